"""Why a job is where it is: each answer with its evidence, on a real file."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import datetime, timezone
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from litebroker import (
    Backoff,
    Context,
    Group,
    Holder,
    JobFailedError,
    JobRecord,
    Queue,
    Retention,
    SQLiteStorage,
    Standing,
    State,
    why,
)
from litebroker.explanation import Explanation, Seen, duration, explain
from litebroker.testing import ManualClock

LIMIT = 30
HERE = f"{socket.gethostname()}:{os.getpid()}"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def storage(tmp_path: Path, clock: ManualClock) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=clock)
    yield storage
    storage.close()


@pytest.fixture
def queue(storage: SQLiteStorage) -> Queue[Any]:
    return Queue("work", storage, backoff=Backoff.fixed(60))


def codes(answer: Explanation) -> list[str]:
    return [reason.code for reason in answer.reasons]


def notes(answer: Explanation) -> list[str]:
    return [note.code for note in answer.notes]


# Pending


def test_a_delayed_job_says_when_it_is_due(queue: Queue[Any], clock: ManualClock) -> None:
    job = queue.add(1, delay=100)
    clock.advance(60)

    answer = queue.why(job)

    assert codes(answer) == ["delayed", "no_worker"]
    assert answer.reasons[0].text == "it is due in 40s"
    assert answer.reasons[0].facts == {"due_at": job.due_at, "due_in_seconds": 40.0}
    assert answer.state is State.PENDING


def test_a_failed_attempt_that_waits_for_its_backoff_says_so_with_the_error(
    queue: Queue[Any], clock: ManualClock
) -> None:
    queue.add(1)
    (job,) = queue.claim()
    queue.fail(job, ValueError("no such user\nat all"))
    clock.advance(20)

    answer = queue.why(job)

    assert answer.reasons[0].code == "backoff"
    assert answer.reasons[0].text == "attempt 1 of 3 failed (ValueError: no such user), and the next one is due in 40s"
    assert answer.reasons[0].facts["worker"] == HERE
    assert notes(answer) == []


def test_a_paused_queue_is_named_first_and_with_the_command_that_resumes_it(
    storage: SQLiteStorage, clock: ManualClock
) -> None:
    queue: Queue[Any] = Queue("my work", storage)
    job = queue.add(1, delay=3600)
    queue.pause()
    clock.advance(300)

    answer = queue.why(job)

    assert codes(answer) == ["paused", "delayed", "no_worker"]
    assert answer.reasons[0].text == "its queue has been paused for 5m00s"
    assert answer.reasons[0].remedy == "litebroker resume 'my work'"


def test_a_full_group_names_those_that_hold_its_places(queue: Queue[Any]) -> None:
    queue.add_many([1, 2])  # not of the group
    ids = [queue.add(number, group=Group("customer", 2)).id for number in range(3)]
    queue.claim(4)

    answer = queue.why(ids[2])

    assert codes(answer) == ["group_full"]
    assert answer.reasons[0].text == (
        f"its group 'customer' is at its limit of 2, held by job {ids[0]} ({HERE}), job {ids[1]} ({HERE})"
    )
    assert answer.reasons[0].facts["holders"] == [
        {"job": job_id, "worker": HERE, "alive": True} for job_id in sorted(ids[:2])
    ]


def test_the_jobs_that_go_before_it_are_counted(queue: Queue[Any]) -> None:
    queue.add_many([1, 2, 3])
    job = queue.add(4)
    one_more = queue.add(5, priority=-1, group="g")
    last = queue.add(6, priority=-1, group="g")

    with closing(queue.storage.listener(["work"])):
        answer, first, second = queue.why(job), queue.why(one_more), queue.why(last)

    assert [it.text for it in answer.reasons] == ["3 jobs go before it"]
    assert codes(first) == ["claimable"]
    assert [it.text for it in second.reasons] == ["1 job of its group 'g' goes before it"]


def test_a_queue_that_nobody_works_on_says_so(queue: Queue[Any]) -> None:
    job = queue.add(1)

    answer = queue.why(job)

    assert codes(answer) == ["no_worker"]


def test_a_worker_that_listens_is_seen_though_it_has_nothing_to_do(queue: Queue[Any], clock: ManualClock) -> None:
    job = queue.add(1)
    clock.advance(3)
    listener = queue.storage.listener(["work"])

    answer = queue.why(job)
    listener.close()

    assert codes(answer) == ["claimable"]
    assert "due for 3.0s" in answer.reasons[0].text
    assert "a worker of its queue is there" in answer.reasons[0].text
    assert queue.why(job).reasons[0].code == "no_worker"


def test_the_next_in_line_waits_for_busy_workers(queue: Queue[Any]) -> None:
    busy = queue.add(1)
    job = queue.add(2)
    queue.claim()

    answer = queue.why(job)

    assert codes(answer) == ["busy"]
    assert HERE in answer.reasons[0].text
    assert answer.reasons[0].facts["holders"] == [{"job": busy.id, "worker": HERE, "alive": True}]


def test_a_job_that_lost_its_worker_before_says_how_that_attempt_ended(queue: Queue[Any], clock: ManualClock) -> None:
    job = queue.add(1)
    queue.claim()
    clock.advance(31)
    queue.storage.recover()

    answer = queue.why(job)

    assert notes(answer) == ["retried"]
    assert answer.notes[0].text.startswith("attempt 1 of 3 ended with its worker or its lease 0.0s ago: ")
    assert answer.notes[0].facts["outcome"] == "lapsed"


def test_a_job_says_that_it_holds_its_dedupe_key(queue: Queue[Any]) -> None:
    job = queue.add(1, dedupe_key="k")

    answer = queue.why(job)

    assert notes(answer) == ["holds_key"]
    assert answer.notes[0].facts == {"dedupe_key": "k", "job": job.id, "state": "pending"}


# Active


def test_a_leased_job_says_who_has_it_since_when_and_until_when(queue: Queue[Any], clock: ManualClock) -> None:
    queue.add(1)
    (job,) = queue.claim()
    clock.advance(10)
    queue.extend(job)
    clock.advance(12)

    answer = queue.why(job)

    assert codes(answer) == ["leased"]
    assert answer.reasons[0].text == (
        f"{HERE} claimed it 22s ago (attempt 1 of 3), renewed 12s ago; the lease ends in 18s"
    )
    assert answer.reasons[0].facts["alive"] is True
    assert answer.reasons[0].facts["lease_ends_in_seconds"] == 18.0
    assert notes(answer) == []


def test_a_lease_that_was_never_renewed_says_so(queue: Queue[Any]) -> None:
    queue.add(1)
    (job,) = queue.claim()

    answer = queue.why(job)

    assert "not renewed since" in answer.reasons[0].text
    assert answer.reasons[0].facts["renewed_at"] is None


@pytest.mark.parametrize(
    ("attempts", "then"),
    [(3, "it is tried again then, after attempt 1 of 3"), (1, "a dead letter then, since attempt 1 of 1 was its last")],
)
def test_a_lease_that_has_ended_says_what_becomes_of_the_job(
    queue: Queue[Any], clock: ManualClock, attempts: int, then: str
) -> None:
    job = queue.add(1, attempts=attempts)
    queue.claim()
    clock.advance(35)

    answer = queue.why(job)

    assert codes(answer) == ["lease_ended"]
    assert answer.reasons[0].text == (
        f"the lease of {HERE} ended 5.0s ago, and the next claim of the queue takes the job back: {then}"
    )
    assert notes(answer) == ["no_worker"]
    assert answer.state is State.ACTIVE


def test_a_job_of_a_killed_process_says_that_its_worker_is_gone(tmp_path: Path) -> None:
    script = (
        "import sys, time; from litebroker import Queue\n"
        "print(Queue('work', sys.argv[1]).claim()[0].id, flush=True); time.sleep(120)"
    )
    with Queue("work", tmp_path / "jobs.db") as queue:
        job = queue.add(1)
        waiting = queue.add(2)
        with subprocess.Popen(
            [sys.executable, "-c", script, tmp_path / "jobs.db"], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout
            assert process.stdout.readline() == f"{job.id}\n"
            before = queue.why(job)
            process.send_signal(signal.SIGKILL)
            process.wait(LIMIT)

        answer, other = queue.why(job), queue.why(waiting)

    worker = f"{socket.gethostname()}:{process.pid}"
    assert codes(before) == ["leased"]
    assert codes(answer) == ["worker_gone"]
    assert answer.reasons[0].text.startswith(f"its worker {worker} is gone, and any worker's next claim takes")
    assert answer.reasons[0].facts["alive"] is False
    assert notes(answer) == ["no_worker"]
    assert codes(other) == ["no_worker"]


def test_where_only_the_lease_tells_that_is_said(queue: Queue[Any]) -> None:
    queue.add(1)
    (job,) = queue.claim()
    record = job.record
    elsewhere = Holder(record.lease.token, "other:7", None, 0, (record.lease_until_ms or 0), None)

    answer = explain(
        Seen(
            now_ms=record.claimed_at_ms or 0,
            job_id=job.id,
            record=record,
            holders={job.id: elsewhere},
            awaited=True,
        )
    )

    assert codes(answer) == ["leased"]
    assert notes(answer) == ["worker_unknown"]


# Ended, or gone


def test_a_dead_letter_says_how_it_failed_and_how_to_let_it_run_again(queue: Queue[Any], clock: ManualClock) -> None:
    queue.add(1, attempts=1)
    (job,) = queue.claim()
    queue.fail(job, ValueError("no such user"))
    clock.advance(60)

    answer = queue.why(job)

    assert codes(answer) == ["failed"]
    assert answer.reasons[0].text == (
        f"it became a dead letter 1m00s ago, after attempt 1 of 1 on {HERE}: its handler raised"
        " ValueError: no such user"
    )
    assert answer.reasons[0].remedy == f"litebroker jobs retry {job.id}"
    assert answer.reasons[0].facts["reason"] == "handler"


def test_a_dead_letter_whose_key_another_job_holds_cannot_be_tried_again(queue: Queue[Any]) -> None:
    queue.add(1, attempts=1, dedupe_key="k", dedupe_until="ended")
    (job,) = queue.claim()
    queue.fail(job, "broken")
    holder = queue.add(2, dedupe_key="k", dedupe_until="ended")

    answer = queue.why(job)

    assert notes(answer) == ["key_held"]
    assert answer.notes[0].facts == {"dedupe_key": "k", "job": holder.id, "state": "pending"}
    assert "cannot be tried again" in answer.notes[0].text
    assert not queue.retry(job)


def test_a_completed_job_that_is_kept_says_when_and_by_whom(storage: SQLiteStorage, clock: ManualClock) -> None:
    queue: Queue[Any] = Queue("work", storage, retention=Retention(completed=None))
    job = queue.add(1)
    queue.complete(queue.claim()[0])
    clock.advance(5)

    answer = queue.why(job)

    assert [it.text for it in answer.reasons] == [f"it was completed 5.0s ago, by attempt 1 of 3 on {HERE}"]


def test_a_cancelled_job_says_when(queue: Queue[Any], clock: ManualClock) -> None:
    job = queue.add(1)
    queue.cancel(job)
    clock.advance(5)

    answer = queue.why(job)

    assert codes(answer) == ["cancelled"]
    assert "cancelled 5.0s ago" in answer.reasons[0].text


def test_a_job_that_is_gone_says_when_it_was_added(tmp_path: Path) -> None:
    with Queue("work", tmp_path / "jobs.db") as queue:
        before = datetime.now(timezone.utc)
        job = queue.add(1)
        queue.complete(queue.claim()[0])

        answer = queue.why(job)

    assert codes(answer) == ["missing"]
    assert answer.job is None
    assert abs((answer.reasons[0].facts["issued_at"] - before).total_seconds()) < 5
    assert str(answer).startswith(f"there is no job {job.id}: by its id it was added 0.")


@pytest.mark.parametrize(("attempts", "end"), [(3, "was completed"), (1, "failed, and was removed")])
def test_a_job_that_is_gone_and_whose_result_is_kept_says_how_it_ended(tmp_path: Path, attempts: int, end: str) -> None:
    def handle(_: int) -> int:
        if attempts == 1:
            raise ValueError
        return 7

    retention = Retention(failed=0)
    with Queue("work", tmp_path / "jobs.db", retention=retention, results=60, on_error=lambda *_: None) as queue:
        job = queue.add(1, attempts=attempts)
        worker = queue.process(handle)
        with suppress(JobFailedError):
            queue.result(job, timeout=LIMIT)
        worker.close()
        queue.purge()

        answer = queue.why(job)

    assert codes(answer) == ["missing"]
    assert f", and {end}: its result is still kept" in answer.reasons[0].text


def test_a_running_job_tells_what_its_handler_has_said(tmp_path: Path) -> None:
    said, seen = Event(), Event()

    def handle(_: int, context: Context) -> None:
        context.progress(0.4, "reading")
        said.set()
        seen.wait(LIMIT)

    with Queue("work", tmp_path / "jobs.db") as queue:
        job = queue.add(1)
        worker = queue.process(handle)
        said.wait(LIMIT)
        ends_at = time.monotonic() + LIMIT
        while queue.progress(job) is None and time.monotonic() < ends_at:
            time.sleep(0.01)

        answer = queue.why(job)
        seen.set()
        worker.close()

    assert codes(answer) == ["leased"]
    assert notes(answer) == ["progress"]
    assert answer.notes[0].text.endswith(" ago: 40% reading")


def test_an_id_of_the_future_was_never_given(tmp_path: Path) -> None:
    with Queue("work", tmp_path / "jobs.db") as queue:
        answer = queue.why(2**62)

    assert "no job has had it yet" in answer.reasons[0].text


@pytest.mark.parametrize("job", [-1, 2**63, True, "17"])
def test_what_is_no_id_is_refused(queue: Queue[Any], job: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="job="):
        queue.why(job)


# How it is said, and how it looks


def test_the_answer_in_words_has_its_evidence_below(queue: Queue[Any]) -> None:
    job = queue.add(1, delay=40, dedupe_key="k")
    queue.pause()

    lines = str(queue.why(job)).splitlines()

    assert lines[0] == f"job {job.id} of queue 'work' is pending: its queue has been paused for 0.0s"
    assert lines[1] == "  and it is due in 40s"
    assert lines[-1] == "  to change that: litebroker resume work"


def test_asking_writes_nothing(queue: Queue[Any], storage: SQLiteStorage, clock: ManualClock) -> None:
    due, delayed, held = queue.add(1), queue.add(2, delay=10), queue.add(3, priority=1)
    queue.claim()
    clock.advance(60)
    written = storage.transactions

    for job in (due, delayed, held):
        queue.why(job)

    assert storage.transactions == written


def test_a_job_that_changes_while_it_is_looked_at_is_looked_at_again(tmp_path: Path, clock: ManualClock) -> None:
    class Busy(SQLiteStorage):
        """Somebody claims between two looks."""

        def standing(self, job_id: int) -> Standing | None:
            found = super().standing(job_id)
            self.claim(["work"], limit=1, lease_ms=30_000)
            return found

    with closing(Busy(tmp_path / "jobs.db", clock=clock)) as storage:
        job = Queue("work", storage).add(1)

        answer = why(storage, job.id)

    assert codes(answer) == ["leased"]


def test_one_that_never_rests_is_told_as_it_was_last_seen() -> None:
    record = _record(state=State.PENDING)

    answer = explain(Seen(now_ms=5000, job_id=1, record=record, standing=Standing(100_000), awaited=None))

    assert [it.text for it in answer.reasons] == ["at least 100,000 jobs go before it"]
    assert answer.reasons[0].facts == {"ahead": 100_000, "at_least": True, "priority": 0}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0s"), (0.04, "0.0s"), (9.94, "9.9s"), (59, "59s"), (3600, "1h00m"), (200, "3m20s"), (273_600, "3d04h")],
)
def test_a_length_of_time_is_said_to_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_why_answers_within_100_ms_in_a_large_queue(tmp_path: Path) -> None:
    with Queue("work", tmp_path / "jobs.db", durability="relaxed") as queue:
        for _ in range(20):
            queue.add_many(range(10_000))
        last = queue.add(0)
        taken = []
        for _ in range(5):
            started = time.perf_counter()
            queue.why(last)
            taken.append(time.perf_counter() - started)

    assert min(taken) < 0.1


def _record(*, state: State) -> JobRecord:
    nothing: dict[str, str] = {}
    return JobRecord(
        1, "work", state, 0, 0, 0, 3, 0, None, None, None, None, None, None, None, None, None, nothing, None, (), b"1"
    )  # fmt: skip
