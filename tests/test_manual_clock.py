"""The clock that tests turn by hand."""

from __future__ import annotations

import threading

import pytest

from litebroker.testing import ManualClock


def test_time_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(now_ms=1000, steady_ms=50)

    assert (clock.now_ms(), clock.steady_ms()) == (1000, 50)
    assert (clock.now_ms(), clock.steady_ms()) == (1000, 50)


def test_time_passes_on_both_clocks() -> None:
    clock = ManualClock(now_ms=1000, steady_ms=50)

    clock.advance(2.5)

    assert (clock.now_ms(), clock.steady_ms()) == (3500, 2550)


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_step_moves_the_wall_clock_alone(seconds: float) -> None:
    clock = ManualClock(now_ms=10_000_000, steady_ms=50)

    clock.step(seconds)

    assert (clock.now_ms(), clock.steady_ms()) == (10_000_000 + round(seconds * 1000), 50)


def test_time_does_not_run_backwards() -> None:
    clock = ManualClock(now_ms=1000, steady_ms=50)

    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-0.001)

    assert (clock.now_ms(), clock.steady_ms()) == (1000, 50)


def test_no_move_of_any_thread_is_lost() -> None:
    clock = ManualClock(now_ms=0, steady_ms=0)

    def move() -> None:
        for _ in range(500):
            clock.advance(0.001)
            clock.step(0.001)

    threads = [threading.Thread(target=move) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert (clock.now_ms(), clock.steady_ms()) == (8000, 4000)
