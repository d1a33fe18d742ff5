"""When recurring messages are sent: cron expressions, intervals, and changes of the clock."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from itertools import pairwise, product

import pytest
from croniter import croniter

from sql.helpers import Connection, column, refused, set_clock, value
from support.landing import at_a_landing

UTC = timezone.utc


def at(text: str) -> datetime:
    """A time in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def runs(
    conn: Connection,
    cron: str,
    after: datetime,
    count: int,
    zone: str = "UTC",
    starts: datetime | None = None,
    ends: datetime | None = None,
) -> list[datetime]:
    """The first runs of a schedule after a time."""
    found = column(
        conn,
        "with recursive run (n, at) as ("
        " select 0, %s::timestamptz union all"
        " select r.n + 1, pgque._next_run(s, r.at) from run r"
        " cross join pgque._schedule(%s, %s, %s, %s) s where r.n < %s and r.at is not null)"
        " select r.at from run r where r.n > 0 and r.at is not null order by r.n",
        after,
        cron,
        zone,
        starts,
        ends,
        count,
    )
    return [found_at.astimezone(UTC) for found_at in found]


def random_field(dice: random.Random, low: int, high: int, names: str = "") -> str:
    """A random field of a cron expression."""

    def one(number: int) -> str:
        words = names.split()
        if words and dice.random() < 0.3:
            return dice.choice([words[number - low], words[number - low].upper()])
        return f"{number:02d}" if dice.random() < 0.1 else str(number)

    def item() -> str:
        kind = dice.random()
        if kind < 0.1:
            return "*"
        if kind < 0.25:
            return f"*/{dice.randint(1, high - low)}"
        first, last = sorted((dice.randint(low, high), dice.randint(low, high)))
        if kind < 0.6 or first == last:
            return one(first) + (f"/{dice.randint(1, high - low)}" if dice.random() < 0.1 else "")
        step = f"/{dice.randint(1, high - low)}" if dice.random() < 0.4 else ""
        return f"{one(first)}-{one(last)}{step}"

    if dice.random() < 0.35:
        return "*"
    return ",".join(item() for _ in range(dice.choice([1, 1, 1, 2, 3])))


def random_cron(dice: random.Random) -> str:
    """A random expression of five fields, or of six with seconds first."""
    fields = [
        random_field(dice, 0, 59),
        random_field(dice, 0, 23),
        random_field(dice, 1, 31),
        random_field(dice, 1, 12, "jan feb mar apr may jun jul aug sep oct nov dec"),
        random_field(dice, 0, 6, "sun mon tue wed thu fri sat"),
    ]
    if dice.random() < 0.3:
        fields.insert(0, random_field(dice, 0, 59))
    return " ".join(fields)


@pytest.mark.slow
def test_a_thousand_random_expressions_run_at_the_times_of_croniter(conn: Connection) -> None:
    dice = random.Random(18)  # noqa: S311
    checked = 0
    while checked < 1000:
        cron = random_cron(dice)
        after = at("2020-01-01T00:00:00") + timedelta(seconds=dice.randrange(20 * 366 * 86400))
        fields = cron.split()
        theirs = cron if len(fields) == 5 else " ".join([*fields[1:], fields[0]])  # it has seconds last
        try:
            expected = croniter(theirs, after)
            wanted = [expected.get_next(datetime) for _ in range(4)]
        except ValueError:  # no such date: it raises CroniterBadDateError
            refused("PQ005", runs, conn, cron, after, 4)
            continue
        assert runs(conn, cron, after, 4) == wanted, f"{cron} after {after}"
        checked += 1


