"""Jobs on one SQLite file: queues, workers and schedules, without a server.

>>> from litebroker import Queue
>>> queue = Queue("emails", "jobs.db")
>>> job = queue.add({"to": "a@example.com"}, delay=60)

Those who write an adapter or a tool find the storage beneath here too: `open_storage`, and the records that it
takes and gives.
"""

from __future__ import annotations

from litebroker.arguments import Group, NewJob, Retention, duration_ms
from litebroker.backoff import Backoff
from litebroker.clock import Clock, SystemClock
from litebroker.contexts import AsyncContext, Context
from litebroker.errors import (
    CancelledTooLateError,
    ChildError,
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    ForeignDatabaseError,
    GroupConflictError,
    JobCancelledError,
    JobFailedError,
    JobLapsedError,
    JobRemovedError,
    LeaseLostError,
    LitebrokerError,
    NotInstalledError,
    PayloadError,
    PayloadTooLargeError,
    ProcessDiedError,
    ProcessStartError,
    ResultError,
    ResultExpiredError,
    ResultNotKeptError,
    ResultRefusedError,
    ResultTimeoutError,
    ScheduleError,
    SchemaError,
    SchemaTooNewError,
    StorageClosedError,
    StorageError,
    TimeLimitError,
    TransferError,
    UnknownQueueError,
)
from litebroker.explanation import Explanation, Reason, why
from litebroker.failures import as_job_error, job_error
from litebroker.inspectors import Content, Inspector, JobRow, TooLate, json_content, late_names
from litebroker.jobs import (
    Added,
    Arrivals,
    Attempt,
    Counts,
    DedupeUntil,
    Holder,
    JobCopy,
    JobError,
    JobRecord,
    JobSpec,
    Keep,
    Lease,
    QueueInfo,
    Standing,
    State,
)
from litebroker.observers import Observer, current_job
from litebroker.queue import Job, Queue, Schedule
from litebroker.results import Progress
from litebroker.schedules import ScheduleSpec, next_tick, plan
from litebroker.serializer import JSON, RAW, Serializer
from litebroker.sqlite import Durability, Options, SQLiteStorage, open_storage
from litebroker.storage import Listener, ScheduleRecord, Storage, Value
from litebroker.terms import ErrorContext, log_error
from litebroker.worker import Worker

__all__ = [
    "JSON",
    "RAW",
    "Added",
    "Arrivals",
    "AsyncContext",
    "Attempt",
    "Backoff",
    "CancelledTooLateError",
    "ChildError",
    "Clock",
    "Content",
    "Context",
    "Counts",
    "DatabaseBusyError",
    "DatabaseCorruptError",
    "DatabaseFullError",
    "DatabaseReadOnlyError",
    "DatabaseUnavailableError",
    "DedupeUntil",
    "Durability",
    "ErrorContext",
    "Explanation",
    "ForeignDatabaseError",
    "Group",
    "GroupConflictError",
    "Holder",
    "Inspector",
    "Job",
    "JobCancelledError",
    "JobCopy",
    "JobError",
    "JobFailedError",
    "JobLapsedError",
    "JobRecord",
    "JobRemovedError",
    "JobRow",
    "JobSpec",
    "Keep",
    "Lease",
    "LeaseLostError",
    "Listener",
    "LitebrokerError",
    "NewJob",
    "NotInstalledError",
    "Observer",
    "Options",
    "PayloadError",
    "PayloadTooLargeError",
    "ProcessDiedError",
    "ProcessStartError",
    "Progress",
    "Queue",
    "QueueInfo",
    "Reason",
    "ResultError",
    "ResultExpiredError",
    "ResultNotKeptError",
    "ResultRefusedError",
    "ResultTimeoutError",
    "Retention",
    "SQLiteStorage",
    "Schedule",
    "ScheduleError",
    "ScheduleRecord",
    "ScheduleSpec",
    "SchemaError",
    "SchemaTooNewError",
    "Serializer",
    "Standing",
    "State",
    "Storage",
    "StorageClosedError",
    "StorageError",
    "SystemClock",
    "TimeLimitError",
    "TooLate",
    "TransferError",
    "UnknownQueueError",
    "Value",
    "Worker",
    "as_job_error",
    "current_job",
    "duration_ms",
    "job_error",
    "json_content",
    "late_names",
    "log_error",
    "next_tick",
    "open_storage",
    "plan",
    "why",
]
