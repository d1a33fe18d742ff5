"""Send in a transaction, with procrastinate. The program does not have the task, and names it.

Before: sh set_up.sh
Run it: python send.py 1
"""

import sys

import psycopg
from procrastinate import App, PsycopgConnector

app = App(connector=PsycopgConnector())
order = int(sys.argv[1])
with app.open(), psycopg.connect() as conn:
    conn.execute("insert into orders (id) values (%s)", [order])
    app.configure_task("web.confirm", connection=conn).defer(order=order)
