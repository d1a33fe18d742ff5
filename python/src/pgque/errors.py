"""Errors, one class per SQLSTATE.

Every error that a call can raise is a `PgqueError`, chained from the psycopg error it stands for. The class
is chosen from the SQLSTATE alone, never from the text of a message.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psycopg


class PgqueError(Exception):
    """Report that a pgque call failed. Its text is the message and, on a second line, the hint.

    Attributes:
        sqlstate: the five-character code, or None if the server never answered.
        hint: what to do, as the server reported it, or None.
        queue: the queue named in the call, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        sqlstate: str | None = None,
        hint: str | None = None,
        queue: str | None = None,
    ) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.hint = hint
        self.queue = queue

    def __str__(self) -> str:
        """Return the message, and the hint where the message does not say it."""
        message = super().__str__()
        return message if self.hint is None or self.hint in message else f"{message}\nhint: {self.hint}"


class PgqueConnectionError(PgqueError):
    """Report that the server cannot be reached, or that the connection was lost."""


class PgqueVersionError(PgqueError):
    """Report that the SQL in the database and this package do not fit.

    Run `pgque install` if the database is older or has no pgque; install a newer package if it is newer.
    Connected processes go on until they connect again.
    """


class PgqueQueueNotFoundError(PgqueError):
    """Report that there is no queue of this name (PQ001)."""


class PgqueQueueExistsError(PgqueError):
    """Report that a queue of this name exists (PQ002)."""


class PgqueQueueFullError(PgqueError):
    """Report that the queue has reached a limit, such as `max_depth` (PQ003)."""


class PgqueInvalidNameError(PgqueError):
    """Report that a name is reserved, empty or too long: 57 bytes for a queue (PQ004)."""


class PgqueBadArgumentError(PgqueError, ValueError):
    """Report that an argument is out of range or unknown (PQ005)."""


class PgquePayloadError(PgqueBadArgumentError):
    """Report that a payload cannot be sent or read.

    Before it is sent: it has a character that the database cannot store, such as NUL or half of a surrogate
    pair (22021, 22P05), also in another text of the call; or it is nested too deeply. After it was received:
    it does not fit the type that the program asked for, or cannot be decoded.

    A worker or consumer dead-letters the message whose handler raises it, unless `bad_payload="retry"`. In a
    loop over `WorkQueue.messages` the program decides: `message.dead(str(error))`.
    """


class PgqueQueueInUseError(PgqueError):
    """Report that a queue or a consumer is in use: by consumers, workers or another session (PQ006)."""


class PgqueMessageNotInBatchError(PgqueError):
    """Report that the message does not belong to the batch (PQ007)."""


class PgqueNotDeadLetterError(PgqueError):
    """Report that there is no dead letter of this id (PQ008)."""


class PgqueKeyConflictError(PgqueError):
    """Report that the key is taken (PQ009)."""


class PgqueMessageNotFoundError(PgqueError):
    """Report that there is no message of this id, or no recurring message of this name (PQ010)."""


class PgqueConsumerNotFoundError(PgqueError):
    """Report that the consumer is not subscribed to the queue (PQ011)."""


class PgqueBatchNotFoundError(PgqueError):
    """Report that the batch is not open, or was delivered to another worker (PQ012)."""


class PgqueQueueDisabledError(PgqueError):
    """Report that the queue is paused or disabled (PQ013)."""


class PgqueNoSchedulerError(PgqueError):
    """Report that the server has no scheduler for the ticker: run `pgque ticker` (PQ014)."""


class PgqueTickNotFoundError(PgqueError):
    """Report that the queue has no such tick, or no longer (PQ015)."""


class PgqueSinkEpochError(PgqueError):
    """Report that a sink refuses an epoch: it is too old, incomplete, or has other parts (PQ016)."""


class PgquePermissionDeniedError(PgqueError):
    """Report that the role lacks the right to the queue, or to all queues (42501)."""


