"""Cron expressions where local clocks are put forward and back, in zones that have done it in odd ways.

The oracle below knows nothing of croniter or of offsets: it walks through the minutes, looks at the clock on the wall,
and follows the rule as `litebroker.schedules` states it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import NamedTuple
from zoneinfo import ZoneInfo

import pytest

from litebroker.schedules import ScheduleSpec, next_tick

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


class Years(NamedTuple):
    """Two years in a zone."""

    tz: str
    first: int

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.tz)

    @property
    def start(self) -> datetime:
        return datetime(self.first, 1, 1, 12, tzinfo=timezone.utc)

    @property
    def end(self) -> datetime:
        return datetime(self.first + 2, 1, 1, 12, tzinfo=timezone.utc)


ZONES = [
    Years("Europe/Berlin", 2026),
    Years("America/New_York", 2026),
    Years("America/Sao_Paulo", 2017),  # At midnight: some days began at 01:00.
    Years("Australia/Lord_Howe", 2026),  # By half an hour.
    Years("Africa/Casablanca", 2023),  # Put back for Ramadan, and forward after it.
    Years("Asia/Kolkata", 2026),  # Never.
    Years("Pacific/Apia", 2011),  # Left out 30 December 2011.
    Years("America/St_Johns", 2010),  # At one minute past midnight, until 2011; by half hours from UTC.
    Years("Asia/Tehran", 2021),  # At midnight, and for the last time in 2022.
    Years("Antarctica/Troll", 2026),  # By two hours.
    Years("Pacific/Chatham", 2026),  # By quarter hours from UTC.
    Years("Europe/Dublin", 2026),  # Winter is what counts as daylight saving there.
]
MORE_ZONES = [
    *ZONES,
    Years("America/Nuuk", 2024),  # The hour before midnight.
    Years("America/Havana", 2026),  # The hour after it.
    Years("Africa/Cairo", 2025),
    Years("Pacific/Kwajalein", 1993),  # Left out 21 August 1993.
    Years("Asia/Manila", 1844),  # Left out 31 December 1844, and has seconds in its offset.
    Years("America/Juneau", 1867),  # Had 18 October 1867 twice, with seconds as well.
    Years("Europe/Berlin", 2060),  # By rule: beyond what is listed.
]

NAMING_HOURS: dict[str, Callable[[datetime], bool]] = {
    "30 2 * * *": lambda wall: (wall.hour, wall.minute) == (2, 30),
    "0 0 * * *": lambda wall: (wall.hour, wall.minute) == (0, 0),
    "15 1 * * *": lambda wall: (wall.hour, wall.minute) == (1, 15),
    "30 23 * * *": lambda wall: (wall.hour, wall.minute) == (23, 30),
    "0,30 2,3 * * *": lambda wall: wall.hour in {2, 3} and wall.minute in {0, 30},
    "*/15 0-3 * * sun": lambda wall: wall.weekday() == 6 and wall.hour <= 3 and wall.minute % 15 == 0,
    "5 */2 * * *": lambda wall: wall.hour % 2 == 0 and wall.minute == 5,
    "*/20 0-22 * * *": lambda wall: wall.hour <= 22 and wall.minute % 20 == 0,
}
IN_EVERY_HOUR: dict[str, Callable[[datetime], bool]] = {
    "0 * * * *": lambda wall: wall.minute == 0,
    "*/15 * * * *": lambda wall: wall.minute % 15 == 0,
    "10,50 0-23 * * *": lambda wall: wall.minute in {10, 50},
    "45 */1 * * sat,sun": lambda wall: wall.weekday() >= 5 and wall.minute == 45,
}
DAILY = ["0 0 * * *", "15 1 * * *", "30 2 * * *"]


def ticks(cron: str, tz: str, start: datetime, end: datetime) -> list[datetime]:
    """All that `next_tick` answers after the start, up to the end."""
    spec, epoch = ScheduleSpec.parse(cron=cron, tz=tz), datetime(1970, 1, 1, tzinfo=timezone.utc)
    found: list[datetime] = []
    at = start
    while at <= end:
        at = epoch + timedelta(milliseconds=next_tick(spec, (at - epoch) // timedelta(milliseconds=1)))
        found.append(at)
    return found[:-1]


def wall(at: datetime, zone: ZoneInfo) -> datetime:
    return at.astimezone(zone).replace(tzinfo=None)


def walk(start: datetime, end: datetime, step: timedelta) -> Iterator[datetime]:
    at = start
    while at <= end:
        yield at
        at += step


def changes(years: Years) -> list[tuple[datetime, datetime]]:
    """A stretch of two days and more around each change of the offset; one in the middle, if it never changes."""
    days = list(walk(years.start, years.end, DAY))
    found = [day for day, after in pairwise(days) if wall(day, years.zone) + DAY != wall(after, years.zone)]
    return [(day - DAY, day + 30 * HOUR) for day in found or [days[180]]]


def minutes(zone: ZoneInfo, start: datetime, end: datetime) -> list[tuple[datetime, datetime]]:
    """Each minute from the start to the end, and what the clock on the wall shows then.

    Old offsets have seconds, but every change here is by whole minutes: so a walk that starts at a full minute of the
    wall clock meets all of its full minutes.
    """
    aligned = start - timedelta(seconds=wall(start, zone).second)
    return [(at, wall(at, zone)) for at in walk(aligned, end, MINUTE)]


def expected(
    matches: Callable[[datetime], bool], shown: list[tuple[datetime, datetime]], *, names_hours: bool
) -> list[datetime]:
    """The ticks in these minutes, but for the first."""
    if not names_hours:
        return [at for at, now in shown[1:] if matches(now)]
    days = {now.date() for _, now in shown}
    seen = {shown[0][1]}
    fired: list[datetime] = []
    for (_, before), (at, now) in pairwise(shown):
        # What has passed since the last look: a minute, or all that the clock has skipped as well.
        passed = [time for time in walk(before + MINUTE, now, MINUTE) if time.date() in days] if now > before else [now]
        if any(matches(time) and time not in seen for time in passed):
            fired.append(at)
        seen.update(passed)
    return fired


@pytest.mark.parametrize("years", MORE_ZONES, ids=lambda years: f"{years.tz}-{years.first}")
def test_ticks_around_every_change_are_those_of_a_walk_through_the_minutes(years: Years) -> None:
    for start, end in changes(years):
        shown = minutes(years.zone, start, end)
        for crons, names_hours in ((NAMING_HOURS, True), (IN_EVERY_HOUR, False)):
            for cron, matches in crons.items():
                fired = ticks(cron, years.tz, shown[0][0], end)

                assert fired == expected(matches, shown, names_hours=names_hours), (cron, start)


@pytest.mark.parametrize("years", ZONES, ids=lambda years: years.tz)
def test_a_daily_time_fires_exactly_once_on_every_local_day(years: Years) -> None:
    days = {wall(at, years.zone).date() for at in walk(years.start, years.end, HOUR)}
    whole_days = sorted(days)[1:-1]

    for cron in DAILY:
        fired = ticks(cron, years.tz, years.start, years.end)

        assert all(before < after for before, after in pairwise(fired))
        assert [day for at in fired if (day := wall(at, years.zone).date()) in whole_days] == whole_days, cron


@pytest.mark.parametrize("years", ZONES, ids=lambda years: years.tz)
def test_a_quarter_of_an_hour_is_one_through_every_change(years: Years) -> None:
    for start, end in changes(years):
        fired = ticks("*/15 * * * *", years.tz, start, end)

        assert {after - before for before, after in pairwise(fired)} == {15 * MINUTE}


@pytest.mark.parametrize(
    "years", [years for years in ZONES if years.tz != "Australia/Lord_Howe"], ids=lambda years: years.tz
)
def test_an_hour_is_one_through_every_change_of_whole_hours(years: Years) -> None:
    for start, end in changes(years):
        fired = ticks("0 * * * *", years.tz, start, end)

        assert {after - before for before, after in pairwise(fired)} == {HOUR}
        assert {wall(at, years.zone).minute for at in fired} == {0}


def test_where_clocks_change_by_half_an_hour_full_hours_are_an_hour_and_a_half_apart_once() -> None:
    years = Years("Australia/Lord_Howe", 2026)

    for start, end in changes(years):
        fired = ticks("0 * * * *", years.tz, start, end)
        apart = [after - before for before, after in pairwise(fired)]

        assert {wall(at, years.zone).minute for at in fired} == {0}
        assert apart.count(90 * MINUTE) == 1
        assert apart.count(HOUR) == len(apart) - 1


@pytest.mark.parametrize(
    ("cron", "tz", "day", "expected"),
    [
        # Put forward, from 02:00 to 03:00, from midnight to 01:00, and from 23:00 to midnight.
        ("30 2 * * *", "Europe/Berlin", "2027-03-28", ["03:00+02:00"]),
        ("0,15,30 2 * * *", "Europe/Berlin", "2027-03-28", ["03:00+02:00"]),
        ("0 2,3,4 * * *", "Europe/Berlin", "2027-03-28", ["03:00+02:00", "04:00+02:00"]),
        (
            "*/30 * * * *",
            "Europe/Berlin",
            "2027-03-28",
            ["00:00+01:00", "00:30+01:00", "01:00+01:00", "01:30+01:00", "03:00+02:00", "03:30+02:00", "04:00+02:00"],
        ),
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-04", ["01:00-02:00"]),
        # Put back, from 03:00 to 02:00, and from 01:00 to midnight.
        ("30 2 * * *", "Europe/Berlin", "2027-10-31", ["02:30+02:00"]),
        ("*/30 2 * * *", "Europe/Berlin", "2027-10-31", ["02:00+02:00", "02:30+02:00"]),
        (
            "30 * * * *",
            "Europe/Berlin",
            "2027-10-31",
            ["00:30+02:00", "01:30+02:00", "02:30+02:00", "02:30+01:00", "03:30+01:00"],
        ),
        ("0 0,12 * * *", "America/Havana", "2026-11-01", ["00:00-04:00"]),
        # A day that was left out.
        ("30 2 * * *", "Pacific/Apia", "2011-12-30", []),
        ("0 * * * *", "Pacific/Apia", "2011-12-30", []),
    ],
)
def test_on_a_day_of_change_these_fire_before_half_past_four(cron: str, tz: str, day: str, expected: list[str]) -> None:
    zone = ZoneInfo(tz)
    noon = datetime.fromisoformat(f"{day}T12:00").replace(tzinfo=timezone.utc)

    fired = [at.astimezone(zone) for at in ticks(cron, tz, noon - 2 * DAY, noon + 2 * DAY)]

    early = [at for at in fired if at.date().isoformat() == day and (at.hour, at.minute) < (4, 30)]
    assert [at.isoformat()[11:16] + at.isoformat()[19:] for at in early] == expected


def test_a_time_in_the_last_hour_of_a_day_that_is_skipped_fires_as_the_day_ends() -> None:
    zone = ZoneInfo("America/Nuuk")
    noon = datetime(2024, 3, 29, 12, tzinfo=timezone.utc)

    fired = [at.astimezone(zone).isoformat() for at in ticks("30 23 * * *", "America/Nuuk", noon, noon + 3 * DAY)]

    assert fired == ["2024-03-29T23:30:00-02:00", "2024-03-31T00:00:00-01:00", "2024-03-31T23:30:00-01:00"]


def test_every_zone_but_kolkata_has_changes_here() -> None:
    unchanging = [
        years.tz
        for years in MORE_ZONES
        for start, end in changes(years)
        if wall(end, years.zone) - wall(start, years.zone) == end - start
    ]

    assert unchanging == ["Asia/Kolkata"]
