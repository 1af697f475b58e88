"""What `plan` says is what `resume` does: random batches of tools of every effect, deaths at random points, people who decide at random."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.deaths import Crash, as_owner, gone
from tests.support.world import GATE, asks, use

from outlast import Agent, Outcome, Outlast, ToolContext, ToolFailed, tool
from outlast.errors import GateClosed, RunBusy, UsageError
from outlast.models import ScriptedModel
from outlast.runtime import crashpoints
from outlast.runtime.clock import ManualClock
from outlast.runtime.plan import Plan

SEED = 20261130
RUN = "run-1"


@dataclass
class World:
    """What tools, checks and model did, in order; and what a check finds of the calls that acted."""

    done: list[tuple[str, str, str]] = field(default_factory=list)  # (model, run or check; call id; key)
    acted: set[str] = field(default_factory=set)


def tools(gated: bool) -> list[Any]:
    gate = GATE if gated else None

    def note(ctx: ToolContext[World], what: str) -> None:
        ctx.deps.done.append((what, ctx.call_id, ctx.idempotency_key))
        if what == "run":
            ctx.deps.acted.add(ctx.idempotency_key)

    @tool(effect="read", gate=gate)
    def look(ctx: ToolContext[World], text: str) -> str:
        note(ctx, "run")
        return text

    @tool(effect="idempotent", gate=gate)
    def deliver(ctx: ToolContext[World], text: str) -> str:
        note(ctx, "run")
        return text

    @tool(gate=gate)
    def act(ctx: ToolContext[World], text: str) -> str:
        note(ctx, "run")
        if text == "fail":
            raise ToolFailed("no")
        return text

    def seen(ctx: ToolContext[World], text: str) -> Outcome:
        note(ctx, "check")
        return Outcome.happened(text) if ctx.idempotency_key in ctx.deps.acted else Outcome.not_happened()

    @tool(gate=gate, check=seen)
    def act_checked(ctx: ToolContext[World], text: str) -> str:
        note(ctx, "run")
        return text

    return [look, deliver, act, act_checked]


class Told(ScriptedModel):
    """Says to the world that it was asked."""

    def __init__(self, world: World, turns: list[Any]) -> None:
        super().__init__(turns)
        self.world = world

    async def __call__(self, request: Any, /) -> Any:
        self.world.done.append(("model", "", ""))
        return await super().__call__(request)


@pytest.mark.parametrize("number", range(40))
def test_plan_is_what_resume_does(number: int, tmp_path: Path) -> None:
    rng = random.Random(SEED + number)
    world, clock = World(), ManualClock()
    names = [rng.choice(["look", "deliver", "act", "act_checked", "made_up"]) for _ in range(rng.randint(1, 3))]
    batch = asks(*(use(name, f"c{n}", text=rng.choice(["x", "fail"])) for n, name in enumerate(names)))
    made = tools(rng.random() < 0.4)

    def process(*, without: str = "") -> Outlast:
        model = Told(world, [batch, [use("look", "last", text="y")], "Done."])
        agent = Agent("a", model=model, tools=[t for t in made if t.name != without])
        return Outlast(tmp_path / "outlast.db", agents=[agent], deps=world, clock=clock)

    with process() as first:
        first.start("a", "go", run_id=RUN)
        die(rng, lambda: first.resume_sync(RUN))
    looked = 0
    for _ in range(8):
        with process(without=rng.choice(["", "", "", "act", "deliver"])) as app:
            entries = len(list(app.journal(RUN)))
            plan = app.plan(RUN)
            assert len(list(app.journal(RUN))) == entries, "a plan writes nothing"
            if plan.next == "nothing":
                assert app.head(RUN).finished
                break
            looked += 1
            before = len(world.done)
            if rng.random() < 0.3:
                die(rng, lambda app=app: app.resume_sync(RUN))  # type: ignore[misc]  # a default binds it
            else:
                app.resume_sync(RUN)
                compare(plan, app, world.done[before:])
        with process() as app:
            person(rng, app, clock)
    assert looked


def die(rng: random.Random, life: Any) -> None:
    """A life that ends at some point, or not at all."""
    left = [rng.randint(1, 25)]

    def hook(name: str) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise Crash(name)

    crashpoints.arm(hook)
    try:
        with as_owner(gone()), suppress(Crash):
            life()
    finally:
        crashpoints.arm(None)


def person(rng: random.Random, app: Outlast, clock: ManualClock) -> None:
    run = app.get(RUN)
    if (run.status == "waiting_for_timer" and run.wake_at is not None) or rng.random() < 0.3:
        clock.move(timedelta(minutes=3))
    for gate in run.gates:
        if gate.outcome is None and rng.random() < 0.7:
            with suppress(RunBusy, GateClosed, UsageError):
                if gate.kind == "approval":
                    app.decide(RUN, gate.gate_id, approved=rng.random() < 0.7, decided_by="priya", note="so it is")
                else:
                    outcome: Any = rng.choice(["happened", "run_again", "give_up"])
                    app.verify(RUN, gate.gate_id, outcome=outcome, decided_by="priya")


def compare(plan: Plan, app: Outlast, done: list[tuple[str, str, str]]) -> None:
    """What was done by a resume that nobody disturbed, and what was said that it would do."""
    run = app.get(RUN)
    first = done[0][0] if done else None
    said = {"ask the model": ["model"], "run calls": ["run", "check"], "wait": [None], "hold": [None], "end": [None]}[plan.next]
    assert first in said, (plan, done)
    assert {"wait": run.waiting, "hold": run.status == "waiting_for_code", "end": run.finished}.get(plan.next, True), (
        plan,
        run.status,
        run.reason,
    )
    results = {
        b["tool_use_id"]: b
        for m in run.messages
        for b in (m["content"] if isinstance(m["content"], list) else [])
        if b["type"] == "tool_result"
    }
    still_open = {gate.call_id for gate in run.gates if gate.outcome is None}
    for item in plan.items:
        mine = [(what, key) for what, call_id, key in done if call_id == item.call_id]
        match item.action:
            case "run" | "run again with the same key" if not item.later:
                assert mine[:1] == [("run", item.key)], (item, done)
            case "check first" if not item.later:
                assert mine[:1] == [("check", item.key)], (item, done)
            case "reuse" | "refuse" | "ask a person" | "wait" | "hold":
                assert mine == [], (item, done)
        if item.action == "ask a person":
            assert item.call_id in still_open, (item, run.gates)
        if item.action == "refuse" and item.call_id in results:
            assert results[item.call_id].get("is_error"), (item, results)
