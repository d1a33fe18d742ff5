"""Message queue and shared event log inside PostgreSQL: the Python client.

with pgque.connect(dsn) as client:
    client.send("orders", {"id": 1})

pgque.send(session, "orders", {"id": 1})  # in the transaction of a connection or session of yours
"""

from typing import TYPE_CHECKING

from ._version import __version__
from .earlier import EARLIER

if TYPE_CHECKING:
    from .client.client import AsyncPgqueClient, connect_async
    from .errors import (
        PgqueBadArgument,
        PgqueBadArgumentError,
        PgqueBatchNotFound,
        PgqueBatchNotFoundError,
        PgqueConnectionError,
        PgqueConsumerNotFound,
        PgqueConsumerNotFoundError,
        PgqueError,
        PgqueInvalidName,
        PgqueInvalidNameError,
        PgqueKeyConflict,
        PgqueKeyConflictError,
        PgqueMessageNotFound,
        PgqueMessageNotFoundError,
        PgqueMessageNotInBatch,
        PgqueMessageNotInBatchError,
        PgqueNoScheduler,
        PgqueNoSchedulerError,
        PgqueNotDeadLetter,
        PgqueNotDeadLetterError,
        PgquePayloadError,
        PgquePermissionDenied,
        PgquePermissionDeniedError,
        PgqueQueueDisabled,
        PgqueQueueDisabledError,
        PgqueQueueExists,
        PgqueQueueExistsError,
        PgqueQueueFull,
        PgqueQueueFullError,
        PgqueQueueInUse,
        PgqueQueueInUseError,
        PgqueQueueNotFound,
        PgqueQueueNotFoundError,
        PgqueSinkEpochError,
        PgqueTickNotFound,
        PgqueTickNotFoundError,
        PgqueVersionError,
    )
    from .integrations.opentelemetry import enable_opentelemetry
    from .integrations.prometheus import enable_prometheus
    from .ops import embedded as embedded
    from .ops import exporter as exporter
    from .outcomes import Dead, HandlerOutcome, Outcomes, Release, Retry
    from .runtime.consumer import AsyncConsumer
    from .runtime.stopper import HandlerInterrupted
    from .runtime.tasks import Task
    from .runtime.workers import AsyncWorker, AsyncWorkMessage, AsyncWorkQueue
    from .transaction.calls import ack_async, nack_async, receive_async, send_async, send_batch_async
    from .twins.calls import ack, nack, receive, send, send_batch
    from .twins.client import PgqueClient, connect
    from .twins.consumer import Consumer
    from .twins.workers import Worker, WorkMessage, WorkQueue
    from .types import (
        Action,
        ArchivedMessage,
        BatchEvent,
        BatchInfo,
        ConsumerInfo,
        DeadLetter,
        DeadReason,
        Event,
        HealthCheck,
        HistoryBucket,
        LagSample,
        Message,
        MessageStatus,
        Metric,
        Outcome,
        PoisonMessage,
        QueuedMessage,
        QueueInfo,
        QueueRights,
        QueueSetting,
        Rate,
        RecurringMessage,
        ReplayResult,
        SendResult,
        StatusRow,
        WorkerInfo,
    )
else:
    # Imported with the first use of a name, in this order: each of Spark's Python processes imports
    # pgque.spark, and with it this module, and most of them need neither a client nor psycopg.
    _MODULES = (
        *("errors", "outcomes", "types", "runtime.stopper"),
        *("integrations.opentelemetry", "integrations.prometheus", "twins.client", "client.client"),
        *("twins.consumer", "runtime.consumer", "twins.workers", "runtime.workers"),
        *("twins.calls", "transaction.calls", "runtime.tasks"),
    )

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in ("client", "errors", "outcomes", "types", *EARLIER):
            return import_module(f"{__name__}.{name}")
        for module in _MODULES if name in __all__ else ():
            found = vars(import_module(f"{__name__}.{module}"))
            if name in found:
                globals()[name] = found[name]
                return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "Action",
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
    "DeadReason",
    "Event",
    "HandlerInterrupted",
    "HandlerOutcome",
    "HealthCheck",
    "HistoryBucket",
    "LagSample",
    "Message",
    "MessageStatus",
    "Metric",
    "Outcome",
    "Outcomes",
    "PgqueBadArgument",
    "PgqueBadArgumentError",
    "PgqueBatchNotFound",
    "PgqueBatchNotFoundError",
    "PgqueClient",
    "PgqueConnectionError",
    "PgqueConsumerNotFound",
    "PgqueConsumerNotFoundError",
    "PgqueError",
    "PgqueInvalidName",
    "PgqueInvalidNameError",
    "PgqueKeyConflict",
    "PgqueKeyConflictError",
    "PgqueMessageNotFound",
    "PgqueMessageNotFoundError",
    "PgqueMessageNotInBatch",
    "PgqueMessageNotInBatchError",
    "PgqueNoScheduler",
    "PgqueNoSchedulerError",
    "PgqueNotDeadLetter",
    "PgqueNotDeadLetterError",
    "PgquePayloadError",
    "PgquePermissionDenied",
    "PgquePermissionDeniedError",
    "PgqueQueueDisabled",
    "PgqueQueueDisabledError",
    "PgqueQueueExists",
    "PgqueQueueExistsError",
    "PgqueQueueFull",
    "PgqueQueueFullError",
    "PgqueQueueInUse",
    "PgqueQueueInUseError",
    "PgqueQueueNotFound",
    "PgqueQueueNotFoundError",
    "PgqueSinkEpochError",
    "PgqueTickNotFound",
    "PgqueTickNotFoundError",
    "PgqueVersionError",
    "PoisonMessage",
    "QueueInfo",
    "QueueRights",
    "QueueSetting",
    "QueuedMessage",
    "Rate",
    "RecurringMessage",
    "Release",
    "ReplayResult",
    "Retry",
    "SendResult",
    "StatusRow",
    "Task",
    "WorkMessage",
    "WorkQueue",
    "Worker",
    "WorkerInfo",
    "__version__",
    "ack",
    "ack_async",
    "connect",
    "connect_async",
    "enable_opentelemetry",
    "enable_prometheus",
    "nack",
    "nack_async",
    "receive",
    "receive_async",
    "send",
    "send_async",
    "send_batch",
    "send_batch_async",
]
