"""What does not go on by itself: each with its reason and the one command that mends it. And what goes on is not in the list."""

from __future__ import annotations

from datetime import UTC, timedelta
from pathlib import Path

import pytest
from tests.support.deaths import dying_at
from tests.waits.conftest import NewStore
from tests.waits.desk import HOUR, Desk, use

from outlast import Limits, Outlast, ToolContext, Wait, approval, tool
from outlast.runtime import notices
from outlast.runtime.clock import wall
from outlast.testing import ManualClock


@pytest.fixture
def desk(tmp_path: Path, new_store: NewStore) -> Desk:
    """At the machine's own time: the view knows no other clock."""
    return Desk(tmp_path, url=new_store(), clock=ManualClock(wall()))


def reasons(app: Outlast) -> list[tuple[str, str]]:
    return [(x.reason, x.command) for x in app.stuck()]


def test_a_gate_with_an_addressee_and_a_deadline_is_not_stuck(desk: Desk) -> None:
    app = desk.waiting()
    assert reasons(app) == [] and app.runs(stuck=True) == []


@pytest.mark.parametrize(
    "to, within, said",
    [
        ("support-lead", None, "it waits for support-lead without a deadline"),
        (None, 4 * HOUR, "asked is nobody in particular"),
        (None, None, "asked is nobody in particular, and there is no deadline"),
    ],
)
def test_a_wait_without_addressee_or_deadline(desk: Desk, to: str | None, within: timedelta | None, said: str) -> None:
    desk.gate = approval(to=to, noun="reply", within=within)
    app = desk.waiting()
    assert reasons(app) == [(f"desk wants to send this reply: {said}", "outlast approve run-1 toolu_01")]
    [head] = app.runs(stuck=True)
    assert head.run_id == "run-1"
    app.decide("run-1", approved=True, decided_by="priya")
    app.resume_sync("run-1")
    assert reasons(app) == []


def test_a_wait_that_outlived_its_last_deadline(desk: Desk) -> None:
    desk.gate = approval(to="support-lead", noun="reply", within=HOUR, then="keep_waiting")
    desk.clock = ManualClock(wall() - 2 * HOUR)
    app = desk.waiting()
    assert reasons(app) == [
        ("desk wants to send this reply: it still waits for support-lead, though its last deadline has passed", "outlast approve run-1 toolu_01")
    ]  # fmt: skip


def test_in_doubt(desk: Desk) -> None:
    @tool
    def pay(ctx: ToolContext, amount: int) -> str:
        """Pay."""
        raise ConnectionError("the bank did not answer")

    desk.tools, desk.turns = [pay], ([use("pay", amount=3)], "Done.")
    app = desk.waiting()
    [(reason, command)] = reasons(app)
    assert "outcome is unknown" in reason and command == "outlast verify run-1 toolu_01"
    app.verify("run-1", outcome="give_up", decided_by="priya")
    assert reasons(app) == []


def test_a_limit_that_nobody_in_particular_is_asked_to_raise(desk: Desk) -> None:
    app = desk.app()
    agent = app.agents["desk"].replace(limits=Limits(model_calls=1))
    app = Outlast(desk.store, agents=[agent], clock=desk.clock)
    run = app.run_sync(agent, "hi", run_id="run-1")
    app.decide("run-1", approved=True, decided_by="priya")
    run = app.resume_sync("run-1")
    assert run.status == "waiting_for_budget"
    assert [command for _, command in reasons(app)] == ["outlast approve run-1 budget:1"]


def test_code_that_no_worker_has(desk: Desk) -> None:
    desk.waiting().close()
    with Outlast(desk.store, agents=[desk.agent().replace(tools=[])], clock=desk.clock) as app:
        app.decide("run-1", approved=True, decided_by="priya")
        assert app.resume_sync("run-1").status == "waiting_for_code"
        assert reasons(app) == [("no worker knows the tool 'reply'", "outlast worker --agent desk")]


def test_an_agent_that_no_worker_knows(desk: Desk) -> None:
    desk.clock = ManualClock(wall() - timedelta(minutes=6))
    app = desk.app()
    app.start("somebody-else", "hi", run_id="run-2")
    assert reasons(app) == [
        ("it is due, and no worker takes it: none that runs knows the agent somebody-else", "outlast worker --agent somebody-else")
    ]
    desk.clock.move(timedelta(minutes=6))
    app.start("somebody-else", "hi", run_id="run-3")  # due for a moment only
    assert [x.run_id for x in app.stuck()] == ["run-2"]


def test_workers_that_die_over_it(desk: Desk) -> None:
    @tool
    def crash(ctx: ToolContext) -> str:
        """Crash."""
        return "never"

    desk.turns, desk.tools = ([use("crash")], "Done."), [crash]
    app = desk.app()
    app.start(app.agents["desk"], "hi", run_id="run-1")
    app.close()
    seen = []
    for _ in range(6):
        app = desk.app()
        app._store.reap()
        try:
            with dying_at("model.before"):
                app.resume_sync("run-1")
        except AssertionError:  # given up: it was not driven
            pass
        app.close()
        with Outlast(desk.store, clock=desk.clock) as bare:
            seen.append([(command, reason) for reason, command in reasons(bare)])
    assert ("outlast show run-1 --journal", "its worker died 3 times in a row") in [x for found in seen for x in found]
    [(command, reason)] = seen[-1]
    assert command == "outlast retry run-1" and reason.startswith("worker died 5 times while asking the model")


def test_a_notice_for_somebody_whom_no_process_tells_any_more(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ends_before(self: notices.Teller) -> int:
        return 0

    desk.clock = ManualClock(wall() - timedelta(minutes=6))
    with monkeypatch.context() as patch:
        patch.setattr(notices.Teller, "deliver", ends_before)
        desk.waiting().close()
    with Outlast(desk.store, clock=desk.clock) as other:  # it tells nobody
        assert other.sweep() == 0
        [(reason, command)] = reasons(other)
        assert "waits for a process that tells python:builtins.list.append" in reason and command == "outlast sweep"
    with desk.app() as app:
        assert app.sweep() == 1
        assert reasons(app) == []


def test_waits_that_end_by_themselves_are_not_stuck(desk: Desk) -> None:
    @tool(effect="idempotent")
    def charge(ctx: ToolContext) -> Wait:
        """Charge."""
        return Wait("settled", within=timedelta(days=3))

    desk.turns, desk.tools = ([use("charge")], "Done."), [charge]
    assert reasons(desk.waiting()) == []


def test_since_is_an_instant_and_the_longest_comes_first(desk: Desk) -> None:
    desk.gate = approval(to="support-lead", noun="reply", within=None)
    app = desk.waiting("run-1")
    desk.clock.move(timedelta(minutes=1))
    app.run_sync(app.agents["desk"], "Another one.", run_id="run-2")
    found = app.stuck()
    assert [x.run_id for x in found] == ["run-1", "run-2"]
    assert found[0].since.tzinfo == UTC and found[1].since - found[0].since == timedelta(minutes=1)
