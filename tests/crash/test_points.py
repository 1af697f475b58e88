"""A point on each side of every commit and of every outside call: seen in a run that does all of them, and read from the source."""

from __future__ import annotations

import ast
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.support.deaths import Crash, as_owner, gone

from outlast import Agent, Notice, Outcome, Outlast, Tool, ToolContext, Wait, approval, tool
from outlast.models import ModelRequest
from outlast.runtime import crashpoints
from outlast.runtime.clock import ManualClock

SRC = Path(__file__).parents[2] / "src" / "outlast"
OUTSIDE = ("tool", "model", "check", "notice")


class Sides:
    """Knows which sides have been passed, and complains about what happens between none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: Counter[Any] = Counter()
        self.passed: set[str] = set()
        self.happened: Counter[str] = Counter()
        self.bare: list[str] = []
        self.die_at: str | None = None

    def point(self, name: str) -> None:
        with self.lock:
            kind, _, side = name.partition(":")[0].partition(".")
            self.passed.add(f"{kind}.{side}")
            self.open[self._where(kind)] += {"before": 1, "after": -1 if kind in ("commit", *OUTSIDE) else 0}[side]
        if name == self.die_at:
            self.die_at = None
            raise Crash(name)

    def _where(self, kind: str) -> Any:
        return (kind, threading.get_ident()) if kind == "commit" else kind  # a commit is one thread's; an outside call goes to another

    def happens(self, kind: str) -> None:
        with self.lock:
            self.happened[kind] += 1
            if self.open[self._where(kind)] < 1:
                self.bare.append(kind)

    def commit_hook(self) -> bool:
        self.happens("commit")
        return False


@pytest.fixture
def sides() -> Iterator[Sides]:
    found = Sides()

    def hook(connection: apsw.Connection) -> None:
        connection.set_commit_hook(found.commit_hook)

    apsw.connection_hooks.append(hook)
    crashpoints.arm(found.point)
    yield found
    crashpoints.arm(None)
    apsw.connection_hooks.remove(hook)


def everything(sides: Sides) -> tuple[Agent[str], dict[str, Tool[..., Any]]]:
    """An agent that does all there is to do outside: an effect of every kind, a check, a sub-agent, a wait."""

    def looks(ctx: ToolContext[Any]) -> Outcome:
        sides.happens("check")
        return Outcome.not_happened()

    @tool(effect="read")
    def look() -> str:
        sides.happens("tool")
        return "seen"

    @tool(effect="idempotent", gate=approval(to="lead", within=timedelta(hours=1), remind_every=timedelta(minutes=10)))
    async def deliver(ctx: ToolContext[Any]) -> str:
        sides.happens("tool")
        return "delivered"

    @tool(check=looks)
    def act(ctx: ToolContext[Any]) -> str:
        sides.happens("tool")
        return "done"

    @tool(effect="idempotent")
    def wait(ctx: ToolContext[Any]) -> Wait:
        sides.happens("tool")
        return Wait("payment", within=timedelta(hours=1))

    def says(*turns: Any) -> Any:
        async def model(request: ModelRequest) -> Any:
            sides.happens("model")
            return turns[sum(m["role"] == "assistant" for m in request.messages)]

        return model

    part = Agent("part", model=says("A part."), tools=[])
    ask = part.as_tool(description="Ask for a part.")
    names = ["look", "act", ask.name, "wait", "deliver"]
    turns = [
        [{"type": "tool_use", "id": f"toolu_{n}", "name": name, "input": {"task": "a part"} if name == ask.name else {}}]
        for n, name in enumerate(names)
    ]
    made = {t.name: t for t in (look, deliver, act, ask, wait)}
    return Agent("whole", model=says(*turns, "Done."), tools=list(made.values())), made


def test_every_commit_and_every_outside_call_has_a_point_on_each_side(tmp_path: Path, sides: Sides) -> None:
    agent, _ = everything(sides)
    clock = ManualClock()

    def told(notice: Notice) -> None:
        sides.happens("notice")

    def app() -> Outlast:
        return Outlast(tmp_path / "outlast.db", agents=[agent], notify=[told], clock=clock)

    with as_owner(gone()):  # a first life, which leaves a call in doubt
        sides.die_at = "tool.after:act"
        first = app()
        with pytest.raises(Crash):
            first.run_sync(agent, "go", run_id="r")
        first.close()
    sides.open.clear()  # what was open died with it
    with app() as again:
        run = again.resume_sync("r")
        assert run.status == "waiting_for_timer", "the dead process's request may still be under way"
        assert run.wake_at is not None
        clock.move(run.wake_at - clock.now)
        assert again.resume_sync("r").status == "waiting_for_event"
        again.event("r", "payment", {"paid": True})
        assert again.resume_sync("r").status == "waiting_for_approval"
        clock.move(timedelta(minutes=11))
        assert again.sweep() >= 1
        again.decide("r", approved=True, decided_by="priya")
        assert again.resume_sync("r").status == "done"
        again.start(agent, "go", run_id="r2")
        again.work_sync(until_idle=True)
        again.cancel("r2", by="priya")
    assert sides.bare == []
    assert {kind for kind, n in sides.happened.items() if n} == {"commit", *OUTSIDE}
    assert set(crashpoints.POINTS) - {"renewal.before", "renewal.after"} == sides.passed
    assert +sides.open == Counter(), "a side was passed and the other was not"


def functions(folder: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file in sorted((SRC / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file.relative_to(SRC)}:{node.name}", node


def commits(node: ast.AST) -> bool:
    """Does this call commit a transaction of a database?"""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    said = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return any(text.strip(" ;").upper() == "COMMIT" for text in said) or node.func.attr == "transaction"


def points_in(function: ast.AST) -> str:
    return " ".join(ast.unparse(n) for n in ast.walk(function) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("point"))


def test_the_source_commits_between_points_only() -> None:
    found = [(where, f) for where, f in functions("stores") if any(commits(n) for n in ast.walk(f))]
    assert len(found) >= 4, "the search finds what is there: SQLite's writer and migration, Postgres's transaction and migration"
    bare = [where for where, f in found if not ("commit.before" in points_in(f) and "commit.after" in points_in(f))]
    assert bare == []


def test_the_source_calls_peoples_functions_between_points_only() -> None:
    found = [
        (where, f)
        for where, f in functions("runtime")
        if f.name != "invoke"
        and any(isinstance(n, ast.Call) and ast.unparse(n.func) in ("invoke", "perform.invoke", "self.model") for n in ast.walk(f))
    ]
    assert len(found) >= 4
    bare = [where for where, f in found if not (".before" in points_in(f) and ".after" in points_in(f))]
    assert bare == []
