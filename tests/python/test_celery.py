"""Celery on pgque: a real application, its workers as processes; and the transport through kombu itself."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest
from celery import Celery
from celery.app.task import Context
from kombu import Connection as Broker
from kombu import Consumer, Exchange, Producer, Queue
from kombu.exceptions import ChannelError, OperationalError
from psycopg.conninfo import conninfo_to_dict

import pgque
import pgque.celery
from conftest import Roles, create_database, drop_database
from conftest import _wait as wait_for
from pgque import embedded
from pgque.ops.install import install
from pgque.ops.ticker import run_ticker
from support import pgbouncer
from support.documents import ROOT
from support.processes import own_folder
from support.servers import TestServer
from support.silent import silent_path

WaitUntil = Callable[..., None]
# What a worker of a test does without at its start
LEAN = ("--without-mingle", "--without-gossip")
SHOP = ROOT / "tests" / "examples" / "celery_shop"


def broker_url(dsn: str, **more: str) -> str:
    """Return the URL of a broker for a connection string."""
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None} | more
    return f"pgque:///{quote(parts.pop('dbname'))}?{urlencode(parts, quote_via=quote)}"


@dataclass(frozen=True)
class Shop:
    """The application's database, where a ticker runs."""

    dsn: str
    folder: Path

    @property
    def app(self) -> Celery:
        """Return the application, as a program that only sends has it."""
        app = Celery("shop", broker=broker_url(self.dsn))
        app.conf.update(task_ignore_result=True)
        return app

    def rows(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            return conn.execute(statement.encode(), parameters).fetchall()

    def done(self, like: str) -> list[str]:
        """Return what the tasks wrote, in order."""
        return [
            str(what) for (what,) in self.rows("select what from done where what like %s order by id", like)
        ]

    def statuses(self, queue: str) -> dict[str, int]:
        """Return how many messages have which status."""
        found = "select m.status, count(*) from pgque.list_messages(%s, null, 1000) as m group by 1"
        return {str(status): int(count) for status, count in self.rows(found, queue)}

    @contextmanager
    def worker(self, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """Run a worker in a session of its own, once it is ready; kill it and its children at the end."""
        variables = {"SHOP_DSN": self.dsn, "SHOP_BROKER": broker_url(self.dsn), **variables}
        log = self.folder / f"{secrets.token_hex(4)}.log"
        command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-l", "info", *arguments]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=SHOP,
                env={**os.environ, **variables},
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )
            try:
                wait_for(lambda: " ready." in log.read_text() or process.poll() is not None, "a worker", 60)
                yield process
            except BaseException:
                print(log.read_text()[-8000:])
                raise
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def ticking(dsn: str) -> Iterator[None]:
    stop = threading.Event()
    ticker = threading.Thread(target=run_ticker, args=(dsn, stop))
    ticker.start()
    try:
        yield
    finally:
        stop.set()
        ticker.join()


@pytest.fixture(scope="module")
def shop(server: TestServer, installed: str) -> Iterator[Shop]:
    name = create_database(server, "pgque_celery", installed)
    try:
        dsn = server.dsn_for(name)
        with psycopg.connect(dsn) as conn:
            conn.execute("create table done (id bigint generated always as identity, what text)")
        with own_folder() as folder, ticking(dsn):
            yield Shop(dsn, folder)
    finally:
        drop_database(server, name)


@pytest.fixture(scope="module")
def running(shop: Shop) -> Iterator[Shop]:
    """The application with a worker of two processes and beat."""
    with shop.worker("-c", "2", "-n", "main@here", "-B", "-s", str(shop.folder / "beat")):
        yield shop


@pytest.fixture
def broker(shop: Shop) -> Iterator[Broker]:
    with Broker(broker_url(shop.dsn), transport_options={"visibility_timeout": 1}) as connection:
        yield connection


@pytest.fixture
def tasks(broker: Broker) -> Queue:
    """A queue of the test's own, as the queues of tasks are."""
    name = f"t_{secrets.token_hex(4)}"
    queue = Queue(name, Exchange(name, type="direct"), routing_key=name)
    queue(broker.default_channel).declare()
    return queue


class Reader:
    """A consumer of kombu that keeps what it gets."""

    def __init__(self, broker: Broker, queue: Queue, prefetch: int = 0, no_ack: bool = False) -> None:
        self.got: list[Any] = []
        self.broker = broker
        self.channel = broker.channel()
        self.consumer = Consumer(self.channel, [queue], on_message=self.got.append, no_ack=no_ack)
        self.consumer.qos(prefetch_count=prefetch)
        self.consumer.consume()

    def drain(self, count: int, timeout: float = 10) -> list[Any]:
        """Return the messages once there are so many."""
        while len(self.got) < count:
            self.broker.drain_events(timeout=timeout)
        return self.got

    def expect_nothing(self, seconds: float = 0.5) -> None:
        with pytest.raises(TimeoutError):
            self.broker.drain_events(timeout=seconds)


def publish(broker: Broker, queue: Queue, *bodies: object, **options: Any) -> None:
    producer = Producer(broker.default_channel)
    for body in bodies:
        producer.publish(
            body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], **options
        )


