"""A plain consumer of queue `changes`: keeps what it received, in the transaction of the ack."""

from __future__ import annotations

import json
import time

import pgque

COLUMNS = ("package", "version", "architecture", "section", "size_class", "dependencies")


def main() -> None:
    """Receive until killed; being killed loses and doubles nothing."""
    with pgque.connect() as client:
        while True:
            began = time.monotonic()
            messages = client.receive("changes", "tally", max_messages=5000)
            if messages:
                with client.conn.cursor().copy(
                    f"copy pipeline.received ({', '.join(COLUMNS)}) from stdin"
                ) as copy:
                    for message in messages:
                        change = json.loads(message.payload or "null")
                        copy.write_row([change[column] for column in COLUMNS])
                client.ack(messages[0].batch_id)
            client.conn.commit()
            if messages:
                print(f"RECEIVED {time.monotonic() - began:.4f}", flush=True)
            else:
                time.sleep(0.1)


if __name__ == "__main__":
    main()
