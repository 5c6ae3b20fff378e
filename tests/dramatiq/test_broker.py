"""What is sent, and what becomes of it before a worker has it."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import Message, MessageProxy, QueueJoinTimeout
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import Middleware, MiddlewareError
from tests.dramatiq.conftest import Await, Run

from litebroker import JobSpec, PayloadTooLargeError, State, open_storage
from litebroker_dramatiq import Dedupe, SQLiteBroker


class Recorder(Middleware):
    """Every enqueue hook, as it comes."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, int | None]] = []

    def before_enqueue(self, broker: dramatiq.Broker, message: Message[Any], delay: int | None) -> None:
        self.seen.append(("before", message, delay))

    def after_enqueue(self, broker: dramatiq.Broker, message: Message[Any], delay: int | None) -> None:
        self.seen.append(("after", message, delay))


def pending(broker: SQLiteBroker, queue: str = "default") -> list[Message[Any]]:
    """In the order in which they would be delivered."""
    jobs = broker.storage.page(broker.engine_queue(queue), State.PENDING, limit=10_000)
    return [Message.decode(job.payload) for job in jobs]


def test_nothing_is_opened_until_the_first_message(database: Path) -> None:
    broker = SQLiteBroker(database)

    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    broker.consume("default")

    assert not database.exists()
    work.send()
    assert database.exists()
    broker.close()


def test_a_queue_is_declared_once_and_without_a_delay_queue(broker: SQLiteBroker) -> None:
    declared = []

    class Watch(Middleware):
        def before_declare_queue(self, broker: dramatiq.Broker, queue_name: str) -> None:
            declared.append(("before", queue_name))

        def after_declare_queue(self, broker: dramatiq.Broker, queue_name: str) -> None:
            declared.append(("after", queue_name))

        def after_declare_delay_queue(self, broker: dramatiq.Broker, queue_name: str) -> None:
            declared.append(("delay", queue_name))

    broker.add_middleware(Watch())

    broker.declare_queue("mail")
    broker.declare_queue("mail")
    broker.declare_queue("mail.DQ")

    assert declared == [("before", "mail"), ("after", "mail")]
    assert broker.get_declared_queues() == {"mail"}
    assert broker.get_declared_delay_queues() == set()


def test_a_message_may_be_sent_to_a_queue_that_was_never_declared(broker: SQLiteBroker) -> None:
    message = Message[None](queue_name="elsewhere", actor_name="unknown", args=(), kwargs={}, options={})

    broker.enqueue(message)

    assert pending(broker, "elsewhere") == [message]
    assert "elsewhere" in broker.get_declared_queues()


