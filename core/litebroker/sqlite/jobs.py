"""The verbs of `litebroker.storage.Jobs` on SQLite."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter

from litebroker.errors import GroupConflictError
from litebroker.jobs import Added, Counts, Holder, JobError, JobRecord, JobSpec, Keep, Lease, QueueInfo, State
from litebroker.sqlite import recovery, rows
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Connection, Row, UniqueError
from litebroker.sqlite.engine import Tx
from litebroker.sqlite.identities import ID_STEP
from litebroker.sqlite.session import Session

_FOREVER = (1 << 63) - 1
_BITE = 500

# What a new job has: anything; no dedupe key, group, headers, or time of its own; or not even a name.
_ANY, _PLAIN, _BARE = range(3)
_INSERTS = {_PLAIN: (sql.INSERT_PLAIN, sql.INSERT_TEN_PLAIN), _BARE: (sql.INSERT_BARE, sql.INSERT_TEN_BARE)}
# A shorter payload is bound as a bytearray: for bytes Python's driver looks for an adapter, which takes longer than the
# copy.
_COPIED = 4096

_QUEUE_OF, _PAYLOAD_OF = attrgetter("queue"), attrgetter("payload")
# In half the time that Added(...) takes.
_ADDED: Callable[[tuple[int, bool]], Added] = functools.partial(tuple.__new__, Added)


class JobVerbs(Session):
    """Jobs in queues."""

    # -- adding --

    def add(self, specs: Sequence[JobSpec]) -> list[Added]:
        if not specs:
            return []
        if len(specs) == 1 and (shape := _shape(specs[0])):
            return [self._add_one(specs[0], shape)]
        jobs = Counter(map(_QUEUE_OF, specs))
        queues = {name: self._made_queue(name) for name in jobs}
        payload = sum(map(len, map(_PAYLOAD_OF, specs)))
        shape = min(map(_shape, specs))
        free = shape or all(spec.dedupe_key is None and spec.group is None and not spec.front for spec in specs)
        now = self._engine.clock.now_ms()

        def op(tx: Tx) -> list[Added]:
            ids = range(first := self._engine.identities.first_id(len(specs)), first + len(specs) * ID_STEP, ID_STEP)
            if free:
                added = _insert_free(tx, specs, queues, ids, now, shape=shape)
            else:
                added = [
                    self._insert(tx, spec, queues[spec.queue], job_id, now)
                    for job_id, spec in zip(ids, specs, strict=True)
                ]
            for queue, count in jobs.items():
                tx.wake(queue, count)
            tx.pages += len(specs) // 2
            tx.carries(payload)
            return added

        while True:
            try:
                return self._write(op, single=bool(free) and len(specs) == 1)
            except UniqueError:
                # Another process drew the same id in the same microsecond.
                self._engine.identities.change_lane()

    def _add_one(self, spec: JobSpec, shape: int) -> Added:
        """Add one plain job: what most are."""
        engine = self._engine
        name, payload, encoding, priority, *_, max_attempts, _headers, ref, task, _front = spec
        queue = engine.queue_ids.get(name) or self._made_queue(name)
        now = engine.clock.now_ms()
        statement, _ten = _INSERTS[shape]
        data = bytearray(payload) if len(payload) < _COPIED else payload
        values: tuple[object, ...] = (queue, priority, now, max_attempts or 0, now, now, now, now, data)
        if shape == _PLAIN:
            values += (ref, task, encoding)

        def op(tx: Tx) -> Added:
            job_id = engine.identities.first_id(1)
            tx.db.change(statement, (job_id, *values))
            tx.wake(name, 1)
            tx.carries(len(payload))
            return Added(job_id, True)

        while True:
            try:
                return self._write(op, single=True)
            except UniqueError:
                engine.identities.change_lane()

    def _insert(self, tx: Tx, spec: JobSpec, queue: int, job_id: int, now: int) -> Added:
        group = None
        if spec.group is not None:
            group = self._group(tx, queue, spec.group, spec.group_concurrency, conflict=True)
        values = _values(spec, queue, job_id, now, group=group)
        if spec.front and values[2] == rows.READY:
            self._take_back(tx, spec.queue, queue, now=self._engine.clock.now_ms(), steady=self._engine.steady_ms())
            ahead = (
                tx.db.rows(sql.FIRST_UNGROUPED, {"queue": queue})
                if group is None
                else tx.db.rows(sql.FIRST_OF_GROUP, {"grp": group})
            )
            for priority, due_at_ms in ahead:
                values = (
                    *values[:3],
                    max(priority, spec.priority),
                    min(due_at_ms - 1, now) if priority >= spec.priority else values[4],
                    *values[5:],
                )
        if spec.dedupe_key is None:
            tx.db.rows(sql.INSERT, values)
            return Added(job_id, True)
        while not tx.db.rows(sql.INSERT_UNLESS_HELD, values):
            held = tx.db.rows(sql.HOLDER_OF_KEY, {"queue": queue, "dedupe_key": spec.dedupe_key})
            if held:
                return Added(held[0][0], False)
        return Added(job_id, True)

    def _group(self, tx: Tx, queue: int, name: str, concurrency: int, *, conflict: bool) -> int:
        """The group's id in the queue, made when it is new."""
        found = tx.db.rows(sql.GROUP_BY_NAME, {"queue": queue, "name": name})
        if found:
            group, has = found[0]
            if conflict and has != concurrency:
                raise GroupConflictError(name, asked=concurrency, concurrency=has)
        else:
            if not tx.db.rows(sql.ANY_GROUP):
                for trigger in sql.GROUP_TRIGGERS:
                    tx.db.rows(trigger)
            group = tx.db.rows(sql.ADD_GROUP, {"queue": queue, "name": name, "concurrency": concurrency})[0][0]
        self._engine.grouped.add(queue)
        return int(group)

    # -- claiming --

    def claim(self, queues: Sequence[str], *, limit: int, lease_ms: int) -> list[JobRecord]:
        joined = self._in_transaction()
        if not joined:
            recovery.recover_dead(self._engine)
        wanted = [
            (name, queue)
            for name in queues
            if (queue := self._queue(name)) is not None and (joined or self._may_have_jobs(name, queue))
        ]
        if limit < 1 or not wanted:
            return []
        if not self._engine.registered:
            self._register()
        claimed, rest = self._claim_of(wanted, limit, lease_ms)
        while rest:
            # Another process has made the first groups of this queue.
            self._engine.grouped.add(rest[0][1])
            found, rest = self._claim_of(rest, limit - len(claimed), lease_ms, alone=not claimed)
            claimed += found
        self._pass_on(wanted, claimed, limit, joined=joined)
        return claimed

    def _claim_of(
        self, wanted: list[tuple[str, int]], limit: int, lease_ms: int, *, alone: bool = True
    ) -> tuple[list[JobRecord], list[tuple[str, int]]]:
        """Claim from these queues up to one that was taken to be without groups, and is not: that and all behind it.

        Args:
            alone: Nothing has been claimed before: a job that has lapsed may be the first, and then the only one.
        """
        engine, grouped = self._engine, self._engine.grouped
        single = not grouped or not any(queue in grouped for _name, queue in wanted)

        def op(tx: Tx) -> tuple[list[JobRecord], list[tuple[str, int]]]:
            got: list[JobRecord] = []
            now, steady = engine.clock.now_ms(), engine.steady_ms()
            for position, (name, queue) in enumerate(wanted):
                rest = limit - len(got)
                if rest <= 0:
                    break
                looked = self._take_back(tx, name, queue, now=now, steady=steady)
                if single and queue in grouped:
                    return got, wanted[position:]  # Turns take a transaction.
                claim = self._claim_in_turns if queue in grouped else self._claim_in_line
                found, met_lapsed = claim(
                    tx, name, queue, rest, lease_ms, now=now, steady=steady, alone=alone and not got
                )
                got += found
                if met_lapsed:
                    tx.wake(name, 1)  # There may be more, for another claim.
                    break
                if looked or queue in grouped or len(found) == rest:
                    continue  # That there are no groups is known, or does not matter.
                if tx.db.rows(sql.HAS_GROUPS, {"queue": queue}):
                    return got, wanted[position:]
            return got, []

        return self._write(op, lasting=False, single=single)

    def _pass_on(self, wanted: list[tuple[str, int]], claimed: list[JobRecord], limit: int, *, joined: bool) -> None:
        """Remember which queues are empty; and when one is not any more, wake the next to come."""
        quiet = self._engine.quiet
        if not claimed:
            quiet.update(queue for _name, queue in wanted)
        elif quiet and not quiet.isdisjoint(looked_at := {queue for _name, queue in wanted}):
            quiet -= looked_at
            if len(claimed) == limit and not joined:
                # There may be more than one worker can take, and one was woken.
                self._engine.wakeups.notify_queue(claimed[-1].queue, 1)

    def _may_have_jobs(self, name: str, queue: int) -> bool:
        """A queue that was empty is looked at again without the writer lock, unless it was heard of since."""
        if queue not in self._engine.quiet:
            return True
        if name in self._engine.heard:
            self._engine.heard.discard(name)
            return True
        found = self._read(lambda db: db.rows(sql.WAITING, {"queue": queue}))
        if not found:
            return False
        ready, due, lease_end, _paused = found[0]
        now, steady = self._engine.clock.now_ms(), self._engine.steady_ms()
        return bool(ready) or (due is not None and due <= now) or (lease_end is not None and lease_end <= steady)

    def _register(self) -> None:
        engine = self._engine

        def op(tx: Tx) -> None:
            engine.register(tx.db)
            tx.registered = True  # Once it is committed: a transaction that this joins may yet be rolled back.

        self._write(op, lasting=False, single=True)

    def _take_back(self, tx: Tx, name: str, queue: int, *, now: int, steady: int) -> bool:
        """Recover what has lapsed, promote what is due, and learn of groups. False: it has been in this millisecond."""
        engine = self._engine
        if engine.looked.get(queue) == (now, steady):
            return False
        (due, lease_end, has_groups) = tx.db.rows(sql.NEXT_EVENTS, {"queue": queue})[0]
        if has_groups:
            engine.grouped.add(queue)  # Another process may have made them.
        if lease_end is not None and lease_end <= steady:
            recovery.recover_ended(engine, tx, name, queue, now=now, steady=steady)
        if due is not None and due <= now:
            _promote(tx, queue, now)
        if tx.looked is None:
            tx.looked = {}
        tx.looked[queue] = (now, steady)
        return True

    def _claim_in_line(
        self, tx: Tx, name: str, queue: int, limit: int, lease_ms: int, *, now: int, steady: int, alone: bool
    ) -> tuple[list[JobRecord], bool]:
        """Claim in a queue without groups: one statement. True, when it came to a job that has lapsed."""
        wary = self._engine.wary
        # Where one had lapsed, the next may have, too, and all others would only be given back.
        most = 1 if name in wary else limit
        token = self._engine.identities.token()
        params = {"queue": queue, "token": token, "until": steady + lease_ms, "now": now}
        if most == 1:
            found = tx.db.rows(sql.CLAIM_ONE, params)
        else:
            found = tx.db.rows(sql.CLAIM_MANY, {**params, "limit": most})
            tx.pages += len(found) >> 1
            # RETURNING promises no order (sqlite.org/lang_returning.html).
            found.sort(key=lambda row: (-row[3], row[4], row[0]))
        records = [rows.record(row, name, steady_to_wall_ms=now - steady) for row in found]
        lapsed = [number for number, record in enumerate(records) if record.history and record.has_lapsed]
        if not lapsed:
            if most < limit and records:
                wary.discard(name)
                more, met_lapsed = self._claim_in_line(
                    tx, name, queue, limit - 1, lease_ms, now=now, steady=steady, alone=False
                )
                return records + more, met_lapsed
            return records, False
        wary.add(name)
        kept = 1 if alone and lapsed[0] == 0 else lapsed[0]
        rest = [record.id for record in records[kept:]]
        if rest:
            tx.db.rows(sql.RELEASE, {"token": token, "ids": rows.ids(rest), "steady": steady})
        return records[:kept], True

    def _claim_in_turns(
        self, tx: Tx, name: str, queue: int, limit: int, lease_ms: int, *, now: int, steady: int, alone: bool
    ) -> tuple[list[JobRecord], bool]:
        """Claim in a queue with groups: streams that have jobs and are below their concurrency take turns.

        True, when it came to a job that has lapsed.
        """
        db = tx.db
        paused, turn, ungrouped_turn = db.rows(sql.QUEUE_TURNS, {"queue": queue})[0]
        if paused is not None:
            return [], False
        found: list[Row] = []
        has_lapsed = 0
        while len(found) < limit and not has_lapsed:
            group = db.rows(sql.NEXT_STREAM, {"queue": queue})
            head = db.rows(sql.HEAD_OF_UNGROUPED, {"queue": queue})
            if not group and not head:
                break
            of_group = not head or (group and group[0][1] < ungrouped_turn)
            if of_group:
                head = db.rows(sql.HEAD_OF_GROUP, {"grp": group[0][0]})
            ((job_id, has_lapsed),) = head
            if has_lapsed and (found or not alone):
                break
            turn += 1
            if of_group:
                db.rows(sql.SET_GROUP_TURN, {"grp": group[0][0], "turn": turn})
            else:
                ungrouped_turn = turn
            lease = {"token": self._engine.identities.token(), "until": steady + lease_ms, "now": now}
            found += db.rows(sql.CLAIM_BY_ID, {"id": job_id, **lease})
        if found:
            db.rows(sql.SET_QUEUE_TURNS, {"queue": queue, "turn": turn, "ungrouped_turn": ungrouped_turn})
            tx.pages += len(found)
        return [rows.record(row, name, steady_to_wall_ms=now - steady) for row in found], bool(has_lapsed)

    # -- settling --

    def extend(self, leases: Sequence[Lease], lease_ms: int) -> list[bool]:
        until = self._engine.steady_ms() + lease_ms

        def op(tx: Tx) -> list[bool]:
            kept: set[tuple[int, int]] = set()
            for token, job_ids in _by_token(leases).items():
                params = {
                    "token": token,
                    "ids": rows.ids(job_ids),
                    "until": until,
                    "now": self._engine.clock.now_ms(),
                    "steady": self._engine.steady_ms(),
                }
                kept.update((job_id, token) for (job_id,) in tx.db.rows(sql.EXTEND, params))
            return [lease in kept for lease in leases]

        return self._write(op, lasting=False, single=_one_token(leases)) if leases else []

    def complete(self, leases: Sequence[Lease], *, keep: bool = False) -> list[bool]:
        engine = self._engine
        if not leases:
            return []
        if len(leases) == 1 and not keep and not engine.grouped:
            (lease,) = leases
            params = {"id": lease.job_id, "token": lease.token}

            def one(tx: Tx) -> list[bool]:
                return [tx.db.change(sql.COMPLETE_ONE, {**params, "steady": engine.steady_ms()}) == 1]

            return self._write(one, lasting=False, single=True)
        return self._settle(leases, sql.KEEP_COMPLETED if keep else sql.COMPLETE_MANY)

    def _settle(self, leases: Sequence[Lease], statement: str, *, wake: bool = False, **more: int) -> list[bool]:
        """End many leases by one statement for each token."""
        engine = self._engine

        def op(tx: Tx) -> list[bool]:
            now, steady = engine.clock.now_ms(), engine.steady_ms()
            settled: set[tuple[int, int]] = set()
            for token, job_ids in _by_token(leases).items():
                params = {"token": token, "ids": rows.ids(job_ids), "now": now, "steady": steady, **more}
                for job_id, queue, *group in tx.db.rows(statement, params):
                    settled.add((job_id, token))
                    if wake or group[0] is not None:  # a group's place has become free
                        tx.wake(self._name(tx.db, queue), 1)
            tx.pages += len(leases) >> 1
            return _once_each(leases, settled)

        return self._write(op, lasting=False, single=_one_token(leases))

    def fail(self, lease: Lease, error: JobError, *, retry_in_ms: int | None) -> State | None:
        engine = self._engine
        text, line = rows.error_text(error), rows.error_line(error)

        def op(tx: Tx) -> State | None:
            params = {
                "id": lease.job_id,
                "token": lease.token,
                "retry": retry_in_ms,
                "now": engine.clock.now_ms(),
                "steady": engine.steady_ms(),
                "error": text,
                "message": line,
            }
            found = tx.db.rows(sql.FAIL, params)
            if not found:
                return None
            state, queue = found[0]
            if state != rows.FAILED or engine.grouped:
                tx.wake(self._name(tx.db, queue), 1)
            return rows.STATES[state]

        return self._write(op, lasting=False, single=True)

    def release(self, leases: Sequence[Lease], *, delay_ms: int | None = None) -> list[bool]:
        if not leases:
            return []
        if delay_ms:
            due = self._engine.clock.now_ms() + delay_ms
            return self._settle(leases, sql.RELEASE_LATER, wake=True, due=due)
        return self._settle(leases, sql.RELEASE, wake=True)

    def recover(self, queues: Sequence[str] | None = None) -> list[JobRecord]:
        if not self._in_transaction():
            recovery.recover_dead(self._engine)
        names = [info.name for info in self.queues()] if queues is None else list(queues)
        known = [(name, queue) for name in names if (queue := self._queue(name)) is not None]
        engine = self._engine

        def op(tx: Tx) -> list[JobRecord]:
            now, steady = engine.clock.now_ms(), engine.steady_ms()
            return [
                record
                for name, queue in known
                for record in recovery.recover_ended(engine, tx, name, queue, now=now, steady=steady)
            ]

        return self._write(op, lasting=False) if known else []

    # -- looking --

    def get(self, job_id: int) -> JobRecord | None:
        def look(db: Connection) -> JobRecord | None:
            found = self._records(db, db.rows(sql.GET, {"id": job_id}))
            return found[0] if found else None

        return self._read(look) if -_FOREVER <= job_id <= _FOREVER else None

    def states(self, job_ids: Sequence[int]) -> dict[int, State]:
        found = self._read(lambda db: db.rows(sql.STATES, {"ids": rows.ids(job_ids)})) if job_ids else []
        return {job_id: rows.STATES[state] for job_id, state in found}

    def find(self, queue: str, *, ref: str | None = None, dedupe_key: str | None = None) -> list[JobRecord]:
        if (ref is None) == (dedupe_key is None):
            msg = f"find needs a ref or a dedupe_key, and not both: ref={ref!r}, dedupe_key={dedupe_key!r}"
            raise ValueError(msg)
        queue_id = self._queue(queue)
        if queue_id is None:
            return []

        def look(db: Connection) -> list[JobRecord]:
            if ref is not None:
                return self._records(db, db.rows(sql.FIND_BY_REF, {"queue": queue_id, "ref": ref}), queue)
            held = db.rows(sql.HOLDER_OF_KEY, {"queue": queue_id, "dedupe_key": dedupe_key})
            return self._records(db, [row for (job_id,) in held for row in db.rows(sql.GET, {"id": job_id})], queue)

        return self._read(look)

    def page(
        self,
        queue: str,
        state: State,
        *,
        limit: int = 100,
        after: JobRecord | None = None,
        offset: int = 0,
        due_by_ms: int | None = None,
        payloads: bool = True,
    ) -> list[JobRecord]:
        queue_id = self._queue(queue)
        if queue_id is None or limit < 1:
            return []
        if state is State.PENDING:
            self._promote_for_reading(queue_id)
        now = self._engine.clock.now_ms()

        def look(db: Connection) -> list[JobRecord]:
            due_by = _FOREVER if due_by_ms is None else due_by_ms
            pager = _Pager(db, queue_id, limit, offset, due_by, now=now, payloads=payloads)
            if state is State.PENDING:
                found = pager.pending(after)
            elif state is State.ACTIVE:
                found = pager.active(after, recovery.steady_to_wall_ms(self._engine))
            else:
                found = pager.ended(rows.ENDED[state], after)
            return self._records(db, found, queue)

        return self._read(look)

    def rank(self, job_id: int) -> int | None:
        place = self._read(lambda db: db.rows(sql.PLACE, {"id": job_id}))
        if not place or place[0][1] not in {rows.READY, rows.DELAYED}:
            return None
        self._promote_for_reading(place[0][0])

        def look(db: Connection) -> int | None:
            place = db.rows(sql.PLACE, {"id": job_id})
            if not place:
                return None
            queue, state, group, priority, due = place[0]
            params = {
                "queue": queue, "grp": group, "priority": priority, "due": due, "id": job_id, "due_by": _FOREVER,
            }  # fmt: skip
            if state == rows.READY and group is None:
                return int(db.rows(sql.AHEAD_IN_READY, params)[0][0])
            if state not in {rows.READY, rows.DELAYED}:
                return None
            ahead = int(db.rows(sql.COUNT_UNGROUPED, params)[0][0])
            if state == rows.READY:
                name = db.rows(sql.GROUP_NAME, params)[0][0]
                ahead += int(db.rows(sql.COUNT_GROUPED_BEFORE, {"queue": queue, "name": name})[0][0])
                return ahead + int(db.rows(sql.AHEAD_IN_GROUP, params)[0][0])
            ahead += int(db.rows(sql.COUNT_GROUPED, params)[0][0])
            return ahead + int(db.rows(sql.AHEAD_IN_DELAYED, params)[0][0])

        return self._read(look)

    def _promote_for_reading(self, queue: int) -> None:
        """What has become due stands among the due, though nobody has claimed since."""
        now = self._engine.clock.now_ms()
        due = self._read(lambda db: db.rows(sql.NEXT_EVENTS, {"queue": queue})[0][0])
        if due is not None and due <= now:
            self._write(lambda tx: _promote(tx, queue, now), lasting=False)

    def holders(self, job_ids: Sequence[int]) -> dict[int, Holder]:
        engine = self._engine
        found = self._read(lambda db: db.rows(sql.HOLDERS, {"ids": rows.ids(job_ids)})) if job_ids else []
        alive = {
            process: recovery.is_living(engine, process, boot)
            for process, boot in {(process, boot) for _id, _token, process, boot, *_rest in found}
            if process is not None
        }
        shift = recovery.steady_to_wall_ms(engine)
        return {
            job_id: Holder(token, label or "", alive.get(process), claimed_at_ms, lease_until_ms + shift, renewed_at_ms)
            for job_id, token, process, _boot, label, claimed_at_ms, lease_until_ms, renewed_at_ms in found
        }

    def counts(self, queue: str) -> Counts:
        queue_id = self._queue(queue)
        if queue_id is None:
            return Counts()
        params = {"queue": queue_id, "now": self._engine.clock.now_ms()}
        return Counts(*self._read(lambda db: db.rows(sql.COUNTS, params)[0]))

    def oldest_due_at_ms(self, queue: str) -> int | None:
        params = {"queue": self._queue(queue), "now": self._engine.clock.now_ms()}

        def look(db: Connection) -> int | None:
            oldest, priorities = db.rows(sql.OLDEST_DUE, params)[0]
            if priorities + 1 >= sql.MOST_PRIORITIES:
                (oldest,) = db.rows(sql.OLDEST_DUE_OF_ALL, params)[0]
            return None if oldest is None else int(oldest)

        return self._read(look)

    def queues(self) -> list[QueueInfo]:
        return [QueueInfo(*row) for row in self._read(lambda db: db.rows(sql.QUEUES))]

    # -- mending --

    def retry(
        self, job_ids: Sequence[int], *, queue: str | None = None, payloads: Mapping[int, bytes] | None = None
    ) -> list[bool]:
        target = None if queue is None else self._made_queue(queue)

        def one(tx: Tx, job_id: int) -> bool:
            found = tx.db.rows(sql.FAILED_GROUP, {"id": job_id})
            if not found:
                return False
            source, group, group_id, concurrency, dedupe_key = found[0]
            goes_to = source if target is None else target
            if tx.db.rows(sql.HOLDER_OF_KEY, {"queue": goes_to, "dedupe_key": dedupe_key}) not in ([], [(job_id,)]):
                return False
            if group is not None and goes_to != source:
                group_id = self._group(tx, goes_to, group, concurrency, conflict=False)
            payload = None if payloads is None else payloads.get(job_id)
            params = {
                "id": job_id, "queue": goes_to, "grp": group_id, "payload": payload, "now": self._engine.clock.now_ms(),
            }  # fmt: skip
            if tx.db.change(sql.RETRY, params) != 1:
                return False
            tx.carries(len(payload or b""))
            tx.wake(self._name(tx.db, goes_to), 1)
            return True

        return self._write(lambda tx: [one(tx, job_id) for job_id in job_ids]) if job_ids else []

    def cancel(self, job_ids: Sequence[int]) -> list[bool]:
        return self._end(job_ids, sql.CANCEL)

    def remove(self, job_ids: Sequence[int]) -> list[bool]:
        return self._end(job_ids, sql.REMOVE)

    def _end(self, job_ids: Sequence[int], statement: str) -> list[bool]:
        params = {"ids": rows.ids(job_ids), "now": self._engine.clock.now_ms()}

        def op(tx: Tx) -> list[bool]:
            done = {(job_id, 0) for (job_id,) in tx.db.rows(statement, params)}
            return _once_each([Lease(job_id, 0) for job_id in job_ids], done)

        return self._write(op, single=True) if job_ids else []

    def reschedule(self, job_id: int, *, due_at_ms: int) -> bool:
        params = {"id": job_id, "due": due_at_ms, "now": self._engine.clock.now_ms()}

        def op(tx: Tx) -> bool:
            for (queue,) in tx.db.rows(sql.RESCHEDULE, params):
                tx.wake(self._name(tx.db, queue), 1)
                return True
            return False

        return self._write(op, single=True)

    def move(self, source: str, target: str) -> int:
        from_queue = self._queue(source)
        if from_queue is None or source == target:
            return 0
        to_queue = self._made_queue(target)

        def op(tx: Tx) -> int:
            params: dict[str, int] = {"source": from_queue, "target": to_queue}
            moved = tx.db.change(sql.MOVE_READY, params) + tx.db.change(sql.MOVE_DELAYED, params)
            for group, name, concurrency, ready in tx.db.rows(sql.GROUPS_OF_QUEUE, {"queue": from_queue}):
                if not ready and not tx.db.rows(sql.HAS_DELAYED_OF_GROUP, {"queue": from_queue, "grp": group}):
                    continue
                params |= {"grp": group, "target_grp": self._group(tx, to_queue, name, concurrency, conflict=False)}
                moved += tx.db.change(sql.MOVE_GROUPED_READY, params)
                moved += tx.db.change(sql.MOVE_GROUPED_DELAYED, params)
            tx.wake(target, moved)
            tx.pages += moved
            return moved

        return self._write(op)

    def move_jobs(self, job_ids: Sequence[int], target: str) -> list[bool]:
        if not job_ids:
            return []
        queue = self._made_queue(target)

        def one(tx: Tx, job_id: int) -> bool:
            found = tx.db.rows(sql.PENDING_GROUP, {"id": job_id})
            if not found:
                return False
            source, group, group_id, concurrency, dedupe_key = found[0]
            if source == queue:
                return True
            if tx.db.rows(sql.HOLDER_OF_KEY, {"queue": queue, "dedupe_key": dedupe_key}):
                return False
            if group is not None:
                group_id = self._group(tx, queue, group, concurrency, conflict=False)
            return tx.db.change(sql.MOVE_BY_ID, {"id": job_id, "target": queue, "target_grp": group_id}) == 1

        def op(tx: Tx) -> list[bool]:
            moved = [one(tx, job_id) for job_id in job_ids]
            tx.wake(target, sum(moved))
            tx.pages += sum(moved)
            return moved

        return self._write(op)

    def purge(self, queue: str, states: Sequence[State], *, limit: int | None = None) -> int:
        queue_id = self._queue(queue)
        if queue_id is None:
            return 0

        def bite(tx: Tx, statement: str, params: Mapping[str, int]) -> int:
            tx.pages += _BITE
            return tx.db.change(statement, params)

        gone = 0
        for statement, params in self._purges(queue_id, states):
            while limit is None or gone < limit:
                most = _BITE if limit is None else min(_BITE, limit - gone)
                bounded = {**params, "most": most}
                count = self._write(lambda tx, s=statement, p=bounded: bite(tx, s, p), single=True)  # type: ignore[misc]
                gone += count
                if count < most:
                    break
        return gone

    def _purges(self, queue: int, states: Sequence[State]) -> list[tuple[str, dict[str, int]]]:
        """The statements that empty these states of a queue."""
        here = {"queue": queue}
        purges: list[tuple[str, dict[str, int]]] = []
        if State.PENDING in states:
            purges += [(sql.PURGE_READY, here), (sql.PURGE_DELAYED, here)]
            groups = self._read(lambda db: db.rows(sql.GROUPS_OF_QUEUE, here))
            purges += [(sql.PURGE_GROUPED, {"grp": group}) for group, _name, _limit, ready in groups if ready]
        purges += [(sql.PURGE_ENDED[code], here) for state, code in rows.ENDED.items() if state in states]
        return purges

    def prune(self, queue: str, keep: Mapping[State, Keep]) -> int:
        queue_id = self._queue(queue)
        if queue_id is None:
            return 0
        now = self._engine.clock.now_ms()
        gone = 0
        for state, limits in keep.items():
            code = rows.ENDED.get(state)
            if code is None:
                continue
            bites = []
            if limits.count is not None:
                bites.append((sql.PRUNABLE_BY_COUNT[code], sql.PRUNE_BY_COUNT[code], {"count": limits.count}))
            if limits.age_ms is not None:
                bites.append((sql.PRUNABLE_BY_AGE[code], sql.PRUNE_BY_AGE[code], {"before": now - limits.age_ms}))
            for look, statement, limit in bites:
                params = {"queue": queue_id, **limit}
                if self._read(lambda db, s=look, p=params: db.rows(s, p)):  # type: ignore[misc]
                    gone += self._write(
                        lambda tx, s=statement, p=params: tx.db.change(s, p),  # type: ignore[misc]
                        lasting=False,
                        single=True,
                    )
        return gone

    def pause(self, queue: str, *, paused: bool) -> bool:
        queue_id = self._made_queue(queue) if paused else self._queue(queue)
        if queue_id is None:
            return False
        params = {"queue": queue_id, "now": self._engine.clock.now_ms()}

        def op(tx: Tx) -> bool:
            changed = tx.db.change(sql.PAUSE if paused else sql.RESUME, params) == 1
            if changed and not paused:
                tx.wake(queue, 8)
            return changed

        return self._write(op, single=True)


