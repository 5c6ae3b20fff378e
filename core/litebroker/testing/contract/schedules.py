# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Schedules."""

from __future__ import annotations

from typing import Any

import pytest

from litebroker.errors import GroupConflictError
from litebroker.jobs import Added, Counts, QueueInfo
from litebroker.storage import ScheduleSpec, Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    Contract,
    add,
    claim_one,
    get,
    in_threads,
    odd_text,
    schedule,
    spec,
)


class ScheduleRules(Contract):
    """Ticks, each of which fires once."""

    @pytest.mark.parametrize(
        "when",
        [
            ScheduleSpec(every_ms=1500),
            ScheduleSpec(cron="0 6 * * *"),
            ScheduleSpec(cron="*/5 * * * 1-5", tz="Europe/Berlin"),
        ],
        ids=["every", "cron", "cron in a time zone"],
    )
    def test_a_schedule_comes_back_as_it_was_given(
        self, storage: Storage, clock: ManualClock, when: ScheduleSpec
    ) -> None:
        job = spec(
            "mail",
            b"\x00\xff",
            encoding="bytes",
            priority=-(2**63),
            dedupe_key="k",
            dedupe_until="ended",
            group="g",
            group_concurrency=3,
            max_attempts=None,
            headers={"ü": "東"},
            ref="r",
            task="t",
            front=True,
        )
        given = schedule(clock, queue="mail", spec=when, job=job, next_at_ms=123, last_at_ms=45)

        storage.put_schedule(given)

        assert storage.get_schedule("mail", "s") == given
        assert storage.list_schedules() == [given]

    @odd_text
    def test_a_schedule_may_have_any_name(self, storage: Storage, clock: ManualClock, text: str) -> None:
        given = schedule(clock, text, text, job=spec(text, b"tick", ref=text, headers={text: text}))
        storage.put_schedule(given)

        fired = storage.fire_schedule(given, next_at_ms=clock.now_ms() + 1000)

        assert fired is not None
        assert claim_one(storage, text).ref == text
        assert storage.remove_schedule(text, text) is True

    def test_a_schedule_that_is_not_there_is_none(self, storage: Storage, clock: ManualClock) -> None:
        storage.put_schedule(schedule(clock))

        assert storage.get_schedule("q", "other") is None
        assert storage.get_schedule("other", "s") is None
        assert storage.remove_schedule("q", "other") is False
        assert storage.fire_schedule(schedule(clock, "other"), next_at_ms=2**50) is None
        assert storage.counts("q") == Counts()

    def test_a_schedule_brings_its_queue_into_being(self, storage: Storage, clock: ManualClock) -> None:
        storage.put_schedule(schedule(clock))

        assert storage.queues() == [QueueInfo("q", None)]

    def test_a_schedule_replaces_the_one_of_its_id_in_its_queue(self, storage: Storage, clock: ManualClock) -> None:
        storage.put_schedule(schedule(clock, queue="other"))
        storage.put_schedule(schedule(clock, last_at_ms=5))
        new = schedule(clock, spec=ScheduleSpec(cron="0 6 * * *"), job=spec(payload=b"new", priority=4), next_at_ms=9)

        storage.put_schedule(new)

        assert storage.get_schedule("q", "s") == new
        assert storage.list_schedules("q") == [new]
        assert len(storage.list_schedules()) == 2

    def test_schedules_are_listed_by_queue_and_id(self, storage: Storage, clock: ManualClock) -> None:
        places = [("b", "2"), ("a", "2"), ("b", "10"), ("a", "ä"), ("B", "1"), ("a", "Z")]
        for queue, schedule_id in places:
            storage.put_schedule(schedule(clock, schedule_id, queue))

        assert [(each.queue, each.id) for each in storage.list_schedules()] == sorted(places)
        assert [each.id for each in storage.list_schedules("a")] == ["2", "Z", "ä"]
        assert storage.list_schedules("unknown") == []

    def test_a_removed_schedule_is_gone_and_its_jobs_stay(self, storage: Storage, clock: ManualClock) -> None:
        storage.put_schedule(schedule(clock))
        storage.fire_schedule(schedule(clock), next_at_ms=clock.now_ms())

        assert storage.remove_schedule("q", "s") is True

        assert storage.get_schedule("q", "s") is None
        assert storage.remove_schedule("q", "s") is False
        assert storage.due_schedules(["q"]) == []
        assert storage.counts("q") == Counts(ready=1)

    def test_a_schedule_is_due_when_its_tick_has_come(self, storage: Storage, clock: ManualClock) -> None:
        given = schedule(clock, next_at_ms=clock.now_ms() + 5000)
        storage.put_schedule(given)

        clock.step(4.999)
        early = storage.due_schedules(["q"])
        clock.step(0.001)

        assert early == []
        assert storage.due_schedules(["q"]) == [given]

    def test_the_most_overdue_schedule_comes_first(self, storage: Storage, clock: ManualClock) -> None:
        for schedule_id, queue, age in (("1", "a", 5), ("2", "b", 20), ("3", "a", 10), ("4", "b", 1), ("5", "c", 99)):
            storage.put_schedule(schedule(clock, schedule_id, queue, next_at_ms=clock.now_ms() - age))

        assert [each.id for each in storage.due_schedules(["a", "b"])] == ["2", "3", "1", "4"]
        assert [each.id for each in storage.due_schedules(["b", "a"], limit=3)] == ["2", "3", "1"]
        assert [each.id for each in storage.due_schedules(["c", "unknown"])] == ["5"]
        assert storage.due_schedules([]) == []

    def test_the_schedules_of_a_paused_queue_are_not_due(self, storage: Storage, clock: ManualClock) -> None:
        storage.put_schedule(schedule(clock, queue="a"))
        storage.put_schedule(schedule(clock, queue="b"))

        storage.pause("a", paused=True)
        while_paused = [each.queue for each in storage.due_schedules(["a", "b"])]
        storage.pause("a", paused=False)

        assert while_paused == ["b"]
        assert {each.queue for each in storage.due_schedules(["a", "b"])} == {"a", "b"}

    def test_a_tick_adds_its_job_and_goes_on_to_the_next(self, storage: Storage, clock: ManualClock) -> None:
        given = schedule(clock, job=spec(payload=b"tick", priority=3, ref="r"))
        storage.put_schedule(given)
        clock.advance(7)

        fired = storage.fire_schedule(given, next_at_ms=given.next_at_ms + 60_000)

        assert fired is not None
        assert fired.created
        job = get(storage, fired.id)
        assert (job.payload, job.priority, job.ref, job.due_at_ms) == (b"tick", 3, "r", clock.now_ms())
        assert storage.get_schedule("q", "s") == given._replace(
            next_at_ms=given.next_at_ms + 60_000, last_at_ms=given.next_at_ms
        )
        assert storage.due_schedules(["q"]) == []

    def test_a_tick_fires_once(self, storage: Storage, clock: ManualClock) -> None:
        given = schedule(clock)
        storage.put_schedule(given)

        answers = [storage.fire_schedule(given, next_at_ms=clock.now_ms() + 60_000) for _ in range(3)]

        assert [answer is not None for answer in answers] == [True, False, False]
        assert storage.counts("q") == Counts(ready=1)

    def test_of_eight_threads_one_fires_a_tick(self, storage: Storage, clock: ManualClock) -> None:
        for number in range(10):
            storage.put_schedule(schedule(clock, str(number)))

        def fire_all() -> int:
            due = storage.due_schedules(["q"])
            return sum(storage.fire_schedule(each, next_at_ms=each.next_at_ms + 60_000) is not None for each in due)

        fired = in_threads(*[fire_all] * 8)

        assert sum(fired) == 10
        assert storage.counts("q") == Counts(ready=10)

    @pytest.mark.parametrize(
        "change",
        [
            {"next_at_ms": 2**50},
            {"last_at_ms": 1},
            {"spec": ScheduleSpec(every_ms=59_999)},
            {"spec": ScheduleSpec(cron="* * * * *")},
            {"job": spec(payload=b"other")},
            {"job": spec(payload=b"tick", priority=1)},
        ],
        ids=["next tick", "last tick", "interval", "cron", "payload", "priority"],
    )
    def test_a_schedule_that_was_changed_does_not_fire_as_it_was(
        self, storage: Storage, clock: ManualClock, change: dict[str, Any]
    ) -> None:
        old = schedule(clock)
        storage.put_schedule(old)
        new = old._replace(**change)
        storage.put_schedule(new)

        assert storage.fire_schedule(old, next_at_ms=2**51) is None
        assert storage.get_schedule("q", "s") == new
        assert storage.counts("q") == Counts()

    def test_a_schedule_may_go_on_without_a_job(self, storage: Storage, clock: ManualClock) -> None:
        given = schedule(clock)
        storage.put_schedule(given)

        answers = [storage.fire_schedule(given, next_at_ms=clock.now_ms() + 60_000, add=False) for _ in range(2)]

        assert answers == [Added(0, created=False), None]
        assert storage.get_schedule("q", "s") == given._replace(next_at_ms=clock.now_ms() + 60_000)
        assert storage.counts("q") == Counts()

    def test_a_tick_whose_key_is_held_adds_nothing_and_goes_on(self, storage: Storage, clock: ManualClock) -> None:
        given = schedule(clock, job=spec(payload=b"tick", dedupe_key="k"))
        storage.put_schedule(given)
        holder = add(storage, dedupe_key="k")

        assert storage.fire_schedule(given, next_at_ms=clock.now_ms() + 60_000) == Added(holder, created=False)

        assert storage.due_schedules(["q"]) == []
        assert storage.counts("q") == Counts(ready=1)

    def test_a_tick_whose_job_is_refused_does_not_go_on(self, storage: Storage, clock: ManualClock) -> None:
        add(storage, group="g", group_concurrency=2)
        given = schedule(clock, job=spec(payload=b"tick", group="g"))
        storage.put_schedule(given)

        with pytest.raises(GroupConflictError):
            storage.fire_schedule(given, next_at_ms=clock.now_ms() + 60_000)

        assert storage.get_schedule("q", "s") == given
