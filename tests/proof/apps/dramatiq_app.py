"""The application of the `dramatiq` commands."""

from __future__ import annotations

import random
from collections.abc import Sequence

import dramatiq
from tests.proof.apps.setting import URL, ledger, produce

from litebroker_dramatiq import SQLiteBroker

broker = SQLiteBroker(URL, max_deliveries=5)
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=2, min_backoff=10, max_backoff=50)
def work(key: str) -> None:
    ledger.run(key)


def add(keys: Sequence[str], chance: random.Random) -> None:
    for key in keys:
        message = work.message(key).copy(message_id=key)
        broker.enqueue(message, delay=chance.choice([None, None, None, 200]))


def waiting() -> int:
    return broker.storage.counts("dramatiq:default").pending


def producer() -> None:
    produce(add, waiting)
