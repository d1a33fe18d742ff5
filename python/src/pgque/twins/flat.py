# Generated from client/flat.py by tools/make_sync.py: edit that file and run the script again.
"""Names of the client's methods from before 0.10.0, when it had no groups."""

from __future__ import annotations

from .admin import Admin
from .archived import Archived
from .consumers import Consumers
from .dlq import Dlq
from .messages import Messages
from .monitor import Monitor
from .pgq import Pgq
from .recurring import Recurring
from ..client.renamed import Renamed


class Flat:
    """Give methods of the groups their earlier names; each use is a DeprecationWarning."""

    dlq_inspect = Renamed("dlq", Dlq.inspect)
    dlq_reasons = Renamed("dlq", Dlq.reasons)
    dlq_delete = Renamed("dlq", Dlq.delete)
    dlq_requeue = Renamed("dlq", Dlq.requeue)
    dlq_requeue_all = Renamed("dlq", Dlq.requeue_all)
    dlq_replay = Renamed("dlq", Dlq.replay)
    dlq_replay_all = Renamed("dlq", Dlq.replay_all)
    dlq_purge = Renamed("dlq", Dlq.purge)
    delete_expired = Renamed("dlq", Dlq.delete_expired)
    list_poison = Renamed("dlq", Dlq.list_poison)
    archive_poison = Renamed("dlq", Dlq.archive_poison)
    archive_list = Renamed("archived", Archived.list)
    archive_replay = Renamed("archived", Archived.replay)
    archive_purge = Renamed("archived", Archived.purge)
    create_recurring = Renamed("recurring", Recurring.create)
    drop_recurring = Renamed("recurring", Recurring.drop)
    pause_recurring = Renamed("recurring", Recurring.pause)
    resume_recurring = Renamed("recurring", Recurring.resume)
    run_recurring = Renamed("recurring", Recurring.run)
    list_recurring = Renamed("recurring", Recurring.list)
    list_messages = Renamed("messages", Messages.list)
    get_message = Renamed("messages", Messages.get)
    message_status = Renamed("messages", Messages.status)
    purge_key = Renamed("messages", Messages.purge_key)
    get_consumer_info = Renamed("consumers", Consumers.get_info)
    consumer_lags = Renamed("consumers", Consumers.lags)
    list_workers = Renamed("consumers", Consumers.list_workers)
    reclaim = Renamed("consumers", Consumers.reclaim)
    seek_to_time = Renamed("consumers", Consumers.seek_to_time)
    share_consumer = Renamed("consumers", Consumers.share)
    unshare_consumer = Renamed("consumers", Consumers.unshare)
    set_key_concurrency = Renamed("consumers", Consumers.set_key_concurrency)
    retry_now = Renamed("consumers", Consumers.retry_now)
    status = Renamed("monitor", Monitor.status)
    metrics = Renamed("monitor", Monitor.metrics)
    health = Renamed("monitor", Monitor.health)
    queue_rates = Renamed("monitor", Monitor.queue_rates)
    get_queue_info = Renamed("monitor", Monitor.get_queue_info)
    list_actions = Renamed("monitor", Monitor.list_actions)
    version = Renamed("monitor", Monitor.version)
    create_queue = Renamed("admin", Admin.create_queue)
    alter_queue = Renamed("admin", Admin.alter_queue)
    rename_queue = Renamed("admin", Admin.rename_queue)
    drop_queue = Renamed("admin", Admin.drop_queue)
    queue_settings = Renamed("admin", Admin.queue_settings)
    queue_config = Renamed("admin", Admin.queue_config)
    set_queue_config = Renamed("admin", Admin.set_queue_config)
    set_default_config = Renamed("admin", Admin.set_default_config)
    pause = Renamed("admin", Admin.pause)
    resume = Renamed("admin", Admin.resume)
    purge = Renamed("admin", Admin.purge)
    grant_queue = Renamed("admin", Admin.grant_queue)
    revoke_queue = Renamed("admin", Admin.revoke_queue)
    my_rights = Renamed("admin", Admin.my_rights)
    maint = Renamed("admin", Admin.maint)
    expire_messages = Renamed("admin", Admin.expire_messages)
    set_schedule = Renamed("admin", Admin.set_schedule)
    set_history = Renamed("admin", Admin.set_history)
    start = Renamed("admin", Admin.start)
    stop = Renamed("admin", Admin.stop)
    next_batch = Renamed("pgq", Pgq.next_batch)
    finish_batch = Renamed("pgq", Pgq.finish_batch)
    get_batch_events = Renamed("pgq", Pgq.get_batch_events)
    get_batch_info = Renamed("pgq", Pgq.get_batch_info)
    event_retry = Renamed("pgq", Pgq.event_retry)
    batch_retry = Renamed("pgq", Pgq.batch_retry)
    # Names of 0.6
    queue_info = Renamed("monitor", Monitor.get_queue_info)
    consumer_info = Renamed("consumers", Consumers.get_info)
