"""What this process holds of the broker's messages, and keeps hold of; and what may still be taken."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from litebroker import Keep, Lease, State, Storage, StorageError
from litebroker_dramatiq.delivery import Delivery

_log = logging.getLogger("litebroker.dramatiq")

# A message is short when it is done within this. A worker whose messages are short may have more of them in memory
# than it has threads: none waits there for longer than a few of these.
_SHORT_S = 0.02
# How much the latest message counts in the average.
_WEIGHT = 0.2
_PRUNE_S = 60.0
# Acknowledgements that nobody came to write are written after this long.
_STALE_S = 0.5


class Lane:
    """The threads of one worker, over all of its queues, and how many messages may be claimed for them.

    A waiting message in the memory of a busy worker could have been run by an idle one, so no more are claimed than
    there are threads; but while they are short, twice as many are, since claiming one by one costs more than running
    them. Where the user set ``dramatiq_queue_prefetch`` (or ``worker.queue_prefetch``), each queue has exactly that.

    Everything here is guarded by the lock of the `Leases` that it belongs to.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.claimed = 0
        self.running = 0
        # Consumers that will come by themselves to write acknowledgements: all but those that are idle.
        self.attending = 0
        # Long until shown otherwise.
        self._average_s = _SHORT_S
        # Consumers that wait for room, as (priority of the queue, turn).
        self._line: list[tuple[float, int]] = []
        self._turn = 0

    @property
    def room(self) -> int:
        limit = self.threads if self._average_s >= _SHORT_S else 2 * self.threads
        return limit - self.claimed

    @property
    def wants(self) -> bool:
        """Whether the threads are about to run dry. Waiting until then makes the next claim a big one."""
        return self.room > 0 and 2 * (self.claimed - self.running) <= self.threads

    def enter(self, priority: float) -> tuple[float, int]:
        """Stand in line. Queues whose actors have the higher priority (the lower number) go first."""
        self._turn += 1
        place = (priority, self._turn)
        self._line.append(place)
        return place

    def first(self, place: tuple[float, int]) -> bool:
        return min(self._line) == place

    def leave(self, place: tuple[float, int]) -> None:
        self._line.remove(place)

    def settle(self, delivery: Delivery) -> None:
        """It no longer needs a thread, nor a place in memory."""
        self.claimed -= 1
        if delivery.started_at is not None:
            self.running -= 1
            took = time.monotonic() - delivery.started_at
            # One long message among short ones counts as ten short ones do, not as a thousand.
            self._average_s += _WEIGHT * (min(took, 10 * _SHORT_S) - self._average_s)


class OwnLane(Lane):
    """A queue that is told how many of its messages to hold, and shares its places with no other."""

    @property
    def room(self) -> int:
        return self.threads - self.claimed

    @property
    def wants(self) -> bool:
        return self.room > 0


