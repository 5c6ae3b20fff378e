"""When schedules fire, and which are refused. Daylight saving has a file of its own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litebroker.errors import ScheduleError
from litebroker.schedules import Plan, ScheduleSpec, first_tick, next_tick, plan

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
YEAR = 365 * DAY

HOURLY = ScheduleSpec.parse(cron="0 * * * *")
DAILY = ScheduleSpec.parse(cron="0 6 * * *")
WEEKLY = ScheduleSpec.parse(cron="0 9 * * mon")
TEN_SECONDS = ScheduleSpec.parse(every=10)


def at(text: str) -> int:
    """The instant in milliseconds; UTC where the text does not say."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(milliseconds=1)


NOON = at("2026-03-04T12:00")  # A Wednesday.


class Scheduler:
    """Does what `plan` says, and keeps what a storage keeps."""

    def __init__(self, spec: ScheduleSpec, now_ms: int) -> None:
        self.spec = spec
        self.next_at_ms = next_tick(spec, now_ms)
        self.last_at_ms: int | None = None
        self.fired: list[int] = []

    def look(self, now_ms: int) -> bool:
        fire, next_at_ms = plan(self.spec, self.next_at_ms, self.last_at_ms, now_ms)
        if fire:
            self.fired.append(self.next_at_ms)
            self.last_at_ms = self.next_at_ms
        self.next_at_ms = next_at_ms
        return fire

    def look_at_all(self, moments: Iterable[int]) -> int:
        return sum(self.look(now_ms) for now_ms in moments)


# --- what is a schedule ---


def test_an_interval_is_in_seconds_or_a_timedelta() -> None:
    specs = [ScheduleSpec.parse(every=value) for value in (90, 90.0, timedelta(minutes=1, seconds=30))]

    assert specs == [ScheduleSpec(every_ms=90_000)] * 3


def test_the_shortest_interval_is_a_millisecond() -> None:
    assert ScheduleSpec.parse(every=0.001) == ScheduleSpec(every_ms=1)

    assert ScheduleSpec.parse(every=0.0004) == ScheduleSpec(every_ms=1)


@pytest.mark.parametrize("every", [0, -1, math.nan, math.inf, True, "10", 4e9, 10**400, timedelta(0), timedelta(-1)])
def test_what_is_no_interval_is_refused(every: object) -> None:
    with pytest.raises(ScheduleError, match=r"^every=.* (seconds|time|century)"):
        ScheduleSpec.parse(every=every)  # type: ignore[arg-type]


def test_spaces_do_not_make_another_schedule() -> None:
    assert ScheduleSpec.parse(cron="  0\t6 *  * * ") == DAILY


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
        ("@Daily", "0 0 * * *"),
    ],
)
def test_the_usual_names_are_understood(name: str, fields: str) -> None:
    named, spelled = ScheduleSpec.parse(cron=name), ScheduleSpec.parse(cron=fields)

    assert next_tick(named, NOON) == next_tick(spelled, NOON)


