"""Send in a transaction, with pgque.

Before: sh set_up.sh
Run it: python send.py 1
"""

import sys

import psycopg

import pgque

order = int(sys.argv[1])
with psycopg.connect() as conn:
    conn.execute("insert into orders (id) values (%s)", [order])
    pgque.send(conn, "orders", {"order": order}, type="confirm")
