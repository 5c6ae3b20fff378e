# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Claiming jobs: which, and how."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress

import pytest

from litebroker.jobs import Counts, Lease, State
from litebroker.storage import Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    HOUR_S,
    LEASE_MS,
    PATIENCE_S,
    TEN_YEARS_S,
    Contract,
    add,
    claim,
    claim_all,
    claim_one,
    get,
    ids_of,
    in_threads,
    spec,
)


class ClaimOrder(Contract):
    """Which job is next."""

    def test_nothing_is_claimed_where_nothing_is(self, storage: Storage) -> None:
        assert claim(storage) == []
        assert storage.claim([], limit=5, lease_ms=LEASE_MS) == []
        add(storage)
        assert claim_all(storage) != []
        assert claim(storage) == []

    def test_of_equals_the_oldest_goes_first(self, storage: Storage) -> None:
        ids = [add(storage) for _ in range(20)]

        assert claim_all(storage) == ids

    def test_the_highest_priority_goes_first(self, storage: Storage) -> None:
        by_priority = {priority: add(storage, priority=priority) for priority in (0, 5, -3, 9, 5000, -(2**40))}

        assert claim_all(storage) == [by_priority[priority] for priority in sorted(by_priority, reverse=True)]

    def test_priorities_reach_from_end_to_end_of_64_bits(self, storage: Storage) -> None:
        priorities = [0, 2**63 - 1, -(2**63), 2**63 - 2, -(2**63) + 1]
        by_priority = {priority: add(storage, priority=priority) for priority in priorities}

        assert [get(storage, by_priority[priority]).priority for priority in priorities] == priorities
        assert ids_of(storage.page("q", State.PENDING)) == [by_priority[p] for p in sorted(priorities, reverse=True)]
        assert claim_all(storage) == [by_priority[priority] for priority in sorted(priorities, reverse=True)]

    def test_of_one_priority_the_earliest_due_goes_first(self, storage: Storage, clock: ManualClock) -> None:
        now = clock.now_ms()
        later, sooner, soonest = (add(storage, run_at_ms=now - age) for age in (1, 2, 3))

        assert claim_all(storage) == [soonest, sooner, later]

    def test_a_batch_goes_in_its_order(self, storage: Storage) -> None:
        added = storage.add([spec(payload=b"%d" % number) for number in range(100)])

        assert ids_of(claim(storage, limit=100)) == [each.id for each in added]

    @pytest.mark.parametrize("limit", [2, 4, 100])
    @pytest.mark.parametrize("group", [None, "g"])
    def test_several_at_once_come_in_the_order_of_single_claims(
        self, storage: Storage, clock: ManualClock, limit: int, group: str | None
    ) -> None:
        now = clock.now_ms()
        ids = {}
        for number, (priority, age) in enumerate(itertools.product((3, 1, 2), (5, 9, 5, 1))):
            run_at_ms = now - age
            job_id = add(storage, priority=priority, run_at_ms=run_at_ms, group=group, group_concurrency=100)
            ids[-priority, run_at_ms, number] = job_id

        claimed = [ids_of(claim(storage, limit=limit)) for _ in range(6)]

        assert list(itertools.chain(*claimed)) == [ids[place] for place in sorted(ids)]

    def test_the_order_is_kept_though_the_wall_clock_goes_back(self, storage: Storage, clock: ManualClock) -> None:
        due = clock.now_ms() - 10 * 365 * 24 * 3_600_000
        ids = []
        for _ in range(5):
            ids.append(add(storage, run_at_ms=due, ref="r"))
            clock.step(-HOUR_S)

        assert ids_of(storage.find("q", ref="r")) == ids
        assert claim_all(storage) == ids

    def test_no_more_are_claimed_than_asked_for(self, storage: Storage) -> None:
        ids = [add(storage) for _ in range(5)]

        assert ids_of(claim(storage, limit=2)) == ids[:2]
        assert ids_of(claim(storage, limit=2)) == ids[2:4]
        assert ids_of(claim(storage, limit=2)) == ids[4:]

    def test_a_job_is_not_claimed_before_it_is_due(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage, delay_ms=5000)

        clock.advance(4.999)
        early = claim(storage)
        clock.advance(0.001)
        in_time = claim(storage)

        assert early == []
        assert ids_of(in_time) == [job_id]

    def test_a_job_runs_at_the_instant_given(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage, run_at_ms=clock.now_ms() + 5000)

        clock.step(4.999)
        early = claim(storage)
        clock.step(0.001)
        in_time = claim(storage)

        assert early == []
        assert ids_of(in_time) == [job_id]

    @pytest.mark.parametrize("run_at_ms", [-1, 0, 1], ids=["before the epoch", "the epoch", "just after"])
    def test_a_time_long_past_is_due_at_once(self, storage: Storage, run_at_ms: int) -> None:
        job_id = add(storage, run_at_ms=run_at_ms)

        assert storage.counts("q") == Counts(ready=1)
        assert ids_of(claim(storage)) == [job_id]

    def test_an_urgent_job_in_the_future_does_not_hold_up_one_that_is_due(self, storage: Storage) -> None:
        add(storage, priority=100, delay_ms=60_000)
        due = add(storage, priority=-100)

        assert claim_all(storage) == [due]

    def test_once_due_the_urgent_job_goes_before_those_that_waited(self, storage: Storage, clock: ManualClock) -> None:
        waiting = add(storage)
        urgent = add(storage, priority=1, delay_ms=60_000)
        add(storage, priority=9, delay_ms=120_000)

        clock.advance(60)

        assert claim_all(storage) == [urgent, waiting]

    def test_a_delayed_job_stands_behind_those_due_before_it(self, storage: Storage, clock: ManualClock) -> None:
        delayed = add(storage, delay_ms=1000)
        earlier = add(storage)
        clock.advance(2)
        later = add(storage)

        assert claim_all(storage) == [earlier, delayed, later]

    def test_ever_so_many_that_come_due_at_once_go_in_order_of_priority(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        added = storage.add([spec(priority=number, delay_ms=1000 + number) for number in range(1500)])

        clock.advance(60)
        first = claim(storage, limit=1)
        others = claim(storage, limit=1499)

        assert ids_of([*first, *others]) == [each.id for each in reversed(added)]

    @pytest.mark.parametrize("step_s", [-HOUR_S, -TEN_YEARS_S], ids=["an hour", "ten years"])
    def test_what_was_due_stays_due_when_the_wall_clock_goes_back(
        self, storage: Storage, clock: ManualClock, step_s: float
    ) -> None:
        job_id = add(storage)

        clock.step(step_s)

        assert storage.counts("q") == Counts(ready=1)
        assert ids_of(storage.page("q", State.PENDING)) == [job_id]
        assert ids_of(claim(storage)) == [job_id]

    def test_the_first_queue_that_has_jobs_is_served_first(self, storage: Storage) -> None:
        in_a = [add(storage, "a") for _ in range(2)]
        in_b = [add(storage, "b", priority=9) for _ in range(2)]

        assert ids_of(storage.claim(["empty", "a", "b"], limit=3, lease_ms=LEASE_MS)) == [*in_a, in_b[0]]
        assert ids_of(storage.claim(["a", "unknown", "b"], limit=3, lease_ms=LEASE_MS)) == [in_b[1]]

    def test_the_queues_are_taken_in_the_order_of_the_call(self, storage: Storage) -> None:
        in_a, in_b = add(storage, "a"), add(storage, "b")

        assert ids_of(storage.claim(["b", "a"], limit=5, lease_ms=LEASE_MS)) == [in_b, in_a]

    def test_other_queues_are_left_alone(self, storage: Storage) -> None:
        add(storage, "a")

        assert claim(storage, "b") == []
        assert storage.counts("a") == Counts(ready=1)

    def test_a_front_job_goes_before_everything_that_waits(self, storage: Storage, clock: ManualClock) -> None:
        waiting = [add(storage), add(storage, priority=50), add(storage, run_at_ms=clock.now_ms() - 1000)]

        front = add(storage, front=True)
        behind = add(storage)

        assert ids_of(storage.page("q", State.PENDING))[0] == front
        assert claim_all(storage) == [front, waiting[1], waiting[2], waiting[0], behind]

    def test_the_latest_front_job_goes_first(self, storage: Storage) -> None:
        waiting = add(storage)
        fronts = [add(storage, front=True) for _ in range(3)]
        batch = storage.add([spec(front=True), spec(front=True)])

        assert claim_all(storage) == [batch[1].id, batch[0].id, *reversed(fronts), waiting]

    def test_a_front_job_goes_before_a_delayed_one_whose_time_has_come(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        delayed = add(storage, priority=9, delay_ms=1000)
        clock.advance(1)

        front = add(storage, front=True)

        assert claim_all(storage) == [front, delayed]

    def test_a_front_job_does_not_hold_up_a_more_urgent_one_that_is_due_later(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        delayed = add(storage, priority=9, delay_ms=1000)

        front = add(storage, front=True)
        clock.advance(1)

        assert claim_all(storage) == [delayed, front]

    def test_a_front_job_in_an_empty_queue_is_a_job_as_any(self, storage: Storage) -> None:
        front = add(storage, front=True)
        behind = add(storage)

        assert claim_all(storage) == [front, behind]

    def test_a_front_job_of_high_priority_goes_first_too(self, storage: Storage) -> None:
        waiting = add(storage, priority=3)
        front = add(storage, priority=7, front=True)

        assert claim_all(storage) == [front, waiting]


class Claiming(Contract):
    """What a claim gives, and to whom."""

    def test_a_claim_counts_as_an_attempt_and_carries_a_lease(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage)
        clock.advance(1)

        job = claim_one(storage)

        assert (job.id, job.state, job.attempts) == (job_id, State.ACTIVE, 1)
        assert (job.claimed_at_ms, job.lease_until_ms) == (clock.now_ms(), clock.now_ms() + LEASE_MS)
        assert job.lease == Lease(job_id, job.token or 0)
        assert job.due_at_ms == clock.now_ms() - 1000

    def test_what_is_claimed_is_as_it_is_stored(self, storage: Storage) -> None:
        add(storage, ref="r", headers={"a": "b"}, group="g")

        assert (job := claim_one(storage)) == get(storage, job.id)

    def test_an_active_job_is_not_claimed_again(self, storage: Storage) -> None:
        add(storage)
        claim_one(storage)

        assert claim(storage) == []

    def test_only_an_active_job_has_a_lease(self, storage: Storage) -> None:
        job = get(storage, add(storage))

        assert (job.token, job.lease_until_ms) == (None, None)
        with pytest.raises(ValueError, match="not active"):
            _ = job.lease

    def test_no_two_claims_share_a_token(self, storage: Storage) -> None:
        storage.add([spec(group=group, group_concurrency=9) for group in (None, "g") for _ in range(5)])
        leases: set[Lease] = set()
        tokens: list[set[int | None]] = []

        for _ in range(10):
            jobs = claim(storage, limit=10)
            leases |= {job.lease for job in jobs}
            tokens.append({job.token for job in jobs})
            storage.release([job.lease for job in jobs])

        assert len(leases) == 100
        assert sum(map(len, tokens)) == len(set.union(*tokens))

    def test_the_token_of_a_claim_that_was_rolled_back_is_not_given_again(self, storage: Storage) -> None:
        add(storage)
        undone: list[Lease] = []
        with suppress(LookupError), storage.transaction():
            undone.append(claim_one(storage).lease)
            raise LookupError

        job = claim_one(storage)

        assert job.lease != undone[0]
        assert storage.complete(undone) == [False]
        assert storage.complete([job.lease]) == [True]

    def test_eight_threads_claim_each_of_500_jobs_exactly_once(self, storage: Storage) -> None:
        added = storage.add([spec() for _ in range(500)])

        def drain(limit: int) -> list[int]:
            ids = []
            while jobs := claim(storage, limit=limit):
                ids += ids_of(jobs)
                assert storage.complete([job.lease for job in jobs]) == [True] * len(jobs)
            return ids

        drained = in_threads(*[lambda limit=limit: drain(limit) for limit in (1, 1, 1, 1, 2, 3, 5, 8)])

        assert sorted(itertools.chain(*drained)) == [each.id for each in added]
        assert storage.counts("q") == Counts()

    def test_threads_that_add_and_claim_at_once_lose_nothing(self, storage: Storage) -> None:
        def produce() -> list[int]:
            return [add(storage) for _ in range(100)]

        def consume() -> list[int]:
            ids: list[int] = []
            until = time.monotonic() + PATIENCE_S
            while len(ids) < 100 and time.monotonic() < until:
                jobs = claim(storage, limit=100 - len(ids))
                ids += ids_of(jobs)
                storage.complete([job.lease for job in jobs])
            return ids

        *produced, first, second = in_threads(produce, produce, consume, consume)

        assert sorted(first + second) == sorted(itertools.chain(*produced))
