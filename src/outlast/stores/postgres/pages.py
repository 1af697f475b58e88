"""What `stores.pages` asks, on Postgres: each method one transaction, one message of statements where the second needs no look at the first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from outlast.core.gate import GateRow
from outlast.core.run import ms
from outlast.stores.base import ENDED, Head, JournalRow
from outlast.stores.pages import (
    GATE_KINDS,
    MOST,
    SCAN,
    STATUSES,
    Cost,
    Glance,
    Key,
    Listed,
    Noted,
    Page,
    PageFilter,
    Statistics,
    Waiting,
    arranged,
    cost,
)
from outlast.stores.postgres.connections import Row, Tx
from outlast.stores.sqlite import rows

_END_OF_TIME = 2**62  # ms; after every instant
_LAST = "\U0010ffff"  # after every character


class Pages:
    """Mixed into the store."""

    now: Callable[[], datetime]
    _read: Callable[[Callable[[Tx], Any]], Any]
    _times: Callable[[], dict[str, Any]]
    _only: Callable[[Sequence[Row], str], Head]
    _heads_of: Callable[[Sequence[Row]], list[Head]]

    def commits(self) -> str:
        return str(self._read(lambda tx: tx.one("commits", {}, commit=True))[0][0])

    def glance(self, run_ids: Sequence[str]) -> dict[str, Glance]:
        found = self._read(lambda tx: tx.one("glance", {"ids": list(run_ids)}, commit=True))
        return {run_id: Glance(n, status, reason, owner, rows.maybe_instant(wake)) for run_id, n, status, reason, owner, wake in found}

    def glance_inbox(self, *, limit: int = 500) -> list[tuple[Any, ...]]:
        return list(self._read(lambda tx: tx.one("glance_inbox", {"limit": limit}, commit=True)))

    def page(self, where: PageFilter, *, scan: int = SCAN) -> Page:
        page: Page = self._read(lambda tx: self._page(tx, where, scan))
        return page

    def _page(self, tx: Tx, where: PageFilter, scan: int) -> Page:
        values = _values(where)
        if where.before is not None:
            last = self._only(tx.one("head", {"run_id": where.before, **self._times()}), where.before)
            values.update(before_at=ms(last.created_at), before_id=last.run_id)
        keys: list[Key] = tx.one(_query(where), values | {"limit": scan if where.searches else where.limit + 1})
        near, ids = [key[2] for key in keys], []
        if where.searches:
            fitting = ("fitting", values | {"numbers": near, "limit": where.limit + 1})
            if where.text and where.before is None:
                found = tx.ask(fitting, ("page_by_id", values | {"scan": scan, "limit": where.limit // 2}))
                near, ids = [row[0] for row in found[0]], [row[0] for row in found[1]]
            else:
                near = [row[0] for row in tx.one(*fitting)]
        shown, following, scanned = arranged(where, keys, near, ids, scan)
        numbers = {"numbers": shown}
        head_rows, first_rows, gate_rows = tx.commit(
            ("heads_of", {**numbers, **self._times()}), ("firsts", numbers), ("soonest_gates", numbers)
        )
        firsts: dict[int, str | None] = {row[0]: row[1] for row in first_rows}
        gates: dict[int, GateRow] = {row[0]: rows.gate(row[1:])[0] for row in gate_rows}
        heads = self._heads_of(head_rows)
        return Page([Listed(head, firsts.get(head.run_no), gates.get(head.run_no)) for head in heads], following, scanned)

    def counts(self, where: PageFilter, *, most: int = MOST) -> dict[str, int]:
        values = {**_values(where), "most": most + 1, "statuses": list(STATUSES)}
        return dict(self._read(lambda tx: tx.one("count_of" if where.agent is None else "count_of_agent", values, commit=True)))

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
        values = {
            "since": ms(since), "now": ms(self.now()), "agent": agent, "offset": int(offset.total_seconds() * 1000), "most": 20_000,
            "statuses": list(STATUSES)}  # fmt: skip

        def work(tx: Tx) -> Statistics:
            few = agent is not None and all(n < MOST for _, n in tx.one("count_of_agent", {**values, "most": MOST}))
            of = "_of_agent" if few else ""
            ended, spent, times, more = tx.commit(
                ("ended_per_hour", values),
                ("spent_per_day" + of, {**values, "scan": scan}),
                ("step_times" + of, {**values, "scan": steps if few or agent is None else 5 * steps}),
                ("more_than", {**values, "scan": scan}),
            )
            counted = [(hour, status, n) for hour, *found in ended for status, n in zip(ENDED, found, strict=True) if n]
            return Statistics(counted, spent, times, scan if more and not few else None)

        found: Statistics = self._read(work)
        return found

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
        return "keys_of_stuck"
    if where.statuses is None:
        return "keys"
    return "keys_of_status" if where.agent is None else "keys_of_agent"


def _values(where: PageFilter) -> dict[str, Any]:
    text = where.text or None
    return {
        "statuses": None if where.statuses is None else list(where.statuses), "agent": where.agent, "tags": json.dumps(dict(where.tags), ensure_ascii=False),
        "since": ms(where.since) if where.since else -_END_OF_TIME, "before_at": _END_OF_TIME, "before_id": "", "text": text,
        "text_end": (text or "") + _LAST}  # fmt: skip
