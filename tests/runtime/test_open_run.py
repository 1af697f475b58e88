"""`app.open`: the loop stays the program's own; every message is a checkpoint, every call runs by its effect."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from tests.cases.conftest import BOTH, MakeApp, lease_clock_ahead
from tests.support.deaths import dying_at
from tests.support.waiting import happens, until
from tests.support.world import GATE, Ledger, assert_whole, tools, use

from outlast import Agent, Outcome, Outlast, ToolContext, ToolFailed, tool
from outlast.core import run as r
from outlast.errors import CommitUnknown, LeaseLost, Refused, RunBusy, RunExists, RunNotFound, StoreError, UsageError
from outlast.models import ModelRequest, ScriptedModel
from outlast.runtime.clock import ManualClock
from outlast.runtime.drive import late_result
from outlast.runtime.writer import Writer

STORES = BOTH
TURNS = [[use("look", "c1", text="a"), use("deliver", "c2", text="b")], [use("act", "c3", text="c")], "Done."]


def answer(turns: list[Any], messages: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> Any:
    request = ModelRequest(messages=messages, instructions="", tools=schemas, output_schema=None, settings={}, emit=lambda text: None)
    return asyncio.run(ScriptedModel(turns)(request))


def loop(app: Any, run_id: str, *, made: Any, turns: list[Any] = TURNS) -> Any:
    """The eight-line loop."""
    with app.open(run_id, "go", tools=made) as run:
        while run.status == "running":
            if run.pending:
                for call in run.pending:
                    run.call_sync(call)
            else:
                run.append(answer(turns, run.messages, run.tools))
    return app.get(run_id)


def test_the_hand_written_loop(make_app: MakeApp, ledger: Ledger) -> None:
    app = make_app()
    run = loop(app, "r", made=[tools()[n] for n in ("look", "deliver", "act")])
    assert (run.status, run.output, run.model_calls, run.agent) == ("done", "Done.", 3, "script")
    assert [m["role"] for m in run.messages] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert [b["tool_use_id"] for b in run.messages[2]["content"]] == ["c1", "c2"]
    assert [line["what"] for line in ledger.lines()] == ["look", "deliver", "act"]
    assert [c.seq for c in app.checkpoints("r")] == [1, 2, 3, 4, 5, 6]
    assert_whole(app, "r")


@pytest.mark.parametrize("at", ["commit.after", "tool.before:act", "tool.after:act", "tool.after:look", "tool.after:deliver"])
def test_the_loop_is_killed_and_run_again(at: str, make_app: MakeApp, ledger: Ledger) -> None:
    made = [tools()[n] for n in ("look", "deliver", "act")]
    with dying_at(at, 2 if at.startswith("commit") else 1):
        loop(make_app(), "r", made=made)
    app = make_app()
    run = loop(app, "r", made=made)
    if run.status == "waiting_for_verification":
        happened = bool(ledger.lines("act"))
        lease_clock_ahead(app, timedelta(seconds=200))
        app.verify("r", outcome="happened" if happened else "give_up", decided_by="priya")
        run = loop(app, "r", made=made)
    assert run.status == "done"
    assert len(ledger.lines("act")) == (at != "tool.before:act")
    assert len(ledger.lines("deliver")) == 1
    assert_whole(app, "r")


def test_a_gate_ends_the_loop_and_a_decision_takes_it_on(make_app: MakeApp, ledger: Ledger) -> None:
    app = make_app()
    made = [tools()["look"], tools()["deliver"], tools(GATE)["act"]]
    assert loop(app, "r", made=made).status == "waiting_for_approval"
    assert app.inbox()[0].call_id == "c3"
    assert loop(app, "r", made=made).status == "waiting_for_approval"
    app.decide("r", approved=True, decided_by="priya")
    assert loop(app, "r", made=made).output == "Done."
    assert len(ledger.lines("act")) == 1


def test_what_is_refused(make_app: MakeApp, ledger: Ledger) -> None:
    app, other = make_app(), make_app()
    with pytest.raises(RunNotFound), app.open("nobody"):
        pass
    with app.open("r", "go", tools=[tools()["look"]]) as run:
        assert (run.run_id, run.status, run.seq, run.finished) == ("r", "running", 1, False)
        for taken in (lambda: other.open("r", "go"), lambda: other.open("r")):
            with pytest.raises(RunBusy), taken():
                pass
        with pytest.raises(UsageError):
            run.append(7)
        with pytest.raises(UsageError):
            run.append({"role": "user", "content": ""})
        with pytest.raises(UsageError):
            run.append({"role": "user"})
        assert run.append([use("look", "c1", text="a")]).seq == 2
        with pytest.raises(Refused, match="results"):
            run.append("text before the result")
        with pytest.raises(Refused, match="results"):
            run.append({"role": "user", "content": "hello"})
        with pytest.raises(UsageError, match="pending"):
            run.call_sync(use("look", "other", text="a"))
        result = run.call_sync(run.pending[0])
        assert result == {"type": "tool_result", "tool_use_id": "c1", "content": '{"done": "a"}'}
        assert (run.seq, run.pending) == (3, [])
        assert run.append("Done.").status == "done"
        with pytest.raises(Refused, match="done"):
            run.append("more")
    with pytest.raises(RunExists), app.open("r", "something else"):
        pass


def test_calls_of_every_outcome(make_app: MakeApp, ledger: Ledger) -> None:
    @tool(effect="read")
    def refuses(ctx: ToolContext) -> str:
        raise ToolFailed("no such ticket")

    @tool
    def breaks(ctx: ToolContext) -> str:
        raise ValueError("half way")

    app = make_app()
    with app.open("r", "go", tools=[refuses, breaks]) as run:
        run.append([use("refuses", "c1"), use("breaks", "c2"), use("made_up", "c3")])
        assert [b["id"] for b in run.pending] == ["c1", "c2"]
        assert run.call_sync(run.pending[0]) == {"type": "tool_result", "tool_use_id": "c1", "content": "no such ticket", "is_error": True}
        doubt = run.call_sync(run.pending[0])
        assert doubt["is_error"] is True
        assert run.status == "waiting_for_verification"
    assert app._store.head("r").lease_owner is None
    app.verify("r", outcome="happened", result="it did", decided_by="priya")
    with app.open("r", tools=[refuses, breaks]) as run:
        assert [b["content"] for b in run.messages[-1]["content"]][:2] == ["no such ticket", "it did"]
        run.append("Done.")
    assert app.head("r").status == "done"
    assert_whole(app, "r")


def test_user_messages_and_texts_that_were_sent(make_app: MakeApp) -> None:
    app = make_app()
    with app.open("r", "go") as run:
        app.send("r", "from outside")
        run.append("First.")
        assert run.status == "running", run.reason
        assert [m["role"] for m in run.messages] == ["user", "assistant", "user"]
        run.append({"role": "user", "content": "from the program"})
        run.append("Second.")
        assert run.status == "done"
    assert_whole(app, "r")


def test_a_run_by_hand_is_no_workers_and_the_other_way_round(make_app: MakeApp) -> None:
    from outlast import Agent

    agent = Agent("script", model=ScriptedModel(["Done."]))
    app = make_app(agent)
    with app.open("mine", "go") as run:
        assert run.status == "running"
    app.work_sync(until_idle=True)
    assert app.head("mine").status == "running"
    app.start(agent, "go", run_id="theirs")
    with pytest.raises(Refused), app.open("theirs"):
        pass


def test_an_exception_in_the_block_gives_the_lease_back(make_app: MakeApp) -> None:
    app = make_app()

    class Mine(Exception):
        pass

    with pytest.raises(Mine), app.open("r", "go"):
        raise Mine
    assert app._store.head("r").lease_owner is None
    with app.open("r") as run:
        run.append("Done.")
    assert app._store.head("r").attempts == 0


def test_a_lease_that_is_lost_ends_the_writing(make_app: MakeApp, clock: ManualClock) -> None:
    app, other = make_app(), make_app()
    with app.open("r", "go") as run:
        lease_clock_ahead(other, timedelta(seconds=60))
        with other.open("r") as theirs:
            with pytest.raises(LeaseLost):
                run.append("Done.")
            theirs.append("Theirs.")
    assert app.get("r").output == "Theirs."
    assert_whole(app, "r")


def test_call_sync_inside_a_loop(make_app: MakeApp, ledger: Ledger) -> None:
    app = make_app()

    async def play() -> Any:
        with app.open("r", "go", tools=[tools()["look"]]) as run:
            run.append([use("look", "c1", text="a")])
            with pytest.raises(UsageError) as wrong:
                run.call_sync(run.pending[0])
            assert "await" in wrong.value.hint
            return await run.call(run.pending[0])

    assert asyncio.run(play())["content"] == '{"done": "a"}'


def test_what_could_not_be_opened_is_not_kept(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Writer, *args: Any, **kwargs: Any) -> Any:
        raise StoreError("disk full")

    app = make_app()
    with monkeypatch.context() as broken:
        broken.setattr(Writer, "save", fails)
        with pytest.raises(StoreError, match="disk full"), app.open("r", "go", tools=[]):
            pass
    assert app._keeper.held() == 0
    assert app._store.head("r").lease_owner is None
    assert loop(app, "r", made=[tools()["look"]], turns=["Done."]).status == "done"


def test_a_run_that_is_over_says_so_when_its_lease_was_seen_gone(make_app: MakeApp) -> None:
    app = make_app()
    with app.open("r", "go", tools=[]) as run:
        run.append("Done.")
        [gone] = app._store.peek([run._writer.lease])
        run._news(gone)  # as the keeper says it a moment later
        assert not gone.held
        with pytest.raises(Refused, match="r is done"):
            run.append("More.")


def test_call_sync_from_several_threads(make_app: MakeApp, ledger: Ledger) -> None:
    """The blocks of one answer given to a pool: each runs once, and nobody waits for ever."""
    app = make_app()
    with app.open("r", "go", tools=[tools()["look"]]) as run:
        run.append([use("look", f"c{n}", text=str(n)) for n in range(4)])
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(run.call_sync, run.pending, timeout=60))
        assert [x["content"] for x in results] == [f'{{"done": "{n}"}}' for n in range(4)]
        assert not run.pending
    assert_whole(app, "r")


def test_a_pending_call_runs_once_however_often_it_is_asked_for(make_app: MakeApp, ledger: Ledger) -> None:
    app = make_app()

    async def play() -> Any:
        wrong: Any = "c1"
        with app.open("r", "go", tools=[tools()["look"]]) as run:
            run.append([use("look", "c1", text="a")])
            with pytest.raises(UsageError, match="tool_use block"):
                await run.call(wrong)
            return await asyncio.gather(run.call(run.pending[0]), run.call(run.pending[0]), return_exceptions=True)

    first, second = asyncio.run(play())
    assert first["content"] == '{"done": "a"}'
    assert isinstance(second, UsageError) and "runs already" in str(second)
    assert len(ledger.lines()) == 1


def test_a_late_result_that_another_save_has_read_is_taken(make_app: MakeApp, clock: ManualClock) -> None:
    """The intent was decided before it came: read by the save of another call, it would no longer stand in the intent's way."""
    paid: list[str] = []

    async def finds_nothing(ctx: ToolContext[Any]) -> Outcome:
        late = r.LateResult("c1", "paid by the first worker", why="it came after its lease was lost")
        await asyncio.to_thread(app._store.outside, "r", lambda tail: late_result(tail, late))
        await looked.wait()
        return Outcome.not_happened()

    @tool(effect="at_most_once", check=finds_nothing)
    def pay() -> str:
        """Pay."""
        paid.append("pay")
        return "paid again"

    made = [pay, tools()["look"]]
    with dying_at("tool.before:pay"), make_app(clock=clock).open("r", "go", tools=made) as run:
        run.append([use("pay", "c1"), use("look", "c2", text="a")])
        run.call_sync(run.pending[0])
    app = make_app(clock=clock)
    clock.move(timedelta(minutes=5))  # its request does not land any more

    async def play() -> Any:
        nonlocal looked
        looked = asyncio.Event()
        with app.open("r", tools=made) as run:
            paying = asyncio.ensure_future(run.call(run.pending[0]))
            await run.call(run.pending[1])
            looked.set()
            return await paying

    looked = asyncio.Event()
    assert asyncio.run(play())["content"] == "paid by the first worker"
    assert paid == []
    assert_whole(app, "r")


