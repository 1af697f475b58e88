"""Group commit: writes of many threads share one transaction and one fsync.

A queue whose head leads: it commits everything queued and hands over to the next head. ("Whoever holds the lock commits all" gains nothing:
the waiters that are done still queue for the lock.)

Rules
1. A write that fails harms no other: the group is rolled back and run again, now each write in a savepoint of its own. (Savepoints from the
   start would cost every member a tenth of its time, for something that hardly ever happens.) So a write must be able to run twice.
2. A group that SQLite threw away (disk full, I/O error: the transaction is gone) is run again one by one.
3. From COMMIT on a failure means "unknown" for every member; each settles it for itself.
4. A thread that is interrupted while it waits waits on: its write counts as sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import apsw

from outlast.errors import CommitUnknown, StoreError
from outlast.stores.sqlite.failures import translated
from outlast.stores.sqlite.opening import Patience, locked

T = TypeVar("T")
MAX_GROUP = 256  # members of one transaction: bounds how long other processes wait for the lock


class _Job(Generic[T]):
    __slots__ = ("done", "error", "value", "wake", "work")

    def __init__(self, work: Callable[[apsw.Connection], T]) -> None:
        self.work = work
        self.value: T | None = None
        self.error: BaseException | None = None
        self.done = False
        self.wake: Any = None  # of one that waits: a lock, released once: done, or ours to lead


class Writer:
    """All writes of one process to one file."""

    def __init__(self, db: apsw.Connection, path: str, *, busy_s: float, point: Callable[[str], None],
                 committed: Callable[[], None]) -> None:  # fmt: skip
        self.db = db
        self.commits = 0  # since opened
        self._path = path
        self._busy_s = busy_s
        self._point = point
        self._committed = committed
        self._mutex = threading.Lock()
        self._queue: list[_Job[Any]] = []
        db.set_busy_timeout(0)  # our own waiting is fairer between processes

    def write(self, work: Callable[[apsw.Connection], T]) -> T:
        """Run `work` inside a transaction and commit. What it raises comes out, with nothing of it written."""
        job = _Job(work)
        with self._mutex:
            leads = not self._queue
            if not leads:
                job.wake = threading.Lock()
                job.wake.acquire()
            self._queue.append(job)
        interrupted = None if leads else _wait(job)
        if not job.done:
            self._lead()
        if interrupted:
            raise interrupted
        if job.error:
            raise job.error
        return cast("T", job.value)

    def _lead(self) -> None:
        with self._mutex:
            batch = self._queue[:MAX_GROUP]
        try:
            self._commit(batch)
        finally:
            with self._mutex:
                del self._queue[: len(batch)]
                heir = self._queue[:1]
            for other in [*batch[1:], *heir]:
                other.wake.release()

    def _commit(self, batch: list[_Job[Any]]) -> None:
        """Every job of the batch is done afterwards, with a value or an error."""
        db, committing, committed = self.db, False, False
        try:
            self._begin()
            if len(batch) == 1:
                batch[0].value = batch[0].work(db)
            elif not self._together(batch):
                for job in batch:
                    self._member(job)
            committing = True
            self._point("commit.before")
            db.execute("COMMIT")
            committed = True
            self.commits += 1
            self._committed()
            self._point("commit.after")
        except _ThrownAway:
            self._roll_back()
            for job in batch:
                job.value = job.error = None
                self._commit([job])
        except Exception as e:  # noqa: BLE001 - each error is handed to the thread that asked
            self._roll_back()
            self._fail(batch, e, committing=committing)
        except BaseException as e:  # noqa: BLE001 - Ctrl-C or a simulated death: to the leader as it is, to the others as an error
            self._roll_back()
            if not committed:
                self._fail(batch[1:], StoreError(f"{self._path}: interrupted"), committing=committing)
            batch[0].error = e
        finally:
            for job in batch:
                job.done = True

    def _together(self, batch: list[_Job[Any]]) -> bool:
        """All of them, if none raises; otherwise a new transaction in which nothing was done yet."""
        try:
            for job in batch:
                job.value = job.work(self.db)
        except Exception as e:
            if not self.db.in_transaction:
                raise _ThrownAway from e
            self.db.execute("ROLLBACK")
            for job in batch:
                job.value = None
            self._begin()
            return False
        return True

    def _begin(self) -> None:
        patience: Patience | None = None
        while True:
            try:
                self.db.execute("BEGIN IMMEDIATE")
            except apsw.BusyError as e:
                patience = patience or Patience(self._busy_s)
                if not patience.wait():
                    raise locked(e, self._path, self._busy_s) from e
            else:
                return

    def _member(self, job: _Job[Any]) -> None:
        db = self.db
        db.execute("SAVEPOINT member")
        try:
            job.value = job.work(db)
            db.execute("RELEASE member")
        except Exception as e:
            if not db.in_transaction:
                raise _ThrownAway from e
            db.execute("ROLLBACK TO member; RELEASE member")
            job.error = translated(e, self._path) if isinstance(e, apsw.Error) else e

    def _fail(self, jobs: list[_Job[Any]], error: Exception, *, committing: bool) -> None:
        if isinstance(error, apsw.Error):
            error = translated(error, self._path, committing=committing)
        elif committing and not isinstance(error, CommitUnknown):
            error = CommitUnknown(f"{self._path}: the commit was cut off ({error})")
        for job in jobs:
            if job.error is None:  # a member refused before keeps its own answer
                job.error = error

    def _roll_back(self) -> None:
        try:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
        except apsw.Error:
            pass  # SQLite has rolled back by itself


class _ThrownAway(Exception):
    """SQLite rolled the whole transaction back."""


def _wait(job: _Job[Any]) -> BaseException | None:
    """Until the job is done or ours to lead. An interrupt is given back, to be raised then."""
    interrupted: BaseException | None = None
    while True:
        try:
            job.wake.acquire()
            return interrupted
        except BaseException as e:  # noqa: BLE001 - Ctrl-C in the main thread: others may depend on our leading
            interrupted = e
