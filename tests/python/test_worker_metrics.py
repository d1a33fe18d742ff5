"""What workers and consumers tell prometheus-client and OpenTelemetry about their handlers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from prometheus_client import CollectorRegistry

import pgque
from pgque.integrations import telemetry as _telemetry
from support.processes import ended, own_folder

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]
Sample = Callable[..., float | None]

_reader = InMemoryMetricReader()
_CALLS = "messaging.client.operation.duration"


@pytest.fixture
def sample(queue: str) -> Iterator[Sample]:
    """sample(name, consumer="c", **labels) returns the value of a sample of the queue."""
    registry = CollectorRegistry()
    pgque.enable_prometheus(registry=registry)

    def value(name: str, consumer: str = "c", **labels: str) -> float | None:
        return registry.get_sample_value(name, {"queue": queue, "consumer": consumer, **labels})

    yield value
    pgque.enable_prometheus(False)
    assert list(registry.collect()) == []
    assert _telemetry._observers == ()


@pytest.fixture
def points(queue: str) -> Iterator[Callable[..., list[Any]]]:
    """points(name) returns the data points of an instrument for the queue, with OpenTelemetry enabled."""
    if not isinstance(metrics.get_meter_provider(), MeterProvider):
        metrics.set_meter_provider(MeterProvider([_reader]))
    pgque.enable_opentelemetry()

    def found(name: str) -> list[Any]:
        data = _reader.get_metrics_data()
        assert data is not None
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
            if point.attributes and point.attributes["messaging.destination.name"] == queue
        ]

    yield found
    pgque.enable_opentelemetry(False)


def _send_one_of_each(client: pgque.PgqueClient, queue: str, tick: Tick) -> None:
    client.subscribe(queue, "c")
    for type in ("ack", "retry", "dead", "fails", "unknown"):
        client.send(queue, {}, type=type)
    tick(queue)


def _register(worker: Any, wrap: Callable[[Callable[[pgque.Message], object]], Any]) -> None:
    def retry(message: pgque.Message) -> object:
        raise pgque.Retry(retry_after=3600)

    def fails(message: pgque.Message) -> object:
        raise RuntimeError("on purpose")

    worker.handler("ack")(wrap(lambda message: None))
    worker.handler("dead")(wrap(lambda message: pgque.Dead("on purpose")))
    worker.handler("retry")(wrap(retry))
    worker.handler("fails")(wrap(fails))


def _as_coroutine(handler: Callable[[pgque.Message], object]) -> Any:
    async def handle(message: pgque.Message) -> object:
        return handler(message)

    return handle


@pytest.mark.parametrize("is_async", [False, True])
def test_a_worker_counts_and_times_its_handlers(
    dsn: str,
    client: pgque.PgqueClient,
    queue: str,
    tick: Tick,
    sample: Sample,
    points: Callable[..., list[Any]],
    is_async: bool,
) -> None:
    _send_one_of_each(client, queue, tick)
    if is_async:
        async_worker = pgque.AsyncWorker(dsn, queue=queue, consumer="c", retry_after=3600)
        _register(async_worker, _as_coroutine)
        asyncio.run(async_worker.run(until_idle=True))
    else:
        worker = pgque.Worker(dsn, queue=queue, consumer="c", retry_after=3600)
        _register(worker, lambda handler: handler)
        worker.run(until_idle=True)
    assert sample("pgque_handler_outcomes_total", outcome="ack") == 1
    assert sample("pgque_handler_outcomes_total", outcome="dead") == 1
    assert sample("pgque_handler_outcomes_total", outcome="nack") == 3
    assert sample("pgque_handler_duration_seconds_count") == 4  # without the one that has no handler
    assert sample("pgque_handler_wait_seconds_count") == 4
    assert sample("pgque_handler_wait_seconds_bucket", le="0.001") is not None
    assert sample("pgque_handler_wait_seconds_bucket", le="3600.0") == 4
    assert sample("pgque_handler_redeliveries_total") == 0
    assert sample("pgque_handler_in_flight") == 0

    outcomes = {point.attributes["pgque.outcome"]: point.value for point in points("pgque.handler.outcomes")}
    assert outcomes == {"ack": 1, "dead": 1, "nack": 3}
    assert [point.value for point in points("messaging.client.sent.messages")] == [5]
    [consumed] = points("messaging.client.consumed.messages")
    assert consumed.value == 4
    assert dict(consumed.attributes) == {
        "messaging.system": "pgque",
        "messaging.operation.name": "process",
        "messaging.destination.name": queue,
        "messaging.consumer.group.name": "c",
    }
    durations: list[HistogramDataPoint] = points("messaging.process.duration")
    by_error = {(point.attributes or {}).get("error.type"): point.count for point in durations}
    assert by_error == {None: 3, "RuntimeError": 1}
    assert durations[0].explicit_bounds[0] == 0.001
    assert durations[0].explicit_bounds[-1] == 3600
    assert [point.value for point in points("pgque.handler.in_flight")] == [0]
    calls = {point.attributes["messaging.operation.name"]: point for point in points(_CALLS)}
    assert calls["send"].count == 5
    assert set(calls) - {"ack"} == {"send", "receive"}  # a report travels with a receive, where there is one
    assert dict(calls["receive"].attributes) == {
        "messaging.system": "pgque",
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "messaging.destination.name": queue,
        "messaging.consumer.group.name": "c",
    }
    assert calls["receive"].explicit_bounds[0] == 0.001


@pytest.mark.parametrize("transactional", [False, True])
def test_a_consumer_counts_and_times_its_handlers(
    dsn: str,
    client: pgque.PgqueClient,
    queue: str,
    tick: Tick,
    wait_until: Wait,
    sample: Sample,
    transactional: bool,
) -> None:
    client.subscribe(queue, "c")
    client.send_batch(queue, ["ok", "bad", "later", "dead", "release"])
    tick(queue)
    consumer = pgque.Consumer(dsn, queue=queue, consumer="c", retry_after=0, transactional=transactional)

    @consumer.handler("*")
    def handle(message: pgque.Message, conn: object = None) -> object:
        assert sample("pgque_handler_in_flight") == 1
        match message.payload:
            case "bad" if not message.retry_count:
                raise RuntimeError("on purpose")
            case "later":
                return pgque.Retry(retry_after=3600)
            case "dead":
                return pgque.Dead("on purpose")
            case "release" if message.receive_count == 1:
                raise pgque.Release
        return None

    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        wait_until(lambda: sample("pgque_handler_outcomes_total", outcome="nack") == 2)

        def redelivered() -> bool:
            tick(queue)
            client.admin.maint()
            return sample("pgque_handler_redeliveries_total") == 2

        wait_until(redelivered, timeout=30)
        wait_until(lambda: sample("pgque_handler_outcomes_total", outcome="ack") == 3)
    finally:
        consumer.stop()
        thread.join(20)
    assert sample("pgque_handler_outcomes_total", outcome="dead") == 1
    assert sample("pgque_handler_outcomes_total", outcome="release") == 1
    assert sample("pgque_handler_duration_seconds_count") == 7
    assert sample("pgque_handler_wait_seconds_count") == 5


def test_a_lost_connection_counts_as_a_reconnect(
    dsn: str, client: pgque.PgqueClient, conn: Connection, queue: str, wait_until: Wait, sample: Sample
) -> None:
    client.subscribe(queue, "c")
    worker = pgque.Worker(dsn, queue=queue, consumer="c", unknown_handler_policy="ack")
    thread = threading.Thread(target=worker.run)
    thread.start()
    end = (
        "select pg_terminate_backend(a.pid, 5000) from pg_stat_activity as a"
        " where a.application_name = %s and a.state = 'idle'"
    )
    try:
        wait_until(lambda: conn.execute(end, [f"pgque {queue}/{worker.worker}"[:63]]).fetchall())
        wait_until(lambda: sample("pgque_client_reconnects_total") == 1)
    finally:
        worker.stop()
        thread.join(20)


def test_a_consumer_has_a_span_too(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick, points: Callable[..., list[Any]]
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "x")
    tick(queue)
    consumer = pgque.Consumer(dsn, queue=queue, consumer="c")
    seen: list[trace.Span] = []

    @consumer.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append(trace.get_current_span())
        consumer.stop()

    consumer.run()
    assert len(seen) == 1
    assert [point.count for point in points("messaging.process.duration")] == [1]
    calls = {point.attributes["messaging.operation.name"]: point for point in points(_CALLS)}
    assert (calls["send"].count, calls["ack"].count) == (1, 1)
    assert calls["receive"].count >= 1
    assert calls["ack"].attributes["messaging.operation.type"] == "settle"
    assert calls["ack"].attributes["messaging.consumer.group.name"] == "c"


def test_every_way_to_send_and_receive_is_timed_and_a_failure_has_its_type(
    dsn: str,
    client: pgque.PgqueClient,
    conn: Connection,
    queue: str,
    tick: Tick,
    points: Callable[..., list[Any]],
) -> None:
    client.subscribe(queue, "c")
    client.send_batch(queue, ["a", "b"])
    pgque.send(conn, queue, "c")
    pgque.send_batch(conn, queue, ["d"])
    tick(queue)
    assert len(client.receive(queue, "c", 1)) == 1
    pgque.receive(conn, queue, "c")
    with pytest.raises(pgque.PgqueConsumerNotFoundError):
        client.receive(queue, "another")
    with pgque.WorkQueue(dsn, queue, consumer="pool") as work:
        client.subscribe(queue, "pool", "earliest")
        for message in work.messages(timeout=0):
            message.ack()  # in a call of its own
    counts = {
        (
            point.attributes["messaging.operation.name"],
            point.attributes.get("messaging.consumer.group.name"),
            point.attributes.get("error.type"),
        ): point.count
        for point in points(_CALLS)
    }
    assert counts.pop(("receive", "pool", None)) >= 2
    assert counts == {
        ("send", None, None): 3,
        ("receive", "c", None): 2,
        ("receive", "another", "PgqueConsumerNotFoundError"): 1,
        ("ack", "pool", None): 4,
    }


_MODULE = """
import pgque
worker = pgque.Worker(queue="{queue}", consumer="c", use="{use}", concurrency=2)

