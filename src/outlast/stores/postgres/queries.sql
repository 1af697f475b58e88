-- Every statement of the Postgres store, written for the schema `outlast`; another name is put in its place. A query is opened by its name
-- between dashes; {name} puts in the text of an earlier one. What one append writes is a function of the schema (migrations).

-- ---- a transaction ------------------------------------------------------------------------------------------------------------

-- begin --
BEGIN ISOLATION LEVEL READ COMMITTED

-- begin_read --  one moment for all its statements
BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY

-- limits --  all settings are this transaction's own: behind a pooler the next one may have another connection
SELECT set_config('synchronous_commit', %(sync)s, true), set_config('statement_timeout', %(statement_ms)s, true),
       set_config('lock_timeout', %(statement_ms)s, true), set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
       extract(epoch FROM clock_timestamp())::float8

-- server --  of a new connection
SELECT current_setting('server_encoding'), pg_is_in_recovery(), current_setting('synchronous_commit'), pg_backend_pid(),
       to_regclass(%(table)s) IS NOT NULL, extract(epoch FROM clock_timestamp())::float8

-- version --
SELECT max(version) FROM outlast.schema_version

-- wake --
SELECT pg_notify(%(channel)s, '')

-- ---- starting and taking runs -------------------------------------------------------------------------------------------------

-- times --  both clocks; and up to when a lease counts as over: before `least` none does but a dead process's (0)
times AS MATERIALIZED (
    SELECT t.now, t.lease_now, t.least, CASE WHEN t.lease_now >= t.least THEN t.lease_now ELSE 0 END AS over
      FROM (SELECT coalesce(%(now)s::bigint, outlast.now_ms()) AS now, coalesce(%(lease_now)s::bigint, outlast.now_ms()) AS lease_now,
                   CASE WHEN %(lease_now)s::bigint IS NOT NULL THEN 0
                        ELSE (extract(epoch FROM pg_postmaster_start_time()) * 1000)::bigint + %(lease_ms)s END AS least) t)

-- start --
SELECT outlast.add_run(%(run)s)

-- take_started --  in the transaction that made it, so that no worker can snatch it
WITH {times}
UPDATE outlast.run SET fence = 1, lease_owner = %(owner)s, lease_until = (SELECT lease_now FROM times) + %(lease_ms)s
 WHERE run_id = %(run_id)s AND nonce = %(nonce)s AND fence = 0 AND lease_owner IS NULL

-- started --  was it this very start that made the run? Also where its answer was lost
SELECT run_no, run_id, agent, fence, attempts, lease_until, false FROM outlast.run WHERE run_id = %(run_id)s AND nonce = %(nonce)s

-- claim --
SELECT * FROM outlast.claim(%(driver)s, %(agents)s::text[], %(need_agents)s::text[], %(needs)s::text[], %(over)s, %(limit)s, %(owner)s,
                            %(nonce)s, %(lease_ms)s, %(now)s::bigint, %(lease_now)s::bigint)

-- claimed --  by claims whose answer was lost: taken anew under their nonces, so that what they wrote is settled
WITH {times}, ours AS MATERIALIZED (
    SELECT run_no FROM outlast.run
     WHERE driver = %(driver)s AND agent = ANY (%(agents)s::text[]) AND lease_owner IS NOT NULL AND lease_owner = %(owner)s
       AND nonce = ANY (%(nonces)s::text[])
     ORDER BY run_id FOR UPDATE
)
UPDATE outlast.run r SET fence = fence + 1, nonce = %(nonce)s, lease_until = (SELECT lease_now FROM times) + %(lease_ms)s
  FROM ours o WHERE r.run_no = o.run_no
RETURNING r.run_no, r.run_id, r.agent, r.fence, r.attempts, r.lease_until, r.attempts > 0

-- take --
WITH {times}
UPDATE outlast.run SET fence = fence + 1, nonce = %(nonce)s, attempts = attempts + (lease_owner IS NOT NULL)::integer, lease_owner = %(owner)s,
       lease_until = (SELECT lease_now FROM times) + %(lease_ms)s
 WHERE run_no = %(run_no)s
RETURNING run_no, run_id, agent, fence, attempts, lease_until, %(held)s

-- due --  what `claim` would take, and in its order; nothing is locked or taken
WITH {times}
SELECT run_id FROM (
    SELECT run_id, 0 AS rank, wake_at AS since FROM outlast.run
     WHERE driver = %(driver)s AND agent = ANY (%(agents)s::text[]) AND wake_at <= (SELECT now FROM times)
       AND lease_owner IS NULL AND wake_at IS NOT NULL AND needs IS NULL
    UNION
    SELECT r.run_id, 0, r.updated_at FROM unnest(%(need_agents)s::text[], %(needs)s::text[]) n(agent, needs)
      JOIN outlast.run r ON r.driver = %(driver)s AND r.agent = n.agent AND r.needs = n.needs AND r.lease_owner IS NULL AND r.needs IS NOT NULL
    UNION
    SELECT run_id, 1, lease_until FROM outlast.run
     WHERE driver = %(driver)s AND agent = ANY (%(agents)s::text[]) AND lease_until <= (SELECT over FROM times) AND lease_owner IS NOT NULL) d
 ORDER BY rank, since, run_id LIMIT %(limit)s

