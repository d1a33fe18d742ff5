"""How a payload becomes a value of a type that the caller names, for `Message.into` and typed handlers.

msgspec validates its Structs, and pydantic all other types by its own rules. `str` and `bytes` need neither:
they are the payload as it was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, TypeAlias, get_origin

from .json import step

# Takes the payload of a message and True, or what a decoder returned and False. Returns a value of the type
# that the converter was made for, or raises MisfitError.
Converter: TypeAlias = Callable[[Any, bool], object]

# The path of what does not fit, and the reason.
_Problem: TypeAlias = tuple[str, str]

# The most problems that are named of one payload.
_MAX_PROBLEMS = 3


class MisfitError(Exception):
    """Report the parts of a payload that do not fit."""

    def __init__(self, *problems: _Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        """Return the first problems. The values are not shown: they may be secret, or large."""
        text = "; ".join(f"payload{path}: {problem}" for path, problem in self.problems[:_MAX_PROBLEMS])
        more = len(self.problems) - _MAX_PROBLEMS
        return f"{text}; and {more} more" if more > 0 else text


# Bounded: an Annotated that is written in the body of a handler is another type in each call.
@lru_cache(maxsize=256)
def converter(kind: Any) -> Converter:
    """Return the converter to a type.

    Raises TypeError for a type that no payload becomes, and ImportError where pydantic is needed and missing.
    """
    base = kind.__origin__ if get_origin(kind) is Annotated else kind
    base = get_origin(base) or base
    if hasattr(base, "__struct_fields__"):
        return _msgspec(kind)
    if not (isinstance(base, type) and issubclass(base, (str, bytes))):
        return _pydantic(kind)
    as_sent = _as_sent(base)
    if base is kind:
        return as_sent
    constrained = _pydantic(kind)
    return lambda value, is_payload: constrained(as_sent(value, is_payload), False)


def name_of(kind: object) -> str:
    """Return the name of a type for an error."""
    return kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)


def _as_sent(kind: Any) -> Converter:
    sent_as = str if issubclass(kind, str) else bytes

    def convert(value: object, is_payload: bool) -> object:
        if not isinstance(value, sent_as):
            raise MisfitError(("", f"expected {kind.__name__}, got {type(value).__name__}"))
        try:
            return value if isinstance(value, kind) else kind(value)
        except ValueError as error:  # of an enum
            raise MisfitError(("", f"is no {kind.__name__}")) from error

    return convert


def _pydantic(kind: Any) -> Converter:
    try:
        from pydantic import TypeAdapter, ValidationError

        rebuild = TypeAdapter.rebuild
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f'{name_of(kind)} needs pydantic 2.10 or newer: pip install "./python[typed]"'
        ) from error
    try:
        adapter = TypeAdapter[object](kind)
        rebuild(adapter, raise_errors=True)  # refuses a name that is not defined
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise TypeError(
            f"no payload becomes {kind!r}: {reason}. Ask for a type that pydantic validates, or for a msgspec"
            " Struct that is not inside of another type"
        ) from error

    def convert(value: Any, is_payload: bool) -> object:
        try:
            if is_payload:
                return adapter.validate_json("null" if value is None else value)
            return adapter.validate_python(value)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            raise MisfitError(
                *(("".join(map(step, each["loc"])), each["msg"]) for each in problems)
            ) from error

    return convert


def _msgspec(kind: Any) -> Converter:
    import msgspec

    def of_pydantic(other: object, value: object) -> object:
        try:
            return converter(other)(value, False)
        except TypeError as error:  # the Struct is wrong, and not the payload
            raise NotImplementedError(str(error)) from error
        except MisfitError as misfit:
            raise ValueError(misfit.problems[0][1]) from misfit

    decoder = msgspec.json.Decoder(kind, dec_hook=of_pydantic)

    def convert(value: Any, is_payload: bool) -> object:
        try:
            if is_payload:
                return decoder.decode("null" if value is None else value)
            return msgspec.convert(value, kind, dec_hook=of_pydantic)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem, _, path = str(error).partition(" - at `$")
            raise MisfitError((path.rstrip("`"), problem)) from error

    return convert
