"""Entries and their fold: what a row holds, what a broken row does, and properties of runs that were played at random.

A play is a run as the world treats it: a model that answers anything, people, late results and crashes between any two appends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.build import HELLO, answer, asks, begun, called, decided, gate, journal, needs_n, result, rung, s, says, t, use

from outlast.core import codec
from outlast.core import gate as g
from outlast.core import messages as m
from outlast.core import run as r
from outlast.core.gate import GatePolicy
from outlast.core.step import (
    CallModel,
    Finish,
    LimitPolicy,
    Policy,
    RunCall,
    RunCalls,
    ToolPolicy,
    Wait,
    closing,
    heard,
    next_step,
    settled,
)

# ---- entries ----------------------------------------------------------------------------------------------------------------

SAMPLES: list[r.Entry] = [
    r.RunStarted("helper", "v1", {"tier": "gold"}, parent_run_id="p", parent_call_id="c", by="ben"),
    answer("hi", use("a", "look", {"z": 1, "a": 1.0, "big": 10**20})),
    begun("a"),
    r.CallSkipped("a", "too late"),
    r.CallFailed("a", "503", t(9)),
    r.CallDoubted("a", "timeout", t(9), checked=True),
    result("a", [{"type": "text", "text": "x"}], is_error=True, how="refused"),
    gate("a", "approval", rung(100, "lead", 40), closes=100, args={}, why="w", guarded=True),
    r.GateWaived("a"),
    r.GateMoved("approval:a", 1, t(40)),
    r.GateExpired("approval:a"),
    r.RunEnded("failed", "why"),
    r.ModelFailed("529", 2, t(9), 529),
    r.ModelCallLost(10, 20),
    r.WorkerDied(["a"], t(5)),
    r.VersionChanged("v2", "sha", "0.1"),
    r.CallUpgraded("p", "post", {"n": 1}),
    r.TextSent([m.text("hurry")], by="ben", entry_id="e1"),
    r.GateDecided("approval:a", "approved", note="ok", args={"n": 1}, digest="d", result=None, has_result=True, by="priya"),
    r.DecisionRefused("approval:a", "late"),
    r.EventReceived("paid", {"eur": 5}, entry_id="e2"),
    r.ChildFinished("a", "done", "4", None, 1, 2, "0.1"),
    r.RetryAsked(by="ben"),
    r.RunCancelled("enough"),
    r.RunMoved("temporal"),
    r.LateResult("a", "paid", why="fenced"),
]


def test_there_is_a_sample_of_every_kind() -> None:
    assert {type(e).__name__ for e in SAMPLES} == set(r.KINDS)


@pytest.mark.parametrize("entry", SAMPLES, ids=lambda e: type(e).__name__)
def test_an_entry_is_what_its_row_says(entry: r.Entry) -> None:
    kept = r.stored(entry)
    assert r.to_row(kept) == r.to_row(entry)
    assert r.stored(kept) == kept
    assert (kept.by, kept.entry_id) == (entry.by, entry.entry_id)


def test_a_message_is_kept_to_the_letter() -> None:
    assert r.to_row(SAMPLES[1])[1] == codec.encode(SAMPLES[1].message)  # type: ignore[attr-defined]  # a MessageAdded
    assert '"z": 1, "a": 1.0, "big": 100000000000000000000' in r.to_row(SAMPLES[1])[1]


def test_the_format_is_always_written() -> None:
    assert '"format": 1' in r.to_row(r.RunStarted("helper"))[1]


BROKEN = [
    ("RunStrated", "{}"),
    ("RunEnded", "{}"),
    ("RunEnded", "[]"),
    ("RunEnded", '{"status": 5}'),
    ("RunEnded", "not json"),
    ("RunEnded", '{"status": ' + "[" * 10_000 + "]" * 10_000 + "}"),
    ("MessageAdded", '{"role": "tool", "content": "x"}'),
    ("MessageAdded", '{"role": "user"}'),
    ("MessageAdded", '{"role": "assistant", "content": [{"type": "tool_use", "name": "look", "input": {}}]}'),
    ("MessageAdded", '{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": "{}"}]}'),
    ("CallFailed", '{"call_id": "a", "why": "x", "retry_at": "soon"}'),
    ("CallFailed", '{"call_id": "a", "why": "x", "retry_at": 7}'),
    ("CallFailed", '{"call_id": "a", "why": "x", "retry_at": "2026-11-30T07:00:00"}'),
    ("WorkerDied", '{"call_ids": [7], "may_act_until": "2026-11-30T07:00:00Z"}'),
    ("GateOpened", '{"gate_id": "g", "kind": "approval", "call_id": "a", "tool": "look", "digest": "d", "rungs": 5}'),
    ("GateOpened", '{"gate_id": "g", "kind": "approval", "call_id": "a", "tool": "look", "digest": "d", "rungs": [{"deadline": "soon"}]}'),
    ("GateOpened", '{"gate_id": "g", "kind": "approval", "call_id": "a", "tool": "look", "digest": "d", "rungs": [{"remind_at": 7}]}'),
    ("GateOpened", '{"gate_id": "g", "kind": "approval", "call_id": "a", "tool": "look", "digest": "d", "rungs": [[]]}'),
    ("GateDecided", '{"gate_id": "g", "outcome": null}'),
    ("GateMoved", '{"gate_id": "g", "level": true}'),
    ("CallFinished", '{"call_id": "a", "is_error": 1}'),
    ("TextSent", '{"content": 7}'),
    ("TextSent", '{"content": ["x"]}'),
]


@pytest.mark.parametrize("kind, body", BROKEN)
def test_a_broken_row_is_named_where_it_is_read(kind: str, body: str) -> None:
    with pytest.raises(codec.Unstorable):
        r.from_row(kind, body, None)


def test_meta_that_is_no_object() -> None:
    with pytest.raises(codec.Unstorable):
        r.from_row("RetryAsked", "{}", "[]")


def test_fields_of_newer_versions_are_passed_over() -> None:
    assert r.from_row("RunEnded", '{"status": "done", "mood": "good"}', None) == r.RunEnded("done")


# ---- the fold ---------------------------------------------------------------------------------------------------------------


def test_two_futures_of_one_past_do_not_meet() -> None:
    past = journal(*HELLO)
    one, two = r.apply(past, asks(use("a", "look"))), r.apply(past, asks(use("b", "look")))
    assert (past.messages.call_ids, one.messages.call_ids, two.messages.call_ids) == (set(), {"a"}, {"b"})
    assert [len(x.messages) for x in (past, one, two)] == [1, 2, 2]
    assert one.messages[-1] != two.messages[-1] and one.messages != two.messages


def test_the_same_future_is_not_copied() -> None:
    past, entry = journal(*HELLO), says("x")
    one, two = r.apply(past, entry), r.apply(past, entry)
    assert one.messages._items is two.messages._items


def test_history_is_a_sequence() -> None:
    history = journal(*HELLO, answer("hi")).messages
    assert len(history) == 2 and history[0] == history[-2] and history[1:] == [history[-1]] and list(history) == history[:]
    with pytest.raises(IndexError):
        history[2]


def test_counts_come_from_usage() -> None:
    run = journal(
        *HELLO, answer("hi", usage={"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 5, "cache_creation_input_tokens": -6})
    )
    assert (run.model_calls, run.input_tokens, run.output_tokens, run.cache_read_tokens, run.cache_write_tokens) == (1, 3, 4, 5, 0)


# ---- plays ------------------------------------------------------------------------------------------------------------------

CODE = Policy(
    tools={
        x.name: x
        for x in (
            ToolPolicy("look", "read", problem=needs_n, schema_digest="d"),
            ToolPolicy("post", "idempotent", key_ttl=s(100)),
            ToolPolicy("pay", has_check=True),
            ToolPolicy("reply", gate=GatePolicy("lead", "reply", s(60), GatePolicy("head", "reply", s(60)), remind_every=s(25))),
        )
    },
    limits=LimitPolicy(model_calls=6, wall=s(900)),
    output_problem=lambda message: "say ok" if m.said(message) == "bad" else None,
)
OTHER = Policy(
    tools={"pay": ToolPolicy("pay", "read"), "look": ToolPolicy("look")}, limits=LimitPolicy(wall=s(300), then="fail"), parallel_calls=1
)

names = st.sampled_from(["look", "post", "pay", "reply", "gone"])
uses = st.builds(use, st.sampled_from(["a", "b", ""]), names, st.sampled_from([{}, {"n": 1}, "{", None]))
answers = st.fixed_dictionaries(
    {
        "content": st.lists(uses | st.sampled_from([m.text("ok"), m.text("bad"), m.text("")]), max_size=3),
        "stop_reason": st.sampled_from(["tool_use"] * 6 + ["end_turn", "max_tokens", "pause_turn", "refusal", None, "odd"]),
    },
    optional={"usage": st.sampled_from([{"input_tokens": 5}, [1], None])},
)


class Play:
    """One run, its journal as rows, and a worker that keeps its fold in memory until it crashes."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.rows: list[tuple[str, str, str | None, Any, Any]] = []
        self.now = t(0)
        self.run = r.Run("run-1")
        self.before = self.run
        self.gates: dict[str, g.GateRow] = {}
        self.append([replace(e, at=self.now) for e in HELLO])

    def any(self, strategy: Any) -> Any:
        return self.draw(strategy)

    def append(self, entries: list[r.Entry]) -> None:
        """As a store: rows; and the gates that they touched, projected from this piece alone."""
        kept = [r.stored(replace(e, at=self.now)) for e in entries]
        self.rows += [(*r.to_row(e), e.by, e.at) for e in kept]
        run, touched = g.projection(self.before, kept)
        self.gates.update((x.gate_id, x) for x in touched)
        self.run = self.before = run

    def entries(self) -> Iterator[r.Entry]:
        for kind, body, meta, by, at in self.rows:
            yield r.from_row(kind, body, meta, by=by, at=at)

    def act(self, entries: list[r.Entry]) -> None:
        """Facts, and what follows from them, in one append."""
        facts = [r.stored(replace(e, at=self.now)) for e in entries]
        _, rest, _ = settled(r.fold(self.run, facts), CODE, self.now)
        self.append([*facts, *rest])

    def move(self) -> None:
        match self.any(st.sampled_from(["work", "work", "work", "work", "outside", "clock", "crash"])):
            case "work":
                self.work()
            case "outside":
                self.outside()
            case "clock":
                self.now += s(self.any(st.sampled_from([1, 24, 60, 200])))
            case "crash":
                self.run = r.fold(r.Run("run-1"), self.entries())

    def work(self) -> None:
        self.act([])
        match next_step(self.run, CODE, self.now):
            case CallModel():
                assert not self.run.calls
                m.check_history(list(self.run.messages))
                try:
                    facts = heard(self.run, self.any(answers), CODE)
                except m.BadMessage:
                    facts = [r.ModelFailed("no message", self.run.model_failures + 1, self.now + s(9))]
                self.act(facts)
            case RunCalls(calls):
                assert calls
                self.call(self.any(st.sampled_from(calls)))
            case Wait() as wait:
                assert wait.until is None or wait.until > self.now
                if wait.until and self.any(st.booleans()):
                    self.now = wait.until
            case Finish():
                assert not self.run.calls

    def call(self, call: RunCall) -> None:
        if call.intent and not call.check:
            self.act([r.CallStarted(call.call_id, call.key, call.effect, call.attempt, self.now + s(40), "me")])
        match self.any(st.sampled_from(["done", "done", "failed", "doubt", "skipped", "crash"])):
            case "done":
                self.act([r.CallFinished(call.call_id, "ok")])
            case "failed" if call.effect != "at_most_once":
                self.act([r.CallFailed(call.call_id, "503", self.now + s(20))])
            case "skipped" if call.intent and not call.check:
                self.act([r.CallSkipped(call.call_id, "too late")])
            case "doubt":
                self.act([r.CallDoubted(call.call_id, "timeout", checked=call.check)])
            case _:
                self.run = r.fold(r.Run("run-1"), self.entries())

    def outside(self) -> None:
        """What people and other runs may append, where a store would take it."""
        opened = [x for x in self.run.all_gates() if x.outcome is None]
        choices: list[r.Entry] = [r.TextSent("hurry", by="ben"), r.EventReceived("paid", 5), r.LateResult("a", "late")]
        if self.run.ended:
            choices += [r.RetryAsked()] * (self.run.ended.status != "done")
        else:
            choices += [r.RunCancelled("enough"), r.DecisionRefused("x", "late"), r.ChildFinished("a", "done")]
            for x in opened:
                outcomes = ["happened", "run_again", "give_up"] if x.opened.kind == "verification" else ["approved", "rejected"]
                choices += [r.GateDecided(x.opened.gate_id, outcome, by="priya") for outcome in outcomes] * 3
        entry = self.any(st.sampled_from(choices))
        entries = [entry]
        if isinstance(entry, r.RunCancelled):
            entries += closing(self.run, "cancelled")
        self.append(entries)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_played_run(data: st.DataObject) -> None:
    play = Play(data.draw)
    for _ in range(data.draw(st.integers(1, 30))):
        play.move()
        history = list(play.run.messages)
        m.check_history(history)
    folded = r.fold(r.Run("run-1"), play.entries())
    assert folded == play.run  # the fold of the journal is the state in memory
    whole, gates = g.projection(r.Run("run-1"), play.entries())
    assert whole == folded
    assert {x.gate_id: x for x in gates} == play.gates  # gates projected in pieces are those of the whole journal
    ids = [c["id"] for x in play.run.messages for c in m.tool_uses(x)]
    assert len(ids) == len(set(ids))
    for code in (CODE, OTHER, Policy()):  # whatever code meets this journal
        for seconds in (0, 60, 10_000):
            run, _, step = settled(play.run, code, play.now + s(seconds))
            assert isinstance(step, CallModel | RunCalls | Wait | Finish)
            if isinstance(step, CallModel):
                m.check_history(list(run.messages))
            if isinstance(step, Wait):
                assert step.until is None or step.until > play.now + s(seconds)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_wait_is_never_late(data: st.DataObject) -> None:
    """Until the instant that it names, or for ever, a wait stays the same wait."""
    play = Play(data.draw)
    for _ in range(data.draw(st.integers(1, 20))):
        play.move()
    play.act([])
    for code in (CODE, OTHER):
        run, _, step = settled(play.run, code, play.now)
        if isinstance(step, Wait):
            for later in (1, 30, 100, 1000, 100_000):
                then = play.now + s(later)
                if step.until is None or then < step.until:
                    assert next_step(run, code, then) == step
            if step.until:
                assert next_step(run, code, step.until) != step


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([*SAMPLES, *HELLO, asks(use("a", "look"), use("b", "pay")), says("x"), decided("verification:a", "run_again")]),
        max_size=14,
    )
)
def test_any_entry_in_any_state_is_applied_and_answered(entries: list[r.Entry]) -> None:
    kept = [r.stored(replace(e, at=t(n))) for n, e in enumerate(entries)]
    run = r.fold(r.Run("run-1"), kept)
    assert run.entries == len(kept)
    assert g.projection(r.Run("run-1"), kept)[0] == run
    for code in (CODE, OTHER):
        next_step(run, code, t(50), ["a"])
        settled(run, code, t(50))


def test_every_field_of_a_run_is_compared() -> None:
    assert all(f.compare for f in dataclasses.fields(r.Run))
    assert called(use("a", "look")) != called(use("b", "look"))
