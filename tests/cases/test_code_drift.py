"""The code changed while a run waited: a tool that is gone, a stricter schema, another model. Nothing crashes in a loop, nothing looks like doubt."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cases.conftest import MakeApp
from tests.support.deaths import dying_at
from tests.support.world import GATE, Ledger, assert_whole, finish, tools, use

from outlast import Agent, Limits, ToolContext, tool
from outlast.models import ScriptedModel
from outlast.runtime.clock import ManualClock


def with_tools(*made: Any, **more: Any) -> Agent[str]:
    return Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=made, **more)


@pytest.mark.parametrize("decided", ["before the deploy", "after the deploy"])
def test_unknown_tool_after_deploy(decided: str, make_app: MakeApp, ledger: Ledger) -> None:
    """Parked with a status that says what is missing; no attempt is burnt, and a worker that has it goes on."""
    old = with_tools(tools(GATE)["act"])
    new = with_tools(tools(GATE)["look"])
    app, later = make_app(old), make_app(new)
    app.run_sync(old, "go", run_id="r")
    if decided == "before the deploy":
        app.decide("r", approved=True, decided_by="priya")
    for _ in range(3):
        later.work_sync(until_idle=True)
    if decided == "after the deploy":
        assert later.head("r").status == "waiting_for_approval"
        later.decide("r", approved=True, decided_by="priya")
        later.work_sync(until_idle=True)
    head = later.head("r")
    assert (head.status, head.attempts) == ("waiting_for_code", 0)
    assert "act" in (head.reason or "")
    assert later._store.head("r").needs == "tool:act"
    entries = later._store.head("r").entries
    later.work_sync(until_idle=True)
    assert later._store.head("r").entries == entries
    assert ledger.lines() == []
    app.work_sync(until_idle=True)
    assert app.head("r").status == "done"
    assert len(ledger.lines("act")) == 1
    assert_whole(app, "r")


def test_unknown_tool_in_doubt_or_rejected_needs_no_code(make_app: MakeApp, ledger: Ledger) -> None:
    old, new = with_tools(tools(GATE)["act"]), with_tools(tools(GATE)["look"])
    app, later = make_app(old), make_app(new)
    app.run_sync(old, "go", run_id="no")
    app.decide("no", approved=False, decided_by="priya")
    later.work_sync(until_idle=True)
    assert later.head("no").status == "done"
    app.run_sync(old, "go", run_id="doubt")
    app.decide("doubt", approved=True, decided_by="priya")
    with dying_at("tool.after:act"):
        make_app(old).resume_sync("doubt")
    later.work_sync(until_idle=True)
    assert later.head("doubt").status == "waiting_for_verification"
    later.verify("doubt", outcome="happened", decided_by="priya")
    later.work_sync(until_idle=True)
    assert later.head("doubt").status == "done"


@pytest.mark.parametrize("gated", [True, False])
def test_config_changed_under_a_paused_run(gated: bool, make_app: MakeApp, ledger: Ledger, clock: ManualClock) -> None:
    """Model, instructions and limits are the new code's; arguments that no longer fit the schema hold the run with the reason."""

    def strict(text: int) -> str:
        """Stricter."""
        raise AssertionError("must not run")

    old = with_tools(tools(GATE if gated else None)["act"])
    new = with_tools(tool(name="act", gate=GATE if gated else None)(strict), instructions="New.")
    app, later = make_app(old, clock=clock), make_app(new, clock=clock)
    if gated:
        app.run_sync(old, "go", run_id="r")
        app.decide("r", approved=True, decided_by="priya")
    else:
        with dying_at("commit.after", 2):
            app.run_sync(old, "go", run_id="r")
    run = later.resume_sync("r")
    assert run.status == "waiting_for_code"
    assert "text" in (run.reason or "") and "schema" in (run.reason or "")
    assert ledger.lines() == []
    app = make_app(old, clock=clock)
    app.work_sync(until_idle=True)
    assert app.head("r").status == "done"
    assert len(ledger.lines()) == 1


def test_new_model_instructions_and_limits_win(make_app: MakeApp, ledger: Ledger) -> None:
    seen: list[str] = []

    async def newer(request: Any) -> str:
        seen.append(request.instructions)
        return "From the new one."

    old = with_tools(tools(GATE)["act"])
    new = Agent(
        "a",
        model=newer,
        tools=[tools(GATE)["act"]],
        instructions=lambda run: f"You are {run.agent} in {run.status}",
        limits=Limits(model_calls=2),
    )
    app, later = make_app(old), make_app(new)
    app.run_sync(old, "go", run_id="r")
    app.decide("r", approved=True, decided_by="priya")
    run = later.resume_sync("r")
    assert (run.status, run.output, seen) == ("done", "From the new one.", ["You are a in running"])


def test_an_effect_made_careless_by_a_deploy_stays_careful(make_app: MakeApp, ledger: Ledger, clock: ManualClock) -> None:
    """A call that began as at-most-once is in doubt, whatever the code says now; what was gated stays gated."""

    @tool(effect="read", name="act")
    def careless(ctx: ToolContext, text: str) -> str:
        ledger.write("again", ctx.idempotency_key)
        return "x"

    old, new = with_tools(tools()["act"]), with_tools(careless)
    with dying_at("tool.after:act"):
        make_app(old, clock=clock).run_sync(old, "go", run_id="begun")
    later = make_app(new, clock=clock)
    assert later.resume_sync("begun").status == "waiting_for_verification"
    gated = with_tools(tools(GATE)["act"])
    make_app(gated, clock=clock).run_sync(gated, "go", run_id="gated")
    assert later.resume_sync("gated").status == "waiting_for_approval"
    assert [line["what"] for line in ledger.lines()] == ["act"]
    later.verify("begun", outcome="happened", decided_by="priya")
    assert finish(later, later.resume_sync("begun"), ledger, clock).status == "done"
