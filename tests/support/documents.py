"""Run the code blocks of a Markdown page in order, as a reader would, and compare what they print.

How a page is written:

- ```sql is run by psql, ```python by Python: one session of each for a page, like the cells of a notebook.
  ```sh is run by bash in the top folder of the repository. Other languages are refused where blocks are run.
- ```text is the output of the block before it, whole. In it … stands for any text, and a line of … for
  any lines. A block without one must only succeed.
- An HTML comment before a block marks it:
  <!-- not run: REASON -->        for what a test cannot do
  <!-- stopped after its output --> for what runs until Ctrl-C, which comes when the output is there
  <!-- stopped when: QUERY -->    the same, as soon as a query of the database answers true
  <!-- run last -->               for what stands above the blocks that it needs; a mark of stopping may
                                  follow: <!-- run last; stopped after its output -->
- The database mydb is one of the test's own. While a block that is not SQL runs, somebody ticks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgque import embedded
from pgque.ops.ticker import run_ticker

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = frozenset({"sql", "sh", "python"})
PATIENCE = 120.0

_FENCE = re.compile(r"^ *```(.*)$")
_MARK = re.compile(
    r"^<!-- *(?:(?P<last>run last)(?:; |(?= *-->)))?"
    r"(?P<mark>not run: .+?|stopped after its output|stopped when: .+?)? *-->$"
)
_VARIABLES = {
    "host": "PGHOST",
    "port": "PGPORT",
    "user": "PGUSER",
    "dbname": "PGDATABASE",
    "password": "PGPASSWORD",
}


class BadPage(AssertionError):
    """A page that does not keep the rules, or whose block does something else than it says."""


@dataclass(frozen=True)
class Block:
    """Some code, where it stands, how it is marked, and what it should print (None: anything)."""

    language: str
    code: str
    line: int
    mark: str = ""
    output: str | None = None
    last: bool = False

    @property
    def runs(self) -> bool:
        """Whether the block is to be run."""
        return not self.mark.startswith("not run: ")


def read(text: str) -> list[Block]:
    """Return the blocks of a page. Raises BadPage for what the rules of this module do not allow."""
    blocks: list[Block] = []
    mark, last = "", False
    lines = iter(enumerate(text.split("\n"), 1))
    blank = True
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            if blank and line.startswith(("    ", "\t")):
                raise BadPage(f"line {number}: an indented block; fence it and name its language")
            if line.startswith("<!--") and (found := _MARK.match(line.strip())):
                mark, last = found["mark"] or "", bool(found["last"])
            elif line.strip():
                mark, last = "", False
            blank = not line.strip()
            continue
        code = []
        for _, inner in lines:
            if inner.strip() == "```":
                break
            code.append(inner)
        else:
            raise BadPage(f"line {number}: this block has no end")
        language, blank = fence[1].strip(), True
        block = Block(language, "\n".join(code) + "\n", number, mark, last=last)
        mark, last = "", False
        if language == "text" and block.runs:
            if not blocks or blocks[-1].output is not None or block.mark or block.last:
                raise BadPage(f"line {number}: output of no block")
            blocks[-1] = Block(**{**vars(blocks[-1]), "output": block.code})
        elif block.runs and language not in LANGUAGES:
            raise BadPage(f"line {number}: a block of language {language!r}; known: {sorted(LANGUAGES)}")
        else:
            blocks.append(block)
    return blocks


def difference(expected: str, found: str) -> str | None:
    """Say how output differs from what a page shows; None if it does not."""
    wanted = [line.rstrip() for line in expected.strip("\n").split("\n")]
    pattern = ""
    for line in wanted:
        pattern += r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n"
    shown = "\n".join(line.rstrip() for line in found.strip("\n").split("\n")) + "\n"
    if re.fullmatch(pattern, shown):
        return None
    return f"--- the page shows\n{expected.strip()}\n--- it prints\n{shown}"


def run_example(path: Path, dsn: str, folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Run an example as a program, and compare its output with that in its docstring.

    Raises BadPage if it fails or prints something else.
    """
    expected = path.read_text(encoding="utf-8").split('"""', 2)[1].split("Prints:\n", 1)[1]
    done = subprocess.run(
        [sys.executable, str(path), dsn],
        env={**environment("", []), **(env or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * PATIENCE,
    )
    if done.returncode != 0:
        raise BadPage(f"{path.name} ended with {done.returncode}:\n{done.stderr}")
    shown = "\n".join(line.removeprefix("    ") for line in expected.strip("\n").split("\n"))
    if (told := difference(shown, done.stdout)) is not None:
        raise BadPage(f"{path.name}: {told}\n{done.stderr}")


def psql_folder(server_bindir: Path | None = None) -> Path | None:
    """Return a folder with psql: the server's own, the machine's, or the embedded server's."""
    candidates = [server_bindir, Path(shutil.which("psql") or "/none").parent]
    with contextlib.suppress(embedded.EmbeddedServerError):
        candidates.append(embedded.find_server("embedded").bindir)
    return next((folder for folder in candidates if folder and (folder / "psql").is_file()), None)


def environment(dsn: str, path: list[Path]) -> dict[str, str]:
    """Return variables that lead psql, bash and Python to the database, with more folders of programs."""
    parts = {k: str(v) for k, v in conninfo_to_dict(dsn).items() if v is not None}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "PSQL"))}
    return {
        **inherited,
        **{_VARIABLES[k]: v for k, v in parts.items() if k in _VARIABLES},
        "PATH": os.pathsep.join([*map(str, path), os.environ["PATH"]]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": "",
        "PYTHONWARNINGS": "error::DeprecationWarning:__main__",  # a page uses no earlier name
        "NO_COLOR": "1",
        "COLUMNS": "80",  # some runners of tests set it, and tables fit themselves to it
    }


@contextmanager
def ticking(dsn: str) -> Iterator[None]:
    """Tick while the block runs, once pgque is installed."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.05):
            with contextlib.suppress(Exception):  # not installed yet
                run_ticker(dsn, stop)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# Runs the cells of a page in one program. A cell arrives as a line of JSON; a line on the descriptor of
# the first argument tells that it has begun, so that Ctrl-C reaches it, and another one how it ended: "done",
# "stopped" by Ctrl-C, or "failed".
_CELLS = r"""
import json, os, signal, sys, traceback
told = os.fdopen(int(sys.argv.pop()), "w", buffering=1)
names = {"__name__": "__main__", "__builtins__": __builtins__}
cells, sys.stdin = sys.stdin, open(os.devnull)
for cell in map(json.loads, cells):
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("begun", file=told)
        exec(compile(cell["code"], cell["name"], "exec"), names)
        how = "done"
    except KeyboardInterrupt:
        how = "stopped"
    except BaseException:
        traceback.print_exc()
        how = "failed"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.flush()
    print(how, file=told)
"""


class _Session:
    """A program that runs one block after another: its input is a pipe, its output two files."""

    def __init__(self, command: list[str], folder: Path, env: Mapping[str, str], **how: Any) -> None:
        folder.mkdir()
        self.output, self.errors = folder / "output", folder / "errors"
        with self.output.open("ab") as out, self.errors.open("ab") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,  # what it leaves running is ended with the page
                **how,
            )

    def send(self, text: str) -> None:
        """Forget what was printed, and give the program more to do."""
        for file in (self.output, self.errors):
            os.truncate(file, 0)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(text.encode())
            self.process.stdin.flush()

    def wait(self, ended: Callable[[], bool]) -> None:
        """Wait until the block is done. Raises BadPage if the program ends or takes too long."""
        deadline = time.monotonic() + PATIENCE
        while not ended():
            if self.process.poll() is not None:
                if ended():
                    return
                raise BadPage(f"ended with {self.process.returncode}:\n{self.printed()}")
            if time.monotonic() > deadline:
                raise BadPage(f"not done after {PATIENCE:.0f} s:\n{self.printed()}")
            time.sleep(0.02)

    def printed(self) -> str:
        """Return all that the block has printed."""
        return self.output.read_text() + self.errors.read_text()

    def end(self) -> None:
        """End the program and what it left running."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Page:
    """One page and the programs that run its blocks: a psql, a bash for each block, a Python."""

    def __init__(
        self,
        path: Path,
        dsn: str,
        scratch: Path,
        bindir: Path | None = None,
        replace: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        psql = psql_folder(bindir)
        if psql is None:
            raise BadPage("no psql here: install PostgreSQL's client, or pgque[embedded]")
        self.path = path
        self.blocks = read(path.read_text(encoding="utf-8"))
        self._dsn = dsn
        self._scratch = scratch
        self.replace = {**(replace or {}), "mydb": str(conninfo_to_dict(dsn)["dbname"])}
        self.env = {**environment(dsn, [Path(sys.executable).parent, psql]), **(env or {})}
        self._passwords()
        self._sessions: list[_Session] = []
        self._psql: _Session | None = None
        self._python: _Session | None = None

    def _passwords(self) -> None:
        """Let every program find the passwords in a file: one in PGPASSWORD would be taken for every role."""
        file = Path(self.env.setdefault("PGPASSFILE", str(self._scratch / "pgpass")))
        with file.open("a") as out:
            out.write(f"*:*:*:{self.env.get('PGUSER', '*')}:{self.env.pop('PGPASSWORD', '')}\n")
        file.chmod(0o600)

    def fill(self, code: str) -> str:
        """Return code with what stands here for the page's names."""
        for old, new in self.replace.items():
            code = code.replace(old, new)
        return code

    def run(self, wanted: Callable[[Block], bool] = lambda block: True) -> int:
        """Run the blocks that are wanted and can be run; return how many. Raises BadPage for the first
        that fails or prints something else."""
        count = 0
        try:
            for block in sorted(self.blocks, key=lambda block: block.last):
                if not block.runs or not wanted(block):
                    continue
                try:
                    self._run(block)
                except BadPage as error:
                    raise BadPage(
                        f"{self.path.name}, line {block.line} ({block.language}): {error}"
                    ) from None
                count += 1
        finally:
            for session in reversed(self._sessions):
                session.end()
        return count

    def _run(self, block: Block) -> None:
        code = self.fill(block.code)
        if block.mark and block.language != "python":
            raise BadPage("only Python blocks can be stopped")
        if block.mark == "stopped after its output" and block.output is None:
            raise BadPage("it is to be stopped after its output, and none is shown")
        if block.language == "sql":
            found = self._sql(code)
        else:
            with ticking(self._dsn):
                found = self._sh(code) if block.language == "sh" else self._cell(code, block)
        if block.output is not None and (told := difference(block.output, found)) is not None:
            raise BadPage(told)

    def _session(self, *command: str, **how: Any) -> _Session:
        session = _Session(list(command), self._scratch / f"session-{len(self._sessions)}", self.env, **how)
        self._sessions.append(session)
        return session

    def _sql(self, code: str) -> str:
        if self._psql is None:
            self._psql = self._session("psql", "-X", "-v", "ON_ERROR_STOP=1")
        psql, end = self._psql, f"end of block {time.monotonic()}\n"
        psql.send(f"{code}\n\\echo {end}")
        psql.wait(lambda: psql.output.read_text().endswith(end))
        return psql.output.read_text().removesuffix(end)

    def _sh(self, code: str) -> str:
        bash = self._session("bash", "-ec", f"cd {shlex.quote(str(ROOT))}\n{code}")
        bash.wait(lambda: bash.process.poll() == 0)
        return bash.output.read_text()

    def _cell(self, code: str, block: Block) -> str:
        if self._python is None:
            self._told, told = os.pipe()
            self._python = self._session(sys.executable, "-c", _CELLS, str(told), pass_fds=[told])
            os.close(told)
            os.set_blocking(self._told, False)
        python, reported, how, asked_to_stop = self._python, "", "", False

        def ended() -> bool:
            nonlocal reported, how, asked_to_stop
            with contextlib.suppress(BlockingIOError):
                reported += os.read(self._told, 100).decode()
            begun, _, how = reported.strip().partition("\n")
            if begun and not how and block.mark and not asked_to_stop and self._may_stop(block, python):
                asked_to_stop = True
                python.process.send_signal(signal.SIGINT)
            return bool(how)

        cell = {"code": "\n" * block.line + code, "name": str(self.path)}
        python.send(json.dumps(cell) + "\n")
        python.wait(ended)
        if how == "failed" or (how == "stopped") > asked_to_stop:
            raise BadPage(f"{how}:\n{python.printed()}")
        if block.mark and not asked_to_stop:
            raise BadPage(f"ended by itself:\n{python.printed()}")
        return python.output.read_text()

    def _may_stop(self, block: Block, python: _Session) -> bool:
        if block.mark.startswith("stopped when: "):
            with psycopg.connect(self._dsn) as conn:
                row = conn.execute(block.mark.removeprefix("stopped when: ").encode()).fetchone()
                return bool(row and row[0])
        return difference(str(block.output), python.output.read_text()) is None
