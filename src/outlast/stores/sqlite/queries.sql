-- Every statement of the SQLite store. A query is opened by its name between dashes; {name} puts in the text of an earlier one.

-- ---- starting and taking runs ---------------------------------------------------------------------------------------------

-- start --
INSERT INTO run (run_id, agent, agent_version, status, entries, seq, wake_at, driver, tags, started_by, parent_run_id, parent_call_id,
                 input_digest, format, created_at, updated_at)
VALUES (:run_id, :agent, :agent_version, 'running', :entries, :seq, :now, :driver, :tags, :started_by, :parent_run_id, :parent_call_id,
        :input_digest, :format, :now, :now)
ON CONFLICT (run_id) DO NOTHING RETURNING run_no

-- held --
SELECT lease_owner IS NOT NULL FROM run WHERE run_no = :run_no

-- take --
UPDATE run SET fence = fence + 1, nonce = :nonce, attempts = attempts + (lease_owner IS NOT NULL), lease_owner = :owner, lease_until = :until,
       lease_boot = :boot, lease_until_at = :until_at
 WHERE run_no = :run_no
RETURNING run_no, run_id, agent, fence, attempts

-- due --
SELECT wake_at, run_no, lease_owner IS NOT NULL FROM run INDEXED BY run_due
 WHERE driver = :driver AND agent = :agent AND wake_at <= :now AND lease_owner IS NULL AND needs IS NULL
 ORDER BY wake_at LIMIT :limit

-- parked_for --
SELECT updated_at, run_no, 0 FROM run INDEXED BY run_parked
 WHERE driver = :driver AND agent = :agent AND needs = :needs AND lease_owner IS NULL
 ORDER BY run_no LIMIT :limit

-- over --  held, and the lease is over
SELECT lease_until, run_no, 1 FROM run INDEXED BY run_held
 WHERE driver = :driver AND agent = :agent AND lease_until <= :boot_now AND lease_owner IS NOT NULL
 ORDER BY lease_until LIMIT :limit

-- ids_of --
SELECT run_no, run_id FROM run WHERE run_no IN (SELECT value FROM json_each(:numbers))

-- drive_by --
UPDATE run SET driver = :driver, updated_at = :now WHERE run_no = :run_no

-- parked --
SELECT DISTINCT agent, needs FROM run INDEXED BY run_parked
 WHERE driver = :driver AND agent = :agent AND needs IS NOT NULL AND lease_owner IS NULL

-- holder --  a loose scan: the next distinct pair
SELECT lease_boot, lease_owner FROM run INDEXED BY run_holders
 WHERE lease_owner IS NOT NULL AND (lease_boot, lease_owner) > (:boot, :owner)
 ORDER BY lease_boot, lease_owner LIMIT 1

-- still_held --
SELECT 1 FROM run INDEXED BY run_holders WHERE lease_boot = :boot AND lease_owner = :owner AND lease_until > 0 LIMIT 1

-- bury --
UPDATE run SET lease_until = 0, lease_until_at = min(lease_until_at, :now)
 WHERE lease_owner IS NOT NULL AND lease_boot = :boot AND lease_owner = :owner AND lease_until > 0
RETURNING 1

-- renew --  by the nonce: it stays when a holder reclaims its own lease (fence + 1) in another thread, and nobody else knows it
UPDATE run SET lease_until = max(run.lease_until, :until), lease_until_at = max(run.lease_until_at, :until_at)
  FROM json_each(:leases) l
 WHERE run.run_no = l.value ->> 0 AND run.nonce = l.value ->> 1 AND run.lease_owner IS NOT NULL
RETURNING run.run_no, run.nonce

-- lengths --
SELECT run_no, fence, entries FROM run WHERE run_no IN (SELECT value FROM json_each(:numbers))

-- holders_of --
SELECT run_no, fence, entries, nonce, lease_owner FROM run WHERE run_no IN (SELECT value FROM json_each(:numbers))

