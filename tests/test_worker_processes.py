"""Workers as users run them: processes, which get signals, stall, and are killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT, comes_true

from litebroker import Counts, Job, Queue, Retention

# Each runs the queue "work" of the file in argv[1], and writes a line for each start and each end of a job to the
# file in argv[2]; a short line that is appended to a file comes there whole.
BEGINNING = """
import os, signal, sys, threading, time
from litebroker import Backoff, Context, Queue

queue = Queue("work", sys.argv[1], backoff=Backoff.fixed(0), lease=float(sys.argv[3]) if len(sys.argv) > 3 else 30)
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def tell(*words):
    os.write(log, (" ".join(map(str, words)) + "\\n").encode())

def run(worker):
    threading.Thread(target=tell_when_it_runs, daemon=True).start()
    sys.exit(0 if worker.run() else 3)

def tell_when_it_runs():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.001)
    tell("up")

"""

SHORT = (
    BEGINNING
    + """
def handler(data):
    tell("ran", data)

run(queue.process(handler, concurrency=4))
"""
)

# Its jobs wait for a file of their name beside the log.
GATED = (
    BEGINNING
    + """
def handler(data, context):
    tell("began", data, context.attempt)
    while not os.path.exists(f"{sys.argv[2]}.{data}"):
        if context.cancelled.wait(0.01):
            tell("cancelled", data)
            return
    tell("ended", data)

run(queue.process(handler, concurrency=2))
"""
)

# Never idle: it has work for longer than the test lasts.
BUSY = (
    BEGINNING
    + """
def handler(data):
    time.sleep(0.01)
    tell("ran", data)

run(queue.process(handler))
"""
)

# One of its jobs kills whoever runs it.
DEADLY = (
    BEGINNING
    + """
def handler(data):
    if data == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    tell("ran", data)

run(queue.process(handler))
"""
)

STUBBORN = (
    BEGINNING
    + """
def handler(data):
    tell("began", data)
    threading.Event().wait()

run(queue.process(handler))
"""
)

UNCLOSED = (
    BEGINNING
    + """
begun = threading.Event()

def handler(data):
    begun.set()
    time.sleep(0.3)
    tell("ended", data)

queue.process(handler)
begun.wait(30)
tell("left")
"""
)


class Workers:
    """Starts worker processes, reads what they tell, and leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self.database = folder / "jobs.db"
        self.log = folder / "log"
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, program: str, *, lease: float = 30) -> subprocess.Popen[bytes]:
        # One for each, since another that is starting may be reading its own.
        script = self._folder / f"program{len(self._processes)}.py"
        script.write_text(program)
        process = subprocess.Popen([sys.executable, str(script), str(self.database), str(self.log), str(lease)])
        self._processes.append(process)
        return process

    def told(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def open(self, name: object) -> None:
        (self._folder / f"log.{name}").touch()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path)
    yield workers
    workers.close()


@pytest.fixture
def queue(workers: Workers) -> Iterator[Queue[Any]]:
    with Queue("work", workers.database, retention=Retention(failed=None)) as queue:
        yield queue


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_worker_in_order(workers: Workers, queue: Queue[Any], number: signal.Signals) -> None:
    process = workers.start(GATED)
    queue.add_many(["a", "b", "c"])
    assert comes_true(lambda: len(workers.told()) == 3)

    process.send_signal(number)

    assert not comes_true(lambda: process.poll() is not None, limit=0.3)
    workers.open("a")
    workers.open("b")
    assert process.wait(LIMIT) == 0
    assert sorted(workers.told()) == ["began a 1", "began b 1", "ended a", "ended b", "up"]
    assert queue.stats() == Counts(ready=1)


def test_a_second_signal_cancels_the_handlers(workers: Workers, queue: Queue[Any]) -> None:
    process = workers.start(GATED)
    queue.add("a")
    assert comes_true(lambda: sorted(workers.told()) == ["began a 1", "up"])
    process.send_signal(signal.SIGTERM)
    assert not comes_true(lambda: process.poll() is not None, limit=0.3)

    process.send_signal(signal.SIGTERM)

    assert process.wait(LIMIT) == 0
    assert workers.told()[-1] == "cancelled a"


