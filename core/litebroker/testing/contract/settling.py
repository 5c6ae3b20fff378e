# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Completing, failing and releasing."""

from __future__ import annotations

import os

import pytest

from litebroker.jobs import Attempt, Counts, JobError, State
from litebroker.storage import Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    ERROR,
    HOUR_S,
    Contract,
    add,
    bring_to,
    claim,
    claim_all,
    claim_one,
    get,
    ids_of,
    odd_text,
)


class Settling(Contract):
    """How a claimed job goes on."""

    def test_a_completed_job_is_gone(self, storage: Storage) -> None:
        add(storage)
        job = claim_one(storage)

        assert storage.complete([job.lease]) == [True]
        assert storage.get(job.id) is None
        assert storage.counts("q") == Counts()

    def test_a_completed_job_that_is_kept_says_how_it_went(self, storage: Storage, clock: ManualClock) -> None:
        add(storage)
        claimed = claim_one(storage)
        clock.advance(2)

        assert storage.complete([claimed.lease], keep=True) == [True]

        job = get(storage, claimed.id)
        assert (job.state, job.ended_at_ms) == (State.COMPLETED, clock.now_ms())
        assert (job.token, job.lease_until_ms, job.error) == (None, None, None)
        assert list(job.history) == [
            Attempt(1, clock.now_ms() - 2000, clock.now_ms(), job.history[0].worker, "completed", None)
        ]
        assert job.history[0].worker.endswith(f":{os.getpid()}")
        assert claim(storage) == []

    @pytest.mark.parametrize("max_attempts", [1, 3, None])
    def test_a_released_job_is_untouched_and_keeps_its_place(self, storage: Storage, max_attempts: int | None) -> None:
        ids = [add(storage, max_attempts=max_attempts) for _ in range(3)]
        before = get(storage, ids[0])
        for _ in range(5):
            job = claim_one(storage)
            assert storage.release([job.lease]) == [True]

        after = get(storage, ids[0])
        assert after._replace(claimed_at_ms=None) == before
        assert claim_all(storage) == ids

    def test_a_released_job_goes_before_those_that_came_after_it(self, storage: Storage, clock: ManualClock) -> None:
        first = add(storage)
        job = claim_one(storage)
        clock.advance(1)
        second = add(storage)

        storage.release([job.lease])

        assert claim_all(storage) == [first, second]

    def test_a_job_may_be_released_for_later(self, storage: Storage, clock: ManualClock) -> None:
        add(storage, max_attempts=1)
        job = claim_one(storage)
        clock.advance(1)

        assert storage.release([job.lease], delay_ms=5000) == [True]
        released = get(storage, job.id)
        clock.advance(4.999)
        early = claim(storage)
        clock.advance(0.001)

        assert (released.state, released.attempts) == (State.PENDING, 0)
        assert released.due_at_ms == clock.now_ms()
        assert early == []
        assert ids_of(claim(storage)) == [job.id]

    def test_a_failed_attempt_is_tried_again_later(self, storage: Storage, clock: ManualClock) -> None:
        add(storage)
        job = claim_one(storage)

        assert storage.fail(job.lease, ERROR, retry_in_ms=5000) is State.PENDING

        retried = get(storage, job.id)
        clock.advance(4.999)
        early = claim(storage)
        clock.advance(0.001)
        again = claim_one(storage)
        assert (retried.state, retried.attempts, retried.ended_at_ms) == (State.PENDING, 1, None)
        assert (retried.token, retried.lease_until_ms) == (None, None)
        assert early == []
        assert (again.id, again.attempts, again.due_at_ms) == (job.id, 2, clock.now_ms())

    def test_a_retry_without_a_delay_is_due_at_once(self, storage: Storage, clock: ManualClock) -> None:
        add(storage)
        job = claim_one(storage)
        clock.advance(1)

        assert storage.fail(job.lease, ERROR, retry_in_ms=0) is State.PENDING

        assert get(storage, job.id).due_at_ms == clock.now_ms()
        assert ids_of(claim(storage)) == [job.id]

    def test_the_error_of_an_attempt_can_be_read_while_the_job_waits(self, storage: Storage) -> None:
        add(storage)
        job = claim_one(storage)

        storage.fail(job.lease, ERROR, retry_in_ms=5000)

        error = get(storage, job.id).error
        assert error is not None
        assert (error.reason, error.type, error.message, error.stack) == ERROR[:4]
        assert list(error.causes) == list(ERROR.causes)

    @pytest.mark.parametrize("max_attempts", [3, None])
    def test_without_a_retry_it_is_a_dead_letter_whatever_remains(
        self, storage: Storage, clock: ManualClock, max_attempts: int | None
    ) -> None:
        add(storage, max_attempts=max_attempts)
        job = claim_one(storage)
        clock.advance(1)

        assert storage.fail(job.lease, ERROR, retry_in_ms=None) is State.FAILED

        dead = get(storage, job.id)
        assert (dead.state, dead.attempts, dead.max_attempts) == (State.FAILED, 1, max_attempts)
        assert (dead.token, dead.lease_until_ms, dead.ended_at_ms) == (None, None, clock.now_ms())
        assert dead.error == ERROR._replace(causes=dead.error.causes if dead.error else ())
        clock.advance(10 * HOUR_S)
        assert claim(storage) == []

    def test_the_last_attempt_is_not_retried(self, storage: Storage) -> None:
        add(storage, max_attempts=3)

        answers = [storage.fail(claim_one(storage).lease, ERROR, retry_in_ms=0) for _ in range(3)]

        assert answers == [State.PENDING, State.PENDING, State.FAILED]
        assert claim(storage) == []

    def test_without_a_limit_every_failure_is_retried(self, storage: Storage) -> None:
        add(storage, max_attempts=None)

        answers = {storage.fail(claim_one(storage).lease, ERROR, retry_in_ms=0) for _ in range(50)}

        assert answers == {State.PENDING}
        assert claim_one(storage).attempts == 51

    @odd_text
    def test_an_error_may_say_anything(self, storage: Storage, text: str) -> None:
        job_id = bring_to(storage, State.ACTIVE)
        given = JobError(text, text, text, text, (text, text))

        storage.fail(get(storage, job_id).lease, given, retry_in_ms=None)

        error = get(storage, job_id).error
        assert error is not None
        assert error._replace(causes=tuple(error.causes)) == given

    def test_an_error_may_be_no_more_than_its_reason(self, storage: Storage) -> None:
        job_id = bring_to(storage, State.ACTIVE)

        storage.fail(get(storage, job_id).lease, JobError("rejected"), retry_in_ms=None)

        error = get(storage, job_id).error
        assert error is not None
        assert error._replace(causes=tuple(error.causes)) == JobError("rejected")

    def test_the_history_says_how_each_attempt_ended(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage, max_attempts=3)
        start = clock.now_ms()
        for _ in range(3):
            job = claim_one(storage)
            clock.advance(1)
            storage.fail(job.lease, JobError("handler", "ValueError", f"try {job.attempts}"), retry_in_ms=4000)
            clock.advance(4)

        history = get(storage, job_id).history

        assert [(each.number, each.outcome, each.error) for each in history] == [
            (1, "retried", "ValueError: try 1"),
            (2, "retried", "ValueError: try 2"),
            (3, "failed", "ValueError: try 3"),
        ]
        assert [each.started_at_ms - start for each in history] == [0, 5000, 10_000]
        assert [each.ended_at_ms - start for each in history] == [1000, 6000, 11_000]

    def test_a_long_history_keeps_its_latest_attempts(self, storage: Storage) -> None:
        job_id = add(storage, max_attempts=None)
        for _ in range(200):
            storage.fail(claim_one(storage).lease, ERROR, retry_in_ms=0)

        numbers = [attempt.number for attempt in get(storage, job_id).history]

        assert 3 <= len(numbers) <= 100
        assert numbers == list(range(201 - len(numbers), 201))
