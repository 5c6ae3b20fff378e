"""Which periodic tasks are due: each tick once, whatever the consumers' number, their pauses, and the local clock do.

Huey asks every periodic task, once a minute of each consumer's own time, whether it matches the present minute. So a
minute is lost when two looks fall on both sides of it, and each consumer adds a task of its own. Here a look covers
every minute since the last one by any consumer, and a tick is claimed in the transaction that adds its task.

In local time (``utc=False``) a task that runs at fixed hours runs once a day also where the clock is changed: what the
spring leaves out runs right after the gap, and what the autumn brings twice runs the first time. A task of every hour
goes by real time.
"""

from __future__ import annotations

import calendar
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from litebroker_huey.storage import LitebrokerStorage

_MINUTE_MS = 60_000
# How many minutes a pause of all consumers may last without losing a tick. A longer one skips them, as huey does.
_LONGEST_PAUSE = 5
# A tick may lie so many minutes ahead of now without the clock having been set back: the hour that autumn repeats.
_REPEATED_HOUR = 65
_LOOK = "periodic"


@dataclass(frozen=True, slots=True)
class Tick:
    """A task's time to run.

    Attributes:
        task: A new instance of the periodic task.
        key: What counts its ticks.
        number: Which tick it is: minutes, on a scale of the key's own.
    """

    task: Any
    key: str
    number: int

    def claim(self, storage: LitebrokerStorage, then: Callable[[], None]) -> bool:
        """Do ``then``, in one transaction with noting the tick; not when the tick is noted already."""
        with storage.engine.transaction():
            if self.is_taken(storage):
                return False
            storage.engine.put(storage.marks, self.key, number=self.number)
            then()
        return True

    def is_taken(self, storage: LitebrokerStorage) -> bool:
        found = storage.engine.peek(storage.marks, [self.key]).get(self.key)
        # What lies further ahead was noted before the clock was set back, and says nothing any more.
        return found is not None and self.number <= found.number <= self.number + _REPEATED_HOUR


def due_ticks(storage: LitebrokerStorage, new_tasks: Callable[[], list[Any]]) -> list[Tick]:
    """The ticks since the last look, missed ones of a task made one.

    Args:
        new_tasks: Gives a new instance of each periodic task.
    """
    minute = storage.engine.clock.now_ms() // _MINUTE_MS
    minutes = range(_first_minute(storage, minute), minute + 1)
    storage.engine.put(storage.marks, _LOOK, number=minute)
    times = [_Time(at, naive, skipped) for at in minutes for naive, skipped in _naive_times(at, utc=storage.utc)]
    ticks = (_last_tick(task, times, utc=storage.utc) for task in new_tasks())
    return [tick for tick in ticks if tick is not None and not tick.is_taken(storage)]


def _first_minute(storage: LitebrokerStorage, minute: int) -> int:
    found = storage.engine.peek(storage.marks, [_LOOK]).get(_LOOK)
    if found is None or not minute - _LONGEST_PAUSE <= found.number < minute:
        return minute
    return found.number + 1


@dataclass(frozen=True, slots=True)
class _Time:
    """A minute as a task's validator sees it; ``is_skipped`` when no local clock ever showed it."""

    minute: int
    naive: datetime
    is_skipped: bool


def _naive_times(minute: int, *, utc: bool) -> Iterator[tuple[datetime, bool]]:
    naive = _naive(minute, utc=utc)
    if not utc:
        step = timedelta(minutes=1)
        skipped = _naive(minute - 1, utc=utc) + step
        while skipped < naive:
            yield skipped, True
            skipped += step
    yield naive, False


def _naive(minute: int, *, utc: bool) -> datetime:
    seconds = minute * 60
    if utc:
        return datetime(1970, 1, 1) + timedelta(seconds=seconds)  # noqa: DTZ001 - what huey's validators take
    return datetime.fromtimestamp(seconds).replace(fold=0)  # noqa: DTZ006 - as above


def _last_tick(task: Any, times: list[_Time], *, utc: bool) -> Tick | None:
    name = f"{type(task).__module__}.{type(task).__name__}"
    for time in reversed(times):
        if not task.validate_datetime(time.naive):
            continue
        if utc or _is_of_every_hour(task, time.naive):
            if not time.is_skipped:
                return Tick(task, f"tick:{name}", time.minute)
        else:
            return Tick(task, f"local-tick:{name}", calendar.timegm(time.naive.timetuple()) // 60)
    return None


def _is_of_every_hour(task: Any, naive: datetime) -> bool:
    return all(task.validate_datetime(naive.replace(hour=hour)) for hour in range(24))
