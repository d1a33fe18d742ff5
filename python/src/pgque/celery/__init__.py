"""A transport of kombu, so that a Celery application runs on pgque.

    import pgque.celery

    app = Celery("shop", broker="pgque://user:password@host:5432/database")

The import makes the scheme `pgque` known to kombu. If only settings can be changed, use
`broker_transport = "pgque.celery:Transport"`. The rest of the URL is that of libpq after
`postgresql://`: several hosts, `?sslmode=…`, `?service=…`. `pgque://` alone takes PGQUE_DSN or the PG*
variables. With `broker_transport`, `broker_url` may also be a connection string: "host=db dbname=shop".
Keep its password in a password file then: Celery hides only those in URLs from its reports and from Flower.

A Celery queue is a queue of pgque with a consumer, whose workers share its messages. Remote control and
events are read from the log of a queue `exchange.…`: each worker remembers how far it has read, and leaves
nothing in the database when it dies.

A worker that stops releases the messages that it has not begun: at once from Celery 5.7 on, with earlier
versions when it ends.

`broker_transport_options`:

- `visibility_timeout`: seconds of a lease (30). A worker extends the leases of all messages that it has, also
  of those that have not begun. So this is only how long the messages of a killed worker wait.
- `polling_interval`: seconds between checks for expired leases and, behind a pooler, for messages: 1, or 0.2
  behind a pooler in transaction mode, where LISTEN does not work.
- `command_timeout`: seconds after which a call that the server does not answer is given up, and the
  connection replaced (30).
- `consumer`: name of the consumer of each queue ("celery").
- `queue_prefix`: begins the names of all queues in pgque ("").
- `queue_config`: settings of queues that the transport creates, as of `create_queue`. A message is delivered
  20 times before it is given up (`max_receive_attempts`).
"""

from kombu.transport import TRANSPORT_ALIASES

from ._bulk import bulk
from ._channel import Channel
from ._transport import Transport

__all__ = ["Channel", "Transport", "bulk"]

TRANSPORT_ALIASES["pgque"] = "pgque.celery:Transport"
