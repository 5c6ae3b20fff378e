"""What users run: `huey_consumer`, with each kind of worker, killed and stopped as it happens."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest
from tests.huey.conftest import WORKER_TYPES, Application, wait_until

from litebroker import State

Make = Callable[..., Application]


def has_begun(application: Application, tasks: int) -> bool:
    return len(application.notes("start")) >= tasks or application.is_drained()


def has_moved(application: Application, tasks: int) -> bool:
    return 503 - int(application.huey.scheduled_count()) >= tasks


@pytest.mark.parametrize("kind", WORKER_TYPES)
def test_tasks_run_once_and_a_graceful_stop_loses_none(application: Application, kind: str) -> None:
    work = application.task("work")
    consumer = application.start(kind)

    for number in range(60):
        work(number, 0.02)
    wait_until(lambda: len(application.notes("start")) > 10)
    consumer.send_signal(signal.SIGINT)
    assert consumer.wait(15) == 0
    stopped_at = len(application.notes("start"))
    application.start(kind)

    wait_until(application.is_drained)
    assert 10 < stopped_at < 60
    assert application.done() == {str(number): 1 for number in range(60)}
    assert len(application.notes("start")) == 60


@pytest.mark.parametrize("kind", WORKER_TYPES)
def test_a_result_reaches_who_waits_for_it(application: Application, kind: str) -> None:
    application.start(kind)

    result = application.task("add")(1, 2)

    assert result.get(blocking=True, timeout=20) == 3


@pytest.mark.parametrize("kind", WORKER_TYPES)
def test_tasks_of_a_consumer_that_is_killed_run_again_within_seconds(new_application: Make, kind: str) -> None:
    application = new_application(lease=60)
    work = application.task("work")
    consumer = application.start(kind)
    work(1, 30)
    wait_until(lambda: application.notes("start", "1"))

    application.kill(consumer)
    killed_at = time.monotonic()
    application.start(kind)

    wait_until(lambda: len(application.notes("start", "1")) == 2, seconds=10)
    assert time.monotonic() - killed_at < 10


def test_the_task_of_a_worker_process_that_is_killed_runs_in_another_at_once(new_application: Make) -> None:
    application = new_application(lease=60)
    application.start("process", 2)
    application.task("work")(1, 2)
    wait_until(lambda: application.notes("start", "1"))
    worker = int(application.notes("start", "1")[0][2])

    os.kill(worker, signal.SIGKILL)
    killed_at = time.monotonic()

    wait_until(lambda: application.done() == {"1": 1})
    assert time.monotonic() - killed_at < 6
    assert {line[2] for line in application.notes("start", "1")} > {str(worker)}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", WORKER_TYPES)
def test_of_2000_tasks_none_is_lost_when_consumers_are_killed_at_random_moments(
    application: Application, kind: str
) -> None:
    work = application.task("work")
    for number in range(2000):
        work(number, 0.001)
    moments = random.Random(kind)

    for _ in range(6):
        consumer = application.start(kind, 4)
        began = len(application.notes("start"))
        enough = began + moments.randint(20, 250)
        wait_until(partial(has_begun, application, enough))
        time.sleep(moments.random() / 50)
        application.kill(consumer)
    application.start(kind, 4)

    wait_until(application.is_drained, seconds=90)
    assert set(application.done()) == {str(number) for number in range(2000)}
    # Only what was running, or done and not ended yet, when its consumer was killed can run again: no more than is
    # claimed at once, and one more for each worker.
    assert sum(application.done().values()) <= 2000 + 6 * (64 + 4)
    assert not application.huey.dead_tasks()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_of_503_tasks_that_become_due_none_is_lost_whenever_the_consumer_is_killed(application: Application) -> None:
    work = application.task("work")
    for number in range(503):
        application.huey.add_schedule(work.s(number, delay=0.5))
    moments = random.Random(503)

    for _ in range(8):
        consumer = application.start("process", 1)
        moved = 503 - application.huey.scheduled_count()
        enough = min(503, moved + moments.randint(1, 120))
        wait_until(partial(has_moved, application, enough))
        application.kill(consumer)
    application.start("process", 2)

    wait_until(application.is_drained, seconds=60)
    assert set(application.done()) == {str(number) for number in range(503)}


def test_the_lock_of_a_task_that_is_killed_goes_with_it(new_application: Make) -> None:
    application = new_application(lease=60)
    consumer = application.start("process", 1)
    application.task("locked")(1, 30)
    wait_until(lambda: application.notes("start", "1"))
    assert application.huey.is_locked("the-lock")

    application.kill(consumer)
    application.start("process", 2)

    wait_until(lambda: len(application.notes("start", "1")) == 2)


@pytest.mark.timeout(90)
def test_a_task_that_kills_its_worker_time_after_time_becomes_a_dead_letter(new_application: Make) -> None:
    application = new_application(max_receives=3)
    application.start("process", 2, "--health-check-interval", "1")
    result = application.task("deadly")()
    for number in range(5):
        application.task("work")(number)

    wait_until(application.huey.dead_tasks, seconds=60)
    [dead] = application.huey.dead_tasks()
    assert (dead.id, dead.reason, dead.receives) == (result.id, "lapsed", 3)
    assert len(application.notes("start", "deadly")) == 3
    wait_until(lambda: len(application.done()) == 5)


@pytest.mark.parametrize("kind", WORKER_TYPES)
def test_a_task_that_is_interrupted_runs_again(application: Application, kind: str) -> None:
    consumer = application.start(kind)
    application.task("work")(1, 20)
    wait_until(lambda: application.notes("start", "1"))

    consumer.send_signal(signal.SIGTERM)
    consumer.wait(15)
    application.start(kind)

    wait_until(lambda: len(application.notes("start", "1")) == 2, seconds=10)
    [job] = application.huey.storage.jobs(application.huey.storage.queue, State.ACTIVE)
    assert job.attempts == 1  # the interrupted one is not counted


@pytest.mark.parametrize("kind", WORKER_TYPES)
@pytest.mark.parametrize("name", ["work", "count_up"])
def test_a_task_that_takes_longer_than_its_lease_runs_once(new_application: Make, kind: str, name: str) -> None:
    application = new_application(lease=1)
    application.start(kind)
    application.start(kind)
    application.task(name)(1, 3.5)

    wait_until(lambda: application.notes("done", "1"))

    wait_until(application.is_drained)
    assert len(application.notes("start", "1")) == 1


def test_a_task_that_may_run_only_once_does_not_run_again_when_it_is_killed(application: Application) -> None:
    consumer = application.start("process", 1)
    application.task("once")(1, 30)
    wait_until(lambda: application.notes("start", "1"))

    application.kill(consumer)
    application.start("process", 1)

    wait_until(application.huey.dead_tasks)
    [dead] = application.huey.dead_tasks()
    assert dead.reason == "lapsed"
    assert len(application.notes("start", "1")) == 1


def test_a_task_that_ends_its_worker_is_tried_again_and_becomes_a_dead_letter(new_application: Make) -> None:
    application = new_application(max_receives=2)
    application.start("thread", 2, "--health-check-interval", "1")
    application.task("leave")(1)

    wait_until(application.huey.dead_tasks, seconds=30)

    [dead] = application.huey.dead_tasks()
    assert (dead.reason, dead.error) == ("exit", "SystemExit: 3")
    assert len(application.notes("start", "1")) == 2


def test_retries_with_delay_come_through_the_schedule(application: Application) -> None:
    application.start()

    application.task("flaky")(1, retries=2, retry_delay=1)

    wait_until(lambda: application.done() == {"1": 1})
    wait_until(application.is_drained)
    assert len(application.notes("start", "1")) == 2


def test_a_task_that_only_a_newer_release_knows_waits_for_it(application: Application) -> None:
    old = application.start(HUEY_OLD_RELEASE="1")
    application.task("new_task")(1)
    wait_until(lambda: "is not known here" in application.log())
    old.send_signal(signal.SIGINT)
    old.wait(15)

    application.start()

    wait_until(lambda: application.done() == {"1": 1})
    assert not application.huey.dead_tasks()


def test_what_cannot_be_decoded_becomes_a_dead_letter_and_the_next_task_runs(application: Application) -> None:
    application.huey.storage.enqueue(b"no pickle", priority=1)
    application.task("work")(1)

    application.start("thread", 1)

    wait_until(lambda: application.done() == {"1": 1})
    [dead] = application.huey.dead_tasks()
    assert dead.reason == "parse"


@pytest.mark.timeout(100)
@pytest.mark.slow
def test_a_periodic_task_runs_once_a_minute_however_many_consumers_there_are(application: Application) -> None:
    for _ in range(3):
        application.start(HUEY_PERIODIC="1")
    wait_until(lambda: application.notes("tick"), seconds=70)
    first = application.notes("tick")[0][1]

    wait_until(lambda: [line for line in application.notes("tick") if line[1] != first], seconds=70)

    ticks = [line[1] for line in application.notes("tick")]
    assert len(ticks) == len(set(ticks))


def test_chords_and_pipelines_run_in_consumers(application: Application) -> None:
    chord = pytest.importorskip("huey.api").__dict__.get("chord")
    if chord is None:
        pytest.skip("huey before 3.0 has no chords")
    add, total = application.task("add"), application.task("total")
    application.start("process")

    pipeline = application.huey.enqueue(add.s(1, 2).then(add, 10).then(add, 100))
    together = application.huey.enqueue(chord([add.s(number, number) for number in range(10)], total))

    assert [pipeline[0], pipeline[1], pipeline[2]] == [3, 13, 113]
    assert together.get(blocking=True, timeout=20) == 90
