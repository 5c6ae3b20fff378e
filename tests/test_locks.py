"""The locks beside the database: one writer at a time, and who is alive."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from litebroker.sqlite import locks
from litebroker.sqlite.locks import Liveness, WriterLock, bury, is_alive

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no flock here")

HOLDER = """
import sys
from pathlib import Path
from litebroker.sqlite.locks import WriterLock
lock = WriterLock(Path(sys.argv[1]))
assert lock.acquire(10_000)
print("held", flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()
"""

LIVING = """
import sys
from pathlib import Path
from litebroker.sqlite.locks import Liveness
life = Liveness(Path(sys.argv[1]), int(sys.argv[2]))
life.hold()
print("held", flush=True)
sys.stdin.readline()
"""

TURNS = """
import sys, time
from pathlib import Path
from litebroker.sqlite.locks import WriterLock
directory = Path(sys.argv[1])
lock = WriterLock(directory / "side")
shared = directory / "shared"
print("ready", flush=True)
sys.stdin.readline()
turns, longest, end = 0, 0.0, time.monotonic() + float(sys.argv[2])
while True:
    asked_at = time.monotonic()
    if asked_at > end:
        break
    assert lock.acquire(30_000)
    longest = max(longest, time.monotonic() - asked_at)
    shared.write_text(str(int(shared.read_text()) + 1))
    lock.release()
    turns += 1
print(turns, longest, flush=True)
"""


@contextlib.contextmanager
def started(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed its first line."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str]) -> str:
    """Let it go on; the next line it prints."""
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@contextlib.contextmanager
def raising_on_signal() -> Iterator[type[Exception]]:
    class StruckError(Exception):
        pass

    def strike(_number: int, _frame: object) -> None:
        raise StruckError

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        yield StruckError
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def signalled_after(seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextlib.contextmanager
def told_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    timer = threading.Timer(seconds, tell, (process,))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_one_process_at_a_time_has_the_writer_lock(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)

    with started(HOLDER, tmp_path) as holder:
        while_held = lock.acquire(0)
        tell(holder)
        once_released = lock.acquire(0)

    assert (while_held, once_released) == (False, True)


def test_a_waiter_gets_the_lock_as_soon_as_it_is_released(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    with started(HOLDER, tmp_path) as holder:
        asked_at = time.monotonic()

        with told_after(0.05, holder):
            got = lock.acquire(20_000)

        assert got
        assert time.monotonic() - asked_at < 10


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    with started(HOLDER, tmp_path) as holder:
        assert not lock.acquire(10)

        holder.kill()

        assert lock.acquire(20_000)


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_stopped_holder_costs_the_timeout_and_no_more(tmp_path: Path, in_thread: bool) -> None:
    lock = WriterLock(tmp_path)
    answers: list[tuple[bool, float]] = []

    def ask() -> None:
        asked_at = time.monotonic()
        got = lock.acquire(200)
        answers.append((got, time.monotonic() - asked_at))

    with started(HOLDER, tmp_path) as holder:
        stop(holder)
        if in_thread:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        else:
            ask()

        ((got, took),) = answers
        assert not got
        assert 0.2 <= took < 5


def test_who_gave_up_leaves_nothing_behind(tmp_path: Path) -> None:
    lock, other = WriterLock(tmp_path), WriterLock(tmp_path)
    threads = threading.active_count()
    with started(HOLDER, tmp_path) as holder:
        answers = [lock.acquire(10) for _ in range(20)]

        tell(holder)

        assert not any(answers)
        assert threading.active_count() == threads
        assert other.acquire(20_000)
        other.release()
        assert lock.acquire(20_000)


def test_who_gave_up_can_come_back(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    with started(HOLDER, tmp_path) as holder:
        assert not lock.acquire(20)

        with told_after(0.05, holder):
            got = lock.acquire(20_000)

        assert got
        assert not WriterLock(tmp_path).acquire(0)


def test_close_while_a_thread_stands_in_line_leaves_nothing_locked(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(lock.acquire(500)))
    with started(HOLDER, tmp_path) as holder:
        waiter.start()

        lock.close()
        waiter.join(20)
        tell(holder)

        assert answers == [False]
        assert WriterLock(tmp_path).acquire(20_000)


def test_an_exception_from_a_signal_handler_ends_the_wait_and_locks_nothing(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    with started(HOLDER, tmp_path) as holder, raising_on_signal() as struck:
        with signalled_after(0.1), pytest.raises(struck):
            lock.acquire(20_000)

        tell(holder)

        assert WriterLock(tmp_path).acquire(20_000)


def test_exceptions_at_any_moment_leave_the_lock_usable(tmp_path: Path) -> None:
    lock, other, third = WriterLock(tmp_path), WriterLock(tmp_path), WriterLock(tmp_path)
    rounds = kept = 0

    with raising_on_signal() as struck:
        for number in range(150):
            with contextlib.suppress(struck), signalled_after(0.0001 * (number % 40)):
                while True:
                    for one in (lock, other):
                        try:
                            one.acquire(1000)
                        finally:
                            one.release()
                    rounds += 1
            kept += not third.acquire(0)
            for one in (lock, other, third):
                one.release()

    assert rounds
    # Python 3.10 looks for signals between any two instructions, so also before the call that a `finally` begins with.
    assert kept <= (15 if sys.version_info < (3, 11) else 0)
    assert third.acquire(0)


class _StruckError(Exception):
    pass


@contextlib.contextmanager
def struck_at_line(number: int) -> Iterator[None]:
    """Raise, once, as a signal handler could, before so many lines of the locks' module have run."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != locks.__file__:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise _StruckError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_an_exception_inside_acquire_locks_nothing(tmp_path: Path) -> None:
    lock, other = WriterLock(tmp_path), WriterLock(tmp_path)
    struck_inside = kept = 0

    with raising_on_signal() as struck:
        for number in range(200):
            try:
                with signalled_after(0.0001 * (number % 20)):
                    while True:
                        lock.acquire(1000)
                        lock.release()
            except struck as error:
                if any(frame.name == "acquire" for frame in traceback.extract_tb(error.__traceback__)):
                    struck_inside += 1
                    kept += not other.acquire(0)
            lock.release()
            other.release()

    assert struck_inside
    assert kept == 0


def test_who_left_the_line_by_an_exception_does_not_stand_there_any_more(tmp_path: Path) -> None:
    strikes, left_marked = 0, 0

    def strike_everywhere() -> None:
        nonlocal strikes, left_marked
        other, struck = WriterLock(tmp_path), True
        while struck:
            lock = WriterLock(tmp_path)
            assert lock.acquire(10_000)
            lock.release()
            assert other.acquire(10_000)
            with contextlib.suppress(_StruckError), struck_at_line(strikes):
                struck = True
                lock.acquire(2)
                struck = False
            other.release()
            strikes += 1
            with (tmp_path / "write.wait").open("a") as line:
                try:
                    fcntl.flock(line, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    left_marked += 1
            lock.close()

    # CPython 3.11 may take the exception that a trace function struck in for one that is still handled, in its thread.
    thread = threading.Thread(target=strike_everywhere)
    thread.start()
    thread.join()

    assert strikes > 30
    assert left_marked == 0


def test_exceptions_at_any_moment_of_a_wait_leave_the_lock_usable(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    with started(HOLDER, tmp_path) as holder, raising_on_signal() as struck:
        for number in range(100):
            with contextlib.suppress(struck), signalled_after(0.0001 * number):
                while True:
                    lock.acquire(3)

        tell(holder)

        assert lock.acquire(10_000)
        assert not WriterLock(tmp_path).acquire(0)
        lock.release()
        assert WriterLock(tmp_path).acquire(10_000)


def test_a_signal_handler_that_acquires_on_top_of_a_wait_for_the_same_lock_is_refused_at_once(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    answers: list[tuple[bool, float]] = []

    def handle(_number: int, _frame: object) -> None:
        asked_at = time.monotonic()
        try:
            answers.append((lock.acquire(60_000), time.monotonic() - asked_at))
        finally:
            lock.release()
        tell(holder)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with started(HOLDER, tmp_path) as holder, signalled_after(0.1):
            got = lock.acquire(20_000)
    finally:
        signal.signal(signal.SIGUSR1, before)

    ((handlers, took),) = answers
    assert (handlers, got) == (False, True)
    assert took < 5
    assert not WriterLock(tmp_path).acquire(0)


def test_a_signal_handler_may_close_what_is_waited_for(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)

    def handle(_number: int, _frame: object) -> None:
        lock.close()
        tell(holder)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with started(HOLDER, tmp_path) as holder, signalled_after(0.1):
            got = lock.acquire(20_000)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert got
    assert not WriterLock(tmp_path).acquire(0)


def test_signal_handlers_that_acquire_at_any_moment_leave_whoever_was_told_so_the_lock(tmp_path: Path) -> None:
    lock, other = WriterLock(tmp_path), WriterLock(tmp_path)
    inside, handling, struck, broken = False, False, 0, 0

    def handle(_number: int, _frame: object) -> None:
        nonlocal handling, struck
        if inside or handling:  # as the owner of the lock is to see to
            return
        struck += 1
        handling = True
        try:
            lock.acquire(1000)
        finally:
            lock.release()
            handling = False

    before = signal.signal(signal.SIGUSR1, handle)
    over = threading.Event()

    def strike() -> None:
        while not over.wait(0.0002):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        for _ in range(20_000):
            try:
                got = lock.acquire(1000)
                inside = True
                broken += not got or other.acquire(0)
            finally:
                inside = False
                other.release()
                lock.release()
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)

    assert struck
    # Between acquire's answer and `inside`, a handler may still have had its way.
    assert broken <= struck / 10
    assert other.acquire(0)


def test_signal_handlers_that_acquire_while_others_write_leave_the_lock_usable(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path / "side")
    (tmp_path / "shared").write_text("0")
    inside, handling, turns, struck = False, False, 0, 0

    def handle(_number: int, _frame: object) -> None:
        nonlocal handling, struck
        if inside or handling:
            return
        struck += 1
        handling = True
        try:
            lock.acquire(struck % 7)
        finally:
            lock.release()
            handling = False

    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(started(TURNS, tmp_path, 1.5)) for _ in range(2)]
        before = signal.signal(signal.SIGUSR1, handle)
        over = threading.Event()

        def strike() -> None:
            while not over.wait(0.001):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            for other in others:
                assert other.stdin
                other.stdin.write("\n")
                other.stdin.flush()
            while any(other.poll() is None for other in others):
                try:
                    turns += lock.acquire(5 if turns % 2 else 5000)
                    inside = True
                finally:
                    inside = False
                    lock.release()
        finally:
            over.set()
            thread.join()
            signal.signal(signal.SIGUSR1, before)
        codes = [other.wait() for other in others]

    assert codes == [0, 0]
    assert struck
    assert turns
    assert WriterLock(tmp_path / "side").acquire(0)


def test_acquiring_what_is_held_and_releasing_what_is_not_change_nothing(tmp_path: Path) -> None:
    lock, other = WriterLock(tmp_path), WriterLock(tmp_path)

    lock.release()
    first, second = lock.acquire(0), lock.acquire(0)
    while_held = other.acquire(0)
    lock.release()
    lock.release()

    assert (first, second, while_held) == (True, True, False)
    assert other.acquire(0)


def test_processes_never_write_at_once_and_none_starves(tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("0")

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(TURNS, tmp_path, 1.5)) for _ in range(4)]
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.communicate()[0].split() for process in processes]

    turns = [int(answer[0]) for answer in answers]
    assert int((tmp_path / "shared").read_text()) == sum(turns)
    assert min(turns) > max(turns) / 20
    assert max(float(answer[1]) for answer in answers) < 1.5


