-- ---------------------------------------------------------------------------
-- earlier: what running calls of an earlier version need during an upgrade
-- ---------------------------------------------------------------------------

-- A call that runs while this file is installed continues with its old body, that of
-- 0.7.0 at the earliest.  A call that has locked tables is not affected: the upgrade waits
-- for it.

-- For a receive() and a next_batch() that were waiting for the consumer.
create or replace function pgque._sift(
  p_queue pgque.queue, p_sub pgque.subscriber, p_pos pgque.position, p_token bigint, p_max bigint, p_whole boolean default false,
  out pos pgque.position, out ids bigint[], out rows text
)
language sql as $$ select * from pgque._sift(p_queue, p_sub, p_pos, p_token, p_max, case when not p_whole then 0::bigint end) $$;

-- For calls that had begun to build a query when the upgrade overtook them.
create or replace function pgque._overtaken() returns text
language plpgsql as $$
begin
  perform pgque._fail('serialization_failure', 'pgque was upgraded while this call waited', 'Retry the transaction.');
  return null;
end
$$;

-- It chose the messages, and its caller relies on that.
create or replace function pgque._chosen_sql(p_sub pgque.subscriber, p_lease pgque.position, p_ids bigint[]) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._xid_condition(p_from pg_snapshot, p_to pg_snapshot) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._slice_condition(p_xids text, p_owner int, p_after bigint, p_upto bigint) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._undone_condition(p_owner int, p_pos pgque.position) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._unfinished_condition(p_sub pgque.subscriber, p_position pgque.position, p_snapshot pg_snapshot) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._span(p_queue pgque.queue, p_after bigint, p_upto bigint) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._map_window(p_queue_id int, p_from bigint, p_to bigint, p_xids text) returns void
language plpgsql as $$
begin
  perform pgque._overtaken();
end
$$;

create or replace function pgque._window_sql(
  p_queue text, p_from bigint, p_to bigint, p_consumer text, p_types text[], p_parts int, p_part int, p_caller name
) returns text
language sql as $$ select pgque._overtaken() $$;

-- For a receive() or an ack() that was waiting.  The default of p_reader would make calls
-- of today's function ambiguous.
drop function if exists pgque._open_window(pgque.position, int, bigint, text);
create or replace function pgque._open_window(p_position pgque.position, p_queue_id int, p_max bigint, p_reader text) returns pgque.position
language sql as $$ select pgque._open_window($1, $2, $3) $$;

create or replace function pgque._turn(
  p_queue text, p_consumer text, p_max bigint, p_worker text, p_timeout interval, p_ack bigint, p_caller name,
  out sub pgque.subscriber, out queue pgque.queue, out pos pgque.position, out leaf int, out open bigint, out due boolean,
  out room bigint, out span bigint, out until timestamptz, out changed boolean
)
language sql as $$
  select pgque._ack(pgque._batch_for(p_caller, p_ack));
  select * from pgque._turn(p_queue, p_consumer, p_max, p_worker, p_timeout, p_caller, null);
$$;

create or replace function pgque._is_newer(p_position pgque.position, p_leaf int) returns boolean
language sql as $$ select true $$;

create or replace function pgque._with_options(p_queue_id int) returns pgque.queue
language sql as $$ select null::pgque.queue from pgque._overtaken() $$;

create or replace function pgque._note_finished(p_sub int, p_batch bigint) returns boolean
language sql as $$ select pgque._close(s, p_batch) = 1 from pgque.subscriber s where s.sub_id = p_sub $$;

-- For an ack() that creates a table of the archive, and for a create_queue(), which would
-- not set the rights on all that it creates.
create or replace function pgque._keep_from_public(p_relation text) returns void
language plpgsql as $$
begin
  if pg_catalog.starts_with(p_relation, 'pgque.archive_') then
    perform pgque._set_rights(array[p_relation::regclass::oid]);
  else
    perform pgque._overtaken();
  end if;
end
$$;

-- For a maint_tables() that goes on.
create or replace function pgque._make_readers() returns int
language sql as $$ select 0 $$;
