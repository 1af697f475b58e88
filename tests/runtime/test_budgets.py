"""What a run may cost, and how often it may repeat itself: counted from the journal, over every crash and worker."""

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from outlast import Agent, Limits, Outlast, Run, tool
from outlast.core.run import ModelCallLost, fold, headed, stored
from outlast.core.run import Run as FoldedRun
from outlast.errors import UsageError
from outlast.models import ScriptedModel
from outlast.prices import Usage, cost, usage_of
from outlast.runtime import crashpoints
from outlast.stores.base import Batch, NewHead

PRICES = {
    "scripted": {
        "input": Decimal(3),
        "output": Decimal(15),
        "cache_read": Decimal("0.30"),
        "cache_write": Decimal("3.75"),
        "cache_write_1h": Decimal(6),
    }
}


@tool(effect="read")
def look(page: int) -> str:
    """Look at a page."""
    return f"page {page}"


@tool(effect="read")
def poll() -> str:
    """Ask whether it is done."""
    return "not yet"


@tool(effect="read", repeatable=True)
def patient() -> str:
    """Ask whether it is done, as often as it takes."""
    return "not yet"


def asks(name: str, arguments: Callable[[int], dict[str, Any]], usage: dict[str, Any]) -> ScriptedModel:
    """A model that never stops asking for that tool."""

    def turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
        n = sum(x["role"] == "assistant" for x in messages)
        block = {"type": "tool_use", "id": f"toolu_{n}", "name": name, "input": arguments(n)}
        return {"role": "assistant", "content": [block], "stop_reason": "tool_use", "usage": usage, "model": "scripted"}

    return ScriptedModel([turn] * 200)


USAGE = {"input_tokens": 1000, "output_tokens": 200}  # 0.003 + 0.003 USD at PRICES
ONE = Decimal("0.006")


def looper(limits: Limits, settings: dict[str, Any] | None = None) -> Agent[str]:
    return Agent(
        "looper",
        model=asks("look", lambda n: {"page": n}, USAGE),
        tools=[look],
        limits=limits,
        model_settings=settings or {"max_tokens": 100},
    )


# ---- what an answer cost -----------------------------------------------------------------------------------------------------


def test_cost_is_worked_out_by_hand_from_stored_usage_alone() -> None:
    raw = {
        "input_tokens": 1200,
        "output_tokens": 340,
        "cache_read_input_tokens": 50_000,
        "cache_creation_input_tokens": 8_000,
        "cache_creation": {"ephemeral_5m_input_tokens": 5_000, "ephemeral_1h_input_tokens": 3_000},
    }
    by_hand = Decimal("0.0036") + Decimal("0.0051") + Decimal("0.015") + Decimal("0.01875") + Decimal("0.018")
    assert usage_of(raw) == Usage(1200, 340, 50_000, 5_000, 3_000)
    assert cost("scripted", usage_of(raw), PRICES) == by_hand


def test_listed_prices_are_used_where_none_is_given() -> None:
    pytest.importorskip("genai_prices")
    raw = {"input_tokens": 1_000, "output_tokens": 1_000}
    listed = cost("claude-sonnet-5-5", usage_of(raw), {})
    assert listed is not None and listed > 0
    assert cost("anthropic:claude-sonnet-5-5", usage_of(raw), {}) == listed
    assert cost("a-model-nobody-lists", usage_of(raw), {}) is None


@pytest.mark.parametrize(
    "prices",
    [
        {"m": {"input": 1}},
        {"m": {"input": 1, "output": -1}},
        {"m": {"input": 1, "output": float("nan")}},
        {"m": {"input": 1, "output": 1, "thought": 1}},
        {"m": 3},
        "cheap",
    ],
)
def test_prices_that_cannot_be_meant_are_refused(prices: Any) -> None:
    with pytest.raises(UsageError, match="prices"):
        Outlast(":memory:", prices=prices)


