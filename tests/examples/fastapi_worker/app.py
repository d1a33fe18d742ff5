"""An application that takes orders, and confirms them in the background."""

from fastapi import FastAPI, Request, Response
from psycopg_pool import AsyncConnectionPool

import pgque.asgi

pool = AsyncConnectionPool(open=False)  # of the PG* environment variables
worker = pgque.AsyncWorker(queue="example_orders", consumer="confirming")


@worker.handler("order.placed")
async def confirm(message: pgque.Message) -> None:
    """Note that an order was confirmed."""
    async with pool.connection() as conn:
        await conn.execute("update orders set confirmed = true where id = %s", [message.json()["order"]])


# The pool is open while the application and its worker run.
app = FastAPI(lifespan=pgque.asgi.lifespan(worker, around=lambda app: pool))


@app.post("/orders")
async def place_order(address: str) -> dict[str, int]:
    """Store an order, and send its message in the same transaction."""
    async with pool.connection() as conn:
        cursor = await conn.execute("insert into orders (address) values (%s) returning id", [address])
        (order,) = await cursor.fetchone()
        await pgque.send_async(conn, "example_orders", {"order": order}, type="order.placed")
    return {"order": order}


@app.get("/orders/{order}")
async def show_order(order: int) -> dict[str, bool]:
    """Return whether an order was confirmed."""
    async with pool.connection() as conn:
        cursor = await conn.execute("select confirmed from orders where id = %s", [order])
        (confirmed,) = await cursor.fetchone()
    return {"confirmed": confirmed}


@app.get("/health")
def health(request: Request, response: Response) -> list[str]:
    """Return the problems of the worker, with status 503 if there are any."""
    problems = request.state.pgque.problems()
    response.status_code = 503 if problems else 200
    return problems
