"""A store with a million runs, put there directly by the database itself: a month of several agents, most of them over.

Of 1,000 runs 30 failed, 10 were cancelled, 3 wait for an approval, 2 for an event, 2 are at work; one in 25,000 is stuck. One agent is rare (1 in 50,000).
Digests are blank: no page looks at them, and `outlast store check` would refuse this store.
"""

from __future__ import annotations

from typing import Any

import apsw

MONTH_MS = 30 * 24 * 3600 * 1000
ENTRIES = 4  # of each run

# One text for both databases, who differ in where numbers come from and in three words.
RUNS = """
INSERT INTO {run} (run_id, agent, agent_version, status, reason, entries, seq, model_calls, input_tokens, output_tokens, cost_usd, wake_at, driver,
                   lease_owner, lease_until, {lease}fence, tags, started_by, format, created_at, updated_at)
SELECT 'run-' || n || '-' || (n * 7919 % 1000003), agent, 'v' || (n / 100000), status,
       CASE status WHEN 'failed' THEN 'the model refused' WHEN 'waiting_for_code' THEN 'no worker has the agent ' || agent
                   WHEN 'waiting_for_approval' THEN 'waits for support-lead' END,
       4, 2, 1, 800 + n % 900, 100 + n % 300, CASE WHEN n % 10 > 0 THEN '0.00' || (10 + n % 90) END,
       CASE WHEN status = 'waiting_for_approval' THEN {now} + 3600000 + n % 86400000 END, 'built-in',
       CASE status WHEN 'running' THEN 'worker-1/boot/1/4117/1' END, CASE status WHEN 'running' THEN {now} + 86400000 END, {leased}1,
       '{{"tenant": "t-' || (n % 200) || '"}}', 'helpdesk', 1, at, at + 60000
  FROM (SELECT n, {now} - ({count} - n) * ({month} / {count}) AS at,
               CASE WHEN n % 50000 = 3 THEN 'rare' WHEN n % 10 < 5 THEN 'support' WHEN n % 10 < 8 THEN 'billing' ELSE 'import' END AS agent,
               CASE WHEN n % 25000 = 7 THEN 'waiting_for_code' WHEN h < 30 THEN 'failed' WHEN h < 40 THEN 'cancelled' WHEN h < 43 THEN 'waiting_for_approval'
                    WHEN h < 45 THEN 'waiting_for_event' WHEN h < 47 THEN 'running' ELSE 'done' END AS status
          FROM (SELECT n, n * 7919 % 1000 AS h FROM {numbers}) x) y
 ORDER BY n
"""
JOURNAL = """
INSERT INTO {entry} (run_no, seq, entry_no, kind, at, fence, "by", status, digest, meta, body)
SELECT r.run_no, k.seq, k.no,
       CASE WHEN k.no = 4 AND r.status LIKE 'waiting%' THEN 'GateOpened' WHEN k.no = 4 AND r.status = 'running' THEN 'CallStarted' ELSE k.kind END,
       r.created_at + k.no * 1000, CASE WHEN k.no > 2 THEN 1 ELSE 0 END, NULL, r.status, {digest},
       {open}CASE k.no
            WHEN 3 THEN '{{"usage": {{"input_tokens": ' || r.input_tokens || ', "output_tokens": ' || r.output_tokens || '}}, "stop_reason": "end_turn"'
                        || ', "latency_ms": ' || (400 + r.run_no % 4000)
                        || CASE WHEN r.cost_usd IS NOT NULL THEN ', "cost_usd": "' || r.cost_usd || '"' ELSE '' END || '}}' END{close},
       {open}CASE k.no WHEN 1 THEN '{{"agent": "' || r.agent || '"}}'
            WHEN 2 THEN '{{"role": "user", "content": "Ticket KITE-' || r.run_no
                        || ' just came in: the customer cannot log in since Thursday, and asks what to do."}}'
            WHEN 3 THEN '{{"role": "assistant", "content": [{{"type": "text", "text": "I looked it up: the workspace moved to single sign-on."}},'
                        || ' {{"type": "tool_use", "id": "toolu_01", "name": "reply_to_customer", "input": {{"ticket_id": "KITE-' || r.run_no || '"}}}}]}}'
            ELSE CASE WHEN r.status LIKE 'waiting%' THEN '{{"gate_id": "approval:toolu_01", "kind": "approval", "call_id": "toolu_01"}}'
                      WHEN r.status = 'running' THEN '{{"call_id": "toolu_01", "key": "' || r.run_id || ':toolu_01", "effect": "idempotent", "attempt": 1}}'
                      ELSE '{{"status": "' || r.status || '"}}' END END{close}
  FROM {run} r CROSS JOIN (SELECT 1 AS no, 0 AS seq, 'RunStarted' AS kind UNION ALL SELECT 2, 1, 'MessageAdded' UNION ALL SELECT 3, 2, 'MessageAdded'
                           UNION ALL SELECT 4, 2, 'RunEnded') k
 ORDER BY r.run_no, k.no
"""
GATES = """
INSERT INTO {gate} (run_no, gate_id, kind, call_id, tool, args, digest, text, role, level, deadline, next_at, closes_at, created_at, outcome, decided_at, decided_by,
                    guarded, seq)
SELECT run_no, 'approval:toolu_01', CASE status WHEN 'waiting_for_event' THEN 'event' ELSE 'approval' END, 'toolu_01', 'reply_to_customer',
       {open}'{{"ticket_id": "KITE-' || run_no || '", "message": "Hello,\\n\\nyour workspace moved to single sign-on.\\n\\nKitebase support"}}'{close},
       'sha256:0000000000000000', 'support wants to send this reply', 'support-lead', 0, wake_at, wake_at, wake_at, created_at,
       CASE status WHEN 'done' THEN 'approved' END, CASE status WHEN 'done' THEN updated_at END, CASE status WHEN 'done' THEN 'priya' END, {false}, 2
  FROM {run} WHERE status IN ('waiting_for_approval', 'waiting_for_event') OR (status = 'done' AND run_no % 20 = 0)
"""


