"""A worker with retries and dead letters, with pgque.

The number of deliveries, 5, is a setting of the queue. Dead letters: pgque dlq list payments

Before: sh set_up.sh
Run it: pgque work retries:worker
"""

import shop

import pgque

worker = pgque.AsyncWorker(queue="payments", consumer="charging")


@worker.handler("charge", retry_on=ConnectionError, backoff=(1, 2, 4, 8))
async def charge(message: pgque.Message) -> None:
    await shop.charge(**message.json())