# -- an application ---------------------------------------------------------------------------------


def test_a_worker_runs_tasks_retries_them_and_runs_those_of_beat(
    running: Shop, wait_until: WaitUntil
) -> None:
    app = running.app
    for number in range(100):
        app.send_task("tasks.note", [f"task {number}"])
    app.send_task("tasks.flaky", [2])
    wait_until(lambda: len(running.done("task %")) == 100, "100 tasks", 60)
    wait_until(lambda: running.done("flaky %") == ["flaky 2"], "the third attempt", 30)
    wait_until(lambda: running.done("beat"), "beat", 30)
    assert len(set(running.done("task %"))) == 100
    app.close()


def test_an_eta_of_an_hour_is_a_delay_in_the_database(running: Shop, wait_until: WaitUntil) -> None:
    app = running.app
    app.send_task("tasks.note", ["in an hour"], eta=datetime.now(timezone.utc) + timedelta(hours=1))
    app.send_task("tasks.note", ["soon"], countdown=1)
    wait_until(lambda: running.done("soon") == ["soon"], "the one of a second", 30)
    assert app.control.inspect(timeout=10, limit=1).scheduled() == {"main@here": []}
    found = "select m.status, m.worker from pgque.list_messages('celery', null, 1000) as m where m.payload ~ 'in an hour'"
    assert running.rows(found) == [("delayed", None)]
    app.close()


def test_remote_control_asks_and_commands_workers(running: Shop, wait_until: WaitUntil) -> None:
    app = running.app
    control = app.control
    assert control.inspect(timeout=30, limit=1).ping() == {"main@here": {"ok": "pong"}}
    app.send_task("tasks.note", ["by another queue"], queue="another")
    reply = control.add_consumer("another", reply=True, timeout=30, limit=1)
    assert list(reply[0]["main@here"]) == ["ok"]
    wait_until(lambda: running.done("by another%"), "a task of another queue", 30)
    control.cancel_consumer("another", reply=True, timeout=30, limit=1)
    app.send_task("tasks.note", ["nobody consumes it"], queue="another")
    with app.connection_for_write() as connection:
        assert connection.default_channel.queue_declare("another", passive=True).message_count >= 0
    wait_until(lambda: running.statuses("another") == {"pending": 1}, "one that waits")
    app.close()


def test_events_of_workers_reach_whoever_listens_from_then_on(running: Shop) -> None:
    app = running.app
    heard: list[str] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection)

        def hear(event: dict[str, Any]) -> None:
            heard.append(event["type"])
            receiver.should_stop = True

        receiver.handlers = {"*": hear}
        receiver.capture(timeout=30, wakeup=False)
    assert heard[0].startswith("worker-")
    app.close()