-- drive_by --
UPDATE outlast.run SET driver = %(driver)s, updated_at = %(now)s WHERE run_no = %(run_no)s

-- parked --
SELECT DISTINCT agent, needs FROM outlast.run
 WHERE driver = %(driver)s AND agent = ANY (%(agents)s::text[]) AND lease_owner IS NULL AND needs IS NOT NULL

-- holder --  a loose scan: all distinct ones
WITH RECURSIVE holder AS (
    (SELECT lease_owner FROM outlast.run WHERE lease_owner IS NOT NULL AND lease_until > 0 ORDER BY lease_owner LIMIT 1)
    UNION ALL
    SELECT (SELECT r.lease_owner FROM outlast.run r
             WHERE r.lease_owner IS NOT NULL AND r.lease_until > 0 AND r.lease_owner > h.lease_owner ORDER BY r.lease_owner LIMIT 1)
      FROM holder h WHERE h.lease_owner IS NOT NULL
)
SELECT lease_owner FROM holder WHERE lease_owner IS NOT NULL

-- bury --
WITH dead AS MATERIALIZED (
    SELECT run_no FROM outlast.run WHERE lease_owner = ANY (%(owners)s::text[]) AND lease_owner IS NOT NULL AND lease_until > 0
     ORDER BY run_id FOR UPDATE
)
UPDATE outlast.run r SET lease_until = 0 FROM dead d WHERE r.run_no = d.run_no
RETURNING 1

-- renew --  by the nonce: it stays when a holder reclaims its own lease (fence + 1) in another thread, and nobody else knows it
WITH {times}, ours AS MATERIALIZED (
    SELECT r.run_no FROM unnest(%(numbers)s::bigint[], %(nonces)s::text[]) l(run_no, nonce)
      JOIN outlast.run r ON r.run_no = l.run_no AND r.nonce = l.nonce AND r.lease_owner IS NOT NULL
     ORDER BY r.run_id FOR UPDATE OF r
)
UPDATE outlast.run r SET lease_until = greatest(r.lease_until, (SELECT lease_now FROM times) + %(lease_ms)s)
  FROM ours o WHERE r.run_no = o.run_no AND r.lease_owner IS NOT NULL
RETURNING r.run_no, r.nonce

-- lengths --
SELECT run_no, fence, entries FROM outlast.run WHERE run_no = ANY (%(numbers)s::bigint[])

-- holders_of --
SELECT run_no, fence, entries, nonce, lease_owner FROM outlast.run WHERE run_no = ANY (%(numbers)s::bigint[])

-- give_back --
UPDATE outlast.run SET lease_owner = NULL, lease_until = NULL, wake_at = %(now)s
 WHERE run_no = %(run_no)s AND fence = %(fence)s AND nonce = %(nonce)s AND lease_owner IS NOT NULL
RETURNING 1

-- mark --
UPDATE outlast.run SET lease_owner = NULL, lease_until = NULL, wake_at = NULL, needs = %(needs)s, status = %(status)s, reason = %(reason)s,
       updated_at = %(now)s, marked = CASE %(status)s WHEN 'failed' THEN fence END
 WHERE run_no = %(run_no)s AND fence = %(fence)s AND nonce = %(nonce)s AND lease_owner IS NOT NULL
RETURNING 1

-- reclaim --  the nonce is random per claim: whoever knows it made the claim that stands, or its own reclaim whose answer was lost too
WITH {times}
UPDATE outlast.run SET fence = fence + 1, lease_owner = %(owner)s, lease_until = (SELECT lease_now FROM times) + %(lease_ms)s
 WHERE run_no = %(run_no)s AND nonce = %(nonce)s
RETURNING fence, lease_until

-- ---- appending ----------------------------------------------------------------------------------------------------------------

-- append --
SELECT outlast.append(%(run_no)s, %(fence)s, %(nonce)s, %(entries)s, %(batch)s)

-- lease --
SELECT fence, nonce, entries, lease_owner, lease_until FROM outlast.run WHERE run_no = %(run_no)s

-- lock --  the rows first; what they protect is read by the statements after this one, whose snapshots are younger than the lock
SELECT run_no FROM outlast.run WHERE run_id = ANY (%(run_ids)s::text[]) ORDER BY run_id FOR UPDATE

-- lock_family --  a run and, before it, the one that it answers a call of: its end may have to be told there
SELECT run_no FROM outlast.run
 WHERE run_id = %(run_id)s OR run_id = (SELECT parent_run_id FROM outlast.run WHERE run_id = %(run_id)s)
 ORDER BY run_id FOR UPDATE

-- ---- from outside -------------------------------------------------------------------------------------------------------------

-- clock --  read after the lock
SELECT coalesce(%(now)s::bigint, outlast.now_ms())

-- seen --
SELECT 1 FROM outlast.entry e JOIN outlast.run r ON r.run_no = e.run_no
 WHERE r.run_id = %(run_id)s AND e.entry_id = %(entry_id)s AND e.entry_id IS NOT NULL

-- outside --
SELECT outlast.append_outside(%(run_no)s, %(batch)s)

-- outside_spent --
UPDATE outlast.run SET input_tokens = input_tokens + %(input_tokens)s, output_tokens = output_tokens + %(output_tokens)s,
       cache_read_tokens = cache_read_tokens + %(cache_read_tokens)s, cache_write_tokens = cache_write_tokens + %(cache_write_tokens)s,
       cost_usd = %(cost_usd)s
 WHERE run_no = %(run_no)s

