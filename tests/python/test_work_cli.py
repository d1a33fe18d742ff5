"""The commands for work queues and their operation, run as processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

import pgque
from pgque.cli import main

Tick = Callable[[str], int | None]
Connection = psycopg.Connection[tuple[Any, ...]]
Run = Callable[..., str]


@pytest.fixture
def run(dsn: str) -> Run:
    """Run the command in this process: run("send", queue, "x", code=0) gives what it printed."""

    def do(*arguments: str, code: int = 0, stdin: str | None = None) -> str:
        result = CliRunner().invoke(main, list(arguments), env={"PGQUE_DSN": dsn}, input=stdin)
        assert result.exit_code == code, result.output
        return result.output

    return do


@pytest.fixture
def pool(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c."""
    client.subscribe(queue, "c")
    return queue


def _received(run: Run, queue: str, *options: str) -> list[dict[str, Any]]:
    text = run("receive", queue, "c", "--worker", "w1", "--no-ack", "--json", *options)
    return [json.loads(line) for line in text.splitlines()]


def test_a_message_is_sent_with_all_its_options(run: Run, pool: str, tick: Tick) -> None:
    text = run(
        "send",
        pool,
        "x",
        "--key",
        "k",
        "--header",
        "a=1",
        "--header",
        "b=2=3",
        "--ttl",
        "1h",
        "--partition-key",
        "p",
    )
    run("send", pool, "later", "--delay", "1h")
    run("send", pool, "at", "--deliver-at", "2099-01-01 00:00:00")
    tick(pool)
    [message] = _received(run, pool)
    assert message["msg_id"] == int(text)
    assert (message["key"], message["headers"], message["extra1"]) == ("k", {"a": "1", "b": "2=3"}, "p")
    assert message["expires_at"] is not None
    assert len(json.loads(run("messages", pool, "--status", "delayed", "--json"))) == 2
    run("send", pool, "x", "--header", "nonsense", code=2)
    run("send", pool, "x", "--delay", "soon", code=2)


def test_a_worker_receives_and_gives_each_message_an_outcome(run: Run, pool: str, tick: Tick) -> None:
    run("send", pool, "--lines", stdin="".join(f"{n}\n" for n in range(6)))
    tick(pool)
    messages = _received(run, pool, "--visibility-timeout", "1m")
    batch = str(messages[0]["batch_id"])
    ids = [str(message["msg_id"]) for message in messages]
    [worker] = json.loads(run("workers", pool, "--json"))
    assert (worker["worker"], worker["messages"]) == ("w1", 6)
    assert "w1" in run("workers", pool, "c")
    assert run("extend", batch, "1m") == "6 leased\n"
    run("ack", batch, ids[0])
    run("nack", batch, ids[1], "--after", "1h", "--reason", "later")
    run("dead", batch, ids[2], "--reason", "no good")
    run("dead", batch, code=2)
    assert ids[0] in run("ack", batch, ids[0], code=3)
    assert "later" in run("message", pool, ids[1])
    assert json.loads(run("message", pool, ids[1], "--json"))[0]["status"] == "retry"
    assert run("release", batch, ids[3]) == "1 released\n"
    assert run("release", batch) == "2 released\n"
    assert run("extend", batch, "1m", code=3) == "0 leased\n"
    assert len(_received(run, pool)) >= 1
    assert "no good" in run("dlq", "list", pool)


def test_an_outcome_that_is_refused_leaves_the_others_standing(run: Run, pool: str, tick: Tick) -> None:
    run("send", pool, "--lines", stdin="".join(f"{n}\n" for n in range(4)))
    tick(pool)
    messages = _received(run, pool, "--visibility-timeout", "1m")
    batch = str(messages[0]["batch_id"])
    ids = [str(message["msg_id"]) for message in messages]
    for number, verb in enumerate(["ack", "nack", "dead"]):
        assert "999999999: " in run(verb, batch, ids[number], "999999999", code=3)
    assert run("release", batch) == "1 released\n"
    assert run("ack", batch, code=3) == f"batch {batch} is not open\n"


