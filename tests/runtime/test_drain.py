"""Stopping a worker: nothing that was taken is kept, nothing that came is lost, and a stop is heard in every moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import LIMIT_S, happens, until
from tests.support.world import Ledger, assert_whole, tools, use

from outlast import Agent, Outlast, ToolContext, tool
from outlast.core.run import CallFinished
from outlast.errors import InvariantViolated, UsageError
from outlast.models import ScriptedModel
from outlast.runtime import crashpoints
from outlast.runtime.worker import Worker
from outlast.stores.base import Lease


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    crashpoints.arm(None)


def test_a_claim_under_way_is_given_back(tmp_path: Path) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")

        async def play() -> None:
            loop = asyncio.get_running_loop()
            cancelled = threading.Event()

            def stop() -> None:
                worker.cancel()
                cancelled.set()

            def hook(name: str) -> None:
                if name == "commit.before":
                    crashpoints.arm(None)
                    loop.call_soon_threadsafe(stop)
                    happens(cancelled)

            crashpoints.arm(hook)
            worker = asyncio.ensure_future(app.work())
            await asyncio.wait({worker}, timeout=LIMIT_S)
            assert worker.cancelled()

        asyncio.run(play())
        head = app._store.head("r")
        assert (head.lease_owner, head.held, head.attempts, head.fence) == (None, False, 0, 1)
        assert head.wake_at is not None
        app.work_sync(until_idle=True)
        assert app.head("r").status == "done"
        assert app._store.head("r").attempts == 0


@pytest.mark.parametrize("verb", ["run", "resume"])
def test_a_run_that_is_cancelled_while_it_is_taken_is_given_back(tmp_path: Path, verb: str) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        if verb == "resume":
            app.start(agent, "go", run_id="r")
        else:
            app.unfinished_runs()

        async def play() -> None:
            loop = asyncio.get_running_loop()
            cancelled = threading.Event()

            def stop() -> None:
                driving.cancel()
                cancelled.set()

            def hook(name: str) -> None:
                if name == "commit.before":
                    crashpoints.arm(None)
                    loop.call_soon_threadsafe(stop)
                    happens(cancelled)

            crashpoints.arm(hook)
            driving = asyncio.ensure_future(app.run(agent, "go", run_id="r") if verb == "run" else app.resume("r"))
            await asyncio.wait({driving}, timeout=LIMIT_S)
            assert driving.cancelled()

        asyncio.run(play())
        head = app._store.head("r")
        assert (head.lease_owner, head.status, head.attempts) == (None, "running", 0)
        assert app.resume_sync("r").status == "done"
        assert app._store.head("r").attempts == 0


def test_a_stop_is_heard_whatever_comes_at_the_same_moment(tmp_path: Path) -> None:
    """A change in the store and the stop fall together, again and again."""
    agent = Agent("a", model=ScriptedModel(["Done."]))
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:

        async def play() -> None:
            for _ in range(50):
                worker = asyncio.ensure_future(app.work())
                while getattr(app, "_worker", None) is None or not app._worker.ready:  # noqa: ASYNC110 - looks at every step of the loop
                    await asyncio.sleep(0)
                app._worker.changed.set()
                await asyncio.sleep(0)
                worker.cancel()
                await asyncio.wait({worker}, timeout=LIMIT_S)
                assert worker.cancelled()
                app._worker = None

        asyncio.run(play())


@pytest.mark.parametrize("grace", [timedelta(0), timedelta(seconds=20)], ids=["no grace", "grace"])
@pytest.mark.parametrize("effect", ["read", "idempotent", "at_most_once"])
def test_what_runs_gets_the_grace_and_its_result_is_saved(tmp_path: Path, effect: str, grace: timedelta) -> None:
    ledger, begun, release = Ledger(tmp_path / "ledger"), threading.Event(), threading.Event()

    @tool(effect=effect)  # type: ignore[call-overload]  # all three in turn
    async def slow(ctx: ToolContext) -> str:
        ledger.write("slow", ctx.idempotency_key)
        begun.set()
        while not release.is_set():
            await asyncio.to_thread(release.wait, 0.01)
        return "ok"

    agent = Agent("a", model=ScriptedModel([[use("slow", "A"), use("look", "B", text="b")], "Done."]), tools=[slow, tools()["look"]])
    with Outlast(tmp_path / "o.db", agents=[agent], deps=ledger) as app:
        app.start(agent, "go", run_id="r")

        async def play() -> None:
            worker: Any = asyncio.ensure_future(app.work(grace=grace))
            await asyncio.to_thread(happens, begun)
            await asyncio.to_thread(until, app, lambda: any(row.kind == "CallFinished" for row in app.journal("r")))
            worker.cancel()
            await asyncio.sleep(0)
            if grace:
                release.set()
            await asyncio.wait({worker}, timeout=LIMIT_S)
            assert worker.cancelled()

        asyncio.run(play())
        release.set()
        head = app._store.head("r")
        assert (head.lease_owner, head.attempts) == (None, 0)
        kinds = [row.kind for row in app.journal("r")]
        if grace:
            assert head.wake_at is not None
            assert kinds.count("CallFinished") == 2 and kinds[-1] == "MessageAdded"
        elif effect == "at_most_once":
            assert head.status == "waiting_for_verification"
        else:
            assert kinds.count("CallFinished") == 1
        if effect == "at_most_once" and not grace:
            app.verify("r", outcome="happened", result="ok", decided_by="priya")
        app.work_sync(until_idle=True)
        assert app.head("r").status == "done"
        assert len(ledger.lines("look")) == 1
        assert len(ledger.lines("slow")) == (1 if grace or effect == "at_most_once" else 2)
        assert_whole(app, "r")


def test_what_runs_begins_nothing_new_while_a_claim_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop comes while the store takes its time for a claim: the runs that are driven hear of it at once."""
    ledger, begun, release, claiming, claimed = Ledger(tmp_path / "ledger"), *(threading.Event() for _ in range(4))

    @tool(effect="idempotent")
    async def slow(ctx: ToolContext) -> str:
        begun.set()
        await asyncio.to_thread(happens, release)
        return "ok"

    agent = Agent("a", model=ScriptedModel([[use("slow", "A")], "Done."]), tools=[slow])
    with Outlast(tmp_path / "o.db", agents=[agent], deps=ledger) as app:
        app.start(agent, "go", run_id="r")
        claim = app._store.claim

        def slowly(*args: Any, **more: Any) -> Any:
            if begun.is_set():
                claiming.set()
                happens(claimed)
            return claim(*args, **more)

        async def play() -> None:
            monkeypatch.setattr(app._store, "claim", slowly)
            worker: Any = asyncio.ensure_future(app.work(grace=timedelta(seconds=20)))
            await asyncio.to_thread(happens, begun)
            await asyncio.to_thread(app.start, agent, "go", run_id="other")
            await asyncio.to_thread(happens, claiming)
            worker.cancel()
            await asyncio.sleep(0)
            release.set()
            await asyncio.to_thread(until, app, lambda: app._store.head("r").lease_owner is None)
            claimed.set()
            await asyncio.wait({worker}, timeout=LIMIT_S)
            assert worker.cancelled()

        asyncio.run(play())
        head = app._store.head("r")
        assert (head.status, head.model_calls, [row.kind for row in app.journal("r")][-1]) == ("running", 1, "MessageAdded")
        assert app._store.head("other").lease_owner is None
        app.work_sync(until_idle=True)
        assert {app.head("r").status, app.head("other").status} == {"done"}
        assert_whole(app, "r")


