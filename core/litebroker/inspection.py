"""Every job of a storage, whoever put it there: listed, found, and mended by the rules of its framework.

    inspection = Inspection(storage)
    page = inspection.jobs(Filter(states=[State.FAILED], older_than_ms=86_400_000))
    inspection.retry(page.rows)

All looks are short, a few hundred jobs at most, so that nothing pins the database while a tool goes through a
million of them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from litebroker.arguments import job_id_of
from litebroker.errors import UnknownQueueError
from litebroker.inspectors import DIRECT, Content, Inspector, JobRow, load_inspectors
from litebroker.jobs import LARGEST_ID, Attempt, JobRecord, State
from litebroker.results import read_progress
from litebroker.storage import Storage

# What is looked at first.
STATES = (State.ACTIVE, State.PENDING, State.FAILED, State.COMPLETED, State.CANCELLED)
_ENDED = frozenset({State.FAILED, State.COMPLETED, State.CANCELLED})
_ENGINE = ""
# One look reads so many jobs at most. Each may have an error of many kilobytes with it.
_LOOK = 250
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs are meant; what is not given does not matter.

    Attributes:
        queues: As the file names them.
        task: Its name; ``*`` stands for any letters.
        older_than_ms: It ended, or was added when it has not ended, so long ago or longer.
        newer_than_ms: The same, and not so long ago.
        but_queue: Not those in this queue.
    """

    queues: Sequence[str] = ()
    states: Sequence[State] = ()
    framework: str | None = None
    task: str | None = None
    older_than_ms: int | None = None
    newer_than_ms: int | None = None
    but_queue: str | None = None

    @property
    def looks_into_rows(self) -> bool:
        """Whether it takes a look at each job to tell."""
        return (self.framework, self.task, self.older_than_ms, self.newer_than_ms) != (None, None, None, None)


class JobPage(NamedTuple):
    """Some jobs, and where to go on.

    Attributes:
        cursor: What to give as ``after`` for the next page; None when this was the last.
    """

    rows: list[JobRow]
    cursor: str | None


class Mended(NamedTuple):
    """What became of one job that was to be mended.

    Attributes:
        why_not: None when it is done.
    """

    row: JobRow
    why_not: str | None


class _Place(NamedTuple):
    """Behind which job to go on: where it is kept (in the engine, or by an inspector), and what it is there."""

    queue: str
    state: State
    keeper: str
    position: Any