def test_bytes_are_printed_as_postgresql_shows_them(
    run: Run, client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    client.send_batch(pool, "t", [b"\x00\xff", b""])
    tick(pool)
    assert run("receive", pool, "c") == "\\x00ff\n\\x\n"


def test_a_consumer_is_shared_by_workers_and_read_on_its_own_again(run: Run, pool: str, tick: Tick) -> None:
    run("send", pool, "x")
    tick(pool)
    run("receive", pool, "c", "--no-ack")
    assert "share_consumer" in run("receive", pool, "c", "--worker", "w1", code=1)
    assert run("share", pool, "c") == f"workers share consumer c of queue {pool} now\n"
    assert run("share", pool, "c") == f"workers share consumer c of queue {pool} already\n"
    assert [message["payload"] for message in _received(run, pool)] == ["x"]
    assert run("key-concurrency", pool, "c", "2") == f"consumer c of queue {pool} has key_concurrency 2 now\n"
    assert "has key_concurrency none now" in run("key-concurrency", pool, "c", "none")
    assert run("unshare", pool, "c") == f"consumer c of queue {pool} reads on its own now\n"
    assert run("unshare", pool, "c") == f"consumer c of queue {pool} reads on its own already\n"
    assert run("receive", pool, "c") == "x\n"


def test_batches_are_reclaimed_and_queues_purged(run: Run, pool: str, tick: Tick) -> None:
    run("send", pool, "x", "--key", "k")
    run("send", pool, "y")
    tick(pool)
    _received(run, pool, "--max", "1")
    assert run("reclaim", pool, "c", "--older-than", "1h") == "0 reclaimed\n"
    assert run("reclaim", pool, "c") == "1 reclaimed\n"
    assert run("retry-now", pool, "c") == "0 due now\n"
    run("purge", pool, stdin="n\n", code=1)
    assert run("purge", pool, "--yes").strip() == "2 removed"
    run("send", pool, "x", "--key", "k")
    tick(pool)
    assert run("purge", pool, "--key", "k", "--yes") == "1 removed\n"


def test_what_failed_is_archived_and_sent_again(
    run: Run, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Callable[..., None]
) -> None:
    run("config", "set", pool, "max_receive_attempts", "1")
    run("send", pool, "x")
    tick(pool)
    [message] = _received(run, pool, "--visibility-timeout", "1s")
    wait_until(lambda: client.receive(pool, "c", worker="w2") == [] and client.dlq.inspect(pool) != [])
    [poison] = json.loads(run("poison", "list", pool, "--json"))
    assert poison["msg_id"] == message["msg_id"]
    assert run("poison", "archive", pool) == "1 archived\n"
    [archived] = json.loads(run("archive", "list", pool, "--since", "2020-01-01", "--json"))
    assert archived["msg_id"] == message["msg_id"]
    assert str(archived["archive_id"]) in run("archive", "list", pool)
    assert int(run("archive", "replay", str(archived["archive_id"]))) > message["msg_id"]
    assert "days dropped" in run("archive", "purge", pool, "--older-than", "3650d")


def test_dead_letters_are_sent_again_to_all(
    run: Run, client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    msg_id = int(run("send", pool, "x"))
    tick(pool)
    [message] = _received(run, pool)
    run("dead", str(message["batch_id"]), str(msg_id))
    [letter] = client.dlq.inspect(pool)
    assert int(run("dlq", "replay", str(letter.dl_id))) > msg_id


def test_settings_are_shown_and_changed(run: Run, pool: str) -> None:
    before = run("config", "get", pool, "max_receive_attempts")
    run("config", "set", pool, "max_receive_attempts", "9")
    assert run("config", "get", pool, "max_receive_attempts") == "9\n"
    assert json.loads(run("config", "get", pool, "--json"))["max_receive_attempts"] == "9"
    run("config", "set", pool, "max_receive_attempts")
    run("config", "default", "max_receive_attempts", "8")
    try:
        assert run("config", "get", pool, "max_receive_attempts") == "8\n"
    finally:
        run("config", "default", "max_receive_attempts")
    assert run("config", "get", pool, "max_receive_attempts") == before
    assert "visibility_timeout" in run("config", "get", pool)
    run("config", "get", pool, "nonsense", code=2)
    run("config", "set", pool, "nonsense", "1", code=1)


def test_queues_are_made_paused_renamed_and_dropped(run: Run, client: pgque.PgqueClient, queue: str) -> None:
    name = f"{queue}_cli"
    run("create", name, "--set", "max_retries=3", "--subscribe", "c")
    assert run("config", "get", name, "max_retries") == "3\n"
    run("subscribe", name, "d", "--from", "earliest", "--keyed-order")
    run("unsubscribe", name, "d")
    run("pause", name)
    run("send", name, "x", code=1)
    run("resume", name)
    run("send", name, "x")
    client.force_next_tick(name)
    client.ticker(name)
    assert "x" in run("peek", name)
    run("rename", name, f"{name}_2")
    run("drop", f"{name}_2", code=1)
    run("drop", f"{name}_2", "--force")
    run("peek", f"{name}_2", code=1)


def test_rights_to_a_queue_are_given_and_taken(run: Run, pool: str, conn: Connection, nobody: Any) -> None:
    def rights() -> list[tuple[str]]:
        return conn.execute(
            "select r.right_name from pgque.queue_right as r where r.right_role = %s::regrole", [nobody.name]
        ).fetchall()

    run("grant", pool, nobody.name, "consume")
    assert rights() == [("consume",)]
    assert "no such role" in run("grant", pool, "no such role", "consume", code=1)
    run("grant", pool, nobody.name, "everything", code=2)
    run("revoke", pool, nobody.name, "consume")
    assert rights() == []


def test_figures_are_shown_for_all_queues_or_one(run: Run, pool: str) -> None:
    rows = json.loads(run("metrics", pool, "--json"))
    assert {row["queue"] for row in rows} == {pool}
    assert pool in run("metrics")


def test_what_expired_is_taken_out_and_the_schedule_set(run: Run, pool: str) -> None:
    assert run("expire", pool) == "0 expired\n"
    assert run("delete-expired", pool) == "0 deleted\n"
    assert run("schedule", "expire", "5 minutes") == "expire runs every 5 minutes\n"
    run("schedule", "expire", "now and then", code=1)
    assert run("schedule", "expire", "") == "expire does not run by itself\n"
