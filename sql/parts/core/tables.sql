-- ---------------------------------------------------------------------------
-- tables
-- ---------------------------------------------------------------------------

-- An upgrade changes tables that calls lock in different orders.  So it locks all of
-- them before it changes one.  If one lock is not free within the time of a call, it
-- releases all and tries again.
do $$
declare
  v_before   text := current_setting('pgque.version_before');
  v_timeout  text := current_setting('lock_timeout');
  v_tables   text;
  v_holders  text;
begin
  if v_before in ('', pgque.version()) then
    return;
  end if;
  select string_agg(c.oid::regclass::text, ', ' order by c.relkind = 'v' desc, c.relname = 'queue' desc, c.relname) into v_tables
  from pg_class c
  where c.relnamespace = 'pgque'::regnamespace and c.relkind in ('r', 'v')
    and not exists (select from pg_inherits i where i.inhrelid = c.oid and i.inhparent in ('pgque.event'::regclass, 'pgque.tick'::regclass, 'pgque.archive'::regclass));
  for v_try in 1..200 loop
    begin
      perform set_config('lock_timeout', '100ms', true);
      execute 'lock table ' || v_tables || ' in access exclusive mode';
      if to_regclass('pgque.archive') is not null and to_regclass('pgque.archive_0') is null then
        lock table only pgque.archive in share update exclusive mode;   -- it gets this leaf
      end if;
      perform set_config('lock_timeout', v_timeout, true);
      return;
    exception
      when lock_not_available then
        perform pg_sleep(0.05);
    end;
  end loop;
  select string_agg(distinct format('%s (%s)', l.pid, l.relation::regclass), ', ') into v_holders
  from pg_locks l
  join pg_class c on c.oid = l.relation
  where c.relnamespace = 'pgque'::regnamespace and l.granted and l.pid <> pg_backend_pid()
    and l.database = (select d.oid from pg_database d where d.datname = current_database());
  raise exception using
    errcode = 'lock_not_available',
    message = 'the upgrade cannot lock the tables of pgque within 30 seconds',
    detail = 'Locks are held by: ' || coalesce(v_holders, 'different sessions each time'),
    hint = 'End transactions that stay open (pg_stat_activity, pg_terminate_backend) and try again. Nothing was changed.';
end
$$;

-- Adds columns that earlier versions did not have.  A table that has all of them is not
-- locked.  p_columns is what follows ADD COLUMN, one a line.
create or replace function pgque._add_columns(p_table text, p_columns text) returns void
language plpgsql as $$
declare
  v_column  text;
begin
  foreach v_column in array pg_catalog.string_to_array(pg_catalog.btrim(p_columns, E' \n'), E';\n') loop
    v_column := pg_catalog.btrim(v_column, E' \n;');
    if not exists (
      select from pg_catalog.pg_attribute a
      where a.attrelid = p_table::regclass and a.attname = pg_catalog.split_part(v_column, ' ', 1) and not a.attisdropped)
    then
      execute pg_catalog.format('alter table %s add column %s', p_table, v_column);
    end if;
  end loop;
end
$$;

-- One row, created by pgque._init().
create table if not exists pgque.config (
  config_id       int not null default 1
    constraint config_pkey primary key
    constraint config_one_row check (config_id = 1),
  tick_period_ms  int not null default 100
    constraint config_tick_period check (tick_period_ms between 1 and 60000),
  stopped_at      timestamptz,
  defaults        jsonb not null default '{}'
    constraint config_defaults check (jsonb_typeof(defaults) = 'object'),
  expire_every    interval default '1 minute'
    constraint config_expire_every check (expire_every > '0'),
  delete_expired_every  interval
    constraint config_delete_expired_every check (delete_expired_every > '0'),
  tick_share      int not null default 15
    constraint config_tick_share check (tick_share between 1 and 100),
  keep_actions    interval default '30 days'
    constraint config_keep_actions check (keep_actions > '0'),
  keep_lags       interval default '7 days'
    constraint config_keep_lags check (keep_lags > '0')
);
comment on table pgque.config is 'Settings of the loop: one row, or none while all are default.';
comment on column pgque.config.config_id is 'Always 1.';
comment on column pgque.config.tick_period_ms is
  'Longest gap that the loop leaves between two ticks of a queue with messages. Set by set_tick_period_ms(). Unit: milliseconds.';
comment on column pgque.config.stopped_at is 'When stop() was called last. Loops that began before it end.';
comment on column pgque.config.expire_every is
  'How often maint() deletes expired messages from the retry queue; none: never. Set by set_schedule(''expire'', interval).';
comment on column pgque.config.delete_expired_every is
  'How often maint() deletes dead letters whose message expired; none: never. Set by set_schedule(''delete_expired'', interval).';

