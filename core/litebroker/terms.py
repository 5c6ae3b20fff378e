"""What holds for all jobs of a queue: how they are encoded, leased, retried and kept, and who is told of errors."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from litebroker.arguments import NewJob, duration_ms, job_spec, queue_name
from litebroker.backoff import Backoff
from litebroker.errors import LitebrokerError, PayloadError, PayloadTooLargeError, StorageError
from litebroker.jobs import Added, JobRecord, JobSpec, Keep, Lease, State
from litebroker.observers import Observer, adding, tell
from litebroker.schedules import plan
from litebroker.serializer import JSON, RAW, Serializer
from litebroker.storage import Storage

ErrorKind = Literal["claim", "cleanup", "schedule", "heartbeat", "complete", "fail", "parse", "handler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorContext:
    """Where an error that `on_error` is told of came up.

    Attributes:
        kind: What was being done. "handler": the handler raised. "parse": a payload could not be read. "heartbeat",
            "complete" and "fail": the storage refused, or the lease was lost. "claim", "schedule" and "cleanup": the
            storage refused, and it is tried again.
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

_logger = logging.getLogger("litebroker")


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

    def specs(self, jobs: Iterable[Any]) -> list[JobSpec]:
        """Payloads, or `NewJob`s, as a storage takes them; all are checked before any is given back."""
        if isinstance(jobs, str | bytes | bytearray | Mapping):
            raise TypeError(f"give a list of payloads or NewJob objects, not one {type(jobs).__name__}")
        specs = []
        jobs = list(jobs)
        queue, encode, encoding, attempts = self.queue, self.encode, self.encoding, self.attempts
        for position, job in enumerate(jobs):
            try:
                if isinstance(job, NewJob):
                    specs.append(self._spec(job))
                else:
                    specs.append(JobSpec(queue, encode(job), encoding, max_attempts=attempts))
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

    def complete(self, storage: Storage, lease: Lease, then: Sequence[JobSpec] = ()) -> bool:
        """End the job well and add what follows, both or neither. False when the lease was lost."""
        if not then:
            return storage.complete([lease], keep=self.keeps_completed)[0]
        with storage.transaction() as transaction:
            done = transaction.complete([lease], keep=self.keeps_completed)[0]
            if done:
                self.add(transaction, then)
        return done

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
