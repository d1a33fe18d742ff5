"""A worker inside an application of FastAPI, with pgqueuer.

Before: sh set_up.sh
Run it: uvicorn web:app
"""

import asyncio
import json
from contextlib import asynccontextmanager

import asyncpg
import shop
from fastapi import FastAPI, Request
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries


@asynccontextmanager
async def lifespan(app: FastAPI):
    async with asyncpg.create_pool() as pool:
        pgq = PgQueuer.from_asyncpg_pool(pool)

        @pgq.entrypoint("confirm")
        async def confirm(job: Job) -> None:
            await shop.confirm(**json.loads(job.payload))

        worker = asyncio.create_task(pgq.run())
        yield {"pool": pool}
        pgq.shutdown.set()
        await worker


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{order}")
async def place_order(order: int, request: Request) -> None:
    async with request.state.pool.acquire() as conn, conn.transaction():
        await conn.execute("insert into orders (id) values ($1)", order)
        await Queries(AsyncpgDriver(conn)).enqueue("confirm", json.dumps({"order": order}).encode())
