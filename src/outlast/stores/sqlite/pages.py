"""What `stores.pages` asks, on SQLite."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import apsw

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
from outlast.stores.sqlite import rows
from outlast.stores.sqlite.connections import Connections
from outlast.stores.sqlite.rows import Q, ask

_END_OF_TIME = 2**62  # ms; after every instant
_LAST = "\U0010ffff"  # after every character


class Pages:
    """Mixed into the store: reads with its connections and its way to see leases."""

    now: Callable[[], datetime]
    _files: Connections
    _head: Callable[[apsw.Connection, str], Head]
    _as_heads: Callable[[Sequence[rows.Row]], list[Head]]

    def commits(self) -> str:
        return str(self._files.version())

    def glance(self, run_ids: Sequence[str]) -> dict[str, Glance]:
        found = self._files.read(lambda db: ask(db, Q["glance"], {"ids": json.dumps(run_ids)}))
        return {run_id: Glance(n, status, reason, owner, rows.maybe_instant(wake)) for run_id, n, status, reason, owner, wake in found}

    def glance_inbox(self, *, limit: int = 500) -> list[tuple[Any, ...]]:
        return self._files.read(lambda db: ask(db, Q["glance_inbox"], {"limit": limit}))

    def page(self, where: PageFilter, *, scan: int = SCAN) -> Page:
        return self._files.read(lambda db: self._page(db, where, scan))

    def _page(self, db: apsw.Connection, where: PageFilter, scan: int) -> Page:
        values = _values(where)
        if where.before is not None:
            last = self._head(db, where.before)
            values.update(before_at=ms(last.created_at), before_id=last.run_id)
        keys = _keys(db, where, values | {"limit": scan if where.searches else where.limit + 1})
        near, ids = [key[2] for key in keys], []
        if where.searches:
            near = _column(ask(db, Q["fitting"], values | {"numbers": json.dumps(near), "limit": where.limit + 1}))
            if where.text and where.before is None:
                ids = _column(ask(db, Q["page_by_id"], values | {"scan": scan, "limit": where.limit // 2}))
        shown, following, scanned = arranged(where, keys, near, ids, scan)
        numbers = {"numbers": json.dumps(shown)}
        heads = self._as_heads(ask(db, Q["heads_of"], numbers))
        firsts: dict[int, str | None] = dict(ask(db, Q["firsts"], numbers))
        gates: dict[int, GateRow] = {row[0]: rows.gate(row[1:])[0] for row in ask(db, Q["soonest_gates"], numbers)}
        return Page([Listed(head, firsts.get(head.run_no), gates.get(head.run_no)) for head in heads], following, scanned)

    def counts(self, where: PageFilter, *, most: int = MOST) -> dict[str, int]:
        query = Q["count_of" if where.agent is None else "count_of_agent"]

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
        values = {
            "since": ms(since), "now": ms(self.now()), "agent": agent, "offset": int(offset.total_seconds() * 1000), "most": 20_000,
            "statuses": json.dumps(STATUSES), "status": None}  # fmt: skip

        def work(db: apsw.Connection) -> Statistics:
            few = agent is not None and all(
                ask(db, Q["count_of_agent"], {**values, "status": s, "most": MOST})[0][0] < MOST for s in STATUSES
            )
            of = "_of_agent" if few else ""
            hours = ask(db, Q["ended_per_hour"], values)
            ended = [(hour, status, n) for hour, found in hours for status, n in zip(ENDED, json.loads(found), strict=True) if n]
            spent = ask(db, Q["spent_per_day" + of], values | {"scan": scan})
            times = ask(db, Q["step_times" + of], values | {"scan": steps if few or agent is None else 5 * steps})
            more = not few and ask(db, Q["more_than"], values | {"scan": scan})
            return Statistics(ended, spent, times, scan if more else None)

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


def _keys(db: apsw.Connection, where: PageFilter, values: Mapping[str, Any]) -> list[Key]:
    """What indexes alone say, newest first."""
    if where.stuck:
        return ask(db, Q["keys_of_stuck"], values)
    statuses = where.statuses
    if statuses is None:
        return ask(db, Q["keys"], values)
    query = Q["keys_of_status" if where.agent is None else "keys_of_agent"]
    found = heapq.merge(*(ask(db, query, {**values, "status": status}) for status in statuses), reverse=True)
    return list(itertools.islice(found, values["limit"]))


def _column(found: Sequence[rows.Row]) -> list[int]:
    return [value for (value,) in found]


def _values(where: PageFilter) -> dict[str, Any]:
    text = where.text or None
    statuses = None if where.statuses is None else json.dumps(where.statuses)
    return {
        "statuses": statuses, "agent": where.agent, "tags": json.dumps(dict(where.tags), ensure_ascii=False),
        "since": ms(where.since) if where.since else -_END_OF_TIME, "before_at": _END_OF_TIME, "before_id": "", "text": text,
        "text_end": (text or "") + _LAST}  # fmt: skip
