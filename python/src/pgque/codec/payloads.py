"""The decoder of a client or worker, and the types that handlers ask for by annotation."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from ..errors import PgquePayloadError, described
from ..outcomes import HandlerOutcome
from ..types import Message, typed, with_decoder
from . import convert

# Takes a message, and returns its `value`.
Decoder: TypeAlias = Callable[[Message], object]
BadPayload: TypeAlias = Literal["dead", "retry"]

M = TypeVar("M", bound=Message)

_EMPTY = inspect.Parameter.empty

# Types that a batch handler may annotate its list with.
_LISTS = (list, Sequence, Iterable, Collection)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Call a decoder. Its error becomes a PgquePayloadError, unless it is an outcome such as Retry."""

    decoder: Decoder

    def __call__(self, message: Message) -> object:
        try:
            return self.decoder(message)
        except (HandlerOutcome, PgquePayloadError):
            raise
        except Exception as error:
            raise PgquePayloadError(
                f"the decoder failed for message {message.msg_id}: {described(error)}", queue=message.queue
            ) from error


def message_maker(make: Callable[..., M], decoder: Decoder | None) -> Callable[..., M]:
    """Return what makes messages of the columns of a row, with the decoder if there is one."""
    if decoder is None:
        return make
    decoding = _Decoding(decoder)

    def made(*row: object) -> M:
        message = make(*row)
        with_decoder(message, decoding)
        return message

    return made


def check_functions(**given: Callable[..., object] | None) -> None:
    """Raise TypeError for an encoder or a decoder that is no function."""
    for name, function in given.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} has to be a function, not {function!r}")


def check_bad_payload(value: str) -> None:
    """Raise ValueError unless it is "dead" or "retry"."""
    if value not in ("dead", "retry"):
        raise ValueError(f"bad_payload must be 'dead' or 'retry', not {value!r}")


def giver(
    handler: Callable[..., object], namespace: Mapping[str, object], name: str, of_batch: bool
) -> Callable[[Message], object]:
    """Return the function that makes what a handler asks for by annotation of a message: `itself` if that is
    a Message, or not said.

    Args:
        handler: the function that was registered.
        namespace: local variables of the code that registers it.
        name: name of the handler for errors.
        of_batch: whether it asks for a list.

    Raises TypeError for an annotation that no message and no payload becomes, and ImportError if it needs
    pydantic, which is missing.
    """
    annotation = _annotation(handler, namespace, name)
    if of_batch and annotation is not Any and annotation is not object and annotation is not _EMPTY:
        if get_origin(annotation) not in _LISTS:
            raise TypeError(
                f"{name} asks for {convert.name_of(annotation)}. A batch handler gets a list of a Message, a"
                " Message[Model] or a Model, such as list[Message]."
            )
        [annotation] = get_args(annotation)
    elif get_origin(annotation) in _LISTS and any(map(_is_message, get_args(annotation))):
        raise TypeError(
            f"{name} asks for {convert.name_of(annotation)}, and gets one message: batch_handler gets lists"
        )
    if _is_any_message(annotation):
        return itself
    give: Callable[[Message, Any], object] = Message.into
    model = annotation
    if _is_message(annotation):
        give = typed
        [model] = get_args(annotation)
    try:
        convert.converter(model)
    except TypeError as error:
        raise TypeError(
            f"{name} asks for {convert.name_of(annotation)}. {error}. A handler may ask for a Message, a"
            " Message[Model] or a Model."
        ) from error
    return lambda message: give(message, model)


def itself(message: Message) -> Message:
    """Return the message."""
    return message


def calling(handler: Callable[..., object], give: Callable[[Message], object]) -> Callable[..., object]:
    """Return what calls a handler with what `give` makes of a message."""
    if give is itself:
        return handler

    @functools.wraps(handler)
    def call(message: Message, *rest: object) -> object:
        return handler(give(message), *rest)

    call.__qualname__ = getattr(handler, "__qualname__", repr(handler))
    return call


def _is_message(annotation: object) -> bool:
    base = get_origin(annotation) or annotation
    return isinstance(base, type) and issubclass(base, Message)


def _is_any_message(annotation: object) -> bool:
    """Return whether a message fits as it is."""
    if annotation is Any or annotation is object or annotation is _EMPTY or isinstance(annotation, TypeVar):
        return True
    if get_origin(annotation) in (Union, UnionType):
        return any(_is_any_message(each) for each in get_args(annotation))
    return _is_message(annotation) and all(map(_is_any_message, get_args(annotation)))


def _annotation(handler: Callable[..., object], namespace: Mapping[str, object], name: str) -> Any:
    """Return the annotation of the first parameter of a handler."""
    try:
        parameter, function = _first_parameter(handler)
    except (TypeError, ValueError):  # of a builtin function that does not tell
        return _EMPTY
    if parameter is None or parameter.annotation is _EMPTY:
        return _EMPTY
    text = parameter.annotation
    text = getattr(text, "__forward_arg__", text)
    scope: dict[str, object] = getattr(function, "__globals__", {})
    if isinstance(function, FunctionType) and "<locals>" in function.__qualname__:
        scope = {**scope, **namespace}

    def asks(message: object) -> None: ...

    asks.__annotations__ = {"message": text}
    try:
        found = typing.get_type_hints(asks, scope, include_extras=True)["message"]
    except Exception as error:
        # A name that is imported under `if TYPE_CHECKING` only.
        if isinstance(text, str) and re.fullmatch(r"([\w.]+\.)?(Async)?(Work)?Message", text):
            return _EMPTY
        raise TypeError(
            f"the annotation of {name}, {text!r}, cannot be read: {error}. Import or define what it names in"
            " its module, and not under `if TYPE_CHECKING`."
        ) from error
    bare = get_args(found)[0] if get_origin(found) is Annotated else found
    members = [each for each in get_args(bare) if each is not NoneType]
    if get_origin(bare) in (Union, UnionType) and len(members) == 1 and _is_message(members[0]):
        return members[0]  # it is never None
    return bare if _is_message(bare) or _is_any_message(bare) else found


def signature_of(handler: Callable[..., object]) -> inspect.Signature | None:
    """Return the signature of a handler, or None of a builtin function that does not tell."""
    try:
        return _signature(handler)
    except (TypeError, ValueError):
        return None


def _signature(handler: Callable[..., object]) -> inspect.Signature:
    how: dict[str, Any] = {"follow_wrapped": False}
    if sys.version_info >= (3, 14):
        import annotationlib

        how["annotation_format"] = annotationlib.Format.FORWARDREF
    return inspect.signature(handler, **how)


def _first_parameter(handler: Callable[..., object]) -> tuple[inspect.Parameter | None, object]:
    """Return the parameter that gets the message, or None, and the function that has it."""
    for parameter in _signature(handler).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL and hasattr(handler, "__wrapped__"):
            return _first_parameter(handler.__wrapped__)  # behind a decorator that passes all on
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return parameter, _function(handler)
        break
    return None, None


def _function(handler: Any) -> object:
    """Return the function that a call of the handler runs."""
    while not isinstance(handler, FunctionType):
        if isinstance(handler, functools.partial):
            handler = handler.func
        elif inspect.ismethod(handler):
            handler = handler.__func__
        elif inspect.isclass(handler):
            return handler.__init__
        else:
            handler = type(handler).__call__
            if not isinstance(handler, FunctionType):
                return handler
    return handler
