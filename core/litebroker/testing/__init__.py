"""Help for tests: what a queue holds, its jobs run in the test's thread, a clock to turn by hand.

pytest has the fixtures of `litebroker_pytest` beside it. And for those who write a storage,
`litebroker.testing.contract` (it needs pytest) holds what every storage must pass, and
`litebroker.testing.model` the plainest storage that does.
"""

from __future__ import annotations

from litebroker.testing.clock import ManualClock
from litebroker.testing.draining import Drained, drain
from litebroker.testing.enqueued import assert_enqueued, assert_not_enqueued
from litebroker.testing.redirected import redirected

__all__ = ["Drained", "ManualClock", "assert_enqueued", "assert_not_enqueued", "drain", "redirected"]