class Inspection:
    """The jobs of a storage.

    Args:
        inspectors: By framework; None is all whose adapters are here.
    """

    def __init__(self, storage: Storage, inspectors: dict[str, Inspector] | None = None) -> None:
        self._storage = storage
        self._inspectors = load_inspectors(storage) if inspectors is None else inspectors

    @property
    def frameworks(self) -> list[str]:
        return sorted(self._inspectors)

    def framework_of(self, encoding: str | None) -> str:
        """Whose a job is that has this encoding: an adapter puts its name there, a `Queue` its serializer's."""
        return DIRECT if encoding is None or encoding not in self._inspectors else encoding

    def why_not_alone(self, queue: str, states: Sequence[State] = STATES) -> str | None:
        """Why jobs of a queue that are in these states cannot be copied or deleted as the engine has them; else None.

        The first job of each state tells whose they are.
        """
        for state in states:
            for record in self._storage.page(queue, state, limit=1, payloads=False):
                why_not = self._inspectors[self.framework_of(record.encoding)].why_not_alone(queue)
                if why_not is not None:
                    return why_not
        return None

    def now_ms(self) -> int:
        """The time by the storage's clock."""
        return self._storage.clock.now_ms()

    # -- looking --

    def queues(self) -> list[str]:
        """Every queue that has, or had, jobs, in the engine or elsewhere."""
        names = {info.name for info in self._storage.queues()}
        return sorted(names.union(*(inspector.shelves() for inspector in self._inspectors.values())))

    def jobs(self, where: Filter, *, limit: int = 100, after: str | None = None) -> JobPage:
        """Up to ``limit`` jobs: queue by queue, those that run first, then those that wait, then what has ended.

        Raises:
            UnknownQueueError: There is no such queue.
            ValueError: There is no such framework, or ``after`` is no cursor.
        """
        found: list[tuple[JobRow, _Place]] = []
        for look in self._looks(where, after, limit):
            found += look
            if len(found) >= limit:
                return JobPage(self._completed(found[:limit]), _cursor(found[limit - 1][1]))
        return JobPage(self._completed(found), None)

    def walk(self, where: Filter, *, size: int = _LOOK) -> Iterator[list[JobRow]]:
        """All jobs, as many at a time as one short look gives; that may be none.

        What is done to those that were given does not lead the walk astray. Whether they are held is not looked up.

        Raises:
            UnknownQueueError: There is no such queue.
            ValueError: There is no such framework.
        """
        for look in self._looks(where, None, size):
            yield [row for row, _place in look]

    def _looks(self, where: Filter, after: str | None, size: int) -> Iterator[list[tuple[JobRow, _Place]]]:
        self.check(where)
        start = None if after is None else _place(after)
        now_ms = self._storage.clock.now_ms()
        size = _LOOK if where.looks_into_rows else min(size, _LOOK)
        for queue, state, keeper in self._segments(where):
            here = (queue, STATES.index(state), keeper)
            if start is not None and here < (start.queue, STATES.index(start.state), start.keeper):
                continue
            position = start.position if start is not None and (queue, state, keeper) == start[:3] else None
            if position is None and keeper == _ENGINE and state in _ENDED and where.older_than_ms is not None:
                # The latest end comes first: skip those that are too young.
                position = [LARGEST_ID, 0, 0, None, None, now_ms - where.older_than_ms]
            is_over = False
            while not is_over:
                if keeper == _ENGINE:
                    found, position, is_over = self._look(queue, state, size, position, where, now_ms)
                else:
                    page = self._inspectors[keeper].page(queue, state, limit=size, after=position)
                    found = [(row, its) for row, its in page if _matches(row, row.framework, where, now_ms)]
                    is_over = len(page) < size
                    position = None if is_over else page[-1][1]
                yield [(row, _Place(queue, state, keeper, its)) for row, its in found]

    def _segments(self, where: Filter) -> Iterator[tuple[str, State, str]]:
        """What is looked through one after the other: queue, state, and who keeps the jobs."""
        shelves = {
            framework: set(inspector.shelves())
            for framework, inspector in self._inspectors.items()
            if where.framework in {None, framework}
        }
        for queue in sorted(set(where.queues)) or self.queues():
            if queue == where.but_queue:
                continue
            keepers = [_ENGINE, *sorted(name for name, queues in shelves.items() if queue in queues)]
            for state in STATES:
                if where.states and state not in where.states:
                    continue
                for keeper in keepers:
                    yield queue, state, keeper

    def _look(  # noqa: PLR0917 - what a look depends on
        self, queue: str, state: State, limit: int, position: Any, where: Filter, now_ms: int
    ) -> tuple[list[tuple[JobRow, Any]], Any, bool]:
        """A page of the engine's: those that match, each with its place; where to go on; whether that was all."""
        after = None if position is None else _marker(queue, state, position)
        records = self._storage.page(queue, state, limit=limit, after=after, payloads=False)
        # Before anything is made of them: where few of a million match, that is what takes the time.
        matching = (
            [record for record in records if _matches(record, self.framework_of(record.encoding), where, now_ms)]
            if where.looks_into_rows
            else records
        )
        found = [(self._row(record), _position(record)) for record in matching]
        if len(records) < limit:
            return found, None, True
        # Of what has ended the latest comes first, so that all that follow may be too old.
        is_past = (
            state in _ENDED
            and where.newer_than_ms is not None
            and now_ms - (records[-1].ended_at_ms or 0) >= where.newer_than_ms
        )
        return found, _position(records[-1]), is_past

    def _row(self, record: JobRecord) -> JobRow:
        return self._inspectors[self.framework_of(record.encoding)].row(record)

    def _completed(self, found: Sequence[tuple[JobRow, _Place]]) -> list[JobRow]:
        return self._with_holders([row for row, _place in found])

    def _with_holders(self, rows: list[JobRow]) -> list[JobRow]:
        """With who runs them, and how far they are."""
        active = [row.record.id for row in rows if row.state is State.ACTIVE and row.record is not None]
        if not active:
            return rows
        holders = self._storage.holders(active)
        reports = read_progress(self._storage, active)
        completed = []
        for row in rows:
            job_id = 0 if row.record is None else row.record.id
            holder = holders.get(job_id)
            if holder is not None:
                row = replace(  # noqa: PLW2901 - the same row, with more
                    row,
                    worker=holder.worker or None,
                    alive=holder.alive,
                    claimed_at_ms=holder.claimed_at_ms,
                    lease_until_ms=holder.lease_until_ms,
                    progress=reports.get(job_id),
                )
            completed.append(row)
        return completed

    def find(self, name: str) -> list[JobRow]:
        """The job of this id; or, where there is none, those that a framework or their sender calls so.

        A Dramatiq message's id, a Huey task's and an RQ job's are such names. Several jobs may have the same one.
        """
        found: list[JobRow] = []
        job_id = job_id_of(name)
        if job_id is not None:
            record = self._storage.get(job_id)
            found = [] if record is None else [self._row(record)]
        if not found:
            for inspector in self._inspectors.values():
                found += inspector.find(name)
        if not found:
            for info in self._storage.queues():
                found += map(self._row, self._storage.find(info.name, ref=name))
        return self._with_holders(found)

    def count(self, where: Filter) -> int | None:
        """How many jobs a filter means, where that is known without a look at each; else None."""
        names = {name for name in where.queues or self.queues() if name != where.but_queue}
        if where.looks_into_rows or any(names & set(inspector.shelves()) for inspector in self._inspectors.values()):
            return None
        counts = [self._storage.counts(name) for name in names]
        return sum(int(getattr(each, str(state))) for each in counts for state in set(where.states) or set(State))

    def content(self, row: JobRow, *, unpickle: bool = False) -> Content:
        """What its payload holds. Nothing is unpickled unless asked for: a pickle runs what it likes."""
        return self._of(row).content(row, unpickle=unpickle)

    def facts(self, row: JobRow) -> dict[str, str]:
        """What else its framework has to say of it, by name."""
        return dict(self._of(row).facts(row))

    def attempts(self, row: JobRow) -> list[Attempt]:
        """Its attempts that have ended, oldest first."""
        return list(self._of(row).attempts(row))

    # -- mending --

    def retry(self, rows: Sequence[JobRow], *, queue: str | None = None) -> list[Mended]:
        """Let failed jobs run again at once, in another queue if one is given."""
        return self._mend(rows, lambda inspector, some: inspector.retry(some, queue=queue), queue)

    def cancel(self, rows: Sequence[JobRow]) -> list[Mended]:
        """End pending jobs as cancelled."""
        return self._mend(rows, lambda inspector, some: inspector.cancel(some))

    def remove(self, rows: Sequence[JobRow]) -> list[Mended]:
        """Delete jobs that are not active."""
        return self._mend(rows, lambda inspector, some: inspector.remove(some))

    def remove_dead(self, rows: Sequence[JobRow]) -> list[Mended]:
        """Delete jobs if they are failed, and leave all others."""
        dead = [row for row in rows if row.state is State.FAILED]
        left = [
            Mended(row, f"it is no dead letter: it is {row.state}") for row in rows if row.state is not State.FAILED
        ]
        return [*left, *self.remove(dead)]

    def reschedule(self, rows: Sequence[JobRow], due_at_ms: int) -> list[Mended]:
        """Make pending jobs due then."""
        return self._mend(rows, lambda inspector, some: inspector.reschedule(some, due_at_ms))

    def move(self, rows: Sequence[JobRow], queue: str) -> list[Mended]:
        """Let pending jobs wait in another queue, in their order."""
        return self._mend(rows, lambda inspector, some: inspector.move(some, queue), queue)

    def _mend(
        self,
        rows: Sequence[JobRow],
        act: Callable[[Inspector, Sequence[JobRow]], list[str | None]],
        queue: str | None = None,
    ) -> list[Mended]:
        answers: dict[int, str | None] = {}
        by_framework: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            misplaced = None if queue is None else self._misplaced(row, queue)
            if misplaced is None:
                by_framework.setdefault(row.framework, []).append(number)
            else:
                answers[number] = misplaced
        for framework, numbers in by_framework.items():
            why_not = act(self._inspectors[framework], [rows[number] for number in numbers])
            answers.update(zip(numbers, why_not, strict=True))
        return [Mended(row, answers[number]) for number, row in enumerate(rows)]

    def _misplaced(self, row: JobRow, queue: str) -> str | None:
        """Why a job cannot go to a queue: the workers of one framework cannot run another one's jobs."""
        owners = [inspector for inspector in self._inspectors.values() if inspector.owns(queue)]
        mine = self._of(row)
        if owners and mine not in owners:
            return f"queue {queue!r} is for jobs of {owners[0].framework}, and it is one of {row.framework}"
        return mine.why_not_in(row, queue)

    def _of(self, row: JobRow) -> Inspector:
        return self._inspectors[row.framework]

    def check(self, where: Filter) -> None:
        """Raises what `walk` raises, when the filter names what is not there."""
        if where.framework is not None and where.framework not in self._inspectors:
            raise ValueError(f"there is no framework {where.framework!r}; there are: {', '.join(self.frameworks)}")
        if where.queues:
            known = self.queues()
            for name in where.queues:
                if name not in known:
                    there = ", ".join(repr(it) for it in known[:10]) or "none"
                    message = f"{self._storage.location}: there is no queue {name!r}; there are: {there}"
                    raise UnknownQueueError(message)


