"""`Outlast.reader`: what pages and reports read of a store, as documents. Blocking; nothing is written.

Whoever only wants a run, a list or the inbox finds them in `Outlast` itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, cast

from outlast.core import messages as m
from outlast.core.run import money
from outlast.documents import Gate, RunHead, entry_document, gate_of, head_fields
from outlast.errors import UsageError
from outlast.prices import usage_of
from outlast.stores.base import JournalRow, Stuck
from outlast.stores.pages import MOST, PER, Cost, Glance, PageFilter, PageStore, Statistics, Waiting


@dataclass(frozen=True)
class Row:
    """One run of a list: how its first message begins, and its open gate that ends first."""

    head: RunHead
    first: str | None
    gate: Gate | None


@dataclass(frozen=True)
class RunPage:
    """`next`: pass it as `before` for the page after this one. `scanned`: a search looked at so many runs and stopped there."""

    rows: Sequence[Row]
    next: str | None
    scanned: int | None


@dataclass(frozen=True)
class Step:
    """A model call or a tool call of a run. `kind`: model, lost (a model call that may have been paid for), tool or run (a sub-agent's)."""

    seq: int
    kind: str
    name: str  # of the model, the tool, or the sub-agent's tool
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cost_usd: Decimal | None = None  # None: unknown; a tool has none
    ms: int | None = None
    attempt: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cost_usd": f"{self.cost_usd:f}" if self.cost_usd is not None else None}


class Reader:
    def __init__(self, store: Any) -> None:
        self._store = cast("PageStore", store)

    @property
    def url(self) -> str:
        """Of the store, without a password."""
        return self._store.url

    def now(self) -> datetime:
        """The store's wall clock."""
        return self._store.now()

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        """Block until something was committed, or the time is over; gives a token to pass in next time."""
        return self._store.wait_for_change(seen, timeout_s)

    def commits(self) -> str:
        """A text that is another one after every commit, of whatever process."""
        return self._store.commits()

    def glance(self, run_ids: Sequence[str]) -> dict[str, Glance]:
        """As much of these runs as tells whether what one knows of them is still true."""
        return self._store.glance(run_ids)

    def glance_inbox(self, *, limit: int = 500) -> Sequence[tuple[Any, ...]]:
        """As much of the inbox as tells whether what one knows of it is still true."""
        return self._store.glance_inbox(limit=limit)

    # ---- lists ----------------------------------------------------------------------------------------------------------------

    def page(self, **where: Any) -> RunPage:
        """Runs, newest first; the keywords are those of `PageFilter`."""
        found = self._store.page(PageFilter(**where))
        rows = [Row(RunHead(**head_fields(x.head)), x.first, gate_of(x.head, x.gate) if x.gate is not None else None) for x in found.runs]
        return RunPage(rows, found.next, found.scanned)

    def counts(self, *, agent: str | None = None, since: datetime | None = None) -> dict[str, int]:
        """Runs per status; `MOST + 1` stands for more than that."""
        return self._store.counts(PageFilter(agent=agent, since=since), most=MOST)

    def agents(self) -> list[str]:
        """Names that any run has."""
        return self._store.agents()

    def stuck(self, *, limit: int = 1000) -> list[Stuck]:
        """Why runs do not go on by themselves, longest first, each with the command that mends it."""
        return self._store.stuck(limit=limit)

    def inbox(self, *, role: str | None = None, agent: str | None = None, limit: int = 500) -> list[tuple[RunHead, Gate]]:
        """What waits for a person, soonest deadline first, each with its run."""
        found = self._store.inbox(role=role, agent=agent, tags={}, limit=limit)
        return [(RunHead(**head_fields(head)), gate_of(head, row, told)) for head, row, told in found]

    def decided(self, *, since: datetime, agent: str | None = None, limit: int = 50) -> list[tuple[RunHead, Gate]]:
        """What was decided or ran out, newest first."""
        found = self._store.decided(since=since, agent=agent, limit=limit)
        return [(RunHead(**head_fields(head)), gate_of(head, row, told)) for head, row, told in found]

    def statistics(self, *, since: datetime, agent: str | None = None, offset: timedelta = timedelta(0)) -> Statistics:
        """Figures for pictures."""
        return self._store.statistics(since=since, agent=agent, offset=offset)

    def costs(self, *, per: str = "agent", since: datetime, agent: str | None = None) -> list[Cost]:
        """What answers cost, dearest first (per day: by day), of runs that began since then. `per`: agent, day, model or tool.

        A tool has no price: what an answer cost is shared evenly among the tools that it asked for, "" being answers that asked for none;
        `calls` and `ms` are the tool's own then. Runs of sub-agents count as their own agent's.
        """
        if per not in PER:
            raise UsageError(f"per must be one of {', '.join(PER)}, not {per!r}")
        found = self._store.costs(per=per, since=since, agent=agent)
        if per == "tool":
            found = _per_tool(found, self._store.statistics(since=since, agent=agent, steps=10_000).steps)
        return sorted(found, key=lambda c: (c.key or "",) if per == "day" else (-(c.cost_usd or 0), c.key or ""))

    def steps(self, run_id: str) -> list[Step]:
        """What each step of a run took and cost, oldest first."""
        self._store.head(run_id)
        names: dict[str, str] = {}
        out: list[Step] = []
        for row in self._store.journal(run_id):
            document = entry_document(run_id, row)
            body, meta = document["body"], document["meta"] or {}
            if row.kind == "MessageAdded" and body.get("role") == "assistant":
                names |= {call["id"]: call["name"] for call in m.tool_uses(body)}
            if (step := _step(row, body, meta, names)) is not None:
                out.append(step)
        return out

    def waiting(self) -> Waiting:
        """Open gates by kind, and how many runs are stuck."""
        return self._store.waiting()

    # ---- one run --------------------------------------------------------------------------------------------------------------

    def gates(self, run_id: str) -> list[Gate]:
        """Open ones first, oldest first."""
        head = self._store.head(run_id)
        return [gate_of(head, row, told) for row, told in self._store.gates(run_id)]

    def gate_entries(self, run_id: str, gate_id: str) -> list[dict[str, Any]]:
        """The journal around a gate: who was asked when, what was begun; no messages, no results."""
        seq = next((row.seq for row, _ in self._store.gates(run_id) if row.gate_id == gate_id), None)
        return [] if seq is None else [entry_document(run_id, row) for row in self._store.gate_entries(run_id, seq)]

    def entries(self, run_id: str, *, after: int = 0, limit: int = 200) -> list[dict[str, Any]]:
        """The journal's entries with a number above `after`, as documents."""
        self._store.head(run_id)
        return [entry_document(run_id, row) for row in self._store.journal(run_id, after=after, limit=limit)]

    def length(self, run_id: str) -> int:
        """How many entries the journal has."""
        return self._store.head(run_id).entries


def _step(row: JournalRow, body: Mapping[str, Any], meta: Mapping[str, Any], names: Mapping[str, str]) -> Step | None:
    match row.kind:
        case "MessageAdded" if body.get("role") == "assistant" and not meta.get("imported"):
            usage, model = usage_of(meta.get("usage")), meta.get("model")
            tokens = (usage.input, usage.output, usage.cache_read, usage.cache_write + usage.cache_write_1h) if usage else (0, 0, 0, 0)
            name = model if isinstance(model, str) else ""
            return Step(row.seq, "model", name, *tokens, money(meta.get("cost_usd")), meta.get("latency_ms"), meta.get("attempt"))
        case "ModelCallLost":
            tokens_in, out = body.get("input_tokens", 0), body.get("output_tokens", 0)
            return Step(row.seq, "lost", "", tokens_in, out, cost_usd=money(body.get("cost_usd")))
        case "CallFinished" if meta.get("ms") is not None:
            return Step(row.seq, "tool", names.get(body.get("call_id", ""), ""), ms=meta["ms"], attempt=meta.get("attempt"))
        case "ChildFinished":
            tokens = tuple(body.get(k, 0) for k in ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens"))
            return Step(row.seq, "run", names.get(body.get("call_id", ""), ""), *tokens, money(body.get("cost_usd")))
    return None


def _per_tool(found: Sequence[Cost], times: Sequence[tuple[str | None, int]]) -> list[Cost]:
    """Answers by the tools they asked for, taken apart: each tool with its share, and with its own calls and time."""
    out: dict[str, Cost] = {}
    for cost in found:
        asked = json.loads(cost.key or "[]") or [""]
        for tool in asked:
            old, n = out.get(tool, _NOTHING), len(asked)
            out[tool] = replace(
                old, key=tool, lost=old.lost + cost.lost, input_tokens=old.input_tokens + cost.input_tokens // n,
                output_tokens=old.output_tokens + cost.output_tokens // n, cache_read_tokens=old.cache_read_tokens + cost.cache_read_tokens // n,
                cache_write_tokens=old.cache_write_tokens + cost.cache_write_tokens // n, unpriced=old.unpriced + cost.unpriced,
                cost_usd=_plus(old.cost_usd, cost.cost_usd / n if cost.cost_usd is not None else None),
                lost_usd=_plus(old.lost_usd, cost.lost_usd),
                **({} if tool else {"calls": old.calls + cost.calls, "ms": old.ms + cost.ms, "timed": old.timed + cost.timed}))  # fmt: skip
    for name, took in times:
        if name is not None:
            old = out.get(name, replace(_NOTHING, key=name))
            out[name] = replace(old, calls=old.calls + 1, ms=old.ms + took, timed=old.timed + 1)
    return list(out.values())


def _plus(a: Decimal | None, b: Decimal | None) -> Decimal | None:
    return b if a is None else a if b is None else a + b


_NOTHING = Cost(None, 0, 0, 0, 0, 0, 0, None, 0, None, 0, 0)
