"""The examples keep what their docstrings promise beyond the printed lines."""

from __future__ import annotations

import importlib

import pytest

import pgque
from support.documents import ROOT


def test_a_night_whose_start_is_delivered_twice_has_one_report(
    own_dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "examples")
    nightly = importlib.import_module("nightly")
    with pgque.connect(own_dsn, autocommit=True) as client:
        client.conn.execute(nightly.SET_UP)
        client.admin.create_queue("example_nightly")
        client.subscribe("example_nightly", "workers")
        run = {"pgque-recurring": {"run_at": "2026-01-01T02:00:00+00:00"}}
        for _ in range(2):
            client.send("example_nightly", None, type="nightly", headers=run)
        printed = ""
        for _ in range(5):  # the starts, the jobs, the one that failed, the report; then nothing is left
            client.force_next_tick("example_nightly")
            client.ticker("example_nightly")
            nightly.make_worker(own_dsn).run(until_idle=True)
            printed += capsys.readouterr().out
        assert client.receive("example_nightly", "workers", worker="nobody") == []
    assert sorted(printed.splitlines()) == [
        "3 jobs",
        "report: east 30, north 12, south 7, total 49",
        "south fails: the till is offline",
    ]
