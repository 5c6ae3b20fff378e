# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Retrying, cancelling, rescheduling, removing, moving, purging, pruning and pausing."""

from __future__ import annotations

import pytest

from litebroker.errors import GroupConflictError
from litebroker.jobs import Counts, Keep, QueueInfo, State
from litebroker.storage import Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    ENDS,
    ERROR,
    LEASE_MS,
    LEASE_S,
    Contract,
    add,
    bring_to,
    claim,
    claim_all,
    claim_one,
    get,
    ids_of,
    spec,
)


class Mending(Contract):
    """What people and tools do to jobs that nobody is working on."""

    def test_a_dead_letter_is_retried_at_once_with_its_history(self, storage: Storage, clock: ManualClock) -> None:
        dead = bring_to(storage, State.FAILED, delay_ms=0, max_attempts=1)
        history = get(storage, dead).history
        clock.advance(60)

        assert storage.retry([dead]) == [True]

        job = get(storage, dead)
        assert (job.state, job.attempts, job.due_at_ms, job.ended_at_ms) == (State.PENDING, 1, clock.now_ms(), None)
        assert job.history == history
        assert claim_one(storage).attempts == 2

    def test_a_retry_grants_one_attempt_more_when_they_are_spent(self, storage: Storage) -> None:
        dead = bring_to(storage, State.FAILED, max_attempts=1)

        for attempts in (2, 3, 4):
            storage.retry([dead])
            job = claim_one(storage)
            assert job.attempts == attempts
            assert storage.fail(job.lease, ERROR, retry_in_ms=0) is State.FAILED

    def test_a_retry_leaves_the_attempts_that_remain(self, storage: Storage) -> None:
        dead = bring_to(storage, State.FAILED, max_attempts=3)

        storage.retry([dead])
        answers = [storage.fail(claim_one(storage).lease, ERROR, retry_in_ms=0) for _ in range(2)]

        assert answers == [State.PENDING, State.FAILED]

    def test_a_retried_job_without_a_limit_stays_without(self, storage: Storage) -> None:
        dead = bring_to(storage, State.FAILED, max_attempts=None)

        storage.retry([dead])

        assert get(storage, dead).max_attempts is None

    @pytest.mark.parametrize("state", [state for state in State if state is not State.FAILED], ids=str)
    def test_only_failed_jobs_are_retried(self, storage: Storage, state: State) -> None:
        job_id = bring_to(storage, state)
        before = get(storage, job_id)

        assert storage.retry([job_id]) == [False]
        assert storage.retry([job_id], queue="elsewhere") == [False]
        assert get(storage, job_id) == before

    def test_each_job_of_a_list_has_its_answer(self, storage: Storage) -> None:
        failed = [bring_to(storage, State.FAILED) for _ in range(2)]
        cancelled = bring_to(storage, State.CANCELLED)

        assert storage.retry([failed[0], 10**15, cancelled, failed[1]]) == [True, False, False, True]
        assert storage.cancel([failed[0], 10**15, cancelled, failed[1]]) == [True, False, False, True]
        assert storage.remove([failed[0], 10**15, cancelled, failed[1]]) == [True, False, True, True]
        assert [storage.retry([]), storage.cancel([]), storage.remove([])] == [[], [], []]

    def test_a_dead_letter_may_go_on_in_another_queue(self, storage: Storage) -> None:
        dead = bring_to(storage, State.FAILED, ref="r")

        assert storage.retry([dead], queue="second chance") == [True]

        assert storage.counts("q") == Counts()
        assert storage.find("q", ref="r") == []
        assert ids_of(storage.find("second chance", ref="r")) == [dead]
        assert ids_of(claim(storage, "second chance")) == [dead]

    def test_a_dead_letter_goes_to_no_queue_that_holds_its_key(self, storage: Storage) -> None:
        dead = bring_to(storage, State.FAILED, dedupe_key="k")
        holder = add(storage, "other", dedupe_key="k")
        before = get(storage, dead)

        assert storage.retry([dead], queue="other") == [False]
        assert get(storage, dead) == before
        assert ids_of(storage.find("other", dedupe_key="k")) == [holder]

    def test_a_dead_letter_may_go_on_with_another_payload(self, storage: Storage) -> None:
        changed, unchanged = bring_to(storage, State.FAILED, payload=b"old"), bring_to(storage, State.FAILED)

        assert storage.retry([changed, unchanged], payloads={changed: b"new"}) == [True, True]

        assert get(storage, changed).payload == b"new"
        assert get(storage, unchanged).payload == b"x"

    def test_only_a_dead_letter_gets_another_payload(self, storage: Storage) -> None:
        job_id = add(storage, payload=b"old")

        assert storage.retry([job_id], payloads={job_id: b"new"}) == [False]
        assert get(storage, job_id).payload == b"old"

    def test_a_grouped_dead_letter_may_go_on_in_another_queue(self, storage: Storage) -> None:
        dead = bring_to(storage, State.FAILED, group="g", group_concurrency=2)

        assert storage.retry([dead], queue="other") == [True]

        assert claim_one(storage, "other").group == "g"
        assert storage.counts("q") == Counts()

    def test_a_retried_job_joins_the_group_that_its_new_queue_has(self, storage: Storage) -> None:
        dead = bring_to(storage, State.FAILED, group="g", group_concurrency=2)
        add(storage, "other", group="g", group_concurrency=1)

        assert storage.retry([dead], queue="other") == [True]

        assert len(claim(storage, "other", limit=9)) == 1

    def test_a_cancelled_job_has_ended_and_does_not_run(self, storage: Storage, clock: ManualClock) -> None:
        ready, delayed = add(storage), add(storage, delay_ms=1000)

        assert storage.cancel([ready, delayed]) == [True, True]

        clock.advance(60)
        assert [get(storage, job_id).state for job_id in (ready, delayed)] == [State.CANCELLED] * 2
        assert get(storage, ready).ended_at_ms == clock.now_ms() - 60_000
        assert claim(storage) == []

    @pytest.mark.parametrize("state", [state for state in State if state is not State.PENDING], ids=str)
    def test_only_pending_jobs_are_cancelled_or_rescheduled(
        self, storage: Storage, clock: ManualClock, state: State
    ) -> None:
        job_id = bring_to(storage, state)
        before = get(storage, job_id)

        assert storage.cancel([job_id]) == [False]
        assert storage.reschedule(job_id, due_at_ms=clock.now_ms() + 1000) is False
        assert get(storage, job_id) == before

    def test_a_job_that_is_not_there_is_not_rescheduled(self, storage: Storage) -> None:
        assert storage.reschedule(10**15, due_at_ms=0) is False

    def test_a_job_may_be_put_off(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage, priority=4)

        assert storage.reschedule(job_id, due_at_ms=clock.now_ms() + 5000) is True
        early = claim(storage)
        clock.advance(5)

        assert early == []
        job = claim_one(storage)
        assert (job.id, job.due_at_ms, job.priority) == (job_id, clock.now_ms(), 4)

    @pytest.mark.parametrize("offset_ms", [0, -5000], ids=["now", "past"])
    def test_a_delayed_job_may_be_brought_forward(self, storage: Storage, clock: ManualClock, offset_ms: int) -> None:
        job_id = add(storage, delay_ms=1_000_000)

        assert storage.reschedule(job_id, due_at_ms=clock.now_ms() + offset_ms) is True

        assert storage.counts("q") == Counts(ready=1)
        assert ids_of(claim(storage)) == [job_id]

    def test_a_rescheduled_job_takes_its_new_place_in_line(self, storage: Storage, clock: ManualClock) -> None:
        first, second, third = (add(storage) for _ in range(3))

        storage.reschedule(first, due_at_ms=clock.now_ms() + 1)
        storage.reschedule(third, due_at_ms=clock.now_ms() - 1)
        clock.advance(1)

        assert claim_all(storage) == [third, second, first]

    @pytest.mark.parametrize("state", [state for state in State if state is not State.ACTIVE], ids=str)
    def test_a_job_that_is_not_active_can_be_removed(self, storage: Storage, state: State) -> None:
        job_id = bring_to(storage, state)

        assert storage.remove([job_id]) == [True]
        assert storage.get(job_id) is None
        assert storage.counts("q") == Counts()
        assert storage.remove([job_id]) == [False]

    def test_a_delayed_job_can_be_removed(self, storage: Storage, clock: ManualClock) -> None:
        job_id = add(storage, delay_ms=1000)

        assert storage.remove([job_id]) == [True]

        clock.advance(1)
        assert claim(storage) == []

    def test_an_active_job_cannot_be_removed(self, storage: Storage, clock: ManualClock) -> None:
        job_id = bring_to(storage, State.ACTIVE)
        before = get(storage, job_id)

        assert storage.remove([job_id]) == [False]
        assert get(storage, job_id) == before
        clock.advance(LEASE_S)
        assert storage.remove([job_id]) == [False]

    def test_every_pending_job_moves_in_its_order(self, storage: Storage, clock: ManualClock) -> None:
        low, high, plain = add(storage, priority=-1), add(storage, priority=5), add(storage)
        grouped, delayed = add(storage, group="g"), add(storage, delay_ms=1000)
        before = [get(storage, job_id) for job_id in (low, high, plain, grouped, delayed)]

        assert storage.move("q", "target") == 5

        assert storage.counts("q") == Counts()
        assert storage.counts("target") == Counts(ready=4, delayed=1)
        after = [get(storage, job_id) for job_id in (low, high, plain, grouped, delayed)]
        assert after == [job._replace(queue="target") for job in before]
        clock.advance(1)
        assert ids_of(storage.page("target", State.PENDING)) == [high, plain, delayed, low, grouped]
        order = claim_all(storage, "target")
        assert [job_id for job_id in order if job_id != grouped] == [high, plain, delayed, low]
        assert grouped in order

    def test_moved_jobs_line_up_with_those_of_the_target(self, storage: Storage, clock: ManualClock) -> None:
        ids = []
        for number in range(6):
            ids.append(add(storage, "source" if number % 2 else "target"))
            clock.advance(1)

        assert storage.move("source", "target") == 3

        assert claim_all(storage, "target") == ids

    @pytest.mark.parametrize("state", [state for state in State if state is not State.PENDING], ids=str)
    def test_only_pending_jobs_move(self, storage: Storage, state: State) -> None:
        job_id = bring_to(storage, state)

        assert storage.move("q", "target") == 0
        assert get(storage, job_id).queue == "q"

    def test_nothing_moves_from_an_unknown_queue(self, storage: Storage) -> None:
        add(storage)

        assert storage.move("unknown", "q") == 0
        assert storage.counts("q") == Counts(ready=1)

    def test_a_job_whose_key_is_held_in_the_target_stays(self, storage: Storage) -> None:
        held, free, none = add(storage, dedupe_key="k"), add(storage, dedupe_key="free"), add(storage)
        held_later = add(storage, dedupe_key="l", delay_ms=1000)
        add(storage, "target", dedupe_key="k")
        add(storage, "target", dedupe_key="l", delay_ms=9)

        assert storage.move("q", "target") == 2

        queues = [get(storage, job_id).queue for job_id in (held, free, none, held_later)]
        assert queues == ["q", "target", "target", "q"]
        assert claim_all(storage) == [held]

    def test_single_jobs_move_with_all_that_they_have(self, storage: Storage, clock: ManualClock) -> None:
        low, high = add(storage, priority=-1), add(storage, priority=5)
        delayed, stays = add(storage, delay_ms=1000, headers={"a": "b"}), add(storage)
        before = [get(storage, job_id) for job_id in (low, high, delayed)]

        assert storage.move_jobs([low, high, delayed], "target") == [True, True, True]

        after = [get(storage, job_id) for job_id in (low, high, delayed)]
        assert after == [job._replace(queue="target") for job in before]
        assert claim_all(storage) == [stays]
        assert claim_all(storage, "target") == [high, low]
        clock.advance(1)
        assert claim_all(storage, "target") == [delayed]

    @pytest.mark.parametrize("state", [state for state in State if state is not State.PENDING], ids=str)
    def test_a_single_job_moves_only_while_it_is_pending(self, storage: Storage, state: State) -> None:
        job_id = bring_to(storage, state)
        pending = add(storage)

        answers = storage.move_jobs([job_id, 10**15, pending, pending], "target")

        assert answers == [False, False, True, True]
        assert get(storage, job_id).queue == "q"
        assert storage.move_jobs([], "target") == []

    def test_a_single_job_does_not_move_to_where_its_key_is_held(self, storage: Storage) -> None:
        held, free = add(storage, dedupe_key="k"), add(storage, dedupe_key="free")
        add(storage, "target", dedupe_key="k")

        assert storage.move_jobs([held, free], "target") == [False, True]
        assert get(storage, held).queue == "q"

    def test_a_single_job_takes_its_group_along(self, storage: Storage) -> None:
        moved = [add(storage, group="g", group_concurrency=2) for _ in range(3)]
        stays = add(storage, group="g", group_concurrency=2)

        assert storage.move_jobs(moved, "target") == [True] * 3

        assert len(claim(storage, "target", limit=9)) == 2
        assert claim_all(storage) == [stays]

    def test_groups_go_with_their_jobs(self, storage: Storage) -> None:
        for _ in range(3):
            add(storage, group="g", group_concurrency=2)

        storage.move("q", "target")

        assert len(claim(storage, "target", limit=9)) == 2
        with pytest.raises(GroupConflictError):
            add(storage, "target", group="g", group_concurrency=1)

    def test_a_move_joins_the_group_that_the_target_has(self, storage: Storage) -> None:
        for _ in range(3):
            add(storage, group="g", group_concurrency=3)
        add(storage, "target", group="g", group_concurrency=1)

        assert storage.move("q", "target") == 3

        assert len(claim(storage, "target", limit=9)) == 1

    def test_a_move_leaves_an_active_job_in_its_group(self, storage: Storage) -> None:
        add(storage, group="g")
        active = claim_one(storage)
        moved = add(storage, group="g")

        storage.move("q", "target")
        late = add(storage, group="g")
        still_taken = claim(storage)
        in_target = claim_all(storage, "target")
        storage.complete([active.lease])

        assert still_taken == []
        assert in_target == [moved]
        assert claim_all(storage) == [late]

    @pytest.mark.parametrize("state", [state for state in State if state is not State.ACTIVE], ids=str)
    def test_purging_a_state_deletes_its_jobs_and_no_others(self, storage: Storage, state: State) -> None:
        kept = {}
        for each in (*ENDS, State.ACTIVE, State.PENDING):
            kept[each] = bring_to(storage, each)
        elsewhere = bring_to(storage, state, "other")
        gone = kept.pop(state)

        assert storage.purge("q", [state]) == 1

        assert storage.get(gone) is None
        assert [get(storage, job_id).state for job_id in kept.values()] == list(kept)
        assert get(storage, elsewhere).state is state

    def test_purge_takes_several_states_and_never_an_active_job(self, storage: Storage) -> None:
        active = bring_to(storage, State.ACTIVE)
        bring_to(storage, State.FAILED)
        add(storage)
        add(storage, group="g")
        add(storage, delay_ms=1000)
        add(storage, group="g", delay_ms=1000)

        assert storage.purge("q", list(State)) == 5

        assert storage.counts("q") == Counts(active=1)
        assert get(storage, active).state is State.ACTIVE
        assert storage.purge("q", list(State)) == 0
        assert storage.purge("q", []) == 0
        assert storage.purge("unknown", list(State)) == 0

    def test_purge_deletes_every_one_of_many(self, storage: Storage) -> None:
        storage.add([spec(group=f"g{n % 3}" if n % 2 else None, delay_ms=n % 5 * 1000) for n in range(1500)])
        storage.add([spec("other")])

        assert storage.purge("q", [State.PENDING]) == 1500

        assert storage.counts("q") == Counts()
        assert claim(storage) == []
        assert storage.counts("other") == Counts(ready=1)

    @pytest.mark.parametrize("state", ENDS, ids=str)
    def test_prune_keeps_so_many_of_the_latest(self, storage: Storage, clock: ManualClock, state: State) -> None:
        ids = []
        for _ in range(5):
            ids.append(bring_to(storage, state))
            clock.advance(1)

        assert storage.prune("q", {state: Keep(count=2)}) == 3

        assert sorted(ids_of(storage.page("q", state))) == ids[3:]
        assert storage.prune("q", {state: Keep(count=2)}) == 0

    @pytest.mark.parametrize("state", ENDS, ids=str)
    def test_prune_keeps_for_so_long(self, storage: Storage, clock: ManualClock, state: State) -> None:
        old = [bring_to(storage, state) for _ in range(2)]
        clock.advance(60)
        young = bring_to(storage, state)
        clock.advance(30)

        assert storage.prune("q", {state: Keep(age_ms=60_000)}) == 2

        assert [storage.get(job_id) for job_id in old] == [None, None]
        assert get(storage, young).state is state

    def test_prune_goes_by_the_time_of_the_end(self, storage: Storage, clock: ManualClock) -> None:
        first, second = add(storage), add(storage)
        storage.cancel([second])
        clock.advance(1)
        storage.cancel([first])

        storage.prune("q", {State.CANCELLED: Keep(count=1)})

        assert ids_of(storage.page("q", State.CANCELLED)) == [first]

    def test_prune_deletes_what_is_beyond_either_limit(self, storage: Storage, clock: ManualClock) -> None:
        for _ in range(4):
            bring_to(storage, State.FAILED)
            clock.advance(60)

        by_count = storage.prune("q", {State.FAILED: Keep(count=3, age_ms=10_000_000)})
        by_age = storage.prune("q", {State.FAILED: Keep(count=99, age_ms=90_000)})

        assert (by_count, by_age) == (1, 2)
        assert storage.counts("q") == Counts(failed=1)

    def test_prune_leaves_alone_what_it_is_not_asked_about(self, storage: Storage) -> None:
        for state in State:
            bring_to(storage, state, str(state))
            bring_to(storage, state, "other-" + str(state))

        for state in State:
            storage.prune(str(state), {end: Keep(count=0) for end in ENDS if end is not state})
            storage.prune(str(state), {end: Keep() for end in ENDS})
            storage.prune(str(state), {})
        storage.prune("unknown", {State.FAILED: Keep(count=0)})

        for state in State:
            assert len(storage.page(str(state), state)) == 1
            assert len(storage.page("other-" + str(state), state)) == 1

    def test_prune_deletes_a_few_hundred_at_most_and_the_oldest_first(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        added = storage.add([spec() for _ in range(1500)])
        ids = [each.id for each in added]
        for start in range(0, 1500, 100):
            storage.cancel(ids[start : start + 100])
            clock.advance(1)

        deleted = storage.prune("q", {State.CANCELLED: Keep(count=100)})

        left = [job_id for job_id in ids if storage.get(job_id) is not None]
        assert 0 < deleted < 1000
        assert len(left) == 1500 - deleted
        assert set(left) >= set(ids[100 * -(-deleted // 100) :])
        while storage.prune("q", {State.CANCELLED: Keep(count=100)}):
            pass
        assert [job_id for job_id in ids if storage.get(job_id) is not None] == ids[1400:]

    def test_a_purge_deletes_no_more_than_its_limit(self, storage: Storage) -> None:
        for _ in range(2):
            bring_to(storage, State.FAILED)
        add(storage)
        add(storage, group="g")
        add(storage, delay_ms=1000)
        states = [State.PENDING, State.FAILED]

        gone = [storage.purge("q", states, limit=limit) for limit in (0, 2, 1, 5)]

        assert gone == [0, 2, 1, 2]
        assert storage.counts("q") == Counts()


class Pausing(Contract):
    """A queue that rests."""

    def test_a_paused_queue_gives_no_jobs_until_it_goes_on(self, storage: Storage) -> None:
        job_id = add(storage)

        assert storage.pause("q", paused=True) is True
        while_paused = [claim(storage), claim(storage, limit=5)]
        assert storage.pause("q", paused=False) is True

        assert while_paused == [[], []]
        assert ids_of(claim(storage)) == [job_id]

    def test_a_second_pause_or_resume_changes_nothing(self, storage: Storage, clock: ManualClock) -> None:
        add(storage)
        resumed = storage.pause("q", paused=False)
        storage.pause("q", paused=True)
        paused_at = clock.now_ms()
        clock.advance(1)
        paused_again = storage.pause("q", paused=True)

        assert (resumed, paused_again) == (False, False)
        assert storage.queues() == [QueueInfo("q", paused_at)]

    def test_a_pause_holds_grouped_jobs_too(self, storage: Storage) -> None:
        job_id = add(storage, group="g")
        storage.pause("q", paused=True)

        assert claim(storage) == []
        storage.pause("q", paused=False)
        assert ids_of(claim(storage)) == [job_id]

    def test_only_the_paused_queue_is_held(self, storage: Storage) -> None:
        add(storage, "a")
        in_b = add(storage, "b")
        storage.pause("a", paused=True)

        assert ids_of(storage.claim(["a", "b"], limit=5, lease_ms=LEASE_MS)) == [in_b]

    def test_a_queue_may_be_paused_before_its_first_job(self, storage: Storage, clock: ManualClock) -> None:
        assert storage.pause("q", paused=True) is True

        add(storage)
        assert claim(storage) == []
        assert storage.queues() == [QueueInfo("q", clock.now_ms())]

    def test_what_was_claimed_before_a_pause_can_be_settled(self, storage: Storage) -> None:
        storage.add([spec() for _ in range(4)])
        jobs = claim(storage, limit=4)
        storage.pause("q", paused=True)

        assert storage.extend([jobs[0].lease], LEASE_MS) == [True]
        assert storage.complete([jobs[0].lease]) == [True]
        assert storage.release([jobs[1].lease]) == [True]
        assert storage.fail(jobs[2].lease, ERROR, retry_in_ms=0) is State.PENDING
        assert storage.fail(jobs[3].lease, ERROR, retry_in_ms=None) is State.FAILED
        assert storage.counts("q") == Counts(ready=2, failed=1)

    def test_leaseslapse_in_a_paused_queue(self, storage: Storage, clock: ManualClock) -> None:
        bring_to(storage, State.ACTIVE)
        storage.pause("q", paused=True)
        clock.advance(LEASE_S)

        storage.recover()

        assert storage.counts("q") == Counts(ready=1)

    def test_delayed_jobs_come_due_during_a_pause(self, storage: Storage, clock: ManualClock) -> None:
        delayed = add(storage, priority=1, delay_ms=1000)
        ready = add(storage)
        storage.pause("q", paused=True)
        clock.advance(1)
        assert claim(storage) == []

        storage.pause("q", paused=False)

        assert claim_all(storage) == [delayed, ready]
