"""Measure how far behind a stream is, for Spark's progress, for the log and for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _connect
from ._offset import Place


def lags(conn: _connect.Connection, consumer: str, places: Mapping[str, Place]) -> dict[str, dict[str, Any]]:
    """Return figures of the messages that a consumer at these places has not read, by queue. Calls
    `pgque.stream_lag`."""
    with _connect.errors():
        found = conn.execute(
            "select s.queue, l.newest_tick, l.ticks_behind, l.events_behind,"
            " extract(epoch from l.oldest_pending)"
            " from unnest(%s::text[], %s::bigint[], %s::uuid[], %s::bigint[]) as s (queue, tick, uid, id)"
            " cross join lateral pgque.stream_lag(s.queue, %s, s.tick, s.uid, s.id) as l",
            [
                list(places),
                [place.tick for place in places.values()],
                [place.incarnation for place in places.values()],
                [place.after_id for place in places.values()],
                consumer,
            ],
        ).fetchall()
    return {
        queue: {
            "tick": newest,
            "ticksBehind": ticks_behind,
            "eventsBehind": events_behind,
            **({} if oldest is None else {"oldestPendingSeconds": round(float(oldest), 3)}),
        }
        for queue, newest, ticks_behind, events_behind, oldest in found
    }
