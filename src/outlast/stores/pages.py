"""What pages and reports read of a store, beside `base.Store`: keyset pages, counts up to a limit, what was decided, what was spent.

Rules
1. Nothing here writes, and nothing here costs more the more runs there are: what cannot be found by an index looks at the newest `scan`
   rows only, and says where it stopped.
2. Every method is one transaction: a page shows one moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Protocol

from outlast.core.gate import GateRow
from outlast.stores.base import ENDED, Head, JournalRow, Store

MOST = 10_000  # counts are exact up to here
SCAN = 2_000  # runs that a search by text or tags looks at
Noted = tuple[Head, GateRow, datetime | None]  # a gate, its run, and when somebody was first told


WAITING = (
    "waiting_for_approval", "waiting_for_verification", "waiting_for_budget", "waiting_for_event", "waiting_for_run", "waiting_for_timer",
    "waiting_for_code")  # fmt: skip
STATUSES = ("running", *WAITING, *ENDED)


@dataclass(frozen=True, slots=True)
class PageFilter:
    status: str | None = None
    waiting: bool = False  # any `waiting_…` but in doubt
    unfinished: bool = False
    stuck: bool = False
    agent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    since: datetime | None = None
    text: str | None = None  # in the run id or the first message
    before: str | None = None  # a run id: the page after it
    limit: int = 50

    @property
    def statuses(self) -> Sequence[str] | None:
        """In each of them an index holds the runs in order, and so it does for each agent and status. None: in all of them together."""
        if self.status is not None:
            return (self.status,)
        if self.waiting:
            return tuple(s for s in WAITING if s != "waiting_for_verification")
        if self.unfinished:
            return ("running", *WAITING)
        return STATUSES if self.agent is not None else None

    @property
    def searches(self) -> bool:
        """Does it ask for what no index finds?"""
        return bool(self.text or self.tags)


@dataclass(frozen=True, slots=True)
class Listed:
    """One run of a list: its head, how its first message begins, and its open gate that ends first."""

    head: Head
    first: str | None
    gate: GateRow | None


@dataclass(frozen=True, slots=True)
class Page:
    """`next`: the run after which the next page begins, or None. `scanned`: a search looked at so many runs and stopped there."""

    runs: Sequence[Listed]
    next: str | None
    scanned: int | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """For pictures. Hours are hours since the epoch; days are days since the epoch in the offset that was asked for."""

    ended: Sequence[tuple[int, str, int]]  # (hour, status, runs)
    spent: Sequence[tuple[int, str, int, int, int, float | None, int]]  # (day, agent, runs, input, output, USD, runs of unknown cost)
    steps: Sequence[tuple[str | None, int]]  # (tool, or None: the model; ms)
    summed: int | None = None  # `spent` is of so many of the newest runs, which are not all; None: of all


PER = ("agent", "day", "model", "tool")
GATE_KINDS = ("approval", "verification", "budget", "event", "run")


@dataclass(frozen=True, slots=True)
class Cost:
    """Answers that have `key` in common. Of `per="tool"` the key is a JSON list: the tools that the answer asked for."""

    key: str | None
    calls: int
    lost: int  # model calls that may have been paid for; not in the sums beside it
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    cost_usd: Decimal | None  # of the answers whose price is known; None: of none
    unpriced: int  # answers whose price is unknown
    lost_usd: Decimal | None  # what the lost ones cost if they were paid for
    ms: int  # that they took together
    timed: int  # how many of them are in `ms`


@dataclass(frozen=True, slots=True)
class Waiting:
    """`open` and `stuck`: `MOST + 1` stands for more than that."""

    open: Sequence[tuple[str, int, datetime | None]]  # (kind of gate, how many, the oldest one)
    stuck: int


Key = tuple[int, str, int]  # (created_at, run_id, run_no): the order of a list


def arranged(
    where: PageFilter, keys: Sequence[Key], near: Sequence[int], ids: Sequence[int], scan: int
) -> tuple[list[int], str | None, int | None]:
    """The numbers of the runs to show, and `next` and `scanned` of their page.

    Args:
        keys: what the indexes gave, in order: one more than a page, or up to `scan` to be searched.
        near: numbers of those of them that fit, in order, one more than a page.
        ids: numbers of runs to be shown before them, half a page at most: their ids begin with the text.
    """
    rest = [run_no for run_no in near if run_no not in ids]
    room = where.limit - len(ids)
    shown = [*ids, *rest[:room]]
    if len(rest) > room:
        return shown, next(run_id for _, run_id, run_no in keys if run_no == rest[room - 1]), None
    if where.searches and len(keys) == scan:
        return shown, keys[-1][1], scan
    return shown, None, None


def cost(row: Sequence[Any]) -> Cost:
    """A row of the query `costs`."""
    key, calls, lost, tokens_in, out, read, write, paid, unpriced, lost_paid, ms, timed = row
    return Cost(key, calls, lost, tokens_in, out, read, write, _usd(paid), unpriced, _usd(lost_paid), ms or 0, timed)


def _usd(units: int | None) -> Decimal | None:
    return Decimal(units).scaleb(-10).normalize() if units is not None else None


@dataclass(frozen=True, slots=True)
class Glance:
    """As much of a run as tells whether its page is still true."""

    entries: int
    status: str
    reason: str | None
    lease_owner: str | None
    wake_at: datetime | None


class PageStore(Store, Protocol):
    def commits(self) -> str:
        """A text that is another one after every commit, of whatever process; the cheapest question there is."""
        ...

    def glance(self, run_ids: Sequence[str]) -> dict[str, Glance]:
        """Those of them that there are."""
        ...

    def glance_inbox(self, *, limit: int = 500) -> list[tuple[Any, ...]]:
        """What waits for a person, in the inbox's order: as much of each gate as tells whether its card is still true."""
        ...

    def page(self, where: PageFilter, *, scan: int = SCAN) -> Page:
        """Newest first (created_at, then run id)."""
        ...

    def counts(self, where: PageFilter, *, most: int = MOST) -> dict[str, int]:
        """Runs per status; of `where` only agent and since count. `most + 1` stands for more than `most`."""
        ...

    def agents(self, *, limit: int = 100) -> list[str]:
        """Names that any run has, in order."""
        ...

    def gate_entries(self, run_id: str, seq: int, *, limit: int = 500) -> list[JournalRow]:
        """Entries of the checkpoint that a gate belongs to, without messages and results: who was asked when, and what was begun."""
        ...

    def decided(self, *, since: datetime, agent: str | None = None, limit: int = 50) -> list[Noted]:
        """Closed gates of kind approval, verification, budget; newest first."""
        ...

    def statistics(
        self, *, since: datetime, agent: str | None = None, offset: timedelta = timedelta(0), scan: int = 100_000, steps: int = 300
    ) -> Statistics:
        """Of the newest runs: `scan` are summed, `steps` timed (of an agent with few runs: its newest)."""
        ...

    def costs(self, *, per: str, since: datetime, agent: str | None = None, scan: int = 100_000) -> list[Cost]:
        """What the answers of runs that began since then cost, by one of `PER`; of the newest `scan` runs."""
        ...

    def waiting(self, *, most: int = MOST) -> Waiting:
        """What waits and what is stuck, for gauges: by indexes, and counted up to `most`."""
        ...