def test_two_threads_that_append_at_once(make_app: MakeApp, ledger: Ledger) -> None:
    app = make_app()
    with app.open("r", "go", tools=[tools()["look"]]) as run:
        together = threading.Barrier(2)

        def append(n: int) -> Any:
            together.wait(60)
            try:
                return run.append([use("look", f"c{n}", text="a")])
            except Refused as e:
                return e

        with ThreadPoolExecutor(2) as pool:
            came = list(pool.map(append, range(2), timeout=60))
        assert sorted(isinstance(x, Refused) for x in came) == [False, True]
        assert [m["role"] for m in run.messages] == ["user", "assistant"]
        run.call_sync(run.pending[0])
        run.append("Done.")
    assert_whole(app, "r")


@pytest.mark.parametrize("message", [[use("look", "c1", text="a")], {"role": "user", "content": "and now?"}], ids=["answer", "text"])
def test_an_append_whose_end_nobody_saw_is_not_made_again(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, message: Any) -> None:
    app = make_app()
    with app.open("r", "go", tools=[tools()["look"]]) as run:
        stands = app._store.append

        def interrupted(*args: Any, **more: Any) -> Any:
            stands(*args, **more)
            raise KeyboardInterrupt

        with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
            broken.setattr(app._store, "append", interrupted)
            run.append(message)
        with pytest.raises(Refused, match="a message of run r was saved meanwhile"):
            run.append(message)
        assert len(run.messages) == 2
        if run.pending:
            run.call_sync(run.pending[0])
        run.append("Done.")
    assert_whole(app, "r")


