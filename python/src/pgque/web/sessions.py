"""Sessions that the server keeps, signed cookies, and a limit for login attempts. All of it is in memory."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from .config import Config, Database
from .database import Connections, LoginRefusedError
from .jobs import Job

ATTEMPTS = 5  # failed logins of one address as one role, and then
ATTEMPTS_OF_ADDRESS = 30  # of one address as any role, and
ATTEMPTS_AS_ROLE = 100  # of all addresses as one role, within
ATTEMPTS_WITHIN = 300.0  # seconds
LOGINS = 8  # to one database at once: more would take connections and threads from users who are logged in
MOST_FLASHES = 20
MOST_FORMS = 1000  # that a session remembers

Key: TypeAlias = tuple[str | None, str | None]  # address and role


@dataclass(slots=True)
class Session:
    """One login: a role, its connections, and texts for the next page."""

    token: str
    database: Database
    user: str
    connections: Connections
    began: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    flashes: list[tuple[str, str]] = field(default_factory=list)
    rights: tuple[float, dict[str | None, dict[str, object]]] | None = None  # when they were asked for
    jobs: dict[str, Job] = field(default_factory=dict)
    forms: dict[str, object] = field(default_factory=dict)  # that were sent, and are not to be sent again

    @property
    def works(self) -> bool:
        """Return True while work on dead letters goes on in this session."""
        return any(job.running for job in list(self.jobs.values()))

    def flash(self, kind: str, text: str) -> None:
        """Keep a text (kind ok or error) for the next page of this session."""
        self.flashes = [*self.flashes[-MOST_FLASHES:], (kind, text)]

    def once(self, form: str) -> bool:
        """Return True the first time that this form comes, and remember it."""
        mine = object()
        while len(self.forms) >= MOST_FORMS:
            self.forms.pop(next(iter(self.forms)), None)
        return self.forms.setdefault(form, mine) is mine

    def take_flashes(self) -> list[tuple[str, str]]:
        """Return the texts that no page has shown yet."""
        taken, self.flashes = self.flashes, []
        return taken


class Signer:
    """Sign cookies and make CSRF tokens with a key of this process."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def _mac(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()

    def signed(self, token: str) -> str:
        """Return a cookie's value for a token."""
        return f"{token}.{self._mac('cookie', token)}"

    def token(self, cookie: str | None) -> str | None:
        """Return the token of a cookie's value, or None if this process did not sign it."""
        token, _, mac = (cookie or "").partition(".")
        good = hmac.compare_digest(mac.encode(), self._mac("cookie", token).encode())
        return token if token and good else None

    def csrf(self, token: str) -> str:
        """Return the CSRF token that every form of a session must send."""
        return self._mac("csrf", token)

    def mark(self, token: str) -> str:
        """Return a mark that is the same on all pages of a session, and differs from that of others."""
        return self._mac("mark", token)[:16]

    def csrf_fits(self, token: str, given: str) -> bool:
        """Return True if a form sent the right token."""
        return hmac.compare_digest(given.encode(), self.csrf(token).encode())