-- One row a queue.  queue_xid is the mark of the transaction that wrote the row, and
-- every statement that updates a row sets it.  In a row that was loaded from a dump it
-- is the mark of another transaction.  The generated columns show that, and
-- pgque._rebase() has to run before the queue takes events.  The mark 2 means that
-- confirm_restore() was called.
--   * queue_own: the settings that are the queue's own; the others follow
--     config.defaults
--   * queue_keyed, queue_expiring: whether a message ever had a key, a ttl.  They lag
--     behind the notes in queue_option: call _keyed(), _expiring()
--   * queue_health_...: when health() warns and when it fails; 0 is never
--   * queue_reader: unused; create_queue() of 0.8.0, which may run during an upgrade,
--     stores it
--   * queue_incarnation: since the last repair after a restore; see _incarnation()
create table if not exists pgque.queue (
  queue_id                 int generated by default as identity
    constraint queue_pkey primary key,
  queue_name               text not null
    constraint queue_name_key unique
    constraint queue_name_length check (octet_length(queue_name) between 1 and 57),
  queue_ntables            int not null default 3
    constraint queue_three_tables check (queue_ntables = 3),
  queue_cur_table          int not null default 0
    constraint queue_cur_table_range check (queue_cur_table between 0 and 2),
  queue_rotation_period    interval not null default '2 hours'
    constraint queue_rotation_period_range check (queue_rotation_period > '0' and queue_rotation_period <= '1 year'),
  queue_switch_time        timestamptz not null default pg_catalog.now(),
  queue_external_ticker    boolean not null default false,
  queue_ticker_paused      boolean not null default false,
  queue_ticker_max_count   int not null default 500
    constraint queue_ticker_max_count_positive check (queue_ticker_max_count > 0),
  queue_ticker_max_lag     interval not null default '0'
    constraint queue_ticker_max_lag_range check (queue_ticker_max_lag >= '0' and queue_ticker_max_lag <= '1 year'),
  queue_ticker_idle_period interval not null default '1 minute'
    constraint queue_ticker_idle_period_range check (queue_ticker_idle_period > '0' and queue_ticker_idle_period <= '1 year'),
  queue_max_retries        int not null default 5
    constraint queue_max_retries_range check (queue_max_retries >= 0),
  queue_retention_period   interval not null default '7 days'
    constraint queue_retention_period_range check (queue_retention_period > '0' and queue_retention_period <= '100 years'),
  queue_paused             boolean not null default false,
  queue_event_seq          regclass not null,
  queue_tick_seq           regclass not null,
  queue_uid                uuid not null default pg_catalog.gen_random_uuid(),
  queue_created_at         timestamptz not null default pg_catalog.now(),
  queue_xid                xid8 not null,
  queue_restored           boolean generated always as (queue_xid <> pgque._xid()) stored,
  queue_open               boolean generated always as (not queue_paused and queue_xid = pgque._xid()) stored,
  queue_own                jsonb not null default '{}'
    constraint queue_own_object check (jsonb_typeof(queue_own) = 'object'),
  queue_visibility_timeout interval not null default '30 seconds'
    constraint queue_visibility_timeout_range check (queue_visibility_timeout > '0' and queue_visibility_timeout <= '1 year'),
  queue_max_receive_attempts int not null default 5
    constraint queue_max_receive_attempts_range check (queue_max_receive_attempts >= 1),
  queue_drop_policy        text not null default 'dead_letter'
    constraint queue_drop_policy_known check (queue_drop_policy in ('drop', 'dead_letter', 'hold')),
  queue_dead_letter_queue  int
    constraint queue_dead_letter_queue_other check (queue_dead_letter_queue <> queue_id),
  queue_retry_backoff      jsonb
    constraint queue_retry_backoff_valid check (pgque._backoff_valid(queue_retry_backoff)),
  queue_message_ttl        interval not null default '0'
    constraint queue_message_ttl_range check (queue_message_ttl >= '0' and queue_message_ttl <= '100 years'),
  queue_max_depth          bigint not null default 0
    constraint queue_max_depth_range check (queue_max_depth >= 0),
  queue_throughput_limit   int not null default 0
    constraint queue_throughput_limit_range check (queue_throughput_limit >= 0),
  queue_archive_on_ack     boolean not null default false,
  queue_keyed              boolean not null default false,
  queue_expiring           boolean not null default false,
  queue_max_consumers      int not null default 1000
    constraint queue_max_consumers_range check (queue_max_consumers >= 0),
  queue_health_pending_warn interval not null default '5 minutes'
    constraint queue_health_pending_warn_range check (queue_health_pending_warn >= '0' and queue_health_pending_warn <= '100 years'),
  queue_health_pending_fail interval not null default '1 hour'
    constraint queue_health_pending_fail_range check (queue_health_pending_fail >= '0' and queue_health_pending_fail <= '100 years'),
  queue_health_tick_warn   interval not null default '5 seconds'
    constraint queue_health_tick_warn_range check (queue_health_tick_warn >= '0' and queue_health_tick_warn <= '100 years'),
  queue_health_tick_fail   interval not null default '1 minute'
    constraint queue_health_tick_fail_range check (queue_health_tick_fail >= '0' and queue_health_tick_fail <= '100 years'),
  queue_health_depth_warn  int not null default 80
    constraint queue_health_depth_warn_range check (queue_health_depth_warn between 0 and 100),
  queue_tick_gap           interval not null default '20 milliseconds'
    constraint queue_tick_gap_range check (queue_tick_gap >= '1 millisecond' and queue_tick_gap <= '1 minute'),
  queue_tick_storage       bigint not null default 67108864
    constraint queue_tick_storage_range check (queue_tick_storage >= 1048576),
  queue_reader             text,
  queue_incarnation        uuid,
  queue_floor              bigint not null default 0,
  queue_max_window         int not null default 0
    constraint queue_max_window_range check (queue_max_window >= 0)
) with (fillfactor = 50);
comment on table pgque.queue is 'The queues with their settings; see alter_queue().';
comment on column pgque.queue.queue_id is 'Number of the queue, as in the names of its tables.';
comment on column pgque.queue.queue_name is 'Name of the queue, 1 to 57 bytes.';
comment on column pgque.queue.queue_ntables is 'Number of tables that the queue''s messages rotate through: 3.';
comment on column pgque.queue.queue_cur_table is 'Number of the table that new messages are stored in: 0 to 2.';
comment on column pgque.queue.queue_rotation_period is
  'Shortest time between two rotations. The queue keeps between two and three periods of messages, and all that the slowest consumer has not '
  'finished.';
comment on column pgque.queue.queue_switch_time is 'Time of the last rotation.';
comment on column pgque.queue.queue_external_ticker is
  'Whether another system chooses the ticks, with ticker(queue_name, tick_id, tick_time, event_seq); the loop does not tick the queue then.';
comment on column pgque.queue.queue_ticker_paused is 'Whether the ticker skips the queue: no message becomes visible to consumers while it is true.';
comment on column pgque.queue.queue_ticker_max_count is 'How many new messages cause a tick before ticker_max_lag has passed. Unit: messages.';
comment on column pgque.queue.queue_ticker_max_lag is
  'How long new messages may wait for a tick while they are fewer than ticker_max_count; 0: they do not wait.';
comment on column pgque.queue.queue_ticker_idle_period is 'Time between two ticks while nothing is sent.';
comment on column pgque.queue.queue_max_retries is
  'How often a rejected message is redelivered before it is given up: n retries are n + 1 deliveries. Unit: retries.';
comment on column pgque.queue.queue_retention_period is
  'How far a consumer may lag. A consumer that lags for longer is moved forward, and the messages that it missed are given up (see drop_policy). '
  'Retries that were due for longer are given up as well. For a delayed message the time counts from when it could be delivered. 0 restores the '
  'default.';
comment on column pgque.queue.queue_paused is 'Whether senders are refused; see pause().';
comment on column pgque.queue.queue_event_seq is 'Sequence that the queue''s message ids are drawn from.';
comment on column pgque.queue.queue_tick_seq is
  'Sequence that the queue''s tick ids are drawn from. A value above the newest tick requests a tick; see force_next_tick().';
comment on column pgque.queue.queue_uid is 'Identity of the queue, unique in all databases; a queue that is created again has another one.';
comment on column pgque.queue.queue_created_at is 'When the queue was created.';
comment on column pgque.queue.queue_xid is 'Mark of the transaction that last wrote this row.';
comment on column pgque.queue.queue_restored is 'Whether the queue was loaded from a dump and not used since. Its first use after the end of the restore repairs it.';
comment on column pgque.queue.queue_open is 'Whether the queue takes messages.';
comment on column pgque.queue.queue_visibility_timeout is
  'How long a worker''s lease on a batch lasts, unless receive() is called with another time.';
comment on column pgque.queue.queue_max_receive_attempts is
  'How often a message is delivered to workers before it is given up; expired leases count too. Unit: deliveries.';
comment on column pgque.queue.queue_drop_policy is
  'Outcome of a message that is given up. dead_letter: it becomes a dead letter, which the ticker forwards to dead_letter_queue. hold: it becomes a dead letter '
  'that dlq_purge() and delete_expired() do not delete. drop: it is deleted, and metrics() counts it.';
comment on column pgque.queue.queue_dead_letter_queue is
  'Name of the queue that the ticker forwards dead letters to, under drop_policy dead_letter; none: they stay. While that queue is full or paused, '
  'they wait as dead letters; those given up before this setting changed stay. A name that ends in .dlq creates that queue. Set it for each queue.';
comment on column pgque.queue.queue_retry_backoff is
  'When a rejected message is redelivered, if nack() is called without a time: the n-th retry follows after base * factor ^ (n - 1) seconds, at most '
  'cap seconds. A random share of that time, up to jitter, is subtracted. The value is a JSON object; its defaults are {"base": 1, "factor": 2, '
  '"cap": 3600, "jitter": 0}. base and cap are 0 to 31536000, factor is 1 to 1000, jitter is 0 to 1. Without a value, every retry follows after a '
  'minute.';
