"""The changes that have a form or a question: queues, consumers, recurring messages and rights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta

from ..errors import PgqueMessageNotFoundError, PgqueQueueNotFoundError
from .change import PREVIEW, Change, Facts, Field, Place, RefusedFieldError, Statement, kept
from .page import Page, Row, in_utc

MOST_COUNTED = 10_000  # retries, dead letters or recurring messages that a question counts

RIGHTS = {
    "produce": "produce: send",
    "consume": "consume: subscribe, receive, acknowledge, read",
    "admin": "admin: both, and settings, dead letters, purge, drop",
}
KINDS = {"own": "reads on its own", "workers": "shared by workers"}
PAYLOADS = {"text": "Text", "json": "JSON", "bytes": "Bytes, in hexadecimal"}
CATCH_UP = {"one": "one: the last run", "none": "none", "all": "all, at most 1,000"}

# Settings of a new queue; its page has the others.
FIRST = (
    Field("visibility_timeout", "Lease", "for example 5 minutes; empty: the default", words="visibility"),
    Field("max_retries", "Retries", "before a message becomes a dead letter", words="max_retries"),
    Field("retention_period", "Keep messages at most", "for example 7 days", words="retention"),
    Field("max_depth", "Most pending messages", "then send is refused", words="max_depth"),
)


def at_most(count: int) -> int | str:
    """Return a count as a text, with "or more" if it is the most that is counted."""
    return f"{MOST_COUNTED:,} or more" if count >= MOST_COUNTED else count


def _may_all(page: Page) -> bool:
    return page.writable and bool(page.role["admin"])


def _to_queue(page: Page) -> Place:
    return "/queue", {"queue": page.form.need("queue")}


def _to_first(_: Page) -> Place:
    return "/", {}


def _to_access(page: Page) -> Place:
    return "/queue/access", {"queue": page.form.need("queue")}


def _queue(page: Page) -> Row:
    return page.one("select * from pgque.get_queue_info(%s)", [page.form.need("queue")])


# -- queues ------------------------------------------------------------------------


def _create_queue(page: Page) -> Statement:
    config = {one.name: page.form.get(one.name) for one in FIRST if page.form.get(one.name)}
    if not config:
        return "select pgque.create_queue(%s)", [page.form.need("new")]
    return "select pgque.create_queue(%s, %s::jsonb)", [
        page.form.need("new"),
        json.dumps(config, ensure_ascii=False),
    ]


def _created_queue(page: Page, count: int) -> str:
    name = page.form.need("new")
    if not count:
        raise RefusedFieldError("new", f"there is a queue of this name: {name}", "Choose another name.")
    page.session.rights = None
    return f"Queue {name} was created. Its consumers get messages that are sent after they subscribed."


def _lost_with_queue(page: Page) -> Facts:
    name = _queue(page)["queue_name"]
    consumers = page.rows("select lag, pending_events, role from pgque.get_consumer_info(%s)", [name])
    figures = {
        row["metric"]: row["total"]
        for row in page.rows(
            "select metric, sum(value) as total from pgque.metrics(%s) where queue is not null group by 1",
            [name],
        )
    }
    recurring = page.value(
        "select count(*) from pgque.list_recurring() as r where r.queue_name = %s",
        [name],
    )
    return [
        ("Consumers", sum(row["role"] != "coop_member" for row in consumers)),
        ("Pending, of the slowest", max((row["pending_events"] or 0 for row in consumers), default=0)),
        ("Processing", figures.get("pgque_messages_in_flight", 0)),
        ("Retries and delayed messages", figures.get("pgque_queue_retries", 0)),
        ("Dead letters", figures.get("pgque_queue_dead_letters", 0)),
        ("Recurring messages", recurring),
    ]


# -- consumers -----------------------------------------------------------------------


def _limit(page: Page) -> int | None:
    text = page.form.get("key_concurrency")
    if not text:
        return None
    if page.form.get("kind") != "workers":
        raise RefusedFieldError(
            "key_concurrency", "only workers have a limit for each key", "Choose shared by workers."
        )
    try:
        return page.form.number("key_concurrency")
    except ValueError as error:
        raise RefusedFieldError("key_concurrency", str(error)) from error


def _subscribe(page: Page) -> Statement:
    form, limit = page.form, _limit(page)
    asked = [form.need("queue"), form.need("consumer"), in_utc(form.get("start_at"))]
    if limit is not None:
        return "select pgque.subscribe(%s, %s, %s, key_concurrency => %s)", [*asked, limit]
    if form.get("kind") == "workers":
        # One that was there is not changed.
        return (
            "select case pgque.subscribe(%s, %s, %s) when 1 then pgque.share_consumer(%s, %s) else 0 end",
            [*asked, *asked[:2]],
        )
    return "select pgque.subscribe(%s, %s, %s)", asked


def _where_it_starts(page: Page) -> Facts:
    tick = page.value(
        "select pgque.tick_for(%s, %s)", [page.form.need("queue"), in_utc(page.form.get("start_at"))]
    )
    return [("Starts after tick", tick)]


def _subscribed(page: Page, count: int) -> str:
    name = page.form.need("consumer")
    if not count:
        raise RefusedFieldError(
            "consumer", f"consumer {name} is subscribed already", "Choose another name, or change this one."
        )
    return f"Consumer {name} is subscribed."


def _consumer(page: Page) -> Row:
    return page.one(
        "select * from pgque.get_consumer_info(%s, %s)", [page.form.need("queue"), page.form.need("consumer")]
    )


def key_limits(page: Page, queue: str) -> dict[str, int] | None:
    """Return the key_concurrency of the consumers that have one; None for a role that may not read it."""
    if not page.role["streams"]:
        return None
    rows = page.rows(
        "select c.co_name, s.sub_key_concurrency from pgque.subscriber as s"
        " join pgque.consumer as c on c.co_id = s.sub_consumer join pgque.queue as q"
        " on q.queue_id = s.sub_queue"
        " where q.queue_name = %s and s.sub_keyed and s.sub_main is null limit %s",
        [queue, MOST_COUNTED],
    )
    return {row["co_name"]: row["sub_key_concurrency"] for row in rows}


def _consumer_now(page: Page) -> dict[str, str]:
    limits = key_limits(page, page.form.need("queue")) or {}
    return {
        "kind": "own" if _consumer(page)["role"] == "normal" else "workers",
        "key_concurrency": str(limits.get(page.form.need("consumer"), "")),
    }


def _change_consumer(page: Page) -> Statement:
    queue, consumer, limit = page.form.need("queue"), page.form.need("consumer"), _limit(page)
    limits = key_limits(page, queue)
    both = [queue, consumer]
    if page.form.get("kind") == "own":
        if limits and consumer in limits:
            return "select pgque.set_key_concurrency(%s, %s, null), pgque.unshare_consumer(%s, %s)", both * 2
        return "select pgque.unshare_consumer(%s, %s)", both
    if _consumer(page)["role"] != "normal":
        if limit is None and limits is None:  # this role does not see the limit, so it would remove one
            raise RefusedFieldError("kind", f"consumer {consumer} is shared by workers already")
        return "select pgque.set_key_concurrency(%s, %s, %s)", [*both, limit]
    if limit is None:
        return "select pgque.share_consumer(%s, %s)", both
    return (
        "select pgque.share_consumer(%s, %s), pgque.set_key_concurrency(%s, %s, %s)",
        [*both, *both, limit],
    )


def _lost_with_consumer(page: Page) -> Facts:
    row = _consumer(page)
    facts: Facts = [
        ("Pending", row["pending_events"]),
        ("Oldest pending", row["lag"] if row["lag"] is not None else timedelta(0)),
    ]
    if page.may("admin", page.form.need("queue")):
        for title, status in (("Retries", "retry"), ("Processing", "processing")):
            count = page.value(
                "select count(*) from pgque.list_messages(%s, %s, %s, only_consumer => %s) as m",
                [page.form.need("queue"), status, MOST_COUNTED, page.form.need("consumer")],
            )
            facts.append((title, at_most(count)))
    return facts


def _unsubscribed(page: Page, count: int) -> str:
    name = page.form.need("consumer")
    if not count:
        raise PgqueQueueNotFoundError(f"consumer {name} is not subscribed", sqlstate="PQ011")
    return f"Consumer {name} was unsubscribed."


# -- recurring messages ----------------------------------------------------------------

_SCHEDULE = (
    Field("queue", "Queue", needed=True, words="queue not found"),
    Field("cron", "Schedule", "five fields of cron, six with seconds, or an interval such as 15 minutes",
          needed=True, words="schedule|cron"),
    Field("timezone", "Time zone", "for example Europe/Berlin", default="UTC", needed=True,
          words="time zone"),
    Field("type", "Type", default="default", needed=True),
    Field("kind", "Payload is", choices=PAYLOADS, default="text"),
    Field("payload", "Payload", rows=6, words="hexadecimal"),
    Field("headers", "Headers, a JSON object", rows=3, words="header|json"),
    Field("key", "Key", "replaces the message with this key that is pending"),
    Field("partition_key", "Partition key", "orders messages of consumers with a limit for each key"),
    Field("delay", "Delay", "for example 5 minutes"),
    Field("ttl", "Time to live", "for example 1 hour", words="ttl"),
    Field("catch_up", "Missed runs that are sent", choices=CATCH_UP, default="one"),
    Field("starts_at", "No run before", "with a zone, for example 2030-01-31 14:30+00", words="starts_at"),
    Field("ends_at", "No run after", "with a zone", words="ends_at"),
)  # fmt: skip

_RECURRING_OPTIONS = (
    " headers => %(headers)s::jsonb, key => %(key)s, delay => %(delay)s::interval, ttl => %(ttl)s::interval,"
    " partition_key => %(partition_key)s, timezone => %(timezone)s, catch_up => %(catch_up)s,"
    " starts_at => %(starts_at)s::timestamptz, ends_at => %(ends_at)s::timestamptz)"
)


def _create_recurring(page: Page, now: Mapping[str, str] | None = None) -> Statement:
    form, stored = page.form, now or {}
    values = {
        one.name: kept(form.get(one.name), stored.get(one.name, ""), bool(one.rows)) for one in _SCHEDULE
    }
    asked: dict[str, object] = {name: value or None for name, value in values.items()}
    asked |= {"name": form.need("name"), "payload": values["payload"]}
    if form.get("kind") == "json":
        return (
            "select pgque.create_recurring(%(name)s, %(queue)s, %(cron)s, %(type)s, %(payload)s::jsonb,"
            + (_RECURRING_OPTIONS),
            asked,
        )
    if form.get("kind") == "bytes":
        try:
            asked["payload"] = bytes.fromhex(values["payload"].removeprefix("\\x"))
        except ValueError as error:
            raise RefusedFieldError(
                "payload", "the payload is no hexadecimal number", "As in 00 ff 1e."
            ) from error
        return (
            "select pgque.create_recurring(%(name)s, %(queue)s, %(cron)s, %(type)s, %(payload)s::bytea,"
            + (_RECURRING_OPTIONS),
            asked,
        )
    return "select pgque.create_recurring(%(name)s, %(queue)s, %(cron)s, %(type)s, %(payload)s::text," + (
        _RECURRING_OPTIONS
    ), asked


def _recurring(page: Page) -> Row:
    name = page.form.need("name")
    # As text, which keeps a month, a number of many digits, and a year above 9999.
    row = page.one(
        "select r.name, r.queue_name, r.cron, r.timezone, r.type_name, r.payload, r.payload_bytes,"
        " r.headers::text as headers, r.key, r.partition_key, r.delay::text as delay, r.ttl::text as ttl,"
        " r.catch_up, r.starts_at::text as starts_at, r.ends_at::text as ends_at, r.created_by,"
        " r.created_at::text as created_at from pgque.list_recurring() as r where r.name = %s",
        [name],
    )
    if not row:
        raise PgqueMessageNotFoundError(f"recurring message not found: {name}", sqlstate="PQ010")
    return row


def _new_recurring(page: Page) -> Statement:
    name = page.form.need("name")
    if page.value("select true from pgque.list_recurring() as r where r.name = %s", [name]):
        raise RefusedFieldError(
            "name", f"there is a recurring message of this name: {name}", "Choose another name, or change it."
        )
    return _create_recurring(page)


def _changed_recurring(page: Page) -> Statement:
    return _create_recurring(page, _recurring_now(page))  # one that was deleted is not created again


def _recurring_seen(page: Page) -> Row:
    hidden = ("payload", "payload_bytes", "headers") if page.hides_payloads else ()
    return {name: value for name, value in _recurring(page).items() if name not in hidden}


def _recurring_now(page: Page) -> dict[str, str]:
    row = _recurring(page)
    if page.site.config.hide_payloads:
        raise RefusedFieldError(
            "payload", "payloads are hidden, so this page cannot change a recurring message"
        )
    kind = "bytes" if row["payload_bytes"] is not None else "text"
    now = {one.name: row.get(one.name) for one in _SCHEDULE}
    now |= {"queue": row["queue_name"], "type": row["type_name"], "kind": kind}
    if kind == "bytes":
        now["payload"] = row["payload_bytes"].hex()
    return {name: "" if value is None else str(value) for name, value in now.items()}


def _may_send(page: Page) -> bool:
    queue = page.form.get("queue")
    return page.writable and (not queue or page.may("produce", queue))


def _may_recurring(page: Page) -> bool:
    row = _recurring(page)
    return page.writable and (row["created_by"] == page.role["name"] or page.may("admin", row["queue_name"]))


def _runs_next(page: Page) -> Facts:
    row = _recurring(page)
    return [("Queue", row["queue_name"]), ("Schedule", f"{row['cron']} {row['timezone']}")]


def _next_runs(page: Page) -> Facts:
    if not page.role["writer"]:  # a role with a right to single queues may not call it
        return []
    asked = [page.form.get(name) or None for name in ("cron", "timezone", "starts_at", "ends_at")]
    rows = page.rows(
        "select r as run from pgque.next_runs(%s, %s, 5, %s::timestamptz, %s::timestamptz) as r", asked
    )
    return [(f"Run {n}", row["run"]) for n, row in enumerate(rows, 1)]


def _to_recurring(_: Page) -> Place:
    return "/recurring", {}


# -- rights ------------------------------------------------------------------------------


def _granted(page: Page, count: int) -> str:
    role, right = page.form.need("role"), page.form.need("right")
    return f"Role {role} has the right {right}." if count else f"Role {role} had the right {right} already."


def _revoked(page: Page, count: int) -> str:
    role, right = page.form.need("role"), page.form.need("right")
    return (
        f"Role {role} has lost the right {right}."
        if count
        else f"Role {role} did not have the right {right}."
    )


CHANGES = (
    Change(
        "/queue/create",
        "Create a queue",
        "Create queue {new}",
        _create_queue,
        _may_all,
        _created_queue,
        lambda page: ("/queue", {"queue": page.form.need("new")}),
        _to_first,
        fields=(Field("new", "Name", "1 to 57 bytes", needed=True, words="queue name"), *FIRST),
    ),
    Change(
        "/queue/drop",
        "Drop queue {queue}?",
        "Drop the queue",
        lambda page: ("select pgque.drop_queue(%s, true)", [page.form.need("queue")]),
        lambda page: page.may_change("admin", page.form.need("queue")),
        lambda page, _: f"Queue {page.form.need('queue')} was dropped.",
        _to_first,
        _to_queue,
        about=("queue",),
        text="The queue is removed with its messages, retries, dead letters and consumers. Programs that send"
        " to it or receive from it fail with PQ001. This cannot be undone.",
        facts=_lost_with_queue,
        typed="queue",
        danger=True,
    ),
    Change(
        "/queue/purge",
        "Purge this queue?",
        "Purge the queue",
        lambda page: ("select pgque.purge(%s)", [page.form.need("queue")]),
        lambda page: page.may_change("admin", page.form.need("queue")),
        lambda page, count: f"The queue is empty. The slowest consumer had {count:,} messages ahead of it.",
        _to_queue,
        about=("queue",),
        text="Every message of the queue is removed for all consumers: pending, processing, delayed, retry."
        " Dead letters and the archive stay. This cannot be undone.",
        facts=lambda page: [
            (
                "Messages that the slowest consumer has ahead of it",
                page.value(
                    "select max(pending_events) from pgque.get_consumer_info(%s)", [page.form.need("queue")]
                ),
            )
        ],
        danger=True,
    ),
    Change(
        "/queue/subscribe",
        "Subscribe a consumer to queue {queue}",
        "Subscribe consumer {consumer}",
        _subscribe,
        lambda page: page.may_change("consume", page.form.need("queue")),
        _subscribed,
        _to_queue,
        about=("queue",),
        fields=(
            Field("consumer", "Name", "1 to 1000 bytes", needed=True, words="consumer name"),
            Field("kind", "Kind", choices=KINDS, default="workers"),
            Field(
                "start_at",
                "Starts at",
                "earliest, latest, a tick, or a time in UTC such as 2030-01-31T14:30",
                default="latest",
                listed=("latest", "earliest"),
                needed=True,
                words="start_at|tick|timestamp",
            ),
            Field(
                "key_concurrency",
                "Messages of one key at a time",
                "key_concurrency, for workers; 1 keeps their order, empty is no limit",
                words="key_concurrency",
            ),
        ),
        facts=_where_it_starts,
    ),
    Change(
        "/queue/consumer",
        "Change consumer {consumer}",
        "Change consumer {consumer}",
        _change_consumer,
        lambda page: page.may_change("consume", page.form.need("queue")),
        lambda page, _: f"Consumer {page.form.need('consumer')} is {KINDS[page.form.need('kind')]}.",
        _to_queue,
        about=("queue", "consumer"),
        fields=(
            Field("kind", "Kind", choices=KINDS, words="subconsumers"),
            Field(
                "key_concurrency",
                "Messages of one key at a time",
                "key_concurrency, for workers; 1 keeps their order, empty is no limit",
                words="key_concurrency",
            ),
        ),
        text="Its position and its retries stay. When the kind changes, leased messages are redelivered."
        " Programs have to receive as the new kind does: with the name of a worker, or without.",
        current=_consumer_now,
        seen=_consumer_now,
    ),
    Change(
        "/queue/unsubscribe",
        "Unsubscribe consumer {consumer}?",
        "Unsubscribe",
        lambda page: (
            "select pgque.unsubscribe(%s, %s)",
            [page.form.need("queue"), page.form.need("consumer")],
        ),
        lambda page: page.may_change("consume", page.form.need("queue")),
        _unsubscribed,
        _to_queue,
        about=("queue", "consumer"),
        text="The consumer is removed with its position, its workers and its retries. Its pending"
        " messages are not delivered to it, also if it subscribes again. Dead letters stay.",
        facts=_lost_with_consumer,
        danger=True,
    ),
    Change(
        "/queue/grant",
        "Grant a right to queue {queue}",
        "Grant {right} to {role}",
        lambda page: (
            "select pgque.grant_queue(%s, %s, %s)",
            [page.form.need("queue"), page.form.need("role"), page.form.need("right")],
        ),
        _may_all,
        _granted,
        _to_access,
        about=("queue",),
        fields=(
            Field("role", "Role", "a role of the server, as in pg_roles", needed=True, words="^role"),
            Field("right", "Right", choices=RIGHTS, default="consume"),
        ),
        text="The role becomes a member of pgque_user, which gives no right to a queue.",
    ),
    Change(
        "/queue/revoke",
        "Revoke {right} from {role}?",
        "Revoke",
        lambda page: (
            "select pgque.revoke_queue(%s, %s, %s)",
            [page.form.need("queue"), page.form.need("role"), page.form.need("right")],
        ),
        _may_all,
        _revoked,
        _to_access,
        about=("queue", "role", "right"),
        text="The next call of the role that needs this right is refused, unless it is a member of a role"
        " that has the right.",
        danger=True,
    ),
    Change(
        "/recurring/create",
        "Create a recurring message",
        "Create {name}",
        _new_recurring,
        _may_send,
        lambda page, _: f"Recurring message {page.form.need('name')} was created.",
        _to_recurring,
        facts=_next_runs,
        fields=(
            Field("name", "Name", "1 to 200 bytes", needed=True, words="name of a recurring"),
            *_SCHEDULE,
        ),
        text="At each run, the role that created it needs the right to send to the queue.",
    ),
    Change(
        "/recurring/change",
        "Change {name}",
        "Change {name}",
        _changed_recurring,
        _may_recurring,
        lambda page, _: f"Recurring message {page.form.need('name')} was changed.",
        _to_recurring,
        about=("name",),
        fields=_SCHEDULE,
        text="From now on it is sent with the rights of the role that is logged in here. The next run"
        " stays the same unless the schedule or its zone changes.",
        facts=_next_runs,
        current=_recurring_now,
        seen=_recurring_seen,
    ),
    Change(
        "/recurring/drop",
        "Delete {name}?",
        "Delete",
        lambda page: ("select pgque.drop_recurring(%s)", [page.form.need("name")]),
        _may_recurring,
        lambda page, _: f"Recurring message {page.form.need('name')} was deleted.",
        _to_recurring,
        about=("name",),
        text="It is not sent again. Messages that were sent stay.",
        facts=_runs_next,
        seen=_recurring_seen,
        danger=True,
    ),
)

READS = {change.path: change.show for change in CHANGES}
ASKS = {change.path + PREVIEW: change.ask for change in CHANGES if change.fields}
RUNS = {change.path: change.run for change in CHANGES}
