"""OpenTelemetry: the context of a sender travels in the headers of a message, to the span of its handler; and
what is sent and handled is counted and timed.

Nothing happens until `enable_opentelemetry()`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

from .._version import __version__
from ..outcomes import HandlerOutcome
from ..types import Event, Message
from . import telemetry

_SYSTEM = {"messaging.system": "pgque"}
_OPERATION_TYPES = {"send": "send", "receive": "receive", "ack": "settle"}
_NOT_TIMED: Final = nullcontext()


class _OpenTelemetry:
    """Spans and instruments. Names of messaging.* are those of OpenTelemetry's conventions."""

    def __init__(self, propagate: ModuleType, trace: ModuleType, metrics: ModuleType) -> None:
        self._propagate = propagate
        self._trace = trace
        meter: Any = metrics.get_meter("pgque", __version__)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that were sent, or should have been."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were given to handlers."
        )
        self._duration = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Time that handlers took.",
            explicit_bucket_boundaries_advisory=telemetry.BUCKETS,
        )
        self._operations = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Time that calls of the database took: send, receive and ack.",
            explicit_bucket_boundaries_advisory=telemetry.BUCKETS,
        )
        self._wait = meter.create_histogram(
            "pgque.handler.wait",
            "s",
            "Time from send to the start of the handler, of first deliveries.",
            explicit_bucket_boundaries_advisory=telemetry.BUCKETS,
        )
        self._outcomes = meter.create_counter(
            "pgque.handler.outcomes", "{message}", "Messages that were handled, by pgque.outcome."
        )
        self._redeliveries = meter.create_counter(
            "pgque.handler.redeliveries",
            "{message}",
            "Messages that were handled and had been delivered before.",
        )
        self._in_flight = meter.create_up_down_counter(
            "pgque.handler.in_flight", "{message}", "Handlers that run now."
        )
        self._overruns = meter.create_counter(
            "pgque.handler.overruns",
            "{message}",
            "Handlers that ran beyond their time limit, or without one for ten leases.",
        )
        self._reconnects = meter.create_counter(
            "pgque.client.reconnects",
            "{attempt}",
            "Attempts to connect to the database again, after a fault.",
        )

    def outgoing(self, event: Event, queue: str) -> Event:
        self._sent.add(
            1, {**_SYSTEM, "messaging.operation.name": "send", "messaging.destination.name": queue}
        )
        context: dict[str, str] = {}
        self._propagate.inject(context)
        return replace(event, headers={**context, **(event.headers or {})}) if context else event

    @contextmanager
    def timed(self, operation: str, queue: str, consumer: str | None) -> Iterator[None]:
        of = {
            **(_of(queue, consumer) if consumer else {**_SYSTEM, "messaging.destination.name": queue}),
            "messaging.operation.name": operation,
            "messaging.operation.type": _OPERATION_TYPES[operation],
        }
        began = time.perf_counter()
        try:
            yield
        except BaseException as error:
            of["error.type"] = type(error).__qualname__
            raise
        finally:
            self._operations.record(time.perf_counter() - began, of)

    @contextmanager
    def handling(self, messages: Sequence[Message], consumer: str) -> Iterator[None]:
        of = {**_of(messages[0].queue, consumer), "messaging.operation.name": "process"}
        self._consumed.add(len(messages), of)
        for message in messages:
            wait = telemetry.waited(message)
            if wait is not None:
                self._wait.record(wait, of)
            if telemetry.is_redelivered(message):
                self._redeliveries.add(1, of)
        failed: dict[str, str] = {}
        self._in_flight.add(1, of)
        began = time.perf_counter()
        try:
            with self._span(messages, of):
                yield
        except HandlerOutcome:
            raise
        except BaseException as error:
            failed["error.type"] = type(error).__qualname__
            raise
        finally:
            self._duration.record(time.perf_counter() - began, {**of, **failed})
            self._in_flight.add(-1, of)

    @contextmanager
    def _span(self, messages: Sequence[Message], of: Mapping[str, str]) -> Iterator[None]:
        """Run the block in a span that continues that of its message, or is linked to those of its batch."""
        message = messages[0]
        attributes: dict[str, str | int] = {
            **of,
            "messaging.operation.type": "process",
            "messaging.batch.id": str(message.batch_id),
        }
        given: dict[str, Any]
        if len(messages) == 1:
            attributes["messaging.message.id"] = str(message.msg_id)
            given = {"context": self._context(message)}
        else:
            attributes["messaging.batch.message_count"] = len(messages)
            spans = [self._trace.get_current_span(self._context(each)) for each in messages]
            senders = [span.get_span_context() for span in spans]
            given = {"links": [self._trace.Link(sender) for sender in senders if sender.is_valid]}
        tracer = self._trace.get_tracer("pgque", __version__)
        with tracer.start_as_current_span(
            f"process {message.queue}",
            kind=self._trace.SpanKind.CONSUMER,
            attributes=attributes,
            **given,
        ):
            yield

    def _context(self, message: Message) -> Any:
        """Return the context in the headers of a message."""
        headers = (message.headers or {}).items()
        return self._propagate.extract({name: value for name, value in headers if isinstance(value, str)})

    def note_outcome(self, message: Message, consumer: str, outcome: str) -> None:
        self._outcomes.add(1, {**_of(message.queue, consumer), "pgque.outcome": outcome})

    def note_overrun(self, message: Message, consumer: str) -> None:
        self._overruns.add(1, _of(message.queue, consumer))

    def note_reconnect(self, queue: str, consumer: str) -> None:
        self._reconnects.add(1, _of(queue, consumer))


def _of(queue: str | None, consumer: str) -> dict[str, str]:
    return {
        **_SYSTEM,
        "messaging.destination.name": queue or "",
        "messaging.consumer.group.name": consumer,
    }


_enabled: _OpenTelemetry | None = None


def enable_opentelemetry(enabled: bool = True) -> None:
    """Put the current OpenTelemetry context into the headers of what is sent from now on, and run the
    handlers of workers and consumers in a span that continues it; count and time both, and the calls of the
    database.

    Headers that a message has already are kept. Exporters, propagators and meters are those that the process
    has set up. Holds for the whole process, and for the processes of a `Worker`. Raises ImportError without
    the package opentelemetry-api: `pip install "./python[otel]"`.
    """
    global _enabled
    telemetry.remove(_enabled)
    _enabled = None
    if not enabled:
        return
    try:
        from opentelemetry import metrics, propagate, trace
    except ImportError as error:
        raise ImportError('OpenTelemetry is missing: pip install "./python[otel]"') from error
    _enabled = _OpenTelemetry(propagate, trace, metrics)
    telemetry.add(_enabled)


def is_enabled() -> bool:
    """Return whether OpenTelemetry was enabled."""
    return _enabled is not None


def outgoing(event: Event, queue: str) -> Event:
    """Return an event with the current context in its headers."""
    return event if _enabled is None else _enabled.outgoing(event, queue)


def timed(operation: str, queue: str, consumer: str | None = None) -> AbstractContextManager[None]:
    """Return a block that takes the time of a call: send, receive or ack."""
    return _NOT_TIMED if _enabled is None else _enabled.timed(operation, queue, consumer)
