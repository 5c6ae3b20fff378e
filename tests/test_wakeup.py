"""Wake-ups: who is woken by what, in this process and in others, and what is left behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest

from litebroker.wakeup import WakeupListener, Wakeups

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")

LISTEN = """
import sys
from pathlib import Path
from litebroker.wakeup import Wakeups
wakeups = Wakeups(Path(sys.argv[1]))
listener = wakeups.listener(["q"], ["t"])
print("listening", flush=True)
while listener.wait(20):
    print("woken", flush=True)
"""

NOTIFY = """
import sys
from pathlib import Path
from litebroker.wakeup import Wakeups
wakeups = Wakeups(Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    getattr(wakeups, line.split()[0])(line.split()[1])
    print("done", flush=True)
"""

PONG = """
import sys
from pathlib import Path
from litebroker.wakeup import Wakeups
wakeups = Wakeups(Path(sys.argv[1]))
listener = wakeups.listener(["ping"], [])
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    if not listener.wait(10):
        sys.exit("a wake-up was lost")
    wakeups.notify_queue("pong")
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


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    assert process.stdout
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


class Waiting:
    """Threads that wait, each at a listener of its own, and what came of it."""

    def __init__(self, listeners: Sequence[WakeupListener], timeout: float) -> None:
        self.woken_at: list[float] = []
        self._timeout = timeout
        self._threads = [threading.Thread(target=self._wait, args=(listener,)) for listener in listeners]
        for thread in self._threads:
            thread.start()
        pairs = list(zip(self._threads, listeners, strict=True))
        while any(thread.is_alive() and not listener.is_asleep for thread, listener in pairs):
            os.sched_yield()

    def _wait(self, listener: WakeupListener) -> None:
        if listener.wait(self._timeout):
            self.woken_at.append(time.monotonic())

    def join(self) -> list[float]:
        for thread in self._threads:
            thread.join()
        return self.woken_at


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if not path.is_dir())


def descriptors() -> set[str]:
    return {f"{entry.name} {entry.readlink()}" for entry in Path("/dev/fd").iterdir() if entry.is_symlink()}