comment on column pgque.queue.queue_message_ttl is
  'How long after it was sent a message may be delivered, unless it is sent with a ttl of its own; 0: no limit.';
comment on column pgque.queue.queue_max_depth is
  'How many messages the slowest consumer may have ahead of it before send() fails with PQ003; 0: no limit. It has no effect without a consumer. '
  'Unit: messages.';
comment on column pgque.queue.queue_throughput_limit is
  'How many messages a second each consumer with workers gets at most; 0: no limit. Unit: messages a second.';
comment on column pgque.queue.queue_archive_on_ack is 'Whether acknowledged messages are kept in the archive; see archive_list().';

-- Events and ticks are partitioned by slot = queue_id * 3 + table number, so
-- that one static INSERT reaches every queue.  Each leaf has its own index, by
-- ev_txid or tick_id, and the parents have none: a dump of the extension's
-- data would make it twice.
--   ev_owner   null: every consumer gets the row; above 0: this subscriber, to which the
--              row is a retry (a reader by offsets); 0, -1, -2: see keys and cancel
create table if not exists pgque.event (
  slot        int not null,
  ev_owner    int,
  ev_id       bigint not null,
  ev_time     timestamptz not null,
  ev_txid     xid8 not null,
  ev_retry    int,
  ev_type     text,
  ev_data     text,
  ev_extra1   text,
  ev_extra2   text,
  ev_extra3   text,
  ev_extra4   text,
  ev_headers  jsonb,
  ev_key      text,
  ev_bytes    bytea,
  ev_expires  timestamptz,
  ev_error    text
) partition by list (slot);
comment on table pgque.event is 'The events of all queues: append only, a partition for each of a queue''s three tables. Internal: read it through receive() or peek().';

create table if not exists pgque.tick (
  slot            int not null,
  tick_queue      int not null,
  tick_id         bigint not null,
  tick_time       timestamptz not null,
  tick_snapshot   pg_snapshot not null,
  tick_event_seq  bigint not null
) partition by list (slot);
comment on table pgque.tick is 'The ticks of all queues: the snapshots at which windows begin and end.';
comment on column pgque.tick.slot is 'Partition: queue_id * 3 + table number.';
comment on column pgque.tick.tick_queue is 'The queue: queue.queue_id.';
comment on column pgque.tick.tick_id is 'Number of the tick in its queue.';
comment on column pgque.tick.tick_time is 'When the tick was stored.';
comment on column pgque.tick.tick_snapshot is 'The snapshot: which transactions had finished at the tick.';
comment on column pgque.tick.tick_event_seq is 'Value of the queue''s event sequence at the tick.';

-- Rights of roles to one queue; see "rights".  A dump writes right_role as a name, but as
-- a number if the role was dropped, and another server may have given this number to
-- another role.  So a right counts only if right_role had the name right_role_name when
-- the row was written or loaded.
create table if not exists pgque.queue_right (
  right_queue  int not null,
  right_role   regrole not null,
  right_name   text not null
    constraint queue_right_known check (right_name in ('produce', 'consume', 'admin')),
  right_role_name  name,
  right_valid  boolean generated always as (pgque._is_role(right_role, right_role_name)) stored,
  constraint queue_right_pkey primary key (right_queue, right_role, right_name)
);
comment on table pgque.queue_right is 'Rights of roles to single queues; see grant_queue().';
comment on column pgque.queue_right.right_queue is 'The queue: queue.queue_id.';
comment on column pgque.queue_right.right_role is 'The role that has the right.';
comment on column pgque.queue_right.right_name is 'The right: produce, consume or admin.';
do $$
begin
  perform pgque._add_columns('pgque.queue_right', $c$
    right_role_name name;
    right_valid boolean generated always as (pgque._is_role(right_role, right_role_name)) stored$c$);
end
$$;
comment on column pgque.queue_right.right_role_name is 'Name of the role when maintenance saw it last.';
comment on column pgque.queue_right.right_valid is
  'Whether the role had this name when the row was written, or loaded from a dump. If not, the right counts for nothing, and maintenance deletes it.';

-- Dropped queues whose leaves are dropped when that blocks no other session.
create table if not exists pgque.dropped_queue (
  queue_id  int not null constraint dropped_queue_pkey primary key
);
comment on table pgque.dropped_queue is 'Dropped queues whose tables are not dropped yet. Internal.';

-- A name belongs to one queue, so that a transaction that subscribes a new name
-- blocks the name on no other queue.  A name of a database that is older than that has
-- co_queue 0, and is one of all queues.
create table if not exists pgque.consumer (
  co_id     int generated by default as identity
    constraint consumer_pkey primary key,
  co_name   text not null
    constraint consumer_name_length check (octet_length(co_name) between 1 and 1000),
  co_queue  int not null default 0,
  constraint consumer_name_key unique (co_queue, co_name)
);
comment on table pgque.consumer is 'Names of consumers.';
comment on column pgque.consumer.co_id is 'Number of the consumer.';
comment on column pgque.consumer.co_name is 'Name of the consumer.';

-- Consumers of a queue, and the workers of a consumer.  A call locks the row of its
-- consumer or worker, so that calls follow each other; deliveries hardly ever update it.
-- sub_keyed, sub_key_concurrency: whether the messages of one key that are leased at a time
-- are limited, and to how many.
-- sub_offsets: the consumer is read by offsets (open_stream), so its redeliveries must be
-- in the log.
-- sub_archived: what it passed since it was subscribed is in the archive, in the retry
-- queue or a dead letter.  sub_history: the subscriber whose archive it reads first.
-- The low 20 bits of sub_id are in every batch id (see pgque._new_batch_id).  The
-- sequence begins again after 2^31 numbers (see pgque._add_subscriber).
create table if not exists pgque.subscriber (
  sub_id        int generated by default as identity (cycle)
    constraint subscriber_pkey primary key,
  sub_queue     int not null,
  sub_consumer  int not null,
  sub_role      text not null default 'normal'
    constraint subscriber_role_known check (sub_role in ('normal', 'coop_main', 'coop_member', 'pool')),
  sub_main      int,
  sub_worker    text
    constraint subscriber_worker_length check (octet_length(sub_worker) between 1 and 1000),
  sub_keyed     boolean not null default false,
  sub_offsets   boolean not null default false,
  sub_archived  boolean not null default false,
  sub_history   int,
  sub_key_concurrency  int not null default 1
    constraint subscriber_key_concurrency_range check (sub_key_concurrency >= 1),
  constraint subscriber_member check ((sub_role = 'coop_member') = (sub_main is not null and sub_worker is not null))
);
comment on table pgque.subscriber is 'Identity of consumers and workers, locked to serialise their calls. Internal: see the view subscription.';