def test_a_deleted_lock_file_parts_its_users_for_a_moment_only(tmp_path: Path) -> None:
    side = tmp_path / "side"
    old, new = WriterLock(side), WriterLock(side)
    assert old.acquire(0)
    old.release()

    shutil.rmtree(side)
    assert new.acquire(0)
    ends_at = time.monotonic() + 20
    while old.acquire(0) and time.monotonic() < ends_at:
        old.release()

    assert time.monotonic() < ends_at
    new.release()
    assert old.acquire(1000)


def test_an_idle_user_of_a_deleted_lock_file_notices_before_it_writes(tmp_path: Path) -> None:
    side = tmp_path / "side"
    old, new = WriterLock(side), WriterLock(side)
    assert old.acquire(0)
    old.release()
    shutil.rmtree(side)
    assert new.acquire(0)
    time.sleep(0.003)  # the interval itself

    got = old.acquire(0)

    assert not got


def test_after_a_fork_parent_and_child_do_not_share_the_lock(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    assert lock.acquire(0)
    lock.release()
    lock.close()
    read, write = os.pipe()

    child = os.fork()
    if not child:
        os.write(write, b"y" if lock.acquire(5000) else b"n")
        signal.pause()
        os._exit(0)
    childs = os.read(read, 1)
    parents = lock.acquire(50)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)

    assert (childs, parents) == (b"y", False)
    assert lock.acquire(20_000)


