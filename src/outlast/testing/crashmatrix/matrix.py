"""The cases of a crash test, in order: undisturbed twice, the control, then one case for every point, and with `pairs` every ordered pair.

A case is void without a death, and a matrix without a control: a deliberately unsafe tool is killed in the same way, and where that goes
unnoticed nothing else that was found, or not found, counts.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from outlast.agent import Agent
from outlast.errors import UsageError
from outlast.models.scripted import ScriptedModel, whole_message
from outlast.testing.crashmatrix.byengine import engine_for_cases
from outlast.testing.crashmatrix.judge import Calm, Seen, differences, undisturbed
from outlast.testing.crashmatrix.life import Case, DidNotEnd, Setup
from outlast.testing.crashmatrix.report import CaseResult, CrashReport
from outlast.testing.crashmatrix.watch import tools_of
from outlast.tools import ToolContext, tool

if TYPE_CHECKING:
    from outlast.app import Input

TRIES = 3  # of a case whose point was not passed: a run may go another way
Progress = Callable[[int, int], None]  # (cases done, cases known so far)


def crash_matrix(
    agent: Agent[Any],
    input: Input,
    *,
    model: ScriptedModel,
    deps: Callable[[Path], Any] | None = None,
    observe: Callable[[Path], object] | None = None,
    approve: bool = True,
    pairs: bool = False,
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
    fixed_deps: Any = None,
    engine: str | None = None,
    at: Sequence[str] = (),
    folder: Path | None = None,
    progress: Progress = lambda done, known: None,
) -> CrashReport:
    """Kill this agent at every crash point it passes, take it up again, and compare. What is asked: `CrashMatrix`.

    Args:
        lifespan, fixed_deps: an app's own, used where `deps` is not given.
        engine: an engine's URL: its worker is what is killed; only crash tests' workers may serve this engine meanwhile.
        at: only the cases of these points, `NAME` or `NAME#n`: to repeat one finding.
        folder: where the cases' folders are made and left; default: a temporary one.
    Raises:
        UsageError: as `CrashMatrix`; or the undisturbed run does not pass a point of `at`.
    """
    if not hasattr(os, "fork"):
        raise UsageError("a crash test needs a system that can fork and kill processes (POSIX)")
    if not isinstance(agent, Agent):
        raise UsageError(f"a crash test takes an Agent, not {agent!r:.80}")
    if not isinstance(model, ScriptedModel):
        raise UsageError("a crash test plays a ScriptedModel: a real model answers differently each time",
                         hint="outlast record RUN > script.json makes one of a real run")  # fmt: skip
    for n, turn in enumerate(model.turns):
        _check_turn(turn, n)
    for name, given in (("deps", deps), ("observe", observe)):
        if given is not None and not callable(given):
            raise UsageError(f"{name} must be a function of one argument, the folder of a case, not {given!r:.80}")
        if inspect.iscoroutinefunction(given):
            raise UsageError(f"{name} must be a plain function, not an async one: {given!r:.80}")
    if engine is not None:
        engine_for_cases(engine)
    setup = Setup(agent, input, model, deps, observe, approve, lifespan, fixed_deps, engine, f"crashtest-{uuid4().hex[:8]}")
    if folder is not None:
        return _Matrix(setup, folder, progress).run(pairs=pairs, at=at)
    with tempfile.TemporaryDirectory(prefix="outlast-crashtest-") as made:
        return _Matrix(setup, Path(made), progress).run(pairs=pairs, at=at)


def _check_turn(turn: Any, n: int) -> None:
    """Raises UsageError for what no model says: a run of it would test something else. A turn that is a function is seen when it is asked."""
    if callable(turn):
        return
    try:
        content = whole_message(turn, n, [])["content"]
    except TypeError as e:
        raise UsageError(str(e)) from None
    for block in content:
        kind = block.get("type")
        if kind == "tool_use" and not (block.get("id") and block.get("name") and isinstance(block.get("input"), Mapping)):
            raise UsageError(
                f"turn {n + 1} of the script: a tool_use block needs an id, a name and an input that is an object: {block!r:.120}"
            )
        if not isinstance(kind, str) or (kind == "text" and not isinstance(block.get("text"), str)):
            raise UsageError(f"turn {n + 1} of the script: this is no content block: {block!r:.120}")


def scripted(turns: Sequence[Any]) -> ScriptedModel:
    """A model that plays turns as `outlast record` prints them."""
    return ScriptedModel(turns)


class _Matrix:
    def __init__(self, setup: Setup, folder: Path, progress: Progress) -> None:
        self.setup, self.folder, self.progress, self.made = setup, folder, progress, 0
        self.report = CrashReport(0, [], agent=setup.agent.name)

    def run(self, *, pairs: bool, at: Sequence[str]) -> CrashReport:
        calm, passed, unequal, notes = _calm(self.setup, self._folder)
        places = dict(points_of(passed))
        if unknown := [spec for spec in at if spec not in places]:
            raise UsageError(f"the undisturbed run never passes {' nor '.join(unknown)}", hint=f"it passes {', '.join(places)}")
        self.setup = replace(self.setup, more_budget=not any(gate[2] == "budget" for gate in calm.seen.ended.gates))
        self.report.notes += notes
        self.report.findings += unequal + control(self._folder, replace(CONTROL, engine=self.setup.engine, apart=self.setup.apart))
        firsts = [(spec, place) for spec, place in places.items() if not at or spec in at]
        afterwards: list[list[str]] = []
        for spec, place in firsts:
            self.progress(len(self.report.results), len(firsts))
            afterwards.append(self._case(calm, [spec], place))
        known = len(firsts) + sum(map(len, afterwards))
        for (spec, place), after in zip(firsts, afterwards if pairs else [], strict=False):
            for spec2, place2 in points_of(after):
                self.progress(len(self.report.results), known)
                self._case(calm, [spec, spec2], f"{place}, then {place2}")
        self._unreached()
        return self.report

    def _folder(self) -> Path:
        self.made += 1
        return self.folder / f"{self.made:04}"

    def _case(self, calm: Calm, specs: Sequence[str], place: str) -> list[str]:
        """One case; the points that the process after its last death passed."""
        reached, found, passed = False, ["it was not run"], list[str]()
        for _ in range(TRIES):
            case = Case(self.setup, self._folder())
            try:
                deaths = [case.killed_at(spec) for spec in specs]
                reached = all(deaths)
                ended = case.finish()
                passed = case.passed()
                found = differences(calm, Seen(ended, _look(self.setup, case.world)), sum(deaths))
            except DidNotEnd as e:
                reached, found = True, [str(e)]
            if reached or found:
                break
        where = f"killed at {place}"
        findings = tuple(_placed(f, where) for f in found)
        self.report.cases += reached
        self.report.findings += findings
        self.report.results.append(CaseResult(tuple(specs), place, findings, reached))
        return passed

    def _unreached(self) -> None:
        """A point that could not be reached at all is no success."""
        names = {name for result in self.report.results if result.reached for name in map(_name, result.points)}
        missed = {name for result in self.report.results for name in map(_name, result.points)} - names
        self.report.findings += [f"no case could be killed at {name}: the run goes another way each time" for name in sorted(missed)]
        if count := sum(not result.reached for result in self.report.results):
            self.report.notes.append(f"{count} of the cases ended before their point: the run goes another way each time")
        if not self.report.cases:
            self.report.findings.append("this run proves nothing: no case was killed at its point")


def points_of(passed: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every pass of every point, as what `OUTLAST_CRASH_AT` takes; and where that is, for people."""
    times: Counter[str] = Counter()
    last = ""
    for name in passed:
        times[name] += 1
        spec = name if times[name] == 1 else f"{name}#{times[name]}"
        commit = name.startswith("commit.")
        yield spec, f"{spec} (after {last})" if commit and last else spec
        if not commit:
            last = spec