# The names before 0.10.0, which go on working
PgqueBadArgument = PgqueBadArgumentError
PgqueBatchNotFound = PgqueBatchNotFoundError
PgqueConsumerNotFound = PgqueConsumerNotFoundError
PgqueInvalidName = PgqueInvalidNameError
PgqueKeyConflict = PgqueKeyConflictError
PgqueMessageNotFound = PgqueMessageNotFoundError
PgqueMessageNotInBatch = PgqueMessageNotInBatchError
PgqueNoScheduler = PgqueNoSchedulerError
PgqueNotDeadLetter = PgqueNotDeadLetterError
PgquePermissionDenied = PgquePermissionDeniedError
PgqueQueueDisabled = PgqueQueueDisabledError
PgqueQueueExists = PgqueQueueExistsError
PgqueQueueFull = PgqueQueueFullError
PgqueQueueInUse = PgqueQueueInUseError
PgqueQueueNotFound = PgqueQueueNotFoundError
PgqueTickNotFound = PgqueTickNotFoundError

BY_SQLSTATE: dict[str, type[PgqueError]] = {
    "PQ001": PgqueQueueNotFoundError,
    "PQ002": PgqueQueueExistsError,
    "PQ003": PgqueQueueFullError,
    "PQ004": PgqueInvalidNameError,
    "PQ005": PgqueBadArgumentError,
    "PQ006": PgqueQueueInUseError,
    "PQ007": PgqueMessageNotInBatchError,
    "PQ008": PgqueNotDeadLetterError,
    "PQ009": PgqueKeyConflictError,
    "PQ010": PgqueMessageNotFoundError,
    "PQ011": PgqueConsumerNotFoundError,
    "PQ012": PgqueBatchNotFoundError,
    "PQ013": PgqueQueueDisabledError,
    "PQ014": PgqueNoSchedulerError,
    "PQ015": PgqueTickNotFoundError,
    "PQ016": PgqueSinkEpochError,
    "42501": PgquePermissionDeniedError,
    # A character that no text has, or that the encoding of the database lacks.
    "22021": PgquePayloadError,
    "22P05": PgquePayloadError,
}

# Lost or refused connections: class 08, a server that is going down or starting, too many connections.
_CONNECTION_STATES = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "53300"})

# A function, a column or the schema that a call names is not there. From inside a function, where somebody's
# own SQL may run, an error has a context.
_MISSING_STATES = frozenset({"42883", "42703", "3F000"})
_MISSING_RIGHT = "42501"
_GRANT_ROLE = (
    "Grant the role what the call needs, for example: grant pgque_writer to …; pgque_writer is for sends,"
    " pgque_reader for consumers and figures, pgque_admin for the ticker and to change queues."
    " For one queue: select pgque.grant_queue(queue, role, 'consume');"
)
_READ_ONLY = "25006"
_PRIMARY = (
    "The server is a standby, or the transaction is read only. Connect to the primary, for example with"
    " host=a,b target_session_attrs=read-write."
)
_INSTALL = "The database has no pgque, or another version than this package: pgque install --dsn …"


def _is_connection_loss(state: str) -> bool:
    return state.startswith("08") or state in _CONNECTION_STATES


# A prepared statement is missing, is there already, or is another client's that takes other parameters: a
# pooler gives each transaction another session.
_POOLER_STATES = frozenset({"26000", "42P05", "08P01"})
_POOLER = (
    "A pooler in transaction mode keeps no prepared statements. Prepare none: with psycopg"
    " prepare_threshold=None, with asyncpg statement_cache_size=0; or connect directly. See"
    " python/docs/poolers.md."
)
_behind_pooler = threading.Event()


def prepare_threshold() -> int | None:
    """Return after how many runs psycopg prepares a statement on a direct connection: never, once one was not
    kept, since some pooler must then show the process id of the server as its own."""
    return None if _behind_pooler.is_set() else 5


def pooler_error(error: BaseException | None) -> psycopg.Error | None:
    """Return the error of a prepared statement that was not kept, if this is one or was raised from one."""
    import psycopg

    while error is not None:
        if isinstance(error, psycopg.Error) and _is_not_kept(error):
            return error
        error = error.__cause__
    return None


def _is_not_kept(error: psycopg.Error) -> bool:
    return error.sqlstate in _POOLER_STATES and not _is_fatal(error.diag)


