"""The state of the Celery worker of this process, if it runs one."""

from __future__ import annotations

import sys
from typing import Any

import celery


def _state() -> Any:
    return sys.modules.get("celery.worker.state")


def is_known(task_id: str | None) -> bool:
    """Return whether the worker of this process may still run a task. When it stops, it forgets those that it
    has not begun, before it cancels its consumers; Celery before 5.7 forgets those that run, too."""
    state = _state()
    if state is None or task_id is None or celery.VERSION[:2] < (5, 7):
        return True
    try:
        return task_id in state.requests or any(it.id == task_id for it in tuple(state.active_requests))
    except RuntimeError:  # the set has changed meanwhile, so something runs
        return True


def is_stopping() -> bool:
    """Return whether the worker has to stop, by a signal or by remote control."""
    state = _state()
    return state is not None and any(
        asked is not None and asked is not False for asked in (state.should_stop, state.should_terminate)
    )
