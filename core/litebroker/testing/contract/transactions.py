# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Transactions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import pytest

from litebroker.errors import GroupConflictError
from litebroker.jobs import Added, Counts, QueueInfo, State
from litebroker.storage import Storage, Value
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    LEASE_MS,
    LEASE_S,
    PATIENCE_S,
    Contract,
    add,
    bring_to,
    claim,
    claim_all,
    claim_one,
    get,
    ids_of,
    in_threads,
    schedule,
    spec,
)


class Transactions(Contract):
    """All or nothing."""

    def test_all_of_a_transaction_is_there_after_it(self, storage: Storage, clock: ManualClock) -> None:
        add(storage)

        with storage.transaction() as inside:
            job = claim_one(inside)
            inside.complete([job.lease])
            follow_up = add(inside, "next")
            inside.put("results", str(job.id), b"done")
            inside.put_schedule(schedule(clock))
            inside.pause("paused", paused=True)

        assert storage.get(job.id) is None
        assert claim_one(storage, "next").id == follow_up
        assert storage.peek("results", [str(job.id)])[str(job.id)].data == b"done"
        assert storage.get_schedule("q", "s") is not None
        assert QueueInfo("paused", clock.now_ms()) in storage.queues()

    def test_an_error_takes_all_of_it_back_and_goes_on(self, storage: Storage, clock: ManualClock) -> None:
        kept = schedule(clock, "kept")
        storage.put_schedule(kept)
        storage.put("s", "kept", b"1", number=1)
        pending, other = add(storage), add(storage)
        failed = bring_to(storage, State.FAILED, "dead")
        before = [get(storage, job_id) for job_id in (pending, other, failed)]

        with pytest.raises(LookupError, match="mine"), storage.transaction():  # noqa: PT012 - all of it is undone
            storage.complete([claim_one(storage).lease])
            storage.cancel([other])
            storage.retry([failed])
            storage.add([spec("new", group="g", dedupe_key="k")])
            storage.put("s", "new", b"1")
            storage.increment("s", "kept")
            storage.fire_schedule(kept, next_at_ms=2**50)
            storage.put_schedule(schedule(clock, "new"))
            storage.pause("q", paused=True)
            raise LookupError("mine")

        assert [get(storage, job_id) for job_id in (pending, other, failed)] == before
        assert storage.list_schedules() == [kept]
        assert storage.scan("s") == [("kept", Value(b"1", 1, None))]
        assert {queue.name: queue.paused_at_ms for queue in storage.queues()} == {"q": None, "dead": None}
        ((_, created),) = storage.add([spec("new", group="g", group_concurrency=2, dedupe_key="k")])
        assert created
        assert claim_all(storage) == [pending, other]

    def test_groups_count_right_after_a_rollback(self, storage: Storage) -> None:
        ids = [add(storage, group="g") for _ in range(2)]

        with suppress(LookupError), storage.transaction():
            claim_one(storage)
            raise LookupError

        assert ids_of(claim(storage, limit=5)) == ids[:1]

    def test_what_is_deleted_in_bites_is_back_after_a_rollback(self, storage: Storage) -> None:
        storage.add([spec() for _ in range(1200)])
        with storage.transaction():
            for number in range(1200):
                storage.put("s", str(number))

        with suppress(LookupError), storage.transaction():
            gone = (storage.purge("q", [State.PENDING]), storage.clear("s"), storage.move("q", "target"))
            raise LookupError

        assert gone == (1200, 1200, 0)
        assert (storage.counts("q"), storage.size("s")) == (Counts(ready=1200), 1200)

    def test_a_transaction_sees_its_own_work(self, storage: Storage, clock: ManualClock) -> None:
        with storage.transaction():
            job_id = add(storage, ref="r", dedupe_key="k")
            storage.put("s", "k", b"data")
            storage.put_schedule(schedule(clock))
            seen = (
                ids_of(storage.find("q", ref="r")),
                storage.counts("q"),
                ids_of(storage.page("q", State.PENDING)),
                storage.rank(job_id),
                storage.add([spec(dedupe_key="k")]),
                storage.peek("s", ["k"]),
                len(storage.due_schedules(["q"])),
            )
            claimed = claim_one(storage)
            completed = storage.complete([claimed.lease])
            ((again, created),) = storage.add([spec(dedupe_key="k")])

        assert seen == (
            [job_id],
            Counts(ready=1),
            [job_id],
            0,
            [Added(job_id, created=False)],
            {"k": Value(b"data", 0, None)},
            1,
        )
        assert completed == [True]
        assert created
        assert again != job_id

    def test_a_transaction_within_a_transaction_is_part_of_it(self, storage: Storage) -> None:
        with suppress(LookupError), storage.transaction():
            add(storage)
            with storage.transaction() as inner:
                add(inner)
            raise LookupError
        rolled_back = storage.counts("q")

        with storage.transaction():
            add(storage)
            with storage.transaction() as inner, inner.transaction() as innermost:
                add(innermost)
            add(storage)

        assert rolled_back == Counts()
        assert storage.counts("q") == Counts(ready=3)

    def test_a_verb_that_raises_inside_a_transaction_has_done_nothing(self, storage: Storage) -> None:
        add(storage, group="g", group_concurrency=2)

        with storage.transaction():
            kept = add(storage, "kept")
            with pytest.raises(GroupConflictError):
                storage.add([spec("lost"), spec(group="g", group_concurrency=1)])

        assert storage.counts("q") == Counts(ready=1)
        assert storage.counts("lost") == Counts()
        assert get(storage, kept).state is State.PENDING

    def test_a_tick_that_is_refused_inside_a_transaction_has_done_nothing(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        add(storage, group="g", group_concurrency=2)
        given = schedule(clock, job=spec(payload=b"tick", group="g"))
        storage.put_schedule(given)

        with storage.transaction():
            kept = add(storage, "kept")
            with pytest.raises(GroupConflictError):
                storage.fire_schedule(given, next_at_ms=clock.now_ms() + 60_000)

        assert storage.get_schedule("q", "s") == given
        assert get(storage, kept).state is State.PENDING

    def test_others_see_all_of_a_transaction_or_nothing(self, storage: Storage) -> None:
        def look() -> tuple[int, int]:
            with storage.transaction():
                return storage.counts("q").ready, storage.size("s")

        with ThreadPoolExecutor(1) as pool:
            with storage.transaction():
                add(storage)
                storage.put("s", "k")
                # It may look now and see nothing, or wait for the end and see all.
                looking = pool.submit(look)
                wait([looking], 0.05)
                add(storage)
                storage.put("s", "l")
            seen = looking.result(PATIENCE_S)

        assert seen in {(0, 0), (2, 2)}
        assert look() == (2, 2)

    def test_transactions_of_threads_do_not_mix(self, storage: Storage) -> None:
        def work(*, keep: bool) -> None:
            for _ in range(20):
                with suppress(LookupError), storage.transaction():
                    add(storage, "kept" if keep else "lost")
                    number = storage.increment("s", "n")
                    storage.increment("s", "n", -1)
                    assert number == 1
                    if not keep:
                        raise LookupError

        in_threads(*[lambda keep=keep: work(keep=keep) for keep in (True, False) * 3])

        assert storage.counts("kept") == Counts(ready=60)
        assert storage.counts("lost") == Counts()

    def test_a_lost_lease_can_stop_what_follows_from_it(self, storage: Storage, clock: ManualClock) -> None:
        add(storage, max_attempts=1)
        job = claim_one(storage)
        clock.advance(LEASE_S)

        with suppress(LookupError), storage.transaction():
            add(storage, "next")
            if not storage.complete([job.lease])[0]:
                raise LookupError

        assert storage.counts("next") == Counts()

    def test_what_came_due_in_a_transaction_that_was_rolled_back_is_due_yet(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        lapsed = bring_to(storage, State.ACTIVE)
        delayed = add(storage, delay_ms=LEASE_MS)
        clock.advance(LEASE_S)

        with suppress(LookupError), storage.transaction():
            assert len(claim_all(storage)) == 2
            raise LookupError

        assert claim_all(storage) == [lapsed, delayed]

    def test_a_transaction_of_nothing_is_nothing(self, storage: Storage) -> None:
        with storage.transaction():
            pass

        assert storage.queues() == []

    def test_what_is_no_connection_cannot_be_bound(self, storage: Storage) -> None:
        with pytest.raises(TypeError):
            storage.bind(object())
