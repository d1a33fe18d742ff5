"""The ticker driven by a real pg_cron."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from support import servers

from .conftest import DATABASE

if TYPE_CHECKING:
    from .conftest import CronServer

pytestmark = pytest.mark.pg_cron

WaitUntil = Callable[..., None]


def prepare(cron: CronServer) -> None:
    with cron.connect() as connection:
        connection.execute("select pgque.create_queue('q')")
        connection.execute("select pgque.subscribe('q', 'c')")


def send(cron: CronServer, text: str = "hello") -> int:
    with cron.connect() as connection:
        row = connection.execute("select pgque.send('q', %s::text)", [text]).fetchone()
    assert row is not None
    message_id: int = row[0]
    return message_id


def receive(cron: CronServer) -> list[int]:
    """Receive and finish what there is; return the message ids."""
    with cron.connect() as connection:
        rows = connection.execute(
            "select m.msg_id, m.batch_id from pgque.receive('q', 'c', 1000) as m"
        ).fetchall()
        for batch_id in {row[1] for row in rows}:
            connection.execute("select pgque.ack(%s)", [batch_id])
    return [row[0] for row in rows]


def ticks(cron: CronServer) -> int:
    with cron.connect() as connection:
        row = connection.execute("select coalesce(max(t.tick_id), 0) from pgque.tick as t").fetchone()
    assert row is not None
    return int(row[0])


def start(cron: CronServer) -> None:
    with cron.connect() as connection:
        connection.execute("select pgque.start()")


def start_and_flow(cron: CronServer, wait_until: WaitUntil) -> None:
    """Start, and wait until messages flow; where jobs begin at the full minute, a restart saves the wait."""
    start(cron)
    if not cron.subminute:
        cron.process.restart()
    flows(cron, wait_until, cron.start_seconds)


def stop(cron: CronServer) -> None:
    with cron.connect() as connection:
        connection.execute("select pgque.stop()")


def status(cron: CronServer) -> dict[str, tuple[str, str]]:
    with cron.connect() as connection:
        return {
            row[0]: (row[1], row[2]) for row in connection.execute("select * from pgque.status()").fetchall()
        }


def jobs(cron: CronServer) -> list[tuple[Any, ...]]:
    with cron.connect() as connection:
        return connection.execute(
            "select j.jobid, j.jobname, j.schedule, j.command from cron.job as j"
        ).fetchall()


def flows(cron: CronServer, wait_until: WaitUntil, seconds: float) -> float:
    """Send one message and return how long it took to come out, at most so many seconds."""
    sent = send(cron)
    begin = time.monotonic()
    got: list[int] = []
    wait_until(lambda: sent in (got.extend(receive(cron)) or got), "the message", timeout=seconds)  # type: ignore[func-returns-value]
    return time.monotonic() - begin


def has_timeout(cron: CronServer) -> bool:
    """Tell whether new sessions have a statement_timeout."""
    with cron.connect() as connection:
        return connection.execute("show statement_timeout").fetchone() != ("0",)


def test_a_sent_message_comes_out_after_start_without_any_manual_tick(
    cron: CronServer, wait_until: WaitUntil
) -> None:
    prepare(cron)
    start_and_flow(cron, wait_until)
    # From then on delivery takes about one tick period, not one schedule.
    delays = sorted(flows(cron, wait_until, 2) for _ in range(10))
    assert delays[5] < 0.5, delays


def test_start_twice_schedules_once(cron: CronServer) -> None:
    prepare(cron)
    start(cron)
    first = [job[1:] for job in jobs(cron)]
    assert first
    start(cron)
    assert [job[1:] for job in jobs(cron)] == first


@pytest.mark.slow
def test_messages_flow_again_after_the_loops_backend_was_killed(
    cron: CronServer, wait_until: WaitUntil
) -> None:
    prepare(cron)
    start(cron)
    flows(cron, wait_until, cron.start_seconds)
    # Without schedules of seconds a second job stands by, in the same minute; not so in background workers,
    # of which pg_cron 1.4 runs one: there the next run comes with the next minute.
    stands_by = not cron.subminute and cron.mode == "libpq"
    for _ in range(3 if cron.subminute else 1):
        wait_until(lambda: len(cron.loops()) >= (2 if stands_by else 1), "the loops", timeout=65)
        killed: list[Any] = []
        with cron.connect() as connection:

            def kill(connection: Any = connection, killed: list[Any] = killed) -> bool:
                killed += connection.execute(
                    "select pg_catalog.pg_terminate_backend(l.pid) from ("
                    " select distinct l.pid from pg_catalog.pg_locks as l"  # a rotation has a second one
                    " where l.locktype = 'advisory' and l.granted and l.pid = any(%s)) as l",
                    [cron.loops()],
                ).fetchall()
                return bool(killed)

            # It has the lock nearly always: not while it commits.
            wait_until(kill, "a loop that has the lock")
        assert killed == [(True,)]
        flows(cron, wait_until, 5 if cron.subminute or stands_by else 65)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_messages_flow_again_after_a_restart_of_the_server(
    cron: CronServer, wait_until: WaitUntil, mode: Any
) -> None:
    prepare(cron)
    start_and_flow(cron, wait_until)
    cron.process.restart(mode)
    flows(cron, wait_until, 10 if cron.subminute else 65)


@pytest.mark.slow
def test_messages_flow_again_after_the_postmaster_was_killed(cron: CronServer, wait_until: WaitUntil) -> None:
    prepare(cron)
    start_and_flow(cron, wait_until)
    cron.process.kill()
    cron.process.restart()
    flows(cron, wait_until, 10 if cron.subminute else 65)


def test_stop_ends_the_running_loop_at_once_and_no_tick_follows(
    cron: CronServer, wait_until: WaitUntil
) -> None:
    prepare(cron)
    start_and_flow(cron, wait_until)
    assert cron.loops()
    stop(cron)
    wait_until(lambda: not cron.loops(), "the loop's end", timeout=10)
    assert jobs(cron) == []
    last = ticks(cron)
    send(cron)
    time.sleep(2.5)  # more than the seconds schedule and many tick periods
    assert ticks(cron) == last
    assert receive(cron) == []
    assert cron.loops() == []


@pytest.mark.slow
def test_start_after_stop_starts_again(cron: CronServer, wait_until: WaitUntil) -> None:
    prepare(cron)
    for _ in range(2):
        start_and_flow(cron, wait_until)
        stop(cron)
        wait_until(lambda: not cron.loops(), "the loop's end", timeout=10)


def test_one_loop_runs_at_a_time(cron: CronServer, wait_until: WaitUntil) -> None:
    """However many jobs the schedule needs, only one of them ticks: the others wait for its lock."""
    prepare(cron)
    start_and_flow(cron, wait_until)
    with cron.connect() as connection:
        before = ticks(cron)
        connection.execute("select pg_catalog.pg_sleep(1)")
        assert ticks(cron) == before, "an idle queue was ticked"


def test_status_reports_whether_the_ticker_runs(cron: CronServer, wait_until: WaitUntil) -> None:
    prepare(cron)
    before = status(cron)
    start_and_flow(cron, wait_until)
    running = status(cron)
    stop(cron)
    wait_until(lambda: not cron.loops(), "the loop's end", timeout=10)
    stopped = status(cron)
    assert {name: s for name, (s, _) in before.items()} == {name: s for name, (s, _) in stopped.items()}
    assert {name: s for name, (s, _) in running.items()} != {name: s for name, (s, _) in stopped.items()}


def test_uninstall_ends_the_loop_and_removes_its_jobs(cron: CronServer, wait_until: WaitUntil) -> None:
    prepare(cron)
    with cron.connect() as connection:
        connection.execute("select cron.schedule('mine', '5 4 * * *', 'select 1')")
    start_and_flow(cron, wait_until)
    with cron.connect() as connection:
        connection.execute("set lock_timeout = '10s'")
        connection.execute("select pgque.uninstall()")
    assert [job[1] for job in jobs(cron)] == ["mine"]
    wait_until(lambda: not cron.loops(), "the loop's end", timeout=10)
    with cron.connect() as connection:
        row = connection.execute(
            "select count(*) from pg_catalog.pg_namespace as n where n.nspname = 'pgque'"
        ).fetchone()
    assert row == (0,)


def test_start_schedules_for_this_database_whatever_a_renaming_or_a_dump_left(cron: CronServer) -> None:
    with cron.connect() as connection:

        def databases() -> set[str]:
            return {row[0] for row in connection.execute("select j.database from cron.job as j").fetchall()}

        connection.execute("select pgque.start()")
        for leave in ("start", "stop"):
            connection.execute("update cron.job set database = 'no_such_database'")
            connection.execute(f"select pgque.{leave}()".encode())
            assert databases() == ({DATABASE} if leave == "start" else set())
        connection.execute("select pgque.start()")
        connection.execute("update cron.job set database = 'postgres'")
        with pytest.raises(psycopg.Error) as caught:
            connection.execute("select pgque.start()")
        assert caught.value.sqlstate == "PQ014"
        assert "postgres" in str(caught.value)
        assert databases() == {"postgres"}
        for statement in re.findall(r"select cron[^;]*", caught.value.diag.message_hint or ""):
            connection.execute(statement.encode())
        connection.execute("select pgque.start()")
        assert databases() == {DATABASE}
        connection.execute("select pgque.stop()")


def test_an_owner_who_may_not_use_pg_cron_gets_the_grant_as_a_hint(cron: CronServer) -> None:
    with cron.connect() as connection:
        connection.execute("select pgque.uninstall()")
        connection.execute("drop role if exists no_cron")
        connection.execute("create role no_cron createrole")
        connection.execute(f"grant create on database {DATABASE} to no_cron".encode())
        connection.execute("set role no_cron")
        connection.execute(servers.SQL_FILE.read_bytes())
        shown = connection.execute("select status, detail from pgque.status() where component = 'scheduler'")
        assert shown.fetchone() == (
            "hidden",
            "pg_cron is installed, and role no_cron may not use it: grant usage on schema cron to no_cron;",
        )
        assert connection.execute("select count(*) from pgque.health()").fetchone() != (0,)
        connection.execute("select pgque.maint()")
        told: list[str] = []
        connection.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
        connection.execute("select pgque.stop()")
        assert any("pg_cron" in text and "no_cron" in text for text in told)
        with pytest.raises(psycopg.Error) as caught:
            connection.execute("select pgque.start()")
        assert caught.value.sqlstate == "PQ014"
        connection.execute("reset role")
        connection.execute((caught.value.diag.message_hint or "").encode())
        connection.execute("set role no_cron")
        connection.execute("select pgque.start()")
        assert jobs(cron)
        connection.execute("select pgque.uninstall()")
        assert jobs(cron) == []
        connection.execute("reset role")
        connection.execute("drop owned by no_cron")
        connection.execute("drop role no_cron")


@pytest.mark.slow
def test_installing_again_keeps_the_loop_running(cron: CronServer, wait_until: WaitUntil) -> None:
    prepare(cron)
    start_and_flow(cron, wait_until)
    with psycopg.connect(cron.dsn) as connection:
        connection.execute("set lock_timeout = '10s'")
        connection.execute(servers.SQL_FILE.read_bytes())
    assert jobs(cron)
    flows(cron, wait_until, 5)


@pytest.mark.slow
def test_a_job_of_somebody_else_still_runs(cron: CronServer, wait_until: WaitUntil) -> None:
    """The endless loop must not keep pg_cron from running other jobs."""
    if not cron.subminute and cron.mode == "workers":
        pytest.xfail("pg_cron 1.4 with background workers runs one job at a time: start() warns about it")
    prepare(cron)
    start_and_flow(cron, wait_until)
    with cron.connect() as connection:
        connection.execute("create table public.beats (at timestamptz)")
        every = "1 second" if cron.subminute else "* * * * *"
        connection.execute(
            "select cron.schedule('beat', %s, 'insert into public.beats select clock_timestamp()')", [every]
        )

        def beats() -> int:
            row = connection.execute("select count(*) from public.beats").fetchone()
            assert row is not None
            return int(row[0])

        wait_until(lambda: beats() >= 1, "the other job", timeout=10 if cron.subminute else 70)
    flows(cron, wait_until, 5)


@pytest.mark.parametrize("level", ["role", "database", "server"])
def test_a_statement_timeout_that_leaves_gaps_between_the_runs_is_named_with_its_remedy(
    cron: CronServer, wait_until: WaitUntil, level: str
) -> None:
    """A job that begins each second leaves no gaps, so there all is well."""
    prepare(cron)
    with cron.connect() as connection:
        (role,) = connection.execute("select quote_ident(current_user)").fetchone() or ("",)
    where = {"role": f"role {role}", "database": f"database {DATABASE}", "server": "system"}[level]

    def execute(*statements: str) -> None:
        with cron.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def check() -> tuple[str, str, str]:
        with cron.connect() as connection:
            row = connection.execute(
                "select status, detail, advice from pgque.health() where check_name = 'ticker'"
            ).fetchone()
        assert row is not None
        return row

    def longest_run() -> float:
        with cron.connect() as connection:
            row = connection.execute(
                "select coalesce(max(extract(epoch from clock_timestamp() - a.query_start)), 0)::float8"
                " from pg_stat_activity as a where a.pid = any(%s)",
                [cron.loops()],
            ).fetchone()
        assert row is not None
        return float(row[0])

    try:
        execute(f"alter {where} set statement_timeout = '5s'", "select pg_reload_conf()")
        wait_until(lambda: has_timeout(cron), "the setting")
        told: list[str] = []
        with cron.connect() as connection:
            connection.add_notice_handler(
                lambda notice: told.append(
                    f"{notice.severity}: {notice.message_primary}; {notice.message_hint}"
                )
            )
            connection.execute("select pgque.start()")
        warnings = [text for text in told if text.startswith("WARNING")]
        if not cron.subminute:
            cron.process.restart()
        wait_until(cron.loops, "a run", timeout=65)
        if cron.subminute:
            assert (warnings, status(cron)["scheduler"][0]) == ([], "scheduled")
            return
        state, detail, advice = check()
        assert (state, status(cron)["scheduler"][0], len(warnings)) == ("fail", "failing", 1)
        for text in (detail, status(cron)["scheduler"][1], warnings[0]):
            assert f"statement_timeout is {'5000ms' if level == 'server' else '5s'} for role {role}" in text
        assert advice in warnings[0]
        execute(advice.split(";")[0])
        assert status(cron)["scheduler"][0] == "scheduled"
        cron.process.restart()
        wait_until(lambda: longest_run() > 6, "a run that is older than the timeout", timeout=70)
        assert check()[0] == "ok"
    finally:
        execute(
            f"alter {where} reset statement_timeout",
            f"alter role {role} in database {DATABASE} reset all",
            "select pg_reload_conf()",
        )


def test_a_database_without_pg_cron_is_ticked_by_the_pg_cron_of_another(
    cron: CronServer, wait_until: WaitUntil
) -> None:
    """As on services that keep pg_cron in the database postgres; see python/docs/managed.md."""
    app = cron.process.dsn_for("app")
    with cron.connect() as here:
        here.execute("create database app")
        try:
            with psycopg.connect(app) as install:
                install.execute(servers.SQL_FILE.read_bytes())
                install.execute("select pgque.create_queue('q'), pgque.subscribe('q', 'c')")
            with psycopg.connect(app, autocommit=True) as there:
                with pytest.raises(psycopg.Error) as caught:
                    there.execute("select pgque.start()")
                assert caught.value.sqlstate == "PQ014"
            schedule = "1 second" if cron.subminute else "@reboot"
            here.execute(
                "select cron.schedule_in_database('pgque app', %s, 'call pgque.ticker_loop()', 'app')",
                [schedule],
            )
            if not cron.subminute:
                cron.process.restart()
            with psycopg.connect(app, autocommit=True) as there:
                there.execute("select pgque.send('q', 'hello')")
                query = "select count(*) from pgque.receive('q', 'c')"
                wait_until(lambda: there.execute(query).fetchone() == (1,), "the message", timeout=20)
                ticker = there.execute("select status from pgque.status() where component = 'ticker'")
                assert ticker.fetchone() == ("running",)
        finally:
            with cron.connect() as again:
                again.execute("select cron.unschedule(jobid) from cron.job")
                again.execute("drop database app with (force)")