def oldest_age_ms(storage: Storage, queue: str) -> int | None:
    """How long the job that has been due the longest is so; None when none is due."""
    due_at_ms = storage.oldest_due_at_ms(queue)
    return None if due_at_ms is None else max(storage.clock.now_ms() - due_at_ms, 0)


@lru_cache(maxsize=8)
def _pattern(task: str) -> re.Pattern[str]:
    # Not fnmatch: a task's name may have brackets, as RQ's "f([1])".
    return re.compile(".*".join(map(re.escape, task.split("*"))), re.DOTALL)


def _matches(job: JobRow | JobRecord, framework: str, where: Filter, now_ms: int) -> bool:
    if where.framework is not None and framework != where.framework:
        return False
    if where.task is not None and not _pattern(where.task).fullmatch(job.task or ""):
        return False
    age_ms = now_ms - (job.ended_at_ms or job.created_at_ms or 0)
    if where.older_than_ms is not None and age_ms < where.older_than_ms:
        return False
    return where.newer_than_ms is None or age_ms < where.newer_than_ms


def _position(record: JobRecord) -> list[Any]:
    """What of a job tells its place in a listing."""
    return [
        record.id, record.priority, record.due_at_ms, record.group, record.lease_until_ms, record.ended_at_ms,
    ]  # fmt: skip


