-- ---------------------------------------------------------------------------
-- times: when recurring messages are due
-- ---------------------------------------------------------------------------

-- Only recurring messages use it.

-- Returns the values that a field of a cron expression allows, in order; null if the
-- field is invalid.  p_names are the names of the values from p_low on.  Weekdays have
-- p_high 7, which is Sunday like 0.
create or replace function pgque._cron_field(p_field text, p_low int, p_high int, p_names text default '') returns int[]
language plpgsql immutable as $$
declare
  v_names   text[] := pg_catalog.string_to_array(p_names, ' ');
  v_item    text;
  v_part    text[];
  v_from    int;
  v_to      int;
  v_values  int[] := '{}';
begin
  foreach v_item in array pg_catalog.string_to_array(pg_catalog.lower(p_field), ',') loop
    v_part := pg_catalog.regexp_match(v_item, '^(?:(\*)|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,2}))?$');
    v_from := case when v_part[1] = '*' then p_low when v_part[2] ~ '[0-9]' then v_part[2]::int
      else p_low - 1 + pg_catalog.array_position(v_names, v_part[2]) end;
    v_to := case when v_part[3] ~ '[0-9]' then v_part[3]::int when v_part[3] is not null then p_low - 1 + pg_catalog.array_position(v_names, v_part[3])
      when v_part[1] = '*' or v_part[4] is not null then p_high else v_from end;
    if p_high = 7 and v_to = 0 and v_from > 0 then
      v_to := 7;   -- fri-sun
    end if;
    if (v_from >= p_low and v_from <= v_to and v_to <= p_high and v_part[4] is distinct from '0' and v_part[4] is distinct from '00') is not true then
      return null;
    end if;
    v_values := v_values || array(select g.n from pg_catalog.generate_series(v_from, v_to, coalesce(v_part[4]::int, 1)) g (n));
  end loop;
  return array(select distinct case when p_high = 7 then v.n % 7 else v.n end as n from pg_catalog.unnest(v_values) v (n) order by n);
end
$$;

-- Returns whether the field of days, or that of weekdays, restricts nothing, so that
-- the other one alone decides.  (A day matches if either field matches, once both
-- restrict.)
create or replace function pgque._is_star(p_field text, p_all boolean, p_other text) returns boolean
language sql immutable as $$ select '*' = any (pg_catalog.string_to_array(p_field, ',')) or p_all and p_other like '%*%' $$;

create or replace function pgque._no_schedule(p_cron text, p_why text) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ005', pg_catalog.format('invalid schedule %s: %s', pg_catalog.quote_nullable(p_cron), p_why),
    'Use five fields (minute hour day month weekday) such as ''0 3 * * mon-fri'', six with seconds first, or an interval such as ''90 seconds''.');
end
$$;

-- Returns a schedule as columns of a definition.  PQ005 if it is invalid or has no run.
create or replace function pgque._schedule(p_cron text, p_timezone text, p_starts_at timestamptz, p_ends_at timestamptz) returns pgque.recurring
language plpgsql as $$
declare
  v_rec     pgque.recurring;
  v_fields  text[] := pg_catalog.regexp_split_to_array(pg_catalog.btrim(p_cron, E' \t\n'), '\s+');
  v_every   interval;
  v_wrong   text;
