"""The JSON API: the command line's documents, every refusal with its status, and three thousand odd requests without a 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from outlast.cli import main
from outlast.web.app import build
from outlast.web.security import Door
from web.conftest import on_both_stores
from web.kite import BIG, Kite, Running, new_kite

CASES = 3_000  # requests in all
EACH = 280  # of an operation


def listed(http: httpx.Client, path: str) -> list[dict[str, Any]]:
    answer = http.get(path).raise_for_status().json()
    assert answer["type"] == "list"
    items: list[dict[str, Any]] = answer["items"]
    return items


@on_both_stores
def test_the_documents_are_those_of_the_command_line(
    running: Running, http: httpx.Client, kite: Kite, capfd: pytest.CaptureFixture[str]
) -> None:
    kite.run("support", "run-1", tags={"tenant": "northwind"})
    kite.run("short", "run-2")
    store = ["--json", "--store", kite.store]

    def printed(*args: str) -> list[dict[str, Any]]:
        import subprocess
        import sys

        done = subprocess.run([sys.executable, "-m", "outlast", *args, *store], capture_output=True, text=True, timeout=60, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    assert printed("runs") == listed(http, "/api/v1/runs")
    assert printed("inbox") == listed(http, "/api/v1/inbox")
    [shown] = printed("show", "run-1", "--messages", "--journal")
    assert shown.pop("steps")  # worked out of the journal, and beside it only
    assert shown.pop("journal") == listed(http, "/api/v1/runs/run-1/journal")
    assert shown == http.get("/api/v1/runs/run-1?messages=1").json()
    assert callable(main)


@on_both_stores
def test_from_start_to_end(running: Running, http: httpx.Client, kite: Kite) -> None:
    body = {"agent": "credit", "input": "Credit it.", "run_id": "run-1", "tags": {"tenant": "northwind"}}
    first, again = http.post("/api/v1/runs", json=body), http.post("/api/v1/runs", json=body)
    assert (first.status_code, again.status_code) == (201, 200) and first.json()["run_id"] == again.json()["run_id"] == "run-1"
    other = http.post("/api/v1/runs", json={**body, "input": "Another."})
    assert other.status_code == 409 and other.json()["error"]["type"] == "run_exists"
    kite.resume("run-1")
    [gate] = listed(http, "/api/v1/inbox")
    assert gate["args"]["invoice"] == BIG and isinstance(gate["args"]["amount_eur"], float)
    args = {**gate["args"], "amount_eur": 2.0, "invoice": BIG + 1}
    stale = http.post("/api/v1/runs/run-1/decide", json={"approved": True, "digest": "sha256:0"})
    assert stale.status_code == 409 and stale.json()["error"]["type"] == "gate_closed"
    done = http.post("/api/v1/runs/run-1/decide", json={"call_id": "toolu_01", "approved": True, "args": args, "digest": gate["digest"]})
    assert done.status_code == 200 and done.json()["decided_by"] == "priya" and done.json()["edited_args"] == args
    late = http.post("/api/v1/runs/run-1/decide", json={"approved": False, "note": "no"})
    assert late.status_code == 409 and late.json()["error"]["gate"]["decided_by"] == "priya"
    kite.resume("run-1")
    assert kite.effects == [("run-1:toolu_01", args)]
    assert http.get("/api/v1/runs/run-1").json()["status"] == "done"
    assert http.post("/api/v1/runs/run-1/retry", json={}).status_code == 409
    assert http.post("/api/v1/runs/run-1/send", json={"input": "And now?"}).json()["status"] == "running"
    assert http.post("/api/v1/runs/run-1/cancel", json={"note": "enough"}).json()["status"] == "cancelled"
    assert http.post("/api/v1/runs/run-1/event", json={"name": "x"}).status_code == 409


@on_both_stores
def test_verify_event_and_health(running: Running, http: httpx.Client, kite: Kite) -> None:
    kite.run("billing", "run-1")
    early = http.post("/api/v1/runs/run-1/verify", json={"outcome": "run_again"})
    if early.status_code == 409:  # the attempt may still act: who, and until when
        assert early.json()["error"]["type"] == "run_busy" and early.json()["error"]["until"]
    kite.clock.move(timedelta(minutes=10))
    done = http.post("/api/v1/runs/run-1/verify", json={"outcome": "happened", "result": {"refund": BIG}})
    assert done.status_code == (409 if early.status_code == 200 else 200)
    kite.run("waiter", "run-2")
    said = [
        http.post("/api/v1/runs/run-2/event", json={"name": "bank.statement", "data": [1], "event_id": "e1"}).json()["first"]
        for _ in range(2)
    ]
    assert said == [True, False]
    assert httpx.get(running.url + "/api/v1/health").json() == {"type": "health", "status": "ok"}


@pytest.mark.parametrize("path, body, status", [
    ("/runs", {"agent": "", "input": "x"}, 400),
    ("/runs", {"agent": "short"}, 400),
    ("/runs", {"agent": "short", "input": 7}, 400),
    ("/runs", {"agent": "short", "input": "x", "run_id": "../../etc/passwd"}, 400),
    ("/runs", {"agent": "short", "input": "x", "run_id": "a\u0000b"}, 400),
    ("/runs", {"agent": "short", "input": "x", "run_id": "x' OR 1=1 --"}, 400),
    ("/runs", {"agent": "short", "input": "x", "tags": {"a": 1}}, 400),
    ("/runs", {"agent": "short", "input": "x", "by": "mallory"}, 400),
    ("/runs/nope/decide", {"approved": True}, 404),
    ("/runs/..%2f..%2fetc/decide", {"approved": True}, 404),
    ("/runs/run-1/decide", {"approved": "true"}, 400),
    ("/runs/run-1/decide", {"approved": 1}, 400),
    ("/runs/run-1/decide", {"approved": None}, 400),
    ("/runs/run-1/decide", {"approved": False}, 400),
    ("/runs/run-1/decide", {"approved": True, "decided_by": "mallory"}, 400),
    ("/runs/run-1/decide", {"approved": True, "args": [1]}, 400),
    ("/runs/run-1/decide", {"approved": True, "args": {"ticket_id": 7}}, 400),
    ("/runs/run-1/decide", [], 400),
    ("/runs/run-1/verify", {"outcome": "maybe"}, 400),
    ("/runs/run-1/event", {"name": ""}, 400),
])  # fmt: skip
def test_what_is_refused(running: Running, http: httpx.Client, kite: Kite, path: str, body: Any, status: int) -> None:
    kite.run("support", "run-1")
    answer = http.post("/api/v1" + path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error" and set(answer.json()["error"]) >= {"type", "message", "hint", "run_id", "gate"}
    assert kite.app.get("run-1").gates[0].outcome is None and len(kite.app.runs()) == 1


@pytest.mark.parametrize("text", ["", "nope", "{", '{"approved": true, "approved": false}', '{"approved": NaN}', "[" * 100_000, '{"a": ' * 300 + "1" + "}" * 300,
                                  '{"approved": true, "note": "\\ud800"}', "\ufeff{}", "1" * 10_000])  # fmt: skip
def test_bodies_that_are_no_json(running: Running, http: httpx.Client, kite: Kite, text: str) -> None:
    kite.run("support", "run-1")
    answer = http.post("/api/v1/runs/run-1/decide", content=text.encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400) and (answer.status_code == 200) == ("ud800" in text)


QUERIES = ["limit=0", "limit=1001", "limit=x", "limit=%C2%B2", "since=yesterday", "status=asleep", "tag=x", "before=nope", "before=", "nonsense=1",
           "unfinished=maybe", "since=99999999999999d", "since=0001-01-01"]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES)
def test_parameters_that_make_no_sense(http: httpx.Client, query: str) -> None:
    assert http.get(f"/api/v1/runs?{query}").status_code in (200, 400, 404)


HOSTILE = [
    "' OR '1'='1",
    "'; DROP TABLE run; --",
    '" OR ""="',
    "%' AND 1=1 --",
    "1) UNION SELECT * FROM run --",
    "\\",
    "%",
    "_",
    "{{7*7}}",
    "../../etc/passwd",
    "x" * 5000,
]


@pytest.mark.parametrize("text", HOSTILE)
@on_both_stores
def test_filters_are_values_never_sql(running: Running, http: httpx.Client, kite: Kite, text: str) -> None:
    kite.run("short", "run-1")
    for key in ("agent", "q", "role", "before"):
        answer = http.get("/api/v1/inbox" if key == "role" else "/api/v1/runs", params={key: text})
        assert answer.status_code in (200, 400, 404) and not (answer.status_code == 200 and answer.json()["items"]), (key, answer.text)
    assert http.get("/api/v1/runs", params={"tag": f"{text[:60]}={text[:200]}"}).json().get("items", []) == []
    assert len(kite.app.runs()) == 1


@on_both_stores
def test_pages_of_the_journal_and_of_runs(running: Running, http: httpx.Client, kite: Kite) -> None:
    for n in range(7):
        kite.app.start("short", "x", run_id=f"run-{n}")
    seen: list[str] = []
    before: str | None = None
    while True:
        page = http.get("/api/v1/runs", params={"limit": "3", **({"before": before} if before else {})}).json()
        seen += [r["run_id"] for r in page["items"]]
        before = page["next"]
        if before is None:
            break
    assert sorted(seen) == [f"run-{n}" for n in range(7)] and len(seen) == 7
    kite.run("support", "run-s")
    whole = listed(http, "/api/v1/runs/run-s/journal")
    parts, after = [], 0
    while after is not None:
        page = http.get("/api/v1/runs/run-s/journal", params={"after": after, "limit": 2}).json()
        parts += page["items"]
        after = page["next"]
    assert parts == whole


@pytest.fixture
def schema(tmp_path: Path) -> Iterator[Any]:
    """The application in this process, as anna, with a run of every kind."""
    kite = new_kite(tmp_path)
    for n, agent in enumerate(("support", "credit", "billing", "waiter", "short", "failing")):
        kite.run(agent, f"run-{n}")
    kite.app.start("short", "x", run_id="run-kite-142")
    served = build(kite.app, Door(hosts=frozenset({"localhost", "testserver"}), get_user=lambda request: "anna"))
    yield schemathesis.openapi.from_asgi("/api/v1/openapi.json", served)
    kite.app.close()


OPERATIONS = {
    ("get", "/health"): 1, ("get", "/runs"): EACH, ("post", "/runs"): EACH, ("get", "/runs/{run_id}"): EACH, ("get", "/runs/{run_id}/journal"): EACH,
    ("get", "/inbox"): EACH, ("post", "/runs/{run_id}/decide"): EACH, ("post", "/runs/{run_id}/verify"): EACH, ("post", "/runs/{run_id}/send"): EACH,
    ("post", "/runs/{run_id}/cancel"): EACH, ("post", "/runs/{run_id}/retry"): EACH, ("post", "/runs/{run_id}/event"): EACH}  # fmt: skip


def test_three_thousand_requests_are_meant(schema: Any) -> None:
    assert {(o.ok().method, o.ok().path.removeprefix("/api/v1")) for o in schema.get_all_operations()} == set(OPERATIONS)
    assert sum(OPERATIONS.values()) >= CASES


@pytest.mark.parametrize("method, path", OPERATIONS)
def test_no_request_gives_a_5xx(schema: Any, method: str, path: str) -> None:
    sent = 0
    statuses: dict[int, int] = {}
    [operation] = [o.ok() for o in schema.get_all_operations() if (o.ok().method, o.ok().path.removeprefix("/api/v1")) == (method, path)]

    @settings(max_examples=OPERATIONS[method, path], deadline=None, database=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @schemathesis_given(operation)
    def send(case: Any) -> None:
        nonlocal sent
        answer = case.call(headers={"Content-Type": "application/json"} if case.method.upper() == "POST" else {})
        sent += 1
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (case.method, case.path, answer.text)
        case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])

    send()
    assert sent >= OPERATIONS[method, path], sent
    assert statuses.keys() & {200, 201, 404, 409}, statuses  # it reached what is behind the checks


def schemathesis_given(operation: Any) -> Any:
    from hypothesis import given

    return given(case=operation.as_strategy())
