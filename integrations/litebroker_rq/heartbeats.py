"""A worker's own heartbeat, state and expiry, and its job's heartbeat: kept back until its process writes more.

RQ sends a dozen of them for each job, each a command of its own, and each would be a write transaction. Nobody
misses them in the meantime: they are written with the next write transaction of the process, before it waits for a
job, before it forks, and before it reads them itself; and when half a second has passed, at the next one.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Literal

from litebroker_rq.keyspace import COMMANDS, Reply, to_int
from litebroker_rq.naming import is_job

if TYPE_CHECKING:
    from litebroker_rq.keyspace import Session

_LONGEST_S = 0.5

_Command = Literal["fields", "expiry", "read", "other"]


class Heartbeats:
    """What is kept back, of the worker that this process is."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in on top
        self._key: bytes | None = None  # of the worker that this process is, or is a work horse of
        self._executions = b""
        self._pid = 0
        self._fields: dict[bytes, dict[bytes, bytes]] = {}
        self._expire_at_ms: dict[bytes, int] = {}
        self._since: float | None = None

    def own(self, key: bytes) -> None:
        """This process is the worker of this key."""
        with self._lock:
            self._key, self._executions, self._pid = key, key + b":executions", os.getpid()

    def _start_anew(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._fields, self._expire_at_ms, self._since = {}, {}, None

    @property
    def pending(self) -> bool:
        return self._since is not None and self._pid == os.getpid()

    def concern(self, commands: list[list[bytes]]) -> bool:
        """Whether one of the commands is about what is kept back."""
        kept = {*self._fields, *self._expire_at_ms}
        return any(not kept.isdisjoint(args) for args in commands)

    def keep(self, commands: list[list[bytes]], now_ms: int) -> list[Reply | None] | None:
        """Keep back what can be; a reply for each command that was, None for those that only read.

        None when the commands must run now.
        """
        if self._key is None:
            return None
        if self._pid != os.getpid():  # a work horse, which goes on from nothing: its parent has written what it had
            self._start_anew()
        kinds = [self._kind(args) for args in commands]
        if "other" in kinds or not {"fields", "expiry"} & set(kinds):
            return None
        with self._lock:
            now = time.monotonic()
            if self._since is not None and now - self._since > _LONGEST_S:
                return None
            for args, kind in zip(commands, kinds, strict=True):
                if kind == "fields":
                    self._fields.setdefault(args[1], {}).update(zip(args[2::2], args[3::2], strict=True))
                elif kind == "expiry":
                    self._expire_at_ms[args[1]] = now_ms + to_int(args[2]) * 1000
            self._since = self._since or now
        answers: dict[_Command, Reply | None] = {"fields": 0, "expiry": 1, "read": None}
        return [answers[kind] for kind in kinds]

    def _kind(self, args: list[bytes]) -> _Command:
        if args[0] == b"HSET" and len(args) % 2 == 0:
            mine = args[1] == self._key and b"birth" not in args
            beat = len(args) == 4 and args[2] == b"last_heartbeat" and is_job(args[1])  # noqa: PLR2004
            return "fields" if mine or beat else "other"
        if args[0] == b"EXPIRE" and args[1] in {self._key, self._executions} and len(args) == 3:  # noqa: PLR2004
            return "expiry"
        entry = COMMANDS.get(args[0])
        if entry is None or entry.writes or self.concern([args]):
            return "other"
        return "read"

    def write(self, session: Session) -> None:
        """Write what is kept back, in this transaction."""
        if not self.pending:
            return
        with self._lock:
            fields, self._fields = self._fields, {}
            expire_at_ms, self._expire_at_ms = self._expire_at_ms, {}
            self._since = None
        for key, changed in fields.items():
            # A job that was deleted meanwhile is not made anew by its last heartbeat.
            if key == self._key or session.find(key) is not None:
                COMMANDS[b"HSET"].run(session, [key, *(item for pair in changed.items() for item in pair)])
        for name, at_ms in expire_at_ms.items():
            row = session.find(name)
            if row is not None:
                session.expire(row, at_ms)
