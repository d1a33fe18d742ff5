"""Handlers that also send their messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar

from ..codec.json import Encoder
from ..errors import PgqueBadArgumentError
from ..transaction.calls import send_async, send_batch_async
from ..twins.calls import send, send_batch
from ..types import Event, Seconds

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class SendOptions(TypedDict, total=False):
    """The options of `pgque.send` except the type, which is that of the task."""

    headers: Mapping[str, object] | None
    key: str | None
    delay: Seconds | None
    deliver_at: datetime | None
    ttl: Seconds | None
    partition_key: str | None
    encoder: Encoder | None


class SendManyOptions(TypedDict, total=False):
    """The options of `pgque.send_batch` except the type, which is that of the task."""

    headers: Sequence[Mapping[str, object] | None] | None
    keys: Sequence[str | None] | None
    delays: Sequence[Seconds | None] | None
    deliver_ats: Sequence[datetime | None] | None
    ttls: Sequence[Seconds | None] | None
    partition_keys: Sequence[str | None] | None
    encoder: Encoder | None


class Owner(Protocol):
    """The worker or consumer that a task belongs to."""

    encoder: Encoder | None


class Task(Generic[T, P, R]):
    """Send messages to a handler, or call it as the function that it is.

        welcome.send(session, Order(id=1), delay=60)

    The decorator `task` of workers and consumers makes it. T is the type of the payload: that of the
    handler's first parameter, or its Model in a `Message[Model]`. A type checker refuses another one.

    Attributes:
        type: the message type.
        queue: the queue that messages are sent to.
    """

    __qualname__: str

    def __init__(self, handler: Callable[P, R], type: str, queue: str, worker: Owner) -> None:
        functools.update_wrapper(self, handler)
        self._handler = handler
        self._worker = worker
        self.type = type
        self.queue = queue

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the handler here and now, as in a test."""
        return self._handler(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<task {self.__qualname__}: type {self.type!r}, queue {self.queue}>"

    def __reduce__(self) -> str:
        """Return the name in its module, so that pickle refers to the task as to a function."""
        return self.__qualname__

    def send(self, conn: object, payload: T, **options: Unpack[SendOptions]) -> int:
        """Send one message in the open transaction of a connection or session, and return its id.

        `conn` and the options (`headers`, `key`, `delay`, `deliver_at`, `ttl`, `partition_key`, `encoder`),
        their units and the errors are those of `pgque.send`. None as `encoder` is that of the worker.
        Raises PgqueBadArgumentError for an Event, which has a type of its own. Calls `pgque.send`.
        """
        return send(conn, self.queue, self._checked(payload), type=self.type, **self._with_encoder(options))

    async def send_async(self, conn: object, payload: T, **options: Unpack[SendOptions]) -> int:
        """Send one message as `send` does, over what `pgque.send_async` takes. Calls `pgque.send`."""
        given = self._with_encoder(options)
        return await send_async(conn, self.queue, self._checked(payload), type=self.type, **given)

    def send_many(self, conn: object, payloads: Iterable[T], **options: Unpack[SendManyOptions]) -> list[int]:
        """Send many messages, all or none, and return their ids in input order.

        `conn` and the options (`headers`, `keys`, `delays`, `deliver_ats`, `ttls`, `partition_keys`,
        `encoder`) are those of `pgque.send_batch`, otherwise as `send`. Calls `pgque.send_batch`.
        """
        given = self._with_encoder(options)
        return send_batch(conn, self.queue, self._all_checked(payloads), type=self.type, **given)

    async def send_many_async(
        self, conn: object, payloads: Iterable[T], **options: Unpack[SendManyOptions]
    ) -> list[int]:
        """Send many messages as `send_many` does, over what `pgque.send_batch_async` takes. Calls
        `pgque.send_batch`."""
        given = self._with_encoder(options)
        return await send_batch_async(conn, self.queue, self._all_checked(payloads), type=self.type, **given)

    def _with_encoder(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if options.keys() & {"type", "queue"}:
            raise PgqueBadArgumentError(
                f"{self.__qualname__} sends messages of type {self.type!r} to queue {self.queue} only",
                hint="Use pgque.send for other messages.",
            )
        return {**options, "encoder": options.get("encoder") or self._worker.encoder}

    def _all_checked(self, payloads: Iterable[T]) -> Iterable[T]:
        # Whatever is no list is left to `send_batch`, which refuses a single payload.
        return [*map(self._checked, payloads)] if isinstance(payloads, (list, tuple)) else payloads

    def _checked(self, payload: T) -> T:
        if isinstance(payload, Event):
            raise PgqueBadArgumentError(
                f"{self.__qualname__} takes a payload and not an Event, which has a type of its own",
                hint="Pass event.payload, and its options as arguments.",
            )
        return payload
