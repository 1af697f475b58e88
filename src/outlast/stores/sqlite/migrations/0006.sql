-- Lists of an agent's runs, and their counts per status: each status is a stretch of the index in the list's order.

DROP INDEX run_agent;
CREATE INDEX run_agent ON run (agent, status, created_at, run_id);
