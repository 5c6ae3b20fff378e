"""Metrics for Prometheus: what is in the file, and what this process's workers do. Needs the extra `metrics`.

>>> from prometheus_client import REGISTRY, start_http_server
>>> from litebroker.metrics import StorageCollector, WorkerMetrics
>>> REGISTRY.register(StorageCollector(queue.storage))
>>> queue.observe(WorkerMetrics())
>>> start_http_server(9101)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from litebroker.errors import StorageError
from litebroker.inspection import oldest_age_ms
from litebroker.jobs import Added, JobRecord, JobSpec
from litebroker.observers import Observer, Outcome
from litebroker.storage import Storage

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "prometheus_client":
        raise
    raise ModuleNotFoundError(
        "litebroker.metrics needs prometheus-client: pip install 'litebroker[metrics]'", name=error.name
    ) from None

__all__ = ["StorageCollector", "WorkerMetrics"]

# Seconds: handlers take from nothing to an hour.
_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)

_logger = logging.getLogger("litebroker")


class StorageCollector(Collector):
    """What is in a storage, read at each scrape: in short reads, which keep nobody waiting.

    To be registered once for each file, in whatever process: every process sees the same. It counts, which takes
    about 10 ms for 100,000 jobs.

    * ``litebroker_up``: 1, or 0 when the storage could not be read. Then the others are missing, and the log says why.
    * ``litebroker_jobs{queue, state}``: how many jobs are ready, delayed, active, completed, failed and cancelled.
    * ``litebroker_oldest_due_age_seconds{queue}``: how long the job waits that has been due the longest, or 0.
    * ``litebroker_queue_paused{queue}``: 1 when it is paused.
    * ``litebroker_file_size_bytes{file}``: of the database, and of its write-ahead log ("wal").
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def describe(self) -> list[GaugeMetricFamily]:
        """So that to register it reads nothing."""
        return list(_families().values())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = _families()
        up = families.pop("up")
        try:
            self._read(families)
        except StorageError as error:
            _logger.warning("metrics of %s: %s: %s", self._storage.location, type(error).__name__, error)
            up.add_metric((), 0)
            yield up
        else:
            up.add_metric((), 1)
            yield up
            yield from families.values()

    def _read(self, families: dict[str, GaugeMetricFamily]) -> None:
        for queue in self._storage.queues():
            for state, number in self._storage.counts(queue.name)._asdict().items():
                families["jobs"].add_metric((queue.name, state), number)
            families["oldest"].add_metric((queue.name,), (oldest_age_ms(self._storage, queue.name) or 0) / 1000)
            families["paused"].add_metric((queue.name,), int(queue.paused_at_ms is not None))
        path = getattr(self._storage, "path", None)
        if path is not None:
            for file, name in (("database", path), ("wal", f"{path}-wal")):
                families["size"].add_metric((file,), _size(name))


def _families() -> dict[str, GaugeMetricFamily]:
    def family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"litebroker_{name}", text, labels=labels)

    return {
        "up": family("up", "Whether the storage could be read."),
        "jobs": family("jobs", "Jobs in each state.", "queue", "state"),
        "oldest": family("oldest_due_age_seconds", "How long the oldest due job waits.", "queue"),
        "paused": family("queue_paused", "Whether the queue is paused.", "queue"),
        "size": family("file_size_bytes", "Size of the database and its write-ahead log.", "file"),
    }


def _size(path: str) -> int:
    # `stat` opens nothing: to open and close the database would drop SQLite's locks.
    try:
        return os.stat(path).st_size  # noqa: PTH116 (a string, as the storage has it)
    except OSError:
        return 0


class WorkerMetrics(Observer):
    """What the workers of this process do: one for all its queues, each of which is given it by ``queue.observe``.

    * ``litebroker_jobs_added_total{queue}``: jobs that this process added; those whose dedupe key was held not counted.
    * ``litebroker_jobs_claimed_total{queue}``
    * ``litebroker_jobs_settled_total{queue, task, outcome}``: "completed", "retried", "failed" (a dead letter),
      "released" or "lost".
    * ``litebroker_wait_seconds{queue}``: a histogram of how long jobs were due before they were claimed.
    * ``litebroker_handler_seconds{queue, task}``: a histogram of how long handlers took, however they ended; for a
      handler of several jobs, each call once.
    * ``litebroker_handlers_running{queue}``

    They are ordinary metrics of prometheus_client, so that its mode for several processes works
    (``PROMETHEUS_MULTIPROC_DIR``).

    Args:
        registry: Where they are registered; the default is prometheus_client's own.
        buckets: The histograms' upper bounds, in seconds.
    """

    def __init__(self, *, registry: CollectorRegistry = REGISTRY, buckets: Sequence[float] = _BUCKETS) -> None:
        self._added = Counter("litebroker_jobs_added", "Jobs added.", ["queue"], registry=registry)
        self._claimed = Counter("litebroker_jobs_claimed", "Jobs claimed.", ["queue"], registry=registry)
        self._settled = Counter(
            "litebroker_jobs_settled", "What became of claimed jobs.", ["queue", "task", "outcome"], registry=registry
        )
        self._wait = Histogram(
            "litebroker_wait_seconds",
            "How long jobs were due before they were claimed.",
            ["queue"],
            registry=registry,
            buckets=buckets,
        )
        self._seconds = Histogram(
            "litebroker_handler_seconds",
            "How long handlers took.",
            ["queue", "task"],
            registry=registry,
            buckets=buckets,
        )
        self._running = Gauge(
            "litebroker_handlers_running",
            "Handlers that run now.",
            ["queue"],
            registry=registry,
            multiprocess_mode="livesum",
        )

    def added(self, specs: Sequence[JobSpec], added: Sequence[Added]) -> None:
        for spec, it in zip(specs, added, strict=True):
            if it.created:
                self._added.labels(spec.queue).inc()

    def claimed(self, jobs: Sequence[JobRecord]) -> None:
        queue = jobs[0].queue
        self._claimed.labels(queue).inc(len(jobs))
        wait = self._wait.labels(queue)
        for job in jobs:
            wait.observe(max((job.claimed_at_ms or job.due_at_ms) - job.due_at_ms, 0) / 1000)

    @contextmanager
    def running(self, jobs: Sequence[JobRecord]) -> Iterator[None]:
        tasks = {job.task for job in jobs}
        queue, task = jobs[0].queue, (tasks.pop() or "") if len(tasks) == 1 else ""
        running = self._running.labels(queue)
        running.inc()
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds.labels(queue, task).observe(perf_counter() - began)
            running.dec()

    def settled(self, job: JobRecord, outcome: Outcome) -> None:
        self._settled.labels(job.queue, job.task or "", outcome).inc()
