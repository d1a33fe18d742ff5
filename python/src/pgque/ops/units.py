"""How numbers, lengths of time and sizes are written for people."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

NOTHING = "\N{EN DASH}"  # for a value that is not known

# Times and lengths of time as PostgreSQL writes them
_TIME = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d) (?P<time>\d\d:\d\d:\d\d)(?:\.\d+)?(?P<zone>[+-]\d\d(?::\d\d)?)"
    r"|(?:(?P<days>\d{1,6}) days? )?\b(?P<hours>\d\d{1,5}:\d\d:\d\d)(?:\.\d+)?\b",
    re.ASCII,
)


def number(value: float | None) -> str:
    """Return a number with separators: 12,345 or 0.4."""
    if value is None:
        return NOTHING
    if abs(value) >= 100 or value == int(value):
        return f"{round(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.2g}"


def span(value: timedelta | float | None) -> str:
    """Return a length of time with its two largest units: 2 h 5 min."""
    if value is None:
        return NOTHING
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 1:
        return f"{sign}{round(seconds * 1000)} ms" if seconds else "0 s"
    if seconds < 10:
        return f"{sign}{seconds:.1f} s"
    left, parts = round(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return sign + " ".join(parts[:2])


def size(value: float | None) -> str:
    """Return a number of bytes: 1.5 MB."""
    if value is None:
        return NOTHING
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def moment(value: datetime | None) -> str:
    """Return a time in UTC to the second, without the zone: 2026-11-27 14:05:00."""
    return NOTHING if value is None else f"{value.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}"


def readable(value: str) -> str:
    """Return a text of the server with its times and lengths of time written as `moment` and `span` do."""

    def written(found: re.Match[str]) -> str:
        try:
            if found["zone"]:
                zone = found["zone"] if ":" in found["zone"] else f"{found['zone']}:00"
                at = datetime.fromisoformat(f"{found['date']} {found['time']}{zone}")
                return f"{moment(at)} UTC"
            hours, minutes, seconds = map(int, found["hours"].split(":"))
            return span(timedelta(int(found["days"] or 0), seconds, hours=hours, minutes=minutes))
        except (ValueError, OverflowError):  # it is a text of a user
            return found[0]

    return _TIME.sub(written, value)
