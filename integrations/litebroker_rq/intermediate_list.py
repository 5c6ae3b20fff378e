"""The list that a queue's jobs go to until they have started.

A claim says which list its job was moved to (leases.py), so that nothing more is written for it: as long as it is open,
its job stands in the list. What was pushed there otherwise is stored as in any list, and comes behind.
"""

from __future__ import annotations

from litebroker_rq.keyspace import Session
from litebroker_rq.plain_list import PlainList


class IntermediateList:
    """``<prefix>:queue:<name>:intermediate``."""

    def __init__(self, session: Session, key: bytes) -> None:
        self._session = session
        self._key = key
        self._rest = PlainList(session, key)

    def _claimed(self) -> list[bytes]:
        found = self._session.select(
            "select ref from litebroker_rq_claims where intermediate = ? order by job_id", self._key
        )
        return [ref for (ref,) in found]

    def __len__(self) -> int:
        return len(self._claimed()) + len(self._rest)

    def push(self, values: list[bytes], *, front: bool) -> None:
        self._rest.push(values, front=front)

    def pop(self, *, front: bool, to: bytes | None = None) -> bytes | None:
        claimed = self._claimed()
        if not claimed or (not front and len(self._rest)):
            return self._rest.pop(front=front, to=to)
        value = claimed[0 if front else -1]
        self._leave(value)
        return value

    def slice(self, offset: int, limit: int) -> list[bytes]:
        everything = [*self._claimed(), *self._rest.slice(0, -1)]
        return everything[offset:] if limit < 0 else everything[offset : offset + limit]

    def remove(self, value: bytes, *, limit: int, from_end: bool) -> int:
        removed = self._rest.remove(value, limit=limit, from_end=from_end) if from_end else 0
        if removed != limit and value in self._claimed():
            self._leave(value)
            removed += 1
        if removed != limit and not from_end:
            removed += self._rest.remove(value, limit=limit - removed if limit > 0 else limit, from_end=False)
        return removed

    def find(self, value: bytes, limit: int) -> list[int]:
        found = [index for index, item in enumerate(self.slice(0, -1)) if item == value]
        return found if limit < 0 else found[:limit]

    def clear(self) -> None:
        """The claims remain, of jobs that stand in no list then."""
        if self._claimed():
            self._session.write("update litebroker_rq_claims set intermediate = null where intermediate = ?", self._key)

    def _leave(self, value: bytes) -> None:
        self._session.write(
            "update litebroker_rq_claims set intermediate = null where intermediate = ? and ref = ?", self._key, value
        )
