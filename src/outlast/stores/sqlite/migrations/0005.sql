-- What was spent, answer by answer; and the open gates by kind and age, for whoever watches.

CREATE INDEX gate_open ON gate (kind, created_at) WHERE outcome IS NULL;

-- One row an answer that was paid for here, and one a model call that may have been paid for and was lost with its worker (`lost`: its tokens
-- and cost are estimates). Tokens of `input_tokens` were neither read from nor written to the cache. `cost_usd` is a decimal text; NULL: unknown.
-- Runs of sub-agents have rows of their own.
CREATE VIEW costs AS
SELECT r.run_id, r.agent, e.seq, e.meta ->> '$.model' AS model, e.kind = 'ModelCallLost' AS lost,
       CASE e.kind WHEN 'ModelCallLost' THEN coalesce(e.body ->> '$.input_tokens', 0)
                   ELSE coalesce(e.meta ->> '$.usage.input_tokens', 0) END AS input_tokens,
       CASE e.kind WHEN 'ModelCallLost' THEN coalesce(e.body ->> '$.output_tokens', 0)
                   ELSE coalesce(e.meta ->> '$.usage.output_tokens', 0) END AS output_tokens,
       coalesce(e.meta ->> '$.usage.cache_read_input_tokens', 0) AS cache_read_tokens,
       coalesce(e.meta ->> '$.usage.cache_creation_input_tokens', 0) AS cache_write_tokens,
       CASE e.kind WHEN 'ModelCallLost' THEN e.body ->> '$.cost_usd' ELSE e.meta ->> '$.cost_usd' END AS cost_usd,
       e.meta ->> '$.latency_ms' AS latency_ms, e.meta ->> '$.attempt' AS attempt,
       strftime('%Y-%m-%dT%H:%M:%fZ', e.at / 1000.0, 'unixepoch') AS at
  FROM entry e JOIN run r ON r.run_no = e.run_no
 WHERE e.kind = 'ModelCallLost'
    OR (e.kind = 'MessageAdded' AND json_type(e.meta, '$.stop_reason') IS NOT NULL AND e.meta ->> '$.imported' IS NULL);
