"""Work horses, whose commands their workers run: what they see of it, and what becomes of it when one is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import rq
from rq.job import JobStatus
from rq.results import Result
from tests.rq import horses, tasks
from tests.rq.conftest import Processes, failure, wait_until

from litebroker_rq import SQLiteConnection

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere work horses open the file themselves")


def perform(queue: rq.Queue, processes: Processes, function: Any, *arguments: object) -> Any:
    """What the function returns in a work horse."""
    job = queue.enqueue(function, *arguments, job_timeout=30)
    worker = processes.rq("worker", "--burst")
    assert processes.finish(worker) == 0
    job.refresh()
    assert job.get_status() == JobStatus.FINISHED, processes.log(worker)
    return job.return_value()


def test_a_work_horse_does_not_open_the_file(queue: rq.Queue, processes: Processes) -> None:
    assert perform(queue, processes, horses.ask) == (False, b"x")


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (horses.wait_for_a_list, [b"list", b"x"]),
        (horses.subscribe, b"x"),
        (horses.enqueue_once, True),
        (horses.load_a_script, 1),
        (horses.work, 1),
    ],
)
def test_for_what_is_its_own_a_work_horse_opens_it(
    function: Any, answer: object, queue: rq.Queue, processes: Processes
) -> None:
    found, alone = perform(queue, processes, function)

    assert (list(found) if isinstance(found, tuple) else found) == answer
    assert alone


def test_the_threads_of_a_work_horse_share_its_line(queue: rq.Queue, processes: Processes) -> None:
    assert perform(queue, processes, horses.count_in_threads) == (400, False)


def test_the_children_of_a_work_horse_use_the_file_by_themselves(queue: rq.Queue, processes: Processes) -> None:
    assert perform(queue, processes, horses.fork) == (60, False)


def test_an_exception_that_strikes_a_question_loses_no_answer_but_its_own(
    queue: rq.Queue, processes: Processes
) -> None:
    counted, acknowledged, struck = perform(queue, processes, horses.be_interrupted)

    assert struck > 1
    assert acknowledged <= counted <= acknowledged + struck


def test_a_signal_handler_may_ask_while_a_question_is_open(queue: rq.Queue, processes: Processes) -> None:
    own, counted, handled, kept = perform(queue, processes, horses.ask_in_handlers)

    assert own == counted > 0
    assert handled == kept > 0


def test_large_values_pass_in_both_directions(queue: rq.Queue, processes: Processes) -> None:
    assert perform(queue, processes, tasks.large, 20_000_000) == b"x" * 20_000_000


def test_a_job_whose_worker_is_killed_goes_on_in_its_work_horse(
    connection: SQLiteConnection, queue: rq.Queue, processes: Processes
) -> None:
    job = queue.enqueue(horses.kill_worker_and_ask)
    processes.rq("worker", "--burst")

    wait_until(lambda: job.get_status(refresh=True) == JobStatus.FINISHED)
    assert job.return_value() == (b"x", True)


FATAL = """
import os, sys
import rq
from litebroker_rq import connect, horses, processes

path, number, moment = sys.argv[1], int(sys.argv[2]), sys.argv[3]
asked = 0
askers = set()
for verb, function in list(horses._VERBS.items()):
    def run(*args, function=function):
        global asked
        if processes.speaks_for_itself():
            return function(*args)
        asked += 1
        askers.add(processes.own())
        if len(askers) == number and moment == "horse":
            os.kill(os.getpid(), 9)
        if asked == number and moment == "before":
            os.kill(os.getpid(), 9)
        done = function(*args)
        if asked == number and moment == "after":
            os.kill(os.getpid(), 9)
        return done
    horses._VERBS[verb] = run
connection = connect(path)
rq.Worker([rq.Queue(connection=connection)], connection=connection).work(burst=True)
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 7))
def test_a_worker_that_is_killed_at_any_question_leaves_a_job_that_ran_once(
    number: int, moment: str, path: Path, queue: rq.Queue, processes: Processes
) -> None:
    log = path.parent / "log.txt"
    job = queue.enqueue(tasks.note, str(log), "ran")
    after = queue.enqueue(tasks.note, str(log), "afterwards", depends_on=job)

    processes.script(FATAL, str(path), str(number), moment)

    wait_until(lambda: job.get_status(refresh=True) == JobStatus.FINISHED)
    wait_until(lambda: after.get_status(refresh=True) in {JobStatus.QUEUED, JobStatus.FINISHED})
    processes.run("worker", "--burst")
    assert log.read_text().split() == ["ran", "afterwards"]
    assert len(job.results()) == len(after.results()) == 1
    assert queue.finished_job_registry.count == 2
    assert not queue.started_job_registry.count


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
import rq
from litebroker_rq import connect, horses, processes