def fill_sqlite(path: str, count: int, now_ms: int) -> None:
    """Into a file that has its schema."""
    db = apsw.Connection(path)
    words: dict[str, Any] = {
        "run": "run", "entry": "entry", "gate": "gate", "open": "", "close": "", "false": "0", "digest": "zeroblob(32)", "now": now_ms, "month": MONTH_MS,
        "count": count, "lease": "lease_boot, lease_until_at, ",
        "leased": f"CASE status WHEN 'running' THEN 'boot' END, CASE status WHEN 'running' THEN {now_ms} + 86400000 END, ",
        "numbers": f"(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {count}) SELECT n FROM c)"}  # fmt: skip
    db.execute("PRAGMA synchronous = off; PRAGMA cache_size = -400000; BEGIN")
    for text in (RUNS, JOURNAL, GATES):
        db.execute(text.format(**words)).fetchall()
    db.execute("COMMIT; PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    db.close()


def fill_postgres(conninfo: str, schema: str, count: int, now_ms: int) -> None:
    """Into a schema that is made."""
    import psycopg

    words: dict[str, Any] = {
        "run": f'"{schema}".run', "entry": f'"{schema}".entry', "gate": f'"{schema}".gate', "open": "(", "close": ")::json", "false": "false",
        "digest": "decode(repeat('00', 32), 'hex')", "now": f"{now_ms}::bigint", "month": f"{MONTH_MS}::bigint", "count": count, "lease": "", "leased": "",
        "numbers": f"generate_series(1, {count}::bigint) g(n)"}  # fmt: skip
    with psycopg.connect(conninfo, autocommit=True) as db:
        db.execute("SET synchronous_commit = off")
        for text in (
            RUNS.replace('\'{{"tenant"', '(\'{{"tenant"').replace("|| '\"}}', 'helpdesk'", "|| '\"}}')::json, 'helpdesk'"),
            JOURNAL,
            GATES,
        ):
            db.execute(text.format(**words))  # type: ignore[arg-type]  # a text made here
        db.execute("VACUUM ANALYZE")
