"""Dramatiq on litebroker beside Dramatiq on Redis: ``python tests/benchmarks/bench_dramatiq.py``.

Redis keeps nothing on disk here, so the fair comparison is with ``durability="relaxed"``; the default's figures stand
beside. All brokers take turns, round by round, and the medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "integrations")]

import dramatiq  # noqa: E402
from dramatiq import Broker, Worker  # noqa: E402
from dramatiq.brokers.redis import RedisBroker  # noqa: E402
from dramatiq.brokers.stub import StubBroker  # noqa: E402
from dramatiq.middleware import Middleware  # noqa: E402

from litebroker_dramatiq import SQLiteBroker  # noqa: E402

LONGEST_S = 60

APP = """
import os, sys, time
sys.path[:0] = {path!r}
import dramatiq
from bench_dramatiq import Acknowledged, open_broker
broker = open_broker({where!r})
broker.add_middleware(Acknowledged(os.path.join({folder!r}, "acks-%d" % os.getpid())))
dramatiq.set_broker(broker)

@dramatiq.actor
def nothing(): pass

@dramatiq.actor
def late(since):
    with open(os.path.join({folder!r}, "late"), "a") as notes:
        notes.write("%f\\n" % (1000 * (time.time() - since)))
"""


class Acknowledged(Middleware):
    """Counts acknowledgements, and keeps the times of the first and the last in a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._count, self._first = 0, 0.0

    def after_ack(self, broker: Broker, message: Any) -> None:
        now = time.time()
        with self._lock:
            self._first = self._first or now
            self._count += 1
            if self._count < 50 or self._count % 50 == 0:
                Path(self._path).write_text(f"{self._count} {self._first} {now}")