-- stands --  is this very entry there?
SELECT 1 FROM outlast.entry WHERE run_no = %(run_no)s AND seq = %(seq)s AND entry_no = %(entry_no)s AND digest = %(digest)s

-- ---- reading ------------------------------------------------------------------------------------------------------------------

-- load --
SELECT entry_no, seq, kind, body::text, meta::text, at, "by", entry_id, digest FROM outlast.entry
 WHERE run_no = %(run_no)s AND seq >= %(since)s AND entry_no > %(after)s
 ORDER BY seq, entry_no

-- since_message --  from the last message on that is not the model's: texts that wait may be older than an answer
SELECT e.entry_no, e.seq, e.kind, e.body::text, e.meta::text, e.at, e."by", e.entry_id, e.digest
  FROM outlast.run r JOIN outlast.entry e ON e.run_no = r.run_no AND e.seq >= coalesce(
         (SELECT u.seq FROM outlast.entry u
           WHERE u.run_no = r.run_no AND u.kind = 'MessageAdded' AND u.body ->> 'role' IS DISTINCT FROM 'assistant'
           ORDER BY u.seq DESC LIMIT 1), least(r.seq, 1))
 WHERE r.run_id = %(run_id)s ORDER BY e.seq, e.entry_no

-- journal --
SELECT entry_no, seq, kind, body::text, meta::text, at, "by", entry_id, fence, status, digest FROM outlast.entry
 WHERE run_no = %(run_no)s AND seq >= %(since)s AND entry_no > %(after)s
 ORDER BY seq, entry_no LIMIT %(limit)s

-- head_columns --  in the place of the lease's instant: is it not over?
r.run_no, r.run_id, r.agent, r.agent_version, r.status, r.reason, r.entries, r.seq, r.model_calls, r.input_tokens, r.output_tokens,
       r.cache_read_tokens, r.cache_write_tokens, r.cost_usd, r.wake_at, r.driver, r.needs, r.lease_owner,
       r.lease_owner IS NOT NULL AND r.lease_until > (SELECT over FROM times),
       CASE WHEN r.lease_until > 0 THEN greatest(r.lease_until, (SELECT least FROM times)) END, NULL, r.fence, r.attempts, r.tags::text, r.started_by, r.parent_run_id,
       r.parent_call_id, r.created_at, r.updated_at, r.input_digest

-- head --
WITH {times}
SELECT {head_columns} FROM outlast.run r WHERE r.run_id = %(run_id)s

-- has_tags --
r.tags::jsonb @> %(tags)s::jsonb

-- heads_where --
(%(status)s::text IS NULL OR r.status = %(status)s) AND (%(agent)s::text IS NULL OR r.agent = %(agent)s)
   AND (%(tags)s = '{}' OR {has_tags})
   AND (r.created_at, r.run_id) < (%(before_at)s, %(before_id)s) AND r.created_at >= %(since)s
 ORDER BY r.created_at DESC, r.run_id DESC LIMIT %(limit)s

-- heads --
WITH {times}
SELECT {head_columns} FROM outlast.run r
 WHERE {heads_where}

-- heads_unfinished --
WITH {times}
SELECT {head_columns} FROM outlast.run r
 WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND {heads_where}

-- heads_stuck --
WITH {times}
SELECT {head_columns} FROM outlast.run r
 WHERE r.run_id IN (SELECT run_id FROM outlast.stuck) AND {heads_where}

-- unfinished --
SELECT run_id FROM outlast.run
 WHERE status <> 'done' AND status <> 'failed' AND status <> 'cancelled'
 ORDER BY created_at, run_id

-- unfinished_page --
WITH {times}
SELECT {head_columns} FROM outlast.run r
 WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND (r.created_at, r.run_id) > (%(after_at)s, %(after_id)s)
 ORDER BY r.created_at, r.run_id LIMIT %(limit)s

-- journal_columns --
e.entry_no, e.seq, e.kind, e.body::text, e.meta::text, e.at, e."by", e.entry_id, e.fence, e.status, e.digest

-- tails --
SELECT r.run_no, {journal_columns}
  FROM outlast.run r JOIN outlast.entry e ON e.run_no = r.run_no AND e.seq = r.seq
 WHERE r.run_no = ANY (%(numbers)s::bigint[])
 ORDER BY r.run_no, e.entry_no

-- ran_by --  the last row of each run counts
SELECT e.run_no, {journal_columns} FROM outlast.entry e
 WHERE e.run_no = ANY (%(numbers)s::bigint[]) AND e.seq = 0 AND e.kind = 'RunStarted'
UNION ALL
SELECT e.run_no, {journal_columns} FROM outlast.entry e
 WHERE e.run_no = ANY (%(numbers)s::bigint[]) AND e.kind = 'VersionChanged'
 ORDER BY 1, 2

-- ends --
SELECT r.run_id, r.entries,
       encode((SELECT e.digest FROM outlast.entry e WHERE e.run_no = r.run_no ORDER BY e.seq DESC, e.entry_no DESC LIMIT 1), 'hex')
  FROM outlast.run r WHERE r.run_id > %(after)s ORDER BY r.run_id LIMIT %(limit)s

