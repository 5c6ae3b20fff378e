BEGIN TRANSACTION;
CREATE TABLE litebroker_boot(
  id text primary key,
  anchor_ms integer not null,
  seen_ms integer not null            -- the latest steady time known, so that the next boot does not start before it
) strict, without rowid;
INSERT INTO "litebroker_boot" VALUES('another-start time:[4026531834]',1796032957921,1796057247936);
CREATE TABLE litebroker_group(
  id integer primary key,
  queue integer not null,
  name text not null,
  concurrency integer not null check (concurrency > 0),
  ready integer not null default 0 check (ready >= 0),    -- counted by the triggers on litebroker_job
  active integer not null default 0 check (active >= 0),
  turn integer not null default 0,
  unique (queue, name)
) strict;
INSERT INTO "litebroker_group" VALUES(1,2,'g',2,3,0,0);
CREATE TABLE litebroker_job(
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
INSERT INTO "litebroker_job" VALUES(118094429950941140,1,0,0,1796057247937,0,3,1152921504606846976,1796057247937,1796057247937,1796057247937,NULL,1796057247937,NULL,NULL,0,'r0',NULL,NULL,NULL,NULL,NULL,X'227265616479203022');
INSERT INTO "litebroker_job" VALUES(118094429950945236,1,1,1,1796057247937,1,3,3134641405684320613,1796057307940,1796057247940,1796057247937,NULL,1796057247937,NULL,NULL,0,'r1',NULL,NULL,NULL,NULL,NULL,X'227265616479203122');
INSERT INTO "litebroker_job" VALUES(118094429950949332,1,0,0,1796057247937,0,3,1152921504606846976,1796057247937,1796057247937,1796057247937,NULL,1796057247937,NULL,NULL,0,'r2',NULL,NULL,NULL,NULL,NULL,X'227265616479203222');
INSERT INTO "litebroker_job" VALUES(118094429950953428,1,0,1,1796057247937,0,3,1152921504606846976,1796057247937,1796057247937,1796057247937,NULL,1796057247937,NULL,NULL,0,'r3',NULL,NULL,NULL,NULL,NULL,X'227265616479203322');
INSERT INTO "litebroker_job" VALUES(118094429950957524,1,0,0,1796057247937,0,3,1152921504606846976,1796057247937,1796057247937,1796057247937,NULL,1796057247937,NULL,NULL,0,'r4',NULL,NULL,NULL,NULL,NULL,X'227265616479203422');
INSERT INTO "litebroker_job" VALUES(118094429950961620,1,0,1,1796057247937,0,3,1152921504606846976,1796057247937,1796057247937,1796057247937,NULL,1796057247937,NULL,NULL,0,'r5',NULL,NULL,NULL,NULL,NULL,X'227265616479203522');
INSERT INTO "litebroker_job" VALUES(118094429951875028,1,2,0,4000000000000,0,3,1152921504606846976,1796057247937,1796057247937,1796057247937,NULL,1796057247937,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,X'226C6174657222');
INSERT INTO "litebroker_job" VALUES(118094429951879124,1,0,0,1796057247937,0,3,1152921504606846976,1796057247937,1796057247937,1796057247937,NULL,1796057247937,NULL,'k',0,NULL,NULL,NULL,NULL,NULL,NULL,X'226B6579656422');
INSERT INTO "litebroker_job" VALUES(118094429953501140,2,0,0,1796057247937,0,3,1152921504606846976,1796057247937,1796057247937,1796057247937,NULL,1796057247937,1,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,X'2267726F75706564203022');
INSERT INTO "litebroker_job" VALUES(118094429953505236,2,0,0,1796057247937,0,3,1152921504606846976,1796057247937,1796057247937,1796057247937,NULL,1796057247937,1,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,X'2267726F75706564203122');
INSERT INTO "litebroker_job" VALUES(118094429953509332,2,0,0,1796057247937,0,3,1152921504606846976,1796057247937,1796057247937,1796057247937,NULL,1796057247937,1,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,X'2267726F75706564203222');
INSERT INTO "litebroker_job" VALUES(118094429956847572,3,3,0,1796057247938,1,3,1152921504606846976,1796057307938,1796057247939,1796057247938,1796057247939,1796057247938,NULL,NULL,0,NULL,'t',NULL,'{"a": "b"}',NULL,'[[1,1796057247939,1796057247939,"another:1","completed",null]]',X'22656E64203022');
INSERT INTO "litebroker_job" VALUES(118094429956851668,3,4,0,1796057247938,1,3,1152921504606846976,1796057307938,1796057247939,1796057247938,1796057247939,1796057247938,NULL,NULL,0,NULL,'t',NULL,'{"a": "b"}','["handler", "ValueError", "no", "stack", ["KeyError: 1"]]','[[1,1796057247939,1796057247939,"another:1","failed","ValueError: no"]]',X'22656E64203122');
INSERT INTO "litebroker_job" VALUES(118094429956855764,3,0,0,1796057247938,0,3,1152921504606846976,1796057247938,1796057247938,1796057247938,NULL,1796057247938,NULL,NULL,0,NULL,'t',NULL,'{"a": "b"}',NULL,NULL,X'22656E64203222');
CREATE TABLE litebroker_meta(
  key text primary key,
  value text not null
) strict, without rowid;
INSERT INTO "litebroker_meta" VALUES('schema','1');
CREATE TABLE litebroker_process(
  id integer primary key,             -- 24 bits, the first of its tokens'
  boot text not null,
  label text not null,                -- host:pid
  started_at_ms integer not null
) strict;
INSERT INTO "litebroker_process" VALUES(11403759,'another-start','another:1',1796057247939);
CREATE TABLE litebroker_queue(
  id integer primary key,
  name text not null unique,
  paused_at_ms integer,
  turn integer not null default 0,            -- how many turns have been given to streams
  ungrouped_turn integer not null default 0   -- the last turn of the jobs without a group
) strict;
INSERT INTO "litebroker_queue" VALUES(1,'work',NULL,0,0);
INSERT INTO "litebroker_queue" VALUES(2,'grouped',NULL,0,0);
INSERT INTO "litebroker_queue" VALUES(3,'ends',NULL,0,0);
INSERT INTO "litebroker_queue" VALUES(4,'ticks',NULL,0,0);
CREATE TABLE litebroker_schedule(
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
INSERT INTO "litebroker_schedule" VALUES(1,4,'s',60000,NULL,NULL,1800000000000,NULL,'{}',X'227469636B22');
CREATE TABLE litebroker_value(
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
INSERT INTO "litebroker_value" VALUES(1,'space','key',3,NULL,NULL,NULL,X'76616C7565');
CREATE INDEX litebroker_group_runnable on litebroker_group(queue, turn) where ready > 0 and active < concurrency;
CREATE INDEX litebroker_job_ready on litebroker_job(queue, priority desc, due_at_ms, id, ref)
  where state = 0 and grp is null;
CREATE INDEX litebroker_job_grouped on litebroker_job(grp, priority desc, due_at_ms)
  where state = 0 and grp is not null;
CREATE INDEX litebroker_job_active on litebroker_job(queue, lease_until_ms) where state = 1;
CREATE INDEX litebroker_job_delayed on litebroker_job(queue, due_at_ms) where state = 2;
CREATE INDEX litebroker_job_ended on litebroker_job(queue, state, ended_at_ms)
  where ended_at_ms is not null;
CREATE UNIQUE INDEX litebroker_job_dedupe on litebroker_job(queue, dedupe_key)
  where dedupe_key is not null and (dedupe_ends = 0 or state < 3);
CREATE INDEX litebroker_job_ref on litebroker_job(queue, ref)
  where ref is not null and (state >= 2 or grp is not null);
CREATE INDEX litebroker_value_expiry on litebroker_value(expires_at_ms) where expires_at_ms is not null;
CREATE INDEX litebroker_value_owner on litebroker_value(owner_job) where owner_job is not null;
CREATE INDEX litebroker_schedule_next on litebroker_schedule(queue, next_at_ms);
CREATE TRIGGER litebroker_job_grouped_insert after insert on litebroker_job
when new.grp is not null and new.state = 0 begin
  update litebroker_group set
    turn = case
      when ready = 0 then max(turn, (select turn from litebroker_queue where id = new.queue)) else turn
    end,
    ready = ready + 1
  where id = new.grp;
end;
CREATE TRIGGER litebroker_job_grouped_leave after update of state, grp on litebroker_job
when old.grp is not null and old.state < 2 and (old.state <> new.state or old.grp is not new.grp) begin
  update litebroker_group set ready = ready - (old.state = 0), active = active - (old.state = 1) where id = old.grp;
end;
CREATE TRIGGER litebroker_job_grouped_enter after update of state, grp on litebroker_job
when new.grp is not null and new.state < 2 and (old.state <> new.state or old.grp is not new.grp) begin
  update litebroker_group set
    turn = case
      when new.state = 0 and ready = 0 then max(turn, (select turn from litebroker_queue where id = new.queue))
      else turn
    end,
    ready = ready + (new.state = 0),
    active = active + (new.state = 1)
  where id = new.grp;
end;
CREATE TRIGGER litebroker_job_grouped_delete after delete on litebroker_job
when old.grp is not null and old.state < 2 begin
  update litebroker_group set ready = ready - (old.state = 0), active = active - (old.state = 1) where id = old.grp;
end;
COMMIT;
