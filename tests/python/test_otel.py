"""OpenTelemetry: a handler's span continues the context of the sender."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import pgque

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]

_exporter = InMemorySpanExporter()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """What was traced, with tracing enabled."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(_exporter))
        trace.set_tracer_provider(provider)
    _exporter.clear()
    pgque.enable_opentelemetry()
    yield _exporter
    pgque.enable_opentelemetry(False)


def test_a_handler_continues_the_trace_of_the_sender(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick, wait_until: Wait, spans: InMemorySpanExporter
) -> None:
    client.subscribe(queue, "c")
    seen: list[tuple[str | None, int, dict[str, object] | None]] = []
    worker = pgque.Worker(dsn, queue=queue, consumer="c")

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append((message.payload, trace.get_current_span().get_span_context().trace_id, message.headers))

    with trace.get_tracer("test").start_as_current_span("request") as request:
        msg_id = client.send(queue, "a", headers={"mine": 1})
        client.send_batch(queue, "t", ["b"])
        with pgque.WorkQueue(dsn, queue) as work:
            work.send("c")
    client.send(queue, "untraced")
    tick(queue)
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_until(lambda: len(seen) == 4)
    worker.stop()
    thread.join(10)
    context = request.get_span_context()
    traces = {payload: trace_id for payload, trace_id, _ in seen}
    assert [traces[payload] for payload in ("a", "b", "c")] == [context.trace_id] * 3
    assert traces["untraced"] != context.trace_id
    headers = {payload: headers for payload, _, headers in seen}
    assert set(headers["a"] or {}) == {"mine", "traceparent"}
    assert headers["untraced"] is None
    [handled] = [
        span
        for span in spans.get_finished_spans()
        if span.attributes and span.attributes.get("messaging.message.id") == str(msg_id)
    ]
    assert handled.kind is trace.SpanKind.CONSUMER
    assert handled.parent is not None
    assert handled.parent.span_id == context.span_id
    assert handled.attributes is not None
    assert handled.attributes["messaging.destination.name"] == queue


def test_the_span_of_a_batch_is_linked_to_those_of_the_senders(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick, spans: InMemorySpanExporter
) -> None:
    client.subscribe(queue, "c")
    senders = []
    for name in ("first", "second"):
        with trace.get_tracer("test").start_as_current_span(name) as sender:
            client.send(queue, name)
        senders.append(sender.get_span_context().span_id)
    client.send(queue, "untraced")
    tick(queue)
    worker = pgque.Worker(dsn, queue=queue, consumer="c")
    worker.batch_handler("*")(lambda messages: None)
    worker.run(until_idle=True)
    [span] = [span for span in spans.get_finished_spans() if span.kind is trace.SpanKind.CONSUMER]
    assert [link.context.span_id for link in span.links] == senders
    assert span.attributes is not None and span.attributes["messaging.batch.message_count"] == 3


def test_a_failure_is_recorded_in_the_span_and_async_handlers_have_one_too(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick, spans: InMemorySpanExporter
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "x")
    tick(queue)

    async def call() -> None:
        worker = pgque.AsyncWorker(dsn, queue=queue, consumer="c", retry_after=3600)

        @worker.handler("*")
        async def handle(message: pgque.Message) -> None:
            worker.stop()
            raise RuntimeError("on purpose")

        await worker.run()

    asyncio.run(asyncio.wait_for(call(), 20))
    [span] = spans.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert [event.name for event in span.events] == ["exception"]


def test_without_opentelemetry_nothing_changes_and_enabling_it_names_what_is_missing() -> None:
    code = """
        import sys
        sys.modules["opentelemetry"] = None
        import pgque
        try:
            pgque.enable_opentelemetry()
        except ImportError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert 'pip install "./python[otel]"' in done.stdout


def test_nothing_is_added_to_headers_unless_it_was_enabled(
    client: pgque.PgqueClient, queue: str, tick: Tick, spans: InMemorySpanExporter
) -> None:
    pgque.enable_opentelemetry(False)
    client.subscribe(queue, "c")
    with trace.get_tracer("test").start_as_current_span("request"):
        client.send(queue, "x")
    tick(queue)
    [message] = client.receive(queue, "c")
    assert message.headers is None
