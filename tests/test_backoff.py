"""How long a failed job waits."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litebroker.backoff import Backoff


def without_chance() -> float:
    return 0.0


def almost_one() -> float:
    return math.nextafter(1, 0)


def test_an_exponential_wait_grows_by_the_factor_up_to_the_cap() -> None:
    backoff = Backoff.exponential(1, factor=3, cap=60)

    waits = [backoff.delay_ms(attempt, without_chance) for attempt in range(1, 7)]

    assert waits == [1_000, 3_000, 9_000, 27_000, 60_000, 60_000]


def test_a_fixed_wait_stays_the_same() -> None:
    backoff = Backoff.fixed(5)

    waits = [backoff.delay_ms(attempt, almost_one) for attempt in (1, 2, 10_000)]

    assert waits == [5_000, 5_000, 5_000]


def test_a_fixed_wait_of_nothing_retries_at_once() -> None:
    backoff = Backoff.fixed(0)

    waits = [backoff.delay_ms(attempt, without_chance) for attempt in (1, 10_000)]

    assert waits == [0, 0]


def test_the_default_waits_a_quarter_of_a_minute_first_and_an_hour_at_most() -> None:
    backoff = Backoff()

    waits = [backoff.delay_ms(attempt, without_chance) for attempt in (1, 2, 3, 8, 9, 25)]

    assert waits == [15_000, 30_000, 60_000, 1_920_000, 3_600_000, 3_600_000]


def test_a_wait_may_be_a_timedelta() -> None:
    from_timedelta = Backoff.exponential(timedelta(seconds=1.5), cap=timedelta(minutes=1))

    assert from_timedelta == Backoff.exponential(1.5, cap=60)
    assert from_timedelta.delay_ms(1, without_chance) == 1_500


def test_jitter_takes_off_up_to_its_share_and_adds_nothing() -> None:
    backoff = Backoff.fixed(10, jitter=0.25)

    assert backoff.delay_ms(1, without_chance) == 10_000
    assert backoff.delay_ms(1, lambda: 0.5) == 8_750
    assert backoff.delay_ms(1, almost_one) == 7_500


def test_chance_is_asked_once_for_each_wait() -> None:
    draws: list[float] = []

    def random() -> float:
        draws.append(0.5)
        return 0.5

    Backoff().delay_ms(3, random)

    assert len(draws) == 1


@given(
    base=st.floats(0.001, 86_400),
    factor=st.floats(1, 1000),
    jitter=st.floats(0, 1),
    attempt=st.one_of(st.integers(1, 40), st.sampled_from([10_000, 2**31, 10**400])),
    random=st.floats(0, 1, exclude_max=True),
)
def test_no_wait_is_negative_or_longer_than_the_cap(
    base: float, factor: float, jitter: float, attempt: int, random: float
) -> None:
    backoff = Backoff.exponential(base, factor=factor, cap=86_400, jitter=jitter)

    wait_ms = backoff.delay_ms(attempt, lambda: random)

    assert isinstance(wait_ms, int)
    assert 0 <= wait_ms <= 86_400_000


@pytest.mark.parametrize("base", [-1, -0.001, math.nan, math.inf, -math.inf, True, "5", None, 10**400])
def test_a_wait_that_is_no_length_of_time_is_refused_by_name(base: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^delay=.* (seconds|time|century)"):
        Backoff.fixed(base)  # type: ignore[arg-type]

    with pytest.raises((ValueError, TypeError), match=r"^base=.* (seconds|time|century)"):
        Backoff.exponential(base)  # type: ignore[arg-type]

    with pytest.raises((ValueError, TypeError), match=r"^cap=.* (seconds|time|century)"):
        Backoff.exponential(1, cap=base)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [0.99, 0, -2, math.nan, math.inf, True, "2", 10**400])
def test_a_factor_that_shrinks_or_is_no_number_is_refused(factor: object) -> None:
    with pytest.raises(ValueError, match=r"^factor must be a number from 1 to 1000, not "):
        Backoff.exponential(1, factor=factor)  # type: ignore[arg-type]


@pytest.mark.parametrize("jitter", [-0.1, 1.01, math.nan, math.inf, True, "0.5"])
def test_jitter_that_is_no_share_is_refused(jitter: object) -> None:
    with pytest.raises(ValueError, match=r"^jitter must be a number from 0 to 1, not "):
        Backoff.fixed(1, jitter=jitter)  # type: ignore[arg-type]


def test_a_cap_below_the_first_wait_is_refused() -> None:
    with pytest.raises(ValueError, match="cap must be at least base: 5000 ms is less than 10000 ms"):
        Backoff.exponential(10, cap=5)


def test_nothing_that_should_grow_is_refused() -> None:
    with pytest.raises(ValueError, match="base must be above 0"):
        Backoff.exponential(0)


@pytest.mark.parametrize("attempt", [0, -1])
def test_attempts_count_from_one(attempt: int) -> None:
    with pytest.raises(ValueError, match=f"cannot be {attempt}"):
        Backoff().delay_ms(attempt, without_chance)
