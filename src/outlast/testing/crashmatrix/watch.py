"""What the tools did, counted across processes: each tool is wrapped, and each attempt leaves lines in a log of the case.

    begun     the function is about to be called; with the key it may use
    returned  it came back, with its result; `read_key`: it asked for `ctx.idempotency_key`; `made`: the random UUIDs that it made;
              `sayable`: whether a person who says that it happened can hand in the very same result
    waits     it came back with a Wait: it acted, and what answers the call comes later
    refused   it said that it surely did nothing: ToolFailed
    raised    it came back with another exception

A line is one write at the end of the file, so it is there whatever happens next. Calls of one answer run one after another: a point then
names one place, and a kill there hits no other tool in its middle.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from outlast.agent import Agent
from outlast.core import codec
from outlast.errors import ToolFailed, UsageError
from outlast.tools import Tool, ToolContext, ToolResult, ToolSource, Wait

Event: TypeAlias = Literal["begun", "returned", "waits", "refused", "raised"]
ACTED: tuple[Event, ...] = ("returned", "waits")
_HIDDEN = "outlast_context"  # the parameter through which a tool that takes no context is told of its call all the same


@dataclass(frozen=True)
class Attempt:
    """One line of the log."""

    event: Event
    run_id: str
    call_id: str
    tool: str
    key: str
    args: str
    effect: str
    result: Any = None
    read_key: bool = False
    made: tuple[str, ...] = ()
    sayable: bool = True

    @property
    def call(self) -> tuple[str, str]:
        return self.run_id, self.call_id


def read(log: Path) -> list[Attempt]:
    """Every line so far, oldest first."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [Attempt(**{**line, "made": tuple(line["made"])}) for line in map(json.loads, lines)]


def append(path: Path, text: str) -> None:
    """One line in one write: nothing of it is lost with a killed process."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{text}\n".encode())
    finally:
        os.close(fd)


def watched(agent: Agent[Any], log: Path, *, model: Any = None, made: dict[int, Agent[Any]] | None = None) -> Agent[Any]:
    """The same agent, whose tools and whose sub-agents' tools leave lines in `log`.

    Raises:
        UsageError: a sub-agent would ask a real model.
    """
    if model is None and isinstance(agent.model, str):
        raise UsageError(f"the sub-agent {agent.name} would ask {agent.model}: a crash test asks no real model",
                         hint="give the sub-agent a ScriptedModel of its own before it becomes a tool")  # fmt: skip
    made = made if made is not None else {}  # a sub-agent may be a tool of several: it stays one agent
    tools = [_watched(tool, log, made) for tool in agent.tools]
    sources = [_Source(source, log) for source in agent.sources]
    twin = agent.replace(model=model or agent.model, tools=[*tools, *sources]).one_by_one()
    made[id(agent)] = twin
    return twin


@dataclass(frozen=True)
class _Source:
    """A server whose tools leave lines too. Two agents' same server stays one."""

    server: ToolSource
    log: Path

    async def connect_tools(self, stack: AsyncExitStack) -> Sequence[Tool[..., Any]]:
        return [_watched(tool, self.log, {}) for tool in await self.server.connect_tools(stack)]


def tools_of(agent: Agent[Any]) -> dict[str, Tool[..., Any]]:
    """By name and alias, those of sub-agents too."""
    found: dict[str, Tool[..., Any]] = {}
    for tool in agent.tools:
        if tool.agent is not None:
            found |= tools_of(tool.agent)
        for name in (tool.name, *tool.aliases):
            found[name] = tool
    return found


def _watched(tool: Tool[..., Any], log: Path, made: dict[int, Agent[Any]]) -> Tool[..., Any]:
    twin = copy.copy(tool)
    if tool.agent is not None:
        twin.agent = made.get(id(tool.agent)) or watched(tool.agent, log, made=made)
        return twin
    twin.context_name = tool.context_name or _HIDDEN
    twin.fn = _wrapper(tool, twin.context_name, log)
    return twin


