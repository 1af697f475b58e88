"""Sweeping: the clocks of gates that no worker looks at. Never needed for correctness, only for punctuality.

A reminder, the next rung and the end of a gate are worked out from what was stored when it opened, so no agent's code is needed: one
transaction a run, under the lock of its row, by the store's clock read after it. A run that somebody holds is left to its holder. What
follows from an expiry (the refusal, the next model call) is the next worker's business: the run is due at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from outlast.core import gate as g
from outlast.core import run as r
from outlast.core import step as s
from outlast.errors import OutlastError, RunNotFound
from outlast.runtime import notices
from outlast.stores import base

log = logging.getLogger("outlast.worker")

PAGE = 1000


def sweep(store: base.Store, targets: Sequence[str]) -> int:
    """Apply every deadline that has passed; how many entries that took. `targets`: who this process tells.

    A process that tells nobody writes notices for those who were told when the gate opened: somebody else delivers them.
    """
    applied = 0
    while True:
        found = store.due_gates(limit=PAGE)
        moved = sum(_one(store, run_id, targets) for run_id in found)
        applied += moved
        if len(found) < PAGE or not moved:
            return applied


def _one(store: base.Store, run_id: str, targets: Sequence[str]) -> int:
    known: dict[str, list[str]] = {}

    def told(gate_id: str) -> Sequence[str]:
        return targets or known.get(gate_id, ())

    try:
        if not targets:
            known = {row.gate_id: store.notice_targets(run_id, row.gate_id) for row, _ in store.gates(run_id) if row.outcome is None}
        _, moved, _ = store.outside(run_id, clocks(told))
    except RunNotFound:  # erased, or moved to another store, since it was found
        return 0
    except OutlastError as e:  # one run that cannot be read is that run's trouble
        log.warning("run %s: its deadlines could not be applied, they are next time: %s", run_id, e, extra={"run_id": run_id})
        return 0
    return int(moved or 0)


def clocks(told: Callable[[str], Sequence[str]]) -> base.Plan:
    """What the clocks of a run's gates say at the store's `now`; the plan's value is how many of them said something."""

    def plan(tail: base.Tail) -> base.Outside:
        if tail.head.held or tail.head.status in base.ENDED:
            return base.Outside(wake=False, value=0)
        entries = [r.stored(replace(e, at=tail.now)) for x in tail.run.all_gates() if x.outcome is None and (e := g.moved(x, tail.now))]
        if not entries:
            return base.Outside(wake=False, value=0)
        after, rows = g.projection(tail.run, entries)
        told_of = [n for e in entries for n in notices.due(tail.run, [e], told(getattr(e, "gate_id", "")))]
        expired = any(isinstance(e, r.GateExpired) for e in entries)
        return base.Outside(
            entries, status="running" if expired else tail.head.status, reason=None if expired else _reason(after, tail.head),
            gates=rows, notices=told_of, value=len(entries))  # fmt: skip

    return plan


def _reason(run: r.Run, head: base.Head) -> str | None:
    """The next rung asks somebody else, until later: what people read about the run says so."""
    if head.status == "waiting_for_approval":
        for call in run.calls:
            approval = call.gate("approval")
            if approval is not None and approval.outcome is None:
                return s.asks(call.name, approval)
    return head.reason
