"""What an application may rely on when it drives: run, resume, work, streams, tags, deps, typed output."""

from __future__ import annotations

import asyncio
import json
import typing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel
from tests.cases.conftest import BOTH, MakeApp, Provider
from tests.support.world import GATE, Ledger, assert_whole, tools, use
from typing_extensions import TypedDict

from outlast import Agent, Limits, Outlast, ToolContext, tool
from outlast.documents import Event
from outlast.errors import RunExists, RunNotFound, UsageError
from outlast.models import ScriptedModel

STORES = BOTH

# ---- run, resume, start ------------------------------------------------------------------------------------------------------


def test_twice_is_once(make_app: MakeApp) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app = make_app(agent)
    first = app.run_sync(agent, "go", run_id="r")
    assert app.run_sync(agent, "go", run_id="r").to_dict() == first.to_dict()
    assert app.start(agent, "go", run_id="r").status == "done"
    with pytest.raises(RunExists):
        app.run_sync(agent, "other", run_id="r")
    with pytest.raises(RunNotFound, match=r"no run 'nobody' in (.*outlast\.db|postgresql://)"):
        app.resume_sync("nobody")
    assert app.resume_sync("r").to_dict() == first.to_dict()


def test_start_then_run_is_the_same_run(make_app: MakeApp) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app = make_app(agent)
    assert app.start(agent, "go", run_id="r", tags={"t": "1"}).status == "running"
    run = app.run_sync(agent, "go", run_id="r")
    assert (run.status, run.tags, len(app.runs())) == ("done", {"t": "1"}, 1)


def test_ids_that_are_made_sort_by_time(make_app: MakeApp) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app = make_app(agent)
    ids = [app.start(agent, f"go {n}").run_id for n in range(5)]
    assert len(set(ids)) == 5
    assert sorted(i[:13] for i in ids) == [i[:13] for i in ids]
    assert app.unfinished_runs() == sorted(ids, key=ids.index)


def test_agents_that_are_not_the_apps(make_app: MakeApp) -> None:
    mine, other = Agent("a", model=ScriptedModel(["Done."])), Agent("b", model=ScriptedModel(["Done."]))
    app = make_app(mine)
    for verb in (lambda: app.run_sync(other, "go"), lambda: app.start(other, "go")):
        with pytest.raises(UsageError, match="b"):
            verb()
    app.start("b", "go", run_id="r")
    with pytest.raises(UsageError, match="b"):
        app.resume_sync("r")
    with pytest.raises(UsageError):
        app.work_sync(agents=["b"])
    with pytest.raises(UsageError):
        make_app().work_sync(until_idle=True)
    assert app.get("r").output is None


def test_sync_twins_inside_a_loop(make_app: MakeApp) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app = make_app(agent)

    async def play() -> None:
        for name, verb in {
            "run": lambda: app.run_sync(agent, "go"),
            "resume": lambda: app.resume_sync("r"),
            "work": app.work_sync,
        }.items():
            with pytest.raises(UsageError) as wrong:
                verb()
            assert f"await app.{name}(" in wrong.value.hint

    asyncio.run(play())
    assert app.runs() == []


def test_a_whole_crowd_on_one_worker(make_app: MakeApp, ledger: Ledger) -> None:
    """Fifty runs, ten at a time; every one ends, every effect is there once."""
    agent = Agent(
        "a",
        model=ScriptedModel([[use("act", text="x"), use("look", "toolu_02", text="y")], "Done."]),
        tools=[tools()["act"], tools()["look"]],
    )
    app = make_app(agent)
    ids = [app.start(agent, "go", run_id=f"r{n}").run_id for n in range(50)]
    app.work_sync(until_idle=True)
    assert {app.head(i).status for i in ids} == {"done"}
    assert sorted(line["key"] for line in ledger.lines("act")) == sorted(f"{i}:toolu_01" for i in ids)
    assert app.store_check() == []


def test_until_idle_leaves_what_waits(make_app: MakeApp, ledger: Ledger) -> None:
    agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(GATE)["act"]])
    app = make_app(agent)
    for n in range(3):
        app.start(agent, "go", run_id=f"r{n}")
    app.work_sync(until_idle=True)
    assert {r.status for r in app.runs()} == {"waiting_for_approval"}
    app.decide("r1", approved=True, decided_by="priya")
    app.work_sync(until_idle=True)
    assert [app.head(f"r{n}").status for n in range(3)] == ["waiting_for_approval", "done", "waiting_for_approval"]


