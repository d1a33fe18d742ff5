"""Dead letters: by reason and one by one; requeue, replay and delete them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import psycopg
from starlette.responses import Response

from ..errors import PgqueBadArgumentError, from_psycopg
from . import export
from .jobs import Call, Job, More
from .page import SHOWN, Form, Page, Row, own

if TYPE_CHECKING:
    from typing_extensions import LiteralString

LOOKED = 10_000  # dead letters that are taken at once, and that a filter counts
PER_PAGE = 50
MOST_GROUPS = 50
COUNTED = 10_000  # newest dead letters whose reasons are counted
OLD_COUNTED = 100_000  # dead letters that are counted before old ones are deleted
SOON = 3.0  # seconds within which the result is shown without a page for the job
STATEMENT = 60  # seconds for one message of a job
MOST_RUNNING = 2
MOST_JOBS = 20
GONE = "no longer dead letters: somebody else requeued, replayed or deleted them"

FILTERS = ("reason", "consumer", "type", "since", "until", "text")

# The reason is one as dlq_reasons() returns it, with N for numbers, or as it is.
_INSPECTED: LiteralString = """
from pgque.dlq_inspect(%(queue)s, %(looked)s, reason => %(reason)s, only_type => %(type)s,
  only_consumer => %(consumer)s, since => %(since)s::timestamptz, until => %(until)s::timestamptz,
  matching => %(text)s, before_id => %(before)s) as d
