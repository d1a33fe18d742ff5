"""Hooks around the handlers of a worker, for logging, tracing and database sessions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Literal, TypeVar

from ..errors import PgqueBadArgumentError
from ..outcomes import HandlerOutcome, Outcomes
from ..types import Message
from .handlers import call, call_async

F = TypeVar("F", bound=Callable[..., object])
Moment = Literal["before", "after", "error"]


class Middleware:
    """Call handlers with the hooks around them.

    In order: the hooks of `before` as registered, the handler, and the hooks of `after` or of `error` in the
    reverse order. All of one message run in one context: context variables that a hook sets are seen by the
    handler and by the other hooks, and are gone afterwards. Of a batch handler, which gets the list of
    messages, the hooks are called for each message; one for which a hook of `before` raises is left out.

    Args:
        owner: name of the class that the hooks are registered with, without "Async".
        check: raises TypeError for a function that cannot be a hook.
        log: where errors in hooks of `error` are logged.
    """

    def __init__(
        self, owner: str, check: Callable[[Callable[..., object], str], None], log: logging.Logger
    ) -> None:
        self._owner = owner
        self._check = check
        self._log = log
        self._hooks: dict[Moment, list[Callable[..., object]]] = {"before": [], "after": [], "error": []}
        self._is_empty = True

    @property
    def hooks(self) -> Mapping[Moment, list[Callable[..., object]]]:
        """Return the hooks by moment."""
        return self._hooks

    def add(self, moment: Moment, hook: F) -> F:
        """Register a hook. Raises TypeError for what cannot be one."""
        self._check(hook, self._owner)
        self._hooks[moment].append(hook)
        self._is_empty = False
        return hook

    def add_all(self, hooks: Mapping[Moment, Sequence[Callable[..., object]]]) -> None:
        """Register the hooks of another worker."""
        for moment, functions in hooks.items():
            for function in functions:
                self.add(moment, function)

    def call(self, handler: Callable[..., object], messages: Sequence[Message], *args: object) -> object:
        """Call a handler of messages, with the hooks for each of them around it, and return what it returned.
        Raises what the handler or a hook raises, and TypeError for an awaitable."""
        if self._is_empty:
            return copy_context().run(call, handler, *args)
        return copy_context().run(self._call, handler, messages, *args)

    def _call(self, handler: Callable[..., object], messages: Sequence[Message], *args: object) -> object:
        try:
            returned: object = None
            left: list[Message] = []
            ended = Outcomes()
            try:
                for message in messages:
                    try:
                        for hook in self._hooks["before"]:
                            call(hook, message)
                        left.append(message)
                    except (HandlerOutcome, Exception) as error:
                        if len(messages) == 1:
                            raise
                        ended[message.msg_id] = error
                if left:
                    returned = call(handler, *((left, *args[1:]) if ended else args))
            except HandlerOutcome as outcome:
                returned = outcome
            if ended:
                returned = merged(left, returned, ended)
            for message in messages:
                if (failed := failure_in(message, returned)) is not None:
                    self.note_failed(message, failed)
                    continue
                for hook in reversed(self._hooks["after"]):
                    try:
                        call(hook, message, returned_for(message, returned))
                    except HandlerOutcome as outcome:
                        own = {message.msg_id: outcome}
                        returned = outcome if len(messages) == 1 else merged(messages, returned, own)
        except BaseException as error:
            for message in messages:
                self.note_failed(message, error)
            raise
        return returned

    def note_failed(self, message: Message, error: BaseException) -> None:
        """Call the hooks of `error`."""
        for hook in reversed(self._hooks["error"]):
            try:
                call(hook, message, error)
            except Exception as another:
                self._log_failed(message, another)

    def call_async(
        self, handler: Callable[..., object], messages: Sequence[Message], *args: object
    ) -> Awaitable[object]:
        """Call a handler in this task as `call` does, and return what its outcome is to be awaited of. Raises
        what the handler or a hook raises, and TypeError for a handler that is a plain function."""
        if self._is_empty:
            return call_async(handler, *args)
        return self._call_async(handler, messages, *args)

    async def _call_async(
        self, handler: Callable[..., object], messages: Sequence[Message], *args: object
    ) -> object:
        try:
            returned: object = None
            left: list[Message] = []
            ended = Outcomes()
            try:
                for message in messages:
                    try:
                        for hook in self._hooks["before"]:
                            await _invoke_any(hook, message)
                        left.append(message)
                    except (HandlerOutcome, Exception) as error:
                        if len(messages) == 1:
                            raise
                        ended[message.msg_id] = error
                if left:
                    returned = await call_async(handler, *((left, *args[1:]) if ended else args))
            except HandlerOutcome as outcome:
                returned = outcome
            if ended:
                returned = merged(left, returned, ended)
            for message in messages:
                if (failed := failure_in(message, returned)) is not None:
                    await self.note_failed_async(message, failed)
                    continue
                for hook in reversed(self._hooks["after"]):
                    try:
                        await _invoke_any(hook, message, returned_for(message, returned))
                    except HandlerOutcome as outcome:
                        own = {message.msg_id: outcome}
                        returned = outcome if len(messages) == 1 else merged(messages, returned, own)
        except BaseException as error:
            for message in messages:
                await self.note_failed_async(message, error)
            raise
        return returned

    async def note_failed_async(self, message: Message, error: BaseException) -> None:
        """Call the hooks of `error`."""
        for hook in reversed(self._hooks["error"]):
            try:
                await _invoke_any(hook, message, error)
            except Exception as another:
                self._log_failed(message, another)

    def _log_failed(self, message: Message, error: Exception) -> None:
        self._log.error("an error hook failed for message %s", message.msg_id, exc_info=error)


def check_returned(messages: Sequence[Message], returned: object) -> None:
    """Raise PgqueBadArgumentError where a batch handler returned outcomes of messages that it did not get, or
    outcomes that are no Outcomes, which would count as a success."""
    if isinstance(returned, Outcomes):
        if unknown := returned.keys() - {message.msg_id for message in messages}:
            raise PgqueBadArgumentError(
                f"the handler returned outcomes of messages that it did not get: {unknown}"
            )
        return
    if not isinstance(returned, (Mapping, list, tuple)):
        return
    values = list(returned.values() if isinstance(returned, Mapping) else returned)
    if any(isinstance(value, (HandlerOutcome, Exception)) for value in values):
        raise PgqueBadArgumentError(
            f"the handler returned outcomes in a {type(returned).__name__}",
            hint="Return pgque.Outcomes({message.msg_id: outcome}).",
        )


def returned_for(message: Message, returned: object) -> object:
    """Return what a handler returned for one of its messages."""
    return returned.get(message.msg_id) if isinstance(returned, Outcomes) else returned


def failure_in(message: Message, returned: object) -> BaseException | None:
    """Return the error that a batch handler returned for one of its messages."""
    own = returned.get(message.msg_id) if isinstance(returned, Outcomes) else None
    return own if isinstance(own, BaseException) and not isinstance(own, HandlerOutcome) else None


def merged(messages: Sequence[Message], returned: object, own: Mapping[int, object]) -> Outcomes:
    """Return what a handler returned for messages, with the outcomes that single ones have of their own."""
    return Outcomes({**{each.msg_id: returned_for(each, returned) for each in messages}, **own})


async def _invoke_any(hook: Callable[..., object], *args: object) -> None:
    """Call a hook that may be a coroutine function."""
    result = hook(*args)
    if inspect.isawaitable(result):
        await result
