-- ---------------------------------------------------------------------------
-- comments: what each public name is for
-- ---------------------------------------------------------------------------

-- sql/REFERENCE.md is generated from these; it adds arguments, result and role.

-- produce
comment on function pgque.send(text, text) is
  'Appends one message of type default and returns its id. The payload is kept byte for byte. It is delivered to every consumer '
  'of the queue after this transaction commits and a tick follows. PQ001 no such queue, PQ013 the queue is paused.';
comment on function pgque.send(text, jsonb) is
  'Same as send(queue_name, payload text) for JSON, which is stored in its canonical form.';
comment on function pgque.send(text, text, text, text) is
  'Same as send(queue_name, type_name, payload), with a partition key that consumers find in extra1.';
comment on function pgque.send(text, text, jsonb, text) is
  'The same for JSON. PQ005 the key begins with { and may be meant as headers: name it headers or partition_key.';
comment on function pgque.send_batch(text, text[]) is
  'Same as send_batch(queue_name, type_name, payloads) with type default.';
comment on function pgque.send_batch(text, jsonb[]) is
  'Same as send_batch(queue_name, type_name, payloads) for JSON with type default.';
comment on function pgque.send_idem(text, text, text, text, interval, text, pgque.caller) is
  'Sends unless a message with the same idem_key was sent to the queue within its ttl: then event_id is that message''s id and '
  'deduped is true. Two senders of one key wait for each other. partition_key goes to extra1. '
  'PQ001 no such queue, PQ005 no key, or a ttl that is not positive or above 100 years, PQ013 the queue is paused.';
comment on function pgque.send_idem(text, text, jsonb, text, interval, text) is
  'Same as send_idem with a text payload, for JSON.';
comment on function pgque.insert_event(text, text, text, text, text, text, text) is
  'PgQ''s name for send, with the four extra texts of an event. Returns the event''s id. '
  'PQ001 no such queue, PQ013 the queue is paused.';
comment on function pgque.insert_event(text, text, text) is
  'Same as insert_event with seven arguments; the extra texts are NULL.';
comment on function pgque.current_event_table(text) is
  'The table that the queue''s events go to now, schema-qualified, for the owner''s COPY; its column defaults make a row of ev_type and '
  'ev_data a complete event; an ev_id of an earlier transaction may be ticked a minute late. Ask again in each transaction: the answer changes with rotation. PQ001 no such queue.';
comment on function pgque.jsontriga() is
  'Row or TRUNCATE trigger that sends each change of its table as JSON: create trigger ... execute function '
  'pgque.jsontriga(''queue'', options...). Options: backup (the old row to ev_extra2), ignore=columns, pkey=columns, deny, skip. ev_type is '
  'I:, U: or D: and the key columns, or R for TRUNCATE; ev_extra1 is the table. '
  'PQ001 no such queue, PQ005 no queue, an unknown option or a key that is no column, PQ013 the queue is paused or the change is denied.';
comment on function pgque.logutriga() is
  'Same as jsontriga(), with the row as URL-encoded pairs.';
comment on function pgque.sqltriga() is
  'Same as jsontriga(), with the change as the part of an SQL statement that follows the table''s name; ev_type is I, U, D or R.';

comment on view pgque.sink is
  'An INSERT or COPY into it sends: one message a row, with all that send() offers. Columns: queue, type (NULL: default), payload or '
  'payload_bytes, headers (text of a JSON object), partition_key. With sink_id, epoch and part, what another transaction has written of that '
  'part of the epoch is left out, and parts, if given, must be the same each time. Errors as of send(); PQ005 epoch, part or parts without sink_id, '
  'PQ016 see sink_commit(), 23514 under session_replication_role = replica, where the view could do nothing.';
comment on view pgque.sink_bulk is
  'The same for plain messages, by a rewrite rule and so about twice as fast: queue, type, payload, headers.';
comment on function pgque.sink_begin(text, bigint) is
  'Begins an attempt to write a share of an epoch. COPY the messages into the table named by stage, with this attempt and n = 0, 1, 2, ... in the order '
  'they are to have; nothing is sent before sink_commit(). epoch NULL: a write that is never replayed. '
  'PQ005 no valid sink_id or epoch, PQ016 the epoch is older than the sink''s newest.';
comment on function pgque.sink_commit(text, bigint, uuid[], bigint) is
  'Sends what these attempts staged, in one transaction and so in one tick, and returns applied; duplicate, sending nothing, if this epoch of the sink was '
  'committed before. row_count is how many messages that must be. Attempts that are not named are dead then; staged rows live for a day, '
  'also through a crash of the server. PQ001 no such queue, PQ003 a queue is full, PQ013 a queue is paused, PQ016 rows are missing or the epoch is older than the sink''s newest, '
  '25000 not READ COMMITTED.';

-- consume
comment on function pgque.subscribe(text, text, text, boolean, pgque.caller) is
  'Makes a consumer of the queue and returns 1; 0 if it was one already, whose position stays. start_at is latest (what comes after the '
  'newest tick), earliest (all that is still there), the id of a tick, or a timestamp. '
  'PQ001 no such queue, PQ004 the consumer''s name has not 1 to 1000 bytes, PQ005 no such place to start at.';
comment on function pgque.register_consumer(text, text) is
  'PgQ''s name for subscribe(queue_name, consumer_name).';
comment on function pgque.register_consumer_at(text, text, bigint, pgque.caller) is
  'Subscribes a consumer at a tick and returns 1, or moves one that is subscribed to that tick and returns 0: its open batch is dropped. '
  'A tick_id of NULL is the newest tick and moves nobody. PQ001 no such queue, PQ005 the tick is not there any more.';
comment on function pgque.unsubscribe(text, text, pgque.caller) is
  'Removes a consumer from the queue with its workers and its waiting retries; its dead letters stay. Returns how many subscribers '
  'went, 0 if it was none. PQ001 no such queue.';
