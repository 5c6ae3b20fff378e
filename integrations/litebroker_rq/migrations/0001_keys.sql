-- What RQ keeps in Redis beside its queues. `key` is Redis' own name of it.
--
-- A hash is kept in one row, as a JSON object of which each byte is one character (Latin-1), so that SQL can read it:
--     select value ->> '$.status' from litebroker_rq_keys where key = cast('rq:job:<id>' as blob)
-- A value of more than a few KiB lies in litebroker_rq_fields instead, and is `true` in the object: a change of status
-- then does not write a megabyte of arguments again.
create table litebroker_rq_keys (
    id            integer primary key,
    key           blob    not null unique,
    kind          text    not null check (kind in ('string', 'hash', 'list', 'set', 'zset', 'stream')),
    version       integer not null,          -- another one with each change; what WATCH compares
    expires_at_ms integer,                   -- on the wall clock, as Redis counts
    value         any                        -- of a string and of a hash
) strict;

-- Serves the purge of what has expired.
create index litebroker_rq_keys_expiring on litebroker_rq_keys (expires_at_ms) where expires_at_ms is not null;

create table litebroker_rq_fields (
    key_id integer not null,
    field  text    not null,
    value  blob    not null,
    unique (key_id, field)
) strict;

-- Members of sets (without a score) and of sorted sets.
create table litebroker_rq_members (
    key_id integer not null,
    member blob    not null,
    score  real,
    primary key (key_id, member)
) strict, without rowid;

-- Serves ranges by score and by rank.
create index litebroker_rq_members_by_score on litebroker_rq_members (key_id, score, member) where score is not null;

-- Lists that are no queue. Positions have gaps.
create table litebroker_rq_items (
    key_id   integer not null,
    position integer not null,
    value    blob    not null,
    primary key (key_id, position)
) strict, without rowid;

create table litebroker_rq_entries (
    key_id integer not null,
    ms     integer not null,
    seq    integer not null,
    fields blob    not null,
    unique (key_id, ms, seq)
) strict;

-- Lists that are RQ queues are queues of the engine, by the same name.
create table litebroker_rq_queues (
    name text primary key
) strict, without rowid;

-- A job that left its queue, until it is known to have started: which lease of the engine protects it. There are no more
-- of them than jobs that are about to start, so that to look through them all costs less than to keep an index.
create table litebroker_rq_claims (
    job_id       integer primary key,
    token        integer not null,
    queue        text    not null,
    ref          blob    not null,
    job_key      blob    not null,           -- the hash whose status tells
    intermediate blob                        -- the list that it stands in meanwhile, if RQ has moved it
) strict;

-- Who is who on this machine, so that the dead are noticed: workers, and jobs that run.
create table litebroker_rq_workers (
    key       blob    primary key,           -- <prefix>:worker:<name>
    process   text    not null
) strict, without rowid;

create table litebroker_rq_runs (
    job_key   blob    primary key,           -- <prefix>:job:<id>
    origin    blob    not null,              -- its queue's name
    process   text    not null,              -- the one that performs it
    worker    text    not null               -- that process' parent
) strict, without rowid;

-- What the worker last answered its work horse, for one whose worker was killed before it could hear it.
create table litebroker_rq_answers (
    worker   text    primary key,            -- the processes, as in the tables above
    horse    text    not null,
    question integer not null,               -- a number that the work horse drew
    answer   blob                            -- null when it was too long
) strict, without rowid;

create table litebroker_rq_clients (
    id      integer primary key,
    name    text not null,
    process text not null
) strict;

-- Pub/sub. A message is read by whoever subscribed before it; it is deleted after a minute.
create table litebroker_rq_messages (
    id              integer primary key autoincrement,
    channel         blob    not null,
    payload         blob    not null,
    published_at_ms integer not null
) strict;

create table litebroker_rq_subscriptions (
    id      integer primary key,
    client  integer not null,
    pattern blob    not null,
    kind    text    not null check (kind in ('channel', 'pattern')),
    process text    not null
) strict;

-- Queue.enqueue(dedupe_key=...): which job holds a key, as long as that job is neither ended nor gone.
create table litebroker_rq_dedupe_keys (
    queue   text not null,
    key     text not null,
    job_key blob not null,
    primary key (queue, key)
) strict, without rowid;