-- digest_at --
SELECT encode(e.digest, 'hex') FROM outlast.run r JOIN outlast.entry e ON e.run_no = r.run_no WHERE r.run_id = %(run_id)s AND e.entry_no = %(entry_no)s

-- pending --
SELECT sum(n)::bigint, min(at) FROM (
    SELECT count(*) AS n, min(wake_at) AS at FROM outlast.run
     WHERE driver = %(driver)s AND agent = ANY (%(agents)s::text[]) AND wake_at <= %(until)s
       AND lease_owner IS NULL AND wake_at IS NOT NULL AND needs IS NULL
    UNION ALL
    SELECT count(*), min(nullif(lease_until, 0)) FROM outlast.run
     WHERE driver = %(driver)s AND agent = ANY (%(agents)s::text[]) AND lease_owner IS NOT NULL) p

-- gate_columns --
g.gate_id, g.kind, g.call_id, g.tool, g.args::text, g.digest, g.text, g.role, g.level, g.deadline, g.next_at, g.closes_at, g.created_at,
       g.outcome, g.decided_at, g.decided_by, g.note, g.edited_args::text, g.guarded, g.seq, g.notified_at

-- gates --
SELECT {gate_columns} FROM outlast.run r JOIN outlast.gate g ON g.run_no = r.run_no
 WHERE r.run_id = %(run_id)s ORDER BY g.outcome IS NOT NULL, g.created_at, g.gate_no

-- inbox --
WITH {times}
SELECT {head_columns}, {gate_columns}
  FROM outlast.gate g JOIN outlast.run r ON r.run_no = g.run_no
 WHERE g.outcome IS NULL AND g.kind IN ('approval', 'verification', 'budget')
   AND (%(role)s::text IS NULL OR g.role = %(role)s) AND (%(agent)s::text IS NULL OR r.agent = %(agent)s) AND (%(tags)s = '{}' OR {has_tags})
 ORDER BY coalesce(g.deadline, 9223372036854775807), g.created_at, g.gate_no LIMIT %(limit)s

-- stuck --
SELECT run_id, status, reason, since, command FROM outlast.stuck ORDER BY since, run_id LIMIT %(limit)s

-- ---- the clock of the gates, and who is told ------------------------------------------------------------------------------------

-- gates_due --
SELECT r.run_id FROM outlast.gate g JOIN outlast.run r ON r.run_no = g.run_no
 WHERE g.outcome IS NULL AND g.next_at IS NOT NULL AND g.next_at <= %(now)s
 GROUP BY r.run_id ORDER BY min(g.next_at) LIMIT %(limit)s

-- notices_due --
WITH due AS MATERIALIZED (
    SELECT run_no, notice_id, target, next_try_at AS since FROM outlast.notice
     WHERE sent_at IS NULL AND next_try_at <= %(now)s AND target = ANY (%(targets)s::text[])
     ORDER BY next_try_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), taken AS (
    UPDATE outlast.notice n SET tries = tries + 1, next_try_at = %(until)s FROM due d
     WHERE n.run_no = d.run_no AND n.notice_id = d.notice_id AND n.target = d.target
    RETURNING n.run_no, n.notice_id, n.target, n.kind, n.text, n.tries, n.created_at, n.gate_id, d.since
), {times}
SELECT n.run_no, n.notice_id, n.target, n.kind, n.text, n.tries, n.created_at, {head_columns}, {gate_columns}
  FROM taken n JOIN outlast.run r ON r.run_no = n.run_no JOIN outlast.gate g ON g.run_no = n.run_no AND g.gate_id = n.gate_id
 ORDER BY n.since

-- notice_failed --
UPDATE outlast.notice SET error = %(error)s, next_try_at = %(next_try_at)s
 WHERE run_no = %(run_no)s AND notice_id = %(notice_id)s AND target = %(target)s AND sent_at IS NULL

-- notice_sent --
UPDATE outlast.notice SET sent_at = %(now)s, error = NULL, next_try_at = NULL
 WHERE run_no = %(run_no)s AND notice_id = %(notice_id)s AND target = %(target)s AND sent_at IS NULL

-- gate_notified --
UPDATE outlast.gate SET notified_at = %(now)s WHERE run_no = %(run_no)s AND gate_id = %(gate_id)s AND notified_at IS NULL

-- notice_targets --
SELECT DISTINCT n.target FROM outlast.notice n JOIN outlast.run r ON r.run_no = n.run_no
 WHERE r.run_id = %(run_id)s AND n.gate_id = %(gate_id)s ORDER BY 1

-- ---- looking after it -----------------------------------------------------------------------------------------------------------

-- check_heads --
SELECT run_no, run_id FROM outlast.run WHERE run_no > %(after)s ORDER BY run_no LIMIT %(limit)s

-- check_head --
SELECT entries, seq, status, model_calls, input_tokens, output_tokens FROM outlast.run WHERE run_no = %(run_no)s

-- check_orphans --
SELECT DISTINCT 'entry', run_no FROM outlast.entry t WHERE NOT EXISTS (SELECT FROM outlast.run r WHERE r.run_no = t.run_no)
UNION SELECT DISTINCT 'gate', run_no FROM outlast.gate t WHERE NOT EXISTS (SELECT FROM outlast.run r WHERE r.run_no = t.run_no)
UNION SELECT DISTINCT 'notice', run_no FROM outlast.notice t WHERE NOT EXISTS (SELECT FROM outlast.run r WHERE r.run_no = t.run_no)