-- give_back --
UPDATE run SET lease_owner = NULL, lease_until = NULL, lease_boot = NULL, lease_until_at = NULL, wake_at = :now
 WHERE run_no = :run_no AND fence = :fence AND nonce = :nonce AND lease_owner IS NOT NULL
RETURNING 1

-- mark --
UPDATE run SET lease_owner = NULL, lease_until = NULL, lease_boot = NULL, lease_until_at = NULL, wake_at = NULL, needs = :needs,
       status = :status, reason = :reason, updated_at = :now, marked = CASE :status WHEN 'failed' THEN fence END
 WHERE run_no = :run_no AND fence = :fence AND nonce = :nonce AND lease_owner IS NOT NULL
RETURNING 1

-- reclaim --  the nonce is random per claim: whoever knows it made the claim that stands, or its own reclaim whose answer was lost too
UPDATE run SET fence = fence + 1, lease_owner = :owner, lease_until = :until, lease_boot = :boot, lease_until_at = :until_at
 WHERE run_no = :run_no AND nonce = :nonce
RETURNING fence

-- ---- appending --------------------------------------------------------------------------------------------------------------

-- advanced --
entries = entries + :n, seq = :seq, agent_version = :agent_version, model_calls = :model_calls, input_tokens = :input_tokens,
       output_tokens = :output_tokens, cache_read_tokens = :cache_read_tokens, cache_write_tokens = :cache_write_tokens, cost_usd = :cost_usd,
       attempts = CASE WHEN :progress THEN 0 ELSE attempts END, updated_at = :now

-- current --
run_no = :run_no AND fence = :fence AND nonce = :nonce AND entries = :entries AND lease_owner IS NOT NULL

-- advance_same --  the status stays and is not named: naming it would rewrite its index. No RETURNING in these four: it costs a table of its own
UPDATE run SET {advanced}
 WHERE {current} AND status = :status AND reason IS :reason

-- advance --
UPDATE run SET {advanced}, status = :status, reason = :reason
 WHERE {current}

-- released --
lease_owner = NULL, lease_until = NULL, lease_boot = NULL, lease_until_at = NULL, wake_at = :wake_at, needs = :needs

-- release_same --
UPDATE run SET {advanced}, {released}
 WHERE {current} AND status = :status AND reason IS :reason

-- release --
UPDATE run SET {advanced}, {released}, status = :status, reason = :reason
 WHERE {current}

-- extend --
UPDATE run SET lease_until = :until, lease_until_at = max(lease_until_at, :until_at) WHERE run_no = :run_no AND lease_until < :until

-- lease --
SELECT fence, nonce, entries, lease_owner, lease_until_at FROM run WHERE run_no = :run_no

