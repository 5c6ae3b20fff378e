"""RQ on a redis-server and RQ on a file, side by side in one run: medians, and how many times as fast.

    python tests/benchmarks/bench_rq.py [--rounds 5] [--jobs 2000] [--durability relaxed]

Redis runs without persistence, as most do for queues: it loses everything when its process is killed. "relaxed" is what
comes nearest to that: a power cut may take the last moments, and a killed process nothing. "nothing" is a connection
that has its answers ready: what RQ and redis-py take themselves, and thus the most that a storage could reach.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [str(ROOT), str(ROOT / "core"), str(ROOT / "integrations")]
sys.path[:0] = SOURCES

import redis  # noqa: E402
import rq  # noqa: E402
from tests.benchmarks import canned  # noqa: E402
from tests.rq import tasks  # noqa: E402

from litebroker_rq import connect  # noqa: E402

Client = Callable[[], redis.Redis]


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A server of its own; its URL."""
    options = ["--port", "0", "--unixsocket", "redis.sock", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(["redis-server", *options], cwd=folder, stdout=subprocess.DEVNULL) as server:
        while not (folder / "redis.sock").exists():
            time.sleep(0.01)
        try:
            yield f"unix://{folder}/redis.sock"
        finally:
            server.kill()


def enqueue(client: Client, jobs: int) -> float:
    """Jobs a second, one by one."""
    queue = rq.Queue(connection=client())
    queue.enqueue(tasks.nothing)
    start = time.perf_counter()
    for _ in range(jobs):
        queue.enqueue(tasks.nothing)
    return jobs / (time.perf_counter() - start)


def enqueue_many(client: Client, jobs: int) -> float:
    """Jobs a second, in one call."""
    queue = rq.Queue(connection=client())
    data = [rq.Queue.prepare_data(tasks.nothing) for _ in range(jobs)]
    start = time.perf_counter()
    queue.enqueue_many(data)
    return jobs / (time.perf_counter() - start)


def drain(client: Client, jobs: int) -> float:
    """Jobs a second that a SimpleWorker performs."""
    return _work(client, jobs // 4, rq.SimpleWorker)


def drain_forking(client: Client, jobs: int) -> float:
    """Jobs a second that a worker performs in a process for each.

    The worker is a process of its own, as `rq worker` is: the larger it is, the longer takes each fork.
    """
    pool = client().connection_pool
    url = getattr(pool, "database_url", None) or pool.connection_kwargs.get("path")
    if pool.connection_class in {canned.Canned, canned.Recording} or url is None:
        return _work(client, jobs // 20, rq.Worker)
    script = "import sys; from tests.benchmarks import bench_rq; bench_rq.work_forking(sys.argv[1], int(sys.argv[2]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    command = [sys.executable, "-c", script, url, str(jobs // 20)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def work_forking(url: str, jobs: int) -> None:
    """The worker's process: a file's URL, or the socket of a redis-server; it prints its rate."""
    logging.disable(logging.ERROR)

    def client() -> redis.Redis:
        return connect(url) if url.startswith("sqlite:") else redis.Redis(unix_socket_path=url)

    print(_work(client, jobs, rq.Worker))


def _work(client: Client, jobs: int, kind: type[rq.worker.BaseWorker]) -> float:
    connection = client()
    queue = rq.Queue(connection=connection)
    queue.enqueue_many([rq.Queue.prepare_data(tasks.nothing) for _ in range(jobs)])
    worker = kind([queue], connection=connection)
    start = time.perf_counter()
    worker.work(burst=True, logging_level="ERROR")
    return jobs / (time.perf_counter() - start)


def idle_worker(environment: dict[str, str], client: Client, folder: Path) -> tuple[float, float]:
    """Of a worker that waits: milliseconds from enqueue to start, in the median; and its CPU, in percent of a core."""
    queue = rq.Queue(connection=client())
    command = [sys.executable, "-m", "rq.cli", "worker", "--quiet", "-w", "rq.SimpleWorker"]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(SOURCES)}
    with subprocess.Popen(command, env=environment, cwd=folder) as worker:
        try:
            delays = []
            for _ in range(30):
                job = queue.enqueue(tasks.nothing)
                while job.get_status(refresh=True) != "finished":
                    time.sleep(0.005)
                job.refresh()
                if job.started_at is None or job.enqueued_at is None:
                    raise RuntimeError(job.id)
                delays.append((job.started_at - job.enqueued_at).total_seconds() * 1000)
                time.sleep(0.05)
            before = _cpu_seconds(worker.pid)
            time.sleep(10)
            used = _cpu_seconds(worker.pid) - before
        finally:
            worker.kill()
    return statistics.median(delays[5:]), used * 10


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


MEASURES: dict[str, Callable[[Client, int], float]] = {
    "enqueue": enqueue,
    "enqueue_many": enqueue_many,
    "SimpleWorker": drain,
    "Worker (forks)": drain_forking,
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--durability", default="relaxed")
    parser.add_argument("--skip-idle", action="store_true", help="leave out the workers that wait")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as temporary, redis_server(Path(temporary)) as url:
        folder = Path(temporary)
        file = folder / "jobs.db"
        clients: dict[str, Client] = {
            "redis": lambda: redis.Redis.from_url(url),
            "file": lambda: connect(file, durability=options.durability),
        }
        horse = canned.Tape()
        drain(canned.client(canned.Recording, folder / "horse.db", horse), 100)
        print(f"{'jobs/s':<16}{'redis':>10}{'file':>10}{'times':>8}{'nothing':>10}{'times':>8}")
        for number, (name, measure) in enumerate(MEASURES.items()):
            tape, recorded = canned.Tape(horse), folder / f"recorded-{number}.db"
            measure(canned.client(canned.Recording, recorded, tape), options.jobs)
            makers = {**clients, "nothing": canned.client(canned.Canned, recorded, tape)}
            found: dict[str, list[float]] = {where: [] for where in makers}
            for turn in range(options.rounds):
                for where in list(makers)[turn % 3 :] + list(makers)[: turn % 3]:
                    tape.rewind()
                    if where != "nothing":
                        makers[where]().flushdb()
                    found[where].append(measure(makers[where], options.jobs))
            rates = {where: statistics.median(rates) for where, rates in found.items()}
            times = {
                where: statistics.median(mine / its for mine, its in zip(found[where], found["redis"], strict=True))
                for where in makers
            }
            print(
                f"{name:<16}{rates['redis']:>10.0f}{rates['file']:>10.0f}{times['file']:>8.2f}"
                f"{rates['nothing']:>10.0f}{times['nothing']:>8.2f}",
                flush=True,
            )
        environments = {
            "redis": {"RQ_REDIS_URL": url},
            "file": {
                "RQ_REDIS_URL": f"sqlite:///{file}?durability={options.durability}",
                "RQ_CONNECTION_CLASS": "litebroker_rq.SQLiteConnection",
            },
        }
        for where, client in clients.items() if not options.skip_idle else ():
            client().flushdb()
            delay_ms, cpu = idle_worker(environments[where], client, folder)
            print(f"idle worker on {where}: a job starts after {delay_ms:.1f} ms; {cpu:.2f} % of a core")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ended from outside, it leaves no process behind.
    main()
