-- What the pages of people need: lists by status and agent, counts per status, what ended and what was decided lately.

CREATE INDEX run_status ON run (status, created_at, run_id);
CREATE INDEX run_agent ON run (agent, created_at, run_id);
-- OR, not IN: every append names updated_at, and IN would make it build a list each time to see that the run is not over.
CREATE INDEX run_ended ON run (updated_at, status, agent) WHERE (status = 'done' OR status = 'failed' OR status = 'cancelled');
CREATE INDEX gate_decided ON gate (decided_at) WHERE decided_at IS NOT NULL AND kind IN ('approval', 'verification', 'budget');
