"""Names of the client's methods from before 0.10.0, when it had no groups."""

from __future__ import annotations

from .admin import AsyncAdmin
from .archived import AsyncArchived
from .consumers import AsyncConsumers
from .dlq import AsyncDlq
from .messages import AsyncMessages
from .monitor import AsyncMonitor
from .pgq import AsyncPgq
from .recurring import AsyncRecurring
from .renamed import Renamed


class AsyncFlat:
    """Give methods of the groups their earlier names; each use is a DeprecationWarning."""

    dlq_inspect = Renamed("dlq", AsyncDlq.inspect)
    dlq_reasons = Renamed("dlq", AsyncDlq.reasons)
    dlq_delete = Renamed("dlq", AsyncDlq.delete)
    dlq_requeue = Renamed("dlq", AsyncDlq.requeue)
    dlq_requeue_all = Renamed("dlq", AsyncDlq.requeue_all)
    dlq_replay = Renamed("dlq", AsyncDlq.replay)
    dlq_replay_all = Renamed("dlq", AsyncDlq.replay_all)
    dlq_purge = Renamed("dlq", AsyncDlq.purge)
    delete_expired = Renamed("dlq", AsyncDlq.delete_expired)
    list_poison = Renamed("dlq", AsyncDlq.list_poison)
    archive_poison = Renamed("dlq", AsyncDlq.archive_poison)
    archive_list = Renamed("archived", AsyncArchived.list)
    archive_replay = Renamed("archived", AsyncArchived.replay)
    archive_purge = Renamed("archived", AsyncArchived.purge)
    create_recurring = Renamed("recurring", AsyncRecurring.create)
    drop_recurring = Renamed("recurring", AsyncRecurring.drop)
    pause_recurring = Renamed("recurring", AsyncRecurring.pause)
    resume_recurring = Renamed("recurring", AsyncRecurring.resume)
    run_recurring = Renamed("recurring", AsyncRecurring.run)
    list_recurring = Renamed("recurring", AsyncRecurring.list)
    list_messages = Renamed("messages", AsyncMessages.list)
    get_message = Renamed("messages", AsyncMessages.get)
    message_status = Renamed("messages", AsyncMessages.status)
    purge_key = Renamed("messages", AsyncMessages.purge_key)
    get_consumer_info = Renamed("consumers", AsyncConsumers.get_info)
    consumer_lags = Renamed("consumers", AsyncConsumers.lags)
    list_workers = Renamed("consumers", AsyncConsumers.list_workers)
    reclaim = Renamed("consumers", AsyncConsumers.reclaim)
    seek_to_time = Renamed("consumers", AsyncConsumers.seek_to_time)
    share_consumer = Renamed("consumers", AsyncConsumers.share)
    unshare_consumer = Renamed("consumers", AsyncConsumers.unshare)
    set_key_concurrency = Renamed("consumers", AsyncConsumers.set_key_concurrency)
    retry_now = Renamed("consumers", AsyncConsumers.retry_now)
    status = Renamed("monitor", AsyncMonitor.status)
    metrics = Renamed("monitor", AsyncMonitor.metrics)
    health = Renamed("monitor", AsyncMonitor.health)
    queue_rates = Renamed("monitor", AsyncMonitor.queue_rates)
    get_queue_info = Renamed("monitor", AsyncMonitor.get_queue_info)
    list_actions = Renamed("monitor", AsyncMonitor.list_actions)
    version = Renamed("monitor", AsyncMonitor.version)
    create_queue = Renamed("admin", AsyncAdmin.create_queue)
    alter_queue = Renamed("admin", AsyncAdmin.alter_queue)
    rename_queue = Renamed("admin", AsyncAdmin.rename_queue)
    drop_queue = Renamed("admin", AsyncAdmin.drop_queue)
    queue_settings = Renamed("admin", AsyncAdmin.queue_settings)
    queue_config = Renamed("admin", AsyncAdmin.queue_config)
    set_queue_config = Renamed("admin", AsyncAdmin.set_queue_config)
    set_default_config = Renamed("admin", AsyncAdmin.set_default_config)
    pause = Renamed("admin", AsyncAdmin.pause)
    resume = Renamed("admin", AsyncAdmin.resume)
    purge = Renamed("admin", AsyncAdmin.purge)
    grant_queue = Renamed("admin", AsyncAdmin.grant_queue)
    revoke_queue = Renamed("admin", AsyncAdmin.revoke_queue)
    my_rights = Renamed("admin", AsyncAdmin.my_rights)
    maint = Renamed("admin", AsyncAdmin.maint)
    expire_messages = Renamed("admin", AsyncAdmin.expire_messages)
    set_schedule = Renamed("admin", AsyncAdmin.set_schedule)
    set_history = Renamed("admin", AsyncAdmin.set_history)
    start = Renamed("admin", AsyncAdmin.start)
    stop = Renamed("admin", AsyncAdmin.stop)
    next_batch = Renamed("pgq", AsyncPgq.next_batch)
    finish_batch = Renamed("pgq", AsyncPgq.finish_batch)
    get_batch_events = Renamed("pgq", AsyncPgq.get_batch_events)
    get_batch_info = Renamed("pgq", AsyncPgq.get_batch_info)
    event_retry = Renamed("pgq", AsyncPgq.event_retry)
    batch_retry = Renamed("pgq", AsyncPgq.batch_retry)
    # Names of 0.6
    queue_info = Renamed("monitor", AsyncMonitor.get_queue_info)
    consumer_info = Renamed("consumers", AsyncConsumers.get_info)
