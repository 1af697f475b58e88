"""Other code than before goes on with a run: the rule of `on_change`, older names of tools, upgraded arguments, forks that ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.core.build import (
    GATED,
    HELLO,
    KEYED,
    LEAD,
    ONCE,
    READ,
    T0,
    asks,
    begun,
    brief,
    called,
    decided,
    hear,
    journal,
    policy,
    result,
    says,
    t,
    use,
)

from outlast.core import codec
from outlast.core import gate as g
from outlast.core import run as r
from outlast.core import step as s
from outlast.core.step import Policy, Settle, ToolPolicy, next_step, settled

OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64
BY_OLD = (r.RunStarted("helper", "1", code=OLD, library="0.1", at=T0), says("hello"))


def code(on_change: Any = "continue", *tools: ToolPolicy, version: str = "2", code: str = NEW) -> Policy:
    return policy(*(tools or (READ, KEYED)), version=version, code=code, library="0.1", on_change=on_change)


def kinds(step: s.Step) -> list[str]:
    return [type(e).__name__ for e in step.entries] if isinstance(step, Settle) else []


# ---- the rule -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "on_change, code_now, version, goes_on",
    [
        ("continue", NEW, "2", True),
        ("warn", NEW, "2", True),
        ("hold", NEW, "2", False),
        ("hold", NEW, "1", False),
        ("hold", OLD, "2", True),  # only its name is another
        ("pinned", NEW, "2", False),
        ("pinned", NEW, "1", True),  # declared to be the same
        ("pinned", OLD, "2", False),
    ],
)
@pytest.mark.parametrize("before", ["a model call", "a call"])
def test_rule(on_change: str, code_now: str, version: str, goes_on: bool, before: str) -> None:
    run = journal(*BY_OLD, *([asks(use("p", "post"))] if before == "a call" else []))
    here = code(on_change, version=version, code=code_now)
    step = next_step(run, here, T0)
    if not goes_on:
        assert brief(step) == f"waiting_for_code [code:{OLD}:1]"
        assert settled(run, here, T0)[1] == []  # nothing is written
        return
    assert kinds(step) == ["VersionChanged"]
    after, entries, step = settled(run, here, T0)
    assert (after.code, after.agent_version, len(entries)) == (code_now, version, 1)
    assert brief(step) == ("calls p#1" if before == "a call" else "model")


def test_undisturbed_code_writes_nothing() -> None:
    for run in (journal(*BY_OLD), journal(*BY_OLD, asks(use("p", "post")))):
        assert settled(run, code("hold", version="1", code=OLD), T0)[1] == []


def test_first_driver_of_a_run_started_by_name_is_recorded() -> None:
    run, entries, step = settled(journal(*HELLO), code("hold"), T0)
    assert [type(e).__name__ for e in entries] == ["VersionChanged"]
    assert (run.code, brief(step)) == (NEW, "model")


def test_another_library_is_recorded_and_holds_nothing() -> None:
    here = replace(code("hold", version="1", code=OLD), library="0.2")
    run, entries, _ = settled(journal(*BY_OLD), here, T0)
    assert (len(entries), run.library) == (1, "0.2")


@pytest.mark.parametrize("on_change", ["hold", "pinned"])
def test_rejection_doubt_and_end_need_no_code(on_change: str) -> None:
    here = code(on_change, GATED, ONCE)
    gate = r.GateOpened("approval:p", "approval", "p", "reply", "sha256:0", rungs=[{"role": "lead", "deadline": None, "remind_at": []}])
    rejected = journal(*BY_OLD, asks(use("p", "reply")), gate, decided("approval:p", "rejected", note="no"))
    assert [type(e).__name__ for e in settled(rejected, here, T0)[1]] == ["CallFinished", "MessageAdded"]
    doubted = journal(*BY_OLD, asks(use("p", "pay")), begun("p"))
    assert brief(settled(doubted, here, t(100))[2]) == "waiting_for_verification"


def test_held_beside_a_gate_waits_for_the_person() -> None:
    run = journal(*BY_OLD, asks(use("a", "reply"), use("b", "post")))
    step = settled(run, code("hold", GATED, KEYED), T0)[2]
    assert brief(step).startswith("waiting_for_approval")


@pytest.mark.parametrize("on_change", ["continue", "warn", "hold", "pinned"])
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("now", [OLD, NEW])
def test_whoever_satisfies_the_need_goes_on(on_change: Any, version: str, now: str) -> None:
    """No worker takes a held run in vain: that would be a loop."""
    run = journal(*BY_OLD)
    step = settled(run, code(on_change, version=version, code=now), T0)[2]
    assert (brief(step) == "model") == s.may_go_on(on_change, OLD, "1", now, version)


# ---- older names ----------------------------------------------------------------------------------------------------------


def takes_body(args: Mapping[str, Any]) -> str | None:
    return None if isinstance(args.get("body"), str) else "body: field required"


def upgrade(args: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"body": args["text"]}


SEND = ToolPolicy("send", "idempotent", gate=LEAD, problem=takes_body, schema_digest="d2")
RENAMED = ToolPolicy("reply", "idempotent", gate=LEAD, tool="send")
UPGRADED = replace(SEND, name="reply", tool="send", upgrade=upgrade)


def approved(text: str = "hi") -> r.Run:
    gate = r.GateOpened(
        "approval:p", "approval", "p", "reply", codec.digest({"text": text}), rungs=[{"role": "lead", "deadline": None, "remind_at": []}]
    )
    return called(use("p", "reply", {"text": text}), then=[gate, decided("approval:p")])


def test_rename_alone_keeps_the_approval() -> None:
    _run, entries, step = settled(approved(), policy(RENAMED, replace(SEND, problem=lambda args: None)), T0)
    assert entries == []
    assert isinstance(step, s.RunCalls) and (step.calls[0].key, step.calls[0].args) == ("run-1:p", {"text": "hi"})


def test_upgrade_that_changes_the_arguments_opens_the_gate_again() -> None:
    run, entries, step = settled(approved(), policy(UPGRADED, SEND), T0)
    assert [type(e).__name__ for e in entries] == ["CallUpgraded", "GateOpened"]
    opened = entries[1]
    assert isinstance(opened, r.GateOpened)
    assert (opened.gate_id, opened.args, opened.digest) == ("approval:p.2", {"body": "hi"}, codec.digest({"body": "hi"}))
    assert brief(step).startswith("waiting_for_approval")
    run = r.fold(run, [r.stored(decided("approval:p.2"))])
    _, entries, step = settled(run, policy(UPGRADED, SEND), T0)
    assert entries == []
    assert isinstance(step, s.RunCalls) and (step.calls[0].key, step.calls[0].name, step.calls[0].args) == (
        "run-1:p",
        "send",
        {"body": "hi"},
    )


def test_edited_arguments_are_what_is_upgraded() -> None:
    run = journal(*HELLO, asks(use("p", "reply", {"text": "hi"})), *[
        r.GateOpened("approval:p", "approval", "p", "reply", "sha256:0", rungs=[{"role": "lead", "deadline": None, "remind_at": []}]),
        decided("approval:p", args={"text": "Dear"})])  # fmt: skip
    after = settled(run, policy(UPGRADED, SEND), T0)[0]
    assert after.calls[0].allowed == {"body": "Dear"}


def test_upgrade_that_keeps_the_arguments_keeps_the_approval() -> None:
    same = replace(UPGRADED, problem=lambda args: None, upgrade=lambda args: args)
    assert brief(settled(approved(), policy(same, SEND), T0)[2]) == "calls p#1"


def test_what_was_asked_once_is_asked_again_even_where_the_new_tool_has_no_gate() -> None:
    open_tool = replace(UPGRADED, gate=None)
    _, entries, step = settled(approved(), policy(open_tool, replace(SEND, gate=None)), T0)
    assert [type(e).__name__ for e in entries] == ["CallUpgraded", "GateOpened"]
    assert brief(step).startswith("waiting_for_approval")


def test_upgrade_that_fails_holds_the_run_and_says_why() -> None:
    def broken(args: Mapping[str, Any]) -> Mapping[str, Any]:
        raise KeyError("body")

    step = settled(approved(), policy(replace(UPGRADED, upgrade=broken), SEND), T0)[2]
    assert isinstance(step, s.Wait) and step.needs == "upgrade:reply" and "KeyError" in step.reason
    step = settled(approved(), policy(replace(UPGRADED, upgrade=lambda args: {}), SEND), T0)[2]
    assert isinstance(step, s.Wait) and step.needs == "upgrade:reply" and "field required" in step.reason


def test_upgraded_call_is_not_run_by_the_older_code_again() -> None:
    run = settled(approved(), policy(UPGRADED, SEND), T0)[0]
    run = r.fold(run, [r.stored(decided("approval:p.2"))])
    assert brief(settled(run, policy(replace(GATED, name="reply")), T0)[2]) == "waiting_for_code [tool:send]"


def test_code_that_holds_does_not_upgrade() -> None:
    gate = r.GateOpened("approval:p", "approval", "p", "reply", "sha256:0", rungs=[{"role": "lead", "deadline": None, "remind_at": []}])
    run = journal(*BY_OLD, asks(use("p", "reply", {"text": "hi"})), gate, decided("approval:p"))
    _, entries, step = settled(run, code("hold", UPGRADED, SEND), T0)
    assert (entries, brief(step)) == ([], f"waiting_for_code [code:{OLD}:1]")


def test_begun_call_whose_arguments_change_is_asked_about_before_it_is_made_again() -> None:
    run = r.fold(approved(), [r.stored(begun("p", "idempotent"))])
    run, entries, _step = settled(run, policy(UPGRADED, SEND), t(100))
    assert [type(e).__name__ for e in entries] == ["CallUpgraded", "GateOpened"]
    said_no = r.fold(run, [r.stored(decided("approval:p.2", "rejected", note="no"))])
    [finished, _] = settled(said_no, policy(UPGRADED, SEND), t(100))[1]
    assert isinstance(finished, r.CallFinished) and finished.how == "unknown" and "outcome is unknown" in finished.content
    said_yes = r.fold(run, [r.stored(decided("approval:p.2"))])
    assert brief(settled(said_yes, policy(UPGRADED, SEND), t(100))[2]) == "calls p#2"


def test_gates_are_the_projection_of_the_journal_after_an_upgrade() -> None:
    run = r.Run("run-1")
    entries = [r.stored(replace(e, at=T0)) for e in [*HELLO, asks(use("p", "reply", {"text": "hi"}))]]
    for code_now in (policy(replace(GATED, name="reply")), policy(UPGRADED, SEND)):
        _after, more, _ = settled(r.fold(r.Run("run-1"), entries), code_now, T0)
        entries += more
        if code_now.tools["reply"].tool == "":
            entries.append(r.stored(replace(decided("approval:p"), at=T0)))
    _, rows = g.projection(run, entries)
    assert {row.gate_id: row.args for row in rows} == {"approval:p": '{"text": "hi"}', "approval:p.2": '{"body": "hi"}'}


def test_fresh_call_by_an_older_name_takes_either_form_and_a_made_up_name_neither() -> None:
    here = policy(UPGRADED, SEND)
    for args in ({"text": "hi"}, {"body": "hi"}):
        run, entries, step = hear(journal(*HELLO), [use("p", "reply", args)], here)
        assert run.calls[0].asked == {"body": "hi"}
        assert brief(step).startswith("waiting_for_approval")
    run, entries, step = hear(journal(*HELLO), [use("p", "repply", {"body": "hi"})], here)
    assert any("Known tools: send." in str(getattr(e, "content", "")) for e in entries)
    run, entries, _ = hear(journal(*HELLO), [use("p", "reply", {"nothing": 1})], here)
    assert [e.how for e in entries if isinstance(e, r.CallFinished)] == ["refused"]


def test_name_only_in_history_is_left_alone() -> None:
    run = journal(*BY_OLD, asks(use("p", "long_gone")), result("p"), says("x"))
    assert brief(settled(run, code("continue", READ), T0)[2]) == "model"


# ---- forks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool, asked", [(READ, False), (KEYED, True), (ONCE, True), (GATED, True)])
def test_fork_asks_before_every_new_effect(tool: ToolPolicy, asked: bool) -> None:
    run = journal(r.RunStarted("helper", asks=True, at=T0), says("hello"), asks(use("p", tool.name)))
    waived = replace(tool, gate=replace(tool.gate, conditional=True) if tool.gate else None, when=lambda args: False)
    for one in (tool, waived):
        step = settled(run, policy(one), T0)[2]
        assert brief(step).startswith("waiting_for_approval") == asked


def test_history_that_was_given_costs_nothing() -> None:
    run = journal(*HELLO, asks(use("p", "look"), usage={"input_tokens": 5, "output_tokens": 7}, imported=True))
    assert (run.model_calls, run.input_tokens, run.output_tokens) == (0, 0, 0)


# ---- the format -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["RunStarted", "VersionChanged"])
def test_newer_format_is_refused_with_both_versions(kind: str) -> None:
    entry = r.RunStarted("helper", format=r.FORMAT + 1) if kind == "RunStarted" else r.VersionChanged("2", NEW, format=r.FORMAT + 1)
    with pytest.raises(r.NewerFormat, match=f"format {r.FORMAT + 1}.*up to {r.FORMAT}"):
        r.from_row(*r.to_row(entry))
