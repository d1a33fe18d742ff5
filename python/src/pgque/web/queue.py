"""The page of one queue: its state, consumers, workers and settings."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from uuid import UUID

from starlette.responses import Response

from ..errors import PgqueBadArgumentError, PgqueBatchNotFoundError
from ..ops.overview import MOST_READERS, READERS_QUERY, WORKERS_QUERY
from . import chart, overview, settings
from .change import Statement
from .changes import MOST_COUNTED, RIGHTS, key_limits
from .page import Page, Row, in_utc

MOST_LEASED = 100_000  # messages among which those of a worker are looked for
MOST_BATCHES = 500  # of a worker that one request releases


def show(page: Page) -> Response:
    """Show everything about one queue."""
    name = page.form.need("queue")
    info = page.one(
        "select i.*, pgque.clock() - i.queue_switch_time as rotation_age from pgque.get_queue_info(%s) as i",
        [name],
    )
    readers = {"queue": name, "most": MOST_READERS}
    consumers, workers = page.rows(READERS_QUERY, readers), page.rows(WORKERS_QUERY, readers)
    named = [row["consumer_name"] for row in consumers if row["role"] != "coop_member"]
    admin = page.may("admin", name)
    return page.shown(
        "queue.html",
        queue=info["queue_name"],
        info=info,
        figures=overview.of_one(page, info),
        consumers=consumers,
        workers=workers,
        key_limits=key_limits(page, name),
        **settings.form(page, name),
        may_admin=admin and page.writable,
        may_see_messages=admin or page.may("consume", name),
        is_admin=admin,
        may_consume=page.may_change("consume", name),
        may_send=page.may_change("produce", name),
        charts=chart.shown(page, info["queue_name"], named),
    )


def show_access(page: Page) -> Response:
    """Show which roles have rights to the queue alone."""
    name = page.form.need("queue")
    info = page.one("select i.queue_name from pgque.get_queue_info(%s) as i", [name])
    rows = page.rows(
        "select a.rolname::text as role, r.right_name from pgque.queue_right as r"
        " join pgque.queue as q on q.queue_id = r.right_queue"
        " join pg_catalog.pg_roles as a on a.oid = r.right_role"
        " where q.queue_name = %s and r.right_valid order by 1, 2 limit %s",
        [info["queue_name"], MOST_COUNTED],
    )
    return page.shown(
        "access.html", queue=info["queue_name"], rows=rows, rights=RIGHTS, may_change=page.writable
    )


def pause(page: Page) -> Response:
    """Close the queue for senders."""
    name = page.form.need("queue")
    page.value("select pgque.pause(%s)", [name])
    return page.done(
        "The queue is paused: senders get an error, consumers still receive.", "/queue", queue=name
    )


def resume(page: Page) -> Response:
    """Open the queue for senders again."""
    name = page.form.need("queue")
    page.value("select pgque.resume(%s)", [name])
    return page.done("The queue is open for senders.", "/queue", queue=name)


def reclaim(page: Page) -> Response:
    """Release the batches of a consumer's workers."""
    name, consumer = page.form.need("queue"), page.form.need("consumer")
    count = page.value("select pgque.reclaim(%s, %s)", [name, consumer])
    return page.done(
        f"Released {count:,} {'batch' if count == 1 else 'batches'} of consumer {consumer}."
        " Their messages are redelivered.",
        "/queue",
        queue=name,
    )


def reclaim_worker(page: Page) -> Response:
    """Release the batches of one worker. A batch that it has finished meanwhile is left out."""
    name, consumer, worker = (page.form.need(field) for field in ("queue", "consumer", "worker"))
    batches = page.rows(
        "select distinct m.batch_id from pgque.list_messages(%s, 'processing', %s, only_consumer => %s)"
        " as m where m.worker = %s and m.batch_id is not null limit %s",
        [name, MOST_LEASED, consumer, worker, MOST_BATCHES],
    )
    count = 0
    for row in batches:
        with suppress(PgqueBatchNotFoundError):
            count += page.value("select pgque.release(%s)", [row["batch_id"]])
    return page.done(
        f"Released {count:,} {'message' if count == 1 else 'messages'} of worker {worker}."
        " They are redelivered at once."
        if count
        else f"Worker {worker} has no lease now. Its messages are redelivered.",
        "/queue",
        queue=name,
    )


