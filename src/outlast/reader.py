"""`Outlast.reader`: what pages and reports read of a store, as documents. Blocking; nothing is written.

Whoever only wants a run, a list or the inbox finds them in `Outlast` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast

from outlast.documents import Gate, RunHead, entry_document, gate_of, head_fields
from outlast.stores.base import Stuck
from outlast.stores.pages import MOST, PageFilter, PageStore, Statistics


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

    # ---- lists ----------------------------------------------------------------------------------------------------------------

    def page(self, **where: Any) -> RunPage:
        """Runs, newest first; the keywords are those of `PageFilter`."""
        found = self._store.page(PageFilter(**where))
        rows = [Row(RunHead(**head_fields(x.head)), x.first, gate_of(x.head, x.gate) if x.gate is not None else None) for x in found.runs]
        return RunPage(rows, found.next, found.scanned)

    def counts(self, *, agent: str | None = None, tags: Mapping[str, str] = {}, since: datetime | None = None) -> dict[str, int]:
        """Runs per status; `MOST + 1` stands for more than that."""
        return self._store.counts(PageFilter(agent=agent, tags=tags, since=since), most=MOST)

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
