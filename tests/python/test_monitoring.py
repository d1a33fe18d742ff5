"""The dashboards, alert rules and configurations of pgque.monitoring, read by the programs they are for."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, start_http_server
from psycopg import conninfo

import pgque
from pgque.cli import main
from pgque.ops import monitoring
from sql.helpers import move_clock
from support.processes import ended

Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]

PROMETHEUS, POSTGRESQL = "grafana-prometheus.json", "grafana-postgresql.json"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the command writes."""
    folder = tmp_path_factory.mktemp("monitoring") / "new"
    done = CliRunner().invoke(main, ["monitoring", "export", str(folder)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in folder.iterdir()} == set(monitoring.FILES)
    return folder


def _program(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}: apt-get install {package}")
    return path


def _promtool(*arguments: object) -> None:
    promtool = _program("promtool", "prometheus")
    done = subprocess.run([promtool, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- dashboards ----------------------------------------------------------------


def _panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("name", [PROMETHEUS, POSTGRESQL])
def test_a_dashboard_is_one_that_grafana_can_import(name: str) -> None:
    board = json.loads(monitoring.text(name))
    assert {"title", "uid", "schemaVersion", "time", "templating", "panels", "tags", "version"} <= set(board)
    assert board["id"] is None
    assert len(board["uid"]) <= 40
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    source = variables["datasource"]
    assert source["type"] == "datasource"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in _panels(board):
        assert panel["title"]
        assert panel["type"] in {"timeseries", "stat", "table", "bargauge"}
        assert panel["datasource"] == {"type": source["query"], "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            text = target.get("expr") or target["rawSql"]
            used = set(re.findall(r"\$\{?([a-z]\w*)", text))
            assert used <= set(variables), text


def _fill(conn: Connection) -> None:
    """Give a database of each kind what a dashboard shows: also what went wrong."""
    client = pgque.PgqueClient(conn)
    client.admin.create_queue("orders", {"max_depth": 1000})
    client.subscribe("orders", "slow")
    client.subscribe("orders", "pool")
    client.admin.create_queue("closed", {"max_retries": 0})
    client.subscribe("closed", "c")
    client.recurring.create("report", "closed", "1 second")
    client.send_batch("orders", "default", list("abcd"))
    client.send("closed", "a")
    _tick(conn)
    batch = client.receive("orders", "pool", 2, worker="w")
    client.nack(batch[0].batch_id, [batch[0].msg_id], 0, "again")
    client.nack(batch[0].batch_id, [batch[1].msg_id], 3600, "later")
    _tick(conn)
    client.receive("orders", "pool", 2, worker="w", visibility_timeout=7200)
    [lost] = client.receive("closed", "c", 1, worker="w")  # the recurring message may be due already
    client.nack(lost.batch_id, [lost.msg_id], 0, "no good")
    client.admin.pause("closed")


def _tick(conn: Connection) -> None:
    conn.execute("select pgque.force_next_tick(q.queue_name) from pgque.get_queue_info() as q")
    conn.execute("select pgque.ticker()")
    conn.execute("select pgque.maint()")


def test_each_query_of_the_dashboard_on_postgresql_has_data_for_a_reader(
    own_dsn: str, roles: Callable[..., Any]
) -> None:
    with psycopg.connect(own_dsn, autocommit=True) as conn:
        database = conn.info.dbname
        _fill(conn)
        move_clock(conn, "10 minutes")  # a shorter lag is not kept, and a recurring message is late
        conn.execute("select pgque.maint_lags()")
        client = pgque.PgqueClient(conn)
        client.send_batch("orders", "default", ["x"] * 500)
        _tick(conn)
        client.receive("orders", "pool", 2, worker="another", visibility_timeout=7200)
    since = datetime.now(timezone.utc) - timedelta(hours=3)
    board = json.loads(monitoring.text(POSTGRESQL))
    empty = []
    with (
        psycopg.connect(own_dsn, autocommit=True) as writer,
        psycopg.connect(roles("reader", dbname=database).dsn, autocommit=True) as reader,
    ):
        [queues] = (
            [str(row[0]) for row in reader.execute(variable["query"].encode())]
            for variable in board["templating"]["list"]
            if variable["type"] == "query"
        )
        assert queues == ["closed", "orders"]
        named = ",".join(f"'{queue}'" for queue in queues)
        with writer.transaction():
            writer.execute(
                "select pgque.send('orders', 'x')"
            )  # a transaction that writes, while this is read
            for panel in _panels(board):
                for target in panel["targets"]:
                    sql = target["rawSql"].replace("${queue:sqlstring}", named)
                    sql = sql.replace("$__timeFrom()", f"'{since:%Y-%m-%dT%H:%M:%SZ}'")
                    assert "$" not in sql
                    cursor = reader.execute(sql.encode())
                    columns = [column.name for column in cursor.description or ()]
                    rows = cursor.fetchall()
                    if target["format"] == "time_series":
                        assert columns == ["time", "metric", "value"], panel["title"]
                    # A figure that is 0 in each row would be 0 if it read the wrong one, too.
                    empty += [
                        f"{panel['title']}: {column}"
                        for at, column in enumerate(columns)
                        if not any(row[at] for row in rows)
                    ]
    assert set(empty) <= {"Consumers: lost to retention"}, empty


# -- alert rules and configurations ----------------------------------------------


@pytest.mark.prometheus
def test_each_alert_comes_with_its_incident_and_not_before(files: Path) -> None:
    alerts = set(re.findall(r"- alert: (\w+)", monitoring.text("alerts.yml")))
    tested = monitoring.text("alerts_test.yml")
    fired = set(re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", tested))
    assert alerts == fired
    _promtool("check", "rules", files / "alerts.yml")
    _promtool("test", "rules", files / "alerts_test.yml")
    _promtool("check", "config", files / "prometheus.yml")


def test_the_file_for_sql_exporter_has_the_statement_of_the_exporter() -> None:
    _, _, query = monitoring.text("sql-exporter.yml").partition("query: |\n")
    assert query.split() == monitoring.text("figures.sql").split()


def test_systemd_accepts_the_unit_of_the_exporter(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    text = monitoring.text("pgque-metrics.service")
    assert "\nExecStart=/opt/pgque/bin/pgque metrics --serve 127.0.0.1:9187\n" in text
    path = tmp_path / "pgque-metrics.service"
    path.write_text(text.replace("/opt/pgque/bin/pgque", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- a real Prometheus -----------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _url(dsn: str) -> str:
    """Return a connection string as the driver of sql_exporter reads it."""
    given = {key: str(value) for key, value in conninfo.conninfo_to_dict(dsn).items()}
    user, password = (urllib.parse.quote(given.get(key, ""), safe="") for key in ("user", "password"))
    host = given["host"]
    if host.startswith("/"):
        query = urllib.parse.urlencode({"host": host, "port": given["port"], "sslmode": "disable"})
        return f"postgres://{user}:{password}@/{given['dbname']}?{query}"
    return f"postgres://{user}:{password}@{host}:{given['port']}/{given['dbname']}?sslmode=disable"


class _Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer, or None while there is none. Raises AssertionError for a wrong query."""
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                body = error.read()
            assert error.code == 503, (parameters, body)
        except OSError:
            pass
        return None

    def has_data(self, query: str) -> bool:
        """Return whether a query has a figure other than 0, which a wrong query could have as well."""
        data = self.get("query", query=query)
        return data is not None and any(row["value"][1] not in ("NaN", "0") for row in data["result"])

    def choices(self, query: str) -> list[str]:
        """Return the values that Grafana offers for a variable: label_values(family, label)."""
        family, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        values = self.get(f"label/{label}/values", **{"match[]": family})
        return [str(value) for value in values or ()]


@contextmanager
def _running(
    files: Path, folder: Path, exporter_url: str, workers_port: int, dsn: str
) -> Iterator[_Prometheus]:
    """Run Prometheus and sql_exporter with the files as they are, but for addresses and pauses."""
    sql_port, port = _free_port(), _free_port()
    config = monitoring.text("sql-exporter.yml").replace("15s", "1s")
    config, count = re.subn(r'"postgres://.*"', json.dumps(_url(dsn)), config)
    assert count == 1
    (folder / "sql.yml").write_text(config)
    config = monitoring.text("prometheus.yml")
    head, between, jobs = config.partition("  # - job_name: pgque-sql\n")
    config = head + (between + jobs).replace("  # ", "  ")
    for old, new in {
        "15s": "1s",
        "alerts.yml": str(files / "alerts.yml"),
        "127.0.0.1:9187": exporter_url.removeprefix("http://"),
        '"127.0.0.1:9188"': f'"127.0.0.1:{workers_port}"',
        "127.0.0.1:9237": f"127.0.0.1:{sql_port}",
    }.items():
        assert old in config
        config = config.replace(old, new)
    (folder / "prometheus.yml").write_text(config)
    commands = [
        [
            _program("prometheus-sql-exporter", "prometheus-sql-exporter"),
            f"-config.file={folder / 'sql.yml'}",
            f"-web.listen-address=127.0.0.1:{sql_port}",
        ],
        [
            _program("prometheus", "prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    ]
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        for command in commands:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, cwd=folder)
            stack.enter_context(ended(process))
        yield _Prometheus(port)


class _Run:
    """A worker with every outcome, and a sender, on queues of their own."""

    def __init__(self, dsn: str, queue: str, conn: Connection) -> None:
        client = pgque.PgqueClient(conn)
        client.subscribe(queue, "c")
        for setting, value in {"drop_policy": "drop", "max_retries": "1", "max_depth": "100000"}.items():
            client.admin.set_queue_config(queue, setting, value)
        self._conn, self._client, self._queue = conn, client, queue
        self._end = threading.Event()
        self._held = threading.Event()
        self.worker = pgque.Worker(dsn, queue=queue, consumer="c", retry_after=0)
        self.worker.handler("ack")(lambda message: None)
        self.worker.handler("hold")(lambda message: self._end.wait(60) and None)
        self.worker.handler("fails")(self._fail)
        client.send(queue, "x", type="hold")
        self._threads = [threading.Thread(target=work) for work in (self.worker.run, self._send)]

    def _fail(self, message: pgque.Message) -> None:
        raise RuntimeError("on purpose")

    def _send(self) -> None:
        while not self._end.wait(0.2):
            self._client.send(self._queue, "x", type="ack")
            self._client.send(self._queue, "x", type="fails")
            self._client.send(self._queue, "x", ttl=0.001)
            self._conn.execute("select pgque.force_next_tick(%s)", [self._queue])
            self._conn.execute("select pgque.ticker(%s)", [self._queue])
            self._conn.execute("select pgque.maint()")

    def __enter__(self) -> _Run:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self.worker.stop()
        for thread in self._threads:
            thread.join(30)


@pytest.mark.prometheus
@pytest.mark.slow
def test_a_prometheus_that_scrapes_a_run_has_data_for_each_query_of_the_dashboard(
    own_dsn: str, files: Path, tmp_path: Path, wait_until: Wait
) -> None:
    board = json.loads(monitoring.text(PROMETHEUS))
    queries = {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "30s")
        for panel in _panels(board)
        for target in panel["targets"]
    }
    queries["sql_exporter"] = 'pgque_queue_bytes{job="pgque-sql", queue="orders", instance=~".*/.+"}'
    queries["sql_exporter, read"] = 'pgque_up{job="pgque-sql", instance=~".*/.+"} == 1'
    registry = CollectorRegistry()
    pgque.enable_prometheus(registry=registry)
    figures, figures_thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with (
            psycopg.connect(own_dsn, autocommit=True) as conn,
            psycopg.connect(own_dsn, autocommit=True) as other,
            psycopg.connect(own_dsn) as writer,
        ):
            _fill(conn)
            client = pgque.PgqueClient(conn)
            client.admin.create_queue("full", {"max_depth": 1})
            client.subscribe("full", "c")
            client.send("full", "x")
            writer.execute("select pg_current_xact_id()")  # an open transaction that writes
            with (
                _serving(own_dsn, tmp_path) as address,
                _Run(own_dsn, "orders", conn) as run,
                _running(files, tmp_path, address, figures.server_port, own_dsn) as prometheus,
            ):
                variables = {
                    variable["name"]: variable["query"]["query"]
                    for variable in board["templating"]["list"]
                    if variable["type"] == "query"
                }
                # Both exporters must have been read: panels leave out the figures of an instance that is not chosen.
                wait_until(
                    lambda: len(prometheus.choices("label_values(pgque_up, instance)")) == 2, timeout=60
                )
                wait_until(lambda: all(map(prometheus.choices, variables.values())), timeout=60)
                chosen = {name: _any_of(prometheus.choices(query)) for name, query in variables.items()}
                wanted = {
                    panel: re.sub(r"\$(\w+)", lambda found: chosen[found[1]], query)
                    for panel, query in queries.items()
                }
                name = f"pgque orders/{run.worker.worker}"[:63]
                end = "select pg_terminate_backend(a.pid, 5000) from pg_stat_activity as a where a.application_name = %s"

                def answered() -> bool:
                    for panel in [panel for panel, query in wanted.items() if prometheus.has_data(query)]:
                        del wanted[panel]
                    if "Reconnects A" in wanted:
                        other.execute(end, [name])
                    # Nothing is lost here: that takes the retention period.
                    return set(wanted) <= {"Lost, expired, dropped A"}

                try:
                    wait_until(answered, timeout=90)
                except AssertionError:
                    pytest.fail(f"no data: {wanted}\n{(tmp_path / 'log').read_text()[-3000:]}")
                for query in wanted.values():
                    assert prometheus.get("query", query=query)["result"]
                rules = prometheus.get("rules")["groups"][0]["rules"]
                assert {rule["health"] for rule in rules} == {"ok"}
                targets = prometheus.get("targets")["activeTargets"]
                assert {target["health"] for target in targets} == {"up"}, targets
    finally:
        pgque.enable_prometheus(False)
        figures.shutdown()
        figures_thread.join(10)
        figures.server_close()


def _any_of(values: list[str]) -> str:
    """Return chosen values of a variable as Grafana writes them into a regular expression of PromQL."""
    return "(" + "|".join(re.escape(value).replace("\\", "\\\\") for value in values) + ")"


@contextmanager
def _serving(dsn: str, folder: Path) -> Iterator[str]:
    """Run `pgque metrics --serve`, and yield its address."""
    address = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "pgque.cli", "metrics", "--serve", address, "--dsn", dsn]
    with (folder / "served").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        with ended(process):
            yield f"http://{address}"