-- check_settings --
SELECT name, reset_val FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit')

-- ids_of --
SELECT run_no, run_id FROM outlast.run WHERE run_no = ANY (%(numbers)s::bigint[])

-- format --
SELECT format FROM outlast.run WHERE run_no = %(run_no)s

-- gates_as_written --
SELECT {gate_columns} FROM outlast.gate g WHERE g.run_no = %(run_no)s ORDER BY g.gate_no

-- notices --
SELECT notice_id, target, gate_id, kind, text, tries, next_try_at, sent_at, error, created_at FROM outlast.notice
 WHERE run_no = %(run_no)s ORDER BY created_at, notice_id, target

-- carried_run --
SELECT run_no FROM outlast.run WHERE run_id = %(run_id)s AND starts_with(driver, %(carried)s)

-- put_run --  the document holds the head's columns by name, entries, gates and notices as lists; nothing is put where a run of that id is
WITH d AS MATERIALIZED (SELECT %(run)s::json AS b), made AS (
    INSERT INTO outlast.run (run_id, agent, agent_version, status, reason, entries, seq, model_calls, input_tokens, output_tokens,
                             cache_read_tokens, cache_write_tokens, cost_usd, wake_at, driver, needs, fence, attempts, tags, started_by,
                             parent_run_id, parent_call_id, input_digest, format, created_at, updated_at)
    SELECT r.run_id, r.agent, r.agent_version, r.status, r.reason, r.entries, r.seq, r.model_calls, r.input_tokens, r.output_tokens,
           r.cache_read_tokens, r.cache_write_tokens, r.cost_usd, r.wake_at, r.driver, r.needs, r.fence, r.attempts, (b ->> 'tags')::json,
           r.started_by, r.parent_run_id, r.parent_call_id, r.input_digest, r.format, r.created_at, r.updated_at
      FROM d, json_populate_record(NULL::outlast.run, b) r
    ON CONFLICT (run_id) DO NOTHING RETURNING run_no
), entries AS (
    INSERT INTO outlast.entry (run_no, entry_no, seq, kind, at, fence, "by", entry_id, status, digest, meta, body)
    SELECT run_no, (i ->> 0)::integer, (i ->> 1)::integer, i ->> 2, (i ->> 3)::bigint, (i ->> 4)::bigint, i ->> 5, i ->> 6, i ->> 7,
           decode(i ->> 8, 'hex'), (i ->> 9)::json, (i ->> 10)::json
      FROM made, d, json_array_elements(b -> 'entries_') i
), gates AS (
    INSERT INTO outlast.gate (run_no, gate_id, kind, call_id, tool, args, digest, text, role, level, deadline, next_at, closes_at, created_at,
                              outcome, decided_at, decided_by, note, edited_args, guarded, seq, notified_at)
    SELECT run_no, i ->> 0, i ->> 1, i ->> 2, i ->> 3, (i ->> 4)::json, i ->> 5, i ->> 6, i ->> 7, (i ->> 8)::integer, (i ->> 9)::bigint,
           (i ->> 10)::bigint, (i ->> 11)::bigint, (i ->> 12)::bigint, i ->> 13, (i ->> 14)::bigint, i ->> 15, i ->> 16, (i ->> 17)::json,
           (i ->> 18)::integer = 1, (i ->> 19)::integer, (i ->> 20)::bigint
      FROM made, d, json_array_elements(b -> 'gates') WITH ORDINALITY g(i, n) ORDER BY g.n
), notices AS (
    INSERT INTO outlast.notice (run_no, notice_id, target, gate_id, kind, text, tries, next_try_at, sent_at, error, created_at)
    SELECT run_no, i ->> 0, i ->> 1, i ->> 2, i ->> 3, i ->> 4, (i ->> 5)::integer, (i ->> 6)::bigint, (i ->> 7)::bigint, i ->> 8,
           (i ->> 9)::bigint
      FROM made, d, json_array_elements(b -> 'notices') i
)
SELECT run_no FROM made

-- let_go --
WITH carried AS MATERIALIZED (SELECT run_no FROM outlast.run WHERE starts_with(driver, %(carried)s) ORDER BY run_id FOR UPDATE)
UPDATE outlast.run r SET driver = substr(driver, length(%(carried)s) + 1) FROM carried c WHERE r.run_no = c.run_no RETURNING r.run_no

-- old_where --  a run whose parent goes on stays: the parent's pages link to it
r.ended_at < %(before)s AND r.ended_at IS NOT NULL AND r.lease_owner IS NULL AND r.status <> ALL (%(keep)s::text[])
   AND NOT EXISTS (SELECT FROM outlast.run p WHERE p.run_id = r.parent_run_id AND p.status NOT IN ('done', 'failed', 'cancelled'))

-- old_count --
SELECT count(*), coalesce(sum(r.entries), 0)::bigint FROM outlast.run r WHERE {old_where}

-- old --
SELECT r.run_no FROM outlast.run r WHERE {old_where} ORDER BY r.ended_at LIMIT %(limit)s FOR UPDATE OF r SKIP LOCKED

