"""Is the file whole? What the database says, what the journal says, and where the file lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apsw

from outlast.core.gate import GateRow, projection
from outlast.core.run import MessageAdded, Run, ms
from outlast.errors import InvariantViolated
from outlast.stores.base import ENDED, chain, genesis
from outlast.stores.sqlite import rows
from outlast.stores.sqlite.connections import Connections
from outlast.stores.sqlite.rows import Q, ask

Finding = tuple[str, str, str]  # where, what, remedy
RESTORE = "restore a backup, keeping this file and its -wal"
NETWORK = frozenset("9p afs beegfs ceph cifs fuse.sshfs fuse.glusterfs glusterfs lustre nfs nfs4 smb2 smb3 smbfs".split())
FIXED = (3, 51, 3)  # earlier versions can lose committed pages when two connections write and checkpoint at once
BIG_WAL = 256 * 1024 * 1024  # bytes: something keeps it from being checkpointed


def findings(files: Connections, mounts: Path) -> list[Finding]:
    found = files.read(lambda db: [*_readable(_database(db, files), files.path), *_readable(_runs(db), files.path)])
    return [*found, *(_file(files.path, mounts) if not files.memory else ())]


def _database(db: apsw.Connection, files: Connections) -> Iterator[Finding]:
    version = tuple(map(int, apsw.sqlite_lib_version().split(".")))
    if version < FIXED:
        yield "sqlite", f"version {apsw.sqlite_lib_version()} can lose committed pages (WAL-reset bug)", "pip install -U apsw"
    for (said,) in ask(db, "PRAGMA integrity_check(20)"):
        if said != "ok":
            yield files.path, f"integrity check: {said}", RESTORE
    [(mode,)] = ask(db, "PRAGMA journal_mode")
    if not files.memory and mode != "wal":
        yield files.path, f"journal mode is {mode}, not WAL", "open it once with `outlast runs`; another program changed it"
    [(level,)] = ask(db, "PRAGMA synchronous")
    if level != 2:
        yield files.path, f"synchronous is {level}, not FULL", "the last commits may be lost with the power"


def _readable(looking: Iterator[Finding], path: str) -> Iterator[Finding]:
    """All that is found until the file cannot be read any further, and that."""
    try:
        yield from looking
    except apsw.Error as e:
        yield path, f"cannot be read any further: {e}", RESTORE


def _runs(db: apsw.Connection) -> Iterator[Finding]:
    known = set()
    for run_no, run_id, *head in ask(db, Q["check_heads"]):
        known.add(run_no)
        try:
            yield from _run(db, run_no, run_id, tuple(head))
        except UnicodeDecodeError as e:
            yield f"run {run_id}", f"an entry holds text that is not UTF-8 ({e.reason}): it was changed after it was written", RESTORE
    for table in ("entry", "gate", "notice"):
        for (run_no,) in ask(db, f"SELECT DISTINCT run_no FROM {table}"):
            if run_no not in known:
                yield f"run number {run_no}", f"rows in {table} without a run", RESTORE


def _run(db: apsw.Connection, run_no: int, run_id: str, head: tuple[int, int, str, int, int, int]) -> Iterator[Finding]:
    where = f"run {run_id}"
    everything = {"run_no": run_no, "since": 0, "after": 0, "limit": -1}
    journal = [rows.journal(row) for row in ask(db, Q["journal"], everything)]
    digest, seq, fence = genesis(run_id), 0, 0
    for n, row in enumerate(journal, 1):
        seq += row.kind == MessageAdded.__name__
        if (row.entry_no, row.seq) != (n, seq):
            yield where, f"entry {n} (checkpoint {seq}) is missing: found entry {row.entry_no} (checkpoint {row.seq})", RESTORE
            return
        digest = chain(
            digest, entry_no=n, seq=seq, kind=row.kind, at_ms=ms(row.at), by=row.by, entry_id=row.entry_id, fence=row.fence,
            status=row.status, meta=row.meta, body=row.body)  # fmt: skip
        if digest != row.digest:
            yield where, f"entry {n} ({row.kind}) was changed after it was written: its digest does not fit", RESTORE
            return
        if row.fence and row.fence < fence:
            yield where, f"entry {n} was written under fence {row.fence} after one under {fence}", "tell the authors of outlast"
        fence = max(fence, row.fence)
    entries, last_seq, status, *counted = head
    if (entries, last_seq) != (len(journal), seq):
        yield where, f"its head says {entries} entries and checkpoint {last_seq}, its journal holds {len(journal)} and {seq}", RESTORE
        return
    try:
        run, gates = projection(Run(run_id), rows.entries(ask(db, Q["load"], everything), run_id))
    except InvariantViolated as e:
        yield where, str(e), RESTORE
        return
    folded = [run.model_calls, run.input_tokens, run.output_tokens]
    if counted[0] not in (run.model_calls, run.model_calls + run.lost_calls) or counted[1:] != folded[1:]:
        what = f"its head counts {counted} (model calls, tokens in, tokens out), its journal {folded}"
        yield where, what, "the next step of the run mends it"
    ended = run.ended.status if run.ended else None
    if (status in ENDED or ended is not None) and status != ended:
        yield where, f"its head says {status}, its journal {ended or 'that it goes on'}", "the next step of the run mends it"
    yield from _gates(db, run_no, where, gates)


def _gates(db: apsw.Connection, run_no: int, where: str, expected: list[GateRow]) -> Iterator[Finding]:
    table = {gate.gate_id: gate for gate, _ in map(rows.gate, ask(db, Q["gates"], {"run_no": run_no}))}
    wanted = {g.gate_id: g for g in expected}
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


# ---- where the file lies -------------------------------------------------------------------------------------------------------


def _file(path: str, mounts: Path) -> Iterator[Finding]:
    file, wal = Path(path), Path(f"{path}-wal")
    if (mode := file.stat().st_mode & 0o777) & 0o077:
        yield path, f"others may read it (mode {mode:04o})", f"chmod 600 {path}*"
    if kind := _network(file.resolve(), mounts):
        yield path, f"lies on a network file system ({kind}): its locks and WAL need one machine", "put it on a local disk, or use Postgres"
    if wal.exists() and wal.stat().st_size > BIG_WAL:
        yield str(wal), f"{wal.stat().st_size // 2**20} MiB not yet in the file: a reader has been open for long", "end that reader"
    if _wal_gone(wal):
        what = "was deleted while this process had it open: commits since then are nowhere else"
        yield str(wal), what, "stop every process, keep a copy of all, and look at the last runs"
    shadow = [p for p in (wal, Path(f"{path}-shm")) if p.is_symlink()]
    for link in shadow:
        yield str(link), "is a symbolic link", "remove it while no process has the file open"


def _wal_gone(wal: Path) -> bool:
    """Do our own open files name a -wal that is no longer there, or is another one by now?"""
    for fd in _open_files():
        try:
            if str(fd.readlink()) == f"{wal} (deleted)":
                return True
        except OSError:
            continue
    return False


def _open_files() -> list[Path]:
    try:
        return list(Path("/proc/self/fd").iterdir())
    except OSError:
        return []


def _network(file: Path, mounts: Path) -> str | None:
    """The kind of the network file system that the file lies on."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    best, kind = "", None
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if len(point) >= len(best) and (point == "/" or file == Path(point) or Path(point) in file.parents):
            best, kind = point, fields[2]
    return kind if kind in NETWORK else None
