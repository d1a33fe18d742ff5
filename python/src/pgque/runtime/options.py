"""The arguments of Worker and Consumer: those that only one of them can have, and those that a copy gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from ..errors import PgqueBadArgumentError

# Why an argument cannot apply, and what to do, by class and argument.
_REFUSED = {
    "Worker": {
        "subconsumer": (
            "workers share their consumer by leases and not as subconsumers",
            "Name the worker with worker=..., or use a Consumer.",
        ),
        "dead_interval": (
            "the messages of a worker that died are redelivered when its leases expire",
            "Set visibility_timeout, or use a Consumer.",
        ),
        "name": ("the name of its consumer is another argument here", "Pass consumer=..., and not name=..."),
    },
    "Consumer": {
        "visibility_timeout": (
            "it reads alone, so its batch stays open until it is reported, without a lease",
            "Use a Worker, or a subconsumer with dead_interval.",
        ),
        "worker": ("it reads alone and has no workers", "Use a Worker, or name a subconsumer=..."),
    },
}

# Arguments that depend on where a copy runs.
_OWN = {
    *("dsn", "queue", "queues", "name", "use", "concurrency", "max_messages", "liveness_file"),
    *("worker", "subconsumer"),
}


def refuse(kind: Literal["Worker", "Consumer"], given: Mapping[str, object]) -> None:
    """Raise PgqueBadArgumentError for an argument that a class cannot have because of what it is, and
    TypeError for one that neither class has."""
    for name in given:
        if name in _REFUSED[kind]:
            reason, hint = _REFUSED[kind][name]
            raise PgqueBadArgumentError(f"a {kind} cannot have {name}: {reason}", hint=hint)
        raise TypeError(f"{kind} has no argument {name!r}")


class Configured(Protocol):
    """A worker or consumer, which has its arguments as attributes."""

    queues: dict[str, float]


def settings_of(worker: Configured, made: Callable[..., object]) -> dict[str, Any]:
    """Return the arguments with which a class makes a copy of a worker, without those that depend on where
    it runs."""
    return {
        "queues": worker.queues,
        "liveness_file": None,
        **{
            name: getattr(worker, name)
            for name, parameter in inspect.signature(made).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name not in _OWN
        },
    }
