"""What must hold in every schedule. Each check carries the name of its invariant; docs/proof.md says what they are."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outlast.core import codec
from outlast.core import run as r
from outlast.stores import base
from outlast.stores.sqlite.rows import ask
from outlast.testing.simulation.loop import PROCESS
from outlast.testing.simulation.world import GATED, KEYED, ONCE, first_text, turns_of

if TYPE_CHECKING:
    from outlast.testing.simulation.schedule import Schedule

LATE_START = timedelta(seconds=30)
AFTER_END = (r.LateResult, r.DecisionRefused)
AFTER_CANCEL = (*AFTER_END, r.CallFinished, r.MessageAdded)  # in one transaction with it: what answers the open calls


def growing(sim: Schedule) -> None:
    """I1, I2, I15: journals only grow, without gaps; fences only grow, by one, and with every claim (another nonce)."""
    db = sim.store._files._open().db
    heads = ask(db, "SELECT run_no, fence, nonce, status, wake_at, lease_until, needs IS NOT NULL FROM run")
    sim.wakes = [(wake_at, lease_until, bool(parked)) for *_, wake_at, lease_until, parked in heads]
    for run_no, fence, nonce, status, *_ in heads:
        last, known = sim.fences.get(run_no, (0, None))
        if not last + (nonce != known) <= fence <= last + 1:
            sim.broken("I15", f"the fence of run {run_no} went from {last} to {fence}, its nonce from {known} to {nonce}")
        sim.fences[run_no] = fence, nonce
        sim.statuses[run_no] = status
    for row, run_no, entry_no, digest in ask(
        db, "SELECT rowid, run_no, entry_no, digest FROM entry WHERE rowid > ? ORDER BY rowid", (sim.last_row,)
    ):
        seen = sim.history.setdefault(run_no, [])
        if entry_no != len(seen) + 1:
            sim.broken("I2", f"entry {entry_no} of run {run_no} follows entry {len(seen)}")
        seen.append(digest)
        sim.last_row = row


def may_begin(sim: Schedule, ctx: Any, args: dict[str, Any]) -> None:
    """At a tool's first line: what the journal must say by then (I11, I16, I22, I25)."""
    entries, _ = sim.store.load(sim.store.head(ctx.run_id).run_no)
    process = PROCESS.get()
    name = _name_of(ctx.run_id, entries, ctx.call_id)
    sim.loop.note("begins", ctx.run_id, ctx.call_id, ctx.attempt, process.name)
    if ctx.idempotency_key != f"{ctx.run_id}:{ctx.call_id}":
        sim.broken("I8", f"{ctx.call_id} of {ctx.run_id} acts under the key {ctx.idempotency_key}")
    if name in (*ONCE, "forgetful"):
        intents = [e for e in entries if isinstance(e, r.CallStarted) and e.call_id == ctx.call_id]
        if not intents or intents[-1].owner != process.owner:
            sim.broken("I11", f"{name} {ctx.call_id} of {ctx.run_id} acts, and the journal does not hold its intent")
        late = sim.loop.now - sim.intended[ctx.run_id, ctx.call_id]
        if name in ONCE and late > LATE_START.total_seconds() + 1:
            sim.broken("I16", f"{name} {ctx.call_id} of {ctx.run_id} begins {late:.0f} s after its intent")
    if name in GATED:
        rows = [row for row, _ in sim.store.gates(ctx.run_id) if row.call_id == ctx.call_id and row.kind == "approval"]
        last = max(rows, key=lambda row: (row.created_at, row.gate_id), default=None)
        if last is None or last.outcome != "approved":
            sim.broken("I25", f"{name} {ctx.call_id} of {ctx.run_id} acts, and its gate is {last.outcome if last else 'not there'}")
        elif not any(isinstance(e, r.GateDecided) and (e.gate_id, e.outcome) == (last.gate_id, "approved") for e in entries):
            sim.broken("I25", f"{name} {ctx.call_id} of {ctx.run_id} acts, and nobody said yes")
        elif codec.decode(last.edited_args or last.args) != args:
            sim.broken("I22", f"{name} {ctx.call_id} runs with {args}, and {last.edited_args or last.args} was approved")


