"""The settings of a queue: one form, a preview of what changes, and one call that changes all or nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import psycopg
from starlette.responses import Response

from ..errors import PgqueConnectionError, PgqueError, PgquePermissionDeniedError, from_psycopg
from .change import Statement, detail_of, reported
from .page import Page, Row

_UNIT = re.compile(r"\s*\bUnit: ([^.]+)\.$")
# The values of settings that take one of some words.
CHOICES = {"drop_policy": ["dead_letter", "hold", "drop"]}
TRIES = 5  # of a change of a row that maintenance changes at the same time

GROUPS = {
    "Delivery and failures": re.compile(
        r"visibility_timeout|max_re.*|retry_backoff|drop_policy|dead_letter_queue|throughput_limit|archive_on_ack"
    ),
    "Storage and limits": re.compile(
        r"rotation_period|retention_period|message_ttl|max_depth|max_consumers|max_window"
    ),
    "Ticks": re.compile(r"tick.*|external_ticker"),
    "Health checks": re.compile(r"health_.*"),
    "Other": re.compile(r".*"),
}
CHANGED = "Changed for this queue"


def read(page: Page, name: str) -> list[Row]:
    """Return the settings with value, default, source, unit, meaning and choices."""
    found = page.rows(
        "select s.setting as name, s.value, s.default_value, s.source, s.type, s.description"
        " from pgque.queue_settings(%s) as s order by s.setting",
        [name],
    )
    for row in found:
        unit = _UNIT.search(row["description"])
        row["unit"] = unit[1] if unit else ""
        row["meaning"] = _UNIT.sub("", row["description"])
        row["choices"] = ["true", "false"] if row["type"] == "boolean" else CHOICES.get(row["name"], [])
        row["typed"] = row["was"] = row["value"] or ""
        row["error"] = ""
    return found


def grouped(rows: list[Row]) -> dict[str, list[Row]]:
    """Return settings by what they are about, those that were changed for this queue first."""
    own = [row for row in rows if row["source"] == "queue"]
    groups = {CHANGED: own} if own else {}
    rows = [row for row in rows if row not in own]
    for title, names in GROUPS.items():
        taken = [row for row in rows if names.fullmatch(row["name"])]
        rows = [row for row in rows if row not in taken]
        if taken:
            groups[title] = taken
    return groups


def form(page: Page, name: str, rows: list[Row] | None = None) -> dict[str, Any]:
    """Return the values that settings.html shows."""
    groups = grouped(read(page, name) if rows is None else rows)
    return {
        "groups": groups,
        "opened": {title for title, kept in groups.items() if any(row["error"] for row in kept)} | {CHANGED},
        # max_consumers limits roles that administer this queue alone
        "fixed": () if page.role["admin"] else ("max_consumers",),
        "may_set": page.may_change("admin", name),
    }


def show(page: Page) -> Response:
    """Show the settings alone."""
    return _shown(page, None, "")


def _shown(page: Page, rows: list[Row] | None, error: str) -> Response:
    name = page.form.need("queue")
    return page.shown(
        "settings.html", status=400 if error else 200, queue=name, error=error, **form(page, name, rows)
    )


def _asked(page: Page) -> tuple[list[Row], list[Row]]:
    """Return all settings, and those that the form changes: typed is the wanted text, was the text that the
    form began with. An empty text restores the default."""
    rows = read(page, page.form.need("queue"))
    for row in rows:
        was, typed = page.form.get(f"was-{row['name']}"), page.form.get(f"set-{row['name']}")
        if was or typed:  # a preview has only those that change
            row["was"], row["typed"] = was, "" if page.form.get("default") == row["name"] else typed
    return rows, [row for row in rows if row["typed"] != row["was"]]


def _statement(page: Page, changed: list[Row]) -> Statement:
    config = {row["name"]: row["typed"] or None for row in changed}
    return "select pgque.alter_queue(%s, %s::jsonb)", [
        page.form.need("queue"),
        json.dumps(config, ensure_ascii=False),
    ]


def ask(page: Page) -> Response:
    """Show the changes of the form, and their SQL."""
    rows, changed = _asked(page)
    if page.form.get("edit"):
        return _shown(page, rows, "")
    if not changed:
        page.session.flash("ok", "No setting was changed, so there is nothing to save.")
        return page.go("/queue", queue=page.form.need("queue"))
    return _question(page, changed)


def _question(page: Page, changed: list[Row], error: str = "") -> Response:
    """Show the changes, and the values that somebody else has set meanwhile, which count as seen then."""
    name = page.form.need("queue")
    fields = [("queue", name)]
    for row in changed:
        now = row["value"] or ""
        row["other"] = now != row["was"]
        fields += [(f"set-{row['name']}", row["typed"]), (f"was-{row['name']}", now)]
    return page.shown(
        "settings_confirm.html",
        status=409 if error else 200,
        queue=name,
        changed=changed,
        error=error,
        sql=page.sql(*_statement(page, changed)),
        fields=fields,
        allowed=page.may_change("admin", name),
    )


def save(page: Page) -> Response:
    """Change all settings of the form or none. Show the preview again if somebody else has changed one since,
    and the form if a value was refused."""
    name = page.form.need("queue")
    rows, changed = _asked(page)
    for left in reversed(range(TRIES)):
        try:
            with page.connection.steady() as execute:
                now = {
                    row["setting"]: row["value"] or ""
                    for row in execute(
                        "select s.setting, s.value from pgque.queue_settings(%s) as s", [name]
                    ).fetchall()
                }
                if any(now[row["name"]] != row["was"] for row in changed):
                    for row in changed:
                        row["value"] = now[row["name"]]
                    return _question(page, changed, "Nothing was saved: somebody else has set one meanwhile.")
                execute(*_statement(page, changed))
            break
        except psycopg.errors.SerializationFailure as error:
            if not left:
                raise from_psycopg(error) from error
        except psycopg.Error as error:
            refused = from_psycopg(error)
            refused.__cause__ = error
            if isinstance(refused, (PgqueConnectionError, PgquePermissionDeniedError)):
                raise refused from error
            _blame(changed, refused)
            return _shown(page, rows, reported(refused))
    values = {row["name"]: row["value"] for row in read(page, name)}
    said = ", ".join(
        f"{row['name']} is now {'empty' if values[row['name']] is None else values[row['name']]}"
        for row in changed
    )
    return page.done(f"{said}.", "/queue", queue=name)


def _blame(changed: list[Row], error: PgqueError) -> None:
    """Write the error beside the setting that it names, or whose value."""
    said = detail_of(error) or str(error)
    for found in (
        [row for row in changed if re.search(rf"(\b|queue_){row['name']}(\b|_)", said)],
        [row for row in changed if row["typed"] and row["typed"] in said],
        changed,
    ):
        if found:
            row = max(found, key=lambda row: len(row["name"]))
            if found is not changed or len(changed) == 1:
                row["error"] = said
            return
