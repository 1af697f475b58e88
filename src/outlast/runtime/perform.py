"""Running one tool call: its function, its check, its time-out, and what each outcome means.

The world is touched here and nowhere else. Whatever a tool does (returns, raises anything at all, hangs), exactly one fact comes out; what
follows from a fact is decided in `core`. Effects and outcomes:

    raised                  read                        idempotent                       at_most_once
    ToolFailed              error result                error result                     error result (surely not done)
    anything, time-out      error result after retry=   unknown: the same key again,     in doubt: check=, else a person
                                                        durably; spent: a person
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from outlast.core import codec, gate
from outlast.core import messages as m
from outlast.core import run as r
from outlast.core.step import RunCall
from outlast.errors import ToolFailed, UsageError
from outlast.runtime.crashpoints import point
from outlast.tools import Outcome, Retry, Tool, ToolContext, ToolResult, Wait

GRACE_S = 1.0  # for a cancelled async tool to clean up; then it is left behind like a thread
DEFAULT_RETRY = Retry()  # of an idempotent tool without retry=: the same key is always tried again before a person is asked


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended: a value, or what was raised. `alive`: it outlived its time and may still act."""

    value: Any = None
    raised: BaseException | None = None
    alive: bool = False


Late = Callable[[Ended], None]


async def invoke(
    function: Callable[..., Any], ctx: ToolContext[Any], args: dict[str, Any], *, context_name: str | None, timeout: timedelta, late: Late
) -> Ended:
    """Call a person's function: a coroutine here, a plain one in a thread of its own. Never raises but for our own cancellation.

    `late` is called (in whatever thread) when an attempt that was given up ends after all.
    """
    kwargs = {**args, context_name: ctx} if context_name else args
    if inspect.iscoroutinefunction(function):
        return await _within(_guarded(function(**kwargs)), timeout, late)
    future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
    _in_thread(function, kwargs, future, late)
    ended = await _within(future, timeout, late, thread=True)  # who gives up cancels it; what the thread delivers afterwards is late
    if ended.raised is None and not ended.alive and inspect.isawaitable(ended.value):
        return await _within(_guarded(ended.value), timeout, late)
    return ended


def _in_thread(function: Callable[..., Any], kwargs: dict[str, Any], future: asyncio.Future[Ended], late: Late) -> None:
    """A daemon thread: one that hangs does not hang the shutdown."""
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            ended = Ended(context.run(function, **kwargs))
        except BaseException as e:  # noqa: BLE001 - SystemExit and the like are the tool's outcome, not ours
            ended = Ended(raised=e)

        def deliver() -> None:
            if not future.done():
                future.set_result(ended)
            else:
                late(ended)

        try:
            loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop is gone
            late(ended)

    threading.Thread(target=run, name=f"tool {getattr(function, '__name__', '')}", daemon=True).start()


async def _guarded(awaitable: Awaitable[Any]) -> Ended:
    """Await a person's coroutine; what it raises becomes a value, our own cancellation stays one."""
    try:
        return Ended(await awaitable)
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Ended(raised=e)
    except BaseException as e:  # noqa: BLE001 - SystemExit and the like are the tool's outcome, not ours
        return Ended(raised=e)


_outliving: set[asyncio.Future[Ended]] = set()  # an event loop itself keeps none of its tasks alive


def _outlives(task: asyncio.Future[Ended], late: Late) -> None:
    """It goes on after its time was over: kept until it ends, and what it says then is told."""
    _outliving.add(task)
    task.add_done_callback(_outliving.discard)
    task.add_done_callback(lambda t: None if t.cancelled() else late(t.result()))


async def _within(work: Any, timeout: timedelta, late: Late, *, thread: bool = False) -> Ended:
    """Control comes back on time, whatever the work does."""
    task: asyncio.Future[Ended] = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout.total_seconds())
    except asyncio.CancelledError:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            done, _ = await asyncio.wait({task}, timeout=0 if thread else GRACE_S)
            if not done and not thread:
                _outlives(task, late)
            elif not task.cancelled():
                late(task.result())
        raise
    if done and task.cancelled():  # by itself, we were not: the tool's outcome, or its worker would take it for a stop of its own
        return Ended(raised=asyncio.CancelledError("the tool cancelled its own task"))
    if done:
        return task.result()
    why = TimeoutError(f"timed out after {gate.duration(timeout)}")
    if thread:
        task.cancel()
        return Ended(raised=why, alive=True)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=GRACE_S)
    if not done:
        _outlives(task, late)
        return Ended(raised=why, alive=True)
    return Ended(raised=why) if task.cancelled() else Ended(raised=why, value=task.result().value)


# ---- what an outcome means ----------------------------------------------------------------------------------------------------