def test_cancelling_run_gives_its_lease_back(tmp_path: Path) -> None:
    ledger, begun = Ledger(tmp_path / "ledger"), threading.Event()

    @tool(effect="idempotent")
    async def slow(ctx: ToolContext) -> str:
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()
        return "ok"

    agent = Agent("a", model=ScriptedModel([[use("slow")], "Done."]), tools=[slow])
    with Outlast(tmp_path / "o.db", agents=[agent], deps=ledger) as app:

        async def play() -> None:
            driving = asyncio.ensure_future(app.run(agent, "go", run_id="r"))
            await asyncio.to_thread(happens, begun)
            driving.cancel()
            await asyncio.wait({driving}, timeout=LIMIT_S)
            assert driving.cancelled()

        asyncio.run(play())
        assert app._store.head("r").lease_owner is None
        assert app.resume_sync("r").status == "done"
        assert app._store.head("r").attempts == 0
        assert_whole(app, "r")


def test_runs_whose_agent_cannot_be_driven_here_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose agent's model cannot be made says so and ends; what it had taken does not count as a death."""
    agent = Agent("a", model=ScriptedModel(["Done."]))
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        for run_id in ("r", "s"):
            app.start(agent, "go", run_id=run_id)

        def refuses(*args: Any, **kwargs: Any) -> Any:
            raise UsageError("no key")

        with monkeypatch.context() as broken:
            broken.setattr(app, "_drive_of", refuses)
            with pytest.raises(UsageError, match="no key"):
                app.work_sync(until_idle=True)
        heads = [app._store.head(run_id) for run_id in ("r", "s")]
        assert [(head.lease_owner, head.attempts) for head in heads] == [(None, 0), (None, 0)]
        app.work_sync(until_idle=True)
        assert {app.head(run_id).status for run_id in ("r", "s")} == {"done"}


