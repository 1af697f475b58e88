"""What the workers of a soak run: an agent whose tools act on a world outside of every database, and windows held open.

`OUTLAST_SOAK` in the environment (JSON: `world`, a folder; `seed`; `store`; `slow`, crash point -> longest wait in ms) makes `app`. At each of those
points the process waits a little and says so in a file that outlives it, so that whoever kills it can tell what it was doing.

Rules
1. What a tool did is a file or a line written by one system call; what a run believes does not count.
2. A run's plan follows from its first message alone: the same answers in any process, however often the model is asked.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from outlast.agent import Agent
from outlast.app import Outlast
from outlast.errors import ModelError
from outlast.gates import approval
from outlast.models.base import ModelRequest
from outlast.runtime import crashpoints
from outlast.runtime.clock import ManualClock
from outlast.tools import Outcome, ToolContext, tool

VARIABLE = "OUTLAST_SOAK"
LEASE = timedelta(seconds=1)
WINDOWS = ("model", "effect", "commit")  # a kill inside: an answer is lost, an effect is not recorded, a commit is under way
OF_POINT = {"model.after": "model", "tool.after": "effect", "commit.before": "commit", "commit.after": "commit"}
_INSIDE = struct.Struct(f"{len(WINDOWS)}i")


@dataclass(frozen=True)
class World:
    """Receivers outside: one that dedupes by key, one that does whatever it is told."""

    folder: Path

    def make(self) -> World:
        for name in ("received", "inside", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        return self

    @property
    def inside(self) -> Path:
        """Where each process tells which windows it holds open."""
        return self.folder / "inside"

    def receive(self, key: str) -> None:
        """Once per key, in one system call; every attempt is noted."""
        self._note("attempts", key)
        try:
            os.close(os.open(self._received(key), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return

    def act(self, key: str) -> None:
        self._note("acts", key)

    def asked(self, run: str) -> None:
        self._note("asked", run)

    def acted(self, key: str) -> bool:
        return key in self.notes("acts")

    def received(self, key: str) -> bool:
        return self._received(key).exists()

    def notes(self, name: str) -> list[str]:
        """Lines noted under that name: `acts`, `attempts`, `asked`."""
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def _received(self, key: str) -> Path:
        return self.folder / "received" / sha256(key.encode()).hexdigest()

    def _note(self, name: str, line: str) -> None:
        fd = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)


class Windows:
    """Holds the windows of this process open, and tells in `FOLDER/PID` how often each is open at this moment."""

    def __init__(self, folder: Path, slow: Mapping[str, float], seed: int) -> None:
        self._slow, self._rng, self._lock = slow, random.Random(f"{seed}-{os.getpid()}"), threading.Lock()  # noqa: S311 - a test's delays
        path = folder / str(os.getpid())
        path.write_bytes(bytes(_INSIDE.size))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _INSIDE.size)  # shared: what is written stands when this process is killed

    def __call__(self, name: str) -> None:
        point = name.partition(":")[0]
        window, longest_ms = OF_POINT.get(point), self._slow.get(point, 0)
        if window is None or not longest_ms:
            return
        self._count(window, 1)
        threading.Event().wait(self._rng.uniform(0, longest_ms) / 1000)
        self._count(window, -1)

    def _count(self, window: str, by: int) -> None:
        with self._lock:
            counts = list(_INSIDE.unpack(self._shared[:]))
            counts[WINDOWS.index(window)] += by
            self._shared[:] = _INSIDE.pack(*counts)


def inside(folder: Path, pid: int) -> set[str]:
    """The windows that are open in that process, or were when it died."""
    try:
        counts = _INSIDE.unpack((folder / str(pid)).read_bytes())
    except (FileNotFoundError, struct.error):
        return set()
    return {name for name, count in zip(WINDOWS, counts, strict=True) if count > 0}


# ---- the agent ----------------------------------------------------------------------------------------------------------------

GATE = approval(to="soak-lead", noun="reply", within=timedelta(hours=4))


@tool(effect="read")
async def look(ctx: ToolContext[World], text: str) -> dict[str, str]:
    return {"done": text}


@tool(effect="idempotent", timeout=timedelta(seconds=10))
def mail(ctx: ToolContext[World], text: str) -> dict[str, str]:
    ctx.deps.receive(ctx.idempotency_key)
    return {"done": text}


@tool(effect="idempotent", gate=GATE, timeout=timedelta(seconds=10))
async def reply(ctx: ToolContext[World], text: str) -> dict[str, str]:
    ctx.deps.receive(ctx.idempotency_key)
    return {"done": text}


def _seen(ctx: ToolContext[World], text: str) -> Outcome:
    return Outcome.happened({"done": text}) if ctx.deps.acted(ctx.idempotency_key) else Outcome.not_happened()


@tool(check=_seen, timeout=timedelta(seconds=10))
async def pay(ctx: ToolContext[World], text: str) -> dict[str, str]:
    ctx.deps.act(ctx.idempotency_key)
    return {"done": text}


@tool(timeout=timedelta(seconds=10))
def ring(ctx: ToolContext[World], text: str) -> dict[str, str]:
    ctx.deps.act(ctx.idempotency_key)
    return {"done": text}


@tool(gate=GATE, check=_seen, timeout=timedelta(seconds=10))
def refund(ctx: ToolContext[World], text: str) -> dict[str, str]:
    ctx.deps.act(ctx.idempotency_key)
    return {"done": text}


TOOLS = {t.name: t for t in (look, mail, reply, pay, ring, refund)}
GATED = ("reply", "refund")
DEDUPED = ("mail", "reply")


@cache
def plan(first: str) -> tuple[tuple[Mapping[str, Any], ...], ...]:
    """The tool calls of each turn of the run that begins with this text; after the last it is done."""
    rng = random.Random(first)  # noqa: S311 - a plan, no secret
    return tuple(
        tuple(
            {"type": "tool_use", "id": f"toolu_{turn}_{n}", "name": rng.choice(list(TOOLS)), "input": {"text": f"{turn}.{n}"}}
            for n in range(rng.choice((1, 1, 2, 3)))
        )
        for turn in range(rng.choice((2, 3, 4)))
    )


def first_text(messages: Sequence[Mapping[str, Any]]) -> str:
    content = messages[0]["content"]
    return content if isinstance(content, str) else str(content[0]["text"])


async def model(request: ModelRequest) -> dict[str, Any]:
    first = first_text(request.messages)
    turn = sum(x["role"] == "assistant" for x in request.messages)
    World(Path(_settings()["world"])).asked(first)
    await asyncio.sleep(0.002)  # whoever is asked takes a moment
    turns = plan(first)
    if turn > len(turns):
        raise ModelError(f"turn {turn + 1} of {len(turns) + 1} was asked for", retryable=False)
    content = [dict(call) for call in turns[turn]] if turn < len(turns) else [{"type": "text", "text": "Done."}]
    return {
        "role": "assistant", "content": content, "stop_reason": "tool_use" if turn < len(turns) else "end_turn",
        "usage": {"input_tokens": 10, "output_tokens": 5}}  # fmt: skip


def _settings() -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(os.environ[VARIABLE])
    return settings


def make(world: World, store: str | None = None, clock: ManualClock | None = None) -> Outlast:
    """`store`: a URL; default: a file in the world's folder."""
    return Outlast(
        store or world.folder / "outlast.db",
        clock=clock,
        agents=[Agent("soaked", model=model, tools=list(TOOLS.values()))],
        deps=world,
        lease=LEASE,
    )


@cache
def _app() -> Outlast:
    settings = _settings()
    world = World(Path(settings["world"]))
    crashpoints.arm(Windows(world.inside, settings["slow"], settings["seed"]))
    return make(world, settings.get("store"))


def __getattr__(name: str) -> Any:
    if name == "app":
        return _app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