def test_what_a_killed_worker_had_is_done_by_another(running: Shop, wait_until: WaitUntil) -> None:
    app, queue = running.app, "packing"
    with running.worker("-P", "solo", "-Q", queue, *LEAN, SHOP_VISIBILITY_TIMEOUT="1") as worker:
        for name in "abc":
            app.send_task("tasks.pack", [name, 60], queue=queue)
        wait_until(lambda: running.done("begin a"), "the first to begin", 60)
        wait_until(lambda: running.statuses(queue) == {"processing": 3}, "all to be prefetched")
        os.killpg(worker.pid, signal.SIGKILL)
    app.control.add_consumer(queue, reply=True, timeout=30, limit=1)
    wait_until(lambda: len(running.done("packed %")) == 3, "another worker", 30)
    assert sorted(running.done("packed %")) == [f"packed {name}, redelivered" for name in "abc"]
    wait_until(lambda: running.statuses(queue) == {}, "the last acknowledgement")
    app.close()


def test_a_worker_that_is_told_to_stop_returns_at_once_what_it_has_not_begun(
    shop: Shop, wait_until: WaitUntil
) -> None:
    app, queue = shop.app, "stopping"
    with shop.worker("-P", "threads", "-c", "1", "-Q", queue, *LEAN, SHOP_VISIBILITY_TIMEOUT="600") as worker:
        for name in ("first", "second", "third"):
            app.send_task("tasks.pack", [f"{queue} {name}", 3], queue=queue)
        wait_until(lambda: shop.statuses(queue) == {"processing": 3}, "all to be prefetched", 60)
        wait_until(lambda: shop.done(f"begin {queue}%"), "the first to begin", 60)
        worker.send_signal(signal.SIGTERM)
        wait_until(lambda: shop.statuses(queue) == {"processing": 1, "retry": 2}, "the release", 30)
        assert shop.done(f"packed {queue}%") == []
        assert worker.wait(30) == 0
    assert shop.done(f"packed {queue}%") == [f"packed {queue} first, at first"]
    assert shop.statuses(queue) == {"retry": 2}
    app.close()


# A worker for each kind of pool has to start and to end.
@pytest.mark.slow
@pytest.mark.parametrize("pool", ["solo", "threads", "gevent", "eventlet"])
def test_each_kind_of_pool_runs_tasks_and_ends_in_order(shop: Shop, wait_until: WaitUntil, pool: str) -> None:
    app = shop.app
    with shop.worker("-P", pool, "-c", "2", "-Q", pool, "-n", f"{pool}@here") as worker:
        app.send_task("tasks.flaky", [1], queue=pool)
        for serializer in ("json", "msgpack", "yaml"):
            for compression in (None, "gzip"):
                what = f"{pool} {serializer} {compression}"
                app.send_task(
                    "tasks.note", [what], queue=pool, serializer=serializer, compression=compression
                )
        wait_until(lambda: len(shop.done(f"{pool} %")) == 6, "the tasks", 60)
        wait_until(lambda: shop.done("flaky 1"), "the retry", 30)
        ping = app.control.inspect([f"{pool}@here"], timeout=30, limit=1).ping()
        assert ping == {f"{pool}@here": {"ok": "pong"}}
        wait_until(lambda: shop.statuses(pool) == {}, "the acknowledgements", 30)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    shop.rows("delete from done where what = 'flaky 1' returning 1")
    app.close()


# A worker has to find out that the database is silent.
@pytest.mark.slow
def test_a_worker_ends_although_the_database_does_not_answer(shop: Shop, wait_until: WaitUntil) -> None:
    with silent_path(shop.dsn) as path:
        url = broker_url(path.dsn, connect_timeout="2")
        with shop.worker("-c", "1", SHOP_BROKER=url, SHOP_COMMAND_TIMEOUT="1") as worker:
            log = max(shop.folder.glob("*.log"), key=lambda file: file.stat().st_mtime)
            path.silence()
            # A heartbeat is due every two seconds, and each try takes as long.
            wait_until(lambda: log.read_text().count("next try") > 2, "attempts to connect", 60)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0


