"""The commands that show queues, messages and workers, and change them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

import click

from .common import (
    confirm,
    connect,
    dsn_option,
    dump,
    echo,
    json_option,
    length_option,
    limit_option,
    parsed_ids,
    print_rows,
    print_table,
    yes_option,
)

# -- queues ------------------------------------------------------------------


@click.command()
@dsn_option
@click.argument("queue")
@click.option(
    "--force", is_flag=True,
    help="Drop it even if it has consumers, delayed messages, retries or dead letters, or takes dead letters"
    " of another queue.",
)  # fmt: skip
def drop(dsn: str, queue: str, force: bool) -> None:
    """Drop a queue."""
    with connect(dsn) as client:
        client.admin.drop_queue(queue, force)
    echo(f"queue {queue} is dropped")


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("new_name")
def rename(dsn: str, queue: str, new_name: str) -> None:
    """Rename a queue."""
    with connect(dsn) as client:
        client.admin.rename_queue(queue, new_name)
    echo(f"queue {queue} is now {new_name}")


@click.command()
@dsn_option
@click.argument("queue")
def pause(dsn: str, queue: str) -> None:
    """Pause a queue: senders get an error, consumers still receive."""
    with connect(dsn) as client:
        client.admin.pause(queue)
    echo(f"queue {queue} is paused")


@click.command()
@dsn_option
@click.argument("queue")
def resume(dsn: str, queue: str) -> None:
    """Resume a paused queue."""
    with connect(dsn) as client:
        client.admin.resume(queue)
    echo(f"queue {queue} is open for senders")


_RIGHTS = ["produce", "consume", "admin"]


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("role")
@click.argument("right", type=click.Choice(_RIGHTS))
def grant(dsn: str, queue: str, role: str, right: str) -> None:
    """Grant a role a right to one queue."""
    with connect(dsn) as client:
        given = client.admin.grant_queue(queue, role, right)
    echo(f"role {role} has the right {right} to queue {queue}{'' if given else ' already'}")


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("role")
@click.argument("right", type=click.Choice(_RIGHTS), required=False)
def revoke(dsn: str, queue: str, role: str, right: str | None) -> None:
    """Revoke a right to one queue, or all rights of the role to it."""
    with connect(dsn) as client:
        count = client.admin.revoke_queue(queue, role, right)
    echo(f"{count} {'right' if count == 1 else 'rights'} revoked")


@click.group()
def config() -> None:
    """Show and change the settings of queues."""


def _setting(value: str | None) -> str:
    return value or "empty"


@config.command("get")
@dsn_option
@json_option
@click.argument("queue")
@click.argument("param", required=False)
def config_get(dsn: str, as_json: bool, queue: str, param: str | None) -> None:
    """Show the settings in force for a queue, or one of them."""
    with connect(dsn) as client:
        settings = client.admin.queue_config(queue)
    if param is not None:
        if param not in settings:
            raise click.UsageError(f"there is no setting {param!r}")
        echo(settings[param] or "")
    elif as_json:
        echo(dump(settings, indent=2))
    else:
        rows = [{"setting": name, "value": value} for name, value in settings.items()]
        print_table(f"Settings of {queue}", rows)


@config.command("set")
@dsn_option
@click.argument("queue")
@click.argument("param")
@click.argument("value", required=False)
def config_set(dsn: str, queue: str, param: str, value: str | None) -> None:
    """Change a setting of a queue; without VALUE it returns to the default."""
    with connect(dsn) as client:
        client.admin.alter_queue(queue, {param: value})
        now = client.admin.queue_config(queue).get(param)
    echo(f"{param} of queue {queue} is {_setting(now)}{' by default' if value is None else ''}")


@config.command("default")
@dsn_option
@click.argument("param")
@click.argument("value", required=False)
def config_default(dsn: str, param: str, value: str | None) -> None:
    """Change the default of a setting for all queues; without VALUE it returns to the built-in one."""
    with connect(dsn) as client:
        client.admin.set_default_config(param, value)
    echo(f"{param} is {'the built-in value' if value is None else _setting(value)} by default")


@click.command()
@dsn_option
@click.argument("queue")
def expire(dsn: str, queue: str) -> None:
    """Delete the expired messages in the retry queue of a queue."""
    with connect(dsn) as client:
        echo(f"{client.admin.expire_messages(queue)} expired")


@click.command("delete-expired")
@dsn_option
@click.argument("queue")
def delete_expired(dsn: str, queue: str) -> None:
    """Delete the dead letters of a queue that have expired."""
    with connect(dsn) as client:
        echo(f"{client.dlq.delete_expired(queue)} deleted")


@click.command()
@dsn_option
@click.argument("job", type=click.Choice(["expire", "delete_expired"]))
@click.argument("every")
def schedule(dsn: str, job: str, every: str) -> None:
    """Set how often a JOB runs: EVERY is an interval such as '5 minutes', or '' for never."""
    with connect(dsn) as client:
        client.admin.set_schedule(job, every)
    echo(f"{job} runs every {every}" if every else f"{job} does not run by itself")


# -- messages ------------------------------------------------------------------


@click.command()
@dsn_option
@json_option
@limit_option
@click.argument("queue")
@click.option(
    "--status",
    type=click.Choice(["pending", "processing", "delayed", "retry", "expired", "dead", "failed", "archived"]),
    help="Only messages of this status.",
)
def messages(dsn: str, as_json: bool, limit: int, queue: str, status: str | None) -> None:
    """List messages of a queue with their state for each consumer."""
    with connect(dsn) as client:
        rows = client.messages.list(queue, status, limit)
    shown = ("msg_id", "status", "consumer_name", "receive_count", "last_error", "type", "key", "created_at")
    print_rows(f"Messages of {queue}", rows, as_json, (*shown, "available_at", "worker"))


@click.command()
@dsn_option
@json_option
@click.argument("queue")
@click.argument("msg_id", callback=parsed_ids("the id of a message, which pgque messages QUEUE shows"))
def message(dsn: str, as_json: bool, queue: str, msg_id: int) -> None:
    """Show the state of a message for each consumer."""
    with connect(dsn) as client:
        rows = client.messages.status(queue, msg_id)
    shown = ("consumer_name", "status", "receive_count", "batch_id", "available_at", "last_error", "worker")
    print_rows(f"Message {msg_id} of {queue}", rows, as_json, shown)


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("msg_id", callback=parsed_ids("the id of a message, which pgque messages QUEUE shows"))
@click.option("--consumer", help="Only for this consumer.")
@yes_option
def cancel(dsn: str, queue: str, msg_id: int, consumer: str | None, yes: bool) -> None:
    """Cancel a message, so that it is no longer delivered.

    Prints the state in which it was. A worker that has it goes on, and its outcome does not count.
    """
    confirm(f"Cancel message {msg_id} of {queue}?", yes)
    with connect(dsn) as client:
        state = client.cancel(queue, msg_id, consumer)
    echo(f"message {msg_id} was {state}" + (" before" if state == "cancelled" else ""))


@click.command()
@dsn_option
@click.argument("queue")
@click.option("--key", help="Only the pending message with this key.")
@yes_option
def purge(dsn: str, queue: str, key: str | None, yes: bool) -> None:
    """Remove all messages of a queue, also leased and delayed ones and retries."""
    confirm(f"Remove messages of {queue}?", yes)
    with connect(dsn) as client:
        count = client.admin.purge(queue) if key is None else client.messages.purge_key(queue, key)
    echo(f"{count} removed")


# -- workers ------------------------------------------------------------------


@click.command()
@dsn_option
@json_option
@click.argument("queue", required=False)
@click.argument("consumer", required=False)
def workers(dsn: str, as_json: bool, queue: str | None, consumer: str | None) -> None:
    """List the workers that have leased messages."""
    with connect(dsn) as client:
        rows = client.consumers.list_workers(queue, consumer)
    shown = ("worker", "messages", "consumer", "queue", "lease_until", "batches", "last_seen", "waiting")
    print_rows("Workers", rows, as_json, shown)


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("consumer")
@length_option("--older-than", "Only batches that were received longer ago.", default="0s")
def reclaim(dsn: str, queue: str, consumer: str, older_than: timedelta) -> None:
    """Release the batches of a consumer's workers."""
    with connect(dsn) as client:
        echo(f"{client.consumers.reclaim(queue, consumer, older_than)} reclaimed")


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("consumer")
def share(dsn: str, queue: str, consumer: str) -> None:
    """Turn a consumer that reads on its own into a pool of workers."""
    with connect(dsn) as client:
        new = client.consumers.share(queue, consumer)
    echo(f"workers share consumer {consumer} of queue {queue} " + ("now" if new else "already"))


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("consumer")
@click.argument("limit", metavar="LIMIT|none")
def key_concurrency(dsn: str, queue: str, consumer: str, limit: str) -> None:
    """Set how many messages of one key all workers of a consumer may have at a time.

    With 1, the messages of a key are delivered in order. "none" removes the limit.
    """
    most = None if limit == "none" else click.IntRange(min=1)(limit)
    with connect(dsn) as client:
        new = client.consumers.set_key_concurrency(queue, consumer, most)
    echo(f"consumer {consumer} of queue {queue} has key_concurrency {limit} " + ("now" if new else "already"))


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("consumer")
def unshare(dsn: str, queue: str, consumer: str) -> None:
    """Turn a pool of workers into a consumer that reads on its own."""
    with connect(dsn) as client:
        new = client.consumers.unshare(queue, consumer)
    echo(f"consumer {consumer} of queue {queue} reads on its own " + ("now" if new else "already"))


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("consumer")
def retry_now(dsn: str, queue: str, consumer: str) -> None:
    """Make the messages of a consumer in state retry due now."""
    with connect(dsn) as client:
        echo(f"{client.consumers.retry_now(queue, consumer)} due now")


