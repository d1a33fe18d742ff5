"""A worker with retries and dead letters, with pgqueuer: held jobs stay in its table.

It does not tell one error from another: its executor retries all. The handler does.

Before: sh set_up.sh
Run it: pgq run retries:main
"""

import json
from contextlib import asynccontextmanager
from datetime import timedelta

import asyncpg
import shop
from pgqueuer import PgQueuer
from pgqueuer.errors import RetryRequested
from pgqueuer.models import Job


@asynccontextmanager
async def main():
    pgq = PgQueuer.from_asyncpg_connection(await asyncpg.connect())

    @pgq.entrypoint("charge", on_failure="hold")
    async def charge(job: Job) -> None:
        try:
            await shop.charge(**json.loads(job.payload))
        except ConnectionError as error:
            if job.attempts >= 4:
                raise
            raise RetryRequested(timedelta(seconds=2**job.attempts), str(error)) from error

    yield pgq
