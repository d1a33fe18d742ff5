-- ---------------------------------------------------------------------------
-- triggers: table changes as events
-- ---------------------------------------------------------------------------

-- Does the work of the three trigger functions.  Arguments: the queue, then options:
--   backup            keep the old row in ev_extra2
--   ignore=a,b        leave these columns out; an update of nothing else is no event
--   pkey=a,b          the key columns, instead of the primary key
--   deny              refuse the change
--   skip              a BEFORE trigger that cancels the change after recording it
-- ev_type is I:, U:, D: or R (truncate) with the key columns; ev_extra1 is the
-- table's name.  p_format is json, url or sql.
--
-- All of this runs with the rights of the role that changes the table, because
-- to_jsonb() runs casts that a table's owner may have created.  So roles that change
-- the table need the role pgque_writer, or the right to produce to the queue.  A role
-- without either cannot call this function, so the trigger functions raise the error.
--
-- Rows that a dump loads are no changes: nothing is sent for them while the queue is
-- being restored (_is_old_change).
create or replace function pgque._row_event(
  p_format text, p_op text, p_table regclass, p_args text[], p_new jsonb, p_old jsonb
) returns void
language plpgsql set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue   text := p_args[0];   -- trigger arguments count from 0
  v_opts    text[] := p_args[1:];
  v_ignore  text[];
  v_pkey    text[];
  v_row     jsonb := coalesce(p_new, p_old);
  v_opt     text;
  v_data    text;
  v_where   text;
begin
  if v_queue is null then
    perform pgque._fail('PQ005', format('the trigger on table %s names no queue', p_table),
      'Name the queue: create trigger ... execute function pgque.jsontriga(''queue'', options...)');
  elsif pgque._is_old_change(v_queue) then
    return;
  end if;
  foreach v_opt in array v_opts loop
    if v_opt like 'ignore=%' then
      v_ignore := string_to_array(substr(v_opt, 8), ',');
    elsif v_opt like 'pkey=%' then
      v_pkey := string_to_array(substr(v_opt, 6), ',');
    elsif v_opt = 'deny' then
      perform pgque._fail('PQ013', format('table %s must not be changed here: its changes come from queue %I', p_table, v_queue),
        'Change the table that sends to the queue, or create the trigger without the option deny.');
    elsif lower(v_opt) not in ('backup', 'skip') then
      perform pgque._fail('PQ005', format('unknown option %L of the trigger on table %s', v_opt, p_table),
        'Use backup, ignore=columns, pkey=columns, deny or skip.');
    end if;
  end loop;
  if p_op = 'TRUNCATE' then
    perform pgque.insert_event(v_queue, 'R', null, p_table::text, null, null, null);
    return;
  end if;
  v_pkey := coalesce(v_pkey, (
    select array_agg(a.attname::text order by k.n)
    from pg_index i
    cross join lateral unnest(i.indkey) with ordinality k (attnum, n)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
    where i.indrelid = p_table and i.indisprimary and k.n <= i.indnkeyatts), '{}');
  if not v_row ?& v_pkey then
    perform pgque._fail('PQ005', format('the key of the trigger on table %s names columns that the table lacks: %s', p_table,
        (select string_agg(k.name, ', ') from unnest(v_pkey) k (name) where not v_row ? k.name)),
      'Write pkey=columns, with commas and no blanks between the names.');
  end if;
  v_row := v_row - coalesce(v_ignore, '{}');
  if p_op = 'UPDATE' and v_row = (p_old - coalesce(v_ignore, '{}')) and v_ignore is not null then
    return;
  end if;
  if p_format = 'json' then
    v_data := v_row::text;
  elsif p_format = 'url' then
    select string_agg(pgque._url_encode(r.key) || coalesce('=' || pgque._url_encode(r.value), ''), '&')
    into v_data from jsonb_each_text(v_row) r;
  else
    select string_agg(quote_ident(r.key) || coalesce(' = ' || quote_literal(r.value), ' is null'), ' and ')
    into v_where from jsonb_each_text(coalesce(p_old, p_new)) r where r.key = any (v_pkey) or v_pkey = '{}';
    if p_op = 'INSERT' then
      select format('(%s) values (%s)', string_agg(quote_ident(r.key), ','), string_agg(quote_nullable(r.value), ','))
      into v_data from jsonb_each_text(v_row) r;
    elsif p_op = 'UPDATE' then
      select string_agg(format('%I = %s', r.key, quote_nullable(r.value)), ', ') || ' where ' || v_where
      into v_data from jsonb_each_text(v_row) r
      where r.value is distinct from p_old ->> r.key;
      v_data := coalesce(v_data, v_where);
    else
      v_data := v_where;
    end if;
  end if;
  perform pgque.insert_event(v_queue,
    case when p_format = 'sql' then left(p_op, 1) else left(p_op, 1) || ':' || array_to_string(v_pkey, ',') end,
    v_data, p_table::text, case when 'backup' = any (v_opts) then p_old::text end, null, null);
