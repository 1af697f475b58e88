"""Rows as values and values as rows: the one place that knows the order of columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import apsw

from outlast.core import codec
from outlast.core.gate import GateRow
from outlast.core.run import EPOCH, Entry, MessageAdded, NewerFormat, from_row, headed, instant, ms, to_row
from outlast.errors import InvariantViolated, Refused, SchemaTooNew
from outlast.stores import sql
from outlast.stores.base import Head, JournalRow, Place, Unfinished, chain, genesis, is_blank
from outlast.stores.care import CARRIED, KeptNotice, Whole

Q = sql.queries("outlast.stores.sqlite")
HEAD = 30  # columns of `head_columns`
Row = tuple[Any, ...]


def ask(db: apsw.Connection, query: str, values: Mapping[str, Any] | Sequence[Any] = ()) -> list[Row]:
    """All rows of a statement. Never a cursor half read: COMMIT would fail for as long as it lives."""
    return db.execute(query, values).fetchall()


def maybe_ms(at: datetime | None) -> int | None:
    return None if at is None else ms(at)


def maybe_instant(value: int | None) -> datetime | None:
    return None if value is None else instant(value)


def head(row: Row, *, held: bool) -> Head:
    return Head(
        run_no=row[0], run_id=row[1], agent=row[2], agent_version=row[3], status=row[4], reason=row[5], entries=row[6],
        seq=row[7], model_calls=row[8], input_tokens=row[9], output_tokens=row[10], cache_read_tokens=row[11], cache_write_tokens=row[12],
        cost_usd=row[13], wake_at=maybe_instant(row[14]), driver=row[15], needs=row[16], lease_owner=row[17],
        lease_until=maybe_instant(row[19]),
        fence=row[21], attempts=row[22], tags=json.loads(row[23]), started_by=row[24], parent_run_id=row[25], parent_call_id=row[26],
        created_at=instant(row[27]), updated_at=instant(row[28]), held=held, input_digest=row[29])  # fmt: skip


def lease(row: Row) -> tuple[str | None, int | None, str | None]:
    """(owner, until by the boot clock, boot) of a head's row."""
    return row[17], row[18], row[20]


def gate(row: Row) -> tuple[GateRow, datetime | None]:
    """A gate, and when somebody was first told."""
    return GateRow(
        gate_id=row[0], kind=row[1], call_id=row[2], tool=row[3], args=row[4], digest=row[5], text=row[6], role=row[7], level=row[8],
        deadline=maybe_instant(row[9]), next_at=maybe_instant(row[10]), closes_at=maybe_instant(row[11]), created_at=instant(row[12]),
        outcome=row[13], decided_at=maybe_instant(row[14]), decided_by=row[15], note=row[16], edited_args=row[17], guarded=bool(row[18]),
        seq=row[19]), maybe_instant(row[20])  # fmt: skip


def gate_values(run_no: int, g: GateRow) -> Row:
    return (
        run_no, g.gate_id, g.kind, g.call_id, g.tool, g.args, g.digest, g.text, g.role, g.level, maybe_ms(g.deadline),
        maybe_ms(g.next_at), maybe_ms(g.closes_at), ms(g.created_at), g.outcome, maybe_ms(g.decided_at), g.decided_by, g.note,
        g.edited_args, int(g.guarded),
        g.seq)  # fmt: skip


def journal(row: Row) -> JournalRow:
    return JournalRow(
        entry_no=row[0], seq=row[1], kind=row[2], body=row[3], meta=row[4], at=instant(row[5]), by=row[6], entry_id=row[7], fence=row[8],
        status=row[9], digest=row[10])  # fmt: skip


def notice(row: Row) -> KeptNotice:
    return KeptNotice(
        notice_id=row[0], target=row[1], gate_id=row[2], kind=row[3], text=row[4], tries=row[5], next_try_at=maybe_instant(row[6]),
        sent_at=maybe_instant(row[7]), error=row[8], created_at=instant(row[9]))  # fmt: skip


def head_values(whole: Whole, *, carried: bool) -> dict[str, Any]:
    """A run as it is put into a store. Its lease stays behind, and counts as one that nobody released."""
    h = whole.head
    return {
        "run_id": h.run_id, "agent": h.agent, "agent_version": h.agent_version, "status": h.status, "reason": h.reason, "entries": h.entries,
        "seq": h.seq, "model_calls": h.model_calls, "input_tokens": h.input_tokens, "output_tokens": h.output_tokens,
        "cache_read_tokens": h.cache_read_tokens, "cache_write_tokens": h.cache_write_tokens, "cost_usd": h.cost_usd,
        "wake_at": maybe_ms(h.wake_at), "driver": CARRIED + h.driver if carried else h.driver, "needs": h.needs, "fence": h.fence + 1,
        "attempts": h.attempts + (h.lease_owner is not None), "tags": json.dumps(dict(h.tags), ensure_ascii=False), "started_by": h.started_by,
        "parent_run_id": h.parent_run_id, "parent_call_id": h.parent_call_id, "input_digest": h.input_digest, "format": whole.format,
        "created_at": ms(h.created_at), "updated_at": ms(h.updated_at)}  # fmt: skip


