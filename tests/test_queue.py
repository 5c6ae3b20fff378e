"""The direct API: what a queue takes, what it refuses, and what it answers."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypedDict

import pytest

from litebroker import (
    RAW,
    Backoff,
    Counts,
    ErrorContext,
    Group,
    GroupConflictError,
    Job,
    NewJob,
    PayloadError,
    PayloadTooLargeError,
    Queue,
    Retention,
    ScheduleError,
    State,
    StorageClosedError,
)
from litebroker.sqlite import SQLiteStorage
from litebroker.storage import Storage
from litebroker.testing import ManualClock


class Email(TypedDict):
    to: str


FIRST: Email = {"to": "a@example.com"}
SECOND: Email = {"to": "b@example.com"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def storage(clock: ManualClock, tmp_path: Path) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=clock, durability="relaxed")
    yield storage
    storage.close()


@pytest.fixture
def queue(storage: Storage) -> Queue[Email]:
    return Queue("emails", storage, backoff=Backoff.fixed(60))


def claimed(queue: Queue[Any]) -> Job[Any]:
    (job,) = queue.claim()
    return job


def now(clock: ManualClock) -> datetime:
    return datetime.fromtimestamp(clock.now_ms() / 1000, timezone.utc)


# Adding and claiming


def test_a_job_comes_back_as_it_was_added(queue: Queue[Email], clock: ManualClock) -> None:
    added = queue.add(
        FIRST, priority=-3, dedupe_key="welcome:1", group="a", attempts=7, headers={"trace": "1"}, task="send", ref="r1"
    )

    job = claimed(queue)

    assert job.data == FIRST
    assert (job.id, job.queue, job.state, job.priority) == (added.id, "emails", State.ACTIVE, -3)
    assert (job.dedupe_key, job.group, job.headers, job.task, job.ref) == (
        "welcome:1",
        "a",
        {"trace": "1"},
        "send",
        "r1",
    )
    assert (job.attempts, job.max_attempts) == (1, 7)
    assert job.created_at == job.due_at == job.claimed_at == now(clock)
    assert job.lease_until == now(clock) + timedelta(seconds=30)


def test_what_add_answers_is_what_was_stored(queue: Queue[Email]) -> None:
    job = queue.add(FIRST, delay=5, priority=9, group="a", headers={"trace": "1"}, task="send", ref="r1")

    stored = queue.get(job.id)

    assert stored is not None
    assert stored.record == job.record
    assert (job.data, job.duplicate) == (FIRST, False)


def test_a_queue_of_bytes_takes_them_as_they_are(storage: Storage) -> None:
    queue: Queue[bytes] = Queue("images", storage, serializer=RAW)
    queue.add(b"\x00\xff")

    job = claimed(queue)

    assert job.data == b"\x00\xff"


def test_a_queue_of_bytes_reads_what_was_added_as_json(storage: Storage, queue: Queue[Email]) -> None:
    queue.add(FIRST)
    other: Queue[Any] = Queue("emails", storage, serializer=RAW)

    job = claimed(other)

    assert job.data == FIRST


@pytest.mark.parametrize("delay", [60, 60.0, timedelta(minutes=1)])
def test_a_delay_counts_from_now(queue: Queue[Email], clock: ManualClock, delay: float | timedelta) -> None:
    job = queue.add(FIRST, delay=delay)

    assert queue.claim() == []
    clock.advance(60)
    assert claimed(queue).id == job.id


def test_run_at_is_an_instant_in_any_time_zone(queue: Queue[Email], clock: ManualClock) -> None:
    east = timezone(timedelta(hours=5, minutes=45))
    job = queue.add(FIRST, run_at=(now(clock) + timedelta(minutes=1)).astimezone(east))

    assert queue.claim() == []
    clock.advance(60)
    assert claimed(queue).id == job.id
    assert job.due_at == now(clock)


def test_a_past_run_at_is_due_at_once(queue: Queue[Email]) -> None:
    job = queue.add(FIRST, run_at=datetime(1961, 4, 12, tzinfo=timezone.utc))

    assert claimed(queue).id == job.id


def test_a_held_dedupe_key_answers_its_holder(queue: Queue[Email]) -> None:
    first = queue.add(FIRST, dedupe_key="welcome:1", priority=5)

    again = queue.add(SECOND, dedupe_key="welcome:1")

    assert (again.id, again.duplicate, again.priority, again.data) == (first.id, True, 5, FIRST)
    assert queue.size() == 1


def test_a_key_that_is_held_until_the_end_is_free_after_it(queue: Queue[Email]) -> None:
    first = queue.add(FIRST, dedupe_key="daily", dedupe_until="ended")
    queue.fail(claimed(queue), retry=False)

    again = queue.add(FIRST, dedupe_key="daily", dedupe_until="ended")

    assert (again.duplicate, again.id == first.id) == (False, False)


def test_each_position_of_a_batch_has_its_job(queue: Queue[Email]) -> None:
    holder = queue.add(FIRST, dedupe_key="k")

    jobs = queue.add_many(
        [
            FIRST,
            NewJob(SECOND, priority=9),
            NewJob(SECOND, dedupe_key="k"),
            NewJob(SECOND, dedupe_key="new"),
            NewJob(FIRST, dedupe_key="new"),
        ]
    )

    assert [job.duplicate for job in jobs] == [False, False, True, False, True]
    assert (jobs[2].id, jobs[2].data) == (holder.id, FIRST)
    assert (jobs[4].id, jobs[4].data) == (jobs[3].id, SECOND)
    assert [job.id for job in queue.claim(10)] == [jobs[1].id, holder.id, jobs[0].id, jobs[3].id]


def test_an_empty_batch_is_an_empty_list(queue: Queue[Email]) -> None:
    assert queue.add_many([]) == []


def test_a_batch_goes_to_several_queues_at_once(queue: Queue[Email], storage: Storage) -> None:
    other: Queue[Email] = Queue("letters", storage)

    queue.add_many([FIRST, NewJob(SECOND, queue="letters")])

    assert (claimed(queue).data, claimed(other).data) == (FIRST, SECOND)


def test_one_bad_job_of_a_batch_stores_none(queue: Queue[Any]) -> None:
    with pytest.raises(PayloadError, match=r"at position 1: .*nan"):
        queue.add_many([FIRST, {"to": float("nan")}])

    assert queue.stats() == Counts()


def test_a_group_that_differs_stores_nothing_of_the_batch(queue: Queue[Email]) -> None:
    queue.add(FIRST, group=Group("a", concurrency=2))

    with pytest.raises(GroupConflictError, match="concurrency 2, not 3"):
        queue.add_many([SECOND, NewJob(SECOND, group=Group("a", concurrency=3))])

    assert queue.size() == 1


# Refusals, before anything is written

BAD_PAYLOADS = [
    float("nan"),
    {"a": [1, float("inf")]},
    "\ud800",
    {"k": "x\udfff"},
    {1: "a"},
    object(),
    {"a": {1, 2}},
    b"x",
]


@pytest.mark.parametrize("payload", BAD_PAYLOADS, ids=repr)
def test_a_payload_that_json_cannot_hold_is_refused(queue: Queue[Any], payload: Any) -> None:
    with pytest.raises(PayloadError):
        queue.add(payload)

    assert queue.storage.queues() == []


def test_a_payload_over_the_limit_is_refused(storage: Storage) -> None:
    queue: Queue[str] = Queue("emails", storage, max_payload_bytes=100)

    with pytest.raises(PayloadTooLargeError, match="101 bytes, over the limit of 100") as refusal:
        queue.add("x" * 99)

    assert (refusal.value.size, refusal.value.limit) == (101, 100)
    assert storage.queues() == []


def test_a_payload_at_the_limit_is_taken(storage: Storage) -> None:
    queue: Queue[str] = Queue("emails", storage, max_payload_bytes=100)

    queue.add("x" * 98)

    assert claimed(queue).data == "x" * 98


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"run_at": datetime(2027, 1, 1)}, ValueError, "no time zone"),  # noqa: DTZ001
    ({"run_at": 1_800_000_000}, TypeError, "datetime"),
    ({"delay": 1, "run_at": datetime(2027, 1, 1, tzinfo=timezone.utc)}, ValueError, "exclude each other"),
    ({"delay": -1}, ValueError, "0 or more"),
    ({"delay": timedelta(seconds=-1)}, ValueError, "0 or more"),
    ({"delay": True}, TypeError, "a bool"),
    ({"delay": float("nan")}, ValueError, "no length of time"),
    ({"delay": float("inf")}, ValueError, "no length of time"),
    ({"delay": 1e300}, ValueError, "longer than a century"),
    ({"delay": 10**400}, ValueError, "longer than a century"),
    ({"delay": timedelta.max}, ValueError, "longer than a century"),
    ({"delay": 10**4000}, ValueError, "longer than a century"),
    ({"delay": "60"}, TypeError, "a str"),
    ({"priority": 2**63}, ValueError, "out of range"),
    ({"priority": -(2**63) - 1}, ValueError, "out of range"),
    ({"priority": 10**4000}, ValueError, "out of range"),
    ({"priority": True}, TypeError, "a bool"),
    ({"priority": 1.5}, TypeError, "a float"),
    ({"priority": 0.0}, TypeError, "a float"),
    ({"dedupe_key": ""}, ValueError, "empty"),
    ({"dedupe_key": "k" * 1025}, ValueError, "1,025 bytes"),
    ({"dedupe_key": "é" * 600}, ValueError, "1,200 bytes"),
    ({"dedupe_key": "k" * 100_000}, ValueError, "100,000 bytes"),
    ({"dedupe_key": "a\0b"}, ValueError, "NUL"),
    ({"dedupe_key": "\ud800"}, ValueError, "surrogate"),
    ({"dedupe_key": 7}, TypeError, "an int"),
    ({"dedupe_until": "done"}, ValueError, "dedupe_until"),
    ({"group": ""}, ValueError, "empty"),
    ({"group": "g" * 1025}, ValueError, "1,025 bytes"),
    ({"group": Group("a", concurrency=0)}, ValueError, "out of range"),
    ({"group": Group("a", concurrency=True)}, TypeError, "a bool"),
    ({"group": 5}, TypeError, "an int"),
    ({"attempts": 0}, ValueError, "out of range"),
    ({"attempts": 2.0}, TypeError, "a float"),
    ({"headers": {"a": 1}}, TypeError, "strings"),
    ({"headers": {1: "a"}}, TypeError, "strings"),
    ({"headers": ["a"]}, TypeError, "a list"),
    ({"headers": {"a": "\ud800"}}, ValueError, "surrogate"),
    ({"headers": {"a": "x" * 70_000}}, ValueError, "70,001 bytes"),
    ({"task": ""}, ValueError, "empty"),
    ({"ref": "r" * 2000}, ValueError, "2,000 bytes"),
    ({"dealy": 5}, TypeError, "dealy"),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD_OPTIONS, ids=lambda it: str(it)[:50])
def test_a_bad_option_is_refused(
    queue: Queue[Email], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        queue.add(FIRST, **options)

    assert queue.storage.queues() == []


@pytest.mark.parametrize("name", ["", "q" * 256, "a\0b", "\ud800", 7, None], ids=repr)
def test_a_bad_name_is_refused(storage: Storage, name: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="name"):
        Queue(name, storage)


def test_a_name_of_255_characters_is_taken(storage: Storage) -> None:
    queue: Queue[Email] = Queue("é" * 255, storage)

    assert queue.add(FIRST).id == claimed(queue).id


@pytest.mark.parametrize(
    "settings",
    [
        {"lease": 0},
        {"lease": -1},
        {"lease": float("nan")},
        {"attempts": 0},
        {"max_payload_bytes": 0},
        {"durability": "relaxed"},
    ],
    ids=repr,
)
def test_a_bad_setting_is_refused(storage: Storage, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Queue("emails", storage, **settings)


class Untaken:
    """A serializer under a name that others know."""

    name = "json"

    def dumps(self, _: Any, /) -> bytes:
        return b""

    def loads(self, data: bytes, /) -> Any:
        return data


@pytest.mark.parametrize(
    "settings",
    [{"backoff": 5}, {"retention": 100}, {"on_error": "log"}, {"serializer": Untaken()}, {"serializer": object()}],
    ids=lambda it: next(iter(it)),
)
def test_a_setting_of_a_wrong_kind_is_refused(storage: Storage, settings: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
        Queue("emails", storage, **settings)


def test_a_serializer_that_gives_no_bytes_is_refused(storage: Storage) -> None:
    class Wordy(Untaken):
        name = "wordy"

        def dumps(self, _: Any, /) -> Any:
            return "text"

    queue: Queue[Any] = Queue("emails", storage, serializer=Wordy())

    with pytest.raises(TypeError, match="'wordy' gave str"):
        queue.add(1)

    assert storage.queues() == []


@pytest.mark.parametrize("retention", [{"failed": -1}, {"completed_age": -1}, {"cancelled": True}], ids=repr)
def test_a_bad_retention_is_refused(retention: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(retention))):
        Retention(**retention)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, ScheduleError),
        ({"every": 0}, ScheduleError),
        ({"every": 60, "cron": "* * * * *"}, ScheduleError),
        ({"cron": "0 0 30 2 *"}, ScheduleError),
        ({"cron": "0 0 * * *", "tz": "Mars/Olympus"}, ScheduleError),
        ({"every": 60, "priority": 2**63}, ValueError),
        ({"every": 60, "delay": 5}, TypeError),
    ],
    ids=repr,
)
def test_a_bad_schedule_is_refused(queue: Queue[Email], options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        queue.schedule(FIRST, id="daily", **options)

    assert queue.schedules() == []


# The message level


def test_a_completed_job_is_gone(queue: Queue[Email]) -> None:
    queue.add(FIRST)

    done = queue.complete(claimed(queue))

    assert done
    assert queue.stats() == Counts()


def test_what_follows_a_job_comes_with_its_end(queue: Queue[Email], storage: Storage) -> None:
    letters: Queue[str] = Queue("letters", storage)
    queue.add(FIRST)

    queue.complete(claimed(queue), then=[SECOND, NewJob("c@example.com", queue="letters", priority=5)])

    assert claimed(queue).data == SECOND
    assert claimed(letters).data == "c@example.com"


def test_nothing_follows_a_job_whose_lease_was_lost(queue: Queue[Email], clock: ManualClock) -> None:
    queue.add(FIRST)
    job = claimed(queue)
    clock.advance(31)

    done = queue.complete(job, then=[SECOND])

    assert not done
    assert [it.data for it in queue.claim(10)] == [FIRST]


def test_how_long_a_key_is_held_needs_a_key(queue: Queue[Any]) -> None:
    with pytest.raises(ValueError, match="give dedupe_key"):
        queue.add("a", dedupe_until="ended")

    assert queue.size() == 0


def test_a_follower_that_is_refused_leaves_the_job_active(queue: Queue[Any]) -> None:
    queue.add(FIRST)
    job = claimed(queue)

    with pytest.raises(PayloadError):
        queue.complete(job, then=[float("nan")])

    assert queue.stats() == Counts(active=1)


def test_every_way_to_settle_answers_false_once_the_lease_is_lost(queue: Queue[Email], clock: ManualClock) -> None:
    queue.add(FIRST)
    job = claimed(queue)
    clock.advance(31)
    second = claimed(queue)

    answers = [queue.complete(job), queue.fail(job), queue.extend(job, 30), queue.release(job)]

    assert answers == [False, False, False, False]
    assert queue.complete(second)


def test_a_failed_job_waits_for_its_backoff(queue: Queue[Email], clock: ManualClock) -> None:
    queue.add(FIRST)
    queue.fail(claimed(queue))

    assert queue.claim() == []
    clock.advance(60)
    assert claimed(queue).attempts == 2


def test_a_failed_job_may_have_its_own_wait(queue: Queue[Email], clock: ManualClock) -> None:
    queue.add(FIRST)
    queue.fail(claimed(queue), retry_in=5)

    clock.advance(5)

    assert claimed(queue).attempts == 2


def test_a_job_out_of_attempts_is_a_dead_letter(queue: Queue[Email]) -> None:
    queue.add(FIRST, attempts=1)

    queue.fail(claimed(queue), "mailbox full")

    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert (dead.error.reason, dead.error.message, dead.data) == ("handler", "mailbox full", FIRST)


def test_a_job_may_be_buried_while_attempts_remain(queue: Queue[Email]) -> None:
    queue.add(FIRST)

    queue.fail(claimed(queue), ValueError("no such mailbox"), retry=False)

    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert (dead.error.reason, dead.error.type, dead.error.message) == ("rejected", "ValueError", "no such mailbox")


def test_an_exception_is_kept_with_its_stack_and_causes(queue: Queue[Email]) -> None:
    queue.add(FIRST)
    try:
        try:
            int("x")
        except ValueError as cause:
            raise RuntimeError("outer") from cause
    except RuntimeError as error:
        queue.fail(claimed(queue), error, retry=False)

    (dead,) = queue.dead_letters()

    assert dead.error is not None
    assert 'int("x")' in dead.error.stack
    assert list(dead.error.causes) == ["ValueError: invalid literal for int() with base 10: 'x'"]
    assert [attempt.outcome for attempt in dead.history] == ["failed"]


def test_retry_in_and_no_retry_exclude_each_other(queue: Queue[Email]) -> None:
    queue.add(FIRST)
    job = claimed(queue)

    with pytest.raises(ValueError, match="exclude each other"):
        queue.fail(job, retry_in=5, retry=False)


def test_a_released_job_gets_its_attempt_back(queue: Queue[Email]) -> None:
    queue.add(FIRST)

    queue.release(claimed(queue))

    assert claimed(queue).attempts == 1


def test_a_job_may_be_released_for_later(queue: Queue[Email], clock: ManualClock) -> None:
    queue.add(FIRST)

    queue.release(claimed(queue), delay=10)

    assert queue.claim() == []
    clock.advance(10)
    assert claimed(queue).attempts == 1


def test_an_extended_lease_lives_on(queue: Queue[Email], clock: ManualClock) -> None:
    queue.add(FIRST)
    job = claimed(queue)

    queue.extend(job, 90)

    clock.advance(89)
    assert queue.complete(job)


def test_a_claim_has_the_lease_it_asks_for(queue: Queue[Email], clock: ManualClock) -> None:
    queue.add(FIRST)
    (job,) = queue.claim(lease=5)

    clock.advance(5)

    assert not queue.complete(job)


@pytest.mark.parametrize("lease", [0, -1, True, float("nan")])
def test_a_bad_lease_is_refused(queue: Queue[Email], lease: float) -> None:
    queue.add(FIRST)

    with pytest.raises((ValueError, TypeError), match="lease"):
        queue.claim(lease=lease)

    assert queue.stats() == Counts(ready=1)


def test_a_job_that_was_only_added_cannot_be_settled(queue: Queue[Email]) -> None:
    job = queue.add(FIRST)

    with pytest.raises(ValueError, match="pending, not active"):
        queue.complete(job)


def test_a_job_of_another_queue_is_refused(queue: Queue[Email], storage: Storage) -> None:
    other: Queue[Email] = Queue("letters", storage)
    other.add(FIRST)
    job = claimed(other)

    with pytest.raises(ValueError, match="letters"):
        queue.complete(job)


def test_a_payload_that_cannot_be_read_fails_and_the_next_job_is_given(storage: Storage) -> None:
    told: list[tuple[BaseException, ErrorContext]] = []
    queue: Queue[Any] = Queue(
        "emails", storage, attempts=1, on_error=lambda error, context: told.append((error, context))
    )
    raw: Queue[bytes] = Queue("emails", storage, serializer=RAW)
    bad = raw.add(b"\xff", attempts=1)
    Queue("emails", storage, serializer=Broken()).add(None, attempts=1)
    queue.add(FIRST)

    jobs = queue.claim(2)

    assert [job.data for job in jobs] == [b"\xff", FIRST]
    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert (dead.error.reason, dead.error.type) == ("parse", "PayloadError")
    assert [(context.kind, context.job_id) for _, context in told] == [("parse", dead.id)]
    assert jobs[0].id == bad.id


class Broken:
    """A serializer that other queues do not have."""

    name = "broken"

    def dumps(self, _: Any, /) -> bytes:
        return b"{"

    def loads(self, _: bytes, /) -> Any:
        raise ValueError("it is broken")


def test_a_payload_that_can_never_be_read_does_not_keep_claim_from_returning(storage: Storage) -> None:
    queue: Queue[Any] = Queue(
        "emails", storage, serializer=Broken(), attempts=None, backoff=Backoff.fixed(0), on_error=lambda *_: None
    )
    queue.add(None)

    assert queue.claim() == []


def test_claim_can_wait_for_a_job(tmp_path: Path) -> None:
    with Queue("emails", tmp_path / "jobs.db", durability="relaxed") as queue:
        adding = threading.Timer(0.1, lambda: queue.add(FIRST))
        adding.start()

        (job,) = queue.claim(wait=30)

        assert job.data == FIRST
        adding.join()


def test_a_wait_ends_without_a_job(tmp_path: Path) -> None:
    with Queue("emails", tmp_path / "jobs.db") as queue:
        assert queue.claim(wait=0.05) == []


# Looking and changing


def test_a_page_follows_the_last_job_of_the_one_before(queue: Queue[Email]) -> None:
    added = queue.add_many([FIRST] * 5)

    first = queue.list("pending", limit=3)
    second = queue.list(State.PENDING, limit=3, after=first[-1])

    assert [job.id for job in (*first, *second)] == [job.id for job in added]


def test_listings_do_not_decode_payloads(storage: Storage) -> None:
    queue: Queue[Any] = Queue("emails", storage, serializer=Broken())
    job = queue.add(None)

    (listed,) = queue.list("pending")

    assert listed.id == job.id
    assert queue.get(job.id) is not None
    assert queue.stats() == Counts(ready=1)
    with pytest.raises(ValueError, match="it is broken"):
        _ = listed.data


def test_an_unknown_state_is_refused(queue: Queue[Email]) -> None:
    with pytest.raises(ValueError, match="one of pending, active, completed, failed, cancelled"):
        queue.list("done")


def test_a_queue_does_not_give_the_jobs_of_another(queue: Queue[Email], storage: Storage) -> None:
    other: Queue[Email] = Queue("letters", storage)
    job = other.add(FIRST)

    answers = queue.get(job.id), queue.cancel(job.id), queue.remove(job.id), queue.retry(job.id)

    assert answers == (None, False, False, False)
    assert other.size() == 1


def test_a_job_is_found_by_its_ref_or_its_key(queue: Queue[Email]) -> None:
    job = queue.add(FIRST, ref="r1", dedupe_key="k1")

    by_ref, by_key, none = queue.find(ref="r1"), queue.find(dedupe_key="k1"), queue.find(ref="r2")

    assert [it.id for it in (*by_ref, *by_key)] == [job.id, job.id]
    assert none == []


def test_the_size_counts_what_is_due_and_what_is_delayed(queue: Queue[Email]) -> None:
    queue.add_many([FIRST, NewJob(FIRST, delay=60), FIRST])
    queue.claim()

    assert queue.size() == 2
    assert queue.stats() == Counts(ready=1, delayed=1, active=1)


def test_a_dead_letter_can_be_tried_again(queue: Queue[Email]) -> None:
    queue.add(FIRST, attempts=1)
    queue.fail(claimed(queue))
    (dead,) = queue.dead_letters()

    answers = queue.retry(dead), queue.retry(dead.id)

    assert answers == (True, False)
    again = claimed(queue)
    assert (again.id, again.attempts) == (dead.id, 2)


def test_all_dead_letters_can_go_on_in_another_queue(queue: Queue[Email], storage: Storage) -> None:
    jobs = queue.add_many([NewJob(FIRST, attempts=1)] * 1200)
    queue_keeps: Queue[Email] = Queue("emails", storage, retention=Retention(failed=None))
    for job in queue_keeps.claim(1200):
        queue_keeps.fail(job)

    moved = queue.retry_all(to="again", limit=1100)

    assert moved == 1100
    assert storage.counts("again").ready == 1100
    assert queue.stats().failed == len(jobs) - 1100


def test_a_dead_letter_whose_key_is_held_elsewhere_stays(queue: Queue[Email], storage: Storage) -> None:
    Queue("again", storage).add(FIRST, dedupe_key="k")
    queue.add_many([NewJob(FIRST, attempts=1, dedupe_key="k"), NewJob(SECOND, attempts=1)])
    for job in queue.claim(2):
        queue.fail(job)

    moved = queue.retry_all(to="again")

    assert moved == 1
    assert [job.data for job in queue.dead_letters()] == [FIRST]


def test_only_a_pending_job_can_be_cancelled(queue: Queue[Email]) -> None:
    queue.add_many([FIRST, SECOND])
    active = claimed(queue)
    (pending,) = queue.list("pending")

    answers = queue.cancel(active), queue.cancel(pending), queue.cancel(pending.id)

    assert answers == (False, True, False)
    assert queue.stats() == Counts(active=1, cancelled=1)


def test_a_pending_job_can_be_rescheduled(queue: Queue[Email], clock: ManualClock) -> None:
    job = queue.add(FIRST)

    moved = queue.reschedule(job, delay=60)

    assert moved
    assert queue.claim() == []
    assert queue.reschedule(job, run_at=now(clock))
    assert claimed(queue).id == job.id
    assert not queue.reschedule(job, delay=1)


@pytest.mark.parametrize(
    "options", [{}, {"delay": 1, "run_at": datetime(2027, 1, 1, tzinfo=timezone.utc)}, {"delay": -1}]
)
def test_a_bad_reschedule_is_refused(queue: Queue[Email], options: dict[str, Any]) -> None:
    job = queue.add(FIRST)

    with pytest.raises(ValueError, match="delay"):
        queue.reschedule(job, **options)


def test_an_active_job_is_neither_removed_nor_purged(queue: Queue[Email]) -> None:
    queue.add_many([FIRST, SECOND, FIRST])
    active = claimed(queue)
    pending = queue.list("pending")

    answers = queue.remove(active), queue.remove(pending[0])

    assert answers == (False, True)
    assert queue.purge() == 1
    assert queue.stats() == Counts(active=1)
    with pytest.raises(ValueError, match="belong to their workers"):
        queue.purge("active")


def test_a_purge_may_be_of_one_state(queue: Queue[Email]) -> None:
    queue.add_many([FIRST, SECOND])
    queue.cancel(queue.list("pending")[0])

    purged = queue.purge("cancelled")

    assert purged == 1
    assert queue.stats() == Counts(ready=1)


def test_a_paused_queue_gives_nothing_until_it_is_resumed(queue: Queue[Email]) -> None:
    queue.add(FIRST)

    assert (queue.pause(), queue.pause(), queue.paused) == (True, False, True)
    assert queue.claim() == []
    assert (queue.resume(), queue.resume(), queue.paused) == (True, False, False)
    assert claimed(queue).data == FIRST


# Retention


def test_a_hundred_dead_letters_are_kept(queue: Queue[Email], clock: ManualClock) -> None:
    added = queue.add_many([NewJob(FIRST, attempts=1)] * 105)
    for job in queue.claim(105):
        clock.advance(0.001)
        queue.fail(job)

    kept = queue.dead_letters(limit=1000)

    assert [job.id for job in kept] == [job.id for job in added[:4:-1]]


def test_completed_jobs_can_be_kept(storage: Storage) -> None:
    queue: Queue[Email] = Queue("emails", storage, retention=Retention(completed=10))
    queue.add(FIRST)

    queue.complete(claimed(queue))

    assert queue.stats() == Counts(completed=1)


def test_completed_jobs_go_when_they_are_too_old(storage: Storage, clock: ManualClock) -> None:
    queue: Queue[Email] = Queue(
        "emails", storage, retention=Retention(completed=None, completed_age=timedelta(hours=1))
    )
    queue.add_many([FIRST, SECOND])
    queue.complete(claimed(queue))
    clock.advance(3600)

    queue.complete(claimed(queue))

    assert [job.data for job in queue.list("completed")] == [SECOND]


# Transactions


def test_what_is_done_in_a_transaction_is_done_whole_or_not_at_all(queue: Queue[Email], storage: Storage) -> None:
    other: Queue[Any] = Queue("letters", storage)
    queue.add(FIRST)
    job = claimed(queue)

    with pytest.raises(PayloadError), queue.transaction():  # noqa: PT012 (that it ends badly is the point)
        queue.complete(job)
        other.add(SECOND)
        other.add(float("nan"))

    assert (queue.stats(), other.stats()) == (Counts(active=1), Counts())


@pytest.fixture
def connection(storage: SQLiteStorage) -> Iterator[sqlite3.Connection]:
    storage.open()
    connection = sqlite3.connect(str(storage.path), isolation_level=None)
    connection.execute("create table users (name text)")
    yield connection
    connection.close()


def test_a_job_joins_the_callers_own_transaction(queue: Queue[Email], connection: sqlite3.Connection) -> None:
    connection.execute("begin immediate")
    connection.execute("insert into users values ('a')")
    queue.bind(connection).add(FIRST)
    seen_before = queue.size()
    connection.execute("commit")

    assert (seen_before, queue.size()) == (0, 1)


def test_a_job_is_gone_with_the_callers_rollback(queue: Queue[Email], connection: sqlite3.Connection) -> None:
    connection.execute("begin immediate")
    queue.bind(connection).add(FIRST)
    connection.execute("rollback")

    assert queue.size() == 0


def test_a_bound_queue_neither_waits_nor_works(queue: Queue[Email], connection: sqlite3.Connection) -> None:
    bound = queue.bind(connection)

    with pytest.raises(ValueError, match="wait"):
        bound.claim(wait=1)
    with pytest.raises(ValueError, match="connection of its own"):
        bound.process(print)


def test_a_queue_on_a_bound_storage_neither_waits_nor_works(
    queue: Queue[Email], connection: sqlite3.Connection
) -> None:
    bound: Queue[Email] = Queue("emails", queue.storage.bind(connection))

    with pytest.raises(ValueError, match="wait"):
        bound.claim(wait=1)
    with pytest.raises(ValueError, match="connection of its own"):
        bound.process(print)


def test_a_queue_may_live_on_the_callers_connection_alone(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "app.db", isolation_level=None)
    queue: Queue[Email] = Queue("emails", connection)

    queue.add(FIRST)

    assert claimed(queue).data == FIRST
    with pytest.raises(ValueError, match="connection of its own"):
        queue.process(print)
    queue.close()
    connection.execute("select 1")
    connection.close()


def test_queues_on_one_path_are_closed_one_by_one(tmp_path: Path) -> None:
    first: Queue[Email] = Queue("emails", tmp_path / "jobs.db")
    second: Queue[Email] = Queue("emails", tmp_path / "jobs.db")
    first.add(FIRST)

    first.close()

    assert claimed(second).data == FIRST
    second.close()


def test_a_queue_that_was_closed_is_closed_while_another_uses_the_file(tmp_path: Path) -> None:
    first: Queue[Email] = Queue("emails", tmp_path / "jobs.db")
    second: Queue[Email] = Queue("emails", tmp_path / "jobs.db")
    first.add(FIRST)
    first.close()

    with pytest.raises(StorageClosedError):
        first.add(FIRST)

    assert second.size() == 1
    second.close()


def test_a_url_says_the_durability(tmp_path: Path) -> None:
    with Queue("emails", f"sqlite:///{tmp_path}/jobs.db?durability=relaxed") as queue:
        queue.add(FIRST)

        assert queue.size() == 1


# Schedules


def test_a_schedule_adds_a_job_at_each_tick(queue: Queue[Email], clock: ManualClock) -> None:
    schedule = queue.schedule(FIRST, id="hourly", every=3600, priority=5)
    start = now(clock)

    clock.advance(3600)
    job = claimed(queue)

    assert schedule.next_at == start + timedelta(hours=1)
    assert (job.data, job.priority) == (FIRST, 5)
    after = queue.get_schedule("hourly")
    assert after is not None
    assert (after.last_at, after.next_at) == (start + timedelta(hours=1), start + timedelta(hours=2))
    assert (after.id, after.queue, after.every, after.data) == ("hourly", "emails", timedelta(hours=1), FIRST)


def test_missed_ticks_fire_once(queue: Queue[Email], clock: ManualClock) -> None:
    queue.schedule(FIRST, id="hourly", every=3600)

    clock.advance(10 * 3600 + 5)

    assert len(queue.claim(10)) == 1


def test_the_same_times_keep_the_next_tick(queue: Queue[Email], clock: ManualClock) -> None:
    first = queue.schedule(FIRST, id="hourly", every=3600)
    clock.advance(1800)

    again = queue.schedule(SECOND, id="hourly", every=timedelta(hours=1))

    assert again.next_at == first.next_at
    stored = queue.get_schedule("hourly")
    assert stored is not None
    assert stored.data == SECOND


def test_other_times_move_the_next_tick(queue: Queue[Email], clock: ManualClock) -> None:
    queue.schedule(FIRST, id="hourly", every=3600)
    clock.advance(1800)

    again = queue.schedule(FIRST, id="hourly", every=60)

    assert again.next_at == now(clock) + timedelta(minutes=1)


def test_a_cron_schedule_knows_its_time_zone(queue: Queue[Email]) -> None:
    schedule = queue.schedule(FIRST, id="daily", cron="0 6 * * *", tz="Europe/Berlin")

    assert (schedule.cron, schedule.tz, schedule.every) == ("0 6 * * *", "Europe/Berlin", None)
    assert schedule.next_at == datetime(2027, 1, 16, 5, tzinfo=timezone.utc)


def test_a_removed_schedule_adds_no_more(queue: Queue[Email], clock: ManualClock) -> None:
    queue.schedule(FIRST, id="hourly", every=3600)

    assert [it.id for it in queue.schedules()] == ["hourly"]
    assert (queue.remove_schedule("hourly"), queue.remove_schedule("hourly")) == (True, False)
    clock.advance(3600)
    assert queue.claim() == []


def test_a_paused_queue_fires_no_schedule(queue: Queue[Email], clock: ManualClock) -> None:
    queue.schedule(FIRST, id="hourly", every=3600)
    queue.pause()

    clock.advance(3600)
    queue.claim()

    assert queue.size() == 0


def test_a_tick_adds_nothing_while_the_last_one_is_unfinished(queue: Queue[Email], clock: ManualClock) -> None:
    queue.schedule(FIRST, id="hourly", every=3600, dedupe_key="hourly", dedupe_until="ended")
    clock.advance(3600)
    job = claimed(queue)
    queue.extend(job, 10_000)

    clock.advance(3600)
    during = queue.claim(10)
    queue.complete(job)
    clock.advance(3600)

    assert during == []
    assert len(queue.claim(10)) == 1


# Types


def test_the_types_are_seen_by_users(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        """
from typing import TypedDict
from litebroker import Context, NewJob, Queue

