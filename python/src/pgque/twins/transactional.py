# Generated from runtime/transactional.py by tools/make_sync.py: edit that file and run the script again.
"""Handlers whose writes are committed together with the outcomes of their messages.

`twins/transactional.py` is generated from `runtime/transactional.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psycopg
from psycopg import Connection
from psycopg.pq import PipelineStatus, TransactionStatus

from ..client.backoff import pauses
from .client import PgqueClient
from ..client.direct import Session
from ..client.limit import within
from ..errors import PgqueError, described, from_psycopg, one_line, pooler_error
from ..integrations import telemetry
from ..types import Message
from ..runtime.batches import RELEASE, Item, MessageOutcome, Refused, Running
from .exchange import round_trip
from ..runtime.handlers import Registered
from ..runtime.stopper import Stopper

log = logging.getLogger("pgque.worker")

# Longest pause between attempts to connect, in seconds.
_MAX_PAUSE = 1.0

# Constraints that are declared as initially deferred: a new transaction defers these and no others.
_DEFERRED = """
select string_agg(format('%%I.%%I', c.nspname, c.conname), ', ')
from (
  select n.nspname, c.conname
  from pg_catalog.pg_constraint as c
  join pg_catalog.pg_namespace as n on n.oid = c.connamespace
  where not pg_catalog.pg_is_other_temp_schema(n.oid) and pg_catalog.has_schema_privilege(n.oid, 'usage')
  group by n.nspname, c.conname
  -- A name is of all tables of a schema that have it: deferring one that cannot be is an error.
  having bool_or(c.condeferred) and bool_and(c.condeferrable)
) as c
"""

_TRANSACTION_FAILED = (
    "the handler caught an error of the database, and its transaction has failed: raise the error, or run the"
    " statement in a savepoint (with conn.transaction())"
)

_LEFT_OPEN = (
    "the handler returned while its connection is busy: read a stream of rows to its end or close it, and"
    " leave the with block of a COPY"
)

# Class of the SQLSTATEs of a transaction that may succeed when it is run again: a conflict with another one.
_CONFLICT = "40"

_LOST = "the connection was lost again while this message was handled"

# Outcomes by message: None is one that needs no report.
Outcomes = dict[int, MessageOutcome | None]


class Owner(Protocol):
    """The worker or consumer that the handlers belong to."""

    consumer: str
    shutdown_timeout: float
    _stopper: Stopper
    _sessions: set[Session]

    def _find(self, message: Message) -> Registered | None:
        """Return the handler of a message."""

    def _unhandled(self, message: Message) -> MessageOutcome:
        """Return the outcome of a message without a handler."""

    def _called(self, handler: Registered, messages: Sequence[Message], *more: object) -> object:
        """Call the handler of messages, and return what its outcome is to be awaited of."""

    def _outcomes(
        self, handler: Registered, messages: Sequence[Message], returned: object
    ) -> dict[int, MessageOutcome]:
        """Return the outcomes of messages, from what their handler returned."""

    def _outcomes_of_error(
        self, messages: Sequence[Message], error: BaseException
    ) -> dict[int, MessageOutcome]:
        """Return the outcomes of messages whose handler raised."""

    def _rejection(self, message: Message, reason: str) -> MessageOutcome:
        """Return the outcome of a message that is rejected for a reason."""

    def _note_started(self, running: Running, messages: Sequence[Message]) -> None:
        """Take note that a handler begins."""

    def _is_ending(self, running: Running) -> bool:
        """Return whether the outcome of an item that runs no longer counts."""

    def _claim(self, running: Running) -> bool:
        """Return whether the outcome of an item counts; from then on it does."""


class _Redo(Exception):
    """Undo a transaction: messages with an outcome, and those that are handled again."""

    def __init__(self, outcomes: Outcomes, again: Sequence[Item]) -> None:
        super().__init__()
        self.outcomes = outcomes
        self.again = again


class _Refused(Exception):
    """Undo a transaction: the server refused outcomes that it reports."""

    def __init__(self, refused: Sequence[Refused]) -> None:
        super().__init__()
        self.refused = refused


class Transactions:
    """Run the handlers of items, each item in one transaction with the outcomes of its messages.

    Each handler has a savepoint, so that one that fails takes only its own work back.

    Args:
        owner: the worker or consumer.
        opening: opens a connection for handlers.
    """

    def __init__(self, owner: Owner, opening: Callable[[], PgqueClient]) -> None:
        self._owner = owner
        self._opening = opening
        self._idle: list[PgqueClient] = []
        self._is_closed = False
        self._logged: str | None = None

    def close(self) -> None:
        """Close the connections that no handler has, and each when its handler has ended."""
        self._is_closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that no handler has."""
        while (client := self._pop_idle()) is not None:
            client.close()

    def _pop_idle(self) -> PgqueClient | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def handle(self, running: Running) -> tuple[Outcomes, Sequence[Item]]:
        """Run the handlers of an item. Return the outcomes that are to be reported, None for those that are
        not, and what is to be handled again."""
        item = running.item
        growing = pauses(_MAX_PAUSE)
        while (client := self._take()) is not None:
            begun: list[Message] = []
            try:
                return self._handle(client, running, begun), ()
            except _Redo as redo:
                return redo.outcomes, redo.again
            except _Refused as lost:
                return self._after_refusal(item, lost.refused), ()
            except (PgqueError, psycopg.Error) as fault:
                error = fault if isinstance(fault, PgqueError) else from_psycopg(fault)
                self._log(f"the transaction of handlers failed, trying again: {one_line(error)}")
                if begun:
                    if (error.sqlstate or "").startswith(_CONFLICT):  # at REPEATABLE READ, say: not its fault
                        return {}, [item]
                    undone = self._redo(item, (), described(fault))
                    return undone.outcomes, undone.again
            finally:
                self._give_back(client)
            self._owner._stopper.sleep_to_end(next(growing))
        return dict.fromkeys((message.msg_id for message in item.messages), RELEASE), ()

    def _take(self) -> PgqueClient | None:
        """Return a connection that no other handler has; None after a stop. A fault is tried again: the
        worker's own connection finds out whether that helps."""
        growing = pauses(_MAX_PAUSE)
        while not self._owner._stopper.is_set():
            while (idle := self._pop_idle()) is not None:
                if not idle.conn.closed:
                    return idle
            try:
                client = self._opening()
                self._logged = None
                return client
            except (PgqueError, psycopg.Error) as fault:
                error = fault if isinstance(fault, PgqueError) else from_psycopg(fault)
                self._log(f"handlers wait for a connection, trying again: {one_line(error)}")
                self._owner._stopper.sleep_to_end(next(growing))
        return None

    def _log(self, text: str) -> None:
        """Log an error once."""
        if text != self._logged:
            self._logged = text
            log.warning("%s", text)

    def _give_back(self, client: PgqueClient) -> None:
        if self._is_closed or client.conn.info.transaction_status is not TransactionStatus.IDLE:
            if client._session is not None:
                self._owner._sessions.add(client._session)  # the server may not get to know that it is closed
            client.close()
        elif not client.conn.closed:
            self._idle.append(client)

    def _handle(self, client: PgqueClient, running: Running, begun: list[Message]) -> Outcomes:
        batch, messages = running.item.batch, running.item.messages
        outcomes: dict[int, MessageOutcome] = {}
        with client.conn.transaction():
            check = _constraint_check(client)
            for of_call in running.item.calls():
                if running.is_over:  # a handler ran for too long: the others are handled elsewhere
                    raise _Redo({}, ())
                if begun and self._owner._stopper.is_set():
                    outcomes.update((message.msg_id, RELEASE) for message in of_call)
                    continue
                begun.extend(of_call)
                self._owner._note_started(running, of_call)
                outcomes.update(self._handle_call(client, running, check))
            running.is_reporting = self._owner._claim(running)
            if not running.is_reporting:
                raise _Redo({}, ())
            are_last = batch.are_last(outcomes)
            statements = batch.statements_for(outcomes, are_last)
            refused, _ = round_trip(client, statements, None, Message[Any])
            if refused:
                raise _Refused(refused)
        if are_last:
            batch.note_last()
        for message in messages:
            telemetry.note_outcome(message, self._owner.consumer, outcomes[message.msg_id].action)
        return dict.fromkeys(outcomes)

    def _handle_call(
        self, client: PgqueClient, running: Running, check: str
    ) -> dict[int, MessageOutcome]:
        """Run a handler in a savepoint, and return the outcomes of its messages."""
        messages = running.messages
        handler = self._owner._find(messages[0])
        if handler is None:
            return {message.msg_id: self._owner._unhandled(message) for message in messages}
        try:
            with telemetry.handling(messages, self._owner.consumer):
                return self._in_savepoint(client, running, handler, check)
        except BaseException as error:
            if self._owner._is_ending(running):
                raise
            self._raise_if_undone(client, running, error)
            return self._owner._outcomes_of_error(messages, error)

    def _in_savepoint(
        self,
        client: PgqueClient,
        running: Running,
        handler: Registered,
        check: str,
    ) -> dict[int, MessageOutcome]:
        owner, conn = self._owner, client.conn

        def allowed() -> float:
            return -math.inf if running.is_over else owner.shutdown_timeout

        with conn.transaction() as savepoint:
            # Deferred triggers are the handler's own work, as its statements are.
            with within(conn, None), owner._stopper.stop_deadline(conn, allowed):
                try:
                    returned = owner._called(handler, running.messages, conn)
                    outcomes = owner._outcomes(handler, running.messages, returned)
                finally:
                    # On a busy connection no statement would end, not even the rollback to the savepoint.
                    is_busy = _is_busy(conn)
                    if is_busy:
                        conn.close()
                if is_busy:
                    raise RuntimeError(_LEFT_OPEN)
                has_failed = conn.info.transaction_status is TransactionStatus.INERROR
                if has_failed and any(outcome.is_success for outcome in outcomes.values()):
                    raise RuntimeError(_TRANSACTION_FAILED)
                if has_failed or all(outcome.redelivers for outcome in outcomes.values()):
                    # The next attempt would repeat the writes of the handler, so they are undone.
                    raise psycopg.Rollback(savepoint)
                conn.execute(check.encode(), prepare=False)
        return outcomes

    def _raise_if_undone(
        self, client: PgqueClient, running: Running, error: BaseException
    ) -> None:
        """Raise an error that undoes the whole transaction if that is at fault and not the handler,
        or if the handler has ended it."""
        item, messages = running.item, running.messages
        if client.conn.broken:
            self._log(
                f"the connection was lost while message {messages[0].msg_id} was handled: {described(error)}"
            )
            raise self._redo(item, messages, _LOST) from error
        if client.conn.info.transaction_status is not TransactionStatus.INTRANS:
            # The handler has ended the transaction, so messages of other handlers can no longer be
            # acknowledged with their writes. A connection that the handler closed, as `with conn` does, is
            # not broken.
            client.conn.close()
            again = running.others()
            log.warning(
                "the handler of message %s ended its transaction: %s other messages are handled again",
                messages[0].msg_id,
                sum(len(other.messages) for other in again),
            )
            raise _Redo({**self._owner._outcomes_of_error(messages, error)}, again) from error
        not_kept = pooler_error(error)
        if client.conn.prepare_threshold is not None and not_kept is not None:
            # Not the handler's fault, once: the next connection prepares nothing.
            from_psycopg(not_kept)
            client.conn.close()
            raise _Redo({}, [item]) from error

    def _redo(self, item: Item, messages: Sequence[Message], reason: str) -> _Redo:
        """Return the next step after a transaction was lost, perhaps through the handler of some messages:
        all are handled again, each call in its own transaction. A call that loses it, too, is rejected."""
        calls = item.calls()
        if len(calls) == 1:
            messages = item.messages
            if item.was_lost:
                return _Redo({each.msg_id: self._owner._rejection(each, reason) for each in messages}, ())
        return _Redo({}, [item._replace(messages=call, was_lost=call[0] in messages) for call in calls])

    def _after_refusal(self, item: Item, refused: Sequence[Refused]) -> Outcomes:
        """Return the outcomes after the server has refused some, and the transaction was rolled back: those
        that were not refused are released."""
        for msg_id, reason in refused:
            log.warning("the outcome of %s does not count: %s", msg_id or "a batch", reason)
        lost = {row.msg_id for row in refused}
        if None in lost:
            item.batch.note_last()
            lost = {message.msg_id for message in item.messages}
        for message in item.messages:
            if message.msg_id in lost:
                telemetry.note_outcome(message, self._owner.consumer, "lost")
        return {message.msg_id: None if message.msg_id in lost else RELEASE for message in item.messages}


def _is_busy(conn: Connection[object]) -> bool:
    """Return whether a connection still sends rows, or takes part in a COPY."""
    is_active = conn.info.transaction_status is TransactionStatus.ACTIVE
    return conn.lock.locked() or (is_active and conn.info.pipeline_status is PipelineStatus.OFF)


def _constraint_check(client: PgqueClient) -> str:
    """Return the statements that check what is deferred, and defer again what a new transaction defers."""
    deferred = client._maybe(str, _DEFERRED)
    check = "set constraints all immediate"
    return f"{check}; set constraints {deferred} deferred" if deferred else check
