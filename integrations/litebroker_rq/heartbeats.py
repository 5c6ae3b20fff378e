"""What a process keeps back until it writes more.

* A worker's own heartbeat, state and expiry, and its job's heartbeat. RQ sends a dozen of them for each job, each a
  command of its own, and each would be a write transaction.
* The execution that a worker registers for a job before it starts that itself, as a SimpleWorker does. It is of use
  once the job has started, which the same process writes next; until then the claim protects the job (leases.py). Not
  that for a work horse, which may start the job after its worker was killed.
* That a queue belongs to the set of queues, which RQ says before each job, where it was in the set at the last look.

Nobody misses them in the meantime: they are written with the next write transaction of the process, before what that
writes; before it waits for a job, before it forks a process that uses the file by itself, and before it reads them; and
when half a second has passed, at the next command that could be kept back.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from redis.exceptions import ResponseError

from litebroker_rq import arenas
from litebroker_rq.keyspace import COMMANDS, Reply, to_int
from litebroker_rq.naming import is_execution, is_job, is_queues, is_started

if TYPE_CHECKING:
    from litebroker_rq.keyspace import Session

_LONGEST_S = 0.5
_MOMENT_MS = 1000
_OF_ALL_KEYS = {b"KEYS", b"SCAN", b"DBSIZE"}

_Command = Literal["fields", "expiry", "execution", "read", "other"]


class Kept:
    """What is kept back at one time.

    Attributes:
        queues: Sets of queues, and what belongs to them.
        commands: Those that are run as they came.
        fields: What is to be set in hashes.
        expire_at_ms: When keys are to end.
        since: When the first of it came, on the monotonic clock; None when there is nothing.
    """

    def __init__(self) -> None:
        self.queues: dict[tuple[bytes, bytes], None] = {}
        self.commands: list[list[bytes]] = []
        self.fields: dict[bytes, dict[bytes, bytes]] = {}
        self.expire_at_ms: dict[bytes, int] = {}
        self.since: float | None = None

    def keys(self) -> list[bytes]:
        """What is going to be written to, the sets of queues aside: they are as they should be."""
        return [*[args[1] for args in self.commands], *self.fields, *self.expire_at_ms]

    @property
    def has_others(self) -> bool:
        """Whether there is more than queues."""
        return bool(self.commands or self.fields or self.expire_at_ms)

    def followed_by(self, later: Kept) -> Kept:
        """This, with what came later added to it."""
        self.queues.update(later.queues)
        self.commands += later.commands
        for key, fields in later.fields.items():
            self.fields.setdefault(key, {}).update(fields)
        self.expire_at_ms.update(later.expire_at_ms)
        self.since = self.since or later.since
        return self

    def write(self, session: Session, worker: bytes | None) -> None:
        """Write it, in this transaction. Of hashes that are gone, only the worker's is made anew."""
        for key, member in self.queues:
            if not session.is_in(key, member):
                with suppress(ResponseError):
                    COMMANDS[b"SADD"].run(session, [key, member])
        for args in self.commands:
            with suppress(ResponseError):  # the key holds another kind of value by now
                COMMANDS[args[0]].run(session, args[1:])
        for key, changed in self.fields.items():
            if key == worker or session.find(key) is not None:
                COMMANDS[b"HSET"].run(session, [key, *(item for pair in changed.items() for item in pair)])
        for name, at_ms in self.expire_at_ms.items():
            row = session.find(name)
            # RQ means minutes: a moment more is not worth a write.
            if row is not None and not 0 <= at_ms - (row.expires_at_ms or 0) < _MOMENT_MS:
                session.expire(row, at_ms)


