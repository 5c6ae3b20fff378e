"""Every statement of the storage. `tests/test_query_plans.py` explains each: none scans a table or sorts.

How they are written, and what it costs otherwise (measured; SQLite 3.40 to 3.54):

* States are literals, and an index's whole condition is repeated, since a partial index is used only where the
  query's own words imply it (sqlite.org/partialindex.html).
* ``+:queue`` and ``limit +:limit``: from 3.5x on, a bare parameter beside a partial index or in a LIMIT makes
  SQLite prepare the statement again at every execution, which costs three to nine times the claim itself.
* Lists of ids go in as one JSON array: one statement, however many.
* Parameters have names, but for the inserts', which are bound in order: seventeen names cost 2 us.
"""

from __future__ import annotations

from litebroker.jobs import MOST_AHEAD

NO_TOKEN = 1 << 60  # eight bytes as every token, so that a claim does not change the row's size

# -- what is returned of a job; the order is that of rows.record() --

_FIELDS = (
    "id, queue, state, priority, due_at_ms, attempts, max_attempts, created_at_ms, token, lease_until_ms,"
    " claimed_at_ms, ended_at_ms, {group}, dedupe_key, ref, task, encoding, headers, error, history, payload"
)
_UNGROUPED_RECORD = _FIELDS.format(group="null")
RECORD = _FIELDS.format(
    group="case when grp is null then null else (select name from litebroker_group where id = grp) end"
)

# The history keeps this many attempts.
_HISTORY = 20


def _logged(outcome: str, error: str) -> str:
    """The history with one more entry: number, started, ended, worker, outcome, error."""
    return f"""json_insert(
    case
      when history is null then '[]'
      when json_array_length(history) >= {_HISTORY} then json_remove(history, '$[0]')
      else history
    end,
    '$[#]',
    json_array(
      attempts, claimed_at_ms, :now,
      coalesce((select label from litebroker_process where id = token >> 38), ''),
      {outcome}, {error}
    )
  )"""


_LAPSED, _COMPLETED = "'lapsed'", "'completed'"

# An attempt was the last one.
_SPENT = "(max_attempts > 0 and attempts >= max_attempts)"
_CURRENT = "token = :token and state = 1 and lease_until_ms > :steady"
# The condition of the unique index on dedupe keys: whether a job holds the key that it has.
_HOLDS_KEY = "dedupe_key is not null and (dedupe_ends = 0 or state < 3)"

# -- queues --

QUEUE_BY_NAME = "select id from litebroker_queue where name = :name"
ADD_QUEUE = "insert into litebroker_queue(name) values(:name) on conflict(name) do nothing"
QUEUES = "select name, paused_at_ms from litebroker_queue order by name"
QUEUE_NAME = "select name from litebroker_queue where id = :queue"
PAUSE = "update litebroker_queue set paused_at_ms = :now where id = :queue and paused_at_ms is null"
RESUME = "update litebroker_queue set paused_at_ms = null where id = :queue and paused_at_ms is not null"
QUEUE_TURNS = "select paused_at_ms, turn, ungrouped_turn from litebroker_queue where id = :queue"
SET_QUEUE_TURNS = "update litebroker_queue set turn = :turn, ungrouped_turn = :ungrouped_turn where id = :queue"

# -- adding --

