"""Forks: the history up to a checkpoint comes along, what happened in it stays done, and nothing new acts without a person."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cases.conftest import BOTH, MakeApp
from tests.support.world import GATE, Ledger, assert_whole, tools, use

from outlast import Agent, ToolContext, tool
from outlast.errors import RunExists, RunNotFound, UsageError
from outlast.models import ScriptedModel

STORES = BOTH


def agent(*, gated: bool = False, **more: Any) -> Agent[str]:
    turns = [[use("look", "toolu_01", text="x")], [use("act", "toolu_02", text="x"), use("made_up", "toolu_03")], "Done."]
    return Agent("a", model=ScriptedModel(turns), tools=list(tools(GATE if gated else None).values()), **more)


def finished(make_app: MakeApp, run_id: str = "r") -> Any:
    one = agent()
    app = make_app(one)
    assert app.run_sync(one, "go", run_id=run_id, tags={"t": "x"}, by="priya").status == "done"
    return app


def test_effects_of_the_history_stay_done_and_new_ones_ask(make_app: MakeApp, ledger: Ledger) -> None:
    app = finished(make_app)
    done = ledger.lines()
    head = app.fork("r", at=4, new_run_id="f", by="kim")
    assert (head.status, head.seq, head.started_by, head.tags, head.model_calls, head.input_tokens) == (
        "running",
        4,
        "kim",
        {"t": "x"},
        0,
        0,
    )
    run = app.resume_sync("f")
    assert run.messages == app.get("r").messages[:4]
    assert run.status == "waiting_for_approval", "act has no gate of its own: a fork asks all the same"
    [gate] = [g for g in run.gates if g.outcome is None]
    assert (gate.tool, gate.call_id) == ("act", "toolu_02")
    assert ledger.lines() == done
    app.decide("f", approved=True, decided_by="priya")
    run = app.resume_sync("f")
    assert run.status == "done" and run.messages[4:] == app.get("r").messages[4:], "the call that could never run is refused as it was"
    assert [line["key"] for line in ledger.lines("act")] == ["r:toolu_02", "f:toolu_02"]
    for run_id in ("r", "f"):
        assert_whole(app, run_id)


def test_rejected_in_a_fork_mails_nobody(make_app: MakeApp, ledger: Ledger) -> None:
    app = finished(make_app)
    app.fork("r", at=4, new_run_id="f")
    app.resume_sync("f")
    app.decide("f", approved=False, decided_by="priya", note="only looking")
    assert app.resume_sync("f").status == "done"
    assert [line["key"] for line in ledger.lines("act")] == ["r:toolu_02"]


def test_live_fork_acts_by_its_own_gates(make_app: MakeApp, ledger: Ledger) -> None:
    app = finished(make_app)
    app.fork("r", at=4, new_run_id="f", live=True)
    assert app.resume_sync("f").status == "done"
    assert [line["key"] for line in ledger.lines("act")] == ["r:toolu_02", "f:toolu_02"]


@pytest.mark.parametrize("at", range(1, 7))
def test_every_checkpoint_can_be_forked_at(at: int, make_app: MakeApp) -> None:
    app = finished(make_app)
    app.fork("r", at=at, new_run_id="f", live=True)
    assert app.resume_sync("f").status == "done"
    assert app.get("f").messages[:at] == app.get("r").messages[:at]
    assert_whole(app, "f")


def test_edited_message_takes_the_place_of_the_last(make_app: MakeApp) -> None:
    app = finished(make_app)
    app.fork("r", at=1, new_run_id="f", edit_message={"role": "user", "content": "go another way"})
    assert app.get("f").messages == [{"role": "user", "content": "go another way"}]
    other = {"role": "assistant", "content": [use("look", "toolu_09", text="y")]}
    app.fork("r", at=2, new_run_id="g", edit_message=other)
    run = app.resume_sync("g")
    assert run.messages[1] == other and run.messages[2]["content"][0]["tool_use_id"] == "toolu_09"
    assert_whole(app, "g")


@pytest.mark.parametrize(
    "more",
    [
        {"at": 0}, {"at": 7}, {"at": True}, {"at": 2, "edit_message": {"role": "user", "content": "x"}},
        {"at": 3, "edit_message": {"role": "user", "content": "no results"}}, {"at": 1, "edit_message": {"role": "user", "content": ""}},
        {"at": 1, "new_run_id": "a:b"},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(more: Any, make_app: MakeApp) -> None:
    app = finished(make_app)
    with pytest.raises(UsageError):
        app.fork("r", **more)
    assert [h.run_id for h in app.runs()] == ["r"]


def test_twice_is_once(make_app: MakeApp) -> None:
    app = finished(make_app)
    first, again = (app.fork("r", at=4, new_run_id="f") for _ in range(2))
    assert first.created_at == again.created_at
    with pytest.raises(RunExists):
        app.fork("r", at=2, new_run_id="f")
    with pytest.raises(RunNotFound):
        app.fork("nothing", at=1)
    assert app.fork("r", at=1).run_id.startswith("run-")


def test_runs_of_sub_agents_of_a_fork_ask_too(make_app: MakeApp, ledger: Ledger) -> None:
    @tool(effect="idempotent")
    def mail(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.deliver("mail", ctx.idempotency_key)
        return text

    child = Agent("child", model=ScriptedModel([[use("mail", text="x")], "Mailed."]), tools=[mail])
    parent = Agent("p", model=ScriptedModel([[use("child", task="t")], "Done."]), tools=[child.as_tool(description="Mails.")])
    app = make_app(parent)
    assert app.run_sync(parent, "go", run_id="r").status == "done"
    app.fork("r", at=2, new_run_id="f")
    app.resume_sync("f")
    app.decide("f", approved=True, decided_by="priya")
    app.resume_sync("f")
    assert app.head("f:toolu_01").status == "waiting_for_approval"
    assert [line["key"] for line in ledger.lines()] == ["r:toolu_01:toolu_01"]


def test_fork_of_a_run_whose_agent_is_not_here(make_app: MakeApp, ledger: Ledger) -> None:
    app = finished(make_app)
    make_app().fork("r", at=4, new_run_id="f")
    assert app.resume_sync("f").status == "waiting_for_approval"


def test_by_the_command_line(make_app: MakeApp, store_url: str, tmp_path: Path) -> None:
    finished(make_app)

    def outlast(*args: str, code: int = 0) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "outlast", *args, "--store", store_url, "--json"], capture_output=True, text=True, check=False, timeout=60,
            cwd=tmp_path, env={k: v for k, v in os.environ.items() if not k.startswith("OUTLAST_")} | {"OUTLAST_BY": "priya"})  # fmt: skip
        assert done.returncode == code, done
        found: dict[str, Any] = json.loads((done.stdout or done.stderr).splitlines()[-1])
        return found

    (tmp_path / "message.json").write_text(json.dumps({"role": "user", "content": "else"}))
    forked = outlast("fork", "r", "--at", "1", "--id", "f", "--edit-message", "message.json")
    assert (forked["run_id"], forked["started_by"], forked["seq"]) == ("f", "priya", 1)
    plan = outlast("plan", "f")
    assert (plan["type"], plan["next"], plan["missing"][0]["what"]) == ("plan", "hold", "agent")
    assert outlast("fork", "r", "--at", "99", code=2)["error"]["type"] == "usage_error"
