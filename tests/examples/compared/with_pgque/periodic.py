"""A periodic task, with pgque: the ticker sends a message at each time.

Before: sh set_up.sh
Run it: pgque work periodic:worker
"""

import shop

import pgque

worker = pgque.AsyncWorker(queue="reports", consumer="reporting")


@worker.every("* * * * * *", type="report")
async def report(message: pgque.Message) -> None:
    await shop.report()
