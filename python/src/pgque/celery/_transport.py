"""A connection of kombu."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from kombu.transport import virtual
from kombu.transport.virtual.exchange import STANDARD_EXCHANGE_TYPES

from ..client.direct import Session
from ..errors import PgqueBadArgumentError, PgqueConnectionError, PgqueError
from ..twins.client import PgqueClient
from ..twins.connection import open_client
from ._channel import Channel
from ._logs import Log
from ._options import Options, dsn_of, without_password
from ._receiver import Receiver
from ._wire import Raw
from ._worker import is_stopping

_EXCHANGE_TYPES = {name: kind(None) for name, kind in STANDARD_EXCHANGE_TYPES.items()}

# Connections of the parent, in a forked process: to close them would end the parent's sessions.
_inherited: list[object] = []


class Transport(virtual.Transport):
    """Run Celery, and whatever uses kombu, on pgque."""

    Channel = Channel
    can_parse_url = True
    driver_type = "pgque"
    driver_name = "psycopg"
    connection_errors = (*virtual.Transport.connection_errors, PgqueConnectionError)
    channel_errors = (*virtual.Transport.channel_errors, PgqueError)
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = ()
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        if len(client.alt) > 1:
            raise PgqueBadArgumentError(
                "a broker's URL names several brokers",
                hint="Name the servers of one database in one URL: pgque://host1,host2/database",
            )
        if client.ssl:
            raise PgqueBadArgumentError(
                "broker_use_ssl does not apply to pgque",
                hint="Say so in the URL: pgque://…?sslmode=verify-full",
            )
        super().__init__(client, **kwargs)
        self.dsn = dsn_of(client.hostname)
        self.options = Options.from_given(client.transport_options)
        self.readers: set[str] = set()  # queues of kombu that are no queues of pgque, but readers of logs
        self._calls: PgqueClient | None = None
        self._sessions: set[Session] = set()  # of connections for calls that may be lost
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._receiver: Receiver | None = None
        self._loop: Any = None  # which waits for the receiver's file descriptor

    def driver_version(self) -> str:
        """Return the version of psycopg."""
        return psycopg.__version__

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL for a log."""
        return uri if include_password else without_password(uri, mask)

    @property
    def default_connection_params(self) -> dict[str, object]:
        """Return nothing: libpq has defaults of its own."""
        return {}

    def establish_connection(self) -> Transport:
        """Connect to the database. Raises PgqueError, which kombu does not try again, where it cannot be
        reached and the worker is to stop: Celery would try without end to send its heartbeat."""
        try:
            with self.calls():
                pass
        except PgqueConnectionError as error:
            if is_stopping():
                raise PgqueError(str(error)) from error
            raise
        super().establish_connection()
        return self

    def close_connection(self, connection: object) -> None:
        """Release the messages that have no outcome, and close the connections."""
        super().close_connection(connection)
        if (receiver := self.open_receiver) is not None:
            if self._loop is not None:
                self.unregister_from_event_loop(connection, self._loop)
            receiver.close()
            self._receiver = None
        if self._pid == os.getpid() and self._calls is not None:
            self._calls.close()
        self._calls = None

    def verify_connection(self, connection: object) -> bool:
        """Return whether the connection is open."""
        return self._calls is not None and _is_open(self._calls)

    def bound(self, exchange: str, routing_key: str) -> set[str]:
        """Return the queues that this process has bound to an exchange, and that a message goes to."""
        declared = self.state.exchanges.get(exchange)
        if declared is None:
            return set()
        found = _EXCHANGE_TYPES[declared["type"]].lookup(declared["table"], exchange, routing_key, None)
        return {queue for queue in found if queue is not None}

    def read(self, queue: str, exchange: str, source: str, tick: int) -> None:
        """Read the log `source` of an exchange from a tick on, once the queue is consumed."""

        def takes(raw: Raw) -> bool:
            return queue in self.bound(exchange, raw["properties"]["delivery_info"].get("routing_key", ""))

        self.receiver.read(queue, exchange, Log(source, tick, lambda: queue in self._callbacks, takes))

    @contextmanager
    def calls(self) -> Iterator[PgqueClient]:
        """Give the connection for calls that are not the receiver's, to one thread at a time."""
        if self._pid != os.getpid():
            _inherited.append(self._calls)
            self._pid, self._lock, self._calls = os.getpid(), threading.RLock(), None
            self._sessions = set()
        with self._lock:
            if self._calls is None or not _is_open(self._calls):
                timeout = self.options.command_timeout
                self._calls = open_client(
                    self.dsn, "pgque celery calls", command_timeout=timeout, sessions=self._sessions
                )
            yield self._calls

    @property
    def receiver(self) -> Receiver:
        """Return the receiver of this connection."""
        found = self.open_receiver
        if found is None:
            found = self._receiver = Receiver(self.dsn, self.options)
        return found

    @property
    def open_receiver(self) -> Receiver | None:
        """Return the receiver of this connection, if this process has begun one."""
        return None if self._receiver is None or self._receiver.is_inherited else self._receiver

    def close_idle_receiver(self) -> None:
        """End the receiver when it has nothing to receive: a program that asks for a reply may do so once."""
        if (receiver := self.open_receiver) is not None and receiver.is_idle and self._loop is None:
            receiver.close()
            self._receiver = None

    def drain_events(self, connection: object, timeout: float | None = None) -> None:
        """Deliver one message, or raise TimeoutError."""
        self._give(*self.receiver.next(timeout))

    def _give(self, queue: str, raw: Raw) -> None:
        """Give a message to the consumer of its queue."""
        callback = self._callbacks.get(queue)
        if callback is not None:
            callback(raw)
        else:  # it was cancelled meanwhile
            self.receiver.reject(raw["properties"]["delivery_tag"], requeue=True)

    def register_with_event_loop(self, connection: object, loop: Any) -> None:
        """Deliver messages from an event loop."""
        receiver = self.receiver
        self._loop = loop

        def give_one() -> None:
            # One at a time, so that between two the worker can stop: the pool "solo" runs a task in here.
            receiver.drain_signal()
            try:
                queue, raw = receiver.next(0)
            except TimeoutError:
                return
            loop.call_soon(give_one)
            self._give(queue, raw)

        loop.add_reader(receiver.fileno(), give_one)

    def unregister_from_event_loop(self, connection: object, loop: Any) -> None:
        """Deliver no more from an event loop."""
        self._loop = None
        if (receiver := self.open_receiver) is not None:
            loop.remove_reader(receiver.fileno())


def _is_open(client: PgqueClient) -> bool:
    """Return whether an idle connection is open. The server sends nothing over it, unless it has ended it."""
    if client.conn.closed:
        return False
    with selectors.DefaultSelector() as selector:  # as Stopper.wait says why
        selector.register(client.conn.fileno(), selectors.EVENT_READ)
        if not selector.select(0):
            return True
    client.close()
    return False
