"""Gates: what a wait asks, of whom, until when, and in which words; and the inbox's rows as a projection of the journal.

All instants are computed once, when the gate opens, and stored with their rule in `GateOpened.rungs`; nothing is ever computed from "now"
again, so no restart restarts a clock. A decision needs `closes_at` None or now < `closes_at`; an expiry needs now >= `closes_at`: exactly
one of them is possible at any instant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from outlast.core import codec
from outlast.core import run as r
from outlast.core.run import Call, Gate, GateOpened, Run, apply, iso

MAX_REMINDERS = 200  # a rung's reminders are computed ahead; after so many nobody reads them any more
SENT = frozenset({"reply", "message", "mail", "email", "e-mail", "letter", "notice", "invoice", "text", "post"})


@dataclass(frozen=True)
class GatePolicy:
    """What `approval()` says, without its Python parts: `count(start, duration)` adds a duration in the gate's hours."""

    role: str | None
    noun: str
    within: timedelta | None
    then: Literal["reject", "keep_waiting"] | GatePolicy = "reject"
    remind_every: timedelta | None = None
    count: Callable[[datetime, timedelta], datetime] = lambda start, within: start + within
    hours: Mapping[str, Any] | None = None  # text, tz, country, library: stored with the instants
    conditional: bool = False  # `when=` is to be asked


def rungs(policy: GatePolicy, now: datetime) -> tuple[list[dict[str, Any]], datetime | None]:
    """The ladder as absolute instants, and `closes_at`. The next rung begins where the one before ends, not when somebody looks. Total."""
    out: list[dict[str, Any]] = []
    start, rung = now, policy
    while True:
        rule: dict[str, Any] = {"within_s": rung.within.total_seconds() if rung.within is not None else None}
        if rung.hours:
            rule["hours"] = dict(rung.hours)
        try:
            deadline = rung.count(start, rung.within) if rung.within is not None else None
            remind_at = _reminders(rung, start, deadline)
        except Exception as e:  # noqa: BLE001 - hours that are over for good: the gate stays closed, has no deadline, and shows as stuck
            deadline, remind_at, rule["problem"] = None, [], str(e)
        out.append({"role": rung.role, "deadline": iso(deadline) if deadline else None, "rule": rule, "remind_at": remind_at})
        if not isinstance(rung.then, GatePolicy):
            return out, deadline if rung.then == "reject" else None
        if deadline is None:
            return out, None
        start, rung = deadline, rung.then


def _reminders(rung: GatePolicy, start: datetime, deadline: datetime | None) -> list[str]:
    if rung.remind_every is None:
        return []
    end = deadline if rung.then != "keep_waiting" else None
    out: list[str] = []
    at = start
    while len(out) < MAX_REMINDERS:
        at = rung.count(at, rung.remind_every)
        if end is not None and at >= end:
            break
        out.append(iso(at))
    return out


def next_at(gate: Gate) -> datetime | None:
    """The least instant at which this gate's clock says something new: a reminder, the next rung, the end."""
    instants = [] if gate.opened.closes_at is None else [gate.opened.closes_at]
    if gate.level < len(gate.opened.rungs) - 1 and gate.deadline:
        instants.append(gate.deadline)
    since = gate.reminded_at
    instants += [at for at in map(datetime.fromisoformat, gate.rung.get("remind_at", ())) if since is None or at > since][:1]
    return min(instants, default=None)


def moved(gate: Gate, now: datetime) -> r.GateMoved | r.GateExpired | None:
    """What this gate's clock says at `now`, or None if nothing new. Reminders and rungs that were slept through are not made up for."""
    opened = gate.opened
    if opened.closes_at is not None and now >= opened.closes_at:
        return r.GateExpired(opened.gate_id)
    level = max(min(gate.level, len(opened.rungs) - 1), 0)  # whatever a journal says, the ladder has an end
    while level < len(opened.rungs) - 1 and (end := opened.rungs[level].get("deadline")) and now >= datetime.fromisoformat(end):
        level += 1
    due = [at for at in map(datetime.fromisoformat, opened.rungs[level].get("remind_at", ())) if at <= now] if opened.rungs else []
    last = due[-1] if due else None
    if level > gate.level:
        return r.GateMoved(opened.gate_id, level, last)
    if last is not None and (gate.reminded_at is None or last > gate.reminded_at):
        return r.GateMoved(opened.gate_id, level, last)
    return None


# ---- words --------------------------------------------------------------------------------------------------------------


def a_role(role: str | None) -> str:
    """ "support-lead" -> "A support lead"."""
    name = (role or "person").replace("-", " ").replace("_", " ")
    return f"{'An' if name[:1].lower() in 'aeiou' else 'A'} {name}"


def verb(noun: str) -> tuple[str, str]:
    """What one does with it, and what was done."""
    return ("send", "sent") if noun.lower() in SENT else ("make", "made")