def test_a_worker_takes_only_its_agents(make_app: MakeApp) -> None:
    a, b = Agent("a", model=ScriptedModel(["A."])), Agent("b", model=ScriptedModel(["B."]))
    app = make_app(a, b)
    app.start(a, "go", run_id="ra")
    app.start(b, "go", run_id="rb")
    app.work_sync(agents=["b"], until_idle=True)
    assert [app.head(i).status for i in ("ra", "rb")] == ["running", "done"]


# ---- tags, people ------------------------------------------------------------------------------------------------------------


def test_tags_are_shown_to_tools_and_never_to_the_model(make_app: MakeApp, provider: Provider) -> None:
    seen: list[Any] = []

    @tool(effect="read")
    def tell(ctx: ToolContext) -> str:
        seen.append(dict(ctx.tags))
        return "ok"

    api, model = provider([use("tell")], "Done.")
    agent = Agent("a", model=model, tools=[tell])
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r", tags={"tenant": "northwind-7"}, by="priya")
    assert (seen, run.tags, run.started_by) == ([{"tenant": "northwind-7"}], {"tenant": "northwind-7"}, "priya")
    assert "northwind-7" not in json.dumps(api.requests)
    assert [r.run_id for r in app.runs(tags={"tenant": "northwind-7"})] == ["r"]
    assert app.runs(tags={"tenant": "other"}) == []


@pytest.mark.parametrize(
    "tags", [{"": "x"}, {"a" * 65: "x"}, {"a": "x" * 257}, {"a": 1}, {1: "a"}, {f"t{n}": "x" for n in range(17)}, "a=b", None]
)
def test_tags_that_are_refused(tags: Any, make_app: MakeApp) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app = make_app(agent)
    with pytest.raises(UsageError, match="tags"):
        app.start(agent, "go", tags=tags)
    assert app.runs() == []


# ---- deps --------------------------------------------------------------------------------------------------------------------


def deps_agent(seen: list[Any]) -> Agent[str]:
    @tool(effect="read")
    def tell(ctx: ToolContext) -> str:
        seen.append(ctx.deps)
        return "ok"

    return Agent("a", model=ScriptedModel([[use("tell")], "Done."]), tools=[tell])


def test_lifespan_is_entered_per_call_and_once_inside_async_with(make_app: MakeApp) -> None:
    seen: list[Any] = []
    life: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[str]:
        life.append("in")
        yield f"deps {len(life)}"
        life.append("out")

    agent = deps_agent(seen)
    app = make_app(agent, lifespan=lifespan)
    app.run_sync(agent, "go", run_id="r1")
    app.start(agent, "go", run_id="r2")
    assert app.head("r2").status == "running"
    app.resume_sync("r2")
    assert (seen, life) == (["deps 1", "deps 3"], ["in", "out", "in", "out"])

    async def play() -> None:
        async with app:
            await app.run(agent, "go", run_id="r3")
            await asyncio.to_thread(app.start, agent, "go", run_id="r4")
            await app.work(until_idle=True)

    asyncio.run(play())
    assert (seen[2:], life[4:]) == (["deps 5", "deps 5"], ["in", "out"])


def test_a_lifespan_that_fails_leaves_the_run_for_others(make_app: MakeApp) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[str]:
        raise ConnectionError("the database is down")
        yield ""

    agent = deps_agent([])
    app = make_app(agent, lifespan=lifespan)
    with pytest.raises(ConnectionError):
        app.run_sync(agent, "go", run_id="r")
    head = app._store.head("r")
    assert (head.status, head.lease_owner) == ("running", None)
    fine = deps_agent(found := [])
    assert make_app(fine, deps="deps").resume_sync("r").status == "done"
    assert found == ["deps"]


def test_deps_and_lifespan_are_one_or_the_other() -> None:
    with pytest.raises(UsageError, match="deps"):
        Outlast("x.db", deps=1, lifespan=lambda: None)  # type: ignore[arg-type, return-value]  # a careless caller


def test_an_agent_is_not_changed_and_a_store_is_a_path_or_a_url() -> None:
    agent = Agent("a", model=ScriptedModel(["x"]))
    with pytest.raises(AttributeError, match="replace"):
        agent.limits = Limits(model_calls=1)
    assert agent.replace(limits=Limits(model_calls=1)).limits.model_calls == 1
    with pytest.raises(UsageError, match="store"):
        Outlast(5)  # type: ignore[arg-type]  # a careless caller


