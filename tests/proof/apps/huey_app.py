"""The application of the consumers."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import sys

if "greenlet" in sys.argv:
    from gevent import monkey

    monkey.patch_all()

import random
from collections.abc import Sequence

from tests.proof.apps.setting import URL, ledger, produce

from litebroker_huey import SQLiteHuey

huey = SQLiteHuey("proof", url=URL, max_receives=5, keep_dead=100_000)


@huey.task(retries=2)
def work(key: str) -> None:
    ledger.run(key)


def add(keys: Sequence[str], chance: random.Random) -> None:
    for key in keys:
        task = work.s(key, **({"delay": 1} if chance.random() < 0.1 else {}))
        task.id = key
        huey.enqueue(task)


def waiting() -> int:
    return int(huey.pending_count())


def producer() -> None:
    produce(add, waiting)
