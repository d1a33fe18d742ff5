-- ---------------------------------------------------------------------------
-- history: how many messages were sent, how far consumers lagged, who changed what
-- ---------------------------------------------------------------------------

-- A binary search over ids finds the newest tick at each of these times, for all times
-- in one statement: a busy queue has too many ticks to read.
create or replace function pgque.queue_rates(
  queue_name text, since interval default '6 hours', buckets int default 72, caller pgque.caller default current_user,
  out start_at timestamptz, out events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'see');
  v_first  pgque.tick;
  v_end    timestamptz := pgque.clock();
begin
  if ($2 > '0' and $2 <= '1 year' and $3 between 1 and 1000) is not true then
    perform pgque._fail('PQ005', format('invalid rates of queue %I: the last %s in %s buckets', v_queue.queue_name, coalesce($2::text, 'null'), coalesce($3::text, 'null')),
      'Pass since as an interval of at most a year, and 1 to 1000 buckets: select * from pgque.queue_rates(queue, ''6 hours'', 72);');
  end if;
  v_first := pgque._find_tick(v_queue, 'earliest');
  return query execute format(
    $q$
    with recursive search as (
      select n, $1 - ($3 - n) * $2 / $3 as at, $4 as low, $5 + 1 as high
      from generate_series(0, $3) n
      union all
      select s.n, s.at, case when m.tick_id < s.high and m.tick_time <= s.at then m.tick_id else s.low end,
        case when m.tick_id < s.high and m.tick_time <= s.at then s.high else (s.low + s.high) / 2 end
      from search s
      left join lateral (
        select t.tick_id, t.tick_time from (%1$s) t where t.tick_id >= (s.low + s.high) / 2 order by t.tick_id limit 1
      ) m on true
      where s.high - s.low > 1
    )
    select s.at, lead(t.tick_event_seq) over (order by s.n) - t.tick_event_seq
    from search s
    cross join lateral (select t.tick_event_seq from (%1$s) t where t.tick_id = s.low) t
    where s.high - s.low <= 1
    order by s.n
    limit $3
    $q$, pgque._ticks_sql(v_queue.queue_id))
  using v_end, $2, $3, v_first.tick_id, (pgque._last_tick(v_queue)).tick_id;
end
$$;
comment on function pgque.queue_rates(text, interval, int, pgque.caller) is
  'Returns how many messages were sent to a queue. An interval (since, at most a year) that ends now is divided into buckets (1 to 1000) of equal '
  'length; each row has the start of one and the number of messages that ticks cover. The ticks go back two to three rotation periods, or to the '
  'slowest consumer; the time before counts as 0. Errors: PQ001 no such queue; PQ005 since or buckets out of range.';

-- Records a change that a role made by hand, in the same transaction.  A null argument
-- was left out, except the value of a setting: there it restores the default.
create or replace function pgque._record_action(p_call text, p_queue text, p_args jsonb default null) returns void
language plpgsql as $$
begin
  if not exists (select from pgque.config c where c.keep_actions is null) then
    insert into pgque.action (act_time, act_role, act_application, act_call, act_queue, act_args, leaf)
    select pgque.clock(), session_user, nullif(pg_catalog.current_setting('application_name'), ''), p_call, p_queue,
      nullif(case when p_call = 'alter_queue' or pg_catalog.right(p_call, 7) = '_config' then p_args else pg_catalog.jsonb_strip_nulls(p_args) end, '{}'), l.last_value
    from pgque.action_leaf l;
  end if;
end
$$;

