"""SQLiteHuey beside RedisHuey and huey's own SqliteHuey, in one run: ``python tests/benchmarks/bench_huey.py``.

Each backend enqueues no-op tasks from one process, then drains them with 4 threads, and with 2 processes: real
`huey_consumer`s, which log nothing but errors. Then a task a second reaches an idle consumer. Medians of ``--rounds``.
Redis keeps nothing on disk here: compare it with "relaxed". SqliteHuey syncs each commit: compare it with "full", and
with the default.
"""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "integrations")]
BACKENDS = ["redis", "relaxed", "sqlite", "durable", "full"]


def make_huey() -> Any:
    """The huey that the environment names. Consumers import this file, and find it as `huey`."""
    backend, place = os.environ["BENCH_BACKEND"], os.environ["BENCH_PLACE"]
    if backend == "redis":
        from huey.api import RedisHuey

        return RedisHuey("bench", host="127.0.0.1", port=int(place))
    if backend == "sqlite":
        from huey.api import SqliteHuey

        return SqliteHuey("bench", filename=place)
    from litebroker_huey import SQLiteHuey

    return SQLiteHuey("bench", filename=place, durability=backend)


if "BENCH_BACKEND" in os.environ:
    huey = make_huey()

    @huey.task()
    def noop() -> None:
        pass

    @huey.task()
    def picked_up(sent_at: float) -> None:
        with Path(os.environ["BENCH_NOTES"]).open("a") as notes:
            notes.write(f"{time.time() - sent_at}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="*", default=BACKENDS, help=", ".join(BACKENDS))
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pick-ups", type=int, default=20)
    parser.add_argument("--best", action="store_true", help="the best rounds instead of the medians, on a busy machine")
    options = parser.parse_args()
    pick = max if options.best else statistics.median
    print(f"{options.tasks} no-op tasks, {'best' if options.best else 'medians'} of {options.rounds}, in turns")
    print(f"{'backend':10} {'enqueue/s':>10} {'4 threads/s':>12} {'2 processes/s':>14} {'pick-up':>12} {'idle CPU':>9}")
    rounds: dict[str, list[tuple[float, float, float]]] = {backend: [] for backend in options.backends}
    with contextlib.ExitStack() as stack:
        servers = {backend: stack.enter_context(Server(backend)) for backend in options.backends}
        # In turns, so that whatever else the machine does meets all alike.
        for _ in range(options.rounds):
            for backend, server in servers.items():
                server.choose()
                rounds[backend].append(measure(options.tasks))
        for backend, server in servers.items():
            server.choose()
            pick_up, cpu = idle(options.pick_ups)
            enqueue, threads, processes = (pick(figures) for figures in zip(*rounds[backend], strict=True))
            print(
                f"{backend:10} {enqueue:10,.0f} {threads:12,.0f} {processes:14,.0f}"
                f" {pick_up * 1000:9.1f} ms {cpu:8.2%}",
                flush=True,
            )


class Server:
    """A backend: a folder, and a redis-server where it needs one."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.folder = tempfile.TemporaryDirectory(prefix="bench-huey-")
        self.place = str(free_port()) if backend == "redis" else f"{self.folder.name}/jobs.db"
        self.redis: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:  # noqa: PYI034 - typing has no Self in Python 3.10
        if self.backend == "redis":
            redis = shutil.which("redis-server") or sys.exit("redis-server is not installed")
            command = [redis, "--port", self.place, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            self.redis = subprocess.Popen(command, cwd=self.folder.name, stdout=subprocess.PIPE)
            assert self.redis.stdout
            while b"eady to accept connections" not in (line := self.redis.stdout.readline()):
                assert line, "redis-server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        if self.redis is not None:
            self.redis.kill()
            self.redis.wait()
        self.folder.cleanup()

    def choose(self) -> None:
        """Let the processes that start from now on use it."""
        os.environ.update(
            BENCH_BACKEND=self.backend,
            BENCH_PLACE=self.place,
            BENCH_NOTES=str(Path(self.folder.name) / "notes"),
            PYTHONPATH=os.pathsep.join([str(ROOT / "core"), str(ROOT / "integrations"), str(Path(__file__).parent)]),
        )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def measure(tasks: int) -> tuple[float, float, float]:
    enqueue, threads = drain(tasks, "thread", 4)
    again, processes = drain(tasks, "process", 2)
    return max(enqueue, again), threads, processes


def drain(tasks: int, kind: str, workers: int) -> tuple[float, float]:
    """Tasks a second: enqueued, and run."""
    producer = in_process("fill", tasks)
    with process("watch", tasks) as watcher:
        assert watcher.stdout
        # It takes as long to start as the consumer, which could be through by then.
        assert watcher.stdout.readline() == b"watching\n", "the watcher did not start"
        with Consumer(kind, workers):
            rate = float(watcher.stdout.readline())
    return producer, rate


def in_process(what: str, tasks: int) -> float:
    """Run one of the functions below in a process of its own; what it returned."""
    with process(what, tasks) as program:
        assert program.stdout
        return float(program.stdout.read())


def process(what: str, tasks: int) -> subprocess.Popen[bytes]:
    script = f"import bench_huey; print(bench_huey.{what}({tasks}))"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)


def fill(tasks: int) -> float:
    noop()
    huey.storage.flush_queue()
    start = time.perf_counter()
    for _ in range(tasks):
        noop()
    return tasks / (time.perf_counter() - start)


def watch(tasks: int) -> float:
    """From the first task that is gone to the last one that is done."""
    assert huey.pending_count() == tasks
    print("watching", flush=True)
    while huey.pending_count() == tasks:
        time.sleep(0.0005)
    start, at_start = time.perf_counter(), int(huey.pending_count())
    while left():
        time.sleep(0.01)
    return at_start / (time.perf_counter() - start)


def left() -> int:
    """How many are not done; of the others' those that wait, which only misses the last one of each worker."""
    in_flight: int = huey.inflight_count() if hasattr(huey, "inflight_count") else 0
    return int(huey.pending_count()) + in_flight


class Consumer:
    """A `huey_consumer` of this file."""

    def __init__(self, kind: str, workers: int) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "huey.bin.huey_consumer", "bench_huey.huey", "--quiet"),
                *("--worker-type", kind, "--workers", str(workers)),
            ],
            start_new_session=True,
        )

    def __enter__(self) -> Consumer:  # noqa: PYI034 - typing has no Self in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(pick_ups: int) -> tuple[float, float]:
    """Seconds from enqueuing to the start of a task, on a consumer that had nothing to do; and its use of a core."""
    notes = Path(os.environ["BENCH_NOTES"])
    notes.write_text("")
    with Consumer("thread", 4) as consumer:
        time.sleep(2)
        begin, cpu = time.perf_counter(), consumer.cpu_seconds()
        time.sleep(10)
        used = (consumer.cpu_seconds() - cpu) / (time.perf_counter() - begin)
        in_process("trickle", pick_ups)
        while len(notes.read_text().splitlines()) < pick_ups:
            time.sleep(0.1)
    return statistics.median(float(line) for line in notes.read_text().splitlines()), used


def trickle(tasks: int) -> float:
    for _ in range(tasks):
        time.sleep(1)
        picked_up(time.time())
    return 1.0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ended from outside, it leaves no process behind.
    main()
