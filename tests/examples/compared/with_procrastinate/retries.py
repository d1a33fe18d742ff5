"""A worker with retries and dead letters, with procrastinate: failed jobs stay in its table.

Before: sh set_up.sh
Run it: procrastinate --app=retries.app worker
"""

import shop
from procrastinate import App, PsycopgConnector, RetryStrategy

app = App(connector=PsycopgConnector())


@app.task(retry=RetryStrategy(max_attempts=4, exponential_wait=2, retry_exceptions={ConnectionError}))
async def charge(id: int, amount: int) -> None:
    await shop.charge(id, amount)
