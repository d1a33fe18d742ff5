"""What goes wrong, each by its name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from history.actors import LOG
from history.record import Delivery, History, Outcome, Session, Tx
from pgque import embedded

# --- sessions end, locks are held, the clock jumps -------------------------------------------------


def kill(h: History, rng: random.Random, name: str) -> None:
    """End anybody's backend."""
    session = Session(h, name, rng, safe=True)
    while h.producing.is_set():
        time.sleep(0.1 + rng.random() * 0.5)
        with h.survive(name):
            session.ready()
            pids = session.run(
                "select pid from pg_stat_activity where datname = current_database()"
                " and backend_type = 'client backend' and application_name not in ('', 'kill', 'judge')"
            )
            if pids:  # after a crash there may be nobody yet
                session.run("select pg_terminate_backend(%s)", rng.choice(pids)[0])
                h.count("kills")


def dump(h: History, rng: random.Random, name: str, bindir: Path | None) -> None:
    """What pg_dump locks, and once in a while pg_dump itself."""
    session = Session(h, name, rng)
    while h.producing.is_set():
        if bindir is not None and rng.random() < 0.3:
            done = subprocess.run(
                [bindir / "pg_dump", "--schema=pgque", "--file=/dev/null", h.dsn],
                capture_output=True,
                check=False,
            )
            h.count("dumps", done.returncode == 0)
        with h.survive(name):
            session.ready()
            session.run("begin isolation level repeatable read")
            session.run("set local lock_timeout = '1s'")
            tables = rng.choice(
                [
                    ["event_1_0"],
                    ["event_1_1", "tick_1_2"],
                    ["position_0"],
                    ["queue", "tick_1_0"],
                    ["event_2_1"],
                ]
            )
            for table in tables:
                session.run(f"lock table pgque.{table} in access share mode")
            time.sleep(rng.random() * 0.4)
            session.run("commit")
        time.sleep(rng.random() * 0.4)


def clock(h: History, rng: random.Random, name: str) -> None:
    """The engine's clock jumps some seconds forward and back; at last it stays where it was furthest."""
    session = Session(h, name, rng, safe=True)
    furthest = 0.0

    def jump(offset: float) -> None:
        session.ready()
        begin = time.monotonic()
        session.run(
            "create or replace function pgque.clock() returns timestamptz language sql volatile as"
            f" $$ select pg_catalog.clock_timestamp() + interval '{offset} seconds' $$"
        )
        h.clock.steps.append((begin, time.monotonic(), offset))
        h.count("clock jumps")

    while h.producing.is_set():
        time.sleep(0.3 + rng.random())
        with h.survive(name):
            offset = round(rng.choice([0, rng.random() * 6, rng.random() * 0.5, -rng.random() * 3]), 3)
            jump(offset)
            furthest = max(furthest, offset)
    set_back = False
    while not set_back:
        with h.survive(name):
            jump(furthest)
            set_back = True


# --- the server crashes, its disk is full ----------------------------------------------------------


class OwnServer:
    """A server that may be killed, with its database on a small disk where one can be mounted."""

    def __init__(self, bindir: Path | None) -> None:
        self.turmoil = threading.Lock()  # one of its faults at a time: it could not come up on a full disk
        self.server = embedded.start(bindir, settings={"shared_buffers": "32MB", "checkpoint_timeout": "30s"})
        self.disk: Path | None = self.server.socket_dir / "disk"
        self.no_disk = ""
        self.disk.mkdir(mode=0o700)
        owner = self.server.data_dir.stat()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400m,mode=0700", "tmpfs", self.disk],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            os.chown(self.disk, owner.st_uid, owner.st_gid)
        else:
            self.disk, self.no_disk = None, done.stderr.strip()

    def database(self) -> str:
        """Make a database, on the small disk if there is one, and tell how to reach it."""
        with psycopg.connect(self.server.dsn, autocommit=True) as conn:
            where = ""
            if self.disk is not None:
                folder, owner = self.disk / "tables", self.disk.stat()
                folder.mkdir(mode=0o700)
                os.chown(folder, owner.st_uid, owner.st_gid)
                conn.execute(f"create tablespace small location '{folder}'".encode())
                where = "tablespace small"
            conn.execute(f"create database history {where}".encode())
        return self.server.dsn_for("history")

    def stop(self) -> None:
        self.server.stop("immediate")
        if self.disk is not None:
            subprocess.run(["umount", "--lazy", self.disk], check=True)
            shutil.rmtree(self.server.socket_dir, ignore_errors=True)


def postmaster(h: History, rng: random.Random, name: str, own: OwnServer) -> None:
    """SIGKILL of the postmaster; the server comes up again."""
    while h.producing.is_set():
        time.sleep(2 + rng.random() * 4)
        with own.turmoil:
            began = time.monotonic()
            own.server.kill()
            own.server.restart()
            h.crashes.append((began, time.monotonic()))
        h.count("crashes")


def disk(h: History, rng: random.Random, name: str, own: OwnServer) -> None:
    """The disk under the tables is full for a while."""
    assert own.disk is not None
    filler = own.disk / "filler"
    while h.producing.is_set():
        time.sleep(1 + rng.random() * 3)
        with own.turmoil:
            try:
                with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                    while file.write(bytes(1 << 16)):
                        pass
                time.sleep(rng.random())
            finally:
                filler.unlink(missing_ok=True)
        h.count("full disks")


