"""OpenTelemetry: the context of a sender travels in the headers of a message, to the span of its handler.

Nothing happens until `enable_opentelemetry()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

from ._version import __version__
from .types import Event, Message


class _Api(NamedTuple):
    propagate: ModuleType
    trace: ModuleType


_api: _Api | None = None


def enable_opentelemetry(enabled: bool = True) -> None:
    """Put the current OpenTelemetry context into the headers of what is sent from now on, and run the
    handlers of workers in a span that continues it.

    Headers that a message has already are kept. Exporters and propagators are those that the process has
    set up. Holds for the whole process, and for the processes of a `Worker`. Raises ImportError without
    the package opentelemetry-api: `pip install "pgque[otel]"`.
    """
    global _api
    if not enabled:
        _api = None
        return
    try:
        from opentelemetry import propagate, trace
    except ImportError as error:
        raise ImportError('OpenTelemetry is missing: pip install "pgque[otel]"') from error
    _api = _Api(propagate, trace)


def is_enabled() -> bool:
    """Say whether OpenTelemetry was enabled."""
    return _api is not None


def outgoing(event: Event) -> Event:
    """Return an event with the current context in its headers."""
    if _api is None:
        return event
    context: dict[str, str] = {}
    _api.propagate.inject(context)
    return replace(event, headers={**context, **(event.headers or {})}) if context else event


@contextmanager
def handling(message: Message, consumer: str) -> Iterator[None]:
    """Run the block in a span that continues the context in the headers of a message."""
    if _api is None:
        yield
        return
    carrier: Mapping[str, str] = {
        name: value for name, value in (message.headers or {}).items() if isinstance(value, str)
    }
    tracer = _api.trace.get_tracer("pgque", __version__)
    with tracer.start_as_current_span(
        f"process {message.queue}",
        context=_api.propagate.extract(carrier),
        kind=_api.trace.SpanKind.CONSUMER,
        attributes={
            "messaging.system": "pgque",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": message.queue or "",
            "messaging.consumer.group.name": consumer,
            "messaging.message.id": str(message.msg_id),
            "messaging.batch.id": str(message.batch_id),
        },
    ):
        yield
