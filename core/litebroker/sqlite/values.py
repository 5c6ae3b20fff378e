"""The verbs of `litebroker.storage.Values` on SQLite."""

from __future__ import annotations

from collections.abc import Sequence

from litebroker.jobs import Lease
from litebroker.sqlite import rows
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Connection, Row
from litebroker.sqlite.engine import Tx
from litebroker.sqlite.session import Session
from litebroker.storage import Value

_BITE = 500
_SWEPT_AT_ONCE = 200  # as the statements say
# Once a second: more than a process puts in that time, or more would come than go.
_MOST_SWEEPS = 20
_LOW, _HIGH = -(1 << 63), (1 << 63) - 1


class ValueVerbs(Session):
    """Data and numbers under keys."""

    def put(
        self,
        space: str,
        key: str,
        data: bytes = b"",
        *,
        ttl_ms: int | None = None,
        owner: Lease | None = None,
        if_absent: bool = False,
        number: int = 0,
    ) -> bool:
        _check_number(number)
        statement = sql.PUT_IF_ABSENT if if_absent else sql.PUT

        def op(tx: Tx) -> bool:
            steady = self._engine.steady_ms()
            if owner is not None:
                current = {"id": owner.job_id, "token": owner.token, "steady": steady}
                if not tx.db.rows(sql.IS_CURRENT, current):
                    return False
            params = {
                "space": space,
                "key": key,
                "number": number,
                "expires": None if ttl_ms is None else steady + ttl_ms,
                "owner_job": owner.job_id if owner is not None else None,
                "owner_token": owner.token if owner is not None else None,
                "data": data,
                "steady": steady,
            }
            tx.carries(len(data))
            return tx.db.change(statement, params) == 1

        stored = self._write(op, lasting=False, single=owner is None)
        if ttl_ms is not None or owner is not None:
            self._sweep()
        return stored

    def peek(self, space: str, keys: Sequence[str]) -> dict[str, Value]:
        steady = self._engine.steady_ms()

        def look(db: Connection) -> dict[str, Value]:
            found = [
                row
                for statement, params in _for_keys(sql.PEEK_ONE, sql.PEEK, keys)
                for row in db.rows(statement, {"space": space, "steady": steady, **params})
            ]
            return {row[0]: _value(row, steady) for row in found}

        return self._read(look)

    def pop(self, space: str, key: str) -> Value | None:
        if not self.peek(space, [key]):
            return None

        def op(tx: Tx) -> Value | None:
            steady = self._engine.steady_ms()
            for row in tx.db.rows(sql.POP, {"space": space, "key": key, "steady": steady}):
                return _value(row, steady)
            return None

        return self._write(op, lasting=False, single=True)

    def delete(self, space: str, keys: Sequence[str]) -> int:
        if not self.peek(space, keys):
            return 0
        deletions = _for_keys(sql.DELETE_VALUE, sql.DELETE_VALUES, keys)

        def op(tx: Tx) -> int:
            steady = self._engine.steady_ms()
            return sum(
                len(tx.db.rows(statement, {"space": space, "steady": steady, **params}))
                for statement, params in deletions
            )

        return self._write(op, lasting=False, single=len(deletions) == 1)

    def increment(
        self,
        space: str,
        key: str,
        amount: int = 1,
        *,
        low: int | None = None,
        high: int | None = None,
        ttl_ms: int | None = None,
    ) -> int | None:
        _check_number(amount)

        def op(tx: Tx) -> int | None:
            steady = self._engine.steady_ms()
            params: dict[str, object] = {
                "space": space,
                "key": key,
                "amount": amount,
                "low": _LOW if low is None else max(low, _LOW),
                "high": _HIGH if high is None else min(high, _HIGH),
                "ttl": ttl_ms,
                "expires": None if ttl_ms is None else steady + ttl_ms,
                "steady": steady,
            }
            found = tx.db.rows(sql.INCREMENT, params)
            if found:
                return int(found[0][0])
            if tx.db.rows(sql.PEEK_ONE, {"space": space, "key": key, "steady": steady}):
                return None
            if (low is not None and amount < low) or (high is not None and amount > high):
                return None
            new = {**params, "number": amount, "owner_job": None, "owner_token": None, "data": b""}
            tx.db.rows(sql.PUT, new)
            return amount

        number = self._write(op, lasting=False)
        if ttl_ms is not None:
            self._sweep()
        return number

    def scan(self, space: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, Value]]:
        steady = self._engine.steady_ms()
        params = {"space": space, "after": after, "limit": limit, "steady": steady}
        return [(row[0], _value(row, steady)) for row in self._read(lambda db: db.rows(sql.SCAN, params))]

    def size(self, space: str) -> int:
        params = {"space": space, "steady": self._engine.steady_ms()}
        return int(self._read(lambda db: db.rows(sql.SIZE, params))[0][0])

    def clear(self, space: str) -> int:
        def bite(tx: Tx) -> tuple[int, int]:
            gone = tx.db.rows(sql.CLEAR, {"space": space, "steady": self._engine.steady_ms()})
            return len(gone), sum(visible for (visible,) in gone)

        living = 0
        while True:
            count, visible = self._write(bite, lasting=False, single=True)
            living += visible
            if count < _BITE:
                return living

    def sweep(self) -> int:
        params = {"steady": self._engine.steady_ms()}
        gone = 0
        # The look takes no write lock: most of the time there is nothing.
        for look, statement in ((sql.SWEEPABLE, sql.SWEEP_EXPIRED), (sql.ORPHANED, sql.SWEEP_ORPHANED)):
            if self._read(lambda db, s=look: db.rows(s, params)):  # type: ignore[misc]
                gone += self._write(lambda tx, s=statement: _bite(tx, s, params), lasting=False, single=True)  # type: ignore[misc]
        return gone

    def _sweep(self) -> None:
        """Delete some of what has expired, and of what its owner left, now and then."""
        if self._in_transaction() or not self._engine.sweep_due():
            return
        for _ in range(_MOST_SWEEPS):
            if self.sweep() < _SWEPT_AT_ONCE:
                return


def _bite(tx: Tx, statement: str, params: dict[str, int]) -> int:
    gone = tx.db.change(statement, params)
    tx.pages += gone
    return gone


def _for_keys(one: str, many: str, keys: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """The statement for all of the keys together; or, where JSON would cut one at a NUL, one for each."""
    if len(keys) > 1 and not any("\0" in key for key in keys):
        return [(many, {"keys": rows.texts(keys)})]
    return [(one, {"key": key}) for key in dict.fromkeys(keys)]


def _value(row: Row, steady: int) -> Value:
    _key, data, number, expires = row
    return Value(data, number, None if expires is None else expires - steady)


def _check_number(number: int) -> None:
    if not _LOW <= number <= _HIGH:
        msg = f"{number} does not fit a signed 64-bit integer"
        raise ValueError(msg)
