"""Before a deploy: what this code would do with every unfinished run, grouped; and that it then does that."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from tests.cases.conftest import BOTH, Edit, MakeApp
from tests.support.deaths import dying_at
from tests.support.world import GATE, Ledger, assert_whole, finish, tools, use

from outlast import Agent, Limits, ToolContext, tool
from outlast.core import run as r
from outlast.errors import SchemaTooNew
from outlast.models import ScriptedModel
from outlast.runtime.clock import ManualClock
from outlast.stores import base

STORES = BOTH


def agent(*made: Any, call: str = "act", **more: Any) -> Agent[str]:
    return Agent("a", model=ScriptedModel([[use(call, text="x")], "Done."]), tools=made, **more)


def groups(app: Any) -> list[tuple[str, int]]:
    return [(g.outcome, g.runs) for g in app.check_deploy().groups]


@tool(effect="idempotent", name="act", gate=GATE)
def stricter(ctx: ToolContext[Ledger], text: str, language: str) -> str:
    raise AssertionError("must not run")


def test_groups(make_app: MakeApp) -> None:
    old = agent(tools(GATE)["act"], version="1")
    app = make_app(old)
    for n in range(7):
        app.run_sync(old, "go", run_id=f"waits-{n}")
    app.start("a", "go", run_id="fresh")
    app.run_sync(old, "go", run_id="rejected")
    app.decide("rejected", approved=False, decided_by="priya", note="no")
    app.start("nobody", "go", run_id="foreign")
    app.run_sync(old, "go", run_id="done")
    app.decide("done", approved=False, decided_by="priya", note="no")
    app.resume_sync("done")

    assert groups(app) == [("held", 1), ("continues", 9)]
    assert app.check_deploy(agents=["a"]).ok
    gone = make_app(agent(tools(GATE)["look"], version="2"))
    report = gone.check_deploy(agents=["a"])
    assert [(g.outcome, g.runs) for g in report.groups] == [("held", 7), ("changes", 2)]
    assert report.groups[0].examples == [(f"waits-{n}", "toolu_01") for n in range(5)]
    assert "act" in report.groups[0].why and not report.ok
    assert "version 1 to 2" in report.groups[1].why
    [held, changes] = make_app(agent(stricter)).check_deploy(agents=["a"]).groups
    assert (held.outcome, held.runs) == ("held", 7) and "language" in held.why
    assert (changes.outcome, changes.runs) == ("changes", 2)


@pytest.mark.parametrize("on_change, outcome", [("continue", "changes"), ("warn", "changes"), ("hold", "held"), ("pinned", "held")])
def test_on_change(on_change: Any, outcome: str, make_app: MakeApp, ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """Held or not: what check says is what a worker does; held, nothing is written and no attempt burnt, and the older code finishes it."""
    old = agent(tools(GATE)["act"], version="1")
    new = agent(tools(GATE)["act"], version="2", instructions="Other.", on_change=on_change)
    app, later = make_app(old), make_app(new)
    app.run_sync(old, "go", run_id="r")
    app.decide("r", approved=True, decided_by="priya")
    assert groups(later) == [(outcome, 1)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            later.work_sync(until_idle=True)
    head = later.head("r")
    said = [record.message for record in caplog.records if "goes on with other code: version 2, until now 1" in record.message]
    assert len(said) == (on_change == "warn")
    if outcome == "changes":
        assert (head.status, head.agent_version) == ("done", "2")
        changed = [e for e in later.journal("r") if e.kind == "VersionChanged"]
        assert len(changed) == 1
    else:
        assert (head.status, head.attempts, head.agent_version) == ("waiting_for_code", 0, "1")
        assert ledger.lines() == []
        assert later._store.parked(agents=["a"]) == [("a", f"code:{old.code}:1")]
        assert [s.reason for s in later.stuck()] == [head.reason]
        entries = later._store.head("r").entries
        later.work_sync(until_idle=True)
        assert later._store.head("r").entries == entries, "a worker that cannot go on does not take it again"
        app.work_sync(until_idle=True)
        assert app.head("r").status == "done"
        assert "VersionChanged" not in {e.kind for e in app.journal("r")}
    assert len(ledger.lines("act")) == 1
    assert_whole(app, "r")


def test_undisturbed_run_writes_no_version_entry(make_app: MakeApp) -> None:
    one = agent(tools()["look"], call="look", version="1", on_change="hold")
    app = make_app(one)
    app.run_sync(one, "go", run_id="r")
    assert [e.kind for e in app.journal("r")].count("VersionChanged") == 0
    first = json.loads(next(iter(app.journal("r"))).body)
    assert (first["format"], first["agent_version"], first["code"]) == (r.FORMAT, "1", one.code)
    assert first["library"]


def test_run_started_by_name_is_recorded_by_its_first_driver(make_app: MakeApp) -> None:
    one = agent(tools()["look"], call="look", version="1", on_change="hold")
    make_app().start("a", "go", run_id="r")
    app = make_app(one)
    app.work_sync(until_idle=True)
    head = app.head("r")
    assert (head.status, head.agent_version) == ("done", "1")
    assert [e.kind for e in app.journal("r")].count("VersionChanged") == 1


def test_two_schemas_that_both_do_not_fit_make_no_loop(make_app: MakeApp, ledger: Ledger) -> None:
    @tool(name="act", gate=GATE)
    def other(ctx: ToolContext[Ledger], text: int) -> str:
        raise AssertionError("must not run")

    old = agent(tools(GATE)["act"])
    app, one, two = make_app(old), make_app(agent(stricter)), make_app(agent(other))
    app.run_sync(old, "go", run_id="r")
    app.decide("r", approved=True, decided_by="priya")
    fences = []
    for _ in range(4):
        for worker in (one, two):
            worker.work_sync(until_idle=True)
            fences.append(worker._store.head("r").fence)
    assert fences[-1] == fences[1], "each tried once"
    app.work_sync(until_idle=True)
    assert app.head("r").status == "done"


def test_upgrade_that_fails_is_mended_by_the_next_deploy(make_app: MakeApp, ledger: Ledger) -> None:
    def process(upgrade: Any) -> Any:
        @tool(name="act2", aliases=["act"], upgrade=upgrade, gate=GATE)
        def act2(ctx: ToolContext[Ledger], body: str) -> str:
            ctx.deps.write("act2", ctx.idempotency_key, body=body)
            return body

        return make_app(agent(act2))

    def fails(name: str, args: Mapping[str, Any]) -> Any:
        raise LookupError(name)

    old = agent(tools(GATE)["act"])
    app, broken, mended = make_app(old), process(fails), process(lambda name, args: {"body": args["text"]})
    app.run_sync(old, "go", run_id="r")
    app.decide("r", approved=True, decided_by="priya")
    assert groups(broken) == [("held", 1)]
    for _ in range(3):
        broken.work_sync(until_idle=True)
    assert broken.head("r").status == "waiting_for_code" and "LookupError" in (broken.head("r").reason or "")
    assert groups(mended) == [("changes", 1)]
    mended.work_sync(until_idle=True)
    [gate] = [g for g in mended.get("r").gates if g.outcome is None]
    assert (gate.tool, gate.args) == ("act2", {"body": "x"})
    mended.decide("r", approved=True, decided_by="priya", digest=gate.digest)
    mended.work_sync(until_idle=True)
    assert mended.head("r").status == "done"
    assert ledger.lines() == [{"what": "act2", "key": "r:toolu_01", "body": "x"}]
    assert_whole(mended, "r")


def test_edited_arguments_of_an_older_name_are_upgraded_like_any(make_app: MakeApp, ledger: Ledger) -> None:
    @tool(name="act2", aliases=["act"], upgrade=lambda name, args: {"body": args["text"]}, gate=GATE)
    def act2(ctx: ToolContext[Ledger], body: str) -> str:
        ctx.deps.write("act2", ctx.idempotency_key, body=body)
        return body

    old = agent(tools(GATE)["act"])
    make_app(old).run_sync(old, "go", run_id="r")
    app = make_app(agent(act2))
    app.decide("r", approved=True, decided_by="priya", args={"text": "better"})
    app.work_sync(until_idle=True)
    app.decide("r", approved=True, decided_by="priya")
    app.work_sync(until_idle=True)
    assert [line["body"] for line in ledger.lines("act2")] == ["better"]


def test_sub_agents_of_held_code_are_not_begun(make_app: MakeApp) -> None:
    child = Agent("child", model=ScriptedModel(["Below."]))
    made = child.as_tool(description="Answers.", gate=GATE)

    def parent(**more: Any) -> Agent[str]:
        return Agent("a", model=ScriptedModel([[use("child", task="x")], "Done."]), tools=[made], **more)

    old = parent()
    make_app(old).run_sync(old, "go", run_id="r")
    later = make_app(parent(instructions="Other.", on_change="hold"))
    later.decide("r", approved=True, decided_by="priya")
    assert later.resume_sync("r").status == "waiting_for_code"
    assert [h.run_id for h in later.runs()] == ["r"]


def test_newer_format_is_parked_not_failed(make_app: MakeApp) -> None:
    """An older worker beside a newer one: it leaves the newer one's runs alone, says both versions, and does not take them again."""
    one = agent(tools()["look"], call="look")
    app = make_app(one)
    entries = [r.RunStarted("a", format=r.FORMAT + 1), r.MessageAdded({"role": "user", "content": "go"})]
    app._store.start(base.NewRun("newer", "a", entries))
    app.start("a", "go", run_id="ours")
    for _ in range(2):
        app.work_sync(until_idle=True)
    assert app.head("ours").status == "done"
    head = app._store.head("newer")
    assert (head.status, head.needs, head.attempts) == ("waiting_for_code", f"format:{r.FORMAT + 1}", 0)
    assert f"format {r.FORMAT + 1}" in (head.reason or "") and f"up to {r.FORMAT}" in (head.reason or "")
    assert [g.outcome for g in app.check_deploy().groups] == ["held"]
    with pytest.raises(SchemaTooNew, match=f"format {r.FORMAT + 1}"):
        app.get("newer")