# Zone, expression, after, and the runs that follow, all in UTC.
CHANGES = [
    # Berlin, 2026: 29 March 02:00 becomes 03:00 at 01:00 UTC; 25 October 03:00 becomes 02:00 at 01:00 UTC.
    ("Europe/Berlin", "30 2 * * *", "2026-03-28T01:00", "03-28T01:30 03-29T01:00 03-30T00:30"),
    ("Europe/Berlin", "*/15 2 * * *", "2026-03-28T01:40", "03-28T01:45 03-29T01:00 03-30T00:00 03-30T00:15"),
    ("Europe/Berlin", "0 2,3 * * *", "2026-03-28T12:00", "03-29T01:00 03-30T00:00 03-30T01:00"),
    ("Europe/Berlin", "30 2-3 * * *", "2026-03-28T12:00", "03-29T01:00 03-29T01:30 03-30T00:30"),
    ("Europe/Berlin", "30 * * * *", "2026-03-29T00:00", "03-29T00:30 03-29T01:30 03-29T02:30"),
    ("Europe/Berlin", "0 */2 * * *", "2026-03-28T22:30", "03-28T23:00 03-29T02:00 03-29T04:00"),
    ("Europe/Berlin", "30 2 * * *", "2026-10-24T12:00", "10-25T00:30 10-26T01:30"),
    ("Europe/Berlin", "30 2 * * *", "2026-10-25T01:15", "10-26T01:30 10-27T01:30"),
    ("Europe/Berlin", "*/30 2 * * *", "2026-10-24T12:00", "10-25T00:00 10-25T00:30 10-26T01:00 10-26T01:30"),
    ("Europe/Berlin", "30 * * * *", "2026-10-25T00:00", "10-25T00:30 10-25T01:30 10-25T02:30"),
    ("Europe/Berlin", "30 * * * *", "2026-10-25T00:30", "10-25T01:30 10-25T02:30"),
    ("Europe/Berlin", "0 */2 * * *", "2026-10-24T22:30", "10-25T00:00 10-25T01:00 10-25T03:00"),
    ("Europe/Berlin", "0 0 3 * * *", "2026-10-24T12:00", "10-25T02:00 10-26T02:00"),
    ("Europe/Berlin", "50 59 */1 * * *", "2026-10-24T23:59:50", "10-25T00:59:50 10-25T01:59:50"),
    # New York, 2026: 8 March 02:00 becomes 03:00 at 07:00 UTC; 1 November 02:00 becomes 01:00 at 06:00 UTC.
    ("America/New_York", "15 2 * * *", "2026-03-07T00:00", "03-07T07:15 03-08T07:00 03-09T06:15"),
    ("America/New_York", "30 1 * * *", "2026-10-31T00:00", "10-31T05:30 11-01T05:30 11-02T06:30"),
    ("America/New_York", "*/20 * * * *", "2026-11-01T05:30", "11-01T05:40 11-01T06:00 11-01T06:20 11-01T06:40"),
    ("America/New_York", "0 9 * * mon-fri", "2026-03-06T00:00", "03-06T14:00 03-09T13:00 03-10T13:00"),
    # Lord Howe, 2026: 5 April 02:00 becomes 01:30 at 15:00 UTC; 4 October 02:00 becomes 02:30 at 15:30 UTC.
    ("Australia/Lord_Howe", "15 2 * * *", "2026-10-02T12:00", "10-02T15:45 10-03T15:30 10-04T15:15"),
    ("Australia/Lord_Howe", "45 1 * * *", "2026-04-03T12:00", "04-03T14:45 04-04T14:45 04-05T15:15"),
    ("Australia/Lord_Howe", "*/15 * * * *", "2026-04-04T14:30", "04-04T14:45 04-04T15:00 04-04T15:15 04-04T15:30"),
    ("Australia/Lord_Howe", "0 * * * *", "2026-04-04T13:30", "04-04T14:00 04-04T15:30 04-04T16:30"),
    ("Australia/Lord_Howe", "0 * * * *", "2026-10-03T14:00", "10-03T14:30 10-03T16:00 10-03T17:00"),
    # Kolkata is half an hour off, always.
    ("Asia/Kolkata", "0 9 * * *", "2026-03-28T12:00", "03-29T03:30 03-30T03:30"),
    ("Asia/Kolkata", "*/20 * * * *", "2026-10-25T00:00", "10-25T00:10 10-25T00:30 10-25T00:50"),
    # Havana, 2026: 8 March 00:00 becomes 01:00 at 05:00 UTC; 1 November 01:00 becomes 00:00 at 05:00 UTC.
    ("America/Havana", "0 0 * * *", "2026-03-06T12:00", "03-07T05:00 03-08T05:00 03-09T04:00"),
    ("America/Havana", "30 0 * * sun", "2026-03-07T12:00", "03-08T05:00 03-15T04:30"),
    ("America/Havana", "30 0 * * *", "2026-10-31T12:00", "11-01T04:30 11-02T05:30"),
    ("America/Havana", "0 * * * *", "2026-11-01T03:30", "11-01T04:00 11-01T05:00 11-01T06:00"),
    # Beirut, 2026: 29 March 00:00 becomes 01:00 at 22:00 UTC; 25 October 00:00 becomes 23:00 of the day before at
    # 21:00 UTC.
    ("Asia/Beirut", "0 0 29 3 *", "2026-03-28T12:00", "03-28T22:00"),
    ("Asia/Beirut", "30 23 * * sat", "2026-10-24T12:00", "10-24T20:30 10-31T21:30"),
    ("Asia/Beirut", "30 * 24 10 *", "2026-10-24T20:00", "10-24T20:30 10-24T21:30"),
    ("Asia/Beirut", "0 * 25 10 *", "2026-10-24T20:00", "10-24T22:00 10-24T23:00"),
]  # fmt: skip


