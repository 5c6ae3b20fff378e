"""How fast a waiting process is woken, and what that costs: ``python tests/benchmarks/bench_wakeup.py``.

Printed are what a notification costs its sender, how long it takes until a waiter in another process goes on, and how
long from ``add`` to the claimed job there; each with one process that waits, and with several.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "core")]

from litebroker.jobs import JobSpec  # noqa: E402
from litebroker.sqlite import SQLiteStorage  # noqa: E402
from litebroker.wakeup import Wakeups  # noqa: E402

# Each prints when it went on: the monotonic clock is the same in all processes.
WAITER = r"""
import os, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from litebroker.wakeup import Wakeups
listener = Wakeups(Path(sys.argv[2])).listener(["q"], ["t"])
print("ready", flush=True)
while True:
    if listener.wait(60):
        os.write(1, b"%d\n" % time.monotonic_ns())
"""

CLAIMER = r"""
import os, sys, time
sys.path[:0] = [sys.argv[1]]
from litebroker.sqlite import SQLiteStorage
storage = SQLiteStorage(sys.argv[2], durability="relaxed")
listener = storage.listener(["q"])
storage.claim(["q"], limit=1, lease_ms=60_000)
print("ready", flush=True)
while True:
    if listener.wait(60):
        for job in storage.claim(["q"], limit=1, lease_ms=60_000):
            os.write(1, b"%d\n" % time.monotonic_ns())
            storage.complete([job.lease])
"""


@contextlib.contextmanager
def waiting(script: str, where: Path, count: int) -> Iterator[Callable[[], int]]:
    """So many processes that wait, and a function that answers when the next of them went on."""
    read, write = os.pipe()
    processes: list[subprocess.Popen[bytes]] = []
    with os.fdopen(read) as lines:
        try:
            for _ in range(count):
                command = [sys.executable, "-c", script, str(ROOT / "core"), str(where)]
                processes.append(subprocess.Popen(command, stdout=write))
                if lines.readline() != "ready\n":
                    raise SystemExit("a waiter did not start")
            yield lambda: int(lines.readline())
        finally:
            os.close(write)
            for process in processes:
                process.kill()
                process.wait()


def measure(send: Callable[[], None], went_on: Callable[[], int], rounds: int, answers: int = 1) -> str:
    """Send, let ``answers`` processes go on, and again; a line with what it took."""
    took: list[float] = []
    cost: list[float] = []
    for _ in range(rounds):
        began_at = time.monotonic_ns()
        send()
        cost.append((time.monotonic_ns() - began_at) / 1000)
        took.append((max(went_on() for _ in range(answers)) - began_at) / 1000)
        time.sleep(0.002)  # so that all of them sleep again
    return f"p50 {at(took, 0.5):6.0f} us   p99 {at(took, 0.99):6.0f} us   the call {at(cost, 0.5):5.1f} us"


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def cost_us(call: Callable[[], object], number: int = 20_000) -> float:
    return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--folder", help="where the files go; default: the system's temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        wakeups = Wakeups(folder / "idle")
        print(f"nobody waits, nobody ever did:  queue {cost_us(lambda: wakeups.notify_queue('q')):5.2f} us", end="   ")
        print(f"topic {cost_us(lambda: wakeups.notify('t')):5.2f} us")
        wakeups.listener(["q"], ["t"]).close()
        print(f"nobody waits any more:          queue {cost_us(lambda: wakeups.notify_queue('q')):5.2f} us", end="   ")
        print(f"topic {cost_us(lambda: wakeups.notify('t')):5.2f} us")
        print(
            f"a listener opened and closed:   queue {cost_us(lambda: wakeups.listener(['q'], []).close(), 500):5.0f} us"
        )
        for count in arguments.processes:
            side = folder / f"side-{count}"
            with waiting(WAITER, side, count) as went_on:
                wakeups = Wakeups(side)
                line = measure(lambda: wakeups.notify_queue("q"), went_on, arguments.rounds)  # noqa: B023
                print(f"{count:3d} waiting, queue, one goes on:    {line}")
                line = measure(lambda: wakeups.notify("t"), went_on, arguments.rounds, answers=count)  # noqa: B023
                print(f"{count:3d} waiting, topic, until the last: {line}")
                wakeups.close()
            path = folder / f"jobs-{count}.db"
            storage = SQLiteStorage(path, durability="relaxed")
            storage.add([JobSpec(queue="other", payload=b"{}")])
            with waiting(CLAIMER, path, count) as went_on:
                line = measure(lambda: add(storage), went_on, arguments.rounds)  # noqa: B023
                print(f"{count:3d} waiting, add until claimed:     {line}")
            storage.close()


def add(storage: SQLiteStorage) -> None:
    storage.add([JobSpec(queue="q", payload=b"{}")])


if __name__ == "__main__":
    main()
