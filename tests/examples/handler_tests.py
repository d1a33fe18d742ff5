"""Test handlers with pytest on a real server: send, let the worker work, look at the outcomes.

Run it: python tests/examples/handler_tests.py, or pytest tests/examples/handler_tests.py.

Prints:
    ...…
    3 passed…
"""

from __future__ import annotations

import sys

import pytest

import pgque
from pgque.testing import TestQueue, pgque_queue  # noqa: F401, the fixture

# In a program of its own: from myapp.jobs import worker
worker = pgque.Worker(queue="emails", consumer="mailers")


@worker.handler("welcome")
def welcome(message: pgque.Message) -> pgque.Dead | None:
    """Send a mail."""
    address = message.json()["to"]
    if "@" not in address:
        return pgque.Dead("no address")
    if address.endswith("@busy.example") and message.receive_count == 1:
        raise pgque.Retry(retry_after=3600, reason="the mail server is busy")
    return None


def test_a_mail_is_sent(pgque_queue: TestQueue) -> None:  # noqa: F811
    """A message that was handled is done."""
    pgque_queue.send({"to": "ann@example.com"}, type="welcome")
    pgque_queue.work(worker)
    assert [message.json() for message in pgque_queue.done] == [{"to": "ann@example.com"}]


def test_without_an_address_the_message_is_a_dead_letter(pgque_queue: TestQueue) -> None:  # noqa: F811
    """A message that was given up is a dead letter, with the reason."""
    pgque_queue.send({"to": "nobody"}, type="welcome")
    pgque_queue.work(worker)
    assert [letter.dl_reason for letter in pgque_queue.dead] == ["no address"]


def test_when_the_mail_server_is_busy_the_mail_is_sent_later(pgque_queue: TestQueue) -> None:  # noqa: F811
    """A message that waits for another attempt is handled again."""
    pgque_queue.send({"to": "joe@busy.example"}, type="welcome")
    pgque_queue.work(worker)
    assert [message.last_error for message in pgque_queue.retried] == ["the mail server is busy"]
    pgque_queue.retry_now()
    pgque_queue.work(worker)
    assert pgque_queue.retried == []
    assert len(pgque_queue.done) == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "--noconftest", "-c", "/dev/null", "-p", "no:cacheprovider"]))
