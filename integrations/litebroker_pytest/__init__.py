"""Fixtures for pytest: a throw-away storage and queue for each test, and a clock to turn by hand.

pytest loads this module at every start, in all projects where litebroker is installed. So nothing else is imported
before a test asks for one of the fixtures; it is a package of its own since ``import litebroker`` would be dear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from litebroker import Queue, SQLiteStorage
    from litebroker.testing import ManualClock


@pytest.fixture
def litebroker_clock() -> ManualClock:
    """The clock of `litebroker_storage`. It shows the time at which the test began, until it is moved."""
    from litebroker import SystemClock
    from litebroker.testing import ManualClock

    return ManualClock(SystemClock().now_ms())


@pytest.fixture
def litebroker_storage(tmp_path: Path, litebroker_clock: ManualClock) -> Iterator[SQLiteStorage]:
    """A storage on a new file in `tmp_path`, whose time is that of `litebroker_clock`."""
    from litebroker import SQLiteStorage

    storage = SQLiteStorage(tmp_path / "litebroker.db", clock=litebroker_clock, durability="relaxed")
    yield storage
    storage.close()


@pytest.fixture
def litebroker_queue(litebroker_storage: SQLiteStorage) -> Iterator[Queue[Any]]:
    """An empty queue with the name "test"."""
    from litebroker import Queue

    with Queue("test", litebroker_storage) as queue:
        yield queue


@pytest.fixture
def litebroker_redirect(litebroker_storage: SQLiteStorage) -> Iterator[Callable[..., None]]:
    """Call it with queues of your program: until the test ends, their jobs are in `litebroker_storage`."""
    from litebroker.testing import redirected

    with ExitStack() as stack:

        def redirect(*queues: Queue[Any]) -> None:
            stack.enter_context(redirected(*queues, to=litebroker_storage))

        yield redirect
