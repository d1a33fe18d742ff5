-- ---------------------------------------------------------------------------
-- rights: what a role may do with one queue
-- ---------------------------------------------------------------------------

-- pgque_writer, pgque_reader and pgque_admin are rights to all queues.  A role without
-- them can get a right to one queue.  It then becomes a member of pgque_user, which may
-- only call the functions that check the caller.  It stays a member: roles belong to
-- the cluster, rights to the database.

-- Returns true if a role has a right to a queue, else false.  Rights: produce; consume;
-- admin, which includes both and more; see, which is any right.  The owner's own
-- functions have all rights.  A caller that is null has no right: the domain
-- pgque.caller refuses null only when a value is converted to it, and an outer join or
-- an empty subquery may give a null later.
create or replace function pgque._may(p_caller name, p_right text, p_queue_id int) returns boolean
language plpgsql as $$
declare
  v_may  boolean := coalesce(
    p_caller = current_user collate pg_catalog."C"
    or pg_catalog.pg_has_role(p_caller, case p_right when 'produce' then 'pgque_writer' when 'admin' then 'pgque_admin' else 'pgque_reader' end, 'usage')
    or exists (
      select from pgque.queue_right r
      where r.right_queue = p_queue_id and (r.right_name in (p_right, 'admin') or p_right = 'see') and r.right_valid
        and pg_catalog.pg_has_role(p_caller, r.right_role, 'usage')),
    false);
begin
  -- An upgrade from 0.7.0 or earlier rewrites the table of rights, and to a transaction
  -- whose snapshot is older the table is empty.
  if not v_may and pgque._old_snapshot() and pg_catalog.pg_relation_filenode('pgque.queue_right') is distinct from (
    select c.relfilenode from pg_catalog.pg_class c where c.oid = 'pgque.queue_right'::regclass)
  then
    perform pgque._overtaken();
  end if;
  return v_may;
end
$$;

create or replace function pgque._no_right(p_caller name, p_right text, p_queue text) returns void
language plpgsql as $$
declare
  v_message  text := pg_catalog.format('permission denied for queue %s', coalesce(pg_catalog.quote_ident(p_queue), 'null'));
begin
  if p_caller is null then
    perform pgque._fail('insufficient_privilege', v_message, 'Leave out the argument caller. Its default is the role that calls.',
      'The argument caller is null.');
  end if;
  perform pgque._fail('insufficient_privilege', v_message,
    pg_catalog.format('If the queue exists, an administrator can grant the right: select pgque.grant_queue(%L, %L, %L);', p_queue, p_caller,
      case p_right when 'see' then 'consume' else p_right end),
    pg_catalog.format('Role %I lacks the right to %s it.', p_caller, case p_right when 'produce' then 'send to' when 'admin' then 'administer' else 'consume' end));
end
$$;

-- Refuses operations on one queue that its administrator may not do.
create or replace function pgque._need_all(p_caller name, p_message text) returns void
language plpgsql as $$
begin
  if not pgque._may(p_caller, 'admin', null) then
    perform pgque._fail('insufficient_privilege', p_message, 'Call it as a member of pgque_admin.');
  end if;
end
$$;

-- Returns a batch id, or null if the caller has no right to the batch's queue.  Then
-- the id counts as one that never existed.
create or replace function pgque._batch_for(p_caller name, p_batch bigint) returns bigint
language plpgsql as $$
begin
  if p_caller = current_user collate pg_catalog."C" or pg_catalog.pg_has_role(p_caller, 'pgque_reader', 'usage')
    or pgque._may(p_caller, 'consume', (pgque._batch_owner(p_batch)).sub_queue)
  then
    return p_batch;
  end if;
  return null;
end
$$;

create or replace function pgque.grant_queue(queue_name text, role_name text, right_name text) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  int := pgque._right_queue($1, $2, $3);
begin
  perform pgque._need_queue(v_queue);
  insert into pgque.queue_right (right_queue, right_role, right_name, right_role_name)
  select v_queue, r.oid, $3, r.rolname from pg_roles r where r.rolname = $2
  on conflict do nothing;
  if not found then
    return 0;
  end if;
  if not pg_has_role($2, 'pgque_user', 'usage') then
    begin
      execute format('grant pgque_user to %I', $2);
    exception
      -- On PostgreSQL 16 and later it is not enough that a role may create roles.
      when insufficient_privilege then
        perform pgque._fail('insufficient_privilege', format('role %I, the owner of pgque, may not make %I a member of pgque_user', current_user, $2),
          format('As a superuser, or as the role that created pgque_user: grant pgque_user to %I with admin option; then call grant_queue() again.', current_user), sqlerrm);
    end;
  end if;
  perform pgque._record_action('grant_queue', $1, jsonb_build_object('role_name', $2, 'right_name', $3));
  return 1;