-- remove --
WITH entries AS (DELETE FROM outlast.entry WHERE run_no = ANY (%(numbers)s::bigint[])),
     gates AS (DELETE FROM outlast.gate WHERE run_no = ANY (%(numbers)s::bigint[])),
     notices AS (DELETE FROM outlast.notice WHERE run_no = ANY (%(numbers)s::bigint[]))
DELETE FROM outlast.run WHERE run_no = ANY (%(numbers)s::bigint[])

-- family --  a child's id is its parent's, a colon and the call's
WITH RECURSIVE family AS (
    SELECT run_id FROM outlast.run WHERE run_id = %(run_id)s
    UNION
    SELECT r.run_id FROM family f JOIN outlast.run r ON r.run_id > f.run_id || ':' AND r.run_id < f.run_id || ';' AND r.parent_run_id = f.run_id
)
SELECT run_id FROM family ORDER BY run_id

-- payloads --
SELECT run_no, seq, entry_no, body::text, meta::text FROM outlast.entry WHERE run_no = ANY (%(numbers)s::bigint[])

-- wipe_entry --
UPDATE outlast.entry e SET body = (i ->> 3)::json, meta = (i ->> 4)::json FROM json_array_elements(%(rows)s::json) i
 WHERE e.run_no = (i ->> 0)::bigint AND e.seq = (i ->> 1)::integer AND e.entry_no = (i ->> 2)::integer

-- wipe_gates --
UPDATE outlast.gate SET args = '{}', text = '', note = NULL, edited_args = NULL WHERE run_no = ANY (%(numbers)s::bigint[])

-- wipe_notices --
UPDATE outlast.notice SET text = '', error = NULL, next_try_at = NULL WHERE run_no = ANY (%(numbers)s::bigint[])

-- wipe_run --
UPDATE outlast.run SET reason = 'erased', tags = '{}', needs = NULL, wake_at = NULL WHERE run_no = ANY (%(numbers)s::bigint[])

-- ---- the schema -----------------------------------------------------------------------------------------------------------------

-- migrate_lock --  one at a time, and for this transaction only
SELECT pg_advisory_xact_lock(hashtextextended('outlast migrate ' || %(schema)s, 0))

-- in_schema --
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s AND c.relkind IN ('r', 'v', 'm', 'p', 'f') ORDER BY c.relname LIMIT 6

-- has_version --
SELECT to_regclass(%(table)s) IS NOT NULL

-- make_version --
CREATE TABLE IF NOT EXISTS outlast.schema_version (version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT clock_timestamp())

-- migrated --
INSERT INTO outlast.schema_version (version) VALUES (%(version)s)

-- ---- pages of people ------------------------------------------------------------------------------------------------------------

-- commits --  a snapshot says which transactions are seen: every commit makes another one of it
SELECT pg_current_snapshot()::text

-- glance --
SELECT run_id, entries, status, reason, lease_owner, wake_at FROM outlast.run WHERE run_id = ANY (%(ids)s::text[])

-- glance_inbox --
SELECT run_no, gate_id, level, digest, deadline FROM outlast.gate
 WHERE outcome IS NULL AND kind IN ('approval', 'verification', 'budget')
 ORDER BY coalesce(deadline, 9223372036854775807), created_at LIMIT %(limit)s

-- key_range --
(r.created_at, r.run_id) < (%(before_at)s, %(before_id)s) AND r.created_at >= %(since)s ORDER BY r.created_at DESC, r.run_id DESC LIMIT %(limit)s

-- keys --  of a list, newest first, by an index
SELECT r.created_at, r.run_id, r.run_no FROM outlast.run r WHERE {key_range}

-- keys_of_status --
SELECT k.* FROM unnest(%(statuses)s::text[]) s(status) CROSS JOIN LATERAL (
        SELECT r.created_at, r.run_id, r.run_no FROM outlast.run r WHERE r.status = s.status AND {key_range}) k
 ORDER BY k.created_at DESC, k.run_id DESC LIMIT %(limit)s

-- keys_of_agent --
SELECT k.* FROM unnest(%(statuses)s::text[]) s(status) CROSS JOIN LATERAL (
        SELECT r.created_at, r.run_id, r.run_no FROM outlast.run r WHERE r.agent = %(agent)s AND r.status = s.status AND {key_range}) k
 ORDER BY k.created_at DESC, k.run_id DESC LIMIT %(limit)s

-- run_fits --
(%(agent)s::text IS NULL OR r.agent = %(agent)s) AND (%(statuses)s::text[] IS NULL OR r.status = ANY (%(statuses)s::text[]))

-- keys_of_stuck --
SELECT r.created_at, r.run_id, r.run_no FROM outlast.run r WHERE r.run_id IN (SELECT run_id FROM outlast.stuck) AND {run_fits} AND {key_range}

-- heads_of --  in the order given
WITH {times}
SELECT {head_columns} FROM unnest(%(numbers)s::bigint[]) WITH ORDINALITY n(run_no, place) JOIN outlast.run r ON r.run_no = n.run_no ORDER BY n.place

-- first_text --  the first message's text, as far as a list shows it
(SELECT CASE json_typeof(e.body -> 'content') WHEN 'string' THEN left(e.body ->> 'content', 400)
                WHEN 'array' THEN (SELECT left(u.value ->> 'text', 400) FROM json_array_elements(e.body -> 'content') u
                                    WHERE json_typeof(u.value) = 'object' AND u.value ->> 'type' = 'text' LIMIT 1) END
           FROM outlast.entry e WHERE e.run_no = r.run_no AND e.seq = 1 AND e.kind = 'MessageAdded')

