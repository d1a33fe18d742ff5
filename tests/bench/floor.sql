-- The bare SQL that the benchmarks compare with, in a schema of its own. Every function measures itself
-- inside the server and returns milliseconds, so that neither the client nor a commit is in the figure.
create schema bench;
create sequence bench.seq;
create table bench.plain (like pgque.event);
create index on bench.plain (ev_txid);
create table bench.paged (like pgque.event);
create table bench.failed (like pgque.retry_queue including all);
create table bench.held (i int);

create function bench.ms(since timestamptz) returns double precision
language sql as $$ select extract(epoch from clock_timestamp() - since)::double precision * 1000 $$;

create function bench.payloads(n int) returns text[]
language sql as $$ select array_agg(format('{"n": %s, "pad": "%s"}', i, repeat('x', 80))) from generate_series(1, n) i $$;

-- One message a call.
create function bench.insert_loop(n int, payload text) returns double precision
language plpgsql as $$
declare
  t timestamptz := clock_timestamp();
begin
  for i in 1..n loop
    insert into bench.plain (slot, ev_id, ev_time, ev_txid, ev_type, ev_data)
    values (3, nextval('bench.seq'), clock_timestamp(), pg_current_xact_id(), 'default', payload);
  end loop;
  return bench.ms(t);
end
$$;

create function bench.send_loop(n int, queue text, payload text) returns double precision
language plpgsql as $$
declare
  t timestamptz := clock_timestamp();
begin
  for i in 1..n loop
    perform pgque.send(queue, payload);
  end loop;
  return bench.ms(t);
end
$$;

-- Many messages a call.
create function bench.insert_batches(calls int, payloads text[]) returns double precision
language plpgsql as $$
declare
  t timestamptz := clock_timestamp();
begin
  for i in 1..calls loop
    insert into bench.plain (slot, ev_id, ev_time, ev_txid, ev_type, ev_data)
    select 3, nextval('bench.seq'), now(), pg_current_xact_id(), 'default', p from unnest(payloads) p;
  end loop;
  return bench.ms(t);
end
$$;

create function bench.send_batches(calls int, queue text, payloads text[]) returns double precision
language plpgsql as $$
declare
  t timestamptz := clock_timestamp();
begin
  for i in 1..calls loop
    perform pgque.send_batch(queue, payloads);
  end loop;
  return bench.ms(t);
end
$$;

-- Reading. `n` counts whole rows, so that the planner can not leave columns out of the bare SELECT.
create function bench.select_ordered(leaf regclass, out ms double precision, out n bigint, out bytes bigint)
language plpgsql as $$
declare
  t timestamptz := clock_timestamp();
begin
  execute format(
    'select count(m), sum(length(m.payload)) from ('
    ' select e.ev_id as msg_id, 0::bigint as batch_id, e.ev_type as type, e.ev_data as payload, coalesce(e.ev_retry, 0), e.ev_time,'
    ' e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes, 1, e.ev_error, e.ev_expires, %L::text'
    ' from %s e order by e.ev_id offset 0) m', 'bench', leaf) into n, bytes;
  ms := bench.ms(t);
end
$$;

create function bench.receive_all(queue text, consumer text, most int, out ms double precision, out n bigint, out bytes bigint)
language plpgsql as $$
declare
  t timestamptz := clock_timestamp();
begin
  select count(m), sum(length(m.payload)) into n, bytes from pgque.receive(queue, consumer, most) m;
  ms := bench.ms(t);
end
$$;

-- Failing.
create function bench.insert_failed(id bigint) returns double precision
language plpgsql as $$
declare
  t timestamptz := clock_timestamp();
begin
  insert into bench.failed (ev_retry_after, ev_queue, ev_id, ev_time, ev_txid, ev_owner)
  values (clock_timestamp(), 1, id, now(), pg_current_xact_id(), 1);
  return bench.ms(t);
end
$$;

create function bench.nack_one(batch bigint, id bigint) returns double precision
language plpgsql as $$
declare
  m pgque.delivery;
  t timestamptz;
