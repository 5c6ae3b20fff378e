"""Errors as they come out of another process."""

from __future__ import annotations

import pickle

import pytest

from litebroker import (
    DatabaseBusyError,
    GroupConflictError,
    JobCancelledError,
    LeaseLostError,
    LitebrokerError,
    PayloadError,
    PayloadTooLargeError,
    ResultTimeoutError,
)


@pytest.mark.parametrize(
    "error",
    [
        DatabaseBusyError("busy", path="jobs.db"),
        GroupConflictError("customer-7", asked=2, concurrency=1),
        JobCancelledError("cancelled", job_id=7),
        LeaseLostError("lost"),
        PayloadError("refused", where="$.to"),
        PayloadTooLargeError(2, 1),
        ResultTimeoutError("not yet", job_id=7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_in_another_process(error: LitebrokerError) -> None:
    pickled = pickle.dumps(error)

    found = pickle.loads(pickled)  # noqa: S301 (our own)

    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
