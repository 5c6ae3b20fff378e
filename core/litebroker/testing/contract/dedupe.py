# ruff: noqa: S101 - tests, which stand here so that other storages can be held to them too
"""Dedupe keys."""

from __future__ import annotations

import pytest

from litebroker.jobs import Added, Counts, Keep, State
from litebroker.storage import Storage
from litebroker.testing.contract.steps import (
    ENDINGS,
    ENDS,
    Contract,
    add,
    bring_to,
    get,
    in_threads,
    spec,
)


class Dedupe(Contract):
    """One job for each key."""

    @pytest.mark.parametrize("state", State, ids=str)
    def test_a_key_is_held_in_every_state_until_the_job_is_removed(self, storage: Storage, state: State) -> None:
        holder = bring_to(storage, state, dedupe_key="k")
        before = get(storage, holder)

        again = storage.add([spec(dedupe_key="k", payload=b"other", priority=9)])

        assert again == [Added(holder, created=False)]
        assert get(storage, holder) == before

    @pytest.mark.parametrize("state", [State.PENDING, State.ACTIVE], ids=str)
    def test_a_key_until_the_end_is_held_before_it(self, storage: Storage, state: State) -> None:
        holder = bring_to(storage, state, dedupe_key="k", dedupe_until="ended")

        assert storage.add([spec(dedupe_key="k", dedupe_until="ended")]) == [Added(holder, created=False)]

    @pytest.mark.parametrize("state", ENDS, ids=str)
    def test_a_key_until_the_end_is_free_after_it(self, storage: Storage, state: State) -> None:
        ended = bring_to(storage, state, dedupe_key="k", dedupe_until="ended")

        ((job_id, created),) = storage.add([spec(dedupe_key="k", dedupe_until="ended")])

        assert created
        assert job_id != ended
        assert get(storage, ended).state is state

    @pytest.mark.parametrize("state", ENDS, ids=str)
    def test_it_is_the_holder_that_says_how_long_it_holds(self, storage: Storage, state: State) -> None:
        holder = bring_to(storage, state, dedupe_key="k", dedupe_until="removed")

        assert storage.add([spec(dedupe_key="k", dedupe_until="ended")]) == [Added(holder, created=False)]

    def test_a_delayed_job_holds_its_key(self, storage: Storage) -> None:
        holder = add(storage, dedupe_key="k", delay_ms=1000)

        assert storage.add([spec(dedupe_key="k")]) == [Added(holder, created=False)]

    @pytest.mark.parametrize("until", ["removed", "ended"])
    @pytest.mark.parametrize("how", ["complete", "remove", "purge", "prune"])
    def test_a_key_is_free_once_its_row_is_gone(self, storage: Storage, how: str, until: str) -> None:
        if how == "complete":
            gone = bring_to(storage, State.ACTIVE, dedupe_key="k", dedupe_until=until)
            storage.complete([get(storage, gone).lease])
        else:
            gone = bring_to(storage, State.FAILED, dedupe_key="k", dedupe_until=until)
            if how == "remove":
                storage.remove([gone])
            elif how == "purge":
                storage.purge("q", [State.FAILED])
            else:
                storage.prune("q", {State.FAILED: Keep(count=0)})

        ((job_id, created),) = storage.add([spec(dedupe_key="k")])

        assert created
        assert job_id != gone

    @pytest.mark.parametrize("until", ["removed", "ended"])
    @pytest.mark.parametrize("how", ["release", "release with a delay", "fail and retry", "lapse"])
    def test_a_key_is_kept_by_a_job_that_goes_back(self, storage: Storage, how: str, until: str) -> None:
        holder = bring_to(storage, State.ACTIVE, dedupe_key="k", dedupe_until=until)

        ENDINGS[how](storage, get(storage, holder).lease)

        assert storage.add([spec(dedupe_key="k")]) == [Added(holder, created=False)]

    def test_a_key_belongs_to_its_queue(self, storage: Storage) -> None:
        in_a, in_b = add(storage, "a", dedupe_key="k"), add(storage, "b", dedupe_key="k")

        assert in_a != in_b

    def test_each_position_of_a_batch_has_the_id_of_its_holder(self, storage: Storage) -> None:
        held = add(storage, dedupe_key="held")

        added = storage.add(
            [
                spec(dedupe_key="new"),
                spec(dedupe_key="held"),
                spec(dedupe_key="new"),
                spec(),
                spec(dedupe_key="new"),
            ]
        )

        assert [each.created for each in added] == [True, False, False, True, False]
        assert [added[position].id for position in (1, 2, 4)] == [held, added[0].id, added[0].id]
        assert storage.counts("q") == Counts(ready=3)

    def test_a_batch_of_one_key_is_one_job(self, storage: Storage) -> None:
        added = storage.add([spec(dedupe_key="k", dedupe_until="ended") for _ in range(100)])

        assert [each.created for each in added] == [True] + [False] * 99
        assert len({each.id for each in added}) == 1

    def test_a_key_may_be_long(self, storage: Storage) -> None:
        key = "k" * 1000

        assert add(storage, dedupe_key=key) == add(storage, dedupe_key=key)
        assert add(storage, dedupe_key=key + "!") != add(storage, dedupe_key=key)

    def test_of_eight_threads_that_add_one_key_one_wins(self, storage: Storage) -> None:
        answers = in_threads(*[lambda: [storage.add([spec(dedupe_key=f"k{n}")])[0] for n in range(20)]] * 8)

        for of_one_key in zip(*answers, strict=True):
            assert len({each.id for each in of_one_key}) == 1
            assert sum(each.created for each in of_one_key) == 1
        assert storage.counts("q") == Counts(ready=20)

    def test_a_retried_job_takes_its_key_again(self, storage: Storage) -> None:
        failed = bring_to(storage, State.FAILED, dedupe_key="k", dedupe_until="ended")

        assert storage.retry([failed]) == [True]

        assert storage.add([spec(dedupe_key="k")]) == [Added(failed, created=False)]

    def test_a_job_whose_key_another_holds_by_now_is_not_retried(self, storage: Storage) -> None:
        failed = bring_to(storage, State.FAILED, dedupe_key="k", dedupe_until="ended")
        holder = add(storage, dedupe_key="k")
        before = get(storage, failed)

        refused = storage.retry([failed])
        unchanged = get(storage, failed)
        storage.remove([holder])

        assert refused == [False]
        assert unchanged == before
        assert storage.retry([failed]) == [True]
