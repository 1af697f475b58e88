"""The counts: what each of them counts, as text that a Prometheus parser takes, on every page that serves it."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from outlast import Agent, Outlast, ToolContext, ToolFailed, approval, tool
from outlast.cli.health import serving
from outlast.models import ScriptedModel
from outlast.runtime import metrics
from outlast.testing import ManualClock
from support.deaths import dying_at

Numbers = dict[tuple[str, frozenset[tuple[str, str]]], float]
SAMPLE = re.compile(r"^([a-z_]+)(?:\{(.*)\})? (-?[0-9.e+-]+|\+Inf)$")
LABEL = re.compile(r'([a-z]+)="((?:[^"\\]|\\.)*)"')


@pytest.fixture(autouse=True)
def _from_nothing() -> Iterator[None]:
    metrics.reset()
    yield
    metrics.reset()


def parsed(text: str) -> Numbers:
    """The samples; what is no Prometheus text fails."""
    out: Numbers = {}
    typed: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in typed, f"{name} comes twice"
            typed[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.match(line)
            assert match, line
            family = re.sub(r"_(bucket|sum|count)$", "", match[1]) if match[1] not in typed else match[1]
            assert family in typed, line
            key = (match[1], frozenset(LABEL.findall(match[2] or "")))
            assert key not in out, line
            out[key] = float(match[3])
    return out


def number(found: Numbers, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@tool(effect="idempotent")
def send(ctx: ToolContext[Any], to: str) -> str:
    """Send a mail."""
    if to == "nobody":
        raise ToolFailed("no such address")
    return "sent"


@tool(gate=approval(to="lead", within=timedelta(hours=4)))
def refund(amount: int) -> str:
    """Pay money back."""
    return "paid"


def calls(name: str, **args: Any) -> list[dict[str, Any]]:
    return [{"type": "tool_use", "id": f"toolu_{name}", "name": name, "input": args}]


def mailer(to: str = "ada") -> Agent[str]:
    turn = {"content": calls("send", to=to), "usage": {"input_tokens": 100, "output_tokens": 7, "cache_read_input_tokens": 1_000_000}}
    return Agent("mailer", model=ScriptedModel([turn, "Sent."]), tools=[send])


def test_what_a_run_counts(tmp_path: Path) -> None:
    agent = mailer()
    prices = {"scripted": {"input": 1, "output": 1}}
    with Outlast(tmp_path / "a.db", agents=[agent], prices=prices) as app:  # type: ignore[arg-type]  # whole numbers are fine
        app.run_sync(agent, "go", run_id="r")
        found = parsed(app.metrics())
        tokens = app.head("r")
    assert number(found, "outlast_claims_total") == 1
    assert number(found, "outlast_recovered_total") == 0
    assert number(found, "outlast_steps_total") == 3  # an answer, its result, an answer
    assert number(found, "outlast_effects_total", tool="send") == 1
    assert number(found, "outlast_tokens_total", kind="cache_read") == 1_000_000
    assert number(found, "outlast_tokens_total", kind="input") == tokens.input_tokens
    assert number(found, "outlast_cost_usd_total") == pytest.approx(float(tokens.cost_usd or 0))
    assert number(found, "outlast_append_seconds_count") >= 3
    assert number(found, "outlast_append_seconds_bucket", le="+Inf") == number(found, "outlast_append_seconds_count")
    assert number(found, "outlast_append_seconds_sum") > 0
    assert number(found, "outlast_runs_held") == 0


def test_what_surely_was_not_done_is_no_effect(tmp_path: Path) -> None:
    agent = mailer("nobody")
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        app.run_sync(agent, "go")
        assert number(parsed(app.metrics()), "outlast_effects_total") == 0


def test_a_repeated_attempt_is_counted_apart(tmp_path: Path) -> None:
    agent = mailer()
    with Outlast(tmp_path / "a.db", agents=[agent]) as app, dying_at("tool.after:send"):
        app.run_sync(agent, "go", run_id="r")
    metrics.reset()
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        assert app.resume_sync("r").status == "done"
        found = parsed(app.metrics())
    assert number(found, "outlast_recovered_total") == 1
    assert number(found, "outlast_replays_total", tool="send") == 1
    assert number(found, "outlast_effects_total") == 0


def test_what_waits_comes_from_the_store(tmp_path: Path) -> None:
    clock = ManualClock(datetime(2026, 11, 27, 15, tzinfo=UTC))
    agent = Agent("cashier", model=ScriptedModel([calls("refund", amount=3), "Paid."]), tools=[refund])
    with Outlast(tmp_path / "a.db", agents=[agent], clock=clock) as app:
        app.run_sync(agent, "go", run_id="first")
        clock.move(timedelta(minutes=10))
        app.run_sync(agent, "go", run_id="second")
    with Outlast(tmp_path / "a.db", clock=clock) as other:  # any process that reaches the store
        clock.move(timedelta(minutes=1))
        found = parsed(other.metrics())
        assert number(found, "outlast_gates_waiting", kind="approval") == 2
        assert number(found, "outlast_gates_waiting_oldest_seconds", kind="approval") == 660
        assert number(found, "outlast_gates_waiting", kind="verification") == number(found, "outlast_calls_in_doubt") == 0
        other.decide("first", approved=True, decided_by="ada")
        found = parsed(other.metrics())
        assert number(found, "outlast_gates_waiting", kind="approval") == 1
        assert number(found, "outlast_gates_waiting_oldest_seconds", kind="approval") == 60


def payer() -> Agent[str]:
    @tool
    def pay(ctx: ToolContext[Any]) -> str:
        """Pay."""
        raise ConnectionError("the bank did not answer")

    return Agent("payer", model=ScriptedModel([calls("pay"), "Paid."]), tools=[pay])


def test_a_call_in_doubt_and_a_stuck_run_show(tmp_path: Path) -> None:
    agent = payer()
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        assert app.run_sync(agent, "go").status == "waiting_for_verification"
        found = parsed(app.metrics())
    assert number(found, "outlast_calls_in_doubt") == 1
    assert number(found, "outlast_runs_stuck") == 1


def test_labels_are_escaped_and_large_counts_are_whole() -> None:
    metrics.add("outlast_effects_total", 123_456_789_012, tool='say "hi"\\\n')
    text = metrics.text({})
    assert 'outlast_effects_total{tool="say \\"hi\\"\\\\\\n"} 123456789012' in text
    parsed(text)


async def _asked(app: Outlast) -> tuple[str, str]:
    import asyncio

    def get(port: int) -> tuple[str, str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            return response.headers["Content-Type"], response.read().decode()

    async with serving(app, 0, ending=lambda: False) as port:
        return await asyncio.to_thread(get, port)


def test_the_health_port_serves_it(tmp_path: Path) -> None:
    import asyncio

    agent = mailer()
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        app.run_sync(agent, "go")
        kind, text = asyncio.run(_asked(app))
        assert kind.startswith("text/plain; version=0.0.4")
        assert parsed(text) == parsed(app.metrics())


def test_the_web_page_serves_it_behind_its_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.testclient import TestClient

    from outlast.web import create_app

    monkeypatch.setenv("OUTLAST_WEB_TOKEN", "a-token-of-some-length-0123456789ab")
    monkeypatch.setenv("OUTLAST_BY", "ada")
    bearer = {"Authorization": "Bearer a-token-of-some-length-0123456789ab"}
    agent = mailer()
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        app.run_sync(agent, "go")
        with TestClient(create_app(app), base_url="http://127.0.0.1") as client:
            assert client.get("/metrics", follow_redirects=False).status_code in (303, 401)
            given = client.get("/metrics", headers=bearer)
            assert (given.status_code, number(parsed(given.text), "outlast_claims_total")) == (200, 1)
        with TestClient(create_app(app, may_view=lambda who, run: True), base_url="http://127.0.0.1") as client:
            assert client.get("/metrics", headers=bearer).status_code == 403


def collected(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    return {m.name: list(m.data.data_points) for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics} if data else {}


def test_opentelemetrys_meter_gets_the_same(tmp_path: Path) -> None:
    from opentelemetry import metrics as otel

    reader = InMemoryMetricReader()
    otel.set_meter_provider(MeterProvider([reader]))
    agent = mailer()
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        app.run_sync(agent, "go")
        points = collected(reader)
        assert [p.value for p in points["outlast.runs_stuck"]] == [0]
        gates = {dict(p.attributes or {})["kind"]: p.value for p in points["outlast.gates_waiting"]}
        assert gates["approval"] == 0 and set(gates) > {"verification", "budget"}
    doubting = payer()
    with Outlast(tmp_path / "a.db", agents=[doubting]) as app:
        assert app.run_sync(doubting, "go").status == "waiting_for_verification"
        points = collected(reader)
        assert [p.value for p in points["outlast.runs_stuck"]] == [1]
        assert [p.value for p in points["outlast.calls_in_doubt"]] == [1]
        ages = {dict(p.attributes or {})["kind"]: p.value for p in points["outlast.gates_waiting_oldest_seconds"]}
        assert ages["verification"] >= 0
    points = collected(reader)
    assert "outlast.runs_stuck" not in points or not points["outlast.runs_stuck"], "a store that is closed is not opened again"
    assert [p.value for p in points["outlast.steps"]] == [5]
    assert {dict(p.attributes or {})["kind"] for p in points["outlast.tokens"]} == {"input", "output", "cache_read"}