# -- messages that failed ------------------------------------------------------------------


@click.group()
def poison() -> None:
    """List or archive messages that may kill their workers."""


@poison.command("list")
@dsn_option
@json_option
@limit_option
@click.argument("queue")
def poison_list(dsn: str, as_json: bool, limit: int, queue: str) -> None:
    """List messages that were delivered more than once without an outcome, or were given up for that."""
    with connect(dsn) as client:
        rows = client.dlq.list_poison(queue, limit)
    shown = ("msg_id", "dl_id", "status", "receive_count", "consumer_name", "last_error")
    print_rows(f"Poison messages of {queue}", rows, as_json, shown)


@poison.command("archive")
@dsn_option
@click.argument("queue")
def poison_archive(dsn: str, queue: str) -> None:
    """Move dead letters that may have killed their workers to the archive."""
    with connect(dsn) as client:
        echo(f"{client.dlq.archive_poison(queue)} archived")


@click.group()
def dlq() -> None:
    """List, requeue, replay or delete dead letters."""


@dlq.command("list")
@dsn_option
@json_option
@limit_option
@click.argument("queue")
def dlq_list(dsn: str, as_json: bool, queue: str, limit: int) -> None:
    """List the dead letters of a queue."""
    with connect(dsn) as client:
        rows = client.dlq.inspect(queue, limit)
    shown = ("ev_id", "dl_id", "dl_reason", "consumer_name", "dl_time", "ev_type", "ev_data", "receive_count")
    print_rows(f"Dead letters of {queue}", rows, as_json, shown)


