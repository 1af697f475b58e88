"""What does a run take in memory: one that waits, and one that is being driven?

What Python holds before and after, by the number of runs (not resident memory: SQLite's page caches fill up to 2 MB a connection whatever
the number of runs). A driven run sits in its model call. Each starts with one short message, so that messages count for next to nothing.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import measure

WAITING, ACTIVE, PEER = 2000, 300, 100


def main() -> None:
    measure.header("memory: of a run that waits, and of one that is driven")
    targets, rows = measure.Targets(), []
    for kind, count in (("waiting", WAITING), ("active", ACTIVE), ("langgraph", PEER)):
        with measure.folder(measure.memory_folder()) as folder:
            done = subprocess.run(
                [sys.executable, __file__, "child", kind, str(count), str(folder)], capture_output=True, text=True, check=False
            )
        assert "BYTES" in done.stdout, done.stderr[-2000:]
        each = float(done.stdout.split("BYTES")[1])
        what = {
            "waiting": "Outlast, waiting",
            "active": "Outlast, in its model call",
            "langgraph": "LangGraph AsyncSqliteSaver, in a node",
        }[kind]
        rows.append((what, f"{count:,}", measure.kib(each)))
        if kind != "langgraph":
            targets.at_most(f"a run that is {kind}", each / 1024, 1 if kind == "waiting" else 8, " KiB")
    measure.table(["", "runs", "KiB a run"], rows)
    targets.show()


def held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def of_ours(kind: str, count: int, folder: Path) -> float:
    from outlast import Agent, Outlast, approval, tool

    there = 0
    forever = asyncio.Event()

    @tool(gate=approval(to="boss", within=timedelta(days=1)))
    def pay(amount: int) -> str:
        """Pay it."""
        return "paid"

    async def model(request: Any) -> Any:
        nonlocal there
        there += 1
        if kind == "active":
            await forever.wait()
        return {"content": [{"type": "tool_use", "id": "call_1", "name": "pay", "input": {"amount": 1}}], "stop_reason": "tool_use"}

    agent = Agent("bench", model=model, tools=[pay])
    app = Outlast(folder / "outlast.db", agents=[agent])

    async def some(first: int, number: int) -> None:
        for n in range(first, first + number):
            app.start(agent, "go", run_id=f"run-{n}")
        await app.work(concurrency=number, until_idle=True)

    await_these = asyncio.ensure_future(some(0, 64)) if kind == "waiting" else None
    if await_these:  # threads, connections and caches are there before we look
        await await_these
        before = held()
        for n in range(64, 64 + count, 100):
            await some(n, 100)
        return (held() - before) / count
    for n in range(64):
        app.start(agent, "go", run_id=f"warm-{n}")
    task = asyncio.ensure_future(app.work(concurrency=10_000))
    while there < 64:
        await asyncio.sleep(0.01)
    before = held()
    for n in range(count):
        app.start(agent, "go", run_id=f"run-{n}")
        await asyncio.sleep(0)
    while there < 64 + count:
        await asyncio.sleep(0.01)
    assert not task.done()
    return (held() - before) / count


async def of_langgraph(count: int, folder: Path) -> float:
    from langgraph.graph import END, START, StateGraph
    from langgraph.graph.message import MessagesState

    import graphs

    there = 0
    forever = asyncio.Event()

    async def model(_: Any) -> Any:
        nonlocal there
        there += 1
        await forever.wait()
        return {"messages": []}

    g = StateGraph(MessagesState)
    g.add_node("model", model)
    g.add_edge(START, "model")
    g.add_edge("model", END)
    compiled = g.compile(checkpointer=await graphs.async_saver(folder))
    tasks = []

    async def some(first: int, number: int) -> None:
        wanted = there + number
        for n in range(first, first + number):
            tasks.append(asyncio.ensure_future(compiled.ainvoke({"messages": [("user", "go")]}, graphs.config(f"t{n}"), durability="sync")))  # noqa: PERF401 - the loop is the plain one
        while there < wanted:
            await asyncio.sleep(0.01)

    await some(0, 64)
    before = held()
    await some(64, count)
    return (held() - before) / count


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _, _, kind, number, where = sys.argv
        tracemalloc.start()
        work = of_langgraph(int(number), Path(where)) if kind == "langgraph" else of_ours(kind, int(number), Path(where))
        print("BYTES", asyncio.new_event_loop().run_until_complete(work), flush=True)
        os._exit(0)  # what it holds is not given back one by one
    main()
