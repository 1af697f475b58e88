-- The first schema. Tables have names of their own; what people read are the views below (their names are the documentation's).
-- Instants are milliseconds since the epoch, UTC; `lease_until` alone is milliseconds of the machine's boot clock.
-- The views must work in any sqlite3 shell from 3.40 on.

CREATE TABLE run (                              -- the head of each run; all but the lease can be rebuilt from its entries
    run_no             INTEGER PRIMARY KEY,
    run_id             TEXT    NOT NULL UNIQUE,
    agent              TEXT    NOT NULL,
    agent_version      TEXT    NOT NULL DEFAULT '',
    status             TEXT    NOT NULL,
    reason             TEXT,
    entries            INTEGER NOT NULL,
    seq                INTEGER NOT NULL,
    model_calls        INTEGER NOT NULL DEFAULT 0,
    input_tokens       INTEGER NOT NULL DEFAULT 0,
    output_tokens      INTEGER NOT NULL DEFAULT 0,
    cache_read_tokens  INTEGER NOT NULL DEFAULT 0,
    cache_write_tokens INTEGER NOT NULL DEFAULT 0,
    cost_usd           TEXT,
    wake_at            INTEGER,                 -- the least instant at which there is something to do; NULL: before somebody acts, nothing
    driver             TEXT    NOT NULL,
    needs              TEXT,                    -- what the code of every worker so far lacked
    lease_owner        TEXT,                    -- NULL: nobody holds it
    lease_until        INTEGER,                 -- boot clock; 0: its process is dead
    lease_boot         TEXT,                    -- the boot that this clock counts from
    lease_until_at     INTEGER,                 -- the same as a wall instant: shown, never compared by a worker
    fence              INTEGER NOT NULL DEFAULT 0,
    nonce              TEXT,                    -- of the claim that stands; kept after a release, so that a lost answer can be settled
    attempts           INTEGER NOT NULL DEFAULT 0,
    tags               TEXT    NOT NULL DEFAULT '{}',
    started_by         TEXT,
    parent_run_id      TEXT,
    parent_call_id     TEXT,
    input_digest       TEXT    NOT NULL DEFAULT '',
    format             INTEGER NOT NULL,        -- of the journal, when the run was started
    created_at         INTEGER NOT NULL,
    updated_at         INTEGER NOT NULL
) STRICT;

CREATE INDEX run_created ON run (created_at, run_id);
CREATE INDEX run_unfinished ON run (created_at, run_id) WHERE status <> 'done' AND status <> 'failed' AND status <> 'cancelled';
CREATE INDEX run_due ON run (driver, agent, wake_at) WHERE lease_owner IS NULL AND wake_at IS NOT NULL;
CREATE INDEX run_held ON run (driver, agent, lease_until) WHERE lease_owner IS NOT NULL;
CREATE INDEX run_holders ON run (lease_boot, lease_owner) WHERE lease_owner IS NOT NULL;
CREATE INDEX run_parked ON run (driver, agent, needs) WHERE lease_owner IS NULL AND needs IS NOT NULL;

CREATE INDEX run_failed ON run (run_no) WHERE status = 'failed';

CREATE TABLE entry (                            -- the journal
    run_no   INTEGER NOT NULL,
    seq      INTEGER NOT NULL,                  -- the message that this entry is, or came after
    entry_no INTEGER NOT NULL,                  -- 1, 2, 3, … per run, no gaps
    kind     TEXT    NOT NULL,
    at       INTEGER NOT NULL,
    fence    INTEGER NOT NULL,                  -- of the lease it was written under; 0: from outside
    "by"     TEXT,
    entry_id TEXT,
    status   TEXT    NOT NULL,                  -- of the run, once the append that wrote it stood
    digest   BLOB    NOT NULL,                  -- chained from the first entry on
    meta     TEXT,                              -- JSON: what came beside a message
    body     TEXT    NOT NULL,                  -- JSON exactly as produced; last, so that the rest is read without it
    PRIMARY KEY (run_no, seq, entry_no)         -- order of the journal and of the checkpoints in one index
) STRICT;

CREATE UNIQUE INDEX entry_ids ON entry (run_no, entry_id) WHERE entry_id IS NOT NULL;

CREATE TABLE gate (                             -- a projection of the journal, `notified_at` excepted
    run_no      INTEGER NOT NULL,
    gate_id     TEXT    NOT NULL,
    kind        TEXT    NOT NULL,
    call_id     TEXT,
    tool        TEXT,
    args        TEXT    NOT NULL,
    digest      TEXT    NOT NULL,
    text        TEXT    NOT NULL,
    role        TEXT,
    level       INTEGER NOT NULL,
    deadline    INTEGER,
    next_at     INTEGER,
    closes_at   INTEGER,
    created_at  INTEGER NOT NULL,
    outcome     TEXT,                           -- NULL: open
    decided_at  INTEGER,
    decided_by  TEXT,
    note        TEXT,
    edited_args TEXT,
    guarded     INTEGER NOT NULL,
    seq         INTEGER NOT NULL,
    notified_at INTEGER,
    PRIMARY KEY (run_no, gate_id)
) STRICT;

-- The inbox's order: soonest deadline first, those without one last, then oldest first.
CREATE INDEX gate_inbox ON gate (coalesce(deadline, 9223372036854775807), created_at)
 WHERE outcome IS NULL AND kind IN ('approval', 'verification', 'budget');

-- Gates whose clock has something new to say.
CREATE INDEX gate_due ON gate (next_at) WHERE outcome IS NULL AND next_at IS NOT NULL;

CREATE TABLE notice (                           -- who is to be told, after the commit
    run_no      INTEGER NOT NULL,
    notice_id   TEXT    NOT NULL,
    target      TEXT    NOT NULL,
    gate_id     TEXT    NOT NULL,
    kind        TEXT    NOT NULL,
    text        TEXT    NOT NULL,
    tries       INTEGER NOT NULL DEFAULT 0,
    next_try_at INTEGER,
    sent_at     INTEGER,
    error       TEXT,
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (run_no, notice_id, target)
) STRICT;

CREATE INDEX notice_due ON notice (next_try_at) WHERE sent_at IS NULL;

-- ---- views ----------------------------------------------------------------------------------------------------------------

CREATE VIEW runs AS
SELECT run_id, agent, agent_version, status, reason, seq, model_calls, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens,
       cost_usd, attempts, tags, started_by, parent_run_id, parent_call_id, lease_owner,
       strftime('%Y-%m-%dT%H:%M:%fZ', lease_until_at / 1000.0, 'unixepoch') AS lease_until,
       strftime('%Y-%m-%dT%H:%M:%fZ', wake_at / 1000.0, 'unixepoch') AS wake_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') AS created_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', updated_at / 1000.0, 'unixepoch') AS updated_at,
       driver, needs, entries, fence
  FROM run;

