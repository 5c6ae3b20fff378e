"""Metrics for Prometheus: of the file, and of this process's workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from litebroker import Backoff, Context, Counts, NewJob, Queue, Retention, SQLiteStorage
from litebroker.metrics import StorageCollector, WorkerMetrics
from litebroker.testing import ManualClock, drain

LIMIT = 30

Samples = dict[str, float]


def samples(text: str) -> Samples:
    """Each value, by its name with its labels, such as ``litebroker_jobs{queue=emails,state=ready}``."""
    found = {}
    for family in text_string_to_metric_families(text):
        for it in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(it.labels.items()))
            found[f"{it.name}{{{labels}}}"] = it.value
    return found


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def scrape(registry: CollectorRegistry) -> Callable[[], Samples]:
    return lambda: samples(generate_latest(registry).decode())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def storage(tmp_path: Path, clock: ManualClock) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=clock, durability="relaxed")
    yield storage
    storage.close()


# The file


def test_a_scrape_has_the_jobs_of_each_queue_in_each_state(
    storage: SQLiteStorage, registry: CollectorRegistry, scrape: Callable[[], Samples]
) -> None:
    registry.register(StorageCollector(storage))
    emails: Queue[Any] = Queue("emails", storage, retention=Retention(completed=10), attempts=1)
    emails.add_many([1, 2, 3, NewJob(4, delay=60), 5, 6])
    claimed = emails.claim(3)
    emails.complete(claimed[0])
    emails.fail(claimed[1], "no")
    emails.cancel(emails.list("pending")[0])
    Queue("other", storage).add(1)

    found = scrape()

    states = {state: found[f"litebroker_jobs{{queue=emails,state={state}}}"] for state in Counts._fields}
    assert states == {"ready": 1, "delayed": 1, "active": 1, "completed": 1, "failed": 1, "cancelled": 1}
    assert found["litebroker_jobs{queue=other,state=ready}"] == 1
    assert found["litebroker_up{}"] == 1


def test_a_scrape_has_the_age_of_the_oldest_due_job_and_whether_a_queue_is_paused(
    storage: SQLiteStorage, clock: ManualClock, registry: CollectorRegistry, scrape: Callable[[], Samples]
) -> None:
    registry.register(StorageCollector(storage))
    queue: Queue[Any] = Queue("emails", storage)
    queue.add(1)
    clock.advance(12.5)

    before = scrape()
    queue.pause()
    queue.purge()
    after = scrape()

    assert before["litebroker_oldest_due_age_seconds{queue=emails}"] == 12.5
    assert before["litebroker_queue_paused{queue=emails}"] == 0
    assert after["litebroker_oldest_due_age_seconds{queue=emails}"] == 0
    assert after["litebroker_queue_paused{queue=emails}"] == 1


def test_a_scrape_has_the_sizes_of_the_file_and_of_its_log(
    storage: SQLiteStorage, registry: CollectorRegistry, scrape: Callable[[], Samples], tmp_path: Path
) -> None:
    registry.register(StorageCollector(storage))
    Queue("emails", storage).add("x" * 10_000)

    found = scrape()

    assert found["litebroker_file_size_bytes{file=database}"] == (tmp_path / "jobs.db").stat().st_size
    assert found["litebroker_file_size_bytes{file=wal}"] == (tmp_path / "jobs.db-wal").stat().st_size > 10_000


def test_a_storage_in_memory_has_no_file(registry: CollectorRegistry, scrape: Callable[[], Samples]) -> None:
    storage = SQLiteStorage(":memory:")
    registry.register(StorageCollector(storage))
    Queue("emails", storage).add(1)

    found = scrape()
    storage.close()

    assert found["litebroker_jobs{queue=emails,state=ready}"] == 1
    assert not [key for key in found if key.startswith("litebroker_file_size_bytes")]


def test_a_storage_that_cannot_be_read_does_not_spoil_the_other_metrics(
    storage: SQLiteStorage, registry: CollectorRegistry, scrape: Callable[[], Samples], caplog: pytest.LogCaptureFixture
) -> None:
    registry.register(StorageCollector(storage))
    WorkerMetrics(registry=registry)
    storage.close()

    found = scrape()

    assert found["litebroker_up{}"] == 0
    assert not [key for key in found if key.startswith("litebroker_jobs{")]
    assert "StorageClosedError" in caplog.text


def test_to_register_a_storage_does_not_read_it(tmp_path: Path, registry: CollectorRegistry) -> None:
    storage = SQLiteStorage(tmp_path / "later.db")

    registry.register(StorageCollector(storage))

    assert not (tmp_path / "later.db").exists()


# Workers


def test_workers_count_what_becomes_of_their_jobs(
    storage: SQLiteStorage, registry: CollectorRegistry, scrape: Callable[[], Samples]
) -> None:
    queue: Queue[Any] = Queue("emails", storage, backoff=Backoff.fixed(1), attempts=2)
    queue.observe(WorkerMetrics(registry=registry))

    def handler(data: str, context: Context) -> None:
        if data == "bad":
            raise ValueError
        if data == "later" and context.attempt == 1 and not released:
            released.append(data)
            context.release()

    released: list[str] = []
    queue.add_many(["good", NewJob("bad", task="greet"), "later"])
    queue.add("good", dedupe_key="k")
    queue.add("good", dedupe_key="k")
    drain(queue, handler, raises=False, delayed=True)

    found = scrape()
    assert found["litebroker_jobs_added_total{queue=emails}"] == 4
    assert found["litebroker_jobs_claimed_total{queue=emails}"] == 6
    assert {key: value for key, value in found.items() if key.startswith("litebroker_jobs_settled_total")} == {
        "litebroker_jobs_settled_total{outcome=completed,queue=emails,task=}": 3,
        "litebroker_jobs_settled_total{outcome=retried,queue=emails,task=greet}": 1,
        "litebroker_jobs_settled_total{outcome=failed,queue=emails,task=greet}": 1,
        "litebroker_jobs_settled_total{outcome=released,queue=emails,task=}": 1,
    }


def test_workers_time_their_handlers_and_how_long_jobs_waited(
    storage: SQLiteStorage, clock: ManualClock, registry: CollectorRegistry, scrape: Callable[[], Samples]
) -> None:
    queue: Queue[Any] = Queue("emails", storage)
    queue.observe(WorkerMetrics(registry=registry, buckets=(1, 10)))
    running: list[float] = []
    queue.add(1, task="greet")
    clock.advance(5)

    drain(queue, lambda _: running.append(scrape()["litebroker_handlers_running{queue=emails}"]))

    found = scrape()
    assert running == [1]
    assert found["litebroker_handlers_running{queue=emails}"] == 0
    assert found["litebroker_handler_seconds_count{queue=emails,task=greet}"] == 1
    assert found["litebroker_wait_seconds_bucket{le=1.0,queue=emails}"] == 0
    assert found["litebroker_wait_seconds_bucket{le=10.0,queue=emails}"] == 1
    assert found["litebroker_wait_seconds_sum{queue=emails}"] == 5


def test_a_worker_in_threads_counts_every_job(
    tmp_path: Path, registry: CollectorRegistry, scrape: Callable[[], Samples]
) -> None:
    with Queue("emails", tmp_path / "jobs.db", durability="relaxed") as queue:
        queue.observe(WorkerMetrics(registry=registry))
        queue.add_many([NewJob(number, task="greet") for number in range(500)])
        worker = queue.process(lambda _: None, concurrency=4)
        ends_at = time.monotonic() + LIMIT
        while queue.stats() != Counts():
            assert time.monotonic() < ends_at
            threading.Event().wait(0.01)
        worker.close()

    found = scrape()
    assert found["litebroker_jobs_settled_total{outcome=completed,queue=emails,task=greet}"] == 500
    assert found["litebroker_handler_seconds_count{queue=emails,task=greet}"] == 500
    assert found["litebroker_jobs_claimed_total{queue=emails}"] >= 500


def test_several_processes_add_up_in_the_mode_of_prometheus_client_for_them(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    work = """
        from litebroker import Queue
        from litebroker.metrics import WorkerMetrics
        from litebroker.testing import drain

        with Queue("emails", "jobs.db") as queue:
            queue.observe(WorkerMetrics())
            queue.add_many([1, 2])
            drain(queue, lambda _: None)
    """
    read = """
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        print(generate_latest(registry).decode())
    """

    def run_script(script: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            cwd=tmp_path,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    run_script(work)
    run_script(work)

    found = samples(run_script(read))
    assert found["litebroker_jobs_settled_total{outcome=completed,queue=emails,task=}"] == 4
    assert found["litebroker_handler_seconds_count{queue=emails,task=}"] == 4


# The command


def command(*arguments: str, cwd: Path) -> Sequence[str]:
    return [sys.executable, "-m", "litebroker", "metrics", *arguments]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments, cwd=cwd), cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with Queue("emails", tmp_path / "jobs.db") as queue:
        queue.add(1)
    return tmp_path / "jobs.db"


def test_the_command_prints_them(file: Path) -> None:
    done = run("--db", "jobs.db", cwd=file.parent)

    assert (done.returncode, done.stderr) == (0, "")
    assert samples(done.stdout)["litebroker_jobs{queue=emails,state=ready}"] == 1


def test_the_command_writes_them_to_a_file(file: Path) -> None:
    done = run("--db", "jobs.db", "--output", "litebroker.prom", cwd=file.parent)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert samples((file.parent / "litebroker.prom").read_text())["litebroker_jobs{queue=emails,state=ready}"] == 1
    assert [it.name for it in file.parent.glob("litebroker.prom*")] == ["litebroker.prom"]


def test_the_command_serves_them_until_a_signal_comes(file: Path) -> None:
    with subprocess.Popen(
        command("--db", "jobs.db", "--port", "0", cwd=file.parent), cwd=file.parent, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        url = process.stderr.readline().split()[-1]
        try:
            with urllib.request.urlopen(url, timeout=LIMIT) as answer:  # noqa: S310 (our own)
                found = samples(answer.read().decode())
        finally:
            process.send_signal(signal.SIGTERM)
        status = process.wait(LIMIT)

    assert found["litebroker_jobs{queue=emails,state=ready}"] == 1
    assert status == 0


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["--db", "none.db"], 1, "there is no such file"),
        (["--db", "text.txt"], 1, "text.txt"),
        (["--db", "jobs.db", "--output", "a", "--port", "1"], 2, "exclude each other"),
        (["--db", "jobs.db", "--output", "nowhere/a.prom"], 1, "No such file"),
        (["--db", "jobs.db", "--port", "70000"], 2, "70000"),
        (["--db", "jobs.db", "--port", "0", "--address", "256.0.0.1"], 1, "Error"),
    ],
)
def test_what_it_cannot_do_it_says_in_a_line(file: Path, arguments: list[str], status: int, why: str) -> None:
    (file.parent / "text.txt").write_text("no database" * 100, encoding="utf-8")

    done = run(*arguments, cwd=file.parent)

    assert done.returncode == status
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_without_prometheus_client_it_says_what_to_install(file: Path) -> None:
    script = (
        "import sys\nsys.modules['prometheus_client'] = None\nfrom litebroker.cli import main\n"
        "main(['metrics', '--db', 'jobs.db'])\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], cwd=file.parent, capture_output=True, text=True, check=False, env=os.environ
    )

    assert done.returncode == 1
    assert done.stderr == "Error: litebroker.metrics needs prometheus-client: pip install 'litebroker[metrics]'\n"
