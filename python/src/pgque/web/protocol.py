"""HTTP with time limits: a client that does not send its request, or does not read its answer, loses
its connection. Each connection counts among those of `limit_concurrency`."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST = 5.0  # seconds for the headers of each request, and for a body that its page does not read
ANSWER = 30.0  # seconds within which a client reads
ANSWER_READ = 64 * 1024  # bytes of an answer, or its rest


class Protocol(H11Protocol):
    """Close a connection whose client leaves the page waiting."""

    _request: asyncio.TimerHandle | None = None
    _answer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Take a piece of a request, and wait for the rest of its headers."""
        super().data_received(data)
        self._expect()

    def on_response_complete(self) -> None:
        """Wait for the next request, and for the rest of one that is answered already.

        A connection without a request is closed at once while more than half of all connections are in use:
        else clients with a small request now and then would keep everybody out.
        """
        crowded = len(self.connections) > (self.limit_concurrency or 0) / 2
        self.timeout_keep_alive = 0 if crowded else self.config.timeout_keep_alive
        super().on_response_complete()
        self._expect()
        self._watch(again=True)

    def pause_writing(self) -> None:
        """Wait until the client has read more of the answer."""
        super().pause_writing()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, and wait until the client has read what is left for it."""
        super().timeout_keep_alive_handler()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._request, self._answer):
            if timer is not None:
                timer.cancel()

    def _expect(self) -> None:
        """Start the time of a request that the client has begun, or end it when the request is whole."""
        answering = self.cycle is not None and not self.cycle.response_complete
        began = (
            self.cycle is None or self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        )
        if answering or not began or self.transport.is_closing():
            if self._request is not None:
                self._request.cancel()
            self._request = None
        elif self._request is None:
            self._request = self.loop.call_later(REQUEST, self._give_up)

    def _give_up(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self.transport.close()
            self._watch()
        else:
            self.transport.abort()  # with TLS, close() would wait 30 s for the client to agree

    def _watch(self, again: bool = False) -> None:
        """Start the time for the answer that is still to be read, if none runs."""
        if self._answer is not None and again:
            self._answer.cancel()
            self._answer = None
        size = self.transport.get_write_buffer_size()
        if self._answer is None and size > 0:
            self._answer = self.loop.call_later(ANSWER, self._check_reader, size)

    def _check_reader(self, before: int) -> None:
        self._answer = None
        if before - self.transport.get_write_buffer_size() < min(before, ANSWER_READ):
            self.transport.abort()
        else:
            self._watch()