class Leases:
    """Every lease of this process, renewed from a thread of its own while its message waits or runs.

    Nothing depends on the consumers for it: they are paused, and stand still for as long as a worker's stop takes.

    Args:
        prune: The queues whose ended messages are to be thinned out, asked for once a minute.
    """

    def __init__(
        self,
        storage: Callable[[], Storage],
        *,
        lease_ms: int,
        dead_ttl_ms: int | None,
        prune: Callable[[], Iterable[str]],
    ) -> None:
        self.lease_ms = lease_ms
        self._storage = storage
        self._keep = Keep(age_ms=dead_ttl_ms)
        self._prune = prune
        self._start_anew()
        reference = weakref.WeakMethod(self._start_anew)
        os.register_at_fork(after_in_child=lambda: (reset := reference()) and reset())

    def _start_anew(self) -> None:
        """A forked child holds nothing: what it inherits is its parent's."""
        # Worker threads are interrupted by exceptions (time limits). `with` on a plain lock is safe from that, while
        # a Condition's own __enter__ can be hit after it took the lock.
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self._held: dict[Lease, Delivery] = {}
        self._acknowledged: list[Delivery] = []
        self._waits_since: float | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._pruned_at = 0.0

    def hold(self, deliveries: Iterable[Delivery]) -> None:
        """Renew these until they are dropped."""
        self._held.update((delivery.lease, delivery) for delivery in deliveries)
        if self._thread is None:
            with self.lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="litebroker-leases", daemon=True)
                    self._thread.start()

    def drop(self, delivery: Delivery) -> None:
        """It is settled: its place is free. Called again, it does nothing."""
        self._held.pop(delivery.lease, None)
        with self.lock:
            self._free(delivery)

    def start(self, delivery: Delivery) -> None:
        """A thread runs it now."""
        with self.lock:
            if delivery.started_at is None:
                delivery.lane.running += 1
            delivery.start()

    def acknowledge(self, delivery: Delivery) -> bool:
        """Let it be written with its worker's next claim: its place is free at once.

        False, nothing done, when none of the worker's consumers will come by.
        """
        with self.lock:
            if not delivery.lane.attending:
                return False
            self._acknowledged.append(delivery)
            self._free(delivery)
            if self._waits_since is None:
                self._waits_since = time.monotonic()
        return True

    @property
    def acknowledged(self) -> bool:
        """Whether any are to be written."""
        return bool(self._acknowledged)

    def take_acknowledged(self) -> list[Delivery]:
        """Those that are to be written now, by the caller, who gives them back if that fails."""
        with self.lock:
            taken, self._acknowledged = self._acknowledged, []
            self._waits_since = None
        return taken

    def give_back(self, deliveries: list[Delivery]) -> None:
        """They could not be written."""
        with self.lock:
            self._acknowledged[:0] = deliveries
            self._waits_since = time.monotonic()

    def written(self, deliveries: Iterable[Delivery], results: Iterable[bool]) -> None:
        """What became of them."""
        for delivery, current in zip(deliveries, results, strict=True):
            self._held.pop(delivery.lease, None)
            if not current:
                _log.warning(
                    "message %s (job %d) was acknowledged after its lease had ended: it runs again elsewhere",
                    delivery.message_id,
                    delivery.lease.job_id,
                )

    def flush(self) -> None:
        """Write what was acknowledged. Raises ``StorageError``, and keeps it then."""
        deliveries = self.take_acknowledged()
        if not deliveries:
            return
        try:
            results = self._storage().complete([delivery.lease for delivery in deliveries])
        except BaseException:
            self.give_back(deliveries)
            raise
        self.written(deliveries, results)

    def close(self) -> None:
        """Write what was acknowledged, give back all else, and stop renewing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()
            self._stop = threading.Event()
        try:
            self.flush()
            if held := list(self._held.values()):
                self._storage().release([delivery.lease for delivery in held])
        except StorageError as error:
            _log.warning("messages could not be given back, so they wait for the end of their leases: %s", error)
        self._held.clear()

    def _free(self, delivery: Delivery) -> None:
        if not delivery.settled:
            delivery.settled = True
            delivery.lane.settle(delivery)
            if delivery.lane.wants:
                self.changed.notify_all()

    def _run(self) -> None:
        stop = self._stop
        renewed_at = time.monotonic()
        troubled = False
        while not stop.wait(min(_STALE_S, self.lease_ms / 6000)):
            try:
                now = time.monotonic()
                if now - renewed_at >= self.lease_ms / 4000:
                    self._renew()
                    renewed_at = now
                if self._waits_since is not None and now - self._waits_since > _STALE_S:
                    self.flush()
                if now - self._pruned_at >= _PRUNE_S:
                    self._pruned_at = now
                    for queue in self._prune():
                        self._storage().prune(queue, {State.FAILED: self._keep, State.CANCELLED: self._keep})
                troubled = False
            except StorageError as error:
                # Leases outlast a few rounds of this, and the consumers say what is wrong.
                if not troubled:
                    _log.warning("leases could not be renewed, it is tried again until it works: %s", error)
                troubled = True
            except Exception:  # noqa: BLE001 (whatever it is, this thread must go on)
                _log.exception("leases could not be renewed")

    def _renew(self) -> None:
        held = list(self._held.values())
        if not held:
            return
        leases: list[Lease] = [delivery.lease for delivery in held]
        for delivery, current in zip(held, self._storage().extend(leases, self.lease_ms), strict=True):
            # One that is acknowledged may have been written this moment; if not, `written` says so.
            if not current and not delivery.settled and self._held.pop(delivery.lease, None) is not None:
                _log.warning(
                    "message %s (job %d) has lost its lease: it is run again elsewhere",
                    delivery.message_id,
                    delivery.lease.job_id,
                )
