"""The SQLite storage does what the reference does, whatever is called in whatever order.

`LITEBROKER_MODEL_EXAMPLES=1000 pytest tests/test_storage_model.py` looks for longer, and each time elsewhere.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from litebroker.errors import GroupConflictError
from litebroker.jobs import Added, Attempt, Counts, JobError, JobRecord, JobSpec, Keep, Lease, State
from litebroker.sqlite import SQLiteStorage
from litebroker.storage import ScheduleRecord, ScheduleSpec, Storage
from litebroker.testing import ManualClock
from litebroker.testing.model import ModelStorage

T = TypeVar("T")

EXAMPLES = os.environ.get("LITEBROKER_MODEL_EXAMPLES")
SETTINGS = settings(
    max_examples=int(EXAMPLES or 100),
    stateful_step_count=60,
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

QUEUES = ("q", "r")
SPACES = ("s", "t")
ENDS = (State.COMPLETED, State.FAILED, State.CANCELLED)
ERROR = JobError("handler", "ValueError", "no", "stack", ("KeyError: 1",))
HOUR_S = 3600.0
TEN_YEARS_S = 87_660 * HOUR_S

# Few of each, so that they meet; the first is the likelier where it is there twice.
queues = st.sampled_from(["q", "q", "r"])
both_orders = st.sampled_from([QUEUES, QUEUES[::-1]])
dedupe_keys = st.sampled_from([None, None, None, "k", "l"])
# Groups are made in "r" only, so that "q" is without any until some are moved there.
places = st.sampled_from([("q", None), ("q", None), ("r", None), ("r", "g"), ("r", "h")])
leases_ms = st.sampled_from([5000, 60_000, 60_000])
delays_ms = st.sampled_from([1, 1000, 5000, 20_000])
ttls_ms = st.none() | delays_ms
value_changes = st.tuples(
    st.sampled_from(
        ["put", "put", "put if absent", "own", "own", "count", "count", "count", "pop", "delete", "clear", "sweep"]
    ),
    st.sampled_from([("s", "a"), ("s", "a"), ("s", "b"), ("t", "a")]),
    ttls_ms,
    st.integers(-3, 3),
)
# Which of the latest jobs or leases: 0 is the last one.
backwards = st.integers(0, 7)

SETTLERS: dict[str, Callable[[Storage, list[Lease]], object]] = {
    "complete": lambda storage, leases: storage.complete(leases),
    "complete and keep": lambda storage, leases: storage.complete(leases, keep=True),
    "extend": lambda storage, leases: storage.extend(leases, 5000),
    "release": lambda storage, leases: storage.release(leases),
    "release for later": lambda storage, leases: storage.release(leases, delay_ms=5000),
    "bury": lambda storage, leases: storage.fail(leases[0], ERROR, retry_in_ms=None),
    "fail": lambda storage, leases: storage.fail(leases[0], ERROR, retry_in_ms=0),
    "fail for now": lambda storage, leases: storage.fail(leases[0], ERROR, retry_in_ms=1000),
}


def specs(where: st.SearchStrategy[tuple[str, str | None]] = places, **more: Any) -> st.SearchStrategy[JobSpec]:
    return st.builds(
        lambda place, **fields: JobSpec(queue=place[0], group=place[1], **fields, **more),
        where,
        payload=st.sampled_from([b"x", b"", b"\x00\xff"]),
        priority=st.integers(-1, 1),
        dedupe_key=dedupe_keys,
        dedupe_until=st.sampled_from(["removed", "ended"]),
        max_attempts=st.sampled_from([1, 2, 3, None]),
        ref=st.sampled_from(["one", "two", None]),
        headers=st.sampled_from([None, {"a": "b"}]),
    )


plain_specs = specs()
front_specs = specs(front=True)
job_specs = st.one_of(
    plain_specs,
    plain_specs,
    front_specs,
    *[specs(delay_ms=delay_ms) for delay_ms in (1, 1000, 20_000)],
    specs(run_at_ms=0),
    specs(st.just(("r", "wide")), group_concurrency=2),
    # Mostly refused.
    specs(st.just(("r", "g")), group_concurrency=2),
)


@dataclass(frozen=True)
class Pair(Generic[T]):
    """One thing as both storages know it."""

    real: T
    model: T

    def __getitem__(self, side: int) -> T:
        return (self.real, self.model)[side]


class StorageMachine(RuleBasedStateMachine):
    driver: Literal["sqlite3", "apsw"] = "sqlite3"

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.cleanup = ExitStack()
        folder = self.cleanup.enter_context(tempfile.TemporaryDirectory())
        self.real = SQLiteStorage(Path(folder, "jobs.db"), clock=self.clock, durability="relaxed", driver=self.driver)
        self.cleanup.callback(self.real.close)
        self.model = ModelStorage(self.clock)
        self.ids: dict[int, int] = {}
        self.jobs: list[Pair[int]] = []
        self.leases: list[Pair[Lease]] = []
        self.transactions: Pair[ExitStack] | None = None

    def teardown(self) -> None:
        if self.transactions is not None:
            self.end_transactions(None)
        self.cleanup.close()

    # -- saying one thing to both, and comparing the answers

    def both(self, ask: Callable[[Storage, int], T]) -> Pair[T]:
        """Ask the real one, then the model; the number says which is asked."""
        return Pair(ask(self.real, 0), ask(self.model, 1))

    def agree(self, ask: Callable[[Storage, int], T]) -> T:
        answers = self.both(ask)
        assert answers.real == answers.model
        return answers.real

    def same_jobs(self, ask: Callable[[Storage, int], Sequence[JobRecord]]) -> Pair[Sequence[JobRecord]]:
        answers = self.both(ask)
        real = [self.neutral(job, self.ids) for job in answers.real]
        model = [self.neutral(job) for job in answers.model]
        assert real == model
        return answers

    def same_added(self, answers: Pair[Sequence[Added]]) -> None:
        """Learn the ids of what is new; check those of what is not."""
        assert [each.created for each in answers.real] == [each.created for each in answers.model]
        for real, model in zip(answers.real, answers.model, strict=True):
            if real.created:
                assert real.id not in self.ids
                self.ids[real.id] = model.id
                self.jobs.append(Pair(real.id, model.id))
            assert self.ids[real.id] == model.id

    @staticmethod
    def neutral(job: JobRecord, ids: dict[int, int] | None = None) -> dict[str, Any]:
        """The record without what a storage may choose: ids, tokens, its words for a lapse, claims given back."""

        def attempt(each: Attempt) -> Attempt:
            return each._replace(worker="", error="" if each.outcome == "lapsed" else each.error)

        error = job.error
        if error is not None:
            error = JobError("lapsed") if error.reason == "lapsed" else error._replace(causes=tuple(error.causes))
        fields = job._asdict()
        fields.update(
            id=job.id if ids is None else ids[job.id],
            token=job.token is not None,
            claimed_at_ms=job.claimed_at_ms if job.attempts or job.token else None,
            headers=dict(job.headers),
            history=[attempt(each) for each in job.history],
            error=error,
        )
        return fields

    # -- jobs

    @initialize(jobs=st.lists(job_specs, min_size=4, max_size=10))
    def begin_with(self, jobs: list[JobSpec]) -> None:
        for job in jobs:
            self.add([job])

    @rule(specs=st.lists(job_specs, min_size=1, max_size=4))
    def add(self, specs: list[JobSpec]) -> None:
        self.clock.advance(0.001)  # else all are due at one time, and only their priorities order them

        def add(storage: Storage, _: int) -> list[Added] | str:
            try:
                return storage.add(specs)
            except GroupConflictError as error:
                return f"{error.group} has {error.concurrency}"

        answers = self.both(add)
        real, model = answers.real, answers.model
        if isinstance(real, str) or isinstance(model, str):
            assert real == model
        else:
            self.same_added(Pair(real, model))

    @rule(place=places, priority=st.integers(-1, 1), count=st.integers(1, 5))
    def add_some(self, place: tuple[str, str | None], priority: int, count: int) -> None:
        self.add([JobSpec(queue=place[0], payload=b"x", group=place[1], priority=priority)] * count)

    @rule(
        wanted=st.sampled_from([["q"], ["r"], [*QUEUES], [*QUEUES[::-1]]]), limit=st.integers(1, 4), lease_ms=leases_ms
    )
    def claim(self, wanted: list[str], limit: int, lease_ms: int) -> None:
        claimed = self.same_jobs(lambda storage, _: storage.claim(wanted, limit=limit, lease_ms=lease_ms))
        self.leases += [Pair(real.lease, model.lease) for real, model in zip(claimed.real, claimed.model, strict=True)]

    @rule(outcomes=st.lists(st.sampled_from(["hold", *SETTLERS]), min_size=1, max_size=4))
    def work(self, outcomes: list[str]) -> None:
        older = len(self.leases)
        self.claim([*QUEUES], len(outcomes), 60_000)
        for number, how in zip(range(older, len(self.leases)), outcomes, strict=False):
            if how != "hold":
                self.settle([len(self.leases) - 1 - number], how)

    @precondition(lambda self: self.leases)
    @rule(which=st.lists(backwards, min_size=1, max_size=3), how=st.sampled_from([*SETTLERS]))
    def settle_late(self, which: list[int], how: str) -> None:
        self.clock.advance(60)
        self.settle(which, how)

    @precondition(lambda self: self.leases)
    @rule(which=st.lists(backwards, min_size=1, max_size=3), how=st.sampled_from([*SETTLERS]))
    def settle(self, which: list[int], how: str) -> None:
        held = [self.leases[-1 - number % len(self.leases)] for number in which]
        self.agree(lambda storage, side: SETTLERS[how](storage, [lease[side] for lease in held]))

    @precondition(lambda self: self.jobs)
    @rule(
        which=st.lists(backwards, min_size=1, max_size=3),
        how=st.sampled_from(["cancel", "remove", "reschedule", "retry", "retry", "move"]),
        queue=st.none() | queues,
    )
    def mend(self, which: list[int], how: str, queue: str | None) -> None:
        chosen = [self.jobs[-1 - number % len(self.jobs)] for number in which]
        if how == "reschedule":
            due_at_ms = self.clock.now_ms() + (-5000, 0, 1000, 20_000)[which[0] % 4]
            self.agree(lambda storage, side: storage.reschedule(chosen[0][side], due_at_ms=due_at_ms))
        elif how == "cancel":
            self.agree(lambda storage, side: storage.cancel([job[side] for job in chosen]))
        elif how == "remove":
            self.agree(lambda storage, side: storage.remove([job[side] for job in chosen]))
        elif how == "move":
            self.agree(lambda storage, side: storage.move_jobs([job[side] for job in chosen], queue or "q"))
        else:
            chosen += [job for job in self.jobs if (found := self.model.get(job.model)) and found.state is State.FAILED]
            self.agree(lambda storage, side: storage.retry([job[side] for job in chosen[-3:]], queue=queue))

    @rule(
        how=st.sampled_from(["recover", "recover", "prune", "prune", "purge", "move", "pause", "resume", "resume"]),
        order=both_orders,
        state=st.sampled_from(State),
        keep=st.builds(Keep, count=st.none() | st.integers(0, 2), age_ms=ttls_ms),
    )
    def manage(self, how: str, order: tuple[str, str], state: State, keep: Keep) -> None:
        queue = order[0]
        if how == "recover":
            self.agree(lambda storage, side: self.recover(storage, side, None if keep.count is None else [queue]))
        elif how == "prune":
            self.agree(lambda storage, _: storage.prune(queue, {state: keep, State.FAILED: keep}))
        elif how == "purge":
            self.agree(lambda storage, _: storage.purge(queue, [state, State.CANCELLED]))
        elif how == "move":
            self.agree(lambda storage, _: storage.move(*order))
        else:
            self.agree(lambda storage, _: storage.pause(queue, paused=how == "pause"))

    @precondition(lambda self: self.jobs)
    @rule(which=st.lists(backwards, min_size=1, max_size=3), remove=st.booleans())
    def carry(self, which: list[int], *, remove: bool) -> None:
        """Put jobs in that were taken out just now, or that are there still."""

        def carry(storage: Storage, side: int) -> list[bool]:
            ids = {self.jobs[-1 - each % len(self.jobs)][side] for each in which}
            copies = [copy for copy in storage.walk_jobs() if copy.record.id in ids]
            copies = [copy for copy in copies if copy.record.state is not State.ACTIVE]
            if remove:
                storage.remove([copy.record.id for copy in copies])
            return storage.put_jobs(copies)

        self.agree(carry)

    def recover(self, storage: Storage, side: int, wanted: list[str] | None) -> list[dict[str, Any]]:
        failed = [self.neutral(job, None if side else self.ids) for job in storage.recover(wanted)]
        return sorted(failed, key=lambda fields: int(fields["id"]))

    @rule(
        queue=queues,
        state=st.sampled_from(State),
        limit=st.integers(1, 3),
        offset=st.integers(0, 3),
        due_in_ms=st.none() | st.sampled_from([-1, 0, 5000]),
        dedupe_key=dedupe_keys,
    )
    def read(  # noqa: PLR0917 - hypothesis gives them by name
        self, queue: str, state: State, limit: int, offset: int, due_in_ms: int | None, dedupe_key: str | None
    ) -> None:
        names = {"ref": "one"} if dedupe_key is None else {"dedupe_key": dedupe_key}
        self.same_jobs(lambda storage, _: storage.find(queue, **names))
        due_by_ms = None if due_in_ms is None else self.clock.now_ms() + due_in_ms
        last: Pair[JobRecord | None] = Pair(None, None)
        while True:
            after = last
            pages = self.same_jobs(
                lambda storage, side, after=after: storage.page(  # type: ignore[misc]
                    queue, state, limit=limit, offset=offset, after=after[side], due_by_ms=due_by_ms
                )
            )
            if not pages.real:
                break
            last = Pair(pages.real[-1], pages.model[-1])

    # -- time

    @rule(seconds=st.sampled_from([0.001, 1.0, 5.0, 20.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([1.0, HOUR_S, TEN_YEARS_S, -1.0, -HOUR_S, -TEN_YEARS_S]))
    def the_wall_clock_jumps(self, seconds: float) -> None:
        # A delayed job whose time came and went back again unseen may be due or not: that is left open.
        now_ms = self.clock.now_ms()
        unseen = [
            job.due_at_ms
            for job in self.model._contents.jobs.values()  # noqa: SLF001 - nobody else has to ask
            if job.state is State.PENDING and not job.due and job.due_at_ms <= now_ms
        ]
        if all(due_at_ms <= now_ms + seconds * 1000 for due_at_ms in unseen):
            self.clock.step(seconds)

    # -- transactions

    @rule(commit=st.booleans())
    def begin_or_end(self, *, commit: bool) -> None:
        if self.transactions is not None:
            self.end_transactions(None if commit else LookupError("rolled back"))
            return
        self.transactions = Pair(ExitStack(), ExitStack())
        self.transactions.real.enter_context(self.real.transaction())
        self.transactions.model.enter_context(self.model.transaction())

    def end_transactions(self, error: LookupError | None) -> None:
        assert self.transactions is not None
        stacks, self.transactions = self.transactions, None
        for stack in (stacks.real, stacks.model):
            if error is None:
                stack.close()
            else:
                # A context manager that swallowed the error would answer True.
                assert not stack.__exit__(LookupError, error, None)

    # -- values

    @rule(changes=st.lists(value_changes, min_size=1, max_size=3))
    def store(self, changes: list[tuple[str, tuple[str, str], int | None, int]]) -> None:
        for how, place, ttl_ms, number in changes:
            self.agree(lambda storage, side: self.change(storage, side, how, place, ttl_ms=ttl_ms, number=number))  # noqa: B023

    def change(
        self, storage: Storage, side: int, how: str, place: tuple[str, str], *, ttl_ms: int | None, number: int
    ) -> object:
        answer: object = None
        if how in {"put", "put if absent"}:
            answer = storage.put(*place, b"x", ttl_ms=ttl_ms, number=number, if_absent=how == "put if absent")
        elif how == "own" and self.leases:
            owner = self.leases[-1 - abs(number) % len(self.leases)][side]
            answer = storage.put(*place, b"owned", ttl_ms=ttl_ms, owner=owner, if_absent=number > 0)
        elif how == "count":
            answer = storage.increment(*place, number, ttl_ms=ttl_ms, low=-4, high=4)
        elif how == "pop":
            answer = storage.pop(*place)
        elif how == "delete":
            answer = storage.delete(place[0], [place[1], "not there"])
        elif how == "clear":
            answer = storage.clear(place[0])
        elif how == "sweep":
            storage.sweep()  # how much of it lies there yet is each storage's own affair
        return answer

    # -- schedules

    @rule(
        schedule_id=st.sampled_from(["x", "y"]),
        spec=st.sampled_from([ScheduleSpec(every_ms=1000), ScheduleSpec(cron="* * * * *", tz="Europe/Berlin")]),
        job=st.one_of(plain_specs, front_specs),
        offset_ms=st.sampled_from([-1000, 0, 0, 1000]),
        remove=st.sampled_from([False, False, False, True]),
    )
    def put_schedule(self, schedule_id: str, spec: ScheduleSpec, job: JobSpec, offset_ms: int, *, remove: bool) -> None:
        record = ScheduleRecord(job.queue, schedule_id, spec, job, self.clock.now_ms() + offset_ms, None)
        if remove:
            self.agree(lambda storage, _: storage.remove_schedule(record.queue, record.id))
        else:
            self.real.put_schedule(record)
            self.model.put_schedule(record)

    @rule(add=st.sampled_from([True, True, False]), stale=st.sampled_from([None, None, "last_at_ms", "job"]))
    def fire_schedules(self, *, add: bool, stale: str | None) -> None:
        due = self.agree(
            lambda storage, _: sorted(
                storage.due_schedules(QUEUES), key=lambda record: (record.next_at_ms, record.queue, record.id)
            )
        )
        for record in due:
            expected = record
            if stale is not None:
                other = record.job._replace(payload=b"other")
                expected = record._replace(last_at_ms=1) if stale == "last_at_ms" else record._replace(job=other)

            def fire(storage: Storage, _: int, expected: ScheduleRecord = expected) -> Added | str | None:
                try:
                    return storage.fire_schedule(expected, next_at_ms=expected.next_at_ms + 5000, add=add)
                except GroupConflictError as error:
                    return f"{error.group} has {error.concurrency}"

            answers = self.both(fire)
            real, model = answers.real, answers.model
            if isinstance(real, Added) and isinstance(model, Added) and add:
                self.same_added(Pair([real], [model]))
            else:
                assert real == model

    # -- what must be so at any time

    @invariant()
    def everything_that_can_be_seen_is_the_same(self) -> None:
        # First, since pages promote what is due, and this does not.
        for job in self.jobs:
            self.same_standing(job)
        self.agree(lambda storage, _: storage.queues())
        self.agree(lambda storage, _: storage.list_schedules())
        for space in SPACES:
            self.agree(lambda storage, _, space=space: (storage.scan(space), storage.size(space)))  # type: ignore[misc]
        for queue in QUEUES:
            self.everything_of_a_queue_is_the_same(queue)

    def same_standing(self, job: Pair[int]) -> None:
        answers = self.both(lambda storage, side: storage.standing(job[side]))
        real = answers.real
        if real is not None:
            real = real._replace(holders=tuple(self.ids[holder] for holder in real.holders))
        assert real == answers.model

    def everything_of_a_queue_is_the_same(self, queue: str) -> None:
        self.agree(lambda storage, _: storage.oldest_due_at_ms(queue))
        counts = self.agree(lambda storage, _: storage.counts(queue))
        pages = {
            state: self.same_jobs(lambda storage, _, state=state: storage.page(queue, state, limit=1000)).real  # type: ignore[misc]
            for state in State
        }
        assert counts == Counts(
            ready=counts.ready,
            delayed=len(pages[State.PENDING]) - counts.ready,
            active=len(pages[State.ACTIVE]),
            completed=len(pages[State.COMPLETED]),
            failed=len(pages[State.FAILED]),
            cancelled=len(pages[State.CANCELLED]),
        )
        assert [self.real.rank(job.id) for job in pages[State.PENDING]] == list(range(counts.pending))
        for page in pages.values():
            assert [self.real.get(job.id) for job in page] == list(page)
        everywhere = {job.id: state for state, page in pages.items() for job in page}
        assert self.real.states(list(everywhere)) == everywhere

    @invariant()
    def the_database_agrees_with_itself(self) -> None:
        for what, statement in FAULTS.items():
            assert self.rows(statement) == [], what
        assert self.rows("pragma integrity_check") == [("ok",)]

    def rows(self, statement: str) -> Iterable[tuple[object, ...]]:
        return [tuple(row) for row in self.real.execute(statement)]


# What must find nothing.
FAULTS = {
    "a group counts other jobs than it has": """
        select g.name, g.ready, g.active from litebroker_group g
        where g.ready <> (select count(*) from litebroker_job j where j.grp = g.id and j.state = 0)
          or g.active <> (select count(*) from litebroker_job j where j.grp = g.id and j.state = 1)""",
    "more of a group are active than may be": """
        select name, active, concurrency from litebroker_group where active > concurrency""",
    "a job's group belongs to another queue": """
        select j.id from litebroker_job j join litebroker_group g on g.id = j.grp where g.queue <> j.queue""",
    "a turn lies ahead of the queue's": """
        select q.name from litebroker_queue q left join litebroker_group g on g.queue = q.id
        where q.ungrouped_turn > q.turn or g.turn > q.turn""",
    "a lease without an active job, or the reverse": """
        select id, state, token from litebroker_job where (state = 1) <> (token <> 1 << 60)""",
    "an end without an ended job, or the reverse": """
        select id, state, ended_at_ms from litebroker_job where (state >= 3) <> (ended_at_ms is not null)""",
    "two jobs hold one key": """
        select queue, dedupe_key from litebroker_job where dedupe_key is not null and (dedupe_ends = 0 or state < 3)
        group by queue, dedupe_key having count(*) > 1""",
    "a job, group or schedule of no queue": """
        select id from litebroker_job where queue not in (select id from litebroker_queue)
        union all select id from litebroker_group where queue not in (select id from litebroker_queue)
        union all select id from litebroker_schedule where queue not in (select id from litebroker_queue)""",
}


class ApswStorageMachine(StorageMachine):
    driver = "apsw"


def as_test(machine: type[StorageMachine], examples: settings) -> Any:
    """What pytest collects: one test, that runs for longer than most."""
    machine.TestCase.settings = examples
    return pytest.mark.slow(pytest.mark.timeout(600)(machine.TestCase))


TestOnSqlite3 = as_test(StorageMachine, SETTINGS)
TestOnApsw = pytest.mark.skipif(find_spec("apsw") is None, reason="apsw is not installed")(
    as_test(ApswStorageMachine, settings(SETTINGS, max_examples=SETTINGS.max_examples // 3))
)