# -- the transport --------------------------------------------------------------------------------


def test_a_channel_has_no_more_messages_than_its_prefetch_count(
    shop: Shop, broker: Broker, tasks: Queue, wait_until: WaitUntil
) -> None:
    publish(broker, tasks, *range(10))
    reader = Reader(broker, tasks, prefetch=3)
    got = reader.drain(3)
    reader.expect_nothing()
    assert shop.statuses(tasks.name) == {"processing": 3, "pending": 7}
    got[0].ack()
    assert [message.payload for message in reader.drain(4)] == [0, 1, 2, 3]
    reader.consumer.qos(prefetch_count=5)
    reader.drain(6)
    reader.expect_nothing()
    reader.channel.close()
    wait_until(lambda: shop.statuses(tasks.name) == {"retry": 5, "pending": 4}, "the release")


def test_a_message_that_is_requeued_comes_again_and_one_that_is_rejected_is_a_dead_letter(
    shop: Shop, broker: Broker, tasks: Queue, wait_until: WaitUntil
) -> None:
    publish(broker, tasks, "bad")
    reader = Reader(broker, tasks)
    assert reader.drain(1)[0].delivery_info["redelivered"] is False
    reader.got[0].requeue()
    assert reader.drain(2)[1].delivery_info["redelivered"] is True
    reader.got[1].reject()
    found = "select d.dl_reason from pgque.dlq_inspect(%s) as d"
    wait_until(lambda: shop.rows(found, tasks.name), "the dead letter")
    assert shop.rows(found, tasks.name) == [("rejected by Celery, without requeue",)]


def test_what_is_no_message_of_kombu_is_a_dead_letter_and_the_others_arrive(
    shop: Shop, broker: Broker, tasks: Queue, wait_until: WaitUntil
) -> None:
    good: dict[str, Any] = {"body": "1", "properties": {"delivery_info": {"routing_key": "x"}}}
    bad = [
        good | {"headers": 5},
        good | {"headers": {"id": [1]}},
        good | {"body": 5},
        good | {"body": "%", "properties": good["properties"] | {"body_encoding": "base64"}},
        good | {"properties": {"delivery_info": "x"}},
        good | {"properties": {"delivery_info": {"routing_key": 5}}},
        {"properties": 1},
        [],
        "text",
    ]
    with pgque.connect(shop.dsn) as client:
        client.send_batch(tasks.name, [json.dumps(each) for each in bad])
    publish(broker, tasks, "good")
    reader = Reader(broker, tasks)
    assert reader.drain(1)[0].payload == "good"
    reader.got[0].ack()
    found = "select count(*) from pgque.dlq_inspect(%s) as d where d.dl_reason ~ 'kombu'"
    wait_until(lambda: shop.rows(found, tasks.name) == [(len(bad),)], "the dead letters")


def test_messages_that_wait_for_an_ack_stay_leased_however_long(
    shop: Shop, broker: Broker, tasks: Queue, wait_until: WaitUntil
) -> None:
    publish(broker, tasks, "slow", "prefetched")
    reader = Reader(broker, tasks)
    reader.drain(2)
    with pgque.connect(shop.dsn, autocommit=True) as client:
        [first] = client.consumers.list_workers(tasks.name, "celery")
        assert first.lease_until is not None
        later = first.lease_until + timedelta(seconds=2)  # a lease is a second

        def is_extended() -> bool:
            [now] = client.consumers.list_workers(tasks.name, "celery")
            return now.worker == first.worker and now.messages == 2 and (now.lease_until or later) > later

        wait_until(is_extended, "a lease that is extended")
    for message in reader.got:
        message.ack()


