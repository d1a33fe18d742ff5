"""The titles of columns: the words of the page, for the tables of the commands and of `pgque top`."""

from __future__ import annotations

# By column of SQL, or by type and column where a word has two meanings. Times are in UTC.
TITLES = {
    "archive_id": "Archive id",
    "archived_at": "Archived (UTC)",
    "available_at": "Available, or lease expires (UTC)",
    "batch_id": "Batch",
    "consumer_name": "Consumer",
    "created_at": "Sent (UTC)",
    "cron": "Schedule",
    "current_batch": "Open batch",
    "dl_held": "Held",
    "dl_id": "Dead letter",
    "dl_reason": "Reason",
    "dl_time": "Given up (UTC)",
    "ends_at": "Ends (UTC)",
    "ev_bytes": "Payload in bytes",
    "ev_data": "Payload",
    "ev_extra1": "Extra 1",
    "ev_extra2": "Extra 2",
    "ev_extra3": "Extra 3",
    "ev_extra4": "Extra 4",
    "ev_headers": "Headers",
    "ev_id": "Message",
    "ev_key": "Key",
    "ev_new": "After the last tick",
    "ev_per_sec": "In, per second",
    "ev_retry": "Rejected",
    "ev_time": "Sent (UTC)",
    "ev_type": "Type",
    "expires_at": "Expires (UTC)",
    "lag": "Oldest pending",
    "last_msg_id": "Last message",
    "last_run": "Last run (UTC)",
    "last_seen": "Last seen",
    "last_tick": "Tick",
    "last_tick_id": "Tick",
    "lease_until": "Lease expires (UTC)",
    "msg_id": "Message",
    "next_run": "Next run (UTC)",
    "payload_bytes": "Payload in bytes",
    "pending_events": "Pending",
    "queue_cur_table": "Current table",
    "queue_external_ticker": "External ticker",
    "queue_max_retries": "Max retries",
    "queue_name": "Queue",
    "queue_ntables": "Tables",
    "queue_paused": "Paused",
    "queue_rotation_period": "Rotation period",
    "queue_switch_time": "Last rotation (UTC)",
    "queue_ticker_idle_period": "Ticker idle period",
    "queue_ticker_max_count": "Ticker max count",
    "queue_ticker_max_lag": "Ticker max lag",
    "queue_ticker_paused": "Ticker paused",
    "receive_count": "Deliveries",
    "registered_at": "Registered (UTC)",
    "retry_count": "Rejected",
    "role": "Kind",
    "sent_at": "Sent (UTC)",
    "skipped_events": "Missed",
    "starts_at": "Starts (UTC)",
    "status": "State",
    "ticker_lag": "Age of the last tick",
    "timezone": "Time zone",
    "type_name": "Type",
    "RecurringMessage.created_at": "Created (UTC)",
    "WorkerInfo.last_seen": "Last received (UTC)",
}

# The kinds of consumers, by their `role`
KINDS = {
    "normal": "reads on its own",
    "pool": "shared by workers",
    "coop_main": "with subconsumers",
    "coop_member": "subconsumer",
}


def title(column: str, of: str = "") -> str:
    """Return the title of a column; `of` is the name of the type that has it."""
    known = TITLES.get(f"{of}.{column}") or TITLES.get(column)
    return known or column.replace("_", " ").capitalize()


def word(column: str, value: object) -> object:
    """Return the word for a value of a column, or the value itself."""
    return KINDS.get(value, value) if column == "role" and isinstance(value, str) else value
