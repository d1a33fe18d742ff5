"""Let a worker do jobs: one succeeds, one is tried again, one becomes a dead letter.

Run it: python tests/examples/workers.py, or with a connection string of a database with pgque.

Prints:
    sent to ann@example.com
    try 1 for joe@example.com: the mail server is busy
    sent to joe@example.com
    dead letter: {"to": "nobody"} (no address)
"""

from __future__ import annotations

from _server import database

import pgque


def main(dsn: str) -> None:
    """Send three jobs, and work until each has an outcome."""
    with pgque.connect(dsn) as client:
        client.admin.create_queue("example_emails")
        client.subscribe("example_emails", "mailers")
    with pgque.connect(dsn) as client:
        for address in ("ann@example.com", "joe@example.com", "nobody"):
            client.send("example_emails", {"to": address}, type="welcome")

    worker = pgque.Worker(dsn, queue="example_emails", consumer="mailers", concurrency=1)

    @worker.handler("welcome")
    def welcome(message: pgque.Message) -> pgque.Dead | None:
        address = message.json()["to"]
        if "@" not in address:
            return pgque.Dead("no address")
        if address.startswith("joe") and message.receive_count == 1:
            print(f"try 1 for {address}: the mail server is busy")
            raise pgque.Retry(retry_after=0, reason="the mail server is busy")
        print(f"sent to {address}")
        if address.startswith("joe"):
            worker.stop()
        return None

    worker.run()

    with pgque.connect(dsn) as client:
        for letter in client.dlq.inspect("example_emails"):
            print(f"dead letter: {letter.ev_data} ({letter.dl_reason})")


if __name__ == "__main__":
    with database() as dsn:
        main(dsn)
