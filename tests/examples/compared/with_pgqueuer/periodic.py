"""A periodic task, with pgqueuer.

Before: sh set_up.sh
Run it: pgq run periodic:main
"""

from contextlib import asynccontextmanager

import asyncpg
import shop
from pgqueuer import PgQueuer
from pgqueuer.models import Schedule


@asynccontextmanager
async def main():
    pgq = PgQueuer.from_asyncpg_connection(await asyncpg.connect())

    @pgq.schedule("report", "* * * * * *")
    async def report(schedule: Schedule) -> None:
        await shop.report()

    yield pgq
