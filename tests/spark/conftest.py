"""What the Spark tests need besides the common fixtures: sessions, JDBC, drivers in processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from conftest import Role
from support.documents import Page
from support.servers import REPOSITORY, TestServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HERE = Path(__file__).parent
JAR = Path(os.environ.get("PGQUE_JDBC_JAR") or "/usr/share/java/postgresql.jar")


@cache
def missing() -> str | None:
    """Tell what the Spark tests lack, or None."""
    if importlib.util.find_spec("pyspark") is None:
        return "no PySpark here: make test-spark has one"
    java = (
        Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else shutil.which("java")
    )
    try:
        told = subprocess.run([str(java), "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return "no Java"
    major = re.search(r'version "(\d+)', told)
    if major is None or int(major[1]) < 17:
        return f"Java is too old: {told.splitlines()[0]}"
    if not JAR.is_file():
        return f"no JDBC driver: {JAR}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it where Spark is missing."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.spark)
        # What PySpark and py4j leave open or still call.
        for warning in (
            "ignore::ResourceWarning",
            "ignore::DeprecationWarning:pyspark.*",
            "ignore::FutureWarning:pyspark.*",
            "ignore::pytest.PytestUnraisableExceptionWarning",
        ):
            item.add_marker(pytest.mark.filterwarnings(warning))
        problem = missing()
        if problem is not None:
            item.add_marker(pytest.mark.skip(reason=problem))


def built_wheel(folder: Path) -> Path:
    """Build the package's wheel into a folder and return it."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(REPOSITORY / "python")], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment() -> dict[str, str]:
    """Return the variables that Spark and its Python workers need. PGQUE_SPARK_PYTHON names another Python for the
    workers."""
    return {
        "PYSPARK_PYTHON": os.environ.get("PGQUE_SPARK_PYTHON", sys.executable),
        "PYSPARK_DRIVER_PYTHON": os.environ.get("PGQUE_SPARK_PYTHON", sys.executable),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def settings(scratch: Path) -> dict[str, str]:
    """Return the settings of the tests' sessions; scratch is a folder for what Spark writes."""
    return {
        "spark.master": "local[2]",
        "spark.app.name": "pgque tests",
        "spark.driver.memory": "1g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraClassPath": str(JAR),
        "spark.executor.extraClassPath": str(JAR),
        "spark.ui.enabled": "false",
        # Said here too: the JVM keeps what the module before set.
        "spark.eventLog.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.local.dir": str(scratch / "local"),
        "spark.log.level": "ERROR",
        # Most of a short run is start-up, which is sooner done without the second compiler.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }


def start_session(scratch: Path, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Start a session; conf adds to or replaces the settings."""
    from pyspark.sql import SparkSession

    os.environ.update(environment())
    builder: Any = SparkSession.builder
    for name, value in {**settings(scratch), **(conf or {})}.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    return session


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A folder for what the module's Spark writes: checkpoints, event logs."""
    with tempfile.TemporaryDirectory(prefix="pgque-spark-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def spark(request: pytest.FixtureRequest, scratch: Path) -> Iterator[SparkSession]:
    """The module's session: local[2], UTC, the JDBC driver at hand.

    A module changes settings with a dictionary SPARK_CONF, such as {"spark.master": "local[2,4]"}
    to have failed tasks retried; EVENT_LOG = True writes an event log below scratch / "events".
    """
    from pyspark.sql import SparkSession

    conf: dict[str, str] = dict(getattr(request.module, "SPARK_CONF", {}))
    if getattr(request.module, "EVENT_LOG", False):
        (scratch / "events").mkdir()
        conf |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": f"file://{scratch / 'events'}"}
    session = start_session(scratch, conf)
    try:
        yield session
    finally:
        for query in session.streams.active:
            query.stop()
        session.stop()
        # The JVM lives on for the next module, and so would the settings of this one.
        builder: Any = SparkSession.builder
        builder._options.clear()


@pytest.fixture
def spark_conf(scratch: Path) -> dict[str, str]:
    """The tests' settings."""
    return settings(scratch)


@pytest.fixture
def spark_variables(scratch: Path) -> dict[str, str]:
    """Variables with which a program that asks for any session gets one with the tests' settings."""
    conf = [word for name, value in settings(scratch).items() for word in ("--conf", f"{name}={value}")]
    return {**environment(), "PYSPARK_SUBMIT_ARGS": shlex.join([*conf, "pyspark-shell"])}


@pytest.fixture
def tcp_dsn(server: TestServer, fresh_dsn: str) -> str:
    """A connection string of a new, empty database through TCP."""
    return tcp(server, fresh_dsn)


@pytest.fixture
def spark_page(
    server: TestServer, tcp_dsn: str, roles: Callable[..., Role], tmp_path: Path
) -> Iterator[Callable[..., Page]]:
    """spark_page(path, variables): a document whose blocks run in a database of their own, by a role that
    may read and write. page.fill(code) puts in what stands for the database, the role and folders."""

    role = roles("reader", "writer")

    def do(path: Path, variables: Mapping[str, str]) -> Page:
        parts = conninfo_to_dict(role.dsn)
        passwords = tmp_path / "pgpass"
        passwords.write_text(f"*:*:*:{role.name}:{parts['password']}\n")
        passwords.chmod(0o600)
        at = conninfo_to_dict(tcp_dsn)
        return Page(
            path,
            tcp_dsn,
            tmp_path,
            server.process.bindir if server.process is not None else None,
            replace={
                '"user": "spark"': f'"user": "{role.name}"',
                '"user", "spark"': f'"user", "{role.name}"',
                "user=spark": f"user={role.name}",
                "/var/lib/spark": str(tmp_path),
                "//localhost/": f"//{at['host']}:{at['port']}/",
            },
            env={**variables, "PGPASSFILE": str(passwords)},
        )

    yield do
    with psycopg.connect(tcp_dsn) as conn:
        conn.execute(f"drop owned by {role.name}".encode())


def tcp(server: TestServer, dsn: str) -> str:
    """Return the connection string through TCP, which is the only way that JDBC has."""
    parts = conninfo_to_dict(dsn)
    if server.process is not None:
        parts |= {"host": "127.0.0.1", "port": str(server.process.port)}
        if parts.get("user") == "postgres":
            parts["password"] = server.process.password
    elif str(parts.get("host", "/")).startswith("/"):
        parts["host"] = "localhost"
    return make_conninfo("", **{k: v for k, v in parts.items() if v is not None})


@dataclass(frozen=True, slots=True)
class Jdbc:
    """A role's way in through JDBC."""

    dsn: str
    user: str
    password: str

    def url(self, **parameters: str) -> str:
        """Return the URL; parameters are the driver's, such as reWriteBatchedInserts="true"."""
        parts = conninfo_to_dict(self.dsn)
        query = "&".join(f"{k}={v}" for k, v in {"logServerErrorDetail": "false", **parameters}.items())
        return f"jdbc:postgresql://{parts['host']}:{parts.get('port', '5432')}/{parts['dbname']}?{query}"

    def options(self, **parameters: str) -> dict[str, str]:
        """Return Spark's options for the connection."""
        return {
            "url": self.url(**parameters),
            "user": self.user,
            "password": self.password,
            "driver": "org.postgresql.Driver",
        }

    def write(
        self,
        frame: DataFrame,
        table: str,
        mode: str = "append",
        *,
        rewrite: bool = True,
        **options: str,
    ) -> None:
        """Write a frame as Spark's JDBC does; options are Spark's."""
        url = {"reWriteBatchedInserts": "true"} if rewrite else {}
        frame.write.format("jdbc").options(**self.options(**url), dbtable=table, **options).mode(mode).save()


@pytest.fixture
def jdbc_as(server: TestServer) -> Callable[[Role], Jdbc]:
    """jdbc_as(role): that role's way in through JDBC."""

    def do(role: Role) -> Jdbc:
        parts = conninfo_to_dict(role.dsn)
        return Jdbc(tcp(server, role.dsn), role.name, str(parts["password"]))

    return do


@pytest.fixture
def jdbc(jdbc_as: Callable[[Role], Jdbc], writer: Role) -> Jdbc:
    """A writer's way in through JDBC."""
    return jdbc_as(writer)


def _processes(session: int) -> dict[int, str]:
    """Return the processes of a session (setsid) that are not zombies, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, _, _, sid = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(sid) == session and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


class Driver:
    """A Python script with a Spark session in a process of its own."""

    def __init__(self, script: Path, arguments: list[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment(), **env},
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether the script has not ended."""
        return self.process.poll() is None

    def processes(self, name: str = "") -> list[int]:
        """Return the ids of what runs in the script's session and has the name in its command line."""
        return [pid for pid, command in _processes(self.process.pid).items() if name in command]

    def output(self) -> str:
        """Return what was written so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 90) -> None:
        """Wait until the output holds the text; fail if the script ends before."""
        deadline = time.monotonic() + timeout
        while text not in self.output():
            assert self.running, f"ended with {self.process.returncode}:\n{self.output()[-4000:]}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s:\n{self.output()[-4000:]}"
            time.sleep(0.02)

    def wait(self, timeout: float = 120) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(timeout)

    def finish(self, timeout: float = 120) -> None:
        """Wait for the end and expect success."""
        assert self.wait(timeout) == 0, self.output()[-4000:]

    def kill(self) -> None:
        """SIGKILL the script and its JVM at once; Python workers are left to notice."""
        for pid in {self.process.pid, *self.processes("org.apache.spark.deploy.SparkSubmit")}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def end(self) -> None:
        """SIGKILL everything that the script started."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait(10)


_PREAMBLE = """
import sys
sys.path[:0] = {path!r}
import importlib.util
from pathlib import Path
_spec = importlib.util.spec_from_file_location("spark_conftest", {conftest!r})
_module = importlib.util.module_from_spec(_spec)
sys.modules["spark_conftest"] = _module
_spec.loader.exec_module(_module)
spark = _module.start_session(Path({scratch!r}), {conf!r})
print("SESSION READY", flush=True)
"""


@pytest.fixture
def run_driver(scratch: Path, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """run_driver(source, *arguments, conf=None, env=None) runs Python source in a process of its own.

    The source finds `spark`, a session with the tests' settings and conf, and its arguments in sys.argv.
    What is still running after the test is killed.
    """
    drivers: list[Driver] = []

    def do(
        source: str,
        *arguments: str,
        conf: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Driver:
        number = len(drivers)
        script = tmp_path / f"driver_{number}.py"
        preamble = _PREAMBLE.format(
            path=[str(HERE.parent)],
            conftest=str(Path(__file__)),
            scratch=str(scratch),
            conf=dict(conf or {}),
        )
        script.write_text(preamble + source)
        driver = Driver(script, list(arguments), tmp_path / f"driver_{number}.log", env or {})
        drivers.append(driver)
        return driver

    yield do
    for driver in drivers:
        driver.end()