# --- the network ----------------------------------------------------------------------------------


class Proxy:
    """Stands in front of the server and treats connections badly while it is told to."""

    def __init__(self, h: History, rng: random.Random, dsn: str) -> None:
        self.h, self.rng = h, rng
        self.target = conninfo_to_dict(dsn)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        port = self._server.sockets[0].getsockname()[1]
        self.dsn = make_conninfo(dsn, port=port)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.05)

    async def _accept(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(client, answer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            answer.transport.abort()
            self._tasks.discard(task)

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        rng = self.rng
        bad = self.h.producing.is_set()
        way = rng.choices(["calm", "deaf", "cut", "slow", "half"], [30, 2, 40, 10, 18])[0] if bad else "calm"
        self.h.count(f"proxy: {way}")
        if way == "deaf":
            await asyncio.sleep(rng.random())
            return
        server, request = await asyncio.open_connection(str(self.target["host"]), self.target["port"])
        # A cut comes after so many bytes, in the middle of whatever it hits: a question or an answer.
        end = int(rng.expovariate(1 / 20000)) if way in ("cut", "half") else None
        asks = end if rng.random() < 0.3 else None
        tells = end if asks is None else None
        delay = 0.05 if way == "slow" else 0.0
        both = [
            asyncio.ensure_future(self._pump(client, request, asks, delay)),
            asyncio.ensure_future(self._pump(server, answer, tells, delay)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if way == "half":
                # Nothing goes through any more; then the client gives up, and the server does not know.
                for task in both:
                    task.cancel()
                await asyncio.sleep(rng.random() * 0.6)
                answer.transport.abort()
                await asyncio.sleep(rng.random() * 2.5)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            request.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, end: int | None, delay: float
    ) -> None:
        while data := await source.read(8192):
            if delay:
                await asyncio.sleep(self.rng.random() * delay)
            if end is not None and self.h.producing.is_set() and len(data) >= end:
                sink.write(data[:end])
                await sink.drain()
                return
            end = end - len(data) if end is not None else None
            sink.write(data)
            await sink.drain()


# --- a client process that is killed --------------------------------------------------------------


def client(h: History, rng: random.Random, name: str, consumer: str, queue: str) -> None:
    """A worker in a process of its own, which is killed while it holds a batch; see victim.py."""
    while h.producing.is_set():
        arguments = [h.dsn, queue, consumer, name, str(rng.randrange(10**9))]
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("victim.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        doom = threading.Timer(0.8 + rng.random() * 1.5, process.send_signal, [signal.SIGKILL])
        doom.start()
        with process:
            assert process.stdout is not None
            with contextlib.suppress(json.JSONDecodeError):  # the last line may be half a line
                _listen(h, name, consumer, process.stdout)
            process.kill()
        doom.cancel()
        doom.join()
        h.count("client kills")


def _listen(h: History, name: str, consumer: str, lines: Any) -> None:
    batch: list[Delivery] = []
    asked: list[Outcome] = []
    for line in lines:
        what, begin, end, answer = json.loads(line)
        if what == "received":
            call = h.call(name, f"receive({consumer})", Tx(begin, end, "committed"), begin)
            call.end = end
            batch = [
                Delivery(call, consumer, name, b, m, text, retries, receives, expires, lease=0.5)
                for m, b, text, retries, receives, expires in answer
            ]
            with h.lock:
                h.deliveries[consumer] += batch
        elif what == "acks":
            call = h.call(name, f"ack({batch[0].batch}, ...)", Tx(begin), begin)
            asked = [Outcome(call, "ack", d.batch, d.id) for d in batch]
            with h.lock:
                h.outcomes[consumer] += asked
            h.finished(consumer, batch)
        elif what == "acked":
            asked[0].call.end = end
            asked[0].call.tx.close("committed")
            asked[0].call.tx.end = end
            for outcome in asked:
                outcome.ok = outcome.id in answer


FAULTS: dict[str, str] = {
    "kill": "backends are ended",
    "client": "client processes are killed",
    "postmaster": "the server is killed",
    "proxy": "connections break, hang, are slow",
    "timeouts": "statement_timeout and lock_timeout of 5 to 50 ms",
    "dump": "pg_dump and its locks",
    "clock": "the clock jumps",
    "disk": "the disk is full",
}

Actor = tuple[Callable[..., None], str, tuple[Any, ...]]


def crew(faults: set[str], own: OwnServer | None) -> list[Actor]:
    """Who makes them."""
    bindir = None if own is None else own.server.bindir
    all_of_them: dict[str, list[Actor]] = {
        "kill": [(kill, "kill", ())],
        "client": [(client, "victim", ("pool", LOG))],
        "postmaster": [(postmaster, "postmaster", (own,))],
        "dump": [(dump, "dump", (bindir,))],
        "clock": [(clock, "clock", ())],
        "disk": [(disk, "disk", (own,))] if own is not None and own.disk is not None else [],
    }
    return [actor for name, actors in all_of_them.items() if name in faults for actor in actors]
