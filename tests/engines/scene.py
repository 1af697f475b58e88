"""What the engines' workers run, `outlast worker scene:app`: the support agent of a ticket system, whose model's script is named by the task.

`SCENE` in the environment is the folder of everything outside of the store: the ledger of effects, a line for each model call, files that let
a held tool go, and files that end the process by SIGKILL at a named point.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from outlast import Agent, Limits, Outlast, ToolContext, approval, tool
from outlast.errors import ModelError
from outlast.models import ModelRequest, ScriptedModel
from outlast.runtime import crashpoints
from support.world import Ledger, use

LIMIT_S = 60.0  # a held tool gives up: the test has failed by then


class World:
    """The folder, seen from inside of a tool and from the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ledger = folder, Ledger(folder / "ledger")

    def hold(self, name: str, run_id: str) -> None:
        """Say that this tool is in it, and stay there until it is let go."""
        self.ledger.write("in", f"{name}:{run_id}")
        pause, left = threading.Event(), LIMIT_S
        while not (self.folder / f"go-{run_id}").exists() and left > 0:
            pause.wait(0.02)
            left -= 0.02

    def let_go(self, run_id: str) -> None:
        (self.folder / f"go-{run_id}").touch()

    def inside(self, run_id: str) -> bool:
        return self.ledger.has(f"hold:{run_id}")

    def kill_at(self, *points: str) -> None:
        """The worker that passes these points, one after the other, dies at the last one."""
        (self.folder / "kill.new").write_text("\n".join(points))
        (self.folder / "kill.new").rename(self.folder / "kill")

    def armed(self) -> bool:
        return (self.folder / "kill").exists()

    def dies(self, point: str) -> None:
        """A hook of the crash points."""
        file = self.folder / "kill"
        try:
            first, *rest = file.read_text().splitlines()
        except FileNotFoundError:
            return
        if first != point:
            return
        if rest:
            file.write_text("\n".join(rest))
            return
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


@tool(effect="read")
def get_ticket(ctx: ToolContext[World], ticket: str) -> str:
    """Look up a ticket."""
    ctx.deps.ledger.write("get_ticket", ctx.idempotency_key)
    return f"{ticket}: locked out since the SSO change" + "x" * int(os.environ.get("SCENE_PAD", "0"))


@tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)))
def reply_to_customer(ctx: ToolContext[World], text: str) -> str:
    """Send the customer a reply."""
    ctx.deps.ledger.deliver("reply", ctx.idempotency_key)
    return "sent"


@tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(seconds=2)))
def reply_soon(ctx: ToolContext[World], text: str) -> str:
    """Send a reply that nobody approves in time."""
    ctx.deps.ledger.deliver("reply", ctx.idempotency_key)
    return "sent"


@tool(effect="idempotent", timeout=timedelta(minutes=5))
def hold(ctx: ToolContext[World]) -> str:
    """Take as long as the test wants."""
    ctx.deps.hold("hold", ctx.run_id)
    ctx.deps.ledger.deliver("held", ctx.idempotency_key)
    return "held"


TICKET = [use("get_ticket", "toolu_01", ticket="KITE-142")]
REPLY = [use("reply_to_customer", "toolu_02", text="Open /recover.")]
SCRIPTS: Mapping[str, Sequence[Any]] = {
    "story": [TICKET, REPLY, "Replied."],
    "soon": [[use("reply_soon", "toolu_01", text="Open /recover.")], "Nobody answered."],
    "hold": [[use("hold", "toolu_01")], "Held."],
    "batch": [[use("hold", "toolu_01"), use("reply_to_customer", "toolu_02", text="Open /recover."), use("get_ticket", "toolu_03", ticket="K")], "Done."],
    "busy": [TICKET, "Done."],
    "long": [*([use("get_ticket", f"toolu_{n:03d}", ticket=f"KITE-{n}")] for n in range(int(os.environ.get("SCENE_TURNS", "500")))), "Done."],
}  # fmt: skip


class Model:
    """The script that the task names; each call leaves a line. `busy` is told to come back later, once."""

    name = "scripted"

    def __init__(self, world: World) -> None:
        self.world = world

    async def __call__(self, request: ModelRequest, /) -> Any:
        task = request.messages[0]["content"]
        name, run_id = (task if isinstance(task, str) else task[0]["text"]).split()
        n = sum(message["role"] == "assistant" for message in request.messages)
        if name == "busy" and n == 0 and not self.world.ledger.has(f"429:{run_id}"):
            self.world.ledger.write("429", f"429:{run_id}")
            raise ModelError("overloaded", retryable=True, retry_after=timedelta(seconds=1), status=429)
        self.world.ledger.write("model", f"{run_id}:{n}")
        return await ScriptedModel(SCRIPTS[name])(request)


def agent_of(world: World, version: str = "1") -> Agent[str]:
    return Agent(
        "kitebase-support", model=Model(world), tools=[get_ticket, reply_to_customer, reply_soon, hold], version=version,
        instructions=f"You answer tickets (version {version}).", limits=Limits(model_calls=None))  # fmt: skip


def app_of(folder: Path, store: str, engine: Any = None, version: str = "1") -> Outlast:
    world = World(folder)
    return Outlast(store, agents=[agent_of(world, version)], deps=world, engine=engine, lease=timedelta(seconds=3))


if "SCENE" in os.environ:
    app = app_of(Path(os.environ["SCENE"]), os.environ["OUTLAST_STORE"], version=os.environ.get("SCENE_VERSION", "1"))
    crashpoints.arm(World(Path(os.environ["SCENE"])).dies)
