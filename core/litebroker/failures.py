"""What an exception becomes when it is kept with a job."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

from litebroker.jobs import JobError

_LONGEST_STACK = 16_384
_LONGEST_MESSAGE = 4_096
_LONGEST_CAUSE = 512
_MOST_CAUSES = 10


def job_error(error: BaseException, *, reason: str = "handler", skip: int = 0) -> JobError:
    """The error with its stack and its causes, each of a bounded size, in text that any storage can hold.

    Args:
        error: Whatever was raised. That its ``str()`` may raise too, or that its causes form a circle, does no harm.
        skip: Leave out so many of the outermost frames: those of the caller.
    """
    return JobError(
        reason=reason,
        type=_bounded(type(error).__qualname__, _LONGEST_CAUSE),
        message=_bounded(_message(error), _LONGEST_MESSAGE),
        stack=_bounded(_stack(error, skip), _LONGEST_STACK),
        causes=tuple(
            _bounded(f"{type(cause).__qualname__}: {_message(cause)}", _LONGEST_CAUSE) for cause in _causes(error)
        ),
    )


def as_job_error(error: BaseException | JobError | str | None, *, reason: str = "handler") -> JobError:
    """What the caller of `fail` gives, as it is kept. A `JobError` stays as it is."""
    if isinstance(error, JobError):
        return error
    if isinstance(error, BaseException):
        return job_error(error, reason=reason)
    if error is not None and not isinstance(error, str):
        raise TypeError(f"error={error!r} is neither an exception, nor a string, nor a JobError")
    return JobError(reason, message=_bounded(error or "", _LONGEST_MESSAGE))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except (Exception, SystemExit) as second:  # noqa: BLE001 (a user's class may raise anything)
        return f"<its str() raised {type(second).__qualname__}>"


def _stack(error: BaseException, skip: int) -> str:
    frames: TracebackType | None = _attribute(error, "__traceback__")
    for _ in range(skip):
        frames = frames.tb_next if frames is not None else None
    for chain in (True, False):
        try:
            return "".join(traceback.format_exception(type(error), error, frames, chain=chain)).rstrip()
        except Exception:  # noqa: BLE001, S112 (a chain so long that Python 3.10 cannot format it: the stack alone then)
            continue
    return ""


def _causes(error: BaseException) -> list[BaseException]:
    """As Python itself follows them, nearest first."""
    causes: list[BaseException] = []
    seen = {id(error)}
    while len(causes) < _MOST_CAUSES:
        cause: BaseException | None = _attribute(error, "__cause__")
        if cause is None and not _attribute(error, "__suppress_context__"):
            cause = _attribute(error, "__context__")
        if cause is None or id(cause) in seen:
            break
        seen.add(id(cause))
        causes.append(cause)
        error = cause
    return causes


def _attribute(error: BaseException, name: str) -> Any:
    """One that every exception has, past a ``__getattribute__`` of its class."""
    return object.__getattribute__(error, name)


def _bounded(text: str, limit: int) -> str:
    """Both ends of it, without what UTF-8 cannot hold, and without NULs, at which databases end a text."""
    if len(text) > limit:
        half = (limit - 50) // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