def test_outcomes_and_messages_of_many_tasks_share_round_trips(
    shop: Shop, tasks: Queue, wait_until: WaitUntil
) -> None:
    url = broker_url(shop.dsn, options="-c track_functions=all")
    found = (
        "select f.funcname, sum(f.calls)::int from pg_stat_user_functions as f where f.schemaname = 'pgque'"
        " and f.funcname in ('_send_many', '_send_as', 'receive', '_ack') group by 1"
    )
    with Broker(url) as counted:
        with pgque.celery.bulk():
            publish(counted, tasks, *range(500))
        reader = Reader(counted, tasks)
        for message in reader.drain(500):
            message.ack()
    wait_until(lambda: len(shop.rows(found)) == 3, "the figures of sessions that ended")
    calls = dict(shop.rows(found))
    assert calls.pop("_send_many") == 1
    assert calls.pop("receive") <= 50
    assert calls.pop("_ack") <= 100
    assert calls == {}
    assert shop.statuses(tasks.name) == {}


def test_tasks_can_be_sent_in_a_transaction_of_ones_own(shop: Shop, broker: Broker, tasks: Queue) -> None:
    with psycopg.connect(shop.dsn) as conn:
        with pgque.celery.bulk(conn):
            publish(broker, tasks, "rolled back")
        conn.rollback()
        with pgque.celery.bulk(conn):
            publish(broker, tasks, "committed")
        assert shop.statuses(tasks.name) == {}
    with pytest.raises(ZeroDivisionError), pgque.celery.bulk():
        publish(broker, tasks, "never")
        raise ZeroDivisionError
    assert [message.payload for message in Reader(broker, tasks).drain(1)] == ["committed"]


def test_a_block_of_bulk_is_for_one_database(shop: Shop, broker: Broker, tasks: Queue) -> None:
    elsewhere = Broker(broker_url(shop.dsn, options="-c application_name=another"))
    with elsewhere, pytest.raises(pgque.PgqueBadArgumentError, match="two databases"), pgque.celery.bulk():
        publish(broker, tasks, "never")
        publish(elsewhere, tasks, "nor this")
    assert shop.statuses(tasks.name) == {}


def test_a_message_with_an_expiration_is_not_delivered_after_it(
    shop: Shop, broker: Broker, tasks: Queue, wait_until: WaitUntil
) -> None:
    publish(broker, tasks, "short", expiration=0.1)
    publish(broker, tasks, "long", expiration=3600)
    over = "select true from pgque.list_messages(%s) as m where m.expires_at < now()"
    wait_until(lambda: shop.rows(over, tasks.name), "the end of the first")
    assert [message.payload for message in Reader(broker, tasks).drain(1)] == ["long"]


def test_workers_share_a_queue_that_is_not_durable(shop: Shop) -> None:
    name = f"t_{secrets.token_hex(4)}"
    queue = Queue(name, Exchange(name), routing_key=name, durable=False)
    with Broker(broker_url(shop.dsn)) as broker, Broker(broker_url(shop.dsn)) as another:
        publish(broker, queue, 1, 2)
        readers = [Reader(each, queue, prefetch=1) for each in (broker, another)]
        assert sorted(reader.drain(1)[0].payload for reader in readers) == [1, 2]


