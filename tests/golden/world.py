"""The agents of the golden databases: runs that wait in every state, as each release left them. `script/golden` makes one.

Never change what stands here in a way that a stored run would notice: what is tested is that later code finishes what earlier code began.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.support.deaths import dying_at
from tests.support.world import Ledger, use

from outlast import Agent, Limits, Outlast, ToolContext, Wait, approval, tool
from outlast.models import ScriptedModel
from outlast.runtime.clock import ManualClock

BEGIN = datetime(2026, 11, 30, 7, 0, tzinfo=UTC)
WAITS = {  # run id -> the status that it was left in
    "approval": "waiting_for_approval",
    "verification": "waiting_for_verification",
    "budget": "waiting_for_budget",
    "event": "waiting_for_event",
    "parent": "waiting_for_run",
    "timer": "waiting_for_timer",
    "code": "waiting_for_code",
    "approved": "running",
    "started": "running",
    "died": "running",
    "done": "done",
    "failed": "failed",
    "cancelled": "cancelled",
}
GATE = approval(
    to="support-lead", noun="reply", within=timedelta(hours=4), then=approval(to="manager", noun="reply", within=timedelta(hours=8))
)


@tool(effect="idempotent", gate=GATE)
def reply(ctx: ToolContext[Ledger], text: str) -> str:
    ctx.deps.deliver("reply", ctx.idempotency_key)
    return f"sent {text}"


@tool
def pay(ctx: ToolContext[Ledger], text: str) -> str:
    ctx.deps.write("pay", ctx.idempotency_key)
    return f"paid {text}"


@tool(effect="idempotent")
def post(ctx: ToolContext[Ledger], text: str) -> str:
    ctx.deps.deliver("post", ctx.idempotency_key)
    return f"posted {text}"


@tool(effect="read")
def shipped(text: str) -> Wait:
    return Wait("shipped", within=timedelta(days=3))


@tool(effect="read")
def pause(text: str) -> Wait:
    return Wait(until=BEGIN + timedelta(hours=1), otherwise="time is over")


@tool(effect="read", name="extra")
def extra(text: str) -> str:
    return "looked"


def agent(name: str, *turns: Any, **more: Any) -> Agent[str]:
    return Agent(name, model=ScriptedModel([*turns, "Done.", "Done again."]), version="1", **more)


def agents(*, without_extra: bool = False) -> list[Agent[str]]:
    child = agent("child", [use("reply", text="from below")], tools=[reply])
    refuses: Any = {"role": "assistant", "content": [{"type": "text", "text": "No."}], "stop_reason": "refusal"}
    return [
        agent("replies", [use("reply", text="hello")], tools=[reply]),
        agent("pays", [use("pay", text="20")], tools=[pay]),
        agent("frugal", [use("post", text="x")], tools=[post], limits=Limits(model_calls=1, to="owner")),
        agent("waits", [use("shipped", text="x")], tools=[shipped]),
        agent("parent", [use("child", task="answer")], tools=[child.as_tool(description="Answers.")]),
        agent("sleeps", [use("pause", text="x")], tools=[pause]),
        agent("looks", [use("extra", text="x")], tools=[] if without_extra else [extra]),
        agent("posts", [use("post", text="y"), use("pay", "toolu_02", text="y")], tools=[post, pay]),
        Agent("refuses", model=ScriptedModel([lambda messages: refuses]), version="1"),
    ]


def opened(path: Path, ledger: Ledger, clock: ManualClock, **more: Any) -> Outlast:
    return Outlast(path, agents=agents(**more), deps=ledger, clock=clock)


def make(path: Path, ledger: Path) -> None:
    """A database with a run in each state, as this version leaves them; closed cleanly."""
    clock, world = ManualClock(BEGIN), Ledger(ledger)
    with opened(path, world, clock) as app:
        by = {"started_by": "priya"}
        for name, run_id in (("replies", "approval"), ("replies", "approved"), ("frugal", "budget"), ("waits", "event"), ("parent", "parent"),
                             ("sleeps", "timer"), ("refuses", "failed")):  # fmt: skip
            app.run_sync(app.agents[name], "go", run_id=run_id, tags=by)
        app.decide("approved", approved=True, decided_by="priya", note="yes")
        app.run_sync(app.agents["replies"], "go", run_id="done")
        app.decide("done", approved=False, decided_by="priya", note="no")
        app.resume_sync("done")
        app.start("replies", "go", run_id="started")
        app.start("replies", "go", run_id="cancelled")
        app.cancel("cancelled", by="priya", note="never mind")
        for run_id in ("verification", "died"):
            with dying_at("tool.after:pay"):
                app.run_sync(app.agents["pays" if run_id == "verification" else "posts"], "go", run_id=run_id)
        with dying_at("tool.before:extra"):  # the call is asked for, and not made
            app.run_sync(app.agents["looks"], "go", run_id="code")
    with opened(path, world, clock, without_extra=True) as app:
        app.resume_sync("code")
        app.resume_sync("verification")