comment on function pgque.unregister_consumer(text, text) is
  'PgQ''s name for unsubscribe.';
comment on function pgque.receive(text, text, int, text, interval, bigint, pgque.caller) is
  'Hands out the consumer''s next messages, at most max_return, as one batch, in the order of their ids (to a worker first those that come again, then new ones); no rows if there are none. Until '
  'ack(batch_id) the same batch comes again, with its id, whole, less what was nacked. With worker, any name, messages are leased to it for visibility_timeout '
  '(null: the queue''s, 30 seconds): every call of every worker gets others, and what was not settled in time comes again to whoever asks, with receive_count + 1, '
  'the older deliveries'' batch ids being dead from then on. ack_batch is finished first, in the same transaction. '
  'Call it in a transaction of its own, or with the work and the ack in one for exactly-once; with worker in READ COMMITTED (25000). PQ001 no such queue, PQ004 no valid worker name, PQ005 max_return is below 1, '
  'visibility_timeout is not positive, or above 100 years, or the consumer has workers and none is named, PQ006 the consumer has received a batch on its own and a worker is named, PQ011 no such consumer.';
comment on function pgque.ack(bigint) is
  'Finishes a batch: exactly the messages that were handed out with it, all of them or none. Returns 1; or 0 if it was finished before, or, '
  'with workers, as soon as one message of it was taken over by another worker or taken out: ack(batch_id, msg_ids) finishes the others then.';
comment on function pgque.finish_batch(bigint) is
  'PgQ''s name for ack.';
comment on function pgque.nack(bigint, pgque.delivery, interval, text, pgque.caller) is
  'Fails one message of an open batch: it is delivered to this consumer again after retry_after, or becomes a dead letter once the queue''s max_retries are used '
  'up. The rest of the batch is as before; ack it when done. Of msg only msg_id counts. Returns 1, also when repeated. '
  'Of a worker''s batch that lapsed, it waits for a transaction that may be taking the message over. '
  'PQ005 retry_after is negative, PQ007 the message is not in this batch, PQ012 the batch is not open.';
comment on function pgque.nack(bigint, pgque.message, interval, text, pgque.caller) is
  'Same as nack(batch_id, msg pgque.delivery, ...), for clients that write the ten columns of pgque.message.';
comment on function pgque.nack(bigint, bigint[], interval, text, pgque.caller) is
  'Fails many messages of an open batch at once, by id. One row a message: msg_id, ok, and if not ok the reason, as of ack(). '
  'PQ005 retry_after is negative or above 100 years.';
comment on function pgque.next_batch(text, text) is
  'Opens the next window between two ticks as a batch, and returns its id; an open batch comes again. NULL if there is no further tick. Read it with '
  'get_batch_events and close it with finish_batch. It may be empty. PQ001 no such queue, PQ005 the consumer has workers, PQ011 not subscribed.';
comment on function pgque.next_batch_info(text, text) is
  'Same as next_batch, with the ids, times and event sequences of the two ticks.';
comment on function pgque.next_batch_custom(text, text, interval, int, interval) is
  'Same as next_batch_info, for a bigger window: it ends at a tick at least min_lag old and takes in at least min_count events or min_interval of time; NULL '
  'is no condition.';
comment on function pgque.get_batch_events(bigint, pgque.caller) is
  'The events of an open batch in the order of their ids, as stored. PQ012 the batch is not open.';
comment on function pgque.get_batch_info(bigint, pgque.caller) is
  'What an open batch spans: queue, consumer, times and ids of its two ticks, their event sequences, and its lag, the age of its end. PQ012 the batch is not open.';
comment on function pgque.get_batch_cursor(bigint, text, int, text) is
  'Opens a cursor over an open batch and returns its first quick_limit events; fetch the rest from cursor_name in the same transaction. extra_where is an SQL condition '
  'on the event columns: never build it from input of strangers. PQ012 the batch is not open.';
comment on function pgque.get_batch_cursor(bigint, text, int) is
  'Same as get_batch_cursor without extra_where.';
comment on function pgque.event_retry(bigint, bigint, timestamptz, pgque.caller) is
  'Delivers one event of an open batch to this consumer again at retry_time (NULL: as nack() does), however often it failed before. Returns 1, or 0 if it was failed already. '
  'PQ005 more than 100 years from now, PQ007 the event is not in this batch, PQ012 the batch is not open.';
comment on function pgque.event_retry(bigint, bigint, int) is
  'Same as event_retry with a time, in so many seconds from now.';
comment on function pgque.batch_retry(bigint, int, pgque.caller) is
  'Delivers every event of an open batch that was not failed already again, in retry_seconds from now (NULL: as nack() does), and returns their number. Finish the batch '
  'afterwards. PQ005 the number is negative, PQ012 the batch is not open.';

-- workers
comment on function pgque.receive_coop(text, text, text, int, interval, pgque.caller) is
  'receive() for one of several workers (subconsumers) that share a consumer; each gets messages of its own. Registers the worker on first use. With dead_interval, the batch of a worker '
  'that was silent for longer is taken over first, under a new batch id. '
  'PQ001 no such queue, PQ004 invalid name, PQ005 max_return is below 1, PQ006 the consumer reads on its own.';
comment on function pgque.register_subconsumer(text, text, text, boolean, pgque.caller) is
  'Makes a worker of a consumer, and the consumer if it is new. Returns 1, or 0 if it was registered already. A consumer that reads on its own is turned into one with workers only if '
  'convert_normal is true; the worker then gets its open batch, under a new id, less what was settled. '
  'PQ001 no such queue, PQ004 the name has not 1 to 1000 bytes, PQ006 the consumer reads on its own.';
comment on function pgque.subscribe_subconsumer(text, text, text, boolean) is
  'Same as register_subconsumer.';