def retry_now(page: Page) -> Response:
    """Make all retries of a consumer due."""
    name, consumer = page.form.need("queue"), page.form.need("consumer")
    count = page.value("select pgque.retry_now(%s, %s)", [name, consumer])
    return page.done(
        f"{count:,} {'retry' if count == 1 else 'retries'} of consumer {consumer} are due now.",
        "/queue",
        queue=name,
    )


def _position(page: Page) -> tuple[str, str, Row]:
    name, consumer = page.form.need("queue"), page.form.need("consumer")
    return name, consumer, page.one("select * from pgque.get_consumer_info(%s, %s)", [name, consumer])


def ask_seek(page: Page) -> Response:
    """Show where a consumer stands, and what a move to another place skips or repeats."""
    name, consumer, info = _position(page)
    wanted, target, tick, incarnation = page.form.get("to"), None, None, None
    facts: list[tuple[str, object]] = [
        ("Stands at tick", info["last_tick"]),
        ("Messages ahead of it", info["pending_events"]),
        ("Oldest pending", info["lag"] if info["lag"] is not None else timedelta(0)),
    ]
    if wanted:
        # The queue may be dropped and created again before the button is pressed.
        incarnation = page.value("select pgque.queue_incarnation(%s)", [name])
        target = page.value("select pgque.tick_for(%s, %s, %s)", [name, in_utc(wanted), incarnation])
        tick = int(target)
        between = _between(page, name, info["last_tick"], tick)
        word = "Skips" if tick >= info["last_tick"] else "Repeats"
        facts.append((f"{word}, in messages", between))
    return page.shown(
        "seek.html",
        queue=info["queue_name"],
        consumer=consumer,
        facts=facts,
        wanted=wanted,
        tick=tick,
        incarnation=incarnation,
        sql=page.sql(*_seek(name, consumer, tick, incarnation)) if tick is not None else "",
        allowed=page.may_change("consume", name),
        back=("/queue", {"queue": name}),
    )


def _seek(name: str, consumer: str, tick: int, incarnation: UUID | None) -> Statement:
    return "select pgque.seek(%s, %s, %s, force => true, incarnation => %s)", [
        name, consumer, tick, incarnation,
    ]  # fmt: skip


def _between(page: Page, name: str, one: int, other: int) -> int | None:
    """Return how many ids lie between two ticks, or None for a role that may not read ticks."""
    if not page.role["admin"]:
        return None
    number = page.value("select q.queue_id from pgque.queue as q where q.queue_name = %s", [name])
    # With constants the tables of other queues are left alone.
    count: int | None = page.value(
        "select abs(max(t.tick_event_seq) filter (where t.tick_id = %(one)s)"
        " - max(t.tick_event_seq) filter (where t.tick_id = %(other)s))"
        " from pgque.tick as t where t.slot in (%(a)s, %(b)s, %(c)s) and t.tick_id in (%(one)s, %(other)s)",
        {"one": one, "other": other, "a": number * 3, "b": number * 3 + 1, "c": number * 3 + 2},
    )
    return count


def _incarnation(text: str) -> UUID | None:
    """Return the field of the form, None if it has none. Raises PgqueBadArgumentError."""
    try:
        return UUID(text) if text else None
    except ValueError:
        raise PgqueBadArgumentError(f"the field incarnation is no UUID: {text[:50]!r}") from None


def seek(page: Page) -> Response:
    """Move a consumer."""
    name, consumer, info = _position(page)
    tick = page.form.number("tick")
    if info["role"] != "normal":
        raise PgqueBadArgumentError(f"consumer {consumer} has workers, so it cannot be moved")
    at = page.value(*_seek(name, consumer, tick, _incarnation(page.form.get("incarnation"))))
    return page.done(f"Consumer {consumer} stands at tick {at}.", "/queue", queue=name)
