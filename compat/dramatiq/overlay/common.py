"""The names that the test modules import from ``.common``."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pika  # type: ignore[import-not-found,unused-ignore]  # Installed where this runs.
import pytest
from dramatiq import Broker, Worker

RABBITMQ_USERNAME = "guest"
RABBITMQ_PASSWORD = "guest"
RABBITMQ_CREDENTIALS = pika.PlainCredentials(RABBITMQ_USERNAME, RABBITMQ_PASSWORD)

skip_in_ci = pytest.mark.skipif(bool(os.environ.get("COMPAT_SKIP_SLOW")), reason="asked to leave out what is slow")
skip_on_windows = pytest.mark.skipif(sys.platform == "win32", reason="not for Windows")
skip_on_pypy = pytest.mark.skipif(platform.python_implementation() == "PyPy", reason="not for PyPy")
skip_unless_rabbit_mq = pytest.mark.skip(reason="needs a RabbitMQ server")
skip_unless_redis = pytest.mark.skip(reason="needs a Redis server")


@contextmanager
def worker(broker: Broker, **options: Any) -> Iterator[Worker]:
    """A worker that runs while the block does."""
    running = Worker(broker, **options)
    running.start()
    try:
        yield running
    finally:
        running.stop()
