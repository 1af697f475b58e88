"""What was spent, from what is stored alone: by hand, in every place that tells it, on both stores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from outlast import Agent, Outlast, tool
from outlast.models import ScriptedModel
from outlast.settings import parse_store
from support.deaths import dying_at
from support.postgres import Server, postgres

__all__ = ["postgres"]

PRICES = {
    "big": {"input": Decimal(3), "output": Decimal(15), "cache_read": Decimal("0.30"), "cache_write": Decimal("3.75"), "cache_write_1h": Decimal(6)},
    "small": {"input": Decimal(1), "output": Decimal(5)},
}  # fmt: skip

# Worked by hand, USD per million tokens as above; of `small` the cache costs 0.1, 1.25 and 2 times its input.
#          input              output            cache read          written, 5 minutes   written, an hour
FIRST = 1200 * 3 / 10**6, 340 * 15 / 10**6, 50_000 * 0.30 / 10**6, 5_000 * 3.75 / 10**6, 3_000 * 6 / 10**6
BIG_1 = Decimal("0.0036") + Decimal("0.0051") + Decimal("0.015") + Decimal("0.01875") + Decimal("0.018")  # 0.06045
BIG_2 = Decimal("0.00003") + Decimal("0.00015") + Decimal("0.0174")  # 10 in, 10 out, 58,000 read: 0.01758
SMALL = Decimal("0.0002") + Decimal("0.0001") + Decimal("0.0001") + Decimal("0.00125") + Decimal("0.002")  # 0.00365
TOTAL = BIG_1 + BIG_2 * 2 + SMALL

USAGE_1 = {
    "input_tokens": 1200, "output_tokens": 340, "cache_read_input_tokens": 50_000, "cache_creation_input_tokens": 8_000,
    "cache_creation": {"ephemeral_5m_input_tokens": 5_000, "ephemeral_1h_input_tokens": 3_000}}  # fmt: skip
USAGE_2 = {"input_tokens": 10, "output_tokens": 10, "cache_read_input_tokens": 58_000}
USAGE_SMALL = {
    "input_tokens": 200, "output_tokens": 20, "cache_read_input_tokens": 1_000, "cache_creation_input_tokens": 2_000,
    "cache_creation": {"ephemeral_5m_input_tokens": 1_000, "ephemeral_1h_input_tokens": 1_000}}  # fmt: skip
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@tool(effect="read")
def look(page: int) -> str:
    """Look at a page."""
    return f"page {page}"


@tool(effect="read")
def listen() -> str:
    """Listen."""
    return "nothing"


def said(model: str, usage: dict[str, Any], *content: dict[str, Any] | str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    blocks = [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]
    calls = any(b["type"] == "tool_use" for b in blocks)
    return lambda messages: {
        "role": "assistant", "content": blocks, "stop_reason": "tool_use" if calls else "end_turn", "usage": usage, "model": model}  # fmt: skip


def called(call_id: str, name: str, **args: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": args}


def agents() -> list[Agent[str]]:
    helper = Agent("helper", model=ScriptedModel([said("small", USAGE_SMALL, "found it")]))
    turns = [
        said("big", USAGE_1, called("toolu_1", "look", page=1), called("toolu_2", "listen")),
        said("big", USAGE_2, called("toolu_3", "research", task="dig")),
        said("big", USAGE_2, "done"),
    ]
    return [Agent("lead", model=ScriptedModel(turns), tools=[look, listen, helper.as_tool(name="research", description="Digs.")])]


@pytest.fixture(params=["sqlite", "postgres"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Outlast]:
    if request.param == "sqlite":
        url: Any = tmp_path / "a.db"
    else:
        server: Server = request.getfixturevalue("postgres")
        url = server.url(schema=server.fresh_schema())
    with Outlast(url, agents=agents(), prices=PRICES) as made:
        made.store_migrate()
        yield made


def run(app: Outlast, run_id: str = "r") -> Any:
    return app.run_sync(app.agents["lead"], "go", run_id=run_id)


def test_the_sum_by_hand(app: Outlast) -> None:
    assert Decimal(sum(FIRST)).quantize(Decimal("0.000001")) == BIG_1
    got = run(app)
    assert (got.status, got.cost_usd) == ("done", TOTAL)
    assert (got.input_tokens, got.output_tokens, got.cache_read_tokens, got.cache_write_tokens) == (1420, 380, 167_000, 10_000)
    assert app.head("r:toolu_3").cost_usd == SMALL


def test_a_parents_head_has_what_its_child_spent_before_anybody_drives_it_again(app: Outlast) -> None:
    app.start("lead", "go", run_id="r")
    app.work_sync(agents=["lead"], until_idle=True)
    assert (app.head("r").status, app.head("r").cost_usd) == ("waiting_for_run", BIG_1 + BIG_2)
    app.work_sync(agents=["helper"], until_idle=True)
    head = app.head("r")
    assert (head.seq, head.cost_usd) == (4, BIG_1 + BIG_2 + SMALL)
    assert (head.input_tokens, head.cache_read_tokens, head.cache_write_tokens) == (1410, 109_000, 10_000)
    app.work_sync(until_idle=True)
    assert app.head("r").cost_usd == TOTAL


@pytest.mark.parametrize(
    "per, table",
    [
        ("agent", {"lead": (3, BIG_1 + BIG_2 * 2), "helper": (1, SMALL)}),
        ("model", {"big": (3, BIG_1 + BIG_2 * 2), "small": (1, SMALL)}),
        ("tool", {"look": (1, BIG_1 / 2), "listen": (1, BIG_1 / 2), "research": (0, BIG_2), "": (2, BIG_2 + SMALL)}),
    ],
)
def test_costs_per(app: Outlast, per: str, table: dict[str, tuple[int, Decimal]]) -> None:
    run(app)
    found = app.reader.costs(per=per, since=LONG_AGO)
    assert {cost.key: (cost.calls, cost.cost_usd) for cost in found} == table
    assert [cost.cost_usd for cost in found] == sorted((cost.cost_usd for cost in found if cost.cost_usd), reverse=True)
    assert sum(cost.cost_usd or 0 for cost in found) == TOTAL


def test_costs_per_day_and_of_one_agent(app: Outlast) -> None:
    run(app)
    days = app.reader.costs(per="day", since=LONG_AGO)
    today = app.reader.now()
    assert {cost.key for cost in days} <= {f"{at:%Y-%m-%d}" for at in (today, today - timedelta(minutes=5))}
    assert sum(cost.cost_usd or 0 for cost in days) == TOTAL
    assert [cost.key for cost in app.reader.costs(since=LONG_AGO, agent="helper")] == ["helper"]
    assert app.reader.costs(since=today + timedelta(days=1)) == []


def test_a_picture_counts_a_childs_money_once(app: Outlast) -> None:
    run(app)
    spent = app.reader.statistics(since=LONG_AGO).spent
    assert [(agent, runs) for _, agent, runs, *_ in spent] == [("lead", 1)]
    assert Decimal(str(spent[0][5])).quantize(Decimal("0.00001")) == TOTAL
    alone = app.reader.statistics(since=LONG_AGO, agent="helper").spent
    assert [agent for _, agent, *_ in alone] == ["helper"]


def test_the_view(app: Outlast) -> None:
    run(app)
    rows = view(app)
    assert [(r["run_id"], r["seq"], r["agent"], r["model"], bool(r["lost"]), Decimal(r["cost_usd"])) for r in rows] == [
        ("r", 2, "lead", "big", False, BIG_1), ("r", 4, "lead", "big", False, BIG_2), ("r", 6, "lead", "big", False, BIG_2),
        ("r:toolu_3", 2, "helper", "small", False, SMALL)]  # fmt: skip
    assert [rows[0][f"{kind}_tokens"] for kind in ("input", "output", "cache_read", "cache_write")] == [1200, 340, 50_000, 8_000]
    assert rows[0]["attempt"] == 1 and rows[0]["latency_ms"] >= 0 and rows[0]["at"].endswith("Z")


def view(app: Outlast) -> list[dict[str, Any]]:
    """The rows of the view `costs`, as anybody's SQL sees them."""
    columns = (
        "run_id", "agent", "seq", "model", "lost", "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "cost_usd",
        "latency_ms", "attempt", "at")  # fmt: skip
    store: Any = app._store
    query = f"SELECT {', '.join(columns)} FROM costs ORDER BY run_id, seq, lost"
    if app.reader.url.startswith("sqlite"):
        import apsw

        found: list[Any] = list(apsw.Connection(str(store.path)).execute(query))
    else:
        import psycopg

        url = parse_store(str(app._given))
        with psycopg.connect(url.url, options=f"-c search_path={url.schema}") as db:
            found = db.execute(query).fetchall()
    return [dict(zip(columns, row, strict=True)) for row in found]


