"""An agent as another one's tool: a run of its own, created and ended in one transaction with its parent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.deaths import dying_at
from tests.support.world import assert_whole
from tests.waits.conftest import NewStore
from tests.waits.desk import FRIDAY, HOUR, MONDAY_NOON, kinds, results, use

from outlast import Agent, Limits, Outlast, ToolContext, approval, tool
from outlast.errors import ModelError, RunNotFound
from outlast.models import ScriptedModel
from outlast.testing import ManualClock

CHILD = "run-1:toolu_01"
USAGE = {"input_tokens": 100, "output_tokens": 10}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "usage": USAGE}


def asks(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(calls), "stop_reason": "tool_use", "usage": USAGE}


@dataclass
class Office:
    """A boss who asks a researcher; `found` is what the researcher does."""

    folder: Path
    found: Any = field(default_factory=lambda: [says("They are on the big plan.")])
    first: Any = field(default_factory=lambda: asks(use("researcher", task="Which plan is Northwind on?")))
    gate: Any = None
    limits: Limits = field(default_factory=Limits)
    sent: list[str] = field(default_factory=list)
    clock: ManualClock = field(default_factory=lambda: ManualClock(FRIDAY))
    url: str = ""  # empty: a file in the folder

    @property
    def store(self) -> str:
        return self.url or str(self.folder / "outlast.db")

    def app(self, **more: Any) -> Outlast:
        @tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=4 * HOUR))
        def reply(ctx: ToolContext, text: str) -> str:
            """Reply."""
            self.sent.append(ctx.idempotency_key)
            return "sent"

        researcher = Agent("researcher", model=ScriptedModel(self.found, log=self.folder / "researcher.log"), tools=[reply])
        boss = Agent(
            "boss", model=ScriptedModel([self.first, lambda messages: says(f"I read: {messages[-1]['content'][0]['content']}")], log=self.folder / "boss.log"),
            tools=[researcher.as_tool(description="Finds facts about a customer.", gate=self.gate)], limits=self.limits)  # fmt: skip
        return Outlast(self.store, agents=[boss], clock=self.clock, **more)

    def started(self, **more: Any) -> Outlast:
        app = self.app(**more)
        app.start(app.agents["boss"], "Look into Northwind.", run_id="run-1", tags={"tenant": "northwind"}, by="helpdesk")
        return app

    def asked(self, who: str) -> int:
        log = self.folder / f"{who}.log"
        return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def office(tmp_path: Path, new_store: NewStore) -> Office:
    return Office(tmp_path, url=new_store())


def boss_only(app: Outlast) -> None:
    """Drive the parent and nothing else."""
    lease = app._store.claim_run("run-1", "host/1/1/somebody/1")
    app._store.release(lease)
    work = app._open_children
    app._open_children = lambda run_id: []  # type: ignore[method-assign]  # as a process that only drives this run
    try:
        app.resume_sync("run-1")
    finally:
        app._open_children = work  # type: ignore[method-assign]  # given back


def test_the_parent_waits_for_a_run_of_its_own(office: Office) -> None:
    app = office.started()
    boss_only(app)
    head = app.head("run-1")
    assert head.status == "waiting_for_run" and head.reason == f"researcher waits for its own run {CHILD}"
    child = app.head(CHILD)
    assert (child.agent, child.status, child.parent_run_id, child.parent_call_id) == ("researcher", "running", "run-1", "toolu_01")
    assert (child.tags, child.started_by) == ({"tenant": "northwind"}, "helpdesk")
    [asked] = app.get(CHILD).messages
    assert asked["role"] == "user" and "Which plan is Northwind on?" in str(asked["content"])
    assert_whole(app, "run-1")
    assert_whole(app, CHILD)


@pytest.mark.parametrize("drive", ["worker", "foreground"])
def test_the_childs_output_answers_the_call_and_its_tokens_add_up(office: Office, drive: str) -> None:
    app = office.started()
    if drive == "worker":
        app.work_sync(until_idle=True)
    else:
        app.resume_sync("run-1")
    run, child = app.get("run-1"), app.get(CHILD)
    assert run.output == "I read: They are on the big plan."
    assert child.output == "They are on the big plan."
    assert (child.input_tokens, child.output_tokens) == (100, 10)
    assert (run.input_tokens, run.output_tokens) == (300, 30)
    assert (office.asked("boss"), office.asked("researcher")) == (2, 1)
    assert_whole(app, "run-1")
    assert_whole(app, CHILD)


def test_two_children_side_by_side(office: Office) -> None:
    office.first = asks(use("researcher", "toolu_01", task="a"), use("researcher", "toolu_02", task="b"))
    office.found = [lambda messages: says(f"about {messages[0]['content']}")]
    app = office.started()
    assert app.resume_sync("run-1").status == "done"
    contents = [x["content"] for x in results(app)]
    assert len(contents) == 2 and contents[0] != contents[1]
    assert [app.head(f"run-1:toolu_0{n}").status for n in (1, 2)] == ["done", "done"]


def test_a_child_that_waits_for_approval_shows_in_the_inbox(office: Office) -> None:
    office.found = [asks(use("reply", "toolu_09", text="Hello.")), says("Replied.")]
    told: list[Any] = []
    app = office.started(notify=[told.append])
    run = app.resume_sync("run-1")
    assert run.status == "waiting_for_run"
    [gate] = app.inbox(role="support-lead")
    assert (gate.run_id, gate.agent, gate.started_by, gate.tags) == (CHILD, "researcher", "helpdesk", {"tenant": "northwind"})
    assert [(n.kind, n.gate.run_id) for n in told] == [("opened", CHILD)]
    app.decide(CHILD, approved=True, decided_by="priya")
    assert app.resume_sync("run-1").output == "I read: Replied."
    assert office.sent == [f"{CHILD}:toolu_09"]


def test_a_childs_deadline_lets_the_parent_go_on(office: Office) -> None:
    office.found = [asks(use("reply", "toolu_09", text="Hello.")), lambda messages: says(messages[-1]["content"][0]["content"])]
    app = office.started()
    app.resume_sync("run-1")
    office.clock.move(4 * HOUR)
    assert app.resume_sync("run-1").output == "I read: Nobody decided on this reply within 4 hours, so it was not sent."
    assert office.sent == []


def failing(messages: list[dict[str, Any]]) -> Any:
    raise ModelError("the key is wrong", retryable=False)


def test_a_child_that_fails_is_an_error_that_the_parent_reads(office: Office) -> None:
    office.found = [failing]
    app = office.started()
    run = app.resume_sync("run-1")
    assert run.status == "done"
    assert [(x["content"], x["is_error"]) for x in results(app)] == [("researcher failed: the key is wrong", True)]
    assert app.head(CHILD).status == "failed"
    assert_whole(app, "run-1")


def test_cancelling_goes_down(office: Office) -> None:
    office.found = [asks(use("reply", "toolu_09", text="Hello.")), says("Replied.")]
    app = office.started()
    app.resume_sync("run-1")
    app.cancel("run-1", by="tom", note="not needed")
    assert [app.head(run_id).status for run_id in ("run-1", CHILD)] == ["cancelled", "cancelled"]
    assert app.inbox() == []
    assert kinds(app)["ChildFinished"] == 0
    assert_whole(app, "run-1")
    assert_whole(app, CHILD)


def test_cancelling_a_child_answers_its_parent(office: Office) -> None:
    office.found = [asks(use("reply", "toolu_09", text="Hello.")), says("Replied.")]
    app = office.started()
    app.resume_sync("run-1")
    app.cancel(CHILD, by="tom", note="not needed")
    run = app.resume_sync("run-1")
    assert run.output == "I read: researcher cancelled: not needed"
    assert run.input_tokens == 300  # what the child had spent until then is spent
    assert_whole(app, "run-1")


def test_a_parent_that_ends_by_a_limit_takes_its_child_along(office: Office) -> None:
    office.found = [asks(use("reply", "toolu_09", text="Hello.")), says("Replied.")]
    office.limits = Limits(wall=timedelta(hours=2), then="fail")
    app = office.started()
    app.resume_sync("run-1")
    office.clock.move(2 * HOUR)
    assert app.resume_sync("run-1").status == "failed"
    assert app.head(CHILD).status == "cancelled" and app.head(CHILD).reason == "run run-1 is over"
    assert app.inbox() == []
    assert_whole(app, "run-1")
    assert_whole(app, CHILD)


@pytest.mark.parametrize("approved", [True, False])
def test_a_gate_before_the_child(office: Office, approved: bool) -> None:
    office.gate = approval(to="support-lead", noun="research", within=4 * HOUR)
    app = office.started()
    assert app.resume_sync("run-1").status == "waiting_for_approval"
    with pytest.raises(RunNotFound):
        app.head(CHILD)
    app.decide("run-1", approved=approved, decided_by="priya", note="no time")
    run = app.resume_sync("run-1")
    assert run.output == ("I read: They are on the big plan." if approved else "I read: A support lead rejected this research: no time")
    assert office.asked("researcher") == approved


def test_a_text_for_a_finished_child_does_not_answer_its_parent_twice(office: Office) -> None:
    office.found = [says("They are on the big plan."), says("And they are happy.")]
    app = office.started()
    app.resume_sync("run-1")
    app.send(CHILD, "Anything else?")
    assert app.resume_sync(CHILD).output == "And they are happy."
    assert kinds(app)["ChildFinished"] == 1
    assert app.get("run-1").output == "I read: They are on the big plan."
    assert_whole(app, "run-1")


Drive = Callable[[Outlast], Any]


@pytest.mark.parametrize(
    "drive", [lambda app: app.resume_sync("run-1"), lambda app: app.work_sync(until_idle=True)], ids=["foreground", "worker"]
)
@pytest.mark.parametrize("point", ["commit.before", "commit.after"])
def test_a_crash_between_any_two_commits_of_a_childs_start_and_end(tmp_path: Path, new_store: NewStore, point: str, drive: Drive) -> None:
    """Both runs stand or neither does: never a parent that waits for a run that is not there, never an end that its parent did not hear of."""
    for nth in range(1, 20):
        folder = tmp_path / f"{nth}"
        folder.mkdir()
        office = Office(folder, url=new_store())
        office.started().close()
        app = office.app()
        try:
            with dying_at(point, nth):
                drive(app)
        except AssertionError:
            assert nth > 4
            return
        finally:
            app.close()
        with office.app() as after:
            assert_linked(after)
            after._store.reap()
            drive(after)
            run = after.get("run-1")
            assert run.output == "I read: They are on the big plan.", nth
            assert (kinds(after)["GateOpened"], kinds(after)["ChildFinished"]) == (1, 1)
            lost = [kinds(after, run_id)["ModelCallLost"] for run_id in ("run-1", CHILD)]
            assert office.asked("boss") + office.asked("researcher") <= 4
            assert sum(lost) <= 1
            assert_whole(after, "run-1")
            assert_whole(after, CHILD)
    raise AssertionError("it has more commits than this test knows")


def assert_linked(app: Outlast) -> None:
    waits = [g for g, _ in app._store.gates("run-1") if g.kind == "run"]
    try:
        child = app.head(CHILD)
    except RunNotFound:
        assert waits == []
        return
    assert len(waits) == 1
    assert (waits[0].outcome == "arrived") == child.finished


def test_deadlines_of_children_are_swept_as_any_other(office: Office) -> None:
    office.found = [asks(use("reply", "toolu_09", text="Hello.")), says("Noted.")]
    office.started().resume_sync("run-1")
    office.clock.move(MONDAY_NOON - FRIDAY)
    with Outlast(office.store, clock=office.clock) as bare:
        assert bare.sweep() == 1
        assert bare.head(CHILD).status == "running" and bare.head("run-1").status == "waiting_for_run"
