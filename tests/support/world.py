"""The world outside the store, as tests see it: a ledger that tools write to, tools of every effect, and a person who looks before deciding.

"Effects" are lines of the ledger file and nothing else: what a run believes does not count.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from outlast import Outcome, Outlast, Run, Tool, ToolContext, approval, tool
from outlast.core import run as r
from outlast.core.gate import projection
from outlast.errors import RunBusy
from outlast.runtime.clock import ManualClock

GATE = approval(to="support-lead", noun="reply", within=timedelta(hours=4))
EFFECTS = ("look", "deliver", "act", "act_checked", "act_unsure")  # a tool of every kind, by name


class Ledger:
    """A file outside of every database: one line an effect, written at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, what: str, key: str = "", **more: Any) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, (json.dumps({"what": what, "key": key, **more}) + "\n").encode())
        finally:
            os.close(fd)

    def lines(self, what: str | None = None) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        found = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in found if what is None or line["what"] == what]

    def has(self, key: str) -> bool:
        return any(line["key"] == key for line in self.lines())

    def deliver(self, what: str, key: str) -> bool:
        """A receiver that dedupes: the first time it acts, later it only says that it did."""
        first = not any(line["key"] == key for line in self.lines(what))
        if first:
            self.write(what, key)
        return first


def use(name: str, call_id: str = "toolu_01", **args: Any) -> dict[str, Any]:
    """A tool_use block."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": args}


def asks(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return list(blocks)


@cache
def tools(gate: Any = None) -> dict[str, Tool[..., Any]]:
    """A tool of every effect; each answers the same on every attempt. Their world is the ledger in `ctx.deps`."""

    @tool(effect="read", gate=gate)
    def look(ctx: ToolContext[Ledger], text: str) -> dict[str, str]:
        ctx.deps.write("look", ctx.idempotency_key)
        return {"done": text}

    @tool(effect="idempotent", gate=gate)
    async def deliver(ctx: ToolContext[Ledger], text: str) -> dict[str, str]:
        ctx.deps.deliver("deliver", ctx.idempotency_key)
        return {"done": text}

    @tool(gate=gate)
    def act(ctx: ToolContext[Ledger], text: str) -> dict[str, str]:
        ctx.deps.write("act", ctx.idempotency_key)
        return {"done": text}

    async def seen(ctx: ToolContext[Ledger], text: str) -> Outcome:
        return Outcome.happened({"done": text}) if ctx.deps.has(ctx.idempotency_key) else Outcome.not_happened()

    @tool(gate=gate, check=seen)
    async def act_checked(ctx: ToolContext[Ledger], text: str) -> dict[str, str]:
        ctx.deps.write("act_checked", ctx.idempotency_key)
        return {"done": text}

    @tool(gate=gate, check=lambda ctx, text: Outcome.unknown("the other system is down"))
    def act_unsure(ctx: ToolContext[Ledger], text: str) -> dict[str, str]:
        ctx.deps.write("act_unsure", ctx.idempotency_key)
        return {"done": text}

    return {t.name: t for t in (look, deliver, act, act_checked, act_unsure)}


def finish(app: Outlast, run: Run[Any], ledger: Ledger, clock: ManualClock, *, approve: bool = True) -> Run[Any]:
    """Drive a run to its end: a person approves what waits, looks into the ledger before verifying, and time passes where it must."""
    for _ in range(30):
        if run.finished:
            return run
        for gate in [g for g in run.gates if g.outcome is None]:
            if gate.kind == "approval":
                app.decide(run.run_id, gate.gate_id, approved=approve, decided_by="priya", note=None if approve else "no")
            elif gate.kind == "verification":
                verify(app, gate.run_id, str(gate.call_id), gate.args, ledger, clock)
        if run.status == "waiting_for_timer":
            assert run.wake_at is not None
            clock.move(run.wake_at - clock.now)
        run = app.resume_sync(run.run_id)
    raise AssertionError(f"run {run.run_id} does not end: {run.status}, {run.reason}")


def verify(app: Outlast, run_id: str, call_id: str, args: dict[str, Any], ledger: Ledger, clock: ManualClock) -> None:
    if ledger.has(f"{run_id}:{call_id}"):
        app.verify(run_id, call_id, outcome="happened", result={"done": args["text"]}, decided_by="priya")
        return
    try:
        app.verify(run_id, call_id, outcome="run_again", decided_by="priya")
    except RunBusy as busy:  # the earlier attempt may still act: wait until then
        clock.move(busy.until - clock.now)
        app.verify(run_id, call_id, outcome="run_again", decided_by="priya")


def assert_whole(app: Outlast, run_id: str) -> None:
    """The journal is dense, the head is its fold, the gates are its projection, and the store finds nothing wrong with itself."""
    journal = list(app.journal(run_id))
    assert [row.entry_no for row in journal] == list(range(1, len(journal) + 1))
    assert all(a.seq <= b.seq for a, b in pairwise(journal))
    fences = [row.fence for row in journal if row.fence]  # 0: written without a lease
    assert fences == sorted(fences)
    entries = [r.from_row(row.kind, row.body, row.meta, by=row.by, entry_id=row.entry_id, at=row.at) for row in journal]
    run, rows = projection(r.Run(run_id), entries)
    head = app.head(run_id)
    assert (run.seq, run.model_calls, run.input_tokens, run.output_tokens) == (
        head.seq, head.model_calls, head.input_tokens, head.output_tokens)  # fmt: skip
    assert len(run.messages) == run.seq
    if run.ended and not run.calls:
        assert head.status == run.ended.status
    stored = [row for row, _ in app._store.gates(run_id)]
    assert sorted(stored, key=lambda g: g.gate_id) == sorted(rows, key=lambda g: g.gate_id)
    assert app.store_check() == []
