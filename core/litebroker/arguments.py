"""What callers give, checked, and turned into what a storage takes.

Every check here runs before anything is written. Seconds, `timedelta` and aware `datetime` come in; integer
milliseconds go out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Generic, TypeVar

from litebroker.jobs import KEEP_RESULT, LARGEST_ID, DedupeUntil, JobSpec, Keep, State

T_co = TypeVar("T_co", covariant=True)

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)
# What is longer is a mistake of units, and added to today it would leave the years that a date can have.
_LONGEST_S = 100 * 366 * 86_400
_LOWEST_PRIORITY, _HIGHEST_PRIORITY = -(2**63), 2**63 - 1
_MOST = 2**31 - 1
_MOST_DIGITS = len(str(LARGEST_ID))
_LONGEST_QUEUE_NAME = 255  # characters
_LONGEST_KEY = 1024  # bytes of UTF-8
_LARGEST_HEADERS = 65_536  # bytes of UTF-8


@dataclass(frozen=True, slots=True)
class Group:
    """A stream of its own within a queue, of which ``concurrency`` jobs may be active at once, over all workers.

    The first job of a group fixes its concurrency for good.
    """

    id: str
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class NewJob(Generic[T_co]):
    """A payload with options of its own, for `add_many`, and for what is to follow a job (``then=``).

    Attributes:
        queue: Another queue of the same storage; None is the one that it is given to.
        delay: Due so much later (seconds or `timedelta`). At most one of ``delay`` and ``run_at``.
        run_at: Due at this instant, an aware `datetime`. A past one is due at once.
        priority: Higher goes first. A signed 64-bit integer.
        dedupe_key: At most one job of the queue holds the key; adding again gives that job.
        dedupe_until: Whether the key is held until the job is "removed", or only until it has "ended".
        group: The id of a group that runs one job at a time, or a `Group`.
        attempts: How often it may be claimed; None is as the queue says.
        keep_result: How long its result is kept once it has ended (seconds or `timedelta`); None is as the queue
            says, 0 is not at all.
        headers: Small strings that travel with the job.
        task: What the job does, as listings show it.
        ref: The caller's own name of the job. Not unique.
    """

    data: T_co
    _: KW_ONLY
    queue: str | None = None
    delay: float | timedelta | None = None
    run_at: datetime | None = None
    priority: int = 0
    dedupe_key: str | None = None
    dedupe_until: DedupeUntil = "removed"
    group: str | Group | None = None
    attempts: int | None = None
    keep_result: float | timedelta | None = None
    headers: Mapping[str, str] | None = None
    task: str | None = None
    ref: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many ended jobs of each state a queue keeps, and for how long after their end.

    None is without limit. An age is in seconds, or a `timedelta`. What is beyond goes in small bites, the oldest first.
    """

    completed: int | None = 0
    completed_age: float | timedelta | None = None
    failed: int | None = 100
    failed_age: float | timedelta | None = None
    cancelled: int | None = None
    cancelled_age: float | timedelta | None = None

    def __post_init__(self) -> None:
        self.keep()

    def keep(self) -> dict[State, Keep]:
        """The same, as a storage takes it."""
        return {
            State.COMPLETED: _keep("completed", self.completed, self.completed_age),
            State.FAILED: _keep("failed", self.failed, self.failed_age),
            State.CANCELLED: _keep("cancelled", self.cancelled, self.cancelled_age),
        }


def _keep(name: str, count: int | None, age: float | timedelta | None) -> Keep:
    return Keep(
        None if count is None else whole_number(name, count, at_least=0),
        None if age is None else duration_ms(f"{name}_age", age),
    )


def duration_ms(name: str, value: float | timedelta, *, positive: bool = False) -> int:
    """Seconds, or a `timedelta`, in milliseconds. What is shorter than one, but not nothing, is one.

    Raises:
        TypeError: It is neither. True and False are no numbers here.
        ValueError: It is negative, not finite, longer than a century, or 0 where it has to be ``positive``.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    else:
        raise TypeError(f"{name}={_short(value)} is {_a(value)}: give seconds, or a timedelta")
    # The comparisons, unlike `math.isfinite`, take integers of any size.
    if seconds != seconds or seconds in {math.inf, -math.inf}:  # noqa: PLR0124
        raise ValueError(f"{name}={value!r} is no length of time: give seconds, or a timedelta")
    if seconds < 0 or (positive and seconds == 0):
        raise ValueError(f"{name}={_short(value)} has to be {'more than 0' if positive else '0 or more'}, in seconds")
    if seconds > _LONGEST_S:
        raise ValueError(f"{name}={_short(value)} is longer than a century: it is counted in seconds")
    return max(round(seconds * 1000), 1) if seconds else 0


def instant_ms(name: str, value: datetime) -> int:
    """An aware `datetime` in milliseconds since the epoch, UTC.

    Raises:
        TypeError: It is no `datetime`.
        ValueError: It is naive.
    """
    if not isinstance(value, datetime):
        raise TypeError(f"{name}={_short(value)} is {_a(value)}: give a datetime with a time zone")
    if value.tzinfo is None or value.utcoffset() is None:
        raise ValueError(
            f"{name}={value!r} has no time zone, so that its instant depends on where it is read: give it one, as in"
            " datetime.now(timezone.utc), or value.astimezone() when it is this machine's local time"
        )
    return (value - _EPOCH) // _MILLISECOND


def instant(at_ms: int) -> datetime:
    """The aware `datetime`, in UTC, of so many milliseconds since the epoch."""
    return _EPOCH + timedelta(milliseconds=at_ms)


def whole_number(name: str, value: int, *, at_least: int, at_most: int = _MOST) -> int:
    """The number itself. Raises ``TypeError`` where it is no `int`, ``ValueError`` where it is out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={_short(value)} is {_a(value)}: give a whole number")
    if not at_least <= value <= at_most:
        raise ValueError(f"{name}={_short(value)} is out of range: from {at_least:,} to {at_most:,}")
    return value


