"""Every error that litebroker raises on purpose.

    LitebrokerError
    ├── StorageError                 the file, or the database in it
    │   ├── DatabaseBusyError        another writer held it for longer than the busy timeout
    │   ├── DatabaseFullError        no space left
    │   ├── DatabaseReadOnlyError    no right to write
    │   ├── DatabaseCorruptError     SQLite says that the file is damaged
    │   ├── DatabaseUnavailableError it cannot be opened, read or written
    │   ├── ForeignDatabaseError     the file belongs to some other application
    │   ├── SchemaError              its litebroker tables are not as this version expects
    │   │   └── SchemaTooNewError    a newer litebroker wrote it
    │   └── StorageClosedError       used after close()
    ├── PayloadError                 what was given cannot be stored exactly
    │   └── PayloadTooLargeError
    ├── ResultError                  there is no result, nor will there be
    │   ├── JobFailedError           the job failed for good
    │   │   └── JobLapsedError       its worker vanished, each time
    │   ├── JobCancelledError
    │   ├── JobRemovedError
    │   ├── ResultExpiredError
    │   ├── ResultNotKeptError       keeping it was not asked for
    │   ├── ResultRefusedError       the job is done, but what it returned could not be kept
    │   └── ResultTimeoutError       not yet: also a TimeoutError
    ├── LeaseLostError               the lease ended before the job was settled
    ├── CancelledTooLateError        the caller was cancelled when the operation had happened
    ├── ChildError                   what a handler raised in a child process
    ├── TimeLimitError               a handler took too long, and its process was ended
    ├── ProcessDiedError             the child process that ran a handler died
    ├── ProcessStartError            a child process cannot run the handler
    ├── NotInstalledError            a framework is needed for this, and is not installed
    ├── UnknownQueueError            no job was ever in a queue of this name
    ├── GroupConflictError           a group's concurrency differs from the one it was made with
    ├── ScheduleError                a schedule that can never fire, or a time zone that does not exist
    └── TransferError                a line cannot be imported, or a job not be exported

Wrong arguments otherwise are ``ValueError`` or ``TypeError`` with the value in the message. Losing a
race is no error: ``claim`` returns ``[]``, and settling a lost lease answers False.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copyreg import __newobj__ as new_object  # type: ignore[attr-defined]
from functools import partial
from typing import Any


class LitebrokerError(Exception):
    """The base of all of them. They can be pickled, as between processes, and come out with their attributes."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        # Exception's own way calls the class with the message, which is not what all of them are made of.
        return new_object, (type(self), *self.args), self.__dict__


class StorageError(LitebrokerError):
    """The database could not do what was asked. Nothing of the operation was stored.

    With one exception, which its message names: a disk that did not confirm what was committed. It may be lost.

    Attributes:
        path: The database file, or None for one in memory.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class DatabaseBusyError(StorageError):
    """Another process or connection held the file for longer than the busy timeout. Try again.

    Look for a transaction that was left open on the file, or for a stopped (SIGSTOP) process.
    """


class DatabaseFullError(StorageError):
    """The disk is full. Nothing is lost: make room, and the same call succeeds."""


class DatabaseReadOnlyError(StorageError):
    """The file, its folder or its file system may not be written by this process."""


class DatabaseCorruptError(StorageError):
    """SQLite found the file damaged. It is left as it is: restore a backup, or salvage with `.recover`."""


class DatabaseUnavailableError(StorageError):
    """The file cannot be opened, read or written: the message says which, and what to do."""


class ForeignDatabaseError(StorageError):
    """The file holds some other application's tables, and sharing it was not asked for."""


class SchemaError(StorageError):
    """The litebroker tables in the file are not those that this version made."""


class SchemaTooNewError(SchemaError):
    """A newer litebroker migrated the file. Upgrade this one; the file was not touched."""


class StorageClosedError(StorageError):
    """The storage was used after ``close()``."""


class PayloadError(LitebrokerError, ValueError):
    """The payload would not come back as it was given. Nothing was stored.

    Attributes:
        where: The path to the value that was refused, such as ``$.user.tags[3]``.
    """

    def __init__(self, message: str, *, where: str = "$") -> None:
        super().__init__(message)
        self.where = where


class PayloadTooLargeError(PayloadError):
    """The encoded payload is over the limit. Store it elsewhere and add a reference to it.

    Attributes:
        size: Its size in bytes.
        limit: The limit in bytes.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the payload takes {size:,} bytes, over the limit of {limit:,}: store it elsewhere and add a"
            " reference to it, or raise max_payload_bytes"
        )
        self.size = size
        self.limit = limit


class ResultError(LitebrokerError):
    """A job has no result to give.

    Attributes:
        job_id: The job's id.
    """

    def __init__(self, message: str, *, job_id: int) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobFailedError(ResultError):
    """The job failed for good: with its last attempt, or because nobody was to try again.

    Its cause (``__cause__``) shows the traceback of the worker.

    Attributes:
        reason: "handler" (it raised), "parse" (its payload could not be read), "lapsed" (its worker vanished),
            "rejected" (given up on purpose), or another that `JobError` names.
        type: The exception's class name, or "".
        message: What it said, bounded.
        stack: Its traceback as text, bounded, or "".
        causes: Its chain of causes, nearest first: each ``Type: message``.
    """

    def __init__(
        self, text: str, *, job_id: int, reason: str, type_name: str, message: str, stack: str, causes: Sequence[str]
    ) -> None:
        super().__init__(text, job_id=job_id)
        self.reason = reason
        self.type = type_name
        self.message = message
        self.stack = stack
        self.causes = tuple(causes)


class JobLapsedError(JobFailedError):
    """The job's workers vanished, or stalled for longer than its lease, until no attempt was left. It may have run."""


