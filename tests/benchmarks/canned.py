"""A connection that costs nothing: what RQ and redis-py themselves take, and so the most that any storage could gain.

A run on a file is recorded, and played back: each command, or pipeline, gets the reply that the same one got when it
came as often before.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import redis

from litebroker_rq import SQLiteConnection, connect
from litebroker_rq.connection import SQLiteFileConnection

_NAP_S = 0.01  # of a thread that listens to messages, of which none comes

Commands = Iterable[Sequence[Any]]


class Tape:
    """Replies, by the names of the commands that they are to.

    Args:
        more: Where to look for those that this one lacks: a work horse's are recorded in no other process.
    """

    def __init__(self, more: Tape | None = None) -> None:
        self._replies: defaultdict[tuple[str, ...], list[Any]] = defaultdict(list)
        self._played: Counter[tuple[str, ...]] = Counter()
        self._more = more

    def record(self, names: tuple[str, ...], reply: Any) -> None:
        self._replies[names].append(reply)

    def play(self, names: tuple[str, ...]) -> Any:
        replies = self._replies.get(names)
        if replies is None:
            if self._more is None:
                raise LookupError(names)
            return self._more.play(names)
        position = self._played[names]
        self._played[names] += 1
        return replies[min(position, len(replies) - 1)]

    def rewind(self) -> None:
        self._played.clear()


def client(kind: Callable[..., SQLiteFileConnection], path: Path, tape: Tape) -> Callable[[], SQLiteConnection]:
    """Makes clients whose connections are of this kind."""

    def make() -> SQLiteConnection:
        made = connect(path, durability="relaxed")
        made.connection_pool.connection_class = kind
        setattr(made.connection_pool, "tape", tape)  # noqa: B010 - of ours, and of no other pool
        return made

    return make


class Recording(SQLiteFileConnection):
    """Answers from the file, and takes it down."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tape: Tape = getattr(kwargs["connection_pool"], "tape")  # noqa: B009 - as above

    def transact(self, commands: Commands) -> Any:
        commands = list(commands)
        replies = super().transact(commands)
        self._tape.record(_names(commands), replies)
        return replies

    def _send(self, commands: Commands) -> None:
        commands = list(commands)
        before = len(self._replies)
        super()._send(commands)
        self._tape.record(_names(commands), list(self._replies)[before:])


class Canned(SQLiteFileConnection):
    """Answers what was taken down."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tape: Tape = getattr(kwargs["connection_pool"], "tape")  # noqa: B009 - as above

    def connect(self) -> None:
        self._connected = True

    def transact(self, commands: Commands) -> Any:
        return self._tape.play(_names(commands))

    def _send(self, commands: Commands) -> None:
        self._replies.extend(self._tape.play(_names(commands)))

    def can_read(self, timeout: float | None = 0) -> bool:
        if not self._replies:
            time.sleep(_NAP_S if timeout is None else min(timeout, _NAP_S))
        return bool(self._replies)

    def read_response(self, disable_decoding: bool = False, **options: Any) -> Any:  # noqa: FBT002
        if not self._replies:
            time.sleep(_NAP_S)
            raise redis.TimeoutError
        return super().read_response(disable_decoding, **options)


def _names(commands: Commands) -> tuple[str, ...]:
    return tuple(args[0] for args in commands)