@dlq.command("requeue")
@dsn_option
@click.argument(
    "ids", nargs=-1, metavar="[DL_ID]...",
    callback=parsed_ids("ids of dead letters, which pgque dlq list QUEUE shows, or --all QUEUE"),
)  # fmt: skip
@click.option("--all", "queue", metavar="QUEUE", help="All dead letters of this queue.")
def dlq_requeue(dsn: str, ids: Sequence[int], queue: str | None) -> None:
    """Requeue dead letters to the consumer that failed them, all or none."""
    if bool(ids) == (queue is not None):
        raise click.UsageError("Give ids of dead letters, which pgque dlq list QUEUE shows, or --all QUEUE.")
    with connect(dsn) as client:
        if queue is not None:
            count = client.dlq.requeue_all(queue)
        else:
            count = len([client.dlq.requeue(dl_id) for dl_id in ids])
    echo(f"{count} requeued")


@dlq.command("replay")
@dsn_option
@click.argument(
    "ids", nargs=-1, metavar="DL_ID...", required=True,
    callback=parsed_ids("ids of dead letters, which pgque dlq list QUEUE shows"),
)  # fmt: skip
def dlq_replay(dsn: str, ids: Sequence[int]) -> None:
    """Send dead letters again, to every consumer, and print the new ids."""
    with connect(dsn) as client:
        sent = [client.dlq.replay(dl_id) for dl_id in ids]
    for msg_id in sent:
        echo(msg_id)