end
$$;

-- Percent-encoding of everything but letters, digits, - _ . and ~.
create or replace function pgque._url_encode(p_text text) returns text
language sql immutable strict as $$
  select coalesce(pg_catalog.string_agg(
    case
      when c.ch ~ '^[A-Za-z0-9_.~-]$' then c.ch
      else pg_catalog.upper(pg_catalog.regexp_replace(pg_catalog.encode(pg_catalog.convert_to(c.ch, 'UTF8'), 'hex'), '(..)', E'%\\1', 'g'))
    end, '' order by c.n), '')
  from pg_catalog.regexp_split_to_table(p_text, '') with ordinality c (ch, n)
$$;

do $functions$
declare
  v_name    text;
  v_format  text;
begin
  for v_name, v_format in values ('jsontriga', 'json'), ('logutriga', 'url'), ('sqltriga', 'sql') loop
    execute format(
      $template$
      create or replace function pgque.%s() returns trigger
      language plpgsql set search_path = pg_catalog, pgque, pg_temp set jit = off as $body$
      begin
        if not has_schema_privilege('pgque', 'usage') or not has_function_privilege('pgque._row_event(text,text,regclass,text[],jsonb,jsonb)', 'execute') then
          raise insufficient_privilege using
            message = format('role %%I may not send the changes of table %%s', current_user, tg_relid::regclass),
            hint = format('select pgque.grant_queue(%%L, %%L, ''produce''); or, for all queues: grant pgque_writer to %%I.', tg_argv[0], current_user, current_user);
        end if;
        perform pgque._row_event(%L, tg_op, tg_relid::regclass, tg_argv,
          case when tg_op in ('INSERT', 'UPDATE') then to_jsonb(new) end, case when tg_op in ('UPDATE', 'DELETE') then to_jsonb(old) end);
        if tg_when = 'BEFORE' and lower(tg_argv[1:]::text)::text[] @> '{skip}' then
          return null;
        end if;
        return coalesce(new, old);
      end
      $body$
      $template$, v_name, v_format);
  end loop;
end
$functions$;
comment on function pgque.jsontriga() is
  'Sends each change of a table as JSON, as a row or TRUNCATE trigger: create trigger ... execute function pgque.jsontriga(''queue'', options...). '
  'Options: backup (the old row to ev_extra2), ignore=columns, pkey=columns, deny, skip. ev_type is I:, U: or D: and the key columns, or R for '
  'TRUNCATE; ev_extra1 is the table. Errors: PQ001 no such queue; PQ005 no queue, an unknown option, or a key that is no column; PQ013 the queue is '
  'paused, or the change is denied; 42501 the role that changes the table may not send to the queue.';
comment on function pgque.logutriga() is
  'Sends each change of a table with the row as URL-encoded pairs, as a row or TRUNCATE trigger. ev_type is I:, U: or D: and the key columns, or R '
  'for TRUNCATE; ev_extra1 is the table. The arguments and the errors of the trigger are those of jsontriga().';
comment on function pgque.sqltriga() is
  'Sends each change of a table as the part of an SQL statement that follows the table''s name, as a row or TRUNCATE trigger. ev_type is I, U, D or '
  'R; ev_extra1 is the table. The arguments and the errors of the trigger are those of jsontriga().';