def paired(sim: Schedule, messages: Any) -> None:
    """I3: what the model is asked with is a history that a provider accepts."""
    open_ids: list[str] = []
    used: set[str] = set()
    for message in messages:
        content = message["content"] if isinstance(message["content"], list) else []
        if message["role"] == "assistant":
            if open_ids:
                sim.broken("I3", f"the calls {open_ids} have no results")
            open_ids = [b["id"] for b in content if b["type"] == "tool_use"]
            if used & set(open_ids) or len(set(open_ids)) < len(open_ids):
                sim.broken("I13", f"a call id is used twice: {open_ids}")
            used |= set(open_ids)
        else:
            results = [b["tool_use_id"] for b in content if b["type"] == "tool_result"]
            if results != open_ids:
                sim.broken("I3", f"results {results} for the calls {open_ids}")
            open_ids = []
    if open_ids:
        sim.broken("I3", f"the model is asked while the calls {open_ids} have no results")


def at_the_end(sim: Schedule) -> None:
    """Everything came to its end: the books among themselves, and the books against the world."""
    heads = sim.store.heads(base.RunFilter(limit=100))
    if missing := set(sim.plans) - {h.run_id for h in heads}:
        sim.broken("I4", f"acknowledged and gone: {sorted(missing)}")
    _nothing_lost(sim)
    for head in heads:
        rows = list(sim.store.journal(head.run_id))
        entries = [r.from_row(x.kind, x.body, x.meta, by=x.by, entry_id=x.entry_id, at=x.at) for x in rows]
        _nothing_after_the_end(sim, head, entries)
        _gates(sim, head, entries)
        _counted(sim, head, entries)
        _effects(sim, head, entries)
        for x in entries:
            sim.reached[type(x).__name__] += 1
        if head.status == "failed" and (head.reason or "").startswith("worker died"):
            sim.reached["a run was given up"] += 1
            # A claim that stood unknown: a lease that nobody knows of runs out. A drain whose store was too slow: its lease was not given back.
            unheard = sim.reached["an unknown commit stood"] + sim.reached["a worker was drained"]
            if sim.deaths + sim.pauses + unheard < 5:
                sim.broken("I20", f"{head.run_id} was given up after {sim.deaths} deaths and {sim.pauses} pauses: {head.reason}")
        sim.reached[f"a run ended as {head.status}"] += 1
    for gate, stands in sim.people.accepted.items():
        if len(stands) > 1:
            sim.broken("I21", f"{gate}: people were told {sorted(stands)}")
    for where, what, _ in sim.store.check():
        sim.broken("I2", f"{where}: {what}")


def _nothing_lost(sim: Schedule) -> None:
    """I1, I4: what was seen and what was acknowledged stands as it was."""
    db = sim.store._files._open().db
    for run_no, seen in sim.history.items():
        now = [digest for (digest,) in ask(db, "SELECT digest FROM entry WHERE run_no = ? ORDER BY entry_no", (run_no,))]
        if now[: len(seen)] != seen:
            sim.broken("I1", f"entries of run {run_no} changed after they were seen")
        entries, digest = sim.acked.get(run_no, (0, b""))
        if entries and (len(now) < entries or now[entries - 1] != digest):
            sim.broken("I4", f"entry {entries} of run {run_no} was acknowledged and is gone")


def _nothing_after_the_end(sim: Schedule, head: base.Head, entries: list[r.Entry]) -> None:
    """I27: after the end only what a person says, and late evidence."""
    ended: r.Entry | None = None
    for entry in entries:
        if isinstance(entry, r.RunEnded | r.RunCancelled):
            if ended is not None:
                sim.broken("I27", f"{head.run_id} ended twice")
            ended = entry
        elif ended is not None and isinstance(entry, r.TextSent | r.RetryAsked):
            ended = None
        elif ended is not None and not isinstance(entry, AFTER_CANCEL if isinstance(ended, r.RunCancelled) else AFTER_END):
            sim.broken("I27", f"{head.run_id}: {type(entry).__name__} after its end")


def _gates(sim: Schedule, head: base.Head, entries: list[r.Entry]) -> None:
    """I21, I24: one end for a gate, on its side of the deadline."""
    closes: dict[str, r.GateOpened] = {e.gate_id: e for e in entries if isinstance(e, r.GateOpened)}
    ends: Counter[str] = Counter()
    for entry in entries:
        if not isinstance(entry, r.GateDecided | r.GateExpired):
            continue
        ends[entry.gate_id] += 1
        opened = closes[entry.gate_id]
        if opened.closes_at is not None and isinstance(entry, r.GateExpired) != (entry.at >= opened.closes_at):
            sim.broken("I24", f"{head.run_id} {entry.gate_id}: {type(entry).__name__} at {entry.at}, it closed at {opened.closes_at}")
    if twice := [gate_id for gate_id, n in ends.items() if n > 1]:
        sim.broken("I24", f"{head.run_id}: {twice} ended twice")
    for row, _ in sim.store.gates(head.run_id):
        told = sim.people.accepted.get((head.run_id, row.gate_id))
        if told and row.outcome not in {x.partition(" ")[0] for x in told}:
            sim.broken("I21", f"{head.run_id} {row.gate_id} is {row.outcome}, people were told {told}")