class JobCancelledError(ResultError):
    """The job was cancelled before it ran."""


class JobRemovedError(ResultError):
    """The job is gone, and left no result: it was removed."""


class ResultExpiredError(ResultError):
    """The job is over, and its result has expired. Keep results for longer, or ask sooner."""


class ResultNotKeptError(ResultError, ValueError):
    """The job keeps no result: ask for it as it is added, by ``Queue(..., results=3600)`` or ``keep_result=3600``."""


class ResultRefusedError(ResultError):
    """The job is done, but what its handler returned could not be kept: the message says why."""


class ResultTimeoutError(ResultError, TimeoutError):
    """The job has not ended in the time that was given. It goes on: ask again."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        # An OSError, which TimeoutError is, takes its arguments as it is initialized, and not as it is made.
        return partial(type(self), job_id=self.job_id), self.args, {}


class LeaseLostError(LitebrokerError):
    """The lease ended before the job was settled: another worker has the job, or had it.

    No call raises it, since losing a race is no error; `on_error` is told of it.
    """


class ChildError(LitebrokerError):
    """What a handler raised in a child process; `on_error` is told of it. Its text begins with the type.

    Attributes:
        type: The exception's class name.
        message: Its own text.
        stack: Its traceback, as text. Logs show it.
        causes: The chain of causes, nearest first, each ``Type: message``.
    """

    def __init__(self, type: str, message: str, stack: str = "", causes: Sequence[str] = ()) -> None:  # noqa: A002 (as in `JobError`)
        super().__init__(f"{type}: {message}" if message else type)
        self.type = type
        self.message = message
        self.stack = stack
        self.causes = causes
        self.__cause__ = RemoteTraceback(stack)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        return type(self), (self.type, self.message, self.stack, self.causes), {}


class TimeLimitError(LitebrokerError):
    """A handler took longer than its time limit, and its child process was ended; `on_error` is told of it.

    Attributes:
        limit: The limit in seconds.
        stack: Where the handler stood, most recent call first, or "".
    """

    def __init__(self, limit: float, *, stack: str = "") -> None:
        super().__init__(f"the handler took longer than {limit:g} s, and its process was ended")
        self.limit = limit
        self.stack = stack


class ProcessDiedError(LitebrokerError):
    """The child process that ran a handler died; `on_error` is told of it.

    Attributes:
        status: Its exit status; negative is the signal that killed it.
        stack: Where the handler stood, most recent call first, where Python could still say so, or "".
        began: Whether it may have begun with the job. If not, the job is given back, its attempt not counted.
    """

    def __init__(self, message: str, *, status: int, stack: str = "", began: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.stack = stack
        self.began = began


class ProcessStartError(LitebrokerError):
    """A child process cannot run the handler: it cannot import it, or died of that. The message says which.

    Attributes:
        stack: The traceback in the child process, as text, or "". Logs show it.
    """

    def __init__(self, message: str, *, stack: str = "") -> None:
        super().__init__(message)
        self.stack = stack
        self.__cause__ = RemoteTraceback(stack) if stack else None


class RemoteTraceback(Exception):  # noqa: N818 (it is no error, but how one looks)
    """As the cause of an error, it shows the traceback, a text, that the error had in another process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}\n"""'


class CancelledTooLateError(LitebrokerError):
    """The caller of an operation of asyncio was cancelled, but it had happened. The cause of the ``CancelledError``.

    Attributes:
        result: What the operation would have answered.
    """

    def __init__(self, result: Any) -> None:
        super().__init__("what was asked for has happened all the same")
        self.result = result

    @classmethod
    def of(cls, error: BaseException | None) -> CancelledTooLateError | None:
        """The one behind a ``CancelledError``, or behind a timeout; None where nothing has happened."""
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            if isinstance(error, cls):
                return error
            seen.add(id(error))
            error = error.__cause__ or error.__context__
        return None


class GroupConflictError(LitebrokerError, ValueError):
    """The group exists with another concurrency. The first job of a group fixes it for good.

    Attributes:
        group: The group's id.
        concurrency: What it was made with.
    """

    def __init__(self, group: str, *, asked: int, concurrency: int) -> None:
        super().__init__(f"group {group!r} has concurrency {concurrency}, not {asked}: use that, or another group")
        self.group = group
        self.concurrency = concurrency


class NotInstalledError(LitebrokerError):
    """A framework's jobs are changed by its own rules, and it is not installed. The message says what to install."""


class UnknownQueueError(LitebrokerError, ValueError):
    """No job was ever in a queue of this name. The message names those that there are."""


class ScheduleError(LitebrokerError, ValueError):
    """A schedule that can never fire, is not understood, or names a time zone that does not exist."""


class TransferError(LitebrokerError, ValueError):
    """A line cannot be imported, or a job not be exported. The message says what is done so far, and how to go on.

    Attributes:
        line: The line's number, from 1; 0 for an export.
    """

    def __init__(self, message: str, *, line: int = 0) -> None:
        super().__init__(message)
        self.line = line
