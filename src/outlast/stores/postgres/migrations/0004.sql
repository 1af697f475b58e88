-- Lists of an agent's runs, and their counts per status: each status is a stretch of the index in the list's order.

DROP INDEX outlast.run_agent;
CREATE INDEX run_agent ON outlast.run (agent, status, created_at, run_id);

-- What ended, hour by hour and by outcome, without a look at the runs themselves.

DROP INDEX outlast.run_ended;
CREATE INDEX run_ended ON outlast.run (ended_at) INCLUDE (status, agent) WHERE ended_at IS NOT NULL;

-- What is stuck is found without a look at every run that failed.

DROP INDEX outlast.run_failed;
ALTER TABLE outlast.run ADD COLUMN marked bigint;  -- the fence under which the run was stopped although its journal does not say that it is over
UPDATE outlast.run SET marked = fence
 WHERE status = 'failed'
   AND (SELECT e.status FROM outlast.entry e WHERE e.run_no = run.run_no ORDER BY e.seq DESC, e.entry_no DESC LIMIT 1) <> 'failed';
CREATE INDEX run_marked ON outlast.run (run_no) WHERE marked IS NOT NULL;
CREATE INDEX run_died ON outlast.run (run_no) WHERE status = 'failed' AND reason LIKE 'worker died % times while %';

CREATE OR REPLACE VIEW outlast.stuck AS
WITH clock(late) AS MATERIALIZED (SELECT outlast.now_ms() - 300000),  -- five minutes ago
found(run_id, status, since, reason, command) AS (
    SELECT r.run_id, r.status, g.created_at,
           g.text || CASE WHEN g.role IS NULL AND g.deadline IS NULL THEN ': asked is nobody in particular, and there is no deadline'
                          WHEN g.role IS NULL THEN ': asked is nobody in particular'
                          WHEN g.deadline IS NULL THEN ': it waits for ' || g.role || ' without a deadline'
                          ELSE ': it still waits for ' || g.role || ', though its last deadline has passed' END,
           'outlast approve ' || r.run_id || ' ' || coalesce(g.call_id, g.gate_id)
      FROM outlast.gate g JOIN outlast.run r ON r.run_no = g.run_no, clock
     WHERE g.outcome IS NULL AND g.kind IN ('approval', 'verification', 'budget') AND g.kind <> 'verification'
       AND (g.role IS NULL OR g.deadline IS NULL OR (g.closes_at IS NULL AND g.deadline < clock.late))
    UNION ALL
    SELECT r.run_id, r.status, g.created_at, g.text, 'outlast verify ' || r.run_id || ' ' || coalesce(g.call_id, g.gate_id)
      FROM outlast.gate g JOIN outlast.run r ON r.run_no = g.run_no
     WHERE g.outcome IS NULL AND g.kind IN ('approval', 'verification', 'budget') AND g.kind = 'verification'
    UNION ALL
    SELECT r.run_id, r.status, n.created_at,
           'the notice (' || n.kind || ') of ' || n.gate_id
           || CASE WHEN n.tries = 0 THEN ' waits for a process that tells ' || n.target
                   ELSE ' could not be delivered to ' || n.target || ' in ' || n.tries || ' tries' END
           || CASE WHEN n.next_try_at IS NULL THEN ', it is not tried again' ELSE '' END || coalesce(': ' || n.error, ''),
           'outlast sweep'
      FROM outlast.notice n JOIN outlast.run r ON r.run_no = n.run_no, clock
     WHERE n.sent_at IS NULL AND r.status NOT IN ('done', 'failed', 'cancelled')
       AND (n.tries >= 3 OR n.next_try_at IS NULL OR (n.tries = 0 AND n.next_try_at < clock.late))
    UNION ALL
    SELECT r.run_id, r.status, r.updated_at, r.reason, 'outlast worker --agent ' || r.agent
      FROM outlast.run r WHERE r.status = 'waiting_for_code'
    UNION ALL
    SELECT r.run_id, r.status, r.wake_at, 'it is due, and no worker takes it: none that runs knows the agent ' || r.agent,
           CASE r.driver WHEN 'script' THEN 'outlast show ' || r.run_id ELSE 'outlast worker --agent ' || r.agent END
      FROM clock, outlast.run r
     WHERE r.lease_owner IS NULL AND r.wake_at IS NOT NULL AND r.needs IS NULL AND r.wake_at < clock.late
       AND r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND r.status <> 'waiting_for_code'
    UNION ALL
    SELECT r.run_id, r.status, r.wake_at, 'it is due, and no worker takes it: none that runs knows the agent ' || r.agent,
           CASE r.driver WHEN 'script' THEN 'outlast show ' || r.run_id ELSE 'outlast worker --agent ' || r.agent END
      FROM clock, outlast.run r
     WHERE r.lease_owner IS NULL AND r.needs IS NOT NULL AND r.wake_at < clock.late
       AND r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND r.status <> 'waiting_for_code'
    UNION ALL
    SELECT r.run_id, r.status, coalesce(nullif(r.lease_until, 0), r.updated_at),
           'its worker is gone, and no other takes it: none that runs knows the agent ' || r.agent,
           CASE r.driver WHEN 'script' THEN 'outlast show ' || r.run_id ELSE 'outlast worker --agent ' || r.agent END
      FROM clock, outlast.run r
     WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled'
       AND r.lease_owner IS NOT NULL AND coalesce(nullif(r.lease_until, 0), r.updated_at) < clock.late
    UNION ALL
    SELECT r.run_id, r.status, r.updated_at, 'its worker died ' || r.attempts || ' times in a row', 'outlast show ' || r.run_id || ' --journal'
      FROM outlast.run r WHERE r.status <> 'done' AND r.status <> 'failed' AND r.status <> 'cancelled' AND r.attempts >= 3
    UNION ALL
    SELECT r.run_id, r.status, r.updated_at, r.reason, 'outlast retry ' || r.run_id
      FROM outlast.run r WHERE r.status = 'failed' AND r.reason LIKE 'worker died % times while %'
    UNION ALL                                        -- stopped and marked: its journal does not say that it is over
    SELECT r.run_id, r.status, r.updated_at, coalesce(r.reason, 'its journal cannot be read'), 'outlast store check'
      FROM outlast.run r WHERE r.marked IS NOT NULL AND r.marked = r.fence AND r.status = 'failed'
)
SELECT run_id, status, reason, outlast.iso(since) AS since, command FROM found;
