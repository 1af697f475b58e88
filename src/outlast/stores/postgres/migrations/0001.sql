-- The first schema, written for the schema `outlast`; another name is put in its place. Tables have names of their own; what people read are
-- the views below (their names are the documentation's).
-- Instants are milliseconds since the epoch by the server's clock. JSON that was produced once is `json`, never `jsonb`: it comes back as it went in.
-- No index holds a column that an ordinary append changes (`entries`, `seq`, `updated_at`, counts): so an append's new row version needs no
-- new index entries (a HOT update).

CREATE TABLE outlast.run (                      -- the head of each run; all but the lease can be rebuilt from its entries
    run_no             bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id             text    COLLATE "C" NOT NULL UNIQUE,  -- so that a child (PARENT:CALL) sorts after its parent: the order of locks
    agent              text    NOT NULL,
    agent_version      text    NOT NULL DEFAULT '',
    status             text    NOT NULL,
    reason             text,
    entries            integer NOT NULL,
    seq                integer NOT NULL,
    model_calls        bigint  NOT NULL DEFAULT 0,
    input_tokens       bigint  NOT NULL DEFAULT 0,
    output_tokens      bigint  NOT NULL DEFAULT 0,
    cache_read_tokens  bigint  NOT NULL DEFAULT 0,
    cache_write_tokens bigint  NOT NULL DEFAULT 0,
    cost_usd           text,
    wake_at            bigint,                  -- the least instant at which there is something to do; NULL: before somebody acts, nothing
    driver             text    NOT NULL,
    needs              text,                    -- what the code of every worker so far lacked
    lease_owner        text,                    -- NULL: nobody holds it
    lease_until        bigint,                  -- 0: its process is dead
    fence              bigint  NOT NULL DEFAULT 0,
    nonce              text,                    -- of the claim that stands; kept after a release, so that a lost answer can be settled
    attempts           integer NOT NULL DEFAULT 0,
    tags               json    NOT NULL DEFAULT '{}',
    started_by         text,
    parent_run_id      text,
    parent_call_id     text,
    input_digest       text    NOT NULL DEFAULT '',
    format             integer NOT NULL,        -- of the journal, when the run was started
    created_at         bigint  NOT NULL,
    updated_at         bigint  NOT NULL,
    ended_at           bigint  GENERATED ALWAYS AS (CASE WHEN status IN ('done', 'failed', 'cancelled') THEN updated_at END) STORED
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);

CREATE INDEX run_created ON outlast.run (created_at, run_id);
CREATE INDEX run_unfinished ON outlast.run (created_at, run_id) WHERE status <> 'done' AND status <> 'failed' AND status <> 'cancelled';
CREATE INDEX run_due ON outlast.run (driver, agent, wake_at) WHERE lease_owner IS NULL AND wake_at IS NOT NULL AND needs IS NULL;
CREATE INDEX run_held ON outlast.run (driver, agent, lease_until) WHERE lease_owner IS NOT NULL;
CREATE INDEX run_holders ON outlast.run (lease_owner) WHERE lease_owner IS NOT NULL AND lease_until > 0;
CREATE INDEX run_parked ON outlast.run (driver, agent, needs) WHERE lease_owner IS NULL AND needs IS NOT NULL;
CREATE INDEX run_failed ON outlast.run (run_no) WHERE status = 'failed';
CREATE INDEX run_status ON outlast.run (status, created_at, run_id);
CREATE INDEX run_agent ON outlast.run (agent, created_at, run_id);
CREATE INDEX run_ended ON outlast.run (ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE outlast.entry (                    -- the journal
    run_no   bigint  NOT NULL,
    seq      integer NOT NULL,                  -- the message that this entry is, or came after
    entry_no integer NOT NULL,                  -- 1, 2, 3, … per run, no gaps
    at       bigint  NOT NULL,
    fence    bigint  NOT NULL,                  -- of the lease it was written under; 0: from outside
    kind     text    NOT NULL,
    "by"     text,
    entry_id text,
    status   text    NOT NULL,                  -- of the run, once the append that wrote it stood
    digest   bytea   NOT NULL,                  -- chained from the first entry on
    meta     json,                              -- what came beside a message
    body     json    NOT NULL,                  -- exactly as produced
    PRIMARY KEY (run_no, seq, entry_no)         -- order of the journal and of the checkpoints in one index
);

CREATE UNIQUE INDEX entry_ids ON outlast.entry (run_no, entry_id) WHERE entry_id IS NOT NULL;

CREATE TABLE outlast.gate (                     -- a projection of the journal, `notified_at` excepted
    run_no      bigint  NOT NULL,
    gate_id     text    NOT NULL,
    gate_no     bigint  GENERATED ALWAYS AS IDENTITY,  -- of two opened in one millisecond the one that was written first comes first
    kind        text    NOT NULL,
    call_id     text,
    tool        text,
    args        json    NOT NULL,
    digest      text    NOT NULL,
    text        text    NOT NULL,
    role        text,
    level       integer NOT NULL,
    deadline    bigint,
    next_at     bigint,
    closes_at   bigint,
    created_at  bigint  NOT NULL,
    outcome     text,                           -- NULL: open
    decided_at  bigint,
    decided_by  text,
    note        text,
    edited_args json,
    guarded     boolean NOT NULL,
    seq         integer NOT NULL,
    notified_at bigint,
    PRIMARY KEY (run_no, gate_id)
);

-- The inbox's order: soonest deadline first, those without one last, then oldest first.
CREATE INDEX gate_inbox ON outlast.gate ((coalesce(deadline, 9223372036854775807)), created_at)
 WHERE outcome IS NULL AND kind IN ('approval', 'verification', 'budget');
-- Gates whose clock has something new to say.
CREATE INDEX gate_due ON outlast.gate (next_at) WHERE outcome IS NULL AND next_at IS NOT NULL;
CREATE INDEX gate_decided ON outlast.gate (decided_at) WHERE decided_at IS NOT NULL AND kind IN ('approval', 'verification', 'budget');

CREATE TABLE outlast.notice (                   -- who is to be told, after the commit
    run_no      bigint  NOT NULL,
    notice_id   text    NOT NULL,
    target      text    NOT NULL,
    gate_id     text    NOT NULL,
    kind        text    NOT NULL,
    text        text    NOT NULL,
    tries       integer NOT NULL DEFAULT 0,
    next_try_at bigint,
    sent_at     bigint,
    error       text,
    created_at  bigint  NOT NULL,
    PRIMARY KEY (run_no, notice_id, target)
);

CREATE INDEX notice_due ON outlast.notice (next_try_at) WHERE sent_at IS NULL;

-- ---- functions: their plans are kept per connection, which a statement sent anew each time would not be ------------------------

CREATE FUNCTION outlast.now_ms() RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint $$;

CREATE FUNCTION outlast.iso(ms bigint) RETURNS text LANGUAGE sql IMMUTABLE AS
$$ SELECT to_char(timestamp 'epoch' + (ms / 1000) * interval '1 second' + (ms % 1000) * interval '1 millisecond', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') $$;

-- Entries, gates and notices of one run. An entry is [entry_no, seq, kind, at, by, entry_id, digest, meta, body].
CREATE FUNCTION outlast.add_rows(_run_no bigint, _fence bigint, _status text, _now bigint, _b jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    i jsonb;
BEGIN
    FOR i IN SELECT * FROM jsonb_array_elements(_b -> 'entries') LOOP
        INSERT INTO outlast.entry (run_no, entry_no, seq, kind, at, fence, "by", entry_id, status, digest, meta, body)
        VALUES (_run_no, (i ->> 0)::integer, (i ->> 1)::integer, i ->> 2, (i ->> 3)::bigint, _fence, i ->> 4, i ->> 5, _status,
                decode(i ->> 6, 'hex'), (i ->> 7)::json, (i ->> 8)::json);
    END LOOP;
    FOR i IN SELECT * FROM jsonb_array_elements(_b -> 'gates') LOOP
        INSERT INTO outlast.gate AS g (run_no, gate_id, kind, call_id, tool, args, digest, text, role, level, deadline, next_at, closes_at,
                                       created_at, outcome, decided_at, decided_by, note, edited_args, guarded, seq)
        VALUES (_run_no, i ->> 0, i ->> 1, i ->> 2, i ->> 3, (i ->> 4)::json, i ->> 5, i ->> 6, i ->> 7, (i ->> 8)::integer, (i ->> 9)::bigint,
                (i ->> 10)::bigint, (i ->> 11)::bigint, (i ->> 12)::bigint, i ->> 13, (i ->> 14)::bigint, i ->> 15, i ->> 16,
                (i ->> 17)::json, (i ->> 18)::integer = 1, (i ->> 19)::integer)
        ON CONFLICT (run_no, gate_id) DO UPDATE SET
               args = excluded.args, digest = excluded.digest, text = excluded.text, role = excluded.role, level = excluded.level,
               deadline = excluded.deadline, next_at = excluded.next_at, closes_at = excluded.closes_at, outcome = excluded.outcome,
               decided_at = excluded.decided_at, decided_by = excluded.decided_by, note = excluded.note,
               edited_args = excluded.edited_args, guarded = excluded.guarded, seq = excluded.seq;
    END LOOP;
    FOR i IN SELECT * FROM jsonb_array_elements(_b -> 'notices') LOOP
        INSERT INTO outlast.notice (run_no, notice_id, target, gate_id, kind, text, next_try_at, created_at)
        VALUES (_run_no, i ->> 0, i ->> 1, i ->> 2, i ->> 3, i ->> 4, _now, _now)
        ON CONFLICT (run_no, notice_id, target) DO NOTHING;
    END LOOP;
END $$;

-- Take up to `_limit` runs: due and parked ones by how long they wait, then those whose lease is over. The rows are locked where the index
-- finds them, past those that another claim holds at this moment; each index's predicate is written out, so that it is used.
-- Within one lease of the server's start no lease is over but a dead process's (0). `_now`, `_lease_now`: NULL, or a test's clock.
CREATE FUNCTION outlast.claim(_driver text, _agents text[], _need_agents text[], _needs text[], _with_over boolean, _limit integer, _owner text,
                              _nonce text, _lease_ms bigint, _now bigint, _lease_now bigint)
RETURNS TABLE (_run_no bigint, _run_id text, _agent text, _fence bigint, _attempts integer, _lease_until bigint, _taken_over boolean)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    wall  bigint := coalesce(_now, outlast.now_ms());
    lease bigint := coalesce(_lease_now, outlast.now_ms());
    over_at bigint := CASE WHEN _lease_now IS NOT NULL OR lease >= (extract(epoch FROM pg_postmaster_start_time()) * 1000)::bigint + _lease_ms
                           THEN lease ELSE 0 END;
BEGIN
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT r.run_no, r.wake_at AS since FROM unnest(_agents) a(agent) CROSS JOIN LATERAL (
            SELECT run_no, wake_at FROM outlast.run
             WHERE driver = _driver AND agent = a.agent AND wake_at <= wall AND lease_owner IS NULL AND wake_at IS NOT NULL AND needs IS NULL
             ORDER BY wake_at LIMIT _limit FOR UPDATE SKIP LOCKED) r
    ), parked AS MATERIALIZED (
        SELECT r.run_no, r.updated_at AS since FROM unnest(_need_agents, _needs) n(agent, needs) CROSS JOIN LATERAL (
            SELECT run_no, updated_at FROM outlast.run
             WHERE driver = _driver AND agent = n.agent AND needs = n.needs AND lease_owner IS NULL AND needs IS NOT NULL
             ORDER BY updated_at LIMIT _limit FOR UPDATE SKIP LOCKED) r
    ), over AS MATERIALIZED (
        SELECT r.run_no, r.lease_until AS since FROM unnest(_agents) a(agent) CROSS JOIN LATERAL (
            SELECT run_no, lease_until FROM outlast.run
             WHERE _with_over AND driver = _driver AND agent = a.agent AND lease_until <= over_at AND lease_owner IS NOT NULL
             ORDER BY lease_until LIMIT _limit FOR UPDATE SKIP LOCKED) r
    ), found AS MATERIALIZED (
        SELECT f.run_no, min(f.rank) AS rank, min(f.since) AS since FROM (
            SELECT run_no, 0 AS rank, since FROM due UNION ALL SELECT run_no, 0, since FROM parked UNION ALL SELECT run_no, 1, since FROM over) f
         GROUP BY f.run_no ORDER BY 2, 3 LIMIT _limit
    ), taken AS (
        UPDATE outlast.run r SET fence = fence + 1, nonce = _nonce, attempts = attempts + f.rank, lease_owner = _owner, lease_until = lease + _lease_ms
          FROM found f WHERE r.run_no = f.run_no
        RETURNING r.run_no, r.run_id, r.agent, r.fence, r.attempts, r.lease_until, f.rank, f.since
    )
    SELECT t.run_no, t.run_id, t.agent, t.fence, t.attempts, t.lease_until, t.rank = 1 FROM taken t ORDER BY t.rank, t.since, t.run_no;
END $$;

-- A new run: its number, or NULL where a run of that id is there.
CREATE FUNCTION outlast.add_run(_b jsonb) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    _run_no bigint;
    _now    bigint := (_b ->> 'now')::bigint;
BEGIN
    INSERT INTO outlast.run (run_id, agent, agent_version, status, entries, seq, wake_at, driver, tags, started_by, parent_run_id,
                             parent_call_id, input_digest, format, created_at, updated_at, nonce)
    VALUES (_b ->> 'run_id', _b ->> 'agent', _b ->> 'agent_version', 'running', (_b ->> 'n')::integer, (_b ->> 'seq')::integer, _now,
            _b ->> 'driver', (_b ->> 'tags')::json, _b ->> 'started_by', _b ->> 'parent_run_id', _b ->> 'parent_call_id',
            _b ->> 'input_digest', (_b ->> 'format')::integer, _now, _now, _b ->> 'nonce')
    ON CONFLICT (run_id) DO NOTHING
    RETURNING run_no INTO _run_no;
    IF FOUND THEN
        PERFORM outlast.add_rows(_run_no, 0, 'running', _now, _b);
    END IF;
    RETURN _run_no;
END $$;

-- One append: true where the lease is current and the journal as long as the writer saw it; else nothing is written.
CREATE FUNCTION outlast.append(_run_no bigint, _fence bigint, _nonce text, _entries integer, _b jsonb) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    _now   bigint := (_b ->> 'now')::bigint;
    _until bigint := (_b ->> 'extend_until')::bigint;
    i      jsonb;
BEGIN
    IF (_b ->> 'release')::boolean THEN
        UPDATE outlast.run SET
               entries = entries + (_b ->> 'n')::integer, seq = (_b ->> 'seq')::integer, agent_version = _b ->> 'agent_version',
               model_calls = (_b ->> 'model_calls')::bigint, input_tokens = (_b ->> 'input_tokens')::bigint,
               output_tokens = (_b ->> 'output_tokens')::bigint, cache_read_tokens = (_b ->> 'cache_read_tokens')::bigint,
               cache_write_tokens = (_b ->> 'cache_write_tokens')::bigint, cost_usd = _b ->> 'cost_usd', updated_at = _now,
               attempts = CASE WHEN (_b ->> 'progress')::boolean THEN 0 ELSE attempts END, status = _b ->> 'status', reason = _b ->> 'reason',
               lease_owner = NULL, lease_until = NULL, wake_at = (_b ->> 'wake_at')::bigint, needs = _b ->> 'needs'
         WHERE run_no = _run_no AND fence = _fence AND nonce = _nonce AND entries = _entries AND lease_owner IS NOT NULL;
    ELSE
        UPDATE outlast.run SET
               entries = entries + (_b ->> 'n')::integer, seq = (_b ->> 'seq')::integer, agent_version = _b ->> 'agent_version',
               model_calls = (_b ->> 'model_calls')::bigint, input_tokens = (_b ->> 'input_tokens')::bigint,
               output_tokens = (_b ->> 'output_tokens')::bigint, cache_read_tokens = (_b ->> 'cache_read_tokens')::bigint,
               cache_write_tokens = (_b ->> 'cache_write_tokens')::bigint, cost_usd = _b ->> 'cost_usd', updated_at = _now,
               attempts = CASE WHEN (_b ->> 'progress')::boolean THEN 0 ELSE attempts END, status = _b ->> 'status', reason = _b ->> 'reason',
               lease_until = greatest(lease_until, _until)
         WHERE run_no = _run_no AND fence = _fence AND nonce = _nonce AND entries = _entries AND lease_owner IS NOT NULL;
    END IF;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM outlast.add_rows(_run_no, _fence, _b ->> 'status', _now, _b);
    FOR i IN SELECT * FROM jsonb_array_elements(_b -> 'children') LOOP
        PERFORM outlast.add_run(i);
    END LOOP;
    RETURN true;
END $$;

-- What an entry from outside writes, its run locked and read before.
CREATE FUNCTION outlast.append_outside(_run_no bigint, _b jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _now  bigint  := (_b ->> 'now')::bigint;
    _wake boolean := (_b ->> 'wake')::boolean;
BEGIN
    IF (_b ->> 'fence')::boolean THEN
        UPDATE outlast.run SET
               entries = entries + (_b ->> 'n')::integer, seq = (_b ->> 'seq')::integer, updated_at = _now, status = _b ->> 'status',
               reason = _b ->> 'reason', fence = fence + 1, nonce = NULL, lease_owner = NULL, lease_until = NULL, wake_at = NULL
         WHERE run_no = _run_no;
    ELSE
        UPDATE outlast.run SET
               entries = entries + (_b ->> 'n')::integer, seq = (_b ->> 'seq')::integer, updated_at = _now, status = _b ->> 'status',
               reason = _b ->> 'reason', wake_at = CASE WHEN _wake THEN _now ELSE wake_at END, needs = CASE WHEN _wake THEN NULL ELSE needs END,
               attempts = CASE WHEN _wake AND (_b ->> 'fresh')::boolean THEN 0 ELSE attempts END
         WHERE run_no = _run_no;
    END IF;
    PERFORM outlast.add_rows(_run_no, 0, _b ->> 'status', _now, _b);
END $$;

-- ---- views ------------------------------------------------------------------------------------------------------------------

CREATE VIEW outlast.runs AS
SELECT run_id, agent, agent_version, status, reason, seq, model_calls, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens,
       cost_usd, attempts, tags, started_by, parent_run_id, parent_call_id, lease_owner, outlast.iso(nullif(lease_until, 0)) AS lease_until,
       outlast.iso(wake_at) AS wake_at, outlast.iso(created_at) AS created_at, outlast.iso(updated_at) AS updated_at,
       driver, needs, entries, fence
  FROM outlast.run;

CREATE VIEW outlast.journal AS
SELECT r.run_id, e.entry_no, e.seq, e.kind, outlast.iso(e.at) AS at, e."by", e.status, e.fence, e.meta, e.body, e.entry_id,
       encode(e.digest, 'hex') AS digest
  FROM outlast.run r JOIN outlast.entry e ON e.run_no = r.run_no;

-- One row a saved message, with the whole list as of then; stored is only the message. The last row of a run that is over shows how it
-- ended, and that of a run taken up again what it is now; every other row what it was when it was saved.
CREATE VIEW outlast.checkpoints AS
SELECT r.run_id, e.seq,
       CASE WHEN e.seq = r.seq AND (r.status IN ('done', 'failed', 'cancelled') OR e.status IN ('done', 'failed', 'cancelled'))
            THEN r.status ELSE e.status END AS status,
       (SELECT ('[' || string_agg(m.body::text, ', ' ORDER BY m.seq) || ']')::json
          FROM outlast.entry m WHERE m.run_no = e.run_no AND m.seq <= e.seq AND m.kind = 'MessageAdded') AS messages,
       outlast.iso(e.at) AS created_at
  FROM outlast.run r JOIN outlast.entry e ON e.run_no = r.run_no AND e.kind = 'MessageAdded';

CREATE VIEW outlast.messages AS
SELECT r.run_id, e.seq, e.body ->> 'role' AS role, e.body -> 'content' AS content, outlast.iso(e.at) AS created_at
  FROM outlast.run r JOIN outlast.entry e ON e.run_no = r.run_no AND e.kind = 'MessageAdded';

CREATE VIEW outlast.gates AS
SELECT r.run_id, g.gate_id, g.kind, g.call_id, g.tool, g.args, g.digest, g.text, g.role, g.level, outlast.iso(g.deadline) AS deadline,
       outlast.iso(g.created_at) AS created_at, outlast.iso(g.notified_at) AS notified_at, g.outcome, outlast.iso(g.decided_at) AS decided_at,
       g.decided_by, g.note, g.edited_args, r.agent, r.tags, r.started_by, outlast.iso(g.next_at) AS next_at,
       outlast.iso(g.closes_at) AS closes_at, g.guarded, g.seq
  FROM outlast.gate g JOIN outlast.run r ON r.run_no = g.run_no;

CREATE VIEW outlast.inbox AS
SELECT * FROM outlast.gates WHERE outcome IS NULL AND kind IN ('approval', 'verification', 'budget');

CREATE VIEW outlast.decisions AS
SELECT * FROM outlast.gates WHERE outcome IS NOT NULL AND decided_by IS NOT NULL AND kind IN ('approval', 'verification', 'budget');

CREATE VIEW outlast.notices AS
SELECT r.run_id, n.notice_id, n.gate_id, n.kind, n.target, n.text, n.tries, outlast.iso(n.next_try_at) AS next_try_at,
       outlast.iso(n.sent_at) AS sent_at, n.error, outlast.iso(n.created_at) AS created_at
  FROM outlast.notice n JOIN outlast.run r ON r.run_no = n.run_no;

-- Every tool call that a model asked for, and how it stands: from the journal alone, so it is right before any worker has looked again.
-- Its entries have the seq of the answer that holds it, until the user message that answers the batch.
CREATE VIEW outlast.tool_calls AS
WITH call AS (
    SELECT a.run_no, a.seq, u.value ->> 'id' AS call_id, u.value ->> 'name' AS tool, u.value -> 'input' AS args
      FROM outlast.entry a,
           json_array_elements(CASE json_typeof(a.body -> 'content') WHEN 'array' THEN a.body -> 'content' ELSE '[]' END) u
     WHERE a.kind = 'MessageAdded' AND a.body ->> 'role' = 'assistant'
       AND CASE json_typeof(u.value) WHEN 'object' THEN u.value ->> 'type' = 'tool_use' END
), seen AS (
    SELECT c.*, r.run_id, r.seq AS last_seq,
           (SELECT e.entry_no FROM outlast.entry e WHERE e.run_no = c.run_no AND e.seq = c.seq AND e.kind = 'CallFinished'
               AND e.body ->> 'call_id' = c.call_id ORDER BY e.entry_no DESC LIMIT 1) AS finished,
           (SELECT e.entry_no FROM outlast.entry e WHERE e.run_no = c.run_no AND e.seq = c.seq AND e.kind = 'CallStarted'
               AND e.body ->> 'call_id' = c.call_id ORDER BY e.entry_no LIMIT 1) AS first_started,
           (SELECT e.kind FROM outlast.entry e WHERE e.run_no = c.run_no AND e.seq = c.seq
               AND CASE WHEN e.kind IN ('CallStarted', 'CallSkipped', 'CallFailed', 'CallDoubted') THEN e.body ->> 'call_id' = c.call_id
                        WHEN e.kind = 'GateDecided' THEN e.body ->> 'outcome' = 'run_again' AND e.body ->> 'gate_id' IN
                             (SELECT g.gate_id FROM outlast.gate g WHERE g.run_no = c.run_no AND g.call_id = c.call_id) END
             ORDER BY e.entry_no DESC LIMIT 1) AS last_act,
           (SELECT count(*) FROM outlast.entry e WHERE e.run_no = c.run_no AND e.seq = c.seq AND e.kind = 'CallStarted'
               AND e.body ->> 'call_id' = c.call_id) AS intents,
           (SELECT count(*) FROM outlast.entry e WHERE e.run_no = c.run_no AND e.seq = c.seq AND e.kind = 'CallFailed'
               AND e.body ->> 'call_id' = c.call_id) AS failures,
           EXISTS (SELECT FROM outlast.gate g WHERE g.run_no = c.run_no AND g.call_id = c.call_id AND g.outcome IS NULL
                      AND g.kind <> 'verification') AS gated,
           EXISTS (SELECT FROM outlast.gate g WHERE g.run_no = c.run_no AND g.call_id = c.call_id AND g.kind IN ('event', 'run')) AS sleeps
      FROM call c JOIN outlast.run r ON r.run_no = c.run_no
)
SELECT s.run_id, s.seq, s.call_id, s.tool, s.args, coalesce(b.body ->> 'effect', f.body ->> 'effect') AS effect,
       CASE WHEN f.entry_no IS NOT NULL THEN
                 CASE coalesce(f.body ->> 'how', 'result') WHEN 'refused' THEN 'refused' WHEN 'cancelled' THEN 'refused'
                                                           WHEN 'unknown' THEN 'unknown' ELSE 'done' END
            WHEN s.last_seq > s.seq THEN 'done'         -- a history that was given as input: the next message holds the result
            WHEN s.gated THEN 'waiting'
            WHEN s.last_act IN ('CallStarted', 'CallDoubted') AND NOT s.sleeps THEN 'begun'
            ELSE 'pending' END AS state,
       CASE WHEN s.intents > 0 THEN s.intents
            ELSE s.failures + (f.entry_no IS NOT NULL AND coalesce(f.body ->> 'how', 'result') = 'result')::integer END AS attempts,
       coalesce(b.body ->> 'key', s.run_id || ':' || s.call_id) AS idempotency_key,
       outlast.iso(b.at) AS started_at, outlast.iso(f.at) AS finished_at
  FROM seen s
  LEFT JOIN outlast.entry b ON b.run_no = s.run_no AND b.seq = s.seq AND b.entry_no = s.first_started
  LEFT JOIN outlast.entry f ON f.run_no = s.run_no AND f.seq = s.seq AND f.entry_no = s.finished;

-- Begun, and nobody can say what came of it: of runs that nobody holds at this moment, and what was left open by a cancel. Once a person
-- has said what happened, or a late result says it, the doubt is over.
CREATE VIEW outlast.in_doubt AS
SELECT c.*
  FROM outlast.run r JOIN outlast.tool_calls c ON c.run_id = r.run_id
 WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND c.state = 'begun'
   AND (r.lease_owner IS NULL OR r.lease_until <= outlast.now_ms())
UNION ALL
SELECT c.*
  FROM outlast.entry e JOIN outlast.run r ON r.run_no = e.run_no
  JOIN outlast.tool_calls c ON c.run_id = r.run_id AND c.seq = e.seq AND c.call_id = e.body ->> 'call_id'
 WHERE e.kind = 'CallFinished' AND e.body ->> 'how' = 'unknown' AND c.state = 'unknown'
   AND NOT EXISTS (SELECT FROM outlast.gate g WHERE g.run_no = e.run_no AND g.call_id = c.call_id AND g.kind = 'verification'
                      AND g.decided_by IS NOT NULL)
   AND NOT EXISTS (SELECT FROM outlast.entry l WHERE l.run_no = e.run_no AND l.seq >= e.seq AND l.kind = 'LateResult'
                      AND l.body ->> 'call_id' = c.call_id);

-- What does not go on by itself: why, since when, and the one command that mends it. A run may have several rows.
CREATE VIEW outlast.stuck AS
WITH clock(late) AS MATERIALIZED (SELECT outlast.now_ms() - 300000),  -- five minutes ago
found(run_no, since, reason, command) AS (
    SELECT g.run_no, g.created_at,
           g.text || CASE WHEN g.role IS NULL AND g.deadline IS NULL THEN ': asked is nobody in particular, and there is no deadline'
                          WHEN g.role IS NULL THEN ': asked is nobody in particular'
                          WHEN g.deadline IS NULL THEN ': it waits for ' || g.role || ' without a deadline'
                          ELSE ': it still waits for ' || g.role || ', though its last deadline has passed' END,
           'outlast approve ' || r.run_id || ' ' || coalesce(g.call_id, g.gate_id)
      FROM outlast.gate g JOIN outlast.run r ON r.run_no = g.run_no, clock
     WHERE g.outcome IS NULL AND g.kind IN ('approval', 'verification', 'budget') AND g.kind <> 'verification'
       AND (g.role IS NULL OR g.deadline IS NULL OR (g.closes_at IS NULL AND g.deadline < clock.late))
    UNION ALL
    SELECT g.run_no, g.created_at, g.text, 'outlast verify ' || r.run_id || ' ' || coalesce(g.call_id, g.gate_id)
      FROM outlast.gate g JOIN outlast.run r ON r.run_no = g.run_no
     WHERE g.outcome IS NULL AND g.kind IN ('approval', 'verification', 'budget') AND g.kind = 'verification'
    UNION ALL
    SELECT n.run_no, n.created_at,
           'the notice (' || n.kind || ') of ' || n.gate_id
           || CASE WHEN n.tries = 0 THEN ' waits for a process that tells ' || n.target
                   ELSE ' could not be delivered to ' || n.target || ' in ' || n.tries || ' tries' END
           || CASE WHEN n.next_try_at IS NULL THEN ', it is not tried again' ELSE '' END || coalesce(': ' || n.error, ''),
           'outlast sweep'
      FROM outlast.notice n JOIN outlast.run r ON r.run_no = n.run_no, clock
     WHERE n.sent_at IS NULL AND r.status NOT IN ('done', 'failed', 'cancelled')
       AND (n.tries >= 3 OR n.next_try_at IS NULL OR (n.tries = 0 AND n.next_try_at < clock.late))
    UNION ALL
    SELECT r.run_no, r.updated_at, r.reason, 'outlast worker --agent ' || r.agent
      FROM outlast.run r WHERE r.status = 'waiting_for_code'
    UNION ALL
    SELECT r.run_no, r.wake_at, 'it is due, and no worker takes it: none that runs knows the agent ' || r.agent,
           CASE r.driver WHEN 'script' THEN 'outlast show ' || r.run_id ELSE 'outlast worker --agent ' || r.agent END
      FROM clock, outlast.run r
     WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND r.status <> 'waiting_for_code'
       AND r.lease_owner IS NULL AND r.wake_at < clock.late
    UNION ALL
    SELECT r.run_no, coalesce(nullif(r.lease_until, 0), r.updated_at),
           'its worker is gone, and no other takes it: none that runs knows the agent ' || r.agent,
           CASE r.driver WHEN 'script' THEN 'outlast show ' || r.run_id ELSE 'outlast worker --agent ' || r.agent END
      FROM clock, outlast.run r
     WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled'
       AND r.lease_owner IS NOT NULL AND coalesce(nullif(r.lease_until, 0), r.updated_at) < clock.late
    UNION ALL
    SELECT r.run_no, r.updated_at, 'its worker died ' || r.attempts || ' times in a row', 'outlast show ' || r.run_id || ' --journal'
      FROM outlast.run r WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND r.attempts >= 3
    UNION ALL
    SELECT r.run_no, r.updated_at, r.reason, 'outlast retry ' || r.run_id
      FROM outlast.run r WHERE r.status = 'failed' AND r.reason LIKE 'worker died % times while %'
    UNION ALL                                        -- stopped and marked: its journal does not say that it is over
    SELECT r.run_no, r.updated_at, coalesce(r.reason, 'its journal cannot be read'), 'outlast store check'
      FROM outlast.run r
     WHERE r.status = 'failed'
       AND (SELECT e.status FROM outlast.entry e WHERE e.run_no = r.run_no ORDER BY e.seq DESC, e.entry_no DESC LIMIT 1) <> 'failed'
)
SELECT r.run_id, r.status, f.reason, outlast.iso(f.since) AS since, f.command
  FROM found f JOIN outlast.run r ON r.run_no = f.run_no;
