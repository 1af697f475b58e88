"""What does a whole agent step cost, not the append alone?

A scripted model that answers at once and a tool that returns at once, driven by `run_sync`: everything else is ours. Beside it the bare
append of the same messages.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import measure
from messages import first, message, piece
from ours import Ours
from outlast import Agent, Limits, Outlast, tool

TURNS = 100


@tool(effect="read")
async def search(query: str) -> str:
    """Look something up."""
    return piece(len(query), 870)


def agent_of(turns: int) -> Agent[str]:
    async def model(request: Any) -> Any:
        n = len(request.messages)
        if n >= 2 * turns:
            return "That is all."
        return {**message(n + n % 2), "stop_reason": "tool_use", "usage": {"input_tokens": 100, "output_tokens": 20}}

    return Agent("bench", model=model, tools=[search], limits=Limits(model_calls=None))


def one(folder: Path, turns: int) -> tuple[float, float, int]:
    """(seconds, seconds of CPU, messages saved) of a run."""
    agent = agent_of(turns)
    with Outlast(folder / "outlast.db", agents=[agent]) as app:
        app.unfinished_runs()
        wall, cpu = time.perf_counter(), time.process_time()
        run = app.run_sync(agent, str(first()["content"]))
        assert run.status == "done", run.reason
        return time.perf_counter() - wall, time.process_time() - cpu, run.seq


def main() -> None:
    measure.header("step: a whole agent step beside the bare append")
    rows = []
    for where, base in (("disk", None), ("tmpfs", measure.memory_folder())):
        steps, cpus, appends = [], [], []
        for _ in range(5):
            with measure.folder(base) as folder:
                wall, cpu, saved = one(folder, TURNS)
                steps.append(wall / saved)
                cpus.append(cpu / saved)
                appends += Ours(measure.sub(folder, "appends")).steps(2, saved)
        rows.append((where, measure.us(measure.median(steps)), measure.us(measure.median(cpus)), measure.us(measure.median(appends))))
    measure.table(["files on", "whole step, µs a message", "of it CPU", "append alone, µs"], rows)


if __name__ == "__main__":
    main()
