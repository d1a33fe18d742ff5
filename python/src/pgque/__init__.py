"""Message queue and shared event log inside PostgreSQL: the Python client.

with pgque.connect(dsn) as client:
    client.send("orders", {"id": 1})
"""

from ._stopper import HandlerInterrupted
from ._version import __version__
from .client import PgqueClient, connect
from .client_async import AsyncPgqueClient, connect_async
from .consumer import Consumer
from .consumer_async import AsyncConsumer
from .errors import (
    PgqueBadArgument,
    PgqueBatchNotFound,
    PgqueConnectionError,
    PgqueConsumerNotFound,
    PgqueError,
    PgqueInvalidName,
    PgqueKeyConflict,
    PgqueMessageNotFound,
    PgqueMessageNotInBatch,
    PgqueNoScheduler,
    PgqueNotDeadLetter,
    PgqueQueueDisabled,
    PgqueQueueExists,
    PgqueQueueFull,
    PgqueQueueInUse,
    PgqueQueueNotFound,
    PgqueSinkEpochError,
    PgqueTickNotFound,
    PgqueVersionError,
)
from .types import (
    BatchEvent,
    BatchInfo,
    ConsumerInfo,
    DeadLetter,
    Event,
    HealthCheck,
    Message,
    Metric,
    Outcome,
    QueueInfo,
    ReplayResult,
    SendResult,
    StatusRow,
)

__all__ = [
    "AsyncConsumer",
    "AsyncPgqueClient",
    "BatchEvent",
    "BatchInfo",
    "Consumer",
    "ConsumerInfo",
    "DeadLetter",
    "Event",
    "HandlerInterrupted",
    "HealthCheck",
    "Message",
    "Metric",
    "Outcome",
    "PgqueBadArgument",
    "PgqueBatchNotFound",
    "PgqueClient",
    "PgqueConnectionError",
    "PgqueConsumerNotFound",
    "PgqueError",
    "PgqueInvalidName",
    "PgqueKeyConflict",
    "PgqueMessageNotFound",
    "PgqueMessageNotInBatch",
    "PgqueNoScheduler",
    "PgqueNotDeadLetter",
    "PgqueQueueDisabled",
    "PgqueQueueExists",
    "PgqueQueueFull",
    "PgqueQueueInUse",
    "PgqueQueueNotFound",
    "PgqueSinkEpochError",
    "PgqueTickNotFound",
    "PgqueVersionError",
    "QueueInfo",
    "ReplayResult",
    "SendResult",
    "StatusRow",
    "__version__",
    "connect",
    "connect_async",
]
