"""When a schedule fires: pure functions of the schedule and the time.

An interval (``every_ms``) counts on from its first tick. A cron expression names times of the zone's wall clocks, and
where the offset changes those skip some times, or show some twice. What then happens depends on whether the expression
names hours, as in Debian's cron (cron(8), Notes), but for the minute field, which does not matter here:

* **It names hours** (``30 2 * * *``): each of its times comes once in each local day. One that the clocks show twice
  fires the first time. One that they skip fires at the instant of the skip, for a night's work is to be done every
  night; several in one skip are one tick. A day that a zone left out (Apia, 30 December 2011) has no ticks.
* **It runs in every hour** (``*/15 * * * *``, ``0 * * * *``): it is an interval, and fires whenever the clocks show one
  of its times. What they skip is not made up for, what they show twice fires twice, and so the time between ticks
  stays the same. (But where they change by half an hour, as on Lord Howe Island, the full hours around it are 90
  minutes apart.)

croniter by itself fires ``30 2 * * *`` twice where 02:30 comes twice, so here it sees wall times only, without a zone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from typing import TYPE_CHECKING, NamedTuple
from zoneinfo import ZoneInfo

from litebroker.arguments import duration_ms
from litebroker.errors import ScheduleError

if TYPE_CHECKING:
    from croniter import croniter

__all__ = ["Plan", "ScheduleSpec", "first_tick", "next_tick", "plan"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)
_SECOND = timedelta(seconds=1)
_DAY = timedelta(days=1)
_DAY_MS = 86_400_000
_FIELDS = ("minute", "hour", "day of the month", "month", "weekday")
_HOUR = _FIELDS.index("hour")
_NAMES = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """When a schedule fires. Exactly one of ``every_ms`` and ``cron`` is set. ``tz`` belongs to cron; None is UTC."""

    every_ms: int | None = None
    cron: str | None = None
    tz: str | None = None

    @classmethod
    def parse(
        cls, *, every: float | timedelta | None = None, cron: str | None = None, tz: str | None = None
    ) -> ScheduleSpec:
        """What a user gave, checked. The constructor checks nothing: it is for what was checked before.

        Args:
            every: Seconds or a timedelta, at least a millisecond.
            cron: Five fields, as croniter reads them, or a name such as ``@daily``. Where both fields for days are
                restricted, either is enough.
            tz: The IANA name of a time zone.

        Raises:
            ScheduleError: It is not understood, can never fire, or names a zone that does not exist.
        """
        if (every is None) == (cron is None):
            raise ScheduleError("a schedule takes exactly one of every and cron")
        if every is not None:
            if tz is not None:
                raise ScheduleError(f"tz={tz!r} goes with cron: an interval is the same in every zone")
            return cls(every_ms=_interval_ms(every))
        spec = cls(cron=_checked(cron), tz=tz)
        next_tick(spec, 0)
        return spec


class Plan(NamedTuple):
    """What to do about a schedule: whether it fires now, and its next tick from now on."""

    fire: bool
    next_at_ms: int


def plan(spec: ScheduleSpec, next_at_ms: int, last_at_ms: int | None, now_ms: int) -> Plan:
    """Decide about a schedule whose next tick is stored as ``next_at_ms``, and whose last was ``last_at_ms``.

    Ticks that were missed fire as one. The clock may have been set back since the next tick was stored:

    * An interval waits at most its own length from now.
    * A cron tick that has fired, alone or with others, does not fire again while it lies less than a day ahead. Where
      ticks that lie further ahead are used up, the clock must have been wrong, and the schedule goes on as from now.
    """
    if spec.every_ms is not None:
        if next_at_ms > now_ms + spec.every_ms:
            return Plan(fire=False, next_at_ms=now_ms + spec.every_ms)
        due = max((now_ms - next_at_ms) // spec.every_ms + 1, 0)
        return Plan(fire=due > 0, next_at_ms=next_at_ms + due * spec.every_ms)
    tomorrow_ms = now_ms + _DAY_MS
    if next_at_ms > tomorrow_ms and next_at_ms > next_tick(spec, tomorrow_ms):
        return Plan(fire=False, next_at_ms=first_tick(spec, last_at_ms, now_ms))
    if next_at_ms > now_ms:
        return Plan(fire=False, next_at_ms=next_at_ms)
    return Plan(fire=True, next_at_ms=next_tick(spec, now_ms))


def first_tick(spec: ScheduleSpec, last_at_ms: int | None, now_ms: int) -> int:
    """Where a schedule begins that is new, changed or made anew, and fired last at ``last_at_ms`` (None: never).

    Raises:
        ScheduleError: As `next_tick`.
    """
    if spec.cron is not None and last_at_ms is not None and now_ms < last_at_ms <= now_ms + _DAY_MS:
        return next_tick(spec, last_at_ms)  # what lies before has fired
    return next_tick(spec, now_ms)


def next_tick(spec: ScheduleSpec, after_at_ms: int) -> int:
    """The first tick after an instant, and not at it. For an interval, the instant counts as a tick.

    Raises:
        ScheduleError: No tick follows, or the zone is not known on this machine.
    """
    if spec.every_ms is not None:
        return after_at_ms + spec.every_ms
    if spec.cron is None:
        raise ScheduleError("a schedule takes exactly one of every and cron")
    zone = _zone(spec.tz)
    try:
        tick = _next_cron_tick(spec.cron, zone, _EPOCH + timedelta(milliseconds=after_at_ms))
    except (OverflowError, ValueError) as error:
        raise ScheduleError(f"cron={spec.cron!r} never fires") from error
    return (tick - _EPOCH) // _MILLISECOND


def _next_cron_tick(cron: str, zone: tzinfo, after: datetime) -> datetime:
    from croniter import croniter  # Late: it takes 40 ms, and few programs have a cron expression.

    times = croniter(cron, ret_type=datetime)
    local = _wall(after, zone)
    if times.expanded[_HOUR] != ["*"]:
        # Later wall times are reached at later instants, so the first one after `after` is the next.
        reached = (_first_reached(wall, zone) for wall in _wall_times(times, local))
        return next(at for at in reached if at is not None and at > after)
    # If the clocks will show this stretch of time again, what lies before in it is still to come, a second time.
    first, second = (local.replace(tzinfo=zone, fold=fold).utcoffset() or timedelta() for fold in (0, 1))
    repeated = first - second if local.fold == 0 and first > second else timedelta()
    ticks: list[datetime] = []
    for wall in _wall_times(times, local - repeated):
        ticks += (at for at in _shown_at(wall, zone) if at > after)
        if ticks and wall > local:
            break
    return min(ticks)


def _wall_times(times: croniter[datetime], after: datetime) -> Iterator[datetime]:
    """The wall times that an expression names, in order."""
    times.set_current(after.replace(second=0, microsecond=0, fold=0))
    while True:
        yield times.get_next()


def _wall(at: datetime, zone: tzinfo) -> datetime:
    """What clocks in the zone show at an instant; ``fold`` tells the first time from the second."""
    return at.astimezone(zone).replace(tzinfo=None)


def _shown_at(wall: datetime, zone: tzinfo) -> list[datetime]:
    """The instants at which clocks show this time: mostly one, none in a skip, two in a repetition."""
    passes = {wall.replace(tzinfo=zone, fold=fold).astimezone(timezone.utc) for fold in (0, 1)}
    return sorted(at for at in passes if _wall(at, zone) == wall)


def _first_reached(wall: datetime, zone: tzinfo) -> datetime | None:
    """The instant at which clocks first show this time, or skip it. None if they skip the whole day."""
    shown = _shown_at(wall, zone)
    if shown:
        return shown[0]
    # Inside a skip, fold 0 counts by the offset before it and so comes too late, fold 1 too early (PEP 495).
    late, early = (wall.replace(tzinfo=zone, fold=fold).astimezone(timezone.utc) for fold in (0, 1))
    seconds = range((late - early) // _SECOND)
    skip = early + bisect_left(seconds, x=True, key=lambda s: _wall(early + s * _SECOND, zone) > wall) * _SECOND
    midnight = wall.replace(hour=0, minute=0)
    whole_day = _wall(skip - _SECOND, zone) < midnight and _wall(skip, zone) >= midnight + _DAY
    return None if whole_day else skip


def _zone(name: str | None) -> tzinfo:
    if name is None:
        return timezone.utc
    try:
        return ZoneInfo(name)
    # What a wrong name raises differs by version and platform: KeyError, ValueError, TypeError, OSError.
    except Exception as error:
        raise ScheduleError(
            f"tz={name!r} is not known on this machine: give an IANA name such as 'Europe/Berlin', and where the system"
            " has no time zones, install the tzdata package"
        ) from error


def _interval_ms(every: float | timedelta) -> int:
    try:
        return duration_ms("every", every, positive=True)
    except (TypeError, ValueError) as error:
        raise ScheduleError(str(error)) from None


def _checked(cron: object) -> str:
    """The expression, with single spaces between its fields."""
    if not isinstance(cron, str):
        raise ScheduleError(f"cron must be a string, not {cron!r}")
    fields = cron.split()
    if len(fields) != len(_FIELDS) and cron.strip().lower() not in _NAMES:
        # croniter takes a sixth field, for seconds, and has it last, where most others have it first.
        raise ScheduleError(
            f"cron={cron!r} is neither five fields ({', '.join(_FIELDS)}) nor one of {', '.join(_NAMES)};"
            " for seconds, use every"
        )
    if any(field[0] in "hHrR" for field in fields):
        raise ScheduleError(f"cron={cron!r} leaves a field to chance (H or R): name the time")
    if not cron.isascii():
        raise ScheduleError(f"cron={cron!r} is not understood: it has characters beyond ASCII")
    from croniter import croniter

    checked = " ".join(fields)
    try:
        croniter(checked)
    # On some expressions croniter trips over itself instead of refusing them.
    except Exception as error:
        raise ScheduleError(f"cron={cron!r} is not understood: {error}") from error
    return checked
