"""Streams: consumers that Spark reads by offsets, and sinks with their epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from .page import Page

if TYPE_CHECKING:
    from typing_extensions import LiteralString

MOST = 200

# The session that reads a consumer holds the lock that open_stream() takes.
_CONSUMERS: LiteralString = """
select q.queue_name, c.co_name as consumer, i.lag, i.last_seen, i.last_tick, i.pending_events, a.pid,
  a.application_name as application
from pgque.subscriber as s
join pgque.queue as q on q.queue_id = s.sub_queue
join pgque.consumer as c on c.co_id = s.sub_consumer
cross join lateral pgque.get_consumer_info(q.queue_name, c.co_name) as i
left join lateral (
  select w.pid, w.application_name
  from pg_catalog.pg_locks as l
  join pg_catalog.pg_stat_activity as w on w.pid = l.pid
  where l.locktype = 'advisory' and l.granted and l.objsubid = 2 and w.datname = pg_catalog.current_database()
    and l.classid::bigint = (pg_catalog.hashtext('pgque.stream')::bigint & 4294967295)
    and l.objid::bigint = (pg_catalog.hashtext(s.sub_queue || ' ' || s.sub_consumer)::bigint & 4294967295)
  limit 1
) as a on true
where s.sub_offsets
order by i.lag desc nulls last, q.queue_name, c.co_name
limit %s
"""

_SINKS: LiteralString = """
with newest as (
  select e.sink_id, max(e.epoch) as epoch from pgque.sink_epoch as e
  where not e.once and e.part > -2 group by e.sink_id
), done as (
  select n.sink_id, n.epoch, max(e.committed_at) as committed_at, bool_and(e.part = -1) as whole,
    count(*) as parts_done, max(e.parts) as parts
  from newest as n join pgque.sink_epoch as e on e.sink_id = n.sink_id and e.epoch = n.epoch
  where e.part > -2
  group by n.sink_id, n.epoch
), begun as (
  select a.sink_id, max(a.epoch) as epoch, count(distinct a.attempt) as attempts, min(a.started_at) as since
  from pgque.sink_attempt as a
  left join newest as n on n.sink_id = a.sink_id
  where a.epoch > coalesce(n.epoch, -1) and a.started_at > pgque.clock() - interval '1 day'
  group by a.sink_id
)
select sink_id, d.epoch, d.committed_at, pgque.clock() - d.committed_at as age, d.whole, d.parts_done,
  d.parts, b.epoch as begun, b.attempts, pgque.clock() - b.since as begun_age
from done as d full join begun as b using (sink_id)
order by d.committed_at desc nulls first, sink_id
limit %s
"""


def show(page: Page) -> Response:
    """Show the consumers of streams with their lag, and the newest epoch of each sink."""
    return page.shown(
        "streams.html",
        queue=None,
        consumers=page.rows(_CONSUMERS, [MOST]),
        sinks=page.rows(_SINKS, [MOST]),
    )
