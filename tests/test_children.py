"""Handlers in child processes: what costs them their lives, and that it costs nobody else anything."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import child_handlers as handlers
from tests.waiting import LIMIT, Told, comes_true

from litebroker import (
    RAW,
    Backoff,
    ChildError,
    Counts,
    JobRecord,
    NewJob,
    Observer,
    ProcessDiedError,
    ProcessStartError,
    Queue,
    State,
    TimeLimitError,
)
from litebroker.sqlite import SQLiteStorage

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it is looked at in /proc")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="child processes need POSIX")


class Notebook:
    """The file that handlers write to."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def lines(self) -> list[str]:
        return Path(self.path).read_text().splitlines() if Path(self.path).exists() else []

    def has(self, number: int) -> Callable[[], bool]:
        """Whether so many lines are there."""
        return lambda: len(self.lines()) >= number

    def pids(self) -> list[int]:
        return [int(line) for line in self.lines()]

    def open(self) -> None:
        """Let those go on that wait."""
        Path(f"{self.path}.open").touch()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(tmp_path / "jobs.db", durability="relaxed")
    yield storage
    storage.close()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    return Notebook(tmp_path / "notebook")


@pytest.fixture
def queue(storage: SQLiteStorage, told: Told) -> Iterator[Queue[Any]]:
    """It leaves no process behind, living or dead, and no descriptor."""
    storage.open()
    Queue("others", storage).size()
    before = descriptors()
    queue: Queue[Any] = Queue("work", storage, attempts=1, backoff=Backoff.fixed(0), on_error=told)
    yield queue
    Path(storage.location).with_name("notebook.open").touch()
    queue.close()
    assert children() == []
    assert descriptors() <= before + 8  # SQLite's own, and the listeners', come and go


def is_done(queue: Queue[Any]) -> Callable[[], bool]:
    return lambda: not (counts := queue.stats()).pending and not counts.active