@dlq.command("purge")
@dsn_option
@click.argument("queue")
@length_option("--older-than", "Only those that are older.", default="30d")
def dlq_purge(dsn: str, queue: str, older_than: timedelta) -> None:
    """Delete the dead letters of a queue that are older than AGE."""
    with connect(dsn) as client:
        count = client.dlq.purge(queue, older_than)
    echo(f"{count} deleted")


# -- archive ------------------------------------------------------------------


@click.group()
def archive() -> None:
    """List, replay or delete archived messages."""


@archive.command("list")
@dsn_option
@json_option
@limit_option
@click.argument("queue")
@click.option("--since", type=click.DateTime(), help="Only those archived since then.")
def archive_list(dsn: str, as_json: bool, limit: int, queue: str, since: datetime | None) -> None:
    """List archived messages of a queue."""
    with connect(dsn) as client:
        rows = client.archived.list(queue, limit, since)
    shown = ("msg_id", "archive_id", "outcome", "consumer_name", "archived_at", "type", "receive_count")
    print_rows(f"Archive of {queue}", rows, as_json, (*shown, "worker"))


@archive.command("replay")
@dsn_option
@click.argument(
    "ids", nargs=-1, metavar="ARCHIVE_ID...", required=True,
    callback=parsed_ids("ids of the archive, which pgque archive list QUEUE shows"),
)  # fmt: skip
def archive_replay(dsn: str, ids: Sequence[int]) -> None:
    """Send archived messages again, all or none, and print the new ids."""
    with connect(dsn) as client:
        sent = [client.archived.replay(archive_id) for archive_id in ids]
    for msg_id in sent:
        echo(msg_id)


@archive.command("purge")
@dsn_option
@click.argument("queue")
@length_option("--older-than", "Only days that ended longer ago.", default="30d")
def archive_purge(dsn: str, queue: str, older_than: timedelta) -> None:
    """Delete old days of the archive of a queue."""
    with connect(dsn) as client:
        count = client.archived.purge(queue, datetime.now(timezone.utc) - older_than)
    echo(f"{count} days dropped")


# -- consumers ----------------------------------------------------------------


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("consumer")
@click.option("--at", type=click.DateTime(), help="To this time, in local time.")
@length_option("--ago", "To the time this long ago.")
def seek(dsn: str, queue: str, consumer: str, at: datetime | None, ago: timedelta | None) -> None:
    """Move a consumer back or forward to a time: it receives again what was sent later."""
    if (at is None) == (ago is None):
        raise click.UsageError("give either --at or --ago")
    with connect(dsn) as client:
        tick = client.consumers.seek_to_time(
            queue, consumer, at or datetime.now(timezone.utc) - (ago or timedelta())
        )
    echo(f"consumer {consumer} of queue {queue} continues after tick {tick}")


COMMANDS: list[click.Command] = [
    archive,
    cancel,
    config,
    delete_expired,
    dlq,
    drop,
    expire,
    key_concurrency,
    message,
    messages,
    pause,
    poison,
    purge,
    reclaim,
    retry_now,
    rename,
    grant,
    revoke,
    resume,
    schedule,
    seek,
    share,
    unshare,
    workers,
]