path, number = sys.argv[1], int(sys.argv[2])
asked = 0
main_commands = 0
for verb, function in list(horses._VERBS.items()):
    def run(*args, function=function):
        global asked, main_commands
        if threading.current_thread() is threading.main_thread():
            main_commands += 1
            return function(*args)
        asked += 1
        if asked == number:
            horse = int(processes.own().split("|")[-2])
            before = main_commands
            os.kill(horse, signal.SIGKILL)
            while Path(f"/proc/{horse}").exists():  # until the worker has noticed
                time.sleep(0.001)
            end = time.monotonic() + 0.3
            while main_commands < before + 3 and time.monotonic() < end:  # so long may it do something about that
                time.sleep(0.001)
        return function(*args)
    horses._VERBS[verb] = run
connection = connect(path)
rq.Worker([rq.Queue(connection=connection)], connection=connection).work(burst=True)
"""


@pytest.mark.parametrize("number", range(1, 5))
def test_what_a_killed_work_horse_has_sent_is_run_before_its_worker_goes_by_its_death(
    number: int, path: Path, queue: rq.Queue, processes: Processes
) -> None:
    log = path.parent / "log.txt"
    job = queue.enqueue(tasks.note, str(log), "ran", retry=rq.Retry(max=1))

    worker = processes.script(KILLED, str(path), str(number))

    assert processes.finish(worker) == 0
    assert job.get_status(refresh=True) == JobStatus.FINISHED
    assert [result.type for result in job.results()].count(Result.Type.SUCCESSFUL) == 1
    assert queue.finished_job_registry.count == 1
    assert not queue.failed_job_registry.count


UNATTENDED = """
import select, sys, threading
import rq
from litebroker_rq import connect

path, lacking = sys.argv[1:]
connection = connect(path)
worker = rq.Worker([rq.Queue(connection=connection)], connection=connection)
if lacking == "epoll":
    del select.epoll
else:
    def start(thread, start=threading.Thread.start):
        if thread.name == "work horse's commands":
            raise RuntimeError("can't start new thread")
        start(thread)
    threading.Thread.start = start
worker.work(burst=True)
"""


@pytest.mark.parametrize("lacking", ["epoll", "thread"])
def test_a_work_horse_that_cannot_be_attended_to_goes_on_alone(
    lacking: str, path: Path, queue: rq.Queue, processes: Processes
) -> None:
    job = queue.enqueue(horses.ask)

    worker = processes.script(UNATTENDED, str(path), lacking)

    assert processes.finish(worker) == 0
    assert job.get_status(refresh=True) == JobStatus.FINISHED, processes.log(worker)
    assert job.return_value() == (True, b"x")


def test_a_job_whose_worker_and_then_its_work_horse_are_killed_fails_as_abandoned(
    path: Path, queue: rq.Queue, processes: Processes
) -> None:
    queue.enqueue(tasks.nothing)
    job = queue.enqueue(horses.die)

    processes.script(FATAL, str(path), "2", "horse")  # before the job has started
    wait_until(lambda: job.get_status(refresh=True) == JobStatus.STARTED)
    processes.rq("worker", "-w", "rq.SimpleWorker")

    wait_until(lambda: job.get_status(refresh=True) == JobStatus.FAILED, seconds=10)
    assert "AbandonedJobError" in failure(job)


COUNTING = """
import ctypes, json, os, sys, threading
import rq
from litebroker_rq import connect
from litebroker_rq.database import opened

connection = connect(sys.argv[1])
queue = rq.Queue(connection=connection)
worker = rq.Worker([queue], connection=connection)
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p

def arenas():
    file = ctypes.c_void_p(libc.fopen(b"arenas.xml", b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    return open("arenas.xml").read().count("<heap ")

for jobs in (2, 12):
    queue.enqueue_many([rq.Queue.prepare_data("tests.rq.tasks.nothing") for _ in range(jobs)])
    before = opened(sys.argv[1]).storage.transactions
    worker.work(burst=True, logging_level="ERROR")
    print(json.dumps({
        "transactions": opened(sys.argv[1]).storage.transactions - before,
        "threads": [thread.name for thread in threading.enumerate()].count("work horse's commands"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "arenas": arenas() if hasattr(libc, "malloc_info") else 1,
    }))
"""


def test_a_worker_of_work_horses_takes_no_more_with_each_job(path: Path, queue: rq.Queue, processes: Processes) -> None:
    worker = processes.script(COUNTING, str(path))
    assert processes.finish(worker) == 0, processes.log(worker)

    few, many = map(json.loads, processes.log(worker).splitlines())

    assert many["transactions"] - few["transactions"] <= 4 * 10
    assert many["threads"] == few["threads"] == 1
    assert many["descriptors"] <= few["descriptors"]
    assert many["arenas"] == 1
    assert queue.finished_job_registry.count == 14


def test_a_worker_that_has_threads_of_its_own_closes_the_file_for_each_job(
    queue: rq.Queue, path: Path, processes: Processes
) -> None:
    job = queue.enqueue(horses.ask)
    script = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n" + FATAL

    worker = processes.script(script, str(path), "1", "before")
    assert processes.finish(worker) == 0, processes.log(worker)

    assert job.return_value() == (True, b"x")
