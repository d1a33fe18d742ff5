"""Message queue and shared event log inside PostgreSQL: the Python client.

with pgque.connect(dsn) as client:
    client.send("orders", {"id": 1})
"""

from ._otel import enable_opentelemetry
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
    PgquePermissionDenied,
    PgqueQueueDisabled,
    PgqueQueueExists,
    PgqueQueueFull,
    PgqueQueueInUse,
    PgqueQueueNotFound,
    PgqueSinkEpochError,
    PgqueTickNotFound,
    PgqueVersionError,
)
from .outcomes import Dead, HandlerOutcome, Release, Retry
from .types import (
    ArchivedMessage,
    BatchEvent,
    BatchInfo,
    ConsumerInfo,
    DeadLetter,
    Event,
    HealthCheck,
    Message,
    MessageStatus,
    Metric,
    Outcome,
    PoisonMessage,
    QueuedMessage,
    QueueInfo,
    ReplayResult,
    SendResult,
    StatusRow,
    WorkerInfo,
)
from .workers import Worker, WorkMessage, WorkQueue
from .workers_async import AsyncWorker, AsyncWorkMessage, AsyncWorkQueue

__all__ = [
    "ArchivedMessage",
    "AsyncConsumer",
    "AsyncPgqueClient",
    "AsyncWorkMessage",
    "AsyncWorkQueue",
    "AsyncWorker",
    "BatchEvent",
    "BatchInfo",
    "Consumer",
    "ConsumerInfo",
    "Dead",
    "DeadLetter",
    "Event",
    "HandlerInterrupted",
    "HandlerOutcome",
    "HealthCheck",
    "Message",
    "MessageStatus",
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
    "PgquePermissionDenied",
    "PgqueQueueDisabled",
    "PgqueQueueExists",
    "PgqueQueueFull",
    "PgqueQueueInUse",
    "PgqueQueueNotFound",
    "PgqueSinkEpochError",
    "PgqueTickNotFound",
    "PgqueVersionError",
    "PoisonMessage",
    "QueueInfo",
    "QueuedMessage",
    "Release",
    "ReplayResult",
    "Retry",
    "SendResult",
    "StatusRow",
    "WorkMessage",
    "WorkQueue",
    "Worker",
    "WorkerInfo",
    "__version__",
    "connect",
    "connect_async",
    "enable_opentelemetry",
]
