"""The test-suite of the storage contract. A storage that passes it carries everything above `litebroker.storage`.

Needs pytest. Subclass `StorageContract` where pytest collects, and say how to make an empty storage:

    import pytest

    pytest.register_assert_rewrite("litebroker.testing.contract")  # before it is imported: failures show the values

    from litebroker.testing.contract import StorageContract


    class TestMyStorage(StorageContract):
        def make_storage(self, clock, tmp_path):
            return MyStorage(tmp_path / "jobs.db", clock=clock)

Give every test a time limit (pytest-timeout): what a storage gets wrong may be that somebody waits for ever.
"""

from __future__ import annotations

from litebroker.testing.contract.adding import Adding
from litebroker.testing.contract.carrying import Carrying
from litebroker.testing.contract.claiming import Claiming, ClaimOrder
from litebroker.testing.contract.dedupe import Dedupe
from litebroker.testing.contract.groups import Groups
from litebroker.testing.contract.leases import Leases
from litebroker.testing.contract.looking import Looking
from litebroker.testing.contract.mending import Mending, Pausing
from litebroker.testing.contract.schedules import ScheduleRules
from litebroker.testing.contract.settling import Settling
from litebroker.testing.contract.standing import Standings
from litebroker.testing.contract.transactions import Transactions
from litebroker.testing.contract.values import ValueRules
from litebroker.testing.contract.waiting import Lifetime, Waiting

__all__ = ["StorageContract"]


class StorageContract(
    Adding,
    ClaimOrder,
    Claiming,
    Groups,
    Dedupe,
    Leases,
    Settling,
    Mending,
    Pausing,
    Looking,
    Carrying,
    Standings,
    ValueRules,
    ScheduleRules,
    Transactions,
    Waiting,
    Lifetime,
):
    """Every rule of the contract, on a storage that `make_storage` makes."""
