"""What a test expects to find in a queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from litebroker.arguments import duration_ms, instant_ms, whole_number
from litebroker.jobs import State
from litebroker.queue import Job, Queue
from litebroker.testing.redirected import checked

_ANY: Any = object()
_SHOWN = 20
_LONGEST = 200


def assert_enqueued(
    queue: Queue[Any],
    data: Any = _ANY,
    *,
    count: int | None = None,
    task: str | None = _ANY,
    delay: float | timedelta | None = _ANY,
    run_at: datetime = _ANY,
    priority: int = _ANY,
    group: str | None = _ANY,
    dedupe_key: str | None = _ANY,
    ref: str | None = _ANY,
    headers: Mapping[str, str] = _ANY,
) -> list[Job[Any]]:
    """Fail, unless a pending job is as described; what is left out may be anything. Answers those that are.

    Args:
        data: What the payload equals; or a function that is given it, and tells whether it is the one.
        count: How many there have to be; None is at least one.
        delay: How long after it was added it is due; None, or 0, is at once.
        headers: Those that it has to have; it may have more.

    Raises:
        AssertionError: There is none, or not so many. The message lists what there is.
    """
    __tracebackhide__ = True
    checked(queue)
    wanted = _wanted(
        data=data,
        task=task,
        delay=delay,
        run_at=run_at,
        priority=priority,
        group=group,
        dedupe_key=dedupe_key,
        ref=ref,
        headers=headers,
    )
    if count is not None:
        whole_number("count", count, at_least=0)
    jobs = list(_pending(queue))
    found = [job for job in jobs if _fits(job, wanted)]
    if len(found) == count or (count is None and found):
        return found
    number = "no pending job" if not found else f"{len(found)} pending job{'s' * (len(found) > 1)}"
    asked = "" if count is None else f", not {count}"
    raise AssertionError(f"queue {queue.name!r} has {number}{_described(wanted)}{asked}; {_listing(queue, jobs)}")


def assert_not_enqueued(queue: Queue[Any], data: Any = _ANY, **description: Any) -> None:
    """Fail if a pending job is as described, or, without a description, if there is any. As `assert_enqueued`."""
    __tracebackhide__ = True
    assert_enqueued(queue, data, count=0, **description)


def _wanted(**description: Any) -> dict[str, Any]:
    wanted = {name: value for name, value in description.items() if value is not _ANY}
    if "delay" in wanted and "run_at" in wanted:
        raise ValueError("delay and run_at exclude each other: give one")
    if wanted.get("delay") is not None:
        duration_ms("delay", wanted["delay"])
    if "run_at" in wanted:
        instant_ms("run_at", wanted["run_at"])
    return wanted


def _pending(queue: Queue[Any]) -> Iterator[Job[Any]]:
    last: Job[Any] | None = None
    while page := queue.list(State.PENDING, limit=500, after=last):
        yield from page
        last = page[-1]


def _fits(job: Job[Any], wanted: Mapping[str, Any]) -> bool:
    for name, value in wanted.items():
        if name == "data":
            fits = bool(value(_data(job))) if callable(value) else _data(job) == value
        elif name == "delay":
            fits = _delay_ms(job) == (0 if value is None else duration_ms("delay", value))
        elif name == "run_at":
            fits = job.record.due_at_ms == instant_ms("run_at", value)
        elif name == "headers":
            fits = all(job.headers.get(key) == text for key, text in value.items())
        else:
            fits = getattr(job, name) == value
        if not fits:
            return False
    return True


class _Unreadable:
    """In place of a payload."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __repr__(self) -> str:
        return f"<not to be read: {self._error}>"


def _data(job: Job[Any]) -> Any:
    try:
        return job.data
    except Exception as error:  # noqa: BLE001 (whatever the serializer raises)
        return _Unreadable(error)


def _delay_ms(job: Job[Any]) -> int:
    return max(job.record.due_at_ms - job.record.created_at_ms, 0)


def _described(wanted: Mapping[str, Any]) -> str:
    return "" if not wanted else " with " + ", ".join(f"{name}={_short(value)}" for name, value in wanted.items())


def _listing(queue: Queue[Any], jobs: list[Job[Any]]) -> str:
    if not jobs:
        others = [f"{number} {name}" for name, number in queue.stats()._asdict().items() if number]
        return "nothing is pending" + (f", {', '.join(others)}" if others else "")
    lines = [f"pending are {len(jobs)}:", *(f"  {_line(job)}" for job in jobs[:_SHOWN])]
    if len(jobs) > _SHOWN:
        lines.append(f"  ... and {len(jobs) - _SHOWN} more")
    return "\n".join(lines)


def _line(job: Job[Any]) -> str:
    """The job, with what is not as ever."""
    parts = [f"data={_short(_data(job))}"]
    if _delay_ms(job):
        parts.append(f"delay={_delay_ms(job) / 1000:g}")
    if job.priority:
        parts.append(f"priority={job.priority}")
    for name in ("task", "group", "dedupe_key", "ref"):
        value = getattr(job, name)
        if value is not None:
            parts.append(f"{name}={_short(value)}")
    if job.headers:
        parts.append(f"headers={_short(dict(job.headers))}")
    if job.attempts:
        parts.append(f"after {job.attempts} attempt{'s' * (job.attempts > 1)}")
    return ", ".join(parts)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