@pytest.mark.parametrize(
    ("cron", "reason"),
    [
        ("", "neither five fields"),
        ("0 6 * *", "neither five fields"),
        ("0 0 6 * * *", "for seconds, use every"),
        ("0 6 * * * 0 2027", "neither five fields"),
        ("@reboot", "neither five fields"),
        ("@every 5m", "neither five fields"),
        ("60 * * * *", "not understood"),
        ("* 24 * * *", "not understood"),
        ("* * 0 * *", "not understood"),
        ("* * * 13 *", "not understood"),
        ("* * * * 8", "not understood"),
        ("*/0 * * * *", "not understood"),
        ("-5 * * * *", "not understood"),
        ("a b c d e", "not understood"),
        ("１ * * * *", "not understood"),  # noqa: RUF001  # A digit, but not one of cron's.
        ("R * * * *", "leaves a field to chance"),
        ("0 h(0-5) * * *", "leaves a field to chance"),
        ("0 0 30 2 *", "never fires"),
        ("0 0 31 4,6,9,11 *", "never fires"),
        ("* * 31 2 *", "never fires"),
        (None, "exactly one of every and cron"),
        (7, "cron must be a string"),
    ],
)
def test_a_cron_expression_that_is_wrong_is_refused(cron: object, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        ScheduleSpec.parse(cron=cron)  # type: ignore[arg-type]


@given(st.lists(st.text("0123456789*/,-#lLwWhr?@mon ", max_size=8), min_size=4, max_size=6).map(" ".join) | st.text())
def test_any_text_is_either_a_schedule_or_a_schedule_error(cron: str) -> None:
    try:
        spec = ScheduleSpec.parse(cron=cron)
    except ScheduleError:
        return

    assert next_tick(spec, NOON) > NOON


@pytest.mark.parametrize(
    "tz",
    [
        "",
        "Europe/Nowhere",
        "America",
        "/etc/passwd",
        "../../etc/passwd",
        "+01:00",
        "a\0b",
        "\ud800",
        "x" * 5000,
        1,
        b"UTC",
    ],
)
def test_a_time_zone_that_does_not_exist_is_refused(tz: object) -> None:
    with pytest.raises(ScheduleError, match="is not known on this machine"):
        ScheduleSpec.parse(cron="0 6 * * *", tz=tz)  # type: ignore[arg-type]


def test_an_interval_has_no_time_zone() -> None:
    with pytest.raises(ScheduleError, match="goes with cron"):
        ScheduleSpec.parse(every=10, tz="Europe/Berlin")


def test_a_schedule_is_an_interval_or_a_cron_expression_but_not_both() -> None:
    with pytest.raises(ScheduleError, match="exactly one"):
        ScheduleSpec.parse(every=10, cron="0 6 * * *")

    with pytest.raises(ScheduleError, match="exactly one"):
        next_tick(ScheduleSpec(), NOON)


# --- its ticks ---


@pytest.mark.parametrize(
    ("cron", "tz", "after", "expected"),
    [
        ("0 6 * * *", None, "2026-03-04T05:59:59.999", "2026-03-04T06:00"),
        ("0 6 * * *", None, "2026-03-04T06:00", "2026-03-05T06:00"),
        ("0 6 * * *", None, "2026-03-04T06:00:00.001", "2026-03-05T06:00"),
        ("0 6 * * *", "UTC", "2026-03-04T12:00", "2026-03-05T06:00"),
        ("0 6 * * *", "Europe/Berlin", "2026-03-04T12:00", "2026-03-05T06:00+01:00"),
        ("0 6 * * *", "Europe/Berlin", "2026-07-04T12:00", "2026-07-05T06:00+02:00"),
        ("0 6 * * *", "Asia/Kolkata", "2026-03-04T12:00", "2026-03-05T06:00+05:30"),
        ("*/15 * * * *", None, "2026-03-04T12:07:30", "2026-03-04T12:15"),
        ("*/15 * * * *", "Asia/Kathmandu", "2026-03-04T12:07:30", "2026-03-04T12:15"),
        ("* * * * *", None, "2026-12-31T23:59:30", "2027-01-01T00:00"),
        ("30 9 * * 1-5", None, "2026-03-06T10:00", "2026-03-09T09:30"),
        ("0 0 13 * fri", None, "2026-03-04T12:00", "2026-03-06T00:00"),  # Either is enough.
        ("0 0 l * *", None, "2026-03-04T12:00", "2026-03-31T00:00"),
        ("0 0 * * mon#1", None, "2026-03-04T12:00", "2026-04-06T00:00"),
        ("0 0 29 2 *", None, "2026-03-04T12:00", "2028-02-29T00:00"),
        ("0 0 29 2 *", None, "2096-03-04T12:00", "2104-02-29T00:00"),  # 2100 is no leap year.
        ("0 0 29 2 mon#5", None, "2044-03-01T12:00", "2072-02-29T00:00"),
        ("0 0 1 1 *", None, "1969-06-01T00:00", "1970-01-01T00:00"),
    ],
)
def test_the_next_tick_is_the_first_one_strictly_after(cron: str, tz: str | None, after: str, expected: str) -> None:
    spec = ScheduleSpec.parse(cron=cron, tz=tz)

    tick = next_tick(spec, at(after))

    assert tick == at(expected)


def test_an_interval_counts_from_the_tick_before() -> None:
    assert next_tick(TEN_SECONDS, NOON + 1) == NOON + 10_001


def test_after_the_end_of_the_calendar_no_tick_follows() -> None:
    with pytest.raises(ScheduleError, match="never fires"):
        next_tick(DAILY, at("9999-12-31T12:00"))

    with pytest.raises(ScheduleError, match="never fires"):
        next_tick(DAILY, 2**62)


def test_a_zone_that_this_machine_does_not_know_is_told_when_its_schedule_is_read() -> None:
    spec = ScheduleSpec(cron="0 6 * * *", tz="Europe/Nowhere")

    with pytest.raises(ScheduleError, match="Europe/Nowhere"):
        plan(spec, NOON, None, NOON)


# --- what to do about it now ---


@pytest.mark.parametrize("spec", [TEN_SECONDS, HOURLY, DAILY, WEEKLY])
def test_a_tick_fires_when_it_has_come_and_not_before(spec: ScheduleSpec) -> None:
    tick = next_tick(spec, NOON)

    assert plan(spec, tick, None, tick - 1) == Plan(fire=False, next_at_ms=tick)
    assert plan(spec, tick, None, tick) == Plan(fire=True, next_at_ms=next_tick(spec, tick))


@pytest.mark.parametrize(
    ("spec", "away", "following"),
    [
        (TEN_SECONDS, 35 * SECOND, NOON + 40 * SECOND),
        (TEN_SECONDS, 40 * SECOND, NOON + 50 * SECOND),
        (TEN_SECONDS, 10 * YEAR, NOON + 10 * YEAR + 10 * SECOND),
        (HOURLY, 5 * HOUR + 1, NOON + 6 * HOUR),
        (DAILY, 10 * DAY, at("2026-03-15T06:00")),
    ],
)
def test_missed_ticks_fire_once_together(spec: ScheduleSpec, away: int, following: int) -> None:
    decided = plan(spec, next_tick(spec, NOON), NOON, NOON + away)

    assert decided == Plan(fire=True, next_at_ms=following)


@given(st.lists(st.integers(1, 2 * MINUTE), max_size=50))
def test_an_interval_keeps_to_the_beat_of_its_first_tick(steps: list[int]) -> None:
    scheduler, now = Scheduler(TEN_SECONDS, NOON + 3), NOON + 3

    for step in steps:
        now += step
        scheduler.look(now)

    assert all((tick - NOON - 3) % (10 * SECOND) == 0 for tick in [*scheduler.fired, scheduler.next_at_ms])
    assert now < scheduler.next_at_ms <= now + 10 * SECOND


@given(spec=st.sampled_from([TEN_SECONDS, HOURLY, DAILY, WEEKLY]), steps=st.lists(st.integers(1, 3 * DAY), max_size=40))
def test_a_look_fires_exactly_when_a_tick_has_come_since_the_last(spec: ScheduleSpec, steps: list[int]) -> None:
    scheduler, before = Scheduler(spec, NOON), NOON

    for step in steps:
        waiting = scheduler.next_at_ms
        fired = scheduler.look(before + step)

        assert fired == (before < waiting <= before + step)
        before += step
        assert scheduler.next_at_ms > before


# --- when the clock is set back ---


def test_an_interval_waits_at_most_its_own_length() -> None:
    spec = ScheduleSpec.parse(every=HOUR / 1000)

    assert plan(spec, NOON + HOUR + 1, NOON, NOON) == Plan(fire=False, next_at_ms=NOON + HOUR)
    assert plan(spec, NOON + HOUR, NOON, NOON) == Plan(fire=False, next_at_ms=NOON + HOUR)
    assert plan(spec, NOON + 10 * YEAR, NOON + 10 * YEAR, NOON) == Plan(fire=False, next_at_ms=NOON + HOUR)


@pytest.mark.parametrize("back", [1, MINUTE, HOUR, 5 * HOUR, DAY - HOUR])
@pytest.mark.parametrize("spec", [HOURLY, DAILY, WEEKLY])
def test_cron_ticks_that_have_fired_do_not_fire_again_within_a_day(spec: ScheduleSpec, back: int) -> None:
    scheduler = Scheduler(spec, NOON - 8 * DAY)
    scheduler.look_at_all(range(NOON - 8 * DAY, NOON + 1, MINUTE * 30))
    fired = list(scheduler.fired)

    again = scheduler.look_at_all(range(NOON - back, NOON + 1, MINUTE))

    assert again == 0
    assert scheduler.fired == fired
    assert scheduler.next_at_ms == next_tick(spec, NOON)


def test_cron_ticks_that_were_missed_and_fired_as_one_do_not_fire_again_either() -> None:
    scheduler = Scheduler(HOURLY, NOON)
    scheduler.look(NOON + 10 * HOUR)

    again = scheduler.look_at_all(range(NOON + 30 * MINUTE, NOON + 10 * HOUR + 1, MINUTE))

    assert again == 0


@pytest.mark.parametrize("ahead", [3 * DAY, 40 * DAY, 10 * YEAR])
@pytest.mark.parametrize("spec", [HOURLY, DAILY])
def test_a_clock_that_was_days_ahead_does_not_stall_a_schedule_when_it_is_set_right(
    spec: ScheduleSpec, ahead: int
) -> None:
    scheduler = Scheduler(spec, NOON)
    fired = scheduler.next_at_ms
    scheduler.look(NOON + ahead)

    decided = plan(spec, scheduler.next_at_ms, scheduler.last_at_ms, NOON + 1)

    assert scheduler.next_at_ms > NOON + ahead
    assert decided == Plan(fire=False, next_at_ms=next_tick(spec, fired))


def test_a_clock_that_fired_every_tick_of_ten_days_ahead_fires_them_again_when_it_is_set_right() -> None:
    scheduler = Scheduler(DAILY, NOON)
    scheduler.look_at_all(range(NOON, NOON + 10 * DAY, HOUR))

    again = scheduler.look_at_all(range(NOON, NOON + 10 * DAY, HOUR))

    assert again == 10


@pytest.mark.parametrize("spec", [HOURLY, DAILY])
def test_a_schedule_that_goes_on_as_from_now_does_so_though_what_it_fired_ahead_comes_near(spec: ScheduleSpec) -> None:
    scheduler = Scheduler(spec, NOON)
    fired = scheduler.next_at_ms
    scheduler.look(fired)
    back = fired - DAY - MINUTE
    scheduler.look(back)

    again = scheduler.look(back + 2 * DAY)

    assert again
    assert scheduler.fired == [fired, next_tick(spec, back)]


def test_ticks_that_have_fired_are_left_out_where_a_schedule_is_made_anew_behind_them() -> None:
    last = NOON + 5 * HOUR

    assert first_tick(HOURLY, None, NOON) == NOON + HOUR
    assert first_tick(HOURLY, NOON - HOUR, NOON) == NOON + HOUR
    assert first_tick(HOURLY, last, NOON) == last + HOUR
    assert first_tick(HOURLY, last + 20 * HOUR, NOON) == NOON + HOUR
    assert first_tick(TEN_SECONDS, last, NOON) == NOON + 10_000


@given(
    spec=st.sampled_from([TEN_SECONDS, HOURLY, DAILY]),
    steps=st.lists(st.integers(-20 * YEAR, 20 * YEAR) | st.integers(-2 * DAY, 2 * DAY), max_size=12),
)
def test_no_clock_steps_stall_a_schedule_for_more_than_a_day_and_a_tick(spec: ScheduleSpec, steps: list[int]) -> None:
    scheduler, now = Scheduler(spec, NOON), NOON

    for step in steps:
        now += step
        scheduler.look(now)

    longest = spec.every_ms or 2 * DAY
    assert scheduler.next_at_ms <= now + longest
    assert scheduler.look(now + longest)


@given(
    spec=st.sampled_from([HOURLY, DAILY]),
    steps=st.lists(st.integers(-DAY // 2, DAY), max_size=60),
)
def test_a_clock_that_is_never_a_day_behind_itself_fires_no_tick_twice(spec: ScheduleSpec, steps: list[int]) -> None:
    scheduler, now, furthest = Scheduler(spec, NOON), NOON, NOON

    for step in steps:
        now = max(now + step, furthest - DAY + 1)
        furthest = max(furthest, now)
        scheduler.look(now)

    assert scheduler.fired == sorted(set(scheduler.fired))


def test_what_reads_cron_expressions_is_loaded_only_where_there_is_one() -> None:
    program = (
        "import sys, litebroker; before = 'croniter' in sys.modules\n"
        "litebroker.ScheduleSpec.parse(cron='0 6 * * *'); print(before, 'croniter' in sys.modules)"
    )

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert result.stdout == "False True\n"
