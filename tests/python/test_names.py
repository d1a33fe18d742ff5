"""One way to say it: consumers and workers agree on names, and a call of SQL has the same name in Python."""

from __future__ import annotations

import asyncio
import inspect
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import pgque

Tick = Callable[[str], int | None]
Connection = psycopg.Connection[tuple[Any, ...]]


# The client's methods before it had groups, and those of 0.6 that were renamed then.
STAY = """
    ack archive cancel dead extend force_next_tick nack peek receive receive_coop release send send_batch send_idem
    set_visibility subscribe subscribe_subconsumer ticker ticker_all touch_subconsumer unsubscribe
    unsubscribe_subconsumer close conn connect from_pool"""
EARLIER = """
    alter_queue archive_list archive_poison archive_purge archive_replay batch_retry consumer_lags create_queue
    create_recurring delete_expired dlq_delete dlq_inspect dlq_purge dlq_reasons dlq_replay dlq_replay_all dlq_requeue
    dlq_requeue_all drop_queue drop_recurring event_retry expire_messages finish_batch get_batch_events get_batch_info
    get_consumer_info get_message get_queue_info grant_queue health list_actions list_messages list_poison
    list_recurring list_workers maint message_status metrics my_rights next_batch pause pause_recurring purge purge_key
    queue_config queue_rates queue_settings reclaim rename_queue resume resume_recurring retry_now revoke_queue
    run_recurring seek_to_time set_default_config set_history set_key_concurrency set_queue_config set_schedule
    share_consumer start status stop unshare_consumer version consumer_info queue_info"""
GROUPS = {"admin", "archived", "consumers", "dlq", "messages", "monitor", "pgq", "recurring"}

# Methods that have always been in their group
ONLY_IN_GROUPS = {("monitor", "history")}

# Python has no overloading, so the second form of ticker() has a name of its own.
NOT_NAMED_AS_IN_SQL = {
    "ticker_all": "ticker",
    # Names of the client from before 0.9.
    "queue_config": "queue_settings",
    "subscribe_subconsumer": "register_subconsumer",
    "unsubscribe_subconsumer": "unregister_subconsumer",
}


def test_an_earlier_name_of_the_client_is_the_method_of_its_group_and_warns_with_the_new_one(
    dsn: str, client: pgque.PgqueClient
) -> None:
    def public(owner: type) -> set[str]:
        return {name for base in owner.__mro__[:-1] for name in vars(base) if not name.startswith("_")}

    for owner in (pgque.PgqueClient, pgque.AsyncPgqueClient):
        assert public(owner) == {*STAY.split(), *EARLIER.split(), *GROUPS}
        other = owner(client.conn)  # type: ignore[arg-type]
        news = set()
        for old in EARLIER.split():
            with pytest.warns(
                DeprecationWarning, match=rf"^{owner.__name__}\.{old} is now called \w+\.\w+$"
            ) as caught:
                method = getattr(other, old)
            assert caught[0].filename == __file__
            group, _, new = str(caught[0].message).rpartition(" ")[2].partition(".")
            assert method.__func__ is getattr(getattr(other, group), new).__func__
            news.add((group, new))
        there = {(group, new) for group in GROUPS for new in public(type(getattr(other, group)))}
        assert news | ONLY_IN_GROUPS == there

    async def count() -> int:
        async with await pgque.connect_async(dsn) as other:
            with pytest.warns(DeprecationWarning, match="consumers.get_info"):
                return len(await other.consumer_info())

    with pytest.warns(DeprecationWarning, match="consumers.get_info"):
        assert len(client.get_consumer_info()) == asyncio.run(count())


GROUP_CLASSES = [type(getattr(pgque.PgqueClient, group).fget(None)) for group in sorted(GROUPS)]


@pytest.mark.parametrize(
    "owner",
    [pgque.PgqueClient, pgque.AsyncPgqueClient, pgque.WorkQueue, pgque.WorkMessage, *GROUP_CLASSES],
)
def test_a_method_has_the_name_of_the_function_that_it_calls(owner: type) -> None:
    called = {
        name: match[1]
        for name, method in vars(owner).items()
        if inspect.isfunction(method)
        and (match := re.search(r"Calls\s+`pgque\.(\w+)`", method.__doc__ or ""))
    }
    assert called
    # In a group, without the word that the group says
    said = (
        {"archive", "consumer", "dlq", "message", "messages", "recurring"}
        if owner in GROUP_CLASSES
        else set()
    )
    different = {
        name: function
        for name, function in called.items()
        if name not in (function, "_".join(word for word in function.split("_") if word not in said))
    }
    assert different.items() <= {**NOT_NAMED_AS_IN_SQL, "messages": "receive"}.items()


