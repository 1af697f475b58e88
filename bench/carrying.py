"""The peer of bench/engines.py: an agent loop that keeps its messages inside of a Temporal workflow."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio import activity, workflow


@activity.defn
async def turn(messages: list[dict[str, Any]], pad: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{len(messages)}" + "x" * pad}


@workflow.defn
class Carrying:
    @workflow.run
    async def run(self, turns: int, pad: int) -> int:
        messages: list[dict[str, Any]] = []
        for _ in range(turns):
            messages.append(await workflow.execute_activity(turn, args=[messages, pad], start_to_close_timeout=timedelta(minutes=1)))
        return len(messages)
