"""Jobs, schedules and values as lines of JSON, to carry them from one storage to another.

The first line says what follows, the last one that it is all there; between them stands one line for each thing. Times
are integer milliseconds, ids are strings, and what is as usual is left out. A payload is the string that it was, or
``payload_base64`` where it is no UTF-8.

Neither side holds the storage up: an export reads a page at a time, an import writes a batch at a time. So an export is
of no single moment. A job that is there all the while is in it once; stop the workers first, or pause the queues, and
nothing moves.

Both can go on where they were interrupted: an export behind its last whole line, an import behind the last batch that
it has committed. How far an import is, is stored by the same transaction as the batch, so that no job is added twice,
though the first ones may have run and be gone meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from litebroker import ndjson
from litebroker.errors import TransferError
from litebroker.inspectors import DIRECT, load_inspectors
from litebroker.jobs import JobCopy
from litebroker.ndjson import CarriedValue, PausedQueue, Thing
from litebroker.storage import ScheduleRecord, Storage

__all__ = ["Imported", "TransferError", "export_lines", "goes_on_behind", "import_lines", "last_line"]

# How far imports are. Not carried along.
_SPACE = "litebroker-import"
_REMEMBERED_MS = 30 * 86_400_000
_BATCH = 1000
_BATCH_BYTES = 8 << 20
_FIRST_PAGE, _LARGEST_PAGE = 50, 1000
_LARGE_PAGE_BYTES, _SMALL_PAGE_BYTES = 4 << 20, 1 << 20


# -- out --


def export_lines(
    storage: Storage,
    *,
    queues: Sequence[str] | None = None,
    after: bytes | None = None,
    on_jobs: Callable[[int], object] = lambda _jobs: None,
) -> Iterator[bytes]:
    """The lines, each with its newline, in pieces of a page.

    Active jobs become pending ones, and their last attempt does not count: their leases stay behind.

    Args:
        queues: Only the jobs and schedules of these, and no values, since those are of no queue.
        after: Go on behind this line, the last whole one of an export that was interrupted. Behind one of which
            `goes_on_behind` is False it begins anew, with another header.
        on_jobs: Is told how many jobs have come since the last call.

    Raises:
        TransferError: ``after`` is no line of an export; or a job belongs to a framework that keeps more than jobs.
    """
    place = _Place.of(after) if after is not None else _Place("start")
    if place.kind == "end":
        return
    if place.kind == "start":
        yield (
            ndjson.header_line(queues)
            + b"".join(_queue_lines(storage, queues))
            + b"".join(_schedule_lines(storage, queues))
        )
    jobs = place.jobs
    inspectors = load_inspectors(storage)
    if place.kind != "job" and queues is None:
        yield from _value_lines(storage, place.value)
    for page in _job_pages(storage, place.job_id):
        chosen = [copy for copy in page if queues is None or copy.record.queue in queues]
        jobs += len(chosen)
        for queue, encoding in {(copy.record.queue, copy.record.encoding) for copy in chosen}:
            owner = inspectors.get(encoding or DIRECT)
            why_not = None if owner is None else owner.why_not_alone(queue)
            if why_not is not None:
                raise TransferError(why_not)
        yield b"".join(ndjson.job_line(copy) for copy in chosen)
        on_jobs(len(page))
    yield ndjson.end_line(jobs if place.jobs_known else None)


def goes_on_behind(line: bytes) -> bool:
    """Whether an export can go on behind this line of it. False for the few that stand before all values and jobs."""
    return _Place.of(line).kind != "start"


class _Place(NamedTuple):
    """Where an interrupted export stopped."""

    kind: str
    job_id: int | None = None
    value: tuple[str, str] | None = None
    jobs: int = 0
    jobs_known: bool = True

    @classmethod
    def of(cls, line: bytes) -> _Place:
        try:
            fields = json.loads(line)
            kind = fields["kind"]
            if kind == "job":
                return cls("job", job_id=int(fields["id"]), jobs_known=False)
            if kind == "value":
                return cls("value", value=(fields["space"], fields["key"]))
        except (ValueError, TypeError, KeyError):
            raise TransferError(f"{line[:80]!r} is no line of an export: nothing can go on behind it") from None
        return cls("end" if kind == "end" else "start")


def _queue_lines(storage: Storage, queues: Sequence[str] | None) -> Iterator[bytes]:
    for info in storage.queues():
        if queues is None or info.name in queues:
            yield ndjson.queue_line(info)


def _schedule_lines(storage: Storage, queues: Sequence[str] | None) -> Iterator[bytes]:
    for record in storage.list_schedules():
        if queues is None or record.queue in queues:
            yield ndjson.schedule_line(record)


def _value_lines(storage: Storage, after: tuple[str, str] | None) -> Iterator[bytes]:
    limit = _FIRST_PAGE
    while page := storage.walk_values(after=after, limit=limit):
        yield b"".join(ndjson.value_line(*entry) for entry in page if entry[0] != _SPACE)
        after = page[-1][:2]
        limit = _next_limit(limit, sum(len(value.data) for _space, _key, value in page))


def _job_pages(storage: Storage, after: int | None) -> Iterator[list[JobCopy]]:
    limit = _FIRST_PAGE
    while page := storage.walk_jobs(after=after, limit=limit):
        yield page
        after = page[-1].record.id
        limit = _next_limit(limit, sum(len(copy.record.payload) for copy in page))


def _next_limit(limit: int, size: int) -> int:
    """How much the next page may hold: it is read in one short transaction, however large the payloads are."""
    if size > _LARGE_PAGE_BYTES:
        return max(limit // 4, 1)
    return min(limit * 2, _LARGEST_PAGE) if size < _SMALL_PAGE_BYTES else limit


def last_line(tail: bytes, *, whole: bool) -> tuple[bytes | None, int]:
    """The last whole line of what an interrupted export has written, and how many bytes stand behind it.

    Args:
        tail: The end of the file.
        whole: It is all of the file. Otherwise the answer is None, too, where the line begins before it.
    """
    end = tail.rfind(b"\n")
    start = tail.rfind(b"\n", 0, max(end, 0))
    if end < 0 or (start < 0 and not whole):
        return None, len(tail)
    return tail[start + 1 : end], len(tail) - end - 1


# -- in --


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of the lines.

    Attributes:
        jobs: Jobs that were added.
        skipped: Jobs that were not: their id is there already, or their dedupe key is held.
        schedules: Schedules that were added; one of the same id stays as it is.
        values: Values that were added, likewise.
        resumed: So many lines were passed over, as an earlier import of the same export had come so far.
        complete: The last line said that this is all. False: the export was cut off, or is still being written.
    """

    jobs: int = 0
    skipped: int = 0
    schedules: int = 0
    values: int = 0
    resumed: int = 0
    complete: bool = False