comment on function pgque.unregister_subconsumer(text, text, text, int, pgque.caller) is
  'Removes a worker and returns 1; 0 if there is none. If it holds a batch: with batch_handling 0 that is an error, with 1 its messages go through retry and dead letters. '
  'PQ001 no such queue, PQ006 it holds a batch, PQ011 not subscribed.';
comment on function pgque.unsubscribe_subconsumer(text, text, text, int) is
  'Same as unregister_subconsumer.';
comment on function pgque.next_batch(text, text, text, interval) is
  'next_batch() for one of several workers (subconsumers) that share a consumer: each gets windows of its own. Registers the worker on first use. With '
  'dead_interval, the batch of a worker that was silent for longer is taken over before a new one is opened, under a new batch id. '
  'PQ001 no such queue, PQ004 invalid name, PQ006 the consumer reads on its own.';
comment on function pgque.next_batch_custom(text, text, text, interval, int, interval, interval, pgque.caller) is
  'Same as next_batch with a subconsumer, for a bigger window: see next_batch_custom without one. Returns the id of the batch only.';
comment on function pgque.touch_subconsumer(text, text, text, pgque.caller) is
  'Says that a worker is alive: dead_interval counts from now. Returns 1. PQ001 no such queue, PQ011 no such worker.';

-- dead letters
comment on function pgque.dlq_inspect(text, int, pgque.caller) is
  'The newest dead letters of a queue, at most limit_count, with consumer and reason. PQ001 no such queue.';
comment on function pgque.dlq_replay(bigint, pgque.caller) is
  'Sends a dead letter as a new event to every consumer of its queue and returns the new id; the dead letter is gone. '
  'PQ008 no such dead letter, PQ013 the queue is paused.';
comment on function pgque.dlq_replay_all(text, pgque.caller) is
  'Replays all dead letters of a queue. Returns how many were sent, how many could not be and stay, and the first error. PQ001 no such queue.';
comment on function pgque.dlq_requeue(bigint, pgque.caller) is
  'Gives a dead letter back to the consumer that failed it, with its id and with retries counted anew; it is delivered at the next tick. Its age stays: beyond retention_period it is delivered, '
  'but a dead letter again with its first failure. Returns the message''s id. '
  'PQ008 no such dead letter, PQ011 that consumer was unsubscribed.';
comment on function pgque.dlq_requeue_all(text, int, pgque.caller) is
  'Requeues the oldest dead letters of a queue, at most limit_count (NULL: all), and returns their number. Those of unsubscribed consumers stay. PQ001 no such queue.';
comment on function pgque.dlq_purge(text, interval, pgque.caller) is
  'Deletes the dead letters of a queue that died longer ago than older_than, but not held ones (drop_policy hold), and returns their number. PQ001 no such queue, PQ005 older_than is NULL.';

-- queues
comment on function pgque.create_queue(text, jsonb) is
  'Creates a queue and returns 1; 0 if the name is taken, whose settings stay. A name has 1 to 57 bytes of any characters. config is an object of the '
  'parameters of set_queue_config, or null for none. PQ004 invalid name, PQ005 unknown parameter or invalid value.';
comment on function pgque.grant_queue(text, text, text) is
  'Gives a role a right to one queue: produce (send), consume (subscribe, receive, settle, read), or admin (both, and its '
  'settings, ticks, dead letters, archive, purge and drop, but not its name and max_consumers). The role becomes a member of pgque_user; it needs none of the other roles, which are for all queues. 1, or 0 if it has the right. '
  'PQ001 no such queue, PQ005 no such right, 42704 no such role.';
comment on function pgque.revoke_queue(text, text, text) is
  'Takes a right back that grant_queue gave, by default all of the role''s rights to the queue, and returns their number. '
  'The role stays a member of pgque_user, which is no right to any queue. '
  'PQ001 no such queue, PQ005 no such right, 42704 no such role.';
comment on function pgque.alter_queue(text, jsonb, pgque.caller) is
  'Sets several parameters of a queue, all or none, and returns their number: {"max_retries": 3, "rotation_period": "1 hour"}; null restores a default. '
  'PQ001 no such queue, PQ005 not an object, unknown parameter or invalid value.';
comment on function pgque.set_queue_config(text, text, text) is
  'Sets one parameter of a queue; NULL restores its default. Parameters: max_retries (5), retry_backoff (none: a minute), max_receive_attempts (5), '
  'visibility_timeout (30 seconds), drop_policy (dead_letter; drop, hold), dead_letter_queue (none), archive_on_ack (false), message_ttl (0: none), max_depth (0: none), '
  'max_consumers (1000; 0: no limit; for roles without a right to all queues), '
  'throughput_limit (0: none; messages a second), retention_period (7 days; 0 is the default), rotation_period (2 hours), tick_gap (20 milliseconds), tick_storage (67108864 bytes), ticker_max_count (500 events), '
  'ticker_max_lag (0 seconds), ticker_idle_period (1 minute), ticker_paused (false), external_ticker (false), health_pending_warn (5 minutes), health_pending_fail (1 hour), health_tick_warn (5 seconds), health_tick_fail (1 minute), '
  'health_depth_warn (80 percent). Periods are intervals. '
  'PQ001 no such queue, PQ005 unknown parameter or invalid value.';
comment on function pgque.queue_config(text, pgque.caller) is
  'The parameters of a queue with the values in force; dead_letter_queue is null for a role that has no right to that queue. PQ001 no such queue.';
comment on function pgque.pause(text, pgque.caller) is
  'Closes a queue for senders, who get PQ013; consumers drain what is there. PQ001 no such queue.';
comment on function pgque.resume(text, pgque.caller) is
  'Opens a paused queue again. PQ001 no such queue.';
