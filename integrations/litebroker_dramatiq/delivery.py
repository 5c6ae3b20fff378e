"""A message that was claimed, and what its hooks add to it until it is settled."""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from dramatiq import Message, MessageProxy

from litebroker import JobError, JobSpec, Lease

if TYPE_CHECKING:
    from litebroker_dramatiq.leases import Lane, Leases

_order = itertools.count()


class Delivery(MessageProxy):
    """A claimed message. Its lease is here, not in its options: those go along with every retry.

    What the hooks of this message enqueue once it has run (its retry, the next of a pipeline, callbacks) waits here,
    and is stored with the acknowledgement, in one transaction: all of it or nothing.

    Attributes:
        leases: Those of the broker that claimed it.
        lane: The worker's that claimed it.
        attempt: How often it was claimed, this time included.
        follow_ups: What its hooks have enqueued since it ran.
        flaw: Why it must not be acknowledged, though Dramatiq will try to: a hook could not do its work.
        started_at: When a thread took it (steady, seconds), or None.
        finished: Its hooks have all run since.
        settled: It was acknowledged, rejected or given back.
    """

    def __init__(self, message: Message[Any], lease: Lease, leases: Leases, lane: Lane, *, attempt: int) -> None:
        super().__init__(message)
        self.lease = lease
        self.leases = leases
        self.lane = lane
        self.attempt = attempt
        self.follow_ups: list[JobSpec] = []
        self.flaw: JobError | None = None
        self.started_at: float | None = None
        self.finished = False
        self.settled = False
        self._order = next(_order)

    def start(self) -> None:
        """A worker thread has taken it."""
        self.started_at = time.monotonic()

    def restart_hooks(self) -> None:
        """Its hooks are about to run. What an earlier round that was interrupted has left does not count."""
        self.follow_ups.clear()
        self.flaw = None
        self.finished = False

    def unfinished(self) -> JobError | None:
        """Why it must not be acknowledged, or None."""
        if self.flaw is None and self.started_at is not None and not self.finished:
            return JobError("hook", message="the thread was interrupted before the message's hooks had run")
        return self.flaw

    # Before 2.2, messages of the same priority are compared in the worker's queue: first come, first served.
    def __lt__(self, other: object) -> bool:
        return isinstance(other, Delivery) and self._order < other._order


class _Hooks(threading.local):
    """The delivery whose hooks run in this thread."""

    delivery: Delivery | None = None

    def spoil(self, error: BaseException) -> None:
        """The hook that runs now fails, in a way that must not be forgotten with its log line."""
        if self.delivery is not None:
            self.delivery.flaw = hook_error(error)


hooks_of = _Hooks()


def hook_error(error: BaseException) -> JobError:
    """What becomes of a message whose hook raised this."""
    # As text: the exception would keep the frames of the worker thread alive.
    stack = "".join(traceback.format_exception(error))
    return JobError("hook", type=type(error).__name__, message=str(error), stack=stack)
