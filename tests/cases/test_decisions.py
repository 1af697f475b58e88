"""Decisions of people: what is no decision, what a decision covers, when it comes too late; and gates that are set up wrongly."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from tests.cases.conftest import BOTH, MakeApp
from tests.support.deaths import dying_at
from tests.support.world import GATE, Ledger, assert_whole, finish, tools, use

from outlast import Agent, Gate, Outlast, ToolContext, approval, tool
from outlast.errors import GateClosed, OutlastError, Refused, UsageError
from outlast.models import ScriptedModel
from outlast.runtime.clock import ManualClock

STORES = BOTH


def waiting(make_app: MakeApp, *, clock: ManualClock | None = None, gate: Any = GATE) -> tuple[Outlast, Agent[str]]:
    agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(gate)["act"]])
    app = make_app(agent, clock=clock)
    app.run_sync(agent, "go", run_id="r")
    return app, agent


NO_DECISIONS = [None, "yes", "true", "false", "", 1, 0, 1.0, {}, [], [True], object()]


@pytest.mark.parametrize("value", NO_DECISIONS, ids=lambda v: repr(v)[:8])
def test_missing_decision_executes(value: Any, make_app: MakeApp, ledger: Ledger) -> None:
    app, _ = waiting(make_app)
    with pytest.raises(UsageError, match="True or False"):
        app.decide("r", approved=value, decided_by="priya")
    assert app.resume_sync("r").status == "waiting_for_approval"
    assert app.inbox()[0].outcome is None
    assert ledger.lines() == []


@pytest.mark.parametrize("value", [None, "yes", True, "Happened", ""], ids=repr)
def test_missing_verification_executes(value: Any, make_app: MakeApp, ledger: Ledger) -> None:
    agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools()["act"]])
    with dying_at("tool.after:act"):
        make_app(agent).run_sync(agent, "go", run_id="r")
    app = make_app(agent)
    assert app.resume_sync("r").status == "waiting_for_verification"
    with pytest.raises(UsageError, match="give_up"):
        app.verify("r", outcome=value, decided_by="priya")
    assert app.resume_sync("r").status == "waiting_for_verification"
    assert len(ledger.lines()) == 1


@pytest.mark.parametrize("who", [None, "", " ", 7, "x" * 300], ids=lambda v: repr(v)[:8])
def test_a_decision_without_a_person_is_none(who: Any, make_app: MakeApp, ledger: Ledger) -> None:
    app, _ = waiting(make_app)
    with pytest.raises(UsageError, match="decided_by"):
        app.decide("r", approved=True, decided_by=who)
    assert app.inbox()[0].outcome is None
    assert ledger.lines() == []


@pytest.mark.parametrize(
    "gate", ["requird", True, {"within": 5}, GATE.policy(), lambda run: True, "support-lead"], ids=lambda v: type(v).__name__
)
def test_misconfigured_gate_fails_open(gate: Any) -> None:
    def act(text: str) -> str:
        raise AssertionError("must not run")

    with pytest.raises(UsageError, match="gate must be approval"):
        tool(gate=gate)(act)


def test_misconfigured_approval_is_refused() -> None:
    with pytest.raises(TypeError):
        approval("support-lead")  # type: ignore[call-arg]  # `within` must be said
    for wrong in ({"within": 4}, {"within": timedelta(0)}, {"within": None, "to": ""}, {"within": None, "then": "approve"}, {"within": None, "when": 5},
                  {"within": timedelta(days=-1)}, {"within": None, "noun": " "}):  # fmt: skip
        with pytest.raises(UsageError):
            approval(**wrong)  # type: ignore[arg-type]  # a careless caller


def _raises(run: Any, **args: Any) -> bool:
    raise RuntimeError("the policy service is down")


@pytest.mark.parametrize("when", [_raises, lambda run, **a: None, lambda run, **a: 0, lambda run, **a: "false", lambda run, **a: [], lambda run: False,
                                  lambda run, **a: True], ids=["raises", "none", "zero", "text", "list", "wrong signature", "true"])  # fmt: skip
def test_a_policy_that_raises_or_says_nothing_keeps_the_gate(when: Any, make_app: MakeApp, ledger: Ledger) -> None:
    app, _ = waiting(make_app, gate=approval(within=timedelta(hours=1), when=when))
    assert app.head("r").status == "waiting_for_approval"
    assert ledger.lines() == []


def test_a_policy_is_asked_once_and_its_answer_stands(make_app: MakeApp, ledger: Ledger) -> None:
    asked: list[str] = []

    def when(run: Any, text: str) -> bool:
        asked.append(run.run_id)
        return len(asked) > 1

    agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(approval(within=None, when=when))["act"]])
    with dying_at("commit.after", 2):
        make_app(agent).run_sync(agent, "go", run_id="r")
    assert asked == ["r"]
    assert make_app(agent).resume_sync("r").status == "done"
    assert asked == ["r"]
    assert len(ledger.lines()) == 1


@pytest.mark.parametrize("approved", [True, False])
@pytest.mark.parametrize("late", [timedelta(0), timedelta(milliseconds=1), timedelta(days=1)], ids=str)
def test_approve_after_expiry(approved: bool, late: timedelta, make_app: MakeApp, clock: ManualClock, ledger: Ledger) -> None:
    """The decision itself looks at the clock: no sweeper need have run."""
    app, _ = waiting(make_app, clock=clock)
    clock.move(timedelta(hours=4) + late)
    with pytest.raises(GateClosed, match="expired") as refused:
        app.decide("r", approved=approved, decided_by="priya")
    assert refused.value.gate.outcome == "expired"
    run = app.resume_sync("r")
    assert run.status == "done"
    assert run.gates[0].outcome == "expired"
    assert "Nobody decided" in run.messages[2]["content"][0]["content"]
    assert ledger.lines() == []
    assert_whole(app, "r")


def test_approve_one_millisecond_before_expiry(make_app: MakeApp, clock: ManualClock, ledger: Ledger) -> None:
    """The decision stands, though the call runs after the deadline."""
    app, _ = waiting(make_app, clock=clock)
    clock.move(timedelta(hours=4) - timedelta(milliseconds=1))
    app.decide("r", approved=True, decided_by="priya")
    clock.move(timedelta(hours=1))
    assert app.resume_sync("r").status == "done"
    assert len(ledger.lines()) == 1


def test_approve_and_expiry_at_the_same_moment(make_app: MakeApp, clock: ManualClock, ledger: Ledger) -> None:
    """A person and a worker at the deadline: there is exactly one outcome, and the call ran exactly if it was approved."""
    for n in range(10):
        agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(GATE)["act"]])
        app, other = make_app(agent, clock=clock), make_app(agent, clock=clock)
        run_id = f"r{n}"
        app.run_sync(agent, "go", run_id=run_id)
        clock.move(timedelta(hours=4) - timedelta(milliseconds=1))
        barrier = threading.Barrier(2)
        said: list[object] = []

        def decide(run_id: str = run_id, other: Outlast = other, barrier: threading.Barrier = barrier, said: list[object] = said) -> None:
            barrier.wait()
            try:
                said.append(other.decide(run_id, approved=True, decided_by="priya").outcome)
            except GateClosed as closed:
                said.append(closed.gate.outcome)

        thread = threading.Thread(target=decide)
        thread.start()
        barrier.wait()
        clock.move(timedelta(milliseconds=1))
        run = app.resume_sync(run_id)
        thread.join()
        run = app.resume_sync(run_id)
        assert run.status == "done"
        assert [run.gates[0].outcome] == said
        assert len([line for line in ledger.lines() if line["key"].startswith(f"{run_id}:")]) == (said == ["approved"])
        assert_whole(app, run_id)


@pytest.mark.parametrize("at", ["claim.after", "commit.before", "commit.after", "tool.before:pay", "tool.after:pay"])
def test_edit_approve_runs_other_arguments(at: str, make_app: MakeApp, ledger: Ledger, clock: ManualClock) -> None:
    """What was approved is what runs: the edited arguments, once, over any crash; the history keeps the model's own call."""

    @tool(effect="idempotent", gate=GATE)
    def pay(ctx: ToolContext, amount: int, to: str = "Ada") -> str:
        first = ledger.deliver(f"pay {amount} {to}", ctx.idempotency_key)
        return "paid" if first else "paid before"

    agent = Agent("a", model=ScriptedModel([[use("pay", amount=500)], "Done."]), tools=[pay])
    app = make_app(agent, clock=clock)
    run = app.run_sync(agent, "go", run_id="r")
    shown = run.gates[0]
    for bad in ({}, {"amount": "much"}, {"amount": 5, "tool": "other"}, {"amount": None}):
        with pytest.raises(UsageError):
            app.decide("r", approved=True, args=bad, decided_by="priya")
    with pytest.raises(UsageError):
        app.decide("r", approved=False, args={"amount": 5}, decided_by="priya")
    with pytest.raises(UsageError):
        app.decide("r", approved=True, args=[5], decided_by="priya")  # type: ignore[arg-type]  # a careless caller
    assert app.inbox()[0].outcome is None
    gate = app.decide("r", approved=True, args={"amount": 5}, decided_by="priya", digest=shown.digest)
    assert (gate.args, gate.edited_args, gate.decided_by) == ({"amount": 500}, {"amount": 5}, "priya")
    assert app.decide("r", approved=True, args={"amount": 5}, decided_by="priya") == gate
    with pytest.raises(GateClosed):  # 500 was shown, and 5 will run
        app.decide("r", approved=True, decided_by="priya")
    with dying_at(at):
        app.resume_sync("r")
    app = make_app(agent, clock=clock)
    run = finish(app, app.resume_sync("r"), ledger, clock)
    assert run.status == "done"
    assert run.messages[1]["content"][0]["input"] == {"amount": 500}
    assert [(line["what"], line["key"]) for line in ledger.lines()] == [("pay 5 Ada", "r:toolu_01")]
    result = run.messages[2]["content"][0]["content"]
    assert "priya" in result and '{"amount": 5}' in result
    decided = next(row for row in app.journal("r") if row.kind == "GateDecided")
    assert (json.loads(decided.body)["args"], decided.by) == ({"amount": 5}, "priya")
    assert_whole(app, "r")