class Sessions:
    """The sessions of this process, by a hash of their token."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._held: dict[bytes, Session] = {}

    @staticmethod
    def _key(token: str) -> bytes:
        return hashlib.sha256(token.encode()).digest()

    def begin(self, database: Database, user: str, connections: Connections) -> Session:
        """Return a new session. If there are too many, one of the role that has the most ends.

        Raises LoginRefusedError if work goes on in all of that role's sessions.
        """
        session = Session(secrets.token_urlsafe(32), database, user, connections)
        with self._lock:
            ended = []
            if len(self._held) >= self._config.most_sessions:
                key = self._spare(session)
                if key is None:
                    connections.close()
                    raise LoginRefusedError(
                        "This role is logged in too often. Log out elsewhere, or try again later."
                    )
                ended.append(self._held.pop(key))
            self._held[self._key(session.token)] = session
        _close(ended)
        return session

    def _spare(self, new: Session) -> bytes | None:
        """Return the session that ends for a new one: nobody's logins push out another role's sessions."""
        roles = Counter((held.database, held.user) for held in (new, *self._held.values()))
        most = max(roles.values())
        idle = [
            (held.used, key)
            for key, held in self._held.items()
            if roles[held.database, held.user] == most and not held.works
        ]
        return min(idle)[1] if idle else None

    def find(self, token: str | None, live: bool) -> Session | None:
        """Return the session of a token, or None; end those that are over.

        A `live` request is one that nobody made: a page that is left open does not keep its session. Work
        keeps it, and the session has the whole time after its end, for what it did is to be read.
        """
        now = time.monotonic()
        with self._lock:
            for held in self._held.values():
                if held.works:
                    held.used = now
            over = [
                key
                for key, held in self._held.items()
                if now - held.used > self._config.session_idle
                or now - held.began > self._config.session_length
            ]
            ended = [self._held.pop(key) for key in over]
            session = self._held.get(self._key(token)) if token else None
            if session is not None and not live:
                session.used = now
        if ended:  # to close connections takes time, and this is asked for every request
            threading.Thread(target=_close, args=(ended,), daemon=True).start()
        return session

    def end(self, session: Session) -> None:
        """End a session and close its connections."""
        with self._lock:
            self._held.pop(self._key(session.token), None)
        _close([session])

    def end_all(self) -> None:
        """End every session."""
        with self._lock:
            ended, self._held = list(self._held.values()), {}
        _close(ended)


def _close(sessions: list[Session]) -> None:
    for session in sessions:
        for job in list(session.jobs.values()):
            job.stop()
        session.connections.close()


class Attempts:
    """Count the failed logins of each address, of each role, and of each address and role.

    Logins that run count as well, until their result is known: otherwise somebody could try as many passwords
    at once as the server takes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: dict[Key, list[float]] = {}
        self._running: Counter[Key] = Counter()
        self._logins: Counter[Database] = Counter()

    def wait(self, address: str, user: str) -> float:
        """Return for how many seconds this address may not try this role, because of failed logins."""
        now = time.monotonic()
        with self._lock:
            self._failed = {
                key: kept
                for key, times in self._failed.items()
                if (kept := [t for t in times if now - t < ATTEMPTS_WITHIN])
            }
            return max(
                self._failed[key][-most] + ATTEMPTS_WITHIN - now if self._count(key) >= most else 0.0
                for key, most in _keys(address, user)
            )

    def begin(self, address: str, user: str, database: Database) -> bool:
        """Return True if a login may run now. Otherwise it waits until others have ended."""
        with self._lock:
            if self._logins[database] >= LOGINS or any(
                self._count(key) + self._running[key] >= most for key, most in _keys(address, user)
            ):
                return False
            self._logins[database] += 1
            self._running.update(key for key, _ in _keys(address, user))
            return True

    def end(self, address: str, user: str, database: Database) -> None:
        """Stop counting a login, because it has ended."""
        with self._lock:
            self._logins[database] -= 1
            self._running.subtract(key for key, _ in _keys(address, user))
            self._running = +self._running

    def failed(self, address: str, user: str) -> None:
        """Count a login whose password was wrong."""
        now = time.monotonic()
        with self._lock:
            for key, _ in _keys(address, user):
                self._failed.setdefault(key, []).append(now)

    def succeeded(self, address: str, user: str) -> None:
        """Forget the failed logins of an address as this role."""
        with self._lock:
            mine = self._failed.pop((address, user), [])
            for key in ((address, None), (None, user)):
                self._failed[key] = [t for t in self._failed.get(key, []) if t not in mine]

    def _count(self, key: Key) -> int:
        return len(self._failed.get(key, []))


def _keys(address: str, user: str) -> tuple[tuple[Key, int], ...]:
    return (
        ((address, user), ATTEMPTS),
        ((address, None), ATTEMPTS_OF_ADDRESS),
        ((None, user), ATTEMPTS_AS_ROLE),
    )
