"""Runs on their way to another store: as a document, or a whole store at once.

Rules
1. No live twin stays behind: what goes on elsewhere ends here with `RunMoved`, and accepts nothing more. A document that was not moved can
   only become a run of another id, with keys of its own.
2. A journal is carried byte by byte, digests included. What comes in is judged first: numbers, digests, every entry, the fold, the head.
3. Copying a store can be cut off anywhere and started again: a run is first put into the target, where nobody takes it; then ended here, if it
   is still the same; and once all are there, all go on.
4. A run goes after the runs that it waits for: until then their ends are told to it here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from outlast.core import codec
from outlast.core import run as r
from outlast.core.gate import GateRow, projection
from outlast.errors import InvariantViolated, Refused, RunBusy, RunExists, RunNotFound, UsageError
from outlast.stores import audit
from outlast.stores.base import Head, JournalRow, Outside, Plan, Tail, chain, genesis, is_blank
from outlast.stores.care import CareStore, KeptNotice, Whole

FORMAT = 1  # of the document
TYPE = "outlast_run"
MOVED = "moved to "
AT_ONCE = 8  # runs that are carried at the same time: their commits share syncs and wait for the network together
_LOT = 64  # so many are on their way when something fails: they are done, no other is begun
_TRIES = 5  # of one run, while others write to it


# ---- ending it here ---------------------------------------------------------------------------------------------------------------


def leave(to: str, by: str | None, *, as_of: int | None = None, gone: Callable[[str], bool] = lambda run_id: False) -> Plan:
    """End a run with `RunMoved`. The value is its head as it was, or None: nothing was written, its journal is no longer `as_of` long."""

    def plan(tail: Tail) -> Outside:
        head = tail.head
        if (reason := _moved(head)) is not None:
            raise Refused(f"run {head.run_id} was {reason}", run_id=head.run_id)
        if head.held:
            raise RunBusy(
                f"{head.run_id} is driven until {r.iso(head.lease_until or tail.now)}", owner=head.lease_owner or "?",
                until=head.lease_until or tail.now, run_id=head.run_id, hint="stop the workers first")  # fmt: skip
        if waits_for := [child for child in children(tail.gates) if not gone(child)]:
            raise Refused(
                f"run {head.run_id} waits for {', '.join(waits_for)}, whose end is told here",
                run_id=head.run_id,
                hint="move the whole store: outlast store copy URL",
            )
        if as_of is not None and head.entries != as_of:
            return Outside(wake=False)
        entries = [r.stored(r.RunMoved(to, by=by, at=tail.now))]
        gates = projection(tail.run, entries)[1]
        return Outside(entries, gates=gates, status="cancelled", reason=MOVED + to, wake=False, fence=True, value=head)

    return plan


def children(gates: Sequence[GateRow]) -> list[str]:
    """The runs that open gates wait for."""
    return [str(codec.decode(g.args)["run_id"]) for g in gates if g.kind == "run" and g.outcome is None]


def _moved(head: Head) -> str | None:
    return head.reason if head.status == "cancelled" and head.reason and head.reason.startswith(MOVED) else None


def _before_it_left(whole: Whole) -> Whole:
    """A run that was moved, as it was before: its journal without the last entry. What its head said is worked out by whoever takes it next."""
    journal = list(whole.journal[:-1])
    last = journal[-1]
    run, gates = _folded(whole.head.run_id, journal)
    told = {row.gate_id: at for row, at in whole.gates}
    ended = run.ended.reason if run.ended else None
    status = run.ended.status if run.ended else "waiting_for_code" if whole.head.needs else last.status
    head = replace(
        whole.head, status=status, reason=ended, entries=last.entry_no, seq=last.seq, updated_at=last.at,
        wake_at=None if run.ended or whole.head.needs else last.at)  # fmt: skip
    return replace(whole, head=head, journal=journal, gates=[(row, told.get(row.gate_id)) for row in gates])


# ---- one run as a document ------------------------------------------------------------------------------------------------------


def export(store: CareStore, run_id: str, *, move: bool = False, by: str | None = None) -> dict[str, Any]:
    """The run as a document. `move`: it ends here first; doing that again gives the same document again."""
    head = store.head(run_id)
    left = None
    if move and _moved(head) is None:
        if (parent := head.parent_run_id) and _goes_on(store, parent):
            what = f"run {run_id} answers a call of {parent}, which goes on here"
            raise Refused(what, run_id=run_id, hint="move the whole store: outlast store copy URL")
        _, left, _ = store.outside(run_id, leave("a document", by))
    whole = store.whole(run_id)
    if any(is_blank(row.body) for row in whole.journal):
        raise Refused(f"run {run_id} was erased: there is nothing to export", run_id=run_id)
    if _moved(whole.head) is None:
        return document(whole, moved=None)
    as_it_was = _before_it_left(whole)
    if left is not None:
        as_it_was = replace(as_it_was, head=replace(left, fence=whole.head.fence))
    return document(as_it_was, moved=whole.journal[-1].at)


def _goes_on(store: CareStore, run_id: str) -> bool:
    try:
        return store.head(run_id).status not in r.AFTER_END
    except RunNotFound:
        return False


_HEAD_FIELDS = (
    "run_id", "agent", "agent_version", "status", "reason", "entries", "seq", "model_calls", "input_tokens", "output_tokens", "cache_read_tokens",
    "cache_write_tokens", "cost_usd", "wake_at", "driver", "needs", "fence", "attempts", "tags", "started_by", "parent_run_id", "parent_call_id",
    "created_at", "updated_at", "input_digest")  # fmt: skip


def document(whole: Whole, *, moved: datetime | None) -> dict[str, Any]:
    return {
        "type": TYPE, "format": FORMAT, "moved_at": _iso(moved), "journal_format": whole.format,
        "run": {name: _plain(getattr(whole.head, name)) for name in _HEAD_FIELDS},
        "journal": [{**_row(row), "digest": row.digest.hex()} for row in whole.journal],
        "told": {row.gate_id: _iso(at) for row, at in whole.gates if at is not None},
        "notices": [_row(notice) for notice in whole.notices]}  # fmt: skip


def _row(row: JournalRow | KeptNotice) -> dict[str, Any]:
    return {f.name: _plain(getattr(row, f.name)) for f in fields(row)}


def _plain(value: Any) -> Any:
    return _iso(value) if isinstance(value, datetime) else dict(value) if isinstance(value, Mapping) else value


def _iso(at: datetime | None) -> str | None:
    return r.iso(at) if at is not None else None


def read_in(store: CareStore, text: str, *, run_id: str | None = None) -> Head:
    """Put a document's run into a store, under another id where one is given. Raises UsageError with what is wrong and where, RunExists."""
    whole, moved = parsed(text)
    if run_id is None and not moved:
        raise UsageError(
            f"run {whole.head.run_id} goes on where it was exported: two of them would do everything twice",
            hint="export it with --move, or import it as another run: --id NEW",
        )
    if run_id is not None and moved:
        raise UsageError(f"run {whole.head.run_id} was moved: it goes on under its own id", hint="leave --id out")
    if run_id is not None:
        whole = _as_another(whole, run_id)
    if not store.put(whole):
        there = store.digest_at(whole.head.run_id, whole.head.entries)
        if there != whole.journal[-1].digest.hex() or _moved(store.head(whole.head.run_id)) is not None:
            raise RunExists(
                f"a run {whole.head.run_id} is in {store.url} already", run_id=whole.head.run_id, hint=f"outlast show {whole.head.run_id}"
            )
    return store.head(whole.head.run_id)


