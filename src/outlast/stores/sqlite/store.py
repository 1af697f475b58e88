"""The store on SQLite: `base.Store` as transactions over one file.

Rules
1. Every write goes through the group commit queue; its first statement is the conditional one. Bodies are encoded before the lock is taken.
2. Reads have connections of their own and never wait for the writer.
3. Leases run on the machine's boot clock with its boot id (WAL means one machine); a lease of another boot, or of a process that is
   provably dead, is over. Wall time is for deadlines and for people.
4. What is due, over, parked or unfinished is found by partial indexes: a claim costs the same whatever the number of runs.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import apsw

from outlast.core.gate import GateRow
from outlast.core.run import FORMAT, Entry, MessageAdded, Run, fold, instant, iso, ms
from outlast.errors import CommitUnknown, InvariantViolated, LeaseLost, Refused, RunNotFound, StoreError
from outlast.stores import owner as owners
from outlast.stores.base import (
    BUILT_IN,
    ENDED,
    Appended,
    Batch,
    Behind,
    DueNotice,
    Head,
    JournalRow,
    Lease,
    NewHead,
    NewNotice,
    NewRun,
    ParentEntry,
    Place,
    Plan,
    Renewed,
    RunFilter,
    Stuck,
    Tail,
    Unfinished,
    busy,
    driven_by_another,
)
from outlast.stores.sqlite import check, opening, rows
from outlast.stores.sqlite.care import Care
from outlast.stores.sqlite.connections import Connections
from outlast.stores.sqlite.rows import Q, ask

T = TypeVar("T")
_END_OF_TIME = 2**62  # ms; after every instant
_PAGE = 500  # journal rows read at once
_POLL_S = (0.01, 0.1)  # between two looks for other processes' commits: at first, at last


def boot_ms() -> int:
    """Milliseconds since this machine was started, sleep included: no wall clock moves it."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1_000_000