def test_an_agent_whose_model_cannot_be_made_takes_no_other_along(tmp_path: Path) -> None:
    """Its runs are held with the reason, for a worker that can; the others go on."""
    good, bad = Agent("good", model=ScriptedModel(["Done."])), Agent("bad", model="nobody:model")
    with Outlast(tmp_path / "o.db", agents=[good, bad]) as app:
        for n in range(3):
            app.start(bad, "go", run_id=f"bad-{n}")
            app.start(good, "go", run_id=f"good-{n}")
        app.work_sync(until_idle=True, concurrency=2)
        assert {app.head(f"good-{n}").status for n in range(3)} == {"done"}
        for n in range(3):
            head = app._store.head(f"bad-{n}")
            assert (head.status, head.needs, head.lease_owner, head.attempts) == ("waiting_for_code", "model:bad", None, 0)
            assert head.reason is not None and "unknown model provider 'nobody'" in head.reason
        assert {x.run_id for x in app.stuck()} == {"bad-0", "bad-1", "bad-2"}
        with pytest.raises(UsageError, match="unknown model provider"):
            app.resume_sync("bad-0")
    with Outlast(tmp_path / "o.db", agents=[good, Agent("bad", model=ScriptedModel(["Done."]))]) as app:
        app.work_sync(until_idle=True)
        assert {app.head(f"bad-{n}").status for n in range(3)} == {"done"}
        assert app.store_check() == []


