# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Carrying jobs and values from one storage to another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from litebroker.clock import SystemClock
from litebroker.jobs import JobCopy, State
from litebroker.storage import Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    ENDS,
    ERROR,
    HOUR_S,
    LEASE_MS,
    PATIENCE_S,
    Contract,
    add,
    bring_to,
    claim,
    claim_all,
    claim_one,
    get,
    spec,
)


class Carrying(Contract):
    """What is walked through in one storage, and put into another, is what it was."""

    @pytest.fixture
    def other(self, clock: ManualClock, tmp_path: Path) -> Iterator[Storage]:
        """A second storage, to carry to."""
        folder = tmp_path / "other"
        folder.mkdir()
        other = self.make_storage(clock, folder)
        yield other
        other.close()

    def test_a_walk_meets_all_jobs_in_the_order_of_their_ids(self, storage: Storage) -> None:
        job_ids = [add(storage, queue) for queue in ("b", "a", "b", "c")]

        walked = storage.walk_jobs()

        assert [copy.record for copy in walked] == [get(storage, job_id) for job_id in sorted(job_ids)]

    def test_a_walk_goes_on_behind_a_job_that_is_gone(self, storage: Storage) -> None:
        job_ids = [add(storage) for _ in range(5)]
        first = storage.walk_jobs(limit=2)
        storage.remove([first[-1].record.id])

        rest = storage.walk_jobs(after=first[-1].record.id)

        assert [copy.record.id for copy in first + rest] == job_ids

    def test_a_walk_meets_a_job_once_whatever_becomes_of_it(self, storage: Storage) -> None:
        for _ in range(4):
            add(storage)
        walked = storage.walk_jobs(limit=2)
        for job in claim(storage, limit=4):
            storage.fail(job.lease, ERROR, retry_in_ms=None)

        walked += storage.walk_jobs(after=walked[-1].record.id)

        assert len({copy.record.id for copy in walked}) == len(walked) == 4

    @pytest.mark.parametrize("state", [State.PENDING, *ENDS], ids=str)
    def test_a_job_comes_over_as_it_is(
        self, storage: Storage, other: Storage, clock: ManualClock, state: State
    ) -> None:
        options: dict[str, Any] = {
            "payload": b"\xff\x00payload",
            "encoding": "pickle",
            "priority": -7,
            "dedupe_key": "welcome:42",
            "dedupe_until": "ended",
            "group": "tenant-9",
            "group_concurrency": 2,
            "max_attempts": 5,
            "headers": {"ü": "東"},
            "ref": "message-1",
            "task": "app.send",
        }
        bring_to(storage, state, **options)
        clock.advance(HOUR_S)

        copies = storage.walk_jobs()
        put = other.put_jobs(copies)

        assert put == [True]
        assert other.walk_jobs() == copies == [JobCopy(copies[0].record, "ended", 2)]

    def test_a_job_that_was_tried_comes_over_with_its_history(
        self, storage: Storage, other: Storage, clock: ManualClock
    ) -> None:
        add(storage)
        for _ in range(2):
            clock.advance(1)
            storage.fail(claim_one(storage).lease, ERROR, retry_in_ms=0)

        other.put_jobs(storage.walk_jobs())

        (carried,) = other.walk_jobs()
        assert carried.record.attempts == 2
        assert [attempt.outcome for attempt in carried.record.history] == ["retried", "retried"]
        assert carried.record.error == ERROR

    def test_jobs_are_claimed_there_in_the_same_order(self, storage: Storage, other: Storage) -> None:
        for priority in (0, 5, -5, 5, 0):
            add(storage, priority=priority)
        other.put_jobs(storage.walk_jobs()[::-1])

        assert claim_all(other) == claim_all(storage)

    def test_a_delayed_job_stays_delayed_until_its_time(
        self, storage: Storage, other: Storage, clock: ManualClock
    ) -> None:
        add(storage, delay_ms=10_000)
        other.put_jobs(storage.walk_jobs())
        assert claim(other) == []

        clock.advance(10)

        assert len(claim(other)) == 1

    def test_a_group_keeps_its_concurrency(self, storage: Storage, other: Storage) -> None:
        for _ in range(3):
            add(storage, group="g", group_concurrency=2)
        other.put_jobs(storage.walk_jobs())

        assert len(claim(other, limit=5)) == 2

    def test_a_group_that_is_there_goes_by_its_own_concurrency(self, storage: Storage, other: Storage) -> None:
        bring_to(other, State.COMPLETED, group="g", group_concurrency=1)
        for _ in range(3):
            add(storage, group="g", group_concurrency=3)

        other.put_jobs(storage.walk_jobs())

        assert len(claim(other, limit=5)) == 1

    def test_a_job_whose_id_is_there_is_left_alone(self, storage: Storage) -> None:
        job_id = add(storage, payload=b"mine")
        (copy,) = storage.walk_jobs()

        put = storage.put_jobs([copy._replace(record=copy.record._replace(payload=b"theirs"))])

        assert put == [False]
        assert get(storage, job_id).payload == b"mine"

    def test_of_one_job_twice_the_first_is_stored(self, storage: Storage, other: Storage) -> None:
        add(storage)
        copies = storage.walk_jobs()

        assert other.put_jobs(copies * 2) == [True, False]

    def test_a_job_whose_key_is_held_does_not_come(self, storage: Storage, other: Storage) -> None:
        add(storage, dedupe_key="k")
        add(storage)
        add(other, dedupe_key="k")

        assert other.put_jobs(storage.walk_jobs()) == [False, True]

    def test_an_active_job_is_refused_and_nothing_stored(self, storage: Storage, other: Storage) -> None:
        add(storage, "idle")
        bring_to(storage, State.ACTIVE)

        with pytest.raises(ValueError, match="is active"):
            other.put_jobs(storage.walk_jobs())

        assert other.walk_jobs() == []

    def test_a_waiting_worker_hears_of_jobs_that_came(self, storage: Storage, tmp_path: Path) -> None:
        add(storage)
        (copy,) = storage.walk_jobs()
        (tmp_path / "live").mkdir()
        live = self.make_storage(SystemClock(), tmp_path / "live")
        live.pause("q", paused=True)
        live.pause("q", paused=False)
        listener = live.listener(["q"])
        while listener.wait(0):
            pass

        live.put_jobs([copy._replace(record=copy.record._replace(due_at_ms=0))])

        assert listener.wait(PATIENCE_S)
        listener.close()
        live.close()

    def test_jobs_that_came_do_not_clash_with_new_ones(self, storage: Storage, other: Storage) -> None:
        for _ in range(3):
            add(storage)
        other.put_jobs(storage.walk_jobs())

        new = [added.id for added in other.add([spec(), spec(), spec()])]

        assert len(other.walk_jobs()) == 6
        assert len(set(new)) == 3

    def test_values_are_walked_in_the_order_of_spaces_and_keys(self, storage: Storage) -> None:
        for space, key in (("b", "1"), ("a", "2"), ("a", "1")):
            storage.put(space, key, key.encode(), number=7)

        first = storage.walk_values(limit=2)
        rest = storage.walk_values(after=first[-1][:2])

        assert [(space, key) for space, key, _ in first + rest] == [("a", "1"), ("a", "2"), ("b", "1")]
        assert first[0][2] == (b"1", 7, None)

    def test_values_that_expired_or_have_an_owner_are_left_out(self, storage: Storage, clock: ManualClock) -> None:
        add(storage)
        storage.put("a", "lasting", ttl_ms=60_000)
        storage.put("a", "short", ttl_ms=1000)
        storage.put("a", "owned", owner=claim_one(storage, lease_ms=LEASE_MS).lease)
        clock.advance(2)

        assert [(key, value.expires_in_ms) for _, key, value in storage.walk_values()] == [("lasting", 58_000)]
