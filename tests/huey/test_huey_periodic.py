"""Periodic tasks: each tick once, for any number of consumers, on any clock."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huey.api import crontab

from litebroker import SQLiteStorage
from litebroker.testing import ManualClock
from litebroker_huey import SQLiteHuey

BERLIN_SPRING = datetime(2027, 3, 28, 0, 0, tzinfo=timezone.utc)  # the clock goes from 02:00 to 03:00 at 01:00 UTC
BERLIN_AUTUMN = datetime(2027, 10, 30, 23, 0, tzinfo=timezone.utc)  # and from 03:00 to 02:00 at 01:00 UTC


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while Consumers.storages:
        Consumers.storages.pop().close()


class Consumers:
    """Schedulers on one file, on a clock that a test moves."""

    storages: ClassVar[list[SQLiteStorage]] = []

    def __init__(self, folder: Path, start: datetime, *, consumers: int = 1, utc: bool = True, **tasks: Any) -> None:
        self.clock = ManualClock(now_ms=int(start.timestamp() * 1000))
        self.hueys = []
        for _ in range(consumers):
            storage = SQLiteStorage(folder / "jobs.db", clock=self.clock)
            self.storages.append(storage)
            huey = SQLiteHuey("app", storage=storage, utc=utc)
            for name, when in tasks.items():
                huey.periodic_task(when, name=name)(lambda: None)
            self.hueys.append(huey)

    def look(self, consumer: int = 0) -> list[str]:
        """One look of a consumer's scheduler; the names of the tasks that it added."""
        huey = self.hueys[consumer]
        before = huey.pending_count()
        for task in huey.read_periodic(None):
            huey.enqueue(task)
        return [type(task).__name__ for task in huey.pending()[before:]]

    def added(self, minutes: int, *, every: float = 1) -> list[tuple[str, str]]:
        """What a scheduler adds in so many minutes, with the time of day in UTC."""
        found = []
        for _ in range(int(minutes / every)):
            now = datetime.fromtimestamp(self.clock.now_ms() / 1000, timezone.utc)
            found += [(name, f"{now:%H:%M}") for name in self.look()]
            self.clock.advance(every * 60)
        return found


NOON = datetime(2027, 6, 1, 12, 0, tzinfo=timezone.utc)


def test_of_several_consumers_one_adds_a_tick(tmp_path: Path) -> None:
    consumers = Consumers(tmp_path, NOON, consumers=3, each=crontab())

    ticks = []
    for _ in range(5):
        ticks.append([name for consumer in range(3) for name in consumers.look(consumer)])
        consumers.clock.advance(60)

    assert ticks == [["each"]] * 5


def test_consumers_that_look_at_the_same_moment_add_one_task(tmp_path: Path) -> None:
    consumers = Consumers(tmp_path, NOON, consumers=2, each=crontab())

    both = [consumers.hueys[consumer].read_periodic(None) for consumer in range(2)]
    for huey, tasks in zip(consumers.hueys, both, strict=True):
        for task in tasks:
            huey.enqueue(task)

    assert [len(tasks) for tasks in both] == [1, 1]
    assert consumers.hueys[0].pending_count() == 1


def test_a_look_that_comes_late_misses_no_minute_and_one_that_comes_early_doubles_none(tmp_path: Path) -> None:
    consumers = Consumers(tmp_path, NOON, each=crontab(), at_one=crontab(minute="1"), at_two=crontab(minute="2"))

    found = []
    for pause in (59.9, 61.0, 0.2, 58.0, 100):  # huey's own phase wanders like that
        found.append(consumers.look())
        consumers.clock.advance(pause)
    found.append(consumers.look())

    assert found == [["each"], [], ["each", "at_one", "at_two"], [], [], ["each"]]


def test_a_tick_is_not_lost_while_consumers_restart(tmp_path: Path) -> None:
    Consumers(tmp_path, NOON, noon_and_two=crontab(minute="2")).look()

    restarted = Consumers(tmp_path, NOON + timedelta(minutes=4), noon_and_two=crontab(minute="2"))

    assert restarted.look() == ["noon_and_two"]


def test_ticks_of_a_long_pause_are_skipped_as_huey_does(tmp_path: Path) -> None:
    Consumers(tmp_path, NOON, noon_and_two=crontab(minute="2")).look()

    restarted = Consumers(tmp_path, NOON + timedelta(minutes=30), noon_and_two=crontab(minute="2"))

    assert restarted.look() == []


def test_a_clock_that_is_set_back_does_not_stop_the_ticks(tmp_path: Path) -> None:
    consumers = Consumers(tmp_path, NOON, each=crontab())
    consumers.look()

    consumers.clock.step(-7200)

    assert consumers.look() == ["each"]


def test_the_claim_of_a_tick_and_its_task_are_one_transaction(tmp_path: Path) -> None:
    consumers = Consumers(tmp_path, NOON, each=crontab())
    [task] = consumers.hueys[0].read_periodic(None)
    # Here the scheduler is killed; another one looks in the same minute.

    assert consumers.look() == ["each"]
    consumers.hueys[0].enqueue(task)
    assert consumers.hueys[0].pending_count() == 1


@pytest.mark.usefixtures("berlin")
def test_in_spring_a_daily_task_runs_though_its_time_does_not_exist(tmp_path: Path) -> None:
    consumers = Consumers(
        tmp_path,
        BERLIN_SPRING,
        utc=False,
        daily=crontab(hour="2", minute="30"),
        hourly=crontab(minute="30"),
        next_hour=crontab(hour="3", minute="0"),
    )

    added = consumers.added(180)

    assert added == [
        ("hourly", "00:30"),
        ("daily", "01:00"),
        ("next_hour", "01:00"),
        ("hourly", "01:30"),
        ("hourly", "02:30"),
    ]


@pytest.mark.usefixtures("berlin")
def test_in_autumn_a_daily_task_runs_once_and_an_hourly_one_each_hour(tmp_path: Path) -> None:
    consumers = Consumers(
        tmp_path,
        BERLIN_AUTUMN,
        utc=False,
        daily=crontab(hour="2", minute="30"),
        twice=crontab(hour="2", minute="10,50"),
        hourly=crontab(minute="30"),
    )

    added = consumers.added(240)

    assert [time for name, time in added if name == "daily"] == ["00:30"]
    assert [time for name, time in added if name == "twice"] == ["00:10", "00:50"]
    assert [time for name, time in added if name == "hourly"] == ["23:30", "00:30", "01:30", "02:30"]


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize("start", [BERLIN_SPRING, BERLIN_AUTUMN])
def test_in_utc_the_local_clock_is_nothing_to_a_task(tmp_path: Path, start: datetime) -> None:
    consumers = Consumers(tmp_path, start, daily=crontab(hour="1", minute="30"))

    assert consumers.added(240) == [("daily", "01:30")]


def test_a_periodic_task_that_is_revoked_is_skipped(tmp_path: Path) -> None:
    consumers = Consumers(tmp_path, NOON, each=crontab())
    huey = consumers.hueys[0]
    [task] = huey.read_periodic(None)
    huey.revoke_all(type(task))
    consumers.look()

    task = huey.dequeue()

    assert huey.execute(task) is None
    assert huey.inflight_count() == 0
