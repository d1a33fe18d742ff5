"""The handlers of a consumer or a worker: which handler a message goes to, and how a handler is called."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..codec import payloads
from ..codec.encode import total_seconds
from ..errors import PgqueBadArgumentError
from ..outcomes import Outcomes
from ..types import Message, Seconds
from .retries import DEFAULT, Retries

# The most message types without a handler that are remembered as logged; there may be any number of types.
_MAX_LOGGED_TYPES = 100


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a handler.

    Args:
        retries: the outcomes of its failed messages.
        timeout: seconds that it may run; None is as its worker has it.
        size: most messages in one call; None is a handler of one message.
    """

    retries: Retries = DEFAULT
    timeout: float | None = None
    size: int | None = None


_NO_OPTIONS = Options()


class Registered(NamedTuple):
    """A handler and its options. `call` calls it with a message, or a batch handler with a list. `give`
    returns the value that its annotation asks for."""

    handler: Callable[..., object]
    options: Options
    call: Callable[..., object]
    give: Callable[[Message], object]

    def read(self, messages: Sequence[Message]) -> tuple[list[object], Outcomes]:
        """Return what a batch handler gets, and the errors of messages that it cannot get."""
        if self.give is payloads.itself:
            return [*messages], Outcomes()
        given: list[object] = []
        failed = Outcomes()
        for message in messages:
            try:
                given.append(self.give(message))
            except Exception as error:  # of any class: of the model's own code, say
                failed[message.msg_id] = error
        return given, failed


def _itself(handler: object) -> object:
    return handler


def timeout_of(seconds: Seconds | None, name: str) -> float | None:
    """Return a time limit in seconds, or None. Raises ValueError for 0 and below."""
    limit = None if seconds is None else total_seconds(seconds)
    if limit is not None and not limit > 0:
        raise ValueError(f"{name} must be more than 0 seconds, or None")
    return limit


class Handlers:
    """Find the handler of a message by its type.

    Args:
        owner: name of the class that the handlers are registered with, without "Async".
        decorator: the decorator that registers a handler, as error messages show it.
        check: raises TypeError for a function that cannot be a handler.
        consumer: name of the consumer, for the log.
        log: where message types without a handler are logged, each once.
        arguments: number of arguments that a handler is called with.
    """

    def __init__(
        self,
        owner: str,
        decorator: str,
        check: Callable[[Callable[..., object], str], None],
        consumer: str,
        log: logging.Logger,
        arguments: int = 1,
    ) -> None:
        self._owner = owner
        self._arguments = arguments
        self._decorator = decorator
        self._check = check
        self._consumer = consumer
        self._log = log
        self._logged: set[str | None] = set()
        self._by_type: dict[str, Registered] = {}

    @property
    def by_type(self) -> Mapping[str, Callable[..., object]]:
        """Return the handlers by message type."""
        return {type: found.handler for type, found in self._by_type.items()}

    @property
    def options_by_type(self) -> Mapping[str, Options]:
        """Return the options of the handlers, by message type."""
        return {type: found.options for type, found in self._by_type.items()}

    def register(
        self, type: object, made: Callable[[Any], Any] = _itself, options: Options = _NO_OPTIONS
    ) -> Callable[[Any], Any]:
        """Return a decorator that registers the handler of a message type, as what `made` makes of it.

        The decorator must be called by the code that names the handler, since it reads the local names of its
        caller: a handler may ask for a model by annotation. Raises TypeError where the decorator was given
        the handler itself in place of the type, for a handler that takes other arguments, and for an
        annotation that no message and no payload becomes; PgqueBadArgumentError if the type has another
        handler.
        """
        if not isinstance(type, str):
            raise TypeError(
                "the message type is missing:"
                f' {self._decorator}("order.created"), or {self._decorator}("*") for all'
            )

        def decorate(handler: Callable[..., object]) -> Any:
            self._check(handler, self._owner)
            _check_arguments(handler, self._arguments, options.size is not None)
            before = self._by_type.get(type)
            if before is not None and before.handler != handler:
                raise PgqueBadArgumentError(
                    f"messages of type {type!r} have a handler already: {_name(before.handler)}",
                    hint="Register one function for a type, and call others from it.",
                )
            namespace = sys._getframe(1).f_locals  # a model may be local to the function that registers it
            give = payloads.giver(handler, namespace, _name(handler), options.size is not None)
            result = made(handler)
            caller = payloads.calling(handler, give) if options.size is None else handler
            self._by_type[type] = Registered(result, options, caller, give)
            return result

        return decorate

    def add_all(self, others: Handlers) -> None:
        """Register the handlers of another worker, with what they ask for by annotation."""
        self._by_type.update(others._by_type)

    def check_any(self, policy: str) -> None:
        """Raise PgqueBadArgumentError without a single handler: each message would fail until it is a dead
        letter."""
        if not self._by_type and policy != "ack":
            raise PgqueBadArgumentError(
                "there is no handler for any message",
                hint=f'Register one with {self._decorator}("type"), or pass unknown_handler_policy="ack".',
            )

    def of(self, message: Message) -> Registered | None:
        """Return what is registered for a message, or else for all types, or None."""
        return self._by_type.get(message.type or "") or self._by_type.get("*")

    def options(self, message: Message) -> Options:
        """Return the options of the handler of a message."""
        found = self.of(message)
        return _NO_OPTIONS if found is None else found.options

    @property
    def take_batches(self) -> bool:
        """Return whether there are batch handlers."""
        return any(found.options.size is not None for found in self._by_type.values())

    def reject_reason(self, message: Message, policy: str) -> str | None:
        """Return the reason to reject a message that has no handler, or None to acknowledge it.

        The first message of each such type is logged.
        """
        self._log_unhandled(message, "acknowledged" if policy == "ack" else "rejected")
        return None if policy == "ack" else f"no handler for type {message.type!r}"

    def _log_unhandled(self, message: Message, outcome: str) -> None:
        if message.type in self._logged or len(self._logged) >= _MAX_LOGGED_TYPES:
            return
        self._logged.add(message.type)
        self._log.warning(
            "no handler for messages of type %r in queue %s, consumer %s: they are %s;"
            " there are handlers for: %s",
            message.type,
            message.queue,
            self._consumer,
            outcome,
            ", ".join(repr(type) for type in sorted(self._by_type)) or "none",
        )


