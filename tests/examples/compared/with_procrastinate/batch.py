"""A consumer of batches, with procrastinate, which has no batches: jobs that run at the same time wait for one insert.

A batch has as many rows as the worker runs jobs at a time. Each job is fetched and finished by itself, and a batch
whose worker dies after the insert is stored again.

Before: sh set_up.sh
Run it: procrastinate --app=batch.app worker --concurrency 1000
"""

import asyncio

import shop
from procrastinate import App, PsycopgConnector

app = App(connector=PsycopgConnector())
waiting: list[dict[str, object]] = []
flushing: asyncio.Task[None] | None = None


async def flush() -> None:
    global waiting, flushing
    await asyncio.sleep(0.2)
    clicks, waiting, flushing = waiting, [], None
    await shop.store(clicks)


@app.task
async def click(id: int, page: str) -> None:
    global flushing
    waiting.append({"id": id, "page": page})
    flushing = flushing or asyncio.create_task(flush())
    await asyncio.shield(flushing)
