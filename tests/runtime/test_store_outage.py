"""The store fails while runs are driven: their worker lives and knows it, so nobody counts a death, and nothing that runs is taken along."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import LIMIT_S, happens

from outlast import Agent, Outlast, tool
from outlast.errors import StoreError
from outlast.models import ScriptedModel
from outlast.runtime import drive as driving
from outlast.runtime.leases import Keeper
from outlast.runtime.worker import Worker
from outlast.stores import base

LEASE = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "STORE_PAUSE_S", 0.05)
    monkeypatch.setattr("outlast.runtime.worker.STORE_PAUSE_S", 0.05)


class Fails:
    """A store's method that raises as long as `left` says."""

    def __init__(self, method: Callable[..., Any], times: int) -> None:
        self.method, self.left, self.failed = method, times, threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.left > 0:
            self.left -= 1
            self.failed.set()
            raise StoreError("the disk is full")
        return self.method(*args, **kwargs)


def kinds(app: Outlast, run_id: str = "r") -> list[str]:
    return [row.kind for row in app.journal(run_id)]


@pytest.mark.parametrize("method", ["load", "head"])
def test_outages_are_no_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    with Outlast(tmp_path / "o.db", agents=[agent], lease=LEASE) as app:
        app.start(agent, "go", run_id="r")
        monkeypatch.setattr(app._store, method, Fails(getattr(app._store, method), 7))
        monkeypatch.setattr(app._store, "release", Fails(app._store.release, 2))
        app.work_sync(until_idle=True)
        head = app._store.head("r")
        assert (head.status, head.attempts) == ("done", 0)
        assert kinds(app) == ["RunStarted", "MessageAdded", "MessageAdded", "RunEnded"]


def test_a_foreground_run_that_met_an_outage_is_free_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")
        monkeypatch.setattr(app._store, "load", Fails(app._store.load, 1))
        with pytest.raises(StoreError, match="disk is full"):
            app.resume_sync("r")
        assert app.resume_sync("r").status == "done"
        assert "ModelCallLost" not in kinds(app)


def test_an_outage_takes_no_call_along_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release, calls = threading.Event(), threading.Event(), []

    @tool(effect="at_most_once")
    async def pay() -> str:
        """Pay."""
        calls.append(1)
        begun.set()
        await asyncio.to_thread(happens, release)
        return "paid"

    agent = Agent("a", model=ScriptedModel([[{"type": "tool_use", "id": "c", "name": "pay", "input": {}}], "Done."]), tools=[pay])
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")

        async def play() -> None:
            work = asyncio.ensure_future(app.work(until_idle=True))
            await asyncio.to_thread(happens, begun)
            load = Fails(app._store.load, 3)
            monkeypatch.setattr(app._store, "load", load)
            await asyncio.to_thread(app.send, "r", "are you there?")
            await asyncio.to_thread(happens, load.failed)
            release.set()
            await asyncio.wait_for(work, LIMIT_S)

        asyncio.run(play())
        assert app.head("r").status == "done"
        assert "CallDoubted" not in kinds(app)
        assert len(calls) == 1


class Told:
    """What a worker asks of its store; a look at what is due."""

    def __init__(self) -> None:
        self.over: list[bool] = []

    def reap(self) -> int:
        return 0

    def parked(self, **more: Any) -> list[tuple[str, str]]:
        return []

    def claim(self, owner: str, *, over: bool, **more: Any) -> list[base.Lease]:
        self.over.append(over)
        return []


def test_whatever_met_the_outage_no_lease_is_taken_over_for_one_lease_period() -> None:
    store = Told()
    keeper = Keeper(store, 30)  # type: ignore[arg-type]  # what is used of a store

    async def blocking(f: Callable[..., Any], *args: Any) -> Any:
        return f(*args)

    def no_drive(lease: base.Lease) -> Any:
        raise AssertionError

    worker = Worker(
        store, keeper, agents=["a"], concurrency=1, grace=timedelta(0), lease_s=30, until_idle=True, drive=no_drive, blocking=blocking,  # type: ignore[arg-type]  # likewise
        satisfies=lambda agent, needs: False)  # fmt: skip
    asyncio.run(worker._take())
    keeper.lost_at = driving.monotonic()  # a renewal failed
    asyncio.run(worker._take())
    keeper.lost_at = driving.monotonic() - 31
    asyncio.run(worker._take())
    worker._lost_store()
    asyncio.run(worker._take())
    assert store.over == [True, False, True, False]


def test_the_keeper_says_when_it_lost_the_store() -> None:
    class Gone(Told):
        asked = threading.Event()

        def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
            self.asked.set()
            raise StoreError("gone")

    store = Gone()
    keeper = Keeper(store, 30)  # type: ignore[arg-type]  # what is used of a store
    before = driving.monotonic()
    try:
        keeper.add(base.Lease(1, "r", "a", 1, "n", "me", driving.datetime.now()), lambda renewed: None)
        happens(store.asked)
        keeper.add(base.Lease(2, "s", "a", 1, "n", "me", driving.datetime.now()), lambda renewed: None)
        assert keeper.held() == 2
    finally:
        keeper.close()
    assert keeper.lost_at >= before