def from_psycopg(error: psycopg.Error, queue: str | None = None) -> PgqueError:
    """Return the error of this package for a psycopg error, ready to be raised `from` it."""
    # Here, so that Spark's processes which open no connection do without psycopg
    import psycopg

    from .client.limit import NoAnswerError

    diag = error.diag
    if isinstance(error, psycopg.DataError) and error.sqlstate is None:
        return from_value(error, queue)  # before it was sent
    return from_fields(
        diag.message_primary or str(error).strip() or type(error).__name__,
        sqlstate=error.sqlstate,
        hint=error.hint if isinstance(error, NoAnswerError) else diag.message_hint,
        context=diag.context,
        is_lost=isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
        and not isinstance(error, psycopg.errors.PipelineAborted),
        is_fatal=_is_fatal(diag),
        queue=queue,
    )


def _is_fatal(diag: psycopg.errors.Diagnostic) -> bool:
    """Return whether an error ended the session. PgBouncer's own errors do, all of which are 08P01."""
    return (diag.severity_nonlocalized or diag.severity) in ("FATAL", "PANIC")


def from_fields(
    message: str,
    *,
    sqlstate: str | None,
    hint: str | None = None,
    context: str | None = None,
    is_lost: bool = False,
    is_fatal: bool = False,
    queue: str | None = None,
) -> PgqueError:
    """Return the error of this package for what a server or a driver reported. `is_lost` is what the driver's
    class of the error says, and counts where there is no SQLSTATE. An error that `is_fatal` ended the
    session."""
    known = BY_SQLSTATE.get(sqlstate or "")
    if sqlstate in _POOLER_STATES and not is_fatal:
        _behind_pooler.set()
        hint = hint or _POOLER
    if sqlstate in _MISSING_STATES and context is None:
        known, hint = PgqueVersionError, _INSTALL
    elif sqlstate == _MISSING_RIGHT and hint is None and context is None:
        hint = _GRANT_ROLE  # the server's own refusal, of the schema or a function
    elif sqlstate == _READ_ONLY:
        hint = hint or _PRIMARY
    elif known is PgquePayloadError:
        hint = hint or _SEND_BYTES
    if known is None:
        lost = is_lost if sqlstate is None else _is_connection_loss(sqlstate)
        known = PgqueConnectionError if lost else PgqueError
    return known(message, sqlstate=sqlstate, hint=hint, queue=queue)


_NUL = "NUL"  # in the texts of psycopg and psycopg2
_SEND_BYTES = "Send the payload as bytes, or without this character."


def from_encoding(error: UnicodeEncodeError, queue: str | None = None) -> PgquePayloadError:
    """Return the error for a text that the encoding of a connection lacks."""
    return PgquePayloadError(
        f"a text has the character {error.object[error.start]!a}, which the encoding of the"
        f" connection lacks: {error.encoding}",
        hint=f"{_SEND_BYTES} Half of a surrogate pair is in no text.",
        queue=queue,
    )


def from_value(error: Exception, queue: str | None = None) -> PgqueBadArgumentError:
    """Return the error for a value that a driver did not send, such as a text with NUL."""
    if _NUL in str(error):
        return PgquePayloadError(f"a text has a NUL character: {error}", hint=_SEND_BYTES, queue=queue)
    return PgqueBadArgumentError(str(error), queue=queue)


_PERMANENT = (
    PgqueVersionError,
    PgqueQueueNotFoundError,
    PgqueConsumerNotFoundError,
    PgqueInvalidNameError,
    PgqueBadArgumentError,
    PgqueQueueInUseError,
)


_MAX_ERROR_TEXT = 2000  # characters of an error's text that are kept


def described(error: BaseException) -> str:
    """Return the class and the text of any error, also of one whose text cannot be had, for a reason."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}"[:_MAX_ERROR_TEXT]


def one_line(error: PgqueError) -> str:
    """Return the text of an error as one line, for a log."""
    return "; ".join(line for line in str(error).splitlines() if line)


def is_permanent(error: PgqueError) -> bool:
    """Return True if trying again cannot help: the code or the set-up must change first."""
    if isinstance(error, PgquePayloadError):
        return False  # of one message, which may be gone the next time
    if isinstance(error, _PERMANENT):
        return True
    if error.sqlstate in {"42883", "42P01", *_POOLER_STATES}:
        # An upgrade may have taken a function from under a running call, and a restore may not have created a
        # table yet. A program that connects again learns whether the versions fit, and
        # prepares nothing.
        return False
    # 25000: not READ COMMITTED; 28: authentication; 42: missing function, missing right, and the like; 3D: no
    # such database.
    return error.sqlstate == "25000" or (error.sqlstate or "")[:2] in {"28", "42", "3D"}
