"""A list that is no queue."""

from __future__ import annotations

from litebroker_rq.keyspace import Row, Session


class PlainList:
    """Values by position; positions have gaps, and may be negative."""

    def __init__(self, session: Session, key: bytes) -> None:
        self._session = session
        self._key = key

    def _row(self) -> Row | None:
        return self._session.find(self._key, "list")

    def __len__(self) -> int:
        row = self._row()
        if row is None:
            return 0
        ((count,),) = self._session.select("select count(*) from litebroker_rq_items where key_id = ?", row.id)
        return int(count)

    def push(self, values: list[bytes], *, front: bool) -> None:
        session = self._session
        edge, step = ("min", -1) if front else ("max", 1)
        position: int | None = None
        row = self._row()
        if row is None:
            row = session.need(self._key, "list")
        else:
            session.change(row)
            ((position,),) = session.select(
                f"select {edge}(position) from litebroker_rq_items where key_id = ?", row.id
            )
        position = -step if position is None else position
        for value in values:
            position += step
            session.write(
                "insert into litebroker_rq_items (key_id, position, value) values (?, ?, ?)", row.id, position, value
            )

    def pop(self, *, front: bool, to: bytes | None = None) -> bytes | None:
        del to
        session = self._session
        row = self._row()
        if row is None:
            return None
        session.must_write()
        edge = "min" if front else "max"
        ((value,),) = session.write(
            "delete from litebroker_rq_items where key_id = ? and position = ("
            f" select {edge}(position) from litebroker_rq_items where key_id = ?) returning value",
            row.id,
            row.id,
        )
        self._changed(row)
        return bytes(value)

    def slice(self, offset: int, limit: int) -> list[bytes]:
        row = self._row()
        if row is None:
            return []
        found = self._session.select(
            "select value from litebroker_rq_items where key_id = ? order by position limit +? offset +?",
            row.id,
            limit,
            offset,
        )
        return [value for (value,) in found]

    def remove(self, value: bytes, *, limit: int, from_end: bool) -> int:
        row = self._row()
        if row is None:
            return 0
        session = self._session
        order = "desc" if from_end else "asc"
        found = session.select(
            "select position from litebroker_rq_items where key_id = ? and value = ?"
            f" order by position {order} limit +?",
            row.id,
            value,
            limit,
        )
        for (position,) in found:
            session.write("delete from litebroker_rq_items where key_id = ? and position = ?", row.id, position)
        if found:
            self._changed(row)
        return len(found)

    def find(self, value: bytes, limit: int) -> list[int]:
        row = self._row()
        if row is None:
            return []
        everything = self._session.select(
            "select value from litebroker_rq_items where key_id = ? order by position", row.id
        )
        found = [index for index, (item,) in enumerate(everything) if item == value]
        return found if limit < 0 else found[:limit]

    def _changed(self, row: Row) -> None:
        self._session.change(row)
        if not self._session.select("select 1 from litebroker_rq_items where key_id = ? limit 1", row.id):
            self._session.delete(row, empty=True)