def parsed(text: str) -> tuple[Whole, bool]:
    """(the run, was it moved). Raises UsageError that names the first bad entry."""
    try:
        doc = codec.decode(text)
    except codec.Unstorable as e:
        raise UsageError(f"it is no document of a run: {e}") from None
    if not isinstance(doc, dict) or doc.get("type") != TYPE:
        raise UsageError("it is no document of a run", hint="outlast store export RUN makes one")
    if doc.get("format") != FORMAT:
        raise UsageError(f"the document is of format {doc.get('format')!r}, this version of outlast reads {FORMAT}", hint="update outlast")
    try:
        given = dict(doc["run"])
        head = Head(
            **{**{f.name: None for f in fields(Head)}, **{name: given[name] for name in _HEAD_FIELDS}, "run_no": 0, "held": False,
               "wake_at": _instant(given["wake_at"]), "created_at": _sure(given["created_at"]), "updated_at": _sure(given["updated_at"])})  # fmt: skip
        told = {str(gate_id): _sure(at) for gate_id, at in doc["told"].items()}
        notices = [
            KeptNotice(**{**n, "next_try_at": _instant(n["next_try_at"]), "sent_at": _instant(n["sent_at"]), "created_at": _sure(n["created_at"])})
            for n in doc["notices"]]  # fmt: skip
        rows, format, moved = list(doc["journal"]), int(doc["journal_format"]), doc["moved_at"] is not None
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UsageError(f"the document is not whole: {type(e).__name__}: {e}") from None
    journal = []
    for index, row in enumerate(rows):
        try:
            journal.append(JournalRow(**{**row, "at": _sure(row["at"]), "digest": bytes.fromhex(row["digest"])}))
        except (KeyError, TypeError, ValueError) as e:
            raise _bad(index, f"{type(e).__name__}: {e}") from None
    whole = Whole(head, format, journal, [], notices)
    return replace(whole, gates=[(row, told.get(row.gate_id)) for row in _judged(whole)]), moved