def test_changes_of_the_clock(conn: Connection) -> None:
    for zone, cron, after, expected in CHANGES:
        wanted = [at(f"2026-{day}") for day in expected.split()]
        for session in ("UTC", zone, "Asia/Kathmandu"):
            conn.execute(f"set timezone = '{session}'".encode())
            found = runs(conn, cron, at(after), len(wanted), zone)
            assert found == wanted, f"{cron} in {zone} after {after}, in a session of {session}"


ZONES = ["Europe/Berlin", "Australia/Lord_Howe", "America/Havana", "Asia/Beirut"]
CRONS = ["*/7 * * * *", "0 */3 * * *", "13 2 * * *", "0 0 * * *", "*/10 0-4 * * *"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zone", "cron"), at_a_landing(list(zip([*ZONES, ZONES[0]], CRONS, strict=True)), product(ZONES, CRONS))
)
def test_a_run_is_the_next_one_wherever_one_asks_before_it(conn: Connection, zone: str, cron: str) -> None:
    """Over both changes of a year: from any time between two runs the second one is next."""
    for month in ("2026-03-27T00:00", "2026-10-02T00:00", "2026-10-23T00:00", "2026-04-03T00:00"):
        found = runs(conn, cron, at(month), 40, zone)
        assert found == sorted(set(found))
        between = [
            (before + (after - before) * part, after)
            for before, after in pairwise(found)
            for part in (0, 0.01, 0.5, 0.99)
        ]
        asked = column(
            conn,
            "select pgque._next_run(s, t.at) from pgque._schedule(%s, %s, null, null) s"
            " cross join unnest(%s::timestamptz[]) with ordinality t (at, n) order by t.n",
            cron,
            zone,
            [moment for moment, _ in between],
        )
        assert asked == [after for _, after in between]


@pytest.mark.parametrize(
    ("interval", "starts", "expected"),
    [
        ("90 seconds", "2026-01-01T00:00:00", "00:00:00 00:01:30 00:03:00"),
        ("1 hour", "2025-01-01T00:17:05", "00:17:05 01:17:05 02:17:05"),
        ("PT10M", "2026-01-01T00:05:00", "00:05:00 00:15:00 00:25:00"),
        ("00:00:01", "2025-12-31T23:59:59", "00:00:00 00:00:01 00:00:02"),
    ],
)
def test_an_interval_is_counted_from_its_start(
    conn: Connection, interval: str, starts: str, expected: str
) -> None:
    wanted = [at(f"2026-01-01T{time}") for time in expected.split()]
    before = at("2025-12-31T23:59:59.5")
    assert runs(conn, interval, before, len(wanted), starts=at(starts)) == wanted


def test_a_day_as_an_interval_has_24_hours(conn: Connection) -> None:
    conn.execute("set timezone = 'Europe/Berlin'")
    starts = at("2026-03-28T01:00")
    assert runs(conn, "1 day", starts, 2, "Europe/Berlin", starts) == [
        at("2026-03-29T01:00"),
        at("2026-03-30T01:00"),
    ]


def test_no_run_is_before_starts_at_or_after_ends_at(conn: Connection) -> None:
    starts, ends = at("2040-05-01T10:00"), at("2040-05-01T12:00")
    wanted = [at(f"2040-05-01T{hour}:00") for hour in (10, 11, 12)]
    assert runs(conn, "0 * * * *", at("2026-01-01T00:00"), 9, starts=starts, ends=ends) == wanted
    assert runs(conn, "1 hour", at("2026-01-01T00:00"), 9, starts=starts, ends=ends) == wanted