def journal_values(whole: Whole) -> list[Row]:
    """Rows of `add_entry`, all but the run's number, as they were."""
    return [
        (x.entry_no, x.seq, x.kind, ms(x.at), x.fence, x.by, x.entry_id, x.status, x.digest, x.meta, x.body) for x in whole.journal]  # fmt: skip


def all_gate_values(whole: Whole) -> list[tuple[Row, int | None]]:
    """Each with the instant at which somebody was first told."""
    return [(gate_values(0, row)[1:], maybe_ms(told)) for row, told in whole.gates]


def notice_values(whole: Whole) -> list[Row]:
    return [
        (n.notice_id, n.target, n.gate_id, n.kind, n.text, n.tries, maybe_ms(n.next_try_at), maybe_ms(n.sent_at), n.error, ms(n.created_at))
        for n in whole.notices]  # fmt: skip


def unfinished(heads: Sequence[Head], ran_by: Iterable[Row], tails: Iterable[Row]) -> list[Unfinished]:
    """Rows of `ran_by` and `tails` begin with the run's number."""
    versions = {row[0]: journal(row[1:]) for row in ran_by}
    since: dict[int, list[JournalRow]] = {}
    for row in tails:
        since.setdefault(row[0], []).append(journal(row[1:]))
    return [Unfinished(h, versions[h.run_no], since.get(h.run_no, [])) for h in heads if h.run_no in versions]


def readable(read: Callable[[], list[Row]], run: str) -> list[Row]:
    """Rows of one run's journal; bytes that are no text stop that run, and no other."""
    try:
        return read()
    except UnicodeDecodeError as e:
        raise InvariantViolated(
            f"an entry of run {run} holds text that is not UTF-8 ({e.reason})", hint="outlast store check", run_id=run
        ) from e


def erased(run: str) -> Refused:
    what = f"run {run} was erased: what is left is that it existed, when and how it went"
    return Refused(what, hint=f"outlast show {run} --journal", run_id=run)


def entry(row: Row, run: str) -> Entry:
    """An entry of a `load` row. A row that cannot be read stops its own run, and no other."""
    if is_blank(row[3]):
        raise erased(run)
    try:
        return from_row(row[2], row[3], row[4], by=row[6], entry_id=row[7], at=instant(row[5]))
    except NewerFormat as e:
        raise SchemaTooNew(f"run {run}: {e}", hint="update outlast, or use the newer worker", run_id=run, needs=f"format:{e.format}") from e
    except codec.Unstorable as e:
        raise InvariantViolated(f"entry {row[0]} of run {run} cannot be read: {e}", hint="outlast store check", run_id=run) from e


def entries(rows: Iterable[Row], run: str) -> list[Entry]:
    return [entry(row, run) for row in rows]


class Written:
    """Entries as rows of `add_entry`, all but the run's number, made before the lock is taken: JSON, numbers, digests."""

    __slots__ = ("_rows", "place", "start")

    def __init__(self, run_id: str, start: Place, entries: Sequence[Entry], *, fence: int, status: str) -> None:
        self.start = start
        self._rows: list[Row] = []
        number, seq, digest = start.entries, start.seq, start.digest or genesis(run_id)
        for e in entries:
            kind, body, meta = to_row(e)
            number += 1
            seq += isinstance(e, MessageAdded)
            at = ms(e.at)
            digest = chain(
                digest, entry_no=number, seq=seq, kind=kind, at_ms=at, by=e.by, entry_id=e.entry_id, fence=fence, status=status, meta=meta,
                body=body)  # fmt: skip
            self._rows.append((number, seq, kind, at, fence, e.by, e.entry_id, status, digest, meta, body))
        self.place = Place(number, seq, digest) if entries else start

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, run_no: int) -> list[Row]:
        return [(run_no, *row) for row in self._rows]


def stamped(entries: Sequence[Entry], now: datetime) -> list[Entry]:
    """Entries of a start or from outside get the store's instant where they carry none."""
    return [headed(e, at=now) if e.at == EPOCH else e for e in entries]