CREATE VIEW journal AS
SELECT r.run_id, e.entry_no, e.seq, e.kind, strftime('%Y-%m-%dT%H:%M:%fZ', e.at / 1000.0, 'unixepoch') AS at, e."by", e.status, e.fence,
       e.meta, e.body, e.entry_id, lower(hex(e.digest)) AS digest
  FROM run r JOIN entry e ON e.run_no = r.run_no;

-- One row a saved message, with the whole list as of then; stored is only the message. The last row of a run that is over shows how it
-- ended, and that of a run taken up again what it is now; every other row what it was when it was saved.
CREATE VIEW checkpoints AS
SELECT r.run_id, e.seq,
       CASE WHEN e.seq = r.seq AND (r.status IN ('done', 'failed', 'cancelled') OR e.status IN ('done', 'failed', 'cancelled'))
            THEN r.status ELSE e.status END AS status,
       (SELECT '[' || group_concat(body, ', ') || ']'
          FROM (SELECT m.body FROM entry m
                 WHERE m.run_no = e.run_no AND m.seq <= e.seq AND m.kind = 'MessageAdded'
                 ORDER BY m.seq)) AS messages,
       strftime('%Y-%m-%dT%H:%M:%fZ', e.at / 1000.0, 'unixepoch') AS created_at
  FROM run r JOIN entry e ON e.run_no = r.run_no AND e.kind = 'MessageAdded';

CREATE VIEW messages AS
SELECT r.run_id, e.seq, e.body ->> '$.role' AS role, e.body -> '$.content' AS content,
       strftime('%Y-%m-%dT%H:%M:%fZ', e.at / 1000.0, 'unixepoch') AS created_at
  FROM run r JOIN entry e ON e.run_no = r.run_no AND e.kind = 'MessageAdded';