-- The journal of positions.  The row with the highest pos_seq of a subscriber is
-- true.  One that delivered a batch is also the record of that batch.
--   pos_tick                     finished up to here
--   pos_next_tick, pos_done_id   the window being read, and how far it is done
--   pos_snapshot ...             what the two ticks say
--   pos_high                     where it stood when it was moved back, or a tick after a
--                                message ahead of it that was cancelled
--   pos_batch, pos_last_id       the batch: ids above pos_done_id up to
--                                pos_last_id (null: to the end of the window)
--   pos_last_batch               the newest batch id that it was given
--   pos_worker, pos_until        whose the batch is and how long
--   pos_fresh                    above 0: these ids of the log were delivered, so the next
--                                delivery begins after them
--   pos_done_count               how many they are, with those that were left out and
--                                have their outcome; in a batch of next_batch() at most
--   pos_shelf                    how many came from the retry queue
--   pos_keys                     the order keys of its messages
--   pos_open, pos_prune          batches that may be open, and when to check them
--   pos_lapse                    no lease ends before this
--   pos_paid                     throughput: paid up to here
--   pos_due                      which part of the retry queue need not be read (see
--                                _due_from)
-- A subconsumer's rows say only when it was heard of.
create table if not exists pgque.journal (
  journal_id   int not null default 1
    constraint journal_pkey primary key
    constraint journal_one_row check (journal_id = 1),
  journal_cur  int not null default 0
    constraint journal_cur_range check (journal_cur in (0, 1)),
  journal_flipped_at  timestamptz not null default '-infinity',
  journal_epoch_cur   int not null default 0
    constraint journal_epoch_cur_range check (journal_epoch_cur in (0, 1)),
  journal_idem_cur    int not null default 0
    constraint journal_idem_cur_range check (journal_idem_cur in (0, 1)),
  journal_emptied_at  timestamptz not null default '-infinity'
);
comment on table pgque.journal is 'The current leaf of the positions. Internal.';
-- The current leaf, as a register that a call reads without a statement.  It is a hint:
-- _compact_journal() sets it, and whoever uses it compares it with the table.
create sequence if not exists pgque.journal_leaf as int minvalue 0 maxvalue 1;

create table if not exists pgque.position (
  pos_sub        int not null,
  pos_seq        bigint not null,
  pos_time       timestamptz not null,
  pos_tick       bigint,
  pos_snapshot   pg_snapshot,
  pos_event_seq  bigint,
  pos_next_tick  bigint,
  pos_next_snapshot   pg_snapshot,
  pos_next_event_seq  bigint,
  pos_done_id    bigint,
  pos_last_id    bigint,
  pos_batch      bigint,
  pos_last_batch bigint not null default 0,
  pos_done_count bigint not null default 0,
  pos_high       bigint,
  pos_skipped    bigint not null default 0,
  pos_worker     text,
  pos_until      timestamptz,
  pos_fresh      int,
  pos_shelf      int,
  pos_keys       text[],
  pos_open       bigint[],
  pos_prune      int,
  pos_lapse      timestamptz,
  pos_paid       timestamptz,
  leaf           int not null,
  pos_due        tstzrange
) partition by list (leaf);
comment on table pgque.position is 'Journal of positions; the newest row of a subscriber counts. Internal: see get_consumer_info().';

-- What became of batches and their messages.  The rows move from leaf to leaf together
-- with the positions.  set_what:
--   * outcome: the message set_ev_id has its outcome
--   * closed: the batch is finished
--   * moved: those of its messages from the log that had no outcome went to the retry
--     queue, under its id
--   * extended: its lease ends at set_until; set_ev_id counts the extensions
--   * lost: its worker got the answer that a message is lost
-- In the other rows set_ev_id is 0.  The key decides between two sessions that record the
-- same.
do $$
begin
  if to_regtype('pgque.settled_what') is null then
    create type pgque.settled_what as enum ('outcome', 'closed', 'moved', 'extended', 'lost');
    -- Up to 0.8, set_ev_id had these meanings by ranges of numbers (see earlier.sql).
    for v_leaf in 0..1 loop
      if to_regclass('pgque.settled_' || v_leaf) is not null then
        execute format('alter table pgque.settled_%s drop constraint settled_%1$s_pkey', v_leaf);
        execute format('alter table pgque.settled_%s rename to earlier_settled_%1$s', v_leaf);
      end if;
    end loop;
    alter table if exists pgque.settled rename to earlier_settled;
  end if;
end
$$;
create table if not exists pgque.settled (
  set_batch  bigint not null,
  set_ev_id  bigint not null default 0,
  set_until  timestamptz,
  leaf       int not null,
  set_what   pgque.settled_what not null,
  set_sub    int   -- rows of a dump of 0.8 have it (see earlier.sql)
) partition by list (leaf);
comment on table pgque.settled is 'Outcomes of batches and their messages. Internal.';

-- Places of the rows of a big window: a cache, see pgque._map_window.
create table if not exists pgque.window_map (
  map_queue      int not null,
  map_from       bigint not null,
  map_to         bigint not null,
  map_chunk      int not null,
  map_id_lo      bigint not null,
  map_id_hi      bigint not null,
  map_lo         tid[] not null,
  map_hi         tid[] not null,
  map_filenodes  oid[] not null,
  map_xid        xid8 not null,
  map_valid      boolean generated always as (map_xid = pgque._xid()) stored
);
comment on table pgque.window_map is 'Places of the rows of big windows: a cache. Internal.';

-- Messages that wait: for another attempt of a consumer, or with a delay and no
-- owner (0) yet.
--   ev_batch, ev_worker  its last batch, and its worker
--   ev_lane              its order key
create table if not exists pgque.retry_queue (
  ev_retry_after  timestamptz not null,
  ev_queue        int not null,
  ev_id           bigint not null,
  ev_time         timestamptz not null,
  ev_txid         xid8 not null,
  ev_owner        int not null,
  ev_retry        int,
  ev_type         text,
  ev_data         text,
  ev_extra1       text,
  ev_extra2       text,
  ev_extra3       text,
  ev_extra4       text,
  ev_headers      jsonb,
  ev_key          text,
  ev_bytes        bytea,
  ev_expires      timestamptz,
  ev_error        text,
  ev_receives     int not null default 0,
  ev_batch        bigint,
  ev_worker       text,
  ev_lane         text,
  -- Not the owner first: on a small table, the planner could choose this index to find the
  -- messages of an owner that are due, and would read all rows of the owner.
  constraint retry_queue_pkey primary key (ev_id, ev_owner, ev_queue)
);
comment on table pgque.retry_queue is
  'Messages to be redelivered to a consumer, also while a worker has them leased, and delayed messages for every consumer; see list_messages().';
comment on column pgque.retry_queue.ev_retry_after is 'When the message is due, or its lease expires.';
comment on column pgque.retry_queue.ev_queue is 'The queue: queue.queue_id.';
comment on column pgque.retry_queue.ev_owner is 'The subscriber that receives it: subscription.sub_id, or 0 for every consumer (a delayed message).';

