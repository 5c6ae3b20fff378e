"""Messages by the calendar and at intervals."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.middleware import CurrentMessage
from tests.dramatiq.conftest import App, Await, Run

from litebroker import ScheduleError, State
from litebroker_dramatiq import Schedules, SQLiteBroker
from litebroker_dramatiq.middleware import fire_due, register

QUEUE = "dramatiq:default"


def test_an_interval_sends_one_message_a_tick_with_an_id_of_its_own(
    broker: SQLiteBroker, run: Run, wait_for: Await
) -> None:
    broker.add_middleware(CurrentMessage())
    seen: list[tuple[str, int]] = []

    @dramatiq.actor(every=200)
    def tick() -> None:
        message: Any = CurrentMessage.get_current_message()
        seen.append((message.message_id, message.message_timestamp))

    with run(broker):
        wait_for(lambda: len(seen) >= 3)

    ids, times = zip(*seen, strict=True)
    assert len(set(ids)) == len(ids)
    assert times[0] > (time.time() - 60) * 1000
    assert times[2] - times[0] > 250


@pytest.mark.slow
def test_of_many_workers_one_sends_each_tick(app: App, wait_for: Await) -> None:
    app.write("""
        from datetime import timedelta

        broker = SQLiteBroker("jobs.db")
        dramatiq.set_broker(broker)

        @dramatiq.actor(every=timedelta(milliseconds=300), max_retries=0)
        def tick():
            note(time.time())
    """)
    app.worker("--processes", "3", "--threads", "1")
    app.worker("--processes", "3", "--threads", "1")

    wait_for(lambda: len(app.notes()) >= 10, within=30)

    times = sorted(map(float, app.notes()))
    assert (len(times) - 1) * 0.3 <= times[-1] - times[0] + 0.35


def test_ticks_that_nobody_was_there_for_are_one_message(broker: SQLiteBroker) -> None:
    @dramatiq.actor(every=10)
    def tick() -> None: ...

    register(broker)
    time.sleep(0.2)

    fire_due(broker)

    assert broker.storage.counts(QUEUE).ready == 1


def test_starting_again_changes_nothing(broker: SQLiteBroker) -> None:
    @dramatiq.actor(cron="0 6 * * *", timezone="Europe/Berlin")
    def daily() -> None: ...

    register(broker)
    (first,) = broker.storage.list_schedules()
    time.sleep(0.01)
    register(broker)

    assert broker.storage.list_schedules() == [first]
    assert (first.spec.cron, first.spec.tz) == ("0 6 * * *", "Europe/Berlin")


def test_a_changed_schedule_is_calculated_anew_and_one_that_is_gone_is_removed(
    broker: SQLiteBroker, database: Path
) -> None:
    @dramatiq.actor(every=timedelta(days=1))
    def one() -> None: ...

    @dramatiq.actor(every=timedelta(days=1))
    def two() -> None: ...

    register(broker)
    later = SQLiteBroker(database)

    @dramatiq.actor(broker=later, actor_name="one", every=timedelta(days=2))
    def one_again() -> None: ...

    @dramatiq.actor(broker=later, actor_name="two")
    def two_again() -> None: ...

    register(later)

    (record,) = later.storage.list_schedules()
    assert (record.id, record.spec.every_ms) == ("one", 2 * 86_400_000)
    assert abs(record.next_at_ms - (time.time() + 2 * 86_400) * 1000) < 5000
    later.close()


def test_a_tick_has_the_arguments_that_were_set(broker: SQLiteBroker) -> None:
    @dramatiq.actor(every=10, schedule_args=("daily", 3))
    def report(kind: str, copies: int) -> None: ...

    register(broker)
    time.sleep(0.05)
    fire_due(broker)

    (job,) = broker.storage.page(QUEUE, State.PENDING)
    assert Message.decode(job.payload).args == ("daily", 3)


def test_a_paused_queue_gets_no_ticks(broker: SQLiteBroker) -> None:
    @dramatiq.actor(every=10)
    def tick() -> None: ...

    register(broker)
    broker.storage.pause(QUEUE, paused=True)
    time.sleep(0.05)

    fire_due(broker)

    assert broker.storage.counts(QUEUE).ready == 0


@pytest.mark.parametrize(
    "options", [{"cron": "61 * * * *"}, {"every": 0}, {"cron": "* * * * *", "timezone": "No/Where"}]
)
def test_a_schedule_that_cannot_be_is_refused_where_the_actor_is(broker: SQLiteBroker, options: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError):

        @dramatiq.actor(**options)  # type: ignore[untyped-decorator]
        def tick() -> None: ...

    assert broker.get_declared_actors() == set()


def test_the_middleware_can_be_added_to_a_bare_broker(database: Path) -> None:
    broker = SQLiteBroker(database, middleware=[])
    broker.add_middleware(Schedules())

    @dramatiq.actor(broker=broker, every=1000)
    def tick() -> None: ...

    assert register(broker)
    broker.close()