begin
  -- Lists of thousands of items would take minutes.
  if pg_catalog.octet_length(p_cron) > 1000 then
    perform pgque._no_schedule(pg_catalog.left(p_cron, 100), 'it is longer than 1000 bytes');
  end if;
  v_rec.rec_cron := p_cron;
  v_rec.rec_starts_at := p_starts_at;
  v_rec.rec_ends_at := p_ends_at;
  if p_timezone = 'UTC' then
    v_rec.rec_timezone := p_timezone;   -- listing all names takes a tenth of a second
  else
    select z.name into v_rec.rec_timezone from pg_catalog.pg_timezone_names z where pg_catalog.lower(z.name) = pg_catalog.lower(p_timezone) limit 1;
  end if;
  if v_rec.rec_timezone is null then
    perform pgque._fail('PQ005', pg_catalog.format('unknown time zone: %s', pg_catalog.quote_nullable(p_timezone)),
      'Use a name such as Europe/Berlin. List the names: select name from pg_timezone_names;');
  elsif not coalesce(pg_catalog.isfinite(p_starts_at), true) or not coalesce(pg_catalog.isfinite(p_ends_at), true) then
    perform pgque._no_schedule(p_cron, 'starts_at and ends_at must be finite');
  end if;
  if p_cron ~* '^\s*(p|[0-9.]+\s*[a-z:])' then
    v_every := p_cron::interval;
    v_rec.rec_every := extract(epoch from v_every);
    v_rec.rec_anchor := pg_catalog.date_trunc('second', coalesce(p_starts_at, pgque.clock()));
    if extract(year from v_every) <> 0 or extract(month from v_every) <> 0 or v_rec.rec_every not between 1 and 31622400
      or v_rec.rec_every <> extract(epoch from v_every)
    then
      perform pgque._no_schedule(p_cron, 'an interval has whole seconds, from 1 second to 366 days, and no months');
    end if;
  else
    if pg_catalog.cardinality(v_fields) = 5 then
      v_fields := pg_catalog.array_prepend('0', v_fields);
    end if;
    if pg_catalog.cardinality(v_fields) is distinct from 6 then
      perform pgque._no_schedule(p_cron, 'it has neither five nor six fields, and is no interval');
    end if;
    v_rec.rec_seconds := pgque._cron_field(v_fields[1], 0, 59);
    v_rec.rec_minutes := pgque._cron_field(v_fields[2], 0, 59);
    v_rec.rec_hours := pgque._cron_field(v_fields[3], 0, 23);
    v_rec.rec_days := pgque._cron_field(v_fields[4], 1, 31);
    v_rec.rec_months := pgque._cron_field(v_fields[5], 1, 12, 'jan feb mar apr may jun jul aug sep oct nov dec');
    v_rec.rec_weekdays := pgque._cron_field(v_fields[6], 0, 7, 'sun mon tue wed thu fri sat');
    v_rec.rec_fixed := v_fields[3] !~ '[*/]';
    v_rec.rec_either := not pgque._is_star(v_fields[4], pg_catalog.cardinality(v_rec.rec_days) = 31, v_fields[6])
      and not pgque._is_star(v_fields[6], pg_catalog.cardinality(v_rec.rec_weekdays) = 7, v_fields[4]);
    select pg_catalog.format('%s %L', f.name, v_fields[f.n]) into v_wrong
    from (values (1, 'second', v_rec.rec_seconds), (2, 'minute', v_rec.rec_minutes), (3, 'hour', v_rec.rec_hours), (4, 'day', v_rec.rec_days),
      (5, 'month', v_rec.rec_months), (6, 'weekday', v_rec.rec_weekdays)) f (n, name, allowed)
    where f.allowed is null
    order by f.n
    limit 1;
    if v_wrong is not null then
      perform pgque._no_schedule(p_cron, v_wrong);
    elsif pgque._next_local(v_rec, '1999-12-31 23:59:59') is null then
      perform pgque._no_schedule(p_cron, 'there is no such date');
    end if;
  end if;
  if pgque._next_run(v_rec, pgque.clock()) is null then
    perform pgque._no_schedule(p_cron, 'there is no run from now to ends_at');
  end if;
  return v_rec;
exception
  when data_exception then
    perform pgque._no_schedule(p_cron, sqlerrm);
end
$$;

create or replace function pgque._at_least(p_values int[], p_least int) returns int
language sql immutable as $$ select min(v.n) from pg_catalog.unnest(p_values) v (n) where v.n >= p_least $$;

-- Returns the first time after another that matches a cron expression, on a clock that
-- is never changed.  Null if there is none within nine years (29 February is every
-- eighth year at least).
create or replace function pgque._next_local(p_rec pgque.recurring, p_after timestamp) returns timestamp
language plpgsql immutable as $$
declare
  v_first   timestamp := pg_catalog.date_trunc('second', p_after) + interval '1 second';
  v_day     date := v_first::date;
  v_until   date := v_day + interval '9 years';
  v_hour    int := extract(hour from v_first);
  v_minute  int := extract(minute from v_first);
  v_at      int[];
  v_match   boolean[];
begin
  -- Hour, minute and second: each restarts at its first value if a greater unit
  -- advances.
  v_at[3] := pgque._at_least(p_rec.rec_seconds, extract(second from v_first)::int);
  v_minute := v_minute + (v_at[3] is null)::int;
  v_at[2] := pgque._at_least(p_rec.rec_minutes, v_minute);
  v_at[3] := case when v_at[2] = v_minute and v_at[3] is not null then v_at[3] else p_rec.rec_seconds[1] end;
  v_hour := v_hour + (v_at[2] is null)::int;
  v_at[1] := pgque._at_least(p_rec.rec_hours, v_hour);
  if v_at[1] is distinct from v_hour or v_at[2] is null then
    v_at[2] := p_rec.rec_minutes[1];
    v_at[3] := p_rec.rec_seconds[1];
  end if;
  v_day := v_day + (v_at[1] is null)::int;
  while v_day <= v_until loop
    if not extract(month from v_day)::int = any (p_rec.rec_months) then
      v_day := pg_catalog.date_trunc('month', v_day::timestamp) + interval '1 month';
      continue;
    end if;
    v_match := array[extract(day from v_day)::int = any (p_rec.rec_days), extract(dow from v_day)::int = any (p_rec.rec_weekdays)];
    if v_match = array[true, true] or p_rec.rec_either and true = any (v_match) then
      if v_at[1] is null or v_day > v_first::date then
        v_at := array[p_rec.rec_hours[1], p_rec.rec_minutes[1], p_rec.rec_seconds[1]];
      end if;
      return v_day + pg_catalog.make_time(v_at[1], v_at[2], v_at[3]);
    end if;
    v_day := v_day + 1;
  end loop;
  return null;
