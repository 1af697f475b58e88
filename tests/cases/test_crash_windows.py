"""Crashes between two things that belong together: what is lost, what is done twice, who gets stuck."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.cases.conftest import BOTH, Edit, MakeApp, Provider, sqlite_alone
from tests.support.deaths import dying_at
from tests.support.waiting import until
from tests.support.world import EFFECTS, GATE, Ledger, asks, assert_whole, finish, tools, use

from outlast import Agent, Outlast, ToolContext, tool
from outlast.errors import RunNotFound, StoreError
from outlast.models import ScriptedModel
from outlast.runtime import crashpoints
from outlast.runtime.clock import ManualClock
from outlast.runtime.drive import Drive

ROOT = Path(__file__).parents[2]
STORES = BOTH


@pytest.mark.parametrize("name", EFFECTS)
def test_orphan_tool_use_after_kill(name: str, make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    """The answer is saved and the call has not begun: it runs, once, and the answer is not asked for again."""
    api, model = provider(asks(use(name, text="x")), "Done.")
    agent = Agent("a", model=model, tools=[tools()[name]])
    with dying_at("commit.after", 2):
        make_app(agent).run_sync(agent, "go", run_id="r")
    assert ledger.lines() == []
    run = make_app(agent).resume_sync("r")
    assert run.status == "done"
    assert len(ledger.lines()) == 1
    assert len(api.requests) == 2
    assert [b["tool_use_id"] for b in run.messages[2]["content"]] == ["toolu_01"]


@pytest.mark.parametrize("effect, attempts", [("read", 2), ("idempotent", 2), ("at_most_once", 1)])
def test_parallel_calls_half_done_then_crash(
    effect: str, attempts: int, make_app: MakeApp, provider: Provider, ledger: Ledger, clock: ManualClock
) -> None:
    """Two of three results are saved: those calls never run again; the third does by its policy, and with the same key."""

    @tool(effect=effect)  # type: ignore[call-overload]  # all three in turn
    async def last(ctx: ToolContext, text: str) -> dict[str, str]:
        await asyncio.to_thread(until, app, lambda: sum(row.kind == "CallFinished" for row in app.journal("r")) == 2)
        ledger.deliver("last", ctx.idempotency_key)
        ledger.write("attempt of last", ctx.idempotency_key)
        return {"done": text}

    api, model = provider(asks(use("look", "A", text="a"), use("deliver", "B", text="b"), use("last", "C", text="c")), "Done.")
    agent = Agent("a", model=model, tools=[tools()["look"], tools()["deliver"], last])
    app = make_app(agent, clock=clock)
    with dying_at("tool.after:last"):
        app.run_sync(agent, "go", run_id="r")
    app = make_app(agent, clock=clock)
    run = finish(app, app.resume_sync("r"), ledger, clock)
    assert run.status == "done"
    assert [len(ledger.lines(name)) for name in ("look", "deliver", "last", "attempt of last")] == [1, 1, 1, attempts]
    assert {line["key"] for line in ledger.lines("attempt of last")} == {"r:C"}
    assert [b["tool_use_id"] for b in run.messages[2]["content"]] == ["A", "B", "C"]
    assert len(api.requests) == 2
    assert_whole(app, "r")


START = """
import os, signal, sys
from outlast import Outlast
head = Outlast(sys.argv[1]).start("a", "go", run_id="r")
print(head.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_crash_before_first_checkpoint_loses_accepted_run(make_app: MakeApp, store_url: str) -> None:
    """Whoever was given a run id may rely on it, though the process died at once; a worker takes it."""
    died = subprocess.run([sys.executable, "-c", START, store_url], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (died.returncode, died.stdout) == (-9, "r\n"), died.stderr
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app = make_app(agent)
    app.work_sync(until_idle=True)
    assert [(r.run_id, r.status, r.model_calls) for r in app.runs()] == [("r", "done", 1)]


def again(app: Outlast, act: Callable[[], Any]) -> Any:
    """As a careful caller: once more after a store's error. A claim whose answer was lost holds the run until its lease is over."""
    try:
        return act()
    except StoreError:
        with suppress(RunNotFound):
            until(app, lambda: not app._store.head("r").held, what="the lease is over")
        return act()


@sqlite_alone
def test_result_and_next_state_not_atomic(make_app: MakeApp, tmp_path: Path, ledger: Ledger) -> None:
    """Every single commit of a run fails once, before and after it stood: the history is as if nothing had happened."""
    agent = Agent("a", model=ScriptedModel([asks(use("look", text="x")), asks(use("act", "toolu_02", text="y")), "Done."]),
                  tools=[tools(GATE)["look"], tools()["act"]])  # fmt: skip

    def play(name: str, fail: tuple[str, int] | None) -> tuple[list[object], int]:
        log = tmp_path / f"{name}.log"
        mine = Ledger(tmp_path / f"{name}.ledger")
        model = ScriptedModel(agent.model.turns, log=log)  # type: ignore[union-attr]  # it is a ScriptedModel
        one = agent.replace(model=model)
        passed: list[str] = []

        def hook(point: str) -> None:
            if point.startswith("commit"):
                passed.append(point)
            if fail and point == fail[0] and passed.count(point) == fail[1]:
                passed.append(point)  # only once
                raise apsw.IOError("simulated: the disk said no")

        app = make_app(one, store=tmp_path / f"{name}.db", deps=mine, lease=timedelta(seconds=1))
        crashpoints.arm(hook)
        try:
            run = again(app, lambda: app.run_sync(one, "go", run_id="r"))
            if run.waiting:
                again(app, lambda: app.decide("r", approved=True, decided_by="priya"))
                run = again(app, lambda: app.resume_sync("r"))
        finally:
            crashpoints.arm(None)
        assert run.status == "done", (fail, run.status, run.reason)
        assert len(mine.lines("act")) == 1
        assert len(mine.lines("look")) == 1
        assert len(log.read_text().splitlines()) <= 3
        assert_whole(app, "r")
        return list(run.messages), passed.count("commit.before")

    calm, commits = play("calm", None)
    for n in range(1, commits + 1):
        for side in ("before", "after"):
            assert play(f"{side}-{n}", (f"commit.{side}", n))[0] == calm


@pytest.mark.parametrize("by_hand", [False, True], ids=["killed", "lease columns emptied by hand"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_recovered_run_stuck_between_steps(k: int, by_hand: bool, make_app: MakeApp, ledger: Ledger, edit: Edit, store_kind: str) -> None:
    """Killed after any commit, or with its lease columns emptied: a worker finds it by itself."""
    agent = Agent("a", model=ScriptedModel([asks(use("deliver", text="x")), asks(use("look", "toolu_02", text="y")), "Done."]),
                  tools=[tools()["deliver"], tools()["look"]])  # fmt: skip
    with dying_at("commit.after", k):
        make_app(agent).run_sync(agent, "go", run_id="r")
    if by_hand:
        more = ", lease_boot = NULL, lease_until_at = NULL" if store_kind == "sqlite" else ""
        assert edit(f"UPDATE run SET lease_owner = NULL, lease_until = NULL{more}")
    app = make_app(agent)
    head = app.head("r")
    assert (head.status, head.finished) == ("running", False)
    app.work_sync(until_idle=True)
    assert app.head("r").status == "done"
    assert len(ledger.lines("deliver")) == 1
    assert_whole(app, "r")


def test_history_ends_in_unapproved_call_counts_as_approved(make_app: MakeApp, ledger: Ledger) -> None:
    """There is no moment at which the answer is saved and its gate is not: whatever is cut off, the run waits, and the gate is there once."""
    agent = Agent("a", model=ScriptedModel([asks(use("act", text="x")), "Done."]), tools=[tools(GATE)["act"]])
    for n, point in enumerate(("commit.before", "commit.after", "release.after")):
        run_id = f"r{n}"
        with dying_at(point, 1 if point == "release.after" else 2):
            make_app(agent).run_sync(agent, "go", run_id=run_id)
        app = make_app(agent)
        run = app.resume_sync(run_id)
        assert run.status == "waiting_for_approval"
        assert [g.gate_id for g in run.gates] == ["approval:toolu_01"]
    imported = [{"role": "user", "content": "go"}, {"role": "assistant", "content": asks(use("act", text="x"))}]
    run = app.run_sync(agent, imported, run_id="imported")
    assert run.status == "waiting_for_approval"
    assert [g.gate_id for g in run.gates] == ["approval:toolu_01"]
    assert ledger.lines() == []


def test_decision_arrives_before_the_wait_is_saved(make_app: MakeApp, ledger: Ledger) -> None:
    """The fastest approver decides in the moment in which the gate's commit stands, before the worker knows of it."""
    agent = Agent("a", model=ScriptedModel([asks(use("act", text="x")), "Done."]), tools=[tools(GATE)["act"]])
    app, other = make_app(agent), make_app(agent)
    decided: list[str] = []

    def hook(point: str) -> None:
        if point == "commit.after" and not decided and other.inbox():
            decided.append(point)
            other.decide("r", approved=True, decided_by="quick")

    crashpoints.arm(hook)
    app.start(agent, "go", run_id="r")
    app.work_sync(until_idle=True)
    assert decided
    assert app.head("r").status == "done"
    assert len(ledger.lines("act")) == 1
    assert_whole(app, "r")


def test_a_worker_that_was_stopped_does_not_repeat_under_a_key_that_is_forgotten(
    make_app: MakeApp, provider: Provider, ledger: Ledger, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had decided to call again while the receiver still knew the key, and was stopped before it did, until the receiver knew it no more."""

    @tool(effect="idempotent", key_ttl=timedelta(hours=24))
    async def pay(ctx: ToolContext, text: str) -> str:
        ledger.write("pay", ctx.idempotency_key)
        return "paid"

    _, model = provider(asks(use("pay", "A", text="a")), "Done.")
    agent = Agent("a", model=model, tools=[pay])
    with dying_at("tool.after:pay"):
        make_app(agent, clock=clock).run_sync(agent, "go", run_id="r")
    decided = Drive._late_for  # the first thing after the decision

    def stopped(self: Drive, *args: Any) -> Any:
        clock.move(timedelta(hours=25))
        return decided(self, *args)

    monkeypatch.setattr(Drive, "_late_for", stopped)
    run = make_app(agent, clock=clock).resume_sync("r")
    assert len(ledger.lines("pay")) == 1
    assert run.status == "waiting_for_verification"
    assert "may have forgotten the key" in str(run.gates[-1].text)