def test_what_is_driven_in_a_process_of_its_own_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to stop at once, cut off after the grace, and has ended, or was ended, before its worker does."""
    monkeypatch.setattr("outlast.runtime.worker.ALONE_FROM", 0)
    agent = Agent("a", model=ScriptedModel(["Done."]))
    told: list[bool] = []
    ended: list[bool] = []
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")

        async def play() -> None:
            begun, ending = asyncio.Event(), asyncio.Event()

            async def alone(lease: Lease, stopping: asyncio.Event) -> None:
                begun.set()
                try:
                    await stopping.wait()
                    told.append(True)
                    await asyncio.Event().wait()
                finally:
                    asyncio.get_running_loop().call_later(0.05, ending.set)
                    await ending.wait()
                    ended.append(True)

            async def blocking(f: Callable[..., Any], *args: Any) -> Any:
                return await asyncio.to_thread(f, *args)

            def no_drive(lease: Lease) -> Any:
                raise AssertionError

            worker = Worker(
                app._store, app._keeper, agents=["a"], concurrency=1, grace=timedelta(seconds=-4.9), lease_s=30, until_idle=False, drive=no_drive,
                blocking=blocking, satisfies=lambda agent, needs: False, alone=alone)  # fmt: skip
            work = asyncio.ensure_future(worker())
            await asyncio.wait_for(begun.wait(), LIMIT_S)
            work.cancel()
            await asyncio.wait({work}, timeout=LIMIT_S)
            assert work.cancelled() and (told, ended) == ([True], [True])

        asyncio.run(play())


@pytest.mark.parametrize("stops", [1, 2])
@pytest.mark.parametrize("during", ["claim", "mark"])
def test_what_was_claimed_and_not_begun_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str, stops: int) -> None:
    """However often its worker is stopped, and wherever in taking a batch: while it is claimed, while its first run is put aside. A claim may
    take longer than the grace."""
    monkeypatch.setattr("outlast.runtime.worker.SAVE_S", 0.0)
    reached, go_on = threading.Event(), threading.Event()
    good, bad = Agent("good", model=ScriptedModel(["Done."])), Agent("bad", model="nobody:model")
    with Outlast(tmp_path / "o.db", agents=[good, bad]) as app:
        app.start(bad, "go", run_id="bad")
        for n in range(3):
            app.start(good, "go", run_id=f"good-{n}")
        does = getattr(app._store, during)

        def slowly(*args: Any, **more: Any) -> Any:
            done = does(*args, **more) if during == "claim" else None
            reached.set()
            happens(go_on)
            return done if during == "claim" else does(*args, **more)

        async def play() -> None:
            monkeypatch.setattr(app._store, during, slowly)
            worker: Any = asyncio.ensure_future(app.work(grace=timedelta(0)))
            await asyncio.to_thread(happens, reached)
            for _ in range(stops):
                worker.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
            go_on.set()
            await asyncio.wait({worker}, timeout=LIMIT_S)
            assert worker.cancelled()
            if stops == 2:  # that one waits for nothing; what was claimed goes back all the same
                await asyncio.to_thread(until, app, lambda: not any(app._store.head(f"good-{n}").held for n in range(3)))

        asyncio.run(play())
        assert {(app._store.head(f"good-{n}").lease_owner, app._store.head(f"good-{n}").attempts) for n in range(3)} == {(None, 0)}
        monkeypatch.undo()
        app.work_sync(until_idle=True)
        assert {app.head(f"good-{n}").status for n in range(3)} == {"done"}


def test_a_worker_that_fails_drains_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs gets the grace, its result is saved, its lease goes back; then the failure is told."""
    begun, failed = threading.Event(), threading.Event()

    @tool(effect="at_most_once")
    async def pay() -> str:
        begun.set()
        await asyncio.to_thread(happens, failed)
        return "paid"

    agent = Agent("a", model=ScriptedModel([[use("pay", "A")], "Done."]), tools=[pay])
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")
        parked = app._store.parked

        def fails(*args: Any, **more: Any) -> Any:
            if begun.is_set():
                failed.set()
                raise InvariantViolated("the store is not what it was")
            return parked(*args, **more)

        with monkeypatch.context() as broken:
            broken.setattr(app._store, "parked", fails)
            with pytest.raises(InvariantViolated):
                app.work_sync(until_idle=True)
        head = app._store.head("r")
        assert (head.status, head.lease_owner, head.attempts) == ("running", None, 0)
        assert [row.kind for row in app.journal("r")][-2:] == ["CallFinished", "MessageAdded"]
        app.work_sync(until_idle=True)
        assert_whole(app, "r")


@pytest.mark.parametrize("by_hand", [False, True], ids=["driven", "by hand"])
def test_a_result_on_its_way_is_filed_where_the_stop_and_the_loss_of_the_lease_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    saving, go_on = threading.Event(), threading.Event()

    @tool(effect="at_most_once")
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent("a", model=ScriptedModel([[use("pay", "A")], "Done."]), tools=[pay])
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        append = app._store.append

        def held(lease: Any, place: Any, batch: Any, **more: Any) -> Any:
            if any(isinstance(e, CallFinished) for e in batch.entries):
                saving.set()
                happens(go_on)
            return append(lease, place, batch, **more)

        async def stops(driving: Any) -> None:
            await asyncio.to_thread(happens, saving)
            await asyncio.to_thread(app.cancel, "r", by="priya")
            driving.cancel()
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.wait({driving}, timeout=LIMIT_S)
            assert driving.cancelled()
            await asyncio.to_thread(until, app, lambda: [row.kind for row in app.journal("r")][-1] == "LateResult")

        async def play() -> None:
            monkeypatch.setattr(app._store, "append", held)
            if not by_hand:
                await stops(asyncio.ensure_future(app.run(agent, "go", run_id="r")))
                return
            with app.open("r", "go", tools=[pay]) as run:
                run.append([use("pay", "A")])
                await stops(asyncio.ensure_future(run.call(run.pending[0])))

        asyncio.run(play())
