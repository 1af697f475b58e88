"""Opening a file: ours, new, or refused and left as it is.

Rules
1. Nothing is opened for writing before the file's own bytes say that it is ours or empty: a text, a damaged file, somebody else's tables
   stay untouched byte for byte.
2. A new file is made with mode 0600 before SQLite opens it; -wal and -shm take its mode.
3. WAL and synchronous=FULL are set and read back: with less, the last commits are lost with the power.
4. A migration looks at the version again inside BEGIN IMMEDIATE: any number of processes may open a new file at once.
5. A reader never makes a file; on read-only media it reads without locks.
6. A -wal that was deleted after a crash is noticed before SQLite makes a new one and the trace is gone.
"""

from __future__ import annotations

import os
import random
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import apsw

from outlast.errors import OutlastError, SchemaTooNew, StoreError, UsageError
from outlast.stores import sql
from outlast.stores.sqlite.failures import speaking, translated

MEMORY = ":memory:"
APPLICATION_ID = 0x6F75746C  # "outl": in the header of every file of ours
MIGRATIONS = sql.migrations("outlast.stores.sqlite")
SCHEMA = len(MIGRATIONS)
TABLES = frozenset({"run", "entry", "gate", "notice"})
WAL_PAGES = 500  # 2 MB, then a checkpoint; more only makes readers and recovery slower
STATEMENTS = 400  # kept prepared; apsw goes round its slots, so a seldom one is thrown out of 100 although most are empty

_HEADER = b"SQLite format 3\0"
_T = TypeVar("_T")


def writer(path: str, busy_s: float, point: Callable[[str], None]) -> apsw.Connection:
    """The connection that writes: file made if need be, schema brought up to date."""
    if path != MEMORY and _is_new(path):
        _create(path)
    db = connect(path, busy_s)
    try:
        _prepare(db, path, busy_s, point)
    except BaseException:
        db.close()
        raise
    return db


def connect(path: str, busy_s: float) -> apsw.Connection:
    """A connection to a file that is there and was found to be ours."""
    with speaking(path):
        db = _opened(path, apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if path == MEMORY else 0))
        if path != MEMORY and db.readonly("main"):
            db.close()
            raise StoreError(f"{path}: the file cannot be written by this user", hint=f"chmod u+w {path}, or run as its owner")
        db.set_busy_timeout(int(busy_s * 1000))
        return db


def _opened(path: str, flags: int) -> apsw.Connection:
    """Plans do not depend on the values that are bound: our statements name their indexes, and otherwise one that looks at a partial index is
    prepared anew for every value (a sixth of the time of a claim, two fifths of an idle look for work).
    """
    db = apsw.Connection(path, flags=flags, statementcachesize=STATEMENTS)
    db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    return db


def reader(path: str, busy_s: float) -> apsw.Connection:
    """A connection that never changes anything, for commands that only read."""
    if _is_new(path):
        raise StoreError(f"{path}: there is no store here", hint="start a run first, or name the store with --store")
    wal = _size(f"{path}-wal")
    try:
        db = _opened(path, apsw.SQLITE_OPEN_READONLY)
        db.set_busy_timeout(int(busy_s * 1000))
        version = _version(db)
    except (apsw.CantOpenError, apsw.ReadOnlyError, apsw.IOError) as e:
        if wal:
            raise StoreError(
                f"{path}: cannot be read here: its last commits stand in {path}-wal, and beside them nothing can be written ({e})",
                hint="copy the file and its -wal to a place that can be written, and read them there") from e  # fmt: skip
        with speaking(path):
            db = _opened(f"file:{quote(path)}?immutable=1", apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
            version = _version(db)
    except apsw.Error as e:
        raise translated(e, path) from e
    _judge_version(path, version)
    if version < SCHEMA:
        db.close()
        raise StoreError(
            f"{path}: {f'its schema is version {version}, this program reads {SCHEMA}' if version else 'there is no store in it yet'}",
            hint="outlast store migrate")  # fmt: skip
    return db


# ---- what the file is, before SQLite may write to it -------------------------------------------------------------------------


def _is_new(path: str) -> bool:
    """Is there nothing yet? Refuses, untouched, what is no store of ours."""
    file = Path(path)
    try:
        found = file.stat()
    except FileNotFoundError:
        if not file.parent.is_dir():
            raise StoreError(f"{path}: the directory {file.parent} does not exist", hint=f"mkdir -p {file.parent}") from None
        _no_orphan_wal(path, "the file is gone, and its -wal is still there")
        return _is_new(path) if _size(path) else True
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}", hint="look at the path and its rights") from e
    if stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{path}: is a directory, not a file", hint=f"name a file in it: {file / 'outlast.db'}")
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path}: is not a regular file", hint="name a file")
    _no_lost_wal(path)
    if found.st_size == 0:
        _no_orphan_wal(path, "the file is empty, and its -wal is not")
        return _is_new(path) if _size(path) else True
    try:
        with file.open("rb") as f:
            header = f.read(100)
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}", hint=f"give this user the right to read it: chmod u+rw {path}") from e
    if not header.startswith(_HEADER):
        damaged = not header.strip(b"\0") or _size(f"{path}-wal")
        raise StoreError(
            f"{path}: is not an SQLite database{' any more: its first page is damaged' if damaged else ''}; it was left as it is",
            hint="restore a backup, keeping this file and its -wal" if damaged else "name another file with --store")  # fmt: skip
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        _refuse_foreign(path)
    else:
        _judge_version(path, int.from_bytes(header[60:64], "big"))
    return False