def text_of(gate: Gate, agent: str) -> str:
    """What is asked, in the gate's own words."""
    opened = gate.opened
    match opened.kind:
        case "approval":
            return f"{agent} wants to {verb(opened.noun)[0]} this {opened.noun}"
        case "verification":
            return f"{opened.tool} was started and its outcome is unknown: did it happen?" + (f" ({opened.why})" if opened.why else "")
        case "budget":
            return opened.why or f"{agent} reached a limit"
        case "event":
            return f"{opened.tool} waits for the event {(opened.args or {}).get('event')}"
        case _:
            return f"{opened.tool} waits for its own run"


def refusal(gate: Gate) -> str:
    """What the model reads where a gate said no. An expiry reads differently from a person's no."""
    noun = gate.opened.noun
    if gate.outcome == "expired":
        return f"Nobody decided on this {noun}{_within(gate)}, so it was not {verb(noun)[1]}."
    note = getattr(gate.closed, "note", None)
    return f"{a_role(gate.role)} rejected this {noun}: {note or 'no reason given'}"


def _within(gate: Gate) -> str:
    """All rungs together, where their time is of one kind."""
    rules = [rung.get("rule") or {} for rung in gate.opened.rungs]
    seconds = [rule.get("within_s") or 0 for rule in rules]
    kinds = {"hours" in rule for rule in rules}
    if not all(seconds) or len(kinds) != 1:
        return " in time"
    return f" within {duration(timedelta(seconds=sum(seconds)), working=kinds.pop())}"


def duration(value: timedelta, *, working: bool = False) -> str:
    """4 hours; 90 minutes; 2 days; 4 working hours."""
    seconds = value.total_seconds()
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size and seconds % size == 0 and not (working and unit == "day"):
            n = int(seconds // size)
            return f"{n} {'working ' if working else ''}{unit}{'' if n == 1 else 's'}"
    return f"{seconds:g} {'working ' if working else ''}second{'' if seconds == 1 else 's'}"


def changed(call: Call) -> str:
    """What the model is told where a person changed the arguments, or ""."""
    decision = call.decision
    if decision is None or decision.args is None or codec.canonical(decision.args) == codec.canonical(call.asked):
        return ""
    return f"A person ({decision.by}) changed the arguments before this ran. It ran with: {codec.encode(decision.args)}\n"


# ---- the inbox's rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GateRow:
    """A gate as the table `gates` holds it; `seq` is the checkpoint that it belongs to."""

    gate_id: str
    kind: str
    call_id: str | None
    tool: str | None
    args: str
    digest: str
    text: str
    role: str | None
    level: int
    deadline: datetime | None
    next_at: datetime | None
    closes_at: datetime | None
    created_at: datetime
    outcome: str | None
    decided_at: datetime | None
    decided_by: str | None
    note: str | None
    edited_args: str | None
    guarded: bool
    seq: int


def row(run: Run, call: Call | None, gate: Gate, decided_at: datetime | None) -> GateRow:
    opened, closed = gate.opened, gate.closed
    args = opened.args if opened.args is not None else (call.args if call else {})
    edited = closed.args if isinstance(closed, r.GateDecided) else None
    return GateRow(
        gate_id=opened.gate_id, kind=opened.kind, call_id=opened.call_id, tool=opened.tool, args=codec.encode(args), digest=opened.digest,
        text=text_of(gate, run.agent), role=gate.role, level=gate.level, deadline=gate.deadline,
        next_at=next_at(gate) if gate.outcome is None else None, closes_at=opened.closes_at, created_at=opened.at, outcome=gate.outcome,
        decided_at=decided_at, decided_by=closed.by if isinstance(closed, r.GateDecided | r.EventReceived) else None,
        note=getattr(closed, "note", None), edited_args=codec.encode(edited) if edited is not None else None, guarded=opened.guarded,
        seq=run.seq)  # fmt: skip


def projection(before: Run, entries: Sequence[r.Entry], *, after_all: Run | None = None) -> tuple[Run, list[GateRow]]:
    """The run after `entries`, and the final row of every gate that they opened, moved or closed: each written once.

    Over a whole journal from the empty run this is the table `gates` itself. `after_all`: the same fold, where the caller has it already.
    """
    if after_all is not None and not _gates(before) and not any(isinstance(e, r.GateOpened) for e in entries):
        return after_all, []
    touched: dict[str, GateRow] = {}
    after = before
    for entry in entries:
        held = {g.opened.gate_id: (c, g) for c, g in _gates(after)}
        after = apply(after, entry)
        now_held = {g.opened.gate_id: (c, g) for c, g in _gates(after)}
        if not held and not now_held:
            continue
        for gate_id, (call, gate) in now_held.items():
            old = held.get(gate_id)
            if old is None or old[1] is not gate:
                closing = gate.outcome is not None
                touched[gate_id] = row(after, call, gate, entry.at if closing else None)
        for gate_id in held.keys() - now_held.keys():  # its batch or the run is over
            call, gate = held[gate_id]
            if gate.outcome is None:
                touched[gate_id] = replace(row(after, call, gate, entry.at), outcome="cancelled", next_at=None)
    return after, list(touched.values())


def _gates(run: Run) -> Sequence[tuple[Call | None, Gate]]:
    return [*((None, g) for g in run.gates), *((c, g) for c in run.calls if c.gates for g in c.gates)]


__all__ = ["GateOpened", "GatePolicy", "GateRow", "projection", "row", "rungs"]