def test_an_idle_worker_ends_at_once(workers: Workers, queue: Queue[Any]) -> None:
    process = workers.start(SHORT)
    assert comes_true(lambda: workers.told() == ["up"])

    process.send_signal(signal.SIGTERM)

    assert process.wait(5) == 0


def test_a_program_that_ends_waits_for_its_handlers(workers: Workers, queue: Queue[Any]) -> None:
    queue.add_many([1, 2, 3])

    process = workers.start(UNCLOSED)

    assert process.wait(LIMIT) == 0
    assert workers.told() == ["left", "ended 1"]
    assert queue.stats() == Counts(ready=2)


def test_the_jobs_of_a_killed_worker_run_again_within_seconds(workers: Workers, queue: Queue[Any]) -> None:
    process = workers.start(GATED)
    queue.add_many(["a", "b"])
    assert comes_true(lambda: len(workers.told()) == 3)
    workers.start(GATED)
    assert comes_true(lambda: workers.told().count("up") == 2)

    process.kill()
    killed_at = time.monotonic()

    assert comes_true(lambda: {"began a 2", "began b 2"} <= set(workers.told()))
    assert time.monotonic() - killed_at < 3
    workers.open("a")
    workers.open("b")
    assert comes_true(lambda: queue.stats() == Counts())


def test_a_job_that_kills_its_workers_takes_no_other_along(workers: Workers, queue: Queue[Any]) -> None:
    for _ in range(4):
        workers.start(DEADLY)
    assert comes_true(lambda: workers.told().count("up") == 4)

    queue.add_many([*range(1500), "deadly", *range(1500, 3000)])

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    assert [(job.data, job.attempts) for job in queue.dead_letters()] == [("deadly", 3)]
    assert {f"ran {number}" for number in range(3000)} <= set(workers.told())


def test_a_busy_worker_takes_over_the_jobs_of_a_killed_one(workers: Workers, queue: Queue[Any]) -> None:
    process = workers.start(GATED)
    queue.add_many(["a", "b"])
    assert comes_true(lambda: len(workers.told()) == 3)
    queue.add_many(list(range(2000)))
    workers.start(BUSY)
    assert comes_true(lambda: "ran 10" in workers.told())

    process.kill()

    assert comes_true(lambda: {"ran a", "ran b"} <= set(workers.told()))
    assert queue.size() > 0


def test_a_program_ends_though_a_handler_does_not(workers: Workers, queue: Queue[Any]) -> None:
    process = workers.start(STUBBORN)
    queue.add("a")
    assert comes_true(lambda: sorted(workers.told()) == ["began a", "up"])

    process.send_signal(signal.SIGTERM)
    assert not comes_true(lambda: process.poll() is not None, limit=0.3)
    process.send_signal(signal.SIGTERM)

    assert process.wait(LIMIT) == 3
    assert queue.stats().active == 1


def test_a_job_that_keeps_killing_its_worker_is_a_dead_letter(workers: Workers, queue: Queue[Any]) -> None:
    queue.add("poison", attempts=3)
    program = BEGINNING + "queue.process(lambda _: os.kill(os.getpid(), 9)).run()"

    codes = [workers.start(program).wait(LIMIT) for _ in range(3)]
    queue.claim()

    assert codes == [-9, -9, -9]
    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert (dead.error.reason, dead.attempts) == ("lapsed", 3)
    assert [attempt.outcome for attempt in dead.history] == ["lapsed"] * 3


def test_a_worker_that_stalled_past_its_lease_cannot_settle(workers: Workers, queue: Queue[Any]) -> None:
    process = workers.start(GATED, lease=1)
    job = queue.add("a")
    assert comes_true(lambda: sorted(workers.told()) == ["began a 1", "up"])
    process.send_signal(signal.SIGSTOP)
    taken: list[Job[Any]] = []

    def taken_over() -> bool:
        taken.extend(queue.claim())
        return bool(taken)

    assert comes_true(taken_over)
    process.send_signal(signal.SIGCONT)

    assert comes_true(lambda: "cancelled a" in workers.told())
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 0
    assert (taken[0].id, taken[0].attempts) == (job.id, 2)
    assert queue.complete(taken[0])


