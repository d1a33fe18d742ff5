"""A consumer of batches, with pgque: the rows of a batch and its end commit together.

Before: sh set_up.sh
Run it: pgque work batch:consumer
"""

import psycopg
import shop

import pgque

consumer = pgque.AsyncConsumer(queue="clicks", consumer="storing", transactional=True)


@consumer.batch_handler("click", size=1000)
async def store(messages: list[pgque.Message], conn: psycopg.AsyncConnection) -> None:
    await shop.store([message.json() for message in messages], conn)
