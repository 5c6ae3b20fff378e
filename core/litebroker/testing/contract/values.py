# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest

from litebroker.jobs import JobRecord, Lease, State
from litebroker.storage import Storage, Value
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    HOUR_S,
    LEASE_MS,
    LEASE_S,
    TEN_YEARS_S,
    Contract,
    add,
    bring_to,
    claim,
    claim_one,
    ending,
    get,
    in_threads,
    odd_payload,
    odd_text,
    spec,
)


class ValueRules(Contract):
    """Data and numbers under keys."""

    def test_a_value_is_there_until_it_is_deleted(self, storage: Storage, clock: ManualClock) -> None:
        assert storage.put("s", "k", b"data", number=7) is True

        clock.advance(TEN_YEARS_S)
        there = storage.peek("s", ["k"])
        deleted = storage.delete("s", ["k"])

        assert there == {"k": Value(b"data", 7, None)}
        assert deleted == 1
        assert storage.peek("s", ["k"]) == {}

    @odd_payload
    def test_data_comes_back_byte_for_byte(self, storage: Storage, payload: bytes) -> None:
        storage.put("s", "k", payload)

        assert storage.peek("s", ["k"])["k"].data == payload
        assert type(storage.peek("s", ["k"])["k"].data) is bytes
        popped = storage.pop("s", "k")
        assert popped is not None
        assert popped.data == payload

    def test_data_may_be_large(self, storage: Storage) -> None:
        data = os.urandom(5_000_000)

        storage.put("s", "k", data)

        assert storage.peek("s", ["k"])["k"].data == data

    @odd_text
    def test_keys_and_spaces_may_be_any_text(self, storage: Storage, text: str) -> None:
        storage.put(text, text, b"1")
        storage.put(text, text + "!", b"2")

        assert storage.peek(text, [text, text + "!", "other"]).keys() == {text, text + "!"}
        assert [key for key, _ in storage.scan(text)] == [text, text + "!"]
        assert storage.increment(text, text) == 1
        assert storage.delete(text, [text]) == 1
        assert storage.size(text) == 1

    @pytest.mark.parametrize(
        ("one", "other"),
        [("k", "K"), ("k", "k "), ("\u00e9", "e\u0301"), ("1", "01"), ("a", "a\x00"), ("a\x00b", "a\x00c")],
        ids=["case", "a space", "normal form", "leading zero", "a zero character", "after a zero character"],
    )
    def test_keys_that_differ_at_all_are_different(self, storage: Storage, one: str, other: str) -> None:
        storage.put("s", one, b"one")
        storage.put("s", other, b"other")

        assert {key: value.data for key, value in storage.peek("s", [one, other]).items()} == {
            one: b"one",
            other: b"other",
        }
        assert storage.delete("s", [other]) == 1
        assert [key for key, _ in storage.scan("s")] == [one]

    def test_each_space_has_keys_of_its_own(self, storage: Storage) -> None:
        storage.put("a", "k", b"in a")
        storage.put("b", "k", b"in b")

        assert storage.clear("a") == 1
        assert storage.peek("b", ["k"])["k"].data == b"in b"

    def test_the_latest_value_replaces_all_of_the_one_before(self, storage: Storage, clock: ManualClock) -> None:
        storage.put("s", "k", b"old", ttl_ms=1000, number=7)

        storage.put("s", "k", b"new")
        clock.advance(2)

        assert storage.peek("s", ["k"]) == {"k": Value(b"new", 0, None)}

    def test_if_absent_leaves_what_is_there(self, storage: Storage) -> None:
        answers = [storage.put("s", "k", data, if_absent=True) for data in (b"first", b"second")]

        assert answers == [True, False]
        assert storage.peek("s", ["k"])["k"].data == b"first"

    def test_a_value_expires_after_its_time(self, storage: Storage, clock: ManualClock) -> None:
        storage.put("s", "k", b"data", ttl_ms=1000)

        clock.advance(0.999)
        before = storage.peek("s", ["k"])
        clock.advance(0.001)

        assert before == {"k": Value(b"data", 0, 1)}
        assert storage.peek("s", ["k"]) == {}

    @pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S, TEN_YEARS_S, -TEN_YEARS_S])
    def test_a_step_of_the_wall_clock_changes_no_age(self, storage: Storage, clock: ManualClock, step_s: float) -> None:
        storage.put("s", "k", b"data", ttl_ms=1000)

        clock.step(step_s)
        after_the_step = storage.peek("s", ["k"])
        clock.advance(1)

        assert after_the_step == {"k": Value(b"data", 0, 1000)}
        assert storage.peek("s", ["k"]) == {}

    def test_what_has_expired_is_gone_for_every_verb(self, storage: Storage, clock: ManualClock) -> None:
        for key in ("peek", "pop", "delete", "increment", "scan", "if absent"):
            storage.put("s", key, b"data", ttl_ms=1000, number=5)
        clock.advance(1)

        assert storage.size("s") == 0
        assert storage.scan("s") == []
        assert storage.peek("s", ["peek"]) == {}
        assert storage.peek("s", ["peek", "pop"]) == {}
        assert storage.pop("s", "pop") is None
        assert storage.delete("s", ["delete"]) == 0
        assert storage.delete("s", ["delete", "peek"]) == 0
        assert storage.increment("s", "increment") == 1
        assert storage.put("s", "if absent", b"new", if_absent=True) is True
        assert storage.peek("s", ["increment", "if absent"]) == {
            "increment": Value(b"", 1, None),
            "if absent": Value(b"new", 0, None),
        }
        assert storage.clear("s") == 2

    def test_a_key_is_taken_once_within_its_time(self, storage: Storage, clock: ManualClock) -> None:
        answers = []
        for _ in range(6):
            answers.append(storage.put("once", "tick", if_absent=True, ttl_ms=1000))
            clock.advance(0.4)

        assert answers == [True, False, False, True, False, False]

    def test_of_eight_threads_one_gets_the_lock(self, storage: Storage) -> None:
        def try_all() -> list[bool]:
            return [storage.put("lock", str(number), if_absent=True, ttl_ms=60_000) for number in range(20)]

        answers = in_threads(*[try_all] * 8)

        assert [sum(of_one_lock) for of_one_lock in zip(*answers, strict=True)] == [1] * 20

    def test_peek_answers_with_those_that_are_there(self, storage: Storage) -> None:
        storage.put("s", "a", b"1")
        storage.put("s", "b", b"2")

        assert storage.peek("s", ["a", "c"]) == {"a": Value(b"1", 0, None)}
        assert storage.peek("s", []) == {}
        assert storage.peek("unknown", ["a"]) == {}

    def test_many_keys_are_looked_up_at_once(self, storage: Storage) -> None:
        with storage.transaction():
            for number in range(3000):
                storage.put("s", f"k{number}", b"%d" % number)

        found = storage.peek("s", [f"k{number}" for number in range(4000)])

        assert {key: value.data for key, value in found.items()} == {f"k{n}": b"%d" % n for n in range(3000)}
        assert storage.delete("s", [f"k{number}" for number in range(4000)]) == 3000

    def test_pop_takes_it_out(self, storage: Storage) -> None:
        storage.put("s", "k", b"data", number=3, ttl_ms=1000)

        assert storage.pop("s", "k") == Value(b"data", 3, 1000)
        assert storage.pop("s", "k") is None
        assert storage.size("s") == 0

    def test_of_eight_threads_one_pops_it(self, storage: Storage) -> None:
        for number in range(20):
            storage.put("s", str(number), b"data")

        answers = in_threads(*[lambda: [storage.pop("s", str(number)) for number in range(20)]] * 8)

        assert [8 - of_one_key.count(None) for of_one_key in zip(*answers, strict=True)] == [1] * 20

    def test_delete_counts_those_that_were_there(self, storage: Storage) -> None:
        for key in ("a", "b", "c"):
            storage.put("s", key)

        assert storage.delete("s", ["a", "x", "c"]) == 2
        assert storage.delete("s", ["a", "x", "c"]) == 0
        assert storage.delete("s", []) == 0
        assert [key for key, _ in storage.scan("s")] == ["b"]

    def test_a_counter_starts_from_nothing(self, storage: Storage) -> None:
        assert [storage.increment("s", "k", amount) for amount in (1, 5, -8, 0)] == [1, 6, -2, -2]
        assert storage.peek("s", ["k"]) == {"k": Value(b"", -2, None)}

    def test_a_counter_leaves_the_data_beside_it(self, storage: Storage) -> None:
        storage.put("s", "k", b"data", number=10)

        assert storage.increment("s", "k", 3) == 13
        assert storage.peek("s", ["k"]) == {"k": Value(b"data", 13, None)}

    def test_a_counter_stays_within_its_bounds(self, storage: Storage) -> None:
        storage.put("s", "k", number=5)

        assert storage.increment("s", "k", 3, high=8) == 8
        assert storage.increment("s", "k", 1, high=8) is None
        assert storage.increment("s", "k", -8, low=0) == 0
        assert storage.increment("s", "k", -1, low=0) is None
        assert storage.increment("s", "k", -1, low=-1, high=1) == -1
        assert storage.peek("s", ["k"])["k"].number == -1

    def test_what_is_refused_leaves_no_counter_and_no_new_age(self, storage: Storage, clock: ManualClock) -> None:
        storage.put("s", "there", ttl_ms=1000)

        refused = [storage.increment("s", key, 5, high=4, ttl_ms=9000) for key in ("there", "not there")]

        assert refused == [None, None]
        assert storage.peek("s", ["there", "not there"]) == {"there": Value(b"", 0, 1000)}
        clock.advance(1)
        assert storage.increment("s", "not there", -1, low=0) is None
        assert storage.size("s") == 0

    def test_a_counters_age_starts_anew_only_when_told(self, storage: Storage, clock: ManualClock) -> None:
        storage.increment("s", "k", ttl_ms=1000)
        clock.advance(0.6)
        storage.increment("s", "k")
        left = storage.peek("s", ["k"])["k"].expires_in_ms
        storage.increment("s", "k", ttl_ms=1000)
        renewed = storage.peek("s", ["k"])["k"].expires_in_ms

        assert (left, renewed) == (400, 1000)
        clock.advance(1)
        assert storage.increment("s", "k") == 1

    def test_a_bounded_counter_gives_no_more_than_it_has(self, storage: Storage) -> None:
        def take() -> int:
            return sum(storage.increment("s", "slots", high=30) is not None for _ in range(10))

        taken = in_threads(*[take] * 8)

        assert sum(taken) == 30
        assert storage.peek("s", ["slots"])["slots"].number == 30

    def test_no_increment_is_lost_between_threads(self, storage: Storage) -> None:
        numbers = in_threads(*[lambda: [storage.increment("s", "k") for _ in range(25)]] * 8)

        assert sorted(number or 0 for number in itertools.chain(*numbers)) == list(range(1, 201))

    def test_a_space_is_read_page_by_page_in_the_order_of_its_keys(self, storage: Storage) -> None:
        keys = ["b", "a", "Z", "ä", "a b", "10", "9", "\U0001f418", "\uffff", "a!"]
        for key in keys:
            storage.put("s", key, key.encode())
        storage.put("other", "c")

        pages: list[list[tuple[str, Value]]] = []
        while page := storage.scan("s", after=pages[-1][-1][0] if pages else "", limit=3):
            pages.append(page)

        read = list(itertools.chain(*pages))
        assert [key for key, _ in read] == sorted(keys)
        assert [value.data for _, value in read] == [key.encode() for key in sorted(keys)]
        assert [len(page) for page in pages] == [3, 3, 3, 1]
        assert read == storage.scan("s")

    def test_a_space_is_cleared_and_counted(self, storage: Storage) -> None:
        with storage.transaction():
            for number in range(1200):
                storage.put("s", str(number))
        storage.put("other", "k")

        assert storage.size("s") == 1200
        assert storage.clear("s") == 1200
        assert (storage.size("s"), storage.size("other"), storage.size("unknown")) == (0, 1, 0)
        assert storage.clear("s") == 0

    @ending
    def test_what_a_lease_owns_is_gone_however_the_lease_ends(
        self, storage: Storage, end: Callable[[Storage, Lease], bool]
    ) -> None:
        bring_to(storage, State.ACTIVE, max_attempts=1, ref="r")
        lease = storage.find("q", ref="r")[0].lease
        assert storage.put("s", "k", b"data", owner=lease) is True
        assert storage.peek("s", ["k"])["k"].data == b"data"

        end(storage, lease)

        assert storage.peek("s", ["k"]) == {}
        assert (storage.size("s"), storage.scan("s"), storage.pop("s", "k")) == (0, [], None)
        assert storage.put("s", "k", b"next", if_absent=True) is True

    def test_what_a_lease_owns_is_gone_with_its_last_moment(self, storage: Storage, clock: ManualClock) -> None:
        job_id = bring_to(storage, State.ACTIVE)
        storage.put("s", "k", b"data", owner=get(storage, job_id).lease)

        clock.advance(LEASE_S - 0.001)
        before = storage.peek("s", ["k"]).keys()
        clock.advance(0.001)

        assert before == {"k"}
        assert storage.peek("s", ["k"]) == {}

    def test_what_a_lease_owns_lives_on_as_it_is_extended(self, storage: Storage, clock: ManualClock) -> None:
        lease = get(storage, bring_to(storage, State.ACTIVE)).lease
        storage.put("s", "k", b"data", owner=lease)

        clock.advance(LEASE_S - 1)
        storage.extend([lease], LEASE_MS)
        clock.advance(LEASE_S - 1)

        assert storage.peek("s", ["k"]).keys() == {"k"}

    def test_what_a_lease_owns_is_not_the_next_leases(self, storage: Storage) -> None:
        add(storage)
        first = claim_one(storage)
        storage.put("s", "k", b"data", owner=first.lease)
        storage.release([first.lease])

        second = claim_one(storage)

        assert second.id == first.id
        assert storage.peek("s", ["k"]) == {}

    def test_an_owned_value_expires_at_its_own_time_too(self, storage: Storage, clock: ManualClock) -> None:
        lease = get(storage, bring_to(storage, State.ACTIVE)).lease
        storage.put("s", "k", b"data", owner=lease, ttl_ms=1000)

        clock.advance(1)

        assert storage.peek("s", ["k"]) == {}

    def test_a_value_put_again_without_its_owner_outlives_the_lease(self, storage: Storage) -> None:
        lease = get(storage, bring_to(storage, State.ACTIVE)).lease
        storage.put("s", "k", b"owned", owner=lease)

        storage.put("s", "k", b"free")
        storage.complete([lease])

        assert storage.peek("s", ["k"])["k"].data == b"free"

    def test_a_lock_that_a_worker_holds_is_free_once_the_worker_is_lost(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        storage.add([spec(), spec()])
        first, second = claim(storage, limit=2)
        storage.extend([second.lease], 10 * LEASE_MS)

        def lock(job: JobRecord) -> bool:
            return storage.put("locks", "k", owner=job.lease, if_absent=True)

        assert [lock(first), lock(second)] == [True, False]
        clock.advance(LEASE_S)
        assert lock(second) is True

    @ending
    def test_a_lease_that_is_over_owns_nothing(self, storage: Storage, end: Callable[[Storage, Lease], bool]) -> None:
        lease = get(storage, bring_to(storage, State.ACTIVE)).lease
        end(storage, lease)

        storage.put("s", "there", b"data")

        assert [storage.put("s", key, b"late", owner=lease) for key in ("there", "not there")] == [False, False]

        assert storage.peek("s", ["there", "not there"]) == {"there": Value(b"data", 0, None)}
        assert storage.put("s", "not there", b"next", if_absent=True) is True

    def test_a_sweep_takes_what_has_expired_and_nothing_else(self, storage: Storage, clock: ManualClock) -> None:
        lease = get(storage, bring_to(storage, State.ACTIVE)).lease
        storage.put("s", "kept", b"1")
        storage.put("s", "owned", b"2", owner=lease)
        storage.put("s", "later", b"3", ttl_ms=1001)
        for number in range(3):
            storage.put("t", str(number), ttl_ms=1000)

        before = storage.sweep()
        clock.advance(1)
        swept = [storage.sweep(), storage.sweep()]

        assert (before, swept) == (0, [3, 0])
        assert [key for key, _ in storage.scan("s")] == ["kept", "later", "owned"]

    def test_a_sweep_takes_what_its_owner_left(self, storage: Storage) -> None:
        lease = get(storage, bring_to(storage, State.ACTIVE)).lease
        with storage.transaction():
            storage.put("s", "k", b"owned", owner=lease)
            storage.complete([lease])

        assert storage.sweep() == 1
        assert storage.sweep() == 0

    def test_sweeps_come_to_an_end(self, storage: Storage, clock: ManualClock) -> None:
        with storage.transaction():
            for number in range(1200):
                storage.put("s", str(number), ttl_ms=1)
        clock.advance(1)

        swept = list(iter(storage.sweep, 0))

        assert sum(swept) == 1200
        assert max(swept) < 1200
