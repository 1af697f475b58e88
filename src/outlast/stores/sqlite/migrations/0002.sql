-- What the pages of people need: lists by status and agent, counts per status, what ended and what was decided lately.

CREATE INDEX run_status ON run (status, created_at, run_id);
CREATE INDEX run_agent ON run (agent, created_at, run_id);
CREATE INDEX run_ended ON run (updated_at, status, agent) WHERE status IN ('done', 'failed', 'cancelled');
CREATE INDEX gate_decided ON gate (decided_at) WHERE decided_at IS NOT NULL AND kind IN ('approval', 'verification', 'budget');