comment on function pgque.drop_queue(text, boolean, pgque.caller) is
  'Drops a queue with its events, retries and dead letters, and returns 1. It needs force while it has consumers, delayed messages, retries or dead letters, '
  'or takes those of another queue; messages in the log that no consumer is to get do not count. '
  'Waits for open transactions that sent to it. Its empty tables go with the next maintenance. PQ001 no such queue, PQ006 it is needed.';

-- run
comment on function pgque.ticker() is
  'Ticks every queue in which something committed since its last tick, and returns the number of ticks. A queue that is broken gives a warning and holds up no other. '
  '25000 in a REPEATABLE READ or SERIALIZABLE transaction.';
comment on function pgque.ticker(text, pgque.caller) is
  'Ticks one queue if there is a reason, and returns the tick''s id; else NULL. What was sent in the same transaction is not in it: send, commit, tick. '
  'A queue that was loaded from a dump is made usable, also one that is paused or has an external ticker. '
  'PQ001 no such queue, PQ005 it has an external ticker, 25000 in a REPEATABLE READ or SERIALIZABLE transaction.';
comment on function pgque.ticker(text, bigint, timestamptz, bigint, pgque.caller) is
  'Stores a tick whose id, time and event sequence another system decided, for a queue with external_ticker. Returns the id. '
  'PQ001 no such queue, PQ005 no external ticker or a tick that does not follow the last, 25000 in a REPEATABLE READ or SERIALIZABLE transaction.';
comment on function pgque.force_next_tick(text, pgque.caller) is
  'Makes the next ticker() tick the queue whether or not anything happened. Returns the id of its newest tick. PQ001 no such queue.';
comment on function pgque.force_tick(text) is
  'Same as force_next_tick.';
comment on procedure pgque.ticker_loop(interval) is
  'The ticker: ticks, moves due retries and maintains, for 55 seconds or run_for, and commits after each step. A queue ticks as soon as its tick_gap has passed since its last tick. Call it again and again outside a transaction; pg_cron (start()) and the '
  'command pgque ticker do. A second loop waits for the first.';
comment on function pgque.set_tick_period_ms(int) is
  'Sets the longest gap that the loop leaves between two ticks of a queue with messages, 1 to 60000 milliseconds (100); the running loop follows at once. Returns it. PQ005 out of range.';
comment on function pgque.set_tick_share(int) is
  'Sets how much of one core the loop may use for looks and ticks, 1 to 100 percent (15); above it, gaps between ticks grow. The running loop follows at once. Returns it. PQ005 out of range.';
comment on function pgque.start() is
  'Has pg_cron run the loop in this database, once however often it is called. Returns the job''s id. PQ014 pg_cron is not in this database or works for another one, its schema is closed to the owner, or it has jobs of these names for another database.';
comment on function pgque.stop() is
  'Ends the running loop, whoever runs it, and removes the pg_cron jobs of this database, and of databases that are gone.';
comment on function pgque.maint() is
  'Does all maintenance now: due retries, retention, rotation, compaction. For a scheduler that does not run the loop; two at once do no harm. Returns how much there was to do. '
  '25000 in a REPEATABLE READ or SERIALIZABLE transaction.';
comment on function pgque.maint_operations() is
  'What maint() does, one call a row, for a scheduler that commits after each.';
comment on function pgque.maint_retry_events() is
  'Puts messages whose retry is due back into their queues, for their consumers alone, at most 10,000 of each queue. Returns their number; a ticker delivers them.';
comment on function pgque.maint_retain(text) is
  'Moves consumers that lag beyond the queue''s retention_period forward, past messages they never saw, and returns how many; get_consumer_info counts what they skipped. PQ001 no such queue.';
comment on function pgque.maint_rotate_tables_step1(text) is
  'Empties the queue''s oldest table and makes it the current one, if rotation_period has passed and every consumer is done with it. Returns 1, or 0 if there was nothing to do, '
  'a consumer is behind, or the table is locked. PQ001 no such queue, 25000 in a REPEATABLE READ or SERIALIZABLE transaction.';
comment on function pgque.maint_rotate_tables_step2() is
  'PgQ''s second half of a rotation: nothing to do here. Returns 0.';
comment on function pgque.maint_tables() is
  'Maintains the tables that all queues share. Returns how much there was to do.';
comment on function pgque.uninstall() is
  'Removes schema pgque with all queues and messages, and the pg_cron jobs; the roles stay. Only the owner of the schema: 42501. '
  '2BP01 while tables outside the schema have columns of its types, which would go too.';

-- observe
comment on function pgque.version() is
  'The version of pgque in this database.';
comment on function pgque.clock() is
  'The time as pgque sees it. Tests replace it to move time.';
comment on function pgque.get_queue_info(text, pgque.caller) is
  'All queues, or one: settings, ticker_lag (age of the last tick), ev_per_sec over the last minute, ev_new (events since the last tick), last tick; NULL where somebody keeps a table of the queue locked. PQ001 no such queue.';
comment on function pgque.get_consumer_info(text, text, pgque.caller) is
  'All consumers and workers, or those of a queue, or one: lag (how long the oldest pending message has been pending; 0 if none is), last_seen, ticks, open batch, '
  'pending_events (with workers also what may be handed out again), and skipped_events lost to retention. Lag and pending_events are NULL where somebody keeps a table of the queue locked. '
  'A worker is named consumer.worker. PQ001 no such queue, PQ011 not subscribed.';
comment on function pgque.tick_for(text, text, pgque.caller) is
  'The id of a tick: earliest, latest, an id, or a timestamp (the last tick before it). PQ001 no such queue, PQ005 no such place, PQ015 the tick is gone.';
comment on function pgque.next_tick(text, bigint, bigint, int, bigint, pgque.caller) is
  'The end of the next piece of work behind after_tick: whole ticks, as many as hold max_events events and at most max_ticks, but at least one, and none beyond '
  'upto; NULL if there is no further tick. One tick can hold more than max_events. PQ001 no such queue, PQ005 a limit below 1, PQ015 the tick is gone.';
