"""Redis' keys in tables: finding, changing, expiring and deleting them inside one transaction.

A `Session` is one such transaction. Commands are functions of a session and their arguments; they read keys as
`Row`s, change those, and the session writes each changed row once, at its end. A session that may only read raises
`WouldWriteError` at the first change, so that "would this command change anything?" is answered by running it.

Expiry is by the wall clock, as in Redis: TTLs survive a restart of the machine, and `EXPIREAT` names a date.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Literal, Protocol, Union

from redis.exceptions import ResponseError

from litebroker import JobSpec

if TYPE_CHECKING:
    from litebroker_rq.database import Database

Reply = Union[bytes, int, None, "list[Reply]", Exception]
Kind = Literal["string", "hash", "list", "set", "zset", "stream"]

# A hash's value of more characters than this lies in a row of its own.
INLINE_CHARS = 4096

# So many keys are read, and so many new ones written, by one statement; fewer are read one by one.
_FEW = 3
_PREFETCH = 12
_INSERTS = 16
_PREFETCH_KEYS = (
    f"select key, id, kind, expires_at_ms, value from litebroker_rq_keys where key in ({', '.join('?' * _PREFETCH)})"
)
_INSERT_KEYS = [
    "insert into litebroker_rq_keys (id, key, kind, version, expires_at_ms, value)"
    f" values {', '.join(['(?, ?, ?, ?, ?, ?)'] * count)}"
    for count in range(_INSERTS + 1)
]
INSERT_KEY = _INSERT_KEYS[1]

_IS_IN = (
    "select 1 from litebroker_rq_members where member = ? and key_id = (select id from litebroker_rq_keys"
    " where key = ? and kind = 'set' and (expires_at_ms is null or expires_at_ms > ?))"
)
# One row, also where there is no such key.
IS_IN_AND_LOAD = (
    f"select ({_IS_IN}), id, kind, expires_at_ms, value from (select 1) left join litebroker_rq_keys on key = ?"
)

# The system's own would take ten times as long, and nobody is to be kept from guessing.
_random = Random()  # noqa: S311
os.register_at_fork(after_in_child=_random.seed)

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode

_WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Status(bytes):
    """A simple string: Lua sees it as a table with the field "ok"."""


OK = Status(b"OK")


class WouldWriteError(Exception):
    """The command would change something, and the session may only read."""


class TooBriefError(Exception):
    """The command takes more than the one statement that its session has."""


class Transaction(Protocol):
    """What a session asks of a transaction of the storage."""

    def execute(self, sql: str, params: Sequence[Any] = (), /) -> list[tuple[Any, ...]]:
        """Run one statement; all its rows."""


class Row:
    """A key that exists.

    Attributes:
        id: None as long as nothing in another table needs it.
        stored: Whether the row is in the table; a new one is written at the end of its session.
        data: A string's bytes; a hash's fields, where True stands for a value in a row of its own; else None.
    """

    __slots__ = ("changed", "data", "dropped", "expires_at_ms", "id", "key", "kind", "stored")

    def __init__(self, key: bytes, kind: Kind, row_id: int | None, expires_at_ms: int | None, data: Any) -> None:
        self.key = key
        self.kind = kind
        self.id = row_id
        self.stored = row_id is not None
        self.expires_at_ms = expires_at_ms
        self.data = data
        self.changed = False
        self.dropped: set[str] = set()


class Session:
    """One transaction on the keys.

    Attributes:
        now_ms: One reading of the wall clock for all of it.
        writing: Whether it may change anything.
        batch: Whether the command is one of several, as in a pipeline or a script.
        topics: What is to be notified once it is committed.
        ended: What was changed is written, or is being written. What a signal handler changes now needs another `end`.
    """

    def __init__(self, database: Database, transaction: Transaction, *, writing: bool) -> None:
        self.database = database
        self.storage = database.storage
        self.now_ms = self.storage.clock.now_ms()
        self.writing = writing
        self._execute = transaction.execute
        self._version = 0
        self._rows: dict[bytes, Row | None] = {}
        self._changed: list[Row] = []
        self._awaited: bytes | None = None
        self._last_id: int | None = None
        self._pushes: list[JobSpec] = []
        self.batch = False
        self.topics: list[str] = []
        self.ended = False
        self._interrupted = False  # a signal handler has changed rows while they were being written

    # Statements

    def select(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Read. Changes to strings and hashes are in the rows that `find` answers, not yet in the tables."""
        return self._execute(sql, params)

    def write(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Change."""
        self.must_write()
        return self._execute(sql, params)

    def must_write(self) -> None:
        if not self.writing:
            raise WouldWriteError

    # Keys

    def find(self, key: bytes, kind: Kind | None = None) -> Row | None:
        """The key, or None when it is not there or has expired.

        Raises:
            ResponseError: It holds another kind of value.
        """
        try:
            row = self._rows[key]
        except KeyError:
            row = self._rows.setdefault(key, self._load(key))  # a signal handler may have made it meanwhile
        if row is not None and kind is not None and row.kind != kind:
            raise ResponseError(_WRONG_TYPE)
        return row

    def has_looked_at(self, key: bytes) -> bool:
        """Whether to find the key costs nothing any more."""
        return key in self._rows

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """These keys are about to be looked at: read them together, unless they are few."""
        known = self.database.knows_queue
        wanted = [key for key in dict.fromkeys(keys) if key not in self._rows and not known(key)]
        if len(wanted) < _FEW:
            self._awaited = wanted[0] if wanted else None
            return
        for start in range(0, len(wanted), _PREFETCH):
            chunk = wanted[start : start + _PREFETCH]
            found: dict[bytes, Row | None] = dict.fromkeys(chunk)
            # Always as many, so that the statement is one that SQLite has compiled.
            padded = [*chunk, *(chunk[:1] * (_PREFETCH - len(chunk)))]
            for key, *columns in self._execute(_PREFETCH_KEYS, padded):
                found[key] = self._made(key, *columns)
            for key, row in found.items():
                self._rows.setdefault(key, row)

    def is_in(self, key: bytes, member: bytes) -> bool:
        """Whether the set of this name, which was not looked at yet, has the member."""
        awaited, self._awaited = self._awaited, None
        if awaited is None or awaited in self._rows:
            return bool(self._execute(_IS_IN, (member, key, self.now_ms)))
        # What is to be looked at next comes along: a statement takes longer than its work.
        ((found, row_id, *columns),) = self._execute(IS_IN_AND_LOAD, (member, key, self.now_ms, awaited))
        self._rows[awaited] = None if row_id is None else self._made(awaited, row_id, *columns)
        return found is not None

    def _load(self, key: bytes) -> Row | None:
        found = self._execute("select id, kind, expires_at_ms, value from litebroker_rq_keys where key = ?", (key,))
        return self._made(key, *found[0]) if found else None

    def _made(self, key: bytes, row_id: int, kind: Kind, expires_at_ms: int | None, value: Any) -> Row | None:
        """The row of what was read; None when it has expired."""
        if kind == "hash":
            value = json.loads(value)
        row = Row(key, kind, row_id, expires_at_ms, value)
        if expires_at_ms is not None and expires_at_ms <= self.now_ms:
            if self.writing:
                self._erase(row)
            return None
        return row

    def need(self, key: bytes, kind: Kind) -> Row:
        """The key, made when it is not there."""
        row = self.find(key, kind)
        if row is None:
            self.must_write()
            data: Any = {} if kind == "hash" else b"" if kind == "string" else None
            row = Row(key, kind, None, None, data)
            row = self._rows[key] = self._rows.get(key) or row
            if data is None:
                self._identify(row)
        if not row.changed:
            self.change(row)
        return row

    def _identify(self, row: Row) -> None:
        """Give a new row the id that SQLite would give it: nobody else can, as long as this transaction is open."""
        if row.id is None:
            if self._last_id is None:
                ((self._last_id,),) = self._execute("select coalesce(max(id), 0) from litebroker_rq_keys")
            row.id = self._last_id = self._last_id + 1

    def change(self, row: Row) -> None:
        """The row's value or expiry is about to change: write it at the end, with a new version."""
        self.must_write()
        if not row.changed:
            row.changed = True
            self._changed.append(row)

    def delete(self, row: Row, *, empty: bool = False) -> None:
        """Delete the key; ``empty`` when nothing of its value is left in other tables."""
        self.must_write()
        self._rows[row.key] = None
        row.changed = False
        self._erase(row, empty=empty)
        self.database.leases.on_deleted(self, row)

    def _erase(self, row: Row, *, empty: bool = False) -> None:
        if row.id is None:
            return
        if empty:
            pass
        elif row.kind == "hash":
            if True in row.data.values() or row.dropped:
                self._execute("delete from litebroker_rq_fields where key_id = ?", (row.id,))
        elif row.kind in {"set", "zset"}:
            self._execute("delete from litebroker_rq_members where key_id = ?", (row.id,))
        elif row.kind == "list":
            self._execute("delete from litebroker_rq_items where key_id = ?", (row.id,))
        elif row.kind == "stream":
            self._execute("delete from litebroker_rq_entries where key_id = ?", (row.id,))
        if row.stored:
            self._execute("delete from litebroker_rq_keys where id = ?", (row.id,))

    def rename(self, row: Row, key: bytes) -> None:
        """Give it another name. What had that name is gone."""
        other = self.find(key)
        if other is not None and other is not row:
            self.delete(other)
        self.change(row)
        self.flush()
        self.write("update litebroker_rq_keys set key = ? where id = ?", key, row.id)
        self._rows[row.key] = None
        row.key = key
        self._rows[key] = row

    def expire(self, row: Row, at_ms: int | None) -> None:
        """Let it end then; None is never. A past time deletes it."""
        if at_ms is not None and at_ms <= self.now_ms:
            self.delete(row)
        elif row.expires_at_ms != at_ms:
            self.change(row)
            row.expires_at_ms = at_ms

    # Fields of hashes

    def get_field(self, row: Row, field: str) -> bytes | None:
        value = row.data.get(field)
        if value is None:
            return None
        if value is True:
            found = self._execute(
                "select value from litebroker_rq_fields where key_id = ? and field = ?", (row.id, field)
            )
            return bytes(found[0][0])
        return str(value).encode("latin-1")

    def set_field(self, row: Row, field: str, value: bytes) -> bool:
        """True when it was not there."""
        self.change(row)
        old = row.data.get(field)
        if old is True:
            row.dropped.add(field)
        row.data[field] = value.decode("latin-1")
        return old is None

    def set_fields(self, row: Row, fields: list[bytes], values: list[bytes]) -> int:
        """How many were not there. The row is one that `need` gave."""
        if row.stored:
            return sum(
                self.set_field(row, field.decode("latin-1"), value) for field, value in zip(fields, values, strict=True)
            )
        data = row.data
        before = len(data)
        for field, value in zip(fields, values, strict=True):
            data[field.decode("latin-1")] = value.decode("latin-1")
        return len(data) - before

    def delete_field(self, row: Row, field: str) -> bool:
        if field not in row.data:
            return False
        self.change(row)
        if row.data.pop(field) is True:
            row.dropped.add(field)
        return True

    def fields(self, row: Row) -> list[tuple[bytes, bytes]]:
        large = {}
        if True in row.data.values():
            large = dict(self._execute("select field, value from litebroker_rq_fields where key_id = ?", (row.id,)))
        return [
            (name.encode("latin-1"), bytes(large[name]) if value is True else value.encode("latin-1"))
            for name, value in row.data.items()
        ]

    # The end

    @property
    def version(self) -> int:
        """What every key that this transaction changes gets: no other transaction has the same."""
        if not self._version:
            self._version = new_version()
        return self._version

    def push(self, job: JobSpec) -> None:
        """Add a job to its queue, no later than at the end, together with others."""
        self._pushes.append(job)

    def prioritize(self, queue: str, ref: str, priority: int) -> bool:
        """Change the priority of what is about to be added. False when no such job is."""
        found = False
        for position, job in enumerate(self._pushes):
            if job.queue == queue and job.ref == ref:
                found = True
                if not job.front:
                    self._pushes[position] = job._replace(priority=priority)
        return found

    def push_all(self) -> None:
        """Add them now: the queue is about to be looked at."""
        pushes, self._pushes = self._pushes, []
        if pushes:
            self.storage.add(pushes)

    def forget(self) -> None:
        """What was read or changed so far is about to be deleted."""
        self._pushes.clear()
        self._changed.clear()
        self._rows.clear()

    def end(self) -> None:
        """Write all that is to be written. The session is over then."""
        interrupting, self.ended = self.ended, True
        self._write()
        self.push_all()
        self._interrupted = interrupting
        for topic in dict.fromkeys(self.topics):
            self.storage.notify(topic)

    def stored_version(self, key: bytes) -> int:
        """What WATCH compares: another number with every change, 0 for a key that is not there."""
        found = self._execute(
            "select version from litebroker_rq_keys where key = ? and (expires_at_ms is null or expires_at_ms > ?)",
            (key, self.now_ms),
        )
        return int(found[0][0]) if found else 0

    def flush(self) -> None:
        """Write the rows that changed, and go on with them."""
        for row in self._changed:
            self._identify(row)
        self._write()

    def _write(self) -> None:
        changed, self._changed = self._changed, []
        new: list[tuple[Row, bytes | str | None]] = []
        for row in changed:
            if not row.changed:
                continue
            row.changed = False
            if not row.stored:
                row.stored = True
                new.append((row, self._stored(row)))
            else:
                self._update(row)
        # Those that have an id go first: SQLite gives the others the next ones.
        new.sort(key=_has_no_id)
        version = self.version if new else 0
        for start in range(0, len(new), _INSERTS):
            together = new[start : start + _INSERTS]
            values: list[Any] = []
            for row, stored in together:
                values += (row.id, row.key, row.kind, version, row.expires_at_ms, stored)
            self._execute(_INSERT_KEYS[len(together)], values)
        while self._interrupted:
            self._interrupted = False
            for row in changed:
                if self._rows.get(row.key) is row:
                    self._update(row)
                elif self._rows.get(row.key) is None:
                    self._execute("delete from litebroker_rq_keys where key = ?", (row.key,))

    def _update(self, row: Row) -> None:
        value = self._stored(row)
        if row.id is None:
            # It was new when this began.
            self._execute(
                "update litebroker_rq_keys set version = ?, expires_at_ms = ?, value = ? where key = ?",
                (self.version, row.expires_at_ms, value, row.key),
            )
        elif row.data is None:
            self._execute(
                "update litebroker_rq_keys set version = ?, expires_at_ms = ? where id = ?",
                (self.version, row.expires_at_ms, row.id),
            )
        else:
            self._execute(
                "update litebroker_rq_keys set version = ?, expires_at_ms = ?, value = ? where id = ?",
                (self.version, row.expires_at_ms, value, row.id),
            )

    def _stored(self, row: Row) -> bytes | str | None:
        """What goes into the row; what is too large for it goes elsewhere at once."""
        if row.data is None:
            return None
        if row.kind == "string":
            return bytes(row.data)
        data: dict[str, Any] = row.data
        for field in row.dropped:
            self._execute("delete from litebroker_rq_fields where key_id = ? and field = ?", (row.id, field))
        row.dropped.clear()
        encoded = encode(data)
        if len(encoded) <= INLINE_CHARS:
            return encoded
        for field, value in list(data.items()):  # a signal handler may add to it
            if value is not True and len(value) > INLINE_CHARS:
                self._identify(row)
                self._execute(
                    "insert into litebroker_rq_fields (key_id, field, value) values (?, ?, ?)"
                    " on conflict (key_id, field) do update set value = excluded.value",
                    (row.id, field, value.encode("latin-1")),
                )
                data[field] = True
        return encode(data)

    def purge_expired(self, limit: int) -> None:
        """Delete a few of the keys that have expired. Nobody can see them any more."""
        expired = self._execute(
            "select key from litebroker_rq_keys where expires_at_ms <= ? order by expires_at_ms limit +?",
            (self.now_ms, limit),
        )
        for (key,) in expired:
            self._rows.pop(key, None)
            self.find(key)


def new_version() -> int:
    """What the keys that a transaction changes get: no other transaction has the same."""
    return _random.getrandbits(62) + 1


def _has_no_id(new: tuple[Row, object]) -> bool:
    return new[0].id is None


Command = Callable[[Session, "list[bytes]"], Reply]


class Entry:
    """A command that is answered.

    Attributes:
        run: The function.
        writes: Whether it may change anything.
        reads: It changes nothing, or often does not, so that it is tried on a reading session first.
        brief: It mostly takes one statement as long as it changes nothing, and thus no transaction to read in.
    """

    __slots__ = ("brief", "least", "reads", "run", "writes")

    def __init__(self, run: Command, *, least: int, writes: bool, often_idle: bool, brief: bool) -> None:
        self.run = run
        self.least = least
        self.writes = writes
        self.reads = not writes or often_idle
        self.brief = brief


COMMANDS: dict[bytes, Entry] = {}


def command(
    *names: str, least: int = 0, writes: bool = False, often_idle: bool = False, brief: bool = False
) -> Callable[[Command], Command]:
    """Answer the Redis commands of these names, given with at least so many arguments, by this function."""

    def register(run: Command) -> Command:
        for name in names:
            COMMANDS[name.encode()] = Entry(run, least=least, writes=writes, often_idle=often_idle, brief=brief)
        return run

    return register


# Numbers, as Redis writes and reads them


def to_int(data: bytes) -> int:
    """A whole number from a command's words."""
    try:
        return int(data)
    except ValueError:
        message = "value is not an integer or out of range"
        raise ResponseError(message) from None


def to_float(data: bytes) -> float:
    """A number, or an infinity, from a command's words."""
    try:
        number = float(data)
    except ValueError:
        number = float("nan")
    if number != number:  # noqa: PLR0124 - NaN
        message = "value is not a valid float"
        raise ResponseError(message)
    return number


def from_float(number: float) -> bytes:
    """A number in an answer."""
    if number in {float("inf"), float("-inf")}:
        return b"inf" if number > 0 else b"-inf"
    if number.is_integer() and abs(number) < 1e17:  # noqa: PLR2004 - exact in a double, and in Redis' %.17g
        return b"%d" % int(number)
    return repr(number).encode()


def flat(pairs: Iterable[tuple[bytes, bytes]]) -> list[Reply]:
    """Names and values in turn, as HGETALL answers them."""
    return [item for pair in pairs for item in pair]


def syntax_error() -> ResponseError:
    """What Redis says of words that it does not understand."""
    return ResponseError("syntax error")
