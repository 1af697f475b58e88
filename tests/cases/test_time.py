"""Deadlines and clocks: computed once, kept over restarts, applied by whoever comes first; and clocks that are wrong move no lease."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from tests.cases.conftest import BOTH, MakeApp, lease_clock_ahead
from tests.support.waiting import LIMIT_S, happens
from tests.support.world import GATE, Ledger, assert_whole, tools, use

from outlast import Agent, Limits, ToolContext, approval, tool
from outlast.errors import RunBusy
from outlast.models import ScriptedModel
from outlast.runtime.clock import ManualClock

STORES = BOTH


def test_deadline_clock_restarts(make_app: MakeApp, clock: ManualClock, ledger: Ledger) -> None:
    """Three restarts on the way: it ends six seconds after it began, once."""
    gate = approval(within=timedelta(seconds=6))
    agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(gate)["act"]])
    run = make_app(agent, clock=clock).run_sync(agent, "go", run_id="r")
    due = run.created_at + timedelta(seconds=6)
    for _ in range(2):
        clock.move(timedelta(seconds=2))
        run = make_app(agent, clock=clock).resume_sync("r")
        assert (run.status, run.gates[0].deadline, run.wake_at) == ("waiting_for_approval", due, due)
    clock.move(timedelta(seconds=2))
    app = make_app(agent, clock=clock)
    app.work_sync(until_idle=True)
    run = app.get("r")
    assert (run.status, run.gates[0].outcome) == ("done", "expired")
    assert [row.kind for row in app.journal("r")].count("GateExpired") == 1
    assert ledger.lines() == []
    assert_whole(app, "r")


def test_deadline_that_passed_while_nobody_worked(make_app: MakeApp, clock: ManualClock, ledger: Ledger) -> None:
    """The first thing that a worker does is to apply it: no model is asked and no tool is run before."""
    order: list[str] = []

    async def model(request: Any) -> Any:
        order.append("model")
        return [use("act", text="x")] if len(request.messages) == 1 else "Done."

    limited = Agent("a", model=model, tools=[tools(GATE)["act"]], limits=Limits(wall=timedelta(hours=1), then="fail"))
    app = make_app(limited, clock=clock)
    app.run_sync(limited, "go", run_id="waits")
    app.start(limited, "go", run_id="new")
    app.decide("waits", approved=True, decided_by="priya")
    clock.move(timedelta(hours=2))
    app.work_sync(until_idle=True)
    for run_id in ("waits", "new"):
        run = app.get(run_id)
        assert run.status == "failed" and "limit of 1 hour" in (run.reason or "")
        assert_whole(app, run_id)
    assert order == ["model"]
    assert ledger.lines() == []


def test_wall_limit_that_asks(make_app: MakeApp, clock: ManualClock) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]), limits=Limits(wall=timedelta(hours=1)))
    app = make_app(agent, clock=clock)
    app.start(agent, "go", run_id="r")
    clock.move(timedelta(hours=2))
    run = app.resume_sync("r")
    assert run.status == "waiting_for_budget"
    app.decide("r", approved=True, decided_by="priya")
    assert app.resume_sync("r").status == "done"


@pytest.mark.parametrize("skew", [timedelta(minutes=10), timedelta(hours=1), -timedelta(hours=1)], ids=str)
def test_clock_skew_between_workers(skew: timedelta, make_app: MakeApp, clock: ManualClock, ledger: Ledger) -> None:
    """A wall clock that is wrong takes nobody's lease and gives nobody a longer one."""
    begun, release = threading.Event(), threading.Event()

    @tool(effect="read")
    def slow(ctx: ToolContext) -> str:
        ledger.write("slow", ctx.idempotency_key)
        begun.set()
        happens(release)
        return "ok"

    agent = Agent("a", model=ScriptedModel([[use("slow")], "Done."]), tools=[slow])
    app = make_app(agent, clock=clock)
    other = make_app(agent, clock=ManualClock(clock.now + skew))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(app.run_sync(agent, "go", run_id="r")))
    thread.start()
    happens(begun)
    with pytest.raises(RunBusy):
        other.resume_sync("r")
    clock.move(timedelta(hours=1))
    with pytest.raises(RunBusy):
        other.resume_sync("r")
    clock.move(-timedelta(hours=1))
    assert other._store.claim("somebody", agents=["a"], lease_s=30) == []
    # Were its holder to stop renewing now, the lease would be over within its own length, wherever the wall clock stands.
    lease_clock_ahead(other, timedelta(seconds=31))
    assert not other._store.head("r").held
    release.set()
    thread.join(LIMIT_S)
    assert found[0].status == "done"
    assert len(ledger.lines()) == 1
    assert_whole(app, "r")