def test_each_reader_of_an_exchange_gets_its_messages_and_leaves_nothing_behind(shop: Shop) -> None:
    name = f"x_{secrets.token_hex(4)}"
    exchange = Exchange(name, type="topic")
    with Broker(broker_url(shop.dsn)) as first, Broker(broker_url(shop.dsn)) as second:
        all_of_it = Queue(f"{name}.1", exchange, routing_key="#", auto_delete=True)
        some_of_it = Queue(f"{name}.2", exchange, routing_key="worker.*", auto_delete=True)
        readers = Reader(first, all_of_it, no_ack=True), Reader(second, some_of_it, no_ack=True)
        with Broker(broker_url(shop.dsn)) as sender:
            producer = Producer(sender.default_channel)
            for key in ("task.sent", "worker.online"):
                producer.publish(key, exchange=exchange, routing_key=key, declare=[exchange])
        assert [message.payload for message in readers[0].drain(2)] == ["task.sent", "worker.online"]
        assert [message.payload for message in readers[1].drain(1)] == ["worker.online"]
        with pgque.connect(shop.dsn) as client:
            assert client.consumers.get_info(f"exchange.{name}") == []
        # Messages that nobody subscribed to are no fault of it.
        check = "select h.status from pgque.health() as h where h.check_name = 'consumers' and h.queue = %s"
        assert shop.rows(check, f"exchange.{name}") == [("ok",)]


def test_a_forked_process_has_connections_of_its_own(shop: Shop, broker: Broker, tasks: Queue) -> None:
    publish(broker, tasks, "parent's")
    reader = Reader(broker, tasks, prefetch=1)
    message = reader.drain(1)[0]
    sessions = "select count(*) from pg_stat_activity as a where a.application_name = 'pgque celery calls'"
    [(before,)] = shop.rows(sessions)
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            message.ack()  # does nothing
            publish(broker, tasks, "child's")
            own = Reader(broker, tasks)
            if own.drain(1)[0].payload == "child's" and shop.rows(sessions) == [(before + 1,)]:
                own.got[0].ack()
                broker.release()
                os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shop.statuses(tasks.name) == {"processing": 1}
    publish(broker, tasks, "after")
    message.ack()
    assert reader.drain(2)[1].payload == "after"


def test_queues_are_counted_purged_and_deleted(
    shop: Shop, broker: Broker, tasks: Queue, wait_until: WaitUntil
) -> None:
    publish(broker, tasks, 1, 2, 3)
    bound = tasks(broker.default_channel)
    wait_until(lambda: bound.queue_declare(passive=True).message_count == 3, "the count")
    assert bound.purge() == 3
    assert bound.get() is None
    bound.delete()
    with pytest.raises(ChannelError, match="no queue"):
        bound.queue_declare(passive=True)


def test_one_message_can_be_asked_for(
    shop: Shop, broker: Broker, tasks: Queue, wait_until: WaitUntil
) -> None:
    publish(broker, tasks, "one", "two")
    bound = tasks(broker.default_channel)
    got: list[Any] = []

    def ask() -> bool:
        got[:] = [bound.get()]
        return got != [None]

    wait_until(ask, "the message")
    assert got[0].payload == "one"
    got[0].ack()
    wait_until(lambda: shop.statuses(tasks.name) == {"pending": 1}, "its acknowledgement")


def test_a_lost_connection_is_replaced_and_what_a_worker_has_stays_its_own(
    shop: Shop, broker: Broker, tasks: Queue, wait_until: WaitUntil
) -> None:
    publish(broker, tasks, "before")
    reader = Reader(broker, tasks)
    reader.drain(1)
    shop.rows(
        "select count(pg_terminate_backend(a.pid, 10000)) from pg_stat_activity as a"
        " where a.datname = current_database() and starts_with(a.application_name, 'pgque celery')"
    )
    reader.got[0].ack()
    publish(broker, tasks, "after")
    assert reader.drain(2)[1].payload == "after"
    reader.got[1].ack()
    wait_until(lambda: shop.statuses(tasks.name) == {}, "both acknowledgements")


def test_what_is_done_over_a_channel_that_was_closed_is_repeated_over_a_new_one(
    broker: Broker, tasks: Queue
) -> None:
    reader = Reader(broker, tasks)
    producer = Producer(broker)
    for channel in (producer.channel, reader.channel):
        channel.close()  # as kombu does when it connects again
    reader.consumer.cancel()
    for use in (lambda: reader.channel.queue_declare(tasks.name, durable=True), reader.consumer.consume):
        with pytest.raises(broker.recoverable_connection_errors, match="disconnected"):
            use()
    producer.publish("kept", routing_key=tasks.name, retry=True, retry_policy={"max_retries": 1})
    assert [message.payload for message in Reader(broker, tasks).drain(1)] == ["kept"]