def _name(spec: str) -> str:
    return spec.partition("#")[0]


def _placed(finding: str, where: str) -> str:
    """`TOOL (CALL): WHERE: what`, or `WHERE: what` where it is no tool's."""
    head, colon, rest = finding.partition("): ")
    if colon and " " in head and "(" in head and head.count(" ") == 1:
        return f"{head}): {where}: {rest}"
    return f"{where}: {finding}"


def _calm(setup: Setup, folder: Callable[[], Path]) -> tuple[Calm, list[str], list[str], list[str]]:
    """Two undisturbed runs: (what to compare with, points passed, findings, notes)."""
    seen, passed = [], list[str]()
    for _ in range(2):
        case = Case(setup, folder())
        try:
            ended = case.finish()
        except DidNotEnd as e:
            raise UsageError(f"the run breaks when nobody disturbs it: {e}") from None
        passed = passed or case.passed()
        seen.append(Seen(ended, _look(setup, case.world, must=True)))
    calm, findings, notes = undisturbed(seen[0], seen[1], tools_of(setup.agent), observes=setup.observe is not None)
    if left := setup.model.turns[max(seen[0].ended.model_calls, default=-1) + 1 :]:
        told = f"the run asked for {len(setup.model.turns) - len(left)} of the script's {len(setup.model.turns)} turns"
        if seen[0].ended.status == "done" and any(_calls(turn) for turn in left):
            raise UsageError(f"{told}: calls in the others are never made, and were not tested", hint="is the script this agent's?")
        notes.append(told)
    return calm, passed, findings, notes


def _calls(turn: Any) -> bool:
    return not callable(turn) and any(block.get("type") == "tool_use" for block in whole_message(turn, 0, [])["content"])


def _look(setup: Setup, world: Path, *, must: bool = False) -> Any:
    if setup.observe is None:
        return None
    try:
        return setup.observe(world)
    except (Exception, SystemExit) as e:
        if must:
            raise UsageError(f"observe raised {type(e).__name__} after a run that nobody disturbed: {e}") from e
        return f"observe raised {type(e).__name__}: {e}"


# ---- the control ----------------------------------------------------------------------------------------------------------------------


@tool(effect="idempotent")
def outlast_control(ctx: ToolContext[Path], text: str) -> str:
    """Deliberately unsafe: it says that it may be repeated, and writes one more line each time."""
    with (ctx.deps / "lines").open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")
    return "written"


CONTROL = Setup(
    Agent("control", model=ScriptedModel([]), tools=[outlast_control]),
    "control",
    ScriptedModel([[{"type": "tool_use", "id": "toolu_01", "name": outlast_control.name, "input": {"text": "a line"}}], "Written."]),
    deps=lambda world: world,
    observe=lambda world: (world / "lines").read_text(encoding="utf-8").splitlines(),
)


def control(folder: Callable[[], Path], setup: Setup = CONTROL) -> list[str]:
    """Kill the deliberately unsafe tool after it acted. Empty: it was found out, as it must be; else why this run proves nothing."""
    calm = _calm(setup, folder)[0]
    case = Case(setup, folder())
    try:
        died = case.killed_at(f"tool.after:{outlast_control.name}")
        found = differences(calm, Seen(case.finish(), _look(setup, case.world)), 1)
    except DidNotEnd as e:
        return [f"this run proves nothing: the control broke: {e}"]
    if died and any("sent 2 times" in finding for finding in found):
        return []
    why = "it was not killed" if not died else "what it did twice was not noticed"
    return [f"this run proves nothing: the control, a deliberately unsafe tool, did not go red: {why}"]
