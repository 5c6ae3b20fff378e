"""Results, limits and barriers, where Dramatiq's own suite does not look."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import dramatiq
import pytest
from dramatiq import group
from dramatiq.middleware import GroupCallbacks, Middleware
from dramatiq.rate_limits import Barrier, BucketRateLimiter, ConcurrentRateLimiter, WindowRateLimiter
from dramatiq.results import ResultFailure, ResultMissing, Results, ResultTimeout
from tests.dramatiq.conftest import App, Run

from litebroker_dramatiq import SQLiteBroker, SQLiteRateLimiterBackend, SQLiteResultBackend


@pytest.fixture
def results(broker: SQLiteBroker, database: Path) -> Iterator[SQLiteResultBackend]:
    backend = SQLiteResultBackend(database)
    broker.add_middleware(Results(backend=backend, store_results=True))
    yield backend
    backend.close()


@pytest.fixture
def limits(database: Path) -> Iterator[SQLiteRateLimiterBackend]:
    backend = SQLiteRateLimiterBackend(database)
    yield backend
    backend.close()


class TestResults:
    def test_a_waiter_is_woken_by_the_result(
        self, broker: SQLiteBroker, results: SQLiteResultBackend, run: Run
    ) -> None:
        stored: list[float] = []

        @dramatiq.actor
        def work() -> int:
            time.sleep(0.7)
            stored.append(time.monotonic())
            return 42

        message = work.send()
        with run(broker):
            assert message.get_result(block=True) == 42
            assert time.monotonic() - stored[0] < 0.1

    def test_a_short_timeout_is_kept(self, broker: SQLiteBroker, results: SQLiteResultBackend) -> None:
        @dramatiq.actor
        def work() -> int:
            return 1

        message = work.send()
        started = time.monotonic()

        with pytest.raises(ResultTimeout):
            message.get_result(block=True, timeout=150)

        assert 0.15 <= time.monotonic() - started < 0.6

    def test_none_is_a_result(self, broker: SQLiteBroker, results: SQLiteResultBackend, run: Run) -> None:
        @dramatiq.actor
        def work() -> None: ...

        message = work.send()
        with run(broker):
            assert message.get_result(block=True) is None

        assert message.get_result() is None

    def test_a_result_is_gone_after_its_time(self, broker: SQLiteBroker, results: SQLiteResultBackend) -> None:
        @dramatiq.actor
        def work() -> int:
            return 1

        message = work.message()

        results.store_result(message, 1, 100)

        assert results.get_result(message) == 1
        time.sleep(0.15)
        with pytest.raises(ResultMissing):
            results.get_result(message)

    def test_a_result_can_be_forgotten(self, broker: SQLiteBroker, results: SQLiteResultBackend) -> None:
        @dramatiq.actor
        def work() -> int:
            return 1

        message = work.message()
        results.store_result(message, 1, 10_000)

        assert results.forget(message)
        assert not results.forget(message)
        with pytest.raises(ResultMissing):
            results.get_result(message)

    def test_an_exception_is_raised_where_the_result_is_asked_for(
        self, broker: SQLiteBroker, results: SQLiteResultBackend, run: Run
    ) -> None:
        @dramatiq.actor(max_retries=0)
        def fail() -> None:
            raise RuntimeError("no such user")

        message = fail.send()

        with run(broker), pytest.raises(ResultFailure, match="RuntimeError: no such user"):
            message.get_result(block=True)

    def test_results_of_two_namespaces_do_not_meet(self, broker: SQLiteBroker, database: Path) -> None:
        one, two = (SQLiteResultBackend(database, namespace=name) for name in ("one", "two"))

        @dramatiq.actor
        def work() -> int:
            return 1

        message = work.message()

        one.store_result(message, 1, 10_000)

        with pytest.raises(ResultMissing):
            two.get_result(message)
        one.close()
        two.close()

    def test_a_result_reaches_another_process(self, app: App) -> None:
        app.write("""
            from dramatiq.results import Results

            broker = SQLiteBroker("jobs.db")
            broker.add_middleware(Results(backend=SQLiteResultBackend("jobs.db"), store_results=True))
            dramatiq.set_broker(broker)

            @dramatiq.actor
            def double(n):
                return 2 * n
        """)
        app.worker("--processes", "1", "--threads", "2")

        asker = app.python("print(double.send(21).get_result(block=True, timeout=20_000))")

        assert asker.wait() == 0
        assert asker.output.strip() == "42"


class TestLimits:
    def test_a_concurrent_limit_holds(self, limits: SQLiteRateLimiterBackend) -> None:
        limiter = ConcurrentRateLimiter(limits, "k", limit=2)

        with limiter.acquire(), limiter.acquire(), limiter.acquire(raise_on_failure=False) as third:
            assert not third

        with limiter.acquire(raise_on_failure=False) as again:
            assert again

    def test_many_threads_at_once_get_no_more_than_the_bucket_holds(self, limits: SQLiteRateLimiterBackend) -> None:
        limiter = BucketRateLimiter(limits, "k", limit=10, bucket=60_000)
        got: list[bool] = []

        def take() -> None:
            for _ in range(5):
                with limiter.acquire(raise_on_failure=False) as acquired:
                    got.append(acquired)

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert got.count(True) == 10

    def test_a_window_counts_over_its_keys(self, limits: SQLiteRateLimiterBackend) -> None:
        limiter = WindowRateLimiter(limits, "k", limit=3, window=60)

        got = []
        for _ in range(5):
            with limiter.acquire(raise_on_failure=False) as acquired:
                got.append(acquired)

        assert got == [True, True, True, False, False]

    def test_the_keys_of_a_sum_may_be_a_list(self, limits: SQLiteRateLimiterBackend) -> None:
        assert limits.incr_and_sum("a", ["a", "b"], 2, 3, 10_000)
        assert not limits.incr_and_sum("b", lambda: ["a", "b"], 2, 3, 10_000)
        assert limits.incr_and_sum("b", ["a", "b"], 1, 3, 10_000)

    def test_a_key_that_has_expired_counts_as_nothing(self, limits: SQLiteRateLimiterBackend) -> None:
        limits.add("k", 5, 50)

        time.sleep(0.1)

        assert not limits.decr("k", 1, 0, 1000)
        assert limits.add("k", 1, 1000)
        assert not limits.add("k", 1, 1000)

    def test_a_success_starts_the_keys_time_anew(self, limits: SQLiteRateLimiterBackend) -> None:
        limits.incr("k", 1, 10, 300)
        time.sleep(0.2)
        limits.incr("k", 1, 10, 300)
        time.sleep(0.2)

        assert not limits.incr("k", 9, 10, 300)

    def test_a_notification_is_heard_also_when_it_came_first(self, limits: SQLiteRateLimiterBackend) -> None:
        limits.wait_notify("k", 10_000)

        assert limits.wait("k", 1000)
        assert limits.wait("k", 1000)
        assert not limits.wait("other", 50)

    def test_all_waiters_of_a_barrier_wake_together(self, limits: SQLiteRateLimiterBackend) -> None:
        barrier = Barrier(limits, "k")
        barrier.create(5)
        woken: list[float] = []

        def party() -> None:
            assert barrier.wait(timeout=10_000)
            woken.append(time.monotonic())

        threads = [threading.Thread(target=party) for _ in range(4)]
        for thread in threads:
            thread.start()
        while not limits.incr("k", 0, 1, 900_000):
            time.sleep(0.005)  # Until the count is down to 1: four have arrived.
        time.sleep(0.1)

        assert barrier.wait(block=False)
        for thread in threads:
            thread.join()

        assert len(woken) == 4
        assert max(woken) - min(woken) < 0.05

    def test_keys_of_two_namespaces_do_not_meet(self, database: Path) -> None:
        one, two = (SQLiteRateLimiterBackend(database, namespace=name) for name in ("one", "two"))

        one.add("k", 1, 10_000)

        assert two.add("k", 1, 10_000)
        assert one.clear() == 1
        assert two.clear() == 1
        one.close()
        two.close()


def test_a_groups_callback_runs_once_after_all_of_its_messages(
    broker: SQLiteBroker, limits: SQLiteRateLimiterBackend, results: SQLiteResultBackend, run: Run
) -> None:
    broker.add_middleware(GroupCallbacks(limits))
    done: list[int] = []
    called: list[list[int]] = []

    @dramatiq.actor
    def part(n: int) -> int:
        done.append(n)
        return n

    @dramatiq.actor
    def finish() -> None:
        called.append(sorted(done))

    work = group([part.message(n) for n in range(20)])
    work.add_completion_callback(finish.message())

    work.run()
    with run(broker):
        broker.join("default", timeout=20_000)
        values = sorted(work.get_results())

    assert called == [list(range(20))]
    assert values == list(range(20))


def test_a_message_that_comes_again_counts_once_in_its_group(
    broker: SQLiteBroker, limits: SQLiteRateLimiterBackend, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("litebroker_dramatiq.consumer._PUT_OFF_MS", 50)
    done: list[int] = []
    called: list[list[int]] = []

    class FailOnce(Middleware):
        def after_process_message(
            self,
            broker: dramatiq.Broker,
            message: dramatiq.MessageProxy,
            *,
            result: object = None,
            exception: BaseException | None = None,
        ) -> None:
            if message.args == (1,) and done.count(1) == 1:
                broker.enqueue(part.message(object()))  # type: ignore[arg-type]

    # Hooks run last first: the group's before this one.
    broker.add_middleware(FailOnce())
    broker.add_middleware(GroupCallbacks(limits))

    @dramatiq.actor
    def part(n: int) -> None:
        done.append(n)

    @dramatiq.actor
    def finish() -> None:
        called.append(sorted(done))

    work = group([part.message(1), part.message(2).copy(options={"eta": int(time.time() * 1000) + 700})])
    work.add_completion_callback(finish.message())

    work.run()
    with run(broker):
        broker.join("default", timeout=20_000)

    assert called == [[1, 1, 2]]


def test_running_messages_are_interrupted_and_waiting_ones_cancelled(
    broker: SQLiteBroker, database: Path, run: Run
) -> None:
    dramatiq_abort = pytest.importorskip("dramatiq_abort")
    from litebroker_dramatiq import SQLiteEventBackend

    broker.add_middleware(dramatiq_abort.Abortable(backend=SQLiteEventBackend(database)))
    started = threading.Event()
    ended: list[str] = []

    @dramatiq.actor(max_retries=0)
    def work(n: int) -> None:
        started.set()
        try:
            for _ in range(1000):
                time.sleep(0.01)
        except dramatiq_abort.Abort:
            ended.append("aborted")
            raise

    running = work.send(1)
    with run(broker, threads=1):
        assert started.wait(10)
        waiting = work.send(2)

        assert broker.abort(waiting)
        assert not broker.abort(running)
        broker.join("default", timeout=10_000)

    assert ended == ["aborted"]
    (letter,) = broker.dead_letters()
    assert letter.message is not None
    assert letter.message.message_id == running.message_id