# A server of its own has to start twice.
@pytest.mark.slow
def test_a_restart_of_the_server_loses_nothing_and_what_a_worker_has_stays_its_own(
    wait_until: WaitUntil,
) -> None:
    with embedded.start() as server:
        install(server.dsn)
        shop = Shop(server.dsn, Path())
        queue = Queue("restarted", Exchange("restarted"), routing_key="restarted")
        with ticking(server.dsn), Broker(broker_url(server.dsn)) as broker:
            publish(broker, queue, "before")
            reader = Reader(broker, queue)
            reader.drain(1)
            server.restart()
            reader.got[0].ack()
            publish(broker, queue, "after")
            assert reader.drain(2)[1].payload == "after"
            reader.got[1].ack()
            wait_until(lambda: shop.statuses("restarted") == {}, "both acknowledgements")


def test_a_role_that_may_not_create_queues_is_told_what_to_do(shop: Shop, roles: Roles) -> None:
    dbname = str(conninfo_to_dict(shop.dsn)["dbname"])
    writer = roles("writer", dbname=dbname)
    both = roles("writer", "reader", dbname=dbname)
    name = f"t_{secrets.token_hex(4)}"
    queue = Queue(name, Exchange(name, type="direct"), routing_key=name)
    with Broker(broker_url(writer.dsn)) as refused:
        queue(refused.default_channel).declare()
        with pytest.raises(pgque.PgqueQueueNotFoundError, match=r"pgque\.create_queue"):
            publish(refused, queue, 1)
    with (
        Broker(broker_url(both.dsn)) as refused,
        pytest.raises(pgque.PgquePermissionDeniedError, match=r"pgque\.create_queue") as told,
    ):
        queue(refused.default_channel).declare()
    with pgque.connect(shop.dsn) as client:
        client.conn.execute((told.value.hint or "").partition("As a pgque_admin:")[2].encode())
        assert client.admin.queue_config(name)["max_receive_attempts"] == "20"
    with Broker(broker_url(writer.dsn)) as sender, Broker(broker_url(both.dsn)) as receiver:
        queue(sender.default_channel).declare()
        publish(sender, queue, "allowed")
        reader = Reader(receiver, queue)
        assert reader.drain(1)[0].payload == "allowed"
        reader.got[0].ack()


def test_a_role_that_may_not_create_a_log_is_told_what_to_do(shop: Shop, roles: Roles) -> None:
    name = f"t_{secrets.token_hex(4)}"
    news = Exchange(name, type="fanout")
    writer = roles("writer", dbname=str(conninfo_to_dict(shop.dsn)["dbname"]))
    with Broker(broker_url(writer.dsn)) as sender:
        producer = Producer(sender.default_channel, exchange=news)  # declares the exchange
        with pytest.raises(pgque.PgquePermissionDeniedError) as told:
            producer.publish(1)
        with pgque.connect(shop.dsn) as client:
            client.conn.execute((told.value.hint or "").partition("As a pgque_admin:")[2].encode())
            found = client.admin.queue_config(f"exchange.{name}")
        producer.publish(1)
    assert (found["rotation_period"], found["health_pending_warn"]) == ("00:10:00", "00:00:00")


def test_what_does_not_apply_to_a_queue_is_refused(broker: Broker) -> None:
    channel = broker.default_channel
    with pytest.raises(pgque.PgqueBadArgumentError, match="x-max-priority") as refused:
        Queue("ranked", Exchange("ranked"), max_priority=9)(channel).declare()
    assert "several queues" in (refused.value.hint or "")
    with pytest.raises(ChannelError, match="auto_delete=True"):
        Queue("kept", Exchange("everybody", type="fanout"))(channel).declare()
    with pytest.raises(ChannelError, match="run by each reader"):
        Queue("brief", Exchange("brief"), routing_key="brief", auto_delete=True)(channel).declare()
    with pytest.raises(ChannelError, match="rpc://"):
        Consumer(channel, [Queue("results", auto_delete=True)]).consume()
    with pytest.raises(pgque.PgqueBadArgumentError, match="sslmode"):
        Broker("pgque://here/shop", ssl=True).connect()