def import_lines(
    storage: Storage | None,
    lines: Iterable[bytes],
    *,
    afresh: bool = False,
    on_lines: Callable[[int, int], object] = lambda _lines, _bytes: None,
) -> Imported:
    """Add what the lines of an export say, a batch in a transaction.

    Args:
        storage: None checks the lines, and does nothing else.
        afresh: Do not go on where an earlier import of the same export stopped, but begin again. Jobs that are still
            there are not added twice; those that have run and are gone are.
        on_lines: Is told after each batch how many lines, and bytes, have come since the last call.

    Raises:
        TransferError: A line is wrong. All lines before it are in the storage.
    """
    return _Import(storage, on_lines).run(lines, afresh=afresh)


class _Import:
    """One run. Lines count as done when the transaction has ended that stored them."""

    def __init__(self, storage: Storage | None, on_lines: Callable[[int, int], object]) -> None:
        self._storage = storage
        self._on_lines = on_lines
        self._name = ""
        self._number = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._done = Imported()

    def run(self, lines: Iterable[bytes], *, afresh: bool) -> Imported:
        rows = iter(lines)
        first = next(rows, b"")
        self._name = ndjson.export_of(first)
        self._count([first])
        if self._storage is not None and not afresh:
            self._pass_over(rows)
        while True:
            batch, things, wrong = self._batch(rows)
            self._store(batch, things)
            if wrong is not None:
                raise TransferError(f"line {self._number + 1}: {wrong}; {self._advice()}", line=self._number + 1)
            if not batch:
                return self._done

    def _pass_over(self, rows: Iterator[bytes]) -> None:
        """Go to where an earlier import of this export stopped."""
        assert self._storage is not None  # noqa: S101 - the caller looked
        kept = self._storage.peek(_SPACE, [self._name]).get(self._name)
        if kept is None:
            return
        line = b""
        while self._number < kept.number and (line := next(rows, b"")):
            self._count([line])
        if self._number < kept.number or self._digest.hexdigest().encode() != kept.data:
            raise TransferError(
                f"an earlier import of this export took {kept.number:,} lines that are not those of this file: it was"
                " changed, or cut. To begin again, import it afresh",
                line=self._number,
            )
        self._done = Imported(resumed=kept.number, complete=ndjson.parsed(line) == "end")

    def _batch(self, rows: Iterator[bytes]) -> tuple[list[bytes], list[Thing], TransferError | None]:
        """The next lines, what they say, and what is wrong with the one behind them."""
        batch: list[bytes] = []
        things: list[Thing] = []
        size = 0
        ended = self._done.complete
        while len(batch) < _BATCH and size < _BATCH_BYTES and (line := next(rows, b"")):
            try:
                if line.strip():
                    if ended:
                        return batch, things, TransferError("it stands behind the end of the export")
                    things.append(ndjson.parsed(line))
                    ended = things[-1] == "end"
            except TransferError as error:
                return batch, things, error
            batch.append(line)
            size += len(line)
        return batch, things, None

    def _store(self, batch: Sequence[bytes], things: Sequence[Thing]) -> None:
        if not batch:
            return
        jobs = [thing for thing in things if isinstance(thing, JobCopy)]
        if self._storage is None:
            self._add_up(jobs=len(jobs), others=things, complete="end" in things)
            self._count(batch)
            return
        self._count(batch)
        with self._storage.transaction() as transaction:
            stored = sum(transaction.put_jobs(jobs))
            others = [thing for thing in things if not isinstance(thing, JobCopy) and _put(transaction, thing)]
            transaction.put(
                _SPACE, self._name, self._digest.hexdigest().encode(), number=self._number, ttl_ms=_REMEMBERED_MS
            )
        self._add_up(jobs=stored, skipped=len(jobs) - stored, others=others, complete="end" in things)

    def _add_up(self, *, jobs: int, skipped: int = 0, others: Sequence[Thing], complete: bool) -> None:
        done = self._done
        self._done = Imported(
            jobs=done.jobs + jobs,
            skipped=done.skipped + skipped,
            schedules=done.schedules + sum(isinstance(thing, ScheduleRecord) for thing in others),
            values=done.values + sum(isinstance(thing, CarriedValue) for thing in others),
            resumed=done.resumed,
            complete=done.complete or complete,
        )

    def _count(self, batch: Sequence[bytes]) -> None:
        whole = b"".join(batch)
        self._digest.update(whole)
        self._number += len(batch)
        self._on_lines(len(batch), len(whole))

    def _advice(self) -> str:
        if self._storage is None:
            return "nothing was imported"
        return "the lines before it are in: mend it and import the file again, which goes on from there"


def _put(storage: Storage, thing: Thing) -> bool:
    """Store what is no job. False where there is one of its name already."""
    if isinstance(thing, ScheduleRecord):
        if storage.get_schedule(thing.queue, thing.id) is not None:
            return False
        storage.put_schedule(thing)
    elif isinstance(thing, CarriedValue):
        data, number, ttl_ms = thing.value
        return storage.put(thing.space, thing.key, data, number=number, ttl_ms=ttl_ms, if_absent=True)
    elif isinstance(thing, PausedQueue):
        return storage.pause(thing.name, paused=True)
    return True
