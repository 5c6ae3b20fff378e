"""RQ's jobs, as tools show and mend them.

What is read comes from the tables alone: no job is unpickled, and rq need not be installed. What is changed goes
through rq's own methods, so that its registries, dependents and callbacks agree.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NamedTuple, cast

from litebroker import (
    Attempt,
    Content,
    Inspector,
    JobError,
    JobRecord,
    JobRow,
    NotInstalledError,
    SQLiteStorage,
    State,
    Storage,
    TooLate,
    json_content,
)
from litebroker_rq import processes

# One transaction changes so many jobs: each takes RQ some milliseconds, and others wait meanwhile.
_BITE = 20
_LARGEST_PAYLOAD = 64 * 1024 * 1024


class _Registry(NamedTuple):
    """A sorted set of RQ's, and what its jobs are to a tool."""

    name: str
    kind: str
    state: State
    stage: str | None = None


_REGISTRIES = (
    _Registry("started", ":wip:", State.ACTIVE),
    _Registry("scheduled", ":scheduled:", State.PENDING, "scheduled"),
    _Registry("deferred", ":deferred:", State.PENDING, "deferred"),
    _Registry("finished", ":finished:", State.COMPLETED),
    _Registry("failed", ":failed:", State.FAILED),
    _Registry("canceled", ":canceled:", State.CANCELLED),
)
_ENDED = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})
# The status of a job's hash, where it is in no registry that tells.
_BY_STATUS = {
    "queued": (State.PENDING, None),
    "created": (State.PENDING, "created"),
    "ready": (State.PENDING, "ready"),
    "stopped": (State.FAILED, "stopped"),
    **{registry.name: (registry.state, registry.stage) for registry in _REGISTRIES},
}

_IS_THERE = "select 1 from sqlite_master where type = 'table' and name = 'litebroker_rq_keys'"
_HASH = (
    "select id, value from litebroker_rq_keys"
    " where key = ? and kind = 'hash' and (expires_at_ms is null or expires_at_ms > ?)"
)
_FIELD = "select value from litebroker_rq_fields where key_id = ? and field = ?"
_MEMBERS = (
    "select m.member from litebroker_rq_keys k join litebroker_rq_members m on m.key_id = k.id"
    " where k.key = ? and k.kind = 'set'"
)
_KEY = "select id from litebroker_rq_keys where key = ?"
# The latest end first, as in the engine; what waits, and what runs, by its time.
_ENTRIES = {
    False: (
        "select member, score from litebroker_rq_members where key_id = ? and score is not null"
        " and (score, member) > (?, ?) order by score, member limit +?"
    ),
    True: (
        "select member, score from litebroker_rq_members where key_id = ? and score is not null"
        " and (score, member) < (?, ?) order by score desc, member desc limit +?"
    ),
}
_RESULTS = (
    "select e.ms, e.fields from litebroker_rq_keys k join litebroker_rq_entries e on e.key_id = k.id"
    " where k.key = ? order by e.ms, e.seq"
)
_SCORE = (
    "select m.score from litebroker_rq_keys k join litebroker_rq_members m on m.key_id = k.id"
    " where k.key = ? and m.member = ?"
)
_RUN = "select process from litebroker_rq_runs where job_key = ?"
_SHOWN = ("timeout", "ttl", "result_ttl", "failure_ttl", "retries_left", "dependency_id", "worker_name", "group_id")