def _counted(sim: Schedule, head: base.Head, entries: list[r.Entry]) -> None:
    """I18, I19: the model was asked for each answer, each death or lost lease, and each of its failures; what was lost is counted."""
    if head.parent_run_id is not None:
        return
    text = sim.plans[head.run_id]
    asked, failed = sim.receivers.asked[text], sim.receivers.failed[text]
    if asked > head.model_calls + failed + sim.interruptions:
        why = f"{head.model_calls} answers, {failed} failures, {sim.interruptions} interruptions"
        sim.broken("I18", f"{head.run_id}: the model was asked {asked} times for {why}")
    lost = sum(isinstance(e, r.ModelCallLost) for e in entries)
    given_up = sum(isinstance(e, r.RunEnded) and (e.reason or "").startswith("worker died") for e in entries)
    set_back = sim.reached["the clock was set back"]  # then what was to be asked again may be waiting again, and nobody is at a call
    if not set_back and asked > head.model_calls + failed + lost + given_up + sim.orderly:
        why = f"{head.model_calls} answers, {failed} failures, {lost} counted as lost, {sim.orderly} orderly ends"
        sim.broken("I19", f"{head.run_id}: the model was asked {asked} times for {why}")


def _effects(sim: Schedule, head: base.Head, entries: list[r.Entry]) -> None:
    """I8, I9, I10, I23: once where it is told as done, never where a person said no, at most once in any case."""
    results: dict[str, r.CallFinished] = {}
    for entry in entries:
        if isinstance(entry, r.CallFinished):
            results.setdefault(entry.call_id, entry)
    added = [e.message for e in entries if isinstance(e, r.MessageAdded)]
    blocks = {b["tool_use_id"]: b for x in added if isinstance(x["content"], list) for b in x["content"] if b["type"] == "tool_result"}
    rejected = {row.call_id for row, _ in sim.store.gates(head.run_id) if row.kind == "approval" and row.outcome in ("rejected", "expired")}
    for message in added:
        for call in (b for b in message["content"] if isinstance(b, dict) and b["type"] == "tool_use"):
            key, name = f"{head.run_id}:{call['id']}", call["name"]
            happened = sim.receivers.effects[key]
            if happened > 1:
                sim.broken("I8" if name in KEYED else "I10", f"{name} {key} happened {happened} times")
            if call["id"] in rejected and happened:
                sim.broken("I23", f"{name} {key} happened, and was rejected")
            result = results.get(call["id"])
            late = name in KEYED and sim.pauses  # a worker that was stopped past its lease may still send under its key, once for all
            if happened and not late and result is not None and result.is_error and result.how == "result":
                sim.broken(
                    "I8" if name in KEYED else "I10", f"{name} {key} happened, and the model is told that it failed: {result.content}"
                )
            block = blocks.get(call["id"])
            if block is None:
                sim.broken("I3", f"{name} {key} has no result at the end")
            elif name in (*ONCE, *KEYED) and not block.get("is_error") and not happened:
                sim.broken("I11", f"{name} {key} is told as done and never happened: {block}")
    if head.status == "done":
        said = sum(isinstance(e, r.TextSent) for e in entries)
        shown = sum(b.get("text") == "hurry up" for x in added if isinstance(x["content"], list) for b in x["content"])
        if shown != said:
            sim.broken("I4", f"{head.run_id} is done, and of {said} texts that were sent {shown} were shown to the model")
    if head.parent_run_id is None and head.status == "done":
        turns = turns_of(first_text(added))
        answers = [x for x in added if x["role"] == "assistant"]
        wanted = [[c["name"] for c in turn] for turn in turns]
        got = [[b["name"] for b in x["content"] if b["type"] == "tool_use"] for x in answers]
        if got[: len(wanted)] != wanted:
            sim.broken("I1", f"{head.run_id} is done, and asked for {got}, not {wanted}")


def _name_of(run_id: str, entries: list[r.Entry], call_id: str) -> str:
    for entry in entries:
        if isinstance(entry, r.MessageAdded) and isinstance(entry.message["content"], list):
            for block in entry.message["content"]:
                if block["type"] == "tool_use" and block["id"] == call_id:
                    return str(block["name"])
    raise AssertionError(f"{run_id} has no call {call_id}")
