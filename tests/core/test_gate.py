"""Gates: their ladder as instants, what their clock says when, their words, and their rows in the inbox."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.build import HELLO, LEAD, T0, asks, at, called, decided, gate, journal, result, rung, s, says, t, use

from outlast.core import gate as g
from outlast.core import run as r
from outlast.core.gate import GatePolicy

G = use("g", "reply", {"to": "ana"})


def seconds(value: datetime | None) -> float | None:
    return None if value is None else (value - T0).total_seconds()


LADDERS = [
    ("one rung", GatePolicy("lead", "reply", s(100)), [("lead", 100, [])], 100),
    ("no time limit", GatePolicy("lead", "reply", None), [("lead", None, [])], None),
    ("keep waiting", GatePolicy("lead", "reply", s(100), "keep_waiting"), [("lead", 100, [])], None),
    ("two rungs", GatePolicy("lead", "reply", s(100), GatePolicy("head", "reply", s(50))), [("lead", 100, []), ("head", 150, [])], 150),
    ("the last keeps waiting", GatePolicy("lead", "reply", s(100), GatePolicy("head", "reply", s(50), "keep_waiting")),
     [("lead", 100, []), ("head", 150, [])], None),
    ("reminders end before the rung does", GatePolicy("lead", "reply", s(100), remind_every=s(50)), [("lead", 100, [50])], 100),
    ("the second rung's own", GatePolicy("lead", "reply", s(100), GatePolicy("head", "reply", s(50), remind_every=s(20))),
     [("lead", 100, []), ("head", 150, [120, 140])], 150),
    ("counted in its own hours", GatePolicy("lead", "reply", s(100), count=lambda start, within: start + 2 * within), [("lead", 200, [])], 200),
]  # fmt: skip


@pytest.mark.parametrize("policy, ladder, closes", [row[1:] for row in LADDERS], ids=[row[0] for row in LADDERS])
def test_rungs_are_instants_from_the_moment_it_opens(policy: GatePolicy, ladder: list[object], closes: float | None) -> None:
    rungs, closes_at = g.rungs(policy, t(0))

    def parse(text: str | None) -> float | None:
        return seconds(datetime.fromisoformat(text)) if text else None

    assert [(x["role"], parse(x["deadline"]), [parse(y) for y in x["remind_at"]]) for x in rungs] == ladder
    assert seconds(closes_at) == closes


def test_reminders_without_end_are_bounded() -> None:
    rungs, _ = g.rungs(GatePolicy("lead", "reply", None, remind_every=s(1)), t(0))
    assert len(rungs[0]["remind_at"]) == g.MAX_REMINDERS


def open_gate(policy: GatePolicy) -> r.Gate:
    rungs, closes_at = g.rungs(policy, t(0))
    opened = r.stored(r.GateOpened("approval:g", "approval", "g", "reply", "d", rungs=rungs, closes_at=closes_at))
    assert isinstance(opened, r.GateOpened)
    return r.Gate(opened)


policies = st.recursive(
    st.builds(GatePolicy, st.just("lead"), st.just("reply"), st.none() | st.integers(1, 90).map(s), st.sampled_from(["reject", "keep_waiting"]),
              st.none() | st.integers(5, 40).map(s)),
    lambda then: st.builds(GatePolicy, st.just("head"), st.just("reply"), st.integers(1, 90).map(s), then, st.none() | st.integers(5, 40).map(s)),
    max_leaves=3,
)  # fmt: skip


@given(policies, st.lists(st.integers(0, 60), max_size=8))
def test_a_gates_clock_is_heard_in_time_and_once(policy: GatePolicy, steps: list[int]) -> None:
    gate_, now = open_gate(policy), 0
    for step in steps:
        until = g.next_at(gate_)
        assert until is None or until > t(now)
        for second in range(now, now + step):  # quiet until the instant it names
            assert (g.moved(gate_, t(second)) is None) == (until is None or t(second) < until)
        now += step
        said = g.moved(gate_, t(now))
        if isinstance(said, r.GateExpired):
            assert gate_.opened.closes_at and t(now) >= gate_.opened.closes_at
            return
        assert gate_.opened.closes_at is None or t(now) < gate_.opened.closes_at
        if said is not None:
            assert said.level >= gate_.level
            gate_ = replace(gate_, level=said.level, reminded_at=said.reminded_at)
        assert g.moved(gate_, t(now)) is None
        assert gate_.level == len(gate_.opened.rungs) - 1 or (gate_.deadline and t(now) < gate_.deadline)


# ---- words ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role, words", [
    ("support-lead", "A support lead"), ("accountant", "An accountant"), ("head_of_support", "A head of support"), (None, "A person"), ("", "A person"),
])  # fmt: skip
def test_a_role(role: str | None, words: str) -> None:
    assert g.a_role(role) == words


@pytest.mark.parametrize("value, working, words", [
    (timedelta(hours=4), True, "4 working hours"), (timedelta(hours=1), False, "1 hour"), (timedelta(minutes=90), False, "90 minutes"),
    (timedelta(days=2), False, "2 days"), (timedelta(days=1), True, "24 working hours"), (timedelta(seconds=1.5), False, "1.5 seconds"),
])  # fmt: skip
def test_duration(value: timedelta, working: bool, words: str) -> None:
    assert g.duration(value, working=working) == words


def expired(policy: GatePolicy) -> r.Gate:
    opened = open_gate(policy)
    return replace(opened, opened=replace(opened.opened, noun=policy.noun), outcome="expired")


@pytest.mark.parametrize("policy, words", [
    (LEAD, "Nobody decided on this reply within 100 seconds, so it was not sent."),
    (replace(LEAD, within=timedelta(hours=4), hours={"text": "Mo-Fr 09:00-17:00"}), "Nobody decided on this reply within 4 working hours, so it was not sent."),
    (replace(LEAD, noun="refund", then=LEAD), "Nobody decided on this refund within 200 seconds, so it was not made."),
])  # fmt: skip
def test_an_expiry_reads_differently_from_a_no(policy: GatePolicy, words: str) -> None:
    assert g.refusal(expired(policy)) == words


def test_the_model_is_told_what_a_person_changed() -> None:
    opened = gate("g", "approval", rung(100))
    assert g.changed(called(G, then=[opened, decided("approval:g")]).calls[0]) == ""
    assert g.changed(called(G, then=[opened, decided("approval:g", args={"to": "ana"})]).calls[0]) == ""
    told = g.changed(called(G, then=[opened, decided("approval:g", args={"to": "bo"})]).calls[0])
    assert told == 'A person (priya) changed the arguments before this ran. It ran with: {"to": "bo"}\n'


# ---- rows -------------------------------------------------------------------------------------------------------------------

ROW = gate("g", "approval", rung(100, "lead", 40), rung(200, "head"), closes=200, noun="reply")


def rows(*then: r.Entry) -> list[g.GateRow]:
    return g.projection(r.Run("run-1"), [r.stored(e) for e in (*HELLO, asks(G), at(1, ROW), *then)])[1]


@pytest.mark.parametrize("then, outcome, decided_by, role, deadline, next_at", [
    ([], None, None, "lead", 100, 40),
    ([r.GateMoved("approval:g", 0, t(40))], None, None, "lead", 100, 100),
    ([r.GateMoved("approval:g", 1)], None, None, "head", 200, 200),
    ([decided("approval:g")], "approved", "priya", "lead", 100, None),
    ([decided("approval:g", "rejected"), decided("approval:g")], "rejected", "priya", "lead", 100, None),
    ([r.GateExpired("approval:g")], "expired", None, "lead", 100, None),
    ([result("g", "cancelled", is_error=True)], "cancelled", None, "lead", 100, None),
    ([says("x")], "cancelled", None, "lead", 100, None),
])  # fmt: skip
def test_the_row_of_a_gate(
    then: list[r.Entry], outcome: str | None, decided_by: str | None, role: str, deadline: float, next_at: float | None
) -> None:
    (row,) = rows(*[at(9, e) for e in then])
    assert (row.outcome, row.decided_by, row.role) == (outcome, decided_by, role)
    assert (seconds(row.deadline), seconds(row.next_at), seconds(row.closes_at), seconds(row.created_at)) == (deadline, next_at, 200, 1)
    assert seconds(row.decided_at) == (9 if outcome else None)
    assert row.text == "helper wants to send this reply"
    assert row.args == '{"to": "ana"}'


def test_gates_in_pieces_are_those_of_the_whole() -> None:
    story = [r.stored(e) for e in (*HELLO, asks(G), at(1, ROW), at(2, r.RunCancelled()), at(2, says("x")))]
    whole = g.projection(r.Run("run-1"), story)[1]
    for cut in range(len(story)):
        run, first = g.projection(r.Run("run-1"), story[:cut])
        _, second = g.projection(run, story[cut:])
        assert list({x.gate_id: x for x in first + second}.values()) == whole


def test_a_budget_gates_row() -> None:
    opened = r.GateOpened(
        "budget:1", "budget", None, None, "d", args={"limit": "tokens"}, why="limit of 5 tokens reached", rungs=(rung(None, None),)
    )
    (row,) = g.projection(journal(*HELLO), [r.stored(opened)])[1]
    assert (row.text, row.call_id, row.args, row.role) == ("limit of 5 tokens reached", None, '{"limit": "tokens"}', None)
    (row,) = g.projection(journal(*HELLO, opened), [r.stored(at(5, r.RunEnded("failed")))])[1]
    assert (row.outcome, seconds(row.decided_at)) == ("cancelled", 5)
