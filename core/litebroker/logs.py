"""Log lines that name their job, for `logging` as it is; and as JSON.

The lines of litebroker itself, of the logger "litebroker", have the attributes ``queue``, ``job_id``, ``attempt`` and
``task`` where they are about a job.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

from litebroker.failures import job_error
from litebroker.observers import current_job

__all__ = ["JSONFormatter", "JobFilter", "log_to_stderr"]

_TEXT = "%(asctime)s %(levelname)-7s [%(process)d] %(message)s"
_FIELDS = ("queue", "job_id", "attempt", "task")
# What every record has: anything else was given by ``extra=``.
_ORDINARY = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", *_FIELDS}


def log_to_stderr(level: str, *, as_json: bool = False) -> None:
    """Log as ``litebroker worker`` and its child processes do, unless logging is configured already."""
    logging.raiseExceptions = False  # Nobody reads the log any more: that is no reason to write more of it.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if as_json else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JobFilter(logging.Filter):
    """Gives every record the attributes ``queue``, ``job_id``, ``attempt`` and ``task`` of the job that is being run.

    Add it to a handler: ``handler.addFilter(JobFilter())``. It lets all records pass, and leaves alone those that have
    the attributes, as litebroker's own do. One that is added to a logger does not see the records of its children.

    Args:
        default: What the attributes are where no job runs; "-", say, for a format of text.
    """

    def __init__(self, default: object = None) -> None:
        super().__init__()
        self._default = default

    def filter(self, record: logging.LogRecord) -> bool:
        found = _job_of(record)
        for name in _FIELDS:
            value = found.get(name)
            setattr(record, name, self._default if value is None else value)
        return True


class JSONFormatter(logging.Formatter):
    """One line of JSON for each record, in ASCII.

    ``time`` (UTC), ``level``, ``logger``, ``message``, ``pid``, ``thread``; ``queue``, ``job_id``, ``attempt`` and
    ``task`` where there is a job; ``error`` with ``type``, ``message`` and ``stack`` where there is an exception; and
    whatever was given by ``extra=``. The job's id is a string, since many readers of JSON round numbers of 64 bits.
    """

    def __init__(self) -> None:
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            "thread": record.threadName,
        }
        job = {name: value for name, value in _job_of(record).items() if value is not None}
        if "job_id" in job:
            job["job_id"] = str(job["job_id"])
        line.update(job)
        if record.exc_info and record.exc_info[1] is not None:
            error = job_error(record.exc_info[1])
            line["error"] = {"type": error.type, "message": error.message, "stack": error.stack}
        if record.stack_info:
            line["stack"] = record.stack_info
        for name, value in vars(record).items():
            if name not in _ORDINARY:
                line.setdefault(name, value)
        return json.dumps(line, default=_text, skipkeys=True)


def _job_of(record: logging.LogRecord) -> dict[str, object]:
    """What the record says itself; else the job that is being run."""
    found = {name: value for name, value in vars(record).items() if name in _FIELDS}
    if "job_id" in found:
        return found
    job = current_job()
    if job is None:
        return found
    return {"queue": job.queue, "job_id": job.id, "attempt": job.attempts, "task": job.task, **found}


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 (a user's class may raise anything)
        return f"<its str() raised {type(error).__qualname__}>"