class _Pager:
    """A page of a queue, gathered from its parts in order. An offset is spent on the way."""

    def __init__(
        self, db: Connection, queue: int, limit: int, offset: int, due_by: int, *, now: int, payloads: bool
    ) -> None:
        self._now = now
        self._payloads = payloads
        self._db = db
        self._queue = queue
        self._limit = limit
        self._offset = offset
        self._due_by = due_by
        self._found: list[Row] = []

    def pending(self, after: JobRecord | None) -> list[Row]:
        place = self._place(after)
        if place is None or (place[0] == rows.READY and place[1] is None):
            self._in_line(sql.PAGE_OF_READY, {"queue": self._queue}, place)
            place = None
        if place is None or place[0] == rows.READY:
            passed = place is None
            for group, _name, _concurrency, ready in self._db.rows(sql.GROUPS_OF_QUEUE, {"queue": self._queue}):
                if place is not None and group == place[1]:
                    self._in_line(sql.PAGE_OF_GROUP, {"grp": group}, place)
                    passed = True
                elif passed and ready:
                    self._in_line(sql.PAGE_OF_GROUP, {"grp": group}, None)
            place = None
        due, job_id = (-_FOREVER, 0) if place is None else (place[3], place[4])
        self._take(sql.PAGE_OF_DELAYED, {"queue": self._queue, "due": due, "id": job_id})
        return self._found

    def active(self, after: JobRecord | None, steady_to_wall_ms: int) -> list[Row]:
        until, job_id = -_FOREVER, 0
        if after is not None and after.lease_until_ms is not None:
            until, job_id = after.lease_until_ms - steady_to_wall_ms, after.id
        self._take(sql.PAGE_OF_ACTIVE, {"queue": self._queue, "until": until, "id": job_id})
        return self._found

    def ended(self, state: int, after: JobRecord | None) -> list[Row]:
        ended, job_id = (_FOREVER, 0) if after is None else (after.ended_at_ms or 0, after.id)
        self._take(sql.PAGE_OF_ENDED[state], {"queue": self._queue, "ended": ended, "id": job_id})
        return self._found

    def _place(self, after: JobRecord | None) -> tuple[int, int | None, int, int, int] | None:
        """Where ``after`` stood: state, group, priority, due, id. It may be gone, or claimed, by now."""
        if after is None:
            return None
        group = None
        if after.group is not None:
            found = self._db.rows(sql.GROUP_BY_NAME, {"queue": self._queue, "name": after.group})
            group = found[0][0] if found else None
        delayed = after.due_at_ms > self._now
        # Due is a state, as long as nobody has changed the job since: the wall clock may have been set back.
        for _queue, state, _group, _priority, due in self._db.rows(sql.PLACE, {"id": after.id}):
            if due == after.due_at_ms and state in {rows.READY, rows.DELAYED}:
                delayed = state == rows.DELAYED
        return (rows.DELAYED if delayed else rows.READY), group, after.priority, after.due_at_ms, after.id

    def _in_line(
        self,
        statements: tuple[str, str, str],
        params: dict[str, int],
        place: tuple[int, int | None, int, int, int] | None,
    ) -> None:
        first, same_priority, lower = statements
        if place is None:
            self._take(first, params)
            return
        _state, _group, priority, due, job_id = place
        self._take(same_priority, {**params, "priority": priority, "due": due, "id": job_id})
        self._take(lower, {**params, "priority": priority})

    def _take(self, statement: str, params: dict[str, int]) -> None:
        missing = self._limit - len(self._found)
        if missing <= 0:
            return
        full = {**params, "due_by": self._due_by, "limit": missing, "offset": self._offset}
        if not self._payloads:
            statement = sql.outline(statement)
        got = self._db.rows(statement, full)
        if not got and self._offset:
            # Less was there than the offset skips: how much, comes off it.
            passed = self._db.rows(statement, {**full, "limit": self._offset, "offset": 0})
            self._offset -= len(passed)
        else:
            self._offset = 0
        self._found += got