INSERT = (
    "insert into litebroker_job(id, queue, state, priority, due_at_ms, attempts, max_attempts, token, lease_until_ms,"
    " renewed_at_ms, claimed_at_ms, created_at_ms, grp, dedupe_key, dedupe_ends, ref, task, encoding, headers, payload)"
    f" values(?, ?, ?, ?, ?, 0, ?, {NO_TOKEN}, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def _inserts(more: str) -> tuple[str, str]:
    """One job that is due now, and ten. To open the table and its indexes takes a third of the time of an insert."""
    row = f"(?, ?, 0, ?, ?, 0, ?, {NO_TOKEN}, ?, ?, ?, ?, 0, ?{more.count(',') * ', ?'})"
    one = (
        "insert into litebroker_job(id, queue, state, priority, due_at_ms, attempts, max_attempts, token,"
        f" lease_until_ms, renewed_at_ms, claimed_at_ms, created_at_ms, dedupe_ends, payload{more}) values{row}"
    )
    return one, one + f", {row}" * 9


# Without a dedupe key, a group or headers, as most are; and with nothing but a payload. It is the parameters that take
# long, those above all that would be None: for each Python's driver looks for an adapter, and could bind four numbers.
INSERT_PLAIN, INSERT_TEN_PLAIN = _inserts(", ref, task, encoding")
INSERT_BARE, INSERT_TEN_BARE = _inserts("")
INSERT_UNLESS_HELD = f"{INSERT} on conflict(queue, dedupe_key) where {_HOLDS_KEY} do nothing returning id"
HOLDER_OF_KEY = f"select id from litebroker_job where queue = +:queue and dedupe_key = :dedupe_key and {_HOLDS_KEY}"
FIRST_UNGROUPED = (
    "select priority, due_at_ms from litebroker_job where state = 0 and grp is null and queue = +:queue"
    " order by priority desc, due_at_ms limit 1"
)
FIRST_OF_GROUP = (
    "select priority, due_at_ms from litebroker_job where state = 0 and grp is not null and grp = +:grp"
    " order by priority desc, due_at_ms limit 1"
)
GROUP_BY_NAME = "select id, concurrency from litebroker_group where queue = :queue and name = :name"
ADD_GROUP = "insert into litebroker_group(queue, name, concurrency) values(:queue, :name, :concurrency) returning id"
ANY_GROUP = "select 1 from litebroker_group limit 1"
HAS_GROUPS = "select 1 from litebroker_group where queue = :queue limit 1"

# The counters of a group, made with the first group of the file, so that files without any never pay for them.
# A group that becomes ready goes to the end of the line of streams; SET_GROUP_TURN sends one there that was served.
GROUP_TRIGGERS = (
    """create trigger if not exists litebroker_job_grouped_insert after insert on litebroker_job
when new.grp is not null and new.state = 0 begin
  update litebroker_group set
    turn = case
      when ready = 0 then max(turn, (select turn from litebroker_queue where id = new.queue)) else turn
    end,
    ready = ready + 1
  where id = new.grp;
end""",
    """create trigger if not exists litebroker_job_grouped_leave after update of state, grp on litebroker_job
when old.grp is not null and old.state < 2 and (old.state <> new.state or old.grp is not new.grp) begin
  update litebroker_group set ready = ready - (old.state = 0), active = active - (old.state = 1) where id = old.grp;
end""",
    """create trigger if not exists litebroker_job_grouped_enter after update of state, grp on litebroker_job
when new.grp is not null and new.state < 2 and (old.state <> new.state or old.grp is not new.grp) begin
  update litebroker_group set
    turn = case
      when new.state = 0 and ready = 0 then max(turn, (select turn from litebroker_queue where id = new.queue))
      else turn
    end,
    ready = ready + (new.state = 0),
    active = active + (new.state = 1)
  where id = new.grp;
end""",
    """create trigger if not exists litebroker_job_grouped_delete after delete on litebroker_job
when old.grp is not null and old.state < 2 begin
  update litebroker_group set ready = ready - (old.state = 0), active = active - (old.state = 1) where id = old.grp;
end""",
)

# -- claiming --

_CLAIM = (
    "update litebroker_job set state = 1, attempts = attempts + 1, token = :token, lease_until_ms = :until,"
    " claimed_at_ms = :now"
)
_UNPAUSED = "(select paused_at_ms is null from litebroker_queue where id = :queue)"
CLAIM_ONE = (
    f"{_CLAIM} where id = (select id from litebroker_job where state = 0 and grp is null and queue = +:queue"
    f" order by priority desc, due_at_ms limit 1) and {_UNPAUSED} returning {_UNGROUPED_RECORD}"
)
CLAIM_MANY = (
    f"{_CLAIM} where id in (select id from litebroker_job where state = 0 and grp is null and queue = +:queue"
    f" order by priority desc, due_at_ms limit +:limit) and {_UNPAUSED} returning {_UNGROUPED_RECORD}"
)
CLAIM_BY_ID = f"{_CLAIM} where id = :id and state = 0 returning {RECORD}"
NEXT_STREAM = (
    "select id, turn from litebroker_group where ready > 0 and active < concurrency and queue = +:queue"
    " order by turn limit 1"
)
# Whether the last attempt that ended has lapsed.
_HAS_LAPSED = "history is not null and json_extract(history, '$[#-1][4]') = 'lapsed'"
HEAD_OF_UNGROUPED = (
    f"select id, {_HAS_LAPSED} from litebroker_job where state = 0 and grp is null and queue = +:queue"
    " order by priority desc, due_at_ms limit 1"
)
HEAD_OF_GROUP = (
    f"select id, {_HAS_LAPSED} from litebroker_job where state = 0 and grp is not null and grp = +:grp"
    " order by priority desc, due_at_ms limit 1"
)
SET_GROUP_TURN = "update litebroker_group set turn = :turn where id = :grp"

# What the queue waits for: the next due time of a delayed job, and the next end of a lease.
NEXT_EVENTS = (
    "select (select min(due_at_ms) from litebroker_job where state = 2 and queue = +:queue),"
    " (select min(lease_until_ms) from litebroker_job where state = 1 and queue = +:queue),"
    " exists(select 1 from litebroker_group where queue = +:queue)"
)
# The same, for a waiter: whether anything may be claimed now, too.
WAITING = (
    "select q.paused_at_ms is null and (exists(select 1 from litebroker_job where state = 0 and grp is null"
    " and queue = q.id) or exists(select 1 from litebroker_group where ready > 0 and active < concurrency"
    " and queue = q.id)), (select min(due_at_ms) from litebroker_job where state = 2 and queue = q.id),"
    " (select min(lease_until_ms) from litebroker_job where state = 1 and queue = q.id), q.paused_at_ms is not null"
    " from litebroker_queue q where q.id = :queue"
)
PROMOTE = (
    "update litebroker_job set state = 0 where id in (select id from litebroker_job where state = 2"
    " and queue = +:queue and due_at_ms <= +:now order by due_at_ms limit 500)"
)
_LAPSE = (
    f"update litebroker_job set state = case when {_SPENT} then 4 else 0 end, token = {NO_TOKEN},"
    f" ended_at_ms = case when {_SPENT} then :now end,"
    f" error = :error, history = {_logged(_LAPSED, ':message')}"
)
RECOVER = (
    f"{_LAPSE} where id in (select id from litebroker_job where state = 1 and queue = +:queue"
    " and lease_until_ms <= +:steady order by lease_until_ms limit 100) returning id, state"
)
# Walks the index of all active jobs, when a process has died.
RECOVER_PROCESS = f"{_LAPSE} where state = 1 and token >> 38 = :process returning id, queue, state"

# -- settling: each names the lease --

EXTEND = (
    "update litebroker_job set lease_until_ms = :until, renewed_at_ms = :now"
    f" where id in (select value from json_each(:ids)) and {_CURRENT} returning id"
)
COMPLETE_ONE = f"delete from litebroker_job where id = :id and {_CURRENT}"
COMPLETE_MANY = (
    f"delete from litebroker_job where id in (select value from json_each(:ids)) and {_CURRENT}"
    " returning id, queue, grp"
)
KEEP_COMPLETED = (
    f"update litebroker_job set state = 3, token = {NO_TOKEN}, ended_at_ms = :now,"
    f" history = {_logged(_COMPLETED, 'null')}"
    f" where id in (select value from json_each(:ids)) and {_CURRENT} returning id, queue, grp"
)
_DEAD = f"(:retry is null or {_SPENT})"
_FAILED_OR_RETRIED = f"case when {_DEAD} then 'failed' else 'retried' end"
FAIL = (
    f"update litebroker_job set state = case when {_DEAD} then 4 when :retry > 0 then 2 else 0 end,"
    f" due_at_ms = case when {_DEAD} then due_at_ms else :now + :retry end, token = {NO_TOKEN},"
    f" ended_at_ms = case when {_DEAD} then :now end,"
    " error = :error,"
    f" history = {_logged(_FAILED_OR_RETRIED, ':message')}"
    f" where id = :id and {_CURRENT} returning state, queue"
)
# As if it had not been claimed, so that the time of the claim is again that of the last attempt that counts.
_UNCLAIMED = (
    f"attempts = attempts - 1, token = {NO_TOKEN},"
    " claimed_at_ms = coalesce(json_extract(history, '$[#-1][1]'), created_at_ms)"
)
RELEASE = (
    f"update litebroker_job set state = 0, {_UNCLAIMED}"
    f" where id in (select value from json_each(:ids)) and {_CURRENT} returning id, queue"
)
RELEASE_LATER = (
    f"update litebroker_job set state = 2, {_UNCLAIMED}, due_at_ms = :due"
    f" where id in (select value from json_each(:ids)) and {_CURRENT} returning id, queue"
)

# -- mending --

CANCEL = (
    "update litebroker_job set state = 5, ended_at_ms = :now"
    " where id in (select value from json_each(:ids)) and state in (0, 2) returning id"
)
RESCHEDULE = (
    "update litebroker_job set state = case when :due > :now then 2 else 0 end, due_at_ms = :due"
    " where id = :id and state in (0, 2) returning queue"
)
REMOVE = "delete from litebroker_job where id in (select value from json_each(:ids)) and state <> 1 returning id"
FAILED_GROUP = (
    "select j.queue, g.name, g.id, g.concurrency, j.dedupe_key"
    " from litebroker_job j left join litebroker_group g on g.id = j.grp"
    " where j.id = :id and j.state = 4"
)
RETRY = (
    "update or ignore litebroker_job set state = 0, due_at_ms = :now, ended_at_ms = null, queue = :queue, grp = :grp,"
    f" max_attempts = case when {_SPENT} then attempts + 1 else max_attempts end, payload = coalesce(:payload, payload)"
    " where id = :id and state = 4"
)
HAS_DELAYED_OF_GROUP = "select 1 from litebroker_job where state = 2 and queue = +:queue and grp = :grp limit 1"
GROUPS_OF_QUEUE = "select id, name, concurrency, ready from litebroker_group where queue = :queue order by name"
MOVE_READY = "update or ignore litebroker_job set queue = :target where state = 0 and grp is null and queue = +:source"
MOVE_DELAYED = (
    "update or ignore litebroker_job set queue = :target where state = 2 and queue = +:source and grp is null"
)
MOVE_GROUPED_READY = (
    "update or ignore litebroker_job set queue = :target, grp = :target_grp"
    " where state = 0 and grp is not null and grp = +:grp"
)
MOVE_GROUPED_DELAYED = (
    "update or ignore litebroker_job set queue = :target, grp = :target_grp"
    " where state = 2 and queue = +:source and grp = :grp"
)
PENDING_GROUP = (
    "select j.queue, g.name, g.id, g.concurrency, j.dedupe_key"
    " from litebroker_job j left join litebroker_group g on g.id = j.grp"
    " where j.id = :id and j.state in (0, 2)"
)
MOVE_BY_ID = "update or ignore litebroker_job set queue = :target, grp = :target_grp where id = :id and state in (0, 2)"
PURGE_READY = (
    "delete from litebroker_job where id in (select id from litebroker_job where state = 0 and grp is null"
    " and queue = +:queue limit +:most)"
)
PURGE_GROUPED = (
    "delete from litebroker_job where id in (select id from litebroker_job where state = 0 and grp is not null"
    " and grp = +:grp limit +:most)"
)
PURGE_DELAYED = (
    "delete from litebroker_job where id in (select id from litebroker_job where state = 2"
    " and queue = +:queue limit +:most)"
)
# The index of what has ended serves only where its condition is repeated.
PURGE_ENDED = {
    state: (
        f"delete from litebroker_job where id in (select id from litebroker_job where state = {state}"
        " and ended_at_ms is not null and queue = +:queue limit +:most)"
    )
    for state in (3, 4, 5)
}
PRUNE_BY_COUNT = {
    state: (
        f"delete from litebroker_job where id in (select id from litebroker_job where state = {state}"
        " and ended_at_ms is not null and queue = +:queue order by ended_at_ms limit max(0, min(200, (select count(*)"
        f" from litebroker_job where state = {state} and ended_at_ms is not null and queue = +:queue) - +:count)))"
    )
    for state in (3, 4, 5)
}
PRUNE_BY_AGE = {
    state: (
        f"delete from litebroker_job where id in (select id from litebroker_job where state = {state}"
        " and ended_at_ms is not null and queue = +:queue and ended_at_ms <= +:before order by ended_at_ms limit 200)"
    )
    for state in (3, 4, 5)
}

PRUNABLE_BY_COUNT = {
    state: (
        f"select 1 from litebroker_job where state = {state} and ended_at_ms is not null and queue = +:queue"
        " order by ended_at_ms desc, id desc limit 1 offset +:count"
    )
    for state in (3, 4, 5)
}
PRUNABLE_BY_AGE = {
    state: (
        f"select 1 from litebroker_job where state = {state} and ended_at_ms is not null and queue = +:queue"
        " and ended_at_ms <= +:before limit 1"
    )
    for state in (3, 4, 5)
}

# -- looking --

GET = f"select {RECORD} from litebroker_job where id = :id"
STATES = "select id, state from litebroker_job where id in (select value from json_each(:ids))"
_READY = "state = 0 and grp is null and queue = +:queue"
# Ready jobs are looked through, in an index: a tenth of a second for a million. Active ones are few.
FIND_BY_REF = (
    f"select {RECORD} from litebroker_job where id in ("
    " select id from litebroker_job where ref is not null and (state >= 2 or grp is not null) and queue = +:queue"
    " and ref = :ref"
    f" union all select id from litebroker_job where {_READY} and ref = :ref"
    " union all select id from litebroker_job where state = 1 and queue = +:queue and ref = :ref"
    ") order by id"
)
_GROUPED = "state = 0 and grp is not null and grp = +:grp"
_IN_LINE = "order by priority desc, due_at_ms, id limit +:limit offset +:offset"


def _pages(condition: str) -> tuple[str, str, str]:
    """A first page in the order of claims; the rest of the priority after a job; the lower priorities."""
    select = f"select {RECORD} from litebroker_job where {condition} and due_at_ms <= :due_by"
    return (
        f"{select} {_IN_LINE}",
        (
            f"{select} and priority = :priority and (due_at_ms, id) > (:due, :id)"
            " order by due_at_ms, id limit +:limit offset +:offset"
        ),
        f"{select} and priority < :priority {_IN_LINE}",
    )


PAGE_OF_READY = _pages(_READY)
PAGE_OF_GROUP = _pages(_GROUPED)
PAGE_OF_DELAYED = (
    f"select {RECORD} from litebroker_job where state = 2 and queue = +:queue and due_at_ms <= :due_by"
    " and (due_at_ms, id) > (:due, :id) order by due_at_ms, id limit +:limit offset +:offset"
)
PAGE_OF_ACTIVE = (
    f"select {RECORD} from litebroker_job where state = 1 and queue = +:queue"
    " and (lease_until_ms, id) > (:until, :id) order by lease_until_ms, id limit +:limit offset +:offset"
)
PAGE_OF_ENDED = {
    state: (
        f"select {RECORD} from litebroker_job where state = {state} and ended_at_ms is not null and queue = +:queue"
        " and (ended_at_ms, id) < (:ended, :id) order by ended_at_ms desc, id desc limit +:limit offset +:offset"
    )
    for state in (3, 4, 5)
}
_PAGES = (*PAGE_OF_READY, *PAGE_OF_GROUP, PAGE_OF_DELAYED, PAGE_OF_ACTIVE, *PAGE_OF_ENDED.values())
# The same pages without payloads, which may be large.
OUTLINES = tuple(page.replace(", history, payload from", ", history, x'' from") for page in _PAGES)
_OUTLINE_OF = dict(zip(_PAGES, OUTLINES, strict=True))


def outline(page: str) -> str:
    """The statement of a page as one that reads no payloads."""
    return _OUTLINE_OF[page]


HOLDERS = (
    "select j.id, j.token, p.id, p.boot, p.label, j.claimed_at_ms, j.lease_until_ms,"
    " case when j.renewed_at_ms > j.claimed_at_ms then j.renewed_at_ms end from litebroker_job j"
    " left join litebroker_process p on p.id = j.token >> 38"
    " where j.id in (select value from json_each(:ids)) and j.state = 1"
)
PLACE = "select queue, state, grp, priority, due_at_ms from litebroker_job where id = :id"
GROUP_NAME = "select name from litebroker_group where id = :grp"


def _ahead(condition: str) -> str:
    select = f"select count(*) from litebroker_job where {condition}"
    return (
        f"select ({select} and priority > :priority)"
        f" + ({select} and priority = :priority and (due_at_ms, id) < (:due, :id))"
    )


AHEAD_IN_READY = _ahead(_READY)
AHEAD_IN_GROUP = _ahead(_GROUPED)
AHEAD_IN_DELAYED = (
    "select count(*) from litebroker_job where state = 2 and queue = +:queue and (due_at_ms, id) < (:due, :id)"
)


def _before(condition: str) -> str:
    # Counted up to a limit: a walk through a million entries takes 50 ms.
    select = f"select 1 from litebroker_job where {condition}"
    return (
        f"select (select count(*) from ({select} and priority > :priority limit {MOST_AHEAD}))"
        f" + (select count(*) from ({select} and priority = :priority and (due_at_ms, id) < (:due, :id)"
        f" limit {MOST_AHEAD}))"
    )


BEFORE_IN_LINE = _before(_READY)
BEFORE_IN_GROUP = _before(_GROUPED)
BEFORE_IN_DELAYED = (
    "select count(*) from (select id, grp, priority, due_at_ms from litebroker_job where state = 2"
    " and queue = +:queue and due_at_ms <= +:now order by due_at_ms limit 10000) where grp is :grp"
    " and (priority > :priority or (priority = :priority and (due_at_ms, id) < (:due, :id)))"
)
GROUP_PLACES = "select concurrency, active from litebroker_group where id = :grp"
ACTIVE_OF_GROUP = (
    "select id from litebroker_job where state = 1 and queue = +:queue and grp = :grp order by lease_until_ms limit 100"
)
LATEST = "select max(id) from litebroker_job"
ARRIVALS = "select id, queue from litebroker_job where id > :after order by id limit +:limit"
ENDED_SINCE = {
    state: (
        f"select count(*) from litebroker_job where state = {state} and ended_at_ms is not null and queue = +:queue"
        " and ended_at_ms >= :since"
    )
    for state in (3, 4, 5)
}
COUNT_UNGROUPED = f"select count(*) from litebroker_job where {_READY}"
COUNT_GROUPED_BEFORE = "select coalesce(sum(ready), 0) from litebroker_group where queue = :queue and name < :name"
COUNT_GROUPED = "select coalesce(sum(ready), 0) from litebroker_group where queue = :queue"
COUNTS = f"""select
  (select count(*) from litebroker_job where {_READY})
    + coalesce((select sum(ready) from litebroker_group where queue = :queue), 0)
    + (select count(*) from litebroker_job where state = 2 and queue = +:queue and due_at_ms <= +:now),
  (select count(*) from litebroker_job where state = 2 and queue = +:queue and due_at_ms > +:now),
  (select count(*) from litebroker_job where state = 1 and queue = +:queue),
  (select count(*) from litebroker_job where state = 3 and ended_at_ms is not null and queue = +:queue),
  (select count(*) from litebroker_job where state = 4 and ended_at_ms is not null and queue = +:queue),
  (select count(*) from litebroker_job where state = 5 and ended_at_ms is not null and queue = +:queue)"""
# There is no index on due times alone. The oldest of each priority stands first in its part of the index, so it is
# enough to jump from one priority to the next; where there are very many, the second answer is as many as were seen.
MOST_PRIORITIES = 10_000
_IN_GROUP = "state = 0 and grp is not null and grp = place.grp"
OLDEST_DUE = f"""with recursive
  line(priority) as (
    select (select priority from litebroker_job where {_READY} order by priority desc limit 1)
    union all
    select (
      select priority from litebroker_job where {_READY} and priority < line.priority order by priority desc limit 1
    ) from line where line.priority is not null
    limit {MOST_PRIORITIES}
  ),
  place(grp, priority) as (
    select g.id, (
      select priority from litebroker_job where state = 0 and grp is not null and grp = g.id
      order by priority desc limit 1
    ) from litebroker_group g where g.queue = +:queue and g.ready > 0
    union all
    select place.grp, (
      select priority from litebroker_job where {_IN_GROUP} and priority < place.priority order by priority desc limit 1
    ) from place where place.priority is not null
    limit {MOST_PRIORITIES}
  )
select min(due), max(seen) from (
  select min((
    select due_at_ms from litebroker_job where {_READY} and priority = line.priority order by due_at_ms limit 1
  )) as due, count(*) as seen from line where priority is not null
  union all
  select min((
    select due_at_ms from litebroker_job where {_IN_GROUP} and priority = place.priority order by due_at_ms limit 1
  )), count(*) from place where priority is not null
  union all
  select min(due_at_ms), 0 from litebroker_job where state = 2 and queue = +:queue and due_at_ms <= +:now
)"""
OLDEST_DUE_OF_ALL = f"""select min(due) from (
  select min(due_at_ms) as due from litebroker_job where {_READY}
  union all
  select min(j.due_at_ms) from litebroker_group g join litebroker_job j on j.state = 0 and j.grp is not null
    and j.grp = g.id where g.queue = +:queue and g.ready > 0
  union all
  select min(due_at_ms) from litebroker_job where state = 2 and queue = +:queue and due_at_ms <= +:now
)"""

# -- carrying jobs from one storage to another --

WALK_JOBS = (
    f"select {RECORD}, dedupe_ends,"
    " case when grp is null then 1 else (select concurrency from litebroker_group where id = grp) end"
    " from litebroker_job where id > :after order by id limit +:limit"
)
KNOWN_IDS = "select id from litebroker_job where id in (select value from json_each(:ids))"
PUT_JOB = (
    "insert into litebroker_job(id, queue, state, priority, due_at_ms, attempts, max_attempts, token, lease_until_ms,"
    " claimed_at_ms, created_at_ms, ended_at_ms, grp, dedupe_key, dedupe_ends, ref, task, encoding, headers, error,"
    f" history, payload) values(?, ?, ?, ?, ?, ?, ?, {NO_TOKEN}, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " on conflict do nothing"
)
# Those of an owner are left out.
WALK_VALUES = (
    "select space, key, data, number, expires_at_ms from litebroker_value where (space, key) > (:space, :key)"
    " and owner_job is null and (expires_at_ms is null or expires_at_ms > :steady) order by space, key limit +:limit"
)

# -- values --

_VISIBLE = (
    "(litebroker_value.expires_at_ms is null or litebroker_value.expires_at_ms > :steady)"
    " and (litebroker_value.owner_job is null or exists(select 1 from litebroker_job j"
    " where j.id = litebroker_value.owner_job and j.token = litebroker_value.owner_token and j.state = 1"
    " and j.lease_until_ms > :steady))"
)
_VALUE = "key, data, number, expires_at_ms"
PUT = (
    "insert into litebroker_value(space, key, number, expires_at_ms, owner_job, owner_token, data)"
    " values(:space, :key, :number, :expires, :owner_job, :owner_token, :data)"
    " on conflict(space, key) do update set number = excluded.number, expires_at_ms = excluded.expires_at_ms,"
    " owner_job = excluded.owner_job, owner_token = excluded.owner_token, data = excluded.data"
)
PUT_IF_ABSENT = f"{PUT} where not ({_VISIBLE})"
PEEK_ONE = f"select {_VALUE} from litebroker_value where space = :space and key = :key and {_VISIBLE}"
PEEK = (
    f"select {_VALUE} from litebroker_value where space = :space"
    f" and key in (select value from json_each(:keys)) and {_VISIBLE}"
)
POP = f"delete from litebroker_value where space = :space and key = :key and {_VISIBLE} returning {_VALUE}"
DELETE_VALUE = f"delete from litebroker_value where space = :space and key = :key and {_VISIBLE} returning 1"
DELETE_VALUES = (
    "delete from litebroker_value where space = :space and key in (select value from json_each(:keys))"
    f" and {_VISIBLE} returning 1"
)
INCREMENT = (
    "update litebroker_value set number = number + :amount,"
    " expires_at_ms = case when :ttl is null then expires_at_ms else :expires end"
    f" where space = :space and key = :key and {_VISIBLE}"
    " and (:low is null or number + :amount >= :low) and (:high is null or number + :amount <= :high)"
    " returning number"
)
SCAN = (
    f"select {_VALUE} from litebroker_value where space = :space and key > :after and {_VISIBLE}"
    " order by key limit +:limit"
)
SIZE = f"select count(*) from litebroker_value where space = :space and {_VISIBLE}"
CLEAR = (
    "delete from litebroker_value where id in (select id from litebroker_value where space = :space limit 500)"
    f" returning {_VISIBLE}"
)
SWEEP_EXPIRED = (
    "delete from litebroker_value where id in (select id from litebroker_value where expires_at_ms is not null"
    " and expires_at_ms <= +:steady order by expires_at_ms limit 200)"
)
SWEEPABLE = "select 1 from litebroker_value where expires_at_ms is not null and expires_at_ms <= +:steady limit 1"
# Walks the index of owned values: there are as many as locks are held.
_ORPHANED = (
    "from litebroker_value v where v.owner_job is not null"
    " and not exists(select 1 from litebroker_job j where j.id = v.owner_job"
    " and j.token = v.owner_token and j.state = 1)"
)
ORPHANED = f"select 1 {_ORPHANED} limit 1"
SWEEP_ORPHANED = f"delete from litebroker_value where id in (select v.id {_ORPHANED} order by v.owner_job limit 200)"

IS_CURRENT = "select 1 from litebroker_job where id = :id and token = :token and state = 1 and lease_until_ms > :steady"

# -- schedules --

_SCHEDULE = (
    "(select name from litebroker_queue where id = queue), name, every_ms, cron, tz, next_at_ms, last_at_ms,"
    " options, payload"
)
PUT_SCHEDULE = (
    "insert into litebroker_schedule(queue, name, every_ms, cron, tz, next_at_ms, last_at_ms, options, payload)"
    " values(:queue, :name, :every_ms, :cron, :tz, :next_at_ms, :last_at_ms, :options, :payload)"
    " on conflict(queue, name) do update set every_ms = excluded.every_ms, cron = excluded.cron, tz = excluded.tz,"
    " next_at_ms = excluded.next_at_ms, last_at_ms = excluded.last_at_ms, options = excluded.options,"
    " payload = excluded.payload"
)
GET_SCHEDULE = f"select {_SCHEDULE} from litebroker_schedule where queue = :queue and name = :name"
SCHEDULES_OF_QUEUE = f"select {_SCHEDULE} from litebroker_schedule where queue = :queue order by name"
REMOVE_SCHEDULE = "delete from litebroker_schedule where queue = :queue and name = :name"
DUE_SCHEDULES = (
    f"select {_SCHEDULE} from litebroker_schedule where queue = :queue and next_at_ms <= :now and {_UNPAUSED}"
    " order by next_at_ms limit +:limit"
)
ADVANCE_SCHEDULE = (
    "update litebroker_schedule set next_at_ms = :next_at_ms, last_at_ms = :last_at_ms"
    " where queue = :queue and name = :name and next_at_ms = :expected and every_ms is :every_ms and cron is :cron"
    " and tz is :tz and last_at_ms is :last and options = :options and payload = :payload"
)

# -- machines and processes --

ANCHOR = "select anchor_ms from litebroker_boot where id = :id"
LATEST_SEEN = "select max(seen_ms) from litebroker_boot"
ADD_BOOT = "insert into litebroker_boot(id, anchor_ms, seen_ms) values(:id, :anchor, :seen) on conflict(id) do nothing"
SEEN = "update litebroker_boot set seen_ms = :seen where id = :id and seen_ms < :seen"
ADD_PROCESS = (
    "insert into litebroker_process(id, boot, label, started_at_ms) values(:id, :boot, :label, :now)"
    " on conflict(id) do nothing"
)
PROCESS_LABEL = "select label from litebroker_process where id = :id"
PROCESSES = "select id, boot, label from litebroker_process"
REMOVE_PROCESS = "delete from litebroker_process where id = :id"

# -- looking after the file --

REMOVE_PROCESSES = "delete from litebroker_process"
# Walks the index of all active jobs, in a file that nobody else uses.
REQUEUE_ACTIVE = f"update litebroker_job set state = 0, attempts = attempts - 1, token = {NO_TOKEN} where state = 1"
# Walks the same, as far as the doctor looks.
LEASES = "select token >> 38, lease_until_ms from litebroker_job where state = 1 limit +:limit"
BOOTS = "select id, anchor_ms, seen_ms from litebroker_boot"
COMPONENTS = "select key, value from litebroker_meta where key >= 'schema' and key < 'schemb'"
