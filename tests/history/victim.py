"""A worker that says what it does on its standard output, to be killed at any moment."""

from __future__ import annotations

import json
import random
import sys
import time

import psycopg

TAKE = (
    "select msg_id, batch_id, payload, retry_count, receive_count, extract(epoch from expires_at)::float8"
    " from pgque.receive(%s, %s, 10, worker => %s, visibility_timeout => '500 ms')"
)


def main(dsn: str, queue: str, consumer: str, name: str, seed: str) -> None:
    dice = random.Random(seed)  # noqa: S311

    def tell(what: str, begin: float, end: float | None = None, answer: object = None) -> None:
        print(json.dumps([what, begin, end, answer]), flush=True)

    with psycopg.connect(dsn, autocommit=True, application_name=name) as conn:
        while True:
            begin = time.monotonic()
            batch = conn.execute(TAKE, (queue, consumer, name)).fetchall()
            if not batch:
                time.sleep(0.02)
                continue
            tell("received", begin, time.monotonic(), batch)
            time.sleep(dice.random() * 0.4)
            begin = time.monotonic()
            tell("acks", begin)
            done = conn.execute(
                "select msg_id from pgque.ack(%s, %s::bigint[]) where ok",
                (batch[0][1], [m[0] for m in batch]),
            ).fetchall()
            tell("acked", begin, time.monotonic(), [row[0] for row in done])


if __name__ == "__main__":
    main(*sys.argv[1:])
