"""An application: its tasks write what they did into the table `done` of the database."""

import os
import time

import psycopg
from celery import Celery

import pgque.celery  # noqa: F401  # makes pgque:// known

DSN = os.environ["SHOP_DSN"]

app = Celery("shop", broker=os.environ.get("SHOP_BROKER", "pgque://"))
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": float(os.environ.get("SHOP_VISIBILITY_TIMEOUT", "30"))},
)


def note(task: str, detail: object) -> None:
    """Write a row into the table."""
    with psycopg.connect(DSN) as conn:
        conn.execute("insert into done (task, detail) values (%s, %s)", [task, str(detail)])


@app.task
def add(x, y):
    note("add", x + y)


@app.task(bind=True, max_retries=3)
def flaky(self, succeeds_at):
    note("flaky", self.request.retries)
    if self.request.retries < succeeds_at:
        raise self.retry(countdown=0.2)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
def slow(self, name, seconds):
    note("begin", name)
    time.sleep(seconds)
    note("slow", name)
