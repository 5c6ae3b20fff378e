"""A consumer of one queue: claims messages for a worker's threads, and settles them."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dramatiq import Consumer, Message, MessageProxy
from dramatiq.errors import ConnectionClosed

from litebroker import JobError, JobRecord, Lease, Listener, StorageError, job_error
from litebroker_dramatiq.delivery import Delivery
from litebroker_dramatiq.leases import Lane

if TYPE_CHECKING:
    from litebroker_dramatiq.broker import SQLiteBroker

_log = logging.getLogger("litebroker.dramatiq")

# A wake-up may be lost with the process that sends it: an idle consumer looks for itself this often.
_LOOK_S = 1.0
# A message whose hooks could not do their work is tried again after this long, then twice that, and so on.
_PUT_OFF_MS = 5_000
_PUT_OFF_MOST_MS = 600_000
# Marks the messages of a schedule, which share one payload.
TICK = "dramatiq-tick"


class SQLiteConsumer(Consumer):
    """One queue of one worker. Making it touches no file.

    Dramatiq acknowledges from its worker threads while another thread is in ``__next__``, and after a restart on
    another consumer than the one that the message came from: what belongs to a message is on its `Delivery`.

    Acknowledgements are written by the consumer, many with the next claim in one transaction, while the worker is
    busy; and by the worker's thread when no consumer would come by to do it.
    """

    def __init__(self, broker: SQLiteBroker, queue_name: str, lane: Lane, *, timeout_ms: int) -> None:
        self._broker = broker
        self._leases = broker.leases
        self._lane = lane
        self._name = queue_name
        self._queue = broker.engine_queue(queue_name)
        self._timeout_s = timeout_ms / 1000
        self._ready: deque[Delivery] = deque()
        self._listener: Listener | None = None
        self._attending = False
        self._closed = False

    def __next__(self) -> MessageProxy | None:
        if self._ready:
            return self._ready.popleft()
        if self._closed:
            raise ConnectionClosed("the consumer is closed")
        deadline = time.monotonic() + self._timeout_s
        self._attend(True)
        try:
            while True:
                room = self._wait_for_room(deadline)
                self._claim(room)
                if self._ready:
                    return self._ready.popleft()
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                if room:
                    self._listen(min(left, _LOOK_S))
        except StorageError as error:
            raise self._broker.lost(error) from error

    def ack(self, message: MessageProxy) -> None:
        # Dramatiq hands in what it likes: what was not claimed, or is settled, has nothing to settle.
        if not isinstance(message, Delivery) or message.settled:
            return
        try:
            flaw = message.unfinished()
            if flaw is not None:
                self._put_off(message, flaw)
            elif message.follow_ups or not self._leases.acknowledge(message):
                self._settle(message, None)
        except StorageError as error:
            raise self._broker.lost(error) from error

    def nack(self, message: MessageProxy) -> None:
        if not isinstance(message, Delivery) or message.settled:
            return
        try:
            self._settle(message, _rejection(message))
        except StorageError as error:
            raise self._broker.lost(error) from error

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        try:
            self._give_back([message for message in messages if isinstance(message, Delivery)])
        except StorageError as error:
            raise self._broker.lost(error) from error

    def close(self) -> None:
        self._closed = True
        self._attend(False)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        ready = list(self._ready)
        self._ready.clear()
        try:
            try:
                self._give_back(ready)
            finally:
                self._leases.flush()
        except StorageError as error:
            raise self._broker.lost(error) from error

    # -- claiming --

    def _attend(self, attending: bool) -> None:  # noqa: FBT001
        with self._leases.lock:
            if self._attending != attending:
                self._attending = attending
                self._lane.attending += 1 if attending else -1

    def _wait_for_room(self, deadline: float) -> int:
        """Reserve places for what is claimed next. 0 when the threads are busy until the deadline."""
        lane = self._lane
        with self._leases.lock:
            place = lane.enter(self._broker.best_priority(self._name))
            try:
                while not (lane.wants and lane.first(place)):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return 0
                    self._leases.changed.wait(left)
                room = lane.room
                lane.claimed += room
                return room
            finally:
                lane.leave(place)
                if lane.wants:
                    self._leases.changed.notify_all()

    def _claim(self, room: int) -> None:
        """Write what was acknowledged, and claim for the reserved places."""
        leases = self._leases
        acknowledged = leases.take_acknowledged()
        claimed: list[Delivery] = []
        try:
            storage = self._broker.storage
            records: list[JobRecord] = []
            results: list[bool] = []
            if acknowledged and room:
                with storage.transaction() as tx:
                    results = tx.complete([delivery.lease for delivery in acknowledged])
                    records = tx.claim([self._queue], limit=room, lease_ms=leases.lease_ms)
            elif acknowledged:
                results = storage.complete([delivery.lease for delivery in acknowledged])
            elif room:
                records = storage.claim([self._queue], limit=room, lease_ms=leases.lease_ms)
            leases.written(acknowledged, results)
            acknowledged = []
            claimed = [delivery for record in records if (delivery := self._deliver(record)) is not None]
            if claimed:
                leases.hold(claimed)
                self._ready.extend(claimed)
        finally:
            if acknowledged:
                leases.give_back(acknowledged)
            with leases.lock:
                self._lane.claimed -= room - len(claimed)
                if self._lane.wants:
                    leases.changed.notify_all()

    def _listen(self, seconds: float) -> None:
        if self._listener is None:
            # What came before it was made is not announced: look once more.
            self._listener = self._broker.storage.listener([self._queue])
            return
        with self._leases.lock:
            if self._leases.acknowledged:
                return
            self._attending = False
            self._lane.attending -= 1
        try:
            self._listener.wait(seconds)
        finally:
            self._attend(True)

    def _deliver(self, record: JobRecord) -> Delivery | None:
        """The message, as Dramatiq is to see it; None when it is not for now, or cannot be read."""
        try:
            message: Message[Any] = Message.decode(record.payload)
            eta = message.options.pop("eta", None)
        except Exception as error:  # noqa: BLE001 (an encoder raises what it likes)
            # By its class alone: the texts of such errors quote what they could not read.
            kind = type(error.__cause__ or error).__name__
            _log.error("job %d in queue %r is no message (%s): it is a dead letter now", record.id, self._name, kind)
            self._broker.storage.fail(record.lease, job_error(error, reason="parse"), retry_in_ms=None)
            return None
        # Another broker's. With an eta, the worker would keep the message in memory until then.
        if (wait_ms := self._broker.until(eta, message.message_id)) > 0:
            self._broker.storage.release([record.lease], delay_ms=wait_ms)
            return None
        if message.queue_name != self._name:
            message = message.copy(queue_name=self._name)
        if TICK in record.headers:
            # Stable over redeliveries, and different for each tick.
            message = message.copy(
                message_id=str(uuid.uuid5(uuid.UUID(message.message_id), str(record.id))),
                message_timestamp=record.created_at_ms,
            )
        return Delivery(message, record.lease, self._leases, self._lane, attempt=record.attempts)

    # -- settling --

    def _settle(self, delivery: Delivery, error: JobError | None) -> None:
        """End it, and store what its hooks have enqueued, in one transaction. A lost lease stores nothing."""
        storage = self._broker.storage
        if not delivery.follow_ups:
            current = _end(storage, delivery.lease, error)
        else:
            with storage.transaction() as tx:
                current = _end(tx, delivery.lease, error)
                if current:
                    # After its end: a retry takes over the dedupe key.
                    tx.add(delivery.follow_ups)
        self._leases.drop(delivery)
        if not current:
            _log.warning(
                "message %s (job %d) had lost its lease before it was settled: it is run again elsewhere",
                delivery.message_id,
                delivery.lease.job_id,
            )

    def _put_off(self, delivery: Delivery, flaw: JobError) -> None:
        """It ran, but its hooks could not do their work: it runs again, a few times, rather than be lost."""
        delay_ms = min(_PUT_OFF_MS * 2 ** (delivery.attempt - 1), _PUT_OFF_MOST_MS)
        state = self._broker.storage.fail(delivery.lease, flaw, retry_in_ms=delay_ms)
        self._leases.drop(delivery)
        _log.error(
            "message %s (job %d) is not acknowledged, since its hooks failed (%s: %s): it is %s now",
            delivery.message_id,
            delivery.lease.job_id,
            flaw.type or flaw.reason,
            flaw.message,
            state or "lost",
        )

    def _give_back(self, deliveries: list[Delivery]) -> None:
        """As if they had never been claimed."""
        if not deliveries:
            return
        try:
            self._broker.storage.release([delivery.lease for delivery in deliveries])
        finally:
            # Where that fails, the leases end by themselves.
            for delivery in deliveries:
                self._leases.drop(delivery)


def _end(storage: Any, lease: Lease, error: JobError | None) -> bool:
    if error is None:
        return bool(storage.complete([lease])[0])
    return storage.fail(lease, error, retry_in_ms=None) is not None


def _rejection(delivery: Delivery) -> JobError:
    """Why it becomes a dead letter: the exception, and the traceback that Dramatiq has put in the message."""
    exception = getattr(delivery, "_exception", None)
    stack = delivery.options.get("traceback") or ""
    if exception is None:
        return JobError("rejected", stack=stack)
    error = job_error(exception, reason="rejected")
    return error._replace(stack=stack) if stack else error
