"""Tools that hang, outlive their time, or throw what nobody throws: one outcome each, and the worker lives."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cases.conftest import MakeApp
from tests.support.waiting import LIMIT_S, happens, until
from tests.support.world import Ledger, assert_whole, finish, tools, use

from outlast import Agent, Retry, ToolContext, tool
from outlast.models import ScriptedModel
from outlast.runtime.clock import ManualClock, monotonic
from outlast.tools import DEFAULT_TIMEOUT

ROOT = Path(__file__).parents[2]
SHORT = timedelta(milliseconds=200)


@pytest.mark.parametrize("colour", ["sync", "async that clings", "async"])
@pytest.mark.parametrize("effect", ["read", "idempotent", "at_most_once"])
def test_timeout_leaves_thread_running(effect: str, colour: str, make_app: MakeApp, ledger: Ledger, clock: ManualClock) -> None:
    """Control comes back on time; the outcome is unknown, and what comes later is kept as evidence, never as a result."""
    release, ended = threading.Event(), threading.Event()

    def act(ctx: ToolContext) -> str:
        ledger.write("begun", ctx.idempotency_key)
        happens(release)
        ledger.write("late", ctx.idempotency_key)
        ended.set()
        return "late"

    async def act_async(ctx: ToolContext) -> str:
        ledger.write("begun", ctx.idempotency_key)
        while not release.is_set():
            try:
                await asyncio.wait_for(asyncio.Event().wait(), 0.05)
            except TimeoutError:
                continue
            except asyncio.CancelledError:
                if colour == "async":
                    raise
        ledger.write("late", ctx.idempotency_key)
        ended.set()
        return "late"

    slow = tool(effect=effect, timeout=SHORT, name="slow")(act if colour == "sync" else act_async)  # type: ignore[call-overload]  # all three
    agent = Agent("a", model=ScriptedModel([[use("slow")], "Done."]), tools=[slow])
    app = make_app(agent, clock=clock)

    async def play() -> Any:
        began = monotonic()
        run = await app.run(agent, "go", run_id="r")
        assert monotonic() - began < LIMIT_S / 3
        if colour == "async that clings":  # an event loop never ends before its tasks do
            release.set()
        return run

    run = asyncio.run(play())
    if effect == "read":
        assert run.status == "done"
        result = run.messages[2]["content"][0]
        assert result["is_error"] is True
        assert "timed out" in result["content"] and "unknown" in result["content"]
    elif effect == "idempotent":
        assert run.status == "waiting_for_timer"
        assert [row.kind for row in app.journal("r")][-1] == "CallFailed"
    else:
        assert run.status == "waiting_for_verification"
        assert "timed out" in run.gates[0].text
    assert len(ledger.lines("begun")) == 1
    release.set()
    if colour == "sync":
        happens(ended)
        until(app, lambda: any(row.kind == "LateResult" for row in app.journal("r")), what="the late result is filed")
        if effect == "at_most_once":
            assert app.get("r").gates[0].outcome == "happened"
        run = app.resume_sync("r") if effect == "at_most_once" else run
    if effect != "idempotent":
        for message in run.messages:
            assert not (effect == "read" and "late" in str(message))
    assert_whole(app, "r")


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_an_idempotent_call_that_times_out_is_tried_with_the_same_key_then_a_person_is_asked(
    colour: str, make_app: MakeApp, ledger: Ledger, clock: ManualClock
) -> None:
    never = threading.Event()

    def act(ctx: ToolContext) -> str:
        ledger.write("begun", ctx.idempotency_key, attempt=ctx.attempt)
        never.wait(LIMIT_S)
        return "late"

    async def act_async(ctx: ToolContext) -> str:
        ledger.write("begun", ctx.idempotency_key, attempt=ctx.attempt)
        await asyncio.Event().wait()
        return "late"

    slow = tool(effect="idempotent", timeout=SHORT, name="slow", retry=Retry(3))(act if colour == "sync" else act_async)
    agent = Agent("a", model=ScriptedModel([[use("slow")], "Done."]), tools=[slow])
    app = make_app(agent, clock=clock)
    run = app.run_sync(agent, "go", run_id="r")
    for _ in range(2):
        assert run.status == "waiting_for_timer"
        assert run.wake_at is not None
        clock.move(max(run.wake_at - clock.now, timedelta(0)))
        run = app.resume_sync("r")
    assert run.status == "waiting_for_verification"
    assert [(line["key"], line["attempt"]) for line in ledger.lines()] == [("r:toolu_01", n) for n in (1, 2, 3)]
    app.verify("r", outcome="give_up", decided_by="priya")
    run = app.resume_sync("r")
    assert run.status == "done"
    assert "unknown" in run.messages[2]["content"][0]["content"]
    never.set()
    assert_whole(app, "r")


def test_a_late_result_in_a_worker_that_goes_on(make_app: MakeApp, ledger: Ledger) -> None:
    """The thread that outlived its time ends while the worker drives others: its result answers the person's gate."""
    release = threading.Event()

    @tool(timeout=SHORT)
    def slow(ctx: ToolContext) -> str:
        ledger.write("slow", ctx.idempotency_key)
        happens(release)
        return "late but true"

    agent = Agent("a", model=ScriptedModel([[use("slow")], "Done."]), tools=[slow])
    app = make_app(agent)
    app.start(agent, "go", run_id="r")

    async def play() -> None:
        worker = asyncio.ensure_future(app.work())
        await asyncio.to_thread(until, app, lambda: app.head("r").status == "waiting_for_verification")
        release.set()
        await asyncio.to_thread(until, app, lambda: app.head("r").status == "done", what="the late result took the run on")
        worker.cancel()
        await asyncio.wait({worker})

    asyncio.run(play())
    assert app.get("r").messages[2]["content"][0]["content"] == "late but true"
    assert len(ledger.lines()) == 1
    assert_whole(app, "r")


