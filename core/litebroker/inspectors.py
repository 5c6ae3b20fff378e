# ruff: noqa: ARG002 - what this inspector does not need, another one does
"""What a tool sees of a job, whatever framework it is of, and what each framework's adapter knows of its own.

The file itself says what a job's state is; what its payload means, and what has to be done beside when it is retried
or cancelled, the adapter says: by an `Inspector`, which tools find under the entry points "litebroker.inspectors". An
inspector reads without its framework being installed.
"""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from litebroker.jobs import Attempt, JobError, JobRecord, State
from litebroker.results import Progress
from litebroker.serializer import JSON, RAW
from litebroker.storage import Storage

DIRECT = "direct"
GROUP = "litebroker.inspectors"

# Where nothing is installed, as in a bare checkout, there are no entry points.
_KNOWN = {
    "dramatiq": "litebroker_dramatiq.inspector:DramatiqInspector",
    "huey": "litebroker_huey.inspector:HueyInspector",
    "rq": "litebroker_rq.inspector:RQInspector",
}


def late_names(package: str, needs: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of an adapter's package, which imports a name's module at the first use of the name.

    So tools can import the inspector beside it where the framework is not installed. There, each of the names is a
    ``ModuleNotFoundError`` that says what to install.

    Args:
        needs: The framework, which is also the name of the extra, and of its module, in small letters.
        homes: The module within the package of each name.
    """
    module = needs.lower()

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            message = f"{package} needs {needs}: pip install 'litebroker[{module}]'"
            raise ModuleNotFoundError(message, name=module) from error
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job of any framework. All times are epoch milliseconds.

    Attributes:
        framework: "direct" for jobs of `litebroker.Queue`, else the name of its inspector.
        queue: As the file calls it: "dramatiq:default", "huey:app", "rq:queue:default".
        id: The number of the job in the file as text; of RQ's jobs, RQ's own id.
        stage: The framework's own word for the state, where it says more: "scheduled", "deferred".
        worker: ``host:pid`` of the process that runs it, the framework's name of it, or None.
        alive: Whether that process lives; None where that cannot be told, or there is none.
        record: As it is stored, without its payload; None where a framework keeps it elsewhere.
    """

    framework: str
    queue: str
    id: str
    state: State
    stage: str | None = None
    task: str | None = None
    ref: str | None = None
    priority: int = 0
    created_at_ms: int | None = None
    due_at_ms: int | None = None
    claimed_at_ms: int | None = None
    lease_until_ms: int | None = None
    ended_at_ms: int | None = None
    attempts: int = 0
    max_attempts: int | None = None
    group: str | None = None
    dedupe_key: str | None = None
    error: JobError | None = None
    worker: str | None = None
    alive: bool | None = None
    progress: Progress | None = None
    record: JobRecord | None = field(default=None, repr=False)

    @property
    def since_ms(self) -> int:
        """What its age is counted from: its end, or when it was added."""
        return self.ended_at_ms or self.created_at_ms or 0


class Content(NamedTuple):
    """What a payload holds, as far as it was read.

    Attributes:
        kind: "json"; "text" or "base64", of bytes as they were given; "pickle"; or the name of what else wrote it.
        size: Of the payload, in bytes.
        value: What JSON holds, the text, or the ``repr`` of what was unpickled; None when it was not read.
        note: Why it was not read, or None.
    """

    kind: str
    size: int
    value: Any = None
    note: str | None = None


class TooLate(str):
    """Why a job was left as it is: it has gone on since it was looked at. No error, where all of a kind were meant."""

    __slots__ = ()


class Inspector:
    """Looks at the jobs of one framework, and mends them by its rules. This one is for jobs of `litebroker.Queue`.

    A verb that mends answers for each row None when it is done, or in words why not (a `TooLate`, where somebody else
    was faster).

    Args:
        storage: Where the jobs are.
    """

    framework = DIRECT

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def owns(self, queue: str) -> bool:
        """Whether a queue of this name can be this framework's only."""
        return False

    def why_not_in(self, row: JobRow, queue: str) -> str | None:
        """Why its workers would not find a job of it in a queue of this name; None where they would."""
        return None

    def why_not_alone(self, queue: str) -> str | None:
        """Why its jobs in this queue are more than what the engine keeps of them, and what to do with them instead.

        None where a tool may copy or delete a job as the engine has it.
        """
        return None

    def row(self, record: JobRecord) -> JobRow:
        """A job of the engine's as a row."""
        return row_of(record, self.framework)

    # -- what it keeps elsewhere than in the engine's queues --

    def shelves(self) -> Collection[str]:
        """The queues of which it keeps jobs elsewhere."""
        return ()

    def page(self, queue: str, state: State, *, limit: int, after: Any) -> list[tuple[JobRow, Any]]:
        """Jobs of a queue that it keeps elsewhere, each with what to give as ``after`` to go on behind it.

        That goes into cursors, as JSON. Fewer than ``limit`` are the last.

        Raises:
            ValueError: ``after`` is nothing that it has given: it came from outside.
        """
        return []

    def find(self, job_id: str) -> list[JobRow]:
        """The jobs of this id that it keeps elsewhere."""
        return []

    # -- looking at one --

    def content(self, row: JobRow, *, unpickle: bool = False) -> Content:
        """What its payload holds. Nothing is unpickled unless asked for: a pickle runs what it likes."""
        record = self.stored(row)
        if record is None:
            return Content("nothing", 0, note="it is gone")
        return self.read(record.payload, record.encoding, unpickle=unpickle)

    def read(self, payload: bytes, encoding: str | None, *, unpickle: bool) -> Content:
        """What a payload of the engine's holds."""
        if encoding is None:
            return json_content(payload)
        if encoding == RAW.name:
            try:
                return Content("text", len(payload), payload.decode())
            except UnicodeDecodeError:
                return Content("base64", len(payload), base64.b64encode(payload).decode())
        if unpickle:
            return unpickled(payload)
        return Content(encoding, len(payload), note=f"written by the serializer {encoding!r}, which only its queue has")

    def facts(self, row: JobRow) -> Mapping[str, str]:
        """What else there is to say of it, by name."""
        return {} if row.record is None else dict(row.record.headers)

    def attempts(self, row: JobRow) -> Sequence[Attempt]:
        """Its attempts that have ended, oldest first."""
        return () if row.record is None else row.record.history

    def stored(self, row: JobRow) -> JobRecord | None:
        """The job as it is now, with its payload."""
        return self.storage.get(int(row.id))

    # -- mending --

    def retry(self, rows: Sequence[JobRow], *, queue: str | None = None) -> list[str | None]:
        """Let failed jobs run again, in another queue if one is given."""
        done = self.storage.retry(_numbers(rows), queue=queue, payloads=self.fresh_payloads(rows))
        return self._answers(rows, done, {State.FAILED}, queue=queue)

    def fresh_payloads(self, rows: Sequence[JobRow]) -> Mapping[int, bytes]:
        """With which payload each goes on; those that are missing keep theirs."""
        return {}

    def cancel(self, rows: Sequence[JobRow]) -> list[str | None]:
        """End pending jobs."""
        return self._answers(rows, self.storage.cancel(_numbers(rows)), {State.PENDING})

    def remove(self, rows: Sequence[JobRow]) -> list[str | None]:
        """Delete jobs that are not active."""
        return self._answers(rows, self.storage.remove(_numbers(rows)), set(State) - {State.ACTIVE})

    def reschedule(self, rows: Sequence[JobRow], due_at_ms: int) -> list[str | None]:
        """Make pending jobs due then."""
        with self.storage.transaction() as tx:
            done = [tx.reschedule(number, due_at_ms=due_at_ms) for number in _numbers(rows)]
        return self._answers(rows, done, {State.PENDING})

    def move(self, rows: Sequence[JobRow], queue: str) -> list[str | None]:
        """Let pending jobs wait in another queue."""
        done = self.storage.move_jobs(_numbers(rows), queue)
        return self._answers(rows, done, {State.PENDING}, queue=queue)

    def _answers(
        self, rows: Sequence[JobRow], done: Sequence[bool], wanted: set[State], *, queue: str | None = None
    ) -> list[str | None]:
        return [None if is_done else self._why_not(row, wanted, queue) for row, is_done in zip(rows, done, strict=True)]

    def _why_not(self, row: JobRow, wanted: set[State], queue: str | None) -> str:
        now = self.storage.get(int(row.id))
        if now is None:
            return TooLate("it is gone")
        if now.state not in wanted:
            return TooLate(f"it is {now.state}")
        if now.dedupe_key is not None:
            return f"its dedupe key {now.dedupe_key!r} is held in queue {queue or now.queue!r}"
        return TooLate("it was changed at this moment; try again")


def row_of(record: JobRecord, framework: str) -> JobRow:
    """A job of the engine, as it is stored there."""
    return JobRow(
        framework=framework,
        queue=record.queue,
        id=str(record.id),
        state=record.state,
        task=record.task,
        ref=record.ref,
        priority=record.priority,
        created_at_ms=record.created_at_ms,
        due_at_ms=record.due_at_ms,
        claimed_at_ms=record.claimed_at_ms,
        lease_until_ms=record.lease_until_ms,
        ended_at_ms=record.ended_at_ms,
        attempts=record.attempts,
        max_attempts=record.max_attempts,
        group=record.group,
        dedupe_key=record.dedupe_key,
        error=record.error,
        record=record._replace(payload=b""),
    )


def json_content(payload: bytes) -> Content:
    """What a payload of JSON holds; a note, when it is none."""
    try:
        return Content("json", len(payload), JSON.loads(payload))
    except (ValueError, RecursionError) as error:
        return Content("json", len(payload), note=f"it is not JSON: {error}")


def unpickled(payload: bytes) -> Content:
    """What a pickle holds, as text. It runs what the pickle says: only for those who trust who wrote it.

    Classes of the application are found from the current folder, as by its workers.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return Content("pickle", len(payload), repr(pickle.loads(payload)))  # noqa: S301 - it was asked for
    except Exception as error:  # noqa: BLE001 - unpickling may raise anything
        return Content("pickle", len(payload), note=f"it cannot be unpickled here: {type(error).__name__}: {error}")


def load_inspectors(storage: Storage) -> dict[str, Inspector]:
    """An inspector for each framework whose adapter is here, and the direct one, by framework."""
    from importlib.metadata import entry_points  # late: it takes a while, and most programs need no tools

    found: dict[str, Inspector] = {DIRECT: Inspector(storage)}
    places: dict[str, Callable[[], Any]] = {name: _importer(place) for name, place in _KNOWN.items()}
    for entry in entry_points(group=GROUP):
        places[entry.name] = entry.load
    for load in places.values():
        try:
            make = cast("Callable[[Storage], Inspector]", load())
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("litebroker_"):
                raise
            continue  # The adapter is left out of this installation.
        inspector = make(storage)
        found[inspector.framework] = inspector
    return found


def _importer(place: str) -> Callable[[], Any]:
    module, _, name = place.partition(":")
    return lambda: getattr(import_module(module), name)


def _numbers(rows: Iterable[JobRow]) -> list[int]:
    return [int(row.id) for row in rows]
