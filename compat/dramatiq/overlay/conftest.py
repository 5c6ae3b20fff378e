"""The fixtures that the test modules ask for, with litebroker behind them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import dramatiq
import pytest
from dramatiq import Worker

from litebroker import State
from litebroker_dramatiq import SQLiteBroker, SQLiteRateLimiterBackend, SQLiteResultBackend

from .common import worker
from .shapes import RabbitShape, RedisShape, StubShape, database

AnyBroker = TypeVar("AnyBroker", bound=SQLiteBroker)

logging.getLogger().setLevel(logging.INFO)


def _serve(broker: AnyBroker) -> Iterator[AnyBroker]:
    # Every test starts with an empty file: queues are known to it that no broker of this test has declared.
    for known in broker.storage.queues():
        broker.storage.purge(known.name, list(State))
    broker.emit_after("process_boot")
    dramatiq.set_broker(broker)
    yield broker
    broker.flush_all()
    broker.close()


@pytest.fixture
def stub_broker() -> Iterator[StubShape]:
    yield from _serve(StubShape())


@pytest.fixture
def redis_broker() -> Iterator[RedisShape]:
    yield from _serve(RedisShape())


@pytest.fixture
def rabbitmq_broker() -> Iterator[RabbitShape]:
    yield from _serve(RabbitShape())


@pytest.fixture
def stub_worker(stub_broker: SQLiteBroker) -> Iterator[Worker]:
    with worker(stub_broker, worker_timeout=100, worker_threads=32) as running:
        yield running


@pytest.fixture
def redis_worker(redis_broker: SQLiteBroker) -> Iterator[Worker]:
    with worker(redis_broker, worker_threads=32) as running:
        yield running


@pytest.fixture
def rabbitmq_worker(rabbitmq_broker: SQLiteBroker) -> Iterator[Worker]:
    with worker(rabbitmq_broker, worker_threads=32) as running:
        yield running


@pytest.fixture
def result_backend() -> SQLiteResultBackend:
    return SQLiteResultBackend(database())


@pytest.fixture
def redis_result_backend(result_backend: SQLiteResultBackend) -> SQLiteResultBackend:
    return result_backend


@pytest.fixture
def rate_limiter_backend() -> SQLiteRateLimiterBackend:
    backend = SQLiteRateLimiterBackend(database())
    backend.clear()
    return backend


@pytest.fixture
def start_cli() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(broker: str, *, extra_args: Sequence[str] = (), **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-m", "dramatiq", *extra_args, broker], **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that cannot apply often fail by waiting for what never comes."""
    for item in items:
        if item.nodeid in _EXPECTED:
            item.add_marker(pytest.mark.timeout(10))


_EXPECTED = set(json.loads(os.environ["COMPAT_EXPECTED"]))
_results: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    known = _results.get(report.nodeid)
    if report.failed or (report.skipped and known != "failed"):
        _results[report.nodeid] = "failed" if report.failed else "skipped"
    elif known is None and report.when == "call":
        _results[report.nodeid] = "passed"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        Path(os.environ["COMPAT_RESULTS"]).write_text(json.dumps(_results))