"""

_LISTED: LiteralString = (
    "select d.dl_id, d.dl_time, d.dl_reason, d.ev_id, d.ev_type, d.consumer_name, d.dl_held, d.receive_count,"
    " d.payload_size, left(d.ev_data, %(cut)s) as ev_data, substr(d.ev_bytes, 1, %(cut)s) as ev_bytes"
    + _INSPECTED
)

_CHOSEN: LiteralString = "select d.dl_id " + _INSPECTED + " order by d.dl_id"

VERBS = {
    "requeue": ("Requeue", "requeued", "They are redelivered only to the consumer that failed them."),
    "replay": ("Replay", "replayed", "They are sent as new messages to every consumer of the queue."),
    "delete": ("Delete", "deleted", "They cannot be requeued. Held ones are deleted too."),
}

_CALLS: dict[str, LiteralString] = {
    "requeue": "select pgque.dlq_requeue(%s)",
    "replay": "select pgque.dlq_replay(%s)",
    "delete": "select pgque.dlq_delete(%s)",
}


def _parameters(page: Page) -> dict[str, object]:
    """Return what _INSPECTED asks for; `upto` is the newest counted, `before` a place in the list."""
    form = page.form
    return {
        **page.filters(FILTERS),
        "queue": form.need("queue"),
        "looked": LOOKED,
        "before": min(form.number("before", 2**63 - 1), form.number("upto", 2**63 - 2) + 1),
    }


def _groups(page: Page, name: str) -> list[Row]:
    """Return how many dead letters there are for each reason. Roles that administer the queue share them."""

    def taken() -> list[Row]:
        return page.rows(
            "select r.reason, r.consumer_name as consumer, r.dead_letters as n, r.held, r.newest,"
            " count(*) over () as groups, sum(r.dead_letters) over () as total"
            " from pgque.dlq_reasons(%s, %s) as r limit %s",
            [name, COUNTED, MOST_GROUPS],
        )

    if not page.may("admin", name):
        return taken()  # which is refused
    return page.site.samples.get(page.session.database, f"reasons of queue {name}", taken)


def show(page: Page) -> Response:
    """Show the dead letters of a queue by reason, and those that match a filter."""
    asked = _parameters(page)
    name = page.form.need("queue")
    if export.wanted(page):
        following = export.searched(page, _LISTED, asked, "dl_id", "looked")
        return export.answer(page, f"dead-letters-{name}", following)
    groups = _groups(page, name)
    longer, matching = bool(page.form.get("longer")), groups[0]["total"] if groups else 0
    letters = page.search(_LISTED, {**asked, "looked": PER_PAGE, "cut": SHOWN})
    filtered = any(page.form.get(key) for key in FILTERS)
    if filtered and letters is not None:
        counted = page.search(
            "select count(*) as n " + _INSPECTED,
            {**asked, "before": 2**63 - 1},
        )
        matching = counted[0]["n"] if counted else None
    return page.shown(
        "dead.html",
        queue=name,
        groups=groups,
        counted=COUNTED if groups and groups[0]["total"] >= COUNTED else None,
        groups_left=(groups[0]["groups"] - len(groups)) if groups else 0,
        letters=letters or [],
        stopped=letters is None,
        longer=longer,
        # How many, in words: not more than the page counts
        matching="many" if matching is None else _at_most(matching, LOOKED if filtered else COUNTED),
        some=matching is None or matching > 0,
        filters={key: page.form.get(key) for key in FILTERS},
        filtered=filtered,
        before=page.form.get("before"),
        following=letters[-1]["dl_id"] if letters and len(letters) == PER_PAGE else None,
        may_admin=page.may_change("admin", name),
        verbs=VERBS,
        here=_here(page.form),
    )


def _at_most(count: int, most: int) -> str:
    return f"{count:,} or more" if count >= most else f"{count:,}"


def _here(form: Form) -> dict[str, object]:
    return {"queue": form.need("queue"), **{key: form.get(key) for key in FILTERS}}


def _verb(form: Form) -> str:
    verb = form.need("action")
    if verb not in VERBS:
        raise PgqueBadArgumentError(f"no such action: {verb[:50]!r}")
    return verb


def _chosen(page: Page) -> list[int]:
    """Return the dead letters that a form names, or all that match its filter, the oldest first."""
    if not page.form.get("all"):
        return sorted(set(page.form.numbers("id")))
    return [row["dl_id"] for row in page.rows(_CHOSEN, _parameters(page))]


def ask(page: Page) -> Response:
    """Ask before many dead letters are requeued or replayed."""
    name, verb = page.form.need("queue"), _verb(page.form)
    title, _, meaning = VERBS[verb]
    ids = _chosen(page)
    if not ids:
        page.session.flash("error", "No dead letter is chosen.")
        return page.go("/dead", **_here(page.form))
    everything = bool(page.form.get("all"))
    count = f"{len(ids):,}{' or more' if everything and len(ids) == LOOKED else ''}"
    fields: list[tuple[str, object]] = [("queue", name), ("action", verb)]
    if everything:
        # A message that is given up from now on was not counted.
        fields += [("all", "1"), ("upto", ids[-1])]
    else:
        fields += [("id", one) for one in ids]
    fields += [(key, page.form.get(key)) for key in FILTERS if page.form.get(key)]
    return page.shown(
        "confirm.html",
        queue=name,
        title=f"{title} {count} dead {'letter' if len(ids) == 1 else 'letters'}?",
        facts=[("Dead letters", count), *((f"Filter: {k}", v) for k, v in _filter(page) if everything)],
        text=meaning,
        action="/dead/do",
        fields=fields,
        button=f"{title} {count}",
        danger=verb == "delete",
        allowed=page.may_change("admin", name),
        back=("/dead", _here(page.form)),
    )


def _filter(page: Page) -> list[tuple[str, str]]:
    return [(key, page.form.get(key)) for key in FILTERS if page.form.get(key)]


def do(page: Page) -> Response:
    """Requeue or replay dead letters: one, those that are chosen, or all that match."""
    name = page.form.need("queue")
    one = page.form.get("one")
    if one:
        verb, _, number = one.partition(" ")
        ids = [Form([("id", number)]).number("id")]
    else:
        verb, ids = _verb(page.form), _chosen(page)
    if verb not in VERBS:
        raise PgqueBadArgumentError(f"no such action: {verb[:50]!r}")
    title, past, _ = VERBS[verb]
    job = Job(f"{title} dead letters of {name}", own("/dead", **_here(page.form)), ids)
    _keep(page, job)
    job.start(_calls(page, verb))
    job.join(SOON)
    if job.running:
        return page.go("/job", key=job.key)
    page.session.jobs.pop(job.key, None)
    if job.done:
        page.session.flash("ok", f"{job.done:,} {past}.")
    if job.gone:
        page.session.flash("error" if job.gone == len(ids) else "ok", f"{job.gone:,} {GONE}.")
    if job.failed:
        page.session.flash("error", f"{job.failed:,} not {past}. Dead letter {_failure(job)}")
    if job.broken:
        page.session.flash("error", job.broken)
    return page.go("/dead", **_here(page.form))


def _failure(job: Job) -> str:
    number, reason = job.failures[0]
    return f"{number}: {reason}"


def _keep(page: Page, job: Job) -> None:
    jobs = page.session.jobs
    if sum(other.running for other in list(jobs.values())) >= MOST_RUNNING:
        raise PgqueBadArgumentError("earlier work is still running", hint="Wait until it has ended.")
    while len(jobs) >= MOST_JOBS:
        jobs.pop(next(key for key, other in list(jobs.items()) if not other.running))
    jobs[job.key] = job


def _calls(page: Page, verb: str) -> Callable[[], AbstractContextManager[tuple[Call, More]]]:
    connections, site, database = page.session.connections, page.site, page.session.database
    asked = _parameters(page) if page.form.get("all") and not page.form.get("one") else None

    @contextmanager
    def opened() -> Iterator[tuple[Call, More]]:
        with connections.take(False, STATEMENT, lasting=True) as connection:

            def call(number: int) -> None:
                try:
                    connection.execute(_CALLS[verb], [number])
                except psycopg.Error as error:
                    raise from_psycopg(error) from error

            def more(lowest: int) -> list[int]:
                """Return those that match and are older than the ones that were tried."""
                if asked is None:
                    return []
                return [row["dl_id"] for row in connection.execute(_CHOSEN, {**asked, "before": lowest})]

            yield call, more
        site.samples.forget(database)

    return opened


def show_job(page: Page) -> Response:
    """Show the progress of work on many messages."""
    job = page.session.jobs.get(page.form.get("key"))
    if job is None:
        page.session.flash("error", "This work is no longer known.")
        return page.go("/")
    return page.shown("job.html", job=job, gone=GONE, queue=None)


def ask_purge(page: Page) -> Response:
    """Ask before old dead letters are deleted."""
    name, older = page.form.need("queue"), page.form.get("older_than", "30 days")
    groups = _groups(page, name)
    until = page.value("select pgque.clock() - %s::interval", [older])
    old = page.value(
        "select count(*) from pgque.dlq_inspect(%s, %s, until => %s) as d", [name, OLD_COUNTED, until]
    )
    return page.shown(
        "dead_purge.html",
        queue=name,
        older=older,
        until=until.isoformat(),
        ages=["0", "1 hour", "1 day", "7 days", "30 days", "90 days"],
        count=_at_most(old, OLD_COUNTED),
        total=_at_most(groups[0]["total"] if groups else 0, COUNTED),
        may_admin=page.may_change("admin", name),
    )


def purge(page: Page) -> Response:
    """Delete the dead letters that were given up before a time: those that were counted, none newer."""
    name, until = page.form.need("queue"), page.form.need("until")
    count = page.value(
        # In seconds: an age in days would be another time where a day has 23 or 25 hours.
        "select pgque.dlq_purge(%s, pg_catalog.make_interval("
        "secs => extract(epoch from pgque.clock() - %s::timestamptz)::float8))",
        [name, until],
    )
    return page.done(f"{count:,} deleted.", "/dead", queue=name)