create or replace function pgque.list_actions(
  queue_name text default null, limit_count int default 100, before timestamptz default null,
  out at timestamptz, out role_name name, out application text, out call text, out queue text, out args jsonb
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query
    select a.act_time, a.act_role, a.act_application, a.act_call, a.act_queue, a.act_args
    from pgque.action a
    where ($1 is null or a.act_queue = $1 collate "default") and ($3 is null or a.act_time < $3)
    order by a.act_time desc
    limit case when $2 < 0 then 0 else $2 end;
end
$$;
comment on function pgque.list_actions(text, int, timestamptz) is
  'Returns the changes that roles made by hand to queues, settings, positions, rights and messages, the newest first: time, the role that was '
  'logged in, the application_name of its session, the function that was called (alter_queue also for set_queue_config), the queue, and the '
  'arguments without payloads and keys. Changes that were rolled back are not listed. queue_name: only those of this queue, by its name at that '
  'time. before: only older ones. set_history(''actions'', …) sets how long actions are kept. Only for the role pgque_admin.';

create or replace function pgque.consumer_lags(
  queue_name text, consumer_name text default null, since interval default '6 hours', caller pgque.caller default current_user,
  out at timestamptz, out consumer text, out lag_seconds real, out pending_events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'see');
  v_sub    int := case when $2 is not null then (pgque._subscriber($1, $2, caller)).sub_id end;
begin
  if ($3 > '0') is not true then
    perform pgque._fail('PQ005', format('invalid lags of queue %I: the last %s', v_queue.queue_name, coalesce($3::text, 'null')),
      'Pass since as an interval above 0: select * from pgque.consumer_lags(queue, null, ''6 hours'');');
  end if;
  return query
    select s.smp_time, pgque._subscriber_name(b), s.smp_lag, s.smp_pending
    from pgque.sample s
    join pgque.subscriber b on b.sub_id = s.smp_sub
    where s.smp_queue = v_queue.queue_id and s.smp_time >= pgque.clock() - $3 and (v_sub is null or s.smp_sub = v_sub)
    order by s.smp_time, 2;
end
$$;
comment on function pgque.consumer_lags(text, text, interval, pgque.caller) is
  'Returns the lag of the consumers of a queue, or of one of them, for an interval (since) that ends now. Each minute, maint() takes a sample of '
  'every consumer that has not finished the messages that ticks cover; a consumer without a sample had finished them. lag_seconds: age of the '
  'oldest pending message. pending_events: as in get_consumer_info(). Unit: seconds, messages. set_history(''lags'', …) sets how long samples are '
  'kept. Errors: PQ001 no such queue; PQ005 since is not above 0; PQ011 not subscribed.';

-- Takes a lock if it is free, and returns whether it did.
create or replace function pgque._can_lock(p_table regclass, p_mode text) returns boolean
language plpgsql as $$
begin
  execute pg_catalog.format('lock table %s in %s mode nowait', p_table, p_mode);
  return true;
exception
  when lock_not_available then
    return false;
end
$$;

-- Only consumers that the last tick is ahead of have a sample, at most 200 a minute,
-- those with the most messages ahead first: an idle database writes nothing, and a busy
-- one not much.  The loop ticks no queue meanwhile, so a locked queue is waited for
-- only once.  Each queue keeps two locks until the transaction ends.  If the server has
-- no room for all queues, some are chosen at random.
create or replace function pgque.maint_lags() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_behind  record;
  v_found   record;
  v_leaf    int;
  v_locked  int[] := '{}';
  v_end     timestamptz := clock_timestamp() + interval '1 second';
begin
  if pgque._is_loading() or exists (select from pgque.config c where c.keep_lags is null)
    or not pgque._is_due(to_timestamp(coalesce(pg_sequence_last_value('pgque.sampled'), 0)), '1 minute')
  then
    return 0;
  end if;
  if not pgque._can_lock('pgque.sample', 'row exclusive') then
    return 0;
  end if;
  perform setval('pgque.sampled', floor(extract(epoch from pgque.clock()))::bigint);
  v_leaf := (select l.last_value from pgque.sample_leaf l);
  for v_behind in
    select r.q, s, n.pos
    from (select q from pgque.queue q order by random() limit pgque._lock_room() / 4) r
    join pgque.subscriber s on s.sub_queue = (r.q).queue_id
    cross join lateral (select p as pos from pgque.position p where p.pos_sub = s.sub_id order by p.pos_seq desc limit 1) n
    where s.sub_main is null
      and ((n.pos).pos_tick < pg_sequence_last_value((r.q).queue_tick_seq) and (n.pos).pos_event_seq < pg_sequence_last_value((r.q).queue_event_seq)
        or cardinality((n.pos).pos_open) > 0)
    order by pg_sequence_last_value((r.q).queue_event_seq) - (n.pos).pos_event_seq desc
    limit 200
  loop
    exit when clock_timestamp() > v_end;
    continue when (v_behind.q).queue_id = any (v_locked);
    begin
      perform pgque._shorten_lock_timeout();
      select c.lag, c.pending_events into v_found
      from pgque._consumers(v_behind.q, array[v_behind.s], array[v_behind.pos], pgque._missing_leaf((v_behind.q).queue_id) is not null) c;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        insert into pgque.sample (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf)
        select pgque.clock(), (v_behind.q).queue_id, (v_behind.s).sub_id, extract(epoch from v_found.lag), v_found.pending_events, v_leaf
        where v_found.lag > '1 second';
      when others then
        v_locked := v_locked || (v_behind.q).queue_id;   -- locked, or dropped meanwhile
    end;
  end loop;
  return 0;
end
$$;
comment on function pgque.maint_lags() is
  'Part of maint(): takes the samples of consumer_lags(), at most once a minute. Returns 0, since it leaves nothing to do.';

create or replace function pgque.set_history(what text, keep interval) returns interval
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._init();
  if pgque._period($2::text) > '100 years' then
    raise data_exception using message = 'more than 100 years';
  elsif $2 is null then
    perform pgque._record_action('set_history', null, jsonb_build_object('what', $1, 'keep', 'off'));
  end if;
  if $1 = 'actions' then
    update pgque.config c set keep_actions = $2;
  elsif $1 = 'lags' then
    update pgque.config c set keep_lags = $2;
  else
    raise data_exception using message = 'no such history';
  end if;
  perform pgque._record_action('set_history', null, jsonb_build_object('what', $1, 'keep', $2)) where $2 is not null;
  return $2;
exception
  when data_exception or check_violation then
    perform pgque._fail('PQ005', format('invalid history: %s for %s', quote_nullable($2), quote_nullable($1)),
      'Use actions or lags, and an interval such as 30 days, at most 100 years, or NULL for off. The setting is unchanged.', sqlerrm);
end
$$;
comment on function pgque.set_history(text, interval) is
  'Sets how long the history of actions (list_actions(); 30 days by default) or of lags (consumer_lags(); 7 days) is kept at least, and returns '
  'that interval. NULL stops the recording; older entries stay. A history that fills 64 MB is cut to its newer half. Errors: PQ005 no such '
  'history, or keep is not above 0, or above 100 years.';

-- Empties the other leaf of a history once the current one reaches back far enough, or
-- is full.  The next call makes the empty leaf the current one.  So recording never
-- waits for a transaction that emptied a leaf and stays open.  A history that is off
-- keeps its rows.
create or replace function pgque._rotate_history() returns int
language plpgsql as $$
declare
  v_history  record;
  v_leaf     int;
  v_other    text;
  v_due      boolean;
  v_count    int := 0;
begin
  for v_history in
    select h.name, h.time, pgque.clock() - h.keep as since
    from pgque.config c
    cross join lateral (values ('action', 'act_time', c.keep_actions), ('sample', 'smp_time', c.keep_lags)) h (name, time, keep)
    where h.keep is not null
  loop
    continue when not pgque._can_lock(('pgque.' || v_history.name)::regclass, 'access share');
    execute pg_catalog.format('select l.last_value from pgque.%I l', v_history.name || '_leaf') into v_leaf;
    execute pg_catalog.format(
      'select (select h.%1$I from pgque.%2$I h limit 1) < $1 and not exists (select from pgque.%3$I h where h.%1$I >= $1)'
      ' or pg_catalog.pg_relation_size(%4$L) > 33554432',
      v_history.time, v_history.name || '_' || v_leaf, v_history.name || '_' || (1 - v_leaf), 'pgque.' || v_history.name || '_' || v_leaf)
    into v_due using v_history.since;
    v_other := pg_catalog.format('pgque.%s_%s', v_history.name, 1 - v_leaf);
    if v_due and pg_catalog.pg_relation_size(v_other) > 0 then
      v_count := v_count + pgque._empty(v_other::regclass, false);
    elsif v_due then
      perform pg_catalog.setval('pgque.' || v_history.name || '_leaf', 1 - v_leaf);
      v_count := v_count + 1;
    end if;
  end loop;
  return v_count;
end
$$;
