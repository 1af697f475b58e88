"""Why an answer ended: only `tool_use` runs tools, and nothing but a whole answer counts as one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cases.conftest import MakeApp, Provider
from tests.support.deaths import dying_at
from tests.support.world import GATE, Ledger, assert_whole, tools, use

from outlast import Agent
from outlast.models import ScriptedModel


def ends(reason: Any, *blocks: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": list(blocks), "stop_reason": reason}


CUT = ends("max_tokens", {"type": "text", "text": "I will"}, use("act", text="x"), use("look", "toolu_02", text="x"))


@pytest.mark.parametrize("gate", [None, GATE], ids=["open", "gated"])
def test_max_tokens_cut_inside_tool_use(gate: Any, make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    """No call of a cut answer runs, and nobody is asked about one; three cuts are answered, the fourth ends the run."""
    _, model = provider(*[CUT] * 4)
    made = tools(gate)
    agent = Agent("a", model=model, tools=[made["act"], made["look"]])
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert run.status == "failed"
    assert "max_tokens" in (run.reason or "")
    assert ledger.lines() == []
    assert run.gates == []
    assert run.model_calls == 4
    for n in (2, 4, 6, 8):
        assert [b["is_error"] for b in run.messages[n]["content"]] == [True, True]
        assert "cut off" in run.messages[n]["content"][0]["content"]


def test_max_tokens_cut_then_whole(make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    _, model = provider(CUT, [use("look", "toolu_03", text="x")], "Done.")
    agent = Agent("a", model=model, tools=[tools()["act"], tools()["look"]])
    run = make_app(agent).run_sync(agent, "go", run_id="r")
    assert run.status == "done"
    assert [line["what"] for line in ledger.lines()] == ["look"]


def test_max_tokens_cut_in_the_text(make_app: MakeApp, provider: Provider) -> None:
    """Half a text is no result: the run fails by name, `retry` alone is refused, a message takes it on."""
    _, model = provider(ends("max_tokens", {"type": "text", "text": "Half a"}), "Whole.")
    agent = Agent("a", model=model)
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert (run.status, "max_tokens" in (run.reason or "")) == ("failed", True)
    with pytest.raises(Exception, match="only fail again") as refused:
        app.retry("r")
    assert "outlast send" in refused.value.hint  # type: ignore[attr-defined]  # Refused has one
    app.send("r", "go on")
    assert app.resume_sync("r").output == "Whole."


SERVER = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}


def test_pause_turn_treated_as_finished(make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    """A paused turn goes back unchanged, after a crash too; the provider's own calls are not ours to run or to answer."""
    api, model = provider(ends("pause_turn", SERVER), ends("end_turn", FOUND, {"type": "text", "text": "Found."}))
    agent = Agent("a", model=model, tools=[tools()["look"]])
    with dying_at("commit.after", 2):
        make_app(agent).run_sync(agent, "go", run_id="r")
    app = make_app(agent)
    run = app.resume_sync("r")
    assert (run.status, run.output) == ("done", "Found.")
    assert [m["role"] for m in run.messages] == ["user", "assistant", "assistant"]
    assert api.requests[-1]["messages"][-1]["role"] == "assistant"
    assert len(api.requests) == 2
    assert_whole(app, "r")


def test_pause_turn_for_ever(make_app: MakeApp, provider: Provider) -> None:
    api, model = provider(*[ends("pause_turn", SERVER | {"id": f"srvtoolu_{n}"}) for n in range(50)])
    agent = Agent("a", model=model)
    run = make_app(agent).run_sync(agent, "go", run_id="r")
    assert run.status == "failed"
    assert "paused" in (run.reason or "")
    assert len(api.requests) == 11


@pytest.mark.parametrize("with_call", [False, True], ids=["text", "call"])
@pytest.mark.parametrize("reason", ["model_context_window_exceeded", "some_new_reason", "refusal", None, 7, {"odd": 1}], ids=str)
def test_context_window_exceeded_or_unknown_stop_reason(reason: Any, with_call: bool, make_app: MakeApp, ledger: Ledger) -> None:
    """Never done in silence, never a tool run: failed, with the reason as it came, shown and stored; the history stays valid."""
    blocks = [{"type": "text", "text": "Hm."}, *([use("act", text="x")] if with_call else [])]
    agent = Agent("a", model=ScriptedModel([ends(reason, *blocks), "Done."]), tools=[tools()["act"]])
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert run.status == "failed"
    shown = {None: "no stop reason"}.get(reason) if not isinstance(reason, dict) else "odd"
    assert str(shown or reason) in (run.reason or ""), run.reason
    assert ledger.lines() == []
    assert run.gates == []
    if with_call:
        assert run.messages[-1]["content"][0] == {"type": "tool_result", "tool_use_id": "toolu_01", "content": "not run", "is_error": True}
    answer = next(row for row in app.journal("r") if row.kind == "MessageAdded" and row.seq == 2)
    assert "stop_reason" in (answer.meta or "")
    app.send("r", "try again")
    assert app.resume_sync("r").status == "done"
    assert_whole(app, "r")