def test_an_unknown_price_is_counted_as_unknown(tmp_path: Path) -> None:
    with Outlast(tmp_path / "a.db", agents=agents(), prices={"small": PRICES["small"]}) as app:
        assert run(app).cost_usd is None
        found = {cost.key: cost for cost in app.reader.costs(since=LONG_AGO)}
        assert (found["lead"].cost_usd, found["lead"].unpriced) == (None, 3)
        assert (found["helper"].cost_usd, found["helper"].unpriced) == (SMALL, 0)


def test_a_lost_call_stands_beside_the_sums_and_not_in_them(tmp_path: Path) -> None:
    lead = Agent("lead", model=ScriptedModel([said("big", USAGE_2, "done")]), model_settings={"max_tokens": 1000})
    prices = {**PRICES, "scripted": PRICES["big"]}
    with Outlast(tmp_path / "a.db", agents=[lead], prices=prices) as app, dying_at("model.after"):
        app.run_sync(lead, "go", run_id="r")
    with Outlast(tmp_path / "a.db", agents=[lead], prices=prices) as app:
        assert app.resume_sync("r").cost_usd == BIG_2
        (cost,) = app.reader.costs(since=LONG_AGO)
        assert (cost.calls, cost.lost, cost.cost_usd) == (1, 1, BIG_2)
        assert [step.kind for step in app.reader.steps("r")] == ["lost", "model"]


def test_steps_of_a_run(app: Outlast) -> None:
    run(app)
    steps = app.reader.steps("r")
    assert [(s.seq, s.kind, s.name, s.cost_usd) for s in steps if s.kind != "tool"] == [
        (2, "model", "big", BIG_1), (4, "model", "big", BIG_2), (4, "run", "research", SMALL), (6, "model", "big", BIG_2)]  # fmt: skip
    assert {s.name for s in steps if s.kind == "tool"} == {"look", "listen"}
    assert json.loads(json.dumps([s.to_dict() for s in steps]))[0]["cost_usd"] == f"{BIG_1:f}"
