"""A program's own queues, on another storage for as long as a test takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from litebroker.queue import Queue
from litebroker.results import Results
from litebroker.storage import Storage


@contextmanager
def redirected(*queues: Queue[Any], to: Storage) -> Iterator[None]:
    """In the ``with`` block these queues have their jobs in another storage, in this whole process.

    For queues that a module makes when it is imported. Their own file is not touched, nor made. Workers that they
    start meanwhile are closed at the end; those that run already go on where they are.
    """
    with ExitStack() as stack:
        for queue in queues:
            stack.enter_context(_one_redirected(checked(queue), to))
        yield


def checked(queue: Queue[Any]) -> Queue[Any]:
    """The queue itself. Raises ``TypeError`` where it is something else."""
    if not isinstance(queue, Queue):
        raise TypeError(f"{queue!r} is no Queue; of an AsyncQueue, give its attribute sync")
    return queue


# It is the same object with another storage beneath: whoever has it, has it there.
# ruff: noqa: SLF001


@contextmanager
def _one_redirected(queue: Queue[Any], storage: Storage) -> Iterator[None]:
    before = dict(vars(queue))
    queue._set_bound(storage)
    queue._results = Results(storage, queue.name, queue._terms.decode)
    queue._upkeep_at_ms = dict.fromkeys(queue._upkeep_at_ms, 0)  # The storages may have different clocks.
    try:
        yield
    finally:
        queue.close()
        vars(queue).update(before)
