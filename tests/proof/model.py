"""The storage's state machine, with its calls spread over two processes on one file."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hypothesis import seed as with_seed
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tests.proof.figures import Figures
from tests.proof.remote import RemoteStorage
from tests.test_storage_model import SETTINGS, ApswStorageMachine, Pair, StorageMachine, T

from litebroker.sqlite import SQLiteStorage
from litebroker.storage import Storage

_EXAMPLES = 25


class TwoProcessesMachine(StorageMachine):
    """What one process knows of the file, and keeps in its memory, the other changes behind its back.

    Inside a transaction all calls are of the process that has it: the other would wait for its end.
    """

    remote: RemoteStorage | None = None  # one for all examples
    _turn = 0
    _time_stands_still = False
    _near: SQLiteStorage

    @property
    def real(self) -> Any:
        far = type(self).remote
        if far is None or self.transactions is not None:
            return self._near
        self._turn += 1
        # Not by turns, else what is asked in pairs would always come from the same.
        return far if (self._turn * 5 // 3) % 2 else self._near

    @real.setter
    def real(self, storage: SQLiteStorage) -> None:
        self.transactions = None
        self._near = storage
        if type(self).remote is None:
            TwoProcessesMachine.remote = RemoteStorage()
        assert self.remote is not None
        self.remote.open(str(storage.path), self.driver, self.clock)

    def both(self, ask: Callable[[Storage, int], T]) -> Pair[T]:
        if self.transactions is None and not self._time_stands_still:
            self.clock.advance(0.001)  # What one has looked up, it looks up again a millisecond later.
        return super().both(ask)

    def everything_of_a_queue_is_the_same(self, queue: str) -> None:
        # A job that became due between two of the looks would stand elsewhere in the second.
        self.clock.advance(0.001)
        self._time_stands_still = True
        try:
            super().everything_of_a_queue_is_the_same(queue)
        finally:
            self._time_stands_still = False

    def teardown(self) -> None:
        super().teardown()
        if self.remote is not None:
            self.remote.close()

    @classmethod
    def end(cls) -> None:
        """End the other process."""
        if TwoProcessesMachine.remote is not None:
            TwoProcessesMachine.remote.end()
            TwoProcessesMachine.remote = None


class ApswTwoProcessesMachine(TwoProcessesMachine):
    driver = "apsw"


MACHINES: list[type[StorageMachine]] = [StorageMachine, TwoProcessesMachine]
if find_spec("apsw") is not None:
    MACHINES += [ApswStorageMachine, ApswTwoProcessesMachine]


def model(_folder: Path, seconds: float, seed: int) -> Figures:
    """Examples of each machine, until the time is up."""
    figures = Figures("model", seed)
    chance = random.Random(seed)
    with figures.timed():
        deadline = time.monotonic() + seconds
        try:
            while figures.faults.total() == 0 or time.monotonic() < deadline:
                for machine in MACHINES:
                    # A test's seed is an attribute of the function that makes the machine.
                    its_seed = chance.randrange(2**31)
                    seeded = with_seed(its_seed)(type(machine.__name__, (machine,), {}))
                    examples = settings(SETTINGS, max_examples=_EXAMPLES, derandomize=False)
                    try:
                        run_state_machine_as_test(seeded, settings=examples)
                    except AssertionError as error:
                        figures.wrong("unexplained", f"{machine.__name__}, seed {its_seed}: {error}"[:2000])
                    figures.fault("sequences of 60 calls", _EXAMPLES)
                    if time.monotonic() > deadline:
                        break
        finally:
            TwoProcessesMachine.end()
    return figures