@worker.handler("*")
def handle(message):
    pass
"""


@pytest.mark.parametrize("use", ["threads", "processes"])
def test_pgque_work_serves_the_figures_also_of_processes(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick, wait_until: Wait, use: str
) -> None:
    client.subscribe(queue, "c")
    client.send_batch(queue, ["a", "b", "c"])
    tick(queue)
    with own_folder() as folder:
        Path(folder / "jobs.py").write_text(_MODULE.format(queue=queue, use=use))
        environment = {**os.environ, "PGQUE_DSN": dsn}
        if use == "processes":
            (folder / "figures").mkdir()
            environment["PROMETHEUS_MULTIPROC_DIR"] = str(folder / "figures")
        port = _free_port()
        command = [sys.executable, "-m", "pgque.cli", "work", "jobs:worker", "--metrics", f"127.0.0.1:{port}"]
        with ended(
            subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
        ) as process:
            wanted = f'pgque_handler_outcomes_total{{consumer="c",outcome="ack",queue="{queue}"}} 3.0'
            wait_until(lambda: wanted in _text(f"http://127.0.0.1:{port}/metrics"), timeout=60)
            process.terminate()
            process.communicate(timeout=30)


def _free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _text(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
            return str(answer.read().decode())
    except OSError:
        return ""


def test_without_prometheus_client_enabling_names_what_is_missing() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import pgque; pgque.enable_prometheus()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "./python[metrics]"' in done.stderr
