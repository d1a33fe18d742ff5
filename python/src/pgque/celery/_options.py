"""Where the database is, and the options of the transport."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from psycopg.sql import quote

from ..client.limit import COMMAND_TIMEOUT, check_command_timeout
from ..types import Seconds, Setting

_SCHEME = re.compile(r"^pgque(\+\w+)?://")
_PASSWORDS = (
    re.compile(r"(//[^:/@?]*:)[^@]*(?=@)"),
    re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&]+)"),
)

# A stop of a worker releases what it has prefetched, and that counts as a delivery.
_MAX_RECEIVE_ATTEMPTS = 20

# A log has no consumers, so rotation alone decides how long its messages stay, and health() need not warn.
LOG_CONFIG: Mapping[str, Setting] = {"rotation_period": "10 minutes", "health_pending_warn": "0"}


def dsn_of(url: str | None) -> str:
    """Return the connection string of libpq for a broker's URL; a connection string is returned as it is."""
    url = url or ""
    if _SCHEME.match(url):
        rest = _SCHEME.sub("", url)
        return f"postgresql://{rest}" if rest.strip("/") else ""
    return url


def without_password(url: str, mask: str) -> str:
    """Return a URL or connection string with its password replaced."""
    for pattern in _PASSWORDS:
        url = pattern.sub(lambda found: found[1] + mask, url)
    return url


def needs_log(queue: str) -> str:
    """Return the hint that creates the queue of a log."""
    return f"The role may not create the queue. {_as_admin(queue, LOG_CONFIG)}"


def _as_admin(queue: str, config: Mapping[str, Setting]) -> str:
    settings = json.dumps(dict(config), default=str)
    return f"As a pgque_admin: select pgque.create_queue({quote(queue)}, {quote(settings)});"


@dataclass(frozen=True, slots=True)
class Options:
    """The `broker_transport_options` that this transport knows; others are kombu's and Celery's."""

    visibility_timeout: Seconds = 30
    polling_interval: float | None = None
    consumer: str = "celery"
    queue_prefix: str = ""
    queue_config: Mapping[str, Setting] = field(default_factory=dict)
    command_timeout: float | None = COMMAND_TIMEOUT

    @classmethod
    def from_given(cls, given: Mapping[str, object]) -> Options:
        """Return the options among those that were given."""
        known = {name: given[name] for name in cls.__slots__ if given.get(name) is not None}
        options = cls(**known)  # type: ignore[arg-type]
        check_command_timeout(options.command_timeout)
        return options

    def config(self) -> Mapping[str, Setting]:
        """Return the settings of a queue that is created."""
        return {"max_receive_attempts": _MAX_RECEIVE_ATTEMPTS, **self.queue_config}

    def needs_consumer(self, name: str) -> str:
        """Return the hint that creates a queue of tasks, with the settings that Celery gives it."""
        return (
            "The role may not create the queue, or it was dropped meanwhile. "
            f"{_as_admin(name, self.config())} select pgque.subscribe({quote(name)}, {quote(self.consumer)});"
        )

    def queue(self, name: str) -> str:
        """Return the queue of pgque for a queue of Celery."""
        return f"{self.queue_prefix}{name}"

    def log(self, exchange: str) -> str:
        """Return the queue of pgque whose log has the messages of an exchange."""
        return f"{self.queue_prefix}exchange.{exchange}"
