"""Short words for the tables of this folder: entries, tools, and a journal that is folded as a store would give it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from outlast.core import messages as m
from outlast.core import run as r
from outlast.core.gate import GatePolicy
from outlast.core.step import Policy, RunCall, RunCalls, Settle, Step, ToolPolicy, heard, settled

T0 = datetime(2026, 11, 30, 7, 0, tzinfo=UTC)


def t(seconds: float) -> datetime:
    """That many seconds after the run was started."""
    return T0 + timedelta(seconds=seconds)


def s(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


# ---- the code's side ------------------------------------------------------------------------------------------------------

LEAD = GatePolicy("support-lead", "reply", within=s(100))


def needs_n(args: Mapping[str, Any]) -> str | None:
    return None if isinstance(args.get("n"), int) else "n: field required"


READ = ToolPolicy("look", "read")
STRICT = ToolPolicy("strict", "read", problem=needs_n, schema_digest="d1")
KEYED = ToolPolicy("post", "idempotent")
FORGETS = ToolPolicy("post", "idempotent", key_ttl=s(50))
ONCE = ToolPolicy("pay", "at_most_once")
CHECKED = ToolPolicy("pay", "at_most_once", has_check=True)
GATED = ToolPolicy("reply", "idempotent", gate=LEAD)


def policy(*tools: ToolPolicy, **more: Any) -> Policy:
    return Policy(tools={x.name: x for x in tools}, **more)


ALL = policy(READ, KEYED, ONCE, GATED, STRICT)


# ---- the journal's side ---------------------------------------------------------------------------------------------------


def at(seconds: float, entry: r.Entry) -> r.Entry:
    return replace(entry, at=t(seconds))


def says(*texts: str) -> r.MessageAdded:
    return r.MessageAdded(m.user(*map(m.text, texts)))


def use(call_id: str, name: str, args: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {} if args is None else args}


def answer(*content: str | dict[str, Any], stop: Any = "end_turn", **meta: Any) -> r.MessageAdded:
    blocks = [m.text(b) if isinstance(b, str) else b for b in content]
    return r.MessageAdded({"role": "assistant", "content": blocks}, meta={"stop_reason": stop, **meta})


def asks(*calls: dict[str, Any], stop: Any = "tool_use", **meta: Any) -> r.MessageAdded:
    return answer(*calls, stop=stop, **meta)


def begun(call_id: str, effect: str = "at_most_once", *, attempt: int = 1, until: float = 60) -> r.CallStarted:
    return r.CallStarted(call_id, f"run-1:{call_id}", effect, attempt, t(until))


def result(call_id: str, content: Any = "ok", **more: Any) -> r.CallFinished:
    return r.CallFinished(call_id, content, **more)


def rung(seconds: float | None, role: str | None = "support-lead", *reminders: float) -> dict[str, Any]:
    return {
        "role": role,
        "deadline": None if seconds is None else r.iso(t(seconds)),
        "rule": {},
        "remind_at": [r.iso(t(x)) for x in reminders],
    }


def gate(
    call_id: str | None, kind: r.GateKind = "approval", *rungs: Mapping[str, Any], closes: float | None = None, n: int = 1, **more: Any
) -> r.GateOpened:
    gate_id = f"{kind}:{call_id}" + (f".{n}" if n > 1 else "")
    return r.GateOpened(
        gate_id, kind, call_id, "reply", "sha256:0", rungs=rungs or (rung(None),), closes_at=None if closes is None else t(closes), **more
    )


def decided(gate_id: str, outcome: str = "approved", **more: Any) -> r.GateDecided:
    return r.GateDecided(gate_id, outcome, by="priya", **more)


STARTED = r.RunStarted("helper", at=T0)
HELLO = (STARTED, says("hello"))


def journal(*entries: r.Entry) -> r.Run:
    """The fold of a journal as a reader gets it: each entry through the form that is stored."""
    return r.fold(r.Run("run-1"), [r.stored(e if e.at != r.EPOCH else replace(e, at=T0)) for e in entries])


def called(*calls: dict[str, Any], then: Sequence[r.Entry] = ()) -> r.Run:
    """A run whose model just asked for these calls."""
    return journal(*HELLO, asks(*calls), *then)


# ---- playing --------------------------------------------------------------------------------------------------------------


def hear(run: r.Run, model_says: Any, code: Policy, now: datetime = T0) -> tuple[r.Run, list[r.Entry], Step]:
    """Save a model's answer as a holder would: its facts, and all that follows from them, in one append."""
    facts = [replace(e, at=now) for e in heard(run, model_says, code)]
    run = r.fold(run, facts)
    run, rest, step = settled(run, code, now)
    return run, [*facts, *rest], step


# ---- a step in one line ----------------------------------------------------------------------------------------------------


def brief(step: Step) -> str:
    """`calls look#1, check pay#2`, `settle CallFinished(refused) MessageAdded`, `waiting_for_timer 30`, `done`: a step as a table shows it."""
    match step:
        case RunCalls(calls):
            return "calls " + ", ".join(_call(c) for c in calls)
        case Settle(entries):
            return "settle " + " ".join(_entry(e) for e in entries)
        case _ if hasattr(step, "until"):
            until = step.until
            return (
                step.status + ("" if until is None else f" {(until - T0).total_seconds():g}") + (f" [{step.needs}]" if step.needs else "")
            )
        case _:
            return getattr(step, "status", "model")


def _call(call: RunCall) -> str:
    return f"{'check ' if call.check else ''}{call.call_id}#{call.attempt}{'!' if call.intent else ''}"


def _entry(entry: r.Entry) -> str:
    match entry:
        case r.CallFinished():
            return f"{entry.call_id}={entry.how}"
        case r.GateOpened():
            return f"open {entry.gate_id}"
        case r.GateMoved():
            return f"level {entry.level}"
        case r.GateExpired():
            return f"expired {entry.gate_id}"
        case r.MessageAdded():
            return "+".join(_block(b) for b in m.blocks(entry.message))
        case r.RunEnded():
            return entry.status
        case _:
            return type(entry).__name__


def _block(block: Mapping[str, Any]) -> str:
    return str(block["tool_use_id"]) if block["type"] == "tool_result" else repr(block["text"])
