"""Is the file whole? What the database says, what the journal says, and where the file lies."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import apsw

from outlast.stores import audit
from outlast.stores.audit import Finding
from outlast.stores.sqlite import rows
from outlast.stores.sqlite.connections import Connections
from outlast.stores.sqlite.rows import Q, ask

RESTORE = "restore a backup, keeping this file and its -wal"
NETWORK = frozenset("9p afs beegfs ceph cifs fuse.sshfs fuse.glusterfs glusterfs lustre nfs nfs4 smb2 smb3 smbfs".split())
FIXED = (3, 51, 3)  # earlier versions can lose committed pages when two connections write and checkpoint at once
LEAST_FREE = 64 * 1024 * 1024  # bytes of the disk
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
    journal = [rows.journal(row) for row in ask(db, Q["journal"], {"run_no": run_no, "since": 0, "after": 0, "limit": -1})]
    gates = [gate for gate, _ in map(rows.gate, ask(db, Q["gates"], {"run_no": run_no}))]
    yield from audit.run(run_id, audit.CheckedHead(*head), journal, gates, RESTORE)


# ---- where the file lies -------------------------------------------------------------------------------------------------------


def _file(path: str, mounts: Path) -> Iterator[Finding]:
    file, wal, shm, journal = Path(path), *(Path(f"{path}-{end}") for end in ("wal", "shm", "journal"))
    for each in (file, wal, shm):
        if each.exists() and (mode := each.stat().st_mode & 0o777) & 0o077:
            yield str(each), f"others may read it (mode {mode:04o})", f"chmod 600 {path}*"
    folder = file.resolve().parent
    if (mode := folder.stat().st_mode) & 0o002 and not mode & stat.S_ISVTX:
        yield str(folder), "anybody may put other files in the place of the store's", f"chmod o-w {folder}"
    if kind := _network(file.resolve(), mounts):
        yield path, f"lies on a network file system ({kind}): its locks and WAL need one machine", "put it on a local disk, or use Postgres"
    disk, size = shutil.disk_usage(folder), file.stat().st_size
    if disk.free < max(LEAST_FREE, size // 10):
        what = f"{disk.free // 2**20} MiB are free on its disk, and it takes {size // 2**20} MiB: full, no run goes on"
        yield path, what, "free some space: outlast store prune --older-than 90d, or a larger disk"
    if wal.exists() and wal.stat().st_size > BIG_WAL:
        yield str(wal), f"{wal.stat().st_size // 2**20} MiB not yet in the file: a reader has been open for long", "end that reader"
    if _wal_gone(wal):
        what = "was deleted while this process had it open: commits since then are nowhere else"
        yield str(wal), what, "stop every process, keep a copy of all, and look at the last runs"
    if journal.exists() and journal.stat().st_size:
        what = "is left over from another journal mode: opened in that mode, SQLite would put its old pages back into the file"
        yield str(journal), what, "stop every process, keep a copy of all, and move it away"
    for link in (wal, shm):
        if link.is_symlink():
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
