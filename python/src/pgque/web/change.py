"""Create, change or remove something: one form, one preview with the SQL that runs, one confirmation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.responses import Response

from ..errors import (
    PgqueBadArgumentError,
    PgqueConnectionError,
    PgqueError,
    PgquePermissionDeniedError,
)
from .database import Parameters
from .page import Page

if TYPE_CHECKING:
    from typing_extensions import LiteralString

Statement: TypeAlias = "tuple[LiteralString, Parameters]"
Place: TypeAlias = "tuple[str, dict[str, object]]"
Facts: TypeAlias = "list[tuple[str, object]]"

LINE = re.compile(r"\r\n?|\n")
PREVIEW = "/preview"  # follows the address of a form


class RefusedFieldError(PgqueBadArgumentError):
    """Report what is wrong with one field of a form."""

    def __init__(self, name: str, text: str, hint: str | None = None) -> None:
        super().__init__(text, hint=hint)
        self.field = name


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a form. `words` is a pattern: an error whose text it fits is about this field."""

    name: str
    label: str
    hint: str = ""
    default: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)  # the titles of the values
    listed: Sequence[str] = ()  # values that are proposed
    rows: int = 0  # of a text of several lines
    needed: bool = False
    words: str = ""


def kept(typed: str, stored: str, lines: bool = True) -> str:
    """Return the stored text if what was typed differs from it only by what a browser makes of line breaks,
    else what was typed. `lines`: the field has several lines."""
    return stored if typed == LINE.sub("\n" if lines else "", stored) else typed


def _nothing(_: Page) -> Any:
    return {}


@dataclass(frozen=True, slots=True)
class Change:
    """A change that the page makes with one statement, which it shows before it runs.

    `about` are the fields of the address that name the object; `fields` are asked for, and without them the
    address leads to the question at once. `done` says what was done, and raises PgqueError if it was nothing.
    `typed` is the field of `about` that somebody has to type, because much is lost. Titles and buttons take
    the values of fields: {queue}. `seen` tells what the change is made from: one that another change came
    before is refused. That the queue is the same one is checked for every form.
    """

    path: str
    title: str
    button: str
    statement: Callable[[Page], Statement]
    allowed: Callable[[Page], bool]
    done: Callable[[Page, Any], str]
    leads_to: Callable[[Page], Place]
    comes_from: Callable[[Page], Place] | None = None  # where Cancel leads, if that is another place
    about: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    text: str = ""
    facts: Callable[[Page], Facts] = _nothing
    current: Callable[[Page], Mapping[str, str]] = _nothing  # the values of the fields now
    seen: Callable[[Page], Mapping[str, object]] = _nothing
    typed: str = ""
    danger: bool = False

    # -- the three addresses -----------------------------------------------------

    def show(self, page: Page) -> Response:
        """Show the form, or the question if there is nothing to fill in."""
        if not self.fields or not self.allowed(page):
            return self._question(page)
        now = self.current(page)
        return self._form(
            page, {f.name: page.form.get(f.name) or now.get(f.name, f.default) for f in self.fields}
        )

    def ask(self, page: Page) -> Response:
        """Show what the filled form would do, and its SQL; or the form again, for the button Change it."""
        if page.form.get("edit"):
            return self._form(page, self._filled(page))
        try:
            self._check(page)
            return self._question(page)
        except PgqueError as error:
            return self._again(page, error)

    def run(self, page: Page) -> Response:
        """Run the statement. If PostgreSQL refuses it, show the form again, with the typed values."""
        try:
            self._check(page)
            if self.typed and page.form.get("typed") != page.form.need(self.typed):
                return self._question(page, f"Type the name of the {self.typed} to confirm.")
            value = page.value(*self.statement(page))
            text = self.done(page, value)
        except PgqueError as error:
            if not self.fields:
                raise
            return self._again(page, error)
        path, query = self.leads_to(page)
        return page.done(text, path, **query)

    # -- parts ---------------------------------------------------------------------

    def _check(self, page: Page) -> None:
        for name in self.about:
            page.form.need(name)
        if page.form.get("seen") not in ("", self._mark(page)):
            raise PgqueBadArgumentError(
                f"{self._named(page, '{' + self.about[-1] + '}')} was changed since this form was opened",
                hint="Nothing was changed. Open the form again to see the present values.",
            )
        for one in self.fields:
            if one.needed and not page.form.get(one.name):
                raise RefusedFieldError(one.name, f"{one.label} is empty")
            if one.choices and page.form.get(one.name) not in one.choices:
                raise RefusedFieldError(
                    one.name, f"no such choice: {page.form.get(one.name)[:50]!r}", "Choose one of the list."
                )

    def _filled(self, page: Page) -> dict[str, str]:
        return {one.name: page.form.get(one.name) for one in self.fields}

    def _named(self, page: Page, text: str) -> str:
        names = (*self.about, *(one.name for one in self.fields))
        return text.format_map({name: page.form.get(name) for name in names})

    def _mark(self, page: Page) -> str:
        now = self.seen(page)
        return hashlib.sha256(repr(sorted(now.items())).encode()).hexdigest() if now else ""

    def _shared(self, page: Page) -> dict[str, Any]:
        allowed = self.allowed(page)
        seen = page.form.get("seen") or (self._mark(page) if allowed else "")
        return {
            "seen": [("seen", seen)] if seen else [],
            "queue": page.form.get("queue") if "queue" in self.about else None,
            "title": self._named(page, self.title),
            "allowed": allowed,
            "back": (self.comes_from or self.leads_to)(page),
            "button": self._named(page, self.button),
        }

    def _form(self, page: Page, values: Mapping[str, str], error: str = "", wrong: str = "") -> Response:
        return page.shown(
            "change.html",
            status=400 if error else 200,
            fields=self.fields,
            about=[(name, page.form.need(name)) for name in self.about],
            values=values,
            error=error,
            wrong=wrong,
            text=self.text,
            action=self.path + PREVIEW,
            **self._shared(page),
        )

    def _again(self, page: Page, error: PgqueError) -> Response:
        if isinstance(error, (PgqueConnectionError, PgquePermissionDeniedError)):
            raise error
        return self._form(page, self._filled(page), reported(error), self._wrong(error))

    def _wrong(self, error: PgqueError) -> str:
        """Return the name of the field that an error is about, or an empty text."""
        if isinstance(error, RefusedFieldError):
            return error.field
        said = f"{error} {detail_of(error)}"
        return next((f.name for f in self.fields if f.words and re.search(f.words, said)), "")

    def _question(self, page: Page, error: str = "") -> Response:
        shared = self._shared(page)
        fields = [(name, page.form.need(name)) for name in self.about] + list(self._filled(page).items())
        return page.shown(
            "confirm.html",
            status=400 if error else 200,
            facts=(self.facts(page) or []) if shared["allowed"] else [],
            text=self.text,
            sql=page.sql(*self.statement(page)) if shared["allowed"] else "",
            action=self.path,
            edit=self.path + PREVIEW if self.fields else "",
            fields=fields,
            typed=self.typed and f"Name of the {self.typed}",
            error=error,
            danger=self.danger,
            **shared,
        )


def detail_of(error: PgqueError) -> str:
    """Return the detail of an error of PostgreSQL, for example which check a value violates."""
    diag = getattr(error.__cause__, "diag", None)
    return (diag.message_detail or "") if diag is not None else ""


def reported(error: PgqueError) -> str:
    """Return the whole text of an error: message, detail and hint."""
    detail = detail_of(error)
    message, mark, hint = str(error).partition("\nhint: ")
    return f"{message}{chr(10) + detail if detail else ''}{mark}{hint}"