CREATE VIEW gates AS
SELECT r.run_id, g.gate_id, g.kind, g.call_id, g.tool, g.args, g.digest, g.text, g.role, g.level,
       strftime('%Y-%m-%dT%H:%M:%fZ', g.deadline / 1000.0, 'unixepoch') AS deadline,
       strftime('%Y-%m-%dT%H:%M:%fZ', g.created_at / 1000.0, 'unixepoch') AS created_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', g.notified_at / 1000.0, 'unixepoch') AS notified_at,
       g.outcome, strftime('%Y-%m-%dT%H:%M:%fZ', g.decided_at / 1000.0, 'unixepoch') AS decided_at, g.decided_by, g.note, g.edited_args,
       r.agent, r.tags, r.started_by,
       strftime('%Y-%m-%dT%H:%M:%fZ', g.next_at / 1000.0, 'unixepoch') AS next_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', g.closes_at / 1000.0, 'unixepoch') AS closes_at, g.guarded, g.seq
  FROM gate g JOIN run r ON r.run_no = g.run_no;

CREATE VIEW inbox AS
SELECT * FROM gates WHERE outcome IS NULL AND kind IN ('approval', 'verification', 'budget');

CREATE VIEW decisions AS
SELECT * FROM gates WHERE outcome IS NOT NULL AND decided_by IS NOT NULL AND kind IN ('approval', 'verification', 'budget');

CREATE VIEW notices AS
SELECT r.run_id, n.notice_id, n.gate_id, n.kind, n.target, n.text, n.tries,
       strftime('%Y-%m-%dT%H:%M:%fZ', n.next_try_at / 1000.0, 'unixepoch') AS next_try_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', n.sent_at / 1000.0, 'unixepoch') AS sent_at, n.error,
       strftime('%Y-%m-%dT%H:%M:%fZ', n.created_at / 1000.0, 'unixepoch') AS created_at
  FROM notice n JOIN run r ON r.run_no = n.run_no;

