"""What `stores.pages` asks, on SQLite."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import apsw

from outlast.core.gate import GateRow
from outlast.core.run import ms
from outlast.stores.base import ENDED, Head, JournalRow
from outlast.stores.pages import GATE_KINDS, MOST, SCAN, Cost, Listed, Noted, Page, PageFilter, Statistics, Waiting, cost
from outlast.stores.sqlite import rows
from outlast.stores.sqlite.connections import Connections
from outlast.stores.sqlite.rows import Q, ask

_END_OF_TIME = 2**62  # ms; after every instant
_LAST = "\U0010ffff"  # after every character
STATUSES = (
    "running", "waiting_for_approval", "waiting_for_verification", "waiting_for_budget", "waiting_for_event", "waiting_for_run",
    "waiting_for_timer", "waiting_for_code", *ENDED)  # fmt: skip


class Pages:
    """Mixed into the store: reads with its connections and its way to see leases."""

    _files: Connections
    _head: Callable[[apsw.Connection, str], Head]
    _as_heads: Callable[[Sequence[rows.Row]], list[Head]]

    def page(self, where: PageFilter, *, scan: int = SCAN) -> Page:
        return self._files.read(lambda db: self._page(db, where, scan))

    def _page(self, db: apsw.Connection, where: PageFilter, scan: int) -> Page:
        values = _values(where) | {"limit": where.limit + 1, "scan": scan}
        if where.before is not None:
            last = self._head(db, where.before)
            values.update(before_at=ms(last.created_at), before_id=last.run_id)
        scanned = None
        if where.text or where.tags:
            found = [] if where.before is not None or not where.text else ask(db, Q["page_by_id"], values)
            seen = {row[0] for row in found}
            near = ask(db, Q["page_by_text"], values)
            found = (found + [row for row in near if row[0] not in seen])[: where.limit + 1]
            end = ask(db, Q["page_end"], values) if len(near) <= where.limit else []
            scanned = scan if end else None
            more = near[where.limit - 1][1] if len(near) > where.limit else end[0][1] if end else None
        else:
            found = ask(db, Q[_query(where)], values)
            more = found[where.limit - 1][1] if len(found) > where.limit else None
        found = found[: where.limit]
        heads = self._as_heads(found)
        numbers = {"numbers": json.dumps([head.run_no for head in heads])}
        firsts: dict[int, str | None] = dict(ask(db, Q["firsts"], numbers))
        gates: dict[int, GateRow] = {row[0]: rows.gate(row[1:])[0] for row in ask(db, Q["soonest_gates"], numbers)}
        return Page([Listed(head, firsts.get(head.run_no), gates.get(head.run_no)) for head in heads], more, scanned)

    def counts(self, where: PageFilter, *, most: int = MOST) -> dict[str, int]:
        narrow = where.agent is not None or bool(where.tags)
        query = Q["count_of_agent" if narrow else "count_of"]

        def work(db: apsw.Connection) -> dict[str, int]:
            values = _values(where) | {"most": most + 1}
            return {status: ask(db, query, values | {"status": status})[0][0] for status in STATUSES}

        return self._files.read(work)

    def agents(self, *, limit: int = 100) -> list[str]:
        def work(db: apsw.Connection) -> list[str]:
            found: list[str] = []
            while len(found) < limit and (row := ask(db, Q["agents"], {"agent": found[-1] if found else ""})):
                found.append(row[0][0])
            return found

        return self._files.read(work)

    def gate_entries(self, run_id: str, seq: int, *, limit: int = 500) -> list[JournalRow]:
        def work(db: apsw.Connection) -> list[JournalRow]:
            values = {"run_no": self._head(db, run_id).run_no, "seq": seq, "limit": limit}
            return [rows.journal(row) for row in ask(db, Q["gate_entries"], values)]

        return self._files.read(work)

    def decided(self, *, since: datetime, agent: str | None = None, limit: int = 50) -> list[Noted]:
        def work(db: apsw.Connection) -> list[Noted]:
            found = ask(db, Q["decided"], {"since": ms(since), "agent": agent, "limit": limit})
            heads = self._as_heads([row[: rows.HEAD] for row in found])
            return [(head, *rows.gate(row[rows.HEAD :])) for head, row in zip(heads, found, strict=True)]

        return self._files.read(work)

    def statistics(
        self, *, since: datetime, agent: str | None = None, offset: timedelta = timedelta(0), scan: int = 100_000, steps: int = 300
    ) -> Statistics:
        values = {"since": ms(since), "agent": agent, "offset": int(offset.total_seconds() * 1000)}

        def work(db: apsw.Connection) -> Statistics:
            return Statistics(
                ended=ask(db, Q["ended_per_hour"], values), spent=ask(db, Q["spent_per_day"], values | {"scan": scan}),
                steps=ask(db, Q["step_times"], values | {"scan": steps, "most": 20_000}))  # fmt: skip

        return self._files.read(work)

    def costs(self, *, per: str, since: datetime, agent: str | None = None, scan: int = 100_000) -> list[Cost]:
        values = {"per": per, "since": ms(since), "agent": agent, "scan": scan}
        return [cost(row) for row in self._files.read(lambda db: ask(db, Q["costs"], values))]

    def waiting(self, *, most: int = MOST) -> Waiting:
        def work(db: apsw.Connection) -> Waiting:
            gates = ask(db, Q["open_gates"], {"kinds": json.dumps(GATE_KINDS), "most": most + 1})
            stuck = ask(db, Q["count_stuck"], {"most": most + 1})[0][0]
            return Waiting([(kind, n, rows.maybe_instant(oldest)) for kind, n, oldest in gates], stuck)

        return self._files.read(work)


def _query(where: PageFilter) -> str:
    """The query whose index fits best: the narrowest filter first."""
    if where.stuck:
        return "page_of_stuck"
    if where.status is not None:
        return "page_of_status"
    if where.waiting or where.unfinished:
        return "page_of_unfinished"
    return "page_of_agent" if where.agent is not None else "page"


def _values(where: PageFilter) -> dict[str, Any]:
    text = where.text or None
    return {
        "status": where.status, "waiting": where.waiting, "agent": where.agent, "tags": json.dumps(dict(where.tags), ensure_ascii=False),
        "since": ms(where.since) if where.since else -_END_OF_TIME, "before_at": _END_OF_TIME, "before_id": "", "text": text,
        "text_end": (text or "") + _LAST}  # fmt: skip
