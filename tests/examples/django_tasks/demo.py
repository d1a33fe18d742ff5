"""Take orders with Django, and have `manage.py pgque_worker` confirm them.

Run it: python tests/examples/django_tasks/demo.py, or with a connection string of a database.

Prints:
    worker … runs tasks of default until SIGTERM or Ctrl-C
    confirmed to ann@example.com
    an order whose card is declined: 500
    attempt 1 for joe@example.com: the mail server is busy
    confirmed to joe@example.com
    dead letter: {"args": [4], "kwargs": {}} (no address)
    stopped
    confirmed orders: ann@example.com, joe@example.com
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from wsgiref.simple_server import make_server

FOLDER = Path(__file__).resolve().parent
sys.path += [str(FOLDER), str(FOLDER.parent)]

from _server import database, export, started  # noqa: E402

import pgque  # noqa: E402


def manage(*arguments: str) -> list[str]:
    """Return a command of the project."""
    return [sys.executable, str(FOLDER / "manage.py"), *arguments]


def post(port: int, **fields: str) -> int:
    """Send a form to the shop, and return the status of its answer."""
    body = urllib.parse.urlencode(fields).encode()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/orders", body) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def main(dsn: str) -> None:
    """Run the shop and its worker."""
    subprocess.run(manage("migrate", "--verbosity=0"), check=True)

    from django.core.wsgi import get_wsgi_application

    os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
    shop = make_server("127.0.0.1", 0, get_wsgi_application())
    threading.Thread(target=shop.serve_forever, daemon=True).start()
    port = shop.server_port

    with started(manage("pgque_worker"), stdout=subprocess.PIPE) as worker:

        def show(lines: int) -> None:
            for _ in range(lines):
                print(worker.stdout.readline(), end="")

        show(1)
        post(port, address="ann@example.com")
        show(1)
        print("an order whose card is declined:", post(port, address="ann@example.com", card="declined"))
        post(port, address="joe@example.com")
        show(2)
        post(port, address="nobody")
        with pgque.connect(dsn, autocommit=True) as client:
            while not (letters := client.dlq.inspect("default")):
                time.sleep(0.1)
        for letter in letters:
            print(f"dead letter: {letter.ev_data} ({letter.dl_reason})")
        worker.terminate()
        show(1)

    from shop.models import Order

    addresses = Order.objects.filter(confirmed=True).order_by("pk").values_list("address", flat=True)
    print("confirmed orders:", ", ".join(addresses))
    shop.shutdown()


if __name__ == "__main__":
    with database() as dsn:
        export(dsn)
        main(dsn)
