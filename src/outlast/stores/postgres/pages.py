"""What `stores.pages` asks, on Postgres: each method one transaction, one message of statements where the second needs no look at the first."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from outlast.core.gate import GateRow
from outlast.core.run import ms
from outlast.stores.base import Head, JournalRow
from outlast.stores.pages import GATE_KINDS, MOST, SCAN, Cost, Listed, Noted, Page, PageFilter, Statistics, Waiting, cost
from outlast.stores.postgres.connections import Row, Tx
from outlast.stores.sqlite import rows
from outlast.stores.sqlite.pages import STATUSES

_END_OF_TIME = 2**62  # ms; after every instant
_LAST = "\U0010ffff"  # after every character


class Pages:
    """Mixed into the store."""

    _read: Callable[[Callable[[Tx], Any]], Any]
    _times: Callable[[], dict[str, Any]]
    _only: Callable[[Sequence[Row], str], Head]
    _heads_of: Callable[[Sequence[Row]], list[Head]]

    def page(self, where: PageFilter, *, scan: int = SCAN) -> Page:
        page: Page = self._read(lambda tx: self._page(tx, where, scan))
        return page

    def _page(self, tx: Tx, where: PageFilter, scan: int) -> Page:
        values = {**self._times(), **_values(where), "limit": where.limit + 1, "scan": scan}
        if where.before is not None:
            last = self._only(tx.one("head", {"run_id": where.before, **self._times()}), where.before)
            values.update(before_at=ms(last.created_at), before_id=last.run_id)
        scanned = None
        if where.text:
            found, near, end = tx.ask(("page_by_id", values), ("page_by_text", values), ("page_end", values))
            found = [] if where.before is not None else found
            seen = {row[0] for row in found}
            found = (found + [row for row in near if row[0] not in seen])[: where.limit + 1]
            end = end if len(near) <= where.limit else []
            scanned = scan if end else None
            more = near[where.limit - 1][1] if len(near) > where.limit else end[0][1] if end else None
        else:
            found = tx.one(_query(where), values)
            more = found[where.limit - 1][1] if len(found) > where.limit else None
        heads = self._heads_of(found[: where.limit])
        numbers = {"numbers": [head.run_no for head in heads]}
        first_rows, gate_rows = tx.commit(("firsts", numbers), ("soonest_gates", numbers))
        firsts: dict[int, str | None] = {row[0]: row[1] for row in first_rows}
        gates: dict[int, GateRow] = {row[0]: rows.gate(row[1:])[0] for row in gate_rows}
        return Page([Listed(head, firsts.get(head.run_no), gates.get(head.run_no)) for head in heads], more, scanned)

    def counts(self, where: PageFilter, *, most: int = MOST) -> dict[str, int]:
        values = {**_values(where), "most": most + 1, "statuses": list(STATUSES)}
        return dict(self._read(lambda tx: tx.one("count_of", values, commit=True)))

    def agents(self, *, limit: int = 100) -> list[str]:
        return [agent for (agent,) in self._read(lambda tx: tx.one("agents", {"limit": limit}, commit=True))]

    def gate_entries(self, run_id: str, seq: int, *, limit: int = 500) -> list[JournalRow]:
        key = {"run_id": run_id}
        heads, found = self._read(
            lambda tx: tx.commit(("head", {**key, **self._times()}), ("gate_entries", {**key, "seq": seq, "limit": limit}))
        )
        self._only(heads, run_id)
        return [rows.journal(row) for row in found]

    def decided(self, *, since: datetime, agent: str | None = None, limit: int = 50) -> list[Noted]:
        values = {**self._times(), "since": ms(since), "agent": agent, "limit": limit}
        found = self._read(lambda tx: tx.one("decided", values, commit=True))
        heads = self._heads_of([row[: rows.HEAD] for row in found])
        return [(head, *rows.gate(row[rows.HEAD :])) for head, row in zip(heads, found, strict=True)]

    def statistics(
        self, *, since: datetime, agent: str | None = None, offset: timedelta = timedelta(0), scan: int = 100_000, steps: int = 300
    ) -> Statistics:
        values = {"since": ms(since), "agent": agent, "offset": int(offset.total_seconds() * 1000)}
        ended, spent, times = self._read(
            lambda tx: tx.commit(
                ("ended_per_hour", values),
                ("spent_per_day", {**values, "scan": scan}),
                ("step_times", {**values, "scan": steps, "most": 20_000}),
            )
        )
        return Statistics(ended=ended, spent=spent, steps=times)

    def costs(self, *, per: str, since: datetime, agent: str | None = None, scan: int = 100_000) -> list[Cost]:
        values = {"per": per, "since": ms(since), "agent": agent, "scan": scan}
        return [cost(row) for row in self._read(lambda tx: tx.one("costs", values, commit=True))]

    def waiting(self, *, most: int = MOST) -> Waiting:
        gates, [(stuck,)] = self._read(
            lambda tx: tx.commit(("open_gates", {"kinds": list(GATE_KINDS), "most": most + 1}), ("count_stuck", {"most": most + 1}))
        )
        return Waiting([(kind, n, rows.maybe_instant(oldest)) for kind, n, oldest in gates], stuck)


def _query(where: PageFilter) -> str:
    if where.stuck:
        return "page_of_stuck"
    return "page_of_unfinished" if where.status is None and (where.waiting or where.unfinished) else "page"


def _values(where: PageFilter) -> Mapping[str, Any]:
    text = where.text or None
    return {
        "status": where.status, "waiting": where.waiting, "agent": where.agent, "tags": json.dumps(dict(where.tags), ensure_ascii=False),
        "since": ms(where.since) if where.since else -_END_OF_TIME, "before_at": _END_OF_TIME, "before_id": "", "text": text,
        "text_end": (text or "") + _LAST}  # fmt: skip
