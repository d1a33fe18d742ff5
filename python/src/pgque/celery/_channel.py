"""A channel of kombu: queues are declared, published to and consumed over it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from amqp import RecoverableConnectionError
from amqp.protocol import queue_declare_ok_t
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.utils.uuid import uuid

from ..errors import (
    PgqueBadArgumentError,
    PgqueConsumerNotFoundError,
    PgqueError,
    PgquePermissionDeniedError,
    PgqueQueueNotFoundError,
    one_line,
)
from ..twins.client import PgqueClient
from ..types import Event
from . import _bulk
from ._logs import latest_tick
from ._options import LOG_CONFIG, needs_log
from ._receiver import Receiver
from ._wire import NO_TASK, Raw, event_of
from ._worker import is_known

log = logging.getLogger("pgque.celery")

# Arguments that are refused for a queue that stays; queues for remote control expire with their process.
_REFUSED = {
    "x-dead-letter-exchange",
    "x-expires",
    "x-max-length",
    "x-max-length-bytes",
    "x-max-priority",
    "x-message-ttl",
}

_NEEDS_BACKEND = "For results, use a backend that keeps them, as db+postgresql://, not rpc://"


class QoS(virtual.QoS):
    """Pass outcomes on to the receiver, which keeps count of the messages of a channel."""

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        self.channel = channel
        self.prefetch_count = prefetch_count or 0

    def can_consume(self) -> bool:
        return True

    def can_consume_max_estimate(self) -> int:
        return self.prefetch_count

    def append(self, message: object, delivery_tag: str) -> None:
        """Do nothing: the receiver has it."""

    def ack(self, delivery_tag: str) -> None:
        if (receiver := self.channel.receiver) is not None:
            receiver.acknowledge(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if (receiver := self.channel.receiver) is not None:
            receiver.reject(delivery_tag, requeue)

    def restore_unacked(self) -> list[object]:
        if (receiver := self.channel.receiver) is not None:
            receiver.release(self.channel.channel_id)
        return []

    def restore_unacked_once(self, stderr: object = None) -> None:
        self.restore_unacked()


class Channel(virtual.Channel):
    """Declare, publish and consume.

    A queue is a queue of pgque with a consumer. One that goes with its process, as those for remote control
    and events, is a reader of the log of each exchange that it is bound to.
    """

    QoS = QoS
    from_transport_options = ()
    connection: Any

    @property
    def broker(self) -> Any:
        """Return the transport. Raises an error that kombu recovers from when the channel is closed: kombu
        closes all channels when it connects again, and retries over a new one."""
        if self.connection is None:
            raise RecoverableConnectionError("channel disconnected")
        return self.connection

    @property
    def receiver(self) -> Receiver | None:
        """Return the receiver, if this process has begun one; None when the channel is closed, which has
        released its messages."""
        return None if self.connection is None else self.connection.open_receiver

    # -- queues ------------------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: Mapping[str, object], **kwargs: Any) -> dict[str, object]:
        """Return the arguments of a queue, those that kombu has names for among them."""
        named = {f"x-{name.replace('_', '-')}": value for name, value in kwargs.items() if value is not None}
        return {**arguments, **named}

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Create a queue with its consumer if it does not exist and the role has the right to create it."""
        queue = queue or f"amq.gen-{uuid()}"
        is_reader = exclusive or auto_delete
        refused = _REFUSED & (arguments or {}).keys()
        if refused and not is_reader:
            raise PgqueBadArgumentError(
                f"queue {queue!r} has arguments that do not apply to pgque: {', '.join(sorted(refused))}",
                hint="For limits, set queue_config in broker_transport_options; for priorities, use several"
                " queues.",
            )
        size = 0
        if passive or not is_reader:
            with self.broker.calls() as client:
                size = self._find(client, queue, create=not passive)
        else:
            self.broker.readers.add(queue)
        return queue_declare_ok_t(queue, size, 0)

    def _find(self, client: PgqueClient, queue: str, create: bool) -> int:
        """Return how many messages a queue has."""
        options = self.broker.options
        name = options.queue(queue)
        try:
            return client.consumers.get_info(name, options.consumer)[0].pending_events or 0
        except PgquePermissionDeniedError:
            return 0  # the role may only send, and the first send says whether there is a queue
        except (PgqueQueueNotFoundError, PgqueConsumerNotFoundError) as error:
            if not create:
                text = f"NOT_FOUND - no queue {name!r} with a consumer {options.consumer!r}"
                raise ChannelError(text, (50, 10), "Channel.queue_declare", "404") from error
        try:
            with client.conn.transaction():  # so that nobody sends before there is a consumer
                client.admin.create_queue(name, options.config())
                client.subscribe(name, options.consumer)
        except PgquePermissionDeniedError as error:
            error.hint = options.needs_consumer(name)
            raise
        return 0

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        """Bind a queue: one that goes with its process reads from now on."""
        exchange = exchange or "amq.direct"
        broker = self.broker
        if self.state.has_binding(queue, exchange, routing_key):
            return
        declared = self.state.exchanges.get(exchange, {})
        if queue in broker.readers:
            if declared.get("type") == "direct" and declared["durable"]:
                raise ChannelError(
                    f"queue {queue!r} goes with its process, so that it only reads: a task of exchange"
                    f" {exchange!r} would be run by each reader, or by nobody. Declare it without"
                    " auto_delete and exclusive",
                    (50, 20),
                    "Channel.queue_bind",
                    "403",
                )
            self._read(queue, exchange)
        elif declared.get("type") == "fanout":
            raise ChannelError(
                f"queue {queue!r} stays, and would be bound to the fanout exchange {exchange!r}, whose"
                " messages each reader gets from a log: declare it with auto_delete=True"
                " (of Celery: control_queue_durable=False)",
                (50, 20),
                "Channel.queue_bind",
                "403",
            )
        super().queue_bind(queue, exchange, routing_key, arguments)

    def _read(self, queue: str, exchange: str) -> None:
        source = self.broker.options.log(exchange)
        with self.broker.calls() as client:
            try:
                tick = latest_tick(client, source)
            except PgqueQueueNotFoundError:
                self._create_log(client, source)
                tick = latest_tick(client, source)
        self.broker.read(queue, exchange, source, tick)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        """Drop a queue, unless others are subscribed to it."""
        for exchange, routing_key, arguments in list(self.state.queue_bindings(queue)):
            self.queue_unbind(queue, exchange, routing_key, arguments)
        self.state.queue_bindings_delete(queue)
        if queue in self.broker.readers:
            self.broker.readers.discard(queue)
            if (receiver := self.receiver) is not None:
                receiver.forget(queue)
                self.broker.close_idle_receiver()
            return
        options = self.broker.options
        name = options.queue(queue)
        with self.broker.calls() as client:
            if (if_empty and self._find(client, queue, create=False)) or (
                if_unused and client.consumers.list_workers(name, options.consumer)
            ):
                return
            with client.conn.transaction():
                client.unsubscribe(name, options.consumer)
                client.admin.drop_queue(name)

    def _size(self, queue: str) -> int:
        with self.broker.calls() as client:
            return self._find(client, queue, create=False)

    def _purge(self, queue: str) -> int:
        """Remove the messages of a queue, also those that workers have, and return their number."""
        with self.broker.calls() as client:
            try:
                purged: int = client.admin.purge(self.broker.options.queue(queue))
            except PgqueError as error:
                log.error("queue %s is not purged: %s", queue, one_line(error))  # Celery says 0, and no more
                raise
        return purged

    # -- publish -----------------------------------------------------------------------------------

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Return a body for JSON: a text is one already."""
        if isinstance(body, str):
            return body, None
        encoded: tuple[Any, str | None] = super().encode_body(body, encoding)
        return encoded

    def basic_publish(self, message: Raw, exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Send a message to the queues that are bound, or to the log of the exchange."""
        self._inplace_augment_message(message, exchange, routing_key)
        queues = [routing_key]
        if exchange:
            queues = list(self.broker.bound(exchange, routing_key) - self.broker.readers)
        event = event_of(message)
        for queue in queues:
            self._send(queue, event)
        if not queues:
            self._send_to_log(exchange, routing_key, event)

    def _send(self, queue: str, event: Event) -> None:
        name = self.broker.options.queue(queue)
        if _bulk.add(self.broker, name, event):
            return
        with self.broker.calls() as client:
            try:
                client.send(name, event)
            except PgqueQueueNotFoundError as error:
                error.hint = self.broker.options.needs_consumer(name)
                if event.type == NO_TASK:  # perhaps the result of a task, for the queue of its sender
                    error.hint = f"{_NEEDS_BACKEND}. {error.hint}"
                raise

    def _send_to_log(self, exchange: str, routing_key: str, event: Event) -> None:
        declared = self.state.exchanges.get(exchange)
        if declared is None or (declared["type"] == "direct" and declared["durable"]):
            raise ChannelError(
                f"no queue that this process declared is bound to exchange {exchange!r} with {routing_key!r}:"
                " name the queue (queue=…), or declare it first",
                (50, 10),
                "Channel.basic_publish",
                "404",
            )
        name = self.broker.options.log(exchange)
        with self.broker.calls() as client:
            try:
                client.send(name, event)
            except PgqueQueueNotFoundError:
                self._create_log(client, name)
                client.send(name, event)

    def _create_log(self, client: PgqueClient, name: str) -> None:
        try:
            client.admin.create_queue(name, LOG_CONFIG)
        except PgquePermissionDeniedError as error:
            error.hint = needs_log(name)
            raise

    # -- consume -----------------------------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> None:
        """Receive from a queue."""
        broker = self.broker
        if queue in broker.readers and not any(self.state.queue_bindings(queue)):
            raise ChannelError(
                f"queue {queue!r} goes with its process and is bound to no exchange, so that no message would"
                f" reach it. {_NEEDS_BACKEND}",
                (60, 20),
                "Channel.basic_consume",
                "403",
            )
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        if queue not in broker.readers:
            broker.receiver.consume(
                self.channel_id, broker.options.queue(queue), no_ack, lambda: self.qos.prefetch_count
            )
        elif (receiver := self.receiver) is not None:
            receiver.begin()

    def basic_cancel(self, consumer_tag: str) -> None:
        """Receive no more from a queue, and release the messages that Celery has not begun."""
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        receiver = self.receiver
        if queue is not None and receiver is not None and queue not in self.broker.readers:
            name = self.broker.options.queue(queue)
            receiver.cancel(self.channel_id, name, is_known)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return one message, or None."""
        options = self.broker.options
        name = options.queue(queue)
        receiver = self.broker.receiver
        with self.broker.calls() as client:
            received_at = time.monotonic()
            messages = client.receive(
                name, options.consumer, 1, worker=receiver.name, visibility_timeout=options.visibility_timeout
            )
        receiver.begin()  # which extends the lease, and reports the outcome
        for _, raw in receiver.take(self.channel_id, name, messages, received_at):
            message = self.Message(raw, channel=self)
            if no_ack:
                receiver.acknowledge(message.delivery_tag)
            return message
        return None

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Set how many messages without an outcome the channel may have; 0 is 1000."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        if (receiver := self.receiver) is not None:
            receiver.begin()

    def close(self) -> None:
        """Release what has no outcome."""
        if not self.closed and (receiver := self.receiver) is not None:
            receiver.close_channel(self.channel_id)
        super().close()
