"""Cancelling: at once, in one transaction, with a history that stays valid, whoever is at work."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.cases.conftest import MakeApp, Provider
from tests.support.waiting import LIMIT_S, happens, until
from tests.support.world import GATE, Ledger, assert_whole, tools, use

from outlast import Agent, ToolContext, tool
from outlast.models import ScriptedModel
from outlast.testing import Slow


@pytest.mark.parametrize("by", ["run", "worker"])
@pytest.mark.parametrize("effect", ["read", "idempotent", "at_most_once"])
@pytest.mark.parametrize("kind", ["async", "sync", "swallows"])
def test_cancelled_error_swallowed_or_dangling(
    kind: str, effect: str, by: str, make_app: MakeApp, provider: Provider, ledger: Ledger
) -> None:
    """No further model call, every call answered, what comes late changes nothing, and a message goes on from there."""
    begun, release = threading.Event(), threading.Event()

    def act(ctx: ToolContext) -> str:
        ledger.write("act", ctx.idempotency_key)
        begun.set()
        release.wait(LIMIT_S)
        return "ok"

    async def act_async(ctx: ToolContext) -> str:
        ledger.write("act", ctx.idempotency_key)
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if kind == "async":
                raise
        return "ok"

    slow = tool(effect=effect, name="slow")(act if kind == "sync" else act_async)  # type: ignore[call-overload]  # all three in turn
    api, model = provider([use("slow", "A"), use("look", "B", text="b")], "Went on.")
    agent = Agent("a", model=model, tools=[slow, tools()["look"]])
    app = make_app(agent)

    async def play() -> Any:
        if by == "run":
            driving: Any = asyncio.ensure_future(app.run(agent, "go", run_id="r"))
        else:
            await asyncio.to_thread(app.start, agent, "go", run_id="r")
            driving = asyncio.ensure_future(app.work())
        await asyncio.to_thread(happens, begun)
        await asyncio.to_thread(until, app, lambda: any(row.kind == "CallFinished" for row in app.journal("r")))
        assert (await asyncio.to_thread(app.cancel, "r", by="priya", note="not needed")).status == "cancelled"
        if by == "run":
            return (await asyncio.wait_for(driving, LIMIT_S)).status
        await asyncio.to_thread(until, app, lambda: not app._keeper._held)
        driving.cancel()
        await asyncio.wait({driving})
        return app.head("r").status

    assert asyncio.run(play()) == "cancelled"
    release.set()
    run = app.get("r")
    assert (run.status, run.reason, len(api.requests)) == ("cancelled", "not needed", 1)
    a, b = run.messages[-1]["content"]
    assert a["is_error"] is True
    assert ("unknown" in a["content"]) == (effect == "at_most_once")
    assert b["content"] == '{"done": "b"}'
    if kind != "async":
        until(app, lambda: any(row.kind == "LateResult" for row in app.journal("r")), what="the late result is filed")
    assert app.get("r").messages == run.messages
    app.send("r", "go on after all")
    assert app.resume_sync("r").output == "Went on."
    assert_whole(app, "r")


def test_cancel_while_the_model_is_asked(make_app: MakeApp, provider: Provider) -> None:
    held = Slow([use("act", text="x")])
    api, model = provider(held, "Never.")
    agent = Agent("a", model=model, tools=[tools()["act"]])
    app = make_app(agent)

    async def play() -> Any:
        driving = asyncio.ensure_future(app.run(agent, "go", run_id="r"))
        await asyncio.to_thread(happens, held.arrived)
        await asyncio.to_thread(app.cancel, "r")
        return await asyncio.wait_for(driving, LIMIT_S)

    run = asyncio.run(play())
    held.release.set()
    assert (run.status, len(run.messages), len(api.requests)) == ("cancelled", 1, 1)
    assert app.cancel("r").status == "cancelled"
    assert_whole(app, "r")


def test_cancel_of_a_waiting_run_closes_its_gates(make_app: MakeApp, ledger: Ledger) -> None:
    agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(GATE)["act"]])
    app = make_app(agent)
    app.run_sync(agent, "go", run_id="r")
    app.cancel("r", by="priya")
    assert app.inbox() == []
    run = app.get("r")
    assert [g.outcome for g in run.gates] == ["cancelled"]
    assert run.messages[-1]["content"][0]["is_error"] is True
    app.work_sync(until_idle=True)
    assert ledger.lines() == []
    assert_whole(app, "r")


def test_cancel_of_a_finished_run_changes_nothing(make_app: MakeApp) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert app.cancel("r").status == "done"
    assert app.get("r").to_dict() == run.to_dict()