def _shape(spec: JobSpec) -> int:
    """Which statement takes it: INSERT_BARE, INSERT_PLAIN, or one for all."""
    _, _, encoding, _, delay_ms, run_at_ms, dedupe_key, _, group, _, _, headers, ref, task, front = spec
    if delay_ms is not None or run_at_ms is not None or dedupe_key is not None or group is not None:
        return _ANY
    if headers or front:
        return _ANY
    return _BARE if encoding is None and ref is None and task is None else _PLAIN


def _promote(tx: Tx, queue: int, now: int) -> None:
    """Let delayed jobs that have become due stand in line."""
    while tx.db.change(sql.PROMOTE, {"queue": queue, "now": now}) == _BITE:
        pass


def _insert_free(
    tx: Tx, specs: Sequence[JobSpec], queues: Mapping[str, int], ids: Sequence[int], now: int, *, shape: int
) -> list[Added]:
    """Insert jobs that need no look at what is there."""
    if shape != _ANY:
        one, ten = _INSERTS[shape]
        jobs: list[tuple[object, ...]] = [
            (
                job_id,
                queues[queue],
                priority,
                now,
                max_attempts or 0,
                now,
                now,
                now,
                now,
                bytearray(payload) if len(payload) < _COPIED else payload,
            )
            for job_id, (queue, payload, _, priority, _, _, _, _, _, _, max_attempts, *_) in zip(
                ids, specs, strict=True
            )
        ]
        if shape == _PLAIN:
            jobs = [(*job, spec.ref, spec.task, spec.encoding) for job, spec in zip(jobs, specs, strict=True)]
        in_tens = len(jobs) - len(jobs) % 10
        tens = [tuple(chain.from_iterable(jobs[first : first + 10])) for first in range(0, in_tens, 10)]
        tx.db.many(ten, tens)
        tx.db.many(one, jobs[in_tens:])
    elif len(specs) == 1:  # it may be a transaction of its own, which `many` never is
        tx.db.change(sql.INSERT, _values(specs[0], queues[specs[0].queue], ids[0], now, group=None))
    else:
        tx.db.many(
            sql.INSERT,
            [
                _values(spec, queues[spec.queue], job_id, now, group=None)
                for job_id, spec in zip(ids, specs, strict=True)
            ],
        )
    return list(map(_ADDED, zip(ids, repeat(True))))


