"""What the model passes to a tool, and what of it is the model's to mend."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.cases.conftest import MakeApp, Provider
from tests.support.world import GATE, Ledger, assert_whole, tools, use

from outlast import Agent, Retry, ToolContext, ToolFailed, tool
from outlast.models import ScriptedModel


@pytest.mark.parametrize("raw", ['{"path": "a', "null", "[1]", "", "7", '"text"', None, [1], 1.5, "{" * 10_000], ids=lambda v: repr(v)[:12])
@pytest.mark.parametrize("gate", [None, GATE], ids=["open", "gated"])
def test_malformed_arguments_not_a_json_object(raw: Any, gate: Any, make_app: MakeApp, ledger: Ledger) -> None:
    """Not run, nobody asked, the model told; `{}` stands in the history, what came is kept beside it."""
    call = {"type": "tool_use", "id": "toolu_01", "name": "act", "input": raw}
    agent = Agent("a", model=ScriptedModel([[call], "Done."]), tools=[tools(gate)["act"]])
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert run.status == "done"
    assert run.messages[1]["content"][0]["input"] == {}
    result = run.messages[2]["content"][0]
    assert result["is_error"] is True
    assert "arguments" in result["content"]
    assert ledger.lines() == []
    assert run.gates == []
    meta = next(row.meta for row in app.journal("r") if row.kind == "MessageAdded" and row.seq == 2)
    assert "malformed" in (meta or "")
    assert_whole(app, "r")


def test_arguments_as_a_json_text_are_read(make_app: MakeApp, ledger: Ledger) -> None:
    agent = Agent(
        "a",
        model=ScriptedModel([[{"type": "tool_use", "id": "c", "name": "act", "input": '{"text": "x"}'}], "Done."]),
        tools=[tools()["act"]],
    )
    run = make_app(agent).run_sync(agent, "go", run_id="r")
    assert run.messages[1]["content"][0]["input"] == {"text": "x"}
    assert len(ledger.lines()) == 1


@pytest.mark.parametrize("given", [{}, {"text": None}, {"text": ["x"]}, {"txt": "x"}], ids=str)
def test_a_missing_or_wrong_field_never_becomes_empty(given: Any, make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    _, model = provider([use("act", **given)], [use("act", "toolu_02", text="x")], "Done.")
    agent = Agent("a", model=model, tools=[tools()["act"]])
    run = make_app(agent).run_sync(agent, "go", run_id="r")
    assert run.status == "done"
    assert run.messages[2]["content"][0]["is_error"] is True
    assert "text" in run.messages[2]["content"][0]["content"]
    assert len(ledger.lines()) == 1


@pytest.mark.parametrize("effect", ["read", "idempotent", "at_most_once"])
def test_validation_error_retried_by_the_engine(effect: str, make_app: MakeApp, ledger: Ledger) -> None:
    """An error that is for the model is the model's: the tool is called once, whatever its retry says."""
    retry = None if effect == "at_most_once" else Retry(5, backoff=timedelta(0))

    @tool(effect=effect, retry=retry)  # type: ignore[call-overload]  # all three in turn
    def refuses(ctx: ToolContext, n: int) -> str:
        ledger.write("called", ctx.idempotency_key)
        raise ToolFailed("only whole dozens")

    agent = Agent("a", model=ScriptedModel([[use("refuses", n=1), use("refuses", "toolu_02", n="many")], "Done."]), tools=[refuses])
    run = make_app(agent).run_sync(agent, "go", run_id="r")
    assert run.status == "done"
    assert len(ledger.lines()) == 1
    first, second = run.messages[2]["content"]
    assert (first["content"], first["is_error"]) == ("only whole dozens", True)
    assert "n" in second["content"] and second["is_error"]
    assert run.model_calls == 2


def test_a_tool_name_that_the_model_made_up(make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    _, model = provider([use("send_fax", text="x"), use("look", "toolu_02", text="y")], "Done.")
    agent = Agent("a", model=model, tools=[tools()["look"]])
    run = make_app(agent).run_sync(agent, "go", run_id="r")
    assert run.status == "done"
    assert "send_fax" in run.messages[2]["content"][0]["content"]
    assert "look" in run.messages[2]["content"][0]["content"]
    assert len(ledger.lines("look")) == 1
