"""The compose file: what can be had without a registry runs, and the rest is read by the programs it is for."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from conftest import Role
from pgque.ops import monitoring
from support import images, servers
from support.pages import Browser

# On a machine that has not built the images yet, the first test installs their packages.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

FILE = servers.REPOSITORY / "tests" / "image" / "compose.yaml"


class Compose:
    """A project of the compose file, with the images that the tests build, on any free ports."""

    def __init__(self, override: Path, **environment: str) -> None:
        program = os.environ.get("PGQUE_COMPOSE")
        name = f"pgque-test-{secrets.token_hex(4)}"
        self._command = [program] if program else [images.client(), "compose"]
        self._command += ["-p", name, "-f", str(FILE), "-f", str(override)]
        self._environment = {**os.environ, **environment}

    def __call__(self, *arguments: str, wanted: int | None = 0) -> str:
        """Return what a command prints."""
        done = subprocess.run(
            [*self._command, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert wanted in (None, done.returncode), done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def address(self, service: str, port: int) -> str:
        """Return where a port of a service is published."""
        return self("port", service, str(port)).strip()


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Compose:
    """The file without what runs; skipped where there is no Docker Compose 2."""
    override = tmp_path_factory.mktemp("compose") / "override.json"
    tags = {"database": "database", "web": "web", "metrics": "web"}
    quick = {"healthcheck": {"interval": "1s"}}
    services = {name: {"image": f"pgque-{tag}:test", **quick} for name, tag in tags.items()}
    override.write_text(json.dumps({"services": services}))
    ports = dict.fromkeys(("PGQUE_PORT", "PGQUE_WEB_PORT"), "0")
    made = Compose(override, PGQUE_PASSWORD="it's secret", PGQUE_MONITOR_PASSWORD="for 'figures'", **ports)
    version = made("version", "--short", wanted=None).removeprefix("v")
    if not version or version.startswith("1."):
        pytest.skip(f"no Docker Compose 2: {version or 'docker compose is missing'}")
    return made


@pytest.fixture(scope="module")
def running(compose: Compose) -> Iterator[Compose]:
    for target in ("database", "web"):
        images.build(target)
    try:
        compose("up", "-d", "--no-build", "--wait", "--wait-timeout", "240", "database", "web", "metrics")
        yield compose
    except AssertionError:
        print(compose("logs", wanted=None))
        raise
    finally:
        compose("down", "-v", "--timeout", "5", wanted=None)


class Remote(Browser):
    """A person's browser, for a page that runs elsewhere."""

    def __init__(self, client: Any) -> None:
        self.client = client


def _read(compose: Compose) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(compose("config", "--format", "json"))
    return found


def test_each_file_is_there_each_port_is_bound_to_this_machine_and_secrets_come_from_outside(
    compose: Compose,
) -> None:
    services = _read(compose)["services"]
    assert set(services) == {"database", "web", "metrics", "prometheus", "grafana"}
    published = {}
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1"
            published[name] = port["target"]
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                assert Path(volume["source"]).is_file(), volume
                assert volume["read_only"]
    assert published == {"database": 5432, "web": 8811, "prometheus": 9090, "grafana": 3000}
    given = {name: json.dumps(service.get("environment")) for name, service in services.items()}
    assert {name for name, text in given.items() if "it's secret" in text} == {"database"}
    assert {name for name, text in given.items() if "for 'figures'" in text} == {
        "database",
        "metrics",
        "grafana",
    }
    command = "docker compose -f tests/image/compose.yaml up --build -d"
    for file in (FILE, servers.REPOSITORY / "python" / "docs" / "docker.md"):
        assert command in file.read_text()


def test_prometheus_and_grafana_find_the_services_the_rules_and_the_dashboards(
    compose: Compose, tmp_path: Path
) -> None:
    services = _read(compose)["services"]
    folder = FILE.parent / "compose"
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    mounted = {Path(volume["target"]): volume["source"] for volume in services["prometheus"]["volumes"]}
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(mounted[Path("/etc/prometheus") / name], tmp_path)
    subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True
    )
    assert "metrics:9187" in (folder / "prometheus.yml").read_text()
    assert services["metrics"]["command"] == ["metrics", "--serve", "0.0.0.0:9187"]

    sources = (folder / "grafana-datasources.yml").read_text()
    types = set(re.findall(r"^ +type: (\S+)", sources, re.MULTILINE))
    mounted = {Path(volume["target"]): volume["source"] for volume in services["grafana"]["volumes"]}
    [dashboards] = re.findall(r"path: (\S+)", (folder / "grafana-dashboards.yml").read_text())
    needed = set()
    for name in ("grafana-prometheus.json", "grafana-postgresql.json"):
        assert Path(mounted[Path(dashboards) / name]).read_text() == monitoring.text(name)
        variables = json.loads(monitoring.text(name))["templating"]["list"]
        needed |= {variable["query"] for variable in variables if variable["type"] == "datasource"}
    assert types == needed
    first = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(first) in mounted
    for url in re.findall(r"url: (?:http://)?(\w+):\d+", sources):
        assert url in services


def test_one_logs_in_to_the_web_page_and_makes_a_queue(running: Compose) -> None:
    with httpx2.Client(base_url=f"http://{running.address('web', 8811)}", follow_redirects=True) as client:
        browser = Remote(client)
        wrong = browser.log_in(Role("postgres", "password=wrong"))
        assert "Log out" not in wrong.text
        page = browser.log_in(Role("postgres", psycopg.conninfo.make_conninfo("", password="it's secret")))
        assert (page.status_code, "Log out" in page.text) == (200, True), page.text
        host, port = running.address("database", 5432).split(":")
        with psycopg.connect(
            host=host, port=int(port), user="postgres", password="it's secret", autocommit=True
        ) as conn:
            conn.execute("select pgque.create_queue('orders')")
        assert "orders" in browser.get("/queue", queue="orders").text


def test_the_figures_are_served_to_prometheus_and_no_program_runs_as_root(
    running: Compose, wait_until: Callable[..., None]
) -> None:
    code = "import urllib.request as u; print(u.urlopen('http://metrics:9187/metrics', timeout=9).read().decode())"

    def text() -> str:
        return running("exec", "-T", "web", "python3", "-c", code)

    assert "pgque_up 1.0" in text()
    wait_until(lambda: 'pgque_queue_paused{queue="orders"} 0.0' in text(), timeout=30)
    for service in ("web", "metrics"):
        assert running("exec", "-T", service, "id", "-un") == "pgque\n"
    user = "select u.usesuper from pg_user as u where u.usename = 'pgque_monitor'"
    assert running("exec", "-T", "database", "psql", "-U", "postgres", "-Atc", user) == "f\n"
    processes = running("exec", "-T", "database", "sh", "-c", "cat /proc/[0-9]*/status | grep ^Uid | sort -u")
    assert "\t0\t" not in processes.partition("\n")[2]  # but for the shell that asks


def test_no_secret_is_in_the_images_and_what_is_built_without_a_target_is_the_database(
    running: Compose,
) -> None:
    command = [images.client(), "image", "inspect", "--format", "{{.Id}} {{.Config.User}} {{.Config.Env}}"]
    found = {
        target: subprocess.run(
            [*command, images.build(target)], capture_output=True, text=True, check=True
        ).stdout
        for target in ("database", "web", None)
    }
    assert found[None] == found["database"]
    assert found["web"].split()[1] == "pgque"
    for text in found.values():
        assert not re.search("PASSWORD|SECRET|TOKEN|development", text), text
