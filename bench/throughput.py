"""Many runs in one process, and many processes on one file: how many steps a second, and who gets them?

Threads, each with a run of its own, append as fast as they can. "one connection and a lock": the same append without sharing a commit.
Arguments: seconds a round.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import graphs
import measure
from messages import first, history, message
from ours import Ours
from plain import Insert

ROUNDS = 5
SECONDS = 1.0
PROCESSES = 4


def main() -> None:
    measure.header("throughput: many runs at once")
    targets = measure.Targets()
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    one_process(targets, seconds)
    whole_steps(seconds)
    four_processes(targets, max(seconds, 2.0))
    targets.show()


# ---- one process --------------------------------------------------------------------------------------------------------------


def one_process(targets: measure.Targets, seconds: float) -> None:
    rows = []
    for threads in (1, 8, 32, 256):
        ways: dict[str, Callable[[Path], float]] = {
            "one connection and a lock": lambda folder, n=threads: ours(folder, n, seconds, locked=True),
            "Outlast": lambda folder, n=threads: ours(folder, n, seconds, locked=False),
        }
        if threads == 1:
            ways["bare INSERT, WAL, FULL"] = lambda folder: bare(folder, seconds)
        if threads in (8, 32):
            ways["LangGraph SqliteSaver, threads"] = lambda folder, n=threads: langgraph_threads(folder, n, seconds)
            ways["LangGraph AsyncSqliteSaver"] = lambda folder, n=threads: langgraph_async(folder, n, seconds)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, rate in ways.items():
                with measure.folder() as folder:
                    rates[way].append(rate(folder))
        found = {way: measure.median(v) for way, v in rates.items()}
        lock = found["one connection and a lock"]
        rows += [(threads, way, f"{rate:,.0f}", f"{rate / lock:.2f}") for way, rate in found.items()]
        if wanted := {8: 1.7, 32: 2.5, 256: 3.0}.get(threads):
            targets.at_least(f"group commit over one connection and a lock, {threads} runs", found["Outlast"] / lock, wanted, "×")
        if threads == 32:
            targets.at_least("LangGraph AsyncSqliteSaver, 32 runs", found["Outlast"] / found["LangGraph AsyncSqliteSaver"], 20, "×")
    measure.table(["runs", "how", "steps a second", "× one connection and a lock"], rows)


def in_threads(count: int, seconds: float, step_of: Callable[[int], Callable[[], None]]) -> float:
    """Steps a second of `count` threads; each has made its first one before the clock starts."""
    steps = [0] * count
    ready, over = threading.Barrier(count + 1), threading.Event()

    def work(n: int) -> None:
        step = step_of(n)
        step()
        ready.wait()
        while not over.is_set():
            step()
            steps[n] += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    begun = measure.now()
    over.wait(seconds)
    over.set()
    took = measure.now() - begun
    for thread in threads:
        thread.join()
    return sum(steps) / took


def ours(folder: Path, threads: int, seconds: float, *, locked: bool) -> float:
    subject = Ours(folder)
    lock: Any = threading.Lock() if locked else nullcontext()

    def step_of(n: int) -> Callable[[], None]:
        session = subject.session(history(2), f"run-{n}")

        def step() -> None:
            fact = session.fact(message(session.n))
            with lock:
                session.save(fact)
            session.n += 1

        return step

    rate = in_threads(threads, seconds, step_of)
    subject.close()
    return rate


def bare(folder: Path, seconds: float) -> float:
    subject = Insert(folder)
    rate = in_threads(1, seconds, lambda _: lambda: subject.steps(1, 1) and None)
    subject.close()
    return rate


def langgraph_threads(folder: Path, threads: int, seconds: float) -> float:
    saver = graphs.sync_saver(folder, timeout=30)

    def step_of(n: int) -> Callable[[], None]:
        loop = graphs.Loop()
        compiled = graphs.graph(saver, loop)
        state = {"thread": "", "at": 0}

        def ten() -> None:  # runs of 40 messages, ten at a time
            if state["at"] % 40 == 0:
                state["thread"], state["at"] = str(uuid.uuid4()), 0
            loop.at, loop.left = state["at"] + 1, 9
            compiled.invoke({"messages": [graphs.lc_message(state["at"])]}, graphs.config(state["thread"]), durability="sync")
            state["at"] += 10

        return ten

    rate = 10 * in_threads(threads, seconds, step_of)
    saver.conn.close()
    return rate


def langgraph_async(folder: Path, tasks: int, seconds: float) -> float:
    async def all_of_them() -> float:
        saver = await graphs.async_saver(folder)
        steps, end = 0, 0.0

        async def one() -> None:
            nonlocal steps
            loop = graphs.Loop()
            compiled = graphs.graph(saver, loop, is_async=True)
            while measure.now() < end:
                loop.at, loop.left, loop.times = 1, 9, []
                where = graphs.config(str(uuid.uuid4()))
                await compiled.ainvoke({"messages": [graphs.lc_message(0)]}, where, durability="sync")
                steps += len(loop.times)

        begun = measure.now()
        end = begun + seconds
        await asyncio.gather(*(one() for _ in range(tasks)))
        took = measure.now() - begun
        await saver.conn.close()
        return steps / took

    return asyncio.run(all_of_them())


def whole_steps(seconds: float) -> None:
    """Not appends alone: agents with a scripted model and a tool, driven by a worker."""
    from outlast import Outlast
    from step import agent_of

    rows = []
    for runs in (1, 8, 32, 256):
        with measure.folder() as folder:
            turns = max(int(40 * seconds), 4)
            agent = agent_of(turns)
            app = Outlast(folder / "outlast.db", agents=[agent])
            for n in range(runs):
                app.start(agent, str(first()["content"]), run_id=f"run-{n}")
            begun = measure.now()
            app.work_sync(concurrency=runs, until_idle=True)
            took = measure.now() - begun
            saved = sum(app.head(f"run-{n}").seq for n in range(runs)) - runs
            app.close()
        rows.append((runs, f"{saved / took:,.0f}"))
    print("\nwhole agent steps (messages saved by a worker: model, tool, next_step, append)")
    measure.table(["runs at once", "messages a second"], rows)


# ---- processes -----------------------------------------------------------------------------------------------------------------


def four_processes(targets: measure.Targets, seconds: float) -> None:
    rows = []
    shares: list[float] = []
    failures = 0
    for kind in ("ours", "article"):
        for _ in range(3 if kind == "ours" else 1):
            with measure.folder() as folder:
                found = race(kind, folder, seconds)
            counts, errors = [f["steps"] for f in found], sum(f["errors"] for f in found)
            share = min(counts) / max(*counts, 1)
            if kind == "ours":
                shares.append(share)
                failures += errors
            longest = max(f["longest"] for f in found) * 1e3
            rows.append(
                (kind, f"{sum(counts) / seconds:,.0f}", f"{min(counts)} … {max(counts)}", f"{share:.2f}", errors, f"{longest:,.0f}")
            )
    print(f"\n{PROCESSES} processes on one file, {seconds:g} s")
    measure.table(["", "steps a second", "slowest … fastest", "slowest / fastest", "errors", "longest wait ms"], rows)
    targets.at_least(f"{PROCESSES} processes: slowest / fastest", measure.median(shares), 0.5)
    targets.at_most(f"{PROCESSES} processes: errors", failures, 0)


def race(kind: str, folder: Path, seconds: float) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "child", kind, str(folder), str(seconds)]
    return measure.race(command, PROCESSES, within_s=seconds + 60)


def child(kind: str, folder: Path, seconds: float, number: int) -> None:
    import sqlite3

    from plain import Article

    errors = steps = 0
    if kind == "ours":
        session = Ours(folder).session(history(2), f"run-{number}")
        step: Callable[[], None] = session.step
    else:
        article, run = Article(folder), history(2)

        def step() -> None:
            run.append(message(len(run) - 1))
            article.save(f"run-{number}", run)

    print("ready", flush=True)
    sys.stdin.readline()
    end, longest = measure.now() + seconds, 0.0
    while (a := measure.now()) < end:
        try:
            step()
            steps += 1
        except (sqlite3.OperationalError, OSError) as e:
            errors += 1
            print(e, file=sys.stderr)
        longest = max(longest, measure.now() - a)
    print(json.dumps({"steps": steps, "errors": errors, "longest": longest}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