def _no_orphan_wal(path: str, what: str) -> None:
    """Another process may be making the file at this moment: it writes the file first, then the -wal, so this looks the other way round."""
    if _size(f"{path}-wal") and not _size(path):
        hint = f"restore the file, or move {path}-wal away"
        raise StoreError(f"{path}: {what}: it may hold commits; both were left as they are", hint=hint)


def _refuse_foreign(path: str) -> None:
    """Without our mark in its header: another program's file, or one of ours whose first commits still stand in the -wal."""
    with speaking(path):
        if _size(f"{path}-wal"):
            db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        else:  # nothing but the file: read it without making a -shm
            db = apsw.Connection(f"file:{quote(path)}?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        try:
            db.set_busy_timeout(1000)
            db.execute("BEGIN")  # mark and tables of one moment: another process may be making it just now
            [(mark,)] = db.execute("PRAGMA application_id").fetchall()
            if mark != APPLICATION_ID:
                _refuse_tables(path, _foreign(db, ours=False))
        except (apsw.BusyError, apsw.CantOpenError, apsw.ReadOnlyError):
            return  # somebody is just making it, or its -wal cannot be read here: who opens it next says so, and the migration looks again
        finally:
            db.close()


def _foreign(db: apsw.Connection, *, ours: bool) -> list[str]:
    """What is in the schema and not ours: in a file of ours the tables, in any other everything."""
    named = "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite~_%' ESCAPE '~' ORDER BY rowid"
    rows: list[tuple[Any, ...]] = db.execute(named).fetchall()
    return [name for kind, name in rows if not ours or (kind == "table" and name not in TABLES)]


def _refuse_tables(path: str, foreign: list[str]) -> None:
    if foreign:
        raise UsageError(
            f"{path}: holds tables of another program ({', '.join(foreign[:5])}{', …' if len(foreign) > 5 else ''}); it was left as it is",
            hint="give the store a file of its own: --store sqlite:///outlast.db")  # fmt: skip


def _create(path: str) -> None:
    """Mode 0600 from the first moment on; another process may have been faster."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
    except OSError as e:
        hint = f"let this user write in {Path(path).parent}, or name another store"
        raise StoreError(f"{path}: cannot be made: {e.strerror}", hint=hint) from e


def _no_lost_wal(path: str) -> None:
    """A killed process leaves -wal and -shm; a clean end removes both. The -shm alone says how many commits stood in a -wal that is gone."""
    before = _wal_index(path)
    if before is None or _size(f"{path}-wal") or _wal_index(path) != before:  # the second look: another process may be ending just now
        return
    pages = _frames(before)
    if pages > 0:
        raise StoreError(
            f"{path}: its -wal was deleted after a crash, and {pages} pages of commits with it: they are nowhere else; all was left as it is",
            hint=f"put {path}-wal back, or restore a backup; to go on with what is left, remove {path}-shm and look at the last runs")  # fmt: skip


def _wal_index(path: str) -> bytes | None:
    """The head of the -shm: two copies of the header, then how much of the -wal is in the file already."""
    try:
        with Path(f"{path}-shm").open("rb") as f:
            head = f.read(100)
    except OSError:
        return None
    return head if len(head) == 100 and head[:48] == head[48:96] and head[12] else None


def _frames(head: bytes) -> int:
    """Pages that stand in the -wal only. (https://sqlite.org/walformat.html, section 2.1)"""
    return int.from_bytes(head[16:20], sys.byteorder) - int.from_bytes(head[96:100], sys.byteorder)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - a string, and called for every opening
    except OSError:
        return 0


# ---- the schema ------------------------------------------------------------------------------------------------------------------


def _prepare(db: apsw.Connection, path: str, busy_s: float, point: Callable[[str], None]) -> None:
    _judge_version(path, patiently(lambda: _version(db), path, busy_s))
    if path != MEMORY:
        mode = patiently(lambda: _pragma(db, "journal_mode"), path, busy_s)
        if mode != "wal":  # the first of many at once: this statement does not wait as long as others do
            with speaking(path):
                point("commit.before")  # it writes the file's first page, and is on the disk before anything else
                mode = patiently(lambda: _pragma(db, "journal_mode = wal"), path, busy_s)
                point("commit.after")
        if mode != "wal":
            raise StoreError(f"{path}: WAL cannot be switched on (journal mode is {mode})", hint="put the file on a local disk")
    configure(db, path)
    version = patiently(lambda: _version(db), path, busy_s)
    if version < SCHEMA:
        patiently(lambda: _migrate(db, path, point), path, busy_s)
    else:
        with speaking(path):
            _refuse_tables(path, _foreign(db, ours=True))


def configure(db: apsw.Connection, path: str) -> None:
    """What a connection that writes must be set to; read back, since SQLite ignores what it does not know."""
    with speaking(path):
        for pragma in ("synchronous = full", "fullfsync = 1", f"wal_autocheckpoint = {WAL_PAGES}", "mmap_size = 0"):
            db.execute(f"PRAGMA {pragma}").fetchall()
        if (level := _pragma(db, "synchronous")) != 2:
            raise StoreError(f"{path}: synchronous is {level} and cannot be set to FULL")


def _migrate(db: apsw.Connection, path: str, point: Callable[[str], None]) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        version = _version(db)  # again: another process may have been faster
        _judge_version(path, version)
        if version == 0:
            _refuse_tables(path, _foreign(db, ours=False))
        for number, statements in enumerate(MIGRATIONS[version:], version + 1):
            db.execute(statements)
            db.execute(f"PRAGMA user_version = {number}")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        point("commit.before")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    point("commit.after")


def _version(db: apsw.Connection) -> int:
    version = _pragma(db, "user_version")
    assert isinstance(version, int)
    return version


def _judge_version(path: str, version: int) -> None:
    if version > SCHEMA:
        raise SchemaTooNew(
            f"{path}: its schema is version {version}, this program knows up to {SCHEMA}; it was left as it is",
            hint="update outlast, or use the newer worker")  # fmt: skip


def _pragma(db: apsw.Connection, what: str) -> str | int:
    rows = db.execute(f"PRAGMA {what}").fetchall()
    value = rows[0][0] if rows else ""
    assert isinstance(value, str | int)
    return value


# ---- waiting for a lock ------------------------------------------------------------------------------------------------------------


class Patience:
    """Waits between tries for a lock: 0.2 to 2 ms, by chance, so that of several processes none is starved.

    The pause does not grow with the waiting, or who has waited longest would look least often: the one that committed last is back within
    0.2 ms, and with a disk that takes 4 ms a commit four processes shared 89 : 9 : 258 : 47. (SQLite's own busy handler sleeps up to
    100 ms: one process then got a thousandth of another's commits.) A try costs 10 microseconds. After two seconds somebody holds the lock
    for long, and there is nothing to share.
    """

    __slots__ = ("_begun", "_event", "_limit")

    def __init__(self, busy_s: float) -> None:
        self._begun = time.monotonic()
        self._limit = self._begun + busy_s
        self._event: threading.Event | None = None

    def wait(self) -> bool:
        """False once the time is over."""
        now = time.monotonic()
        left = self._limit - now
        if left <= 0:
            return False
        self._event = self._event or threading.Event()
        top = 0.002 if now - self._begun < 2 else 0.02  # seconds
        self._event.wait(min(random.uniform(top / 10, top), left))  # noqa: S311 - jitter, no secret
        return True


def patiently(act: Callable[[], _T], path: str, busy_s: float) -> _T:
    """Do it, again while another process holds the lock, until `busy_s` is over. What SQLite raises comes out as one of ours."""
    patience = Patience(busy_s)
    while True:
        try:
            return act()
        except apsw.BusyError as e:
            if not patience.wait():
                _give_up(e, path, busy_s)
        except apsw.Error as e:
            raise translated(e, path) from e


def _give_up(error: apsw.Error, path: str, busy_s: float) -> NoReturn:
    raise locked(error, path, busy_s) from error


def locked(error: apsw.Error, path: str, busy_s: float) -> OutlastError:
    return translated(error, path, what=f"waited {busy_s:g} s")
