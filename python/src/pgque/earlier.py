"""Module paths from before 0.10.0. They go on working: each is a second name of the module of today."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

EARLIER = {
    "calls": "twins.calls",
    "calls_async": "transaction.calls",
    "cli_health": "cli.health",
    "cli_messaging": "cli.messaging",
    "cli_monitoring": "cli.monitoring",
    "cli_operate": "cli.operate",
    "cli_recurring": "cli.recurring",
    "cli_top": "cli.top",
    "cli_web": "cli.web",
    "cli_work": "cli.work",
    "client_async": "client.client",
    "consumer": "twins.consumer",
    "consumer_async": "runtime.consumer",
    "embedded": "ops.embedded",
    "exporter": "ops.exporter",
    "install": "ops.install",
    "monitoring": "ops.monitoring",
    "ticker": "ops.ticker",
    "workers": "twins.workers",
    "workers_async": "runtime.workers",
}
DOCUMENTED = ("embedded", "exporter")


class _Finder:
    """Find the modules of EARLIER, and load the module of today in place of each."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        loader: Any = self
        return ModuleSpec(name, loader) if package == "pgque" and module in EARLIER else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.rpartition(".")[2]
        if name not in DOCUMENTED:
            told = f"the module pgque.{name} is now pgque.{EARLIER[name]}: import public names from pgque"
            warnings.warn(told, DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(f"pgque.{EARLIER[name]}")


sys.meta_path.append(_Finder())
