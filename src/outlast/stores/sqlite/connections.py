"""The connections of one process to one file: one that writes, some that read, one that watches.

Rules
1. Opened on first use, once per process; `Outlast(...)` itself does no I/O.
2. Before a fork all are closed, and opened anew where they are needed, in parent and child: SQLite keeps its books about file locks in
   the process's memory, a child with the parent's books would believe in locks that only the parent holds.
3. Should a child find connections that its parent opened all the same (a fork past Python's hooks), it never touches and never closes them.
4. In memory there is one connection, and whoever reads waits for whoever writes.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

import apsw

from outlast.errors import StoreError
from outlast.stores.sqlite import opening
from outlast.stores.sqlite.failures import speaking
from outlast.stores.sqlite.group import Writer

_T = TypeVar("_T")
_IDLE_READERS = 8  # kept open; more are opened and closed as needed
_QUIET_WAIT_S = 5.0  # before a fork or a close, for what runs at that moment
_all: weakref.WeakSet[Connections] = weakref.WeakSet()
_hooks: list[bool] = []


class Connections:
    def __init__(self, path: str, *, read_only: bool, busy_s: float, point: Callable[[str], None], committed: Callable[[], None]) -> None:
        self.path = path
        self.memory = path == opening.MEMORY
        self._read_only = read_only
        self._busy_s = busy_s
        self.point = point
        self._committed = committed
        self._reset()
        _all.add(self)
        if not _hooks:
            _hooks.append(True)
            os.register_at_fork(before=_suspend, after_in_parent=_resume, after_in_child=_start_anew)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._opening = threading.Lock()
        self._one = threading.RLock()  # in memory: around every read and every write
        self._using = 0
        self._suspended = False
        self._writer: Writer | None = None
        self._idle: list[apsw.Connection] = []
        self._watcher: apsw.Connection | None = None

    # ---- using ----------------------------------------------------------------------------------------------------------------

    def write(self, work: Callable[[apsw.Connection], _T]) -> _T:
        if self._read_only:
            raise StoreError(f"{self.path}: opened for reading only")
        with self._use():
            if self.memory:
                with self._one:
                    return self._open().write(work)
            return self._open().write(work)

    def read(self, work: Callable[[apsw.Connection], _T]) -> _T:
        """`work` sees one moment of the file, whatever is committed meanwhile."""
        with self._use(), speaking(self.path):
            if self.memory:
                with self._one:
                    return work(self._open().db)
            db = self._borrow()
            try:
                db.execute("BEGIN")
                return work(db)
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                with self._changed:
                    keep = len(self._idle) < _IDLE_READERS
                    if keep:
                        self._idle.append(db)
                if not keep:
                    db.close()

    def version(self) -> int:
        """A number that is another one after every commit, of whatever process."""
        if self.memory:
            with self._use():
                return self._open().commits
        with self._use(), speaking(self.path):
            if self._watcher is None:
                self._ready()
                with self._opening:
                    self._watcher = self._watcher or self._connect()
            [(version,)] = self._watcher.execute("PRAGMA data_version").fetchall()
            assert isinstance(version, int)
            return version

    def _borrow(self) -> apsw.Connection:
        with self._changed:
            if self._idle:
                return self._idle.pop()
        self._ready()
        return self._connect()

    def _connect(self) -> apsw.Connection:
        return opening.reader(self.path, self._busy_s) if self._read_only else opening.connect(self.path, self._busy_s)

    def _ready(self) -> None:
        """Before the first reader: the file is there and of our schema."""
        if not self._read_only:
            self._open()

    def _open(self) -> Writer:
        if self._writer is None:
            with self._opening:
                if self._writer is None:
                    db = opening.writer(self.path, self._busy_s, self.point)
                    self._writer = Writer(db, self.path, busy_s=self._busy_s, point=self.point, committed=self._committed)
        return self._writer

    def _use(self) -> _Using:
        return _Using(self)

    # ---- closing, and forks ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for what other threads do at that moment; a later use opens the file again."""
        if os.getpid() != self._pid:
            self._disown()
        with speaking(self.path):
            self._close()

    def _close(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._using == 0, _QUIET_WAIT_S)
            connections = self._held()
            self._writer, self._watcher = None, None
            self._idle.clear()
        for db in connections:
            db.close()

    def _held(self) -> list[apsw.Connection]:
        return [db for db in (self._writer.db if self._writer else None, self._watcher, *self._idle) if db is not None]

    def suspend(self) -> None:
        """Before a fork: wait for what runs, then close. In memory there is nothing to close: the data would be gone."""
        with self._changed:
            self._suspended = True
            done = self._changed.wait_for(lambda: self._using == 0, _QUIET_WAIT_S)
        if done and not self.memory:
            try:
                self._close()
            except apsw.Error:
                pass  # the child disowns what it finds

    def resume(self) -> None:
        with self._changed:
            self._suspended = False
            self._changed.notify_all()

    def _disown(self) -> None:
        """In a child: what the parent opened stays untouched for ever, its end included. In memory it is the child's own copy."""
        if self.memory:
            writer = self._writer
            self._reset()
            if writer is not None:
                self._writer = Writer(writer.db, self.path, busy_s=self._busy_s, point=self.point, committed=self._committed)
            return
        for db in self._held():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))  # so that no destructor closes it
        self._reset()


class _Using:
    """Around every use: none begins while a fork is being made; a fork and a close wait for those that have begun."""

    __slots__ = ("_of",)

    def __init__(self, of: Connections) -> None:
        self._of = of

    def __enter__(self) -> None:
        of = self._of
        if os.getpid() != of._pid:
            of._disown()
        with of._lock:
            while of._suspended:
                of._changed.wait()
            of._using += 1

    def __exit__(self, *exc: object) -> None:
        of = self._of
        with of._lock:
            of._using -= 1
            if of._using == 0:
                of._changed.notify_all()  # a fork or a close may wait for it


def _suspend() -> None:
    for connections in list(_all):
        connections.suspend()


def _resume() -> None:
    for connections in list(_all):
        connections.resume()


def _start_anew() -> None:
    for connections in list(_all):
        connections._disown()