def job_id_of(text: str) -> int | None:
    """The job's id that the text is, in decimal digits; None where it can be none."""
    # Of thousands of digits, `int` makes an error of its own.
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        return None
    number = int(text)
    return number if number <= LARGEST_ID else None


def queue_name(value: str) -> str:
    """The name itself: 1 to 255 characters. Raises ``TypeError`` or ``ValueError``."""
    _check_text("the queue's name", value)
    if len(value) > _LONGEST_QUEUE_NAME:
        raise ValueError(
            f"the queue's name {_short(value)} has {len(value):,} characters: {_LONGEST_QUEUE_NAME} are the most"
        )
    return value


def key(name: str, value: str) -> str:
    """The text itself: not empty, at most 1,024 bytes of UTF-8. Raises ``TypeError`` or ``ValueError``."""
    size = _check_text(name, value)
    if size > _LONGEST_KEY:
        raise ValueError(
            f"{name}={_short(value)} takes {size:,} bytes: {_LONGEST_KEY:,} are the most, so hash what is longer"
        )
    return value


def headers(value: Mapping[str, str]) -> dict[str, str]:
    """A copy: strings to strings, 64 KiB at most. Raises ``TypeError`` or ``ValueError``."""
    if not isinstance(value, Mapping):
        raise TypeError(f"headers={_short(value)} is {_a(value)}: give a mapping of strings to strings")
    size = 0
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"headers has {_short(name)}: {_short(text)}: both have to be strings")
        size += _check_unicode(f"headers[{_short(name)}]", name) + _check_unicode(f"headers[{_short(name)}]", text)
    if size > _LARGEST_HEADERS:
        raise ValueError(f"headers take {size:,} bytes: {_LARGEST_HEADERS:,} are the most, so put it into the payload")
    if KEEP_RESULT in value:
        raise ValueError(f"headers has {KEEP_RESULT!r}, which is litebroker's own: give keep_result")
    return dict(value)


def job_spec(
    queue: str,
    payload: bytes,
    encoding: str | None,
    *,
    attempts: int | None,
    delay: float | timedelta | None = None,
    run_at: datetime | None = None,
    priority: int = 0,
    dedupe_key: str | None = None,
    dedupe_until: DedupeUntil = "removed",
    group: str | Group | None = None,
    keep_result_ms: int | None = None,
    headers: Mapping[str, str] | None = None,
    task: str | None = None,
    ref: str | None = None,
) -> JobSpec:
    """The job that a storage adds. Options are those of `NewJob`; ``attempts=None`` is without limit.

    With ``keep_result_ms=None``, or 0, no result is kept.

    Raises:
        TypeError: An option is of a wrong type.
        ValueError: An option is out of range, or two exclude each other.
    """
    if delay is not None and run_at is not None:
        raise ValueError(f"delay={delay!r} and run_at={run_at!r} exclude each other: give one")
    if dedupe_until not in {"removed", "ended"}:
        raise ValueError(f'dedupe_until={dedupe_until!r}: it is "removed" or "ended"')
    if dedupe_until != "removed" and dedupe_key is None:
        raise ValueError(f"dedupe_until={dedupe_until!r} says how long the job holds a key: give dedupe_key, too")
    group_concurrency = 1
    if isinstance(group, Group):
        group_concurrency = whole_number("the group's concurrency", group.concurrency, at_least=1)
        group = group.id
    return JobSpec(
        queue=queue,
        payload=payload,
        encoding=encoding,
        priority=priority
        if priority == 0 and type(priority) is int
        else whole_number("priority", priority, at_least=_LOWEST_PRIORITY, at_most=_HIGHEST_PRIORITY),
        delay_ms=None if delay is None else duration_ms("delay", delay),
        run_at_ms=None if run_at is None else instant_ms("run_at", run_at),
        dedupe_key=None if dedupe_key is None else key("dedupe_key", dedupe_key),
        dedupe_until=dedupe_until,
        group=None if group is None else key("the group's id", group),
        group_concurrency=group_concurrency,
        max_attempts=None if attempts is None else whole_number("attempts", attempts, at_least=1),
        headers=_all_headers(headers, keep_result_ms),
        ref=None if ref is None else key("ref", ref),
        task=None if task is None else key("task", task),
    )


_headers = headers  # `job_spec` has an argument of that name.


def _all_headers(value: Mapping[str, str] | None, keep_result_ms: int | None) -> dict[str, str] | None:
    """The user's, and our own."""
    given = None if value is None else _headers(value)
    return {**(given or {}), KEEP_RESULT: str(keep_result_ms)} if keep_result_ms else given


def _check_text(name: str, value: str) -> int:
    """Its size in UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={_short(value)} is {_a(value)}: give a string")
    if not value:
        raise ValueError(f"{name} is empty: give at least one character")
    if "\0" in value:
        # SQLite's functions end a text there (sqlite.org/nulinstr.html), and other databases take none.
        raise ValueError(f"{name}={_short(value)} has a NUL character in it")
    return _check_unicode(name, value)


def _check_unicode(name: str, value: str) -> int:
    """Its size in UTF-8."""
    try:
        return len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}={_short(value)} has half a surrogate pair at {error.start}, which UTF-8 cannot hold"
        ) from None


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 (a user's class may raise anything; so does an integer of 5,000 digits)
        return f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"  # noqa: PLR2004


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
