# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Listings, counts and searches."""

from __future__ import annotations

import itertools
import os
import socket
from typing import Any

import pytest

from litebroker.jobs import Counts, Holder, JobRecord, QueueInfo, State
from litebroker.storage import Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    ENDS,
    HOUR_S,
    LEASE_MS,
    LEASE_S,
    Contract,
    add,
    bring_to,
    claim_all,
    claim_one,
    get,
    ids_of,
    spec,
)


class Looking(Contract):
    """What can be seen, and in which order."""

    def test_every_known_queue_is_listed_by_name(self, storage: Storage, clock: ManualClock) -> None:
        names = ["b", "a", "Z", "ä", "\U0001f418", "\uffff", "10", "9"]
        storage.add([spec(name) for name in names])
        storage.pause("a", paused=True)

        listed = storage.queues()

        assert [queue.name for queue in listed] == sorted(names)
        assert [queue.paused_at_ms for queue in listed if queue.name == "a"] == [clock.now_ms()]
        assert {queue.paused_at_ms for queue in listed if queue.name != "a"} == {None}

    def test_looking_makes_no_queue(self, storage: Storage) -> None:
        storage.counts("q")
        storage.oldest_due_at_ms("q")
        storage.page("q", State.PENDING)
        storage.find("q", ref="r")
        storage.ended_since("q", State.FAILED, 0)
        storage.is_awaited("q")
        storage.due_schedules(["q"])
        storage.get_schedule("q", "s")
        storage.listener(["q"]).close()

        assert storage.queues() == []

    def test_the_oldest_due_job_of_all_streams_is_the_one_that_has_waited_longest(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        start = clock.now_ms()
        add(storage, priority=9)
        add(storage, delay_ms=2000)
        clock.advance(1)
        oldest = add(storage, group="g", run_at_ms=start - 500)
        bring_to(storage, State.CANCELLED, run_at_ms=start - 900)

        of_all = storage.oldest_due_at_ms("q")
        storage.remove([oldest])
        without_it = storage.oldest_due_at_ms("q")

        assert (of_all, without_it) == (start - 500, start)

    def test_a_delayed_job_is_the_oldest_only_once_its_time_has_come(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        add(storage, delay_ms=1000)

        before = storage.oldest_due_at_ms("q")
        clock.advance(5)
        after = storage.oldest_due_at_ms("q")

        assert (before, after) == (None, clock.now_ms() - 4000)

    def test_where_nothing_is_due_nothing_is_the_oldest(self, storage: Storage) -> None:
        bring_to(storage, State.ACTIVE)

        assert storage.oldest_due_at_ms("q") is None
        assert storage.oldest_due_at_ms("unknown") is None

    def test_a_queue_is_known_after_its_last_job(self, storage: Storage) -> None:
        storage.remove([add(storage)])

        assert storage.queues() == [QueueInfo("q", None)]

    def test_the_counts_tell_the_states_apart(self, storage: Storage, clock: ManualClock) -> None:
        for count, state in enumerate((State.COMPLETED, State.FAILED, State.CANCELLED, State.ACTIVE), start=1):
            for _ in range(count):
                bring_to(storage, state)
        storage.add([spec(delay_ms=1000)] * 6 + [spec()] * 5 + [spec(group="g")] * 3 + [spec("other")])

        assert storage.counts("q") == Counts(ready=8, delayed=6, active=4, completed=1, failed=2, cancelled=3)
        clock.advance(1)
        assert storage.counts("q") == Counts(ready=14, delayed=0, active=4, completed=1, failed=2, cancelled=3)
        assert storage.counts("unknown") == Counts()

    def test_jobs_are_found_by_their_ref_in_the_order_they_were_added(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        ids = []
        for state in (State.COMPLETED, State.FAILED, State.CANCELLED, State.ACTIVE, State.PENDING):
            ids.append(bring_to(storage, state, ref="r"))
            clock.step(-HOUR_S)
        ids.append(add(storage, ref="r", delay_ms=1000, priority=9))
        add(storage, ref="other")
        add(storage, "other", ref="r")

        found = storage.find("q", ref="r")

        assert ids_of(found) == ids
        assert found == [get(storage, job_id) for job_id in ids]

    def test_jobs_are_found_by_their_dedupe_key(self, storage: Storage) -> None:
        job_id = add(storage, dedupe_key="k")
        add(storage, "other", dedupe_key="k")

        assert ids_of(storage.find("q", dedupe_key="k")) == [job_id]
        assert storage.find("q", dedupe_key="other") == []
        assert storage.find("q", ref="k") == []
        assert storage.find("unknown", ref="k") == []

    def test_a_job_that_let_go_of_its_key_is_not_found_by_it(self, storage: Storage) -> None:
        bring_to(storage, State.FAILED, dedupe_key="k", dedupe_until="ended")
        held_by_none = storage.find("q", dedupe_key="k")
        holder = add(storage, dedupe_key="k", dedupe_until="ended")

        assert held_by_none == []
        assert ids_of(storage.find("q", dedupe_key="k")) == [holder]

    @pytest.mark.parametrize("state", State, ids=str)
    def test_the_holder_of_a_key_is_found_in_every_state(self, storage: Storage, state: State) -> None:
        holder = bring_to(storage, state, dedupe_key="k")

        assert storage.find("q", dedupe_key="k") == [get(storage, holder)]

    @pytest.mark.parametrize("names", [{}, {"ref": "r", "dedupe_key": "k"}], ids=["none", "both"])
    def test_a_search_goes_by_exactly_one_name(self, storage: Storage, names: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=r"ref.*dedupe_key"):
            storage.find("q", **names)

    def test_pending_jobs_are_listed_as_they_would_be_claimed(self, storage: Storage, clock: ManualClock) -> None:
        now = clock.now_ms()
        for priority, age in itertools.product((2, 0, 1, -5), (3, 3, 9, 1)):
            add(storage, priority=priority, run_at_ms=now - age)

        listed = ids_of(storage.page("q", State.PENDING))

        assert len(listed) == 16
        assert listed == claim_all(storage)

    def test_delayed_jobs_are_listed_behind_those_that_are_due_the_soonest_first(self, storage: Storage) -> None:
        latest = add(storage, priority=9, delay_ms=3000)
        soonest = add(storage, priority=-9, delay_ms=1000)
        due = add(storage, priority=-99)
        middle = add(storage, group="g", delay_ms=2000)

        assert ids_of(storage.page("q", State.PENDING)) == [due, soonest, middle, latest]

    def test_a_delayed_job_is_listed_as_due_once_its_time_has_come(self, storage: Storage, clock: ManualClock) -> None:
        waiting = add(storage)
        urgent = add(storage, priority=1, delay_ms=1000)
        later = add(storage, delay_ms=2000)
        grouped = add(storage, group="g", priority=9)

        clock.advance(1)

        listed = [urgent, waiting, grouped, later]
        assert ids_of(storage.page("q", State.PENDING)) == listed
        assert [storage.rank(job_id) for job_id in listed] == [0, 1, 2, 3]

    def test_grouped_jobs_are_listed_behind_the_others_group_by_group(self, storage: Storage) -> None:
        ids: dict[str | None, list[int]] = {"b": [], "a": [], None: [], "c": []}
        for priority in (1, 3, 2):
            for group, of_group in ids.items():
                of_group.append(add(storage, group=group, priority=priority))

        listed = storage.page("q", State.PENDING)

        groups = [group for group, _ in itertools.groupby(job.group for job in listed)]
        assert groups == [None, "a", "b", "c"]
        for group, (low, high, middle) in ids.items():
            assert [job.id for job in listed if job.group == group] == [high, middle, low]

    def test_active_jobs_are_listed_by_the_end_of_their_lease(self, storage: Storage, clock: ManualClock) -> None:
        ids = [add(storage) for _ in range(4)]
        for lease_ms in (9000, 3000, 7000, 5000):
            claim_one(storage, lease_ms=lease_ms)
            clock.advance(0.5)

        storage.extend([get(storage, ids[1]).lease], 60_000)

        assert ids_of(storage.page("q", State.ACTIVE)) == [ids[3], ids[2], ids[0], ids[1]]

    @pytest.mark.parametrize("state", ENDS, ids=str)
    def test_ended_jobs_are_listed_by_their_end_the_latest_first(
        self, storage: Storage, clock: ManualClock, state: State
    ) -> None:
        ids = []
        for _ in range(4):
            ids.append(bring_to(storage, state))
            clock.advance(1)

        assert ids_of(storage.page("q", state)) == ids[::-1]

    def test_a_state_and_a_queue_are_listed_alone(self, storage: Storage) -> None:
        ids = {state: bring_to(storage, state) for state in (*ENDS, State.ACTIVE, State.PENDING)}
        for state in State:
            bring_to(storage, state, f"other-{state}")

        assert {state: ids_of(storage.page("q", state)) for state in ids} == {state: [ids[state]] for state in ids}
        assert storage.page("unknown", State.PENDING) == []

    def test_a_listed_job_is_as_it_is_stored(self, storage: Storage) -> None:
        for state in State:
            job_id = bring_to(storage, state, str(state), ref="r", headers={"a": "b"}, payload=b"\x00\xff")

            assert storage.page(str(state), state) == [get(storage, job_id)]

    @pytest.mark.parametrize("state", State, ids=str)
    @pytest.mark.parametrize("limit", [1, 3, 7, 50])
    def test_pages_follow_each_other_without_a_gap(
        self, storage: Storage, clock: ManualClock, state: State, limit: int
    ) -> None:
        if state is State.PENDING:
            for number in range(24):
                offset_ms = 1 + number // 8 if number % 4 == 1 else -(number % 4)
                group = ["g", "h", None][number % 3] if number % 2 else None
                add(storage, group=group, priority=number % 3, run_at_ms=clock.now_ms() + offset_ms)
        else:
            for number in range(24):
                bring_to(storage, state)
                clock.advance(0.001 * (number % 2))
        whole = ids_of(storage.page("q", state))

        pages: list[list[JobRecord]] = []
        while page := storage.page("q", state, limit=limit, after=pages[-1][-1] if pages else None):
            pages.append(page)

        assert len(whole) == 24
        assert list(itertools.chain.from_iterable(map(ids_of, pages))) == whole
        assert {len(page) for page in pages[:-1]} <= {limit}

    @pytest.mark.parametrize("state", [state for state in State if state is not State.ACTIVE], ids=str)
    def test_a_page_goes_on_though_the_last_job_is_gone(self, storage: Storage, state: State) -> None:
        for _ in range(4):
            bring_to(storage, state)
        whole = storage.page("q", state)
        first = storage.page("q", state, limit=2)

        storage.remove(ids_of(first))

        assert ids_of(storage.page("q", state, after=first[-1])) == ids_of(whole[2:])

    @pytest.mark.parametrize("change", ["put off", "cancelled", "removed", "moved"])
    @pytest.mark.parametrize("delay_ms", [None, 1000], ids=["due", "delayed"])
    def test_a_page_goes_on_where_the_last_job_stood_whatever_became_of_that(
        self, storage: Storage, clock: ManualClock, change: str, delay_ms: int | None
    ) -> None:
        ids = [add(storage, priority=-number, delay_ms=delay_ms) for number in range(4)]
        delayed = add(storage, delay_ms=2000)
        first = storage.page("q", State.PENDING, limit=2)

        match change:
            case "put off":
                storage.reschedule(ids[1], due_at_ms=clock.now_ms() + 9000)
            case "cancelled":
                storage.cancel(ids[:2])
            case "removed":
                storage.remove(ids[:2])
            case _:
                storage.move_jobs(ids[:2], "elsewhere")

        rest = ids_of(storage.page("q", State.PENDING, after=first[-1]))
        assert rest[:3] == [*ids[2:], delayed]
        assert set(rest[3:]) <= {ids[1]}

    def test_a_page_has_a_hundred_jobs_unless_told_otherwise(self, storage: Storage) -> None:
        storage.add([spec() for _ in range(120)])

        assert len(storage.page("q", State.PENDING)) == 100
        assert len(storage.page("q", State.PENDING, limit=1000)) == 120

    @pytest.mark.parametrize("state", State, ids=str)
    def test_an_offset_skips_so_many(self, storage: Storage, clock: ManualClock, state: State) -> None:
        for _ in range(8):
            bring_to(storage, state)
            clock.advance(0.001)
        whole = storage.page("q", state)

        assert ids_of(storage.page("q", state, offset=3, limit=2)) == ids_of(whole[3:5])
        assert ids_of(storage.page("q", state, offset=2, limit=2, after=whole[1])) == ids_of(whole[4:6])
        assert storage.page("q", state, offset=8) == []

    @pytest.mark.parametrize("state", State, ids=str)
    def test_a_page_may_come_without_payloads(self, storage: Storage, state: State) -> None:
        job_id = bring_to(storage, state, payload=b"large", headers={"a": "b"})

        page = storage.page("q", state, payloads=False)

        assert page == [get(storage, job_id)._replace(payload=b"")]

    def test_grouped_and_delayed_jobs_come_without_payloads_too(self, storage: Storage) -> None:
        ids = [add(storage, priority=2), add(storage, priority=1), add(storage, group="g"), add(storage, delay_ms=1)]
        first = storage.page("q", State.PENDING, limit=1, payloads=False)

        rest = storage.page("q", State.PENDING, after=first[0], payloads=False)

        assert ids_of([*first, *rest]) == ids
        assert {job.payload for job in (*first, *rest)} == {b""}

    def test_an_offset_counts_across_due_grouped_and_delayed_jobs(self, storage: Storage) -> None:
        storage.add([spec()] * 3 + [spec(group="a")] * 3 + [spec(group="b")] * 3 + [spec(delay_ms=1000)] * 3)
        whole = ids_of(storage.page("q", State.PENDING))

        for offset, limit in itertools.product(range(13), (1, 4, 100)):
            page = storage.page("q", State.PENDING, offset=offset, limit=limit)
            assert ids_of(page) == whole[offset : offset + limit]

    def test_what_is_due_later_can_be_left_out(self, storage: Storage, clock: ManualClock) -> None:
        now = clock.now_ms()
        by_delay = {delay: add(storage, delay_ms=delay) for delay in (3000, 0, 1000, 2000)}
        past = add(storage, run_at_ms=now - 5)

        def due_by(due_by_ms: int, **options: Any) -> list[int]:
            return ids_of(storage.page("q", State.PENDING, due_by_ms=due_by_ms, **options))

        assert due_by(now - 6) == []
        assert due_by(now - 1) == [past]
        assert due_by(now + 2000) == [past, by_delay[0], by_delay[1000], by_delay[2000]]
        assert due_by(now + 2000, limit=2, offset=1) == [by_delay[0], by_delay[1000]]

    def test_a_rank_is_the_number_of_jobs_listed_before(self, storage: Storage, clock: ManualClock) -> None:
        now = clock.now_ms()
        for number in range(30):
            due = now + (number % 4 - 2)
            add(storage, priority=number % 3, run_at_ms=due, group=[None, "a", "b"][number // 10])

        listed = storage.page("q", State.PENDING)

        assert [storage.rank(job.id) for job in listed] == list(range(30))

    def test_only_a_pending_job_has_a_rank(self, storage: Storage) -> None:
        others = [bring_to(storage, state) for state in State if state is not State.PENDING]

        assert [storage.rank(job_id) for job_id in [*others, 10**15]] == [None] * 5

    def test_the_holder_of_an_active_job_is_the_process_that_claimed_it(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        job_id, waiting = add(storage), add(storage, priority=-1)
        claimed_at_ms = clock.now_ms()
        record = claim_one(storage, lease_ms=LEASE_MS)
        clock.advance(1)

        holders = storage.holders([job_id, waiting])

        label = f"{socket.gethostname()}:{os.getpid()}"
        expected = Holder(record.lease.token, label, True, claimed_at_ms, claimed_at_ms + LEASE_MS)
        assert holders == {job_id: expected}

    def test_a_lease_that_has_ended_shows_as_past_and_is_not_taken_back_by_looking(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        job_id = add(storage)
        claim_one(storage, lease_ms=LEASE_MS)
        clock.advance(2 * LEASE_S)

        holder = storage.holders([job_id])[job_id]

        assert holder.lease_until_ms < clock.now_ms()
        assert get(storage, job_id).state is State.ACTIVE

    def test_the_states_of_many_jobs_are_read_at_once(self, storage: Storage) -> None:
        removed = bring_to(storage, State.CANCELLED)
        storage.remove([removed])
        jobs = {bring_to(storage, state): state for state in reversed(State)}
        delayed = add(storage, delay_ms=HOUR_S * 1000)

        states = storage.states([*jobs, delayed, removed, 12345])

        assert states == {**jobs, delayed: State.PENDING}
        assert storage.states([]) == {}

    @pytest.mark.parametrize("state", [state for state in State if state is not State.ACTIVE], ids=str)
    def test_a_job_that_is_not_active_has_no_holder(self, storage: Storage, state: State) -> None:
        job_id = bring_to(storage, state)

        assert storage.holders([job_id, 12345]) == {}
        assert storage.holders([]) == {}
