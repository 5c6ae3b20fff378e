"""What the verbs run on: the engine's own connection, or the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from litebroker.jobs import JobRecord
from litebroker.sqlite import rows
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Connection, Row
from litebroker.sqlite.engine import Engine, Tx, in_savepoint
from litebroker.sqlite.location import Durability
from litebroker.sqlite.recovery import queue_name, steady_to_wall_ms

R = TypeVar("R")


class Session:
    """Runs operations on the engine's connection, each in a transaction of its own or in the thread's.

    Args:
        durability: Which operations wait for the disk: none ("relaxed"), those that cannot be done again
            ("durable"), or all ("full").
    """

    def __init__(self, engine: Engine, durability: Durability) -> None:
        self._engine = engine
        self._durability: Durability = durability

    def _write(self, op: Callable[[Tx], R], *, lasting: bool = True, single: bool = False) -> R:
        """Run an operation.

        Args:
            lasting: Whether its loss in a power cut would be a loss: False for what is only done again.
            single: As in `Engine.write`.
        """
        durable = self._durability == "full" or (lasting and self._durability == "durable")
        return self._engine.write(op, durable=durable, single=single)

    def _read(self, look: Callable[[Connection], R]) -> R:
        return self._engine.read(look)

    def _in_transaction(self) -> bool:
        return self._engine.current is not None

    # -- what all verbs need --

    def _queue(self, name: str) -> int | None:
        """The queue's id; None when it is not known yet."""
        found = self._engine.queue_ids.get(name)
        if found is None:
            rows_ = self._read(lambda db: db.rows(sql.QUEUE_BY_NAME, {"name": name}))
            if not rows_:
                return None
            found = int(rows_[0][0])
            self._remember(name, found)
        return found

    def _made_queue(self, name: str) -> int:
        """The queue's id; made when it is not known yet.

        In a commit of its own, so that the id can be remembered, unless a transaction is open, which may roll it back.
        """
        found = self._queue(name)
        if found is None:

            def make(tx: Tx) -> int:
                tx.db.rows(sql.ADD_QUEUE, {"name": name})
                return int(tx.db.rows(sql.QUEUE_BY_NAME, {"name": name})[0][0])

            found = self._write(make, lasting=False)
            self._remember(name, found)
        return found

    def _remember(self, name: str, queue_id: int) -> None:
        if not self._in_transaction():
            self._engine.queue_ids[name] = queue_id
            self._engine.queue_names[queue_id] = name

    def _name(self, db: Connection, queue_id: int) -> str:
        return queue_name(self._engine, db, queue_id)

    def _records(self, db: Connection, found: list[Row], queue: str | None = None) -> list[JobRecord]:
        shift = steady_to_wall_ms(self._engine)
        return [rows.record(row, queue or self._name(db, row[1]), steady_to_wall_ms=shift) for row in found]


class BoundSession(Session):
    """Runs operations on the caller's connection: they are the caller's statements."""

    def __init__(self, engine: Engine, durability: Durability, connection: Connection) -> None:
        super().__init__(engine, durability)
        self._connection = connection

    def _write(self, op: Callable[[Tx], R], *, lasting: bool = True, single: bool = False) -> R:  # noqa: ARG002
        tx = Tx(self._connection)
        self._connection.begin_implicitly()
        result = op(tx) if single else in_savepoint(tx, op)
        # The commit is the caller's, and cannot be seen from here: who wakes too early looks again soon.
        tx.durable = False
        self._engine.after(tx)
        return result

    def _read(self, look: Callable[[Connection], R]) -> R:
        return look(self._connection)

    def _in_transaction(self) -> bool:
        return True
