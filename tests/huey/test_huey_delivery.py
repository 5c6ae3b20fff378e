"""How a leased task ends: once, with what follows from it, or not at all."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import inspect
import sqlite3
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import huey as stock
import pytest
from huey.exceptions import CancelExecution, HueyException, RetryTask, TaskException

from litebroker import DatabaseBusyError, SQLiteStorage, State
from litebroker_huey import SIGNAL_DEAD, SQLiteHuey

needs_chords = pytest.mark.skipif(not hasattr(stock.api, "chord"), reason="huey before 3.0 has no chords")


def run_next(huey: SQLiteHuey) -> Any:
    task = huey.dequeue()
    assert task is not None
    return huey.execute(task)


def counts(huey: SQLiteHuey) -> tuple[int, int, int, int]:
    """Waiting, scheduled, with workers, dead."""
    return (huey.pending_count(), huey.scheduled_count(), huey.inflight_count(), len(huey.dead_tasks()))


def let_lapse(huey: SQLiteHuey, task: Any) -> None:
    """What happens to a lease whose worker is heard of no more; the worker does not know yet."""
    storage = huey.storage
    lease = task._litebroker_delivery.lease  # noqa: SLF001 - nobody else needs it
    storage.engine.extend([lease], 1)
    time.sleep(0.01)
    storage.engine.recover([storage.queue, storage.schedule])


def raise_(error: BaseException) -> None:
    raise error


def test_a_task_is_leased_while_it_runs_and_gone_when_it_is_done(huey: SQLiteHuey) -> None:
    seen = []

    @huey.task()
    def look() -> None:
        seen.append(counts(huey))

    look()
    run_next(huey)

    assert seen == [(0, 0, 1, 0)]
    assert counts(huey) == (0, 0, 0, 0)


ENDINGS: dict[str, tuple[Callable[[SQLiteHuey], Any], tuple[int, int, int, int]]] = {
    "it returns": (lambda _: None, (0, 0, 0, 0)),
    "it fails for good": (lambda _: raise_(ValueError("x")), (0, 0, 0, 1)),
    "it is cancelled": (lambda _: raise_(CancelExecution(retry=False)), (0, 0, 0, 0)),
    "it asks to be run again": (lambda _: raise_(RetryTask()), (1, 0, 0, 0)),
    "it asks to be run again later": (lambda _: raise_(RetryTask(delay=60)), (0, 1, 0, 0)),
    "its worker stops": (lambda _: raise_(KeyboardInterrupt()), (1, 0, 0, 0)),
    "it finds a lock taken": (lambda huey: huey.lock_task("taken").__enter__(), (0, 0, 0, 0)),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_settles_the_lease(huey: SQLiteHuey, ending: str) -> None:
    what, expected = ENDINGS[ending]
    huey.lock_task("taken").acquire()

    @huey.task()
    def task() -> None:
        what(huey)

    task()
    run_next(huey)

    assert counts(huey) == expected


def test_a_task_that_fails_with_retries_left_waits_again_and_is_no_dead_letter(huey: SQLiteHuey) -> None:
    @huey.task(retries=1)
    def fail() -> None:
        raise ValueError("x")

    fail()
    run_next(huey)
    after_the_first = counts(huey)
    run_next(huey)

    assert after_the_first == (1, 0, 0, 0)
    assert counts(huey) == (0, 0, 0, 1)


def test_a_revoked_and_an_expired_task_end_without_running(huey: SQLiteHuey) -> None:
    @huey.task()
    def never() -> None:
        raise AssertionError("it ran")

    huey.revoke(never().task, revoke_once=True)
    huey.enqueue(never.s(expires=datetime.now() - timedelta(days=1)))  # noqa: DTZ005 - as huey's users write it

    assert run_next(huey) is None
    assert run_next(huey) is None
    assert counts(huey) == (0, 0, 0, 0)


def test_revoke_once_is_not_used_up_when_the_worker_dies_before_the_task_is_ended(huey: SQLiteHuey) -> None:
    @huey.task()
    def never() -> None:
        raise AssertionError("it ran")

    result = never()
    result.revoke(revoke_once=True)
    task = huey.dequeue()
    let_lapse(huey, task)

    huey.execute(task)  # by the worker that does not know that it is lost
    assert result.is_revoked()
    run_next(huey)

    assert not result.is_revoked()
    assert counts(huey) == (0, 0, 0, 0)


def test_a_run_that_lost_its_lease_does_not_retry_the_task_a_second_time(huey: SQLiteHuey) -> None:
    @huey.task(retries=1)
    def fail() -> None:
        raise ValueError("x")

    fail()
    lost = huey.dequeue()
    let_lapse(huey, lost)

    huey.execute(lost)

    assert counts(huey) == (1, 0, 0, 0)
    assert huey.pending()[0].retries == 1


def test_a_run_that_lost_its_lease_does_not_start_the_next_of_its_pipeline(huey: SQLiteHuey) -> None:
    @huey.task()
    def first() -> int:
        return 1

    @huey.task()
    def second(number: int) -> int:
        return number

    huey.enqueue(first.s().then(second))
    lost = huey.dequeue()
    let_lapse(huey, lost)

    huey.execute(lost)

    assert [type(task).__name__ for task in huey.pending()] == ["first"]


@needs_chords
def test_a_member_of_a_chord_that_runs_twice_is_counted_once(huey: SQLiteHuey) -> None:
    @huey.task()
    def member(number: int) -> int:
        return number

    @huey.task()
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    result = huey.enqueue(stock.api.chord([member.s(1), member.s(2)], total))
    lost = huey.dequeue()
    let_lapse(huey, lost)
    huey.execute(lost)
    assert huey.storage.engine.size("huey-counters:app") == 0  # nothing of the lost run counts
    run_next(huey)
    assert [type(task).__name__ for task in huey.pending()] == ["member"]
    run_next(huey)
    run_next(huey)

    assert result.get() == 3
    assert huey.storage.engine.size("huey-counters:app") == 0
    assert counts(huey) == (0, 0, 0, 0)


@needs_chords
def test_a_chord_completes_when_a_member_is_a_dead_letter(huey: SQLiteHuey) -> None:
    @huey.task(max_receives=1)
    def member(number: int) -> int:
        return number

    @huey.task()
    def total(values: list[Any]) -> int:
        return len(values)

    result = huey.enqueue(stock.api.chord([member.s(1), member.s(2)], total))
    let_lapse(huey, huey.dequeue())
    run_next(huey)
    run_next(huey)

    assert result.get() == 2
    assert len(huey.dead_tasks()) == 1


@needs_chords
def test_a_member_that_died_and_runs_again_is_not_counted_again(huey: SQLiteHuey) -> None:
    @huey.task(max_receives=1)
    def member(number: int) -> int:
        return number

    @huey.task()
    def total(values: list[Any]) -> int:
        return len(values)

    huey.enqueue(stock.api.chord([member.s(1, priority=1), member.s(2)], total))
    let_lapse(huey, huey.dequeue())
    huey.retry_dead()

    run_next(huey)  # the first, again
    assert [task.args for task in huey.pending()] == [(2,)]
    run_next(huey)

    assert [type(task).__name__ for task in huey.pending()] == ["total"]


def test_signals_of_a_chord_are_sent_after_its_commit(huey: SQLiteHuey) -> None:
    if not hasattr(stock.api, "chord"):
        pytest.skip("huey before 3.0 has no chords")

    @huey.task()
    def member() -> None:
        pass

    @huey.task()
    def total(_: list[Any]) -> None:
        pass

    in_another_thread: list[int] = []

    @huey.signal("enqueued")
    def look(_signal: str, task: Any, *_: Any) -> None:
        if type(task).__name__ == "total":
            thread = threading.Thread(target=lambda: in_another_thread.append(huey.pending_count()))
            thread.start()
            thread.join(5)

    huey.enqueue(stock.api.chord([member.s()], total))
    run_next(huey)

    assert in_another_thread == [1]


def test_the_schedule_gives_a_due_task_to_the_queue_in_one_transaction(huey: SQLiteHuey) -> None:
    @huey.task()
    def later() -> None:
        pass

    huey.add_schedule(later.s(delay=-1))

    due = list(huey.read_schedule())
    before = counts(huey)
    writes: SQLiteStorage = huey.storage.engine
    at = writes.transactions
    huey.enqueue(due[0])

    assert before == (0, 1, 0, 0)
    assert counts(huey) == (1, 0, 0, 0)
    assert writes.transactions == at + 1


def test_a_due_task_that_was_read_and_not_enqueued_is_still_in_the_schedule(huey: SQLiteHuey) -> None:
    @huey.task()
    def later() -> None:
        pass

    huey.add_schedule(later.s(delay=-1))
    [task] = huey.read_schedule()
    let_lapse(huey, task)

    huey.enqueue(task)  # too late: another scheduler has it now
    assert counts(huey) == (0, 1, 0, 0)
    [again] = huey.read_schedule()
    huey.enqueue(again)

    assert counts(huey) == (1, 0, 0, 0)


def test_a_scheduler_that_stops_half_way_leaves_the_rest_to_others_at_once(huey: SQLiteHuey) -> None:
    @huey.task()
    def later(number: int) -> None:
        pass

    for number in range(5):
        huey.add_schedule(later.s(number, delay=-1))
    due = iter(huey.read_schedule())
    huey.enqueue(next(due))
    del due

    others = [task.args[0] for task in huey.read_schedule()]

    assert others == [1, 2, 3, 4]


def test_due_tasks_keep_their_priority(huey: SQLiteHuey) -> None:
    @huey.task()
    def later(name: str) -> None:
        pass

    huey.add_schedule(later.s("low", delay=-2, priority=1.5))
    huey.add_schedule(later.s("high", delay=-1, priority=2))
    for task in huey.read_schedule():
        huey.enqueue(task)

    assert [task.args[0] for task in huey.pending()] == ["high", "low"]


@pytest.mark.parametrize("value", [None, 7], ids=["as the lease ends", "as the result is stored"])
def test_a_storage_error_in_the_middle_of_the_bookkeeping_leads_to_another_run(
    tmp_path: Path, value: int | None
) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", timeout=0.1, read_timeout=0.05)
    other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    runs = []

    @huey.task()
    def task() -> int | None:
        runs.append(1)
        if len(runs) == 1:
            other.execute("begin immediate")  # as another program may, for longer than anyone waits
        return value

    result = task()
    claimed = huey.dequeue()
    with pytest.raises(DatabaseBusyError):
        huey.execute(claimed)
    other.execute("rollback")
    let_lapse(huey, claimed)
    run_next(huey)

    assert len(runs) == 2
    assert result.get() == value
    assert counts(huey) == (0, 0, 0, 0)
    other.close()
    huey.storage.close()


def test_a_result_that_cannot_be_serialized_is_a_dead_letter_after_one_run(huey: SQLiteHuey) -> None:
    runs = []

    @huey.task()
    def make_lock() -> Any:
        runs.append(1)
        return threading.Lock()

    result = make_lock()
    with pytest.raises(TypeError, match="pickle"):
        run_next(huey)

    assert [dead.reason for dead in huey.dead_tasks()] == ["result"]
    assert len(runs) == 1
    with pytest.raises(TaskException, match="pickle"):
        result.get()


def test_who_waits_for_a_dead_letter_is_told(huey: SQLiteHuey) -> None:
    told = []

    @huey.signal(SIGNAL_DEAD)
    def note(_signal: str, task: Any) -> None:
        told.append(task.id)

    @huey.task(max_receives=1)
    def first() -> None:
        pass

    @huey.task()
    def second() -> None:
        pass

    results = huey.enqueue(first.s().then(second))
    let_lapse(huey, huey.dequeue())

    assert told == [next(iter(results)).id]
    for result in results:
        with pytest.raises(TaskException, match="lapsed"):
            result.get()


def test_a_run_that_knows_that_it_lost_its_lease_stores_no_result(huey: SQLiteHuey) -> None:
    @huey.task(context=True)
    def task(task: Any = None) -> int:
        let_lapse(huey, task)
        task._litebroker_delivery.lose()  # noqa: SLF001 - as the heartbeat does, when it finds out
        return 7

    result = task()
    run_next(huey)

    assert result.get() is None
    assert counts(huey) == (1, 0, 0, 0)


def test_who_waits_for_a_dead_letter_that_another_program_found_is_told_once(huey: SQLiteHuey, tmp_path: Path) -> None:
    told = []

    @huey.signal(SIGNAL_DEAD)
    def note(_signal: str, task: Any) -> None:
        told.append(task.id)

    @huey.task(max_receives=1)
    def task() -> None:
        pass

    result = task()
    huey.storage.engine.extend([huey.dequeue()._litebroker_delivery.lease], 1)  # noqa: SLF001
    time.sleep(0.01)
    other = SQLiteStorage(tmp_path / "jobs.db")
    other.recover()
    other.close()

    for _ in range(2):
        huey.storage.looked_after_at = -1000.0
        list(huey.read_schedule())  # where a scheduler looks

    assert told == [result.id]
    with pytest.raises(TaskException, match="lapsed"):
        result.get()


def test_a_task_with_one_receive_is_not_given_out_again_when_it_is_interrupted(huey: SQLiteHuey) -> None:
    @huey.task(max_receives=1)
    def task() -> None:
        raise KeyboardInterrupt

    task()
    run_next(huey)

    assert counts(huey) == (0, 0, 0, 1)
    assert huey.dead_tasks()[0].reason == "interrupted"


def test_a_handler_may_enqueue_the_interrupted_task_itself(huey: SQLiteHuey) -> None:
    @huey.signal("interrupted")
    def again(_signal: str, task: Any) -> None:
        huey.enqueue(task)

    @huey.task()
    def task() -> None:
        raise KeyboardInterrupt

    task()
    run_next(huey)

    assert counts(huey) == (1, 0, 0, 0)


def test_an_interrupted_task_that_is_done_before_its_process_ends_does_not_run_again(huey: SQLiteHuey) -> None:
    if "discard(task)" not in inspect.getsource(stock.api.Huey._execute):  # noqa: SLF001
        pytest.skip("this huey itself fails a task that ends after notify_interrupted_tasks")
    started, go_on = threading.Event(), threading.Event()

    @huey.task()
    def task() -> int:
        started.set()
        go_on.wait(5)
        return 7

    result = task()
    worker = threading.Thread(target=run_next, args=[huey])
    worker.start()
    started.wait(5)
    huey.notify_interrupted_tasks()
    given_back = counts(huey)
    go_on.set()
    worker.join(5)

    assert given_back == (1, 0, 0, 0)
    assert counts(huey) == (0, 0, 0, 0)
    assert result.get() == 7


def test_a_task_may_enqueue_itself(huey: SQLiteHuey) -> None:
    @huey.task(context=True)
    def count(number: int, task: Any = None) -> int:
        if task.args[0] < 3:
            task.args = (task.args[0] + 1,)
            huey.enqueue(task)
        return number

    result = count(1)
    values = [run_next(huey) for _ in range(3)]

    assert values == [1, 2, 3]
    assert result.get() == 3
    assert counts(huey) == (0, 0, 0, 0)


def test_a_lock_ends_with_the_lease_of_the_task_that_holds_it(huey: SQLiteHuey) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @huey.task()
    @huey.lock_task("lock")
    def task() -> None:
        inside.set()
        go_on.wait(5)

    task()
    claimed = huey.dequeue()
    worker = threading.Thread(target=huey.execute, args=[claimed])
    worker.start()
    inside.wait(5)
    is_held = huey.is_locked("lock")
    let_lapse(huey, claimed)
    is_held_after = huey.is_locked("lock")
    go_on.set()
    worker.join(5)

    assert is_held
    assert not is_held_after


def test_a_lock_that_a_task_only_acquires_stays_for_another_to_release(huey: SQLiteHuey) -> None:
    @huey.task()
    def begin() -> None:
        huey.lock_task("lock").acquire()

    @huey.task()
    def finish() -> None:
        huey.lock_task("lock").clear()

    begin()
    run_next(huey)
    between = huey.is_locked("lock")
    finish()
    run_next(huey)

    assert between
    assert not huey.is_locked("lock")


def test_a_lock_ends_after_its_ttl(huey: SQLiteHuey) -> None:
    huey.lock_task("lock", ttl=0.05).acquire()
    assert huey.is_locked("lock")

    end = time.monotonic() + 5
    while huey.is_locked("lock") and time.monotonic() < end:
        time.sleep(0.01)

    assert not huey.is_locked("lock")


@pytest.mark.parametrize(("unknown_ttl", "expected"), [(3600, (1, 0, 0, 0)), (0, (0, 0, 0, 1))])
def test_a_task_that_is_not_known_waits_and_then_is_a_dead_letter(
    tmp_path: Path, unknown_ttl: float, expected: tuple[int, int, int, int]
) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", unknown_ttl=unknown_ttl, read_timeout=0.01)

    @huey.task()
    def task() -> None:
        pass

    result = task()
    task.unregister()

    assert huey.dequeue() is None
    assert counts(huey) == expected
    if unknown_ttl:
        [job] = huey.storage.engine.page("huey:app", State.PENDING)
        assert job.attempts == 0  # to be offered costs nothing
    else:
        assert (huey.dead_tasks()[0].reason, huey.dead_tasks()[0].id) == ("unknown", result.id)
        with pytest.raises(TaskException, match="unknown"):
            result.get()
    huey.storage.close()


def test_dead_letters_are_listed_run_again_and_discarded(huey: SQLiteHuey) -> None:
    fails = True

    @huey.task()
    def task(number: int) -> int:
        if fails:
            raise ValueError(f"not {number}")
        return number

    results = [task(number) for number in range(3)]
    for _ in results:
        run_next(huey)
    listed = huey.dead_tasks()
    fails = False
    again = huey.retry_dead(results[1].id)
    value = run_next(huey)
    gone = huey.discard_dead()

    assert [(dead.id, dead.error) for dead in listed] == [
        (result.id, f"ValueError: not {number}") for number, result in reversed(list(enumerate(results)))
    ]
    assert "raise ValueError" in listed[0].traceback
    assert listed[0].died_at is not None
    assert listed[0].died_at.tzinfo is timezone.utc
    assert (again, value, gone, huey.dead_tasks()) == (1, 1, 2, [])


def test_no_more_dead_letters_are_kept_than_was_said(tmp_path: Any) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", keep_dead=2, read_timeout=0.01)

    @huey.task()
    def fail(number: int) -> None:
        raise ValueError(number)

    for number in range(5):
        fail(number)
        run_next(huey)
    list(huey.read_schedule())  # where a scheduler looks after it

    assert [dead.error for dead in huey.dead_tasks()] == ["ValueError: 4", "ValueError: 3"]
    huey.storage.close()


@pytest.mark.parametrize("key", ["the-key", True, lambda number: f"key-{number}"])
def test_a_second_task_of_the_same_key_gives_the_handle_of_the_first(huey: SQLiteHuey, key: Any) -> None:
    @huey.task(dedupe_key=key)
    def task(number: int) -> int:
        return number

    first, second = task(1), task(1)
    waiting = counts(huey)
    run_next(huey)

    assert second.id == first.id
    assert waiting == (1, 0, 0, 0)
    assert second.get() == 1
    assert task(1).id != first.id


def test_a_key_is_held_in_the_schedule_and_while_the_task_runs_and_over_its_retries(huey: SQLiteHuey) -> None:
    @huey.task(dedupe_key="key", retries=1, retry_delay=60)
    def task() -> None:
        assert task().id == first.id  # a second one while this one runs
        raise ValueError("again, later")

    first = task.schedule(delay=60)
    huey.execute(huey.dequeue())  # into the schedule
    in_schedule = task()
    [due] = huey.read_schedule(datetime.now(timezone.utc).replace(tzinfo=None) + timedelta(hours=1))
    due.eta = None
    huey.enqueue(due)
    run_next(huey)
    in_retry = task()

    assert in_schedule.id == first.id
    assert in_retry.id == first.id
    assert counts(huey) == (0, 1, 0, 0)


def test_a_refused_duplicate_sends_no_signal(huey: SQLiteHuey) -> None:
    sent = []

    @huey.signal("enqueued")
    def note(_signal: str, task: Any) -> None:
        sent.append(task.id)

    @huey.task(dedupe_key="key")
    def task() -> None:
        pass

    first = task()
    task()

    if sent:  # huey has the signal since 2.5.3
        assert sent == [first.id]


def test_of_many_threads_that_enqueue_one_key_one_wins(huey: SQLiteHuey) -> None:
    @huey.task(dedupe_key="key")
    def task() -> None:
        pass

    ids = []
    threads = [threading.Thread(target=lambda: ids.append(task().id)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(ids)) == 1
    assert counts(huey) == (1, 0, 0, 0)


def test_immediate_mode_is_as_huey_has_it(huey: SQLiteHuey) -> None:
    @huey.task(dedupe_key="key")
    def task(number: int) -> int:
        return number

    huey.immediate = True
    result = task(5)
    at_once = (result.get(), type(huey.storage).__name__)
    huey.immediate = False
    task(6)

    assert at_once == (5, "MemoryStorage")
    assert counts(huey) == (1, 0, 0, 0)


def test_waiting_for_a_result_ends_with_its_time(huey: SQLiteHuey) -> None:
    @huey.task()
    def task() -> int:
        return 1

    with pytest.raises(HueyException, match="timed out"):
        task().get(blocking=True, timeout=0.05)


def test_flush_forgets_what_waits_runs_and_died(huey: SQLiteHuey) -> None:
    @huey.task(retries=1)
    def task() -> None:
        huey.flush()
        raise ValueError("x")

    @huey.task()
    def fail() -> None:
        raise ValueError("x")

    fail()
    run_next(huey)
    task()
    task.schedule(delay=60)
    run_next(huey)

    assert counts(huey) == (0, 0, 0, 0)
