"""A periodic task, with procrastinate.

Before: sh set_up.sh
Run it: procrastinate --app=periodic.app worker
"""

import shop
from procrastinate import App, PsycopgConnector

app = App(connector=PsycopgConnector())


@app.periodic(cron="* * * * * *")
@app.task
async def report(timestamp: int) -> None:
    await shop.report()
