"""Settings: those of the example, with more databases and backends. TASKS_API chooses the API of tasks."""

import os
from typing import Any

from shop.settings import *  # noqa: F403
from shop.settings import DATABASES, INSTALLED_APPS

API = os.environ["TASKS_API"]
INSTALLED_APPS = [app for app in INSTALLED_APPS if app != "django_tasks"]
if API == "django_tasks":
    INSTALLED_APPS.append(API)

DATABASES = {
    "default": {**DATABASES["default"], "CONN_MAX_AGE": None},  # so a worker's connection can break
    "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
}

_PGQUE = "pgque.django.tasks.PgqueBackend"
TASKS: dict[str, Any] = {
    "default": {"BACKEND": _PGQUE, "QUEUES": ["mail", "default"], "OPTIONS": {"priorities": [10, -10]}},
    "plain": {"BACKEND": _PGQUE, "QUEUES": ["default", "shard-10"], "OPTIONS": {"consumer": "plain"}},
    "lite": {"BACKEND": _PGQUE, "OPTIONS": {"database": "lite"}},
    "dummy": {"BACKEND": f"{API}.backends.dummy.DummyBackend"},
}