create table if not exists pgque.dead_letter (
  dl_id           bigint generated by default as identity
    constraint dead_letter_pkey primary key,
  dl_queue_id     int not null,
  dl_consumer_id  int not null,
  dl_time         timestamptz not null,
  dl_reason       text,
  ev_id           bigint not null,
  ev_time         timestamptz not null,
  ev_txid         xid8 not null,
  ev_retry        int,
  ev_type         text,
  ev_data         text,
  ev_extra1       text,
  ev_extra2       text,
  ev_extra3       text,
  ev_extra4       text,
  ev_headers      jsonb,
  ev_key          text,
  ev_bytes        bytea,
  ev_expires      timestamptz,
  ev_error        text,
  dl_receives     int not null default 0,
  dl_held         boolean not null default false,
  dl_forward      int,
  constraint dead_letter_once unique (dl_queue_id, dl_consumer_id, ev_id)
);
comment on table pgque.dead_letter is 'Messages that were given up, once for each consumer; see the view dead_letters and dlq_inspect().';
comment on column pgque.dead_letter.dl_id is 'Number of the dead letter: the argument of dlq_requeue() and dlq_replay().';
comment on column pgque.dead_letter.dl_queue_id is 'The queue: queue.queue_id.';
comment on column pgque.dead_letter.dl_consumer_id is 'The consumer that failed it: consumer.co_id.';
comment on column pgque.dead_letter.dl_time is 'When the message became a dead letter.';
comment on column pgque.dead_letter.dl_reason is 'Why the message was given up: the reason of the last nack().';

-- The columns that retry_queue and dead_letter both have
do $$
declare
  v_column  record;
begin
  for v_column in
    select t.name as tab, c.*
    from (values ('retry_queue'), ('dead_letter')) t (name), (values
      ('ev_id', 'Id of the message.'),
      ('ev_time', 'When the message was sent.'),
      ('ev_txid', 'Transaction that stored it in the queue.'),
      ('ev_retry', 'How often the message failed; NULL: never.'),
      ('ev_type', 'Type of the message.'),
      ('ev_data', 'The payload.'),
      ('ev_extra1', 'Free text of the sender: the partition key, or a trigger''s table.'),
      ('ev_extra2', 'Free text of the sender.'),
      ('ev_extra3', 'Free text of the sender.'),
      ('ev_extra4', 'Free text of the sender.'),
      ('ev_headers', 'Metadata of the sender.'),
      ('ev_key', 'Key of a keyed message.'),
      ('ev_bytes', 'The payload, if it was sent as bytes.'),
      ('ev_expires', 'When the message expires; NULL: never.'),
      ('ev_error', 'The reason given when the message last failed.')
    ) c (name, text)
  loop
    execute format('comment on column pgque.%I.%I is %L', v_column.tab, v_column.name, v_column.text);
  end loop;
end
$$;

-- Messages of send_idem(), in two leaves.  The row of a key with the highest idem_n is
-- the valid one.
create table if not exists pgque.idempotency (
  idem_queue    int not null,
  idem_key      text not null,
  idem_n        bigint not null,
  idem_ev_id    bigint not null,
  idem_expires  timestamptz not null,
  leaf          int not null
) partition by list (leaf);
comment on table pgque.idempotency is 'Keys of send_idem() until their ttl ends. Internal.';

-- Messages that sinks have staged and not committed, in two leaves.  A row holds one
-- message, or as many as rows says in arrays, which costs less.  A sequence holds
-- the number of the current leaf, because a change of it leaves no dead row.  The
-- tables are not unlogged, as no table here is: if PostgreSQL crashes right after a
-- rolled-back TRUNCATE of an unlogged table, the next start can fail with "could not
-- create file ...: File exists".
create sequence if not exists pgque.sink_leaf as int minvalue 0 maxvalue 1;

-- Returns whether each text is a JSON object or null; 22P02 if one is no JSON.
create or replace function pgque._are_headers(p_headers text[]) returns boolean
language sql immutable as $$ select coalesce(pg_catalog.bool_and(pg_catalog.jsonb_typeof(h::jsonb) = 'object'), true) from pg_catalog.unnest(p_headers) h $$;


create table if not exists pgque.sink_attempt (
  attempt     uuid not null,
  sink_id     text not null,
  epoch       bigint,
  started_at  timestamptz not null,
  leaf        int not null
) partition by list (leaf);
comment on table pgque.sink_attempt is 'Attempts of sinks to write. Internal: see sink_begin().';
create table if not exists pgque.sink_stage (
  attempt        uuid not null,
  n              int not null,
  queue          text not null,
  type           text,
  payload        text,
  headers        jsonb
    constraint sink_stage_headers check (jsonb_typeof(headers) = 'object'),
  payload_bytes  bytea,
  partition_key  text,
  leaf           int not null,
  key            text,
  delay          text,
  deliver_at     timestamptz,
  ttl            text,
  constraint sink_stage_one_payload check (payload is null or payload_bytes is null)
) partition by list (leaf);
comment on table pgque.sink_stage is 'Messages that sinks have staged and not committed. Internal: see sink_begin().';

-- Epochs that sinks committed: whole epochs (part -1), and parts that were written row by
-- row, with transaction and session.  Part -2 is the list of servers that the epoch is
-- spread over.  Only a sink's newest epoch is needed.  An attempt of a write without
-- epochs is a sink of its own, once.  pgque.journal has the leaf that takes rows.
create table if not exists pgque.sink_epoch (
  sink_id       text not null,
  epoch         bigint not null,
  part          int not null,
  parts         int,
  txid          xid8 not null default pg_catalog.pg_current_xact_id(),
  session       text not null default pgque._session(),
  once          boolean not null default false,
  committed_at  timestamptz not null default pgque.clock(),
  leaf          int not null,
  servers       text[],
  servers_by    text
) partition by list (leaf);
comment on table pgque.sink_epoch is 'Epochs that sinks committed. Internal: see sink_commit().';

-- Counts of messages that were removed or redelivered, in two leaves; metrics() adds
-- them up.
create table if not exists pgque.tally (
  tal_queue  int not null,
  tal_sub    int not null,
  tal_what   text not null,
  tal_count  bigint not null,
  leaf       int not null
) partition by list (leaf);
comment on table pgque.tally is 'Counts of messages that were dropped, expired or archived. Internal: see metrics().';

-- Messages that are done and kept.  A leaf holds one day of one queue; bucket =
-- queue_id * 100000 + days since 2000-01-01.  Only maintenance creates these leaves: a
-- transaction that creates one lets others wait until it ends.  So the leaf archive_0,
-- bucket 0, takes messages whose leaf does not exist yet, until maintenance moves them.
create sequence if not exists pgque.archive_id_seq;
create table if not exists pgque.archive (
  bucket         bigint not null,
  archive_id     bigint not null default pg_catalog.nextval('pgque.archive_id_seq'),
  archived_at    timestamptz not null,
  arc_queue      int not null,
  arc_consumer   int not null,
  arc_worker     text,
  arc_outcome    text not null,
  arc_receives   int not null,
  ev_id          bigint not null,
  ev_time        timestamptz not null,
  ev_retry       int,
  ev_type        text,
  ev_data        text,
  ev_extra1      text,
  ev_extra2      text,
  ev_extra3      text,
  ev_extra4      text,
  ev_headers     jsonb,
  ev_key         text,
  ev_bytes       bytea,
  ev_expires     timestamptz,
  ev_error       text
) partition by list (bucket);
comment on table pgque.archive is 'Messages that are done and kept; a leaf holds one day of one queue. See archive_list().';
do $$
begin
  if to_regclass('pgque.archive_0') is null then
    create table pgque.archive_0 (like pgque.archive including defaults, constraint archive_0_pkey primary key (archive_id));
    create index archive_0_ev_id on pgque.archive_0 (ev_id);
    alter table pgque.archive attach partition pgque.archive_0 for values in (0);
  end if;
end
$$;
comment on table pgque.archive_0 is 'Archived messages that maintenance has not moved to the leaf of their queue and day yet. Internal.';

