"""What `resume` would do with a run at this moment, without doing it.

Worked out by the same functions that drive (`taken_over`, `settled`, `call_step`) on the same journal, so it cannot say anything else. Pure:
nothing is written, no tool, check or model is called; `when=`, `key=` and `upgrade=` are, as they are before a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

from outlast.core import run as r
from outlast.core import step as s
from outlast.runtime.drive import taken_over

Action = Literal["reuse", "run", "run again with the same key", "check first", "ask a person", "refuse", "wait", "hold"]
CHARS_PER_TOKEN = 4  # rough


@dataclass(frozen=True)
class Item:
    """One call of the open batch, and what becomes of it."""

    call_id: str
    tool: str
    action: Action
    why: str
    key: str | None = None
    role: str | None = None
    until: datetime | None = None
    later: bool = False  # not at once: it begins when calls before it are done

    def to_dict(self) -> dict[str, Any]:
        return {
            "call_id": self.call_id, "tool": self.tool, "action": self.action, "why": self.why, "key": self.key, "role": self.role,
            "until": r.iso(self.until) if self.until else None, "later": self.later,
        }  # fmt: skip


@dataclass(frozen=True)
class Missing:
    """What this process lacks to go on: an agent, a tool, code, a key of a provider, a person of a role."""

    what: Literal["agent", "tool", "code", "key", "role"]
    name: str
    why: str

    def to_dict(self) -> dict[str, Any]:
        return {"what": self.what, "name": self.name, "why": self.why}


@dataclass(frozen=True)
class Plan:
    """`next`: what comes first. `tokens`, `cost_usd`: of the model call that follows, at most and roughly; None: none follows, or unknown."""

    run_id: str
    status: str
    next: Literal["run calls", "ask the model", "wait", "hold", "end", "nothing"]
    reason: str | None
    until: datetime | None
    items: Sequence[Item]
    tokens: int | None
    cost_usd: Decimal | None
    changed: bool  # other code than before goes on: an entry would say so
    missing: Sequence[Missing] = field(default=())
    held_by: str | None = None  # somebody drives it at this moment

    def to_dict(self) -> dict[str, Any]:
        """The `plan` document."""
        return {
            "type": "plan", "run_id": self.run_id, "status": self.status, "next": self.next, "reason": self.reason,
            "until": r.iso(self.until) if self.until else None, "items": [item.to_dict() for item in self.items], "tokens": self.tokens,
            "cost_usd": f"{self.cost_usd:f}" if self.cost_usd is not None else None, "changed": self.changed,
            "missing": [one.to_dict() for one in self.missing], "held_by": self.held_by,
        }  # fmt: skip


def plan(run: r.Run, policy: s.Policy, now: datetime, *, status: str, died: bool, attempts: int) -> Plan:
    """`died`: the lease was never given back; `attempts`: deaths in a row, that one included."""
    if run.ended and not run.calls:
        return Plan(run.id, status, "nothing", run.ended.reason, None, (), None, None, changed=False)
    facts = [r.stored(r.headed(e, at=now)) for e in taken_over(run, policy, now, attempts)] if died else []
    after, entries, step = s.settled(r.fold(run, facts), policy, now)
    entries = [*facts, *entries]
    items = _in_order([_item(run, call, after, entries, policy, now, died=died) for call in run.calls], after, step)
    asks = isinstance(step, s.CallModel) or (isinstance(step, s.RunCalls) and all(i.action in _PASSES for i in items))
    tokens = (after.context_tokens + _chars(after) // CHARS_PER_TOKEN + 1) if asks else None
    return Plan(
        run.id, status, _next(step), getattr(step, "reason", None), getattr(step, "until", None), items, tokens,
        policy.next_cost(after) if asks else None, changed=any(isinstance(e, r.VersionChanged) for e in entries) and bool(run.code),
        missing=_missing(items, step))  # fmt: skip


_PASSES = ("reuse", "run", "run again with the same key", "refuse")  # unless a tool itself waits or fails


def _next(step: s.Step) -> Any:
    match step:
        case s.CallModel():
            return "ask the model"
        case s.RunCalls():
            return "run calls"
        case s.Wait(status="waiting_for_code"):
            return "hold"
        case s.Wait():
            return "wait"
        case _:
            return "end"


def _item(run: r.Run, call: r.Call, after: r.Run, entries: Sequence[r.Entry], policy: s.Policy, now: datetime, *, died: bool) -> Item:
    item = Item(call.id, call.name, "reuse", "its result is in the journal", key=call.key or f"{run.id}:{call.id}")
    if call.result is not None:
        return item
    finished = next((e for e in entries if isinstance(e, r.CallFinished) and e.call_id == call.id), None)
    if finished is not None:
        said = str(finished.content)[:200]
        if finished.how in ("refused", "unknown", "cancelled"):
            return replace(item, action="refuse", why=said)
        return replace(
            item, why={"verified": "a person said what happened", "answered": "it was answered from outside"}.get(finished.how, said)
        )
    now_call = after.call(call.id)
    assert now_call is not None  # unanswered, so its batch is open
    match s.call_step(after, now_call, policy, now):
        case s.RunCall() as ready:
            held = s.version_step(after, policy)
            if isinstance(held, s.Wait):
                return replace(item, action="hold", why=held.reason, key=ready.key)
            return _to_run(replace(item, key=ready.key), now_call, ready, died=died)
        case s.Wait(status="waiting_for_approval" | "waiting_for_verification") as wait:
            gate = now_call.gate("approval" if wait.status == "waiting_for_approval" else "verification")
            return replace(item, action="ask a person", why=wait.reason, role=gate.role if gate else None, until=wait.until)
        case s.Wait(status="waiting_for_code") as wait:
            return replace(item, action="hold", why=wait.reason)
        case s.Wait() as wait:
            return replace(item, action="wait", why=wait.reason, until=wait.until)
        case _:
            raise AssertionError(f"call {call.id} of run {run.id} is not settled")


def _to_run(item: Item, call: r.Call, ready: s.RunCall, *, died: bool) -> Item:
    if ready.check:
        return replace(item, action="check first", why="an attempt began and its outcome was not saved: the tool's check looks")
    earlier = call.attempts + (died and not ready.intent)
    if earlier:
        why = "an attempt began and its outcome was not saved" if not died or call.attempts else "its worker died: it may have run already"
        return replace(item, action="run again with the same key", why=f"{why} ({ready.effect})")
    approved = call.decision
    return replace(item, action="run", why=f"approved by {approved.by}" if approved else f"it may run ({ready.effect})")


_RUNS = ("run", "run again with the same key", "check first")


def _in_order(items: Sequence[Item], after: r.Run, step: s.Step) -> list[Item]:
    """An at-most-once call waits for every earlier one that is begun and unanswered; and only so many run side by side."""
    now = {ready.call_id for ready in step.calls} if isinstance(step, s.RunCalls) else set()
    out: list[Item] = []
    blocked_by: str | None = None
    for item in items:
        call, placed = after.call(item.call_id), item
        if item.action in _RUNS and item.call_id not in now:
            late = f"it waits until it is known what became of {blocked_by}" if blocked_by else f"{item.why}; after the calls before it"
            placed = replace(item, action="wait", why=late) if blocked_by else replace(item, why=late, later=True)
        if call is not None and call.begun and item.action not in _RUNS:
            blocked_by = blocked_by or item.call_id
        out.append(placed)
    return out


def _chars(run: r.Run) -> int:
    return sum(len(str(x.get("content"))) for x in (run.messages if not run.context_tokens else run.messages[-1:]))


def _missing(items: Sequence[Item], step: s.Step) -> list[Missing]:
    out = [Missing("tool", item.tool, item.why) for item in items if item.action == "hold"]
    if not out and isinstance(step, s.Wait) and step.status == "waiting_for_code":
        out = [Missing("code", step.needs or "", step.reason)]
    return out


__all__ = ["Item", "Missing", "Plan", "plan"]
