"""One file in one process: its connections, its locks, its transactions, and what has to happen around them.

Writers queue up three deep, and each step makes the next one rare:

1. Threads: each puts its operation in line and asks for the lead. Who gets it runs all that stand in line, in one
   transaction (group commit); whose operation was run meanwhile has nothing left to do. One alone does not line up.
2. Processes: the leader takes the writer lock, a flock on a sidecar, so that processes take turns instead of
   polling SQLite's own lock, which starves some and lets the WAL grow.
3. Strangers, who write to the file without that lock: SQLite's busy handler.

A commit writes the WAL and does not wait for the disk. Where an operation promises durability, the WAL is synced
after both locks are free, once for all who wait: the throughput of `synchronous = full` is doubled that way,
and nothing that was acknowledged is lost to a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from litebroker.clock import Clock
from litebroker.errors import (
    DatabaseBusyError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    StorageClosedError,
    StorageError,
)
from litebroker.jobs import JobRecord
from litebroker.sqlite import crossing, fork, machine, schema
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Connection, connect, drivers_share_sqlite
from litebroker.sqlite.identities import Identities
from litebroker.sqlite.location import file_identity
from litebroker.sqlite.locks import Liveness, WriterLock
from litebroker.sqlite.schema import PAGE_BYTES
from litebroker.sqlite.steady import SteadyClock
from litebroker.wakeup import Wakeups

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("litebroker")

R = TypeVar("R")

# The WAL is copied back into the database when about so many of its pages are new: 4 MB, a stall of 5 ms. Beside other
# writers, whose pages count too, a process looks after fewer of its own.
_CHECKPOINT_PAGES = 4_000_000 // PAGE_BYTES
_FEWEST_PAGES = _CHECKPOINT_PAGES // 5
# How often an engine looks whether its file is still the one it opened.
_LOOK_S = 1.0


class Tx:
    """A write transaction under way, and what is to happen once it is committed.

    Attributes:
        durable: It is on disk before its caller goes on.
        pages: How many pages of the WAL it writes, about.
        looked: The queues whose due times and leases were looked at, and when.
        registered: This process became known as one that claims.
    """

    pages = 4
    queues: dict[str, int] | None = None
    topics: set[str] | None = None
    lapsed: list[JobRecord] | None = None
    looked: dict[int, tuple[int, int]] | None = None
    registered = False

    def __init__(self, db: Connection, *, durable: bool = False) -> None:
        self.db = db
        self.durable = durable

    def carries(self, size: int) -> None:
        """It writes payloads of so many bytes, which take pages of their own."""
        self.pages += size // PAGE_BYTES

    def wake(self, queue: str, jobs: int) -> None:
        if self.queues is None:
            self.queues = {queue: jobs}
        else:
            self.queues[queue] = self.queues.get(queue, 0) + jobs

    def notify(self, topic: str) -> None:
        if self.topics is None:
            self.topics = set()
        self.topics.add(topic)

    def failed(self, records: list[JobRecord]) -> None:
        """These failed since their last worker vanished: callbacks hear of it."""
        self.lapsed = [*(self.lapsed or ()), *records]


class _Request(Generic[R]):
    """An operation that waits for its turn, and what became of it."""

    __slots__ = ("done", "durable", "error", "op", "result", "sequence", "single", "tx")

    def __init__(self, op: Callable[[Tx], R], *, durable: bool, single: bool) -> None:
        self.op = op
        self.durable = durable
        self.single = single
        self.sequence = 0
        self.tx: Tx | None = None
        self.result: R | None = None
        self.error: BaseException | None = None
        self.done = False


class Engine:
    """Opens lazily, at the first operation, so that it can be made at import time and carried through a fork.

    Args:
        path: The database file, or None for a database in memory.
        shared: The file may hold other applications' tables.
        network: Open it on a network file system all the same.
    """

    def __init__(
        self,
        path: str | None,
        *,
        driver: str,
        busy_timeout_ms: int,
        clock: Clock,
        shared: bool,
        network: bool,
    ) -> None:
        self.path = path
        self.driver = driver
        self.clock = clock
        self.transactions = 0
        self.callbacks: list[Callable[[JobRecord], None]] = []
        self._busy_timeout_ms = busy_timeout_ms
        self.shared = shared
        self._network = network
        self._sidecar = Path(f"{path}-litebroker") if path is not None else None
        self.wakeups = Wakeups(self._sidecar)
        self._writer_lock = WriterLock(self._sidecar) if self._sidecar is not None else None
        self._closed = False
        self._spoiled = False
        self._stays_open = False
        # The file, and the versions of its schema, that were found good.
        self._checked: tuple[tuple[int, int] | None, tuple[int, int]] | None = None
        self._fresh()
        _engines.add(self)
        fork.register(self)

    def _fresh(self) -> None:
        """Everything that belongs to one process only; made anew in a forked child."""
        self._lead = threading.RLock()
        # Whether this thread has it. Not public, but what threading.Condition asks of an RLock; an owner noted beside
        # the lock would be wrong wherever an exception strikes between the two.
        self._leading: Callable[[], bool] = self._lead._is_owned  # type: ignore[attr-defined]  # noqa: SLF001
        self._tx: Tx | None = None
        # Somebody has the turn, or is about to: who comes now stands in line. An exception may leave it as it is not,
        # until the next turn ends: that only decides who shares a transaction.
        self._led = False
        self._waiting: deque[_Request[Any]] = deque()
        self._db: Connection | None = None
        self._read_lock = threading.RLock()
        self._reader: Connection | None = None
        self._sync_lock = threading.RLock()  # re-entrant, as all of them: a signal handler may write, too
        self._committed = 0
        self._synced = 0
        self._doubtful: OSError | None = None  # the disk refused a sync, and has not confirmed since
        self._wal: int | None = None
        self._dirty_pages = 0
        self._checkpoint_at = _CHECKPOINT_PAGES
        self._identity: tuple[int, int] | None = None
        self._looked_at = 0.0
        self._liveness: Liveness | None = None
        self._registered = False
        self._checked_at = 0.0
        self._swept_at = 0.0
        self.identities = Identities()
        self._steady = SteadyClock(self.clock)
        self.grouped: set[int] = set()  # queues known to have groups
        self.quiet: set[int] = set()  # queues whose last claim found nothing
        self.heard: set[str] = set()  # queues of which a listener has heard since
        self.wary: set[str] = set()  # queues whose last claim found a job that has lapsed
        self.looked: dict[int, tuple[int, int]] = {}  # when due times and leases were last looked at
        self.queue_ids: dict[str, int] = {}
        self.queue_names: dict[int, str] = {}

    # -- writing --

    @property
    def current(self) -> Tx | None:
        """The transaction that this thread is in, if any."""
        return self._tx if self._leading() else None

    def write(self, op: Callable[[Tx], R], *, durable: bool = False, single: bool = False) -> R:
        """Run the operation in a write transaction of its own, or one that it shares with other threads'.

        It must be able to run twice: when one fails, the others' transaction is rolled back and run anew.

        Args:
            durable: Return only once it is on disk.
            single: It is one statement, or several of which each may stand alone: no transaction is needed around it.
        """
        if self._leading():
            return self._join(op, durable=durable, single=single)
        fork.give_way()
        if single and not self._led:
            self._led = True
            return self._run_at_once(op, durable=durable)
        request = _Request(op, durable=durable, single=single)
        self._waiting.append(request)
        try:
            # An exception can strike between any two steps (a signal handler's, or one that another thread set), so the
            # lead is held by nothing but a `with` on the lock itself, which CPython does not interrupt halfway.
            with self._lead:
                if not request.done:
                    self._serve(request)
        except BaseException:
            with contextlib.suppress(ValueError):
                self._waiting.remove(request)
            raise
        if request.error is not None:
            raise request.error
        self._follow_up(request.tx, request.sequence)
        return request.result  # type: ignore[return-value]

    @contextlib.contextmanager
    def transaction(self, *, durable: bool | None = None) -> Iterator[Tx]:
        """All that this thread writes meanwhile is one transaction. Nested, it is part of the outer one.

        Args:
            durable: Whether to wait for the disk at the end; None leaves it to the operations in it.
        """
        if self._leading() and self._tx is not None:
            if durable:
                self._tx.durable = True
            yield self._tx
            return
        fork.give_way()
        # A signal handler, before the leader has begun, or after its commit: the turn is the leader's.
        interrupting = self._leading()
        with self._lead:
            db = self._ready()
            try:
                if not interrupting:
                    self._lock_writer()
                tx = self._tx = Tx(db)
                self._begin(db)
                yield tx
                self._commit(db)
                sequence = self._committed
                self._checkpoint_if_due(db, tx.pages)
            finally:
                try:
                    self._end_turn(db, unlock=not interrupting)
                except BaseException:  # one that strikes just now
                    self._end_turn(db, unlock=not interrupting)
                    raise
        if durable is not None:
            tx.durable = durable
        self._follow_up(tx, sequence)

    def alone(self, op: Callable[[Tx], R], *, durable: bool = False) -> R:
        """Run what SQLite refuses within a transaction, as nobody else of any process writes.

        Args:
            durable: Return only once it is on disk.

        Raises:
            StorageError: This thread is in a transaction itself.
        """
        if self._leading():
            raise StorageError(f"{self.path}: this cannot be a part of a transaction: call it outside", path=self.path)
        fork.give_way()
        return self._run_at_once(op, durable=durable)

    def _run_at_once(self, op: Callable[[Tx], R], *, durable: bool) -> R:
        """Run an operation whose statements are their own transactions, without a look at who else stands in line."""
        with self._lead:
            db = self._ready()
            try:
                self._lock_writer()
                tx = self._tx = Tx(db, durable=durable)
                result = op(tx)
                self._committed += 1
                self.transactions += 1
                sequence = self._committed
                self._checkpoint_if_due(db, tx.pages)
            finally:
                try:
                    self._end_turn(db)
                except BaseException:  # one that strikes just now: nobody could write until this process does again
                    self._end_turn(db)
                    raise
        self._follow_up(tx, sequence)
        return result

    def _join(self, op: Callable[[Tx], R], *, durable: bool, single: bool) -> R:
        """Inside this thread's own transaction, be it that a signal handler runs on top of it."""
        tx = self._tx
        if tx is None:  # a signal handler, before the leader has begun, or after its commit
            tx = self._tx = Tx(self._ready(), durable=durable)
            try:
                result = op(tx) if single else in_savepoint(tx, op)
            finally:
                self._tx = None
            self._committed += 1
            self._follow_up(tx, self._committed)
            return result
        if durable:
            tx.durable = True
        if single:
            return op(tx)
        return in_savepoint(tx, op)

    def _serve(self, own: _Request[Any]) -> None:
        """Run what waits, and one's own. The caller leads."""
        batch = self._drain(own)
        try:
            db = self._ready()
            try:
                self._lock_writer()
                if len(batch) == 1 and own.single:
                    self._run_alone(db, own)
                else:
                    self._run_together(db, batch)
            finally:
                try:
                    self._end_turn(db)
                except BaseException:  # one that strikes just now
                    self._end_turn(db)
                    raise
        except Exception as error:  # noqa: BLE001 - it came of opening or locking, and is everybody's
            for request in batch:
                if not request.done:
                    request.error = error
                    request.done = True
        except BaseException:
            # Of this thread's interruption the others need not suffer.
            self._waiting.extendleft(request for request in batch if request is not own and not request.done)
            raise

    def _drain(self, own: _Request[Any]) -> list[_Request[Any]]:
        taken: list[_Request[Any]] = []
        try:
            while self._waiting:
                taken.append(self._waiting.popleft())
        except IndexError:  # one was withdrawn
            pass
        if own not in taken:  # a leader that was interrupted had taken it
            taken.append(own)
        return taken

    def _end_turn(self, db: Connection, *, unlock: bool = True) -> None:
        """Leave no transaction open, and let the next process write, whatever has happened."""
        try:
            self._tx = None
            self._led = False
            if db.in_transaction:
                self._abandon(db)
        finally:
            # Directly: as a Python method is entered, an exception could strike.
            if unlock and self._writer_lock is not None:
                self._writer_lock.release()

    def _run_alone(self, db: Connection, request: _Request[Any]) -> None:
        tx = self._tx = request.tx = Tx(db, durable=request.durable)
        try:
            request.result = request.op(tx)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            request.error = error
        self._committed += 1
        self.transactions += 1
        request.sequence = self._committed
        request.done = True
        self._checkpoint_if_due(db, tx.pages)

    def _run_together(self, db: Connection, batch: list[_Request[Any]]) -> None:
        begun = committing = False
        try:
            self._tx = Tx(db)  # a signal handler that strikes from here on joins in
            self._begin(db)
            begun = True
            for request in batch:
                tx = self._tx = request.tx = Tx(db, durable=request.durable)
                request.result = request.op(tx)
            committing = True
            self._commit(db)
            self._mark_done(batch)
        except Exception as error:  # noqa: BLE001 - the callers get it
            self._abandon(db)
            if begun and len(batch) > 1:
                # One of them failed: it must not take the others with it.
                for request in batch:
                    self._run_together(db, [request])
            else:
                # Where not even the begin went well (the file was busy), each would only wait for as long again.
                for request in batch:
                    request.error = error
                    request.done = True
            return
        except BaseException:
            if committing and not db.in_transaction:
                self._committed += 1  # it may not have been counted yet
                self._mark_done(batch)
            raise
        self._checkpoint_if_due(db, sum(request.tx.pages for request in batch if request.tx is not None))

    def _mark_done(self, batch: list[_Request[Any]]) -> None:
        for request in batch:
            request.sequence = self._committed
            request.done = True

    def _begin(self, db: Connection) -> None:
        # IMMEDIATE, since a deferred transaction that reads and then writes can meet a newer snapshot, and SQLite
        # then fails it with SQLITE_BUSY at once, whatever the timeout.
        db.rows("begin immediate")

    def _commit(self, db: Connection) -> None:
        db.rows("commit")
        self._committed += 1
        self.transactions += 1

    def _abandon(self, db: Connection) -> None:
        """Roll back what is open. Some errors have done so by themselves (sqlite.org/lang_transaction.html)."""
        if db.in_transaction:
            try:
                db.rows("rollback")
            except StorageError:
                log.exception("a transaction could not be rolled back: its connection is opened anew")
                self._drop_connections()

    def _lock_writer(self) -> None:
        """Wait for this process's turn. The caller unlocks in any case: to release what is not held does nothing."""
        self._led = True
        if self._writer_lock is None:
            return
        try:
            mine = self._writer_lock.acquire(self._busy_timeout_ms)
        except OSError as error:
            raise self._sidecar_error(error) from error
        if not mine and not self._writer_lock.is_waiting:  # to a signal handler in it SQLite's own lock has to do
            msg = (
                f"{self.path}: no turn to write within {self._busy_timeout_ms / 1000:g} s: another process holds the"
                f" writer lock ({self._sidecar}/write.lock); look for a stopped one"
            )
            raise DatabaseBusyError(msg, path=self.path)

    def _sidecar_error(self, error: OSError) -> StorageError:
        """What it means that the folder of locks beside the file cannot be used."""
        if error.errno == errno.ENOSPC:
            return DatabaseFullError(f"{self._sidecar}: no space left: make room; nothing was lost", path=self.path)
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            msg = f"{self._sidecar}: the locks beside the file cannot be made ({error.strerror}): check the rights"
            return DatabaseReadOnlyError(msg, path=self.path)
        msg = f"{self._sidecar}: the locks beside the file cannot be used ({error.strerror})"
        return DatabaseUnavailableError(msg, path=self.path)

    # -- after a commit --

    def after(self, tx: Tx) -> None:
        """Wake who waits for what a transaction has done."""
        if tx.looked:
            self.looked.update(tx.looked)
        if tx.queues:
            for queue, jobs in tx.queues.items():
                self.wakeups.notify_queue(queue, jobs)
        if tx.topics:
            for topic in tx.topics:
                self.wakeups.notify(topic)

    def _follow_up(self, tx: Tx | None, sequence: int) -> None:
        """What each thread does for its own operation, when the lead is free again."""
        if tx is None:
            return
        self.after(tx)
        if tx.registered:
            self._registered = True
        if tx.durable:
            self._sync(sequence)
        if tx.lapsed:
            self._report(tx.lapsed)

    def _report(self, records: list[JobRecord]) -> None:
        for record in records:
            for callback in self.callbacks:
                try:
                    callback(record)
                except Exception:
                    log.exception("job %s: the callback for a job whose worker vanished failed", record.id)

    def _sync(self, sequence: int) -> None:
        """Wait until the commit of this number is on disk. One sync serves all who committed before it began."""
        if self.path is None or self._synced >= sequence:
            return
        with self._sync_lock:
            if self._synced >= sequence:
                return
            target = self._committed
            try:
                if self._doubtful is None:
                    _sync_file(self._wal_descriptor())
            except FileNotFoundError:
                pass  # the last connection was closed: that put it all into the file, and synced that
            except OSError as error:
                self._doubtful = error
            if self._doubtful is None:
                self._synced = target
                return
        self._write_back()

    def _write_back(self) -> None:
        """After the disk has refused a sync once: put the WAL into the database, and have that confirmed.

        Linux tells of a failed write once, and the next sync succeeds without it (fsync(2)). What came later would then
        stand in the WAL behind a hole, where recovery stops.
        """
        with self._lead:
            db = self._ready()
            target = self._committed
            failure: Exception | None = self._doubtful
            try:
                self._lock_writer()
                ((_busy, gathered, copied),) = db.rows("pragma wal_checkpoint(passive)")
                if gathered == copied:
                    self._doubtful = None
                    self._synced = max(self._synced, target)
                    return
            except StorageError as error:
                failure = error
            finally:
                if self._writer_lock is not None:
                    self._writer_lock.release()
        msg = f"{self.path}-wal: the disk did not confirm what was written ({failure}): it may be lost in a power cut"
        raise DatabaseUnavailableError(msg, path=self.path) from failure

    def _wal_descriptor(self) -> int:
        # The -wal is the one file of SQLite's that others may open: its locks lie elsewhere. SQLite removes it when the
        # last connection closes, and makes a new one.
        if self._wal is not None and os.fstat(self._wal).st_nlink == 0:
            self._drop_wal_descriptor()
        if self._wal is None:
            self._wal = os.open(f"{self.path}-wal", os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
            with contextlib.suppress(OSError):  # its name, too, has to be on disk; Windows cannot open a folder
                folder = os.open(os.path.dirname(os.path.abspath(str(self.path))), os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        return self._wal

    def _checkpoint_if_due(self, db: Connection, pages: int) -> None:
        """Copy the WAL back, once enough has gathered. It follows a commit, so nothing is raised.

        Always under the writer lock, so that it never meets a commit of ours: on SQLite before 3.51.3 that can
        corrupt the file (sqlite.org/wal.html#walresetbug).
        """
        self._dirty_pages += pages
        if self._dirty_pages < self._checkpoint_at or self.path is None or db.in_transaction:
            return
        self._dirty_pages = 0
        try:
            ((_busy, gathered, _copied),) = db.rows("pragma wal_checkpoint(passive)")
            # What operations say of their pages is a guess, too high by up to five times. A checkpoint syncs twice, so
            # it is put off until as many have really gathered; what other processes write counts, too.
            if gathered > 0:
                wanted = self._checkpoint_at * _CHECKPOINT_PAGES // gathered
                self._checkpoint_at = min(max(wanted, _FEWEST_PAGES), 8 * _CHECKPOINT_PAGES)
            self._steady.mark(db)
        except StorageError as error:
            self._dirty_pages = _CHECKPOINT_PAGES // 2
            log.warning("a checkpoint failed, and will be tried again: %s", error)

    # -- reading --

    def read(self, look: Callable[[Connection], R]) -> R:
        """Look at the file without waiting for writers. In this thread's own transaction: at what it has done."""
        tx = self.current
        if tx is not None:
            return look(tx.db)
        if self.path is None:
            return self.write(lambda tx: look(tx.db), single=True)
        self._prepare_reading()
        with self._read_lock:
            return look(self._reading())

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A read transaction: all that this thread reads in it is of one moment. Keep it short: it pins the WAL."""
        if self.path is None or self.current is not None:
            with self.transaction() as tx:
                yield tx.db
            return
        self._prepare_reading()
        with self._read_lock:
            db = self._reading()
            outermost = not db.in_transaction
            if outermost:
                db.rows("begin")
            try:
                yield db
            finally:
                if outermost and db.in_transaction:
                    db.rows("rollback")

    def _prepare_reading(self) -> None:
        """Opening and looking after the file are a writer's work, and done before the read lock is taken."""
        fork.give_way()
        if self._db is None or self._replaced():
            with self._lead:
                self._ready()

    def _replaced(self) -> bool:
        """Whether the file is not the one any more that was opened. Looks once a second."""
        now = time.monotonic()
        if now - self._looked_at <= _LOOK_S:
            return False
        if file_identity(str(self.path)) == self._identity:
            self._looked_at = now
            return False
        return True

    def _reading(self) -> Connection:
        if self._closed or self._spoiled:
            self._ready()  # says why
        if self._reader is None:
            self._reader = connect(str(self.path), self.driver, busy_timeout_ms=self._busy_timeout_ms)
        return self._reader

    # -- opening and closing --

    def open(self) -> None:
        """Open now what would be opened at the first operation."""
        self.write(lambda _tx: None, single=True)

    @property
    def is_open(self) -> bool:
        return self._db is not None

    def _ready(self) -> Connection:
        """The writing connection. The caller holds the lead, not the writer lock."""
        if self._closed:
            msg = f"{self.path or 'the database in memory'}: the storage was closed"
            raise StorageClosedError(msg, path=self.path)
        if self._spoiled and self.path is None:
            msg = "a database in memory cannot be carried through a fork: open one in the child"
            raise DatabaseUnavailableError(msg)
        if self._spoiled or (self._db is None and self.path in _spoiled_files):
            # Not through a new connection either: what SQLite was doing with the file when this process was copied
            # stands in its memory, and it takes the parent's locks for its own.
            msg = (
                f"{self.path}: this process was forked while a transaction was open, and cannot use the file any more:"
                " fork before the transaction, or after it"
            )
            raise DatabaseUnavailableError(msg, path=self.path)
        if self._db is None and crossing.is_lost(self.path):
            msg = (
                f"{self.path}: this process was forked while the file was being closed or replaced, or has closed"
                " descriptors that it did not open, and cannot use the file any more: start it again"
            )
            raise DatabaseUnavailableError(msg, path=self.path)
        if self._db is None:
            self._open()
        elif self._db.in_transaction and self._tx is None:
            self._abandon(self._db)  # an exception struck while its transaction was being ended
        elif self.path is not None and self._replaced():
            self._look_after_file()
        assert self._db is not None  # noqa: S101 - for the type checker
        return self._db

    def _open(self) -> None:
        if self.path is None:
            db = connect(":memory:", self.driver, busy_timeout_ms=self._busy_timeout_ms)
            schema.migrate(db, 0)
        else:
            if self._identity is None or file_identity(self.path) != self._identity:
                self._refuse_bad_places()
            self._refuse_deleted()
            self._refuse_another_driver()
            self._look_first()
            # Under the writer lock: to switch a new file to WAL ignores the busy timeout.
            try:
                self._lock_writer()
                db = connect(self.path, self.driver, busy_timeout_ms=self._busy_timeout_ms)
                try:
                    identity = file_identity(self.path)
                    # After a fork it is the file that was looked at before, and its tables are as they were.
                    is_known = self._checked is not None and self._checked == (identity, _schema_versions(db))
                    found = 0 if is_known else schema.check(db, self.path, shared=self.shared)
                    schema.use_wal(db, self.path, busy_timeout_ms=self._busy_timeout_ms)
                    if not is_known:
                        schema.migrate(db, found)
                        self._checked = (identity, _schema_versions(db))
                    if self._identity not in {None, identity}:
                        self._forget_file()
                    self._identity = identity
                except BaseException:
                    db.close()
                    raise
            finally:
                if self._writer_lock is not None:
                    self._writer_lock.release()
        self._db = db
        self._looked_at = time.monotonic()
        self._steady.find(db)
        self.wakeups.sweep()

    def _look_first(self) -> None:
        """Refuse a file that is not ours before even the folder for the locks is made beside it."""
        if os.path.exists(str(self._sidecar)) or not os.path.exists(str(self.path)):
            return
        db = connect(str(self.path), self.driver, busy_timeout_ms=self._busy_timeout_ms)
        try:
            schema.check(db, self.path, shared=self.shared)
        finally:
            db.close()

    def _refuse_bad_places(self) -> None:
        path = Path(str(self.path))
        if path.is_dir():
            msg = f"{path}: this is a folder: give the path of a file in it, such as {path / 'jobs.db'}"
            raise DatabaseUnavailableError(msg, path=self.path)
        if not path.parent.is_dir():
            msg = f"{path}: the folder {path.parent} does not exist: make it first"
            raise DatabaseUnavailableError(msg, path=self.path)
        if path.exists() and not os.access(path, os.W_OK):
            msg = f"{path}: it may not be written: check the rights on the file"
            raise DatabaseReadOnlyError(msg, path=self.path)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            msg = f"{path}: its folder may not be written, where SQLite and the locks need to: check its rights"
            raise DatabaseReadOnlyError(msg, path=self.path)
        kind = None if self._network else machine.network_file_system(path.parent)
        if kind is not None:
            msg = (
                f"{path}: it lies on a {kind} file system, where SQLite's locks and shared memory cannot be trusted and"
                " jobs would be lost: put it on a local disk, or insist with network=True (in a URL: ?network=1)"
            )
            raise DatabaseUnavailableError(msg, path=self.path)

    def _look_after_file(self) -> None:
        """Notice that the file was deleted or replaced under us."""
        self._refuse_deleted()
        log.warning("%s: the file was replaced while it was in use: the new one is opened", self.path)
        with self._read_lock:
            # SQLite sees that the file has moved away, and leaves the WAL that lies there now alone.
            self._drop_connections()
        self._open()

    def _refuse_another_driver(self) -> None:
        for other in list(_engines):
            if other.path == self.path and other.driver != self.driver and other.is_open and not drivers_share_sqlite():
                msg = (
                    f"{self.path}: this process has it open with driver={other.driver!r}: use that here, too;"
                    " two copies of SQLite in one process drop each other's locks"
                )
                raise DatabaseUnavailableError(msg, path=self.path)

    def _refuse_deleted(self) -> None:
        if self._identity is not None and file_identity(str(self.path)) is None:
            msg = (
                f"{self.path}: the file was deleted while it was in use: put it back, or restart to begin with a"
                " new one"
            )
            raise DatabaseUnavailableError(msg, path=self.path)

    def _forget_file(self) -> None:
        """Another file lies there than before."""
        self.queue_ids.clear()
        self.queue_names.clear()
        self.grouped.clear()
        self.quiet.clear()
        self.heard.clear()
        self.wary.clear()
        self.looked.clear()
        self._registered = False

    def _drop_connections(self) -> None:
        for name in ("_db", "_reader"):
            db: Connection | None = getattr(self, name)
            setattr(self, name, None)
            if db is not None:
                with contextlib.suppress(StorageError):
                    db.close()
        self._drop_wal_descriptor()

    def _drop_wal_descriptor(self) -> None:
        with self._sync_lock:
            descriptor, self._wal = self._wal, None
            if descriptor is not None:
                os.close(descriptor)

    def close(self, *, orderly: bool) -> None:
        """Let go of the file.

        Args:
            orderly: Nothing is claimed any more. Otherwise others are left to find a dead process, and what it held.
        """
        with self._lead:
            if self._closed:
                return
            self._closed = True
            with self._read_lock:
                self._drop_connections()
            if self._liveness is not None:
                if orderly:
                    self._liveness.drop()
                else:
                    self._liveness.forget()  # the lock is free, its file stays: others see a dead process
                self._liveness = None
            if self._writer_lock is not None:
                self._writer_lock.close()
            self.wakeups.close()
        _engines.discard(self)
        fork.unregister(self)

    # -- time, names and identities --

    def steady_ms(self) -> int:
        """The file's steady clock. Its anchor lies in the file, which is opened for it."""
        if not self._steady.is_known:
            self.open()
        return self._steady.now_ms()

    def use_anchor_in(self, db: Connection) -> None:
        """Go by the file's steady clock, read through another connection, while this engine is not open itself."""
        if self._db is None:
            self._steady.find(db)

    @property
    def process(self) -> int:
        """The number of this process among those that claim from the file."""
        return self.identities.process

    @property
    def registered(self) -> bool:
        return self._registered

    def register(self, db: Connection) -> None:
        """Make this process known as one that claims, and hold its liveness lock, before its first claim."""
        if self._registered:
            return
        label = machine.process_label()
        while True:
            self.hold_liveness()
            db.rows(
                sql.ADD_PROCESS,
                {"id": self.process, "boot": machine.boot_id(), "label": label, "now": self.clock.now_ms()},
            )
            if db.rows(sql.PROCESS_LABEL, {"id": self.process}) == [(label,)]:
                return
            # Another process drew the same number.
            if self._liveness is not None:
                self._liveness.forget()
                self._liveness = None
            self.identities.change_process()

    def hold_liveness(self) -> None:
        if self._sidecar is None:
            return
        try:
            if self._liveness is None:
                self._liveness = Liveness(self._sidecar, self.process)
            self._liveness.hold()
        except OSError as error:
            raise self._sidecar_error(error) from error

    @property
    def sidecar(self) -> Path | None:
        return self._sidecar

    @property
    def local(self) -> bool:
        """Whether locks on this machine tell of every process that can use the file."""
        return not self._network

    def check_due(self, interval_s: float) -> bool:
        """Whether it is time to look for dead processes; True once an interval."""
        now = time.monotonic()
        if now - self._checked_at < interval_s:
            return False
        self._checked_at = now
        return True

    def sweep_due(self) -> bool:
        """Whether it is time to delete values that have expired; True once a second."""
        now = time.monotonic()
        if now - self._swept_at < 1.0:
            return False
        self._swept_at = now
        return True

    # -- fork --

    def stay_open_at_fork(self) -> bool:
        """Leave the connections open at the next fork. The child has none of them, and may open the file itself.

        Returns:
            Whether it will, unless something changes until then.
        """
        self._stays_open = self._db is not None and not self._leading() and crossing.POSSIBLE
        return self._stays_open

    def locks_for_fork(self) -> tuple[threading.RLock, ...]:
        """What `before_fork` needs to hold: then no thread is inside SQLite. Called before they are taken."""
        self._fork_spoils = self._leading()
        return self._lead, self._read_lock, self._sync_lock

    def before_fork(self) -> None:
        """Close everything, but for what may cross."""
        inside = self._fork_spoils or (self._db is not None and (self._db.in_transaction or self.path is None))
        inside = inside or (self._reader is not None and self._reader.in_transaction)
        self._fork_spoils = inside
        asked, self._stays_open = self._stays_open, False
        self._crosses = asked and not inside and self._db is not None and crossing.stay_open(str(self.path))
        if not inside and not self._crosses:
            for db in (self._db, self._reader):
                if db is not None:
                    db.leave_wal()
            self._drop_connections()
        if not inside and self._writer_lock is not None:
            self._writer_lock.close()
        self.wakeups.before_fork()

    def after_fork_in_parent(self) -> None:
        self._sync_lock.release()
        self._read_lock.release()
        self._lead.release()

    def after_fork_in_child(self) -> None:
        spoiled = self._fork_spoils
        if spoiled or self._crosses:
            # They must be neither used nor closed here.
            fork.keep_for_ever(self._db, self._reader)
            self._drop_wal_descriptor()
        if self._crosses:
            crossing.keep(str(self.path), self._db, self._reader)
        if spoiled:
            if self.path is not None:
                _spoiled_files.add(self.path)
            if self._writer_lock is not None:
                self._writer_lock.forget()
        if self._liveness is not None:
            self._liveness.forget()
        identity = self._identity
        self._fresh()
        self._identity = identity
        self._spoiled = self._spoiled or spoiled
        self.wakeups.after_fork_in_child()


def in_savepoint(tx: Tx, op: Callable[[Tx], R]) -> R:
    """Run a part of a transaction so that, when it fails, the rest goes on as if it had not been there."""
    tx.db.rows("savepoint litebroker")
    try:
        result = op(tx)
    except BaseException:
        if tx.db.in_transaction:
            tx.db.rows("rollback to litebroker")
            tx.db.rows("release litebroker")
        tx.looked = None
        tx.registered = False
        raise
    tx.db.rows("release litebroker")
    return result


def _schema_versions(db: Connection) -> tuple[int, int]:
    """SQLite's own, which changes with each change of a table; and ours, which a migration of rows changes alone."""
    return int(db.rows("pragma schema_version")[0][0]), schema.version(db)


def _sync_file(descriptor: int) -> None:
    if _FULL_SYNC is not None:  # macOS: fsync leaves it in the drive's cache (fsync(2) there)
        fcntl.fcntl(descriptor, _FULL_SYNC)
    else:
        _sync_data(descriptor)


_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_spoiled_files: set[str] = set()