@pytest.mark.slow
def test_jobs_survive_kills_at_any_point(workers: Workers, queue: Queue[Any]) -> None:
    chance = random.Random(7)
    queue_of_many_attempts: Queue[Any] = Queue("work", queue.storage, attempts=None)
    running = [workers.start(SHORT) for _ in range(2)]
    added = 0
    for _ in range(8):
        queue_of_many_attempts.add_many(range(added, added + 500))
        added += 500
        time.sleep(chance.uniform(0, 0.5))  # the kill's moment is what is drawn
        running.pop(0).kill()
        running.append(workers.start(SHORT))

    assert comes_true(lambda: queue.stats() == Counts())
    runs = Counter(line for line in workers.told() if line.startswith("ran "))
    assert set(runs) == {f"ran {number}" for number in range(added)}
    # Each kill may make those run again that were finished a few milliseconds before it.
    assert sum(runs.values()) - added < 8 * 64


def test_many_processes_run_each_job_once(workers: Workers, queue: Queue[Any]) -> None:
    queue.add_many(range(4000))

    processes = [workers.start(SHORT) for _ in range(4)]

    assert comes_true(lambda: queue.stats() == Counts())
    assert comes_true(lambda: workers.told().count("up") == 4)
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
    runs = sorted(int(line.removeprefix("ran ")) for line in workers.told() if line != "up")
    assert runs == list(range(4000))


def test_an_idle_worker_in_another_process_starts_at_once(workers: Workers, queue: Queue[Any]) -> None:
    workers.start(SHORT)
    assert comes_true(lambda: workers.told() == ["up"])
    waits = []

    for number in range(20):
        added_at = time.monotonic()
        queue.add(number)
        assert comes_true(lambda: workers.told()[-1] == f"ran {number}")  # noqa: B023 (called at once)
        waits.append(time.monotonic() - added_at)

    assert sorted(waits)[10] < 0.1  # A worker that polls needs a quarter of a second.


def test_a_worker_in_another_thread_leaves_signals_alone(workers: Workers, queue: Queue[Any]) -> None:
    program = BEGINNING + (
        "before = signal.getsignal(signal.SIGTERM)\n"
        "with queue.process(tell):\n"
        "    assert signal.getsignal(signal.SIGTERM) is before\n"
        "    thread = threading.Thread(target=queue.process(tell).run)\n"
        "    thread.start()\n"
        "    assert signal.getsignal(signal.SIGTERM) is before\n"
        "    queue.close()\n"
        "    thread.join()\n"
    )

    process = workers.start(program)

    assert process.wait(LIMIT) == 0


def test_run_puts_the_signals_handlers_back(workers: Workers, queue: Queue[Any]) -> None:
    program = BEGINNING + (
        "def mine(*_): ...\n"
        "signal.signal(signal.SIGTERM, mine)\n"
        "worker = queue.process(tell)\n"
        "threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()\n"
        "assert worker.run()\n"
        "assert signal.getsignal(signal.SIGTERM) is mine\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )

    process = workers.start(program)

    assert process.wait(LIMIT) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is not kept everywhere")
def test_a_worker_that_gets_no_threads_says_so_and_leaves_nothing_behind(workers: Workers, queue: Queue[Any]) -> None:
    program = BEGINNING + (
        "import resource\n"
        "queue.add_many(range(10))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "try:\n"
        "    queue.process(lambda _: None, concurrency=5000)\n"
        "except RuntimeError as error:\n"
        "    tell(error)\n"
        "queue.close()\n"
        "tell(threading.active_count())\n"
    )

    process = workers.start(program)

    assert process.wait(LIMIT) == 0
    assert workers.told() == ["can't start new thread", "1"]
    assert queue.stats().active == 0
