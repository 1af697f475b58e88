"""Entries without a lease: what a person's or another system's word does to a run.

Each function gives a plan: a pure function of what stands under the lock of the run's row (`Tail`), which either says what is written or
raises the refusal. The first decision stands; a decision needs `closes_at` None or now < `closes_at`, by the store's clock read after the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from outlast.core import codec
from outlast.core import run as r
from outlast.core import step as s
from outlast.core.gate import GateRow, projection
from outlast.documents import gate_of
from outlast.errors import GateClosed, NotAllowed, Refused, RunBusy, UsageError
from outlast.stores import base, owner

DECIDED_BY = {"approved": ("approval", "budget"), "rejected": ("approval", "budget"), "verify": ("verification",)}
May = Callable[[GateRow], str | None]  # why this person may not decide it, or None


def find(tail: base.Tail, kinds: Sequence[str], call: str | None) -> GateRow:
    """The gate that a verb means: by call id or gate id, or the only open one; with none open the last closed one. Raises UsageError."""
    of_kind = [g for g in tail.gates if g.kind in kinds]
    if call is not None:
        named = [g for g in of_kind if g.gate_id == call] or [g for g in of_kind if g.call_id == call]
        found = [g for g in named if g.outcome is None] or named
        if found:
            return max(found, key=_age)
        raise _which(tail, of_kind, kinds, f"{call!r} is no {' or '.join(kinds)} gate of run {tail.head.run_id}")
    waiting = [g for g in of_kind if g.outcome is None]
    if len(waiting) == 1:
        return waiting[0]
    if not waiting and of_kind:
        return max(of_kind, key=lambda g: (g.decided_at or g.created_at, *_age(g)))
    if not waiting:
        raise _which(tail, of_kind, kinds, f"run {tail.head.run_id} has no {' or '.join(kinds)} gate ({tail.head.status})")
    raise _which(tail, of_kind, kinds, f"run {tail.head.run_id} waits for {len(waiting)} decisions: say which call")


def _age(g: GateRow) -> tuple[datetime, int, str]:
    return (g.created_at, len(g.gate_id), g.gate_id)


def _which(tail: base.Tail, of_kind: Sequence[GateRow], kinds: Sequence[str], why: str) -> UsageError:
    waiting = [f"{g.call_id or g.gate_id} ({g.tool or g.kind})" for g in of_kind if g.outcome is None]
    hint = f"one of: {', '.join(waiting)}" if waiting else f"outlast show {tail.head.run_id}"
    return UsageError(f"{why}{'; open: ' + ', '.join(waiting) if waiting else ''}", hint=hint, run_id=tail.head.run_id)


def _write(tail: base.Tail, entries: Sequence[r.Entry], **more: Any) -> base.Outside:
    ready = [r.stored(replace(e, at=tail.now)) for e in entries]
    _, rows = projection(tail.run, ready)
    return base.Outside(ready, gates=rows, **more)


def _closed(tail: base.Tail, row: GateRow, why: str) -> GateClosed:
    return GateClosed(why, gate=gate_of(tail.head, row), hint=f"outlast show {tail.head.run_id}", run_id=tail.head.run_id)


def decide(kinds: Sequence[str], call: str | None, entry: r.GateDecided, *, digest: str | None, may: May,
           prepare: Callable[[base.Tail, GateRow, r.GateDecided], r.GateDecided]) -> base.Plan:  # fmt: skip
    """A person's word on a gate. `prepare` checks edited arguments against the gate that is meant; it raises what is wrong with them."""

    def plan(tail: base.Tail) -> base.Outside:
        row = find(tail, kinds, call)
        mine = replace(entry, gate_id=row.gate_id)
        if (why := may(row)) is not None:
            refused = NotAllowed(
                f"{entry.by} may not decide {row.call_id or row.gate_id}: {why}",
                run_id=tail.head.run_id,
                hint=f"asked: {row.role or 'anyone'}",
            )
            return _write(tail, [r.DecisionRefused(row.gate_id, why, by=entry.by)], wake=False, value=refused)
        if digest is not None and digest not in (row.digest, codec.digest(codec.decode(row.edited_args)) if row.edited_args else None):
            raise _closed(tail, row, f"{row.call_id or row.gate_id} no longer has the arguments that were shown ({digest[:20]}…)")
        if row.outcome is not None:
            if row.kind == "budget" and mine.args is not None:
                mine = prepare(tail, row, mine)  # 0.5 and "0.5" are the same limit
            return _decided_before(tail, row, mine)
        if row.closes_at is not None and tail.now >= row.closes_at:
            raise _closed(tail, replace(row, outcome="expired"), f"{row.call_id or row.gate_id} expired at {r.iso(row.closes_at)}")
        if mine.outcome == "run_again" and (early := _too_early(tail, row)):
            return early
        mine = prepare(tail, row, mine)
        decided = _write(tail, [mine], status="running")
        after = next((g for g in decided.gates if g.gate_id == row.gate_id), None)
        if after is None or after.outcome is None:
            raise _closed(tail, row, f"{row.call_id or row.gate_id} is no longer open")
        return replace(decided, value=gate_of(tail.head, after))

    return plan