class SQLiteStore(Care):
    """Runs in one SQLite file (`:memory:` for one process only).

    Args:
        path: of the file; made with mode 0600 on first use, unless `read_only`.
        clock: the wall clock; aware UTC.
        boot_clock: ms since the machine was started.
        boot: the id of this boot.
        dead: is the process of that lease owner provably gone?
        point: called as "commit.before" and "commit.after" around every COMMIT.
        busy_s: how long a call waits for another process's lock; shorter than a lease.
        read_only: never makes or changes a file; reads on read-only media too.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], datetime] | None = None,
                 boot_clock: Callable[[], int] | None = None, boot: Callable[[], str] = owners.boot_id,
                 dead: Callable[[str], bool] = owners.provably_dead, point: Callable[[str], None] = lambda name: None, busy_s: float = 10,
                 read_only: bool = False) -> None:  # fmt: skip
        raw = os.fspath(path)
        self.path = raw if raw == opening.MEMORY else os.path.abspath(raw)  # noqa: PTH100 - keeps symlinks, does no I/O beyond the cwd
        self.url = f"sqlite:///{self.path}"
        self._busy_s = busy_s
        self._clock = clock
        self._boot_clock = boot_clock or boot_ms
        self._boot = boot
        self._dead = dead
        self._changed = threading.Condition()
        self._own_commits = 0
        self._more = False  # did the last claim get all that it asked for? Then the next one does not look before it locks
        self._unsettled: dict[str, tuple[bool, Lease]] = {}  # by nonce: leases whose commit's answer was lost; were they asked for by name?
        self._files = Connections(self.path, read_only=read_only, busy_s=busy_s, point=point, committed=self._committed)

    def now(self) -> datetime:
        now = self._clock() if self._clock else datetime.now(UTC)
        return now.replace(microsecond=now.microsecond // 1000 * 1000)

    def close(self) -> None:
        """Closes the file; a later call opens it again."""
        self._files.close()

    # ---- starting and taking runs ---------------------------------------------------------------------------------------------

    def start(self, new: NewRun, *, owner: str | None = None, lease_s: float = 30) -> tuple[Head, Lease | None, bool]:
        now = self.now()
        written = self._first(new, now)
        taken: list[Lease] = []
        again = False

        def work(db: apsw.Connection) -> tuple[Head, Lease | None, bool]:
            lost, taken[:] = list(taken), []
            run_no = self._create(db, new, written, now)
            if run_no is None:
                head = self._head(db, new.run_id)
                taken[:] = self._kept(db, lost, lease_s)
                ours = again and head.created_at == now and head.input_digest == new.input_digest
                return head, taken[0] if taken else None, bool(taken) or (owner is None and ours)
            if owner:
                taken[:] = [self._take(db, run_no, owner, lease_s)]
            return self._head(db, new.run_id), taken[0] if taken else None, True

        try:
            return self._files.write(work)
        except CommitUnknown as e:
            again = True
            return self._once_more(work, taken, e, by_name=True)

    # SQLite has one writer at a time, and a commit that failed is rolled back: whoever writes next sees whether it stood.

    def _once_more(self, work: Callable[[apsw.Connection], T], taken: list[Lease], unknown: CommitUnknown, *, by_name: bool) -> T:
        """After a lost answer: `work` looks first for what it had taken. Where that fails too, it is kept for who asks next."""
        lost = list(taken)
        try:
            return self._files.write(work)
        except StoreError as e:
            with self._changed:
                self._unsettled.update({lease.nonce: (by_name, lease) for lease in [*lost, *taken]})
            raise unknown from e

    def _kept(self, db: apsw.Connection, leases: Sequence[Lease], lease_s: float) -> list[Lease]:
        """Those that stand, from now on for as long as any new one: whoever asks may have waited until they were nearly over, or past that."""
        if not leases:  # nearly always
            return []
        until = self.now() + timedelta(seconds=lease_s)
        held = self._renewed(db, leases, lease_s)
        return [replace(lease, until=until) for lease in leases if (lease.run_no, lease.nonce) in held]

    def _renewed(self, db: apsw.Connection, leases: Sequence[Lease], lease_s: float) -> set[tuple[Any, ...]]:
        """(run_no, nonce) of those that are still held, now for so long; the nonce is random per claim and says whose it is."""
        ours = _json([[lease.run_no, lease.nonce] for lease in leases])
        return set(ask(db, Q["renew"], {"leases": ours, **self._until(timedelta(seconds=lease_s), self.now())}))

    def _taking(self, find: Callable[[apsw.Connection], Sequence[int]], owner: str, lease_s: float, *,
                by_name: bool, which: Callable[[Lease], bool]) -> list[Lease]:  # fmt: skip
        """Take the runs that `find` names, or find again what was taken before by a commit whose answer was lost."""
        with self._changed:  # what was lost is found by one asker, or two would hold the same lease
            kept = {
                nonce: (named, lease)
                for nonce, (named, lease) in self._unsettled.items()
                if (by_name or not named) and lease.owner == owner and which(lease)
            }
            for nonce in kept:
                del self._unsettled[nonce]
        taken: list[Lease] = []

        def work(db: apsw.Connection) -> list[Lease]:
            lost = [*(lease for _, lease in kept.values()), *taken]
            if kept_on := self._kept(db, lost, lease_s):
                return kept_on
            taken[:] = [self._take(db, run_no, owner, lease_s) for run_no in find(db)]
            return list(taken)

        try:
            try:
                return self._files.write(work)
            except CommitUnknown as e:
                return self._once_more(work, taken, e, by_name=by_name)
        except BaseException:
            with self._changed:
                self._unsettled.update(kept)
            raise

    @staticmethod
    def _first(new: NewRun, now: datetime) -> rows.Written:
        return rows.Written(new.run_id, Place(), rows.stamped(new.entries, now), fence=0, status="running")

    @staticmethod
    def _create(db: apsw.Connection, new: NewRun, written: rows.Written, now: datetime) -> int | None:
        """The new run's number, or None where a run of that id is there."""
        values = {
            "run_id": new.run_id, "agent": new.agent, "agent_version": new.agent_version, "entries": written.place.entries,
            "seq": written.place.seq, "driver": new.driver, "tags": _json(dict(new.tags)), "started_by": new.started_by,
            "parent_run_id": new.parent_run_id, "parent_call_id": new.parent_call_id, "input_digest": new.input_digest, "format": FORMAT,
            "now": ms(now)}  # fmt: skip
        made = ask(db, Q["start"], values)
        if not made:
            return None
        run_no = int(made[0][0])
        db.executemany(Q["add_entry"], written.rows(run_no))
        return run_no

    def claim(self, owner: str, *, agents: Sequence[str], limit: int = 1, lease_s: float = 30, driver: str = BUILT_IN,
              needs: Sequence[tuple[str, str]] = (), over: bool = True) -> list[Lease]:  # fmt: skip
        def find(db: apsw.Connection, limit: int) -> list[int]:
            return self._claimable(db, driver, agents, needs, limit, with_over=over)

        settled = all(named for named, _ in list(self._unsettled.values()))
        if settled and not self._more and not self._files.read(lambda db: find(db, 1)):
            return []
        found = self._taking(lambda db: find(db, limit), owner, lease_s, by_name=False, which=lambda lease: lease.agent in agents)
        self._more = len(found) == limit
        return found

    def _claimable(self, db: apsw.Connection, driver: str, agents: Sequence[str], needs: Sequence[tuple[str, str]],
                   limit: int, *, with_over: bool) -> list[int]:  # fmt: skip
        """Run numbers: due and parked ones by how long they wait, then those whose lease is over."""
        at = {"driver": driver, "now": ms(self.now()), "boot_now": self._boot_clock(), "limit": limit}
        due: list[Any] = []
        for agent in agents:
            due += ask(db, Q["due"], {**at, "agent": agent})
        for agent, need in needs:
            if agent in agents:
                due += ask(db, Q["parked_for"], {**at, "agent": agent, "needs": need})
        found = list(dict.fromkeys(run_no for _, run_no, _ in sorted(due)))[:limit]
        if with_over and len(found) < limit:
            over: list[Any] = []
            for agent in agents:
                over += ask(db, Q["over"], {**at, "agent": agent})
            found += [run_no for _, run_no, _ in sorted(over)][: limit - len(found)]
        return found

    def _take(self, db: apsw.Connection, run_no: int, owner: str, lease_s: float) -> Lease:
        now = self.now()
        nonce = secrets.token_hex(8)
        until = now + timedelta(seconds=lease_s)
        values = {"run_no": run_no, "owner": owner, "nonce": nonce, **self._until(timedelta(seconds=lease_s), now)}
        [(held,)] = ask(db, Q["held"], {"run_no": run_no})
        [(_, run_id, agent, fence, attempts)] = ask(db, Q["take"], values)
        return Lease(
            run_no=run_no, run_id=run_id, agent=agent, fence=fence, nonce=nonce, owner=owner, until=until, attempts=attempts,
            taken_over=bool(held))  # fmt: skip

    def _until(self, length: timedelta, now: datetime) -> dict[str, Any]:
        return {"until": self._boot_clock() + length // timedelta(milliseconds=1), "until_at": ms(now + length), "boot": self._boot()}

    def claim_run(self, run_id: str, owner: str, *, lease_s: float = 30, driver: str | None = BUILT_IN) -> Lease:
        def find(db: apsw.Connection) -> list[int]:
            head = self._head(db, run_id)
            if driver is not None and head.driver != driver:
                raise driven_by_another(head, driver)
            if head.held:
                raise busy(head, self.now())
            return [head.run_no]

        [lease] = self._taking(find, owner, lease_s, by_name=True, which=lambda lease: lease.run_id == run_id)
        return lease

    def due(self, *, agents: Sequence[str], driver: str, limit: int = 100, needs: Sequence[tuple[str, str]] = ()) -> list[str]:
        def work(db: apsw.Connection) -> list[str]:
            numbers = self._claimable(db, driver, agents, needs, limit, with_over=True)
            found: dict[int, str] = dict(ask(db, Q["ids_of"], {"numbers": _json(numbers)}))
            return [found[n] for n in numbers if n in found]

        return self._files.read(work)

    def drive_by(self, run_id: str, driver: str) -> Head:
        def work(db: apsw.Connection) -> Head:
            head = self._head(db, run_id)
            if head.held:
                raise busy(head, self.now())
            if head.driver != driver:
                if not head.status.startswith("waiting_"):
                    raise Refused(
                        f"{run_id} is {head.status}: it can be moved only while it waits", run_id=run_id, hint=f"outlast show {run_id}"
                    )
                ask(db, Q["drive_by"], {"run_no": head.run_no, "driver": driver, "now": ms(self.now())})
            return self._head(db, run_id)

        return self._files.write(work)

    def parked(self, *, agents: Sequence[str], driver: str = BUILT_IN) -> list[tuple[str, str]]:
        return self._files.read(
            lambda db: [(a, n) for agent in agents for a, n in ask(db, Q["parked"], {"driver": driver, "agent": agent})]
        )

    def renew(self, leases: Sequence[Lease], *, lease_s: float = 30) -> list[Renewed]:
        if not leases:
            return []
        numbers = _json([lease.run_no for lease in leases])

        def work(db: apsw.Connection) -> list[Renewed]:
            held = self._renewed(db, leases, lease_s)
            there = {row[0]: row[1:] for row in ask(db, Q["lengths"], {"numbers": numbers})}
            return [Renewed(lease.run_id, (lease.run_no, lease.nonce) in held, *there.get(lease.run_no, (0, 0))) for lease in leases]

        return self._files.write(work)

    def peek(self, leases: Sequence[Lease]) -> list[Renewed]:
        if not leases:
            return []
        numbers = _json([lease.run_no for lease in leases])
        there = self._files.read(lambda db: {row[0]: row[1:] for row in ask(db, Q["holders_of"], {"numbers": numbers})})

        def found(lease: Lease) -> Renewed:
            fence, entries, nonce, holder = there.get(lease.run_no, (0, 0, None, None))
            return Renewed(lease.run_id, nonce == lease.nonce and holder is not None, fence, entries)

        return [found(lease) for lease in leases]

    def release(self, lease: Lease) -> None:
        values = {"run_no": lease.run_no, "fence": lease.fence, "nonce": lease.nonce, "now": ms(self.now())}
        self._files.write(lambda db: ask(db, Q["give_back"], values))

    def mark(self, lease: Lease, head: NewHead) -> None:
        values = {
            "run_no": lease.run_no, "fence": lease.fence, "nonce": lease.nonce, "status": head.status, "reason": head.reason,
            "needs": head.needs, "now": ms(self.now())}  # fmt: skip

        def work(db: apsw.Connection) -> None:
            if not ask(db, Q["mark"], values):
                raise self._lost(db, lease)

        self._files.write(work)

    def reap(self) -> int:
        boot = self._boot()

        def holders(db: apsw.Connection) -> list[tuple[str, str]]:
            found: list[tuple[str, str]] = []
            last = {"boot": "", "owner": ""}
            while step := ask(db, Q["holder"], last):
                last = {"boot": step[0][0], "owner": step[0][1]}
                if last["boot"] != boot or self._dead(last["owner"]):
                    found += [(last["boot"], last["owner"])] if ask(db, Q["still_held"], last) else []
            return found

        gone = self._files.read(holders)
        if not gone:
            return 0
        now = ms(self.now())

        def bury(db: apsw.Connection) -> int:
            return sum(len(ask(db, Q["bury"], {"boot": of_boot, "owner": who, "now": now})) for of_boot, who in gone)

        return self._files.write(bury)

    def reclaim(self, lease: Lease, *, lease_s: float = 30) -> Lease:
        def work(db: apsw.Connection) -> Lease:
            now = self.now()
            length = timedelta(seconds=lease_s)
            values = {"run_no": lease.run_no, "nonce": lease.nonce, "owner": lease.owner, **self._until(length, now)}
            found = ask(db, Q["reclaim"], values)
            if not found:
                raise self._lost(db, lease)
            return replace(lease, fence=int(found[0][0]), until=now + length)

        return self._files.write(work)

    # ---- writing --------------------------------------------------------------------------------------------------------------

    def append(self, lease: Lease, place: Place, batch: Batch, *, now: datetime) -> Appended | Behind:
        ready = _Ready(self, lease, place, batch, now)

        def work(db: apsw.Connection) -> Appended | Behind:
            if self._advance(db, lease, place, ready):
                self._write(db, ready)
                return Appended(ready.written.place)
            self._present(db, lease)
            others, end = self._tail(db, lease.run_no, lease.run_id, place)
            return Behind(others, end)

        return self._files.write(work)

    def append_locked(self, lease: Lease, place: Place, plan: Callable[[Sequence[Entry], Place], Batch], *,
                      now: datetime) -> tuple[Appended, Sequence[Entry]]:  # fmt: skip
        def work(db: apsw.Connection) -> tuple[Appended, Sequence[Entry]]:
            self._present(db, lease)
            others, end = self._tail(db, lease.run_no, lease.run_id, place)
            ready = _Ready(self, lease, end, plan(others, end), now)
            if not self._advance(db, lease, end, ready):
                raise InvariantViolated(f"the journal of {lease.run_id} changed under its own lock", run_id=lease.run_id)
            self._write(db, ready)
            return Appended(ready.written.place), others

        return self._files.write(work)

    @staticmethod
    def _advance(db: apsw.Connection, lease: Lease, place: Place, ready: _Ready) -> bool:
        """The conditional update: true where the lease is current and the journal as long as the writer saw it."""
        kind = "release" if ready.batch.head.release else "advance"
        db.execute(Q[f"{kind}_same"], ready.values)
        if not db.changes():
            db.execute(Q[kind], ready.values)
            if not db.changes():
                return False
        if ready.extend:
            db.execute(Q["extend"], {"run_no": lease.run_no, "until": ready.extend["until"], "until_at": ready.extend["until_at"]})
        return True

    def _write(self, db: apsw.Connection, ready: _Ready) -> None:
        """All that an append carries beside the head."""
        run_no, batch = ready.lease.run_no, ready.batch
        db.executemany(Q["add_entry"], ready.written.rows(run_no))
        _put_gates(db, run_no, batch.gates)
        _add_notices(db, run_no, batch.notices, ready.now)
        for child, written in ready.children:
            self._create(db, child, written, ready.now)
        for other in batch.others:
            self._tell(db, other)
        if batch.parent:
            self._tell(db, batch.parent)

    def _tell(self, db: apsw.Connection, entry: ParentEntry) -> None:
        """An entry for another run of this store; one that is no longer there (erased, moved) cannot be told."""
        if ask(db, Q["run_no"], {"run_id": entry.run_id}):
            self._outside(db, entry.run_id, entry.plan, None)

    def _present(self, db: apsw.Connection, lease: Lease) -> None:
        """Is the lease current? Raises LeaseLost."""
        found = ask(db, Q["lease"], {"run_no": lease.run_no})
        if not found or (found[0][0], found[0][1]) != (lease.fence, lease.nonce) or found[0][3] is None:
            raise self._lost(db, lease)

    @staticmethod
    def _lost(db: apsw.Connection, lease: Lease) -> LeaseLost:
        found = ask(db, Q["lease"], {"run_no": lease.run_no})
        if not found:
            return LeaseLost(f"{lease.run_id} is no longer there", run_id=lease.run_id)
        fence, _, _, holder, until = found[0]
        who = f"is held by {owners.short(holder)} until {iso(instant(until))}" if holder else "was released or cancelled"
        message = f"{lease.run_id} {who} (fence {fence}, ours {lease.fence})"
        return LeaseLost(message, hint=f"outlast show {lease.run_id}", run_id=lease.run_id)

    @staticmethod
    def _tail(db: apsw.Connection, run_no: int, run_id: str, after: Place, since_seq: int = 0) -> tuple[list[Entry], Place]:
        values = {"run_no": run_no, "since": max(after.seq, since_seq), "after": after.entries}
        found = rows.readable(lambda: ask(db, Q["load"], values), run_id)
        if not found:
            return [], after
        number, seq, digest = found[-1][0], found[-1][1], found[-1][8]
        return rows.entries(found, run_id), Place(number, seq, digest)

    # ---- from outside ---------------------------------------------------------------------------------------------------------

    def outside(self, run_id: str, plan: Plan, *, entry_id: str | None = None) -> tuple[Head, Any, bool]:
        def work(db: apsw.Connection) -> tuple[Head, Any, bool]:
            value, written = self._outside(db, run_id, plan, entry_id)
            return self._head(db, run_id), value, written

        return self._files.write(work)

    def _outside(self, db: apsw.Connection, run_id: str, plan: Plan, entry_id: str | None) -> tuple[Any, bool]:
        head = self._head(db, run_id)
        key = {"run_no": head.run_no}
        if entry_id is not None and ask(db, Q["seen"], {**key, "entry_id": entry_id}):
            return None, False
        before, place = self._since_message(db, head)
        now = self.now()
        out = plan(Tail(head, before, [g for g, _ in self._gates(db, head.run_no)], now))
        if not out.entries:
            return out.value, False
        entries = rows.stamped(out.entries, now)
        if entry_id is not None and all(e.entry_id != entry_id for e in entries):
            entries[0] = replace(entries[0], entry_id=entry_id)
        if out.fence:
            ask(db, Q["outside_fence"], key)
        status = out.status or head.status
        written = rows.Written(run_id, place, entries, fence=0, status=status)
        db.execute(Q["outside"], {**key, "n": len(written), "seq": written.place.seq, "now": ms(now)})
        if out.spent is not None:
            db.execute(Q["outside_spent"], {**key, **asdict(out.spent)})
        if status != head.status or (out.status is not None and out.reason != head.reason):
            db.execute(Q["outside_status"], {**key, "status": status, "reason": out.reason})
        if out.wake and not out.fence:
            db.execute(Q["outside_wake"], {**key, "now": ms(now), "fresh": out.fresh})
        db.executemany(Q["add_entry"], written.rows(head.run_no))
        _put_gates(db, head.run_no, out.gates)
        _add_notices(db, head.run_no, out.notices, now)
        for other in out.others:
            self._tell(db, other)
        return out.value, True

    def _since_message(self, db: apsw.Connection, head: Head) -> tuple[Run, Place]:
        """The run folded from its last message that is not the model's on (texts that wait may be older than an answer), and the journal's end."""
        since = head.seq
        while True:
            values = {"run_no": head.run_no, "since": since, "after": 0}
            found = rows.readable(lambda values=values: ask(db, Q["load"], values), head.run_id)  # type: ignore[misc]  # a default binds it
            if not found:
                raise InvariantViolated(f"run {head.run_id} has no entries", hint="outlast store check", run_id=head.run_id)
            entries = rows.entries(found, head.run_id)
            first = entries[0]
            if since <= 1 or not (isinstance(first, MessageAdded) and first.message["role"] == "assistant"):
                break
            since -= 1
        run = Run(
            head.run_id, agent=head.agent, agent_version=head.agent_version, tags=head.tags,
            started_by=head.started_by, parent_run_id=head.parent_run_id, parent_call_id=head.parent_call_id, entries=found[0][0] - 1,
            seq=found[0][1] - isinstance(first, MessageAdded))  # fmt: skip
        return fold(run, entries), Place(found[-1][0], found[-1][1], found[-1][8])

    # ---- reading --------------------------------------------------------------------------------------------------------------

    def load(self, run_no: int, *, after: Place = Place(), since_seq: int = 0) -> tuple[list[Entry], Place]:  # noqa: B008 - a frozen value
        try:
            return self._files.read(lambda db: self._tail(db, run_no, f"number {run_no}", after, since_seq))
        except Refused as e:
            raise rows.erased(self._name(run_no)) from e

    def _name(self, run_no: int) -> str:
        [(_, run_id)] = self._files.read(lambda db: ask(db, Q["ids_of"], {"numbers": _json([run_no])}))
        return str(run_id)

    def head(self, run_id: str) -> Head:
        return self._files.read(lambda db: self._head(db, run_id))

    def _head(self, db: apsw.Connection, run_id: str) -> Head:
        found = ask(db, Q["head"], {"run_id": run_id})
        if not found:
            raise RunNotFound(f"there is no run {run_id!r} in {self.url}", hint="outlast runs", run_id=run_id)
        return self._as_heads(found)[0]

    def _as_heads(self, found: Sequence[rows.Row]) -> list[Head]:
        boot, boot_now = self._boot(), self._boot_clock()
        dead: dict[str, bool] = {}

        def held(row: rows.Row) -> bool:
            who, until, of_boot = rows.lease(row)
            if who is None or until is None or until <= boot_now or of_boot != boot:
                return False
            if who not in dead:
                dead[who] = self._dead(who)
            return not dead[who]

        return [rows.head(row, held=held(row)) for row in found]

    def heads(self, where: RunFilter) -> list[Head]:
        unfinished = where.unfinished or (where.status is not None and where.status not in ENDED)
        query = Q["heads_stuck" if where.stuck else "heads_unfinished" if unfinished else "heads"]
        values = {
            "status": where.status, "agent": where.agent, "tags": _json(dict(where.tags)),
            "since": ms(where.since) if where.since else -_END_OF_TIME, "limit": where.limit, "before_at": _END_OF_TIME,
            "before_id": ""}  # fmt: skip

        def work(db: apsw.Connection) -> list[Head]:
            if where.before is not None:
                last = self._head(db, where.before)
                values.update(before_at=ms(last.created_at), before_id=last.run_id)
            return self._as_heads(db.execute(query, values).fetchall())

        return self._files.read(work)

    def unfinished(self) -> list[str]:
        return self._files.read(lambda db: [run_id for (run_id,) in ask(db, Q["unfinished"])])

    def unfinished_page(self, *, after: Head | None = None, limit: int = _PAGE) -> list[Unfinished]:
        values = {"after_at": ms(after.created_at) if after else -_END_OF_TIME, "after_id": after.run_id if after else "", "limit": limit}

        def work(db: apsw.Connection) -> list[Unfinished]:
            heads = self._as_heads(ask(db, Q["unfinished_page"], values))
            numbers = {"numbers": _json([head.run_no for head in heads])}
            return rows.unfinished(heads, ask(db, Q["ran_by"], numbers), ask(db, Q["tails"], numbers))

        return self._files.read(work)

    def pending(self, *, agents: Sequence[str], driver: str = BUILT_IN,
                within: timedelta = timedelta(seconds=60)) -> tuple[int, datetime | None]:  # fmt: skip
        until = ms(self.now() + within)

        def work(db: apsw.Connection) -> tuple[int, datetime | None]:
            counts = [
                ask(db, Q[query], {"driver": driver, "agent": agent, "until": until})[0]
                for agent in agents for query in ("pending_due", "pending_held")]  # fmt: skip
            instants = [at for _, at in counts if at is not None]
            return sum(n for n, _ in counts), instant(min(instants)) if instants else None

        return self._files.read(work)

    def gates(self, run_id: str) -> list[tuple[GateRow, datetime | None]]:
        return self._files.read(lambda db: self._gates(db, self._head(db, run_id).run_no))

    @staticmethod
    def _gates(db: apsw.Connection, run_no: int) -> list[tuple[GateRow, datetime | None]]:
        return [rows.gate(row) for row in ask(db, Q["gates"], {"run_no": run_no})]

    def inbox(self, *, role: str | None, agent: str | None, tags: Mapping[str, str],
              limit: int) -> list[tuple[Head, GateRow, datetime | None]]:  # fmt: skip
        values = {"role": role, "agent": agent, "tags": _json(dict(tags)), "limit": limit}

        def work(db: apsw.Connection) -> list[tuple[Head, GateRow, datetime | None]]:
            found = ask(db, Q["inbox"], values)
            heads = self._as_heads([row[: rows.HEAD] for row in found])
            return [(head, *rows.gate(row[rows.HEAD :])) for head, row in zip(heads, found, strict=True)]

        return self._files.read(work)

    def stuck(self, *, limit: int = 1000) -> list[Stuck]:
        found = self._files.read(lambda db: ask(db, Q["stuck"], {"limit": limit}))
        return [Stuck(run_id, status, reason, datetime.fromisoformat(since), command) for run_id, status, reason, since, command in found]

    # ---- the clock of the gates, and who is told ----------------------------------------------------------------------------

    def due_gates(self, *, limit: int = 1000) -> list[str]:
        now = ms(self.now())
        return self._files.read(lambda db: [run_id for (run_id,) in ask(db, Q["gates_due"], {"now": now, "limit": limit})])

    def claim_notices(self, targets: Sequence[str], *, limit: int = 50, hold: timedelta = timedelta(seconds=60)) -> list[DueNotice]:
        now = self.now()
        due = {"now": ms(now), "targets": _json(list(targets)), "limit": limit}
        if not targets or not self._files.read(lambda db: ask(db, Q["notices_due"], {**due, "limit": 1})):
            return []

        def work(db: apsw.Connection) -> list[DueNotice]:
            taken = []
            for (rowid,) in ask(db, Q["notices_due"], due):
                db.execute(Q["notice_take"], {"rowid": rowid, "until": ms(now + hold)})
                found = ask(db, Q["notice"], {"rowid": rowid})
                taken += [self._due_notice(row) for row in found]
            return taken

        return self._files.write(work)

    def _due_notice(self, row: rows.Row) -> DueNotice:
        gate, notified_at = rows.gate(row[7 + rows.HEAD :])
        [head] = self._as_heads([row[7 : 7 + rows.HEAD]])
        run_no, notice_id, target, kind, text, tries, created_at = row[:7]
        return DueNotice(run_no, notice_id, target, kind, text, tries, instant(created_at), head, gate, notified_at)

    def notice_done(self, notice: DueNotice, *, error: str | None = None, again: timedelta | None = None) -> None:
        now = self.now()
        key = {"run_no": notice.run_no, "notice_id": notice.notice_id, "target": notice.target}
        next_at = rows.maybe_ms(now + again if again is not None else None)

        def work(db: apsw.Connection) -> None:
            if error is not None:
                db.execute(Q["notice_failed"], {**key, "error": error, "next_try_at": next_at})
                return
            db.execute(Q["notice_sent"], {**key, "now": ms(now)})
            db.execute(Q["gate_notified"], {"run_no": notice.run_no, "gate_id": notice.gate.gate_id, "now": ms(now)})

        self._files.write(work)

    def notice_targets(self, run_id: str, gate_id: str) -> list[str]:
        return self._files.read(
            lambda db: [t for (t,) in ask(db, Q["notice_targets"], {"run_no": self._head(db, run_id).run_no, "gate_id": gate_id})]
        )

    def journal(self, run_id: str, *, after: int = 0, limit: int | None = None) -> Iterator[JournalRow]:
        run_no = self.head(run_id).run_no
        return self._pages(run_no, after, limit)

    def _pages(self, run_no: int, after: int, limit: int | None) -> Iterator[JournalRow]:
        since = 0
        while limit is None or limit > 0:
            values = {"run_no": run_no, "since": since, "after": after, "limit": min(_PAGE, limit if limit is not None else _PAGE)}
            page = self._files.read(partial(ask, query=Q["journal"], values=values))
            yield from map(rows.journal, page)
            if len(page) < values["limit"]:
                return
            after, since = page[-1][0], page[-1][1]
            limit = None if limit is None else limit - len(page)

    def ends(self) -> Iterator[tuple[str, int, str]]:
        after = ""
        while page := self._files.read(lambda db, after=after: ask(db, Q["ends"], {"after": after, "limit": _PAGE})):  # type: ignore[misc]  # a default binds it
            yield from page
            after = page[-1][0]

    def digest_at(self, run_id: str, entry_no: int) -> str | None:
        found = self._files.read(lambda db: ask(db, Q["digest_at"], {"run_id": run_id, "entry_no": entry_no}))
        return str(found[0][0]) if found else None

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        end = time.monotonic() + timeout_s
        pause, last = _POLL_S
        while True:
            with self._changed:
                own = self._own_commits
            version = self._files.version()
            left = end - time.monotonic()
            if seen is None or version != seen or left <= 0:
                return version
            with self._changed:
                if self._own_commits == own:
                    self._changed.wait(min(pause, left))
            pause = min(pause * 1.5, last)

    def _committed(self) -> None:
        with self._changed:
            self._own_commits += 1
            self._changed.notify_all()

    def check(self, *, mounts: Path = Path("/proc/mounts")) -> list[tuple[str, str, str]]:
        return check.findings(self._files, mounts)


class _Ready:
    """A batch made ready before the lock is taken: rows with their digests, and the values of the head's update."""

    __slots__ = ("batch", "children", "extend", "lease", "now", "values", "written")

    def __init__(self, store: SQLiteStore, lease: Lease, place: Place, batch: Batch, now: datetime) -> None:
        head = batch.head
        self.lease, self.batch, self.now = lease, batch, now
        self.written = rows.Written(lease.run_id, place, batch.entries, fence=lease.fence, status=head.status)
        if self.written.place.seq != batch.seq:
            what = f"{lease.run_id}: the batch ends at checkpoint {batch.seq}, its entries at {self.written.place.seq}"
            raise InvariantViolated(what, run_id=lease.run_id)
        self.children = [(child, store._first(child, now)) for child in batch.children]
        self.extend = store._until(batch.extend_until, now) if batch.extend_until is not None else None
        self.values: dict[str, Any] = {
            "run_no": lease.run_no, "fence": lease.fence, "nonce": lease.nonce, "entries": place.entries, "n": len(self.written),
            "seq": batch.seq, "agent_version": head.agent_version, "model_calls": head.model_calls, "input_tokens": head.input_tokens,
            "output_tokens": head.output_tokens, "cache_read_tokens": head.cache_read_tokens, "cache_write_tokens": head.cache_write_tokens,
            "cost_usd": head.cost_usd, "progress": batch.progress, "now": ms(now), "status": head.status, "reason": head.reason,
            "wake_at": rows.maybe_ms(head.wake_at), "needs": head.needs}  # fmt: skip


def _put_gates(db: apsw.Connection, run_no: int, gates: Sequence[GateRow]) -> None:
    for gate in gates:
        db.execute(Q["put_gate"], rows.gate_values(run_no, gate))


def _add_notices(db: apsw.Connection, run_no: int, notices: Sequence[NewNotice], now: datetime) -> None:
    for n in notices:
        values = {"run_no": run_no, "notice_id": n.notice_id, "target": n.target, "gate_id": n.gate_id, "kind": n.kind, "text": n.text}
        db.execute(Q["add_notice"], {**values, "now": ms(now)})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


__all__ = ["SQLiteStore", "StoreError", "boot_ms"]
