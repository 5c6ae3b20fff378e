"""What holds for all jobs of a queue: how they are encoded, leased, retried and kept, and who is told of errors."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any, Literal

from litebroker.arguments import NewJob, duration_ms, job_spec, queue_name
from litebroker.backoff import Backoff
from litebroker.errors import LeaseLostError, LitebrokerError, PayloadError, PayloadTooLargeError, StorageError
from litebroker.failures import job_error
from litebroker.jobs import KEEP_RESULT, Added, JobError, JobRecord, JobSpec, Keep, State
from litebroker.observers import Observer, Outcome, adding, tell
from litebroker.results import keep, kept_for_ms, pack_failure, pack_refusal, pack_value
from litebroker.schedules import plan
from litebroker.serializer import JSON, RAW, Serializer
from litebroker.storage import Storage

ErrorKind = Literal[
    "claim",
    "cleanup",
    "schedule",
    "heartbeat",
    "progress",
    "complete",
    "fail",
    "parse",
    "handler",
    "result",
    "timeout",
    "crashed",
    "process",
    "lapsed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorContext:
    """Where an error that `on_error` is told of came up.

    Attributes:
        kind: What was being done. "handler": the handler raised. "parse": a payload could not be read. "heartbeat",
            "complete" and "fail": the storage refused, or the lease was lost. "claim", "schedule", "progress" and
            "cleanup": the storage refused, and it is tried again. "result": what the handler returned cannot be kept;
            the job is completed all the same. Of workers with child processes, "timeout": the handler took too long,
            and its process was ended; "crashed": the process died; "process": one died without a job, or does not
            start, and it is tried again. "lapsed": a job became a dead letter, since its last worker vanished.
        job_id: The job that it is about, or None.
        attempt: Which attempt of the job it was, or None.
        max_attempts: How many it may have; None is without limit, or not about a job.
        task: What the job does, or None.
        retry_in: Seconds until the next attempt, where one follows.
        dead: No attempt follows: the job becomes a dead letter.
    """

    kind: ErrorKind
    queue: str
    job_id: int | None = None
    attempt: int | None = None
    max_attempts: int | None = None
    task: str | None = None
    retry_in: float | None = None
    dead: bool = False

    @classmethod
    def of(
        cls, kind: ErrorKind, record: JobRecord, *, wait_ms: int | None = None, settled: bool = True
    ) -> ErrorContext:
        """About a job.

        Args:
            wait_ms: How long it is to wait for its next attempt; None when it is to have none.
            settled: What becomes of it is not decided by this error.
        """
        spent = record.max_attempts is not None and record.attempts >= record.max_attempts
        dead = not settled and (wait_ms is None or spent)
        return cls(
            kind=kind,
            queue=record.queue,
            job_id=record.id,
            attempt=record.attempts,
            max_attempts=record.max_attempts,
            task=record.task,
            retry_in=None if settled or dead or wait_ms is None else wait_ms / 1000,
            dead=dead,
        )


OnError = Callable[[BaseException, ErrorContext], object]

# In half the time that JobSpec(...) takes.
_SPEC: Callable[[tuple[Any, ...]], JobSpec] = functools.partial(tuple.__new__, JobSpec)

_logger = logging.getLogger("litebroker")
# An error of the storage that repeats is told once in this time.
_QUIET_S = 60.0


def log_error(error: BaseException, context: ErrorContext) -> None:
    """The `on_error` that applies when none is given: one record to the logger "litebroker", without the payload.

    The record has the attributes ``queue``, ``job_id``, ``attempt`` and ``task``.
    """
    extra = {"queue": context.queue, "job_id": context.job_id, "attempt": context.attempt, "task": context.task}
    if context.job_id is None:
        _logger.error("queue %r, %s: %s: %s", context.queue, context.kind, type(error).__name__, error, extra=extra)
    else:
        _logger.error(
            "job %d of queue %r, attempt %s, %s: %s: %s%s",
            context.job_id,
            context.queue,
            context.attempt,
            context.kind,
            type(error).__name__,
            error,
            _outlook(context),
            exc_info=error if context.kind in {"handler", "parse"} else None,
            extra=extra,
        )


def _outlook(context: ErrorContext) -> str:
    if context.dead:
        return f"; no attempt is left: a dead letter after {context.attempt}"
    if context.retry_in is None:
        return ""
    limit = "" if context.max_attempts is None else f" of {context.max_attempts}"
    return f"; attempt {(context.attempt or 0) + 1}{limit} follows in {context.retry_in:.3g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The settings of a queue, and what is done by them alike for single messages and in workers."""

    queue: str
    serializer: Serializer
    max_payload_bytes: int
    attempts: int | None
    backoff: Backoff
    lease_ms: int
    keep: Mapping[State, Keep]
    on_error: OnError
    results_ms: int | None = None
    observers: list[Observer] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.backoff, Backoff):
            raise TypeError(f"backoff={self.backoff!r}: give a Backoff, such as Backoff.fixed(60)")
        if not callable(self.on_error):
            raise TypeError(f"on_error={self.on_error!r} cannot be called")
        name = getattr(self.serializer, "name", None)
        if not isinstance(name, str) or not name:
            raise TypeError(f"serializer={self.serializer!r} has no name, which its jobs are to remember")
        if name in {JSON.name, RAW.name} and self.serializer not in {JSON, RAW}:
            raise ValueError(f"serializer={self.serializer!r} is named {name!r}, which is taken: give it another name")

    @property
    def keeps_completed(self) -> bool:
        return self.keep[State.COMPLETED].count != 0

    def encode(self, data: Any) -> bytes:
        """The payload. Raises `PayloadError` where it would not come back as it is, or is over the limit."""
        payload = self.serializer.dumps(data)
        if type(payload) is not bytes:
            raise TypeError(f"serializer {self.serializer.name!r} gave {type(payload).__name__}, and has to give bytes")
        if len(payload) > self.max_payload_bytes:
            raise PayloadTooLargeError(len(payload), self.max_payload_bytes)
        return payload

    @property
    def encoding(self) -> str | None:
        """The serializer, as jobs name it."""
        return None if self.serializer.name == JSON.name else self.serializer.name

    def decode(self, payload: bytes, encoding: str | None) -> Any:
        """What was given to `add`. Raises whatever the serializer raises."""
        if encoding == self.encoding:
            return self.serializer.loads(payload)
        # A tool may have added it as JSON, or the queue may have had another serializer before.
        if encoding is None:
            return JSON.loads(payload)
        if encoding == RAW.name:
            return RAW.loads(payload)
        raise PayloadError(
            f"the payload was written by serializer {encoding!r}; this queue has {self.serializer.name!r}"
        )

    def spec(self, data: Any) -> JobSpec:
        """A payload, as a storage takes it."""
        return self._without_options(self.encode(data))

    def _without_options(self, payload: bytes) -> JobSpec:
        headers = {KEEP_RESULT: str(self.results_ms)} if self.results_ms else None
        return JobSpec(self.queue, payload, self.encoding, max_attempts=self.attempts, headers=headers)

    def specs(self, jobs: Iterable[Any]) -> list[JobSpec]:
        """Payloads, or `NewJob`s, as a storage takes them; all are checked before any is given back."""
        if isinstance(jobs, str | bytes | bytearray | Mapping):
            raise TypeError(f"give a list of payloads or NewJob objects, not one {type(jobs).__name__}")
        specs: list[JobSpec] = []
        jobs = list(jobs)
        encode = self.encode
        queue, _, *rest = self._without_options(b"")
        for position, job in enumerate(jobs):
            try:
                specs.append(self._spec(job) if isinstance(job, NewJob) else _SPEC((queue, encode(job), *rest)))
            except (TypeError, ValueError) as error:
                if len(jobs) > 1:
                    error.args = (f"at position {position}: {error}", *error.args[1:])
                raise
        return specs

    def _spec(self, job: NewJob[Any]) -> JobSpec:
        return job_spec(
            self.queue if job.queue is None else queue_name(job.queue),
            self.encode(job.data),
            self.encoding,
            attempts=self.attempts if job.attempts is None else job.attempts,
            delay=job.delay,
            run_at=job.run_at,
            priority=job.priority,
            dedupe_key=job.dedupe_key,
            dedupe_until=job.dedupe_until,
            group=job.group,
            keep_result_ms=self.keep_result_ms(job.keep_result),
            headers=job.headers,
            task=job.task,
            ref=job.ref,
        )

    def add(self, storage: Storage, specs: Sequence[JobSpec]) -> tuple[Sequence[JobSpec], list[Added]]:
        """Store the jobs; the specs as they were stored, and what became of each."""
        if not self.observers:
            return specs, storage.add(specs)
        with adding(self.observers, specs) as observed:
            added = storage.add(observed)
            tell(self.observers, lambda observer: observer.added(observed, added))
        return observed, added

    def keep_result_ms(self, keep_result: float | timedelta | None) -> int | None:
        """How long the result of a new job is to be kept; 0 or None when it is not."""
        return self.results_ms if keep_result is None else duration_ms("keep_result", keep_result)

    def result(self, record: JobRecord, value: Any) -> bytes | None:
        """What the job has come to, as it is kept; None when it is not to be. Raises as `encode`."""
        if not record.headers or kept_for_ms(record.headers) is None:
            return None
        # None, too, is a result where the serializer takes bytes only.
        return pack_value(b"null", None) if value is None else pack_value(self.encode(value), self.encoding)

    def results(
        self, records: Sequence[JobRecord], returned: object, *, in_batches: bool
    ) -> list[tuple[bytes | None, Exception | None]]:
        """The same for each of the jobs that a handler was called with, by what it returned.

        What cannot be kept is no reason to run the job again, whose work is done: the result says so then, and the
        second of the pair is why.
        """
        if not in_batches:
            values: Sequence[object] = [returned]
        elif returned is None:
            values = [None] * len(records)
        elif isinstance(returned, list | tuple) and len(returned) == len(records):
            values = returned
        else:
            what = f"{len(returned)} results" if isinstance(returned, list | tuple) else f"a {type(returned).__name__}"
            error = TypeError(f"the handler was given {len(records)} jobs, and gave {what}: return a list of as many")
            refused = pack_refusal(str(error))
            return [(None, None) if kept_for_ms(it.headers) is None else (refused, error) for it in records]
        results: list[tuple[bytes | None, Exception | None]] = []
        for record, value in zip(records, values, strict=True):
            try:
                results.append((self.result(record, value), None))
            except Exception as error:  # noqa: BLE001 (whatever the serializer raises)
                results.append((pack_refusal(f"{type(error).__name__}: {error}"), error))
        return results

    def complete(
        self, storage: Storage, record: JobRecord, then: Sequence[JobSpec] = (), result: bytes | None = None
    ) -> bool:
        """End the job well, keep its result and add what follows: all or nothing. False when the lease was lost."""
        if not then and result is None:
            return storage.complete([record.lease], keep=self.keeps_completed)[0]
        with storage.transaction() as transaction:
            done = transaction.complete([record.lease], keep=self.keeps_completed)[0]
            if done and then:
                self.add(transaction, then)
            if done and result is not None:
                keep(transaction, record, result)
        return done

    def fail(self, storage: Storage, record: JobRecord, error: JobError, retry_in_ms: int | None) -> State | None:
        """End the attempt badly, and keep that as the result when it was the last. None when the lease was lost."""
        if not record.headers or kept_for_ms(record.headers) is None:
            return storage.fail(record.lease, error, retry_in_ms=retry_in_ms)
        with storage.transaction() as transaction:
            state = transaction.fail(record.lease, error, retry_in_ms=retry_in_ms)
            if state is State.FAILED:
                keep(transaction, record, pack_failure(error))
        return state

    def wait_ms(
        self, record: JobRecord, *, retry_in: float | timedelta | None = None, retry: bool = True
    ) -> int | None:
        """How long the job waits for its next attempt; None when it gets none."""
        if retry_in is not None and not retry:
            raise ValueError(f"retry_in={retry_in!r} and retry=False exclude each other: give one")
        if not retry:
            return None
        if retry_in is not None:
            return duration_ms("retry_in", retry_in)
        return self.backoff.delay_ms(max(record.attempts, 1), random.random)

    def fire_schedules(self, storage: Storage, *, everything: bool = False) -> list[LitebrokerError]:
        """Add the jobs of the ticks that have come. Answers what went wrong with single schedules.

        ``everything`` mends those, too, that a wall clock gone wrong has moved out of reach.
        """
        errors: list[LitebrokerError] = []
        now_ms = storage.clock.now_ms()
        due = storage.due_schedules([self.queue])
        for record in storage.list_schedules(self.queue) if everything else due:
            try:
                fire, next_at_ms = plan(record.spec, record.next_at_ms, record.last_at_ms, now_ms)
                # Those of a paused queue are not among the due.
                if record in due if fire else next_at_ms != record.next_at_ms:
                    storage.fire_schedule(record, next_at_ms=next_at_ms, add=fire)
            except StorageError:
                raise
            except LitebrokerError as error:
                errors.append(error)
        return errors