def test_a_worker_whose_results_go_to_rpc_is_told_to_use_another_backend(shop: Shop) -> None:
    app = Celery("answers", broker=broker_url(shop.dsn), backend="rpc://")
    sender = Context(reply_to=secrets.token_hex(4), correlation_id="1")
    with pytest.raises(pgque.PgqueQueueNotFoundError) as refused:
        app.backend.store_result("1", 7, "SUCCESS", request=sender)
    assert "not rpc://" in (refused.value.hint or "")


def test_applications_with_prefixes_share_a_database(shop: Shop) -> None:
    name = f"t_{secrets.token_hex(4)}"
    queue = Queue(name, Exchange(name), routing_key=name)
    news = Queue(f"{name}.news", Exchange(f"{name}.all", type="fanout"), auto_delete=True)
    with (
        Broker(broker_url(shop.dsn), transport_options={"queue_prefix": "one."}) as one,
        Broker(broker_url(shop.dsn), transport_options={"queue_prefix": "two."}) as two,
    ):
        readers = [(Reader(broker, queue), Reader(broker, news, no_ack=True)) for broker in (one, two)]
        for broker in (two, one):
            publish(broker, queue, broker.transport_options["queue_prefix"])
            publish(broker, news, broker.transport_options["queue_prefix"])
        for prefix, pair in zip(("one.", "two."), readers, strict=True):
            for reader in pair:
                while not reader.got:
                    reader.broker.drain_events(timeout=10)
                assert [message.payload for message in reader.got] == [prefix]
            pair[0].got[0].ack()
    assert shop.rows(
        "select queue_name from pgque.queue where queue_name like %s order by 1", f"___.{name}"
    ) == [
        (f"one.{name}",),
        (f"two.{name}",),
    ]


def test_a_route_to_no_queue_is_an_error_and_no_message_is_lost_in_silence(broker: Broker) -> None:
    exchange = Exchange("nobody", type="direct")
    with pytest.raises(ChannelError, match="no queue that this process declared"):
        Producer(broker.default_channel).publish(1, exchange=exchange, routing_key="x", declare=[exchange])


@pytest.mark.pgbouncer
def test_behind_a_pooler_messages_are_polled_for(shop: Shop, tasks: Queue) -> None:
    with pgbouncer.through(shop.dsn) as pooled, Broker(broker_url(pooled)) as broker:
        reader = Reader(broker, tasks)
        reader.expect_nothing()
        publish(broker, tasks, *range(5))
        for message in reader.drain(5):
            message.ack()
    assert shop.statuses(tasks.name) == {}


def test_urls_are_those_of_libpq_and_logs_hide_their_passwords(shop: Shop) -> None:
    parts = conninfo_to_dict(shop.dsn)
    assert "secret" not in Broker("pgque://ann:secret@here:1/shop?sslmode=prefer").as_uri()
    assert "secret" not in Broker("pgque://here/shop?password=secret&user=ann").as_uri()
    with Broker(shop.dsn, transport="pgque.celery:Transport") as plain:  # broker_transport
        assert plain.default_channel.queue_declare(durable=True).message_count == 0
    with pytest.raises(OperationalError), Broker("pgque://127.0.0.1:1/nobody") as nobody:
        nobody.ensure_connection(max_retries=1, interval_start=0)
    with pytest.raises(pgque.PgqueBadArgumentError, match="several"):
        Broker("pgque://one/shop;pgque://two/shop").connect()
    assert parts