def test_an_unknown_price_is_unknown_and_never_0(tmp_path: Path) -> None:
    agent = Agent("plain", model=ScriptedModel(["Hello."]))
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        assert app.run_sync(agent, "hi", run_id="r").cost_usd is None
    with Outlast(tmp_path / "b.db", agents=[agent], prices=PRICES) as app:
        run = app.run_sync(agent, "hi", run_id="r")
        assert run.cost_usd is not None and run.cost_usd > 0
        assert run.to_dict()["cost_usd"] == f"{run.cost_usd:f}"


# ---- a cap on money -----------------------------------------------------------------------------------------------------------


def spent(run: Run[Any]) -> Decimal:
    assert run.cost_usd is not None
    return run.cost_usd


def test_a_cap_stops_before_the_call_that_may_pass_it_and_a_person_raises_it(tmp_path: Path) -> None:
    agent = looper(Limits(cost_usd=Decimal("0.05")))
    with Outlast(tmp_path / "a.db", agents=[agent], prices=PRICES) as app:
        run = app.run_sync(agent, "go", run_id="r")
        assert run.status == "waiting_for_budget"
        assert Decimal("0.05") - 2 * ONE <= spent(run) <= Decimal("0.05")
        gate = run.gates[0]
        assert (gate.kind, gate.args["limit"], gate.args["used"]) == ("budget", "cost_usd", f"{spent(run):f}")
        with pytest.raises(UsageError, match="above"):
            app.decide("r", approved=True, decided_by="ada", args={"raise_to": "0.01"})
        app.decide("r", approved=True, decided_by="ada", args={"raise_to": "0.10"})
        app.decide("r", approved=True, decided_by="ada", args={"raise_to": "0.10"})  # once more: accepted
        again = app.resume_sync("r")
        assert again.status == "waiting_for_budget"
        assert Decimal("0.10") - 2 * ONE <= spent(again) <= Decimal("0.10")
        app.decide("r", approved=False, decided_by="ada", note="enough")
        ended = app.resume_sync("r")
        assert ended.status == "failed" and "enough" in (ended.reason or "")


def test_an_unknown_price_fails_closed_and_says_how_to_give_one(tmp_path: Path) -> None:
    agent = looper(Limits(cost_usd=1))
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        run = app.run_sync(agent, "go", run_id="r")
        assert (run.status, run.model_calls) == ("waiting_for_budget", 0)
        assert "prices=" in (run.reason or "")
    failing = looper(Limits(cost_usd=1, then="fail"))
    with Outlast(tmp_path / "b.db", agents=[failing]) as app:
        run = app.run_sync(failing, "go", run_id="r")
        assert (run.status, run.model_calls) == ("failed", 0)


class Killed(BaseException):
    pass


def test_spend_is_at_most_the_cap_and_one_call_over_every_crash(tmp_path: Path) -> None:
    """A worker that dies after every answer, before it is saved: what may have been paid for is counted as well."""
    cap = Decimal("0.05")
    agent = looper(Limits(cost_usd=cap, then="fail"))
    paid = Decimal(0)

    def kill(name: str) -> None:
        nonlocal paid
        if name == "model.after":
            paid += ONE
            if int(paid / ONE) % 2:  # every second one is lost
                raise Killed

    status, lives = "running", 0
    with Outlast(tmp_path / "a.db") as app:
        app.start("looper", "go", run_id="r")
    while status == "running":
        lives += 1
        assert lives < 40
        with Outlast(tmp_path / "a.db", agents=[agent], prices=PRICES) as app:
            app._store._dead = lambda owner: True  # type: ignore[attr-defined]  # the killed holder was this process
            crashpoints.arm(kill)
            try:
                status = app.resume_sync("r").status
            except Killed:
                status = app.head("r").status
            finally:
                crashpoints.arm(None)
    assert status == "failed"
    assert paid <= cap + ONE
    assert paid >= cap / 2