_making: ContextVar[list[str] | None] = ContextVar("the UUIDs that this attempt of a tool has made", default=None)


def watch_uuids() -> None:
    """From now on, in this process, note each random UUID that a tool makes, however it came by `uuid4`."""
    made = uuid.UUID.__init__

    @functools.wraps(made)
    def init(self: uuid.UUID, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        list_ = _making.get()
        if list_ is not None and kwargs.get("version") is not None:  # given where one is made, not where one is read
            list_.append(str(self))

    uuid.UUID.__init__ = init  # type: ignore[method-assign]  # the process is a case's own


class _Watched(ToolContext[Any]):
    """A context that notices whether its key is asked for."""

    def __getattribute__(self, name: str) -> Any:
        if name == "idempotency_key":
            object.__setattr__(self, "_read", True)
        return super().__getattribute__(name)

    @classmethod
    def of(cls, ctx: ToolContext[Any]) -> _Watched:
        return cls(**{f.name: getattr(ctx, f.name) for f in dataclasses.fields(ctx)})

    def key_was_read(self) -> bool:
        return bool(self.__dict__.get("_read"))


def _wrapper(tool: Tool[..., Any], context_name: str, log: Path) -> Callable[..., Any]:
    function: Callable[..., Any] = tool.fn

    def write(event: Event, ctx: _Watched, kwargs: dict[str, Any], key: str, result: Any = None) -> None:
        made = tuple(_making.get() or ())
        try:
            args = codec.digest(codec.stored({name: value for name, value in kwargs.items() if name != context_name})[1])
        except codec.Unstorable:
            args = ""
        kept, sayable = _kept(result)
        line = Attempt(event, ctx.run_id, ctx.call_id, tool.name, key, args, tool.effect, kept, ctx.key_was_read(), made, sayable)
        append(log, codec.encode(dataclasses.asdict(line)))

    def begin(kwargs: dict[str, Any]) -> tuple[_Watched, dict[str, Any], str]:
        key = kwargs[context_name].idempotency_key
        ctx = _Watched.of(kwargs[context_name])
        given = {**kwargs, context_name: ctx}
        if tool.context_name is None:
            del given[context_name]
        _making.set([])
        write("begun", ctx, kwargs, key)
        return ctx, given, key

    async def awaited(value: Any, ctx: _Watched, kwargs: dict[str, Any], key: str) -> Any:
        try:
            result = await value
        except BaseException as e:
            write("refused" if isinstance(e, ToolFailed) else "raised", ctx, kwargs, key, f"{type(e).__name__}: {e}")
            raise
        write(_how(result), ctx, kwargs, key, result)
        return result

    @functools.wraps(function)
    async def acts_async(**kwargs: Any) -> Any:
        ctx, given, key = begin(kwargs)
        return await awaited(function(**given), ctx, kwargs, key)

    @functools.wraps(function)
    def acts(**kwargs: Any) -> Any:
        ctx, given, key = begin(kwargs)
        try:
            value = function(**given)
        except BaseException as e:
            write("refused" if isinstance(e, ToolFailed) else "raised", ctx, kwargs, key, f"{type(e).__name__}: {e}")
            raise
        if inspect.isawaitable(value):
            return awaited(value, ctx, kwargs, key)
        write(_how(value), ctx, kwargs, key, value)
        return value

    return acts_async if inspect.iscoroutinefunction(function) else acts


def _how(value: Any) -> Event:
    return "waits" if isinstance(value, Wait) else "returned"


def _kept(value: Any) -> tuple[Any, bool]:
    """What a person would find, as it would be stored, and whether that is all of it: not of None (which says that no result is known), of
    an error, of content blocks. Of a wait what it ends with, as nobody sends a crash test an event.
    """
    if isinstance(value, Wait):
        return _kept(value.otherwise)
    whole = value is not None
    if isinstance(value, ToolResult):
        whole = isinstance(value.content, str) and not value.is_error
        value = value.content
    try:
        return codec.stored(value)[1], whole
    except codec.Unstorable:
        return str(value), whole
