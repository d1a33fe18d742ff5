"""A worker inside an application of FastAPI, with procrastinate.

Before: sh set_up.sh
Run it: uvicorn web:app
"""

import asyncio
from contextlib import asynccontextmanager, suppress

import shop
from fastapi import FastAPI
from procrastinate import App, PsycopgConnector
from psycopg_pool import AsyncConnectionPool

pool = AsyncConnectionPool(open=False)
tasks = App(connector=PsycopgConnector())


@tasks.task
async def confirm(order: int) -> None:
    await shop.confirm(order)


@asynccontextmanager
async def lifespan(app: FastAPI):
    async with pool, tasks.open_async(pool):
        worker = asyncio.create_task(tasks.run_worker_async(install_signal_handlers=False))
        yield
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(worker, timeout=10)


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{order}")
async def place_order(order: int) -> None:
    async with pool.connection() as conn:
        await conn.execute("insert into orders (id) values (%s)", [order])
        await confirm.configure(connection=conn).defer_async(order=order)
