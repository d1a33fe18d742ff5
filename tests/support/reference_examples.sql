-- What sql/REFERENCE.md needs besides the catalogs: the group of each public function and view, and one
-- example of each.  Read by support/catalog.py (make reference), run by tests/python/test_reference.py.
--
--   -- before: TITLE     SQL that is run once, before all examples; \gset keeps columns as psql variables
--   -- group: TITLE      begins a group; the lines of comment that follow, up to a blank line, introduce it
--   -- NAME              begins the example of a function or a view, with all its overloads; earlier names,
--                        which their comments say, have none
--   -- commits: REASON   after NAME: cannot run in a transaction, so it runs in a database of its own
--   -- not run: REASON   after NAME: cannot run in the test, which only parses it
--
-- Every other example runs in a transaction that is rolled back.

-- before: Before the examples

select pgque.create_queue('orders');
select pgque.subscribe('orders', 'billing');                    -- reads on its own
select pgque.subscribe('orders', 'mailers');                    -- shared by workers
select pgque.subscribe('orders', 'spark');                      -- a stream
select pgque.register_consumer('orders', 'audit');              -- reads by PgQ's names
select pgque.register_subconsumer('orders', 'team', 'w1');
select pgque.create_queue('sales', '{"archive_on_ack": true}');
select pgque.subscribe('sales', 'billing');
select pgque.subscribe_archive('sales', 'report', archive_of => 'billing');
create role shop;
select pgque.grant_queue('orders', 'shop', 'consume');
create table customers (id int primary key, name text);
insert into customers values (1, 'Ann');

select pgque.send_batch('orders', 'order.created', array['{"id": 1}', '{"id": 2}', '{"id": 3}', '{"id": 4}']);
select pgque.send('orders', 'order.due', '{"id": 1}', key => 'order-1', delay => '1 hour');
select pgque.ticker('orders');

select min(batch_id) as batch, min(msg_id) as msg_id from pgque.receive('orders', 'billing') \gset
select min(batch_id) as lease, min(msg_id) as lease_msg from pgque.receive('orders', 'mailers', 4, worker => 'w1') \gset
select * from pgque.dead(:lease, array[:lease_msg + 1], 'no such address');
select * from pgque.archive(:lease, array[:lease_msg + 2]);
select * from pgque.nack(:lease, array[:lease_msg + 3], '1 minute', 'no answer');
select dl_id from pgque.dlq_inspect('orders') \gset
select archive_id from pgque.archive_list('orders') \gset
select pgque.next_batch('orders', 'audit') as window \gset
select pgque.tick_for('orders', 'earliest') as from_tick, pgque.tick_for('orders', 'latest') as to_tick \gset
select attempt, stage from pgque.sink_begin('nightly', 1) \gset
select pgque.create_recurring('hourly', 'orders', '0 * * * *', 'report', '{"all": false}');

-- group: Sending
-- For producers: the role `pgque_writer`, or the right `produce` to a queue.

-- send
select pgque.send('orders', 'order.created', '{"id": 5}');
select pgque.send('orders', 'order.due', '{"id": 5}', headers => '{"trace": "4bf9"}', delay => '1 hour');

-- send_batch
select pgque.send_batch('orders', 'order.created', array['{"id": 5}', '{"id": 6}']);

-- send_idem
select event_id, deduped from pgque.send_idem('orders', 'order.paid', '{"id": 1}', 'payment-4711', ttl => '1 day');

-- group: Recurring messages
-- The ticker sends a recurring message at its times. For producers; the role that creates one may also change it.

-- create_recurring
select pgque.create_recurring('nightly', 'orders', '0 3 * * mon-fri', 'report', '{"all": true}', timezone => 'Europe/Berlin');
select pgque.create_recurring('poll', 'orders', '90 seconds', 'poll', null::text, key => 'poll');

-- next_runs
select * from pgque.next_runs('0 3 * * *', 'Europe/Berlin');

-- list_recurring
select name, status, cron, next_run, last_run, last_error from pgque.list_recurring();

-- run_recurring
select pgque.run_recurring('hourly');

-- pause_recurring
select pgque.pause_recurring('hourly');

-- resume_recurring
select pgque.pause_recurring('hourly');
select pgque.resume_recurring('hourly');

-- drop_recurring
select pgque.drop_recurring('hourly');

-- group: Receiving
-- For consumers: the role `pgque_reader`, or the right `consume` to a queue.

-- subscribe
select pgque.subscribe('orders', 'reports', 'earliest');