def children() -> list[str]:
    """This process's children, zombies too, but not those of subprocesses that tests have made."""
    found = subprocess.run(
        ["ps", "-A", "-o", "ppid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    # The server for tests of other files stays for as long as they all run.
    others = (" ps -A", "redis-server")
    return [line for line in found if line.split()[0] == str(os.getpid()) and not any(it in line for it in others)]


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def hears(process: subprocess.Popen[str]) -> bool:
    """Whether the process has a handler for SIGTERM by now. Where nobody tells, it has had a second for it."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        time.sleep(1)
        return True
    caught = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def is_gone(pid: int) -> bool:
    """Whether the process is no more, or a zombie that its parent has not buried yet."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:1] in {"", "Z"}


def dead_letter(queue: Queue[Any]) -> Any:
    (dead,) = queue.dead_letters()
    assert dead.error is not None
    return dead


# Running


def test_a_handler_runs_in_another_process(queue: Queue[Any], notebook: Notebook) -> None:
    queue.add_many([notebook.path] * 20)

    queue.process(handlers.tell_pid, workers="processes", concurrency=2)

    assert comes_true(is_done(queue))
    assert len(notebook.pids()) == 20
    assert os.getpid() not in notebook.pids()
    assert len(set(notebook.pids())) <= 2


def test_as_many_handlers_run_at_once_as_there_are_processes(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.wait_for, workers="processes", concurrency=3)
    queue.add_many([notebook.path] * 4)

    assert comes_true(notebook.has(3))

    assert queue.stats().active == 3
    assert len(set(notebook.pids())) == 3


def test_the_processes_are_ready_when_process_returns(queue: Queue[Any]) -> None:
    queue.process(handlers.tell_pid, workers="processes", concurrency=2)

    assert len(children()) == 2


def test_close_waits_for_the_job_and_lets_the_process_end_in_order(queue: Queue[Any], notebook: Notebook) -> None:
    worker = queue.process(handlers.by_name, workers="processes")
    queue.add(["tell_at_the_end", notebook.path])
    assert comes_true(is_done(queue))
    queue.add(["wait_for", notebook.path])
    assert comes_true(notebook.has(1))

    closing = threading.Thread(target=worker.close)
    closing.start()
    notebook.open()
    closing.join(LIMIT)

    assert worker.closed
    assert queue.stats() == Counts()
    assert notebook.lines()[1:] == ["ended in order"]
    assert children() == []


def test_what_a_handler_prints_is_there_when_its_job_is_done(
    queue: Queue[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    queue.process(handlers.print_it, workers="processes")
    queue.add("a")

    assert comes_true(is_done(queue))

    assert capfd.readouterr().out == "seen: a\n"


def test_a_large_payload_gets_there_as_it_is(storage: SQLiteStorage, notebook: Notebook) -> None:
    with Queue("blobs", storage, serializer=RAW, max_payload_bytes=2**24) as queue:
        queue.process(handlers.copy_length, workers="processes")
        queue.add(notebook.path.encode().ljust(200) + bytes(2**23))

        assert comes_true(is_done(queue))

    assert notebook.lines() == [str(200 + 2**23)]


def test_a_serializer_of_ones_own_decodes_in_the_process(storage: SQLiteStorage, notebook: Notebook) -> None:
    with Queue("texts", storage, serializer=handlers.Reversing()) as queue:
        queue.process(handlers.tell_pid, workers="processes")
        queue.add(notebook.path)

        assert comes_true(is_done(queue))

    assert len(notebook.pids()) == 1


def test_an_initializer_runs_before_the_first_job(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.tell_initialized, workers="processes", initializer=handlers.initialize)
    queue.add_many([notebook.path] * 2)

    assert comes_true(is_done(queue))

    assert notebook.lines() == ["initialized"] * 2


def test_a_handler_may_be_the_method_of_an_object(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.Callable("called").method, workers="processes")
    queue.add(notebook.path)

    assert comes_true(is_done(queue))

    assert notebook.lines() == ["called"]


# Errors


def test_an_error_comes_back_with_its_traceback(queue: Queue[Any], told: Told) -> None:
    queue.process(handlers.fail, workers="processes")
    queue.add("what was wrong")

    assert comes_true(is_done(queue))

    error = dead_letter(queue).error
    assert (error.reason, error.type, error.message) == ("handler", "LookupError", "what was wrong")
    assert "in fail" in error.stack
    assert "child.py" not in error.stack
    assert error.causes == ("ValueError: invalid literal for int() with base 10: 'beneath'",)
    ((seen, context),) = told.errors
    assert isinstance(seen, ChildError)
    assert (context.kind, context.dead) == ("handler", True)
    assert "in fail" in str(seen.__cause__)


def test_a_handler_that_exits_has_failed(queue: Queue[Any]) -> None:
    queue.process(handlers.leave, workers="processes")
    queue.add(None)

    assert comes_true(is_done(queue))

    assert (dead_letter(queue).error.reason, dead_letter(queue).error.type) == ("handler", "SystemExit")


def test_a_payload_that_cannot_be_read_is_no_crash(storage: SQLiteStorage, told: Told, notebook: Notebook) -> None:
    with Queue("texts", storage, serializer=handlers.Unreadable(), attempts=1, on_error=told) as queue:
        queue.process(handlers.tell_pid, workers="processes")
        queue.add_many(["x" * 101, notebook.path])

        assert comes_true(is_done(queue))

        assert dead_letter(queue).error.reason == "parse"
    assert len(notebook.pids()) == 1
    assert told.kinds == ["parse"]


# Crashes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exit_at_once", "ended with status 7"),
        ("kill_itself", "was killed by SIGKILL: by hand, or since memory ran out"),
        ("crash", "was killed by SIGSEGV"),
    ],
)
def test_a_crash_costs_the_job_that_ran_and_no_other(
    queue: Queue[Any], notebook: Notebook, name: str, message: str
) -> None:
    queue.process(handlers.by_name, workers="processes", concurrency=2)
    neighbour = queue.add(["wait_for", notebook.path])
    assert comes_true(notebook.has(1))
    queue.add([name])

    assert comes_true(lambda: queue.stats().failed == 1)

    error = dead_letter(queue).error
    assert (error.reason, error.message) == ("crashed", f"the process that ran it {message}")
    assert queue.get(neighbour.id).state is State.ACTIVE  # type: ignore[union-attr]
    notebook.open()
    assert comes_true(is_done(queue))
    assert len(notebook.pids()) == 1


def test_on_error_is_told_of_a_crash_with_the_status(queue: Queue[Any], told: Told) -> None:
    queue.process(handlers.exit_at_once, workers="processes")
    queue.add(None)

    assert comes_true(is_done(queue))

    ((error, context),) = told.errors
    assert isinstance(error, ProcessDiedError)
    assert (error.status, context.kind, context.dead) == (7, "crashed", True)


def test_a_crash_tells_where_the_handler_stood(queue: Queue[Any]) -> None:
    queue.process(handlers.crash, workers="processes")
    queue.add(None)

    assert comes_true(is_done(queue))

    stack = dead_letter(queue).error.stack
    assert stack.startswith("Fatal Python error: Segmentation fault")
    assert "in crash" in stack
    assert "child.py" not in stack


def test_a_handler_that_writes_into_the_socket_of_its_process_has_crashed(
    queue: Queue[Any], notebook: Notebook
) -> None:
    queue.process(handlers.by_name, workers="processes")
    queue.add_many([["write_where_it_should_not"], ["tell_pid", notebook.path]])

    assert comes_true(is_done(queue))

    assert dead_letter(queue).error.reason == "crashed"
    assert len(notebook.pids()) == 1


def test_a_job_that_crashed_is_tried_again(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.crash_once, workers="processes")
    queue.add(notebook.path, attempts=2)

    assert comes_true(is_done(queue))

    assert notebook.lines() == ["attempt 2"]


def test_a_crash_is_noticed_though_something_holds_its_descriptors(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.fork_and_crash, workers="processes")
    queue.add(notebook.path)

    assert comes_true(is_done(queue))

    assert dead_letter(queue).error.reason == "crashed"
    assert comes_true(lambda: is_gone(notebook.pids()[0]))


def test_what_a_handler_has_started_ends_with_its_process(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.start_another_and_crash, workers="processes")
    queue.add(notebook.path)

    assert comes_true(is_done(queue))

    assert comes_true(lambda: is_gone(notebook.pids()[0]))


def test_a_handler_that_forks_and_returns_twice_settles_once(queue: Queue[Any], notebook: Notebook, told: Told) -> None:
    queue.process(handlers.by_name, workers="processes")
    queue.add_many([["fork_and_return", notebook.path], ["tell_pid", notebook.path]])

    assert comes_true(is_done(queue))

    assert len(notebook.pids()) == 3
    assert told.errors == []


def test_what_a_handler_forks_ends_by_the_signals_that_end_others(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.fork_and_terminate, workers="processes", time_limit=20)
    queue.add(notebook.path)

    assert comes_true(is_done(queue))

    assert notebook.lines() == ["-15"] * 20


def test_a_process_that_dies_while_it_is_idle_is_replaced(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.tell_pid, workers="processes", concurrency=2)
    queue.add(notebook.path)
    assert comes_true(is_done(queue))
    (pid,) = notebook.pids()

    os.kill(pid, signal.SIGKILL)

    assert comes_true(lambda: len([it for it in children() if " Z" not in it]) == 2 and not has_zombies())
    job = queue.add(notebook.path)
    assert comes_true(is_done(queue))
    assert queue.get(job.id) is None
    assert notebook.pids()[1] != pid


def has_zombies() -> bool:
    return any(line.split()[1].startswith("Z") for line in children())


@LINUX
def test_a_process_that_dies_before_it_has_read_its_job_costs_no_attempt(
    queue: Queue[Any], notebook: Notebook, told: Told
) -> None:
    queue.process(handlers.tell_pid, workers="processes")
    queue.add(notebook.path)
    assert comes_true(is_done(queue))
    (pid,) = notebook.pids()
    os.kill(pid, signal.SIGSTOP)
    queue.add(notebook.path)
    assert comes_true(lambda: queue.stats().active == 1)

    os.kill(pid, signal.SIGKILL)

    assert comes_true(is_done(queue))  # Of its one attempt.
    assert queue.dead_letters() == []
    assert len(notebook.pids()) == 2
    assert set(told.kinds) <= {"process"}


def test_many_crashes_in_a_row_leave_nothing_behind(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.by_name, workers="processes", concurrency=2)
    queue.add(["exit_at_once"])
    assert comes_true(is_done(queue))
    before = descriptors()
    queue.add_many([["exit_at_once"]] * 6)

    queue.add(["tell_pid", notebook.path])

    assert comes_true(is_done(queue))
    assert queue.stats().failed == 7
    assert len(notebook.pids()) == 1
    assert comes_true(lambda: len(children()) == 2 and not has_zombies())
    assert descriptors() < before + 8  # SQLite's own come and go.


def test_workers_that_come_and_go_leave_nothing_behind(queue: Queue[Any]) -> None:
    queue.process(handlers.tell_pid, workers="processes").close()
    before = descriptors()

    for _ in range(4):
        queue.process(handlers.tell_pid, workers="processes").close()

    assert descriptors() < before + 4


# Time limits


@pytest.mark.parametrize("name", ["spin", "match_for_ever"])
def test_the_time_limit_ends_a_handler_whatever_it_does(queue: Queue[Any], told: Told, name: str) -> None:
    queue.process(handlers.by_name, workers="processes", time_limit=0.2)
    queue.add([name])

    assert comes_true(is_done(queue))

    error = dead_letter(queue).error
    assert (error.reason, error.type) == ("timeout", "TimeLimitError")
    assert error.message == "the handler took longer than 0.2 s, and its process was ended"
    assert f"in {name}" in error.stack
    assert "child.py" not in error.stack
    ((seen, context),) = told.errors
    assert isinstance(seen, TimeLimitError)
    assert context.kind == "timeout"


def test_jobs_within_their_time_limit_run_on(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.by_name, workers="processes", time_limit=0.5)
    queue.add_many([["spin"], *[["tell_pid", notebook.path]] * 5])

    assert comes_true(is_done(queue))

    assert len(notebook.pids()) == 5
    assert queue.stats().failed == 1


def test_the_time_limit_ends_what_the_handler_has_started(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.start_another, workers="processes", time_limit=1)
    queue.add(notebook.path)

    assert comes_true(is_done(queue))

    assert comes_true(lambda: is_gone(notebook.pids()[0]))


@LINUX
def test_the_time_limit_ends_a_process_that_is_stopped(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.wait_for, workers="processes", time_limit=0.5)
    queue.add(notebook.path)
    assert comes_true(notebook.has(1))

    os.kill(notebook.pids()[0], signal.SIGSTOP)

    assert comes_true(is_done(queue))
    assert dead_letter(queue).error.reason == "timeout"


# Recycling


def test_a_process_is_replaced_after_so_many_jobs(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.tell_pid, workers="processes", recycle_after=2)

    queue.add_many([notebook.path] * 6)

    assert comes_true(is_done(queue))
    pids = notebook.pids()
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 2]


def test_a_process_is_replaced_when_it_has_grown(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.grow, workers="processes", recycle_mb=150)

    queue.add_many([[notebook.path, 0], [notebook.path, 200], [notebook.path, 0]])

    assert comes_true(is_done(queue))
    first, second, third = notebook.pids()
    assert first == second != third


# The context


def test_the_context_knows_its_job(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.tell_facts, workers="processes")
    queue.add(notebook.path, attempts=5, priority=3, task="t", ref="r", headers={"a": "b"}, group="g")

    assert comes_true(is_done(queue))

    assert notebook.lines() == ["work 1 5 3 t r {'a': 'b'} g True"]


def test_a_handler_completes_its_job_and_adds_what_follows(queue: Queue[Any], notebook: Notebook) -> None:
    worker = queue.process(handlers.complete_with_followers, workers="processes")
    queue.add(notebook.path)
    assert comes_true(notebook.has(1))
    worker.close()

    followers = Queue("others", queue.storage).claim(2)

    assert notebook.lines() == ["True False"]
    assert [(job.data, job.priority, dict(job.headers)) for job in followers] == [
        ("later", 3, {"a": "b"}),
        ("next", 0, {}),
    ]


@pytest.mark.parametrize(("what", "reason"), [("commit", None), ("roll back", "handler"), ("crash", "crashed")])
def test_a_handler_completes_its_job_in_a_transaction_of_its_own(
    tmp_path: Path, told: Told, what: str, reason: str | None
) -> None:
    database = str(tmp_path / "app.db")
    with sqlite3.connect(database) as db:
        db.execute("create table mine(word text)")
    with Queue("work", f"sqlite:///{database}?shared=1", attempts=1, on_error=told) as queue:
        worker = queue.process(handlers.complete_in_a_transaction, workers="processes")
        queue.add([database, what])

        assert comes_true(is_done(queue))

        worker.close()
        assert db.execute("select word from mine").fetchall() == ([] if reason else [("commit",)])
        assert Queue("others", queue.storage).size() == (0 if reason else 1)
        assert [dead.error.reason for dead in queue.dead_letters() if dead.error] == ([reason] if reason else [])
    db.close()


def test_a_handler_fails_its_job_for_good(queue: Queue[Any]) -> None:
    queue.process(handlers.fail_for_good, workers="processes")
    queue.add(None, attempts=5)

    assert comes_true(is_done(queue))

    dead = dead_letter(queue)
    assert (dead.attempts, dead.error.reason, dead.error.type) == (1, "rejected", "LookupError")


def test_a_handler_releases_its_job(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.release_at_first, workers="processes")
    queue.add(notebook.path)

    assert comes_true(is_done(queue))

    assert notebook.lines()[1:] == ["attempt 1"]


def test_what_the_parent_refuses_is_raised_in_the_handler(queue: Queue[Any], notebook: Notebook) -> None:
    queue.add("holds the group", group="g", delay=600)
    queue.process(handlers.be_refused, workers="processes")
    queue.add(notebook.path)

    assert comes_true(notebook.has(3))

    connection, payload, group = notebook.lines()
    assert connection.startswith("TypeError")
    assert payload.startswith("PayloadError")
    assert group.startswith("GroupConflictError group 'g' has concurrency 1, not 2")


def test_a_shutdown_that_waits_no_longer_cancels_the_handler(queue: Queue[Any], notebook: Notebook) -> None:
    worker = queue.process(handlers.wait_to_be_cancelled, workers="processes")
    queue.add(notebook.path)
    assert comes_true(notebook.has(1))

    assert not worker.close(timeout=0)

    assert worker.close(timeout=LIMIT)
    assert notebook.lines()[1] == "cancelled True"


def test_a_thread_of_the_handler_settles_the_job(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.settle_in_a_thread, workers="processes")
    queue.add(notebook.path)

    assert comes_true(notebook.has(1))

    assert comes_true(is_done(queue))


def test_a_crash_after_the_job_was_completed_does_not_undo_that(queue: Queue[Any], told: Told) -> None:
    worker = queue.process(handlers.complete_and_crash, workers="processes")
    queue.add("first")
    assert comes_true(lambda: bool(told.errors))
    worker.close()

    assert queue.dead_letters() == []
    assert {context.dead for _, context in told.errors} == {False}


# Results and progress


def test_what_the_handler_returned_is_kept(queue: Queue[Any]) -> None:
    queue.process(handlers.double, workers="processes")

    job = queue.add({"n": 1}["n"] * 21, keep_result=60)

    assert queue.result(job, timeout=LIMIT) == 42


def test_a_result_that_cannot_be_kept_is_told_and_the_job_is_done(queue: Queue[Any], told: Told) -> None:
    queue.process(handlers.return_what_cannot_be_kept, workers="processes")

    queue.add(1, keep_result=60)

    assert comes_true(is_done(queue))
    assert told.kinds == ["result"]
    assert queue.stats().failed == 0


def test_the_latest_progress_gets_through(queue: Queue[Any], notebook: Notebook) -> None:
    queue.process(handlers.report_and_wait, workers="processes")

    job = queue.add(notebook.path)

    assert comes_true(
        lambda: (said := queue.progress(job)) is not None and (said.fraction, said.note) == (0.99, "late")
    )


def test_observers_watch_from_the_parent(queue: Queue[Any]) -> None:
    class Watching(Observer):
        def __init__(self) -> None:
            self.seen: list[str] = []

        @contextmanager
        def running(self, jobs: Sequence[JobRecord]) -> Iterator[None]:
            try:
                yield
            except Exception as error:
                self.seen.append(f"{jobs[0].attempts}: {error}")
                raise

        def settled(self, job: JobRecord, outcome: str) -> None:
            self.seen.append(outcome)

    watching = Watching()
    queue.observe(watching)
    queue.process(handlers.by_name, workers="processes")
    queue.add_many([["fail", "wrong"], ["exit_at_once"], ["print_it", "fine"]])

    assert comes_true(is_done(queue))

    assert comes_true(lambda: len(watching.seen) == 5)
    assert sorted(watching.seen) == [
        "1: LookupError: wrong",
        "1: the process that ran it ended with status 7",
        "completed",
        "failed",
        "failed",
    ]


# Batches, and async handlers


def test_a_batch_runs_in_one_call(queue: Queue[Any], notebook: Notebook) -> None:
    queue.add_many([[notebook.path, word] for word in "abc"])

    queue.process_many(handlers.tell_batch, batch=10, workers="processes")

    assert comes_true(is_done(queue))
    assert notebook.lines() == ["a b c"]


def test_jobs_of_a_batch_are_settled_one_by_one(queue: Queue[Any], notebook: Notebook) -> None:
    queue.add_many([[notebook.path, word] for word in ("a", "bad", "c")])

    queue.process_many(handlers.settle_some, batch=10, workers="processes")

    assert comes_true(is_done(queue))
    assert notebook.lines() == ["a", "c"]
    assert dead_letter(queue).error.message == "bad one"


def test_a_crash_costs_the_batch(queue: Queue[Any]) -> None:
    queue.add_many(["a", "b"])

    queue.process_many(handlers.crash_in_batch, batch=2, workers="processes")

    assert comes_true(is_done(queue))
    assert [dead.error.reason for dead in queue.dead_letters() if dead.error] == ["crashed"] * 2


def test_an_async_handler_runs_on_a_loop_of_its_process(queue: Queue[Any], notebook: Notebook) -> None:
    worker = queue.process(handlers.tell_async, workers="processes")
    queue.add(notebook.path)
    assert comes_true(notebook.has(1))
    worker.close()

    assert notebook.lines() == ["async 1"]
    assert [job.data for job in Queue("others", queue.storage).list("pending")] == ["follower"]


def test_an_async_handler_is_cancelled_by_a_shutdown(queue: Queue[Any], notebook: Notebook) -> None:
    worker = queue.process(handlers.wait_async, workers="processes")
    queue.add(notebook.path)
    assert comes_true(notebook.has(1))

    worker.close(timeout=0)

    assert worker.close(timeout=LIMIT)
    assert notebook.lines()[1] == "cancelled"


# What is refused


def test_a_handler_that_no_other_process_can_find_is_refused(queue: Queue[Any]) -> None:
    def local(_: object) -> None: ...

    for handler in (lambda _: None, local, threading.Lock().acquire):
        with pytest.raises(TypeError, match=r"cannot be given to a child process.*at the top level of a module"):
            queue.process(handler, workers="processes")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": "fibers"}, "workers='fibers': it is 'threads' or 'processes'"),
        ({"time_limit": 5}, "time_limit=5 is for workers='processes': a thread cannot be ended"),
        ({"recycle_after": 5}, "recycle_after=5 is for workers='processes'"),
        ({"workers": "processes", "time_limit": 0}, "time_limit=0 has to be more than 0"),
        ({"workers": "processes", "recycle_after": 0}, "recycle_after=0"),
        ({"workers": "processes", "recycle_mb": -1}, "recycle_mb=-1"),
    ],
)
def test_wrong_options_are_refused(queue: Queue[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        queue.process(handlers.tell_pid, **options)


def test_an_initializer_that_fails_is_an_error_of_process(queue: Queue[Any]) -> None:
    queue.add("waits")

    with pytest.raises(ProcessStartError, match="OSError: no model") as caught:
        queue.process(handlers.tell_pid, workers="processes", concurrency=2, initializer=handlers.fail_to_initialize)

    assert "in fail_to_initialize" in caught.value.stack
    assert queue.stats() == Counts(ready=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_end_a_process_that_is_starting(
    queue: Queue[Any], notebook: Notebook, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(subprocess, "Popen", signalled(number))

    queue.process(handlers.tell_pid, workers="processes")

    queue.add(notebook.path)
    assert comes_true(is_done(queue))
    assert len(notebook.pids()) == 1


def signalled(number: signal.Signals) -> type[subprocess.Popen[bytes]]:
    """Processes that get a signal as soon as they are there."""

    class Signalled(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.send_signal(number)

    return Signalled


FRAGILE = """
import os

if os.path.exists(__file__ + ".broken") and "LITEBROKER_CHILD" in os.environ:
    {breaks}

def handler(data):
    if data == "crash":
        os._exit(1)
"""


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Callable[[str], object]]]:
    """Makes a module that can be imported here, and the handler in it; a file breaks it for child processes."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(breaks: str) -> Callable[[str], object]:
        (tmp_path / "fragile.py").write_text(FRAGILE.format(breaks=breaks))
        import fragile  # type: ignore[import-not-found]

        return fragile.handler  # type: ignore[no-any-return]

    yield make
    sys.modules.pop("fragile", None)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        ("raise LookupError('no such table')", "a child process cannot load the handler: LookupError: no such table"),
        ("raise SystemExit(3)", "a child process cannot load the handler: SystemExit: 3"),
        ("os._exit(3)", "a child process ended with status 3 before it was ready for the handler"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_of_process(
    queue: Queue[Any], tmp_path: Path, fragile: Callable[[str], Any], breaks: str, message: str
) -> None:
    handler = fragile(breaks)
    (tmp_path / "fragile.py.broken").touch()

    with pytest.raises(ProcessStartError, match=message):
        queue.process(handler, workers="processes")


def test_a_module_that_breaks_later_is_tried_again_with_pauses(
    queue: Queue[Any], told: Told, tmp_path: Path, fragile: Callable[[str], Any]
) -> None:
    queue.process(fragile("raise LookupError('gone')"), workers="processes")
    (tmp_path / "fragile.py.broken").touch()
    queue.add("crash")
    assert comes_true(lambda: told.kinds == ["crashed", "process"])

    job = queue.add("fine")

    assert not comes_true(lambda: queue.get(job.id) is None, limit=0.5)
    assert queue.get(job.id).attempts == 0  # type: ignore[union-attr]
    (tmp_path / "fragile.py.broken").unlink()
    assert comes_true(is_done(queue))
    assert told.kinds == ["crashed", "process"]


# The parent, in a process of its own

BEGINNING = """
import os, re, signal, sys, threading
from tests import child_handlers
from litebroker import Backoff, Queue

queue = Queue("work", sys.argv[1], backoff=Backoff.fixed(0))
notebook = sys.argv[2]

def mine(data):
    child_handlers.write(notebook, "mine", data)

"""


@pytest.fixture
def start(tmp_path: Path, notebook: Notebook) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs a program with the database's path and the notebook's, and leaves none behind."""
    processes: list[subprocess.Popen[str]] = []

    def start(program: str, *, module: bool = False) -> subprocess.Popen[str]:
        path = tmp_path / f"program{len(processes)}.py"
        path.write_text(BEGINNING + program)
        what = ["-m", path.stem] if module else [str(path)]
        process = subprocess.Popen(
            [sys.executable, *what, str(tmp_path / "jobs.db"), notebook.path],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["wait_for", "match_for_ever"])
def test_children_end_when_their_parent_is_killed(
    queue: Queue[Any], notebook: Notebook, start: Callable[..., subprocess.Popen[str]], name: str
) -> None:
    if name == "match_for_ever" and sys.platform != "linux":
        pytest.skip("only Linux ends a process that holds the GIL")
    process = start(f"queue.process(child_handlers.{name}, workers='processes', concurrency=2).run()")
    queue.add_many([NewJob(notebook.path, attempts=2)] * 2)
    assert comes_true(notebook.has(2))
    pids = notebook.pids()

    process.kill()

    assert comes_true(lambda: all(is_gone(pid) for pid in pids), limit=10)
    queue.process(handlers.tell_pid, workers="processes")
    assert comes_true(notebook.has(4))  # Another worker has taken the jobs over.


def test_a_process_that_the_parent_forked_does_not_keep_the_children(
    queue: Queue[Any], notebook: Notebook, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("""
worker = queue.process(child_handlers.wait_for, workers='processes')
if not os.fork():
    child_handlers.write(notebook, os.getpid())
    threading.Event().wait()
worker.run()
""")
    queue.add(notebook.path)
    assert comes_true(notebook.has(2))
    pids = notebook.pids()

    process.kill()

    assert comes_true(lambda: sum(is_gone(pid) for pid in pids) == 1, limit=10)
    for pid in pids:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_lets_jobs_end(
    queue: Queue[Any], notebook: Notebook, start: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = start("""
worker = queue.process(child_handlers.wait_for, workers='processes')
threading.Timer(0, lambda: child_handlers.write(notebook, os.getpid())).start()
sys.exit(0 if worker.run() else 3)
""")
    queue.add(notebook.path)
    assert comes_true(notebook.has(2))
    pids = notebook.pids()
    assert comes_true(lambda: hears(process))

    for pid in pids:
        os.kill(pid, number)  # As a service manager does it.

    assert not comes_true(lambda: process.poll() is not None, limit=0.3)
    notebook.open()
    assert process.wait(LIMIT) == 0
    assert queue.stats() == Counts()


@pytest.mark.parametrize("module", [False, True])
def test_a_handler_in_the_main_module_is_found_there(
    queue: Queue[Any], notebook: Notebook, start: Callable[..., subprocess.Popen[str]], module: bool
) -> None:
    queue.add("a")

    process = start("if __name__ == '__main__':\n    queue.process(mine, workers='processes').run()", module=module)

    assert comes_true(is_done(queue))
    assert notebook.lines() == ["mine a"]
    assert comes_true(lambda: hears(process))
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 0


def test_a_main_module_without_a_guard_is_told_to_have_one(
    queue: Queue[Any], notebook: Notebook, start: Callable[..., subprocess.Popen[str]]
) -> None:
    queue.add("a")

    process = start("queue.process(mine, workers='processes').run()")

    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert "under `if __name__ == '__main__':`" in errors
    assert queue.stats() == Counts(ready=1)


def test_a_program_that_ends_waits_for_its_children(
    queue: Queue[Any], notebook: Notebook, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("""
queue.process(child_handlers.wait_for, workers='processes')
while not os.path.exists(notebook):
    threading.Event().wait(0.005)
""")
    queue.add(notebook.path)
    assert comes_true(notebook.has(1))

    assert not comes_true(lambda: process.poll() is not None, limit=0.3)
    notebook.open()
    assert process.wait(LIMIT) == 0
    assert comes_true(is_done(queue))
    assert comes_true(lambda: is_gone(notebook.pids()[0]))


def test_groups_hold_across_child_processes(queue: Queue[Any], notebook: Notebook) -> None:
    queue.add_many([NewJob(notebook.path, group="g") for _ in range(4)])

    queue.process(handlers.wait_for, workers="processes", concurrency=2)

    assert comes_true(notebook.has(1))
    assert not comes_true(notebook.has(2), limit=0.3)