comment on function pgque.split_window(text, bigint, bigint, int, pgque.caller) is
  'Cuts the window between two ticks into at most parts pieces with about as many events: runs of ticks, and a heavy tick into residues of the ids. Each row is '
  'arguments of read_window(). PQ001 no such queue, PQ005 no such window, PQ015 a tick is gone.';
comment on function pgque.read_window(text, bigint, bigint, text, text[], int, int, pgque.caller) is
  'The events between two ticks in the order of their ids; with a consumer_name its retries too, with types only those types, with parts only ids whose remainder is part. '
  'No side effects; the same rows for ever while a consumer stands at from_tick or before. '
  'PQ001 no such queue, PQ005 no such window, PQ011 not subscribed, PQ015 a tick is gone.';
comment on function pgque.read_window_cursor(text, text, bigint, bigint, text, text[], int, int, pgque.caller) is
  'Opens a cursor named cursor_name over the rows of read_window(), to be read with FETCH in the same transaction.';
comment on function pgque.seek(text, text, bigint, boolean, pgque.caller) is
  'Moves a consumer forward to a tick, with force back too, and returns the tick where it stands: one it has passed changes nothing. An open batch is dropped. '
  'PQ001 no such queue, PQ005 the consumer has workers, PQ011 not subscribed, PQ015 the tick is gone.';
comment on function pgque.open_stream(text, text, text, pgque.caller) is
  'For a reader that keeps its own offsets: subscribes the consumer at start_at if it is new, holds it for this session until the session ends, and returns the tick '
  'where it stands. PQ001 no such queue, PQ005 no such place or the consumer has workers, PQ006 another session holds it.';
comment on function pgque.dead(text, text, bigint[], text[], pgque.caller) is
  'Puts messages behind the consumer''s position among its dead letters, each with its reason; one row each: ok, or why not. A message that is dead already stays as it is, '
  'so a repetition is harmless. PQ001 no such queue, PQ005 not as many reasons as msg_ids, PQ011 not subscribed.';
comment on function pgque.peek(text, int, text, pgque.caller) is
  'The next n messages that the slowest consumer, or the one named, has not finished, whether a tick covers them or not, and of what comes again that which is due. Changes nothing; batch_id is NULL. '
  'PQ001 no such queue, PQ005 n is below 1, PQ011 not subscribed.';
comment on function pgque.metrics() is
  'One figure a row for a monitoring system: name, queue, consumer, value. Of a queue with more than 100 consumers (pgque_queue_consumers) it names the 100 that are furthest back, and sums the others. It does not wait for the tables of a queue that somebody keeps locked: their figures are left out.';
comment on function pgque.health() is
  'One check a row: ok, warn or fail, what was found, and what to do about it. The settings health_* of a queue say when it warns and fails. Of a queue whose tables somebody keeps locked it says who.';
comment on function pgque.status() is
  'What is installed, scheduled and running: version, scheduler, ticker, queues.';

-- types
comment on domain pgque.caller is
  'The role that calls a function: the default of each last argument of this type, and the only value it can have. Leave the argument out. Only the owner of pgque may make a column, a function or a type of it, and never should.';
comment on type pgque.message is 'The first ten columns of pgque.delivery, as existing clients write them for nack().';
comment on type pgque.look is 'What the loop knows of a queue since it looked at it. Internal.';
comment on type pgque.delivery is 'A message as receive() hands it to a consumer.';
comment on column pgque.delivery.msg_id is 'Id of the message in its queue. It keeps it through retries and dead letters.';
comment on column pgque.delivery.batch_id is 'The batch it was handed out with; what ack() and nack() take.';
comment on column pgque.delivery.type is 'What the sender called it; default if nothing.';
comment on column pgque.delivery.payload is 'The text or JSON that was sent.';
comment on column pgque.delivery.retry_count is 'How often it was failed before: 0 at first.';
comment on column pgque.delivery.created_at is 'When it was sent.';
comment on column pgque.delivery.extra1 is 'Free text of the sender: the partition key, or a trigger''s table.';
comment on column pgque.delivery.extra2 is 'Free text of the sender.';
comment on column pgque.delivery.extra3 is 'Free text of the sender.';
comment on column pgque.delivery.extra4 is 'Free text of the sender.';
comment on column pgque.delivery.headers is 'Metadata of the sender.';
comment on column pgque.delivery.key is 'Key of a keyed message.';
comment on column pgque.delivery.payload_bytes is 'The payload, if it was sent as bytes; payload is NULL then.';
comment on column pgque.delivery.receive_count is 'Number of this delivery: 1 at first.';
comment on column pgque.delivery.last_error is 'The reason given when it was failed last.';
comment on column pgque.delivery.expires_at is 'When it is worth nothing any more; NULL: never.';
comment on column pgque.delivery.queue is 'Name of its queue.';
comment on type pgque.outcome is 'What became of one message of a call that settles several.';
comment on column pgque.outcome.msg_id is 'Id of the message.';
comment on column pgque.outcome.ok is 'Whether this call settled it.';
comment on column pgque.outcome.reason is 'Why not, if not: not in this batch, settled already, batch not open, lost to another worker; of dead() by queue: not found behind the position, dead already.';

