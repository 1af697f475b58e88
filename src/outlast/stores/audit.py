"""Is a run whole? Its journal without gaps, its digests, and head and gates as its journal says: the same questions for every store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from outlast.core.codec import Unstorable
from outlast.core.gate import GateRow, projection
from outlast.core.run import MessageAdded, Run, from_row, ms
from outlast.errors import InvariantViolated
from outlast.stores.base import ENDED, JournalRow, as_chained, chain, genesis, is_blank

Finding = tuple[str, str, str]  # where, what, remedy


class CheckedHead(NamedTuple):
    """What the head says that its journal can confirm."""

    entries: int
    seq: int
    status: str
    model_calls: int
    input_tokens: int
    output_tokens: int


def run(run_id: str, head: CheckedHead, journal: Sequence[JournalRow], gates: Sequence[GateRow], restore: str) -> Iterator[Finding]:
    """`restore`: what to do where rows are missing or were changed."""
    where = f"run {run_id}"
    digest, seq, fence = genesis(run_id), 0, 0
    for n, row in enumerate(journal, 1):
        seq += row.kind == MessageAdded.__name__
        if (row.entry_no, row.seq) != (n, seq):
            yield where, f"entry {n} (checkpoint {seq}) is missing: found entry {row.entry_no} (checkpoint {row.seq})", restore
            return
        digest = chain(
            digest, entry_no=n, seq=seq, kind=row.kind, at_ms=ms(row.at), by=row.by, entry_id=row.entry_id, fence=row.fence,
            status=row.status, meta=row.meta and as_chained(row.meta), body=as_chained(row.body))  # fmt: skip
        if digest != row.digest:
            yield where, f"entry {n} ({row.kind}) was changed after it was written: its digest does not fit", restore
            return
        if row.fence and row.fence < fence:
            yield where, f"entry {n} was written under fence {row.fence} after one under {fence}", "tell the authors of outlast"
        fence = max(fence, row.fence)
    if (head.entries, head.seq) != (len(journal), seq):
        what = f"its head says {head.entries} entries and checkpoint {head.seq}, its journal holds {len(journal)} and {seq}"
        yield where, what, restore
        return
    if any(is_blank(row.body) for row in journal):
        return  # erased: its digests fit, and that is all that is left to compare
    entries = []
    for row in journal:
        try:
            entries.append(from_row(row.kind, row.body, row.meta, by=row.by, entry_id=row.entry_id, at=row.at))
        except Unstorable as e:
            yield where, f"entry {row.entry_no} cannot be read: {e}", restore
            return
    try:
        folded, expected = projection(Run(run_id), entries)
    except InvariantViolated as e:
        yield where, str(e), restore
        return
    counted, counts = (
        (head.model_calls, head.input_tokens, head.output_tokens),
        (folded.model_calls, folded.input_tokens, folded.output_tokens),
    )
    if counted[0] not in (counts[0], counts[0] + folded.lost_calls) or counted[1:] != counts[1:]:
        what = f"its head counts {list(counted)} (model calls, tokens in, tokens out), its journal {list(counts)}"
        yield where, what, "the next step of the run mends it"
    ended = folded.ended.status if folded.ended else None
    if (head.status in ENDED or ended is not None) and head.status != ended:
        yield where, f"its head says {head.status}, its journal {ended or 'that it goes on'}", "the next step of the run mends it"
    yield from _gates(where, gates, expected)


def compared(heads: Iterable[tuple[str, int, str]], digest_at: Callable[[str, int], str | None]) -> Iterator[Finding]:
    """What was there when these heads were written down, and is no longer: (run id, entries, digest of the last one in hex)."""
    for run_id, entries, digest in heads:
        found = digest_at(run_id, entries)
        if found is None:
            what = f"it had {entries} entries when its head was kept, and they are no longer there"
            yield f"run {run_id}", what, "was it erased or pruned? Else a -wal was deleted or an older file was put back: restore a backup"
        elif found != digest:
            yield (
                f"run {run_id}",
                f"entry {entries} is not the one that was kept: the journal was rewritten since",
                "compare it with a backup",
            )


def _gates(where: str, found: Sequence[GateRow], expected: Sequence[GateRow]) -> Iterator[Finding]:
    table, wanted = {g.gate_id: g for g in found}, {g.gate_id: g for g in expected}
    for gate_id in table.keys() | wanted.keys():
        have, want = table.get(gate_id), wanted.get(gate_id)
        if have != want:
            yield where, f"gate {gate_id} {_differing(have, want)}", "the journal is what counts: tell the authors of outlast"


def _differing(have: GateRow | None, want: GateRow | None) -> str:
    if have is None:
        return "is missing from the table"
    if want is None:
        return "is not in its journal"
    names = [name for name in GateRow.__slots__ if getattr(have, name) != getattr(want, name)]
    return "differs from its journal: " + ", ".join(f"{name} is {getattr(have, name)!r}, not {getattr(want, name)!r}" for name in names)
