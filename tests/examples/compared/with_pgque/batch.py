"""A consumer of batches, with pgque: the rows of a batch and its end commit together.

Before: sh set_up.sh
Run it: python batch.py
"""

import asyncio

import psycopg
import shop

import pgque


async def main() -> None:
    async with await psycopg.AsyncConnection.connect(autocommit=True) as conn:
        while True:
            async with conn.transaction():
                messages = await pgque.receive_async(conn, "clicks", "storing", 1000)
                await shop.store([message.json() for message in messages], conn)
                if messages:
                    await pgque.ack_async(conn, messages[0].batch_id)
            if not messages:
                await asyncio.sleep(0.2)


asyncio.run(main())