begin
  m.msg_id := id;
  t := clock_timestamp();
  perform pgque.nack(batch, m, '1 hour');
  return bench.ms(t);
end
$$;

create function bench.nack_many(batch bigint, ids bigint[]) returns double precision
language plpgsql as $$
declare
  t timestamptz := clock_timestamp();
begin
  perform pgque.nack(batch, ids, '1 hour');
  return bench.ms(t);
end
$$;

-- Workers: a table as pgmq 1.5 makes it; the key is ours.
create table bench.q_floor (
  msg_id       bigint generated always as identity primary key,
  read_ct      int not null default 0,
  enqueued_at  timestamptz not null default now(),
  vt           timestamptz not null default clock_timestamp(),
  message      jsonb,
  key          text
);
create index on bench.q_floor (vt);
create unique index on bench.q_floor (key) where key is not null and read_ct = 0;

-- Medians, in microseconds.  Each call has a transaction of its own, since a session's own changes pile up.
create procedure bench.hand_outs(
  queue text, consumer text, worker text, size int, calls int,
  inout receive_us double precision default null, inout ack_us double precision default null
)
language plpgsql as $$
declare
  t         timestamptz;
  n         bigint;
  batch     bigint;
  receives  double precision[];
  acks      double precision[];
begin
  for i in 1..calls loop
    t := clock_timestamp();
    select count(*), max(r.batch_id) into n, batch from pgque.receive(queue, consumer, size, worker => hand_outs.worker) r;
    receives[i] := bench.ms(t) * 1000;
    if n = 0 then
      raise exception 'no messages';
    end if;
    t := clock_timestamp();
    perform pgque.ack(batch);
    acks[i] := bench.ms(t) * 1000;
    commit;
  end loop;
  receive_us := (select percentile_cont(0.5) within group (order by u) from unnest(receives) u);
  ack_us := (select percentile_cont(0.5) within group (order by u) from unnest(acks) u);
end
$$;

create procedure bench.hand_outs_floor(
  size int, calls int,
  inout receive_us double precision default null, inout ack_us double precision default null
)
language plpgsql as $$
declare
  t         timestamptz;
  ids       bigint[];
  receives  double precision[];
  acks      double precision[];
begin
  for i in 1..calls loop
    t := clock_timestamp();
    with cte as (
      select q.msg_id from bench.q_floor q where q.vt <= clock_timestamp()
      order by q.msg_id limit size for update skip locked
    ), taken as (
      update bench.q_floor m set vt = clock_timestamp() + interval '30 seconds', read_ct = m.read_ct + 1
      from cte where m.msg_id = cte.msg_id
      returning m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message
    )
    select array_agg(x.msg_id) into ids from taken x;
    receives[i] := bench.ms(t) * 1000;
    t := clock_timestamp();
    delete from bench.q_floor q where q.msg_id = any (ids);
    acks[i] := bench.ms(t) * 1000;
    commit;
  end loop;
  receive_us := (select percentile_cont(0.5) within group (order by u) from unnest(receives) u);
  ack_us := (select percentile_cont(0.5) within group (order by u) from unnest(acks) u);
end
$$;

-- The same as pgmq 1.5 does it itself: functions that put their statements together for each call.
create function bench.q_read(queue text, vt int, qty int)
returns table (msg_id bigint, read_ct int, enqueued_at timestamptz, vt_until timestamptz, message jsonb)
language plpgsql as $$
begin
  return query execute format(
    'with cte as (select q.msg_id from bench.%1$I q where q.vt <= clock_timestamp()'
    ' order by q.msg_id asc limit $1 for update skip locked)'
    ' update bench.%1$I m set vt = clock_timestamp() + %2$L, read_ct = m.read_ct + 1'
    ' from cte where m.msg_id = cte.msg_id'
    ' returning m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message', queue, make_interval(secs => vt))
  using qty;
end
$$;

create function bench.q_delete(queue text, ids bigint[]) returns setof bigint
language plpgsql as $$
begin
  return query execute format('delete from bench.%I q where q.msg_id = any ($1) returning q.msg_id', queue) using ids;
end
$$;
