"""The order of messages: every call answered in the very next user message, results first, whatever people say in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.cases.conftest import MakeApp, Provider
from tests.support.deaths import dying_at
from tests.support.waiting import happens
from tests.support.world import GATE, Ledger, asks, assert_whole, finish, tools, use

from outlast import Agent, ToolContext, tool
from outlast.errors import UsageError
from outlast.models import ScriptedModel
from outlast.runtime.clock import ManualClock
from outlast.testing import Slow


def kinds(message: dict[str, Any]) -> list[str]:
    return [block["type"] for block in message["content"]]


@pytest.mark.parametrize("first", ["send", "decide"])
@pytest.mark.parametrize("approved", [True, False])
def test_user_message_injected_between_call_and_result(
    first: str, approved: bool, make_app: MakeApp, provider: Provider, ledger: Ledger
) -> None:
    """A text that comes while a call waits for approval stands behind its result, in the same user message."""
    _, model = provider(asks(use("act", text="x")), "Done.")
    agent = Agent("a", model=model, tools=[tools(GATE)["act"]])
    app = make_app(agent)
    app.run_sync(agent, "go", run_id="r")
    if first == "send":
        assert app.send("r", "hurry up").status == "waiting_for_approval"
        app.send("r", [{"type": "text", "text": "and be nice"}])
    app.decide("r", approved=approved, decided_by="priya")
    if first == "decide":
        app.send("r", "hurry up")
        app.send("r", [{"type": "text", "text": "and be nice"}])
    run = app.resume_sync("r")
    assert run.status == "done"
    assert kinds(run.messages[2]) == ["tool_result", "text", "text"]
    assert [b.get("text") for b in run.messages[2]["content"]][1:] == ["hurry up", "and be nice"]
    assert len(ledger.lines()) == approved


def test_user_message_injected_while_the_call_runs(make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    @tool(effect="read")
    async def slow(ctx: ToolContext) -> str:
        await asyncio.to_thread(app.send, "r", "hurry up")
        return "ok"

    _, model = provider(asks(use("slow")), "Done.")
    agent = Agent("a", model=model, tools=[slow])
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert run.status == "done"
    assert kinds(run.messages[2]) == ["tool_result", "text"]


def test_user_message_injected_while_the_model_is_asked(make_app: MakeApp, provider: Provider) -> None:
    """The answer under way when a text came does not answer it: the model is asked once more, with the text behind its answer."""
    held = Slow("First answer.")
    api, model = provider(held, "Second answer.")
    agent = Agent("a", model=model)
    app = make_app(agent)

    async def play() -> Any:
        running = asyncio.ensure_future(app.run(agent, "go", run_id="r"))
        await asyncio.to_thread(happens, held.arrived)
        await asyncio.to_thread(app.send, "r", "and now?")
        held.release.set()
        return await running

    run = asyncio.run(play())
    assert (run.status, run.output) == ("done", "Second answer.")
    assert [m["role"] for m in run.messages] == ["user", "assistant", "user", "assistant"]
    assert len(api.requests) == 2


def test_texts_of_a_finished_failed_and_cancelled_run(make_app: MakeApp, provider: Provider) -> None:
    """A text wakes a run that is over; one that was cancelled in the middle of a batch goes on with a valid history."""
    _, model = provider(asks(use("act", text="x")), "Done.", "Still here.")
    agent = Agent("a", model=model, tools=[tools(GATE)["act"]])
    app = make_app(agent)
    app.run_sync(agent, "go", run_id="r")
    assert app.cancel("r").status == "cancelled"
    assert app.send("r", "go on").status == "running"
    assert app.resume_sync("r").output == "Done."
    app.send("r", "are you there?")
    run = app.resume_sync("r")
    assert (run.status, run.output) == ("done", "Still here.")
    assert_whole(app, "r")


U = {"role": "user", "content": "go"}
CALL = {"role": "assistant", "content": [use("look", "c1", text="x"), use("look", "c2", text="y")]}
R1, R2 = ({"type": "tool_result", "tool_use_id": f"c{n}", "content": "ok"} for n in (1, 2))


@pytest.mark.parametrize("history, index", [
    ([CALL], 0),
    ([U, CALL, {"role": "user", "content": [R1]}], 2),
    ([U, CALL, {"role": "user", "content": "never mind"}], 2),
    ([U, {"role": "user", "content": [R1]}], 1),
    ([U, CALL, {"role": "user", "content": [{"type": "text", "text": "x"}, R1, R2]}], 2),
    ([U, CALL, {"role": "user", "content": [R1, R2, R2]}], 2),
    ([U, {"role": "assistant", "content": [use("look", "c1"), use("look", "c1")]}], 1),
    ([U, {"role": "assistant", "content": []}], 1),
    ([U, {"role": "robot", "content": "x"}], 1),
    ([U, {"role": "assistant", "content": [R1]}], 1),
    ([U, {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": "{}"}]}], 1),
])  # fmt: skip
def test_compaction_or_trim_splits_a_pair(history: list[Any], index: int, make_app: MakeApp) -> None:
    """A history in which a call and its result were parted is refused at once, with the index of the bad message, and nothing is started."""
    agent = Agent("a", model=ScriptedModel(["Done."] * 3), tools=[tools()["look"]])
    app = make_app(agent)
    with pytest.raises(UsageError, match=f"message {index}"):
        app.start(agent, history, run_id="r")
    assert app.runs() == []


def test_a_whole_history_is_taken_up_where_it_stands(make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    api, model = provider("Unused.", "Done.", "Done.")
    agent = Agent("a", model=model, tools=[tools()["look"]])
    app = make_app(agent)
    assert app.run_sync(agent, [U, CALL], run_id="open").status == "done"
    assert len(ledger.lines("look")) == 2
    answered = [U, CALL, {"role": "user", "content": [R1, R2]}]
    assert app.run_sync(agent, answered, run_id="answered").output == "Done."
    assert len(api.requests) == 2


@pytest.mark.parametrize("order", ["approve first", "reject first"])
def test_denied_call_leaves_result_without_call(
    order: str, make_app: MakeApp, provider: Provider, ledger: Ledger, clock: ManualClock
) -> None:
    """One of two calls is approved, the other rejected, with a crash in between: both stay, each with its own answer."""
    api, model = provider(asks(use("act", "A", text="a"), use("act", "B", text="b")), "Done.")
    agent = Agent("a", model=model, tools=[tools(GATE)["act"]])
    app = make_app(agent, clock=clock)
    app.run_sync(agent, "go", run_id="r")
    decisions = [("A", True, None), ("B", False, "not this one")]
    for call_id, approved, note in decisions if order == "approve first" else decisions[::-1]:
        app.decide("r", call_id, approved=approved, decided_by="priya", note=note)
        if call_id == "A":
            with dying_at("tool.after:act"):
                app.resume_sync("r")
        else:
            with dying_at("claim.after"):
                app.resume_sync("r")
        app = make_app(agent, clock=clock)
    run = finish(app, app.resume_sync("r"), ledger, clock)
    assert run.status == "done"
    a, b = run.messages[2]["content"]
    assert (a["tool_use_id"], a.get("is_error")) == ("A", None)
    assert (b["tool_use_id"], b["is_error"]) == ("B", True)
    assert b["content"] == "A support lead rejected this reply: not this one"
    assert len(ledger.lines("act")) == 1
    assert len(api.requests) == 2
