"""The broker: messages into the file, and everything that Dramatiq expects around that."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from queue import PriorityQueue
from typing import Any

import dramatiq.worker
from dramatiq import Actor, Broker, Consumer, Message, MessageProxy, QueueJoinTimeout, Worker
from dramatiq.common import dq_name, q_name
from dramatiq.errors import ConnectionClosed, ConnectionFailed
from dramatiq.middleware import Middleware, MiddlewareError, default_middleware

from litebroker import (
    DatabaseCorruptError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    Durability,
    ForeignDatabaseError,
    JobRecord,
    JobSpec,
    PayloadTooLargeError,
    SchemaError,
    State,
    Storage,
    StorageError,
)
from litebroker_dramatiq.consumer import SQLiteConsumer
from litebroker_dramatiq.delivery import Delivery, hooks_of
from litebroker_dramatiq.leases import Lane, Leases, OwnLane
from litebroker_dramatiq.middleware import Dedupe, Schedules, dedupe_of, schedule_of
from litebroker_dramatiq.source import Source, Where

_log = logging.getLogger("litebroker.dramatiq")

_LONGEST_QUEUE_NAME = 255
# A message's broker_priority weighs more than any actor's priority.
_BROKER_PRIORITY = 1_000_000
_ACTOR_PRIORITY_MOST = _BROKER_PRIORITY // 2 - 1
_BROKER_PRIORITY_MOST = 2**40
# How often join looks: more seldom the longer it lasts.
_JOIN_FIRST_S, _JOIN_MOST_S = 0.002, 0.05
_SETTLING = frozenset({"process_message", "skip_message"})


@dataclasses.dataclass(frozen=True)
class DeadLetter:
    """A message that was rejected, or that its workers did not survive.

    Attributes:
        message: As it was delivered last; None when it cannot be decoded.
        reason: "rejected" (it failed for good), "lapsed" (its last worker vanished, as often as was allowed), "parse"
            (it cannot be decoded) or "hook" (its hooks could not do their work).
        error: ``Type: message``, or "".
        traceback: The one that Dramatiq put into the message, or "".
    """

    id: int
    queue_name: str
    message: Message[Any] | None
    reason: str
    error: str
    traceback: str
    attempts: int
    died_at: datetime


class SQLiteBroker(Broker):
    """Dramatiq's messages in one SQLite file.

        dramatiq.set_broker(SQLiteBroker("jobs.db"))

    The file is opened when the first message is sent or consumed, and opened again in each process that was forked.
    Durations are in milliseconds, as everywhere in Dramatiq, or `timedelta`.

    Args:
        where: A path, a URL (``sqlite:///jobs.db?durability=relaxed``) or an open storage.
        middleware: As for any broker: None is Dramatiq's own and `Dedupe` and `Schedules`; a list is all there is.
        namespace: In the file, a queue is called ``namespace:queue``. Brokers of one namespace share their queues.
        durability: What a power cut may take; None is as the URL says, else the storage's default.
        lease: How long a message stays with a worker that does not renew it. Workers renew all the time, and those
            that were killed on this machine are noticed at once, so this is for one that stands still: stopped, or
            in C code that keeps the interpreter's lock.
        max_deliveries: A message that so many workers did not survive becomes a dead letter. None is without limit.
            Each message keeps the limit that it was sent with.
        dead_message_ttl: How long dead letters are kept. None is for ever.
        max_message_bytes: A larger message is refused when it is sent.
    """

    def __init__(
        self,
        where: Where,
        *,
        middleware: list[Middleware] | None = None,
        namespace: str = "dramatiq",
        durability: Durability | None = None,
        lease: int | timedelta = 120_000,
        max_deliveries: int | None = 10,
        dead_message_ttl: int | timedelta | None = 7 * 86_400_000,
        max_message_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        if middleware is None:
            middleware = [*(make() for make in default_middleware), Dedupe(), Schedules()]
        self._has_dedupe = self._has_schedules = False
        self._namespace = namespace
        self._max_deliveries = max_deliveries
        self._max_message_bytes = max_message_bytes
        self._engine_names: dict[str, str] = {}
        self._best_priorities: dict[str, int] = {}
        self._lanes: weakref.WeakKeyDictionary[PriorityQueue[Any], Lane] = weakref.WeakKeyDictionary()
        self._joined = _Joined()
        self._source = Source(where, durability, self._opened)
        self.leases = Leases(
            self._source,
            lease_ms=_milliseconds("lease", lease),
            dead_ttl_ms=None if dead_message_ttl is None else _milliseconds("dead_message_ttl", dead_message_ttl),
            prune=lambda: [self.engine_queue(name) for name in self.get_declared_queues()],
        )
        super().__init__(middleware)
        self.queues: set[str] = set()

    @property
    def storage(self) -> Storage:
        """The engine's storage. It is opened now if need be."""
        return self._source()

    def engine_queue(self, queue_name: str) -> str:
        """What a queue is called in the file. Raises ``ValueError`` when that is too long."""
        name = self._engine_names.get(queue_name)
        if name is None:
            name = f"{self._namespace}:{q_name(queue_name)}"
            if len(name) > _LONGEST_QUEUE_NAME:
                raise ValueError(
                    f"queue {queue_name[:60]!r}... is too long: with the namespace, {_LONGEST_QUEUE_NAME} characters"
                    f" are the most, not {len(name)}"
                )
            self._engine_names[queue_name] = name
        return name

    # -- declaring --

    def add_middleware(
        self,
        middleware: Middleware,
        *,
        before: type[Middleware] | None = None,
        after: type[Middleware] | None = None,
    ) -> None:
        super().add_middleware(middleware, before=before, after=after)
        # Without them, actor options of these names are some other middleware's.
        self._has_dedupe |= isinstance(middleware, Dedupe)
        self._has_schedules |= isinstance(middleware, Schedules)

    def declare_queue(self, queue_name: str) -> None:
        """Make the queue known. Nothing is written, nor opened: it runs while modules are imported."""
        queue_name = q_name(queue_name)
        if queue_name in self.queues:
            return
        self.engine_queue(queue_name)
        self.emit_before("declare_queue", queue_name)
        self.queues.add(queue_name)
        self.emit_after("declare_queue", queue_name)
        # No delay queue is declared: delayed messages wait in the file, and nobody has to consume them.

    def declare_actor(self, actor: Actor[Any, Any]) -> None:
        if self._has_schedules:
            schedule_of(actor)  # A mistake is told here: what hooks raise is only logged.
        super().declare_actor(actor)
        known = self._best_priorities.get(actor.queue_name)
        self._best_priorities[actor.queue_name] = actor.priority if known is None else min(known, actor.priority)

    def get_declared_queues(self) -> set[str]:
        return set(self.queues)

    def best_priority(self, queue_name: str) -> int:
        """The highest priority (the lowest number) among the queue's actors."""
        return self._best_priorities.get(queue_name, 0)

    # -- sending --

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Send a message, after ``delay`` milliseconds if given.

        What the hooks of a message that has run enqueue (its retry, the next of a pipeline, callbacks) is stored when
        the message is acknowledged, in the same transaction.

        Returns:
            The message that was sent, or the one that holds its dedupe key.

        Raises:
            PayloadTooLargeError: It takes more than ``max_message_bytes``.
            ValueError: The queue's name is too long.
            ConnectionClosed: The file could not be written; the cause says why.
        """
        return self._enqueue([message], delay)[0]

    def send_many(self, messages: Iterable[Message[Any]], *, delay: int | None = None) -> list[Message[Any]]:
        """Send them all, or none, in one transaction and in their order: ``send_many([actor.message(1), ...])``."""
        return self._enqueue(list(messages), delay)

    @contextmanager
    def transaction(self, connection: object = None) -> Iterator[None]:
        """Make everything that this thread sends in the block one transaction.

        With a ``connection`` to the same file, it is the caller's transaction: the messages are there when the caller
        commits, and gone when the caller rolls back. Neither is done here. Workers notice within half a second; at
        once, when the commit comes in the block.
        """
        if connection is None:
            with self.storage.transaction():
                yield
            return
        outer, outer_queues = self._joined.storage, self._joined.queues
        self._joined.storage = self.storage.bind(connection)
        queues: set[str] = set()
        self._joined.queues = queues
        try:
            yield
        finally:
            self._joined.storage, self._joined.queues = outer, outer_queues
            if not getattr(connection, "in_transaction", True):
                for queue in queues:
                    self.storage.notify_queue(queue)

    def _enqueue(self, messages: Sequence[Message[Any]], delay: int | None) -> list[Message[Any]]:
        delivery = hooks_of.delivery
        if delivery is None or delivery.leases is not self.leases or self._joined.storage is not None:
            return self._send([self._prepare(message, delay) for message in messages], delay)
        try:
            prepared = [self._prepare(message, delay) for message in messages]
        except MiddlewareError:
            raise
        except Exception as error:
            # Dramatiq logs what a hook raises, and acknowledges the message whose retry or successor this was.
            hooks_of.spoil(error)
            raise
        delivery.follow_ups.extend(spec for _, spec in prepared)
        for outgoing, _ in prepared:
            self.emit_after("enqueue", outgoing, delay)
        return [outgoing for outgoing, _ in prepared]

    def _send(self, prepared: Sequence[tuple[Message[Any], JobSpec]], delay: int | None) -> list[Message[Any]]:
        storage = self._joined.storage
        try:
            if storage is None:
                storage = self._source()
            else:
                self._joined.queues.update(spec.queue for _, spec in prepared)
            added = storage.add([spec for _, spec in prepared])
            sent = []
            for (outgoing, spec), (job_id, created) in zip(prepared, added, strict=True):
                if created:
                    self.emit_after("enqueue", outgoing, delay)
                    sent.append(outgoing)
                else:
                    sent.append(self._holder(storage, spec, outgoing, job_id))
        except StorageError as error:
            raise self.lost(error) from error
        return sent

    def _prepare(self, message: Message[Any], delay: int | None) -> tuple[Message[Any], JobSpec]:
        """The message as its hooks and its sender see it, and what is stored."""
        outgoing = message.copy() if isinstance(message, MessageProxy) else message
        if outgoing.queue_name not in self.queues:
            self.declare_queue(outgoing.queue_name)
        if delay is not None:
            # By the convention of other brokers. In the file it is in its own queue, without an eta.
            eta = int(time.time() * 1000) + delay
            outgoing = outgoing.copy(queue_name=dq_name(outgoing.queue_name), options={"eta": eta})
        self.emit_before("enqueue", outgoing, delay)
        stored = outgoing
        run_at_ms = None
        if "eta" in outgoing.options:
            options = dict(outgoing.options)
            eta = options.pop("eta")
            if delay is None and self.until(eta, outgoing.message_id) > 0:
                run_at_ms = int(eta)
            stored = dataclasses.replace(outgoing, queue_name=q_name(outgoing.queue_name), options=options)
        elif outgoing.queue_name.endswith((".DQ", ".XQ")):
            stored = dataclasses.replace(outgoing, queue_name=q_name(outgoing.queue_name))
        return outgoing, self._spec(stored, delay, run_at_ms)

    def _spec(self, message: Message[Any], delay_ms: int | None = None, run_at_ms: int | None = None) -> JobSpec:
        payload = message.encode()
        if len(payload) > self._max_message_bytes:
            raise PayloadTooLargeError(len(payload), self._max_message_bytes)
        actor = self.actors.get(message.actor_name)
        key, until = dedupe_of(message, actor if self._has_dedupe else None)
        return JobSpec(
            queue=self.engine_queue(message.queue_name),
            payload=payload,
            encoding="dramatiq",
            priority=_priority(message, actor),
            delay_ms=delay_ms,
            run_at_ms=run_at_ms,
            dedupe_key=key,
            dedupe_until=until,
            max_attempts=self._max_deliveries,
            ref=message.message_id,
            task=message.actor_name,
        )

    def tick_spec(self, message: Message[Any], mark: str) -> JobSpec:
        """What a schedule adds at each tick."""
        return self._spec(message)._replace(headers={mark: "1"})

    def _holder(self, storage: Storage, spec: JobSpec, outgoing: Message[Any], job_id: int) -> Message[Any]:
        """The message that is there under the dedupe key."""
        holder = storage.get(job_id)
        if holder is None:
            # It ended in this moment, so the key is free.
            ((job_id, created),) = storage.add([spec])
            return outgoing if created else self._holder(storage, spec, outgoing, job_id)
        self.logger.debug("Message %r is there already, as job %d.", outgoing.message_id, job_id)
        return Message.decode(holder.payload)

    def until(self, eta: object, message_id: str) -> int:
        """Milliseconds until a message's ``eta`` option; 0 when it has come, or is none."""
        if eta is None:
            return 0
        if not isinstance(eta, (int, float)) or not math.isfinite(eta):
            self.logger.warning("Invalid eta value for message %r: %r. It is due now.", message_id, eta)
            return 0
        return max(0, int(eta - time.time() * 1000))

    # -- consuming --

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> Consumer:
        """A consumer of the queue. Nothing is opened until it is asked for a message."""
        # Dramatiq calls this in the thread of one of the worker's consumers, which has the worker's queue.
        work_queue = getattr(threading.current_thread(), "work_queue", None)
        lane = None if work_queue is None else self._lanes.get(work_queue)
        if (
            lane is None
            or dramatiq.worker.QUEUE_PREFETCH
            or prefetch != min(2 * lane.threads, 65_535)  # The user has set ``worker.queue_prefetch``.
        ):
            lane = OwnLane(prefetch)
        return SQLiteConsumer(self, q_name(queue_name), lane, timeout_ms=timeout)

    def emit_before(self, signal: str, *args: Any, **kwargs: Any) -> None:
        if signal == "process_message" and isinstance(args[0], Delivery):
            self.leases.start(args[0])
        elif signal == "worker_boot" and isinstance(args[0], Worker):
            self._refuse_what_stays_wrong()
            self._lanes[args[0].work_queue] = Lane(args[0].worker_threads)
        elif signal in {"ack", "nack"} and isinstance(args[0], Delivery):
            with _hooks(args[0]):
                super().emit_before(signal, *args, **kwargs)
            return
        super().emit_before(signal, *args, **kwargs)

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        if signal in _SETTLING and isinstance(args[0], Delivery):
            delivery = args[0]
            delivery.restart_hooks()
            with _hooks(delivery):
                super().emit_after(signal, *args, **kwargs)
            delivery.finished = True
            return
        super().emit_after(signal, *args, **kwargs)

    def _refuse_what_stays_wrong(self) -> None:
        """A worker whose file is of no use to it says so and ends, rather than try again for ever."""
        try:
            self.storage.queues()
        except (DatabaseCorruptError, DatabaseReadOnlyError, ForeignDatabaseError, SchemaError) as error:
            raise ConnectionFailed(str(error)) from error
        except StorageError as error:
            self.logger.warning("%s", error)  # It may be well soon: the consumers try.

    def lost(self, error: StorageError) -> ConnectionClosed:
        """What Dramatiq is told when the file could not be used: it tries again, for as long as it takes."""
        if isinstance(error, DatabaseUnavailableError):
            # It was deleted, or its disk is gone. Open anew what is there at the next try.
            self._source.close()
        return ConnectionClosed(str(error))

    def _opened(self, storage: Storage) -> None:
        storage.on_lapsed(self._lapsed)

    def _lapsed(self, record: JobRecord) -> None:
        """A message has become a dead letter, since its workers did not survive it: tell those who wait for it."""
        prefix = f"{self._namespace}:"
        if not record.queue.startswith(prefix):
            return
        self.logger.error(
            "Message %r (job %d) of actor %r is a dead letter: %d workers vanished while they had it.",
            record.ref,
            record.id,
            record.task,
            record.attempts,
        )
        message = MessageProxy(Message.decode(record.payload).copy(queue_name=record.queue.removeprefix(prefix)))
        message.stuff_exception(RuntimeError(f"{record.attempts} workers vanished while they had the message"))
        message.fail()
        self.emit_before("nack", message)
        self.emit_after("nack", message)

    # -- looking after queues --

    def join(self, queue_name: str, *, timeout: int | None = None, interval: int | None = None) -> None:
        """Wait until no message of the queue is waiting, delayed or running.

        Raises:
            QueueJoinTimeout: That took longer than ``timeout`` milliseconds.
        """
        queue = self.engine_queue(queue_name)
        deadline = time.monotonic() + timeout / 1000 if timeout else None
        pause = _JOIN_FIRST_S if interval is None else interval / 1000
        while self._busy(queue):
            if deadline is not None and time.monotonic() >= deadline:
                raise QueueJoinTimeout(queue_name)
            time.sleep(pause)
            pause = min(2 * pause, max(pause, _JOIN_MOST_S))

    def _busy(self, queue: str) -> bool:
        storage = self.storage
        # Cheap looks first: counting all is for when there is nothing, or nearly so.
        if storage.page(queue, State.PENDING, limit=1) or storage.page(queue, State.ACTIVE, limit=1):
            return True
        counts = storage.counts(queue)
        return bool(counts.pending or counts.active)

    def flush(self, queue_name: str) -> None:
        """Drop all of the queue's messages, delayed and dead ones too, but those that are with a worker."""
        try:
            self.storage.purge(
                self.engine_queue(queue_name), [State.PENDING, State.FAILED, State.CANCELLED, State.COMPLETED]
            )
        except StorageError as error:
            raise self.lost(error) from error

    def flush_all(self) -> None:
        for queue_name in self.get_declared_queues():
            self.flush(queue_name)

    def cancel(self, message: Message[Any] | str, *, queue_name: str | None = None) -> bool:
        """End a message that waits, delayed or not. False when it runs, has ended, or is not there.

        Args:
            message: What was sent, or its id.
            queue_name: Where an id is looked for; None is in every declared queue.
        """
        if isinstance(message, str):
            message_id, names = message, self.get_declared_queues() if queue_name is None else {queue_name}
        else:
            message_id, names = message.message_id, {message.queue_name}
        storage = self.storage
        waiting = [
            job.id
            for name in names
            for job in storage.find(self.engine_queue(name), ref=message_id)
            if job.state is State.PENDING
        ]
        return any(storage.cancel(waiting)) if waiting else False

    def abort(self, message: Message[Any] | str) -> bool:
        """Cancel a message that waits; interrupt one that runs, for which dramatiq-abort's middleware is needed.

        True when it was waiting. A message that runs is told to stop, and may do so a little later.
        """
        if self.cancel(message):
            return True
        message_id = message if isinstance(message, str) else message.message_id
        for middleware in self.middleware:
            if callable(interrupt := getattr(middleware, "abort", None)):
                interrupt(message_id)
        return False

    def dead_letters(self, queue_name: str | None = None, *, limit: int = 100) -> list[DeadLetter]:
        """Dead letters of a queue, or of all declared ones, the latest first; so many of each queue."""
        names = sorted(self.get_declared_queues()) if queue_name is None else [q_name(queue_name)]
        return [
            _dead_letter(name, record)
            for name in names
            for record in self.storage.page(self.engine_queue(name), State.FAILED, limit=limit)
        ]

    def retry_dead_letters(self, letters: Iterable[DeadLetter]) -> int:
        """Send them again, with all of their retries before them. How many were still there."""
        sent = 0
        for letter in letters:
            if letter.message is None:
                sent += sum(self.storage.retry([letter.id]))
                continue
            options = {
                name: value
                for name, value in letter.message.options.items()
                if name not in {"retries", "traceback", "requeue_timestamp"}
            }
            spec = self._spec(dataclasses.replace(letter.message, queue_name=letter.queue_name, options=options))
            with self.storage.transaction() as tx:
                if all(tx.remove([letter.id])):
                    tx.add([spec])
                    sent += 1
        return sent

    def close(self) -> None:
        """Let go of the file. The broker may be used again: it is opened again then."""
        self.leases.close()
        self._source.close()


class _Joined(threading.local):
    """The caller's transaction that this thread sends in."""

    storage: Storage | None = None
    queues: set[str]

    def __init__(self) -> None:
        self.queues = set()


class _hooks:  # noqa: N801 (used as a function)
    """What this thread's hooks enqueue goes with this delivery. A hook that is interrupted spoils it."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def __enter__(self) -> None:
        hooks_of.delivery = self._delivery

    def __exit__(self, _type: object, error: BaseException | None, _stack: object) -> None:
        if error is not None and not isinstance(error, MiddlewareError):
            hooks_of.spoil(error)
        hooks_of.delivery = None


def _dead_letter(queue_name: str, record: JobRecord) -> DeadLetter:
    try:
        message = Message.decode(record.payload)
    except Exception:  # noqa: BLE001 (That it cannot be decoded is why it is here.)
        message = None
    error = record.error
    text = "" if error is None else ": ".join(part for part in (error.type, error.message) if part)
    return DeadLetter(
        id=record.id,
        queue_name=queue_name,
        message=message,
        reason="" if error is None else error.reason,
        error=text,
        traceback="" if error is None else error.stack,
        attempts=record.attempts,
        died_at=datetime.fromtimestamp((record.ended_at_ms or 0) / 1000, tz=timezone.utc),
    )


def _priority(message: Message[Any], actor: Actor[Any, Any] | None) -> int:
    """In the engine, higher goes first."""
    wanted = message.options.get("broker_priority", 0)
    if not isinstance(wanted, int) or not -_BROKER_PRIORITY_MOST <= wanted <= _BROKER_PRIORITY_MOST:
        raise ValueError(f"broker_priority={wanted!r}: give a whole number of at most {_BROKER_PRIORITY_MOST:,}")
    lower_first = 0 if actor is None else max(-_ACTOR_PRIORITY_MOST, min(actor.priority, _ACTOR_PRIORITY_MOST))
    return wanted * _BROKER_PRIORITY - lower_first


def _milliseconds(name: str, value: int | timedelta) -> int:
    result = round(value.total_seconds() * 1000) if isinstance(value, timedelta) else value
    if isinstance(result, bool) or not isinstance(result, int) or result <= 0:
        raise ValueError(f"{name}={value!r}: give milliseconds, at least 1, or a timedelta")
    return result