def test_edited_arguments_need_the_schema(make_app: MakeApp) -> None:
    waiting(make_app)
    with pytest.raises(UsageError, match=r"is known"):
        make_app().decide("r", approved=True, args={"text": "y"}, decided_by="priya")


def test_a_decision_on_what_was_not_shown_is_refused(make_app: MakeApp, ledger: Ledger) -> None:
    app, _ = waiting(make_app)
    with pytest.raises(GateClosed):
        app.decide("r", approved=True, decided_by="priya", digest="sha256:" + "0" * 64)
    assert app.inbox()[0].outcome is None
    app.decide("r", approved=True, decided_by="priya", digest=app.inbox()[0].digest)
    assert app.resume_sync("r").status == "done"


def test_the_first_decision_stands(make_app: MakeApp, ledger: Ledger) -> None:
    app, agent = waiting(make_app)
    first = app.decide("r", approved=False, decided_by="priya", note="no")
    assert app.decide("r", approved=False, decided_by="priya", note="no") == first
    for person, approved in (("omar", True), ("omar", False), ("priya", True)):
        with pytest.raises(GateClosed, match="priya") as closed:
            app.decide("r", "toolu_01", approved=approved, decided_by=person)
        assert closed.value.gate.outcome == "rejected"
    entries = app._store.head("r").entries
    assert make_app(agent).resume_sync("r").status == "done"
    assert ledger.lines() == []
    assert app._store.head("r").entries > entries
    assert app.decide("r", "toolu_01", approved=False, decided_by="priya", note="no").outcome == "rejected"


def test_twenty_people_decide_at_once(make_app: MakeApp, ledger: Ledger) -> None:
    app, agent = waiting(make_app)
    apps = [make_app(agent) for _ in range(4)]
    barrier = threading.Barrier(20)
    stood: list[Gate] = []
    refused: list[OutlastError] = []

    def decide(n: int) -> None:
        barrier.wait()
        try:
            stood.append(apps[n % 4].decide("r", approved=n % 2 == 0, decided_by=f"person-{n}"))
        except GateClosed as closed:
            refused.append(closed)

    threads = [threading.Thread(target=decide, args=(n,)) for n in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (len(stood), len(refused)) == (1, 19)
    assert {r.gate.decided_by for r in refused if isinstance(r, GateClosed)} == {stood[0].decided_by}
    assert app.resume_sync("r").status == "done"
    assert len(ledger.lines()) == (stood[0].outcome == "approved")
    assert_whole(app, "r")


def test_a_decision_of_a_run_that_is_over(make_app: MakeApp, ledger: Ledger) -> None:
    app, _ = waiting(make_app)
    app.cancel("r")
    with pytest.raises(Refused):
        app.decide("r", approved=True, decided_by="priya")
    assert ledger.lines() == []
