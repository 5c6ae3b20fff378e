"""What is kept of an exception."""

from __future__ import annotations

import pytest

from litebroker import JobError
from litebroker.failures import as_job_error, job_error


def raised(error: BaseException) -> BaseException:
    """The same, with a stack."""
    try:
        raise error  # noqa: TRY301 (to have a stack)
    except BaseException as it:  # noqa: BLE001
        return it


def test_an_error_keeps_its_class_its_words_and_where_it_came_from() -> None:
    kept = job_error(raised(ValueError("no such mailbox")))

    assert (kept.reason, kept.type, kept.message) == ("handler", "ValueError", "no such mailbox")
    assert kept.stack.startswith("Traceback (most recent call last):\n")
    assert "in raised\n    raise error" in kept.stack
    assert kept.stack.endswith("\nValueError: no such mailbox")


def test_the_callers_own_frames_can_be_left_out() -> None:
    def inner() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as refusal:
        inner()

    kept = job_error(refusal.value, skip=1)

    assert "in inner" in kept.stack
    assert "in test_the_callers" not in kept.stack


def test_more_frames_than_there_are_can_be_left_out() -> None:
    assert job_error(raised(ValueError("no")), skip=10).stack == "ValueError: no"


def test_causes_are_kept_nearest_first() -> None:
    outer, middle, inner = RuntimeError("outer"), KeyError("middle"), OSError("inner")
    outer.__cause__ = middle
    middle.__context__ = inner

    kept = job_error(outer)

    assert kept.causes == ("KeyError: 'middle'", "OSError: inner")
    assert kept.stack.index("inner") < kept.stack.index("outer")


def test_a_context_that_was_suppressed_is_no_cause() -> None:
    error = RuntimeError("outer")
    error.__context__ = KeyError("hidden")
    error.__suppress_context__ = True

    assert job_error(error).causes == ()


def test_a_circle_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one

    assert job_error(one).causes == ("ValueError: two",)


def test_a_long_chain_of_causes_is_cut() -> None:
    error: BaseException = ValueError("0")
    for number in range(1, 5000):
        following = ValueError(str(number))
        following.__cause__ = error
        error = following

    kept = job_error(error)

    assert kept.causes == tuple(f"ValueError: {number}" for number in range(4998, 4988, -1))
    assert len(kept.stack) <= 16_384


def test_long_words_keep_both_ends() -> None:
    kept = job_error(raised(ValueError("begin" + "x" * 1_000_000 + "end")))

    assert (len(kept.message) <= 4_096, len(kept.stack) <= 16_384) == (True, True)
    assert kept.message.startswith("begin")
    assert kept.message.endswith("end")
    assert "characters left out" in kept.message


def test_deep_recursion_is_kept_in_bounds() -> None:
    def deeper(number: int) -> int:
        return deeper(number + 1) + 1

    with pytest.raises(RecursionError) as refusal:
        deeper(0)

    kept = job_error(refusal.value)

    assert kept.type == "RecursionError"
    assert len(kept.stack) <= 16_384


@pytest.mark.parametrize(("words", "kept"), [("half \ud800", "half \\ud800"), ("a\0b", "a\\x00b")])
def test_what_a_text_cannot_hold_is_written_out(words: str, kept: str) -> None:
    assert job_error(ValueError(words)).message == kept


def test_an_error_that_cannot_tell_its_words_is_kept_all_the_same() -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise KeyError

    assert job_error(raised(Mute())).message == "<its str() raised KeyError>"


def test_what_fail_is_given_becomes_an_error() -> None:
    ready = JobError("mine", "T", "m")

    assert as_job_error(ready) is ready
    assert as_job_error("full") == JobError("handler", message="full")
    assert as_job_error(None, reason="rejected") == JobError("rejected")
    assert as_job_error(ValueError("no")).type == "ValueError"
    with pytest.raises(TypeError, match="neither an exception"):
        as_job_error(5)  # type: ignore[arg-type]


def test_an_error_that_cannot_be_looked_at_is_kept_by_its_class() -> None:
    class UnseenError(Exception):
        def __getattribute__(self, name: str) -> object:
            raise RuntimeError(name)

        def __str__(self) -> str:
            raise SystemExit(1)

    kept = job_error(raised(UnseenError()))

    assert kept.type.endswith("UnseenError")
    assert kept.message == "<its str() raised SystemExit>"