-- add_entry --
INSERT INTO entry (run_no, entry_no, seq, kind, at, fence, "by", entry_id, status, digest, meta, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- put_gate --
INSERT INTO gate (run_no, gate_id, kind, call_id, tool, args, digest, text, role, level, deadline, next_at, closes_at, created_at, outcome,
                  decided_at, decided_by, note, edited_args, guarded, seq)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (run_no, gate_id) DO UPDATE SET
       args = excluded.args, digest = excluded.digest, text = excluded.text, role = excluded.role, level = excluded.level,
       deadline = excluded.deadline, next_at = excluded.next_at, closes_at = excluded.closes_at, outcome = excluded.outcome,
       decided_at = excluded.decided_at, decided_by = excluded.decided_by, note = excluded.note, edited_args = excluded.edited_args,
       guarded = excluded.guarded, seq = excluded.seq

-- add_notice --
INSERT INTO notice (run_no, notice_id, target, gate_id, kind, text, next_try_at, created_at)
VALUES (:run_no, :notice_id, :target, :gate_id, :kind, :text, :now, :now)
ON CONFLICT (run_no, notice_id, target) DO NOTHING

-- ---- from outside -----------------------------------------------------------------------------------------------------------

-- seen --
SELECT 1 FROM entry INDEXED BY entry_ids WHERE run_no = :run_no AND entry_id = :entry_id AND entry_id IS NOT NULL

-- outside --
UPDATE run SET entries = entries + :n, seq = :seq, updated_at = :now WHERE run_no = :run_no

-- outside_spent --
UPDATE run SET input_tokens = input_tokens + :input_tokens, output_tokens = output_tokens + :output_tokens,
       cache_read_tokens = cache_read_tokens + :cache_read_tokens, cache_write_tokens = cache_write_tokens + :cache_write_tokens,
       cost_usd = :cost_usd
 WHERE run_no = :run_no

-- outside_status --
UPDATE run SET status = :status, reason = :reason WHERE run_no = :run_no

-- outside_wake --
UPDATE run SET wake_at = :now, needs = NULL, attempts = CASE WHEN :fresh THEN 0 ELSE attempts END WHERE run_no = :run_no

-- outside_fence --
UPDATE run SET fence = fence + 1, nonce = NULL, lease_owner = NULL, lease_until = NULL, lease_boot = NULL, lease_until_at = NULL, wake_at = NULL
 WHERE run_no = :run_no
RETURNING fence

-- ---- reading ----------------------------------------------------------------------------------------------------------------

-- load --
SELECT entry_no, seq, kind, body, meta, at, "by", entry_id, digest FROM entry
 WHERE run_no = :run_no AND seq >= :since AND entry_no > :after
 ORDER BY seq, entry_no

-- journal --
SELECT entry_no, seq, kind, body, meta, at, "by", entry_id, fence, status, digest FROM entry
 WHERE run_no = :run_no AND seq >= :since AND entry_no > :after
 ORDER BY seq, entry_no LIMIT :limit

-- head_columns --
r.run_no, r.run_id, r.agent, r.agent_version, r.status, r.reason, r.entries, r.seq, r.model_calls, r.input_tokens, r.output_tokens,
       r.cache_read_tokens, r.cache_write_tokens, r.cost_usd, r.wake_at, r.driver, r.needs, r.lease_owner, r.lease_until, r.lease_until_at,
       r.lease_boot, r.fence, r.attempts, r.tags, r.started_by, r.parent_run_id, r.parent_call_id, r.created_at, r.updated_at, r.input_digest

-- head --
SELECT {head_columns} FROM run r WHERE r.run_id = :run_id

-- run_no --
SELECT run_no FROM run WHERE run_id = :run_id

-- has_tags --
NOT EXISTS (SELECT 1 FROM json_each(:tags) w WHERE NOT EXISTS
                      (SELECT 1 FROM json_each(r.tags) t WHERE t.key = w.key AND t.value = w.value))

-- heads_where --
(:status IS NULL OR r.status = :status) AND (:agent IS NULL OR r.agent = :agent) AND (:tags = '{}' OR {has_tags})
   AND (r.created_at, r.run_id) < (:before_at, :before_id) AND r.created_at >= :since
 ORDER BY r.created_at DESC, r.run_id DESC LIMIT :limit

-- heads --
SELECT {head_columns} FROM run r INDEXED BY run_created
 WHERE {heads_where}

-- heads_unfinished --
SELECT {head_columns} FROM run r INDEXED BY run_unfinished
 WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND {heads_where}

-- heads_stuck --
SELECT {head_columns} FROM run r INDEXED BY run_created
 WHERE r.run_id IN (SELECT run_id FROM stuck) AND {heads_where}

-- unfinished --
SELECT run_id FROM run INDEXED BY run_unfinished
 WHERE status <> 'done' AND status <> 'failed' AND status <> 'cancelled'
 ORDER BY created_at, run_id

-- unfinished_page --
SELECT {head_columns} FROM run r INDEXED BY run_unfinished
 WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND (r.created_at, r.run_id) > (:after_at, :after_id)
 ORDER BY r.created_at, r.run_id LIMIT :limit

-- journal_columns --
e.entry_no, e.seq, e.kind, e.body, e.meta, e.at, e."by", e.entry_id, e.fence, e.status, e.digest

-- tails --
SELECT r.run_no, {journal_columns}
  FROM json_each(:numbers) n JOIN run r ON r.run_no = n.value JOIN entry e ON e.run_no = r.run_no AND e.seq = r.seq
 ORDER BY r.run_no, e.entry_no

-- ran_by --  the last row of each run counts
SELECT e.run_no, {journal_columns}
  FROM json_each(:numbers) n JOIN entry e ON e.run_no = n.value AND e.seq = 0 AND e.kind = 'RunStarted'
UNION ALL
SELECT e.run_no, {journal_columns}
  FROM json_each(:numbers) n JOIN entry e INDEXED BY entry_versions ON e.run_no = n.value AND e.kind = 'VersionChanged'
 ORDER BY 1, 2

-- ends --
SELECT r.run_id, r.entries,
       lower(hex((SELECT e.digest FROM entry e WHERE e.run_no = r.run_no ORDER BY e.seq DESC, e.entry_no DESC LIMIT 1)))
  FROM run r WHERE r.run_id > :after ORDER BY r.run_id LIMIT :limit

-- digest_at --
SELECT lower(hex(e.digest)) FROM run r JOIN entry e ON e.run_no = r.run_no WHERE r.run_id = :run_id AND e.entry_no = :entry_no

-- pending_due --
SELECT count(*), min(wake_at) FROM run INDEXED BY run_due
 WHERE driver = :driver AND agent = :agent AND wake_at <= :until AND lease_owner IS NULL AND needs IS NULL

-- pending_held --
SELECT count(*), min(lease_until_at) FROM run INDEXED BY run_held
 WHERE driver = :driver AND agent = :agent AND lease_owner IS NOT NULL

-- gate_columns --
g.gate_id, g.kind, g.call_id, g.tool, g.args, g.digest, g.text, g.role, g.level, g.deadline, g.next_at, g.closes_at, g.created_at, g.outcome,
       g.decided_at, g.decided_by, g.note, g.edited_args, g.guarded, g.seq, g.notified_at

-- gates --
SELECT {gate_columns} FROM gate g WHERE g.run_no = :run_no ORDER BY g.outcome IS NOT NULL, g.created_at, g.rowid

-- inbox --
SELECT {head_columns}, {gate_columns}
  FROM gate g INDEXED BY gate_inbox JOIN run r ON r.run_no = g.run_no
 WHERE g.outcome IS NULL AND g.kind IN ('approval', 'verification', 'budget')
   AND (:role IS NULL OR g.role = :role) AND (:agent IS NULL OR r.agent = :agent) AND (:tags = '{}' OR {has_tags})
 ORDER BY coalesce(g.deadline, 9223372036854775807), g.created_at, g.rowid LIMIT :limit

-- stuck --
SELECT run_id, status, reason, since, command FROM stuck ORDER BY since, run_id LIMIT :limit

-- ---- the clock of the gates, and who is told ----------------------------------------------------------------------------------

-- gates_due --
SELECT r.run_id FROM gate g INDEXED BY gate_due JOIN run r ON r.run_no = g.run_no
 WHERE g.outcome IS NULL AND g.next_at <= :now
 GROUP BY r.run_id ORDER BY min(g.next_at) LIMIT :limit

-- notices_due --
SELECT rowid FROM notice INDEXED BY notice_due
 WHERE sent_at IS NULL AND next_try_at <= :now AND target IN (SELECT value FROM json_each(:targets))
 ORDER BY next_try_at LIMIT :limit

-- notice_take --
UPDATE notice SET tries = tries + 1, next_try_at = :until WHERE rowid = :rowid

-- notice --
SELECT n.run_no, n.notice_id, n.target, n.kind, n.text, n.tries, n.created_at, {head_columns}, {gate_columns}
  FROM notice n JOIN run r ON r.run_no = n.run_no JOIN gate g ON g.run_no = n.run_no AND g.gate_id = n.gate_id
 WHERE n.rowid = :rowid

-- notice_failed --
UPDATE notice SET error = :error, next_try_at = :next_try_at
 WHERE run_no = :run_no AND notice_id = :notice_id AND target = :target AND sent_at IS NULL

-- notice_sent --
UPDATE notice SET sent_at = :now, error = NULL, next_try_at = NULL
 WHERE run_no = :run_no AND notice_id = :notice_id AND target = :target AND sent_at IS NULL

-- gate_notified --
UPDATE gate SET notified_at = :now WHERE run_no = :run_no AND gate_id = :gate_id AND notified_at IS NULL

-- notice_targets --
SELECT DISTINCT target FROM notice WHERE run_no = :run_no AND gate_id = :gate_id ORDER BY target

-- check_heads --
SELECT run_no, run_id, entries, seq, status, model_calls, input_tokens, output_tokens FROM run ORDER BY run_no

-- ---- looking after it -------------------------------------------------------------------------------------------------------

-- format --
SELECT format FROM run WHERE run_no = :run_no

-- gates_as_written --
SELECT {gate_columns} FROM gate g WHERE g.run_no = :run_no ORDER BY g.rowid

-- notices --
SELECT notice_id, target, gate_id, kind, text, tries, next_try_at, sent_at, error, created_at FROM notice WHERE run_no = :run_no ORDER BY rowid

-- carried_run --
SELECT run_no FROM run WHERE run_id = :run_id AND driver LIKE :carried || '%'

-- put_run --
INSERT INTO run (run_id, agent, agent_version, status, reason, entries, seq, model_calls, input_tokens, output_tokens, cache_read_tokens,
                 cache_write_tokens, cost_usd, wake_at, driver, needs, fence, attempts, tags, started_by, parent_run_id, parent_call_id,
                 input_digest, format, created_at, updated_at)
VALUES (:run_id, :agent, :agent_version, :status, :reason, :entries, :seq, :model_calls, :input_tokens, :output_tokens, :cache_read_tokens,
        :cache_write_tokens, :cost_usd, :wake_at, :driver, :needs, :fence, :attempts, :tags, :started_by, :parent_run_id, :parent_call_id,
        :input_digest, :format, :created_at, :updated_at)
ON CONFLICT (run_id) DO NOTHING RETURNING run_no

-- put_told --
UPDATE gate SET notified_at = :at WHERE run_no = :run_no AND gate_id = :gate_id

-- put_notice --
INSERT INTO notice (run_no, notice_id, target, gate_id, kind, text, tries, next_try_at, sent_at, error, created_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- let_go --
UPDATE run SET driver = substr(driver, length(:carried) + 1) WHERE driver LIKE :carried || '%' RETURNING run_no

-- old_where --  a run whose parent goes on stays: the parent's pages link to it
(r.status = 'done' OR r.status = 'failed' OR r.status = 'cancelled') AND r.updated_at < :before AND r.lease_owner IS NULL
   AND r.status NOT IN (SELECT value FROM json_each(:keep))
   AND NOT EXISTS (SELECT 1 FROM run p WHERE p.run_id = r.parent_run_id AND p.status <> 'done' AND p.status <> 'failed' AND p.status <> 'cancelled')

-- old_count --
SELECT count(*), coalesce(sum(r.entries), 0) FROM run r INDEXED BY run_ended WHERE {old_where}

-- old --
SELECT r.run_no FROM run r INDEXED BY run_ended WHERE {old_where} ORDER BY r.updated_at LIMIT :limit

-- remove_entry --
DELETE FROM entry WHERE run_no = :run_no

-- remove_gate --
DELETE FROM gate WHERE run_no = :run_no

-- remove_notice --
DELETE FROM notice WHERE run_no = :run_no

-- remove_run --
DELETE FROM run WHERE run_no = :run_no

-- children_of --  a child's id is its parent's, a colon and the call's
SELECT run_id FROM run WHERE run_id > :from AND run_id < :to AND parent_run_id = :run_id

-- payloads --
SELECT seq, entry_no, body, meta FROM entry WHERE run_no = :run_no

-- wipe_entry --
UPDATE entry SET body = :body, meta = :meta WHERE run_no = :run_no AND seq = :seq AND entry_no = :entry_no

-- wipe_gates --
UPDATE gate SET args = '{}', text = '', note = NULL, edited_args = NULL WHERE run_no = :run_no

-- wipe_notices --
UPDATE notice SET text = '', error = NULL, next_try_at = NULL WHERE run_no = :run_no

-- wipe_run --
UPDATE run SET reason = 'erased', tags = '{}', needs = NULL, wake_at = NULL WHERE run_no = :run_no

-- backup_fences --  in a copy: its leases are over, and no lease of the time after it counts
UPDATE run SET fence = fence + :fences, marked = marked + :fences, nonce = NULL, lease_until = CASE WHEN lease_owner IS NOT NULL THEN 0 END

-- ---- pages of people --------------------------------------------------------------------------------------------------------

-- glance --
SELECT run_id, entries, status, reason, lease_owner, wake_at FROM run WHERE run_id IN (SELECT value FROM json_each(:ids))

-- glance_inbox --
SELECT run_no, gate_id, level, digest, deadline FROM gate INDEXED BY gate_inbox
 WHERE outcome IS NULL AND kind IN ('approval', 'verification', 'budget')
 ORDER BY coalesce(deadline, 9223372036854775807), created_at LIMIT :limit

-- key_range --
(r.created_at, r.run_id) < (:before_at, :before_id) AND r.created_at >= :since ORDER BY r.created_at DESC, r.run_id DESC LIMIT :limit

-- keys --  of a list, newest first, from an index alone
SELECT r.created_at, r.run_id, r.run_no FROM run r INDEXED BY run_created WHERE {key_range}

-- keys_of_status --
SELECT r.created_at, r.run_id, r.run_no FROM run r INDEXED BY run_status WHERE r.status = :status AND {key_range}

-- keys_of_agent --
SELECT r.created_at, r.run_id, r.run_no FROM run r INDEXED BY run_agent WHERE r.agent = :agent AND r.status = :status AND {key_range}

-- run_fits --
(:agent IS NULL OR r.agent = :agent) AND (:statuses IS NULL OR r.status IN (SELECT value FROM json_each(:statuses)))

-- keys_of_stuck --
SELECT r.created_at, r.run_id, r.run_no FROM run r WHERE r.run_id IN (SELECT run_id FROM stuck) AND {run_fits} AND {key_range}

-- heads_of --  in the order given
SELECT {head_columns} FROM json_each(:numbers) n JOIN run r ON r.run_no = n.value ORDER BY n.key

-- first_text --  the first message's text, as far as a list shows it
(SELECT CASE json_type(e.body, '$.content') WHEN 'text' THEN substr(e.body ->> '$.content', 1, 400)
                ELSE (SELECT substr(u.value ->> '$.text', 1, 400) FROM json_each(e.body, '$.content') u
                       WHERE u.type = 'object' AND u.value ->> '$.type' = 'text' LIMIT 1) END
           FROM entry e WHERE e.run_no = r.run_no AND e.seq = 1 AND e.kind = 'MessageAdded')

-- says --
(:text IS NULL OR instr(r.run_id, :text) > 0 OR instr(lower(coalesce({first_text}, '')), lower(:text)) > 0)

-- fitting --  those of the runs that a search finds, in the order given
SELECT r.run_no FROM json_each(:numbers) n JOIN run r ON r.run_no = n.value
 WHERE (:tags = '{}' OR {has_tags}) AND {says} ORDER BY n.key LIMIT :limit

-- page_by_id --  of the first :scan ids that begin with the text
SELECT r.run_no FROM (SELECT run_no FROM run WHERE run_id >= :text AND run_id < :text_end ORDER BY run_id LIMIT :scan) near
  JOIN run r ON r.run_no = near.run_no
 WHERE {run_fits} AND (:tags = '{}' OR {has_tags}) AND r.created_at >= :since ORDER BY r.run_id LIMIT :limit

-- firsts --
SELECT r.run_no, {first_text} FROM run r WHERE r.run_no IN (SELECT value FROM json_each(:numbers))

-- soonest_gates --  the open gate of each run that ends first
SELECT g.run_no, {gate_columns} FROM gate g
 WHERE g.run_no IN (SELECT value FROM json_each(:numbers)) AND g.outcome IS NULL
 ORDER BY coalesce(g.deadline, 9223372036854775807) DESC, g.created_at DESC

-- count_of --
SELECT count(*) FROM (SELECT 1 FROM run r INDEXED BY run_status WHERE r.status = :status AND r.created_at >= :since LIMIT :most)

-- count_of_agent --
SELECT count(*) FROM (SELECT 1 FROM run r INDEXED BY run_agent WHERE r.agent = :agent AND r.status = :status AND r.created_at >= :since LIMIT :most)

-- agents --  a loose scan: the next distinct name
SELECT agent FROM run INDEXED BY run_agent WHERE agent > :agent ORDER BY agent LIMIT 1

-- gate_entries --  what the journal says about a gate and its call, without messages and results
SELECT entry_no, seq, kind, body, meta, at, "by", entry_id, fence, status, digest FROM entry
 WHERE run_no = :run_no AND seq = :seq AND kind NOT IN ('MessageAdded', 'CallFinished', 'LateResult', 'TextSent')
 ORDER BY entry_no LIMIT :limit

-- decided --
SELECT {head_columns}, {gate_columns}
  FROM gate g INDEXED BY gate_decided JOIN run r ON r.run_no = g.run_no
 WHERE g.decided_at IS NOT NULL AND g.kind IN ('approval', 'verification', 'budget') AND g.decided_at >= :since
   AND (:agent IS NULL OR r.agent = :agent)
 ORDER BY g.decided_at DESC LIMIT :limit

-- ended_per_hour --  hour by hour, so that nothing is sorted: (hour, [done, failed, cancelled])
WITH RECURSIVE hour(h) AS (
    SELECT max(:since, min(updated_at)) / 3600000 FROM run INDEXED BY run_ended WHERE (status = 'done' OR status = 'failed' OR status = 'cancelled')
    UNION ALL SELECT h + 1 FROM hour WHERE h < :now / 3600000)
SELECT h, (SELECT json_array(count(*) FILTER (WHERE status = 'done'), count(*) FILTER (WHERE status = 'failed'), count(*) FILTER (WHERE status = 'cancelled'))
             FROM run INDEXED BY run_ended
            WHERE (status = 'done' OR status = 'failed' OR status = 'cancelled') AND updated_at >= max(:since, h * 3600000) AND updated_at < (h + 1) * 3600000
              AND (:agent IS NULL OR agent = :agent))
  FROM hour

-- near --  the newest runs, up to :scan
SELECT run_no FROM run INDEXED BY run_created WHERE created_at >= :since ORDER BY created_at DESC LIMIT :scan

-- more_than --  is there more than `scan`?
SELECT run_no FROM run INDEXED BY run_created WHERE created_at >= :since ORDER BY created_at DESC LIMIT 1 OFFSET :scan

-- near_of_agent --  for an agent that has few
SELECT run_no FROM json_each(:statuses) s CROSS JOIN run INDEXED BY run_agent
 WHERE agent = :agent AND status = s.value AND created_at >= :since ORDER BY created_at DESC LIMIT :scan

-- spent_columns --  what a sub-agent's run spent is in its parent's sum already
(r.created_at + :offset) / 86400000, r.agent, count(*), sum(r.input_tokens), sum(r.output_tokens), sum(CAST(r.cost_usd AS REAL)), sum(r.cost_usd IS NULL)

-- spent_where --
CASE WHEN :agent IS NULL THEN r.parent_run_id IS NULL ELSE r.agent = :agent END GROUP BY 1, 2 ORDER BY 1, 2

-- spent_per_day --
SELECT {spent_columns} FROM ({near}) n CROSS JOIN run r ON r.run_no = n.run_no WHERE {spent_where}

-- spent_per_day_of_agent --
SELECT {spent_columns} FROM ({near_of_agent}) n CROSS JOIN run r ON r.run_no = n.run_no WHERE {spent_where}

-- costs --  of the newest :scan runs, by :per; money in units of 1e-10 USD, so that adding is exact
SELECT CASE :per WHEN 'agent' THEN r.agent WHEN 'day' THEN strftime('%Y-%m-%d', e.at / 1000.0, 'unixepoch') WHEN 'model' THEN e.meta ->> '$.model'
                 ELSE (SELECT json_group_array(u.value ->> '$.name') FROM json_each(e.body, '$.content') u
                        WHERE CASE WHEN u.type = 'object' THEN u.value ->> '$.type' = 'tool_use' END) END,
       sum(e.kind = 'MessageAdded'), sum(e.kind = 'ModelCallLost'),
       sum(coalesce(e.meta ->> '$.usage.input_tokens', 0)), sum(coalesce(e.meta ->> '$.usage.output_tokens', 0)),
       sum(coalesce(e.meta ->> '$.usage.cache_read_input_tokens', 0)), sum(coalesce(e.meta ->> '$.usage.cache_creation_input_tokens', 0)),
       sum(CAST(round(CAST(e.meta ->> '$.cost_usd' AS REAL) * 1e10) AS INTEGER)),
       sum(e.kind = 'MessageAdded' AND e.meta ->> '$.cost_usd' IS NULL),
       sum(CAST(round(CAST(e.body ->> '$.cost_usd' AS REAL) * 1e10) AS INTEGER)) FILTER (WHERE e.kind = 'ModelCallLost'),
       sum(e.meta ->> '$.latency_ms') FILTER (WHERE e.kind = 'MessageAdded'), count(e.meta ->> '$.latency_ms')
  FROM (SELECT run_no, agent FROM run INDEXED BY run_created
         WHERE created_at >= :since AND (:agent IS NULL OR agent = :agent) ORDER BY created_at DESC LIMIT :scan) r
  JOIN entry e ON e.run_no = r.run_no
 WHERE e.kind = 'ModelCallLost'
    OR (e.kind = 'MessageAdded' AND json_type(e.meta, '$.stop_reason') IS NOT NULL AND e.meta ->> '$.imported' IS NULL)
 GROUP BY 1 ORDER BY 1

-- open_gates --  by kind: how many, up to :most, and the oldest one's instant
SELECT k.value,
       (SELECT count(*) FROM (SELECT 1 FROM gate INDEXED BY gate_open WHERE outcome IS NULL AND kind = k.value LIMIT :most)),
       (SELECT created_at FROM gate INDEXED BY gate_open WHERE outcome IS NULL AND kind = k.value ORDER BY created_at LIMIT 1)
  FROM json_each(:kinds) k

-- count_stuck --
SELECT count(*) FROM (SELECT DISTINCT run_id FROM stuck LIMIT :most)

-- step_columns --  (tool or NULL: the model, ms)
CASE e.kind WHEN 'CallFinished' THEN
            (SELECT u.value ->> '$.name' FROM entry a, json_each(a.body, '$.content') u
              WHERE a.run_no = e.run_no AND a.seq = e.seq AND a.kind = 'MessageAdded'
                AND CASE WHEN u.type = 'object' THEN u.value ->> '$.id' = e.body ->> '$.call_id' END LIMIT 1) END,
       coalesce(e.meta ->> '$.ms', e.meta ->> '$.latency_ms')

-- step_where --
e.kind IN ('CallFinished', 'MessageAdded') AND coalesce(e.meta ->> '$.ms', e.meta ->> '$.latency_ms') IS NOT NULL LIMIT :most

-- step_times --
SELECT {step_columns} FROM ({near}) n CROSS JOIN run r ON r.run_no = n.run_no JOIN entry e ON e.run_no = r.run_no
 WHERE (:agent IS NULL OR r.agent = :agent) AND {step_where}

-- step_times_of_agent --
SELECT {step_columns} FROM ({near_of_agent}) n JOIN entry e ON e.run_no = n.run_no WHERE {step_where}