def _judged(whole: Whole) -> list[GateRow]:
    """The gates that the journal says, once everything else was found to fit together."""
    head, digest, seq = whole.head, genesis(whole.head.run_id), 0
    if not whole.journal:
        raise UsageError("the document holds no entries")
    for index, row in enumerate(whole.journal):
        seq += row.kind == r.MessageAdded.__name__
        if (row.entry_no, row.seq) != (index + 1, seq):
            raise _bad(index, f"it says entry {row.entry_no}, checkpoint {row.seq}; it is entry {index + 1}, checkpoint {seq}")
        try:
            digest = _chained(digest, row)
        except (TypeError, AttributeError) as e:
            raise _bad(index, f"{type(e).__name__}: {e}") from None
        if digest != row.digest:
            raise _bad(index, "it was changed: its digest does not fit")
    try:
        _, gates = _folded(head.run_id, whole.journal)
    except _BadEntry as e:
        raise _bad(e.index, str(e)) from None
    checked = audit.CheckedHead(head.entries, head.seq, head.status, head.model_calls, head.input_tokens, head.output_tokens)
    for _, what, _ in audit.run(head.run_id, checked, whole.journal, gates, ""):
        raise UsageError(f"the document does not fit together: {what}")
    return gates


def _chained(digest: bytes, row: JournalRow) -> bytes:
    return chain(
        digest, entry_no=row.entry_no, seq=row.seq, kind=row.kind, at_ms=r.ms(row.at), by=row.by, entry_id=row.entry_id, fence=row.fence,
        status=row.status, meta=row.meta, body=row.body)  # fmt: skip


class _BadEntry(Exception):
    def __init__(self, index: int, why: object) -> None:
        super().__init__(str(why))
        self.index = index


def _folded(run_id: str, journal: Sequence[JournalRow]) -> tuple[r.Run, list[GateRow]]:
    run, entries = r.Run(run_id), []
    for index, row in enumerate(journal):
        try:
            entry = r.from_row(row.kind, row.body, row.meta, by=row.by, entry_id=row.entry_id, at=row.at)
            run = r.apply(run, entry)
        except (codec.Unstorable, InvariantViolated, LookupError, TypeError, ValueError) as e:
            raise _BadEntry(index, e) from None
        entries.append(entry)
    return projection(r.Run(run_id), entries)


def _bad(index: int, why: str) -> UsageError:
    return UsageError(f"entry {index + 1} of the document is not valid: {why}")


def _instant(text: str | None) -> datetime | None:
    return None if text is None else _sure(text)