def _values(spec: JobSpec, queue: int, job_id: int, now: int, *, group: int | None) -> tuple[object, ...]:
    """The row of a new job, in the order of INSERT's parameters."""
    if spec.delay_ms is not None:
        due = now + spec.delay_ms
    elif spec.run_at_ms is not None:
        due = spec.run_at_ms
    else:
        due = now
    return (
        job_id,
        queue,
        rows.READY if due <= now else rows.DELAYED,
        spec.priority,
        due,
        spec.max_attempts or 0,
        now,
        now,
        now,
        now,
        group,
        spec.dedupe_key,
        1 if spec.dedupe_until == "ended" else 0,
        spec.ref,
        spec.task,
        spec.encoding,
        json.dumps(dict(spec.headers)) if spec.headers else None,
        spec.payload,
    )


def _by_token(leases: Sequence[Lease]) -> dict[int, list[int]]:
    """Job ids by token: those of one claim share it, and are settled by one statement."""
    found: dict[int, list[int]] = {}
    for job_id, token in leases:
        found.setdefault(token, []).append(job_id)
    return found


def _one_token(leases: Sequence[Lease]) -> bool:
    return len({token for _job_id, token in leases}) == 1


def _once_each(leases: Sequence[Lease], settled: set[tuple[int, int]]) -> list[bool]:
    """Whether each was settled; of the same one twice, the first was."""
    answers: list[bool] = []
    for lease in leases:
        answers.append(lease in settled)
        settled.discard(lease)
    return answers
