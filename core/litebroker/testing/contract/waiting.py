# ruff: noqa: PLR2004, S101 - tests, which stand here so that other storages can be held to them too
"""Listeners."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from litebroker.clock import SystemClock
from litebroker.errors import StorageClosedError
from litebroker.jobs import JobRecord, State
from litebroker.storage import Storage
from litebroker.testing.clock import ManualClock
from litebroker.testing.contract.steps import (
    PATIENCE_S,
    SETTLERS,
    Contract,
    add,
    bring_to,
    claim,
    claim_one,
    get,
    ids_of,
    odd_text,
    spec,
)

T = TypeVar("T")


class Waiting(Contract):
    """The listener may be wrong when it says that there is something: so no test takes that amiss."""

    @staticmethod
    def wait_until(listener: Any, found: Callable[[], T], timeout: float | None = None) -> T:
        """Wait and look, as a worker does. None when patience is at its end."""
        until = time.monotonic() + PATIENCE_S
        while not (answer := found()) and time.monotonic() < until:
            listener.wait(timeout if timeout is not None else PATIENCE_S)
        return answer

    @staticmethod
    def is_quiet(listener: Any) -> bool:
        return any(not listener.wait(0.01) for _ in range(200))

    def test_without_anything_to_do_a_wait_ends_in_time(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"], ["t"])

        started = time.monotonic()
        quiet = self.is_quiet(listener)
        elapsed = time.monotonic() - started

        assert quiet
        assert elapsed < PATIENCE_S

    def test_a_wait_lasts_as_long_as_it_was_asked_to(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"])
        self.is_quiet(listener)

        started = time.monotonic()
        woken = listener.wait(0.2)

        assert woken or time.monotonic() - started >= 0.19

    def test_a_wait_of_nothing_looks_once(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"])
        self.is_quiet(listener)
        add(live_storage)

        assert listener.wait(0)

    def test_a_waiter_is_woken_by_a_new_job(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"])

        def work() -> tuple[list[JobRecord], float]:
            jobs = self.wait_until(listener, lambda: claim(live_storage))
            return jobs, time.monotonic()

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            working_still = not working.done()
            added_at = time.monotonic()
            job_id = add(live_storage)
            jobs, claimed_at = working.result()

        assert working_still
        assert ids_of(jobs) == [job_id]
        assert claimed_at - added_at < PATIENCE_S / 2

    def test_a_waiter_without_a_timeout_is_woken_too(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["other", "q"])

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(listener.wait)
            add(live_storage)
            woken = waiting.result(PATIENCE_S)

        assert woken

    def test_each_job_of_a_batch_finds_a_waiter(self, live_storage: Storage) -> None:
        def work() -> list[JobRecord]:
            listener = live_storage.listener(["q"])
            ready.release()
            return self.wait_until(listener, lambda: claim(live_storage))

        ready = threading.Semaphore(0)
        with ThreadPoolExecutor(4) as pool:
            working = [pool.submit(work) for _ in range(4)]
            for _ in range(4):
                assert ready.acquire(timeout=PATIENCE_S)
            added = live_storage.add([spec() for _ in range(4)])
            claimed = [each.result() for each in working]

        assert sorted(job.id for jobs in claimed for job in jobs) == [each.id for each in added]

    def test_nothing_is_missed_between_looking_and_waiting(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"])
        self.is_quiet(listener)

        for _ in range(20):
            assert claim(live_storage) == []
            add(live_storage)
            assert listener.wait(PATIENCE_S)
            assert len(claim(live_storage)) == 1

    def test_what_happened_since_the_listener_was_made_counts(self, live_storage: Storage) -> None:
        for_jobs, for_topics = live_storage.listener(["q"]), live_storage.listener(topics=["t"])

        add(live_storage)
        live_storage.notify("t")

        assert for_jobs.wait(PATIENCE_S)
        assert for_topics.wait(PATIENCE_S)

    @pytest.mark.parametrize("pause_s", [0.0, 0.01], ids=["at once", "with breaks"])
    def test_a_stream_of_jobs_is_drained_without_a_stall(self, live_storage: Storage, pause_s: float) -> None:
        listener = live_storage.listener(["q"])

        def work() -> list[int]:
            ids: list[int] = []
            while len(ids) < 50:
                jobs = claim(live_storage, limit=10)
                ids += ids_of(jobs)
                if not jobs and not listener.wait(PATIENCE_S):
                    break
            return ids

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            added = []
            for _ in range(50):
                added.append(add(live_storage))
                threading.Event().wait(pause_s)
            drained = working.result()

        assert drained == added

    def test_a_waiter_is_woken_when_a_delay_is_over(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"])
        job_id = add(live_storage, delay_ms=300)

        jobs = self.wait_until(listener, lambda: claim(live_storage))

        assert ids_of(jobs) == [job_id]
        assert (jobs[0].claimed_at_ms or 0) - jobs[0].due_at_ms < PATIENCE_S * 1000 / 2

    def test_a_waiter_is_woken_when_a_lease_runs_out(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"])
        job_id = add(live_storage)
        claim_one(live_storage, lease_ms=300)

        jobs = self.wait_until(listener, lambda: claim(live_storage))

        assert ids_of(jobs) == [job_id]

    @pytest.mark.parametrize(
        "how", ["release", "fail and retry", "retry", "reschedule", "move", "resume", "a free place in the group"]
    )
    def test_a_waiter_is_woken_however_a_job_becomes_claimable(self, live_storage: Storage, how: str) -> None:
        if how in {"release", "fail and retry"}:
            lease = get(live_storage, bring_to(live_storage, State.ACTIVE)).lease
            act: Callable[[], object] = lambda: SETTLERS[how](live_storage, lease)  # noqa: E731
        elif how == "retry":
            failed = bring_to(live_storage, State.FAILED)
            act = lambda: live_storage.retry([failed])  # noqa: E731
        elif how == "reschedule":
            delayed = add(live_storage, delay_ms=1_000_000)
            act = lambda: live_storage.reschedule(delayed, due_at_ms=0)  # noqa: E731
        elif how == "move":
            add(live_storage, "source")
            act = lambda: live_storage.move("source", "q")  # noqa: E731
        elif how == "resume":
            add(live_storage)
            live_storage.pause("q", paused=True)
            act = lambda: live_storage.pause("q", paused=False)  # noqa: E731
        else:
            add(live_storage, group="g")
            holder = claim_one(live_storage)
            add(live_storage, group="g")
            act = lambda: live_storage.complete([holder.lease])  # noqa: E731
        listener = live_storage.listener(["q"])
        assert claim(live_storage) == []

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(lambda: (self.wait_until(listener, lambda: claim(live_storage)), time.monotonic()))
            acted_at = time.monotonic()
            act()
            jobs, claimed_at = working.result()

        assert len(jobs) == 1
        assert claimed_at - acted_at < PATIENCE_S / 2

    def test_every_listener_of_a_topic_is_woken(self, live_storage: Storage) -> None:
        listeners = [live_storage.listener(topics=["t", "u"]) for _ in range(3)]
        for listener in listeners:
            self.is_quiet(listener)

        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(listener.wait, PATIENCE_S) for listener in listeners]
            live_storage.notify("t")
            woken = [each.result() for each in waiting]

        assert woken == [True] * 3

    def test_a_topic_without_listeners_may_be_notified(self, live_storage: Storage) -> None:
        live_storage.notify("nobody listens")
        live_storage.notify_queue("nobody listens")

        assert live_storage.queues() == []

    @odd_text
    def test_a_topic_may_have_any_name(self, live_storage: Storage, text: str) -> None:
        listener = live_storage.listener([text], [text])
        self.is_quiet(listener)

        live_storage.notify(text)
        by_topic = listener.wait(PATIENCE_S)
        live_storage.notify_queue(text)
        by_queue = listener.wait(PATIENCE_S)

        assert (by_topic, by_queue) == (True, True)

    def test_a_result_wakes_the_one_who_waits_for_it(self, live_storage: Storage) -> None:
        listener = live_storage.listener(topics=["result:1"])

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: self.wait_until(listener, lambda: live_storage.peek("results", ["1"])))
            with live_storage.transaction():
                live_storage.put("results", "1", b"done")
                live_storage.notify("result:1")
            result = waiting.result()

        assert result["1"].data == b"done"

    def test_a_notice_in_a_transaction_goes_out_after_the_commit(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"], ["t"])
        self.is_quiet(listener)

        with ThreadPoolExecutor(1) as pool, live_storage.transaction():
            job_id = add(live_storage)
            # Who is woken now sees nothing, waits again, and must be woken again.
            working = pool.submit(lambda: self.wait_until(listener, lambda: claim(live_storage)))
            wait([working], 0.2)
            live_storage.notify("t")
            committed_at = time.monotonic()
        jobs = working.result()

        assert ids_of(jobs) == [job_id]
        assert time.monotonic() - committed_at < PATIENCE_S / 2

    def test_wake_ends_a_wait_from_another_thread(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"])
        self.is_quiet(listener)

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(listener.wait)
            listener.wake()
            woken = waiting.result(PATIENCE_S)

        assert woken

    def test_wake_ends_the_next_wait(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"])
        self.is_quiet(listener)

        listener.wake()

        assert listener.wait(PATIENCE_S)

    def test_wake_is_used_up_by_the_wait_that_it_ended(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"])
        listener.wake()
        listener.wait(PATIENCE_S)

        assert self.is_quiet(listener)

    def test_close_ends_a_wait_and_may_be_repeated(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"], ["t"])
        self.is_quiet(listener)

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(listener.wait)
            wait([waiting], 0.05)
            listener.close()
            waiting.result(PATIENCE_S)
        listener.close()
        add(live_storage)
        live_storage.notify("t")

        assert ids_of(claim(live_storage)) != []

    @pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals to send")
    def test_a_signal_handler_that_raises_ends_a_wait(self, live_storage: Storage) -> None:
        def interrupt(*_: object) -> None:
            raise LookupError("from the handler")

        listener = live_storage.listener(["q"])
        self.is_quiet(listener)
        before = signal.signal(signal.SIGUSR1, interrupt)
        main = threading.get_ident()
        timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGUSR1))

        timer.start()
        try:
            with pytest.raises(LookupError, match="from the handler"):  # noqa: PT012 - a wait may end early
                while listener.wait(PATIENCE_S):
                    pass
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)

        add(live_storage)
        assert listener.wait(PATIENCE_S)
        assert len(claim(live_storage)) == 1

    @pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals to send")
    def test_a_signal_handler_may_wake_the_waiter(self, live_storage: Storage) -> None:
        listener = live_storage.listener(["q"])
        self.is_quiet(listener)
        before = signal.signal(signal.SIGUSR1, lambda *_: listener.wake())
        main = threading.get_ident()
        timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGUSR1))

        timer.start()
        try:
            woken = listener.wait(PATIENCE_S)
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)

        assert woken


class Lifetime(Contract):
    """From opening to closing."""

    def test_a_storage_says_where_it_is_and_what_time_it_goes_by(self, storage: Storage, clock: ManualClock) -> None:
        assert storage.clock is clock
        assert storage.location

    def test_a_worker_is_named_by_its_host_and_process(self, storage: Storage) -> None:
        job_id = bring_to(storage, State.COMPLETED)

        assert re.fullmatch(rf".+:{os.getpid()}", get(storage, job_id).history[0].worker)

    def test_close_may_be_repeated(self, clock: ManualClock, tmp_path: Path) -> None:
        storage = self.make_storage(clock, tmp_path)
        add(storage)

        storage.close()
        storage.close()

        for verb in (lambda: add(storage), lambda: claim(storage), lambda: storage.peek("s", ["k"]), storage.queues):
            with pytest.raises(StorageClosedError):
                verb()

    def test_close_ends_the_waits_of_its_listeners(self, tmp_path: Path) -> None:
        storage = self.make_storage(SystemClock(), tmp_path)
        listener = storage.listener(["q"])

        def wait_for_ever() -> bool:
            with suppress(StorageClosedError):
                while listener.wait(PATIENCE_S):
                    pass
            return True

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait_for_ever)
            wait([waiting], 0.05)
            closed_at = time.monotonic()
            storage.close()
            waiting.result()

        assert time.monotonic() - closed_at < PATIENCE_S / 2
