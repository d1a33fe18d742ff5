# Generated from runtime/consumer.py by tools/make_sync.py: edit that file and run the script again.
"""A consumer that reads alone: its messages are handled in order, by one process at a time.

`twins/consumer.py` is generated from `runtime/consumer.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn

from .client import PgqueClient
from ..client.limit import COMMAND_TIMEOUT
from ..client.statements import MAX_BYTES
from ..codec.encode import total_seconds
from ..codec.json import Encoder
from ..codec.payloads import BadPayload, Decoder
from ..errors import (
    PgqueBadArgumentError,
    PgqueConsumerNotFoundError,
    PgqueError,
    PgquePayloadError,
    PgqueQueueInUseError,
)
from ..types import Message, Seconds
from ..runtime import batches
from ..runtime.batches import Batch, OwnBatch, Statement
from ..runtime.options import refuse
from .runtime import Runtime
from ..runtime.sources import Priority, Source

log = logging.getLogger("pgque.consumer")

_NOT_FOR_CONSUMER = (
    "Start a pgque.Worker for this consumer, or give the Consumer another: client.subscribe(queue, name)."
    " To take it from its workers, unsubscribe and subscribe it again; its pending retries are lost."
)


class Consumer(Runtime):
    """Run a handler for each message of a queue, in order.

        consumer = Consumer(dsn, queue="orders", consumer="billing")

        @consumer.handler("order.created")
        def bill(message): ...

        consumer.run()

    A consumer is a worker that reads alone: handlers, outcomes, hooks, `transactional` and stops are those of
    Worker. It has one batch at a time, without a lease. If the process is killed, the messages of its
    batch are redelivered, one at a time: handlers must bear that. A message that ends the process again and
    again is rejected each time, and is dead after `max_retries`.

    If a handler raises, its message is redelivered after `retry_after` seconds, and the messages behind it do
    not wait for that.

    Args:
        dsn: as of Worker, and so is each argument that is not listed here.
        queue: name or `queue_uid` of the queue. The consumer must be subscribed to it, unless it has a
            `subconsumer`.
        queues: several queues, each of which is read in order.
        consumer: name of the consumer.
        name: the earlier name of this argument.
        concurrency: number of handlers that run at a time. Above 1, the messages of a batch are handled side
            by side, not in order.
        poll_interval: seconds between polls of the queue when no notification comes.
        max_messages: most messages in one batch; `prefetch` is another name of it.
        min_interval: as of Worker. The ack comes before the pause.
        subconsumer: name of this process if several share the consumer. The consumer must not read on its own
            (PgqueQueueInUseError): either do not subscribe it, and it begins at the newest tick with its
            first subconsumer; or convert it with `subscribe_subconsumer(…, convert_normal=True)`.
        dead_interval: seconds of silence after which the batch of another subconsumer may be taken over.

    Raises PgqueBadArgumentError for an argument of a Worker that a consumer cannot have.
    """

    _kind = "Consumer"
    _is_shared = False
    _log: ClassVar[logging.Logger] = log

    def __init__(
        self,
        dsn: str = "",
        *,
        queue: str | None = None,
        queues: Mapping[str, float] | None = None,
        priority: Priority = "weighted",
        consumer: str | None = None,
        name: str | None = None,
        concurrency: int = 1,
        use: Literal["threads", "processes"] = "threads",
        prefetch: int | None = None,
        max_messages: int | None = None,
        max_bytes: int | None = MAX_BYTES,
        min_interval: float = 0,
        poll_interval: float = 30,
        retry_after: Seconds | None = None,
        archive: bool = False,
        transactional: bool = False,
        unknown_handler_policy: Literal["nack", "ack"] = "nack",
        subconsumer: str | None = None,
        dead_interval: Seconds | None = None,
        shutdown_timeout: float = 30,
        handler_timeout: Seconds | None = None,
        encoder: Encoder | None = None,
        decoder: Decoder | None = None,
        bad_payload: BadPayload = "dead",
        liveness_file: str | os.PathLike[str] | None = None,
        command_timeout: float | None = COMMAND_TIMEOUT,
        **of_worker: NoReturn,
    ) -> None:
        refuse("Consumer", of_worker)
        if consumer is None:
            consumer = name
        elif name is not None:
            raise TypeError("a Consumer needs consumer=..., or name=..., and not both")
        if consumer is None:
            raise TypeError("a Consumer needs the name of its consumer: consumer=...")
        if str(use) == "processes":
            raise PgqueBadArgumentError(
                "a Consumer cannot have use='processes': it reads alone, and each would get its batch",
                hint="Use a Worker.",
            )
        self.use = use
        self.subconsumer = subconsumer
        self.dead_interval = dead_interval
        super().__init__(
            dsn,
            queue=queue,
            queues=queues,
            priority=priority,
            consumer=consumer,
            name=subconsumer or consumer,
            concurrency=concurrency,
            prefetch=prefetch,
            max_messages=max_messages,
            max_bytes=max_bytes,
            min_interval=min_interval,
            poll_interval=poll_interval,
            lease_seconds=math.inf,
            retry_after=retry_after,
            archive=archive,
            transactional=transactional,
            unknown_handler_policy=unknown_handler_policy,
            shutdown_timeout=shutdown_timeout,
            handler_timeout=handler_timeout,
            encoder=encoder,
            decoder=decoder,
            bad_payload=bad_payload,
            liveness_file=liveness_file,
            command_timeout=command_timeout,
        )

    @property
    def name(self) -> str:
        """Return the name of the consumer: the earlier name of `consumer`."""
        return self.consumer

    # Earlier names, which stay.
    on = Runtime.handler
    start = Runtime.run

    @property
    def _made(self) -> Callable[..., Any]:
        return Consumer

    def _receive_statement(self, queue: str, count: int) -> Statement:
        return batches.receive_alone(
            queue, self.consumer, self.subconsumer, count, self.dead_interval, self.max_bytes
        )

    def _batch(self, source: Source, received: Sequence[Message], received_at: float) -> Batch[Message]:
        queue, consumer, subconsumer = source.queue, self.consumer, self.subconsumer
        batch = OwnBatch(
            received, received_at, lambda patience: batches.touch(queue, consumer, subconsumer, patience)
        )
        source.batch = batch
        return batch

    def _kept_seconds(self) -> float | None:
        if self.subconsumer is None or self.dead_interval is None:
            return None
        return total_seconds(self.dead_interval)

    def _prepare(self, client: PgqueClient, source: Source) -> None:
        """Find out which batch an earlier process left open."""
        if not source.left.is_known:
            subscription = (
                self.consumer if self.subconsumer is None else f"{self.consumer}.{self.subconsumer}"
            )
            try:
                found = client.consumers.get_info(source.queue, subscription)
            except PgqueConsumerNotFoundError:
                found = []  # of a subconsumer, which its first receive registers
            source.left.note_open(found)

    def _explain(self, error: PgqueError) -> None:
        is_of_consumer = isinstance(error, (PgqueBadArgumentError, PgqueQueueInUseError))
        if is_of_consumer and self.subconsumer is None and not isinstance(error, PgquePayloadError):
            error.hint = _NOT_FOR_CONSUMER