class Heartbeats:
    """What this process keeps back, and for which worker.

    Attributes:
        key: The worker's that this process is, or is a work horse of.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in on top
        self.key: bytes | None = None
        self._executions = b""
        self._is_worker = False  # and not a child of one
        self._may_attend = False  # a thread of it may run what its work horses send
        self._claimed = False  # it has claimed a job since it last forked
        self._performs = False  # it starts its jobs itself, instead of having another process do so
        self._queues: set[tuple[bytes, bytes]] = set()  # sets of queues, and what was in them
        self._kept = Kept()

    def own(self, key: bytes) -> None:
        """This process is the worker of this key."""
        with self._lock:
            self.key, self._executions = key, key + b":executions"
            self._is_worker, self._performs = True, False
            self._may_attend = arenas.keep_to_one()

    def start_anew(self) -> None:
        """In a child process, such as a work horse: what is kept back is its parent's."""
        self._lock = threading.RLock()
        self._is_worker = self._claimed = self._performs = False
        self._kept = Kept()

    def has_started(self, worker: object) -> None:
        """This process has started a job, as the worker of this name."""
        name = worker.encode("latin-1") if isinstance(worker, str) else b""
        self._performs = self.key is not None and bool(name) and self.key.endswith(b":" + name)

    def has_claimed(self) -> None:
        """This process has claimed a job."""
        self._claimed = True

    def forks_for_job(self) -> bool:
        """Whether this process, which is about to fork, is a worker with a job for the child, and may attend to it."""
        claimed, self._claimed = self._claimed, False
        return claimed and self._is_worker and self._may_attend and not self._performs

    def has_seen(self, key: bytes, member: bytes) -> None:
        """This is in the set."""
        if is_queues(key):
            self._queues.add((key, member))

    @property
    def pending(self) -> bool:
        return self._kept.since is not None

    @property
    def overdue(self) -> bool:
        """Whether it has been kept back for long enough."""
        return self._kept.since is not None and time.monotonic() - self._kept.since > _LONGEST_S

    def concern(self, commands: list[list[bytes]]) -> bool:
        """Whether one of the commands is about what is kept back."""
        kept = {*self._kept.keys(), *(key for key, _ in self._kept.queues)}
        return any(not kept.isdisjoint(args) or args[0] in _OF_ALL_KEYS for args in commands)

    def keep(self, commands: list[list[bytes]], now_ms: int) -> list[Reply | None] | None:
        """Keep back what can be; a reply for each command that was, None for those that only read.

        None when the commands must run now.
        """
        if len(commands) == 1 and (queue := self.known_queue(commands[0])) is not None:
            with self._lock:
                if self.overdue:
                    return None
                self._kept.queues[queue] = None
                self._kept.since = self._kept.since or time.monotonic()
            return [0]
        if self.key is None:
            return None
        execution = self._performs and self._is_execution(commands)
        kinds = [self._kind(args, "execution" if execution else "other") for args in commands]
        if "other" in kinds or not {"fields", "expiry"} & set(kinds):
            return None
        with self._lock:
            kept = self._kept
            if self.overdue:
                return None
            for args, kind in zip(commands, kinds, strict=True):
                if kind == "fields":
                    kept.fields.setdefault(args[1], {}).update(zip(args[2::2], args[3::2], strict=True))
                elif kind == "expiry":
                    kept.expire_at_ms[args[1]] = now_ms + to_int(args[2]) * 1000
                elif kind != "read":
                    kept.commands.append(args)
            kept.since = kept.since or time.monotonic()
        answers: dict[_Command, Reply | None] = {"fields": 0, "expiry": 1, "execution": 1, "read": None}
        return [answers[kind] for kind in kinds]

    def known_queue(self, args: list[bytes]) -> tuple[bytes, bytes] | None:
        """The set of queues that was seen to have what the command adds to it, and that."""
        if args[0] != b"SADD" or len(args) != 3:  # noqa: PLR2004
            return None
        queue = args[1], args[2]
        return queue if queue in self._queues else None

    def _is_execution(self, commands: list[list[bytes]]) -> bool:
        """Whether they register the execution of a job, and do nothing else."""
        return any(is_started(args[1]) for args in commands if len(args) > 1) and all(map(self._registers, commands))

    def _registers(self, args: list[bytes]) -> bool:
        if len(args) < 3 or (args[0] == b"HSET" and len(args) % 2):  # noqa: PLR2004 - what is refused is refused at once
            return False
        name, key = args[:2]
        if key == self.key:
            return name == b"HSET" and b"birth" not in args
        if key == self._executions:
            return name in {b"SADD", b"EXPIRE"}
        if name == b"ZADD":
            return len(args) == 4 and (is_started(key) or is_execution(key))  # noqa: PLR2004 - it has no option
        return name in {b"HSET", b"EXPIRE"} and is_execution(key)

    def _kind(self, args: list[bytes], otherwise: Literal["execution", "other"]) -> _Command:
        if args[0] == b"HSET" and len(args) % 2 == 0:
            mine = args[1] == self.key and b"birth" not in args
            beat = len(args) == 4 and args[2] == b"last_heartbeat" and is_job(args[1])  # noqa: PLR2004
            return "fields" if mine or beat else otherwise
        if args[0] == b"EXPIRE" and args[1] in {self.key, self._executions} and len(args) == 3:  # noqa: PLR2004
            return "expiry"
        entry = COMMANDS.get(args[0])
        if entry is None or entry.writes or self.concern([args]):
            return otherwise
        return "read"

    def take(self) -> Kept:
        """What is kept back, which the caller writes, or gives back."""
        with self._lock:
            kept, self._kept = self._kept, Kept()
        return kept

    def give_back(self, kept: Kept) -> None:
        """It could not be written."""
        with self._lock:
            self._kept = kept.followed_by(self._kept)

    def take_over(self, kept: Kept) -> None:
        """This was kept back by a work horse, after what is kept back here."""
        with self._lock:
            self._kept = self._kept.followed_by(kept)
