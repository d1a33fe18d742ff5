"""What runs around the handlers of a worker, for logging, tracing and database sessions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Literal, TypeVar

from ..outcomes import HandlerOutcome
from ..types import Message
from .handlers import call_async, invoke

F = TypeVar("F", bound=Callable[..., object])
Moment = Literal["before", "after", "error"]


class Middleware:
    """Call handlers with the hooks around them.

    In order: the hooks of `before` as registered, the handler, and the hooks of `after` or of `error` in the
    reverse order. All of one message run in one context: context variables that a hook sets are seen by the
    handler and by the other hooks, and are gone afterwards.

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

    def call(self, handler: Callable[..., object], message: Message, *more: object) -> object:
        """Call a handler with a message, and perhaps a connection, with the hooks around it, and return its
        outcome. Raises what the handler or a hook raises, and TypeError for an awaitable."""
        return copy_context().run(invoke if self._is_empty else self._call, handler, message, *more)

    def _call(self, handler: Callable[..., object], message: Message, *more: object) -> object:
        try:
            returned: object
            try:
                for hook in self._hooks["before"]:
                    invoke(hook, message)
                returned = invoke(handler, message, *more)
            except HandlerOutcome as outcome:
                returned = outcome
            for hook in reversed(self._hooks["after"]):
                try:
                    invoke(hook, message, returned)
                except HandlerOutcome as outcome:
                    returned = outcome
        except BaseException as error:
            for hook in reversed(self._hooks["error"]):
                try:
                    invoke(hook, message, error)
                except Exception as another:
                    self._log_failed(message, another)
            raise
        return returned

    def call_async(
        self, handler: Callable[..., object], message: Message, *more: object
    ) -> Awaitable[object]:
        """Call a handler in this task as `call` does, and return what its outcome is to be awaited of. Raises
        what the handler or a hook raises, and TypeError for a handler that is a plain function."""
        if self._is_empty:
            return call_async(handler, message, *more)
        return self._call_async(handler, message, *more)

    async def _call_async(self, handler: Callable[..., object], message: Message, *more: object) -> object:
        try:
            returned: object
            try:
                for hook in self._hooks["before"]:
                    await _invoke_any(hook, message)
                returned = await call_async(handler, message, *more)
            except HandlerOutcome as outcome:
                returned = outcome
            for hook in reversed(self._hooks["after"]):
                try:
                    await _invoke_any(hook, message, returned)
                except HandlerOutcome as outcome:
                    returned = outcome
        except BaseException as error:
            for hook in reversed(self._hooks["error"]):
                try:
                    await _invoke_any(hook, message, error)
                except Exception as another:
                    self._log_failed(message, another)
            raise
        return returned

    def _log_failed(self, message: Message, error: Exception) -> None:
        self._log.error("an error hook failed for message %s", message.msg_id, exc_info=error)


async def _invoke_any(hook: Callable[..., object], *args: object) -> None:
    """Call a hook that may be a coroutine function."""
    result = hook(*args)
    if inspect.isawaitable(result):
        await result