-- tables that people query; change them through functions only
comment on table pgque.config is 'Settings of the loop: one row, or none while all are default.';
comment on column pgque.config.config_id is 'Always 1.';
comment on column pgque.config.tick_period_ms is 'The longest gap between two ticks of a queue with messages, in milliseconds; see set_tick_period_ms().';
comment on column pgque.config.tick_share is 'How much of one core the loop may use for looks and ticks, in percent; see set_tick_share().';
comment on column pgque.config.stopped_at is 'When stop() was called last; loops that began before end.';
comment on table pgque.queue is 'The queues with their settings; see set_queue_config().';
comment on column pgque.queue.queue_id is 'Number of the queue, as in the names of its tables.';
comment on column pgque.queue.queue_name is 'Name of the queue, 1 to 57 bytes.';
comment on column pgque.queue.queue_ntables is 'Number of tables that its events rotate through: 3.';
comment on column pgque.queue.queue_cur_table is 'Number of the table that events go to now: 0 to 2.';
comment on column pgque.queue.queue_rotation_period is 'Least time between two rotations.';
comment on column pgque.queue.queue_switch_time is 'Time of the last rotation.';
comment on column pgque.queue.queue_external_ticker is 'Whether another system decides the ticks.';
comment on column pgque.queue.queue_ticker_paused is 'Whether the ticker leaves it alone.';
comment on column pgque.queue.queue_tick_gap is 'Least time that the loop leaves between two ticks; a queue with many consumers takes 4 ms for each, at most the tick period.';
comment on column pgque.queue.queue_tick_storage is 'Bytes of ticks; a third of it in the current table brings the next rotation early.';
comment on column pgque.queue.queue_ticker_max_count is 'So many events bring a tick before ticker_max_lag has passed.';
comment on column pgque.queue.queue_ticker_max_lag is 'Least time between two ticks while fewer events come; 0: no wait.';
comment on column pgque.queue.queue_ticker_idle_period is 'Time between two ticks while nothing happens.';
comment on column pgque.queue.queue_max_retries is 'How often a failed message is delivered again before it becomes a dead letter.';
comment on column pgque.queue.queue_retention_period is 'A consumer that lags for longer is moved forward.';
comment on column pgque.queue.queue_paused is 'Whether senders are refused; see pause().';
comment on column pgque.queue.queue_event_seq is 'Sequence of its message ids.';
comment on column pgque.queue.queue_tick_seq is 'Sequence through which force_next_tick() asks for a tick.';
comment on column pgque.queue.queue_uid is 'Identity of the queue that no other one ever has, in any database.';
comment on column pgque.queue.queue_created_at is 'When it was created.';
comment on column pgque.queue.queue_xid is 'Mark of the transaction that wrote this row last.';
comment on column pgque.queue.queue_restored is 'Whether it was loaded from a dump and not used since; its first use repairs it.';
comment on column pgque.queue.queue_open is 'Whether it takes events as it is.';
comment on table pgque.queue_right is 'Rights of roles to single queues; see grant_queue().';
comment on column pgque.queue_right.right_queue is 'The queue.';
comment on column pgque.queue_right.right_role is 'The role.';
comment on column pgque.queue_right.right_name is 'produce, consume or admin.';
comment on table pgque.consumer is 'Names of consumers.';
comment on column pgque.consumer.co_id is 'Number of the consumer.';
comment on column pgque.consumer.co_name is 'Name of the consumer.';
comment on view pgque.subscription is 'Who reads what, and how far: consumers of queues, and their workers.';
comment on column pgque.subscription.sub_id is 'Number of the subscription.';
comment on column pgque.subscription.sub_queue is 'The queue: queue.queue_id.';
comment on column pgque.subscription.sub_consumer is 'The consumer: consumer.co_id.';
comment on column pgque.subscription.sub_last_tick is 'The tick up to which it is done; NULL for a worker without a batch.';
comment on column pgque.subscription.sub_active is 'When it last received, finished or was touched.';
comment on column pgque.subscription.sub_batch is 'Its open batch, or NULL.';
comment on column pgque.subscription.sub_next_tick is 'The end of the window that it reads, or NULL.';
comment on column pgque.subscription.sub_role is 'normal, pool (with workers that lease messages), coop_main (with subconsumers) or coop_member (a subconsumer).';
comment on column pgque.subscription.sub_main is 'For a subconsumer, the sub_id of its consumer.';
comment on column pgque.subscription.sub_worker is 'For a subconsumer, its name.';
comment on table pgque.tick is 'The ticks of all queues: snapshots between which batches lie.';
comment on column pgque.tick.slot is 'Partition: queue_id * 3 + table number.';
comment on column pgque.tick.tick_queue is 'The queue: queue.queue_id.';
comment on column pgque.tick.tick_id is 'Number of the tick in its queue.';
comment on column pgque.tick.tick_time is 'When it was made.';
comment on column pgque.tick.tick_snapshot is 'Which transactions had finished by then.';
comment on column pgque.tick.tick_event_seq is 'Value of the event sequence by then.';
comment on table pgque.retry_queue is 'Messages that wait: failed ones for their consumer, also while a worker holds them, and delayed ones for everybody.';
comment on column pgque.retry_queue.ev_retry_after is 'When it is due.';
comment on column pgque.retry_queue.ev_queue is 'The queue: queue.queue_id.';
comment on column pgque.retry_queue.ev_id is 'Id of the message.';
comment on column pgque.retry_queue.ev_time is 'When it was sent.';
comment on column pgque.retry_queue.ev_txid is 'Transaction that stored it in the queue.';
comment on column pgque.retry_queue.ev_owner is 'Who gets it: subscription.sub_id, or 0 for everybody (a delayed message).';
comment on column pgque.retry_queue.ev_retry is 'How often it failed; NULL: never.';
comment on column pgque.retry_queue.ev_type is 'Type of the message.';
comment on column pgque.retry_queue.ev_data is 'Its payload.';
comment on column pgque.retry_queue.ev_extra1 is 'Free text of the sender: the partition key, or a trigger''s table.';
comment on column pgque.retry_queue.ev_extra2 is 'Free text of the sender.';
comment on column pgque.retry_queue.ev_extra3 is 'Free text of the sender.';
comment on column pgque.retry_queue.ev_extra4 is 'Free text of the sender.';
comment on column pgque.retry_queue.ev_headers is 'Metadata of the sender.';
comment on column pgque.retry_queue.ev_key is 'Key of a keyed message.';
comment on column pgque.retry_queue.ev_bytes is 'Its payload, if it was sent as bytes.';
comment on column pgque.retry_queue.ev_expires is 'When it is worth nothing any more; NULL: never.';
comment on column pgque.retry_queue.ev_error is 'The reason given when it failed last.';
comment on table pgque.dead_letter is 'Messages whose retries are used up, once for each consumer; see dlq_inspect().';
comment on column pgque.dead_letter.dl_id is 'Number of the dead letter; what dlq_requeue() and dlq_replay() take.';
comment on column pgque.dead_letter.dl_queue_id is 'The queue: queue.queue_id.';
comment on column pgque.dead_letter.dl_consumer_id is 'The consumer that failed it: consumer.co_id.';
comment on column pgque.dead_letter.dl_time is 'When it became a dead letter.';
comment on column pgque.dead_letter.dl_reason is 'Why: the reason of the last nack().';
comment on column pgque.dead_letter.ev_id is 'Id of the message.';
comment on column pgque.dead_letter.ev_time is 'When it was sent.';
comment on column pgque.dead_letter.ev_txid is 'Transaction that stored it in the queue.';
comment on column pgque.dead_letter.ev_retry is 'How often it failed; NULL: never.';
comment on column pgque.dead_letter.ev_type is 'Type of the message.';
comment on column pgque.dead_letter.ev_data is 'Its payload.';
comment on column pgque.dead_letter.ev_extra1 is 'Free text of the sender: the partition key, or a trigger''s table.';
comment on column pgque.dead_letter.ev_extra2 is 'Free text of the sender.';
comment on column pgque.dead_letter.ev_extra3 is 'Free text of the sender.';
comment on column pgque.dead_letter.ev_extra4 is 'Free text of the sender.';
comment on column pgque.dead_letter.ev_headers is 'Metadata of the sender.';
comment on column pgque.dead_letter.ev_key is 'Key of a keyed message.';
comment on column pgque.dead_letter.ev_bytes is 'Its payload, if it was sent as bytes.';
comment on column pgque.dead_letter.ev_expires is 'When it is worth nothing any more; NULL: never.';
comment on column pgque.dead_letter.ev_error is 'The reason given when it failed last.';

