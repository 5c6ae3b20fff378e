"""One of several processes: ``python -m tests.benchmarks.child ROLE ARGUMENTS``, told what to do by `several`.

It says "ready", begins when it is told "go", and its last line is what it has found, in JSON. The end of its input ends
those roles that have no end of their own.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.contestants import CONTESTANTS, Contestant

from litebroker import Queue

NAP_S = 0.001  # who finds nothing looks again after this


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A Ctrl-C is for who started it, and ends it.
    role, arguments = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(ROLES[role](**arguments)), flush=True)


def ready() -> None:
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit("who started this process is gone")


def at_end_of_input() -> threading.Event:
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def opened(kind: str, path: str, level: Any) -> Contestant:
    """Open, and warm. Several processes begin together, and not every peer can make its file in company."""
    with Path(f"{path}.opening").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        contestant = CONTESTANTS[kind](Path(path), level)
        contestant.claim()
    return contestant


def produce(kind: str, path: str, level: Any, count: int) -> dict[str, Any]:
    """Add so many, one at a time."""
    contestant = opened(kind, path, level)
    ready()
    cpu = time.process_time()
    for _ in range(count):
        contestant.add()
    cpu, last = time.process_time() - cpu, time.monotonic()
    return {"cpu": cpu, "done": count, "last": last, "settings": contestant.settings()}


def consume(kind: str, path: str, level: Any) -> dict[str, Any]:
    """Claim and complete, one at a time, until nothing is left after the end of the input."""
    contestant = opened(kind, path, level)
    ready()
    ended, done, last, cpu = at_end_of_input(), 0, 0.0, time.process_time()
    while True:
        ending = ended.is_set()
        job = contestant.claim()
        if job is not None:
            done += contestant.complete(job)
            last = time.monotonic()
        elif ending:
            return {"cpu": time.process_time() - cpu, "done": done, "last": last}
        else:
            time.sleep(NAP_S)


def work(path: str, level: Any, concurrency: int) -> dict[str, Any]:
    """Run a worker until the end of the input; each line before it asks for the CPU time used so far.

    A job that says when it was added tells how long it took to get here.
    """
    done, last, delays = 0, 0.0, []
    queue: Queue[Any] = Queue("q", path, durability=level)

    def handler(data: dict[str, Any]) -> None:
        nonlocal done, last
        last = time.monotonic()
        done += 1
        if "added_at" in data:
            delays.append(last - data["added_at"])

    with queue, queue.process(handler, concurrency=concurrency):
        ready()
        cpu = time.process_time()
        answer(delays)
    return {"cpu": time.process_time() - cpu, "done": done, "last": last, "delays": delays}


def listen(kind: str, path: str, level: Any) -> dict[str, Any]:
    """As `work`, with a peer's own way to wait for jobs."""
    contestant: Any = opened(kind, path, level)
    delays: list[float] = []

    def handler(data: dict[str, Any]) -> None:
        delays.append(time.monotonic() - data["added_at"])

    threading.Thread(target=contestant.listen, args=(handler,), daemon=True).start()
    ready()
    answer(delays)
    return {"delays": delays, "settings": contestant.settings()}


def answer(delays: list[float]) -> None:
    """Say at each line of the input what was used and done so far."""
    for _line in sys.stdin:
        found = {"cpu": time.process_time(), "now": time.monotonic(), "delays": len(delays)}
        print(json.dumps(found), flush=True)


def write(kind: str, path: str, level: Any, seconds: float) -> dict[str, Any]:
    """Add, claim and complete without a pause."""
    contestant = opened(kind, path, level)
    contestant.add()
    ready()
    until, waits = time.monotonic() + seconds, []

    def timed(operation: Callable[..., Any], *arguments: Any) -> Any:
        began = time.monotonic()
        result = operation(*arguments)
        waits.append(time.monotonic() - began)
        return result

    while time.monotonic() < until:
        timed(contestant.add)
        job = timed(contestant.claim)
        if job is not None:
            timed(contestant.complete, job)
    waits.sort()
    p99 = waits[len(waits) * 99 // 100]
    return {"done": len(waits), "longest": waits[-1], "p99": p99, "settings": contestant.settings()}


def drain(path: str, count: int, concurrency: int) -> dict[str, Any]:
    """A worker's memory while it drains a queue: (seconds, MB, jobs done) over time."""
    done, ended, curve = 0, threading.Event(), []
    queue: Queue[Any] = Queue("q", path, durability="relaxed")

    def handler(_data: Any) -> None:
        nonlocal done
        done += 1
        if done >= count:
            ended.set()

    ready()
    began = time.monotonic()
    with queue, queue.process(handler, concurrency=concurrency):
        while not ended.wait(0.5):
            curve.append((time.monotonic() - began, resident_mb(), done))
    return {"curve": curve, "highest": highest_mb(), "seconds": time.monotonic() - began}


def resident_mb() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return highest_mb()
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def highest_mb() -> float:
    # Not what getrusage(2) says on Linux, which includes the process that this one was copied from.
    with suppress(FileNotFoundError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) there
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


ROLES: dict[str, Callable[..., dict[str, Any]]] = {
    "produce": produce,
    "consume": consume,
    "work": work,
    "listen": listen,
    "write": write,
    "drain": drain,
}


if __name__ == "__main__":
    main()