def check_handler(handler: Callable[..., object], owner: str) -> None:
    """Raise TypeError for a function that cannot be a handler of a Worker or a Consumer."""
    check_async_handler(handler, owner)
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
        raise TypeError(f"{_name(handler)} is a coroutine function: use Async{owner}")


def check_async_handler(handler: Callable[..., object], owner: str) -> None:
    """Raise TypeError for a function that cannot be a handler of an AsyncWorker or an AsyncConsumer."""
    if not callable(handler):
        raise TypeError(f"a handler has to be a function: {handler!r}")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise TypeError(
            f"{_name(handler)} is a generator, which a call does not run: a handler has to be a function"
        )


def _check_arguments(handler: Callable[..., object], count: int, of_batch: bool) -> None:
    """Raise TypeError for a handler that cannot be called with `count` arguments."""
    if (signature := payloads.signature_of(handler)) is None:
        return
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        given = "the list of messages" if of_batch else "the message"
        given += "" if count == 1 else " and the connection, since transactional=True"
        raise TypeError(f"{_name(handler)} is called with {given}: {error}") from error


def call(handler: Callable[..., object], *args: object) -> object:
    """Call a handler and return its outcome. Raises TypeError for an awaitable: nothing was done yet."""
    outcome = handler(*args)
    if inspect.isawaitable(outcome):
        if inspect.iscoroutine(outcome):
            outcome.close()
        raise TypeError(f"{_name(handler)} returned an awaitable, which only the async classes await")
    return outcome


def call_async(handler: Callable[..., object], *args: object) -> Awaitable[object]:
    """Call a handler and return what its outcome is to be awaited of. Raises TypeError for a plain function.

    Context variables that the handler sets are gone when the current task ends.
    """
    outcome = handler(*args)
    if not inspect.isawaitable(outcome):
        raise TypeError(
            f"{_name(handler)} has to be a coroutine function (async def): it returned"
            f" {type(outcome).__name__}, which cannot be awaited"
        )
    return outcome


def _name(handler: object) -> str:
    return f"handler {getattr(handler, '__qualname__', repr(handler))}"
