# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Groups: their limits and their turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from litebroker.errors import GroupConflictError
from litebroker.jobs import Counts, Lease, State
from litebroker.storage import Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    LEASE_MS,
    LEASE_S,
    SETTLERS,
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
    spec,
)


class Groups(Contract):
    """Streams with a limit, taking turns."""

    @pytest.mark.parametrize("concurrency", [1, 3])
    def test_no_more_of_a_group_are_active_than_its_concurrency(self, storage: Storage, concurrency: int) -> None:
        ids = [add(storage, group="g", group_concurrency=concurrency) for _ in range(5)]

        assert ids_of(claim(storage, limit=10)) == ids[:concurrency]
        assert claim(storage, limit=10) == []

    @ending
    def test_however_a_job_ends_its_groups_place_is_free_again(
        self, storage: Storage, end: Callable[[Storage, Lease], bool]
    ) -> None:
        add(storage, group="g")
        add(storage, group="g")
        first = claim_one(storage)
        assert claim(storage) == []

        end(storage, first.lease)

        assert len(claim(storage, limit=10)) == 1
        assert claim(storage, limit=10) == []

    def test_an_extended_lease_keeps_the_groups_place(self, storage: Storage, clock: ManualClock) -> None:
        add(storage, group="g")
        add(storage, group="g")
        job = claim_one(storage)

        clock.advance(LEASE_S - 1)
        storage.extend([job.lease], LEASE_MS)
        clock.advance(LEASE_S - 1)

        assert claim(storage) == []

    def test_settling_a_lost_lease_frees_no_place(self, storage: Storage, clock: ManualClock) -> None:
        for _ in range(3):
            add(storage, group="g")
        lost = claim_one(storage)
        clock.advance(LEASE_S)
        claim_one(storage)

        assert [settle(storage, lost.lease) for settle in SETTLERS.values()] == [False] * len(SETTLERS)
        assert claim(storage) == []

    @pytest.mark.parametrize("how", ["cancel", "remove", "purge", "move", "reschedule"])
    def test_a_waiting_job_that_is_taken_out_leaves_its_group_in_order(self, storage: Storage, how: str) -> None:
        active = [add(storage, group="g"), claim_one(storage).id][0]
        waiting = add(storage, group="g")
        assert {
            "cancel": lambda: storage.cancel([waiting]) == [True],
            "remove": lambda: storage.remove([waiting]) == [True],
            "purge": lambda: storage.purge("q", [State.PENDING]) == 1,
            "move": lambda: storage.move("q", "elsewhere") == 1,
            "reschedule": lambda: storage.reschedule(waiting, due_at_ms=2**50),
        }[how]()

        still_taken = claim(storage)
        storage.complete([get(storage, active).lease])
        nothing_left = claim(storage)
        last = add(storage, group="g")

        assert (still_taken, nothing_left) == ([], [])
        assert claim_all(storage) == [last]

    def test_the_order_holds_within_a_group(self, storage: Storage, clock: ManualClock) -> None:
        now = clock.now_ms()
        low, late, early, high = (
            add(storage, group="g", group_concurrency=4, priority=priority, run_at_ms=now - age)
            for priority, age in ((-1, 9), (0, 1), (0, 5), (7, 0))
        )

        assert claim_all(storage) == [high, early, late, low]

    def test_groups_and_the_ungrouped_take_turns(self, storage: Storage) -> None:
        for group in ("a", "b", None):
            for _ in range(4):
                add(storage, group=group)
        order = []

        while jobs := claim(storage):
            order.append(jobs[0].group)
            storage.complete([jobs[0].lease])

        rounds = [order[start : start + 3] for start in range(0, 12, 3)]
        assert [set(served) for served in rounds] == [{"a", "b", None}] * 4
        assert rounds == rounds[:1] * 4

    def test_streams_take_turns_within_one_claim(self, storage: Storage) -> None:
        ids: dict[str | None, list[int]] = {group: [] for group in ("a", "b", None)}
        for group in ids:
            ids[group] = [add(storage, group=group, group_concurrency=5) for _ in range(5)]

        jobs = claim(storage, limit=6)

        for start in (0, 3):
            assert {job.group for job in jobs[start : start + 3]} == {"a", "b", None}
        assert {job.id for job in jobs} == {first for queue in ids.values() for first in queue[:2]}

    def test_the_priority_of_its_jobs_gives_a_stream_no_second_turn(self, storage: Storage) -> None:
        for _ in range(4):
            add(storage, group="urgent", group_concurrency=9, priority=100)
            add(storage, group="modest", group_concurrency=9, priority=-100)

        served = [job.group for job in claim(storage, limit=8)]

        assert [set(served[start : start + 2]) for start in range(0, 8, 2)] == [{"urgent", "modest"}] * 4

    def test_a_group_that_comes_late_does_not_catch_up(self, storage: Storage) -> None:
        for _ in range(20):
            add(storage, group="early", group_concurrency=99)
        claim(storage, limit=10)

        for _ in range(5):
            add(storage, group="late", group_concurrency=99)
        served = [job.group for job in claim(storage, limit=10)]

        assert [set(served[start : start + 2]) for start in range(0, 10, 2)] == [{"early", "late"}] * 5

    def test_a_group_that_was_empty_for_long_does_not_catch_up(self, storage: Storage) -> None:
        add(storage, group="rare", group_concurrency=99)
        for _ in range(20):
            add(storage, group="busy", group_concurrency=99)
        claim(storage, limit=11)

        for _ in range(3):
            add(storage, group="rare", group_concurrency=99)
        served = [job.group for job in claim(storage, limit=6)]

        assert [set(served[start : start + 2]) for start in range(0, 6, 2)] == [{"rare", "busy"}] * 3

    def test_a_saturated_group_does_not_block_the_others(self, storage: Storage) -> None:
        for _ in range(3):
            add(storage, group="full", priority=9)
        claim_one(storage)
        others = {add(storage, group="other"), add(storage)}

        assert {job.id for job in claim(storage, limit=10)} == others

    def test_each_of_two_hundred_groups_is_served_once_a_round(self, storage: Storage) -> None:
        storage.add([spec(group=f"g{number}", group_concurrency=9) for number in range(200) for _ in range(2)])

        for _ in range(2):
            assert len({job.group for job in claim(storage, limit=200)}) == 200
        assert claim(storage) == []

    def test_a_delayed_job_of_a_group_waits_for_its_time_and_for_its_place(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        delayed = add(storage, group="g", delay_ms=10_000)
        first = add(storage, group="g")
        assert claim_all(storage) == [first]

        clock.advance(10)
        while_taken = claim(storage)
        storage.complete([get(storage, first).lease])

        assert while_taken == []
        assert claim_all(storage) == [delayed]

    def test_a_delayed_job_alone_makes_its_group_wait(self, storage: Storage, clock: ManualClock) -> None:
        delayed = add(storage, group="g", delay_ms=10_000)
        assert claim(storage) == []

        clock.advance(10)

        assert claim_all(storage) == [delayed]

    def test_a_differing_concurrency_is_refused_and_nothing_is_stored(self, storage: Storage) -> None:
        add(storage, group="g", group_concurrency=2)

        with pytest.raises(GroupConflictError) as caught:
            storage.add([spec(), spec("other"), spec(group="g", group_concurrency=3), spec()])

        assert (caught.value.group, caught.value.concurrency) == ("g", 2)
        assert storage.counts("q") == Counts(ready=1)
        assert storage.counts("other") == Counts()

    def test_a_batch_that_disagrees_with_itself_leaves_no_group_behind(self, storage: Storage) -> None:
        with pytest.raises(GroupConflictError):
            storage.add([spec(group="g", group_concurrency=1), spec(group="g", group_concurrency=2)])

        assert storage.counts("q") == Counts()
        assert get(storage, add(storage, group="g", group_concurrency=2)).group == "g"

    def test_the_concurrency_is_fixed_for_good(self, storage: Storage) -> None:
        job_id = add(storage, group="g", group_concurrency=2)
        storage.remove([job_id])

        with pytest.raises(GroupConflictError):
            add(storage, group="g", group_concurrency=1)

        assert get(storage, add(storage, group="g", group_concurrency=2)).group == "g"

    def test_each_queue_has_groups_of_its_own(self, storage: Storage) -> None:
        for queue, concurrency in (("a", 1), ("b", 2)):
            for _ in range(3):
                add(storage, queue, group="g", group_concurrency=concurrency)

        assert [len(claim(storage, queue, limit=9)) for queue in ("a", "b")] == [1, 2]

    def test_a_retried_job_waits_for_its_groups_place_as_well(self, storage: Storage) -> None:
        failed = bring_to(storage, State.FAILED, group="g")
        add(storage, group="g")
        other = claim_one(storage)

        storage.retry([failed])
        while_taken = claim(storage)
        storage.complete([other.lease])

        assert while_taken == []
        assert claim_all(storage) == [failed]

    def test_the_limit_holds_across_threads(self, storage: Storage) -> None:
        storage.add([spec(group="g", group_concurrency=5) for _ in range(100)])

        claimed = in_threads(*[lambda: claim(storage, limit=3)] * 8)

        assert sum(map(len, claimed)) == 5

    def test_a_grouped_front_job_goes_first_in_its_group(self, storage: Storage) -> None:
        waiting = add(storage, group="g", priority=5, group_concurrency=3)
        front = add(storage, group="g", front=True, group_concurrency=3)

        assert claim_all(storage) == [front, waiting]