-- says --
(%(text)s::text IS NULL OR strpos(r.run_id, %(text)s) > 0 OR strpos(lower(coalesce({first_text}, '')), lower(%(text)s)) > 0)

-- fitting --  those of the runs that a search finds, in the order given
SELECT r.run_no FROM unnest(%(numbers)s::bigint[]) WITH ORDINALITY n(run_no, place) JOIN outlast.run r ON r.run_no = n.run_no
 WHERE (%(tags)s = '{}' OR {has_tags}) AND {says} ORDER BY n.place LIMIT %(limit)s

-- page_by_id --  of the first `scan` ids that begin with the text
SELECT r.run_no FROM (SELECT run_no FROM outlast.run WHERE run_id >= %(text)s AND run_id < %(text_end)s ORDER BY run_id LIMIT %(scan)s) near
  JOIN outlast.run r ON r.run_no = near.run_no
 WHERE {run_fits} AND (%(tags)s = '{}' OR {has_tags}) AND r.created_at >= %(since)s ORDER BY r.run_id LIMIT %(limit)s

-- firsts --
SELECT r.run_no, {first_text} FROM outlast.run r WHERE r.run_no = ANY (%(numbers)s::bigint[])

-- soonest_gates --  the open gate of each run that ends first
SELECT DISTINCT ON (g.run_no) g.run_no, {gate_columns} FROM outlast.gate g
 WHERE g.run_no = ANY (%(numbers)s::bigint[]) AND g.outcome IS NULL
 ORDER BY g.run_no, coalesce(g.deadline, 9223372036854775807), g.created_at, g.gate_no

-- count_of --  per status, each up to a limit
SELECT s.status, (SELECT count(*) FROM (
        SELECT FROM outlast.run r WHERE r.status = s.status AND r.created_at >= %(since)s LIMIT %(most)s) found)
  FROM unnest(%(statuses)s::text[]) s(status)

-- count_of_agent --
SELECT s.status, (SELECT count(*) FROM (
        SELECT FROM outlast.run r WHERE r.agent = %(agent)s AND r.status = s.status AND r.created_at >= %(since)s LIMIT %(most)s) found)
  FROM unnest(%(statuses)s::text[]) s(status)

-- agents --  a loose scan: the next distinct name, and again
WITH RECURSIVE known AS (
    (SELECT agent, 1 AS n FROM outlast.run ORDER BY agent LIMIT 1)
    UNION ALL
    SELECT (SELECT r.agent FROM outlast.run r WHERE r.agent > k.agent ORDER BY r.agent LIMIT 1), k.n + 1
      FROM known k WHERE k.agent IS NOT NULL AND k.n < %(limit)s
)
SELECT agent FROM known WHERE agent IS NOT NULL

-- gate_entries --  what the journal says about a gate and its call, without messages and results
SELECT {journal_columns} FROM outlast.run r JOIN outlast.entry e ON e.run_no = r.run_no
 WHERE r.run_id = %(run_id)s AND e.seq = %(seq)s AND e.kind NOT IN ('MessageAdded', 'CallFinished', 'LateResult', 'TextSent')
 ORDER BY e.entry_no LIMIT %(limit)s

-- decided --
WITH {times}
SELECT {head_columns}, {gate_columns}
  FROM outlast.gate g JOIN outlast.run r ON r.run_no = g.run_no
 WHERE g.decided_at IS NOT NULL AND g.kind IN ('approval', 'verification', 'budget') AND g.decided_at >= %(since)s
   AND (%(agent)s::text IS NULL OR r.agent = %(agent)s)
 ORDER BY g.decided_at DESC, g.gate_no DESC LIMIT %(limit)s

-- ended_per_hour --  hour by hour, so that nothing is sorted: (hour, done, failed, cancelled)
SELECT h.hour, c.*
  FROM generate_series((SELECT greatest(%(since)s::bigint, min(ended_at)) FROM outlast.run WHERE ended_at IS NOT NULL) / 3600000, %(now)s::bigint / 3600000) h(hour)
 CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE status = 'done'), count(*) FILTER (WHERE status = 'failed'), count(*) FILTER (WHERE status = 'cancelled')
          FROM outlast.run
         WHERE ended_at IS NOT NULL AND ended_at >= greatest(%(since)s::bigint, h.hour * 3600000) AND ended_at < (h.hour + 1) * 3600000
           AND (%(agent)s::text IS NULL OR agent = %(agent)s)) c

-- near --  the newest runs, up to `scan`
SELECT run_no FROM outlast.run WHERE created_at >= %(since)s ORDER BY created_at DESC LIMIT %(scan)s

-- more_than --  is there more than `scan`?
SELECT run_no FROM outlast.run WHERE created_at >= %(since)s ORDER BY created_at DESC LIMIT 1 OFFSET %(scan)s

-- near_of_agent --  for an agent that has few
SELECT k.run_no FROM unnest(%(statuses)s::text[]) s(status) CROSS JOIN LATERAL (
        SELECT run_no, created_at FROM outlast.run WHERE agent = %(agent)s AND status = s.status AND created_at >= %(since)s) k
 ORDER BY k.created_at DESC LIMIT %(scan)s

