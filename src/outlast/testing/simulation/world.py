"""What lies outside of every database in a schedule: receivers, the wire to them, the model, and the agent whose tools reach them.

Effects land after a while on the wire, also those of a sender that is dead by then, but never later than the sender's time-out, and for a
dead one within the seconds that the runtime allows for (`core.run.LATE_WIRE`). Each tool looks, at the moment it begins, whether it may.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from outlast.agent import Agent, Limits
from outlast.errors import ModelError, ToolFailed
from outlast.gates import approval
from outlast.models.base import ModelRequest
from outlast.testing.simulation.loop import LEASE, PROCESS
from outlast.tools import Outcome, Retry, Tool, ToolContext, Wait, tool

if TYPE_CHECKING:
    from outlast.testing.simulation.schedule import Schedule

TIMEOUT = timedelta(seconds=20)
KEY_TTL = timedelta(seconds=60)
REMEMBERS = timedelta(seconds=60 + 40)  # KEY_TTL, and the time that an attempt begun before it may take
NAMES = ("look", "mail", "forgetful", "reply", "reply", "pay", "pay", "ring", "refund", "refund", "await_word", "ask")
playing: Any = None  # the Schedule that is being played
ONCE = ("pay", "ring", "refund")
KEYED = ("mail", "forgetful", "reply")
GATED = ("reply", "refund")
MODEL, TOOL, CHECK = "the model is asked", "a tool runs", "a check looks"


@contextmanager
def in_flight(window: str, call_id: str | None = None) -> Iterator[None]:
    """A call to the outside: its window is open as long as it takes. What comes of it is not saved yet, unless whoever asked gave it up."""
    process, given_up = PROCESS.get(), False
    process.inside.append(window)
    try:
        yield
    except asyncio.CancelledError:
        given_up = True
        raise
    finally:
        process.inside.remove(window)
        if not given_up:
            process.unsaved.add((LEASE.get(), call_id))


@dataclass
class Receivers:
    """The world's own books."""

    sim: Schedule
    effects: Counter[str] = field(default_factory=Counter)  # key -> times that it happened
    seen_at: dict[str, float] = field(default_factory=dict)  # receivers that dedupe: key -> first time
    sent: set[str] = field(default_factory=set)
    under_way: int = 0  # requests on the wire
    args: dict[str, str] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def land(self, key: str, args: str, *, dedupes: bool, forgets: bool = False) -> None:
        """The effect arrives."""
        self.under_way -= 1
        now = self.sim.loop.now
        if dedupes:
            first = self.seen_at.get(key)
            if first is not None and not (forgets and now > first + REMEMBERS.total_seconds()):
                self.sim.reached["an attempt was deduped"] += 1
                return
            self.seen_at[key] = now
        self.effects[key] += 1
        if self.args.setdefault(key, args) != args:
            self.sim.broken("I8", f"{key} came with other arguments: {self.args[key]} and {args}")
        self.sim.loop.note("effect", key)

    async def send(self, ctx: ToolContext[Any], args: Mapping[str, Any], *, dedupes: bool, forgets: bool = False) -> dict[str, Any]:
        """Over the wire and back: it may land late, its answer may be lost, it may be refused, it may take longer than the time-out."""
        sim, key = self.sim, ctx.idempotency_key
        sim.begins(ctx, dict(args))
        with in_flight(TOOL, ctx.call_id):
            mishap = sim.choices.pick(5, sim.mood.wire)
            if mishap == 1 and key not in self.sent:  # "surely not done" would be a lie where an earlier attempt's request is under way
                raise ToolFailed("refused: not done")
            wire = (0.0, 0.5, 2.0, 4.0)[sim.choices.pick(4, 0.5)]
            self.sent.add(key)
            self.under_way += 1
            sim.in_world(wire, lambda: self.land(key, json.dumps(args, sort_keys=True), dedupes=dedupes, forgets=forgets))
            sim.point("wire")
            if mishap == 2:  # known only once it has landed: whoever raises earlier than what it sent lands cannot be helped by a journal
                await asyncio.sleep(wire + 0.01)
                raise ConnectionError("the answer was lost")
            back = 60.0 if mishap == 3 else 9.0 if mishap == 4 else (0.1, 3.0)[sim.choices.pick(2, 0.4)]
            await asyncio.sleep(wire + back)
            return {"done": dict(args)}

    def told(self, key: str) -> bool:
        return self.effects[key] > 0


Sim = ToolContext[Receivers]


