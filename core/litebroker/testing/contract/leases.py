# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Leases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from litebroker.jobs import Counts, JobRecord, Lease, State
from litebroker.storage import Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    ENDINGS,
    HOUR_S,
    LEASE_MS,
    LEASE_S,
    SETTLERS,
    TEN_YEARS_S,
    Contract,
    add,
    bring_to,
    claim,
    claim_all,
    claim_one,
    ending,
    get,
    ids_of,
    in_threads,
    lapse,
    settler,
    spec,
)


class Leases(Contract):
    """How a lease ends, and what it is good for until then."""

    def test_a_lease_ends_after_its_time(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage)
        claim_one(storage)

        clock.advance(LEASE_S - 0.001)
        too_early = claim(storage)
        clock.advance(0.001)
        in_time = claim(storage)

        assert too_early == []
        assert ids_of(in_time) == [job_id]
        assert in_time[0].attempts == 2

    @pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S, TEN_YEARS_S, -TEN_YEARS_S])
    def test_a_step_of_the_wall_clock_ends_no_lease(self, storage: Storage, clock: ManualClock, step_s: float) -> None:
        add(storage)
        job = claim_one(storage)

        clock.step(step_s)
        taken_back = [storage.recover(), claim(storage)]

        assert taken_back == [[], []]
        assert get(storage, job.id).lease_until_ms == clock.now_ms() + LEASE_MS
        assert storage.extend([job.lease], LEASE_MS) == [True]
        assert storage.complete([job.lease]) == [True]

    @pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S, TEN_YEARS_S, -TEN_YEARS_S])
    def test_a_step_of_the_wall_clock_prolongs_no_lease(
        self, storage: Storage, clock: ManualClock, step_s: float
    ) -> None:
        job_id = add(storage)
        claim_one(storage)

        clock.step(step_s)
        clock.advance(LEASE_S)

        assert ids_of(claim(storage)) == [job_id]

    @pytest.mark.parametrize("end", [ENDINGS["release"], lapse], ids=["release", "lapse"])
    @pytest.mark.parametrize("step_s", [-HOUR_S, -TEN_YEARS_S])
    def test_a_job_that_goes_back_is_due_though_the_wall_clock_went_back(
        self, storage: Storage, clock: ManualClock, step_s: float, end: Callable[[Storage, Lease], bool]
    ) -> None:
        add(storage)
        job = claim_one(storage)

        clock.step(step_s)
        end(storage, job.lease)

        assert storage.counts("q") == Counts(ready=1)
        assert ids_of(claim(storage)) == [job.id]

    @settler
    def test_a_lease_that_has_run_out_is_lost_though_nobody_took_the_job(
        self, storage: Storage, clock: ManualClock, settle: Callable[[Storage, Lease], bool]
    ) -> None:
        add(storage)
        job = claim_one(storage)
        clock.advance(LEASE_S)
        before = get(storage, job.id)

        assert settle(storage, job.lease) is False
        assert get(storage, job.id) == before

    @settler
    def test_a_lease_is_good_until_its_last_moment(
        self, storage: Storage, clock: ManualClock, settle: Callable[[Storage, Lease], bool]
    ) -> None:
        add(storage)
        job = claim_one(storage)
        clock.advance(LEASE_S - 0.001)

        assert settle(storage, job.lease) is True

    @settler
    def test_the_token_of_an_older_claim_is_lost(
        self, storage: Storage, clock: ManualClock, settle: Callable[[Storage, Lease], bool]
    ) -> None:
        add(storage)
        old = claim_one(storage)
        clock.advance(LEASE_S)
        new = claim_one(storage)

        assert settle(storage, old.lease) is False
        assert get(storage, new.id) == new
        assert settle(storage, new.lease) is True

    @settler
    def test_a_token_made_up_settles_nothing(self, storage: Storage, settle: Callable[[Storage, Lease], bool]) -> None:
        waiting = add(storage, "other")
        add(storage)
        job = claim_one(storage)

        assert settle(storage, Lease(job.id, job.lease.token + 1)) is False
        assert settle(storage, Lease(waiting, job.lease.token)) is False
        assert settle(storage, Lease(10**15, job.lease.token)) is False
        assert get(storage, job.id) == job

    @ending
    def test_a_lease_that_was_settled_is_over(self, storage: Storage, end: Callable[[Storage, Lease], bool]) -> None:
        add(storage)
        job = claim_one(storage)
        end(storage, job.lease)
        before = storage.get(job.id)

        assert [settle(storage, job.lease) for settle in SETTLERS.values()] == [False] * len(SETTLERS)
        assert storage.get(job.id) == before

    def test_a_lost_lease_in_a_list_does_not_spoil_the_others(self, storage: Storage, clock: ManualClock) -> None:
        storage.add([spec() for _ in range(9)])
        short = claim(storage, limit=3, lease_ms=1000)
        long = claim(storage, limit=6)
        clock.advance(1)
        leases = [job.lease for pair in zip(long[:3], short, strict=True) for job in pair]

        assert storage.extend(leases, LEASE_MS) == [True, False] * 3
        assert storage.release(leases[:2]) == [True, False]
        assert storage.complete(leases[2:4], keep=True) == [True, False]
        assert storage.complete(leases[4:]) == [True, False]
        assert [get(storage, job.id).state for job in long[:2]] == [State.PENDING, State.COMPLETED]

    @pytest.mark.parametrize("how", ["extend", "release", "complete", "complete and keep"])
    def test_an_old_and_the_current_lease_of_a_job_are_told_apart_in_one_list(
        self, storage: Storage, clock: ManualClock, how: str
    ) -> None:
        add(storage)
        old = claim_one(storage).lease
        clock.advance(LEASE_S)
        current = claim_one(storage).lease
        leases = [old, current, old]

        answers = {
            "extend": lambda: storage.extend(leases, LEASE_MS),
            "release": lambda: storage.release(leases),
            "complete": lambda: storage.complete(leases),
            "complete and keep": lambda: storage.complete(leases, keep=True),
        }[how]()

        assert answers == [False, True, False]

    @settler
    def test_whoever_has_the_lease_may_settle_it(
        self, storage: Storage, settle: Callable[[Storage, Lease], bool]
    ) -> None:
        add(storage)
        job = claim_one(storage)

        answers = in_threads(lambda: settle(storage, job.lease))

        assert answers == [True]

    def test_a_listed_job_has_the_lease_that_settles_it(self, storage: Storage) -> None:
        add(storage)
        claim_one(storage)

        (listed,) = storage.page("q", State.ACTIVE)

        assert storage.complete([listed.lease]) == [True]

    def test_settling_nothing_answers_nothing(self, storage: Storage) -> None:
        assert storage.complete([]) == []
        assert storage.complete([], keep=True) == []
        assert storage.release([]) == []
        assert storage.extend([], LEASE_MS) == []

    def test_many_are_settled_in_one_call(self, storage: Storage) -> None:
        storage.add([spec() for _ in range(2000)])
        leases = [job.lease for job in claim(storage, limit=2000)]

        assert storage.extend(leases, LEASE_MS) == [True] * 2000
        assert storage.release(leases[:1000]) == [True] * 1000
        assert storage.complete(leases) == [False] * 1000 + [True] * 1000
        assert storage.counts("q") == Counts(ready=1000)

    def test_an_extended_lease_ends_so_long_from_now(self, storage: Storage, clock: ManualClock) -> None:
        add(storage)
        job = claim_one(storage)
        clock.advance(LEASE_S - 1)

        storage.extend([job.lease], 5000)
        extended_until = get(storage, job.id).lease_until_ms
        clock.advance(4.999)
        still_held = claim(storage)
        clock.advance(0.001)

        assert extended_until == clock.now_ms()
        assert still_held == []
        assert ids_of(claim(storage)) == [job.id]

    def test_a_lease_may_be_shortened(self, storage: Storage, clock: ManualClock) -> None:
        add(storage)
        job = claim_one(storage)

        storage.extend([job.lease], 1000)
        clock.advance(1)

        assert ids_of(claim(storage)) == [job.id]

    def test_what_is_extended_stays_as_it_was(self, storage: Storage) -> None:
        add(storage)
        job = claim_one(storage)

        storage.extend([job.lease], LEASE_MS + 5000)

        assert get(storage, job.id) == job._replace(lease_until_ms=(job.lease_until_ms or 0) + 5000)

    def test_alapsed_job_is_pending_again_in_its_old_place(self, storage: Storage, clock: ManualClock) -> None:
        ids = [add(storage) for _ in range(3)]
        claim(storage, limit=2)
        clock.advance(LEASE_S)
        later = add(storage)

        recovered = storage.recover()

        job = get(storage, ids[0])
        assert recovered == []
        assert (job.state, job.attempts, job.token, job.lease_until_ms) == (State.PENDING, 1, None, None)
        assert job.ended_at_ms is None
        assert job.due_at_ms == clock.now_ms() - LEASE_MS
        assert claim_all(storage) == [*ids, later]

    def test_alapse_stands_in_the_history(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage)
        claimed_at = clock.now_ms()
        claim_one(storage)
        clock.advance(LEASE_S)

        storage.recover()

        (attempt,) = get(storage, job_id).history
        assert (attempt.number, attempt.started_at_ms, attempt.outcome) == (1, claimed_at, "lapsed")
        assert attempt.error

    def test_a_job_whose_attempts_are_spent_fails_when_itlapses(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage, max_attempts=2)
        claim_one(storage)
        clock.advance(LEASE_S)
        claim_one(storage)
        clock.advance(LEASE_S)

        claimed = claim(storage)

        job = get(storage, job_id)
        assert claimed == []
        assert (job.state, job.attempts, job.token, job.ended_at_ms) == (State.FAILED, 2, None, clock.now_ms())
        assert job.error is not None
        assert job.error.reason == "lapsed"
        assert [attempt.outcome for attempt in job.history] == ["lapsed", "lapsed"]

    def test_recover_answers_those_that_failed(self, storage: Storage, clock: ManualClock) -> None:
        spent = [add(storage, max_attempts=1) for _ in range(3)]
        add(storage)
        claim(storage, limit=4)
        clock.advance(LEASE_S)

        failed = storage.recover()

        assert sorted(ids_of(failed)) == spent
        assert failed == [get(storage, job.id) for job in failed]
        assert storage.recover() == []

    def test_recover_keeps_to_the_queues_it_is_given(self, storage: Storage, clock: ManualClock) -> None:
        for queue in ("a", "b", "c"):
            add(storage, queue, max_attempts=1)
            claim_one(storage, queue)
        clock.advance(LEASE_S)

        of_two = storage.recover(["b", "a", "unknown"])
        of_none = storage.recover([])
        of_all = storage.recover()

        assert {job.queue for job in of_two} == {"a", "b"}
        assert of_none == []
        assert {job.queue for job in of_all} == {"c"}

    def test_ever_so_manylapse_at_once(self, storage: Storage, clock: ManualClock) -> None:
        added = storage.add([spec(max_attempts=1 + number % 2) for number in range(600)])
        claim(storage, limit=600)
        clock.advance(LEASE_S)

        failed = storage.recover()

        assert sorted(ids_of(failed)) == [each.id for each in added[::2]]
        assert ids_of(storage.page("q", State.PENDING, limit=600)) == [each.id for each in added[1::2]]

    def test_a_job_that_lapsed_is_claimed_alone(self, storage: Storage, clock: ManualClock) -> None:
        lapsed = [add(storage), add(storage)]
        claim(storage, limit=2)
        clock.advance(LEASE_S)
        fresh = [add(storage), add(storage)]

        claims = [ids_of(claim(storage, limit=10)) for _ in range(4)]

        assert claims == [[lapsed[0]], [lapsed[1]], fresh, []]

    def test_what_stands_before_a_job_that_lapsed_is_claimed_without_it(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        lapsed = add(storage)
        claim_one(storage)
        clock.advance(LEASE_S)
        ahead = [add(storage, priority=1), add(storage, priority=1)]
        behind = add(storage)

        claims = [ids_of(claim(storage, limit=10)) for _ in range(3)]

        assert claims == [ahead, [lapsed], [behind]]

    def test_who_killed_its_worker_takes_no_other_job_along(self, storage: Storage, clock: ManualClock) -> None:
        killer = add(storage, max_attempts=3)
        others = [add(storage, max_attempts=3) for _ in range(8)]

        for _ in range(30):  # Each worker dies at once when it has the killer, and else does what it has got.
            jobs = claim(storage, limit=5)
            if killer in ids_of(jobs):
                clock.advance(LEASE_S)
            else:
                storage.complete([job.lease for job in jobs], keep=True)

        assert get(storage, killer).state is State.FAILED
        assert {get(storage, job_id).state for job_id in others} == {State.COMPLETED}

    def test_a_job_that_lapsed_in_another_queue_is_claimed_alone_too(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        lapsed = add(storage, "b", group="g")
        claim_one(storage, "b")
        clock.advance(LEASE_S)
        fresh = add(storage, "a")

        claims = [ids_of(storage.claim(["a", "b"], limit=10, lease_ms=LEASE_MS)) for _ in range(2)]

        assert claims == [[fresh], [lapsed]]

    def test_to_set_a_job_apart_costs_the_others_no_attempt(self, storage: Storage, clock: ManualClock) -> None:
        add(storage, max_attempts=2)
        claim_one(storage)
        clock.advance(LEASE_S)
        other = add(storage, max_attempts=1)

        claim(storage, limit=10)

        assert get(storage, other).attempts == 0
        assert ids_of(claim(storage, limit=10)) == [other]

    def test_without_a_limit_a_job_never_runs_out_of_attempts(self, storage: Storage, clock: ManualClock) -> None:
        add(storage, max_attempts=None)

        for number in range(1, 60):
            assert claim_one(storage).attempts == number
            clock.advance(LEASE_S)

        assert storage.recover() == []
        assert storage.counts("q") == Counts(ready=1)

    @pytest.mark.parametrize("finder", ["claim", "recover"])
    def test_whoever_finds_a_vanished_workers_job_is_told(
        self, storage: Storage, clock: ManualClock, finder: str
    ) -> None:
        told: list[tuple[JobRecord, int]] = []
        storage.on_lapsed(lambda job: told.append((job, threading.get_ident())))
        last = add(storage, max_attempts=1)
        add(storage, max_attempts=2)
        claim(storage, limit=2)
        clock.advance(LEASE_S)

        if finder == "claim":
            claim(storage)
        else:
            storage.recover()

        assert told == [(get(storage, last), threading.get_ident())]
        assert told[0][0].state is State.FAILED

    def test_a_callback_forlapsed_jobs_may_use_the_storage(self, storage: Storage, clock: ManualClock) -> None:
        def raise_alarm(job: JobRecord) -> None:
            add(storage, "alarms", ref=str(get(storage, job.id).state))

        storage.on_lapsed(raise_alarm)
        bring_to(storage, State.ACTIVE, max_attempts=1)
        clock.advance(LEASE_S)

        storage.recover()

        assert claim_one(storage, "alarms").ref == "failed"

    def test_a_callback_that_raises_is_logged_and_disturbs_nobody(
        self, storage: Storage, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        told: list[int] = []

        def raise_once(job: JobRecord) -> None:
            told.append(job.id)
            raise LookupError("from the callback")

        storage.on_lapsed(raise_once)
        first, second = add(storage, max_attempts=1), add(storage, max_attempts=1)
        claim(storage, limit=2)
        clock.advance(LEASE_S)

        failed = storage.recover()

        assert sorted(ids_of(failed)) == sorted(told) == [first, second]
        assert "from the callback" in caplog.text

    def test_alapse_that_is_rolled_back_is_not_told(self, storage: Storage, clock: ManualClock) -> None:
        told: list[int] = []
        storage.on_lapsed(lambda job: told.append(job.id))
        job_id = bring_to(storage, State.ACTIVE, max_attempts=1)
        clock.advance(LEASE_S)

        with suppress(LookupError), storage.transaction():
            storage.recover()
            raise LookupError
        not_told = list(told)
        with storage.transaction():
            storage.recover()
            not_yet_told = list(told)

        assert (not_told, not_yet_told, told) == ([], [], [job_id])
