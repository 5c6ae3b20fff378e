"""How messages are claimed, held, given back and settled."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import Consumer, Message, MessageProxy
from dramatiq.middleware import Middleware, Retries, TimeLimit, TimeLimitExceeded
from dramatiq.results import ResultFailure, Results
from tests.dramatiq.conftest import Await, Run

from litebroker import JobError, JobSpec, State
from litebroker_dramatiq import SQLiteBroker, SQLiteResultBackend

QUEUE = "dramatiq:default"


@pytest.fixture
def consume(broker: SQLiteBroker) -> Iterator[Callable[..., Consumer]]:
    consumers: list[Consumer] = []

    def consume(prefetch: int = 10, timeout: int = 1000) -> Consumer:
        consumers.append(broker.consume("default", prefetch, timeout))
        return consumers[-1]

    yield consume
    for consumer in consumers:
        consumer.close()


def take(consumer: Consumer) -> MessageProxy:
    message = next(consumer)
    assert message is not None
    return message


def send(broker: SQLiteBroker, count: int = 1, **options: Any) -> list[Message[Any]]:
    make = Message[None]
    messages = [
        make(queue_name="default", actor_name="work", args=(n,), kwargs={}, options=dict(options)) for n in range(count)
    ]
    return broker.send_many(messages)


def test_the_first_look_finds_a_message_that_waits(broker: SQLiteBroker, consume: Callable[..., Consumer]) -> None:
    (message,) = send(broker)

    assert take(consume()) == message


def test_an_idle_consumer_answers_none_after_its_timeout(consume: Callable[..., Consumer]) -> None:
    consumer = consume(timeout=200)

    started = time.monotonic()

    assert next(consumer) is None
    assert 0.2 <= time.monotonic() - started < 1


def test_a_consumer_that_has_its_prefetch_waits_as_well(broker: SQLiteBroker, consume: Callable[..., Consumer]) -> None:
    send(broker, 3)
    consumer = consume(prefetch=2, timeout=200)
    held = [take(consumer), take(consumer)]

    started = time.monotonic()
    third = next(consumer)

    assert third is None
    assert time.monotonic() - started >= 0.2
    consumer.ack(held[0])
    assert take(consumer).args == (2,)


def test_a_message_that_is_sent_ends_the_wait(broker: SQLiteBroker, consume: Callable[..., Consumer]) -> None:
    consumer = consume(timeout=10_000)
    assert broker.storage.counts(QUEUE).pending == 0
    timer = threading.Timer(0.2, send, [broker])
    timer.start()

    started = time.monotonic()
    take(consumer)

    assert time.monotonic() - started < 1
    timer.join()


def test_messages_of_one_priority_come_in_their_order(broker: SQLiteBroker, run: Run) -> None:
    seen: list[int] = []

    @dramatiq.actor
    def work(n: int) -> None:
        seen.append(n)

    send(broker, 100)

    with run(broker, threads=1):
        broker.join("default", timeout=10_000)

    assert seen == list(range(100))


class TestHoldings:
    """A worker holds what it can run, and no more."""

    def test_a_busy_worker_holds_as_many_messages_as_it_has_threads(
        self, broker: SQLiteBroker, run: Run, wait_for: Await
    ) -> None:
        go_on = threading.Event()

        @dramatiq.actor
        def work(n: int) -> None:
            assert go_on.wait(10)

        send(broker, 20)

        with run(broker, threads=3):
            wait_for(lambda: broker.storage.counts(QUEUE).active == 3)
            time.sleep(0.3)
            held = broker.storage.counts(QUEUE).active
            go_on.set()
            broker.join("default", timeout=10_000)

        assert held == 3

    def test_all_queues_of_a_worker_share_its_threads(self, broker: SQLiteBroker, run: Run, wait_for: Await) -> None:
        go_on = threading.Event()

        @dramatiq.actor
        def work() -> None:
            assert go_on.wait(10)

        @dramatiq.actor(queue_name="other")
        def other() -> None:
            assert go_on.wait(10)

        for _ in range(5):
            work.send()
            other.send()

        def active() -> int:
            return sum(broker.storage.counts(f"dramatiq:{name}").active for name in ("default", "other"))

        with run(broker, threads=3):
            wait_for(lambda: active() == 3)
            time.sleep(0.3)
            held = active()
            go_on.set()
            broker.join("default", timeout=10_000)
            broker.join("other", timeout=10_000)

        assert held == 3

    def test_every_queue_gets_its_turn(self, broker: SQLiteBroker, run: Run) -> None:
        order: list[str] = []

        @dramatiq.actor
        def work() -> None:
            order.append("work")
            time.sleep(0.03)

        @dramatiq.actor(queue_name="other")
        def other() -> None:
            order.append("other")
            time.sleep(0.03)

        for _ in range(10):
            work.send()
            other.send()

        with run(broker, threads=1):
            broker.join("default", timeout=10_000)
            broker.join("other", timeout=10_000)

        assert 3 <= order[:10].count("work") <= 7

    def test_the_queue_whose_actors_go_first_has_the_threads_first(self, broker: SQLiteBroker, run: Run) -> None:
        order: list[str] = []

        @dramatiq.actor(priority=5)
        def low() -> None:
            order.append("low")
            time.sleep(0.03)

        @dramatiq.actor(queue_name="urgent", priority=1)
        def high() -> None:
            order.append("high")
            time.sleep(0.03)

        for _ in range(8):
            low.send()
            high.send()

        with run(broker, threads=1):
            broker.join("default", timeout=10_000)
            broker.join("urgent", timeout=10_000)

        assert order[:8].count("high") >= 7

    def test_what_the_user_sets_as_prefetch_is_used_in_full(self, broker: SQLiteBroker, wait_for: Await) -> None:
        go_on = threading.Event()

        @dramatiq.actor
        def work(n: int) -> None:
            assert go_on.wait(10)

        send(broker, 20)
        worker = dramatiq.Worker(broker, worker_threads=2, worker_timeout=100)
        worker.queue_prefetch = 7

        worker.start()

        wait_for(lambda: broker.storage.counts(QUEUE).active == 7)
        go_on.set()
        broker.join("default", timeout=10_000)
        worker.stop()


class TestSettling:
    def test_messages_are_acknowledged_from_any_thread_on_any_consumer(
        self, broker: SQLiteBroker, consume: Callable[..., Consumer]
    ) -> None:
        send(broker, 2)
        first, second = consume(), consume()
        messages = [take(first), take(first)]

        for message in messages:
            thread = threading.Thread(target=second.ack, args=(message,))
            thread.start()
            thread.join()
        first.close()

        assert broker.storage.counts(QUEUE).active == 0

    def test_an_acknowledgement_is_written_without_another_look_for_messages(
        self, broker: SQLiteBroker, consume: Callable[..., Consumer], wait_for: Await
    ) -> None:
        send(broker)
        consumer = consume()

        consumer.ack(take(consumer))

        wait_for(lambda: broker.storage.counts(QUEUE).active == 0, within=3)

    def test_what_was_never_claimed_or_is_settled_is_ignored(
        self, broker: SQLiteBroker, consume: Callable[..., Consumer]
    ) -> None:
        send(broker)
        consumer = consume()
        message = take(consumer)
        stranger = MessageProxy(message._message)  # noqa: SLF001

        consumer.nack(message)
        consumer.nack(message)
        consumer.ack(message)
        consumer.ack(stranger)
        consumer.nack(stranger)
        consumer.nack(message._message)  # type: ignore[arg-type]  # noqa: SLF001

        assert len(broker.dead_letters()) == 1

    def test_given_back_messages_keep_their_place_and_their_attempts(
        self, broker: SQLiteBroker, consume: Callable[..., Consumer]
    ) -> None:
        sent = send(broker, 3)
        consumer = consume()
        messages = [take(consumer) for _ in range(3)]

        consumer.requeue(message for message in reversed(messages))

        jobs = broker.storage.page(QUEUE, State.PENDING)
        assert [Message.decode(job.payload) for job in jobs] == sent
        assert [job.attempts for job in jobs] == [0, 0, 0]

    def test_closing_gives_back_what_was_claimed_and_not_yet_taken(
        self, broker: SQLiteBroker, consume: Callable[..., Consumer]
    ) -> None:
        send(broker, 5)
        consumer = consume()
        take(consumer)
        assert broker.storage.counts(QUEUE).active == 5

        consumer.close()
        consumer.close()

        counts = broker.storage.counts(QUEUE)
        assert (counts.ready, counts.active) == (4, 1)

    def test_a_payload_that_cannot_be_decoded_is_a_dead_letter_and_the_next_is_delivered(
        self, broker: SQLiteBroker, consume: Callable[..., Consumer]
    ) -> None:
        broker.storage.add([JobSpec(queue=QUEUE, payload=b"\xff nonsense")])
        broker.storage.add([JobSpec(queue=QUEUE, payload=b'{"queue_name": "default"}')])
        (message,) = send(broker)
        broker.declare_queue("default")

        assert take(consume()) == message

        assert [(letter.reason, letter.message) for letter in broker.dead_letters()] == [("parse", None)] * 2

    def test_a_message_for_an_unknown_actor_is_a_dead_letter(self, broker: SQLiteBroker, run: Run) -> None:
        (message,) = send(broker)
        broker.declare_queue("default")

        with run(broker):
            broker.join("default", timeout=10_000)

        (letter,) = broker.dead_letters()
        assert letter.message == message
        assert letter.reason == "rejected"

    def test_a_message_from_another_queues_payload_is_acknowledged_all_the_same(
        self, broker: SQLiteBroker, run: Run
    ) -> None:
        seen = []

        @dramatiq.actor
        def work(n: int) -> None:
            seen.append(n)

        moved = Message[None](queue_name="old", actor_name="work", args=(1,), kwargs={}, options={})
        broker.storage.add([JobSpec(queue=QUEUE, payload=moved.encode())])

        with run(broker):
            broker.join("default", timeout=10_000)

        assert seen == [1]


class TestLeases:
    @pytest.fixture
    def short(self, database: Path) -> Iterator[SQLiteBroker]:
        broker = SQLiteBroker(database, lease=600)
        dramatiq.set_broker(broker)
        yield broker
        broker.close()

    def test_a_message_that_runs_for_several_leases_runs_once(self, short: SQLiteBroker, run: Run) -> None:
        runs = []

        @dramatiq.actor
        def work() -> None:
            runs.append(1)
            time.sleep(2)

        work.send()

        with run(short, threads=2):
            short.join("default", timeout=10_000)

        assert runs == [1]

    def test_a_paused_worker_keeps_what_it_has(self, short: SQLiteBroker, wait_for: Await) -> None:
        @dramatiq.actor
        def work(n: int) -> None:
            time.sleep(1.8)

        send(short, 2)
        worker = dramatiq.Worker(short, worker_threads=1, worker_timeout=100)
        worker.queue_prefetch = 2 + 1
        worker.start()
        wait_for(lambda: short.storage.counts(QUEUE).active == 2)

        worker.pause()
        (job, *_) = short.storage.page(QUEUE, State.ACTIVE)

        assert job.attempts == 1
        worker.resume()
        short.join("default", timeout=10_000)
        worker.stop()

    def test_a_stop_waits_for_what_runs_and_keeps_its_lease(self, short: SQLiteBroker, wait_for: Await) -> None:
        runs = []

        @dramatiq.actor
        def work(n: int) -> None:
            runs.append(n)
            time.sleep(1.8)

        send(short, 3)
        worker = dramatiq.Worker(short, worker_threads=1, worker_timeout=100)
        worker.queue_prefetch = 3
        worker.start()
        wait_for(lambda: runs)

        worker.stop()

        jobs = short.storage.page(QUEUE, State.PENDING)
        assert runs == [0]
        assert [(Message.decode(job.payload).args, job.attempts) for job in jobs] == [((1,), 0), ((2,), 0)]
        assert short.storage.counts(QUEUE).active == 0

    def test_what_a_lost_lease_leads_to_is_not_stored(self, short: SQLiteBroker, run: Run) -> None:
        go_on = threading.Event()
        started = threading.Event()

        @dramatiq.actor(max_retries=5, min_backoff=60_000)
        def work(n: int) -> None:
            started.set()
            assert go_on.wait(10)
            raise RuntimeError

        send(short)
        with run(short):
            assert started.wait(10)
            (job,) = short.storage.page(QUEUE, State.ACTIVE)
            short.storage.fail(job.lease, JobError("rejected"), retry_in_ms=None)
            go_on.set()
            time.sleep(0.5)

        counts = short.storage.counts(QUEUE)
        assert (counts.pending, counts.failed) == (0, 1)


class Spy(Middleware):
    """Calls a function at a hook."""

    def __init__(self, **hooks: Callable[[], Any]) -> None:
        self.hooks = hooks

    def before_ack(self, broker: dramatiq.Broker, message: MessageProxy) -> None:
        self.hooks.get("before_ack", int)()

    def after_ack(self, broker: dramatiq.Broker, message: MessageProxy) -> None:
        self.hooks.get("after_ack", int)()

    def after_process_message(
        self,
        broker: dramatiq.Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        self.hooks.get("after_process_message", int)()


class TestFollowUps:
    """What the hooks of a message enqueue is stored with its acknowledgement."""

    def test_the_next_of_a_pipeline_is_stored_when_the_one_before_is_acknowledged(
        self, broker: SQLiteBroker, run: Run
    ) -> None:
        waiting: list[int] = []
        seen: list[int] = []

        @dramatiq.actor
        def one() -> int:
            return 42

        @dramatiq.actor(queue_name="two")
        def two(n: int = 0) -> None:
            seen.append(n)

        def look() -> None:
            waiting.append(broker.storage.counts("dramatiq:two").pending)

        broker.add_middleware(Spy(before_ack=look, after_ack=look))

        (one.message() | two.message()).run()
        with run(broker, queues={"default"}):
            broker.join("default", timeout=10_000)
        with run(broker, queues={"two"}):
            broker.join("two", timeout=10_000)

        assert waiting[:2] == [0, 1]
        assert seen == [42]

    def test_a_retry_replaces_its_message_in_one_step(self, broker: SQLiteBroker, run: Run, wait_for: Await) -> None:
        @dramatiq.actor(min_backoff=60_000)
        def fail() -> None:
            raise RuntimeError

        fail.send()
        seen = set()

        with run(broker):
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                counts = broker.storage.counts(QUEUE)
                seen.add(counts.pending + counts.active)
                if counts.delayed:
                    break

        assert seen == {1}

    def test_what_an_actor_sends_itself_is_sent_at_once(self, broker: SQLiteBroker, run: Run) -> None:
        seen: list[int] = []

        @dramatiq.actor(queue_name="other")
        def other() -> None: ...

        @dramatiq.actor
        def work() -> None:
            other.send()
            seen.append(broker.storage.counts("dramatiq:other").pending)

        work.send()
        with run(broker, queues={"default"}):
            broker.join("default", timeout=10_000)

        assert seen == [1]

    def test_many_that_a_hook_sends_are_stored_with_the_acknowledgement(self, broker: SQLiteBroker, run: Run) -> None:
        waiting: list[int] = []

        @dramatiq.actor(queue_name="other")
        def other(n: int) -> None: ...

        def send_some() -> None:
            broker.send_many([other.message(n) for n in range(3)])
            waiting.append(broker.storage.counts("dramatiq:other").pending)

        broker.add_middleware(Spy(after_process_message=send_some))

        @dramatiq.actor
        def work(n: int) -> None: ...

        send(broker)
        with run(broker, queues={"default"}):
            broker.join("default", timeout=10_000)

        assert waiting == [0]
        assert broker.storage.counts("dramatiq:other").pending == 3

    def test_a_pipeline_whose_next_message_cannot_be_made_is_not_acknowledged(
        self, broker: SQLiteBroker, run: Run, wait_for: Await
    ) -> None:
        @dramatiq.actor
        def one() -> object:
            return object()

        @dramatiq.actor
        def two(_: object = None) -> None: ...

        (one.message() | two.message()).run()

        with run(broker):
            wait_for(lambda: broker.storage.counts(QUEUE).delayed)

        (job,) = broker.storage.page(QUEUE, State.PENDING)
        assert job.error is not None
        assert (job.error.reason, job.error.type) == ("hook", "TypeError")

    def test_it_is_a_dead_letter_in_the_end(self, database: Path, run: Run, wait_for: Await) -> None:
        broker = SQLiteBroker(database, max_deliveries=1)
        dramatiq.set_broker(broker)

        @dramatiq.actor
        def one() -> object:
            return object()

        (one.message() | one.message()).run()

        with run(broker):
            (letter,) = wait_for(broker.dead_letters)

        assert letter.reason == "hook"
        broker.close()

    def test_a_result_that_cannot_be_stored_leaves_the_message(
        self, broker: SQLiteBroker, tmp_path: Path, run: Run, wait_for: Await
    ) -> None:
        folder = tmp_path / "missing"
        broker.add_middleware(Results(backend=SQLiteResultBackend(folder / "results.db")))

        @dramatiq.actor(store_results=True)
        def work() -> int:
            return 1

        work.send()

        with run(broker):
            wait_for(lambda: broker.storage.counts(QUEUE).delayed)

        (job,) = broker.storage.page(QUEUE, State.PENDING)
        assert job.error is not None
        assert job.error.type == "DatabaseUnavailableError"

    # As in Dramatiq without us: what interrupts the hooks that look after a failure ends the thread.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_message_whose_hooks_were_interrupted_is_not_acknowledged(
        self, broker: SQLiteBroker, run: Run, wait_for: Await
    ) -> None:
        class Interrupt(BaseException):
            pass

        def interrupt() -> None:
            raise Interrupt("in a hook")

        broker.add_middleware(Spy(after_process_message=interrupt))

        @dramatiq.actor
        def work(n: int) -> None: ...

        send(broker)

        with run(broker):
            wait_for(lambda: broker.storage.counts(QUEUE).delayed)

        (job,) = broker.storage.page(QUEUE, State.PENDING)
        assert job.error is not None
        assert job.error.reason == "hook"

    def test_a_hook_that_fails_by_itself_changes_nothing(self, broker: SQLiteBroker, run: Run) -> None:
        def fail() -> None:
            raise RuntimeError

        broker.add_middleware(Spy(after_process_message=fail))

        @dramatiq.actor
        def work(n: int) -> None: ...

        send(broker)

        with run(broker):
            broker.join("default", timeout=10_000)

        assert broker.dead_letters() == []

    def test_what_a_hook_sends_to_another_broker_goes_there(
        self, broker: SQLiteBroker, tmp_path: Path, run: Run
    ) -> None:
        other = SQLiteBroker(tmp_path / "other.db")

        @dramatiq.actor(broker=other)
        def there() -> None: ...

        broker.add_middleware(Spy(after_process_message=there.send))

        @dramatiq.actor
        def work(n: int) -> None: ...

        send(broker)
        with run(broker):
            broker.join("default", timeout=10_000)

        assert other.storage.counts(QUEUE).ready == 1
        other.close()


def test_time_limits_that_strike_in_the_middle_of_a_send_break_nothing(database: Path, run: Run) -> None:
    broker = SQLiteBroker(database, middleware=[TimeLimit(interval=1), Retries(max_retries=0)])
    broker.emit_after("process_boot")  # Starts the thread that looks for limits.
    dramatiq.set_broker(broker)
    interrupted: list[int] = []
    sent = itertools.count()

    @dramatiq.actor(queue_name="sink")
    def sink(n: int) -> None: ...

    @dramatiq.actor(time_limit=30)
    def send_for_ever(n: int) -> None:
        try:
            while True:
                sink.send(n)
                next(sent)
        except TimeLimitExceeded:
            interrupted.append(n)
            raise

    broker.send_many([send_for_ever.message(n) for n in range(100)])

    with run(broker, threads=4, queues={"default"}) as worker:
        broker.join("default", timeout=40_000)
        alive = [thread.is_alive() for thread in worker.workers]
        sink.send(-1)

    # A send that was interrupted may have been stored all the same, but nothing is stored in part, or twice.
    stored, whole = broker.storage.counts("dramatiq:sink").ready, next(sent) + 1
    assert sorted(interrupted) == list(range(100))
    assert alive == [True] * 4
    assert len(broker.dead_letters("default")) == 100
    assert whole <= stored <= whole + 100
    broker.close()


def test_those_who_wait_for_a_message_hear_of_it_when_its_workers_vanished(database: Path, run: Run) -> None:
    broker = SQLiteBroker(database, max_deliveries=1, lease=300)
    results = SQLiteResultBackend(database)
    broker.add_middleware(Results(backend=results, store_results=True))
    dramatiq.set_broker(broker)

    @dramatiq.actor
    def work() -> None: ...

    message = work.send()
    # As a worker that stands still: it never comes to renew.
    broker.storage.claim([QUEUE], limit=1, lease_ms=100)

    with run(broker), pytest.raises(ResultFailure, match="vanished"):
        results.get_result(message, block=True, timeout=10_000)

    (letter,) = broker.dead_letters()
    assert letter.reason == "lapsed"
    broker.close()


def test_closing_the_broker_gives_back_what_nobody_has_settled(broker: SQLiteBroker) -> None:
    send(broker, 2)
    consumer = broker.consume("default", timeout=1000)
    take(consumer)

    broker.close()

    assert broker.storage.counts(QUEUE).ready == 2