HANGS = """
import sys, threading
from datetime import timedelta
from outlast import Agent, Outlast, ToolContext, tool
from outlast.models import ScriptedModel
@tool(effect="read", timeout=timedelta(milliseconds=200))
def hangs() -> str:
    "Hangs."
    threading.Event().wait()
agent = Agent("a", model=ScriptedModel([[{"type": "tool_use", "id": "t", "name": "hangs", "input": {}}], "Done."]), tools=[hangs])
with Outlast(sys.argv[1], agents=[agent]) as app:
    print(app.run_sync(agent, "go", run_id="r").status, flush=True)
"""


def test_a_thread_that_hangs_does_not_hang_the_end_of_the_process(store_url: str) -> None:
    done = subprocess.run([sys.executable, "-c", HANGS, store_url], cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_hung_remote_tool_never_returns(make_app: MakeApp, ledger: Ledger) -> None:
    """Every tool has a time; others go on meanwhile; a cancel is heard at once, and the hung call is in doubt, not repeated."""
    assert timedelta(seconds=1) < DEFAULT_TIMEOUT < timedelta(minutes=10)
    begun, never = threading.Event(), threading.Event()

    @tool
    def hung(ctx: ToolContext) -> str:
        ledger.write("hung", ctx.idempotency_key)
        begun.set()
        never.wait(4 * LIMIT_S)
        return "late"

    agent = Agent(
        "a", model=ScriptedModel([lambda messages: [use("hung")] if messages[0]["content"] == "hang" else "Done.", "Done."]), tools=[hung]
    )
    app = make_app(agent)
    app.start(agent, "hang", run_id="hangs")

    async def play() -> None:
        worker = asyncio.ensure_future(app.work())
        await asyncio.to_thread(happens, begun)
        await asyncio.to_thread(app.start, agent, "quick", run_id="quick")
        await asyncio.to_thread(until, app, lambda: app.head("quick").status == "done")
        began = monotonic()
        await asyncio.to_thread(app.cancel, "hangs", by="priya")
        await asyncio.to_thread(until, app, lambda: not worker_runs(app), what="the worker let go of it")
        assert monotonic() - began < LIMIT_S / 3
        worker.cancel()
        await asyncio.wait({worker})

    def worker_runs(app: Any) -> bool:
        return bool(app._keeper._held)

    asyncio.run(play())
    run = app.get("hangs")
    assert run.status == "cancelled"
    assert "unknown" in run.messages[-1]["content"][0]["content"]
    assert len(ledger.lines()) == 1
    never.set()
    assert_whole(app, "hangs")


class Odd(BaseException):
    """What no tool should throw."""


THROWN: list[Any] = [SystemExit(3), SystemExit(), KeyboardInterrupt(), Odd("odd"), GeneratorExit(), asyncio.CancelledError(), StopIteration(),
                     MemoryError(), RecursionError("deep"), ExceptionGroup("several", [ValueError("x")])]  # fmt: skip


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("effect", ["read", "idempotent", "at_most_once"])
@pytest.mark.parametrize("thrown", THROWN, ids=lambda e: type(e).__name__ + str(e)[:3])
def test_tool_calls_sys_exit(
    thrown: BaseException, effect: str, colour: str, make_app: MakeApp, ledger: Ledger, clock: ManualClock
) -> None:
    """Whatever it is, the worker lives, the sibling keeps its result, and the outcome follows the effect."""

    def act(ctx: ToolContext) -> str:
        ledger.write("act", ctx.idempotency_key)
        raise thrown

    async def act_async(ctx: ToolContext) -> str:
        return act(ctx)

    bad = tool(effect=effect, name="bad", retry=None if effect == "at_most_once" else Retry(1))(act if colour == "sync" else act_async)  # type: ignore[call-overload]  # all three
    agent = Agent("a", model=ScriptedModel([[use("bad", "A"), use("look", "B", text="b")], "Done."]), tools=[bad, tools()["look"]])
    app = make_app(agent, clock=clock)
    app.start(agent, "go", run_id="r")
    app.work_sync(until_idle=True)
    run = app.get("r")
    assert len(ledger.lines("act")) == 1
    assert len(ledger.lines("look")) == 1
    if effect == "read":
        assert run.status == "done"
        bad_result, sibling = run.messages[2]["content"]
        assert bad_result["is_error"] is True
        assert bad_result["content"].startswith("bad failed: ")
        if isinstance(thrown, SystemExit) and thrown.code:
            assert "exit(3)" in bad_result["content"]
        assert sibling["content"] == '{"done": "b"}'
    else:
        assert run.status == "waiting_for_verification", run.reason
        app.verify("r", outcome="give_up", decided_by="priya")
        assert finish(app, app.resume_sync("r"), ledger, clock).status == "done"
        assert len(ledger.lines("act")) == len(ledger.lines("look")) == 1
    assert_whole(app, "r")


def test_an_unawaited_coroutine_and_other_odd_results(make_app: MakeApp, ledger: Ledger) -> None:
    async def later() -> str:
        return "awaited"

    @tool(effect="read")
    def gives_coroutine() -> Any:
        return later()

    @tool(effect="read")
    async def gives_generator() -> Any:
        return (n for n in range(3))

    agent = Agent(
        "a",
        model=ScriptedModel([[use("gives_coroutine", "A"), use("gives_generator", "B")], "Done."]),
        tools=[gives_coroutine, gives_generator],
    )
    run = make_app(agent).run_sync(agent, "go", run_id="r")
    a, b = run.messages[2]["content"]
    assert a["content"] == "awaited"
    assert b["is_error"] is True


WORKER = """
import sys, threading
from outlast import Agent, Outlast, ToolContext, tool
from outlast.models import ScriptedModel
@tool
def slow() -> str:
    "Slow."
    print("begun", flush=True)
    sys.stdin.readline()
    return "ok"
agent = Agent("a", model=ScriptedModel([[{"type": "tool_use", "id": "t", "name": "slow", "input": {}}], "Done."]), tools=[slow])
with Outlast(sys.argv[1], agents=[agent]) as app:
    app.start(agent, "go", run_id="r")
    try:
        app.work_sync()
    except KeyboardInterrupt:
        print("stopped", flush=True)
"""


def test_a_real_ctrl_c_still_stops_the_worker_and_a_result_that_comes_is_saved(store_url: str, make_app: MakeApp) -> None:
    child = subprocess.Popen([sys.executable, "-c", WORKER, store_url], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "begun\n"
        os.kill(child.pid, signal.SIGINT)
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert child.stdout.readline() == "stopped\n"
        assert child.wait(LIMIT_S) == 0
    finally:
        child.kill()
        child.wait()
    app = make_app()
    head = app._store.head("r")
    assert (head.status, head.lease_owner, head.attempts) == ("running", None, 0)
    assert [row.kind for row in app.journal("r")][-2:] == ["CallFinished", "MessageAdded"]