-- internal tables
comment on table pgque.event is 'The events of all queues: append only, a partition for each of a queue''s three tables. Internal: read it through receive() or peek().';
comment on table pgque.dropped_queue is 'Dropped queues whose tables still have to go. Internal.';
comment on table pgque.subscriber is 'Identity of consumers and workers, locked to serialise their calls. Internal: see the view subscription.';
comment on table pgque.journal is 'Which leaf of the positions is written. Internal.';
comment on table pgque.position_0 is 'Journal of positions, first leaf; the newest row of a subscriber counts. Internal: see get_consumer_info().';
comment on table pgque.position_1 is 'Journal of positions, second leaf. Internal.';
comment on table pgque.settled_0 is 'Messages of open batches that were failed already, first leaf. Internal.';
comment on table pgque.settled_1 is 'Messages of open batches that were failed already, second leaf. Internal.';
comment on table pgque.window_map is 'Where the rows of big windows lie: a cache. Internal.';
comment on table pgque.sink_attempt_0 is 'Attempts of sinks to write an epoch, first leaf. Internal: see sink_begin().';
comment on table pgque.sink_attempt_1 is 'Attempts of sinks to write an epoch, second leaf. Internal.';
comment on table pgque.sink_stage_0 is 'What was staged for an epoch, first leaf: writers COPY into it and can not read it.';
comment on table pgque.sink_stage_1 is 'What was staged for an epoch, second leaf.';
comment on table pgque.sink_epoch_0 is 'The newest epoch of each sink, whole (part -1) or in parts, first leaf. Internal.';
comment on table pgque.sink_epoch_1 is 'The newest epoch of each sink, whole (part -1) or in parts, second leaf. Internal.';
comment on function pgque.send(text, text, text, jsonb, text, interval, timestamptz, interval, text) is
  'Sends a message with options and returns its id. headers: a JSON object that travels with it. key: while a message with that key is pending '
  '(given to nobody yet) this one replaces its body and headers, and the same id comes back. delay (from now) or deliver_at: not delivered before. '
  'ttl: not delivered after, both at most 100 years; 0 is never, null the queue''s message_ttl. partition_key: kept in extra1, and the key for a consumer with keyed_order. '
  'PQ001 no such queue, PQ003 queue full, PQ005 bad option, PQ013 queue paused; 40001 when a transaction that is not READ COMMITTED missed a change to the key.';
comment on function pgque.send(text, text, jsonb, jsonb, text, interval, timestamptz, interval, text) is
  'The same for jsonb, stored in its canonical form.';
comment on function pgque.send(text, text, bytea, jsonb, text, interval, timestamptz, interval, text) is
  'The same for bytes: received in payload_bytes, payload is null.';
comment on function pgque.send_batch(text, text, text[], jsonb[], text[], interval[], timestamptz[], interval[], text[]) is
  'Sends many messages with options, all or none; ids in input order. Each option is an array as long as payloads, or null; see send(). PQ005 for another length.';
comment on function pgque.send_batch(text, text, jsonb[], jsonb[], text[], interval[], timestamptz[], interval[], text[]) is
  'The same for jsonb.';
comment on function pgque.send_batch(text, text, bytea[], jsonb[], text[], interval[], timestamptz[], interval[], text[]) is
  'The same for bytes.';
comment on function pgque.ack(bigint, bigint[], pgque.caller) is
  'Finishes some messages of a batch; the others stay with it. One row a message: msg_id, ok, and if not ok the reason: not in this batch, settled already, '
  'lost to another worker, batch not open. After an answer "lost to another worker" an ack of the whole batch returns 0: it would finish that message too, if the '
  'other one let go of it. With archive_on_ack they are kept in the archive.';