class RQInspector(Inspector):
    """Jobs that wait are in the engine's queues ("rq:queue:<name>"), all others in RQ's registries.

    Args:
        prefix: What RQ's keys begin with; None is as RQ has it, from RQ_KEY_PREFIX.
    """

    framework = "rq"

    def __init__(self, storage: Storage, *, prefix: str | None = None) -> None:
        super().__init__(storage)
        self._prefix = os.environ.get("RQ_KEY_PREFIX", "rq") if prefix is None else prefix
        self._is_there = False

    def owns(self, queue: str) -> bool:
        return queue.startswith(self._queue_key(""))

    def why_not_in(self, row: JobRow, queue: str) -> str | None:
        return None if self.owns(queue) else f"rq has no queue {queue!r}; its queues are called like {row.queue!r}"

    def why_not_alone(self, queue: str) -> str | None:
        return (
            f"queue {queue!r} is RQ's, which keeps most of a job in tables of its own: `litebroker backup` copies all"
            f" of it, and `litebroker rq empty {self._name_of(queue)}` deletes its jobs"
        )

    def row(self, record: JobRecord) -> JobRow:
        row = super().row(record)
        return replace(row, id=record.ref or row.id)

    # -- what is in RQ's own tables --

    def shelves(self) -> Collection[str]:
        found = self._select(_MEMBERS, self._key(":queues"))
        return [bytes(member).decode() for (member,) in found]

    def page(self, queue: str, state: State, *, limit: int, after: Any) -> list[tuple[JobRow, Any]]:
        registries = [registry for registry in _REGISTRIES if registry.state is state]
        start = None
        if after is not None:
            try:
                name, score, member = after
                start = (float(score), str(member).encode("latin-1"))
            except (TypeError, ValueError):
                raise ValueError(f"{after!r} is no place in a registry of RQ") from None
            while registries and registries[0].name != name:
                registries.pop(0)
        rows: list[tuple[JobRow, Any]] = []
        for registry in registries:
            # Entries of jobs that are gone are passed over, and do not make a page look like the last.
            while len(rows) < limit:
                wanted = limit - len(rows)
                entries = self._entries(queue, registry, wanted, start)
                for member, score in entries:
                    row = self._row_of_entry(queue, registry, member, score)
                    if row is not None:
                        rows.append((row, [registry.name, score, member.decode("latin-1")]))
                if len(entries) < wanted:
                    break
                start = (entries[-1][1], entries[-1][0])
            start = None
        return rows

    def _entries(
        self, queue: str, registry: _Registry, limit: int, start: tuple[float, bytes] | None
    ) -> list[tuple[bytes, float]]:
        found = self._select(_KEY, self._registry_key(queue, registry))
        if not found:
            return []
        is_ended = registry.state in _ENDED
        score, member = start or ((float("inf") if is_ended else float("-inf")), b"")
        entries = self._select(_ENTRIES[is_ended], found[0][0], score, member, limit)
        return [(bytes(member), float(score)) for member, score in entries]

    def _row_of_entry(self, queue: str, registry: _Registry, member: bytes, score: float) -> JobRow | None:
        ref = member.decode("utf-8", "replace")
        job = self._hash(ref)
        if job is None and registry.state is State.ACTIVE:  # <job id>:<execution id>
            ref = ref.rpartition(":")[0]
            job = self._hash(ref)
        if job is None:
            return None
        due_at_ms = round(score * 1000) if registry.name == "scheduled" else None
        return self._row(ref, job, queue, (registry.state, registry.stage), due_at_ms)

    def find(self, job_id: str) -> list[JobRow]:
        job = self._hash(job_id)
        if job is None:
            return []
        status = job.text("status") or "queued"
        state, stage = _BY_STATUS.get(status, (State.PENDING, status))
        queue = self._queue_key(job.text("origin"))
        if status == "queued":
            waiting = self.storage.find(queue, ref=job_id) if self.owns(queue) else []
            if waiting:
                return [self.row(record) for record in waiting[:1]]
        due_at_ms = None
        if status == "scheduled":
            (registry,) = (registry for registry in _REGISTRIES if registry.name == "scheduled")
            score = self._select(_SCORE, self._registry_key(queue, registry), job_id.encode())
            due_at_ms = round(score[0][0] * 1000) if score else None
        return [self._row(job_id, job, queue, (state, stage), due_at_ms)]

    def _row(
        self, ref: str, job: _Hash, queue: str, standing: tuple[State, str | None], due_at_ms: int | None
    ) -> JobRow:
        state, stage = standing
        results = self._results(ref)
        worker, alive = self._worker(ref, job) if state is State.ACTIVE else (None, None)
        return JobRow(
            framework=self.framework,
            queue=queue,
            id=ref,
            ref=ref,
            state=state,
            stage=stage,
            task=job.words("description") or None,
            priority=int(job.text("litebroker_priority") or 0),
            created_at_ms=_time_ms(job.text("created_at")),
            due_at_ms=_time_ms(job.text("enqueued_at")) if due_at_ms is None else due_at_ms,
            claimed_at_ms=_time_ms(job.text("started_at")),
            ended_at_ms=_time_ms(job.text("ended_at")),
            attempts=len(results) + (state is State.ACTIVE),
            error=self._error(job, results) if state in {State.FAILED, State.PENDING} else None,
            worker=worker,
            alive=alive,
        )

    def _worker(self, ref: str, job: _Hash) -> tuple[str | None, bool | None]:
        """Who runs it: ``host:pid``, or RQ's name of it; and whether that process lives."""
        name = job.text("worker_name")
        if not name:
            return None, None
        found = self._select(_RUN, self._key(f":job:{ref}"))
        alive = processes.is_alive(found[0][0]) if found else None
        worker = self._read_hash(self._key(f":worker:{name}"))
        host, pid = ("", "") if worker is None else (worker.words("hostname"), worker.text("pid"))
        return (f"{host}:{pid}" if host and pid else name), alive

    def _results(self, ref: str) -> list[tuple[int, dict[str, str]]]:
        found = []
        for at_ms, data in self._select(_RESULTS, self._key(f":results:{ref}")):
            fields = json.loads(data)
            found.append((at_ms, dict(zip(fields[::2], fields[1::2], strict=False))))
        return found

    def _error(self, job: _Hash, results: Sequence[tuple[int, dict[str, str]]]) -> JobError | None:
        """Of the newest result, or the one that RQ before 1.12 kept with the job."""
        if results:
            return _job_error(results[-1][1].get("exc_string", ""))
        compressed = job.field("exc_info")
        return None if not compressed else _as_error(_inflated(compressed))

    # -- looking at one --

    def content(self, row: JobRow, *, unpickle: bool = False) -> Content:
        job = self._hash(row.id)
        if job is None:
            return Content("nothing", 0, note="it is gone")
        return self.read(_inflated(job.field("data")), "rq", unpickle=unpickle)

    def read(self, payload: bytes, encoding: str | None, *, unpickle: bool) -> Content:
        # [function, instance, args, kwargs], by RQ's JSONSerializer, or as a pickle.
        if payload[:1] in {b"[", b"{", b'"'}:
            return json_content(payload)
        if unpickle:
            return super().read(payload, encoding, unpickle=True)
        return Content("pickle", len(payload), note="a pickle, which runs what it likes when it is read")

    def facts(self, row: JobRow) -> Mapping[str, str]:
        job = self._hash(row.id)
        if job is None:
            return {}
        facts = {name: text for name in _SHOWN if (text := job.words(name))}
        if meta := job.field("meta"):
            facts["meta"] = meta.decode("utf-8", "replace") if meta[:1] == b"{" else f"a pickle of {len(meta)} bytes"
        return facts

    def attempts(self, row: JobRow) -> Sequence[Attempt]:
        attempts = []
        for number, (at_ms, result) in enumerate(self._results(row.id), 1):
            error = _job_error(result.get("exc_string", ""))
            # RQ keeps no start of earlier executions.
            started_at_ms = _time_ms(result.get("execution_started_at")) or at_ms
            line = None if error is None else f"{error.type}: {error.message}"
            outcome = "completed" if error is None else "failed"
            attempts.append(Attempt(number, started_at_ms, at_ms, result.get("worker_name", ""), outcome, line))
        return attempts

    # -- mending, by rq's own rules --

    def retry(self, rows: Sequence[JobRow], *, queue: str | None = None) -> list[str | None]:
        from_failed = {"failed", "stopped"}

        def requeue(queue_of_job: Any, job: Any) -> None:
            if queue is not None:
                job.origin = self._name_of(queue)
                job.save()
            queue_of_job.failed_job_registry.requeue(job)

        return self._change(rows, from_failed, requeue)

    def cancel(self, rows: Sequence[JobRow]) -> list[str | None]:
        return self._change(rows, {"queued", "deferred", "scheduled"}, lambda _, job: job.cancel())

    def remove(self, rows: Sequence[JobRow]) -> list[str | None]:
        idle = {"created", "queued", "deferred", "scheduled", "finished", "failed", "stopped", "canceled", "ready"}
        return self._change(rows, idle, lambda _, job: job.delete())

    def reschedule(self, rows: Sequence[JobRow], due_at_ms: int) -> list[str | None]:
        due = datetime.fromtimestamp(due_at_ms / 1000, timezone.utc)

        def schedule(queue: Any, job: Any) -> None:
            queue.remove(job)
            job.set_status("scheduled")  # which releases of RQ before 2 leave to the caller
            queue.schedule_job(job, due)

        return self._change(rows, {"queued", "scheduled"}, schedule)

    def move(self, rows: Sequence[JobRow], queue: str) -> list[str | None]:
        name = self._name_of(queue)

        def move(source: Any, job: Any) -> None:
            if source.name == name:
                return
            target = self._queue(name)
            job.origin = name
            if _status(job) == "scheduled":
                due = source.scheduled_job_registry.get_scheduled_time(job)
                source.scheduled_job_registry.remove(job)
                target.schedule_job(job, due)
            else:
                source.remove(job)
                target.enqueue_job(job)

        return self._change(rows, {"queued", "scheduled"}, move)

    def _change(
        self, rows: Sequence[JobRow], states: set[str], change: Callable[[Any, Any], object]
    ) -> list[str | None]:
        """Do it to each job that is in one of these states, a few in a transaction: no worker takes one in between."""
        try:
            import rq  # noqa: F401 - is it here?

            from litebroker_rq.database import opened
        except ModuleNotFoundError as error:
            raise NotInstalledError(
                f"{error.name} is not installed, and RQ's jobs are changed by its rules: pip install 'litebroker[rq]'"
            ) from error
        database = opened(self.storage.location)
        queues: dict[str, Any] = {}
        answers: list[str | None] = []
        for start in range(0, len(rows), _BITE):
            with database.writing(lasting=True):
                for row in rows[start : start + _BITE]:
                    name = self._name_of(row.queue)
                    if name not in queues:
                        queues[name] = self._queue(name)
                    answers.append(_changed(queues[name], row.id, states, change))
        return answers

    def _queue(self, name: str) -> Any:
        import rq

        from litebroker_rq.client import SQLiteConnection

        return rq.Queue(name, connection=SQLiteConnection(self.storage.location), serializer=cast("Any", _Sealed))

    # -- names and tables --

    def _key(self, rest: str) -> bytes:
        return (self._prefix + rest).encode()

    def _queue_key(self, name: str) -> str:
        return f"{self._prefix}:queue:{name}"

    def _name_of(self, queue: str) -> str:
        return queue.removeprefix(self._queue_key(""))

    def _registry_key(self, queue: str, registry: _Registry) -> bytes:
        return self._key(registry.kind + self._name_of(queue))

    def _hash(self, ref: str) -> _Hash | None:
        return self._read_hash(self._key(f":job:{ref}"))

    def _read_hash(self, key: bytes) -> _Hash | None:
        found = self._select(_HASH, key, self.storage.clock.now_ms())
        return _Hash(self, *found[0]) if found else None

    def _select(self, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        """All rows; none, where this file has never seen an RQ."""
        if not isinstance(self.storage, SQLiteStorage):
            return []
        if not self._is_there:
            self._is_there = bool(self.storage.execute(_IS_THERE))
        return list(self.storage.execute(statement, params)) if self._is_there else []

    def large_field(self, key_id: int, name: str) -> bytes:
        """A value that lies in a row of its own."""
        found = self._select(_FIELD, key_id, name)
        return bytes(found[0][0]) if found else b""


class _Hash:
    """A hash's fields. Each byte of a value is one character, and a large value lies elsewhere."""

    def __init__(self, inspector: RQInspector, key_id: int, value: str) -> None:
        self._inspector = inspector
        self._id = key_id
        self._fields: dict[str, Any] = json.loads(value)

    def field(self, name: str) -> bytes:
        """Its bytes; b"" when it has none."""
        value = self._fields.get(name, "")
        return value.encode("latin-1") if isinstance(value, str) else self._inspector.large_field(self._id, name)

    def text(self, name: str) -> str:
        """A short value of ASCII."""
        value = self._fields.get(name)
        return value if isinstance(value, str) else ""

    def words(self, name: str) -> str:
        """A value for people."""
        return self.field(name).decode("utf-8", "replace")


class _Kept(dict[str, Any]):
    """What a job has beside its arguments, as it lies in the file."""

    data = b""


class _Sealed:
    """Stands in for a job's serializer, so that nothing is unpickled to change a job, and nothing of it is lost."""

    @staticmethod
    def loads(data: bytes) -> _Kept:
        kept = _Kept({"": True} if data else {})
        kept.data = data
        return kept

    @staticmethod
    def dumps(value: Any, *_: Any) -> bytes:
        if isinstance(value, _Kept):
            return value.data
        raise TypeError("a job's arguments are not changed here")


def _changed(queue: Any, job_id: str, states: set[str], change: Callable[[Any, Any], object]) -> str | None:
    from rq.exceptions import InvalidJobOperation, NoSuchJobError

    try:
        job = queue.job_class.fetch(job_id, connection=queue.connection, serializer=_Sealed)
        status = _status(job)
        if status not in states:
            return TooLate(f"it is {status}")
        change(queue, job)
    except NoSuchJobError:
        return TooLate("it is gone")
    except InvalidJobOperation as error:
        return str(error) or "rq refuses it in its state"
    return None


def _status(job: Any) -> str:
    status = job.get_status()
    return str(getattr(status, "value", status))


def _inflated(data: bytes) -> bytes:
    """What zlib has packed; as it is, when it has not."""
    try:
        return zlib.decompressobj().decompress(data, _LARGEST_PAYLOAD)
    except zlib.error:
        return data


def _job_error(exc_string: str) -> JobError | None:
    """Of a result's traceback, as RQ has packed it."""
    if not exc_string:
        return None
    try:
        packed = base64.b64decode(exc_string)
    except ValueError:
        return None
    return _as_error(_inflated(packed))


def _as_error(traceback: bytes) -> JobError | None:
    stack = traceback.decode("utf-8", "replace").strip()
    if not stack:
        return None
    kind, colon, message = stack.splitlines()[-1].partition(": ")
    return JobError("handler", kind if colon else "", message if colon else kind, stack)


def _time_ms(text: str | None) -> int | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return round((found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp() * 1000)
