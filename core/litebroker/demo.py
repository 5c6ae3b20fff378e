"""A queue at work, and a worker killed in the middle of it: ``python -m litebroker.demo``.

One process adds jobs, two run them, and one of these two is ended by SIGKILL with jobs in its hands. What is told at
the end is read from what the processes wrote down themselves: the producer a line for each job that `add` has
returned for, the workers one for each start and each end of a job.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from litebroker.queue import Queue

_JOBS, _MOST_JOBS = 300, 1000
_JOB_S = 0.04
_THREADS = 4
# The worker is killed when it has run so many.
_KILL_AFTER = 30
_TIME_LIMIT_S = 30.0
_LOOK_S = 0.005


class _Line(NamedTuple):
    """What a process wrote down. ``at`` is by `time.monotonic`, the same clock in all of them."""

    what: str
    job_id: int
    pid: int
    at: float


class _Notebook:
    """Lines that several processes append to one file: a short one gets there whole."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "notebook"
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, what: str, job_id: int) -> None:
        os.write(self._file, f"{what} {job_id} {os.getpid()} {time.monotonic()}\n".encode())

    def read(self) -> list[_Line]:
        # A line that crosses a page of the file can be seen half written, as the last one.
        whole, _, _ = self._path.read_text(encoding="ascii").rpartition("\n")
        fields = (line.split() for line in whole.splitlines())
        return [_Line(what, int(job_id), int(pid), float(at)) for what, job_id, pid, at in fields]


class _Story:
    """Tells what happens, and when."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def tell(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._began:6.2f} s  {text}\n")
        sys.stdout.flush()


class _OutOfTimeError(Exception):
    """Something did not come about within the time limit."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the demonstration. Answers the exit status: 1 when a job was lost, or it took too long."""
    parser = argparse.ArgumentParser(prog="python -m litebroker.demo", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=_JOBS, metavar="N", help=f"how many jobs are added ({_JOBS})")
    jobs = parser.parse_args(args).jobs
    if not 2 * _KILL_AFTER <= jobs <= _MOST_JOBS:
        parser.error(f"--jobs {jobs}: give a number from {2 * _KILL_AFTER} to {_MOST_JOBS}")
    try:
        with tempfile.TemporaryDirectory(prefix="litebroker-demo-") as name:
            return _run(Path(name), jobs)
    except _OutOfTimeError as error:
        sys.stderr.write(f"litebroker.demo: {error} within {_TIME_LIMIT_S:.0f} s\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _run(folder: Path, jobs: int) -> int:
    story, notebook = _Story(), _Notebook(folder)
    with _open(folder) as queue, _Processes(folder) as processes:
        story.tell(f"the queue is one SQLite file, {folder / 'jobs.db'}")
        first, second = processes.start("work"), processes.start("work")
        _wait(lambda: sum(it.what == "up" for it in notebook.read()) == 2, "two workers did not start")  # noqa: PLR2004
        story.tell(f"processes {first.pid} and {second.pid} wait for jobs, each with {_THREADS} threads")
        producer = processes.start("produce", jobs)
        story.tell(f"process {producer.pid} adds {jobs} jobs; each takes {_JOB_S * 1000:.0f} ms")

        def ran_by_first() -> int:
            return sum(line.what == "ended" and line.pid == first.pid for line in notebook.read())

        _wait(
            lambda: ran_by_first() >= _KILL_AFTER and bool(_in_hand(notebook.read(), first.pid)),
            f"process {first.pid} did not run {_KILL_AFTER} jobs",
        )
        first.kill()
        first.wait()
        killed_at = time.monotonic()
        in_hand = _in_hand(notebook.read(), first.pid)
        story.tell(f"kill -9 {first.pid}: it had run {ran_by_first()} jobs, and was at {len(in_hand)} more")

        def taken_over() -> bool:
            return in_hand <= {it.job_id for it in notebook.read() if it.what == "began" and it.pid == second.pid}

        _wait(taken_over, f"process {second.pid} did not take over the jobs of {first.pid}")
        taken_over_at = max(
            (it.at for it in notebook.read() if it.what == "began" and it.pid == second.pid and it.job_id in in_hand),
            default=killed_at,
        )
        story.tell(f"process {second.pid} has begun all of them again")
        _wait(lambda: producer.poll() is not None, "the producer did not end")
        _wait(lambda: queue.size() == 0 and queue.stats().active == 0, "the queue did not become empty")
        second.send_signal(signal.SIGTERM)
        _wait(lambda: second.poll() is not None, "the worker did not heed SIGTERM")
        story.tell(f"the queue is empty; process {second.pid} has ended at SIGTERM with status {second.returncode}")
        status = producer.returncode or second.returncode
    return _sum_up(notebook.read(), taken_over_at - killed_at) or status


def _in_hand(lines: Sequence[_Line], pid: int) -> set[int]:
    """The jobs that a process has begun and not ended."""
    return {it.job_id for it in lines if it.pid == pid and it.what == "began"} - {
        it.job_id for it in lines if it.pid == pid and it.what == "ended"
    }


def _sum_up(lines: Sequence[_Line], taken_over_s: float) -> int:
    added = {it.job_id for it in lines if it.what == "added"}
    runs = Counter(it.job_id for it in lines if it.what == "ended")
    lost = added - set(runs)
    again = sum(runs.values()) - len(runs)
    sys.stdout.write(
        f"\njobs added       {len(added):6}"
        f"\njobs run         {len(added & set(runs)):6}"
        f"\njobs lost        {len(lost):6}"
        f"\nrun twice        {again:6}   (done, but not yet written down when its process was killed)"
        f"\ntaken over after {taken_over_s:6.2f} s\n"
    )
    return 1 if lost else 0


@contextmanager
def _open(folder: Path) -> Iterator[Queue[Any]]:
    with Queue("demo", folder / "jobs.db") as queue:
        yield queue


class _Processes:
    """This module in other processes, which are gone at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, *args: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"from litebroker import demo; demo.{role}()", str(self._folder)]
        # Where this process found litebroker, they find it, too.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen([*command, *map(str, args)], env=environment)  # noqa: S603 (this very module)
        self._processes.append(process)
        return process

    def __enter__(self) -> _Processes:  # noqa: PYI034 (Self came with Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    ends_at = time.monotonic() + _TIME_LIMIT_S
    while not condition():
        if time.monotonic() > ends_at:
            raise _OutOfTimeError(otherwise)
        time.sleep(_LOOK_S)


def produce() -> None:
    """The producer's process: add jobs one by one, and write each down once `add` has returned."""
    folder = Path(sys.argv[1])
    notebook = _Notebook(folder)
    with _open(folder) as queue:
        for number in range(int(sys.argv[2])):
            notebook.write("added", queue.add(number).id)


def work() -> None:
    """A worker's process: run jobs until SIGTERM."""
    folder = Path(sys.argv[1])
    notebook = _Notebook(folder)

    def handle(_: object, context: Any) -> None:
        notebook.write("began", context.job_id)
        time.sleep(_JOB_S)
        notebook.write("ended", context.job_id)

    with _open(folder) as queue:
        worker = queue.process(handle, concurrency=_THREADS)
        notebook.write("up", 0)
        sys.exit(0 if worker.run() else 1)


if __name__ == "__main__":
    sys.exit(main())
