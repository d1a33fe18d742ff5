"""Delayed messages, messages that expire, and what is too old to keep."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from conftest import Connect
from sql.helpers import (
    Connection,
    ack,
    configure,
    dead_letters,
    extend,
    figure,
    forced_tick,
    ids,
    leaf,
    move_clock,
    nack,
    offer,
    outcome,
    payloads,
    post,
    pump,
    queue_bytes,
    receive,
    refused,
    release,
    rows,
    send,
    send_many,
    settle,
    status,
    subscribe,
    take,
    tick,
    value,
    work_off,
)


@pytest.mark.parametrize("what", ["pump", "purge", "expire_messages"])
def test_delayed_messages_of_two_queues_with_the_same_ids_have_nothing_to_do_with_each_other(
    pool: Connection, what: str
) -> None:
    value(pool, "select pgque.create_queue('other')")
    subscribe(pool, "other")
    for queue in ("q", "other"):
        assert post(pool, queue, "plain", delay="1 minute", ttl="3 minutes") == 1
        assert post(pool, queue, "keyed", delay="1 minute", key="k") == 2
    if what == "purge":
        assert value(pool, "select pgque.purge('other')") == 2
    elif what == "expire_messages":
        move_clock(pool, "4 minutes")
        assert value(pool, "select pgque.expire_messages('other')") == 1
    else:
        move_clock(pool, "2 minutes")
        assert (
            value(pool, "select pgque._retry_queue(q.queue_id) from pgque.queue q where queue_name = 'other'")
            == 2
        )
    waiting = rows(
        pool,
        "select q.queue_name, array_agg(r.ev_id order by r.ev_id) from pgque.retry_queue r"
        " join pgque.queue q on q.queue_id = r.ev_queue group by q.queue_name order by q.queue_name",
    )
    assert (
        waiting
        == {
            "pump": [("q", [1, 2])],
            "purge": [("q", [1, 2])],
            "expire_messages": [("other", [2]), ("q", [1, 2])],
        }[what]
    )


@pytest.mark.parametrize("plain", [True, False])
def test_a_delayed_message_comes_when_it_is_due_with_the_id_that_send_gave(
    pool: Connection, plain: bool
) -> None:
    late = post(pool, "q", "late", "kind", delay="10 minutes", headers='{"h": 1}', partition_key="p")
    at = value(pool, "select pgque.clock() + interval '20 minutes'")
    later = post(pool, "q", "later", deliver_at=at)
    now = post(pool, "q", "now")
    got: list[tuple[int, str | None]] = []
    for minutes in (0, 9, 11, 19, 21):
        move_clock(pool, f"{minutes} minutes")
        settle(pool, "q")
        while batch := receive(pool, "q") if plain else take(pool, "q"):
            got += [(m.msg_id, f"{m.payload} at {minutes}") for m in batch]
            assert {(m.receive_count, m.retry_count, m.last_error) for m in batch} == {(1, 0, None)}
            if batch[0].payload == "late":
                assert (batch[0].type, batch[0].headers, batch[0].extra1) == ("kind", {"h": 1}, "p")
            ack(pool, batch[0].batch_id)
    assert got == [(now, "now at 0"), (late, "late at 11"), (later, "later at 21")]


def test_a_time_in_the_past_and_a_delay_of_zero_are_now(pool: Connection) -> None:
    a = post(pool, "q", deliver_at="2000-01-01")
    b = post(pool, "q", delay="0")
    settle(pool, "q")
    assert sorted(ids(work_off(pool, "q"))) == [a, b]


def test_delay_and_deliver_at_together_are_refused(conn: Connection, queue: str) -> None:
    refused("PQ005", lambda: post(conn, queue, delay="1 minute", deliver_at="2000-01-01"))
    refused("PQ005", lambda: post(conn, queue, delay="-1 microsecond"))


def test_each_element_of_a_batch_has_its_own_delay(pool: Connection) -> None:
    sent = value(
        pool,
        "select pgque.send_batch('q', 't', array['a', 'b', 'c'], delays => array[null, '5 minutes', '0']::interval[])",
    )
    settle(pool, "q")
    assert sorted(ids(work_off(pool, "q"))) == [sent[0], sent[2]]
    move_clock(pool, "6 minutes")
    settle(pool, "q")
    assert [(m.msg_id, m.payload) for m in work_off(pool, "q")] == [(sent[1], "b")]


@pytest.mark.parametrize(
    "arrays",
    [
        "delays => array['1 minute']::interval[]",
        "delays => array['-1 minute', null]::interval[]",
        "keys => array['k', '']",
        "keys => array['k', 'l', 'm']",
        "ttls => array['-1 s', null]::interval[]",
        "headers => array['{}']::jsonb[]",
        "deliver_ats => array[now(), null], delays => array['1 s', null]::interval[]",
        "partition_keys => array['a']",
    ],
)
def test_a_batch_whose_arrays_do_not_fit_is_refused_whole(
    conn: Connection, subscribed: str, arrays: str
) -> None:
    call = f"select pgque.send_batch(%s, 't', array['a', 'b'], {arrays})"
    refused("PQ005", value, conn, call, subscribed)
    settle(conn, subscribed)
    assert take(conn, subscribed) == []


def test_a_delayed_send_that_is_rolled_back_never_comes(pool: Connection) -> None:
    pool.execute("begin")
    post(pool, "q", delay="1 minute")
    pool.execute("rollback")
    move_clock(pool, "1 hour")
    settle(pool, "q")
    assert take(pool, "q") == []


def test_thousands_of_due_messages_come_within_two_ticks(pool: Connection) -> None:
    sent = value(
        pool,
        "select pgque.send_batch('q', 't', array(select g::text from generate_series(1, 5000) as g),"
        " delays => array(select interval '1 minute' from generate_series(1, 5000)))",
    )
    move_clock(pool, "2 minutes")
    pool.execute("set statement_timeout = '5s'")
    for _ in range(2):
        settle(pool, "q")
    assert sorted(ids(work_off(pool, "q", count=1000))) == sorted(sent)


def test_a_large_message_that_is_being_replaced_holds_back_no_other(
    pool: Connection, own_dsn: str, connect: Connect
) -> None:
    post(pool, "q", "x" * 1_200_000, key="k", delay="1 minute")
    others = [post(pool, "q", delay="2 minutes") for _ in range(3)]
    replacer = connect(own_dsn, autocommit=False)
    post(replacer, "q", "y", key="k", delay="1 minute")
    move_clock(pool, "3 minutes")
    settle(pool, "q")
    assert ids(work_off(pool, "q")) == others


def test_every_consumer_gets_a_delayed_message_once(pool: Connection) -> None:
    subscribe(pool, "q", "d")
    take(pool, "q", "w1", consumer="d")
    late = post(pool, "q", delay="10 minutes")
    subscribe(pool, "q", "newcomer")
    move_clock(pool, "11 minutes")
    settle(pool, "q")
    assert ids(work_off(pool, "q")) == [late]
    assert ids(work_off(pool, "q", consumer="d")) == [late]
    assert payloads(pool, "q", "newcomer") == ["x"]
    settle(pool, "q")
    assert work_off(pool, "q") == []


@pytest.mark.parametrize("plain", [True, False])
def test_an_expired_message_is_not_delivered_before_any_cleanup_ran(pool: Connection, plain: bool) -> None:
    post(pool, "q", "gone", ttl="1 minute")
    kept = post(pool, "q", "kept", ttl="1 hour")
    for_ever = post(pool, "q", "for ever")
    tick(pool, "q")
    move_clock(pool, "2 minutes")
    got = receive(pool, "q") if plain else take(pool, "q")
    assert ids(got) == [kept, for_ever]
    assert abs(got[0].expires_at - got[0].created_at - timedelta(hours=1)) < timedelta(seconds=1)
    assert got[1].expires_at is None


def test_an_expired_window_does_not_hide_the_next(pool: Connection) -> None:
    for _ in range(3):
        for _ in range(20):
            post(pool, "q", ttl="1 minute")
        tick(pool, "q")
    move_clock(pool, "2 minutes")
    later = offer(pool, "q", 3)
    assert ids(take(pool, "q", count=2)) == later[:2]
    assert ids(take(pool, "q", count=2)) == later[2:]


def test_a_messages_ttl_wins_over_the_queues_and_that_over_the_default(pool: Connection) -> None:
    value(pool, "select pgque.set_default_config('message_ttl', '10 minutes')")
    by_default = send(pool, "q")
    configure(pool, "q", message_ttl="20 minutes")
    by_queue = send(pool, "q")
    by_itself = post(pool, "q", ttl="30 minutes")
    never = post(pool, "q", ttl="0")
    configure(pool, "q", message_ttl=None)
    value(pool, "select pgque.set_default_config('message_ttl', null)")
    unlimited = send(pool, "q")
    tick(pool, "q")
    expected = [by_default, by_queue, by_itself, never, unlimited]
    subscribe(pool, "q", "x")
    for minutes, alive in ((9, 5), (11, 4), (21, 3), (31, 2), (10_000, 2)):
        move_clock(pool, f"{minutes} minutes")
        got = []
        while batch := take(pool, "q", "w1", 1, "1 second"):
            if batch[0].msg_id in got:
                break
            got += ids(batch)
        assert sorted(got) == expected[5 - alive :]
        value(pool, "select pgque.reclaim('q', 'c')")
        configure(pool, "q", max_receive_attempts=1000)


@pytest.mark.parametrize("call", ["ttl", "message_ttl"])
def test_a_negative_ttl_is_refused(conn: Connection, queue: str, call: str) -> None:
    if call == "ttl":
        refused("PQ005", lambda: post(conn, queue, ttl="-1 second"))
    else:
        refused("PQ005", value, conn, "select pgque.set_queue_config(%s, 'message_ttl', '-1 second')", queue)


@pytest.mark.parametrize("late", [{"ttl": "101 years"}, {"delay": "101 years"}, {"deliver_at": "infinity"}])
def test_times_that_no_client_can_read_are_refused(
    conn: Connection, queue: str, late: dict[str, str]
) -> None:
    error = refused("PQ005", lambda: post(conn, queue, **late))
    assert queue in str(error) and "100 years" in str(error)


@pytest.mark.parametrize(
    "call",
    [
        "select * from pgque.nack(%(batch)s, array[%(id)s], '101 years')",
        "select pgque.event_retry(%(batch)s, %(id)s, now() + interval '101 years')",
        "select pgque.event_retry(%(batch)s, %(id)s, timestamptz 'infinity')",
        "select pgque.set_visibility(%(batch)s, '101 years')",
        "select pgque.extend(%(batch)s, '101 years')",
        "select * from pgque.receive('q', 'c', 10, worker => 'v', visibility_timeout => '101 years')",
    ],
)
def test_a_message_is_not_delayed_until_a_time_that_no_client_can_read(pool: Connection, call: str) -> None:
    sent = offer(pool, "q", 2)
    (message,) = take(pool, "q", "w", 1)

    def put_aside() -> None:
        pool.execute(call.encode(), {"batch": message.batch_id, "id": message.msg_id})

    assert "100 years" in str(refused("PQ005", put_aside))
    assert outcome(pool, "ack", message.batch_id, sent[:1]) == {sent[0]: None}
    assert ids(take(pool, "q", "w")) == sent[1:]


def test_a_live_lease_survives_expiry_and_its_ack_counts(pool: Connection) -> None:
    sent = post(pool, "q", ttl="1 minute")
    tick(pool, "q")
    token = take(pool, "q", "w1", timeout="1 hour")[0].batch_id
    move_clock(pool, "10 minutes")
    value(pool, "select pgque.expire_messages('q')")
    value(pool, "select pgque.maint()")
    assert extend(pool, token, "1 second") == 1
    assert outcome(pool, "ack", token, [sent]) == {sent: None}
    assert figure(pool, "expired", "q") == 0


@pytest.mark.parametrize("how", ["lapse", "nack"])
def test_a_message_that_expired_while_it_was_leased_is_not_redelivered(pool: Connection, how: str) -> None:
    post(pool, "q", ttl="1 minute")
    tick(pool, "q")
    (message,) = take(pool, "q", timeout="30 seconds")
    if how == "nack":
        nack(pool, message, "5 seconds")
    move_clock(pool, "2 minutes")
    settle(pool, "q")
    assert take(pool, "q") == []
    assert dead_letters(pool, "q") == {}
    assert figure(pool, "expired", "q") == 1


def test_a_delayed_message_that_expires_first_is_never_delivered(pool: Connection) -> None:
    post(pool, "q", delay="10 minutes", ttl="5 minutes")
    move_clock(pool, "11 minutes")
    settle(pool, "q")
    assert take(pool, "q") == []


def test_expired_messages_are_taken_out_on_demand_and_counted(pool: Connection) -> None:
    for _ in range(3):
        post(pool, "q", ttl="1 minute")
    tick(pool, "q")
    batch = take(pool, "q", timeout="1 second")
    for message in batch:
        nack(pool, message, "1 hour")
    assert value(pool, "select pgque.expire_messages('q')") == 0
    move_clock(pool, "5 minutes")
    assert value(pool, "select pgque.expire_messages('q')") == 3
    assert value(pool, "select pgque.expire_messages('q')") == 0
    assert value(pool, "select count(*) from pgque.retry_queue") == 0
    assert figure(pool, "expired", "q") == 3
    assert value(pool, "select pgque.delete_expired('q')") >= 0
    move_clock(pool, "2 hours")
    settle(pool, "q")
    assert take(pool, "q") == []


def test_expired_messages_that_were_skipped_are_counted_in_metrics(pool: Connection) -> None:
    for _ in range(4):
        post(pool, "q", ttl="1 minute")
    tick(pool, "q")
    move_clock(pool, "5 minutes")
    assert take(pool, "q") == []
    value(pool, "select pgque.maint()")
    assert figure(pool, "expired", "q") == 4


def test_an_expired_message_is_listed_as_such(pool: Connection) -> None:
    sent = post(pool, "q", ttl="1 minute")
    tick(pool, "q")
    assert status(pool, "q", sent) == {"c": "pending"}
    move_clock(pool, "5 minutes")
    assert status(pool, "q", sent) == {"c": "expired"}
    assert rows(pool, "select l.msg_id from pgque.list_messages('q', 'expired') as l") == [(sent,)]
    assert rows(pool, "select l.msg_id from pgque.list_messages('q', 'pending') as l") == []


@pytest.mark.parametrize("job", ["expire", "delete_expired"])
def test_the_schedule_of_the_cleanups_is_set_at_run_time(pool: Connection, job: str) -> None:
    call = "select pgque.set_schedule(%s, %s)"
    assert value(pool, call, job, "5 minutes")
    for bad in ("nonsense", "-1 minute", "-1 month 31 days", "every day", "* * * * *"):
        refused("PQ005", value, pool, call, job, bad)
    assert value(pool, call, job, "") == ""
    assert value(pool, call, job, "1 hour")
    refused("PQ005", value, pool, call, "reboot", "1 hour")


def test_the_cleanup_runs_by_its_schedule_and_not_when_it_is_off(pool: Connection) -> None:
    def waiting() -> int:
        return int(value(pool, "select count(*) from pgque.retry_queue"))

    value(pool, "select pgque.set_schedule('expire', '')")
    post(pool, "q", ttl="1 minute")
    tick(pool, "q")
    (message,) = take(pool, "q")
    nack(pool, message, "10 hours")
    move_clock(pool, "1 hour")
    for _ in range(2):
        value(pool, "select pgque.maint()")
    assert waiting() == 1
    value(pool, "select pgque.set_schedule('expire', '10 minutes')")
    move_clock(pool, "2 hours")
    for _ in range(2):
        value(pool, "select pgque.maint()")
    assert waiting() == 0
    assert figure(pool, "expired", "q") == 1


def fill(conn: Connection, count: int = 3000) -> None:
    send_many(conn, "q", count)
    tick(conn, "q")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["drop", "dead_letter"])
@pytest.mark.parametrize("pooled", [True, False])
def test_messages_of_a_consumer_that_never_comes_back_are_dropped_or_dead_lettered_and_their_disk_is_freed(
    pool: Connection, policy: str, pooled: bool
) -> None:
    configure(pool, "q", drop_policy=policy, retention_period="1 day", rotation_period="1 hour")
    if pooled:
        assert take(pool, "q") == []
    sent = send_many(pool, "q", 50)
    tick(pool, "q")
    peak = 0
    for hour in range(36):
        move_clock(pool, f"{hour} hours")
        if hour < 24:
            fill(pool)
        else:
            forced_tick(pool, "q")
        value(pool, "select pgque.maint()")
        peak = max(peak, queue_bytes(pool, "q"))
    for hour in range(36, 36 + 24):
        move_clock(pool, f"{hour} hours")
        forced_tick(pool, "q")
        value(pool, "select pgque.maint()")
    dead = dead_letters(pool, "q")
    if policy == "drop":
        assert dead == {}
        assert figure(pool, "dropped|skipped", "q") >= 50
    else:
        assert {dead.get(i) for i in sent} == {"retention period passed"}
    assert queue_bytes(pool, "q") < peak / 3
    sizes = [value(pool, "select pg_relation_size(%s::regclass)", leaf(pool, "q", n)) for n in range(3)]
    assert sum(sizes) < peak / 3
    later = offer(pool, "q", 2)
    assert ids(work_off(pool, "q") if pooled else receive(pool, "q"))[-2:] == later


@pytest.mark.parametrize("how", ["nack", "release", "plain nack", "plain batch"])
def test_a_message_with_a_delay_beyond_retention_keeps_its_retries(pool: Connection, how: str) -> None:
    configure(pool, "q", retention_period="1 day", drop_policy="drop")
    sent = post(pool, "q", delay="2 days")
    move_clock(pool, "49 hours")
    settle(pool, "q")
    (message,) = receive(pool, "q") if how.startswith("plain") else take(pool, "q")
    if how == "release":
        release(pool, message.batch_id)
    else:
        nack(pool, message)
    if how.startswith("plain"):
        ack(pool, message.batch_id)
    if how == "plain batch":
        assert ids(receive(pool, "q")) == [sent]
    value(pool, "select pgque.maint()")
    assert ids(receive(pool, "q") if how.startswith("plain") else take(pool, "q")) == [sent]


def test_messages_are_given_up_a_retention_period_after_their_retry_was_due(pool: Connection) -> None:
    configure(pool, "q", retention_period="1 day")
    (sent,) = offer(pool, "q", 1)
    (message,) = take(pool, "q")
    nack(pool, message, "10 days", "later")
    move_clock(pool, "10 days 23 hours")
    value(pool, "select pgque.maint()")
    assert dead_letters(pool, "q") == {}
    move_clock(pool, "12 days")
    forced_tick(pool, "q")
    for _ in range(2):
        value(pool, "select pgque.maint()")
    assert value(pool, "select count(*) from pgque.retry_queue") == 0
    assert list(dead_letters(pool, "q")) == [sent]


def test_a_retention_of_zero_is_the_default_of_seven_days(pool: Connection) -> None:
    configure(pool, "q", retention_period="1 day")
    configure(pool, "q", retention_period="0")
    seen = "select c.param_value from pgque.queue_config('q') as c where c.param_name = 'retention_period'"
    assert value(pool, seen) in ("7 days", "168:00:00")
    sent = offer(pool, "q", 1)
    take(pool, "q", "w1", 1, "1 second")
    move_clock(pool, "5 days")
    forced_tick(pool, "q")
    value(pool, "select pgque.maint()")
    assert ids(work_off(pool, "q")) == sent


def test_a_live_lease_outlives_retention(pool: Connection) -> None:
    configure(pool, "q", retention_period="1 hour")
    sent = offer(pool, "q", 1)
    token = take(pool, "q", "w1", timeout="1 day")[0].batch_id
    move_clock(pool, "3 hours")
    for _ in range(3):
        forced_tick(pool, "q")
        value(pool, "select pgque.maint()")
    assert outcome(pool, "ack", token, sent) == {sent[0]: None}
    assert dead_letters(pool, "q") == {}


def test_headers_are_json_of_any_depth(pool: Connection) -> None:
    headers = {"a": [1, None, {"ü": "\u0001"}], "n": 1.5, "": True}
    post(pool, "q", headers=json.dumps(headers), delay="1 minute", ttl="1 hour")
    move_clock(pool, "2 minutes")
    settle(pool, "q")
    (message,) = take(pool, "q")
    assert message.headers == headers
    assert ack(pool, message.batch_id) == 1


def test_a_cleanup_reads_each_pending_message_once(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    reapers = (
        "select pgque.expire_messages('q')",
        "select pgque.maint_retain('q')",
    )
    for _ in range(8):  # until the plans are kept, made for a table in which nothing is
        for reaper in reapers:
            assert value(own, reaper) == 0
    value(
        own,
        "select count(*) from unnest(pgque.send_batch('q', 'default', array(select 'x' from generate_series(1, 40000)),"
        " delays => array(select interval '1 hour' from generate_series(1, 40000)))) s",
    )
    own.execute("set statement_timeout = '30s'")
    for reaper in reapers:
        assert value(own, reaper) == 0


def test_arrays_of_a_batch_count_from_one_in_one_dimension_whatever_they_are(pool: Connection) -> None:
    sent = value(
        pool,
        "select pgque.send_batch('q', 't', '[5:6]={a,b}'::text[], keys => array[array['k'], array['l']],"
        " ttls => '[-1:0]={1 hour,2 hours}'::interval[])",
    )
    settle(pool, "q")
    got = work_off(pool, "q")
    assert [(m.msg_id, m.payload, m.key) for m in got] == [(sent[0], "a", "k"), (sent[1], "b", "l")]
    assert got[0].expires_at < got[1].expires_at


def test_a_call_moves_few_large_messages_since_no_queue_ticks_meanwhile(pool: Connection) -> None:
    for _ in range(5):
        value(pool, "select pgque.send('q', 't', repeat('x', 400000), delay => '1 minute')")
    move_clock(pool, "2 minutes")
    assert [pump(pool) for _ in range(3)] == [3, 2, 0]
    tick(pool, "q")
    assert len(work_off(pool, "q")) == 5
