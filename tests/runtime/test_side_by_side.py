"""Calls that run side by side: what one of them meets takes nothing from the others."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import LIMIT_S, happens, until
from tests.support.world import assert_whole, use

from outlast import Agent, Outlast, approval, tool
from outlast.core import run as r
from outlast.errors import StoreError
from outlast.models import ScriptedModel
from outlast.runtime import drive
from outlast.runtime.writer import Writer


def kinds(app: Outlast) -> list[str]:
    return [row.kind for row in app.journal("r")]


def test_a_gate_beside_a_long_call_is_not_deaf(tmp_path: Path) -> None:
    """Its time passes while the call runs, and nothing else happens meanwhile."""
    expired = threading.Event()

    @tool(effect="idempotent", gate=approval("lead", within=timedelta(milliseconds=300)))
    def gated() -> str:
        return "never"

    @tool(effect="idempotent")
    def slow() -> str:
        happens(expired)
        return "ok"

    agent = Agent("a", model=ScriptedModel([[use("gated", "A"), use("slow", "B")], "Done."]), tools=[gated, slow])
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")

        async def play() -> None:
            worker = asyncio.ensure_future(app.work(until_idle=True))
            await asyncio.to_thread(until, app, lambda: "GateExpired" in kinds(app))
            expired.set()
            await asyncio.wait({worker}, timeout=LIMIT_S)

        try:
            asyncio.run(play())
        finally:
            expired.set()
        assert app.head("r").status == "done"
        assert_whole(app, "r")


def test_a_result_is_kept_where_another_call_could_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are back at the same moment: one with its result, one because its intent could not be saved."""
    monkeypatch.setattr(drive, "STORE_PAUSE_S", 0)
    ran: list[str] = []
    failed = threading.Event()
    propose = Writer.propose

    def fails_once(self: Writer, intent: r.CallStarted, extend: timedelta) -> bool:
        if intent.call_id == "B" and not failed.is_set():
            failed.set()
            raise StoreError("disk full")
        return propose(self, intent, extend)

    monkeypatch.setattr(Writer, "propose", fails_once)

    @tool(effect="idempotent")
    async def quick() -> str:
        ran.append("quick")
        while not failed.is_set():  # noqa: ASYNC110 - both are to come back in the same step of the loop
            await asyncio.sleep(0)
        return "ok"

    @tool
    async def pay() -> str:
        ran.append("pay")
        return "paid"

    agent = Agent("a", model=ScriptedModel([[use("quick", "A"), use("pay", "B")], "Done."]), tools=[quick, pay])
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")
        app.work_sync(until_idle=True)
        assert (app.head("r").status, ran) == ("done", ["quick", "pay"])
        assert app._store.head("r").fence == 1
        assert_whole(app, "r")


def test_a_result_is_kept_where_the_stop_comes_while_another_intent_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result waits for its turn behind the intent of another call when its driver is cancelled."""
    saving, go_on = threading.Event(), threading.Event()
    propose = Writer.propose
    ran: list[str] = []

    def waits(self: Writer, intent: r.CallStarted, extend: timedelta) -> bool:
        if intent.call_id == "B":
            saving.set()
            happens(go_on)
        return propose(self, intent, extend)

    monkeypatch.setattr(Writer, "propose", waits)

    @tool(effect="idempotent")
    async def first() -> str:
        await asyncio.to_thread(happens, saving)
        ran.append("first")
        return "ok"

    @tool
    async def pay() -> str:
        return "paid"

    agent = Agent("a", model=ScriptedModel([[use("first", "A"), use("pay", "B")], "Done."]), tools=[first, pay])
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:

        async def play() -> None:
            driving: Any = asyncio.ensure_future(app.run(agent, "go", run_id="r"))
            while not ran:  # noqa: ASYNC110 - looks at every step of the loop
                await asyncio.sleep(0)
            for _ in range(50):  # steps of the loop: until the driver has taken the result and waits for its turn
                await asyncio.sleep(0)
            driving.cancel()
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.wait({driving}, timeout=LIMIT_S)
            assert driving.cancelled()

        try:
            asyncio.run(play())
        finally:
            go_on.set()
        finished = [row for row in app.journal("r") if row.kind == "CallFinished"]
        assert [row.body for row in finished][:1] and '"A"' in str(finished[0].body)
        assert app._store.head("r").lease_owner is None


def test_a_tool_that_cancels_itself_does_not_stop_its_worker(tmp_path: Path) -> None:
    ran: list[str] = []

    @tool(effect="read")
    async def odd() -> str:
        ran.append("odd")
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return "never"

    agent = Agent("a", model=ScriptedModel([[use("odd", "A")], "Done."]), tools=[odd])
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")
        app.work_sync(until_idle=True)
        assert (app.head("r").status, ran) == ("done", ["odd"])
        assert "cancelled its own task" in str(list(app.journal("r"))[-3].body)