-- Messages that the ticker sends at their times; see "recurring".
--   * rec_every: an interval in seconds, counted from rec_anchor
--   * rec_seconds to rec_weekdays: the values that a cron expression allows
--   * rec_fixed: whether it names hours without * and /
--   * rec_either: whether a day matches if rec_days or rec_weekdays does
--   * rec_since: the number of the first run that counts
--   * rec_xid: as queue_xid
--   * rec_role: a name, so that a dump can be loaded where the role is missing
create table if not exists pgque.recurring (
  rec_id             int generated by default as identity
    constraint recurring_pkey primary key,
  rec_name           text not null
    constraint recurring_name_key unique
    constraint recurring_name_length check (octet_length(rec_name) between 1 and 200),
  rec_queue          text not null,
  rec_role           name not null,
  rec_paused         boolean not null default false,
  rec_cron           text not null,
  rec_timezone       text not null,
  rec_every          int,
  rec_anchor         timestamptz,
  rec_seconds        int[],
  rec_minutes        int[],
  rec_hours          int[],
  rec_days           int[],
  rec_months         int[],
  rec_weekdays       int[],
  rec_fixed          boolean,
  rec_either         boolean,
  rec_starts_at      timestamptz,
  rec_ends_at        timestamptz,
  rec_catch_up       text not null
    constraint recurring_catch_up_known check (rec_catch_up in ('none', 'one', 'all')),
  rec_type           text,
  rec_data           text,
  rec_bytes          bytea,
  rec_headers        jsonb,
  rec_key            text,
  rec_delay          interval,
  rec_ttl            interval,
  rec_partition_key  text,
  rec_created_at     timestamptz not null,
  rec_registered_at  timestamptz not null,
  rec_since          bigint not null default 0,
  rec_xid            xid8 not null,
  rec_restored       boolean generated always as (rec_xid <> pgque._xid()) stored,
  constraint recurring_schedule check (num_nonnulls(rec_every, rec_seconds) = 1
    and num_nonnulls(rec_seconds, rec_minutes, rec_hours, rec_days, rec_months, rec_weekdays, rec_fixed, rec_either) in (0, 8))
);
comment on table pgque.recurring is 'Recurring messages. Internal: see list_recurring().';

-- The runs of recurring messages, in two leaves.  The row with the highest run_n of
-- a definition counts; one without run_due was sent by run_recurring().
--   run_at, run_for            when it was sent or tried, and the time of the schedule
--   run_next, run_due          the next run, and when it is sent or tried again
--   run_msg                    the message, the last one of several
--   run_failures ...           attempts at the next run that failed, the last error
create sequence if not exists pgque.recurring_n;
create sequence if not exists pgque.recurring_leaf as int minvalue 0 maxvalue 1;
create table if not exists pgque.recurring_run (
  run_rec       int not null,
  run_n         bigint not null,
  run_at        timestamptz not null,
  run_for       timestamptz,
  run_next      timestamptz,
  run_due       timestamptz,
  run_msg       bigint,
  run_failures  int not null,
  run_error     text,
  run_hint      text,
  leaf          int not null
) partition by list (leaf);
comment on table pgque.recurring_run is 'Journal of the runs of recurring messages. Internal: see list_recurring().';

-- The time of the first recurring message that is due, in microseconds since 1970.
create sequence if not exists pgque.recurring_at minvalue 0;

-- History, in two leaves each: one is the current one, and the other is emptied when
-- all of its rows are older than the setting keeps them.
create sequence if not exists pgque.action_leaf as int minvalue 0 maxvalue 1;
create table if not exists pgque.action (
  act_time         timestamptz not null,
  act_role         name not null,
  act_application  text,
  act_call         text not null,
  act_queue        text,
  act_args         jsonb,
  leaf             int not null
) partition by list (leaf);
comment on table pgque.action is 'Changes by hand. Internal: see list_actions().';

-- Samples of figures that exist anyway, at most one a minute: counters, which go on from
-- row to row, so that a row that is missing loses nothing.  A queue's row has smp_sub 0,
-- and the row of all queues together has smp_queue 0 too.  There is no row while nothing
-- changes.
--   smp_sent          the event sequence: how many message ids were drawn
--   smp_passed        up to which of these ids the consumer has received, less what it missed
--   smp_redelivered, smp_removed   sums of the tally: redelivered; dropped and forwarded
--   smp_dead          dead letters that were there at a sample and are not forwarded
--   smp_mark          of all queues: the sequence of dead letters at the sample
--   smp_gap           of all queues: there is no sample between then and this row
create sequence if not exists pgque.sample_leaf as int minvalue 0 maxvalue 1;
create sequence if not exists pgque.sample_hour_leaf as int minvalue 0 maxvalue 1;
create sequence if not exists pgque.sampled minvalue 0;
create table if not exists pgque.sample (
  smp_time     timestamptz not null,
  smp_queue    int not null,
  smp_sub      int not null,
  smp_lag      real,
  smp_pending  bigint,
  leaf         int not null,
  smp_sent         bigint,
  smp_passed       bigint,
  smp_redelivered  bigint,
  smp_removed      bigint,
  smp_dead         bigint,
  smp_mark         bigint,
  smp_gap          timestamptz
) partition by list (leaf);
do $$
begin
  perform pgque._add_columns('pgque.sample', $c$
    smp_sent bigint;
    smp_passed bigint;
    smp_redelivered bigint;
    smp_removed bigint;
    smp_dead bigint;
    smp_mark bigint;
    smp_gap timestamptz$c$);
  if exists (select from pg_attribute a where a.attrelid = 'pgque.sample'::regclass and a.attname = 'smp_lag' and a.attnotnull) then
    alter table pgque.sample alter smp_lag drop not null, alter smp_pending drop not null;
  end if;
end
$$;
comment on table pgque.sample is 'Samples of queues and consumers, one a minute, for a day. Internal: see history() and consumer_lags().';
create table if not exists pgque.sample_hour (like pgque.sample) partition by list (leaf);
comment on table pgque.sample_hour is 'Samples of queues and consumers, one an hour: the last counters and the greatest lag. Internal: see history() and consumer_lags().';

-- Sequences as registers that leave no dead rows: the last runs of the cleanup jobs in
-- seconds since 1970, and the last notification of consumers for due messages in
-- microseconds.
create sequence if not exists pgque.expire_ran minvalue 0;
create sequence if not exists pgque.delete_expired_ran minvalue 0;
create sequence if not exists pgque.woken minvalue 0;

-- The journals are append only and have two leaves.  While one is the current one, the
-- valid rows of the other are copied to it, and the other is emptied.
do $$
declare
  v_journal  record;
  v_leaf     text;
begin
  for v_journal in
    select j.name, j.key, n as leaf
    from (values ('position', 'pos_sub, pos_seq'), ('settled', 'set_batch, set_ev_id, set_what'), ('tally', null), ('recurring_run', 'run_rec, run_n'), ('action', null), ('sample', null), ('sample_hour', null),
      ('idempotency', 'idem_queue, idem_key, idem_n'), ('sink_attempt', 'attempt'), ('sink_stage', 'attempt, n'), ('sink_epoch', 'sink_id, epoch, part')) j (name, key)
    cross join generate_series(0, 1) n
  loop
    v_leaf := format('%s_%s', v_journal.name, v_journal.leaf);
    if to_regclass('pgque.' || v_leaf) is null then
      execute format('create table pgque.%I partition of pgque.%I (leaf default %s%s) for values in (%3$s)',
        v_leaf, v_journal.name, v_journal.leaf, format(', constraint %I primary key (' || v_journal.key || ')', v_leaf || '_pkey'));
    end if;
  end loop;
