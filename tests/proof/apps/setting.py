"""What each program of the campaign is told in its environment, and how a producer goes about it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.proof.ledger import Ledger

URL = os.environ["PROOF_URL"]

ledger = Ledger(Path(os.environ["PROOF_FOLDER"]))

_FULL = int(os.environ.get("PROOF_BACKLOG", "300"))  # jobs that wait, beyond which a producer pauses


def produce(add: Callable[[Sequence[str], random.Random], None], waiting: Callable[[], int]) -> None:
    """Add jobs without end, a few at a time; each is noted before, and once it has been taken.

    Args:
        add: Adds jobs of these keys.
        waiting: How many jobs wait.
    """
    chance, number = random.Random(os.getpid()), 0
    while True:
        if number % 20 == 0:
            while waiting() > _FULL:
                time.sleep(0.02)
        keys = [f"{os.getpid()}-{number + it}" for it in range(chance.choice([1, 1, 1, 5]))]
        number += len(keys)
        for key in keys:
            ledger.tell("try", key)
        add(keys, chance)
        for key in keys:
            ledger.tell("add", key)
        time.sleep(0.002)
