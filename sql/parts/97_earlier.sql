-- ---------------------------------------------------------------------------
-- earlier: what calls of an earlier version ask that an upgrade overtakes
-- ---------------------------------------------------------------------------

-- A call that runs while this file is installed goes on with its old body, the
-- loop until it ends.  What 0.2.0 had and this version does not stays here as
-- long as an upgrade may start from it; what else 0.3.0 had is asked by calls that
-- hold tables already, and for those an upgrade waits.

create or replace function pgque._loop_config(out tick_period_ms int, out stopped_at timestamptz)
language sql security definer set search_path = pg_catalog, pgque, pg_temp as $$
  select coalesce(max(c.tick_period_ms), 100), max(c.stopped_at) from pgque.config c
$$;

-- The loop of 0.5.0 and before ends with its next round, and the scheduler begins
-- ours.  In the round that the upgrade overtakes, it ticks no queue any more.
create or replace function pgque._loop_settings(out tick_period_ms int, out stopped_at timestamptz, out period interval)
language sql as $$ select 100, timestamptz '9000-01-01', interval '100 milliseconds' $$;

create or replace function pgque._look_again_at() returns timestamptz
language sql as $$ select pg_catalog.clock_timestamp() $$;

create or replace function pgque._looks(p_queues int[], p_known pgque.look[]) returns pgque.look[]
language sql as $$ select '{}'::pgque.look[] $$;

create or replace function pgque._remember(p_known pgque.look[], p_looks pgque.look[]) returns pgque.look[]
language sql as $$ select p_known $$;

create or replace function pgque._try_tick(p_queue_id int) returns bigint
language sql security definer set search_path = pg_catalog, pgque, pg_temp as $$
  select 1 from pgque._look_at(row($1, 0, 0, null, false, false)) k where k.ticked
$$;

-- Tables of queues that were dropped ask it until maintenance drops them.
create or replace function pgque._takes_nothing(p_queue text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  perform pgque._no_queue(p_queue);
  return false;
end
$$;

create or replace function pgque._close_lease(p_batch bigint) returns int
language sql as $$ select pgque._close_lease((pgque._batch_owner($1)).sub_id, $1) $$;

create or replace function pgque._need_rows(p_rows pgque.event[], p_ids bigint[]) returns void
language plpgsql as $$
begin
  if coalesce(pg_catalog.cardinality(p_rows), 0) <> pg_catalog.cardinality(p_ids) then
    perform pgque._rewritten();
  end if;
end
$$;

create or replace function pgque._subscribe(p_queue text, p_consumer text, p_role text, p_start_at text) returns int
language sql as $$ select pgque._subscribe($1, $2, $3, $4, current_user) $$;

create or replace function pgque._window_sql(
  p_queue text, p_from bigint, p_to bigint, p_consumer text, p_types text[], p_parts int, p_part int
) returns text
language sql as $$ select pgque._window_sql($1, $2, $3, $4, $5, $6, $7, current_user) $$;

create or replace function pgque._exhume(p_dl_id bigint) returns pgque.dead_letter
language sql as $$ select pgque._exhume($1, current_user) $$;

create or replace function pgque._settle(p_batch bigint, p_ids bigint[], p_what text, p_after interval, p_reason text) returns setof pgque.outcome
language sql as $$ select * from pgque._settle($1, $2, $3, $4, $5, false) $$;