def make_tools(child: Agent[str] | None) -> dict[str, Tool[..., Any]]:
    quick = approval(
        to="lead", noun="reply", within=timedelta(seconds=60), then=approval(to="boss", noun="reply", within=timedelta(seconds=40))
    )

    @tool(effect="read", retry=Retry(2, backoff=timedelta(seconds=1)), timeout=TIMEOUT)
    async def look(ctx: Sim, text: str) -> dict[str, str]:
        sim = ctx.deps.sim
        sim.begins(ctx, {"text": text})
        with in_flight(TOOL, ctx.call_id):
            await asyncio.sleep((0.1, 5.0, 90.0)[sim.choices.pick(3, 0.2)])
            if sim.choices.chance(sim.mood.wire):
                raise ConnectionError("not reachable")
            return {"seen": text}

    @tool(effect="idempotent", timeout=TIMEOUT, retry=Retry(3, backoff=timedelta(seconds=2)))
    async def mail(ctx: Sim, text: str) -> dict[str, Any]:
        return await ctx.deps.send(ctx, {"text": text}, dedupes=True)

    @tool(effect="idempotent", timeout=TIMEOUT, key_ttl=KEY_TTL)
    async def forgetful(ctx: Sim, text: str) -> dict[str, Any]:
        return await ctx.deps.send(ctx, {"text": text}, dedupes=True, forgets=True)

    @tool(effect="idempotent", timeout=TIMEOUT, gate=quick)
    async def reply(ctx: Sim, text: str) -> dict[str, Any]:
        return await ctx.deps.send(ctx, {"text": text}, dedupes=True)

    async def seen(ctx: Sim, text: str) -> Outcome:
        sim = ctx.deps.sim
        with in_flight(CHECK, ctx.call_id):
            await asyncio.sleep((0.1, 6.0, 18.0)[sim.choices.pick(3, 0.7)])
            if sim.choices.chance(sim.mood.wire):
                return Outcome.unknown("503")
            return Outcome.happened({"done": {"text": text}}) if ctx.deps.told(ctx.idempotency_key) else Outcome.not_happened()

    @tool(timeout=TIMEOUT, check=seen)
    async def pay(ctx: Sim, text: str) -> dict[str, Any]:
        return await ctx.deps.send(ctx, {"text": text}, dedupes=False)

    @tool(timeout=TIMEOUT)
    async def ring(ctx: Sim, text: str) -> dict[str, Any]:
        return await ctx.deps.send(ctx, {"text": text}, dedupes=False)

    @tool(timeout=TIMEOUT, gate=quick, check=seen)
    async def refund(ctx: Sim, text: str) -> dict[str, Any]:
        return await ctx.deps.send(ctx, {"text": text}, dedupes=False)

    @tool(effect="read", timeout=TIMEOUT)
    async def await_word(ctx: Sim, text: str) -> Wait:
        ctx.deps.sim.begins(ctx, {"text": text})
        with in_flight(TOOL, ctx.call_id):
            return Wait(f"word-{ctx.call_id}", within=timedelta(seconds=150), otherwise="nobody said anything")

    made = {t.name: t for t in (look, mail, forgetful, reply, pay, ring, refund, await_word)}
    if child is not None:
        made["ask"] = child.as_tool(description="Ask another agent.", name="ask")
    return made


def turns_of(text: str) -> list[list[dict[str, Any]]]:
    """The plan of a run stands in its first message: turns of (tool, call id)."""
    document = json.loads(text)
    plan: list[list[list[str]]] = document[1] if document else []
    return [
        [
            {"type": "tool_use", "id": call_id, "name": name, "input": {"task": "[]"} if name == "ask" else {"text": call_id}}
            for name, call_id in turn
        ]
        for turn in plan
    ]


def first_text(messages: Any) -> str:
    content = messages[0]["content"]
    return content if isinstance(content, str) else str(content[0]["text"])


async def answer(request: ModelRequest) -> dict[str, Any]:
    """The model: plays the plan that the run begins with. Slow and failing now and then."""
    sim, text = playing, first_text(request.messages)
    sim.check_pairs(request.messages)
    turn = sum(x["role"] == "assistant" for x in request.messages)
    sim.receivers.asked[text] += 1
    sim.loop.note("asked", turn)
    with in_flight(MODEL):
        await asyncio.sleep((0.2, 8.0, 50.0)[sim.choices.pick(3, 0.2)])
    mishap = sim.choices.pick(4, sim.mood.model)
    if mishap:
        sim.receivers.failed[text] += 1
    if mishap == 1:
        raise ModelError("overloaded", retryable=True, status=529)
    if mishap == 2:
        raise ModelError("slow down", retryable=True, status=429, retry_after=timedelta(seconds=40))
    if mishap == 3:
        raise ModelError("no such model", retryable=False, status=404)
    turns = turns_of(text)
    content = [dict(call) for call in turns[turn]] if turn < len(turns) else [{"type": "text", "text": "Done."}]
    return {
        "role": "assistant", "content": content, "stop_reason": "tool_use" if turn < len(turns) else "end_turn",
        "usage": {"input_tokens": 10, "output_tokens": 5}}  # fmt: skip


@cache
def make_agents(lacks: str | None = None, *, asks: bool = True) -> list[Agent[Any]]:
    """The agents of a process; `lacks`: a tool that this version of the code does not have; `asks`: is there another agent to be asked?"""
    limits = Limits(model_calls=40)
    child = Agent("helper", model=answer, tools=[], limits=limits)
    tools = [t for name, t in make_tools(child if asks else None).items() if name != lacks]
    agent: Agent[Any] = Agent("agent", model=answer, tools=tools, limits=limits)
    return [agent, child] if asks else [agent]
