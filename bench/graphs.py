"""LangGraph: a loop of model and tool nodes that save after every superstep (`durability="sync"`), as its documentation has it.

A step's time is taken between two successive nodes, so that it holds all that LangGraph does in between and nothing of ours.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypedDict

from messages import first, message

os.environ.setdefault("LANGSMITH_TRACING", "false")


def lc_message(i: int) -> Any:
    """Message number i as LangChain has it."""
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    if i == 0:
        return HumanMessage(first()["content"], id="m0")
    m = message(i - 1)
    if m["role"] == "assistant":
        text, call = m["content"]
        return AIMessage(content=text["text"], tool_calls=[{"name": call["name"], "args": call["input"], "id": call["id"]}], id=f"m{i}")
    result = m["content"][0]
    return ToolMessage(content=result["content"], tool_call_id=result["tool_use_id"], id=f"m{i}")


class Loop:
    """What a graph is to do: messages from `at` on, `left` of them; the instants of its steps."""

    def __init__(self) -> None:
        self.at = self.left = 0
        self.times: list[float] = []

    def next(self) -> Any:
        self.times.append(time.perf_counter())
        made = lc_message(self.at)
        self.at, self.left = self.at + 1, self.left - 1
        return {"messages": [made]}


def graph(saver: Any, loop: Loop, *, delta: bool = False, is_async: bool = False) -> Any:
    from langgraph.graph import END, START, StateGraph
    from langgraph.graph.message import add_messages

    channel: Any = add_messages
    if delta:
        from langgraph.channels.delta import DeltaChannel
        from langgraph.graph.message import _messages_delta_reducer

        channel = DeltaChannel(_messages_delta_reducer)
    state: Any = TypedDict("State", {"messages": Annotated[list, channel]})

    def node(_: Any) -> Any:
        return loop.next()

    async def async_node(_: Any) -> Any:
        return loop.next()

    g = StateGraph(state)
    g.add_node("model", async_node if is_async else node)
    g.add_node("tools", async_node if is_async else node)
    g.add_edge(START, "model")
    g.add_conditional_edges("model", lambda _: END if loop.left <= 0 else "tools", {END: END, "tools": "tools"})
    g.add_edge("tools", "model")
    return g.compile(checkpointer=saver)


def config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}, "recursion_limit": 1_000_000}


def sync_saver(folder: Path, **more: Any) -> Any:
    from langgraph.checkpoint.sqlite import SqliteSaver

    saver = SqliteSaver(sqlite3.connect(folder / "langgraph.db", check_same_thread=False, **more))
    saver.setup()
    return saver


async def async_saver(folder: Path) -> Any:
    import aiosqlite
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    saver = AsyncSqliteSaver(await aiosqlite.connect(folder / "langgraph.db"))
    await saver.setup()
    return saver


class LangGraph:
    name = "LangGraph SqliteSaver"
    delta = False

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.saver = sync_saver(folder)
        self.graph = graph(self.saver, self.loop, delta=self.delta)
        self._threads: dict[int, tuple[str, int]] = {}

    def seed(self, thread: str, n: int) -> None:
        """n messages, in one update."""
        self.graph.update_state(config(thread), {"messages": [lc_message(i) for i in range(n)]}, as_node="__start__")

    def go(self, thread: str, at: int, k: int) -> list[float]:
        self.loop.times, self.loop.at, self.loop.left = [], at + 1, k + 1
        self.invoke({"messages": [lc_message(at)]}, config(thread))
        return [b - a for a, b in pairwise(self.loop.times)]

    def invoke(self, given: Any, where: Any) -> None:
        self.graph.invoke(given, where, durability="sync")

    def steps(self, n: int, k: int) -> list[float]:
        if n not in self._threads:
            self._threads[n] = (str(uuid.uuid4()), n)
            self.seed(self._threads[n][0], n)
        thread, at = self._threads[n]
        times = self.go(thread, at, k)
        self._threads[n] = (thread, self.loop.at)
        return times

    def anew(self, n: int) -> None:
        self._threads.pop(n, None)

    def settle(self) -> None:
        self.saver.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def load(self, thread: str) -> Any:
        return self.graph.get_state(config(thread)).values["messages"]

    def close(self) -> None:
        self.saver.conn.close()


class LangGraphDelta(LangGraph):
    name = "LangGraph SqliteSaver, DeltaChannel"
    delta = True


class LangGraphAsync(LangGraph):
    name = "LangGraph AsyncSqliteSaver"

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self._run = asyncio.new_event_loop().run_until_complete
        self.saver = self._run(async_saver(folder))
        self.graph = graph(self.saver, self.loop, is_async=True)
        self._threads = {}

    def seed(self, thread: str, n: int) -> None:
        self._run(self.graph.aupdate_state(config(thread), {"messages": [lc_message(i) for i in range(n)]}, as_node="__start__"))

    def invoke(self, given: Any, where: Any) -> None:
        self._run(self.graph.ainvoke(given, where, durability="sync"))

    def load(self, thread: str) -> Any:
        return self._run(self.graph.aget_state(config(thread))).values["messages"]

    def close(self) -> None:
        self._run(self.saver.conn.close())
