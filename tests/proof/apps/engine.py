"""Workers of the engine itself, each a process: threads in a `Queue.process`, or a loop of claims of its own."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence

from tests.proof.apps.setting import URL, ledger, produce

from litebroker import Backoff, NewJob, Queue, Retention, open_storage

storage = open_storage(URL)
queue: Queue[str] = Queue("proof", storage, backoff=Backoff.fixed(0.01), retention=Retention(failed=None))
_PROCESSES = 4


def handle(key: str) -> None:
    ledger.run(key)


def work() -> None:
    """What the threads of a worker do."""
    queue.process(handle, concurrency=4).run()


def loop() -> None:
    """Claim, and settle one way or another."""
    chance = random.Random(os.getpid())
    while True:
        jobs = queue.claim(limit=chance.choice([1, 3]), lease=60)
        if not jobs:
            time.sleep(0.005)
        for job in jobs:
            if chance.random() < 0.05:
                queue.release(job)
                continue
            try:
                ledger.run(job.data)
            except Exception as error:  # noqa: BLE001 - it is the job's failure
                queue.fail(job, error)
            else:
                if chance.random() < 0.1:
                    queue.extend(job, 60)
                queue.complete(job)


def forked() -> None:
    """Keep so many forked processes at it; the parent touches no database."""
    while True:
        for _ in range(_PROCESSES - len(running)):
            pid = os.fork()
            if pid == 0:
                loop()
            running.add(pid)
        running.discard(os.wait()[0])


def add(keys: Sequence[str], chance: random.Random) -> None:
    jobs = [
        NewJob(
            key,
            ref=key,
            priority=chance.choice([0, 0, 5]),
            delay=chance.choice([0, 0, 0, 0.2]),
            group=chance.choice([None, None, "one", "two"]),
        )
        for key in keys
    ]
    queue.add_many(jobs)


def waiting() -> int:
    return storage.counts("proof").pending


def producer() -> None:
    produce(add, waiting)


running: set[int] = set()

if __name__ == "__main__":
    if sys.argv[1] == "forked":
        forked()
    else:
        work()