def _sure(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return at


def _as_another(whole: Whole, run_id: str) -> Whole:
    """The same history as another run: its digests begin with another id, its calls from now on have other keys, nobody waits for its end."""
    if waits_for := children([row for row, _ in whole.gates]):
        raise UsageError(f"run {whole.head.run_id} waits for {', '.join(waits_for)}, whose end is told to it alone")
    digest, journal = genesis(run_id), []
    for row in whole.journal:
        digest = _chained(digest, row)
        journal.append(replace(row, digest=digest))
    head = replace(whole.head, run_id=run_id, parent_run_id=None, parent_call_id=None)
    return replace(whole, head=head, journal=journal, notices=[])


# ---- a whole store --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Copied:
    """What came of a copy. `left`: (run id, why) of runs that stayed; with any of them nothing goes on in the target yet."""

    runs: int = 0  # that are in the target and ended here
    elsewhere: int = 0  # that had been moved to another place before
    left: list[tuple[str, str]] = field(default_factory=list)
    let_go: int = 0


def copy(source: CareStore, target: CareStore, *, by: str | None = None, each: Callable[[str], None] = lambda run_id: None) -> Copied:
    """Carry every run of `source` to `target`, and end it in `source`. Raises RunBusy where a run is held."""
    if source.url == target.url:
        raise UsageError(f"{target.url} is the store that is to be copied")
    next(iter(target.ends()), None)  # its schema fits, before anything is ended here
    went: set[str] = set()
    with ThreadPoolExecutor(AT_ONCE, "outlast-copy") as pool:
        while True:
            done = Copied()
            before = len(went)
            ids = sorted((run_id for run_id, _, _ in source.ends()), reverse=True)  # what a run started comes before it: PARENT:CALL
            to_go = [run_id for run_id in ids if run_id not in went]
            done.runs = len(ids) - len(to_go)
            for start in range(0, len(to_go), _LOT):
                lot = to_go[start : start + _LOT]
                carried = [pool.submit(_carry, source, target, run_id, went, by) for run_id in lot]
                for run_id, one in zip(lot, carried, strict=True):
                    _note(done, went, run_id, one, each)
            if not done.left or len(went) == before:
                break
    if not done.left:
        done.let_go = target.let_go()
    return done


def _note(done: Copied, went: set[str], run_id: str, one: Future[bool], each: Callable[[str], None]) -> None:
    try:
        if one.result():
            went.add(run_id)
            done.runs += 1
            each(run_id)
        else:
            done.elsewhere += 1
    except (Refused, InvariantViolated, UsageError) as e:
        done.left.append((run_id, str(e)))


def _carry(source: CareStore, target: CareStore, run_id: str, went: set[str], by: str | None) -> bool:
    """True: it is there, and ended here. False: it was moved to another place before."""
    for _ in range(_TRIES):
        whole = source.whole(run_id)
        if (reason := _moved(whole.head)) is not None:
            if reason != MOVED + target.url:
                return False
            if target.digest_at(run_id, whole.head.entries - 1) != whole.journal[-2].digest.hex():
                raise Refused(f"it was moved there, and there it is not (any more), or another one: look at {target.url}", run_id=run_id)
            return True
        if whole.head.held:
            raise RunBusy(
                f"it is driven until {r.iso(whole.head.lease_until or source.now())}", owner=whole.head.lease_owner or "?",
                until=whole.head.lease_until or source.now(), run_id=run_id, hint="stop the workers first")  # fmt: skip
        if not target.put(whole, carried=True) and target.digest_at(run_id, whole.head.entries) != whole.journal[-1].digest.hex():
            raise RunExists(f"another run of that id is in {target.url}", run_id=run_id)
        if any(is_blank(row.body) for row in whole.journal):
            return True  # erased: nothing can wake it, so there is nothing to end
        if source.outside(run_id, leave(target.url, by, as_of=whole.head.entries, gone=went.__contains__))[2]:
            return True
    raise Refused("others write to it all the time: stop the workers first", run_id=run_id)


def dumped(doc: Mapping[str, Any]) -> str:
    return json.dumps(doc, ensure_ascii=False)


__all__ = ["Copied", "copy", "document", "dumped", "export", "leave", "parsed", "read_in"]
