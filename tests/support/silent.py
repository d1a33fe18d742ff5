"""A path to the server that goes silent: what is sent is acknowledged, and no answer ever comes.

The proxy has processes of its own, one for each connection. A stopped process keeps its sockets: the kernel still
accepts connections and acknowledges bytes, and nothing else happens. A proxy in the test's own process would stop
with the interpreter that it is to observe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_PROXY = """
import os, re, selectors, signal, socket, sys

host, port, pattern = sys.argv[1:]
last = re.compile(pattern.encode("latin-1"), re.IGNORECASE | re.DOTALL)
cuts = bool(pattern)

def cut(number, frame):
    global cuts
    cuts = number == signal.SIGUSR1

signal.signal(signal.SIGUSR1, cut)
signal.signal(signal.SIGUSR2, cut)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    near, _ = listener.accept()
    if os.fork() == 0:
        break
    near.close()
listener.close()
if host.startswith("/"):
    far = socket.socket(socket.AF_UNIX)
    far.connect(f"{host}/.s.PGSQL.{port}")
else:
    far = socket.create_connection((host, int(port)))
with selectors.DefaultSelector() as selector:
    selector.register(near, selectors.EVENT_READ, far)
    selector.register(far, selectors.EVENT_READ, near)
    while True:
        for key, _ in selector.select():
            data = key.fileobj.recv(65536)
            if not data:
                sys.exit()
            if cuts and key.fileobj is near and (found := last.search(data)):
                far.sendall(data[:found.start()])
                os.kill(os.getpid(), signal.SIGSTOP)
            key.data.sendall(data)
"""


# Patterns of messages that a client sends. A commit, in the extended protocol where the statement has no
# name, or in the simple one:
COMMIT = r"(P....\0|Q....)commit\0"
# The end of each statement, or of a pipeline, without which nothing is committed.
SYNC = r"S\0\0\0\x04"


class SilentPath:
    """A path to the server that the test can silence."""

    def __init__(self, process: subprocess.Popen[str], dsn: str, port: int) -> None:
        self._process = process
        self._port = port
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port)

    def let_through(self) -> None:
        """Let the message through that silences connections, on those that are opened from now on."""
        os.kill(self._process.pid, signal.SIGUSR2)

    def cut(self) -> None:
        """Silence the connections that there are before the message."""
        for pid in self._connections():
            os.kill(pid, signal.SIGUSR1)

    @property
    def silent(self) -> int:
        """How many connections are silent."""
        return sum(1 for pid in self._connections() if _is_stopped(pid))

    def _connections(self) -> list[int]:
        pid = self._process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def silence(self, *, new_ones: bool = True) -> None:
        """Silence the connections that there are, and those that are opened from now on, unless `new_ones` is
        False."""
        for pid in ([self._process.pid] if new_ones else []) + self._connections():
            os.kill(pid, signal.SIGSTOP)
            while not _is_stopped(pid):
                time.sleep(0.001)

    def resume(self) -> None:
        """Let everything through that was held back."""
        for pid in [*self._connections(), self._process.pid]:
            os.kill(pid, signal.SIGCONT)

    @property
    def unanswered(self) -> int:
        """On how many connections something was sent since they are silent: bytes that the proxy has not read."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        port = f":{self._port:04X}"
        return sum(1 for line in lines if line[1].endswith(port) and int(line[4].partition(":")[2], 16) > 0)

    @property
    def connections(self) -> int:
        """How many connections lead over the path, silent ones included."""
        return len(self._connections())


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def silent_path(dsn: str, before: str = "") -> Iterator[SilentPath]:
    """Yield a path to the database that works until the test silences it, or a connection until it would
    pass on a message, given by a pattern."""
    given = conninfo_to_dict(dsn)
    process = subprocess.Popen(
        [sys.executable, "-c", _PROXY, str(given["host"]), str(given["port"]), before],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield SilentPath(process, dsn, int(process.stdout.readline()))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
