"""Times and lengths of time are the same whatever DateStyle, IntervalStyle and TimeZone a session has."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

import pgque

Tick = Callable[[str], int | None]
Connection = psycopg.Connection[tuple[Any, ...]]

STYLES = [
    ("SQL, DMY", "iso_8601"),
    ("German, DMY", "sql_standard"),
    ("Postgres, MDY", "postgres_verbose"),
]

# Later than now, and another date where day and month change places.
DUE = datetime(2041, 3, 4, 5, 6, 7, 89, tzinfo=timezone.utc)
PERIOD = timedelta(days=1, hours=2, seconds=3)


@pytest.fixture(params=STYLES, ids=lambda style: style[1])
def styled_dsn(request: pytest.FixtureRequest, admin: Any, conn: Connection) -> str:
    """Connection string of a role with settings of its own."""
    for name, value in zip(("datestyle", "intervalstyle"), request.param, strict=True):
        conn.execute(
            sql.SQL("alter role {} set {} = {}").format(sql.Identifier(admin.name), sql.SQL(name), value)
        )
    dsn: str = admin.dsn
    with psycopg.connect(dsn) as own:
        assert own.info.parameter_status("DateStyle") == request.param[0]
    return dsn


@pytest.fixture
def busy(client: pgque.PgqueClient, queue: str, tick: Tick) -> tuple[str, int]:
    """The name of a queue with messages in every state, and the batch that its consumer c has open."""
    client.admin.alter_queue(queue, {"rotation_period": PERIOD, "ticker_idle_period": timedelta(seconds=90)})
    for consumer in ("c", "workers"):
        client.subscribe(queue, consumer)
    client.send_batch(queue, "t", ["a", "b", "c", "d"], ttls=[PERIOD] * 4, headers=[{"n": 1}] * 4)
    client.send(queue, "later", deliver_at=DUE)
    tick(queue)
    [message, *_] = client.receive(queue, "c")
    taken = client.receive(queue, "workers", worker="w", visibility_timeout=3600)
    client.archive(taken[0].batch_id, taken[:1])
    client.dead(taken[0].batch_id, taken[1:2], "no good")
    client.nack(taken[0].batch_id, taken[2:3], timedelta(days=3), "later")
    return queue, message.batch_id


def _calls(queue: str, batch_id: int) -> dict[str, Callable[[Any], Any]]:
    """Return all calls that give times or lengths of time; none of them changes anything."""
    since = datetime.now(timezone.utc) - timedelta(hours=1)
    return {
        "receive": lambda client: client.receive(queue, "c"),
        "peek": lambda client: client.peek(queue),
        "get_batch_events": lambda client: client.pgq.get_batch_events(batch_id),
        "get_batch_info": lambda client: client.pgq.get_batch_info(batch_id),
        "get_queue_info": lambda client: client.monitor.get_queue_info(queue),
        "all queues": lambda client: client.monitor.get_queue_info(),
        "get_consumer_info": lambda client: client.consumers.get_info(queue, "c"),
        "list_workers": lambda client: client.consumers.list_workers(queue),
        "list_messages": lambda client: client.messages.list(queue),
        "message_status": lambda client: client.messages.status(queue, 1),
        "archive_list": lambda client: client.archived.list(queue, since=since),
        "dlq_inspect": lambda client: client.dlq.inspect(queue),
        "list_poison": lambda client: client.dlq.list_poison(queue),
        "metrics": lambda client: client.monitor.metrics(),
        "health": lambda client: client.monitor.health(),
        "status": lambda client: client.monitor.status(),
    }


def _steady(answer: Any) -> Any:
    """Return an answer with 0 for what changes from call to call."""
    if isinstance(answer, list):
        return [_steady(row) for row in answer]
    if isinstance(answer, (pgque.Metric, pgque.HealthCheck, pgque.StatusRow)):
        return type(answer)
    ages = {field.name for field in dataclasses.fields(answer)} & {"ticker_lag", "lag", "last_seen"}
    for name in ages:
        value = getattr(answer, name)
        if isinstance(value, timedelta):
            assert timedelta(0) <= value < timedelta(days=1), name
            answer = dataclasses.replace(answer, **{name: timedelta(0)})
    if isinstance(answer, pgque.QueueInfo):
        answer = dataclasses.replace(answer, ev_per_sec=0.0)
    return answer


def test_what_is_read_is_the_same(styled_dsn: str, client: pgque.PgqueClient, busy: tuple[str, int]) -> None:
    calls = _calls(*busy)
    wanted = {name: _steady(call(client)) for name, call in calls.items()}
    assert wanted["receive"][0].expires_at is not None
    assert wanted["get_queue_info"][0].queue_rotation_period == PERIOD
    assert {row.available_at for row in wanted["list_messages"]} >= {DUE}
    assert all(wanted[name] for name in wanted if name != "list_poison")
    with psycopg.connect(styled_dsn) as own:
        wrapped = pgque.PgqueClient(own)
        assert {name: _steady(call(wrapped)) for name, call in calls.items()} == wanted


def test_what_the_async_client_reads_is_the_same(
    styled_dsn: str, client: pgque.PgqueClient, busy: tuple[str, int]
) -> None:
    calls: dict[str, Callable[[Any], Awaitable[Any]]] = _calls(*busy)

    async def read() -> dict[str, Any]:
        async with await pgque.connect_async(styled_dsn) as own:
            return {name: _steady(await call(own)) for name, call in calls.items()}

    assert asyncio.run(read()) == {name: _steady(call(client)) for name, call in _calls(*busy).items()}


def test_what_is_given_is_understood(
    styled_dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    with pgque.connect(styled_dsn, autocommit=True) as own:
        own.admin.set_queue_config(queue, "rotation_period", PERIOD)
        own.admin.set_queue_config(queue, "visibility_timeout", PERIOD)
        assert own.monitor.get_queue_info(queue)[0].queue_rotation_period == PERIOD
        own.subscribe(queue, "c", datetime.now(timezone.utc))
        own.subscribe(queue, "pgq")
        own.send_batch(queue, "t", ["ttl", "plain"], ttls=[PERIOD, None])
        own.send_batch(queue, "t", ["due", "delayed"], deliver_ats=[DUE, None], delays=[None, PERIOD])
        tick(queue)
        now = datetime.now(timezone.utc)

        def near(time: datetime | None, wanted: datetime) -> bool:
            return time is not None and abs(time - wanted) < timedelta(minutes=1)

        def soon(time: datetime | None, after: timedelta) -> bool:
            return near(time, now + after)

        taken = {m.payload: m for m in own.receive(queue, "c", worker="w", visibility_timeout=PERIOD)}
        assert set(taken) == {"ttl", "plain"}
        assert soon(taken["ttl"].expires_at, PERIOD)
        [worker] = own.consumers.list_workers(queue)
        assert soon(worker.lease_until, PERIOD)
        batch = taken["ttl"].batch_id
        own.extend(batch, PERIOD)
        assert soon(own.consumers.list_workers(queue)[0].lease_until, 2 * PERIOD)
        own.set_visibility(batch, PERIOD)
        assert soon(own.consumers.list_workers(queue)[0].lease_until, PERIOD)
        own.nack(batch, [taken["plain"]], PERIOD)
        due = {m.payload: m.available_at for m in client.messages.list(queue) if m.consumer_name != "pgq"}
        assert due["due"] == DUE
        assert soon(due["delayed"], PERIOD)
        assert soon(due["plain"], PERIOD)
        open_batch = own.pgq.next_batch(queue, "pgq")
        assert open_batch is not None
        own.pgq.event_retry(open_batch, taken["ttl"].msg_id, DUE)
        assert any(near(m.available_at, DUE) for m in client.messages.status(queue, taken["ttl"].msg_id))
        own.dead(batch, [taken["ttl"]])
        assert own.dlq.purge(queue, PERIOD) == 0
        assert own.archived.list(queue, since=DUE) == []
        assert own.archived.purge(queue, now - 30 * PERIOD) == 0
        assert own.consumers.reclaim(queue, "c", PERIOD) == 0
        assert own.send_idem(queue, "x", "key", ttl=PERIOD).deduped is False


@pytest.fixture
def feed(client: pgque.PgqueClient, queue: str, tick: Tick) -> Iterator[str]:
    """The name of a queue with a message for its consumer c, in a database whose every session has styles
    of its own."""
    database = sql.Identifier(str(conninfo_to_dict(client.conn.info.dsn)["dbname"]))
    client.subscribe(queue, "c")
    client.send(queue, "x", ttl=PERIOD)
    tick(queue)
    client.conn.execute(sql.SQL("alter database {} set datestyle = 'SQL, DMY'").format(database))
    client.conn.execute(sql.SQL("alter database {} set intervalstyle = 'iso_8601'").format(database))
    yield queue
    client.conn.execute(sql.SQL("alter database {} reset all").format(database))


@pytest.mark.parametrize("kind", ["Consumer", "Worker", "WorkQueue"])
def test_messages_are_handled(dsn: str, client: pgque.PgqueClient, feed: str, kind: str) -> None:
    [wanted] = client.peek(feed)  # over a connection that is older than the styles
    seen: list[pgque.Message] = []

    def handle(message: pgque.Message) -> None:
        seen.append(message)
        runner.stop()

    runner: pgque.Consumer | pgque.Worker
    if kind == "Consumer":
        runner = pgque.Consumer(dsn, queue=feed, name="c")
        runner.on("*")(handle)
        runner.start()
    elif kind == "Worker":
        runner = pgque.Worker(dsn, queue=feed, consumer="c")
        runner.handler("*")(handle)
        runner.run()
    else:
        with pgque.WorkQueue(dsn, feed, consumer="c") as work:
            seen.extend(work.messages(timeout=0))
    [message] = seen
    assert wanted.expires_at is not None
    assert (message.created_at, message.expires_at) == (wanted.created_at, wanted.expires_at)


def test_the_command_prints_the_same(dsn: str, styled_dsn: str, busy: tuple[str, int]) -> None:
    queue, _ = busy

    def printed(*arguments: str, dsn: str) -> Any:
        command = [sys.executable, "-m", "pgque.cli", *arguments, "--json", "--dsn", dsn]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        rows = [row for row in json.loads(done.stdout) if row.get("queue_name", queue) == queue]
        for row in rows:
            row.pop("ticker_lag", None)
            row.pop("ev_per_sec", None)
            row.pop("consumers", None)
        return rows

    for command in (
        ["queues"],
        ["peek", queue],
        ["messages", queue],
        ["workers", queue],
        ["dlq", "list", queue],
        ["archive", "list", queue],
    ):
        assert printed(*command, dsn=styled_dsn) == printed(*command, dsn=dsn)


@pytest.fixture
def far_zones(monkeypatch: pytest.MonkeyPatch, conn: Connection) -> Iterator[None]:
    """The process is in India, its session in New York."""
    conn.execute("set timezone = 'America/New_York'")
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_zones")
def test_a_time_without_zone_is_local_time_of_the_process(client: pgque.PgqueClient, queue: str) -> None:
    local = datetime(2041, 3, 4, 5, 6)
    wanted = datetime(2041, 3, 3, 23, 36, tzinfo=timezone.utc)
    client.send(queue, "send", deliver_at=local)
    client.send(queue, pgque.Event("t", "event", deliver_at=local))
    client.send_batch(queue, "t", ["batch", "zone"], deliver_ats=[local, wanted])
    client.send_batch(queue, "t", [pgque.Event("t", "event of a batch", deliver_at=local)])
    due = {message.payload: message.available_at for message in client.messages.list(queue)}
    assert due == dict.fromkeys(("send", "event", "batch", "zone", "event of a batch"), wanted)


@pytest.mark.usefixtures("far_zones")
def test_a_consumer_starts_at_a_local_time(client: pgque.PgqueClient, queue: str, tick: Tick) -> None:
    client.send(queue, "before")
    tick(queue)
    now = datetime.now()
    client.send(queue, "after")
    tick(queue)
    client.subscribe(queue, "c", now)
    assert [message.payload for message in client.receive(queue, "c")] == ["after"]


@pytest.mark.usefixtures("far_zones")
def test_an_event_is_retried_at_a_local_time(client: pgque.PgqueClient, queue: str, tick: Tick) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "x")
    tick(queue)
    [message] = client.receive(queue, "c")
    client.pgq.event_retry(message.batch_id, message.msg_id, datetime(2041, 3, 4, 5, 6))
    [status] = client.messages.status(queue, message.msg_id)
    assert status.available_at is not None
    assert abs(status.available_at - datetime(2041, 3, 3, 23, 36, tzinfo=timezone.utc)) < timedelta(minutes=1)


@pytest.mark.usefixtures("far_zones")
def test_the_archive_is_searched_and_cut_at_a_local_time(
    client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "x")
    tick(queue)
    [message] = client.receive(queue, "c")
    client.archive(message.batch_id)
    [archived] = client.archived.list(queue)
    local = archived.archived_at.astimezone().replace(tzinfo=None)
    minute = timedelta(minutes=1)
    assert client.archived.list(queue, since=local - minute) == [archived]
    assert client.archived.list(queue, since=local + minute) == []
    assert client.archived.list(queue, since=datetime.min) == [archived]
    assert client.archived.list(queue, since=datetime.max) == []
    # The day (UTC) ends at half past five in India, before it does in New York.
    day = archived.archived_at.astimezone(timezone.utc).date() + timedelta(days=1)
    end = datetime(day.year, day.month, day.day, 5, 30)
    assert client.archived.purge(queue, end - minute) == 0
    assert client.archived.purge(queue, end + minute) == 1