end
$$;
comment on function pgque.grant_queue(text, text, text) is
  'Grants a role a right to one queue. Returns 1, or 0 if the role has the right already. Rights: produce (send); consume (subscribe, receive, '
  'acknowledge and reject, read); admin (both, and the queue''s settings, ticks, dead letters, archive, purge and drop, but not its name and '
  'max_consumers). The role becomes a member of pgque_user. It needs none of the roles pgque_reader, pgque_writer and pgque_admin, which are for all '
  'queues. Errors: PQ001 no such queue; PQ005 no such right; 42704 no such role; 42501 the owner of pgque may not grant pgque_user.';

create or replace function pgque.revoke_queue(queue_name text, role_name text, right_name text default null) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  int := pgque._right_queue($1, $2, coalesce($3, 'admin'));
  v_role   oid := (select r.oid from pg_roles r where r.rolname = $2);
  v_count  int;
begin
  delete from pgque.queue_right r where r.right_queue = v_queue and r.right_role = v_role and ($3 is null or r.right_name = $3);
  get diagnostics v_count = row_count;
  perform pgque._record_action('revoke_queue', $1, jsonb_build_object('role_name', $2, 'right_name', $3)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.revoke_queue(text, text, text) is
  'Revokes a right that grant_queue() gave, by default all rights of the role to the queue, and returns the number of rights revoked. The role '
  'stays a member of pgque_user, which gives no right to a queue. Errors: PQ001 no such queue; PQ005 no such right; 42704 no such role.';

-- Applies the rules of _may() to all queues at once.
create or replace function pgque.my_rights(
  caller pgque.caller default current_user, out queue_name text, out see boolean, out produce boolean, out consume boolean, out admin boolean
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query
    with every as materialized (
      select r.see, pgque._may(caller, 'produce', null) as produce, r.see as consume, pgque._may(caller, 'admin', null) as admin
      from (select pgque._may(caller, 'see', null)) r (see)
    )
    select null::text, e.see, e.produce, e.consume, e.admin
    from every e
    union all (
      select q.queue_name, e.see or o.n > 0, e.produce or o.produce, e.consume or o.consume, e.admin or o.admin
      from every e
      cross join pgque.queue q
      cross join lateral (
        select count(*) as n, count(*) filter (where r.right_name <> 'consume') > 0 as produce,
          count(*) filter (where r.right_name <> 'produce') > 0 as consume, count(*) filter (where r.right_name = 'admin') > 0 as admin
        from pgque.queue_right r
        where r.right_queue = q.queue_id and r.right_valid and pg_has_role(caller, r.right_role, 'usage')
      ) o
      where e.see or e.produce or e.admin or o.n > 0
      order by q.queue_name
    );
end
$$;
comment on function pgque.my_rights(pgque.caller) is
  'Returns the rights of the caller: first a row for all queues (queue_name is NULL), then a row for each queue to which it has a right. see: call '
  'get_queue_info() and the like. produce: send. consume: subscribe, receive, acknowledge, reject and read. admin: all of these, and operate the '
  'queue; in the first row also the calls that concern no single queue. The rights come from pgque_reader (see and consume), pgque_writer '
  '(produce), pgque_admin or grant_queue().';

-- Deletes the rights of roles that do not exist, and stores the new names of renamed
-- roles.
create or replace function pgque._tidy_rights() returns void
language plpgsql as $$
begin
  delete from pgque.queue_right r where not r.right_valid or not exists (select from pg_catalog.pg_roles a where a.oid = r.right_role);
  update pgque.queue_right r set right_role_name = a.rolname
  from pg_catalog.pg_roles a
  where a.oid = r.right_role and r.right_role_name is distinct from a.rolname;
end
$$;

-- Returns the id of the queue for a change of rights, after a check of the arguments.
-- One such change runs at a time.
create or replace function pgque._right_queue(p_queue text, p_role text, p_right text) returns int
language plpgsql as $$
declare
  v_queue  pgque.queue := pgque._queue(p_queue);
begin
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.rights'));
  perform pgque._tidy_rights();
  if p_right is null or p_right not in ('produce', 'consume', 'admin') then
    perform pgque._fail('PQ005', pg_catalog.format('no such right to queue %I: %s', v_queue.queue_name, coalesce(pg_catalog.quote_literal(p_right), 'null')),
      'Use produce, consume or admin.');
  elsif not exists (select from pg_catalog.pg_roles r where r.rolname = p_role) then
    perform pgque._fail('undefined_object', pg_catalog.format('role not found: %s', coalesce(pg_catalog.quote_ident(p_role), 'null')),
      'Pass the name of a role as in pg_roles, without quotes.');
  end if;
  return v_queue.queue_id;
end
$$;

-- Up to 0.7.0 a right had no name of its role.
do $$
begin
  perform pgque._tidy_rights();
end
$$;