def test_close_unlocks_what_a_forked_child_has_too(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    assert lock.acquire(0)
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        lock.close()

        assert WriterLock(tmp_path).acquire(0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_child_that_forgets_leaves_its_parent_the_lock_and_does_not_keep_it_itself(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from litebroker.sqlite.locks import WriterLock
lock = WriterLock(Path(sys.argv[1]))
assert lock.acquire(0)
child = os.fork()
if not child:
    lock.forget()
    print(os.getpid(), lock.acquire(0), flush=True)
    signal.pause()
signal.pause()
"""
    other = WriterLock(tmp_path)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child, childs = parent.stdout.readline().split()
        try:
            before = other.acquire(0)
            parent.kill()
            parent.wait()
            after = other.acquire(0)
        finally:
            os.kill(int(child), signal.SIGKILL)

    assert (childs, before, after) == ("False", False, True)


def test_descriptors_that_somebody_closed_are_opened_again(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    assert lock.acquire(0)
    lock.release()
    descriptors = descriptors_of(tmp_path / "write.lock")
    for descriptor in descriptors:
        os.close(descriptor)

    got = lock.acquire(1000)

    assert descriptors
    assert got
    assert not WriterLock(tmp_path).acquire(0)


def test_a_descriptor_that_somebody_closed_is_opened_again_where_others_stand_in_line(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    line = os.open(tmp_path / "write.wait", os.O_RDWR | os.O_CREAT)
    fcntl.flock(line, fcntl.LOCK_SH)
    until = time.monotonic() + 0.02
    while time.monotonic() < until:  # at the end of a turn, it looks who stands in line
        assert lock.acquire(1000)
        lock.release()
    assert len(descriptors_of(tmp_path / "write.wait")) == 2
    descriptors = descriptors_of(tmp_path / "write.lock")
    assert lock.acquire(1000)
    lock.release()
    for descriptor in descriptors:
        os.close(descriptor)

    got = lock.acquire(1000)

    assert got
    assert not WriterLock(tmp_path).acquire(0)
    os.close(line)


def descriptors_of(file: Path) -> list[int]:
    """Of this process."""
    return [int(entry.name) for entry in Path("/dev/fd").iterdir() if entry.resolve() == file]


def test_the_sidecar_is_made_with_the_users_umask_but_not_the_databases_folder(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        WriterLock(tmp_path / "side").acquire(0)
    finally:
        os.umask(before)

    with pytest.raises(FileNotFoundError):
        WriterLock(tmp_path / "missing" / "side").acquire(0)
    assert (tmp_path / "side").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "side" / "write.lock").stat().st_mode & 0o777 == 0o640


def test_without_flock_there_is_no_lock_and_nobody_can_tell_who_lives(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["fcntl"] = None
from pathlib import Path
from litebroker.sqlite import locks
from litebroker.sqlite.locks import Liveness, WriterLock, bury, is_alive
directory = Path(sys.argv[1])
lock, life = WriterLock(directory), Liveness(directory, 1)
life.hold()
print(lock.acquire(0), is_alive(directory, 1))
lock.release(), lock.close(), life.drop(), life.forget(), bury(directory, 1)
"""

    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)

    assert done.stdout == "True None\n"


def test_a_process_is_alive_until_it_is_killed(tmp_path: Path) -> None:
    with started(LIVING, tmp_path, 7) as process:
        before = is_alive(tmp_path, 7)
        process.kill()
        process.wait()
        after = is_alive(tmp_path, 7)

    assert (before, after) == (True, False)


def test_a_stopped_process_is_alive(tmp_path: Path) -> None:
    with started(LIVING, tmp_path, 7) as process:
        stop(process)

        assert is_alive(tmp_path, 7)


def test_of_a_holder_that_ended_in_order_nothing_can_be_told(tmp_path: Path) -> None:
    life = Liveness(tmp_path, 7)
    never = is_alive(tmp_path, 7)
    life.hold()
    held = is_alive(tmp_path, 7)

    life.drop()

    assert (never, held, is_alive(tmp_path, 7)) == (None, True, None)
    assert list((tmp_path / "live").iterdir()) == []


def test_only_the_dead_are_buried(tmp_path: Path) -> None:
    living = Liveness(tmp_path, 1)
    living.hold()
    with started(LIVING, tmp_path, 2) as process:
        process.kill()

    for holder in (1, 2, 3):
        bury(tmp_path, holder)

    assert is_alive(tmp_path, 1)
    assert [path.name for path in (tmp_path / "live").iterdir()] == ["1"]


def test_a_deleted_life_is_made_anew(tmp_path: Path) -> None:
    life = Liveness(tmp_path / "side", 1)
    life.hold()
    shutil.rmtree(tmp_path / "side")
    gone = is_alive(tmp_path / "side", 1)

    life.hold()

    assert (gone, is_alive(tmp_path / "side", 1)) == (None, True)


def test_a_new_process_takes_the_number_of_a_dead_one(tmp_path: Path) -> None:
    with started(LIVING, tmp_path, 7) as process:
        process.kill()
    life = Liveness(tmp_path, 7)

    life.hold()
    bury(tmp_path, 7)

    assert is_alive(tmp_path, 7)


def test_a_number_that_lives_is_not_taken_from_its_holder(tmp_path: Path) -> None:
    second = Liveness(tmp_path, 7)
    with started(LIVING, tmp_path, 7) as first:
        second.hold()
        second.drop()

        assert is_alive(tmp_path, 7)
        first.kill()
    assert is_alive(tmp_path, 7) is False


@pytest.mark.parametrize("call", ["forget", "drop"])
def test_a_forked_child_lets_go_without_killing_its_parent(tmp_path: Path, call: str) -> None:
    life = Liveness(tmp_path, 7)
    life.hold()

    child = os.fork()
    if not child:
        getattr(life, call)()
        os._exit(0 if is_alive(tmp_path, 7) else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert is_alive(tmp_path, 7)


def test_a_forked_child_that_forgot_does_not_outlive_its_parent(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from litebroker.sqlite.locks import Liveness
life = Liveness(Path(sys.argv[1]), 7)
life.hold()
child = os.fork()
if not child:
    life.forget()
    print(os.getpid(), flush=True)
    signal.pause()
signal.pause()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        try:
            before = is_alive(tmp_path, 7)
            parent.kill()
            parent.wait()
            after = is_alive(tmp_path, 7)
        finally:
            os.kill(child, signal.SIGKILL)

    assert (before, after) == (True, False)


def test_a_process_that_begins_or_ends_in_order_is_never_seen_dead(tmp_path: Path) -> None:
    answers: set[bool | None] = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            answers.add(is_alive(tmp_path, 7))
            bury(tmp_path, 7)

    thread = threading.Thread(target=look)
    thread.start()
    held: list[bool] = []
    while len(held) < 300 or True not in answers:
        life = Liveness(tmp_path, 7)
        life.hold()
        held.append((tmp_path / "live" / "7").exists())
        life.drop()
    over.set()
    thread.join()

    assert all(held)
    assert False not in answers
