-- Jobs, values and schedules. Times are integer milliseconds: *_at_ms since the epoch (UTC); lease_until_ms
-- and expires_at_ms on the file's steady clock, which litebroker_boot ties to the machine's.
--
-- The names carry a prefix, so that the tables can lie beside an application's own.

create table litebroker_meta(
  key text primary key,
  value text not null
) strict, without rowid;

-- One row for each start of a machine that used the file: steady time = anchor_ms + that machine's uptime.
create table litebroker_boot(
  id text primary key,
  anchor_ms integer not null,
  seen_ms integer not null            -- the latest steady time known, so that the next boot does not start before it
) strict, without rowid;

-- One row for each process that has claimed, for as long as it lives. A free lock on its sidecar means that it died.
create table litebroker_process(
  id integer primary key,             -- 24 bits, the first of its tokens'
  boot text not null,
  label text not null,                -- host:pid
  started_at_ms integer not null
) strict;

-- Never deleted: the ids are cached in every process.
create table litebroker_queue(
  id integer primary key,
  name text not null unique,
  paused_at_ms integer,
  turn integer not null default 0,            -- how many turns have been given to streams
  ungrouped_turn integer not null default 0   -- the last turn of the jobs without a group
) strict;

-- A stream of its own within a queue. Never deleted: its concurrency is fixed by its first job.
create table litebroker_group(
  id integer primary key,
  queue integer not null,
  name text not null,
  concurrency integer not null check (concurrency > 0),
  ready integer not null default 0 check (ready >= 0),    -- counted by the triggers on litebroker_job
  active integer not null default 0 check (active >= 0),
  turn integer not null default 0,
  unique (queue, name)
) strict;

-- serves NEXT_STREAM: saturated and empty groups are not in it
create index litebroker_group_runnable on litebroker_group(queue, turn) where ready > 0 and active < concurrency;

-- A claim overwrites fields of constant size (token, times, attempts 0 to 1), so that SQLite changes the
-- row in place and a large payload is not written again.
create table litebroker_job(
  id integer primary key,             -- made by the client: microseconds since 2026 and 12 bits; never used again
  queue integer not null,
  state integer not null check (state between 0 and 5),
    -- 0 ready, 1 active, 2 delayed, 3 completed, 4 failed, 5 cancelled (0 and 2 are both "pending" outside)
  priority integer not null,
  due_at_ms integer not null,
  attempts integer not null check (attempts >= 0),
  max_attempts integer not null,      -- 0 is without limit
  token integer not null,             -- the lease's: process << 38 | claim; 1 << 60 when there is none
  lease_until_ms integer not null,
  claimed_at_ms integer not null,
  created_at_ms integer not null,
  ended_at_ms integer,
  renewed_at_ms integer,              -- when a lease was last extended, if that is after claimed_at_ms
  grp integer,
  dedupe_key text,
  dedupe_ends integer not null,       -- 1: the key is let go when the job ends
  ref text,
  task text,
  encoding text,
  headers text,                       -- JSON object
  error text,                         -- JSON array: reason, type, message, stack, causes
  history text,                       -- JSON array of the latest attempts
  payload blob not null               -- last, so that reading the rest does not touch its overflow pages
) strict;

-- serves CLAIM_ONE, CLAIM_MANY, HEAD_OF_UNGROUPED, the first page of pending jobs, and counts. The ref is in it so that
-- FIND_BY_REF can look through the queue without its jobs, and the id so that these stay in the order they came.
create index litebroker_job_ready on litebroker_job(queue, priority desc, due_at_ms, id, ref)
  where state = 0 and grp is null;
-- serves HEAD_OF_GROUP and pages of a group
create index litebroker_job_grouped on litebroker_job(grp, priority desc, due_at_ms)
  where state = 0 and grp is not null;
-- serves RECOVER, pages and counts of active jobs
create index litebroker_job_active on litebroker_job(queue, lease_until_ms) where state = 1;
-- serves PROMOTE, pages and counts of delayed jobs
create index litebroker_job_delayed on litebroker_job(queue, due_at_ms) where state = 2;
-- serves pages, counts and pruning of what has ended; one index, since each costs every insert a look at its condition
create index litebroker_job_ended on litebroker_job(queue, state, ended_at_ms)
  where ended_at_ms is not null;
-- holds the dedupe key unique in its queue, and serves HOLDER_OF_KEY
create unique index litebroker_job_dedupe on litebroker_job(queue, dedupe_key)
  where dedupe_key is not null and (dedupe_ends = 0 or state < 3);
-- serves FIND_BY_REF. Refs come in no order, and a page in the middle of the index for each would make an insert half as
-- dear again: most jobs come and go without ever being in it.
create index litebroker_job_ref on litebroker_job(queue, ref)
  where ref is not null and (state >= 2 or grp is not null);

create table litebroker_value(
  id integer primary key,
  space text not null,
  key text not null,
  number integer not null,
  expires_at_ms integer,
  owner_job integer,                  -- with owner_token: gone when that lease is
  owner_token integer,
  data blob not null,
  unique (space, key)
) strict;

-- serves SWEEP_EXPIRED
create index litebroker_value_expiry on litebroker_value(expires_at_ms) where expires_at_ms is not null;
-- serves SWEEP_ORPHANED
create index litebroker_value_owner on litebroker_value(owner_job) where owner_job is not null;

create table litebroker_schedule(
  id integer primary key,
  queue integer not null,
  name text not null,
  every_ms integer,
  cron text,
  tz text,
  next_at_ms integer not null,
  last_at_ms integer,
  options text not null,              -- JSON object: the options of the job that each tick adds
  payload blob not null,
  unique (queue, name)
) strict;

-- serves DUE_SCHEDULES
create index litebroker_schedule_next on litebroker_schedule(queue, next_at_ms);
