"""How long a job that failed waits before its next attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from litebroker.arguments import duration_ms

_LONGEST_MS = 100 * 366 * 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The first wait is ``base_ms``, each further one is ``factor`` times as long, none is longer than ``cap_ms``.

    The default is 15 s, 30 s, 60 s and so on up to an hour, each shortened by up to a fifth at random. What makes
    a job fail is most often another service, whose restart takes seconds; Dramatiq, Oban and Sidekiq begin with 15 s
    or a little more, too.

    Attributes:
        factor: 1 makes it fixed.
        jitter: The share of a wait, 0 to 1, that chance may take off, so that jobs that failed together do
            not come back together. It never lengthens a wait: the cap stays one.

    Raises:
        ValueError: A value makes no sense; the message names it.
    """

    base_ms: int = 15_000
    factor: float = 2.0
    cap_ms: int = 3_600_000
    jitter: float = 0.2

    def __post_init__(self) -> None:
        _check("base_ms", self.base_ms, low=0, high=_LONGEST_MS)
        _check("factor", self.factor, low=1, high=1000)
        _check("cap_ms", self.cap_ms, low=0, high=_LONGEST_MS)
        _check("jitter", self.jitter, low=0, high=1)
        if self.cap_ms < self.base_ms:
            raise ValueError(f"cap must be at least base: {self.cap_ms} ms is less than {self.base_ms} ms")
        if self.base_ms == 0 and self.factor > 1:
            raise ValueError("base must be above 0 for waits that grow: no factor makes 0 longer")

    @classmethod
    def fixed(cls, delay: float | timedelta, *, jitter: float = 0.0) -> Backoff:
        """The same wait each time, in seconds or as a timedelta. 0 retries at once."""
        delay_ms = duration_ms("delay", delay)
        return cls(base_ms=delay_ms, factor=1.0, cap_ms=delay_ms, jitter=jitter)

    @classmethod
    def exponential(
        cls,
        base: float | timedelta,
        *,
        factor: float = 2.0,
        cap: float | timedelta = 3600,
        jitter: float = 0.2,
    ) -> Backoff:
        """Waits that grow from ``base`` to ``cap``, both in seconds or as timedeltas."""
        return cls(base_ms=duration_ms("base", base), factor=factor, cap_ms=duration_ms("cap", cap), jitter=jitter)

    def delay_ms(self, attempt: int, random: Callable[[], float]) -> int:
        """The wait after the ``attempt``-th attempt, which counts from 1.

        ``random`` draws from 0 to 1, as `random.random` does; it is called once.
        """
        if attempt < 1:
            raise ValueError(f"attempt counts from 1, so it cannot be {attempt}")
        try:
            wait_ms = min(self.base_ms * float(self.factor) ** (attempt - 1), self.cap_ms)
        except OverflowError:
            wait_ms = self.cap_ms
        return round(wait_ms * (1 - self.jitter * random()))


def _check(name: str, value: object, *, low: float, high: float) -> None:
    # A bool is an int to Python, and a mistake here. NaN fails both comparisons.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, not {value!r}")
