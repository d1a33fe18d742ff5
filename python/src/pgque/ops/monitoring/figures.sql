select m.metric, coalesce(m.queue, '') as queue, coalesce(m.consumer, '') as consumer, '' as "check", m.value
from pgque.metrics() as m
where m.value is not null
union all
select 'pgque_health_status', coalesce(h.queue, ''), '', h.check_name,
  max(array_position(array['ok', 'warn', 'fail'], h.status) - 1)::double precision
from pgque.health() as h
group by h.queue, h.check_name
