"""A consumer of batches, with pgqueuer, which has no batches: jobs that run at the same time wait for one insert.

A batch has as many rows as the worker takes jobs at a time. A batch whose worker dies after the insert is stored again.

Before: sh set_up.sh
Run it: pgq run batch:main --batch-size 1000
"""

import asyncio
import json
from contextlib import asynccontextmanager

import asyncpg
import shop
from pgqueuer import PgQueuer
from pgqueuer.models import Job

waiting: list[dict[str, object]] = []
flushing: asyncio.Task[None] | None = None


async def flush() -> None:
    global waiting, flushing
    await asyncio.sleep(0.2)
    clicks, waiting, flushing = waiting, [], None
    await shop.store(clicks)


@asynccontextmanager
async def main():
    pgq = PgQueuer.from_asyncpg_connection(await asyncpg.connect())

    @pgq.entrypoint("click")
    async def click(job: Job) -> None:
        global flushing
        waiting.append(json.loads(job.payload))
        flushing = flushing or asyncio.create_task(flush())
        await asyncio.shield(flushing)

    yield pgq