comment on function pgque.dead(bigint, bigint[], text) is
  'Gives messages of a batch up at once: they go the way of drop_policy (dead letters by default) with the reason. One row a message, as of ack().';
comment on function pgque.archive(bigint, bigint[], pgque.caller) is
  'Finishes messages of a batch, all by default, and keeps them in the archive; see archive_list(). One row a message, as of ack().';
comment on function pgque.release(bigint, bigint[], pgque.caller) is
  'Hands messages of a worker''s batch back, all by default: any worker can take them at once, and their receive_count stays. Returns their number. PQ005 for a batch that is not a worker''s.';
comment on function pgque.set_visibility(bigint, interval, pgque.caller) is
  'Sets when the lease on a worker''s batch ends, counted from now; 0 hands it back. Returns the number of messages still held: 0 when the batch is lost. PQ005 when null, negative or above 100 years.';
comment on function pgque.extend(bigint, interval, pgque.caller) is
  'Adds to the lease on a worker''s batch and never shortens it. Returns the number of messages still held: 0 when the batch is lost. PQ005 when negative or above 100 years.';
comment on function pgque.list_workers(text, text, pgque.caller) is
  'Workers that hold messages now: batches, messages, last_seen (when they last received), lease_until (when the first of their leases ends).';
comment on function pgque.reclaim(text, text, interval, pgque.caller) is
  'Hands back the batches of a consumer''s workers that were received longer ago than older_than, whether or not their leases ended. Returns the number of batches. PQ005 when older_than is null.';
comment on function pgque.retry_now(text, text, pgque.caller) is
  'Makes every message that waits for another attempt of a consumer due now, such as after a repair, or after a clock that was ahead. Returns their number. PQ001 no such queue, PQ011 not subscribed.';
comment on function pgque.list_poison(text, int, pgque.caller) is
  'Messages that were delivered more than once without an outcome, or died of that: they may kill their workers. dl_id is set when it is a dead letter.';
comment on function pgque.archive_poison(text, pgque.caller) is 'Moves the dead letters that list_poison() shows to the archive, outcome poison. Returns their number.';
comment on function pgque.list_messages(text, text, int, pgque.caller) is
  'The messages of a queue by id, without touching them, at most limit_count; one row for each consumer. only_status: pending, processing, delayed, retry, expired, '
  'dead, failed (dead with drop_policy hold), archived. available_at is when a message can be taken, or its lease ends. PQ005 for another status.';
comment on function pgque.message_status(text, bigint, pgque.caller) is
  'Where one message stands, a row for each consumer that still knows it; status as in list_messages(). PQ010 when nobody does.';
comment on function pgque.purge(text, pgque.caller) is
  'Removes every committed message of a queue: pending, leased, delayed, to be retried. Dead letters and the archive stay; open batches report false from then on. Returns what the slowest consumer had before it.';
comment on function pgque.purge_key(text, text, pgque.caller) is 'Removes the pending message with a key; returns 1, or 0 if there is none.';
comment on function pgque.archive_list(text, int, timestamptz, pgque.caller) is 'The newest messages of a queue''s archive, at most limit_count, or those archived since a time.';
comment on function pgque.archive_replay(bigint, pgque.caller) is 'Sends an archived message again, as a new one for every consumer, and returns its id; it stays in the archive. PQ010 when it is not there.';
comment on function pgque.archive_purge(text, timestamptz, pgque.caller) is 'Drops the days of a queue''s archive (UTC) that ended before a time. Returns the number of days.';
comment on function pgque.rename_queue(text, text) is 'Gives a queue another name; queue_uid stays. It needs the role pgque_admin. Returns 1. PQ001 no such queue, PQ002 the name is taken, PQ004 invalid name. Listeners on pgque_<old name> hear nothing more.';
comment on function pgque.set_default_config(text, text) is
  'Sets a parameter for every queue that has no value of its own, from the next call of any session on; null restores the built-in default. Returns the number of queues changed. PQ005 for an unknown parameter or a bad value.';
comment on function pgque.set_schedule(text, text) is
  'Sets how often a reaper runs within maint(): job expire (takes expired messages out of the retry queue; 1 minute by default) or delete_expired (deletes dead letters whose message expired, but not held ones; off by default). '
  'every is an interval; an empty string turns the reaper off, null restores its default. PQ005 for an invalid one, and the old one stays.';
comment on function pgque.expire_messages(text, pgque.caller) is 'Takes expired messages out of the retry queue now; in the log they are passed over anyway. Returns their number.';
comment on function pgque.delete_expired(text, pgque.caller) is 'Deletes dead letters whose message has expired meanwhile, but not held ones (drop_policy hold). Returns their number.';
comment on function pgque.maint_lapsed() is 'Judges messages whose last lease ended and whose attempts are used up, also of consumers nobody receives for. Part of maint(). Returns their number.';
comment on function pgque.maint_expire() is 'Runs the reapers that are due, see set_schedule(). Part of maint(). Returns how much they removed.';
comment on table pgque.archive is 'Messages that were done with and kept; a leaf holds one day of one queue. See archive_list().';
comment on table pgque.idempotency_0 is 'Keys of send_idem() until their ttl ends, first leaf. Internal.';
comment on table pgque.idempotency_1 is 'Keys of send_idem() until their ttl ends, second leaf. Internal.';
comment on table pgque.tally_0 is 'Counts of messages that were dropped, expired or archived, first leaf. Internal: see metrics().';
comment on table pgque.tally_1 is 'Counts of messages that were dropped, expired or archived, second leaf. Internal.';
comment on table pgque.roster_0 is 'For workers, where the messages of big windows lie, first leaf: a cache. Internal.';
comment on table pgque.roster_1 is 'For workers, where the messages of big windows lie, second leaf: a cache. Internal.';