@pytest.mark.parametrize(
    ("cron", "after", "expected"),
    [
        ("0 0 29 2 *", "2026-01-01T00:00", "2028-02-29T00:00"),
        ("0 0 29 2 *", "2096-02-29T00:00", "2104-02-29T00:00"),
        ("0 0 * * 7", "2026-01-01T00:00", "2026-01-04T00:00"),
        ("0 0 * * fri-sun", "2026-01-01T00:00", "2026-01-02T00:00"),
        ("0 0 13 * fri", "2026-01-01T00:00", "2026-01-02T00:00"),  # a 13th or a Friday
        ("0 0 13 * *", "2026-01-01T00:00", "2026-01-13T00:00"),
        ("  5   4  *\t* * ", "2026-01-01T00:00", "2026-01-01T04:05"),
        ("59 59 23 31 dec *", "2026-01-01T00:00", "2026-12-31T23:59:59"),
    ],
)
def test_days(conn: Connection, cron: str, after: str, expected: str) -> None:
    assert runs(conn, cron, at(after), 1) == [at(expected)]


BAD = [
    "", " ", "* * * *", "* * * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 0 *", "* * * 13 *",
    "* * * * 8", "5-1 * * * *", "*/0 * * * *", "* * * mon *", "* * * * jan", "a * * * *", "1,,2 * * * *", "1, * * * *",
    "-1 * * * *", "1.5 * * * *", "* * * * mon#2", "* * L * *", "@daily", "0 0 31 2 *", "0 0 31 apr,jun *", "0 0 30 2 *",
    "90 secons", "0 seconds", "1.5 seconds", "0.5 seconds", "1 month", "1 year", "400 days", "-5 minutes", "10000000 years",
    "*/-2 * * * *", "\u0661 * * * *",
]  # fmt: skip


def test_what_is_no_schedule_is_refused_with_a_hint(conn: Connection, queue: str) -> None:
    call = "select pgque.create_recurring('bad', %s, %s, 't', 'x')"
    for cron in BAD:
        error = refused("PQ005", value, conn, call, queue, cron)
        assert "0 3 * * mon-fri" in str(error.diag.message_hint), cron


@pytest.mark.parametrize("zone", ["Europe/Berlinn", "CEST", "UTC+3", "", "Mars/Olympus"])
def test_unknown_time_zones_are_refused(conn: Connection, queue: str, zone: str) -> None:
    call = "select pgque.create_recurring('bad', %s, '0 3 * * *', 't', 'x', timezone => %s)"
    error = refused("PQ005", value, conn, call, queue, zone)
    assert "pg_timezone_names" in str(error.diag.message_hint)
    refused("PQ005", value, conn, call, queue, None)


def test_limits_that_leave_no_run_are_refused(conn: Connection, queue: str) -> None:
    call = "select pgque.create_recurring('bad', %s, '0 3 * * *', 't', 'x', starts_at => %s, ends_at => %s)"
    for starts, ends in [
        (None, "2020-01-01"),
        ("2040-01-02", "2040-01-01"),
        ("2040-01-01 04:00Z", "2040-01-01 05:00Z"),
        ("infinity", None),
        (None, "infinity"),
    ]:
        refused("PQ005", value, conn, call, queue, starts, ends)


def test_the_next_runs_of_a_schedule_are_those_that_it_would_have(own: Connection) -> None:
    own.execute("select pgque.create_queue('q')")
    set_clock(own, "timestamptz '2026-03-28 12:00Z'")
    asked = "select pgque.next_runs(%s, %s, %s, %s, %s)"
    # The clock skips 02:30 of the 29th in Berlin.
    assert column(own, asked, "30 2 * * *", "Europe/Berlin", 3, None, None) == [
        at("2026-03-29T01:00:00"), at("2026-03-30T00:30:00"), at("2026-03-31T00:30:00"),
    ]  # fmt: skip
    own.execute(
        "select pgque.create_recurring('r', 'q', '30 2 * * *', 't', 'x'::text, timezone => 'Europe/Berlin')"
    )
    assert value(own, "select next_run from pgque.list_recurring()") == at("2026-03-29T01:00:00")
    # Fewer before the end; an interval counts from its start.
    found = column(own, asked, "1 hour", "UTC", 5, at("2026-03-29T00:30:00"), at("2026-03-29T02:00:00"))
    assert found == [at("2026-03-29T00:30:00"), at("2026-03-29T01:30:00")]
    assert len(column(own, "select pgque.next_runs('* * * * *')")) == 5
    for cron, zone, n in (("61 * * * *", "UTC", 5), ("* * * * *", "Mars", 5), ("* * * * *", "UTC", 0),
                          ("* * * * *", "UTC", 101), ("* * * * *", "UTC", None), (None, "UTC", 1)):  # fmt: skip
        refused("PQ005", value, own, asked, cron, zone, n, None, None)