def test_a_consumer_has_the_names_of_a_worker_and_keeps_its_earlier_ones_without_a_warning(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "c")

    def consume(runner: Any, *, early: bool) -> None:
        client.send(queue, "a", type="t")
        tick(queue)
        register, run = (runner.on, runner.start) if early else (runner.handler, runner.run)
        assert (runner.queue, runner.consumer, runner.name) == (queue, "c", "c")

        def handle(message: pgque.Message) -> None:
            runner.stop()

        async def handle_async(message: pgque.Message) -> None:
            runner.stop()

        if isinstance(runner, pgque.Consumer):
            register("t")(handle)
            run()
        else:
            register("t")(handle_async)
            asyncio.run(asyncio.wait_for(run(), 20))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for owner in (pgque.Consumer, pgque.AsyncConsumer):
            consume(owner(dsn, queue=queue, consumer="c"), early=False)
            consume(owner(dsn, queue=queue, name="c"), early=True)
    for given in ({}, {"name": "c", "consumer": "c"}):
        options: dict[str, Any] = {**given, "queue": queue}
        with pytest.raises(TypeError, match=r"consumer=\.\.\."):
            pgque.Consumer(dsn, **options)


def test_send_batch_takes_the_order_of_send_and_the_earlier_one(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    two = ["a", "b"]
    send = client.send_batch
    with pgque.WorkQueue(dsn, queue) as work_queue, warnings.catch_warnings():
        warnings.simplefilter("error")
        ways: list[tuple[str, Callable[[], list[int]]]] = [
            ("t", lambda: send(queue, two, type="t")),
            ("default", lambda: send(queue, two)),
            ("default", lambda: send(queue=queue, payloads=two)),
            ("t", lambda: send(queue, "t", two)),
            ("t", lambda: send(queue, "t", payloads=two)),
            ("t", lambda: send(queue=queue, type="t", payloads=two)),
            ("e", lambda: send(queue, [pgque.Event("e", "a"), pgque.Event("e", "b")])),
            (
                "e",
                lambda: work_queue.send_batch(
                    [pgque.Event("e", "a"), pgque.Event("e", "b")], keys=[None] * 2
                ),
            ),
        ]
        sent = {msg_id: type_ for type_, way in ways for msg_id in way()}
        tick(queue)
        got = {message.msg_id: message.type for message in client.receive(queue, "c")}
        assert got == sent
        assert len(sent) == 2 * len(ways)
        assert send(queue, []) == send(queue, "t", []) == []
    wrong: Any = send
    for arguments, options in (
        ((), {}),
        (("t",), {"payloads": two, "type": "t"}),
        ((two, "t"), {}),
        (("t", two, "x"), {}),
        (("t",), {}),
    ):
        with pytest.raises(TypeError, match="payloads"):
            wrong(queue, *arguments, **options)
    with pytest.raises(ValueError, match="one type"):
        send(queue, [pgque.Event("e", "a"), "b"])


def test_an_earlier_name_of_an_error_is_its_class_without_a_warning() -> None:
    errors = {
        name for name in pgque.__all__ if isinstance(getattr(pgque, name), type) and name.startswith("Pgque")
    }
    earlier = {name for name in errors if f"{name}Error" in errors}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in earlier:
            assert getattr(pgque, name) is getattr(pgque, f"{name}Error") is getattr(pgque.errors, name)
            assert getattr(pgque, name).__name__ == f"{name}Error"
    assert {name for name in errors if not name.endswith("Error")} == {*earlier, "PgqueClient"}
    assert len(earlier) == 16
    part_a = {
        "PgqueQueueNotFound",
        "PgqueConsumerNotFound",
        "PgqueBatchNotFound",
    }  # the earlier names of api.md
    assert part_a <= earlier


def test_retry_after_has_one_name_and_its_earlier_one_warns(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    """The earlier argument is `after`."""
    with pytest.warns(DeprecationWarning, match="after of Retry is now called retry_after") as caught:
        retry = pgque.Retry(after=60, reason="busy")
        assert retry.after == retry.retry_after == pgque.Retry(60).retry_after
        retry.after = None
    assert retry.retry_after is None
    assert [each.filename for each in caught] == [__file__] * 3
    client.subscribe(queue, "c")
    client.send_batch(queue, ["a", "b"])
    tick(queue)

    async def reject() -> None:
        async with pgque.AsyncWorkQueue(dsn, queue, consumer="c") as work:
            async for message in work.messages(timeout=0):
                with pytest.warns(
                    DeprecationWarning, match="after of nack is now called retry_after"
                ) as caught:
                    assert await message.nack(after=3600, reason="busy")
                assert caught[0].filename == __file__
                break

    asyncio.run(reject())
    with pgque.WorkQueue(dsn, queue, consumer="c") as work:
        for message in work.messages(timeout=0):
            with pytest.warns(DeprecationWarning, match="after of nack is now called retry_after") as caught:
                assert message.nack(after=3600, reason="busy")
            assert caught[0].filename == __file__
    retried = client.messages.list(queue, "retry")
    assert [each.last_error for each in retried] == ["busy"] * 2
    for each in retried:
        assert each.available_at and each.created_at
        assert each.available_at - each.created_at > timedelta(minutes=50)