def test_an_unknown_provider_starts_nothing(make_app: MakeApp) -> None:
    agent = Agent("a", model="nobody:model-1")
    app = make_app(agent)
    with pytest.raises(UsageError, match="nobody"):
        app.run_sync(agent, "go", run_id="r")
    assert app.runs() == []


# ---- streams -----------------------------------------------------------------------------------------------------------------


async def listens(app: Outlast) -> None:
    """Until a stream that was begun hears what is said: text that comes before is not kept for it."""
    async with asyncio.timeout(30):
        while not app._listeners:  # noqa: ASYNC110 - the stream is the code that is tested: it tells nobody
            await asyncio.sleep(0)


def test_a_stream_gives_what_was_and_what_comes_until_the_end(make_app: MakeApp, ledger: Ledger) -> None:
    agent = Agent(
        "a", model=ScriptedModel([[{"type": "text", "text": "I look."}, use("act", text="x")], "Done."]), tools=[tools(GATE)["act"]]
    )
    app = make_app(agent)
    app.start(agent, "go", run_id="r")

    async def play() -> list[Event]:
        waits = asyncio.Event()

        async def watch() -> list[Event]:
            events = []
            async for event in app.stream("r"):
                events.append(event)
                if (event.type, event.status) == ("run", "waiting_for_approval"):
                    waits.set()
            return events

        watching = asyncio.ensure_future(watch())
        await listens(app)
        await app.resume("r")
        await asyncio.wait_for(waits.wait(), 30)  # a status that nobody looked at while it stood is not told
        await asyncio.to_thread(app.decide, "r", approved=True, decided_by="priya")
        await app.resume("r")
        return await asyncio.wait_for(watching, 30)

    events = asyncio.run(play())
    assert [e.seq for e in events if e.type == "checkpoint"] == [1, 2, 3, 4]
    assert events[-1].type == "run" and events[-1].status == "done"
    assert "waiting_for_approval" in [e.status for e in events if e.type == "run"]
    assert [e.text for e in events if e.type == "text"] == ["I look.", "Done."]
    order = [(e.type, e.seq) for e in events if e.type != "run"]
    assert order.index(("checkpoint", 3)) < order.index(("text", 4)) < order.index(("checkpoint", 4))
    saved = {c.seq: c.created_at for c in app.checkpoints("r")}
    assert {e.seq: e.created_at for e in events if e.type == "checkpoint"} == saved
    later = asyncio.run(_all(app, "r", 2))
    assert [(e.type, e.seq) for e in later] == [("checkpoint", 3), ("checkpoint", 4), ("run", 4)]
    for event in events:
        json.dumps(event.to_dict())


async def _all(app: Outlast, run_id: str, after: int) -> list[Event]:
    return [event async for event in app.stream(run_id, after=after)]


def test_a_stream_reads_the_store_when_something_was_saved_and_not_for_every_piece(make_app: MakeApp) -> None:
    async def model(request: Any) -> str:
        for _ in range(500):
            request.emit("x")
            await asyncio.sleep(0)
        return "x" * 500

    agent = Agent("a", model=model)
    app = make_app(agent)
    app.start(agent, "go", run_id="r")
    looks, wait_for_change = 0, app._store.wait_for_change

    def counted(seen: int | None, timeout_s: float) -> int:
        nonlocal looks
        looks += 1
        return wait_for_change(seen, timeout_s)

    app._store.wait_for_change = counted  # type: ignore[method-assign]  # to count the looks

    async def play() -> list[Event]:
        watching = asyncio.ensure_future(_all(app, "r", 0))
        await listens(app)
        await app.resume("r")
        return await asyncio.wait_for(watching, 30)

    events = asyncio.run(play())
    assert sum(e.type == "text" for e in events) == 500
    assert looks < 50


def test_a_stream_of_nobody(make_app: MakeApp) -> None:
    with pytest.raises(RunNotFound):
        asyncio.run(_all(make_app(), "nobody", 0))


def test_on_event_says_what_the_store_says(make_app: MakeApp) -> None:
    heard: list[Event] = []
    agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(GATE)["act"]])
    app = make_app(agent, on_event=heard.append)
    app.run_sync(agent, "go", run_id="r")
    event, head = heard[-1], app.head("r").to_dict()
    assert (event.type, head["lease_owner"], head["wake_at"] is not None) == ("run", None, True)
    assert event.to_dict() == head
    assert [e.created_at for e in heard if e.type == "checkpoint"] == [c.created_at for c in app.checkpoints("r", after=1)]