@pytest.mark.parametrize("stays", [False, True], ids=["once", "stays"])
def test_a_store_that_fails_as_the_block_ends(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    """What was appended stands, so nothing is raised; and nobody counts a death of a process that lives."""

    def fails(*args: Any, **more: Any) -> Any:
        raise StoreError("disk full")

    app = make_app()
    with monkeypatch.context() as broken:
        with app.open("r", "go", tools=[tools()["look"]]) as run:
            run.append([use("look", "c1", text="a")])
            broken.setattr(app._store, "append", fails)
            if stays:
                broken.setattr(app._store, "release", fails)
        assert (app._store.head("r").lease_owner is None) == (not stays)
    until(app, lambda: app._store.head("r").lease_owner is None)
    with app.open("r", tools=[tools()["look"]]) as run:
        assert (run.attempts, [b["id"] for b in run.pending]) == (0, ["c1"])
    assert [row.kind for row in app.journal("r")] == ["RunStarted", "MessageAdded", "MessageAdded"]
    assert app._keeper.held() == 0


def test_a_call_that_could_not_begin_is_pending_again(make_app: MakeApp, ledger: Ledger) -> None:
    """Also where another one was saved meanwhile, which took it for one that runs."""
    app = make_app()

    async def play(run: Any) -> None:
        seen = asyncio.Event()

        async def down(*args: Any) -> bool:
            await seen.wait()
            raise StoreError("disk full")

        act, look = run.pending
        intend, run._drive._intend = run._drive._intend, down
        acting = asyncio.ensure_future(run.call(act))
        await run.call(look)
        seen.set()
        with pytest.raises(StoreError):
            await acting
        run._drive._intend = intend
        assert (run.status, run.pending) == ("running", [act])
        await run.call(act)

    with app.open("r", "go", tools=[tools()["look"], tools()["act"]]) as run:
        run.append([use("act", "c1", text="a"), use("look", "c2", text="b")])
        asyncio.run(play(run))
        run.append("Done.")
    assert_whole(app, "r")


def test_a_result_whose_commit_nobody_answered_is_given_and_told(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    told: list[Any] = []
    app.listen(told.append)
    with app.open("r", "go", tools=[tools()["look"]]) as run:
        run.append([use("look", "c1", text="a")])
        stands = app._store.append

        def unknown(*args: Any, **more: Any) -> Any:
            stands(*args, **more)
            raise CommitUnknown("the answer was lost")

        with monkeypatch.context() as broken:
            broken.setattr(app._store, "append", unknown)
            came = run.call_sync(run.pending[0])
        assert came["content"] == '{"done": "a"}' and "is_error" not in came
        assert [event.seq for event in told if event.type == "checkpoint"][-1] == 3
    assert_whole(app, "r")


def test_an_agent_of_the_same_name_brings_no_tools(make_app: MakeApp, ledger: Ledger) -> None:
    theirs = Agent("boss", model=ScriptedModel(["Done."]), tools=[tools()["act"]])
    app = make_app(theirs)
    with app.open("r", "go", tools=[tools()["look"]], agent="boss") as run:
        run.append([use("look", "c1", text="a")])
        assert run.call_sync(run.pending[0])["content"] == '{"done": "a"}'


def test_calls_in_two_event_loops_at_once_are_refused(make_app: MakeApp) -> None:
    app = make_app()
    go_on = threading.Event()

    @tool(effect="read")
    def look() -> str:
        """Look."""
        begun.set()
        happens(go_on)
        return "seen"

    async def play(run: Any) -> Any:
        first, second = run.pending
        looking = asyncio.ensure_future(run.call(first))
        await asyncio.to_thread(happens, begun)
        with pytest.raises(UsageError, match="another event loop"):
            await asyncio.to_thread(run.call_sync, second)
        go_on.set()
        await looking
        return await run.call(second)

    begun = threading.Event()
    with app.open("r", "go", tools=[look]) as run:
        run.append([use("look", "c1"), use("look", "c2")])
        assert asyncio.run(play(run))["content"] == "seen"


def test_tools_get_what_the_lifespan_gave(store_url: str) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[str]:
        yield "the database"

    @tool(effect="read")
    def look(ctx: ToolContext[str]) -> str:
        """Look."""
        return ctx.deps

    async def play() -> Any:
        async with Outlast(store_url, lifespan=lifespan) as app:
            with app.open("r", "go", tools=[look]) as run:
                run.append([use("look", "c1")])
                return await run.call(run.pending[0])

    assert asyncio.run(play())["content"] == "the database"


def test_a_save_that_finds_the_lease_gone_ends_the_calls(make_app: MakeApp, ledger: Ledger) -> None:
    app, other = make_app(), make_app()
    with app.open("r", "go", tools=[tools()["look"], tools()["deliver"]]) as run:
        run.append([use("look", "c1", text="a"), use("deliver", "c2", text="b")])
        look, deliver = run.pending
        app._keeper.remove(run._writer.lease)  # the keeper has not looked yet
        other.cancel("r")
        for call in (look, deliver):
            with pytest.raises(LeaseLost):
                run.call_sync(call)
    assert ledger.lines("deliver") == []


def test_a_child_that_was_forked_inside_gives_nothing_back(make_app: MakeApp) -> None:
    app = make_app()
    with app.open("r", "go", tools=[]) as run:
        run._pid += 1  # as a forked child sees it
        run._close()
        assert app._store.head("r").lease_owner is not None
        run._pid -= 1
    assert app._store.head("r").lease_owner is None