def test_a_sub_agents_run_of_a_newer_format_can_be_cancelled(make_app: MakeApp) -> None:
    app = make_app(agent(tools()["look"], call="look"))
    entries = [r.RunStarted("a", format=r.FORMAT + 1), r.MessageAdded({"role": "user", "content": "go"})]
    app._store.start(base.NewRun("p:c", "a", entries, parent_run_id="p", parent_call_id="c"))
    assert app.cancel("p:c", by="priya").status == "cancelled"


def test_stuck_runs_are_a_group_of_their_own(make_app: MakeApp, clock: ManualClock) -> None:
    once = agent(tools()["act"], version="1", limits=Limits(model_calls=5))
    app = make_app(once, clock=clock)
    with dying_at("tool.after:act"):
        make_app(once, clock=clock).run_sync(once, "go", run_id="doubt")
    app.resume_sync("doubt")
    [group] = app.check_deploy().groups
    assert (group.outcome, group.examples) == ("stuck", [("doubt", None)])
    assert app.check_deploy().ok
    finish(app, app.get("doubt"), app._deps, clock)


def test_broken_journal_is_stuck_not_a_crash(make_app: MakeApp, edit: Edit) -> None:
    one = agent(tools(GATE)["act"])
    app = make_app(one)
    app.run_sync(one, "go", run_id="r")
    assert edit("UPDATE entry SET body = '[]' WHERE seq = 2 AND kind = 'MessageAdded'")
    [group] = app.check_deploy().groups
    assert group.outcome == "stuck" and "cannot be read" in group.why
