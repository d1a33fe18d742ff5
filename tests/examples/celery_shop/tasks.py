"""An application of Celery, as it was before: only the URL of its broker, and the import, are those of pgque.

Its tasks write what they did into the table `done`.
"""

import os
import time

import psycopg
from celery import Celery

import pgque.celery  # noqa: F401  # makes pgque:// known

app = Celery("shop", broker=os.environ.get("SHOP_BROKER", "pgque://"))
app.conf.update(
    task_ignore_result=True,
    accept_content=["json", "msgpack", "yaml"],
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "visibility_timeout": float(os.environ.get("SHOP_VISIBILITY_TIMEOUT", "30")),
        "command_timeout": float(os.environ.get("SHOP_COMMAND_TIMEOUT", "30")),
    },
    beat_schedule={"every second": {"task": "tasks.note", "schedule": 1.0, "args": ("beat",)}},
)


@app.task
def note(what):
    """Write a row."""
    with psycopg.connect(os.environ.get("SHOP_DSN", "")) as conn:
        conn.execute("insert into done (what) values (%s)", [str(what)])


@app.task(bind=True, max_retries=3)
def flaky(self, succeeds_at):
    """Fail until it is retried so many times."""
    if self.request.retries < succeeds_at:
        raise self.retry(countdown=0.1)
    note(f"flaky {self.request.retries}")


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
def pack(self, name, seconds):
    """Take some time, unless another worker has begun it."""
    begun_before = self.request.delivery_info["redelivered"]
    note(f"begin {name}")
    time.sleep(0 if begun_before else seconds)
    note(f"packed {name}, {'redelivered' if begun_before else 'at first'}")
