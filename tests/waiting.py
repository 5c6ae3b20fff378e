"""What tests of threads and processes wait with: for a condition, and for what an `on_error` is told."""

from __future__ import annotations

import time
from collections.abc import Callable

from litebroker import ErrorContext

LIMIT = 30  # seconds for what takes milliseconds, or a few seconds where processes start


def comes_true(condition: Callable[[], object], limit: float = LIMIT) -> bool:
    """Whether it does, within the limit."""
    ends_at = time.monotonic() + limit
    while not condition():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.002)
    return True


class Told:
    """An `on_error` that remembers."""

    def __init__(self) -> None:
        self.errors: list[tuple[BaseException, ErrorContext]] = []

    def __call__(self, error: BaseException, context: ErrorContext) -> None:
        self.errors.append((error, context))

    @property
    def kinds(self) -> list[str]:
        return [context.kind for _, context in self.errors]
