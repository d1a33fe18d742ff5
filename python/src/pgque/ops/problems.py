"""Kinds of problems that `health()` finds, and the page that mends each, for web page and terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problems, and its one action.

    `links` are the pages of `pgque web` that mend it: path, fragment, and the words that lead there.
    `words` say what to do on such a page; without them, the advice of `health()` does.
    """

    title: str
    links: tuple[tuple[str, str, str], ...] = ()
    words: str = ""


_CONSUMERS = (("/queue", "consumers", "Show consumers"),)

# By the name of the check, or by what `kind` makes of it.
KINDS: dict[str, Kind] = {
    # of the server
    "health": Kind("checks took too long"),
    "ticker": Kind("ticker"),
    "standby": Kind("standby"),
    "queues": Kind("locks for the checks"),
    "restore": Kind("incomplete restore"),
    "stored callers": Kind("stored callers"),
    "rights": Kind("rights that pgque did not grant"),
    "open transactions": Kind("open transactions"),
    "transaction ids": Kind("transaction ids"),
    "notifications": Kind("notifications"),
    # of a queue
    "tables": Kind("tables that are locked or missing"),
    "paused": Kind(
        "sending is paused",
        (("/queue", "actions", "Show the queue"),),
        "Resume sending when senders may send again.",
    ),
    "senders": Kind(
        "full, or nearly full",
        (("/queue", "consumers", "Show consumers"), ("/queue", "setting-max_depth", "Show the limit")),
        "Start the slowest consumer, or raise max_depth.",
    ),
    "paused ticker": Kind(
        "ticks are paused",
        (("/queue", "setting-ticker_paused", "Show its settings"),),
        "Set ticker_paused to false.",
    ),
    "ticks": Kind("messages wait for a tick"),
    "rotation": Kind("tables are not emptied", _CONSUMERS),
    "consumers": Kind("consumers are late", _CONSUMERS),
    "retries": Kind("due messages are not delivered", (("/failing", "retries", "Show failing messages"),)),
    "leases": Kind(
        "workers hold messages for long",
        (("/queue", "workers", "Show workers"),),
        "If the worker hangs, end it, then reclaim its messages.",
    ),
    "dead letters": Kind(
        "dead letters",
        (("/dead", "", "Show dead letters"),),
        "Read the reasons. When the cause is mended, requeue, replay or delete them.",
    ),
    "recurring": Kind("recurring messages are not sent", (("/recurring", "", "Show recurring messages"),)),
}


@dataclass(frozen=True, slots=True)
class Group:
    """The problems of one kind, the worst first."""

    name: str
    kind: Kind
    problems: list[Row]

    @property
    def status(self) -> str:
        """Return the status of the worst problem: fail or warn."""
        return "fail" if any(row["status"] == "fail" for row in self.problems) else "warn"

    @property
    def queues(self) -> int:
        """Return how many queues have problems of this kind; 0 for a problem of the server."""
        return len({row["queue"] for row in self.problems} - {None})

    @property
    def title(self) -> str:
        """Return the title of the kind, with the number of queues."""
        count = f" in {self.queues:,} queues" if self.queues > 1 else ""
        return f"{self.kind.title}{count}"


def kind(problem: Row, paused: bool, ticker_paused: bool) -> str:
    """Return the name of a problem's kind. Senders that are refused and ticks that do not come have two
    causes each."""
    name: str = problem["check_name"]
    if name == "senders" and paused:
        return "paused"
    if name == "ticks" and ticker_paused:
        return "paused ticker"
    return name


def of(problem: Row) -> Kind:
    """Return the kind of a problem."""
    name = problem.get("kind") or problem["check_name"]
    return KINDS.get(name) or Kind(name)  # a newer database has other checks


def grouped(problems: Iterable[Row]) -> list[Group]:
    """Return problems by their kind, in the order of the first one of each."""
    groups: dict[str, Group] = {}
    for problem in problems:
        name = problem.get("kind") or problem["check_name"]
        groups.setdefault(name, Group(name, of(problem), [])).problems.append(problem)
    return list(groups.values())
