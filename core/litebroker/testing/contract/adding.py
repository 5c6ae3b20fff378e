# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Adding jobs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from litebroker.jobs import Counts, JobRecord, State
from litebroker.storage import Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    HOUR_S,
    Contract,
    add,
    claim,
    claim_one,
    get,
    ids_of,
    odd_payload,
    odd_text,
    spec,
)


class _TickingClock:
    """Each look at it takes a millisecond."""

    def __init__(self) -> None:
        self._ticks = itertools.count(1)

    def now_ms(self) -> int:
        return 1_800_000_000_000 + next(self._ticks)

    def steady_ms(self) -> int:
        return 100_000_000 + next(self._ticks)


class Adding(Contract):
    """What goes in comes out as it was."""

    def test_a_job_comes_back_as_it_was_given(self, storage: Storage, clock: ManualClock) -> None:
        given = spec(
            "mail",
            b"\x01payload",
            encoding="pickle",
            priority=-7,
            delay_ms=1500,
            dedupe_key="welcome:42",
            group="tenant-9",
            group_concurrency=2,
            max_attempts=5,
            headers={"traceparent": "00-af", "ü": "東"},
            ref="message-1",
            task="app.send",
        )

        ((job_id, created),) = storage.add([given])

        assert created
        assert get(storage, job_id) == JobRecord(
            id=job_id,
            queue="mail",
            state=State.PENDING,
            priority=-7,
            due_at_ms=clock.now_ms() + 1500,
            attempts=0,
            max_attempts=5,
            created_at_ms=clock.now_ms(),
            token=None,
            lease_until_ms=None,
            claimed_at_ms=None,
            ended_at_ms=None,
            group="tenant-9",
            dedupe_key="welcome:42",
            ref="message-1",
            task="app.send",
            encoding="pickle",
            headers={"traceparent": "00-af", "ü": "東"},
            error=None,
            history=get(storage, job_id).history,
            payload=b"\x01payload",
        )
        assert list(get(storage, job_id).history) == []

    def test_a_plain_job_is_due_now_and_has_three_attempts_and_no_names(
        self, storage: Storage, clock: ManualClock
    ) -> None:
        job = get(storage, add(storage))

        assert (job.state, job.due_at_ms, job.priority, job.max_attempts) == (State.PENDING, clock.now_ms(), 0, 3)
        assert (job.group, job.dedupe_key, job.ref, job.task, job.encoding) == (None,) * 5
        assert dict(job.headers) == {}

    def test_each_position_has_its_answer_in_order(self, storage: Storage) -> None:
        added = storage.add([spec(payload=b"%d" % number) for number in range(50)])

        assert all(each.created for each in added)
        assert len({each.id for each in added}) == 50
        assert [get(storage, each.id).payload for each in added] == [b"%d" % number for number in range(50)]

    def test_adding_nothing_answers_nothing(self, storage: Storage) -> None:
        assert storage.add([]) == []

    def test_a_batch_is_stored_on_one_reading_of_the_clock(self, tmp_path: Path) -> None:
        storage = self.make_storage(_TickingClock(), tmp_path)

        added = storage.add([spec() for _ in range(20)])

        jobs = [get(storage, each.id) for each in added]
        storage.close()
        assert len({job.created_at_ms for job in jobs}) == 1
        assert len({job.due_at_ms for job in jobs}) == 1

    def test_a_batch_may_be_large_and_go_to_several_queues(self, storage: Storage) -> None:
        added = storage.add([spec(f"q{number % 3}", b"%d" % number) for number in range(3000)])

        assert [job.payload for job in claim(storage, "q1", limit=3000)] == [b"%d" % n for n in range(1, 3000, 3)]
        assert len({each.id for each in added}) == 3000
        assert [storage.counts(queue).pending for queue in ("q0", "q1", "q2")] == [1000, 0, 1000]

    @pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 30, 47])
    @pytest.mark.parametrize("named", [False, True, None], ids=["without names", "with names", "some with names"])
    def test_each_job_of_a_batch_comes_back_as_it_was_given(
        self, storage: Storage, count: int, *, named: bool | None
    ) -> None:
        given = [
            spec("work", b"%d" % number * (2000 if number % 7 == 3 else 1), priority=number)
            if not (number % 3 == 0 if named is None else named)
            else spec("mail", b"%d" % number, ref=f"r{number}", task=f"t{number}", encoding="pickle", max_attempts=None)
            for number in range(count)
        ]

        records = [storage.get(job_id) for job_id, _created in storage.add(given)]

        found = [
            it and (it.queue, it.payload, it.priority, it.max_attempts, it.ref, it.task, it.encoding) for it in records
        ]
        assert found == [
            (it.queue, it.payload, it.priority, it.max_attempts, it.ref, it.task, it.encoding) for it in given
        ]

    def test_an_id_is_never_used_again(self, storage: Storage, clock: ManualClock) -> None:
        seen = set()

        for _ in range(20):
            job_id = add(storage)
            seen.add(job_id)
            storage.remove([job_id])
            clock.step(-HOUR_S)

        assert len(seen) == 20

    @odd_payload
    def test_a_payload_comes_back_byte_for_byte(self, storage: Storage, payload: bytes) -> None:
        job_id = add(storage, payload=payload)

        assert get(storage, job_id).payload == payload
        assert type(get(storage, job_id).payload) is bytes
        assert claim_one(storage).payload == payload

    @odd_text
    def test_a_queue_may_have_any_name(self, storage: Storage, text: str) -> None:
        job_id = add(storage, text)
        add(storage, "another")

        assert storage.counts(text) == Counts(ready=1)
        assert text in [queue.name for queue in storage.queues()]
        assert claim_one(storage, text).id == job_id
        assert get(storage, job_id).queue == text

    @odd_text
    def test_a_jobs_names_may_be_any_text(self, storage: Storage, text: str) -> None:
        job_id = add(storage, ref=text, task=text, encoding=text, dedupe_key=text, group=text, headers={text: text})

        job = get(storage, job_id)
        assert (job.ref, job.task, job.encoding, job.dedupe_key, job.group) == (text,) * 5
        assert dict(job.headers) == {text: text}
        assert ids_of(storage.find("q", ref=text)) == [job_id]
        assert ids_of(storage.find("q", dedupe_key=text)) == [job_id]
        assert claim_one(storage) == get(storage, job_id)

    @pytest.mark.parametrize(
        ("one", "other"),
        [("q", "Q"), ("ä", "Ä"), ("q", "q "), ("\u00e9", "e\u0301"), ("1", "01"), ("1", "1.0")],
        ids=["case", "case of an umlaut", "a space", "normal form", "leading zero", "decimal"],
    )
    def test_names_that_differ_at_all_are_different(self, storage: Storage, one: str, other: str) -> None:
        in_one = add(storage, one, dedupe_key=one, ref=one, group=one)
        in_other = add(storage, one, dedupe_key=other, ref=other, group=other)

        assert in_other != in_one
        assert ids_of(storage.find(one, ref=one)) == [in_one]
        assert len(claim(storage, one, limit=5)) == 2
        assert storage.counts(other) == Counts()

    def test_an_unknown_id_has_no_job(self, storage: Storage) -> None:
        add(storage)

        assert [storage.get(unknown) for unknown in (0, -1, 10**9, 2**63 - 1)] == [None] * 4