def test_on_event_that_raises_disturbs_nothing(make_app: MakeApp) -> None:
    seen: list[str] = []

    def listen(event: Event) -> None:
        seen.append(event.type)
        raise RuntimeError("the dashboard is down")

    agent = Agent("a", model=ScriptedModel(["Done."]))
    run = make_app(agent, on_event=listen).run_sync(agent, "go", run_id="r")
    assert run.status == "done"
    assert seen == ["text", "checkpoint", "run"]


# ---- typed output ------------------------------------------------------------------------------------------------------------


class Verdict(BaseModel):
    ok: bool
    why: str = ""


@dataclass
class Point:
    x: int


class Shape(TypedDict):
    sides: int


class Inner(typing.TypedDict):  # the standard library's, which pydantic refuses before Python 3.12
    a: int


class Outer(typing.TypedDict, total=False):
    one: typing.Required[Inner]
    many: list[Inner] | None


@pytest.mark.parametrize("output, text, expected", [(Verdict, '{"ok": true}', Verdict(ok=True)), (Point, '{"x": 1}', Point(1)),
                                                    (Outer, '{"one": {"a": 1}, "many": null}', {"one": {"a": 1}, "many": None}),
                                                    (Shape, '```json\n{"sides": 3}\n```', {"sides": 3}), (str, "{}", "{}")])  # fmt: skip
def test_typed_output(output: Any, text: str, expected: Any, make_app: MakeApp) -> None:
    agent: Agent[Any] = Agent("a", model=ScriptedModel([text]), output=output)
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert run.output == expected
    assert app.get("r").output == expected
    elsewhere = make_app().get("r").output
    assert elsewhere == (text if output is str else {"sides": 3} if output is Shape else json.loads(text))
    json.dumps(run.to_dict())


def test_typed_output_is_sent_back_twice_then_fails(make_app: MakeApp, provider: Provider) -> None:
    _, model = provider("no json", '{"ok": "perhaps"}', '{"ok": true}')
    agent = Agent("a", model=model, output=Verdict)
    run = make_app(agent).run_sync(agent, "go", run_id="r")
    assert (run.status, run.output, run.model_calls) == ("done", Verdict(ok=True), 3)
    _, model = provider("no", "never", "not today", '{"ok": true}')
    agent = Agent("b", model=model, output=Verdict)
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="s")
    assert (run.status, run.output, run.model_calls) == ("failed", None, 3)
    assert "output" in (run.reason or "")
    app.send("s", "try once more")
    assert app.resume_sync("s").status == "done"
    assert_whole(app, "s")


# ---- limits ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, used", [(None, 4), ({"raise_to": 3}, 3), ({"raise_to": 7}, 7)])
def test_a_limit_is_raised_by_a_person(args: Any, used: int, make_app: MakeApp, ledger: Ledger) -> None:
    agent = Agent(
        "a",
        model=ScriptedModel([[use("look", f"c{n}", text=str(n))] for n in range(9)]),
        tools=[tools()["look"]],
        limits=Limits(model_calls=2, repeats=None),
    )
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert (run.status, run.model_calls, run.gates[0].args) == ("waiting_for_budget", 2, {"limit": "model_calls", "used": 2, "raise_to": 4})
    for bad in ({"raise_to": 2}, {"raise_to": "many"}, {"raise_to": True}, {}, {"raise_to": 9, "model": "x"}):
        with pytest.raises(UsageError):
            app.decide("r", "budget:1", approved=True, decided_by="priya", args=bad)
    app.decide("r", approved=True, decided_by="priya", args=args)
    run = app.resume_sync("r")
    assert (run.status, run.model_calls) == ("waiting_for_budget", used)
    app.decide("r", approved=False, decided_by="priya", note="enough")
    run = app.resume_sync("r")
    assert (run.status, run.model_calls) == ("failed", used)
    assert "enough" in (run.reason or "")
    assert_whole(app, "r")


def test_a_tool_takes_a_typed_dict_of_the_standard_library() -> None:
    @tool(effect="read")
    def look(inner: Inner, more: list[Inner] | None = None) -> int:
        """Look."""
        return inner["a"]

    assert look.problem({"inner": {"a": "no"}}) is not None
    assert look.validated({"inner": {"a": 1}, "more": [{"a": 2}]}) == {"inner": {"a": 1}, "more": [{"a": 2}]}
    assert look.input_schema["required"] == ["inner"]