@pytest.mark.parametrize("end", ["done", "cancelled"])
def test_a_childs_lost_model_call_is_counted_by_its_parent(tmp_path: Path, end: str) -> None:
    """The child's worker dies with an answer in hand. What that may have cost is spent of its parent's budget, however the child ends."""
    says = {
        "role": "assistant",
        "content": [{"type": "text", "text": "Done."}],
        "stop_reason": "end_turn",
        "usage": USAGE,
        "model": "scripted",
    }
    call = {"type": "tool_use", "id": "toolu_1", "name": "helper", "input": {"task": "Look."}}
    ask = {**says, "content": [call], "stop_reason": "tool_use"}

    def app_with(cap: str) -> Outlast:
        helper = Agent("helper", model=ScriptedModel([says]), model_settings={"max_tokens": 100})
        boss = Agent(
            "boss", model=ScriptedModel([ask, says]), tools=[helper.as_tool(description="Helps.")], model_settings={"max_tokens": 100},
            limits=Limits(cost_usd=Decimal(cap)))  # fmt: skip
        app = Outlast(tmp_path / "a.db", agents=[boss, helper], prices=PRICES)
        app._store._dead = lambda owner: True  # type: ignore[attr-defined]  # the killed holder was this process
        return app

    answers = 0

    def kill(name: str) -> None:
        nonlocal answers
        answers += name == "model.after"
        if name == "model.after" and answers == 2:
            raise Killed

    with app_with("0.018") as app:
        app.start("boss", "go", run_id="r")
        crashpoints.arm(kill)
        try:
            with pytest.raises(Killed):
                app.resume_sync("r")
        finally:
            crashpoints.arm(None)
    with app_with("0.018") as app:
        child = app.head("r:toolu_1").run_id
        if end == "done":
            app.resume_sync(child)
        else:
            app._store.reap()
            lease = app._store.claim_run(child, "another")
            lost = ModelCallLost(input_tokens=100, cost_usd="0.0018")  # what its next worker had written before it was cancelled
            entries, place = app._store.load(lease.run_no)
            head = NewHead("running", None, release=True)
            app._store.append(lease, place, Batch([stored(headed(lost, at=app._store.now()))], head, place.seq), now=app._store.now())
            assert len(entries) == place.entries
            app.cancel(child)
        run = app.resume_sync("r")
        folded, below = (fold(FoldedRun(x), app._store.load(app._store.head(x).run_no)[0]) for x in ("r", child))
        assert below.lost_usd > 0 and below.lost_tokens > 0
        assert (folded.lost_usd, folded.lost_tokens, folded.lost_calls) == (below.lost_usd, below.lost_tokens, 0)
        assert run.cost_usd == 2 * ONE, "what may have been lost is no answer's cost"
        assert run.status == ("waiting_for_budget" if end == "done" else "done"), run.reason


# ---- a loop that only burns tokens ------------------------------------------------------------------------------------------------


def test_the_same_call_with_the_same_result_pauses_the_run(tmp_path: Path) -> None:
    agent = Agent("stubborn", model=asks("poll", lambda n: {}, USAGE), tools=[poll])
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        run = app.run_sync(agent, "go", run_id="r")
        assert (run.status, run.model_calls) == ("waiting_for_budget", 5)
        assert run.reason == "poll was called 5 times in a row with the same arguments and the same result"
        app.decide("r", approved=True, decided_by="ada")
        again = app.resume_sync("r")
        assert (again.status, again.model_calls) == ("waiting_for_budget", 10)


@pytest.mark.parametrize(
    "tools, name, arguments, limits",
    [
        ([patient], "patient", lambda n: {}, Limits(model_calls=12)),
        ([look], "look", lambda n: {"page": n}, Limits(model_calls=12)),
        ([poll], "poll", lambda n: {}, Limits(model_calls=12, repeats=None)),
    ],
)
def test_what_is_no_loop_goes_on(tmp_path: Path, tools: Any, name: str, arguments: Any, limits: Limits) -> None:
    agent = Agent("patient", model=asks(name, arguments, USAGE), tools=tools, limits=limits)
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        run = app.run_sync(agent, "go", run_id="r")
        assert (run.reason, run.model_calls) == ("limit of 12 model calls reached", 12)