end
$$;

-- Columns that 0.7.0, the oldest version to upgrade from, lacks, and constraints that it
-- has.
do $$
declare
  v_key  record;
begin
  perform pgque._add_columns('pgque.queue', $c$
    queue_incarnation uuid;
    queue_floor bigint not null default 0;
    queue_max_window int not null default 0 constraint queue_max_window_range check (queue_max_window >= 0)$c$);
  perform pgque._add_columns('pgque.dead_letter', 'dl_forward int');
  perform pgque._add_columns('pgque.position', 'pos_due tstzrange');
  if to_regclass('pgque.sink_stage_options') is not null then
    drop index pgque.sink_stage_options;
  end if;
  if not exists (select from pg_attribute a where a.attrelid = 'pgque.sink_stage'::regclass and a.attname = 'rows') then
    alter table pgque.sink_stage
      add rows int, add queues text[], add types text[], add payloads text[], add all_headers text[], add all_bytes bytea[],
      add partition_keys text[], add keys text[], add delays text[], add deliver_ats timestamptz[], add ttls text[],
      -- Compression would cost more than the rest of staging.
      alter queues set storage external, alter types set storage external, alter payloads set storage external,
      alter all_headers set storage external, alter all_bytes set storage external, alter partition_keys set storage external,
      alter keys set storage external, alter delays set storage external, alter deliver_ats set storage external, alter ttls set storage external,
      add constraint sink_stage_arrays check (
        case
          when rows is null then num_nonnulls(queues, types, payloads, all_headers, all_bytes, partition_keys, keys, delays, deliver_ats, ttls) = 0
          else num_nonnulls(payloads, all_bytes) = 1 and num_nonnulls(type, payload, headers, payload_bytes, partition_key, key, delay, deliver_at, ttl) = 0
            and rows = all (array_remove(array[cardinality(queues), cardinality(types), cardinality(payloads), cardinality(all_headers),
              cardinality(all_bytes), cardinality(partition_keys), cardinality(keys), cardinality(delays), cardinality(deliver_ats), cardinality(ttls)], null))
        end),
      add constraint sink_stage_all_headers check (all_headers is null or pgque._are_headers(all_headers));
  end if;
  perform pgque._add_columns('pgque.subscriber', 'sub_key_concurrency int not null default 1 constraint subscriber_key_concurrency_range check (sub_key_concurrency >= 1)');
  -- A parallel restore loads the tables of an extension in any order, so they refer to
  -- each other without foreign keys.  _need_queue() does their work.
  for v_key in
    select c.conrelid::regclass as tab, c.conname as name
    from pg_constraint c
    where c.contype = 'f' and c.conname in
      ('queue_right_queue_fkey', 'subscriber_queue_fkey', 'subscriber_consumer_fkey', 'dead_letter_queue_fkey', 'dead_letter_consumer_fkey')
      and c.conrelid in ('pgque.queue_right'::regclass, 'pgque.subscriber'::regclass, 'pgque.dead_letter'::regclass)
  loop
    execute format('alter table %s drop constraint %I', v_key.tab, v_key.name);
  end loop;
  if (select c.conkey[1] from pg_constraint c where c.conrelid = 'pgque.retry_queue'::regclass and c.conname = 'retry_queue_pkey')
    = (select a.attnum from pg_attribute a where a.attrelid = 'pgque.retry_queue'::regclass and a.attname = 'ev_owner')
  then
    alter table pgque.retry_queue drop constraint retry_queue_pkey,
      add constraint retry_queue_pkey primary key (ev_id, ev_owner, ev_queue);
  end if;
  -- No statistics of the retry queue: they may be of a moment in which a consumer had
  -- no rows there.  By them the planner would expect one row where there are thousands.
  if exists (
    select from pg_attribute a
    where a.attrelid = 'pgque.retry_queue'::regclass and a.attnum > 0 and not a.attisdropped and coalesce(a.attstattarget, -1) <> 0)
  then
    execute (
      select 'alter table pgque.retry_queue ' || string_agg(format('alter column %I set statistics 0', a.attname), ', ')
      from pg_attribute a
      where a.attrelid = 'pgque.retry_queue'::regclass and a.attnum > 0 and not a.attisdropped);
  end if;
end
$$;
-- Samples from before 0.12, which were all kept for the same time
insert into pgque.sample_hour (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf)
select max(s.smp_time), s.smp_queue, s.smp_sub, max(s.smp_lag), max(s.smp_pending), l.last_value
from pgque.sample s, pgque.sample_hour_leaf l
where not exists (select from pgque.sample n where n.smp_queue = 0) and not exists (select from pgque.sample_hour)
group by s.smp_queue, s.smp_sub, date_trunc('hour', s.smp_time), l.last_value;
comment on column pgque.config.keep_actions is
  'How long list_actions() goes back at least; none: actions are not recorded. Set by set_history(''actions'', interval).';
comment on column pgque.config.keep_lags is
  'How long history() and consumer_lags() go back at least; none: no samples are taken. Set by set_history(''lags'', interval).';
comment on column pgque.config.tick_share is
  'How much of one core the loop may use for checks and ticks; above it, gaps between ticks grow. Set by set_tick_share(). Unit: percent.';
comment on column pgque.dead_letter.dl_forward is
  'The dead_letter_queue that the loop forwards it to: queue.queue_id; NULL: it stays here.';
comment on column pgque.queue.queue_tick_gap is
  'Shortest time that the loop leaves between two ticks. With many consumers the loop leaves at least 4 ms for each, but no more than the tick '
  'period for all of them.';
comment on column pgque.queue.queue_tick_storage is
  'Size of the stored ticks: when those in the current table reach a third of it, the queue rotates before its period. Unit: bytes.';
comment on column pgque.queue.queue_reader is 'Unused since 0.9.';
comment on column pgque.queue.queue_floor is
  'Event sequence of the oldest tick that was stored at the last rotation: no consumer stands before it, so that max_depth is checked by a subtraction.';
comment on column pgque.queue.queue_max_window is
  'How many messages a batch of next_batch(), or a micro-batch of Spark, has at most; 0: no limit, so that a batch is whole windows. A larger window becomes '
  'several batches with the same two ticks. Unit: messages.';
comment on column pgque.queue.queue_incarnation is
  'Identity of the queue since it was loaded from a dump, because its ticks begin anew then; NULL if it never was: then queue_uid is its identity. '
  'See queue_incarnation().';
comment on column pgque.queue.queue_max_consumers is
  'How many consumers a queue may have, subconsumers included; 0: no limit. Beyond it subscribe() fails with PQ003 for roles that have a right to '
  'this queue only. Only a member of pgque_admin sets it. Unit: consumers.';
comment on column pgque.queue.queue_health_pending_warn is
  'health() warns when a consumer''s oldest pending message is older than this, or older than 80 % of retention_period. 0: only retention_period '
  'counts, and a queue without a consumer is no reason to warn.';