end
$$;

-- How far the clock of a time zone is ahead of UTC.
create or replace function pgque._offset(p_at timestamptz, p_zone text) returns interval
language sql stable as $$ select (p_at at time zone p_zone) - (p_at at time zone 'UTC') $$;

-- Returns the first instant after p_after at which a clock of the time zone shows a
-- time of the cron expression after p_local.  PostgreSQL reads a time that exists twice
-- as the later one, and a time that does not exist by the clock before the change.
create or replace function pgque._next_instant(p_rec pgque.recurring, p_after timestamptz, p_local timestamp) returns timestamptz
language plpgsql stable as $$
declare
  v_zone   text := p_rec.rec_timezone;
  v_local  timestamp := p_local;
  v_at     timestamptz;
  v_low    timestamptz;
  v_mid    timestamptz;
  v_back   interval;
begin
  loop
    v_local := pgque._next_local(p_rec, v_local);
    if v_local is null then
      return null;
    end if;
    v_at := v_local at time zone v_zone;
    if v_at at time zone v_zone <> v_local then
      -- The time does not exist: find the change of the clock.
      v_low := v_at - ((v_at at time zone v_zone) - v_local);
      while v_at - v_low > interval '1 second' loop
        v_mid := pg_catalog.date_trunc('second', v_low + (v_at - v_low) / 2);
        if pgque._offset(v_mid, v_zone) = pgque._offset(v_at, v_zone) then
          v_at := v_mid;
        else
          v_low := v_mid;
        end if;
      end loop;
      if not p_rec.rec_fixed then
        v_local := (v_at at time zone v_zone) - interval '1 second';
        continue;
      end if;
    else
      v_back := pgque._offset(v_at - interval '24 hours', v_zone) - pgque._offset(v_at, v_zone);
      if v_back > interval '0' and (v_at - v_back) at time zone v_zone = v_local and (p_rec.rec_fixed or v_at - v_back > p_after) then
        v_at := v_at - v_back;   -- the time exists twice
      end if;
    end if;
    if v_at > p_after then
      return v_at;
    end if;
  end loop;
end
$$;

-- Returns the first run of a definition after a time; null if there is none.
create or replace function pgque._next_run(p_rec pgque.recurring, p_after timestamptz) returns timestamptz
language plpgsql stable as $$
declare
  v_after  timestamptz := greatest(p_after, p_rec.rec_starts_at - interval '1 microsecond');
  v_local  timestamp;
  v_back   interval;
  v_run    timestamptz;
begin
  if p_rec.rec_every is not null then
    v_run := p_rec.rec_anchor + interval '1 second' * p_rec.rec_every
      * (pg_catalog.floor(extract(epoch from greatest(v_after, p_rec.rec_anchor - interval '1 microsecond') - p_rec.rec_anchor) / p_rec.rec_every) + 1)::float8;
  else
    v_local := v_after at time zone p_rec.rec_timezone;
    v_run := pgque._next_instant(p_rec, v_after, v_local);
    v_back := pgque._offset(v_after, p_rec.rec_timezone) - pgque._offset(v_after + interval '24 hours', p_rec.rec_timezone);
    -- Before the clock is set back, the times that it will show again come first.
    if not p_rec.rec_fixed and v_back > interval '0' and (v_after + v_back) at time zone p_rec.rec_timezone = v_local
      and (v_run <= v_after + v_back) is not true
    then
      v_run := least(v_run, pgque._next_instant(p_rec, v_after, v_local - v_back));
    end if;
  end if;
  return case when (v_run > p_rec.rec_ends_at) is not true then v_run end;
end
$$;

-- Returns the last run up to p_now; p_run is a run before it.
create or replace function pgque._latest_run(p_rec pgque.recurring, p_run timestamptz, p_now timestamptz) returns timestamptz
language plpgsql stable as $$
declare
  v_high  timestamptz := p_now;   -- no run from here to p_now
  v_mid   timestamptz;
  v_next  timestamptz;
begin
  while v_high - p_run >= interval '1 second' loop
    v_mid := p_run + interval '1 second' * (extract(epoch from v_high - p_run) / 2)::float8;
    v_next := pgque._next_run(p_rec, v_mid);
    if v_next <= p_now then
      p_run := v_next;
    else
      v_high := v_mid;
    end if;
  end loop;
  return p_run;
end
$$;

