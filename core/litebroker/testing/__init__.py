"""Help for tests: a clock to turn by hand, and the test-suite of the storage contract.

`litebroker.testing.contract` (it needs pytest) holds what every storage must pass, and
`litebroker.testing.model` the plainest storage that does.
"""

from __future__ import annotations

from litebroker.testing.clock import ManualClock

__all__ = ["ManualClock"]