def _decided_before(tail: base.Tail, row: GateRow, mine: r.GateDecided) -> base.Outside:
    """The same decision of the same person again is accepted and changes nothing; any other hears what stands. So does who approves what was
    shown where edited arguments run: that is not what they saw."""
    edited = codec.canonical(codec.decode(row.edited_args)) if row.edited_args else None
    same_args = (codec.canonical(mine.args) if mine.args is not None else None) == edited
    if row.outcome == mine.outcome and row.decided_by == mine.by and same_args:
        return base.Outside(value=gate_of(tail.head, row), wake=False)
    when = f" at {r.iso(row.decided_at)[11:16]}" if row.decided_at else ""
    who = f" by {row.decided_by}" if row.decided_by else ""
    what = {"run_again": "set to run again", "give_up": "given up", "happened": "confirmed", "arrived": "answered"}.get(
        row.outcome or "", row.outcome
    )
    verb = what if row.outcome in ("expired", "happened") and not who else f"was {what}"
    raise _closed(tail, row, f"{row.call_id or row.gate_id} {verb}{who}{when}")


def _too_early(tail: base.Tail, row: GateRow) -> base.Outside | None:
    """ "Run again" is refused while an earlier attempt may still act: with who and until when. Where its process is provably dead that is soon, and
    written down; not at once: what is still on the wire lands after the person has looked.
    """
    call, now = tail.run.call(row.call_id), tail.now
    if call is None or call.may_act_until is None or now >= call.may_act_until:
        return None
    died = worker_died([call], now)
    until = died.may_act_until if died else call.may_act_until
    who = owner.short(call.started.owner) if call.started else "an earlier attempt"
    why = "what it sent may still land" if died else "may still act"
    busy = RunBusy(
        f"{call.name} {why} until {r.iso(until)} ({who})", owner=who, until=until, run_id=tail.head.run_id,
        hint="look again and try again then, or say what happened: outlast verify --happened, --give-up")  # fmt: skip
    if died is None:
        raise busy
    return _write(tail, [died], wake=False, value=busy)


def worker_died(calls: Sequence[r.Call], now: datetime) -> r.WorkerDied | None:
    """That the processes which began these calls are provably gone; None where none is, or no time is gained by writing it down."""
    gone = [
        c.id
        for c in calls
        if c.begun and c.started and owner.provably_dead(c.started.owner) and (c.may_act_until or now) > now + r.LATE_WIRE
    ]
    return r.WorkerDied(gone, now + r.LATE_WIRE) if gone else None


def _over(tail: base.Tail) -> str | None:
    """Why nothing more is accepted at all: the run was moved to another store."""
    reason = tail.run.ended.reason if tail.run.ended else None
    return reason if reason and reason.startswith("moved to ") else None


def send(content: str | Sequence[Mapping[str, Any]], by: str | None) -> base.Plan:
    """Queue a text; it wakes a run that is over."""

    def plan(tail: base.Tail) -> base.Outside:
        if why := _over(tail):
            raise Refused(f"run {tail.head.run_id} was {why}", run_id=tail.head.run_id)
        waits = tail.head.status.startswith("waiting_")
        return _write(tail, [r.TextSent(content, by=by)], status=None if waits else "running", fresh=tail.head.status in base.ENDED)

    return plan