comment on column pgque.queue.queue_health_pending_fail is
  'health() fails when a consumer''s oldest pending message is older than this, or older than retention_period. 0: only retention_period counts. '
  'health() also warns when a worker has leased a message for longer than this and than ten times visibility_timeout; 0: it never does.';
comment on column pgque.queue.queue_health_tick_warn is 'health() warns when messages have waited longer for a tick; 0: never.';
comment on column pgque.queue.queue_health_tick_fail is 'health() fails when messages have waited longer for a tick; 0: never.';
comment on column pgque.queue.queue_health_depth_warn is
  'health() warns when the queue is this full; 0: never. A full queue fails. Unit: percent of max_depth.';

-- Indexes.  CREATE INDEX locks its table against writers even if the index exists, and
-- an upgrade must not.
do $$
declare
  v_index  record;
begin
  for v_index in
    select i.name, i.kind, i.on_rows
    from (values
      ('queue_uid_key', 'unique index', 'queue (queue_uid)'),
      ('subscriber_low_bits', 'unique index', 'subscriber ((sub_id & 1048575))'),
      ('subscriber_queue', 'index', 'subscriber (sub_queue)'),
      ('subscriber_consumer', 'unique index', 'subscriber (sub_queue, sub_consumer) where sub_main is null'),
      ('subscriber_worker', 'unique index', 'subscriber (sub_main, sub_worker) where sub_main is not null'),
      ('window_map_id', 'index', 'window_map (map_queue, map_from, map_to, map_id_hi)'),
      ('retry_queue_queue', 'index', 'retry_queue (ev_queue, ev_id)'),
      -- The messages of one consumer that are due.  Delayed messages have no consumer (0)
      -- yet.
      ('retry_queue_owner_due', 'index', 'retry_queue (ev_owner, ev_retry_after)'),
      ('retry_queue_held', 'index', 'retry_queue (ev_owner, ev_batch, ev_id) where ev_batch is not null'),
      -- Leased messages of which a delivery was lost.  They are few.
      ('retry_queue_suspect', 'index', 'retry_queue (ev_owner, ev_worker) where ev_batch is not null and ev_receives > coalesce(ev_retry, 0) + 1'),
      ('retry_queue_lane', 'index', 'retry_queue (ev_owner, ev_lane, ev_id) where ev_lane is not null'),
      -- Messages without a key that are due: any number of others may wait for their busy
      -- key.
      ('retry_queue_free_due', 'index', 'retry_queue (ev_owner, ev_retry_after) where ev_lane is null'),
      ('retry_queue_key', 'index', 'retry_queue (ev_queue, ev_key) where ev_key is not null'),
      -- A probe of the loop, which finds nothing as a rule.
      ('dead_letter_forward', 'index', 'dead_letter (dl_forward, dl_id) where dl_forward is not null'),
      -- A query for a batch compares pos_sub + 0.  Otherwise a plan without statistics also
      -- reads all rows of the consumer in the primary key.
      ('sample_0_of', 'index', 'sample_0 (smp_queue, smp_sub, smp_time)'),
      ('sample_1_of', 'index', 'sample_1 (smp_queue, smp_sub, smp_time)'),
      ('sample_hour_0_of', 'index', 'sample_hour_0 (smp_queue, smp_sub, smp_time)'),
      ('sample_hour_1_of', 'index', 'sample_hour_1 (smp_queue, smp_sub, smp_time)'),
      ('position_0_batch', 'index', 'position_0 (pos_batch) where pos_batch is not null'),
      ('position_1_batch', 'index', 'position_1 (pos_batch) where pos_batch is not null')
    ) i (name, kind, on_rows)
    where to_regclass('pgque.' || i.name) is null
  loop
    execute format('create %s %I on pgque.%s', v_index.kind, v_index.name, v_index.on_rows);
  end loop;
end
$$;

-- Types of a message as existing clients write it when they nack,
-- `row(...)::pgque.message` with ten values; of the same with our columns, as a
-- consumer gets it; and of the outcome of one message in a call for several.
do $$
begin
  if to_regtype('pgque.outcome') is null then
    create type pgque.outcome as (
      msg_id  bigint,
      ok      boolean,
      reason  text
    );
  end if;
  if to_regtype('pgque.look') is null then
    create type pgque.look as (
      queue_id   int,
      event_seq  bigint,
      tick_seq   bigint,
      tick_time  timestamptz,
      settled    boolean,
      ticked     boolean
    );
  end if;
  if to_regtype('pgque.message') is null then
    create type pgque.message as (
      msg_id         bigint,
      batch_id       bigint,
      type           text,
      payload        text,
      retry_count    int,
      created_at     timestamptz,
      extra1         text,
      extra2         text,
      extra3         text,
      extra4         text
    );
  end if;
  if to_regtype('pgque.delivery') is null then
    create type pgque.delivery as (
      msg_id         bigint,
      batch_id       bigint,
      type           text,
      payload        text,
      retry_count    int,
      created_at     timestamptz,
      extra1         text,
      extra2         text,
      extra3         text,
      extra4         text,
      headers        jsonb,
      key            text,
      payload_bytes  bytea,
      receive_count  int,
      last_error     text,
      expires_at     timestamptz,
      queue          text
    );
  end if;
end
$$;
comment on type pgque.message is 'Message as clients write it for nack(): the first ten columns of pgque.delivery.';
comment on type pgque.look is 'State of a queue that the loop keeps after a check. Internal.';
comment on type pgque.delivery is 'A message as receive() delivers it to a consumer.';
comment on column pgque.delivery.msg_id is 'Id of the message in its queue; it stays through retries and dead letters.';
comment on column pgque.delivery.batch_id is 'The batch that the message was delivered with: the argument of ack() and nack().';
comment on column pgque.delivery.type is 'Type that the sender gave; default if none.';
comment on column pgque.delivery.payload is 'The text or JSON that was sent.';
comment on column pgque.delivery.retry_count is 'How often the message was rejected before: 0 at first.';
comment on column pgque.delivery.created_at is 'When the message was sent.';
comment on column pgque.delivery.extra1 is 'Free text of the sender: the partition key, or a trigger''s table.';
comment on column pgque.delivery.extra2 is 'Free text of the sender.';
comment on column pgque.delivery.extra3 is 'Free text of the sender.';
comment on column pgque.delivery.extra4 is 'Free text of the sender.';
comment on column pgque.delivery.headers is 'Metadata that the sender gave: a JSON object.';
comment on column pgque.delivery.key is 'Key that the sender gave; NULL if none.';
comment on column pgque.delivery.payload_bytes is 'The payload, if it was sent as bytes; payload is NULL then.';
comment on column pgque.delivery.receive_count is 'Number of this delivery: 1 at first.';
comment on column pgque.delivery.last_error is 'Reason that was given when the message was rejected last.';
comment on column pgque.delivery.expires_at is 'When the message expires; NULL: never.';
comment on column pgque.delivery.queue is 'Name of the message''s queue.';
comment on type pgque.outcome is 'Outcome of one message, for calls that take several.';
comment on column pgque.outcome.msg_id is 'Id of the message.';
comment on column pgque.outcome.ok is 'Whether this call had the effect on the message.';
comment on column pgque.outcome.reason is
  'Why ok is false: not in this batch, settled already, cancelled, batch not open, lost to another worker; for dead(queue_name, …): not found behind '
  'the position, dead already.';