def _marker(queue: str, state: State, position: Sequence[Any]) -> JobRecord:
    """A job in that place, for `Jobs.page`."""
    job_id, priority, due_at_ms, group, lease_until_ms, ended_at_ms = position
    return JobRecord(
        id=job_id,
        queue=queue,
        state=state,
        priority=priority,
        due_at_ms=due_at_ms,
        attempts=0,
        max_attempts=None,
        created_at_ms=0,
        token=None,
        lease_until_ms=lease_until_ms,
        claimed_at_ms=None,
        ended_at_ms=ended_at_ms,
        group=group,
        dedupe_key=None,
        ref=None,
        task=None,
        encoding=None,
        headers={},
        error=None,
        history=(),
        payload=b"",
    )


def _cursor(place: _Place) -> str:
    text = json.dumps([place.queue, str(place.state), place.keeper, place.position], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _place(cursor: str) -> _Place:
    """What a cursor says. It comes from outside, so that nothing in it is taken for granted."""
    try:
        queue, state, keeper, position = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        place = _Place(str(queue), State(state), str(keeper), position)
        if place.keeper != _ENGINE or _is_position(*position):
            return place
    except (ValueError, TypeError, RecursionError):
        pass
    shown = repr(cursor) if len(cursor) <= _SHOWN else f"{cursor[:_SHOWN]!r}..."
    raise ValueError(f"{shown} is no cursor: give one that a listing has printed")


def _is_position(  # noqa: PLR0917 - they come as a list
    job_id: Any, priority: Any, due_at_ms: Any, group: Any, lease_until_ms: Any, ended_at_ms: Any
) -> bool:
    numbers = (job_id, priority, due_at_ms, lease_until_ms or 0, ended_at_ms or 0)
    return isinstance(group or "", str) and all(type(it) is int and abs(it) <= LARGEST_ID for it in numbers)
