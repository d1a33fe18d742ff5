"""The published client of PgQue 0.2, unmodified, against our SQL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OLD_CLIENT = Path(sys.prefix) / "old-client"  # the Makefile installs it there

PREAMBLE = """
import sys, threading, time
import psycopg, pgque
assert not hasattr(pgque, "AsyncPgqueClient"), "this is our own client"
dsn, queue = sys.argv[1:]
client = pgque.connect(dsn, autocommit=True)

def tick():
    client.force_next_tick(queue)
    assert client.ticker(queue) is not None
"""


def run(script: str, dsn: str, queue: str) -> None:
    assert (OLD_CLIENT / "pgque").is_dir(), "run the tests with make test: it installs the old client"
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, dsn, queue],
        env={**os.environ, "PYTHONPATH": str(OLD_CLIENT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_sends_receives_and_acks(dsn: str, queue: str) -> None:
    run(
        """
assert client.subscribe(queue, "c") == 1 and client.subscribe(queue, "c") == 0
first = client.send(queue, {"a": 1}, type="t")
more = client.send_batch(queue, "t", [{"n": 2}, {"n": 3}])
tick()
messages = client.receive(queue, "c", 100)
assert [m.msg_id for m in messages] == [first, *more], messages
assert messages[0].type == "t" and not messages[0].retry_count
assert client.ack(messages[0].batch_id) == 1
assert client.receive(queue, "c") == []
assert client.unsubscribe(queue, "c") == 1
""",
        dsn,
        queue,
    )


def test_it_nacks_and_gets_the_message_again(dsn: str, queue: str) -> None:
    run(
        """
client.subscribe(queue, "c")
client.send_batch(queue, "t", [{"n": 1}, {"n": 2}])
tick()
one, two = client.receive(queue, "c")
client.nack(one.batch_id, one, retry_after=0, reason="no")
client.ack(one.batch_id)
client.conn.execute("select pgque.maint_retry_events()")
tick()
(again,) = client.receive(queue, "c")
assert again.msg_id == one.msg_id and again.retry_count == 1
""",
        dsn,
        queue,
    )


def test_its_errors_still_have_their_own_classes(dsn: str, queue: str) -> None:
    run(
        """
def raises(error, call, *args):
    try:
        call(*args)
    except error:
        return
    raise AssertionError(f"{call.__name__} did not raise {error.__name__}")

raises(pgque.PgqueQueueNotFound, client.send, "no such queue", {})
raises(pgque.PgqueConsumerNotFound, client.receive, queue, "nobody")
client.subscribe(queue, "c")
client.send(queue, {})
tick()
(message,) = client.receive(queue, "c")
client.ack(message.batch_id)
raises(pgque.PgqueBatchNotFound, client.nack, message.batch_id, message)
""",
        dsn,
        queue,
    )


def test_its_cooperative_consumers_share_messages(dsn: str, queue: str) -> None:
    run(
        """
for worker in ("w1", "w2"):
    assert client.subscribe_subconsumer(queue, "c", worker) == 1
client.send_batch(queue, "t", [{"n": n} for n in range(4)])
tick()
one = client.receive_coop(queue, "c", "w1", max_messages=2)
two = client.receive_coop(queue, "c", "w2", max_messages=2)
assert len(one) == len(two) == 2 and not {m.msg_id for m in one} & {m.msg_id for m in two}
client.touch_subconsumer(queue, "c", "w1")
client.ack(one[0].batch_id)
assert client.unsubscribe_subconsumer(queue, "c", "w2", batch_handling=1) == 1
""",
        dsn,
        queue,
    )


def test_its_consumer_handles_what_the_ticker_announces(dsn: str, queue: str) -> None:
    run(
        """
client.subscribe(queue, "c")
seen, failed = [], []
consumer = pgque.Consumer(dsn, queue=queue, name="c", poll_interval=1, retry_after=0)

@consumer.on("good")
def good(message):
    seen.append(message.msg_id)

@consumer.on("bad")
def bad(message):
    failed.append(message.msg_id)
    raise ValueError("no")

thread = threading.Thread(target=consumer.start)
thread.start()
sent = [client.send(queue, {"n": n}, type="good") for n in range(3)]
client.send(queue, {}, type="bad")
deadline = time.monotonic() + 20
while (len(seen) < 3 or len(failed) < 2) and time.monotonic() < deadline:
    client.conn.execute("select pgque.maint_retry_events()")
    client.ticker(queue)
    time.sleep(0.05)
consumer.stop()
thread.join(20)
assert seen == sent and len(failed) >= 2, (seen, failed)
""",
        dsn,
        queue,
    )
