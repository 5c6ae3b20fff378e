"""The verbs of `litebroker.storage.Tools` that tell where jobs stand, and what has come and gone. They only read."""

from __future__ import annotations

from collections import Counter

from litebroker.jobs import LARGEST_ID, Arrivals, Standing, State
from litebroker.sqlite import identities, rows
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Connection
from litebroker.sqlite.session import Session


class StandingVerbs(Session):
    """What `why` and watchers ask for."""

    def standing(self, job_id: int) -> Standing | None:
        now = self._engine.clock.now_ms()

        def look(db: Connection) -> Standing | None:
            place = db.rows(sql.PLACE, {"id": job_id})
            if not place or place[0][1] not in {rows.READY, rows.DELAYED}:
                return None
            queue, state, group, priority, due = place[0]
            params = {"queue": queue, "grp": group, "priority": priority, "due": due, "id": job_id, "now": now}
            ahead = None
            if state == rows.READY or due <= now:
                before = sql.BEFORE_IN_LINE if group is None else sql.BEFORE_IN_GROUP
                # What has become due while nobody claimed stands among the delayed still.
                ahead = int(db.rows(before, params)[0][0]) + int(db.rows(sql.BEFORE_IN_DELAYED, params)[0][0])
            if group is None:
                return Standing(ahead)
            concurrency, active = db.rows(sql.GROUP_PLACES, params)[0]
            holders = tuple(job for (job,) in db.rows(sql.ACTIVE_OF_GROUP, params)) if active else ()
            return Standing(ahead, int(concurrency), int(active), holders)

        return self._read(look) if 0 <= job_id <= LARGEST_ID else None

    def issued_at_ms(self, job_id: int) -> int | None:
        return identities.issued_at_ms(job_id) if identities.SMALLEST_ID <= job_id <= LARGEST_ID else None

    def arrivals(self, after: int | None, *, limit: int = 1000) -> Arrivals:
        def look(db: Connection) -> Arrivals:
            if after is None:
                return Arrivals(db.rows(sql.LATEST)[0][0] or 0, {})
            found = db.rows(sql.ARRIVALS, {"after": after, "limit": limit})
            counts = Counter(queue for _id, queue in found)
            return Arrivals(found[-1][0] if found else after, {self._name(db, q): n for q, n in counts.items()})

        return self._read(look)

    def ended_since(self, queue: str, state: State, since_ms: int) -> int:
        params = {"queue": self._queue(queue), "since": since_ms}
        return int(self._read(lambda db: db.rows(sql.ENDED_SINCE[rows.ENDED[state]], params))[0][0])
