# ruff: noqa: S101 - tests, which stand here so that other storages can be held to them too
"""Where jobs stand, and what has come and gone."""

from __future__ import annotations

import pytest

from litebroker.jobs import Arrivals, Standing, State
from litebroker.storage import Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    ENDS,
    LEASE_MS,
    LEASE_S,
    Contract,
    add,
    bring_to,
    claim_one,
    get,
)


class Standings(Contract):
    """What tools ask for, to say why a job waits."""

    def test_those_ahead_of_a_job_are_the_due_ones_of_its_stream_that_are_claimed_before_it(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        start = clock.now_ms()
        first, second = add(storage), add(storage)
        clock.advance(1)
        late, urgent, backdated = add(storage), add(storage, priority=1), add(storage, run_at_ms=start - 5)
        add(storage, delay_ms=1000)
        add(storage, priority=-1)
        add(storage, "other")
        grouped, behind = add(storage, group="g", priority=9), add(storage, group="g")

        standings = {job_id: storage.standing(job_id) for job_id in (urgent, backdated, first, second, late)}

        assert standings == {
            urgent: Standing(0),
            backdated: Standing(1),
            first: Standing(2),
            second: Standing(3),
            late: Standing(4),
        }
        assert storage.standing(grouped) == Standing(0, 1)
        assert storage.standing(behind) == Standing(1, 1)

    def test_a_job_whose_time_has_come_stands_among_the_due_though_nobody_has_claimed_since(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        delayed, urgent = add(storage, delay_ms=1000), add(storage, delay_ms=2000, priority=5)
        waiting = add(storage, priority=-1)
        before = storage.standing(delayed)
        clock.advance(3)
        last = add(storage)

        standings = [storage.standing(job_id) for job_id in (urgent, delayed, last, waiting)]

        assert before == Standing(None)
        assert standings == [Standing(0), Standing(1), Standing(2), Standing(3)]

    def test_a_full_group_is_told_with_those_that_hold_its_places(self, storage: Storage) -> None:
        ids = [add(storage, group="g", group_concurrency=2) for _ in range(3)]
        later = claim_one(storage, lease_ms=2 * LEASE_MS).id
        sooner = claim_one(storage).id
        add(storage, group="other")
        claim_one(storage)

        standing = storage.standing(ids[2])

        assert standing == Standing(0, 2, 2, (sooner, later))

    def test_a_delayed_job_of_a_group_has_its_groups_places(self, storage: Storage) -> None:
        holder = add(storage, group="g")
        delayed = add(storage, group="g", delay_ms=1000)
        claim_one(storage)

        assert storage.standing(delayed) == Standing(None, 1, 1, (holder,))

    def test_only_pending_jobs_stand_in_a_stream(self, storage: Storage) -> None:
        others = [bring_to(storage, state) for state in State if state is not State.PENDING]

        assert [storage.standing(job_id) for job_id in [*others, -1, 0, 2**63 - 1, 2**70]] == [None] * 8

    def test_looking_where_a_job_stands_changes_nothing(self, storage: Storage, clock: ManualClock) -> None:
        due, delayed, held = add(storage, priority=1), add(storage, delay_ms=1000), add(storage, priority=2)
        claim_one(storage)
        clock.advance(2 * LEASE_S)
        before = [get(storage, job_id) for job_id in (due, delayed, held)]

        for job_id in (due, delayed, held):
            storage.standing(job_id)

        assert [get(storage, job_id) for job_id in (due, delayed, held)] == before

    def test_a_lease_tells_when_it_was_extended_last(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage)
        record = claim_one(storage)
        at_first = storage.holders([job_id])[job_id].renewed_at_ms
        clock.advance(1)
        storage.extend([record.lease], LEASE_MS)
        extended_at_ms = clock.now_ms()
        clock.advance(1)

        assert at_first is None
        assert storage.holders([job_id])[job_id].renewed_at_ms == extended_at_ms

    def test_a_new_claim_was_not_extended_yet(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage)
        storage.extend([claim_one(storage).lease], LEASE_MS)
        clock.advance(LEASE_S)
        claim_one(storage)

        assert storage.holders([job_id])[job_id].renewed_at_ms is None

    def test_an_id_tells_when_it_was_given_or_nothing(self, storage: Storage) -> None:
        first, second = (storage.issued_at_ms(job_id) for job_id in (add(storage), add(storage)))

        if first is None or second is None:
            assert first is second
        else:
            assert first <= second
        assert storage.issued_at_ms(2**70) is None
        assert storage.issued_at_ms(1) is None

    def test_arrivals_are_the_jobs_with_higher_ids_by_their_queues(self, storage: Storage) -> None:
        assert storage.arrivals(None) == Arrivals(0, {})
        first = add(storage)
        assert storage.arrivals(None) == Arrivals(first, {})
        add(storage, "other")
        add(storage, delay_ms=1000)
        last = add(storage)

        assert storage.arrivals(first) == Arrivals(last, {"other": 1, "q": 2})
        assert storage.arrivals(last) == Arrivals(last, {})

    def test_arrivals_come_in_pages(self, storage: Storage) -> None:
        ids = [add(storage) for _ in range(5)]

        first = storage.arrivals(ids[0], limit=3)

        assert first == Arrivals(ids[3], {"q": 3})
        assert storage.arrivals(first.latest, limit=3) == Arrivals(ids[4], {"q": 1})

    @pytest.mark.parametrize("state", ENDS, ids=str)
    def test_those_that_ended_since_an_instant_are_counted(
        self, storage: Storage, clock: ManualClock, state: State
    ) -> None:
        bring_to(storage, state)
        clock.advance(1)
        since_ms = clock.now_ms()
        bring_to(storage, state)
        clock.advance(1)
        bring_to(storage, state)
        bring_to(storage, state, "other")

        counts = [storage.ended_since("q", other, since_ms) for other in ENDS]

        assert counts == [2 if other is state else 0 for other in ENDS]
        assert storage.ended_since("unknown", state, since_ms) == 0

    def test_a_queue_is_awaited_while_a_listener_for_it_is_open(self, storage: Storage) -> None:
        add(storage)
        before = storage.is_awaited("q")
        listener = storage.listener(["other", "q"])

        during = [storage.is_awaited(name) for name in ("q", "other", "third")]
        listener.close()

        assert before in {False, None}
        assert during == [True, True, before]
        assert storage.is_awaited("q") is before