class Email(TypedDict):
    to: str

queue: Queue[Email] = Queue("emails", "jobs.db")
reveal_type(queue.add({"to": "a@example.com"}))
reveal_type(queue.claim()[0].data)
reveal_type(queue.add_many([{"to": "a@example.com"}, NewJob[Email]({"to": "b@example.com"}, priority=9)]))
reveal_type(Queue("emails", "jobs.db"))
def one(data: Email) -> None: ...
def two(data: Email, context: Context) -> None: ...
def many(data: list[Email], contexts: list[Context]) -> None: ...
def wrong(data: int) -> None: ...
queue.process(one)
queue.process(two, concurrency=4)
queue.process(lambda data: print(data["to"]))
queue.process_many(many, batch=10)
queue.process(wrong)
queue.add({"from": "a@example.com"})
"""
    )

    told = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--no-incremental", str(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    lines = [line.removeprefix("program.py:") for line in told.stdout.splitlines()]
    assert {line.split(":")[0] for line in lines if " error: " in line} == {"21", "22"}, told.stdout
    assert [line.split('"')[1].replace("program.", "") for line in lines if "Revealed type" in line] == [
        "litebroker.queue.Job[TypedDict(Email, {'to': str})]",
        "TypedDict(Email, {'to': str})",
        "list[litebroker.queue.Job[TypedDict(Email, {'to': str})]]",
        "litebroker.queue.Queue[Any]",
    ]


def test_a_dead_letter_goes_on_in_another_queue(storage: SQLiteStorage) -> None:
    queue: Queue[str] = Queue("work", storage)
    other: Queue[str] = Queue("second-chance", storage)
    added = queue.add("a", attempts=1)
    (job,) = queue.claim()
    queue.fail(job, ValueError("no"))

    moved = queue.retry(added, to="second-chance")

    assert moved
    (again,) = other.claim()
    assert again.id == added.id
    assert (again.data, again.attempts, len(again.history)) == ("a", 2, 1)
    assert queue.retry(added, to="third") is False
