"""Prometheus: what workers and consumers of this process do, in families of `prometheus-client`.

Nothing happens until `enable_prometheus()`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..types import Message
from . import telemetry

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_MISSING = 'prometheus-client is missing: pip install "./python[metrics]"'


class _Prometheus:
    """The families, in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        of = ("queue", "consumer")
        self._registry = registry
        self._duration = Histogram(
            "pgque_handler_duration_seconds",
            "Time that handlers took.",
            of,
            buckets=telemetry.BUCKETS,
            registry=registry,
        )
        self._wait = Histogram(
            "pgque_handler_wait_seconds",
            "Time from send to the start of the handler, of first deliveries.",
            of,
            buckets=telemetry.BUCKETS,
            registry=registry,
        )
        self._outcomes = Counter(
            "pgque_handler_outcomes_total",
            "Messages that were handled, by outcome: ack, archive, nack, dead, release or lost.",
            (*of, "outcome"),
            registry=registry,
        )
        self._redeliveries = Counter(
            "pgque_handler_redeliveries_total",
            "Messages that were handled and had been delivered before.",
            of,
            registry=registry,
        )
        self._in_flight = Gauge(
            "pgque_handler_in_flight",
            "Handlers that run now.",
            of,
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._overruns = Counter(
            "pgque_handler_overruns_total",
            "Handlers that ran beyond their time limit, or without one for ten leases.",
            of,
            registry=registry,
        )
        self._reconnects = Counter(
            "pgque_client_reconnects_total",
            "Attempts to connect to the database again, after a fault.",
            of,
            registry=registry,
        )

    def unregister(self) -> None:
        """Take the families out of the registry."""
        for family in (
            self._duration,
            self._wait,
            self._outcomes,
            self._redeliveries,
            self._in_flight,
            self._overruns,
            self._reconnects,
        ):
            self._registry.unregister(family)

    @contextmanager
    def handling(self, messages: Sequence[Message], consumer: str) -> Iterator[None]:
        of = (messages[0].queue or "", consumer)
        redeliveries = self._redeliveries.labels(*of)  # shown as 0 from the first message on
        for message in messages:
            wait = telemetry.waited(message)
            if wait is not None:
                self._wait.labels(*of).observe(wait)
            if telemetry.is_redelivered(message):
                redeliveries.inc()
        began = time.perf_counter()
        in_flight = self._in_flight.labels(*of)
        in_flight.inc()
        try:
            yield
        finally:
            in_flight.dec()
            self._duration.labels(*of).observe(time.perf_counter() - began)

    def note_outcome(self, message: Message, consumer: str, outcome: str) -> None:
        self._outcomes.labels(message.queue or "", consumer, outcome).inc()

    def note_overrun(self, message: Message, consumer: str) -> None:
        self._overruns.labels(message.queue or "", consumer).inc()

    def note_reconnect(self, queue: str, consumer: str) -> None:
        self._reconnects.labels(queue, consumer).inc()


_enabled: _Prometheus | None = None


def enable_prometheus(enabled: bool = True, *, registry: CollectorRegistry | None = None) -> None:
    """Count and time what the handlers of workers and consumers do from now on, with prometheus-client.

    The program serves the figures as it does its own, for instance with
    `prometheus_client.start_http_server(9188)`. Holds for the whole process. The processes of a `Worker`
    count too; there prometheus-client needs its variable PROMETHEUS_MULTIPROC_DIR.

    Args:
        enabled: False takes the figures out of the registry.
        registry: where the figures are registered; None is the registry of prometheus-client.

    Raises ImportError without the package prometheus-client: `pip install "./python[metrics]"`.
    """
    global _enabled
    if not enabled:
        if _enabled is not None:
            telemetry.remove(_enabled)
            _enabled.unregister()
        _enabled = None
        return
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise ImportError(_MISSING) from error
    if _enabled is not None:
        if registry is None or registry is _enabled._registry:
            return
        enable_prometheus(False)
    _enabled = _Prometheus(REGISTRY if registry is None else registry)
    telemetry.add(_enabled)


def serve(host: str, port: int) -> None:
    """Enable, and serve the figures of this process at /metrics in a thread, those of its child processes too
    where PROMETHEUS_MULTIPROC_DIR is set. Raises ImportError as `enable_prometheus`, and OSError."""
    enable_prometheus()
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    start_http_server(port, host, registry)


def is_enabled() -> bool:
    """Return whether figures are collected for Prometheus."""
    return _enabled is not None
