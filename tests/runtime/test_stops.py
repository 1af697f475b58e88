"""What a stop finds under way, at every moment of a step: one save at a time, and nothing is said to be in doubt, or unpaid, that is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import LIMIT_S, happens
from tests.support.world import assert_whole, use

from outlast import Agent, Outlast, Retry, ToolContext, tool
from outlast.core import run as r
from outlast.errors import LeaseLost, Refused, StoreError
from outlast.models import ModelRequest, ScriptedModel
from outlast.runtime import drive as drives
from outlast.runtime import perform
from outlast.runtime.writer import Writer
from outlast.stores import base


def kinds(app: Outlast) -> list[str]:
    return [row.kind for row in app.journal("r")]


class Held:
    """A store's `append` that waits where `which` says so; how many are under way at once."""

    def __init__(self, app: Outlast, which: Callable[[Any], bool]) -> None:
        self.append, self.which = app._store.append, which
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.now = self.most = 0
        self.lock = threading.Lock()

    def __call__(self, lease: Any, place: Any, batch: Any, **more: Any) -> Any:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            if self.which(batch) and not self.go_on.is_set():
                self.begun.set()
                happens(self.go_on)
            return self.append(lease, place, batch, **more)
        finally:
            with self.lock:
                self.now -= 1


def holds(kind: type[r.Entry]) -> Callable[[Any], bool]:
    return lambda batch: any(isinstance(e, kind) for e in batch.entries)


def full_disk() -> tuple[threading.Event, Callable[..., Any]]:
    """(it was met, an `append` that meets it)."""
    failed = threading.Event()

    def fails(*args: Any, **more: Any) -> Any:
        failed.set()
        raise StoreError("the disk is full")

    return failed, fails


async def stopped(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task}, timeout=LIMIT_S)
    assert task.cancelled()