def retry(by: str | None) -> base.Plan:
    """Take a failed or cancelled run up again, where asking the same again can help."""

    def plan(tail: base.Tail) -> base.Outside:
        run_id, status = tail.head.run_id, tail.head.status
        why = _over(tail)
        if status not in ("failed", "cancelled") or why:
            raise Refused(f"run {run_id} is {status}{f', {why}' if why else ''}: there is nothing to retry", run_id=run_id,
                          hint=f"outlast send {run_id} TEXT" if status == "done" else f"outlast show {run_id}")  # fmt: skip
        last = tail.run.messages[-1] if len(tail.run.messages) else None
        if last is not None and last["role"] == "assistant" and not tail.run.calls and not tail.run.queued:
            raise Refused(f"run {run_id} would only fail again: {tail.head.reason}", run_id=run_id, hint=f"outlast send {run_id} TEXT")
        return _write(tail, [r.RetryAsked(by=by)], status="running", fresh=True)

    return plan


def cancel(by: str | None, note: str | None, gone: tuple[int, str | None] = (0, None)) -> base.Plan:
    """Close the gates and answer every open call in one transaction; needs no living worker. `gone`: what `lost` says of a child run."""

    def plan(tail: base.Tail) -> base.Outside:
        if tail.head.status in base.ENDED:
            return base.Outside(wake=False)
        run = tail.run
        entries = [r.RunCancelled(note, by=by), *s.closing(run, "cancelled")]
        children = [g.opened.args["run_id"] for g in run.all_gates() if g.opened.kind == "run" and g.outcome is None and g.opened.args]
        others = [base.ParentEntry(child, cancel(by, note)) for child in children]
        if tail.head.parent_run_id and tail.head.parent_call_id:
            head = tail.head
            ended = r.ChildFinished(
                tail.head.parent_call_id, "cancelled", None, note, head.input_tokens, head.output_tokens,
                head.cost_usd if head.model_calls else "0",
                head.cache_read_tokens, head.cache_write_tokens, *gone)  # fmt: skip
            others.append(base.ParentEntry(tail.head.parent_run_id, child_ended(ended)))
        return _write(
            tail, entries, status="cancelled", reason=note or f"cancelled{' by ' + by if by else ''}", wake=False, fence=True, others=others
        )

    return plan


def paid(run: r.Run) -> str | None:
    """What a run that is over adds to its parent's cost; None: unknown. One that asked no model cost nothing."""
    if not run.model_calls:
        return "0"
    return f"{run.cost_usd:f}" if run.cost_usd is not None else None


def lost(run: r.Run) -> tuple[int, str | None]:
    """Tokens and USD of model calls of a run, and of runs below, that may have been paid for and lost."""
    return run.lost_tokens, f"{run.lost_usd:f}" if run.lost_usd else None


def child_ended(entry: r.ChildFinished) -> base.Plan:
    """What the end of a child run does to its parent: the call is answered, and what it cost is the parent's cost."""

    def plan(tail: base.Tail) -> base.Outside:
        call = tail.run.call(entry.call_id)
        gate = call.gate("run") if call else None
        if tail.head.status in base.ENDED or gate is None or gate.outcome is not None:
            return base.Outside(wake=False)
        waits = tail.head.status == "waiting_for_run"
        written = _write(tail, [replace(entry, entry_id=f"child:{entry.call_id}")], status="running" if waits else None)
        before, more = r.money(tail.head.cost_usd), r.money(entry.cost_usd)
        spent = base.Spent(
            entry.input_tokens, entry.output_tokens, entry.cache_read_tokens, entry.cache_write_tokens,
            f"{before + more:f}" if before is not None and more is not None else None)  # fmt: skip
        return replace(written, spent=spent)

    return plan


def event(name: str, data: Any, event_id: str) -> base.Plan:
    """Something happened outside: it answers the call that waits for it, or is kept for one that will."""

    def plan(tail: base.Tail) -> base.Outside:
        if tail.head.status in base.ENDED:
            raise Refused(f"run {tail.head.run_id} is {tail.head.status}: it waits for no event", run_id=tail.head.run_id)
        written = _write(tail, [r.EventReceived(name, data, entry_id=event_id)])
        answers = any(g.outcome is not None for g in written.gates)
        return replace(written, status="running" if answers and tail.head.status in ("waiting_for_event", "waiting_for_timer") else None)

    return plan