-- Every tool call that a model asked for, and how it stands: from the journal alone, so it is right before any worker has looked again.
-- Its entries have the seq of the answer that holds it, until the user message that answers the batch.
CREATE VIEW tool_calls AS
WITH call AS (
    SELECT a.run_no, a.seq, u.key AS place, u.value ->> '$.id' AS call_id, u.value ->> '$.name' AS tool, u.value -> '$.input' AS args
      FROM entry a, json_each(a.body, '$.content') u
     WHERE a.kind = 'MessageAdded' AND a.body ->> '$.role' = 'assistant'
       AND CASE WHEN u.type = 'object' THEN u.value ->> '$.type' = 'tool_use' END  -- content that is a text yields rows of type text
), seen AS (
    SELECT c.*, r.run_id, r.seq AS last_seq,
           (SELECT e.entry_no FROM entry e WHERE e.run_no = c.run_no AND e.seq = c.seq AND e.kind = 'CallFinished'
               AND e.body ->> '$.call_id' = c.call_id ORDER BY e.entry_no DESC LIMIT 1) AS finished,
           (SELECT e.entry_no FROM entry e WHERE e.run_no = c.run_no AND e.seq = c.seq AND e.kind = 'CallStarted'
               AND e.body ->> '$.call_id' = c.call_id ORDER BY e.entry_no LIMIT 1) AS first_started,
           (SELECT e.kind FROM entry e WHERE e.run_no = c.run_no AND e.seq = c.seq
               AND CASE e.kind WHEN 'CallStarted' THEN e.body ->> '$.call_id' = c.call_id
                               WHEN 'CallSkipped' THEN e.body ->> '$.call_id' = c.call_id
                               WHEN 'CallFailed'  THEN e.body ->> '$.call_id' = c.call_id
                               WHEN 'CallDoubted' THEN e.body ->> '$.call_id' = c.call_id
                               WHEN 'GateDecided' THEN e.body ->> '$.outcome' = 'run_again' AND e.body ->> '$.gate_id' IN
                                    (SELECT g.gate_id FROM gate g WHERE g.run_no = c.run_no AND g.call_id = c.call_id) END
             ORDER BY e.entry_no DESC LIMIT 1) AS last_act,
           (SELECT count(*) FROM entry e WHERE e.run_no = c.run_no AND e.seq = c.seq AND e.kind = 'CallStarted'
               AND e.body ->> '$.call_id' = c.call_id) AS intents,
           (SELECT count(*) FROM entry e WHERE e.run_no = c.run_no AND e.seq = c.seq AND e.kind = 'CallFailed'
               AND e.body ->> '$.call_id' = c.call_id) AS failures,
           EXISTS (SELECT 1 FROM gate g WHERE g.run_no = c.run_no AND g.call_id = c.call_id AND g.outcome IS NULL AND g.kind <> 'verification')
               AS gated,
           EXISTS (SELECT 1 FROM gate g WHERE g.run_no = c.run_no AND g.call_id = c.call_id AND g.kind IN ('event', 'run')) AS sleeps
      FROM call c JOIN run r ON r.run_no = c.run_no
)
SELECT s.run_id, s.seq, s.call_id, s.tool, s.args, coalesce(b.body ->> '$.effect', f.body ->> '$.effect') AS effect,
       CASE WHEN f.entry_no IS NOT NULL THEN
                 CASE coalesce(f.body ->> '$.how', 'result') WHEN 'refused' THEN 'refused' WHEN 'cancelled' THEN 'refused'
                                                             WHEN 'unknown' THEN 'unknown' ELSE 'done' END
            WHEN s.last_seq > s.seq THEN 'done'         -- a history that was given as input: the next message holds the result
            WHEN s.gated THEN 'waiting'
            WHEN s.last_act IN ('CallStarted', 'CallDoubted') AND NOT s.sleeps THEN 'begun'
            ELSE 'pending' END AS state,
       CASE WHEN s.intents > 0 THEN s.intents
            ELSE s.failures + (f.entry_no IS NOT NULL AND coalesce(f.body ->> '$.how', 'result') = 'result') END AS attempts,
       coalesce(b.body ->> '$.key', s.run_id || ':' || s.call_id) AS idempotency_key,
       strftime('%Y-%m-%dT%H:%M:%fZ', b.at / 1000.0, 'unixepoch') AS started_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', f.at / 1000.0, 'unixepoch') AS finished_at
  FROM seen s
  LEFT JOIN entry b ON b.run_no = s.run_no AND b.seq = s.seq AND b.entry_no = s.first_started
  LEFT JOIN entry f ON f.run_no = s.run_no AND f.seq = s.seq AND f.entry_no = s.finished;

-- Begun, and nobody can say what came of it: of runs that nobody holds at this moment, and what was left open by a cancel. Once a person
-- has said what happened, or a late result says it, the doubt is over.
CREATE VIEW in_doubt AS
SELECT c.*
  FROM run r JOIN tool_calls c ON c.run_id = r.run_id
 WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND c.state = 'begun'
   AND (r.lease_owner IS NULL OR r.lease_until_at <= CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER))
UNION ALL
SELECT c.*
  FROM entry e JOIN run r ON r.run_no = e.run_no JOIN tool_calls c ON c.run_id = r.run_id AND c.seq = e.seq AND c.call_id = e.body ->> '$.call_id'
 WHERE e.kind = 'CallFinished' AND e.body ->> '$.how' = 'unknown' AND c.state = 'unknown'
   AND NOT EXISTS (SELECT 1 FROM gate g WHERE g.run_no = e.run_no AND g.call_id = c.call_id AND g.kind = 'verification' AND g.decided_by IS NOT NULL)
   AND NOT EXISTS (SELECT 1 FROM entry l WHERE l.run_no = e.run_no AND l.seq >= e.seq AND l.kind = 'LateResult'
                      AND l.body ->> '$.call_id' = c.call_id);