class Teller:
    """Tells of a worker's errors, and of what its jobs came to. It calls the user's code: have no lock meanwhile."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._quiet_until: dict[ErrorKind, float] = {}

    def error(
        self,
        kind: ErrorKind,
        error: BaseException,
        record: JobRecord | None = None,
        *,
        wait_ms: int | None = None,
        settled: bool = True,
    ) -> None:
        """Tell `on_error`. What is not about one job is told once in a while.

        Args:
            wait_ms: As in `ErrorContext.of`, like ``settled``.
        """
        if record is None:
            now = monotonic()
            if now < self._quiet_until.get(kind, 0.0):
                return
            self._quiet_until[kind] = now + _QUIET_S
            context = ErrorContext(kind=kind, queue=self._terms.queue)
        else:
            context = ErrorContext.of(kind, record, wait_ms=wait_ms, settled=settled)
        try:
            self._terms.on_error(error, context)
        except (Exception, SystemExit) as second:  # noqa: BLE001 (sys.exit() would end this thread only, and settle nothing)
            # As text, since what cannot be looked at makes logging raise, too.
            what = job_error(second)
            told = what.stack or what.type
            _logger.error("on_error itself raised, told of %s in queue %r\n%s", kind, context.queue, told)  # noqa: TRY400

    def lost(self, kind: ErrorKind, record: JobRecord) -> None:
        """Tell `on_error` that the lease of a job was lost."""
        text = f"the lease of job {record.id} ended before it was settled: another worker has it, or had it"
        self.error(kind, LeaseLostError(text), record)

    def settled(self, record: JobRecord, outcome: Outcome) -> None:
        """Tell the observers what a job has come to."""
        tell(self._terms.observers, lambda observer: observer.settled(record, outcome))