-- spent_columns --  what a sub-agent's run spent is in its parent's sum already
(r.created_at + %(offset)s) / 86400000, r.agent, count(*), sum(r.input_tokens)::bigint, sum(r.output_tokens)::bigint, sum(r.cost_usd::float8),
       count(*) FILTER (WHERE r.cost_usd IS NULL)

-- spent_where --
CASE WHEN %(agent)s::text IS NULL THEN r.parent_run_id IS NULL ELSE r.agent = %(agent)s END GROUP BY 1, 2 ORDER BY 1, 2

-- spent_per_day --
SELECT {spent_columns} FROM (SELECT * FROM outlast.run WHERE created_at >= %(since)s ORDER BY created_at DESC LIMIT %(scan)s) r WHERE {spent_where}

-- spent_per_day_of_agent --
SELECT {spent_columns} FROM ({near_of_agent}) n JOIN outlast.run r ON r.run_no = n.run_no WHERE {spent_where}

-- costs --  of the newest `scan` runs, by `per`
SELECT CASE %(per)s::text
         WHEN 'agent' THEN r.agent WHEN 'day' THEN left(outlast.iso(e.at), 10) WHEN 'model' THEN e.meta ->> 'model'
         ELSE (SELECT coalesce(json_agg(u.value ->> 'name'), '[]')::text
                 FROM json_array_elements(CASE json_typeof(e.body -> 'content') WHEN 'array' THEN e.body -> 'content' ELSE '[]' END) u
                WHERE CASE json_typeof(u.value) WHEN 'object' THEN u.value ->> 'type' = 'tool_use' END) END,
       count(*) FILTER (WHERE e.kind = 'MessageAdded'), count(*) FILTER (WHERE e.kind = 'ModelCallLost'),
       coalesce(sum((e.meta -> 'usage' ->> 'input_tokens')::bigint), 0)::bigint,
       coalesce(sum((e.meta -> 'usage' ->> 'output_tokens')::bigint), 0)::bigint,
       coalesce(sum((e.meta -> 'usage' ->> 'cache_read_input_tokens')::bigint), 0)::bigint,
       coalesce(sum((e.meta -> 'usage' ->> 'cache_creation_input_tokens')::bigint), 0)::bigint,
       round(sum((e.meta ->> 'cost_usd')::numeric) * 1e10)::bigint,
       count(*) FILTER (WHERE e.kind = 'MessageAdded' AND e.meta ->> 'cost_usd' IS NULL),
       round(sum((e.body ->> 'cost_usd')::numeric) FILTER (WHERE e.kind = 'ModelCallLost') * 1e10)::bigint,
       (sum((e.meta ->> 'latency_ms')::bigint) FILTER (WHERE e.kind = 'MessageAdded'))::bigint, count(e.meta ->> 'latency_ms')
  FROM (SELECT run_no, agent FROM outlast.run
         WHERE created_at >= %(since)s AND (%(agent)s::text IS NULL OR agent = %(agent)s) ORDER BY created_at DESC LIMIT %(scan)s) r
  JOIN outlast.entry e ON e.run_no = r.run_no
 WHERE e.kind = 'ModelCallLost'
    OR (e.kind = 'MessageAdded' AND e.meta -> 'stop_reason' IS NOT NULL AND e.meta ->> 'imported' IS NULL)
 GROUP BY 1 ORDER BY 1

-- open_gates --  by kind: how many, up to `most`, and the oldest one's instant
SELECT k.kind,
       (SELECT count(*) FROM (SELECT 1 FROM outlast.gate g WHERE g.outcome IS NULL AND g.kind = k.kind LIMIT %(most)s) x),
       (SELECT g.created_at FROM outlast.gate g WHERE g.outcome IS NULL AND g.kind = k.kind ORDER BY g.created_at LIMIT 1)
  FROM unnest(%(kinds)s::text[]) k(kind)

-- count_stuck --
SELECT count(*) FROM (SELECT DISTINCT run_id FROM outlast.stuck LIMIT %(most)s) x

-- step_columns --  (tool or NULL: the model, ms)
CASE e.kind WHEN 'CallFinished' THEN
            (SELECT u.value ->> 'name'
               FROM outlast.entry a, json_array_elements(CASE json_typeof(a.body -> 'content') WHEN 'array' THEN a.body -> 'content' ELSE '[]' END) u
              WHERE a.run_no = e.run_no AND a.seq = e.seq AND a.kind = 'MessageAdded'
                AND CASE json_typeof(u.value) WHEN 'object' THEN u.value ->> 'id' = e.body ->> 'call_id' END LIMIT 1) END,
       coalesce(e.meta ->> 'ms', e.meta ->> 'latency_ms')::float8::bigint

-- step_where --
e.kind IN ('CallFinished', 'MessageAdded') AND coalesce(e.meta ->> 'ms', e.meta ->> 'latency_ms') IS NOT NULL LIMIT %(most)s

-- step_times --
SELECT {step_columns} FROM ({near}) n JOIN outlast.run r ON r.run_no = n.run_no JOIN outlast.entry e ON e.run_no = r.run_no
 WHERE (%(agent)s::text IS NULL OR r.agent = %(agent)s) AND {step_where}

-- step_times_of_agent --
SELECT {step_columns} FROM ({near_of_agent}) n JOIN outlast.entry e ON e.run_no = n.run_no WHERE {step_where}
