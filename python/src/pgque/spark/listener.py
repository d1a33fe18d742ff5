"""Watch streams that read queues: a line in the log for each progress, and figures for Prometheus.

    spark.streams.addListener(PgqueListener())

Works in a driver and in a client of Spark Connect: Spark calls listeners where they were added.
"""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.streaming import StreamingQueryListener

from ..errors import PgqueError
from . import _connect
from ._lag import lags
from ._offset import Place, load

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

__all__ = ["PgqueListener"]

log = logging.getLogger("pgque.spark")

# The figures of Spark's progress by the families that Prometheus gets.
_FAMILIES = {
    "eventsBehind": ("pgque_spark_events_behind", "Messages that the stream has not read, at most."),
    "ticksBehind": ("pgque_spark_ticks_behind", "Ticks that the stream has not read."),
    "oldestPendingSeconds": (
        "pgque_spark_oldest_pending_seconds",
        "Age of the oldest message that the stream has not read; 0 if there is none.",
    ),
    "lostTicks": (
        "pgque_spark_lost_ticks_total",
        "Ticks that were gone before the stream read them (failOnDataLoss=false).",
    ),
    "replayedEpochs": (
        "pgque_spark_replayed_epochs_total",
        "Micro-batches that were read again after a restart.",
    ),
}


class _Seen(NamedTuple):
    """Describe one queue of a running query, on one of its servers if it has several."""

    query: str
    server: str | None
    queue: str
    consumer: str
    place: Place
    figures: dict[str, float]


class PgqueListener(StreamingQueryListener):
    """Report how far behind the streams of a session are.

    Each progress of a query that reads queues is a line of level INFO in the log `pgque.spark`, one for each
    queue. The figures are those of Spark's own progress (`sources[].latestOffset`), taken when the
    micro-batch began.

    Args:
        dsn: connection string or URL of a role that may consume the queues. The figures are then asked for
            where Spark's progress has none, that is on PySpark 4.0 and 4.1, and while a query is idle.
            Of a stream of several servers, each is asked, as this role.
        registry: where the figures are registered for Prometheus, such as `prometheus_client.REGISTRY`; the
            program serves them. None registers none. Needs prometheus-client:
            `pip install "./python[metrics]"`.
    """

    def __init__(self, dsn: str | None = None, *, registry: CollectorRegistry | None = None) -> None:
        self._dsn = dsn
        self._conns: dict[str | None, _connect.Connection] = {}
        self._seen: dict[str, list[_Seen]] = {}  # by the run of the query
        if registry is not None:
            registry.register(_collector(self._seen))

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Ignore the start: only a progress names the queue."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Log the progress and keep its figures."""
        progress = event.progress
        query = str(progress.name or progress.id)
        seen = [one for source in progress.sources for one in self._of(query, source)]
        if not seen:
            return
        self._seen[str(progress.runId)] = seen
        for one in seen:
            log.info(
                "query %s, micro-batch %s of %s rows: %squeue %s, consumer %s at tick %s%s",
                query,
                progress.batchId,
                progress.numInputRows,
                "" if one.server is None else f"server {one.server}, ",
                one.queue,
                one.consumer,
                one.place.tick,
                _text(one.figures),
            )

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Ask for the figures again."""
        run = str(event.runId)
        for number, one in enumerate(self._seen.get(run, [])):
            found = self._ask(one.server, one.consumer, {one.queue: one.place}).get(one.queue, {})
            self._seen[run][number] = one._replace(figures=one.figures | found)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forget the query's figures."""
        self._seen.pop(str(event.runId), None)

    def _of(self, query: str, source: Any) -> Iterator[_Seen]:
        end, latest = _offset(source.endOffset), _offset(source.latestOffset)
        consumer = end.get("consumer")
        if consumer is None:
            return  # another source
        servers = latest.get("servers", {})
        for server, one in end.get("servers", {None: end}).items():
            if "ticks" not in one and "queue" not in one:
                return  # a checkpoint of pgque 0.6
            places = load(None if "ticks" in one else one["queue"], one)
            known = latest if server is None else servers.get(server, {})
            found = known.get("queues") or self._ask(server, consumer, places)
            for queue, place in places.items():
                figures = {name: found[queue][name] for name in _FAMILIES if name in found.get(queue, {})}
                yield _Seen(query, server, queue, consumer, place, figures)

    def _ask(
        self, server: str | None, consumer: str, places: Mapping[str, Place]
    ) -> dict[str, dict[str, Any]]:
        if self._dsn is None:
            return {}
        try:
            conn = self._conns.get(server)
            if conn is None or conn.closed:
                given = {"url": self._dsn}
                given = given if server is None else _connect.at(given, server)
                conn = _connect.connect(given, f"pgque-spark/{consumer}/listener", autocommit=True)
                self._conns[server] = conn
            return lags(conn, consumer, places)
        except PgqueError as error:
            log.warning("pgque: the lag of consumer %s is not known: %s", consumer, error)
            return {}


def _offset(text: Any) -> dict[str, Any]:
    """Return an offset of the progress; empty for one of another kind."""
    try:
        # Spark Connect on 4.0 and 4.1 has Python's text of a dictionary in place of JSON.
        found = ast.literal_eval(text) if text.startswith("{'") else json.loads(text)
    except (AttributeError, SyntaxError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(figures: Mapping[str, float]) -> str:
    shown = (
        ("eventsBehind", "{} events behind"),
        ("ticksBehind", "{} ticks behind"),
        ("oldestPendingSeconds", "oldest pending {} s"),
        ("lostTicks", "{} ticks lost"),
        ("replayedEpochs", "{} epochs replayed"),
    )
    return "".join(", " + text.format(figures[name]) for name, text in shown if name in figures)


def _collector(seen: Mapping[str, list[_Seen]]) -> Any:
    try:
        from prometheus_client.registry import Collector

        from ..ops.exporter import _family
    except ImportError as error:
        from ..integrations.prometheus import _MISSING

        raise ImportError(_MISSING) from error

    class Figures(Collector):
        def collect(self) -> Iterable[Metric]:
            now = [one for found in list(seen.values()) for one in found]
            labels = ["query", "queue", "consumer"]
            if any(one.server is not None for one in now):
                labels.append("server")
            for figure, (name, about) in _FAMILIES.items():
                family = _family(name, tuple(labels), about)
                for one in now:
                    if figure in one.figures:
                        values = [one.query, one.queue, one.consumer, one.server or ""]
                        family.add_metric(values[: len(labels)], one.figures[figure])
                yield family

    return Figures()