def stop_while_it_saves(app: Outlast, agent: Agent[Any], kind: type[r.Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    """One stop of a run, from its beginning, while an entry of this kind is on its way into the store."""
    held = Held(app, holds(kind))
    monkeypatch.setattr(app._store, "append", held)

    async def play() -> None:
        driving = asyncio.ensure_future(app.run(agent, "go", run_id="r"))
        await asyncio.to_thread(happens, held.begun)
        driving.cancel()
        await asyncio.sleep(0)
        held.go_on.set()
        await stopped(driving)

    asyncio.run(play())


def test_however_often_it_is_stopped_one_save_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        held = Held(app, holds(r.MessageAdded))
        monkeypatch.setattr(app._store, "append", held)

        async def play() -> None:
            driving = asyncio.ensure_future(app.run(agent, "go", run_id="r"))
            await asyncio.to_thread(happens, held.begun)
            for _ in range(3):
                driving.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
            await asyncio.to_thread(held.begun.wait, 0.2)  # what a second save would need to begin
            held.go_on.set()
            await stopped(driving)

        asyncio.run(play())
        assert held.most == 1
        assert kinds(app).count("MessageAdded") == 2
        assert app.resume_sync("r").status == "done"
        assert_whole(app, "r")


def test_a_stop_that_is_meant_ends_also_where_nothing_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    failed, fails = full_disk()

    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")
        monkeypatch.setattr(app._store, "append", fails)

        async def play() -> None:
            driving = asyncio.ensure_future(app.resume("r"))
            await asyncio.to_thread(happens, failed)
            for _ in range(2):
                driving.cancel()
                await asyncio.sleep(0)
            await stopped(driving)

        asyncio.run(play())


def test_one_stop_ends_within_its_time_where_nothing_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "GIVE_UP_S", 0.05)
    agent = Agent("a", model=ScriptedModel(["Done."]))
    failed, fails = full_disk()

    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")
        append = app._store.append
        monkeypatch.setattr(app._store, "append", fails)

        async def play() -> None:
            driving = asyncio.ensure_future(app.resume("r"))
            await asyncio.to_thread(happens, failed)
            driving.cancel()
            try:
                await stopped(driving)
            finally:
                driving.cancel()

        asyncio.run(play())
        monkeypatch.setattr(app._store, "append", append)


def test_a_stop_while_the_last_save_is_under_way_says_nothing_of_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        stop_while_it_saves(app, agent, r.RunEnded, monkeypatch)
        assert app.head("r").status == "done"
    assert "could not be given back" not in caplog.text


def test_a_call_hears_at_once_that_its_run_was_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads what is new finds the lease gone before the keeper does: that is no store which fails, and is asked again."""
    monkeypatch.setattr(drives, "STORE_PAUSE_S", 3600.0)
    begun = threading.Event()

    @tool(effect="at_most_once")
    async def pay() -> str:
        """Pay."""
        begun.set()
        await asyncio.Event().wait()
        return "never"

    agent = Agent("a", model=ScriptedModel([[use("pay", "c")], "Done."]), tools=[pay])
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:

        async def play() -> None:
            driving = asyncio.ensure_future(app.run(agent, "go", run_id="r"))
            await asyncio.to_thread(happens, begun)

            def gone(*args: Any, **more: Any) -> Any:
                raise LeaseLost("taken over")

            monkeypatch.setattr(app._store, "load", gone)
            await asyncio.to_thread(app.send, "r", "are you there?")
            await asyncio.wait({driving}, timeout=LIMIT_S)
            assert driving.done() and isinstance(driving.exception(), LeaseLost)

        asyncio.run(play())


def test_a_lease_is_kept_whatever_the_keeper_has_to_tell_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its own thread, before the driver has done anything: the driver's loop is known to it."""
    agent = Agent("a", model=ScriptedModel(["Done."]))
    kept: list[int] = []
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")
        keeper, add = app._keeper, app._keeper.add

        def tells(lease: Any, news: Any) -> None:
            add(lease, news)
            teller = threading.Thread(target=news, args=[base.Renewed(lease.run_id, True, lease.fence, 2)])
            teller.start()
            teller.join()
            kept.append(keeper.held())

        monkeypatch.setattr(keeper, "add", tells)
        assert app.resume_sync("r").status == "done"
    assert kept == [1]


def test_a_call_that_was_stopped_before_its_act_is_not_in_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[str] = []

    @tool
    async def pay() -> str:
        """Pay."""
        acts.append("paid")
        return "paid"

    agent = Agent("a", model=ScriptedModel([[use("pay", "c")], "Done."]), tools=[pay])
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        stop_while_it_saves(app, agent, r.CallStarted, monkeypatch)
        assert (kinds(app)[-1], acts) == ("CallSkipped", [])
        assert app.head("r").status == "running"
        assert app.resume_sync("r").status == "done"
        assert acts == ["paid"]
        assert_whole(app, "r")


@pytest.mark.parametrize("by", ["run", "work"])
def test_a_model_call_that_is_cut_is_counted(tmp_path: Path, by: str) -> None:
    asked, times = threading.Event(), []

    async def model(request: ModelRequest) -> Any:
        times.append(1)
        if len(times) == 1:
            asked.set()
            await asyncio.Event().wait()
        return "Done."

    agent = Agent("a", model=model)
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")

        async def play() -> None:
            driving: Any = asyncio.ensure_future(app.resume("r") if by == "run" else app.work(grace=timedelta(0)))
            await asyncio.to_thread(happens, asked)
            driving.cancel()
            await stopped(driving)

        asyncio.run(play())
        assert kinds(app)[-1] == "ModelCallLost"
        assert app._store.head("r").lease_owner is None
        assert app.resume_sync("r").status == "done"
        assert kinds(app).count("ModelCallLost") == 1


def test_a_model_that_ends_its_own_task_is_no_stop(tmp_path: Path) -> None:
    times: list[int] = []

    async def model(request: ModelRequest) -> Any:
        times.append(1)
        if len(times) < 3:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if len(times) == 2:
                await asyncio.sleep(0)
        return "Done."

    agent = Agent("a", model=model, retry=Retry(attempts=3, backoff=timedelta(0)))
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")
        app.work_sync(until_idle=True)
        assert app.head("r").status == "done"
        assert kinds(app) == ["RunStarted", "MessageAdded", "ModelFailed", "ModelFailed", "MessageAdded", "RunEnded"]


def test_a_loop_of_ones_own_hears_at_once_that_its_run_is_gone(tmp_path: Path) -> None:
    begun, stopped_by = threading.Event(), []

    @tool(effect="idempotent")
    async def slow() -> str:
        """Take long."""
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as e:
            stopped_by.append(e)
            raise
        return "never"

    with Outlast(tmp_path / "o.db") as app, Outlast(tmp_path / "o.db") as other, app.open("r", "go", tools=[slow]) as run:
        run.append([use("slow", "c"), use("slow", "d")])
        canceller = threading.Thread(target=lambda: (happens(begun), other.cancel("r")))
        canceller.start()

        async def both() -> list[Any]:
            return await asyncio.gather(*(run.call(call) for call in run.pending), return_exceptions=True)

        assert [type(x) for x in asyncio.run(both())] == [LeaseLost, LeaseLost]
        canceller.join()
        assert len(stopped_by) == 2
        with pytest.raises(LeaseLost):
            run.append("Done.")


def test_calls_of_a_loop_of_ones_own_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @tool(effect="read")
    async def look(n: int) -> int:
        """Look."""
        return n

    with Outlast(tmp_path / "o.db") as app, app.open("r", "go", tools=[look]) as run:
        run.append([use("look", f"c{n}", n=n) for n in range(6)])
        held = Held(app, lambda batch: False)
        monkeypatch.setattr(app._store, "append", held)

        async def play() -> None:
            await asyncio.gather(*(run.call(call) for call in run.pending))

        asyncio.run(play())
        assert held.most == 1
        assert [b["content"] for b in run.messages[-1]["content"]] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped"])
def test_a_call_of_ones_own_that_comes_back_while_another_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """What is decided for the one knows that the other still runs; and its result, which waits for its turn, is not lost by a stop."""

    @tool(effect="read")
    async def look() -> str:
        """Look."""
        return "seen"

    @tool(effect="at_most_once")
    async def pay() -> str:
        """Pay."""
        begun.set()
        await back.wait()
        paid.set()
        return "paid"

    async def play(run: Any, held: Held) -> list[Any]:
        nonlocal begun, back, paid
        begun, back, paid = asyncio.Event(), asyncio.Event(), asyncio.Event()
        second, first = (asyncio.ensure_future(run.call(call)) for call in reversed(run.pending))
        await begun.wait()
        await asyncio.to_thread(happens, held.begun)
        back.set()
        await paid.wait()
        for task in (first, second) if stopped else ():
            task.cancel()
        await asyncio.sleep(0)
        held.go_on.set()
        return await asyncio.gather(first, second, return_exceptions=True)

    begun = back = paid = asyncio.Event()
    with Outlast(tmp_path / "o.db") as app, app.open("r", "go", tools=[look, pay]) as run:
        run.append([use("look", "A"), use("pay", "B")])
        held = Held(app, lambda batch: any(isinstance(e, r.CallFinished) and e.call_id == "A" for e in batch.entries))
        monkeypatch.setattr(app._store, "append", held)
        came = asyncio.run(play(run, held))
        assert all(isinstance(x, asyncio.CancelledError) for x in came) if stopped else [x["content"] for x in came] == ["seen", "paid"]
        assert (run.status, run.pending) == ("running", [])
        assert [b["content"] for b in run.messages[-1]["content"]] == ["seen", "paid"]
        assert_whole(app, "r")


@pytest.mark.parametrize("effect, again", [("at_most_once", False), ("idempotent", True), ("read", True)])
def test_a_call_of_ones_own_that_was_stopped_is_decided_again(tmp_path: Path, effect: Any, again: bool) -> None:
    keys: list[str] = []

    @tool(effect=effect)
    async def act(ctx: ToolContext[Any]) -> str:
        """Act."""
        keys.append(ctx.idempotency_key)
        begun.set()
        await back.wait()
        return "acted"

    async def play(run: Any) -> None:
        nonlocal begun, back
        begun, back = asyncio.Event(), asyncio.Event()
        call = run.pending[0]
        task = asyncio.ensure_future(run.call(call))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        back.set()
        if again:
            assert (run.status, run.pending) == ("running", [call])
            assert (await run.call(call))["content"] == "acted"
        else:
            assert (run.status, run.pending) == ("waiting_for_verification", [])
            with pytest.raises(Refused, match="act was started and its outcome is unknown: it was stopped while it ran"):
                await run.call(call)

    begun = back = asyncio.Event()
    with Outlast(tmp_path / "o.db") as app, app.open("r", "go", tools=[act]) as run:
        run.append([use("act", "A")])
        asyncio.run(play(run))
        assert len(keys) == 1 + again and len(set(keys)) == 1
        assert_whole(app, "r")


@pytest.mark.parametrize("fails", [False, True], ids=["", "the store fails"])
def test_a_call_of_ones_own_that_was_stopped_twice_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Also where nobody could write down that its outcome is unknown."""
    acted: list[str] = []

    @tool(effect="at_most_once")
    async def act() -> str:
        """Act, and hear of no stop."""
        acted.append("act")
        begun.set()
        try:
            await never.wait()
        except asyncio.CancelledError:
            stopping.set()
            await never.wait()
        return "acted"

    async def play(run: Any) -> None:
        nonlocal begun, stopping, never
        begun, stopping, never = asyncio.Event(), asyncio.Event(), asyncio.Event()
        call = run.pending[0]
        task = asyncio.ensure_future(run.call(call))
        with monkeypatch.context() as broken:
            for heard in (begun, stopping):
                await heard.wait()
                task.cancel()
                if fails:
                    broken.setattr(app._store, "append", full_disk()[1])
            with pytest.raises(asyncio.CancelledError):
                await task
        if fails:
            assert (run.status, run.pending) == ("running", [call])
            said = await asyncio.wait_for(run.call(call), LIMIT_S)
            assert said["content"].startswith("no result yet: act was started and its outcome is unknown")
        assert (run.status, run.pending) == ("waiting_for_verification", [])

    begun = stopping = never = asyncio.Event()
    with Outlast(tmp_path / "o.db") as app, app.open("r", "go", tools=[act]) as run:
        run.append([use("act", "A")])
        asyncio.run(play(run))
        assert acted == ["act"]
        assert_whole(app, "r")


def test_a_call_that_was_stopped_twice_takes_no_later_result_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is stopped twice gives up what is being saved then; the next save is another."""

    @tool(effect="read")
    async def look() -> str:
        """Look."""
        return "seen"

    @tool(effect="at_most_once")
    async def pay() -> str:
        """Pay."""
        return "paid"

    with Outlast(tmp_path / "o.db") as app, app.open("r", "go", tools=[look, pay]) as run:
        run.append([use("look", "A"), use("pay", "B")])
        first, second = run.pending
        held = Held(app, holds(r.CallFinished))
        monkeypatch.setattr(app._store, "append", held)

        async def play() -> Any:
            looking = asyncio.ensure_future(run.call(first))
            await asyncio.to_thread(happens, held.begun)
            for _ in range(2):
                looking.cancel()
                await asyncio.sleep(0)
            held.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await looking
            left = 1

            def fails_once(lease: Any, place: Any, batch: Any, **more: Any) -> Any:
                nonlocal left
                if left and holds(r.CallFinished)(batch):
                    left = 0
                    raise StoreError("database is locked")
                return held.append(lease, place, batch, **more)

            monkeypatch.setattr(app._store, "append", fails_once)
            return await run.call(second)

        assert asyncio.run(play())["content"] == "paid"
        assert_whole(app, "r")


def test_a_stop_while_a_run_is_taken_again_after_its_sub_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Agent("part", model=ScriptedModel(["Part done."]))
    boss = Agent("boss", model=ScriptedModel([[use("part", "A", task="x")], "Done."]), tools=[part.as_tool(description="Does a part.")])
    with Outlast(tmp_path / "o.db", agents=[boss, part]) as app:
        claim, taking, go_on = app._store.claim_run, threading.Event(), threading.Event()

        def slow(run_id: str, *args: Any, **more: Any) -> Any:
            if run_id == "r":
                taking.set()
                happens(go_on)
            return claim(run_id, *args, **more)

        async def play() -> None:
            monkeypatch.setattr(app._store, "claim_run", slow)
            driving = asyncio.ensure_future(app.run(boss, "go", run_id="r"))
            await asyncio.to_thread(happens, taking)
            driving.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await driving

        asyncio.run(play())
        assert app._store.head("r").lease_owner is None
        assert app.resume_sync("r").output == "Done."
        assert "ModelCallLost" not in kinds(app)
        assert_whole(app, "r")


def test_a_stopped_call_of_ones_own_does_not_wait_for_a_store_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @tool(effect="at_most_once")
    async def act() -> str:
        """Act."""
        begun.set()
        await asyncio.Event().wait()
        return "never"

    async def play(run: Any) -> None:
        nonlocal begun
        begun = asyncio.Event()
        call = run.pending[0]
        acting = asyncio.ensure_future(run.call(call))
        await begun.wait()
        with monkeypatch.context() as broken:
            broken.setattr(app._store, "append", full_disk()[1])
            broken.setattr(drives, "GIVE_UP_S", 0.01)
            acting.cancel()
            await stopped(acting)
        assert (run.status, run.pending) == ("running", [call])

    begun = asyncio.Event()
    with Outlast(tmp_path / "o.db") as app, app.open("r", "go", tools=[act]) as run:
        run.append([use("act", "A")])
        asyncio.run(play(run))
        assert_whole(app, "r")


def test_a_call_of_ones_own_that_is_stopped_before_its_intent_stands_never_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acted: list[str] = []

    @tool(effect="at_most_once")
    async def act() -> str:
        """Act."""
        acted.append("act")
        return "acted"

    async def play(run: Any) -> None:
        call = run.pending[0]
        acting = asyncio.ensure_future(run.call(call))
        await asyncio.to_thread(happens, held.begun)
        acting.cancel()
        for _ in range(10):  # the grace is over, and its intent is still on its way
            await asyncio.sleep(0)
        held.go_on.set()
        await stopped(acting)
        assert (run.status, run.pending, acted) == ("running", [call], [])
        assert (await run.call(call))["content"] == "acted"

    monkeypatch.setattr(perform, "GRACE_S", 0)
    with Outlast(tmp_path / "o.db") as app, app.open("r", "go", tools=[act]) as run:
        run.append([use("act", "A")])
        held = Held(app, holds(r.CallStarted))
        monkeypatch.setattr(app._store, "append", held)
        asyncio.run(play(run))
        assert_whole(app, "r")


def test_a_block_that_ends_stops_nothing_that_is_being_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer in another thread, which the store does not take yet: it is paid for."""
    closing, (met, fails), save = threading.Event(), full_disk(), Writer.save

    def closes(self: Writer, *args: Any, draining: bool = False, **more: Any) -> Any:
        if draining:
            closing.set()
        return save(self, *args, draining=draining, **more)

    with Outlast(tmp_path / "o.db") as app:
        append = app._store.append

        def until_it_closes(*args: Any, **more: Any) -> Any:
            return append(*args, **more) if closing.is_set() else fails()

        monkeypatch.setattr(app._store, "append", until_it_closes)
        monkeypatch.setattr(Writer, "save", closes)
        with app.open("r", "go", tools=[]) as run:
            appending = threading.Thread(target=run.append, args=["Done."])
            appending.start()
            happens(met)
        appending.join(LIMIT_S)
        assert app.get("r").output == "Done."
        assert_whole(app, "r")


STUBBORN = '''
import asyncio, gc, logging, sys
from datetime import timedelta
from pathlib import Path
from outlast import Agent, Outlast, tool
from outlast.models import ScriptedModel

logging.basicConfig()
gc.set_threshold(10)  # at every moment: nothing of the tool's own refers to its task

@tool(timeout=timedelta(milliseconds=100))
async def stay() -> str:
    """Swallow every stop."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

agent = Agent("a", model=ScriptedModel([[{"type": "tool_use", "id": "c", "name": "stay", "input": {}}], "Done."]), tools=[stay])
with Outlast(Path(__file__).parent / "o.db", agents=[agent]) as app:
    if sys.argv[1] == "run":
        print(app.run_sync(agent, "go", run_id="r").status, flush=True)
    else:
        app.start(agent, "go", run_id="r")
        app.work_sync(until_idle=True)
        print(app.head("r").status, flush=True)
    assert app._store.head("r").lease_owner is None
'''


@pytest.mark.parametrize("verb", ["run", "work"])
def test_a_tool_that_swallows_every_stop_keeps_nobody(tmp_path: Path, verb: str) -> None:
    (tmp_path / "program.py").write_text(STUBBORN)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), verb], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "waiting_for_verification"), done.stderr
    assert "left behind" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [True, False])
def test_what_comes_after_the_application_is_closed_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    go_on, filed = threading.Event(), threading.Event()

    @tool(timeout=timedelta(milliseconds=50))
    def slow() -> str:
        """Outlive its time."""
        happens(go_on)
        return "at last"

    agent = Agent("a", model=ScriptedModel([[use("slow", "c")], "Done."]), tools=[slow])
    app = Outlast(tmp_path / "o.db", agents=[agent])
    in_thread = perform._in_thread

    def told(function: Any, kwargs: Any, future: Any, late: Any) -> None:
        in_thread(function, kwargs, future, lambda ended: (late(ended), filed.set()))

    monkeypatch.setattr(perform, "_in_thread", told)
    assert app.run_sync(agent, "go", run_id="r").status == "waiting_for_verification"
    store, threads = app._store, app._open()[3]
    if closed:
        app.close()
    go_on.set()
    happens(filed)
    threads.shutdown(wait=True)
    assert (store._files._writer is None) is closed  # type: ignore[attr-defined]  # the SQLite store's own file
    assert ("LateResult" in kinds(app)) is not closed
    app.close()


def test_who_was_stopped_past_its_lease_asks_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its claim and its first look somebody else has taken the run."""
    asked: list[str] = []

    def asks(who: str) -> Agent[Any]:
        async def model(request: ModelRequest) -> Any:
            asked.append(who)
            return "Done."

        return Agent("a", model=model)

    with Outlast(tmp_path / "o.db", agents=[asks("slow")]) as app, Outlast(tmp_path / "o.db", agents=[asks("other")]) as other:
        app.start("a", "go", run_id="r")
        load = app._store.load

        def late(*args: Any, **more: Any) -> Any:
            monkeypatch.setattr(app._store, "load", load)
            found = load(*args, **more)
            other._store._boot_clock = lambda: 10**12  # type: ignore[attr-defined]  # SQLite's lease clock: much later
            other._store.claim_run("r", "host/boot/ns/1/1")
            return found

        monkeypatch.setattr(app._store, "load", late)
        with pytest.raises(LeaseLost):
            app.resume_sync("r")
        assert asked == []
