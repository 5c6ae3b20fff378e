"""Running the jobs of a queue in the thread of a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from litebroker.jobs import JobRecord, State
from litebroker.observers import Observer, Outcome
from litebroker.queue import Queue
from litebroker.testing.clock import ManualClock
from litebroker.testing.redirected import checked
from litebroker.worker import Worker

# Whoever stops in a debugger keeps the job: no heartbeat renews its lease here.
_LEASE_MS = 24 * 3_600_000


@dataclass(kw_only=True)
class Drained:
    """What `drain` has done.

    Attributes:
        completed: How many jobs were completed.
        retried: How many attempts failed, of jobs that were to be tried again.
        failed: How many jobs became dead letters.
        released: How often a handler gave its job back.
        lost: How many jobs were settled by somebody else before their handler ended.
        errors: What handlers raised, in order, and what kept payloads from being read.
    """

    completed: int = 0
    retried: int = 0
    failed: int = 0
    released: int = 0
    lost: int = 0
    errors: list[BaseException] = field(default_factory=list)

    @property
    def attempts(self) -> int:
        """How often a handler was called, or a payload could not be read."""
        return self.completed + self.retried + self.failed + self.released + self.lost


class _Count(Observer):
    def __init__(self, drained: Drained) -> None:
        self._drained = drained

    def settled(self, job: JobRecord, outcome: Outcome) -> None:
        del job
        setattr(self._drained, outcome, getattr(self._drained, outcome) + 1)


def drain(
    queue: Queue[Any],
    handler: Callable[..., object],
    *,
    delayed: bool = False,
    raises: bool = True,
    at_most: int = 1000,
) -> Drained:
    """Run a queue's due jobs here, one after the other, until none is due; also those that the handler adds.

    Each is claimed, run and settled as by a worker, but in this thread: what it does is done when `drain` returns, and
    debuggers and mocks see it. Schedules that are due add their jobs first. An async handler gets an event loop of its
    own.

    Args:
        handler: As for `Queue.process`.
        delayed: Run those that are due later, too, retries among them: the clock, which has to be a `ManualClock`, goes
            on to the next one's time whenever none is due.
        raises: Raise what a handler raises, as soon as its job is settled. False collects it in `Drained.errors`, and
            goes on.
        at_most: So many attempts are no accident: a handler probably adds its own job again each time.

    Raises:
        AssertionError: There were more than ``at_most`` attempts.
        TypeError: ``delayed`` was asked for, and the storage does not have a `ManualClock`.
    """
    __tracebackhide__ = True
    checked(queue)
    storage = queue.storage
    clock = storage.clock
    if delayed and not isinstance(clock, ManualClock):
        raise TypeError(
            f"delayed=True moves the clock, and this storage has a {type(clock).__name__}: open it with a ManualClock,"
            " as in SQLiteStorage(path, clock=ManualClock())"
        )
    drained = Drained()
    terms = queue._terms  # noqa: SLF001 (a worker of this queue, as `Queue.process` makes one)
    terms = replace(
        terms,
        lease_ms=_LEASE_MS,
        on_error=lambda error, _: drained.errors.append(error),
        observers=[*terms.observers, _Count(drained)],
    )
    with Worker(storage, terms, handler) as worker:
        while True:
            drained.errors.extend(terms.fire_schedules(storage))
            ran = worker.step()
            for error in drained.errors:
                if raises or not isinstance(error, Exception):
                    raise error
            if ran and drained.attempts > at_most:
                raise AssertionError(f"queue {queue.name!r} is not empty after {at_most} attempts; {queue.stats()}")
            if not ran and not (delayed and isinstance(clock, ManualClock) and _go_on(queue, clock)):
                return drained


def _go_on(queue: Queue[Any], clock: ManualClock) -> bool:
    """Move the clock to the time of the next delayed job. False: there is none, or they cannot be claimed."""
    if queue.paused:
        return False
    due = queue.storage.counts(queue.name).ready
    now_ms = clock.now_ms()
    for record in queue.storage.page(queue.name, State.PENDING, limit=1, offset=due):
        if record.due_at_ms > now_ms:
            clock.advance((record.due_at_ms - now_ms) / 1000)
            return True
    return False