def test_a_waiter_in_another_process_is_woken_by_its_queue_and_its_topic(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    with started(LISTEN, tmp_path) as process:
        assert process.stdout

        wakeups.notify_queue("q")
        by_queue = process.stdout.readline()
        wakeups.notify("t")
        by_topic = process.stdout.readline()

    assert (by_queue, by_topic) == ("woken\n", "woken\n")


@pytest.mark.parametrize("line", ["notify_queue q", "notify t"])
def test_another_process_wakes_a_waiter_here(tmp_path: Path, line: str) -> None:
    listener = Wakeups(tmp_path).listener(["q"], ["t"])
    with started(NOTIFY, tmp_path) as process:
        waiting = Waiting([listener], 30)

        tell(process, line)

        assert len(waiting.join()) == 1


@pytest.mark.parametrize("directory", ["wake-ups", None])
def test_only_what_a_listener_asked_for_wakes_it(tmp_path: Path, directory: str | None) -> None:
    wakeups = Wakeups(directory and tmp_path / directory)  # type: ignore[arg-type]
    listener = wakeups.listener(["q"], ["t"])

    wakeups.notify_queue("t")
    wakeups.notify_queue("q", 0)
    wakeups.notify("q")

    assert not listener.wait(0.02)


@pytest.mark.parametrize("directory", ["wake-ups", None])
def test_what_came_before_the_wait_counts_once(tmp_path: Path, directory: str | None) -> None:
    wakeups = Wakeups(directory and tmp_path / directory)  # type: ignore[arg-type]
    listener = wakeups.listener(["q"], ["t"])
    for _ in range(3):
        wakeups.notify_queue("q", 5)
        wakeups.notify("t")
        listener.wake()

    answers = [listener.wait(0), listener.wait(0)]

    assert answers == [True, False]


@pytest.mark.parametrize("directory", ["wake-ups", None])
def test_one_job_wakes_one_waiter(tmp_path: Path, directory: str | None) -> None:
    wakeups = Wakeups(directory and tmp_path / directory)  # type: ignore[arg-type]
    woken = []

    # A waiter that does not sleep yet takes all that it finds: sometimes two.
    for _ in range(5):
        listeners = [wakeups.listener(["q"], []) for _ in range(4)]
        waiting = Waiting(listeners, 0.2)
        wakeups.notify_queue("q", 2)
        woken.append(len(waiting.join()))
        for listener in listeners:
            listener.close()

    assert max(woken) == 2
    assert min(woken) >= 1


def test_all_listeners_of_a_topic_are_woken_at_once(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    slowest = []
    with started(LISTEN, tmp_path) as process:
        assert process.stdout
        listeners = [wakeups.listener(["q"], ["other", "t"]) for _ in range(8)]

        for _ in range(10):
            waiting = Waiting(listeners, 20)
            notified_at = time.monotonic()
            wakeups.notify("t")
            elsewhere = process.stdout.readline()
            heard_at = time.monotonic()
            woken_at = waiting.join()
            assert elsewhere == "woken\n"
            assert len(woken_at) == 8
            slowest.append(max(*woken_at, heard_at) - notified_at)

    # The best of ten, as others use this machine too.
    assert min(slowest) < 0.010


@pytest.mark.parametrize("directory", ["wake-ups", None])
def test_names_may_be_anything(tmp_path: Path, directory: str | None) -> None:
    names = ["", "a/../b", "ü" * 300, "\0", "\ud800"]
    wakeups = Wakeups(directory and tmp_path / directory)  # type: ignore[arg-type]
    listener = wakeups.listener(names, names)
    answers = []

    for name in names:
        wakeups.notify_queue(name)
        answers.append(listener.wait(0))
        wakeups.notify(name)
        answers.append(listener.wait(0))

    assert answers == [True] * 10


def test_no_wake_up_is_lost_between_two_processes(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    listener = wakeups.listener(["pong"], [])
    took = []

    with started(PONG, tmp_path, 2000):
        for _ in range(2000):
            asked_at = time.monotonic()
            wakeups.notify_queue("ping")
            assert listener.wait(10)
            took.append(time.monotonic() - asked_at)

    # The slow look, after half a second, would find what a lost one left behind. A busy machine is as slow at times.
    assert sum(seconds > 0.4 for seconds in took) <= 2


def test_of_many_waiters_one_is_always_woken(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    listeners = [wakeups.listener(["q"], []) for _ in range(4)]
    answers: SimpleQueue[bool] = SimpleQueue()

    def work(listener: WakeupListener) -> None:
        while not listener.closed:
            if listener.wait(10):
                answers.put(True)

    threads = [threading.Thread(target=work, args=(listener,)) for listener in listeners]
    for thread in threads:
        thread.start()
    took = []
    for _ in range(500):
        asked_at = time.monotonic()
        wakeups.notify_queue("q")
        assert answers.get(timeout=10)
        took.append(time.monotonic() - asked_at)
    for listener in listeners:
        listener.close()
    for thread in threads:
        thread.join()

    assert answers.empty()
    assert sum(seconds > 0.4 for seconds in took) <= 2


def test_a_waiter_that_comes_while_another_leaves_hears_everything(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            wakeups.listener(["q"], ["t"]).close()

    threads = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    heard = []
    for _ in range(200):
        listener = wakeups.listener(["q"], ["t"])
        # The others take the byte at times; but not that of the topic.
        wakeups.notify("t")
        heard.append(listener.wait(10))
        heard.append(Path(listener._channels._queues[0][0]).exists())  # type: ignore[union-attr]  # noqa: SLF001
        listener.close()
    over.set()
    for thread in threads:
        thread.join()

    assert all(heard)


def test_a_thousand_listeners_leave_nothing_behind(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    wakeups.listener(["q"], ["t"]).close()
    before = descriptors()

    for number in range(1000):
        listener = wakeups.listener(["q", f"q{number}"], ["t", f"t{number}"])
        wakeups.notify_queue("q")
        assert listener.wait(0)
        listener.close()
    wakeups.close()

    assert descriptors() == before
    assert files_in(tmp_path) == []


def test_a_forgotten_listener_leaves_nothing_behind(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    before = descriptors()
    listener = wakeups.listener(["q"], ["t"])

    del listener
    gc.collect()

    assert descriptors() == before
    assert files_in(tmp_path) == []


def test_the_next_notification_removes_a_killed_listener(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    with started(LISTEN, tmp_path) as process:
        process.kill()
    left = len(files_in(tmp_path))
    listener = wakeups.listener([], ["t"])

    wakeups.notify("t")

    assert left == 2
    assert listener.wait(0)
    assert len(files_in(tmp_path)) == 2  # the queue's, which is shared, and the living listener's
    listener.close()
    assert len(files_in(tmp_path)) == 1


def test_sweep_removes_what_killed_listeners_left_and_nothing_else(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    with started(LISTEN, tmp_path) as process:
        process.kill()
    living = wakeups.listener(["other"], ["t"])
    before = len(files_in(tmp_path))

    wakeups.sweep()

    assert (before, len(files_in(tmp_path))) == (4, 2)
    wakeups.notify_queue("other")
    assert living.wait(0)
    wakeups.notify("t")
    assert living.wait(0)


def test_a_forked_child_neither_takes_nor_removes_what_is_its_parents(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    listener = wakeups.listener(["q"], ["t"])
    wakeups.notify_queue("q")
    assert listener.wait(0)
    files = files_in(tmp_path)
    before = descriptors()

    wakeups.before_fork()
    child = os.fork()
    if not child:
        wakeups.after_fork_in_child()
        code = 1
        try:
            listener.wake()
            listener.wait(0)
        except RuntimeError:
            code = 0
        left = descriptors() & before
        opened = {name for name in left if str(tmp_path) in name or "eventpoll" in name}
        listener.close()
        own = wakeups.listener(["q"], ["t"])
        own.close()
        del listener, own
        gc.collect()
        os._exit(code or bool(opened))
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert files_in(tmp_path) == files
    assert not listener.wait(0)
    wakeups.notify_queue("q")
    assert listener.wait(0)
    wakeups.notify("t")
    assert listener.wait(0)


def test_a_child_that_was_forked_without_notice_does_no_harm(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    listener = wakeups.listener(["q"], ["t"])
    files = files_in(tmp_path)

    child = os.fork()
    if not child:
        listener.wake()
        del listener, wakeups
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)

    assert files_in(tmp_path) == files
    assert not listener.wait(0)
    wakeups.notify("t")
    assert listener.wait(0)


def test_a_child_sleeps_while_its_parent_has_the_queues_wake_up(tmp_path: Path) -> None:
    # The descriptors of the parent, left open in the child, must not make its own waits return at once.
    wakeups = Wakeups(tmp_path)
    listener = wakeups.listener(["q"], [])

    child = os.fork()
    if not child:
        wakeups.after_fork_in_child()
        own = wakeups.listener(["q"], [])
        started_at = time.thread_time()
        woken = own.wait(0.3)
        os._exit(woken or time.thread_time() - started_at > 0.1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert not listener.wait(0)


def test_an_idle_wait_sleeps(tmp_path: Path) -> None:
    listener = Wakeups(tmp_path).listener(["q"], ["t"])
    began_at, began_cpu = time.monotonic(), time.thread_time()

    woken = listener.wait(1.2)

    assert not woken
    assert time.monotonic() - began_at >= 1.2
    assert time.thread_time() - began_cpu < 0.05


def test_a_deleted_sidecar_is_made_anew_and_the_waiter_looks_once_more(tmp_path: Path) -> None:
    side = tmp_path / "side"
    wakeups, others = Wakeups(side), Wakeups(side)
    listener = wakeups.listener(["q"], ["t"])
    others.notify_queue("q")
    assert listener.wait(0)
    descriptor = listener.fileno()

    shutil.rmtree(side)

    assert listener.wait(20)
    assert not listener.wait(0)
    others.notify("t")
    assert listener.wait(0)
    # The other one writes to the deleted FIFO for up to half a second, unless it is closed, as it is now.
    others.notify_queue("q")
    assert listener.wait(0)
    assert listener.fileno() == descriptor
    listener.close()
    assert files_in(tmp_path) == []


def test_a_renewed_listener_is_not_kept_awake_by_the_fifo_that_a_child_still_has(tmp_path: Path) -> None:
    listener = Wakeups(tmp_path / "side").listener(["q"], [])
    (fifo,) = (tmp_path / "side" / "wake").glob("q-*")
    late = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        shutil.rmtree(tmp_path / "side")
        assert listener.wait(20)
        os.write(late, b"x")
        began_cpu = time.thread_time()

        woken = listener.wait(0.3)

        assert not woken
        assert time.thread_time() - began_cpu < 0.1
    finally:
        os.close(late)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_writer_leaves_a_deleted_fifo_that_a_stopped_process_still_reads(tmp_path: Path) -> None:
    side = tmp_path / "side"
    wakeups = Wakeups(side)
    with started(LISTEN, side) as process:
        wakeups.notify_queue("q")
        assert process.stdout
        assert process.stdout.readline() == "woken\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        shutil.rmtree(side)
        listener = wakeups.listener(["q"], [])
        ends_at = time.monotonic() + 20

        while not listener.wait(0.01) and time.monotonic() < ends_at:
            wakeups.notify_queue("q")

        assert time.monotonic() < ends_at


def test_without_fifos_a_listener_polls_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "wake").write_text("in the way")
    wakeups = Wakeups(tmp_path)
    with caplog.at_level(logging.WARNING):
        listeners = [wakeups.listener(["q"], ["t"]) for _ in range(2)]

    nothing = listeners[0].wait(0.01)
    wakeups.notify("t")
    here = [listener.wait(0) for listener in listeners]
    waiting = Waiting([listeners[0]], 20)
    listeners[0].wake()

    assert len(waiting.join()) == 1
    assert [listener.polling for listener in listeners] == [True, True]
    assert nothing is False
    assert here == [True, True]
    assert len(caplog.records) == 1
    with pytest.raises(OSError, match="no descriptor"):
        listeners[0].fileno()


def test_a_listener_that_polls_for_want_of_descriptors_recovers(tmp_path: Path) -> None:
    script = """
import os, resource, sys
from pathlib import Path
from litebroker.wakeup import Wakeups
wakeups = Wakeups(Path(sys.argv[1]))
wakeups.listener(["q"], ["t"]).close()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
os.close(taken.pop())
listener = wakeups.listener(["q"], ["t"])
poor = listener.polling, listener.wait(0.02)
listener.wake()
poor += listener.wait(20),
for descriptor in taken:
    os.close(descriptor)
rich = listener.wait(20), listener.polling
wakeups.notify("t")
print(poor, rich, listener.wait(0))
listener.close()
"""

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=30
    )

    assert done.stdout == "(True, False, True) (True, False) True\n"
    assert files_in(tmp_path) == []


def test_descriptors_beyond_what_select_takes_are_waited_for(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken = [os.dup(0) for _ in range(1100)]
    try:
        wakeups = Wakeups(tmp_path)
        listener = wakeups.listener(["q"], ["t"])
        waiting = Waiting([listener], 20)
        wakeups.notify_queue("q")

        assert listener.fileno() > 1024
        assert len(waiting.join()) == 1
        listener.close()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("directory", ["wake-ups", None])
def test_an_exception_from_a_signal_handler_ends_the_wait(tmp_path: Path, directory: str | None) -> None:
    class StruckError(Exception):
        pass

    def strike(_number: int, _frame: object) -> None:
        raise StruckError

    wakeups = Wakeups(directory and tmp_path / directory)  # type: ignore[arg-type]
    listener = wakeups.listener(["q"], ["t"])
    before = signal.signal(signal.SIGUSR1, strike)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(StruckError):
            listener.wait(None)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)

    wakeups.notify_queue("q")
    assert listener.wait(0)


@pytest.mark.parametrize("call", ["wake", "close", "notify"])
@pytest.mark.parametrize("directory", ["wake-ups", None])
def test_a_signal_handler_may_end_the_wait_that_it_interrupts(tmp_path: Path, directory: str | None, call: str) -> None:
    wakeups = Wakeups(directory and tmp_path / directory)  # type: ignore[arg-type]
    listener = wakeups.listener(["q"], ["t"])

    def handle(_number: int, _frame: object) -> None:
        if call == "notify":
            wakeups.notify("t")
        else:
            getattr(listener, call)()

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    try:
        timer.start()
        woken = listener.wait(None)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)

    assert woken == (call != "close")
    assert listener.closed == (call == "close")


def test_signals_at_any_moment_break_neither_waits_nor_notifications(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    listener = wakeups.listener(["q"], ["t"])
    struck = 0

    def handle(_number: int, _frame: object) -> None:
        nonlocal struck
        struck += 1
        wakeups.notify_queue("q")
        wakeups.notify("t")
        listener.wake()

    before = signal.signal(signal.SIGUSR1, handle)
    over = threading.Event()

    def strike() -> None:
        while not over.wait(0.0002):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    thread = threading.Thread(target=strike)
    thread.start()
    heard = []
    try:
        for _ in range(1000):
            wakeups.notify_queue("q")
            heard.append(listener.wait(10))
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)

    assert struck
    assert all(heard)


@pytest.mark.parametrize("directory", ["wake-ups", None])
def test_close_ends_a_wait_in_another_thread_and_what_follows(tmp_path: Path, directory: str | None) -> None:
    wakeups = Wakeups(directory and tmp_path / directory)  # type: ignore[arg-type]
    before = descriptors()
    listener = wakeups.listener(["q"], ["t"])
    waiting = Waiting([listener], 30)

    listener.close()

    assert waiting.join() == []
    assert listener.wait(None) is False
    listener.wake()
    listener.close()
    assert descriptors() == before
    assert files_in(tmp_path) == []


def test_closing_the_wake_ups_closes_their_listeners(tmp_path: Path) -> None:
    before = descriptors()
    wakeups = Wakeups(tmp_path)
    listener = wakeups.listener(["q"], ["t"])
    wakeups.notify_queue("q")

    wakeups.close()

    assert listener.closed
    assert descriptors() == before


def test_an_event_loop_can_watch_the_descriptor(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    listener = wakeups.listener(["q"], ["t"])
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    answers = []
    notifications: list[Callable[[], None]] = [
        lambda: wakeups.notify_queue("q"),
        lambda: wakeups.notify("t"),
        listener.wake,
    ]

    for notify in notifications:
        answers.append(bool(poll.poll(0)))
        notify()
        answers.append(bool(poll.poll(5000)))
        answers.append(listener.wait(0))

    assert answers == [False, True, True] * 3
    assert not poll.poll(0)


def test_notifying_after_the_last_waiter_left_spares_a_program_that_dies_of_sigpipe(tmp_path: Path) -> None:
    script = """
import signal, sys
from pathlib import Path
from litebroker.wakeup import Wakeups
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
wakeups, others = Wakeups(Path(sys.argv[1])), Wakeups(Path(sys.argv[1]))
for _ in range(3):
    listener = others.listener(["q"], ["t"])
    wakeups.notify_queue("q"), wakeups.notify("t")
    assert listener.wait(0)
    listener.close()
    wakeups.notify_queue("q"), wakeups.notify("t")
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
assert signal.sigpending() == set()
print("alive")
"""

    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)

    assert done.stdout == "alive\n"


def test_a_queue_that_nobody_reads_any_more_fills_up_without_harm(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    listener = wakeups.listener(["q"], [])

    for _ in range(10_000):
        wakeups.notify_queue("q", 100)

    assert [listener.wait(0), listener.wait(0)] == [True, False]


def test_more_queues_than_descriptors_kept(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    before = len(descriptors())
    queues = [f"q{number}" for number in range(150)]
    listener = wakeups.listener(queues, [])
    with_listener = len(descriptors())
    answers = []

    for queue in queues * 2:
        wakeups.notify_queue(queue)
        answers.append(listener.wait(0))

    assert all(answers)
    assert with_listener > before + 150
    assert len(descriptors()) <= with_listener + 64


def test_only_the_waiters_of_a_database_in_memory_hear_its_notifications() -> None:
    here, there = Wakeups(None), Wakeups(None)
    listener, stranger = here.listener(["q"], ["t"]), there.listener(["q"], ["t"])

    here.notify_queue("q")
    here.notify("t")

    assert listener.wait(0)
    assert not stranger.wait(0)
    assert not listener.polling


def test_a_platform_without_fifos_wakes_within_the_process(tmp_path: Path) -> None:
    script = """
import os, select, sys
del os.mkfifo, select.poll
sys.modules["fcntl"] = None
from pathlib import Path
from litebroker.wakeup import Wakeups
for directory in (Path(sys.argv[1]), None):
    wakeups = Wakeups(directory)
    listener = wakeups.listener(["q"], ["t"])
    answers = [listener.polling, listener.wait(0.01)]
    wakeups.notify_queue("q")
    answers.append(listener.wait(0))
    wakeups.notify("t")
    answers.append(listener.wait(0))
    listener.wake()
    answers += [listener.wait(None), listener.wait(0)]
    listener.close()
    print(answers)
"""

    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == [
        "[True, False, True, True, True, False]",
        "[False, False, True, True, True, False]",
    ]
    assert files_in(tmp_path) == []