def test_the_hooks_see_the_message_before_and_after_it_is_stored(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work() -> None: ...

    recorder = Recorder()
    broker.add_middleware(recorder)

    plain = work.send()
    delayed = work.send_with_options(delay=0)

    assert recorder.seen == [
        ("before", plain, None),
        ("after", plain, None),
        ("before", delayed, 0),
        ("after", delayed, 0),
    ]


def test_what_a_hook_adds_to_the_options_is_stored(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work() -> None: ...

    class Stamp(Middleware):
        def before_enqueue(self, broker: dramatiq.Broker, message: Message[Any], delay: int | None) -> None:
            message.options["trace"] = "abc"

    broker.add_middleware(Stamp())

    work.send()
    work.send_with_options(delay=10)

    assert [message.options for message in pending(broker)] == [{"trace": "abc"}, {"trace": "abc"}]


def test_a_hook_that_refuses_a_message_leaves_nothing_behind(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work() -> None: ...

    class Refuse(Middleware):
        def before_enqueue(self, broker: dramatiq.Broker, message: Message[Any], delay: int | None) -> None:
            raise MiddlewareError("not today")

    broker.add_middleware(Refuse())

    with pytest.raises(MiddlewareError, match="not today"):
        work.send()

    assert pending(broker) == []


def test_a_delayed_message_is_named_as_other_brokers_name_it_and_stored_without_an_eta(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work() -> None: ...

    before = time.time() * 1000
    message = work.send_with_options(delay=60_000)

    assert message.queue_name == "default.DQ"
    assert before + 59_999 <= message.options["eta"] <= time.time() * 1000 + 60_000
    (stored,) = pending(broker)
    assert (stored.queue_name, stored.options, stored.message_id) == ("default", {}, message.message_id)
    (job,) = broker.storage.page("dramatiq:default", State.PENDING)
    assert abs(job.due_at_ms - message.options["eta"]) < 1000


def test_an_eta_among_the_options_is_honoured(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work() -> None: ...

    eta = int(time.time() * 1000) + 60_000

    work.send_with_options(eta=eta)

    (job,) = broker.storage.page("dramatiq:default", State.PENDING)
    assert job.due_at_ms == eta
    assert pending(broker)[0].options == {}


@pytest.mark.parametrize("eta", [None, "soon", float("nan"), 0, -5, 1.5])
def test_an_eta_that_is_none_or_over_is_due_at_once(broker: SQLiteBroker, eta: Any) -> None:
    @dramatiq.actor
    def work() -> None: ...

    work.send_with_options(eta=eta)

    assert next(broker.consume("default", timeout=1000)) is not None


def test_a_message_that_another_broker_left_with_an_eta_waits_for_it(broker: SQLiteBroker) -> None:
    eta = int(time.time() * 1000) + 400
    message = Message[None](queue_name="default.DQ", actor_name="work", args=(), kwargs={}, options={"eta": eta})
    broker.storage.add([JobSpec(queue="dramatiq:default", payload=message.encode())])
    broker.declare_queue("default")
    consumer = broker.consume("default", timeout=5000)

    delivered = next(consumer)

    assert delivered is not None
    assert time.time() * 1000 >= eta
    assert (delivered.queue_name, delivered.options) == ("default", {})
    consumer.close()


def test_actors_with_a_lower_priority_number_go_first_also_after_a_delay(broker: SQLiteBroker) -> None:
    @dramatiq.actor(priority=10)
    def low(n: int) -> None: ...

    @dramatiq.actor(priority=0)
    def high(n: int) -> None: ...

    low.send(1)
    low.send(2)
    high.send_with_options(args=(3,), delay=0)
    high.send(4)

    assert [message.args[0] for message in pending(broker)] == [3, 4, 1, 2]


def test_a_broker_priority_weighs_more_than_the_actors(broker: SQLiteBroker) -> None:
    @dramatiq.actor(priority=100)
    def low(n: int) -> None: ...

    @dramatiq.actor(priority=0)
    def high(n: int) -> None: ...

    high.send(1)
    low.send_with_options(args=(2,), broker_priority=1)
    high.send_with_options(args=(3,), broker_priority=1)
    high.send_with_options(args=(4,), broker_priority=-1)

    assert [message.args[0] for message in pending(broker)] == [3, 2, 1, 4]


@pytest.mark.parametrize("priority", [2**80, -(2**80)])
def test_any_priority_of_an_actor_can_be_stored(broker: SQLiteBroker, priority: int) -> None:
    @dramatiq.actor(priority=priority)
    def work() -> None: ...

    work.send()

    assert len(pending(broker)) == 1


def test_a_broker_priority_that_is_no_number_is_refused(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work() -> None: ...

    with pytest.raises(ValueError, match="broker_priority='urgent'"):
        work.send_with_options(broker_priority="urgent")


def test_a_message_id_may_be_sent_twice(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work() -> None: ...

    message = work.send()

    broker.enqueue(message)

    assert [m.message_id for m in pending(broker)] == [message.message_id] * 2


def test_a_proxy_can_be_sent(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work() -> None: ...

    message = work.message()

    sent = broker.enqueue(MessageProxy(message))  # type: ignore[arg-type]

    assert type(sent) is Message
    assert pending(broker) == [message]


def test_many_messages_are_sent_in_order_or_not_at_all(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work(n: object) -> None: ...

    sent = broker.send_many([work.message(n) for n in range(100)])

    assert pending(broker) == sent
    with pytest.raises(TypeError):
        broker.send_many([work.message(1), work.message(object())])
    assert len(pending(broker)) == 100


def test_many_messages_can_be_delayed(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work(n: int) -> None: ...

    broker.send_many([work.message(1), work.message(2)], delay=60_000)

    assert broker.storage.counts("dramatiq:default").delayed == 2


def test_a_message_that_is_too_large_is_refused_with_its_size(database: Path) -> None:
    broker = SQLiteBroker(database, max_message_bytes=1000)

    @dramatiq.actor(broker=broker)
    def work(text: str) -> None: ...

    with pytest.raises(PayloadTooLargeError, match="over the limit of 1,000"):
        work.send("x" * 1000)

    assert not database.exists()
    broker.close()


def test_a_queue_name_that_is_too_long_is_refused(broker: SQLiteBroker) -> None:
    message = Message[None](queue_name="q" * 300, actor_name="work", args=(), kwargs={}, options={})

    with pytest.raises(ValueError, match="255 characters"):
        broker.enqueue(message)


def test_a_payload_need_not_be_text(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work(data: bytes) -> None: ...

    encoder = dramatiq.get_encoder()
    dramatiq.set_encoder(dramatiq.PickleEncoder())
    try:
        message = work.send(b"\xff\x00")

        delivered = next(broker.consume("default", timeout=1000))

        assert delivered == message
    finally:
        dramatiq.set_encoder(encoder)


class TestDedupe:
    def test_while_a_message_is_there_sending_it_again_answers_that_one(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor
        def welcome(user_id: int) -> None: ...

        first = welcome.send_with_options(args=(1,), dedupe_key="welcome:1")

        second = welcome.send_with_options(args=(2,), dedupe_key="welcome:1")

        assert second == first
        assert len(pending(broker)) == 1

    def test_a_repeated_message_is_not_counted_as_sent(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor
        def work() -> None: ...

        recorder = Recorder()
        broker.add_middleware(recorder)

        work.send_with_options(dedupe_key="k")
        work.send_with_options(dedupe_key="k")

        assert [event for event, _, _ in recorder.seen] == ["before", "after", "before"]

    def test_an_actor_makes_the_key_from_its_arguments(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor(dedupe_key=lambda user_id, **_: f"user:{user_id}")
        def welcome(user_id: int, *, tone: str = "warm") -> None: ...

        first = welcome.send(1)

        assert welcome.send(1, tone="cold") == first
        assert welcome.send(2) != first

    def test_two_actors_do_not_mean_the_same_by_a_key(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor(unique=True)
        def one() -> None: ...

        @dramatiq.actor(unique=True)
        def two() -> None: ...

        assert one.send() != two.send()

    def test_a_unique_actor_waits_or_runs_once_for_the_same_arguments(self, broker: SQLiteBroker, run: Run) -> None:
        started, go_on = threading.Event(), threading.Event()

        @dramatiq.actor(unique=True, max_retries=0)
        def build(**_: int) -> None:
            started.set()
            assert go_on.wait(10)

        first = build.send(a=1, b=2)

        with run(broker):
            assert started.wait(10)
            while_it_runs = build.send(b=2, a=1)
            go_on.set()
            broker.join("default", timeout=10_000)
            afterwards = build.send(a=1, b=2)
            broker.join("default", timeout=10_000)

        assert while_it_runs == first
        assert afterwards != first

    @pytest.mark.parametrize(("until", "again"), [("removed", False), ("ended", True)])
    def test_a_dead_letter_holds_its_key_or_lets_go_of_it(
        self, broker: SQLiteBroker, run: Run, until: str, again: bool
    ) -> None:
        @dramatiq.actor(max_retries=0)
        def fail() -> None:
            raise RuntimeError

        first = fail.send_with_options(dedupe_key="k", dedupe_until=until)
        with run(broker):
            broker.join("default", timeout=10_000)

        second = fail.send_with_options(dedupe_key="k", dedupe_until=until)

        assert (second.message_id != first.message_id) is again

    def test_a_retry_keeps_the_key(self, broker: SQLiteBroker, run: Run) -> None:
        @dramatiq.actor(min_backoff=100_000)
        def fail() -> None:
            raise RuntimeError

        first = fail.send_with_options(dedupe_key="k")
        with run(broker) as worker:
            while not broker.storage.counts("dramatiq:default").delayed:
                time.sleep(0.01)
            worker.join()

        again = fail.send_with_options(dedupe_key="k")

        assert again.message_id == first.message_id
        assert again.options["retries"] == 1
        assert len(pending(broker)) == 1

    def test_in_one_batch_each_position_gets_its_message(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor(unique=True)
        def work(n: int) -> None: ...

        sent = broker.send_many([work.message(1), work.message(2), work.message(1)])

        assert sent[0] == sent[2] != sent[1]
        assert len(pending(broker)) == 2

    def test_the_options_are_known_to_decorators_through_the_middleware(self, database: Path) -> None:
        bare = SQLiteBroker(database, middleware=[])

        with pytest.raises(ValueError, match="unique"):

            @dramatiq.actor(broker=bare, unique=True)
            def refused() -> None: ...

        bare.add_middleware(Dedupe())

        @dramatiq.actor(broker=bare, unique=True)
        def taken() -> None: ...

    def test_options_of_another_middleware_are_left_alone(self, database: Path) -> None:
        class Other(Middleware):
            @property
            def actor_options(self) -> set[str]:
                return {"unique", "cron"}

        broker = SQLiteBroker(database, middleware=[Other()])

        @dramatiq.actor(broker=broker, unique=True, cron="whenever")
        def work() -> None: ...

        assert work.send() != work.send()
        broker.close()

    @pytest.mark.parametrize("options", [{"dedupe_key": 5}, {"dedupe_key": ""}, {"dedupe_until": "later"}])
    def test_options_that_make_no_sense_are_refused(self, broker: SQLiteBroker, options: dict[str, Any]) -> None:
        @dramatiq.actor
        def work() -> None: ...

        with pytest.raises(ValueError, match="dedupe"):
            work.send_with_options(**options)


class TestTransactions:
    @pytest.fixture
    def connection(self, broker: SQLiteBroker, database: Path) -> Iterator[sqlite3.Connection]:
        broker.storage.counts("dramatiq:default")
        connection = sqlite3.connect(database)
        connection.execute("create table orders (id integer primary key)")
        yield connection
        connection.close()

    def test_messages_are_there_when_the_caller_commits(
        self, broker: SQLiteBroker, connection: sqlite3.Connection
    ) -> None:
        @dramatiq.actor
        def ship(order: int) -> None: ...

        with broker.transaction(connection):
            connection.execute("insert into orders values (1)")
            message = ship.send(1)
        unseen = pending(broker)
        connection.commit()

        assert unseen == []
        assert pending(broker) == [message]

    def test_messages_are_gone_when_the_caller_rolls_back(
        self, broker: SQLiteBroker, connection: sqlite3.Connection
    ) -> None:
        @dramatiq.actor
        def ship(order: int) -> None: ...

        with broker.transaction(connection):
            connection.execute("insert into orders values (1)")
            ship.send(1)
        connection.rollback()

        assert pending(broker) == []
        assert connection.execute("select count(*) from orders").fetchone() == (0,)

    def test_a_commit_in_the_block_wakes_workers_at_once(
        self, broker: SQLiteBroker, connection: sqlite3.Connection, run: Run, wait_for: Await
    ) -> None:
        ran: list[float] = []

        @dramatiq.actor
        def ship() -> None:
            ran.append(time.monotonic())

        with run(broker):
            time.sleep(0.2)  # The consumer waits for messages by now.
            with broker.transaction(connection):
                ship.send()
                connection.commit()
                committed = time.monotonic()
            wait_for(lambda: ran)

        assert ran[0] - committed < 0.25

    def test_other_threads_send_for_themselves(self, broker: SQLiteBroker, connection: sqlite3.Connection) -> None:
        @dramatiq.actor
        def work(n: int) -> None: ...

        with broker.transaction(connection):
            thread = threading.Thread(target=work.send, args=(1,))
            thread.start()
            thread.join()

            assert len(pending(broker)) == 1

    def test_without_a_connection_it_is_a_transaction_of_its_own(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor
        def work(n: int) -> None: ...

        def send_and_fail() -> None:
            with broker.transaction():
                work.send(3)
                raise KeyError

        with broker.transaction():
            work.send(1)
            work.send(2)
        with pytest.raises(KeyError):
            send_and_fail()

        assert [message.args for message in pending(broker)] == [(1,), (2,)]

    def test_a_connection_to_another_file_is_refused(self, broker: SQLiteBroker, tmp_path: Path) -> None:
        other = sqlite3.connect(tmp_path / "other.db")

        with pytest.raises(ValueError, match="same file"), broker.transaction(other):
            pass

        other.close()


class TestCancel:
    def test_a_message_that_waits_is_cancelled_delayed_or_not(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor
        def work() -> None: ...

        now, later = work.send(), work.send_with_options(delay=60_000)

        assert broker.cancel(now)
        assert broker.cancel(later.message_id)
        assert pending(broker) == []

    def test_what_has_ended_or_never_was_is_not(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor
        def work() -> None: ...

        message = work.send()
        broker.cancel(message)

        assert not broker.cancel(message)
        assert not broker.cancel("no-such-id")

    def test_what_runs_is_not(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor
        def work() -> None: ...

        message = work.send()
        consumer = broker.consume("default", timeout=1000)
        next(consumer)

        assert not broker.cancel(message)
        consumer.close()


class TestDeadLetters:
    def test_they_are_listed_with_their_reason_and_traceback(self, broker: SQLiteBroker, run: Run) -> None:
        @dramatiq.actor(max_retries=1, min_backoff=1)
        def fail() -> None:
            raise RuntimeError("no such user")

        message = fail.send()
        with run(broker):
            broker.join("default", timeout=10_000)

        (letter,) = broker.dead_letters()

        assert letter.message is not None
        assert letter.message.message_id == message.message_id
        assert (letter.reason, letter.error) == ("rejected", "RuntimeError: no such user")
        assert "in fail\n    raise RuntimeError" in letter.traceback
        assert letter.queue_name == "default"

    def test_they_can_be_sent_again_with_all_of_their_retries(self, broker: SQLiteBroker, run: Run) -> None:
        runs = []

        @dramatiq.actor(max_retries=1, min_backoff=1)
        def fail() -> None:
            runs.append(1)
            raise RuntimeError

        fail.send()
        with run(broker):
            broker.join("default", timeout=10_000)
            retried = broker.retry_dead_letters(broker.dead_letters("default"))
            broker.join("default", timeout=10_000)

        assert retried == 1
        assert len(runs) == 4
        assert len(broker.dead_letters()) == 1

    def test_a_dead_letter_is_sent_again_once(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor
        def work() -> None: ...

        work.send()
        consumer = broker.consume("default", timeout=1000)
        proxy = next(consumer)
        assert proxy is not None
        consumer.nack(proxy)
        letters = broker.dead_letters()

        assert broker.retry_dead_letters([*letters, *letters]) == 1
        assert len(pending(broker)) == 1
        consumer.close()

    def test_they_are_kept_as_long_as_was_said(self, database: Path, wait_for: Await) -> None:
        broker = SQLiteBroker(database, dead_message_ttl=timedelta(milliseconds=1), lease=600)

        @dramatiq.actor(broker=broker)
        def work() -> None: ...

        work.send()
        consumer = broker.consume("default", timeout=1000)
        proxy = next(consumer)
        assert proxy is not None

        consumer.nack(proxy)

        wait_for(lambda: not broker.dead_letters())
        consumer.close()
        broker.close()


class TestJoinAndFlush:
    def test_join_waits_for_what_is_delayed_and_what_runs(self, broker: SQLiteBroker, run: Run) -> None:
        ran = []

        @dramatiq.actor
        def work() -> None:
            time.sleep(0.1)
            ran.append(1)

        work.send_with_options(delay=200)

        with run(broker):
            broker.join("default", timeout=10_000)

        assert ran == [1]

    def test_join_gives_up_after_its_timeout(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor
        def work() -> None: ...

        work.send()

        with pytest.raises(QueueJoinTimeout, match="default"):
            broker.join("default", timeout=50)

    def test_join_counts_a_message_between_its_run_and_its_retry(self, broker: SQLiteBroker, run: Run) -> None:
        runs = []

        @dramatiq.actor(max_retries=20, min_backoff=1, max_backoff=1)
        def fail() -> None:
            runs.append(1)
            raise RuntimeError

        fail.send()

        with run(broker):
            broker.join("default", timeout=20_000)

        assert len(runs) == 21

    def test_flush_drops_waiting_delayed_and_dead_messages_of_one_queue(self, broker: SQLiteBroker) -> None:
        @dramatiq.actor
        def work() -> None: ...

        @dramatiq.actor(queue_name="other")
        def other() -> None: ...

        work.send()
        work.send_with_options(delay=60_000)
        consumer = broker.consume("default", timeout=1000)
        dead = next(consumer)
        assert dead is not None
        consumer.nack(dead)
        kept = other.send()

        broker.flush("default")

        assert broker.storage.counts("dramatiq:default") == broker.storage.counts("dramatiq:none")
        assert pending(broker, "other") == [kept]
        broker.flush_all()
        assert pending(broker, "other") == []
        consumer.close()

    def test_a_flush_leaves_what_runs_to_its_worker(self, broker: SQLiteBroker, run: Run) -> None:
        started, go_on = threading.Event(), threading.Event()

        @dramatiq.actor
        def work() -> None:
            started.set()
            assert go_on.wait(10)

        work.send()
        with run(broker):
            assert started.wait(10)

            broker.flush_all()
            go_on.set()
            broker.join("default", timeout=10_000)

        assert broker.dead_letters() == []


def test_a_file_that_cannot_be_used_is_a_connection_error(tmp_path: Path) -> None:
    broker = SQLiteBroker(tmp_path / "no-such-folder" / "jobs.db")

    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    with pytest.raises(ConnectionClosed, match="no-such-folder"):
        work.send()
    with pytest.raises(ConnectionClosed, match="no-such-folder"):
        next(broker.consume("default"))


def test_a_broker_can_be_closed_twice_and_used_again(broker: SQLiteBroker) -> None:
    @dramatiq.actor
    def work() -> None: ...

    work.send()

    broker.close()
    broker.close()
    work.send()

    assert len(pending(broker)) == 2


def test_an_open_storage_is_left_open(database: Path) -> None:
    storage = open_storage(database)
    broker = SQLiteBroker(storage)

    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    work.send()
    broker.close()

    assert storage.counts("dramatiq:default").ready == 1
    storage.close()


def test_brokers_of_different_namespaces_do_not_meet(broker: SQLiteBroker, database: Path) -> None:
    other = SQLiteBroker(database, namespace="other")
    message = Message[None](queue_name="default", actor_name="work", args=(), kwargs={}, options={})

    other.enqueue(message)

    assert pending(broker) == []
    assert pending(other) == [message]
    other.close()


@pytest.mark.parametrize("option", ["lease", "dead_message_ttl"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1s", timedelta(0)])
def test_a_duration_that_is_none_is_refused(database: Path, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        SQLiteBroker(database, **{option: value})


def test_a_warning_names_an_eta_that_is_none(broker: SQLiteBroker, caplog: pytest.LogCaptureFixture) -> None:
    @dramatiq.actor
    def work() -> None: ...

    with caplog.at_level(logging.WARNING):
        message = work.send_with_options(eta="soon")

    assert any(message.message_id in record.message and "soon" in record.message for record in caplog.records)
