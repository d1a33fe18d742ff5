"""HTTP as the command speaks it: a client that sends no request does not keep its connection."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

FIRST_REQUEST = 5.0  # seconds for the headers of the first request of a connection


class Protocol(H11Protocol):
    """Close a connection whose first request does not come: it counts among those of `limit_concurrency`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, but not for ever."""
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST, self._close_if_silent)

    def _close_if_silent(self) -> None:
        cycle: object = self.cycle  # None before the first request
        if cycle is None and not self.transport.is_closing():
            self.transport.close()
