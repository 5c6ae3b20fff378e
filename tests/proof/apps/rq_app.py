"""What the workers of `rq` run."""

from __future__ import annotations

import random
from collections.abc import Sequence

import rq
from tests.proof.apps.setting import URL, ledger, produce

from litebroker_rq import connect


def work(key: str) -> None:
    ledger.run(key)


def producer() -> None:
    queue = rq.Queue("proof", connection=connect(URL))

    def add(keys: Sequence[str], chance: random.Random) -> None:
        for key in keys:
            retry = chance.choice([None, rq.Retry(max=2)])
            queue.enqueue("tests.proof.apps.rq_app.work", key, job_id=key, result_ttl=0, failure_ttl=-1, retry=retry)

    produce(add, lambda: queue.count)