-- What does not go on by itself: why, since when, and the one command that mends it. A run may have several rows. By the wall clock of the
-- machine that asks.
CREATE VIEW stuck AS
WITH clock(late) AS (SELECT CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - 300000),  -- five minutes ago
found(run_no, since, reason, command) AS (
    SELECT g.run_no, g.created_at,
           g.text || CASE WHEN g.role IS NULL AND g.deadline IS NULL THEN ': asked is nobody in particular, and there is no deadline'
                          WHEN g.role IS NULL THEN ': asked is nobody in particular'
                          WHEN g.deadline IS NULL THEN ': it waits for ' || g.role || ' without a deadline'
                          ELSE ': it still waits for ' || g.role || ', though its last deadline has passed' END,
           'outlast approve ' || r.run_id || ' ' || coalesce(g.call_id, g.gate_id)
      FROM clock, gate g INDEXED BY gate_inbox JOIN run r ON r.run_no = g.run_no
     WHERE g.outcome IS NULL AND g.kind IN ('approval', 'verification', 'budget') AND g.kind <> 'verification'
       AND (g.role IS NULL OR g.deadline IS NULL OR (g.closes_at IS NULL AND g.deadline < clock.late))
    UNION ALL
    SELECT g.run_no, g.created_at, g.text, 'outlast verify ' || r.run_id || ' ' || coalesce(g.call_id, g.gate_id)
      FROM gate g INDEXED BY gate_inbox JOIN run r ON r.run_no = g.run_no
     WHERE g.outcome IS NULL AND g.kind IN ('approval', 'verification', 'budget') AND g.kind = 'verification'
    UNION ALL
    SELECT n.run_no, n.created_at,
           'the notice (' || n.kind || ') of ' || n.gate_id
           || CASE WHEN n.tries = 0 THEN ' waits for a process that tells ' || n.target
                   ELSE ' could not be delivered to ' || n.target || ' in ' || n.tries || ' tries' END
           || CASE WHEN n.next_try_at IS NULL THEN ', it is not tried again' ELSE '' END || coalesce(': ' || n.error, ''),
           'outlast sweep'
      FROM clock, notice n INDEXED BY notice_due JOIN run r ON r.run_no = n.run_no
     WHERE n.sent_at IS NULL AND r.status NOT IN ('done', 'failed', 'cancelled')
       AND (n.tries >= 3 OR n.next_try_at IS NULL OR (n.tries = 0 AND n.next_try_at < clock.late))
    UNION ALL
    SELECT r.run_no, r.updated_at, r.reason, 'outlast worker --agent ' || r.agent
      FROM run r INDEXED BY run_unfinished WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND r.status = 'waiting_for_code'
    UNION ALL
    SELECT r.run_no, r.wake_at, 'it is due, and no worker takes it: none that runs knows the agent ' || r.agent,
           CASE r.driver WHEN 'script' THEN 'outlast show ' || r.run_id ELSE 'outlast worker --agent ' || r.agent END
      FROM clock, run r INDEXED BY run_unfinished
     WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled'
       AND r.status <> 'waiting_for_code' AND r.lease_owner IS NULL AND r.wake_at < clock.late
    UNION ALL
    SELECT r.run_no, r.lease_until_at, 'its worker is gone, and no other takes it: none that runs knows the agent ' || r.agent,
           CASE r.driver WHEN 'script' THEN 'outlast show ' || r.run_id ELSE 'outlast worker --agent ' || r.agent END
      FROM clock, run r INDEXED BY run_unfinished
     WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled'
       AND r.lease_owner IS NOT NULL AND r.lease_until_at < clock.late
    UNION ALL
    SELECT r.run_no, r.updated_at, 'its worker died ' || r.attempts || ' times in a row', 'outlast show ' || r.run_id || ' --journal'
      FROM run r INDEXED BY run_unfinished WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND r.attempts >= 3
    UNION ALL
    SELECT r.run_no, r.updated_at, r.reason, 'outlast retry ' || r.run_id
      FROM run r INDEXED BY run_failed WHERE r.status = 'failed' AND r.reason LIKE 'worker died % times while %'
    UNION ALL                                        -- stopped and marked: its journal does not say that it is over
    SELECT r.run_no, r.updated_at, coalesce(r.reason, 'its journal cannot be read'), 'outlast store check'
      FROM run r INDEXED BY run_failed
     WHERE r.status = 'failed'
       AND (SELECT e.status FROM entry e WHERE e.run_no = r.run_no ORDER BY e.seq DESC, e.entry_no DESC LIMIT 1) <> 'failed'
)
SELECT r.run_id, r.status, f.reason, strftime('%Y-%m-%dT%H:%M:%fZ', f.since / 1000.0, 'unixepoch') AS since, f.command
  FROM found f JOIN run r ON r.run_no = f.run_no;
