"""The crash test itself: green where it must be, red where it must be, and in which words."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from tests.support.world import EFFECTS, GATE, Ledger, asks, tools, use

from outlast import Agent, Limits, Outcome, Outlast, Tool, ToolContext, ToolResult, Wait, approval, tool
from outlast.errors import ToolFailed, UsageError
from outlast.models import ScriptedModel
from outlast.testing import CrashMatrix, CrashReport
from outlast.testing.crashmatrix import matrix
from outlast.testing.crashmatrix.judge import changing, masked
from outlast.testing.crashmatrix.life import Case, Setup

LONG = os.environ.get("OUTLAST_TESTS") == "long"  # every point of every matrix; else a few, and one whole matrix a day
TODAY = datetime.now(UTC).toordinal()


def deps(folder: Path) -> Ledger:
    return Ledger(folder / "ledger")


def effects(folder: Path) -> list[dict[str, Any]]:
    return [line for line in deps(folder).lines() if line["what"] != "look"]


@pytest.fixture
def killed_at(tmp_path: Path) -> Any:
    """The crash test of a few points only."""

    def run(*points: str) -> Any:
        return partial(matrix.crash_matrix, at=points, folder=Path(mkdtemp(dir=tmp_path)))

    return run


def agent_of(*tools_: Tool[..., Any]) -> Agent[str]:
    return Agent("tested", model="anthropic:no-model-is-asked", tools=list(tools_))


def script(*names: str) -> ScriptedModel:
    return ScriptedModel([*(asks(use(name, f"toolu_{n:02}", text=name)) for n, name in enumerate(names, 1)), "Done."])


@pytest.mark.parametrize("effect", EFFECTS)
def test_declared_truly_is_green(crash_matrix: CrashMatrix, killed_at: Any, effect: str) -> None:
    whole = LONG or effect == list(EFFECTS)[TODAY % len(EFFECTS)]
    matrix_ = crash_matrix if whole else killed_at(f"tool.before:{effect}", f"tool.after:{effect}", "commit.after#3", "claim.after")
    report = matrix_(agent_of(tools(GATE)[effect]), "go", model=script(effect), deps=deps, observe=effects)
    report.assert_ok()
    assert report.cases >= (20 if whole else 4)
    assert all(result.reached for result in report.results)


def test_a_batch_and_a_rejection_are_green(crash_matrix: CrashMatrix, killed_at: Any) -> None:
    in_batch = crash_matrix if LONG else killed_at("tool.before:act", "tool.after:deliver", "commit.before#5")
    rejected = crash_matrix if LONG else killed_at("model.after", "commit.after#4")
    batch = ScriptedModel([asks(*(use(name, f"toolu_{n:02}", text=name) for n, name in enumerate(EFFECTS))), "Done."])
    in_any_order = partial(sorted, key=str)  # a call in doubt waits for its check or a person, those after it do not
    in_batch(agent_of(*tools().values()), "go", model=batch, deps=deps, observe=lambda d: in_any_order(effects(d))).assert_ok()
    report = rejected(agent_of(tools(GATE)["act"]), "go", model=script("act"), deps=deps, observe=effects, approve=False)
    report.assert_ok()


def test_pairs(killed_at: Any) -> None:
    report = killed_at("model.after", "commit.before#3")(agent_of(), "go", model=ScriptedModel(["Done."]), pairs=True)
    report.assert_ok()
    firsts = [result.points[0] for result in report.results if len(result.points) == 1]
    pairs = [result.points for result in report.results if len(result.points) == 2]
    assert firsts == ["commit.before#3", "model.after"]
    assert {first for first, _ in pairs} == set(firsts)
    assert {("model.after", "model.after"), ("model.after", "release.after"), ("model.after", "claim.after")} <= set(pairs)


def test_two_deaths_in_one_case(tmp_path: Path) -> None:
    """The second strikes on the way out of the doubt that the first has left."""
    setup = Setup(agent_of(tools()["act_checked"]), "go", script("act_checked"), deps, effects)
    case = Case(setup, tmp_path / "case")
    assert case.killed_at("tool.after:act_checked")
    assert case.killed_at("check.after:act_checked")
    ended = case.finish()
    assert ended.status == "done"
    assert [line["what"] for line in effects(case.world)] == ["act_checked"]


def test_a_key_that_is_not_sent_is_red(crash_matrix: CrashMatrix, killed_at: Any) -> None:
    @tool(effect="idempotent")
    def send(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.write("send")
        return "sent"

    seen = crash_matrix(agent_of(send), "go", model=script("send"), deps=deps, observe=effects)
    at = [result for result in seen.results if result.points == ("tool.after:send",)]
    assert len(at) == 1
    [finding] = at[0].findings
    assert finding.startswith("send (toolu_01): killed at tool.after:send: sent 2 times; ")
    assert "crash-test:toolu_01" in finding
    assert 'effect="at_most_once"' in finding
    assert finding.count("'what': 'send'") == 2, "both lines are shown"
    assert all("tool.after:send" in f for f in seen.findings), "only what comes after the effect and before its result is saved"
    unseen = killed_at("tool.after:send")(agent_of(send), "go", model=script("send"), deps=deps)
    assert any(f.startswith("send (toolu_01): killed at tool.after:send: sent 2 times; ") for f in unseen.findings)
    with pytest.raises(AssertionError, match="sent 2 times"):
        seen.assert_ok()


@pytest.mark.parametrize("observed", [True, False])
def test_a_key_made_anew_is_red_and_both_keys_are_named(killed_at: Any, observed: bool) -> None:
    @tool(effect="idempotent")
    async def send(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.deliver("send", str(uuid.uuid4()))
        return "sent"

    folders: list[Path] = []

    def observe(folder: Path) -> list[dict[str, Any]]:
        folders.append(folder)
        return effects(folder)

    model = script("send")
    report = killed_at("tool.after:send")(agent_of(send), "go", model=model, deps=deps, observe=observe) if observed else killed_at("tool.after:send")(
        agent_of(send), "go", model=model, deps=deps)  # fmt: skip
    [finding] = [f for f in report.findings if "killed at tool.after:send: sent 2 times, each time with another key: " in f]
    assert "send ctx.idempotency_key (crash-test:toolu_01 on every attempt)" in finding
    if observed:
        keys = [sorted(line["key"] for line in effects(folder)) for folder in folders]
        assert any(len(pair) == 2 and all(key in finding for key in pair) for pair in keys)
        assert any("observe must see the same after every run" in f for f in report.findings)


def test_a_key_that_is_ignored_is_red(killed_at: Any) -> None:
    @tool(effect="idempotent")
    def send(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.write("send", ctx.idempotency_key)
        return "sent"

    report = killed_at("tool.after:send")(agent_of(send), "go", model=script("send"), deps=deps, observe=effects)
    assert any("acts again on the same key (crash-test:toolu_01)" in f for f in report.findings)


def test_a_read_that_writes_is_red(killed_at: Any) -> None:
    @tool(effect="read")
    def peek(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.write("peek")
        return "seen"

    report = killed_at("tool.after:peek")(agent_of(peek), "go", model=script("peek"), deps=deps, observe=effects)
    assert any('it is declared effect="read" and changes the world' in f for f in report.findings)


def test_a_check_that_lies_is_red(killed_at: Any) -> None:
    @tool(check=lambda ctx, text: Outcome.happened("done"))
    def act(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.write("act", ctx.idempotency_key)
        return "done"

    report = killed_at("tool.before:act")(agent_of(act), "go", model=script("act"), deps=deps, observe=effects)
    assert any("killed at tool.before:act: acted 0 times, undisturbed 1: lost" in f for f in report.findings)


def test_a_harmless_repetition_is_green_where_observe_shows_it(killed_at: Any) -> None:
    @tool(effect="idempotent")
    def put(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.path.write_text(text)
        return "there"

    killed_at("tool.after:put")(agent_of(put), "go", model=script("put"), deps=deps, observe=lambda d: deps(d).path.read_text()).assert_ok()


def test_a_sub_agent_and_a_wait_are_green(crash_matrix: CrashMatrix, killed_at: Any) -> None:
    part = Agent("part", model=script("deliver"), tools=[tools()["deliver"]])

    @tool(effect="idempotent")
    def later(ctx: ToolContext[Ledger], text: str) -> Wait:
        ctx.deps.deliver("later", ctx.idempotency_key)
        return Wait(within=timedelta(hours=3))

    model = ScriptedModel([asks(use("part", task="do your part")), asks(use("later", "toolu_02", text="x")), "Done."])
    made = agent_of(part.as_tool(description="Does a part."), later)
    matrix_ = crash_matrix if LONG else killed_at("tool.after:later", "model.after#2", "commit.after#6", "tool.after:deliver")
    matrix_(made, "go", model=model, deps=deps, observe=effects).assert_ok()


def test_a_time_of_day_in_a_result_is_left_out_and_said(killed_at: Any) -> None:
    @tool(effect="read")
    def now(text: str) -> dict[str, Any]:
        """Tell the time."""
        return {"time": datetime.now(UTC).isoformat()}

    report = killed_at("tool.after:now")(agent_of(now), "go", model=script("now"))
    with pytest.warns(UserWarning, match="was not compared"):
        report.assert_ok()
    assert any("changes from run to run and was not compared" in note for note in report.notes)


def test_only_the_result_that_changes_is_left_out(killed_at: Any) -> None:
    """A clock beside it must not hide that another tool's result tells of a second time."""

    @tool(effect="read")
    def now(text: str) -> str:
        return datetime.now(UTC).isoformat()

    @tool(effect="idempotent")
    def charge(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.write("charge", ctx.idempotency_key)
        return f"charged {len(ctx.deps.lines())} times"

    report = killed_at("tool.after:charge")(agent_of(now, charge), "go", model=script("now", "charge"), deps=deps)
    assert report.notes == ["the result of now (toolu_01) changes from run to run and was not compared"]
    assert any("message 5 of crash-test is" in f and "charged 2 times" in f for f in report.findings)
    with pytest.raises(AssertionError, match="- the result of now"):
        report.assert_ok()


def test_a_tool_that_only_breaks_is_not_tested_and_red(killed_at: Any) -> None:
    @tool(effect="idempotent")
    def send(ctx: ToolContext[Any], text: str) -> str:
        ctx.deps.write(str(uuid.uuid4()))
        return "sent"

    report = killed_at("tool.after:send")(agent_of(send), "go", model=script("send"))
    [finding] = report.findings
    assert finding.startswith("send (toolu_01) never came back in the undisturbed run (AttributeError: 'NoneType'") and "deps=" in finding
    assert report.notes[0].endswith(", 3 times")


@pytest.mark.parametrize("effect", ["idempotent", "at_most_once"])
def test_a_tool_that_says_that_it_did_nothing_is_green(killed_at: Any, effect: str) -> None:
    @tool(effect=effect)  # type: ignore[call-overload]  # both in turn
    def refund(text: str) -> str:
        raise ToolFailed(f"there is no order {text}")

    report = killed_at("tool.before:refund", "tool.after:refund", "commit.before#6")(agent_of(refund), "go", model=script("refund"))
    report.assert_ok()


@pytest.mark.parametrize(
    "turns, why",
    [
        (["Done.", [use("send", "toolu_01", text="x")]], "asked for 1 of the script's 2 turns: calls in the others are never made"),
        ([[{"type": "tool_use", "name": "send", "input": {}}], "Done."], "turn 1 of the script: a tool_use block needs an id"),
        ([[{"type": "tool_use", "id": "x", "name": "send", "input": "x"}], "Done."], "an input that is an object"),
        (["Hm.", [{"type": "text", "text": 5}]], "turn 2 of the script: this is no content block"),
        ([[{"text": "x"}]], "this is no content block"),
        ([5], "turn 1 of the script is int"),
    ],
)
def test_a_script_that_would_test_something_else_is_refused(killed_at: Any, turns: list[Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        killed_at("model.before")(agent_of(tools()["look"]), "go", model=ScriptedModel(turns), deps=deps)


def test_a_tool_that_is_called_something_else_by_now_is_red_and_what_did_not_run_is_said(killed_at: Any) -> None:
    renamed = killed_at("model.before")(agent_of(tools()["look"]), "go", model=script("look", "peek"), deps=deps)
    assert [f.partition(":")[0] for f in renamed.findings] == ["the model called peek (toolu_02), and there is no such tool"]
    wrong = ScriptedModel([asks(use("look", "toolu_01", wrong=1)), "Done.", "More."])
    some = killed_at("model.before")(agent_of(tools()["look"]), "go", model=wrong, deps=deps)
    assert some.ok
    assert some.notes[0].startswith("look (toolu_01) was called and did not run: ")
    assert some.notes[1:] == ["the run asked for 2 of the script's 3 turns"]


def test_what_the_model_was_told_says_whether_there_is_such_a_tool(killed_at: Any) -> None:
    """Not the names that somebody knows: a server's tool exists, and a sub-agent's is none of its parent's."""
    look: Any = Server(tools()["look"])
    served = Agent("tested", model="anthropic:no-model-is-asked", tools=[look])
    wrong = ScriptedModel([asks(use("look", "toolu_01", wrong=1)), "Done."])
    fine = killed_at("model.before")(served, "go", model=wrong, deps=deps)
    assert fine.ok
    assert fine.notes[0].startswith("look (toolu_01) was called and did not run: ")

    part = Agent("part", model=script("deliver"), tools=[tools()["deliver"]])
    made = agent_of(part.as_tool(description="Does a part."))
    model = ScriptedModel([asks(use("part", task="do your part")), asks(use("deliver", "toolu_02", text="x")), "Done."])
    none = killed_at("model.before")(made, "go", model=model, deps=deps)
    assert [f.partition(":")[0] for f in none.findings] == ["the model called deliver (toolu_02), and there is no such tool"]


class Server:
    """Brings tools once it is connected."""

    def __init__(self, *brings: Tool[..., Any]) -> None:
        self.brings = brings

    async def connect_tools(self, stack: AsyncExitStack) -> Sequence[Tool[..., Any]]:
        return self.brings


@pytest.mark.parametrize("effect", EFFECTS)
def test_the_tools_of_a_server_are_watched_too(killed_at: Any, effect: str) -> None:
    server: Any = Server(tools()[effect])
    agent = Agent("tested", model="anthropic:no-model-is-asked", tools=[server])
    report = killed_at(f"tool.before:{effect}", f"tool.after:{effect}")(agent, "go", model=script(effect), deps=deps, observe=effects)
    assert (report.findings, report.notes, report.cases) == ([], [], 2)


@pytest.mark.parametrize(
    "answer",
    [
        Wait(within=timedelta(hours=3), otherwise="nobody came"),
        Wait(within=timedelta(hours=3)),
        None,
        ToolResult("there is no such parcel", is_error=True),
        ToolResult("on its way"),
        ToolResult([{"type": "text", "text": "on its way"}]),
        {"parcel": 7},
    ],
    ids=["wait", "wait for nothing", "none", "error", "text", "blocks", "value"],
)
def test_what_a_person_confirms_is_green_whatever_the_tool_answers(killed_at: Any, answer: Any) -> None:
    """A person who says that it happened cannot hand in None, an error or content blocks."""

    @tool(effect="at_most_once")
    def order(ctx: ToolContext[Ledger], text: str) -> Any:
        ctx.deps.write("order", ctx.idempotency_key)
        return answer

    killed_at("tool.after:order")(agent_of(order), "go", model=script("order"), deps=deps, observe=effects).assert_ok()


def test_a_result_that_a_person_handed_in_and_that_comes_out_otherwise_is_red(killed_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = Outlast.verify

    def garbles(app: Outlast, *args: Any, **more: Any) -> Any:
        return verify(app, *args, **{**more, "result": "garbled"})

    monkeypatch.setattr(Outlast, "verify", garbles)
    report = killed_at("tool.after:act")(agent_of(tools()["act"]), "go", model=script("act"), deps=deps, observe=effects)
    assert any("'garbled'" in finding and "undisturbed" in finding for finding in report.findings)


def test_a_model_call_that_was_lost_may_need_more_budget(killed_at: Any) -> None:
    agent = agent_of(tools()["look"]).replace(limits=Limits(model_calls=2, to="lead"))
    points = ("model.before", "model.after", "tool.after:look", "model.after#2")
    killed_at(*points)(agent, "go", model=script("look"), deps=deps).assert_ok()
    killed_at(*points)(agent, "go", model=script("look"), deps=deps, approve=False).assert_ok()
    killed_at(*points)(agent, "go", model=script("look", "look", "look"), deps=deps).assert_ok()


def test_a_check_that_did_not_see_what_happened_is_named(killed_at: Any) -> None:
    @tool(check=lambda ctx, text: Outcome.not_happened())
    def pay(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.write("pay", ctx.idempotency_key)
        return "paid"

    report = killed_at("tool.after:pay")(agent_of(pay), "go", model=script("pay"), deps=deps, observe=effects)
    assert any("sent 2 times; its check= said of an attempt that had come back that it did not happen" in f for f in report.findings)
    assert not any("please report" in f for f in report.findings)


def test_what_deps_and_observe_do_wrong_is_said(killed_at: Any) -> None:
    def down(folder: Path) -> Any:
        raise ConnectionError("db is down")

    def leaves(folder: Path) -> Any:
        raise SystemExit(4)

    async def waits(folder: Path) -> Any:
        return None

    def ends(ctx: ToolContext[Any]) -> str:
        os._exit(3)

    def look(**more: Any) -> None:
        killed_at("model.before")(agent_of(tools()["look"]), "go", model=script("look"), **more)

    with pytest.raises(UsageError, match=r"a process broke \(1\): deps raised ConnectionError: db is down"):
        look(deps=down)
    with pytest.raises(UsageError, match="observe raised SystemExit"):
        look(deps=deps, observe=leaves)
    for name in ("deps", "observe"):
        with pytest.raises(UsageError, match=f"{name} must be a plain function"):
            look(**{name: waits})
        with pytest.raises(UsageError, match=f"{name} must be a function of one argument"):
            look(**{name: "no function"})
    with pytest.raises(UsageError, match=r"a process broke \(3\) in leave"):
        killed_at("model.before")(
            agent_of(tool(effect="read", name="leave")(ends)), "go", model=ScriptedModel([asks(use("leave", "t")), "Done."])
        )


def test_the_control_must_go_red(killed_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "differences", lambda calm, found, deaths: [])
    report = killed_at("tool.after:look")(agent_of(tools()["look"]), "go", model=script("look"), deps=deps)
    assert report.findings == [
        "this run proves nothing: the control, a deliberately unsafe tool, did not go red: what it did twice was not noticed"
    ]


def test_what_cannot_be_tested_is_refused(crash_matrix: CrashMatrix) -> None:
    look = agent_of(tools()["look"])
    with pytest.raises(UsageError, match="fails when nobody disturbs it: the script has 1 turns"):
        crash_matrix(look, "go", model=ScriptedModel([asks(use("look", text="a"))]), deps=deps)
    with pytest.raises(UsageError, match="observe raised FileNotFoundError"):
        crash_matrix(look, "go", model=script("look"), deps=deps, observe=lambda d: (d / "nothing").read_text())
    with pytest.raises(UsageError, match="plays a ScriptedModel"):
        crash_matrix(look, "go", model="anthropic:x")  # type: ignore[arg-type]  # what a careless caller gives
    asks_for_real = Agent("part", model="anthropic:x", tools=[]).as_tool(description="x")
    with pytest.raises(UsageError, match=r"breaks when nobody disturbs it: .*sub-agent part would ask anthropic:x"):
        crash_matrix(agent_of(asks_for_real), "go", model=script("part"))


def test_a_point_that_is_never_passed_is_refused(killed_at: Any) -> None:
    """A misspelt point would be green: no case, so no finding."""
    look = agent_of(tools()["look"])
    with pytest.raises(UsageError, match=r"never passes tool\.after:lok nor commit\.after#99") as refused:
        killed_at("model.before", "tool.after:lok", "commit.after#99")(look, "go", model=script("look"), deps=deps)
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("it passes ")
    assert {"model.before", "tool.after:look"} <= set(refused.value.hint.removeprefix("it passes ").split(", "))


def test_only_cases_that_were_killed_count(killed_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    really = Case.killed_at
    monkeypatch.setattr(Case, "killed_at", lambda case, spec: spec != "model.after" and really(case, spec))
    some = killed_at("model.before", "model.after")(agent_of(), "go", model=ScriptedModel(["Done."]))
    assert (some.cases, [result.reached for result in some.results]) == (1, [True, False])
    assert some.headline() == "tested: killed in 1 cases, 1 finding"
    none = killed_at("model.after")(agent_of(), "go", model=ScriptedModel(["Done."]))
    assert "this run proves nothing: no case was killed at its point" in none.findings


def test_children_touch_nothing_of_the_test(crash_matrix: CrashMatrix, tmp_path: Path) -> None:
    """The agent is a closure; what its children change in memory, and where they work, stays theirs."""
    seen: list[str] = []

    @tool(effect="read")
    def look(text: str) -> str:
        seen.append(text)
        Path("here").write_text("a relative path is in the case's own folder")
        return "seen"

    here = Path.cwd()
    before = threading.active_count()
    crash_matrix(agent_of(look), "go", model=script("look"), observe=lambda d: (d / "here").exists()).assert_ok()
    assert seen == []
    assert Path.cwd() == here
    assert not Path("here").exists()
    assert threading.active_count() == before


def test_junit(tmp_path: Path) -> None:
    report = CrashReport(1, ["whole", "a \x1b[31m finding"], agent="tested")
    report.results.append(matrix.CaseResult(("tool.after:x",), "tool.after:x", ("a \x1b[31m finding",)))
    report.write_junit(tmp_path / "junit.xml")
    suite = ET.parse(tmp_path / "junit.xml").getroot()[0]  # noqa: S314 - we have just written it
    assert (suite.get("tests"), suite.get("failures")) == ("2", "2")
    assert [case.get("name") for case in suite] == ["undisturbed, and the control", "killed at tool.after:x"]
    assert [failure.get("message") for failure in suite.iter("failure")] == ["whole", "a \\u001b[31m finding"]


@pytest.mark.parametrize(
    "a, b, where",
    [
        ([1, 2], [1, 2], set()),
        ([{"x": 1, "t": 5}], [{"x": 1, "t": 6}], {("*", "t")}),
        ([1], [1, 2], {()}),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, {("a", "*", "b")}),
        ("x", "y", {()}),
    ],
)
def test_what_changes_by_itself(a: Any, b: Any, where: set[tuple[str, ...]]) -> None:
    paths = changing(a, b)
    assert paths == where
    assert masked(a, paths) == masked(b, paths) or where == {()}
    json.dumps(masked(a, paths))


def test_gates_are_compared(killed_at: Any) -> None:
    """A gate that depends on what the world holds opens undisturbed and not after a crash: that is a finding."""

    @tool(effect="idempotent", gate=approval(to="lead", within=timedelta(hours=1), when=lambda run, text: not Path("asked").exists()))
    def send(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.deliver("send", ctx.idempotency_key)
        return "sent"

    @tool(effect="idempotent")
    def note(ctx: ToolContext[Ledger], text: str) -> str:
        if ctx.attempt > 1:
            Path("asked").touch()
        return "noted"

    model = script("note", "send")
    report = killed_at("tool.after:note")(agent_of(note, send), "go", model=model, deps=deps, observe=effects)
    assert any("the gates differ" in finding for finding in report.findings)
