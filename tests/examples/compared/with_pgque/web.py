"""A worker inside an application of FastAPI, with pgque.

Before: sh set_up.sh
Run it: uvicorn web:app
"""

import shop
from fastapi import FastAPI
from psycopg_pool import AsyncConnectionPool

import pgque.asgi

pool = AsyncConnectionPool(open=False)
worker = pgque.AsyncWorker(queue="orders", consumer="confirming")


@worker.handler("confirm")
async def confirm(message: pgque.Message) -> None:
    await shop.confirm(**message.json())


app = FastAPI(lifespan=pgque.asgi.lifespan(worker, around=lambda app: pool))


@app.post("/orders/{order}")
async def place_order(order: int) -> None:
    async with pool.connection() as conn:
        await conn.execute("insert into orders (id) values (%s)", [order])
        await pgque.send_async(conn, "orders", {"order": order}, type="confirm")
