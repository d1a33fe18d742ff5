"""The consumers of the demo, each in its own process."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from ..twins.consumer import Consumer
from ..twins.workers import Worker
from ..types import Message

QUEUE = "pgque_demo"
COMPILER = "compile"
SIZES = "sizes"
RETRY_AFTER = 0.2  # seconds
SEND_AT_ONCE = 200
RECEIVE_AT_ONCE = 50

TABLES = """
drop schema if exists pgque_demo cascade;
create schema pgque_demo;
create table pgque_demo.compiled (
  msg_id   bigint primary key,
  name     text not null,
  worker   text not null,
  attempt  int not null,
  seconds  double precision not null
);
create table pgque_demo.sized (
  msg_id   bigint primary key,
  package  text not null,
  bytes    bigint not null,
  seconds  double precision not null
);
"""


def compile_worker(dsn: str, name: str) -> None:
    """Compile files, or parse lines, as one of several workers of a consumer, until SIGTERM."""
    logging.getLogger("pgque.worker").setLevel(logging.ERROR)  # failing files are part of the demo
    warnings.simplefilter("ignore")
    worker = Worker(
        dsn,
        queue=QUEUE,
        consumer=COMPILER,
        worker=name,
        concurrency=1,
        prefetch=RECEIVE_AT_ONCE,
        retry_after=RETRY_AFTER,
    )

    def record(message: Message, what: str) -> None:
        # A message may come twice, so once is enough.
        conn.execute(
            "insert into pgque_demo.compiled (msg_id, name, worker, attempt, seconds)"
            " values (%s, %s, %s, %s, extract(epoch from clock_timestamp() - %s))"
            " on conflict (msg_id) do nothing",
            (message.msg_id, what, name, message.receive_count, message.created_at),
        )

    @worker.handler("file")
    def compile_file(message: Message) -> None:
        path = _payload(message)["path"]
        compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        record(message, path)

    @worker.handler("line")
    def parse_line(message: Message) -> None:
        record(message, type(message.json()).__name__)

    own = make_conninfo(dsn, application_name="pgque demo records")
    with psycopg.connect(own, autocommit=True, prepare_threshold=None) as conn:
        worker.run()


def size_worker(dsn: str) -> None:
    """Add up sizes by package, as a consumer of its own, until SIGTERM."""
    logging.getLogger("pgque.consumer").setLevel(logging.ERROR)
    consumer = Consumer(
        dsn,
        queue=QUEUE,
        consumer=SIZES,
        transactional=True,
        retry_after=RETRY_AFTER,
        max_messages=SEND_AT_ONCE,
        poll_interval=5,
    )

    @consumer.handler("*")
    def add(message: Message, conn: psycopg.Connection[object]) -> None:
        if message.type == "file":
            file = _payload(message)
            package, size = file["package"], int(file["size"])
        else:
            package, size = type(message.json()).__name__, len((message.payload or "").encode())
        conn.execute(
            "insert into pgque_demo.sized (msg_id, package, bytes, seconds)"
            " values (%s, %s, %s, extract(epoch from clock_timestamp() - %s))",
            (message.msg_id, package, size, message.created_at),
        )

    consumer.run()


def _payload(message: Message) -> dict[str, str]:
    value = message.json()
    if not isinstance(value, dict):
        raise TypeError(f"message {message.msg_id} is not an object")
    return value
