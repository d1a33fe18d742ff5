"""The client for asyncio, where each method is one call of one SQL function, and what opens connections.

`client` has AsyncPgqueClient, and `admin`, `archived`, `consumers`, `dlq`, `messages`, `monitor`, `pgq` and
`recurring` its groups. `calling` is how they call, `flat` gives methods of groups their earlier names, and
`statements` has the SQL that the client shares with `pgque.transaction`.
`connection`, `dsn`, `limit`, `direct` and `backoff` open connections, open them again, and bound how long a
call may take. Public are the names in `pgque`, and here the two that this module had before it was a
folder.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..twins.client import PgqueClient, connect
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ..twins import client

        return getattr(client, name)


__all__ = ["PgqueClient", "connect"]