async def act(call: RunCall, tool: Tool[..., Any], ctx: ToolContext[Any], late: Late) -> Ended:
    """One attempt of the tool itself."""
    point(f"tool.before:{call.name}")
    ended = await invoke(tool.fn, ctx, tool.validated(call.args), context_name=tool.context_name, timeout=tool.timeout, late=late)
    point(f"tool.after:{call.name}")
    return ended


async def look(call: RunCall, tool: Tool[..., Any], ctx: ToolContext[Any]) -> Outcome:
    """What the tool's check says of an earlier attempt. Anything but an Outcome counts as unknown."""
    assert tool.check is not None
    point(f"check.before:{call.name}")
    check = tool.check

    def bound(**kwargs: Any) -> Any:
        return check(ctx, **kwargs)

    async def bound_async(**kwargs: Any) -> Any:
        return await check(ctx, **kwargs)

    ended = await invoke(bound_async if inspect.iscoroutinefunction(check) else bound, ctx, tool.validated(call.args), context_name=None,
                         timeout=tool.timeout, late=lambda ended: None)  # fmt: skip
    point(f"check.after:{call.name}")
    if ended.raised is not None:
        return Outcome.unknown(f"the check failed: {describe(ended.raised)}")
    if isinstance(ended.value, Outcome):
        return ended.value
    return Outcome.unknown(f"the check returned {ended.value!r:.60}, not an Outcome")


def fact(call: RunCall, entry: r.Call, tool: Tool[..., Any], ended: Ended, now: datetime) -> r.Entry:
    """The one fact that an attempt leaves in the journal."""
    if ended.raised is None:
        return result(entry, ended.value, now)
    why = describe(ended.raised)
    if isinstance(ended.raised, ToolFailed):
        return r.CallFinished(call.call_id, str(ended.raised) or "failed", is_error=True)
    if call.effect == "at_most_once":
        return r.CallDoubted(call.call_id, why, may_act_until=now + tool.timeout if ended.alive else now)
    retry = tool.retry or (DEFAULT_RETRY if call.effect == "idempotent" else None)
    again = retry is not None and entry.failures + 1 < retry.attempts
    again = again and (call.effect == "idempotent" or (retry is not None and isinstance(ended.raised, retry.on)))
    if again and retry is not None:
        after = getattr(ended.raised, "retry_after", None)
        delay = retry.delay(entry.failures + 1, after if isinstance(after, timedelta) else None)
        return r.CallFailed(call.call_id, why, now + delay)
    if call.effect == "idempotent":
        return r.CallDoubted(call.call_id, f"{why} (tried {m.plural(entry.failures + 1, 'time')} with the same key)")
    return r.CallFinished(call.call_id, f"{call.name} failed: {why}", is_error=True)


def result(entry: r.Call, value: Any, now: datetime) -> r.Entry:
    """A tool's value as its result, or as a wait."""
    if isinstance(value, Wait):
        ends, rule = _ends(value, now)
        args = {
            "event": value.event or entry.id,
            "timer": value.event is None and value.until is not None,  # an instant and no name: nobody is expected to answer
            "otherwise": value.otherwise,
        }
        return r.GateOpened(
            f"event:{entry.id}", "event", entry.id, entry.name, codec.digest(args), noun="event", args=args, closes_at=ends,
            rungs=[{"role": None, "deadline": r.iso(ends) if ends else None, "rule": rule, "remind_at": []}])  # fmt: skip
    if isinstance(value, ToolResult):
        content, is_error = codec.result_content(value.content) if isinstance(value.content, str) else codec.block_content(value.content)
        is_error = is_error or value.is_error
    else:
        content, is_error = codec.result_content(value)
    if told := gate.changed(entry):
        content = told + content if isinstance(content, str) else [m.text(told), *content]
    return r.CallFinished(entry.id, content, is_error=is_error)


def _ends(wait: Wait, now: datetime) -> tuple[datetime | None, dict[str, Any]]:
    """Until when a wait lasts, and the rule that says so. Hours that are over for good give no end: the tool has acted, so it still waits."""
    rule: dict[str, Any] = {"within_s": wait.within.total_seconds() if wait.within is not None else None}
    if wait.hours is not None:
        rule["hours"] = wait.hours.rule()
    try:
        return wait.ends(now), rule
    except UsageError as e:
        return None, {**rule, "problem": str(e)}


def describe(e: BaseException) -> str:
    """An exception in one line, for a model and for people."""
    if isinstance(e, SystemExit):
        return f"the tool called exit({e.code if e.code is not None else ''})"
    text = " ".join(str(e).split())[:2000]
    if isinstance(e, TimeoutError) and text.startswith("timed out after"):
        return f"{text}, outcome unknown"
    return f"{type(e).__name__}: {text}" if text else type(e).__name__