def open_broker(where: str) -> Broker:
    """As the names in the table: "redis <url>", "stub", "dramatiq-sqlite <path>", "<durability> <path>"."""
    kind, _, place = where.partition(" ")
    if kind == "redis":
        return RedisBroker(url=place)
    if kind == "stub":
        return StubBroker()
    if kind == "dramatiq-sqlite":
        peer: Broker = importlib.import_module("dramatiq_sqlite").SQLiteBroker(url=f"sqlite://{place}")
        return peer
    return SQLiteBroker(place, durability=kind)  # type: ignore[arg-type]


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str | None]:
    if shutil.which("redis-server") is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(["redis-server", *options], cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        for line in server.stdout:
            if "eady to accept connections" in line:
                break
        threading.Thread(target=server.stdout.read, daemon=True).start()
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            server.kill()


class Place:
    """A broker's name, and a fresh one of it for each measurement."""

    def __init__(self, name: str, folder: Path, redis_url: str | None) -> None:
        self.name = name
        self._folder = folder
        self._redis_url = redis_url
        self._count = 0

    def fresh(self) -> str:
        self._count += 1
        if self.name == "redis":
            import redis

            redis.Redis.from_url(str(self._redis_url)).flushall()
            return f"redis {self._redis_url}"
        if self.name == "stub":
            return "stub"
        folder = self._folder / f"{self.name}-{self._count}"
        folder.mkdir()
        return f"{self.name} {folder}/jobs.db"


def declare(broker: Broker) -> Any:
    dramatiq.set_broker(broker)

    @dramatiq.actor
    def nothing() -> None: ...

    return nothing


def send(place: Place, count: int) -> float:
    """Messages per second, one sender."""
    broker = open_broker(place.fresh())
    actor = declare(broker)
    started = time.perf_counter()
    for _ in range(count):
        actor.send()
    took = time.perf_counter() - started
    with contextlib.suppress(NotImplementedError):
        broker.flush_all()
    broker.close()
    return count / took


def drain(place: Place, count: int) -> float:
    """Messages per second, by a Worker with eight threads, from its start to the last acknowledgement."""
    broker = open_broker(place.fresh())
    done = threading.Event()
    left = count
    lock = threading.Lock()

    class Countdown(Middleware):
        def after_ack(self, broker: Broker, message: Any) -> None:
            nonlocal left
            with lock:
                left -= 1
                if not left:
                    done.set()

    broker.add_middleware(Countdown())
    fill(broker, count)
    worker = Worker(broker, worker_threads=8)
    started = time.perf_counter()
    worker.start()
    if not done.wait(LONGEST_S):
        raise TimeoutError(f"{left} of {count} messages are left after {LONGEST_S} s")
    took = time.perf_counter() - started
    worker.stop()
    broker.close()
    return count / took


def drain_command(place: Place, count: int) -> float:
    """Messages per second, by the command with two processes, from the first to the last acknowledgement."""
    where = place.fresh()
    broker = open_broker(where)
    fill(broker, count)
    with tempfile.TemporaryDirectory() as folder, command(where, Path(folder)):
        until = time.monotonic() + LONGEST_S
        while True:
            time.sleep(0.1)
            if time.monotonic() > until:
                raise TimeoutError(f"messages are left after {LONGEST_S} s")
            acks = [path.read_text().split() for path in Path(folder).glob("acks-*")]
            acks = [ack for ack in acks if len(ack) == 3]
            # Each of the two processes may have done 49 more than it has told.
            if acks and sum(int(done) for done, _, _ in acks) >= max(count - 98, count // 2):
                break
        total = sum(int(done) for done, _, _ in acks)
        rate = total / (max(float(last) for *_, last in acks) - min(float(first) for _, first, _ in acks))
    broker.close()
    return rate


def latency(place: Place, delay: int | None) -> tuple[float, float]:
    """Milliseconds from send, or from when it is due, to the actor's start, on an idle worker: median and worst."""
    where = place.fresh()
    broker = open_broker(where)
    declare(broker)
    with tempfile.TemporaryDirectory() as name, command(where, Path(name)) as processes:
        folder = Path(name)
        notes = folder / "late"
        for n in range(-3, 30 if delay is None else 12):
            time.sleep(0.05)
            late = dramatiq.Message[None](
                queue_name="default",
                actor_name="late",
                args=(time.time() + (delay or 0) / 1000,),
                kwargs={},
                options={},
            )
            broker.enqueue(late, delay=delay)
            while not notes.exists() or len(notes.read_text().splitlines()) < n + 4:
                time.sleep(0.002)
        times = sorted(map(float, notes.read_text().splitlines()[3:]))
        del processes
    broker.close()
    return statistics.median(times), times[-1]


def idle(place: Place) -> float:
    """Per cent of a core that `dramatiq -p 2 -t 8` takes while there is nothing to do."""
    where = place.fresh()
    broker = open_broker(where)
    declare(broker)
    with tempfile.TemporaryDirectory() as folder, command(where, Path(folder)) as pids:
        time.sleep(3)
        before = cpu_seconds(pids)
        time.sleep(10)
        used = cpu_seconds(pids) - before
    broker.close()
    return used * 10


def memory(place: Place, count: int) -> tuple[float, float]:
    """MB of a worker process when it is idle, and with so many messages delayed for days."""
    sizes = []
    for delayed in (0, count):
        where = place.fresh()
        broker = open_broker(where)
        actor = declare(broker)
        if isinstance(broker, SQLiteBroker):
            for start in range(0, delayed, 10_000):
                broker.send_many([actor.message() for _ in range(min(10_000, delayed - start))], delay=5 * 86_400_000)
        else:
            for _ in range(delayed):
                actor.send_with_options(delay=5 * 86_400_000)
        with tempfile.TemporaryDirectory() as folder, command(where, Path(folder)) as pids:
            time.sleep(6)
            statm = max(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
            sizes.append(statm * resource.getpagesize() / 1e6)
        broker.close()
    return sizes[0], sizes[1]


def fill(broker: Broker, count: int) -> None:
    actor = declare(broker)
    if isinstance(broker, SQLiteBroker):
        broker.send_many([actor.message() for _ in range(count)])
    else:
        for _ in range(count):
            actor.send()


@contextlib.contextmanager
def command(where: str, folder: Path) -> Iterator[list[int]]:
    """The real command, two processes of eight threads; the pids of the two."""
    path = [str(ROOT / "core"), str(ROOT / "integrations"), str(Path(__file__).parent)]
    (folder / "bench_app.py").write_text(APP.format(path=path, where=where, folder=str(folder)))
    log = folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "dramatiq", "bench_app", "-p", "2", "-t", "8", "--path", str(folder)],
            stdout=stream,
            stderr=stream,
        )
    try:
        until = time.monotonic() + LONGEST_S
        while log.read_text().count("ready for action") < 2:
            if time.monotonic() > until or process.poll() is not None:
                raise ChildProcessError(f"the command did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        yield [int(pid) for pid in children.split()]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--brokers", nargs="*", default=["redis", "relaxed", "durable", "stub"])
    parser.add_argument("--delayed", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="litebroker-bench-") as name, redis_server(Path(name)) as redis_url:
        places = [Place(kind, Path(name), redis_url) for kind in args.brokers if kind != "redis" or redis_url]
        for measure in args.only:
            MEASURES[measure](places, args)


def rates(title: str, measure: Callable[[Place, int], float]) -> Callable[[list[Place], argparse.Namespace], None]:
    """Takes turns, and prints the medians."""

    def report(places: list[Place], args: argparse.Namespace) -> None:
        # A StubBroker's messages do not leave their process.
        inside = [place for place in places if place.name != "stub" or title != "command"]
        figures: dict[str, list[float]] = {place.name: [] for place in inside}
        for _ in range(args.rounds):
            for place in inside:
                figures[place.name].append(measure(place, args.count))
        medians = {kind: statistics.median(values) for kind, values in figures.items()}
        base = medians.get("redis")
        for kind, rate in medians.items():
            times = f", {rate / base:.2f} x redis" if base and kind != "redis" else ""
            spread = " ".join(f"{value:,.0f}" for value in figures[kind])
            print(f"{title}, {kind}: {rate:,.0f}/s{times}   ({spread})", flush=True)

    return report


def each(describe: Callable[[Place, argparse.Namespace], str]) -> Callable[[list[Place], argparse.Namespace], None]:
    """One line for each broker that has a server, or a file."""

    def report(places: list[Place], args: argparse.Namespace) -> None:
        for place in places:
            if place.name != "stub":
                print(describe(place, args), flush=True)

    return report


def describe_latency(place: Place, _args: argparse.Namespace) -> str:
    median, worst = latency(place, None)
    return f"send to start, {place.name}: median {median:.1f} ms, worst {worst:.1f} ms"


def describe_lateness(place: Place, _args: argparse.Namespace) -> str:
    median, worst = latency(place, 500)
    return f"late after a delay, {place.name}: median {median:.1f} ms, worst {worst:.1f} ms"


def describe_idle(place: Place, _args: argparse.Namespace) -> str:
    return f"idle, {place.name}: {idle(place):.2f} % of a core"


def describe_memory(place: Place, args: argparse.Namespace) -> str:
    without, with_them = memory(place, args.delayed)
    return f"memory, {place.name}: {without:.0f} MB; with {args.delayed:,} delayed messages {with_them:.0f} MB"


MEASURES = {
    "send": rates("send", send),
    "drain": rates("drain", drain),
    "command": rates("command", drain_command),
    "latency": each(describe_latency),
    "late": each(describe_lateness),
    "idle": each(describe_idle),
    "memory": each(describe_memory),
}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ended from outside, it leaves no process behind.
    main()
