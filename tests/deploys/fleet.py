"""A worker of one of two versions, as a process of its own: `python fleet.py VERSION FOLDER`. Version 2 has another name for the tool."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from pathlib import Path

from tests.support.world import Ledger, use

from outlast import Agent, Outlast, ToolContext, approval, tool
from outlast.models import ScriptedModel

GATE = approval(to="support-lead", noun="reply", within=timedelta(hours=4))


@tool(effect="idempotent", gate=GATE)
def reply_to_customer(ctx: ToolContext[Ledger], text: str) -> str:
    ctx.deps.deliver("reply", ctx.idempotency_key)
    return f"sent {text}"


@tool(effect="idempotent", gate=GATE, aliases=["reply_to_customer"])
def answer_ticket(ctx: ToolContext[Ledger], text: str) -> str:
    ctx.deps.deliver("reply", ctx.idempotency_key)
    return f"sent {text}"


def app(version: str, folder: Path) -> Outlast:
    name, made = ("reply_to_customer", reply_to_customer) if version == "1" else ("answer_ticket", answer_ticket)
    agent = Agent("support", model=ScriptedModel([[use(name, text="hello")], "Done."]), tools=[made], version=version)
    return Outlast(folder / "outlast.db", agents=[agent], deps=Ledger(folder / "ledger"))


async def work(version: str, folder: Path) -> None:
    print("ready", flush=True)
    async with app(version, folder) as worker:
        await worker.work(concurrency=4)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], Path(sys.argv[2])))
