"""Send in a transaction, with pgqueuer. Payloads are bytes.

Before: sh set_up.sh
Run it: python send.py 1
"""

import json
import sys

import psycopg
from pgqueuer.db import SyncPsycopgDriver
from pgqueuer.queries import SyncQueries

order = int(sys.argv[1])
with psycopg.connect(autocommit=True) as conn, conn.transaction():
    conn.execute("insert into orders (id) values (%s)", [order])
    SyncQueries(SyncPsycopgDriver(conn)).enqueue("confirm", json.dumps({"order": order}).encode())