-- receive
select msg_id, batch_id, type, payload from pgque.receive('orders', 'billing', 10);

-- ack
select pgque.ack(:batch);                            -- the whole batch
select * from pgque.ack(:lease, array[:lease_msg]);  -- some messages of a worker's batch

-- nack
select * from pgque.nack(:batch, array[:msg_id], '10 seconds', 'printer on fire');

-- archive
select * from pgque.archive(:batch, array[:msg_id]);

-- seek
select pgque.seek('orders', 'billing', :from_tick, force => true);

-- seek_to_time
select pgque.seek_to_time('orders', 'billing', now() - interval '1 day');

-- unsubscribe
select pgque.unsubscribe('orders', 'billing');

-- group: Workers
-- Workers share the messages of one consumer: each calls [receive](#receive) with `worker`, and leases the messages that it gets.

-- extend
select pgque.extend(:lease, '1 minute');

-- release
select pgque.release(:lease);

-- list_workers
select worker, messages, lease_until from pgque.list_workers('orders');

-- reclaim
select pgque.reclaim('orders', 'mailers', '1 hour');

-- unshare_consumer
select pgque.unshare_consumer('orders', 'mailers');

-- share_consumer
select pgque.share_consumer('orders', 'mailers');

-- set_key_concurrency
select pgque.set_key_concurrency('orders', 'mailers', 3);
select pgque.set_key_concurrency('orders', 'mailers', null);

-- group: Failures
-- A message that was rejected too often, or that killed its workers, becomes a dead letter. The functions of this chapter list dead
-- letters, deliver them again or delete them. [nack](#nack) rejects a message.

-- dead
select * from pgque.dead(:lease, array[:lease_msg], 'no such address');

-- dlq_inspect
select dl_id, ev_id, consumer_name, dl_reason from pgque.dlq_inspect('orders', 10);

-- dead_letters
select queue, consumer, msg_id, payload, reason from pgque.dead_letters where queue = 'orders';

-- dlq_requeue
select pgque.dlq_requeue(:dl_id);

-- dlq_requeue_all
select pgque.dlq_requeue_all('orders', 1000);

-- dlq_edit
select pgque.dlq_edit(:dl_id, payload => '{"id": 1, "address": "mended"}');

-- dlq_replay
select pgque.dlq_replay(:dl_id);

-- dlq_replay_all
select replayed, failed, first_error from pgque.dlq_replay_all('orders');

-- dlq_reasons
select consumer_name, reason, dead_letters, newest from pgque.dlq_reasons('orders');

-- dlq_delete
select pgque.dlq_delete(:dl_id);

-- dlq_purge
select pgque.dlq_purge('orders', '7 days');

-- delete_expired
select pgque.delete_expired('orders');

-- expire_messages
select pgque.expire_messages('orders');

-- retry_now
select pgque.retry_now('orders', 'mailers');

-- list_poison
select msg_id, consumer_name, receive_count, last_error from pgque.list_poison('orders');

-- archive_poison
select pgque.archive_poison('orders');

-- group: Operating: queues and rights
-- For operators: the role `pgque_admin`, or the right `admin` to a queue.

-- create_queue
select pgque.create_queue('invoices', '{"max_retries": 3, "message_ttl": "1 day"}');

-- alter_queue
select pgque.alter_queue('orders', '{"max_retries": 3, "rotation_period": "1 hour"}');

-- queue_settings
select setting, value, default_value, source from pgque.queue_settings('orders') where source <> 'built in';

-- set_default_config
select pgque.set_default_config('max_retries', '3');

-- rename_queue
select pgque.rename_queue('orders', 'shop.orders');

-- pause
select pgque.pause('orders');

-- resume
select pgque.resume('orders');

-- purge
select pgque.purge('orders');

-- cancel
select pgque.cancel('orders', 4);

-- purge_key
select pgque.purge_key('orders', 'order-1');

-- drop_queue
select pgque.drop_queue('orders', force => true);

-- my_rights
select queue_name, see, produce, consume, admin from pgque.my_rights();

-- grant_queue
select pgque.grant_queue('orders', 'shop', 'produce');

-- revoke_queue
select pgque.revoke_queue('orders', 'shop');

-- archive_list
select archive_id, msg_id, payload, outcome from pgque.archive_list('orders', 10);

-- archive_replay
select pgque.archive_replay(:archive_id);

-- archive_purge
select pgque.archive_purge('orders', now() - interval '30 days');

-- group: Operating: ticker and maintenance
-- pg_cron ([start](#start)) or the command `pgque ticker` runs the loop. Any other scheduler calls [ticker](#ticker) and [maint](#maint).

-- start
-- not run: needs pg_cron; tests/cron runs it
select pgque.start();

-- stop
select pgque.stop();

-- status
select component, status, detail from pgque.status();

-- ticker
select pgque.ticker();          -- all queues
select pgque.ticker('orders');  -- one queue

-- force_next_tick
select pgque.force_next_tick('orders');
select pgque.ticker('orders');

-- ticker_loop
-- commits: after each step
call pgque.ticker_loop('1 second');

-- set_tick_period_ms
select pgque.set_tick_period_ms(50);

-- set_tick_share
select pgque.set_tick_share(25);

-- maint
select pgque.maint();

-- set_history
select pgque.set_history('actions', '90 days');

-- set_schedule
select pgque.set_schedule('delete_expired', '1 hour');

-- confirm_restore
select pgque.confirm_restore();                               -- only if health() says so

-- version
select pgque.version();

-- clock
select pgque.clock();

-- uninstall
select pgque.uninstall();

-- group: Operating: looking at queues
-- No function of this chapter changes anything.

-- health
select check_name, queue, status, detail, advice from pgque.health() where status <> 'ok';
select check_name, status, detail, advice from pgque.health('orders');

-- metrics
select metric, queue, consumer, value from pgque.metrics();
select metric, consumer, value from pgque.metrics('orders');

-- overview
select queue, pending_events, lag_seconds, dead_letters, problems from pgque.overview();

-- get_queue_info
select queue_name, ticker_lag, ev_per_sec, ev_new from pgque.get_queue_info();

-- get_consumer_info
select queue_name, consumer_name, lag, pending_events from pgque.get_consumer_info('orders');

-- queue_rates
select start_at, events from pgque.queue_rates('orders', '1 hour', 12);

-- consumer_lags
select at, consumer, lag_seconds, pending_events from pgque.consumer_lags('orders', 'billing', '1 day');

-- history
select start_at, sent, delivered, failed, dead, lag_seconds from pgque.history('orders', 'billing', '6 hours', 72);

-- list_actions
select at, role_name, application, call, queue, args from pgque.list_actions('orders');

-- peek
select msg_id, type, payload from pgque.peek('orders', 10, 'spark');

-- list_messages
select msg_id, consumer_name, status, available_at from pgque.list_messages('orders', 'retry');
select msg_id, payload from pgque.list_messages('orders', only_type => 'order.created', matching => '"id": 1', after_id => 0);
select msg_id, status, type from pgque.list_messages('orders', null, 50, before_id => 9223372036854775807);

-- get_message
select consumer_name, status, payload, receive_count, dl_id from pgque.get_message('orders', :msg_id);

-- message_history
select at, event, consumer_name, worker, number, detail from pgque.message_history('orders', :msg_id);

-- message_status
select consumer_name, status, receive_count, worker from pgque.message_status('orders', :msg_id);

-- group: Streams and sinks (Spark)
-- For programs that keep their own offsets. An offset is the id of a tick with the queue's incarnation, because a queue that was
-- created again counts its ticks anew. For Spark itself see [python/SPARK.md](../python/SPARK.md).

-- queue_incarnation
select pgque.queue_incarnation('orders') as incarnation \gset
select pgque.next_tick('orders', :from_tick, incarnation => :'incarnation');

-- open_stream
select pgque.open_stream('orders', 'spark', 'latest');

-- tick_for
select pgque.tick_for('orders', 'latest');

-- next_tick
select pgque.next_tick('orders', :from_tick, max_events => 10000);

-- next_window
select to_tick, upto_id from pgque.next_window('orders', :from_tick, max_events => 10000);

-- split_window
select from_tick, to_tick, after_id, upto_id from pgque.split_window('orders', :from_tick, :to_tick, 4);

-- read_window
select ev_id, ev_type, ev_data from pgque.read_window('orders', :from_tick, :to_tick);

-- read_window_cursor
-- In one transaction:
select pgque.read_window_cursor('events', 'orders', :from_tick, :to_tick, columns => '{ev_id,ev_data}', ordered => false);
fetch 1000 from events;

-- stream_lag
select ticks_behind, events_behind, oldest_pending from pgque.stream_lag('orders', 'spark', :from_tick);

-- stage_dead
select pgque.stage_dead('orders', 'spark', :to_tick, array[:msg_id], array['no JSON']);

-- unstage_dead
select pgque.unstage_dead('orders', 'spark', :from_tick);

-- subscribe_archive
select pgque.subscribe_archive('sales', 'audit', archive_of => 'billing');

-- archive_of
select pgque.archive_of('sales', 'report');

-- archive_next
select pgque.archive_next('sales', 'report', pgque.open_stream('sales', 'report'), after_id => 0, max_events => 1000);

-- archive_read
select ev_id, ev_type, ev_data from pgque.archive_read('sales', 'report', pgque.open_stream('sales', 'report'), after_id => 0, upto_id => 1000);

-- archive_read_cursor
-- In one transaction:
select pgque.archive_read_cursor('archived', 'sales', 'report', pgque.open_stream('sales', 'report'), after_id => 0, upto_id => 1000);
fetch 200 from archived;

-- sink
insert into pgque.sink (queue, type, payload, headers) values ('orders', 'order.created', '{"id": 5}', '{"trace": "4bf9"}');

-- sink_bulk
insert into pgque.sink_bulk (queue, type, payload) select 'orders', 'customer', to_jsonb(c)::text from customers c;

-- sink_begin
select attempt, stage from pgque.sink_begin('nightly', 2);

-- sink_servers
select pgque.sink_servers('spread', 1, array['db1:5432/app', 'db2:5432/app']);

-- sink_commit
insert into :stage (attempt, n, queue, payload) values (:'attempt', 0, 'orders', '{"id": 5}');
select pgque.sink_commit('nightly', 1, array[:'attempt'::uuid], 1);

-- group: PgQ's names
-- The functions of PgQ and pgq_coop, for programs that were written for them, and triggers that send changes of tables. New programs
-- call the functions of the other chapters.

-- jsontriga
create trigger customers_changed after insert or update or delete on customers
  for each row execute function pgque.jsontriga('orders');
insert into customers values (2, 'Joe');

-- logutriga
create trigger customers_changed after insert or update or delete on customers
  for each row execute function pgque.logutriga('orders', 'ignore=name');

-- sqltriga
create trigger customers_changed after insert or update or delete on customers
  for each row execute function pgque.sqltriga('orders');

-- insert_event
select pgque.insert_event('orders', 'order.created', '{"id": 5}');

-- current_event_table
select pgque.current_event_table('orders');

-- register_consumer
select pgque.register_consumer('orders', 'reports');

-- register_consumer_at
select pgque.register_consumer_at('orders', 'reports', :from_tick);

-- unregister_consumer
select pgque.unregister_consumer('orders', 'audit');

-- next_batch
select pgque.next_batch('orders', 'audit');

-- next_batch_info
select batch_id, prev_tick_id, cur_tick_id from pgque.next_batch_info('orders', 'audit');

-- next_batch_custom
select batch_id from pgque.next_batch_custom('orders', 'audit', '1 second', 1000, null);

-- get_batch_info
select queue_name, consumer_name, lag from pgque.get_batch_info(:window);

-- get_batch_events
select ev_id, ev_type, ev_data from pgque.get_batch_events(:window);

-- get_batch_cursor
-- In one transaction:
select ev_id, ev_data from pgque.get_batch_cursor(:window, 'events', 2);
fetch 1000 from events;

-- event_retry
select pgque.event_retry(:window, :msg_id, 60);

-- batch_retry
select pgque.batch_retry(:window, 60);

-- finish_batch
select pgque.finish_batch(:window);

-- register_subconsumer
select pgque.register_subconsumer('orders', 'team', 'w2');

-- receive_coop
select msg_id, batch_id, payload from pgque.receive_coop('orders', 'team', 'w1', 10, dead_interval => '5 minutes');

-- touch_subconsumer
select pgque.touch_subconsumer('orders', 'team', 'w1');

-- unregister_subconsumer
select pgque.unregister_subconsumer('orders', 'team', 'w1');

-- force_tick
select pgque.force_tick('orders');

-- set_queue_config
select pgque.set_queue_config('orders', 'tick_gap', '5 ms');

-- maint_operations
select func_name, func_arg from pgque.maint_operations();

-- maint_retry_events
select pgque.maint_retry_events();

-- maint_rotate_tables_step1
select pgque.maint_rotate_tables_step1('orders');

-- maint_rotate_tables_step2
select pgque.maint_rotate_tables_step2();

-- subscription
select q.queue_name, c.co_name, s.sub_role, s.sub_last_tick from pgque.subscription s
join pgque.queue q on q.queue_id = s.sub_queue join pgque.consumer c on c.co_id = s.sub_consumer;
