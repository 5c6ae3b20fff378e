"""What actors and messages may ask for beyond Dramatiq's own options: dedupe keys and schedules."""

from __future__ import annotations

import hashlib
import logging
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from dramatiq import Actor, Broker, Message, Worker
from dramatiq.message import get_encoder
from dramatiq.middleware import Middleware

from litebroker import (
    DedupeUntil,
    JobSpec,
    ScheduleRecord,
    ScheduleSpec,
    Storage,
    StorageError,
    plan,
)
from litebroker_dramatiq.consumer import TICK

if TYPE_CHECKING:
    from litebroker_dramatiq.broker import SQLiteBroker

_log = logging.getLogger("litebroker.dramatiq")

# The longest that the scheduler sleeps: a schedule that another process has put is seen after this.
_LOOK_S = 5.0
_IDS = uuid.UUID("6d1f7c0e-6a8b-4c0b-9d39-1f3ee1b8d6c4")


class Dedupe(Middleware):
    """Options that keep a message from being sent twice.

        @dramatiq.actor(dedupe_key=lambda user_id: f"welcome:{user_id}")
        def welcome(user_id): ...

        @dramatiq.actor(unique=True)
        def rebuild_index(): ...

        report.send_with_options(args=(2024,), dedupe_key="report:2024")

    While a message with the key is in the queue, sending another answers that one. The key is let go of when the
    message has been acknowledged, or, with ``dedupe_until="ended"``, also when it is a dead letter.

    Options of actors:
        dedupe_key: A function of the message's arguments, or a string.
        dedupe_until: "removed", unless given, or "ended".
        unique: The key is made of all arguments, until "ended": one message that waits or runs.

    ``send_with_options`` takes ``dedupe_key`` (a string, used as it is) and ``dedupe_until``, with this middleware or
    without it.
    """

    @property
    def actor_options(self) -> set[str]:
        return {"dedupe_key", "dedupe_until", "unique"}


def dedupe_of(message: Message[Any], actor: Actor[Any, Any] | None) -> tuple[str | None, DedupeUntil]:
    """The message's dedupe key, and until when it holds it."""
    own = message.options
    if actor is None and not own:
        return None, "removed"
    options = {} if actor is None else actor.options
    until = own.get("dedupe_until") or options.get("dedupe_until") or ("ended" if options.get("unique") else "removed")
    if until not in {"removed", "ended"}:
        raise ValueError(f'dedupe_until={until!r}: it is "removed" or "ended"')
    key = own.get("dedupe_key")
    if key is None:
        key = _actor_key(message, options)
    elif not isinstance(key, str) or not key:
        raise ValueError(f"dedupe_key={key!r}: give a string that is not empty")
    return key, cast("DedupeUntil", until)


def _actor_key(message: Message[Any], options: dict[str, Any]) -> str | None:
    key: str | Callable[..., str] | None = options.get("dedupe_key")
    if callable(key):
        key = key(*message.args, **message.kwargs)
    if key is None and options.get("unique"):
        arguments = get_encoder().encode({"args": list(message.args), "kwargs": dict(sorted(message.kwargs.items()))})
        key = hashlib.sha256(arguments).hexdigest()[:32]
    # Two actors of one queue do not mean the same by the same key.
    return None if key is None else f"{message.actor_name}:{key}"


class Schedules(Middleware):
    """Options that send a message again and again, by the calendar or at an interval.

        @dramatiq.actor(cron="0 6 * * *", timezone="Europe/Berlin")
        def daily_report(): ...

        @dramatiq.actor(every=timedelta(minutes=5))
        def refresh(): ...

    The schedules are kept in the file, and workers send what is due: one message a tick, however many workers there
    are.
    Ticks that came while none was running are made up for by one message. A schedule is gone when a worker starts whose
    actor no longer has one.

    Options of actors:
        cron: Five fields.
        every: Milliseconds, or a `timedelta`.
        timezone: For ``cron``; UTC unless given.
        schedule_args: The arguments of each message.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def actor_options(self) -> set[str]:
        return {"cron", "every", "schedule_args", "timezone"}

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(broker,), name="litebroker-schedules", daemon=True)
        self._thread.start()

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()

    def _run(self, broker: SQLiteBroker) -> None:
        registered = False
        while True:
            pause = _LOOK_S
            try:
                if not registered:
                    if not register(broker):
                        return
                    registered = True
                pause = fire_due(broker)
            except StorageError as error:
                _log.warning("schedules could not be looked after, next try in a moment: %s", error)
            except Exception:  # noqa: BLE001 (whatever it is, this thread must go on)
                _log.exception("schedules could not be looked after")
            if self._stop.wait(pause):
                return


def schedule_of(actor: Actor[Any, Any]) -> ScheduleSpec | None:
    """An actor's schedule, if it has one. Raises ``ScheduleError``."""
    options = actor.options
    cron, every = options.get("cron"), options.get("every")
    if cron is None and every is None:
        return None
    if every is not None and not isinstance(every, timedelta):
        every = timedelta(milliseconds=every)
    return ScheduleSpec.parse(every=every, cron=cron, tz=options.get("timezone"))


def register(broker: SQLiteBroker) -> bool:
    """Bring the schedules in the file in line with the broker's actors; whether there are any.

    Those that have not changed keep their next tick.
    """
    storage = broker.storage
    known_ids = {(record.queue, record.id) for record in storage.list_schedules()}
    found = False
    for actor in list(broker.actors.values()):
        queue, spec = broker.engine_queue(actor.queue_name), schedule_of(actor)
        if spec is None:
            if (queue, actor.actor_name) in known_ids:
                storage.remove_schedule(queue, actor.actor_name)
            continue
        found = True
        job = _tick_of(broker, actor)
        with storage.transaction() as tx:
            old = tx.get_schedule(queue, actor.actor_name)
            now_ms = storage.clock.now_ms()
            record = ScheduleRecord.defined(queue, actor.actor_name, spec, job, old=old, now_ms=now_ms)
            if record != old:
                tx.put_schedule(record)
    return found


def _tick_of(broker: SQLiteBroker, actor: Actor[Any, Any]) -> JobSpec:
    """What each tick adds: the same bytes every time, so that a start of a worker changes nothing."""
    name = f"{broker.engine_queue(actor.queue_name)}:{actor.actor_name}"
    message = actor.message_with_options(args=tuple(actor.options.get("schedule_args", ())))
    return broker.tick_spec(message.copy(message_id=str(uuid.uuid5(_IDS, name)), message_timestamp=0), TICK)


def fire_due(broker: SQLiteBroker) -> float:
    """Send what is due. How many seconds there are until the next tick, or until one should look again."""
    storage: Storage = broker.storage
    queues = {broker.engine_queue(name) for name in broker.get_declared_queues()}
    due = {(record.queue, record.id) for record in storage.due_schedules(sorted(queues))}
    now_ms = storage.clock.now_ms()
    soonest_ms = now_ms + round(_LOOK_S * 1000)
    for record in storage.list_schedules():
        if record.queue not in queues:
            continue
        fire, next_at_ms = plan(record.spec, record.next_at_ms, record.last_at_ms, now_ms)
        if not fire and next_at_ms != record.next_at_ms:
            storage.fire_schedule(record, next_at_ms=next_at_ms, add=False)
        elif fire and (record.queue, record.id) in due:
            storage.fire_schedule(record, next_at_ms=next_at_ms)
        soonest_ms = min(soonest_ms, next_at_ms)
    return max(0.0, (soonest_ms - storage.clock.now_ms()) / 1000)
