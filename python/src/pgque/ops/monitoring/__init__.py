"""Dashboards, alert rules and the configuration of an exporter, as files: `pgque monitoring export DIR`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["FILES", "export", "text"]

# What `export` writes, and what it is for.
FILES = {
    "grafana-prometheus.json": "Grafana dashboard; data source Prometheus",
    "grafana-postgresql.json": "Grafana dashboard; data source PostgreSQL, no exporter is needed",
    "alerts.yml": "alert rules of Prometheus",
    "alerts_test.yml": "unit tests of the alert rules, for promtool test rules",
    "pgque-metrics.service": "systemd unit of pgque metrics --serve",
    "prometheus.yml": "a configuration of Prometheus that scrapes pgque",
    "sql-exporter.yml": "configuration of credativ's sql_exporter, Debian's prometheus-sql-exporter",
}


@cache
def text(name: str) -> str:
    """Return the text of a file of this package."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def export(folder: Path) -> list[Path]:
    """Write the files into a folder and return their paths. A missing folder is created, files of the same
    names are replaced. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in FILES]
    for path in paths:
        path.write_text(text(path.name), encoding="utf-8", newline="\n")
    return paths
