"""The store on Postgres: `base.Store` as transactions of one or two messages each.

Rules
1. An append is one message: BEGIN, the settings, the conditional update with all it carries, COMMIT. So is every other write that needs no
   look in between. What a plan decides takes two: lock and read; write and COMMIT.
2. Every transaction locks rows of `run` first, in order of run id (a child sorts after its parent), then gates.
3. Leases and deadlines run on the server's clock; our clock is never ahead of it. A lease lasts at least one lease from the server's start
   on: after a restart the holders come back before anybody takes over.
4. Every call ends within its limit, a third of the shortest lease seen and at most 10 s, whatever the network does. Until then what surely
   wrote nothing is tried again (a restart, a lost connection, a standby, a deadlock), unless this process never reached the server.
5. A lost answer of COMMIT is `CommitUnknown`. A start, a claim of one run and an entry from outside settle it themselves: each locks what the
   lost one had locked, and looks whether its own mark stands.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg

from outlast.core.gate import GateRow
from outlast.core.run import EPOCH, FORMAT, Entry, MessageAdded, Run, fold, instant, iso, ms
from outlast.errors import CommitUnknown, InvariantViolated, LeaseLost, Refused, RunNotFound, UsageError
from outlast.stores import audit
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
from outlast.stores.postgres import schema as schemas
from outlast.stores.postgres.care import Care
from outlast.stores.postgres.clock import ServerClock
from outlast.stores.postgres.connections import Connections, Row, Statement, Tx
from outlast.stores.postgres.failures import Full, Late, Standby, passing
from outlast.stores.postgres.listening import Listener
from outlast.stores.sqlite import rows

_T = TypeVar("_T")
_LIMIT_S = 10.0  # the most that a call may take: a third of the usual lease, so that a renewal can fail once and still come in time
_LEAST_S = 0.5  # and the least, however short the lease
_PAUSE_S = (0.02, 0.5)  # between tries: at first, at last
_END_OF_TIME = 2**62  # ms; after every instant
_PAGE = 500  # rows read at once
_RESTORE = "restore a backup, keeping this database"
_MS = timedelta(milliseconds=1)


class PostgresStore(Care):
    """Runs in one schema of a Postgres database. Nothing is opened before the first call; the schema is made by `migrate` only.

    Args:
        url: `postgresql://…`; beside what libpq takes, `allow_async=1` (go on where the server's synchronous_commit is off) and `listen_url`
            (the server itself, where `url` is a pooler's).
        schema: of our tables; nothing else may be in it.
        shown: the url as it may be printed; default: without its password.
        clock: tests: replaces the server's clock for deadlines; aware UTC.
        lease_clock: tests: replaces it for leases.
        dead: is the process of that lease owner provably gone?
        point: called as "commit.before" and "commit.after" around every COMMIT.
        limit_s: tests: the most that a call may take.
    """

    def __init__(self, url: str, *, schema: str = "outlast", shown: str | None = None, clock: Callable[[], datetime] | None = None,
                 lease_clock: Callable[[], datetime] | None = None, dead: Callable[[str], bool] = owners.provably_dead,
                 point: Callable[[str], None] = lambda name: None, limit_s: float = _LIMIT_S) -> None:  # fmt: skip
        given, options = _options(url)
        self.url = _without(shown, "listen_url") if shown is not None else _shown(given, schema)
        self._clock, self._lease_clock, self._dead, self._limit_s = clock, lease_clock, dead, limit_s
        self._lease_ms = 30_000
        self._server = ServerClock()
        self._connections = Connections(
            given, schema, self.url, allow_async=options.get("allow_async", "") not in ("", "0"), heard=self._server.heard, point=point)  # fmt: skip
        self._speaker = self._connections.speaker
        self._listener = Listener(self._connections, schema, options.get("listen_url"), limit_s)
        self._wake: Statement = ("wake", {"channel": schema})
        self._unsettled: dict[str, float] = {}  # nonces of claims whose answer was lost, each with the instant until which it matters
        self._lock = threading.Lock()

    def migrate(self) -> tuple[int, int]:
        """Make the schema, or bring it up to date: (version before, version now). Safe with many at once, and with a kill at any instant."""
        try:
            return schemas.migrate(self._connections)
        except (psycopg.Error, Late, Standby, Full) as e:
            raise self._speaker.error(e) from e

    def migration_sql(self) -> str:
        """What `migrate` runs in an empty database."""
        return schemas.statements(self._connections.schema)

    def now(self) -> datetime:
        """No I/O, but for the very first time: somebody must ask the server once."""
        if self._clock:
            now = self._clock()
            return now.replace(microsecond=now.microsecond // 1000 * 1000)
        at = self._server.now_ms()
        if at is None:
            self._read(lambda tx: tx.commit())
            at = self._server.now_ms()
            assert at is not None
        return EPOCH + at * _MS

    def close(self) -> None:
        """Closes the connections; a later call opens them again."""
        self._listener.close()
        self._connections.close()

    # ---- asking ---------------------------------------------------------------------------------------------------------------

    def _until(self) -> float:
        return time.monotonic() + self._limit_s

    def _leased(self, lease_s: float) -> int:
        """In ms; from now on no call takes longer than a third of it."""
        self._limit_s = min(self._limit_s, max(lease_s / 3, _LEAST_S))
        self._lease_ms = int(lease_s * 1000)
        return self._lease_ms

    def _write(self, work: Callable[[Tx], _T], *, until: float | None = None) -> _T:
        return self._do(work, until if until is not None else self._until(), reads=False)

    def _read(self, work: Callable[[Tx], _T]) -> _T:
        return self._do(work, self._until(), reads=True)

    def _do(self, work: Callable[[Tx], _T], until: float, *, reads: bool) -> _T:
        """One transaction; again, from its beginning, while it surely wrote nothing and the cause may pass before the time is over."""
        pause, last = _PAUSE_S
        while True:
            tx: Tx | None = None
            try:
                with self._connections.lend(until) as wire:
                    tx = Tx(self._connections, wire, limit_s=max(until - time.monotonic(), 0), reads=reads)
                    try:
                        return work(tx)
                    finally:
                        tx.end()
            except UnicodeEncodeError as e:
                raise UsageError(f"not a text that can be stored: {e.object!r}") from e
            except (psycopg.Error, Late, Standby, Full) as e:
                unknown = tx is not None and tx.unknown(e)
                if unknown or not passing(e) or not self._connections.answered or time.monotonic() + pause >= until:
                    raise self._speaker.error(e, committing=unknown) from e
            threading.Event().wait(pause)
            pause = min(pause * 1.6, last)

    def _times(self, lease_ms: int | None = None) -> dict[str, Any]:
        """What the query `times` takes. `lease_ms`: of the lease that is asked for; else the last one that was."""
        return {
            "now": ms(self._clock()) if self._clock else None, "lease_now": ms(self._lease_clock()) if self._lease_clock else None,
            "lease_ms": lease_ms if lease_ms is not None else self._lease_ms}  # fmt: skip

    # ---- starting and taking runs ---------------------------------------------------------------------------------------------

    def start(self, new: NewRun, *, owner: str | None = None, lease_s: float = 30) -> tuple[Head, Lease | None, bool]:
        nonce = secrets.token_hex(8)
        times = self._times(self._leased(lease_s))
        key = {"run_id": new.run_id, "nonce": nonce}

        def work(tx: Tx) -> tuple[Head, Lease | None, bool]:
            made: list[Statement] = [("start", {"run": _json({**_new_run(new, self.now()), "nonce": nonce})})]
            made.append(("take_started", {**key, **times, "owner": owner}) if owner else self._wake)
            _, _, started, heads = tx.commit(*made, ("started", key), ("head", {"run_id": new.run_id, **times}))
            lease = self._lease(started[0], nonce, owner) if started and owner else None
            return self._heads_of(heads)[0], lease, bool(started)

        return self._settled(work)

    def _settled(self, work: Callable[[Tx], _T]) -> _T:
        """Again after a lost answer: `work` begins by locking what the lost one had locked, and knows its own mark."""
        until = self._until()
        while True:
            try:
                return self._write(work, until=until)
            except CommitUnknown:
                if time.monotonic() >= until:
                    raise

    def _lease(self, row: Row, nonce: str, owner: str) -> Lease:
        run_no, run_id, agent, fence, attempts, until, taken_over = row
        return Lease(
            run_no=run_no, run_id=run_id, agent=agent, fence=fence, nonce=nonce, owner=owner, until=instant(until), attempts=attempts,
            taken_over=bool(taken_over))  # fmt: skip

    def claim(self, owner: str, *, agents: Sequence[str], limit: int = 1, lease_s: float = 30, driver: str = BUILT_IN,
              needs: Sequence[tuple[str, str]] = (), over: bool = True) -> list[Lease]:  # fmt: skip
        nonce = secrets.token_hex(8)
        known = [(agent, need) for agent, need in needs if agent in agents]
        values = {
            **self._times(self._leased(lease_s)), "driver": driver, "agents": list(agents), "limit": limit, "owner": owner, "nonce": nonce,
            "need_agents": [agent for agent, _ in known], "needs": [need for _, need in known], "over": over}  # fmt: skip
        with self._lock:
            lost = list(self._unsettled)
        query, more = ("claimed", {"nonces": lost}) if lost else ("claim", {})
        try:
            found = self._write(lambda tx: tx.one(query, {**values, **more}, commit=True))
        except CommitUnknown:
            with self._lock:
                self._unsettled[nonce] = time.monotonic() + lease_s
            raise
        leases = [self._lease(row, nonce, owner) for row in found]
        if lost:
            self._forget(lost)
            if not leases:
                return self.claim(owner, agents=agents, limit=limit, lease_s=lease_s, driver=driver, needs=needs, over=over)
        return leases

    def _forget(self, nonces: Sequence[str]) -> None:
        """A COMMIT that was still under way when we looked lands within its own limits; the lease that it made then runs out."""
        with self._lock:
            for nonce in nonces:
                self._unsettled.pop(nonce, None)

    def claim_run(self, run_id: str, owner: str, *, lease_s: float = 30, driver: str | None = BUILT_IN) -> Lease:
        nonce = secrets.token_hex(8)
        times = self._times(self._leased(lease_s))

        def work(tx: Tx) -> Lease:
            _, heads, ours = tx.ask(
                ("lock", {"run_ids": [run_id]}), ("head", {"run_id": run_id, **times}), ("started", {"run_id": run_id, "nonce": nonce})
            )
            head = self._only(heads, run_id)
            if ours:  # the answer to an earlier try was lost
                return self._lease(ours[0], nonce, owner)
            if driver is not None and head.driver != driver:
                raise driven_by_another(head, driver)
            if head.held:
                raise busy(head, self.now())
            values = {**times, "run_no": head.run_no, "owner": owner, "nonce": nonce, "held": head.lease_owner is not None}
            return self._lease(tx.one("take", values, commit=True)[0], nonce, owner)

        return self._settled(work)

    def due(self, *, agents: Sequence[str], driver: str, limit: int = 100, needs: Sequence[tuple[str, str]] = ()) -> list[str]:
        known = [(agent, need) for agent, need in needs if agent in agents]
        values = {
            **self._times(), "driver": driver, "agents": list(agents), "limit": limit, "need_agents": [agent for agent, _ in known],
            "needs": [need for _, need in known]}  # fmt: skip
        return [run_id for (run_id,) in self._read(lambda tx: tx.one("due", values, commit=True))]

    def drive_by(self, run_id: str, driver: str) -> Head:
        times = self._times()

        def work(tx: Tx) -> Head:
            _, heads = tx.ask(("lock", {"run_ids": [run_id]}), ("head", {"run_id": run_id, **times}))
            head = self._only(heads, run_id)
            if head.held:
                raise busy(head, self.now())
            if head.driver == driver:
                return head
            if not head.status.startswith("waiting_"):
                raise Refused(
                    f"{run_id} is {head.status}: it can be moved only while it waits", run_id=run_id, hint=f"outlast show {run_id}"
                )
            moved = {"run_no": head.run_no, "driver": driver, "now": ms(self.now())}
            return self._only(tx.commit(("drive_by", moved), ("head", {"run_id": run_id, **times}))[1], run_id)

        return self._write(work)

    def parked(self, *, agents: Sequence[str], driver: str = BUILT_IN) -> list[tuple[str, str]]:
        found = self._read(lambda tx: tx.one("parked", {"driver": driver, "agents": list(agents)}, commit=True))
        return sorted((agent, needs) for agent, needs in found)

    def renew(self, leases: Sequence[Lease], *, lease_s: float = 30) -> list[Renewed]:
        if not leases:
            return []
        numbers = [lease.run_no for lease in leases]
        values = {**self._times(self._leased(lease_s)), "numbers": numbers, "nonces": [lease.nonce for lease in leases]}
        renewed, lengths = self._write(lambda tx: tx.commit(("renew", values), ("lengths", {"numbers": numbers})))
        held, there = {tuple(row) for row in renewed}, {row[0]: row[1:] for row in lengths}
        return [Renewed(lease.run_id, (lease.run_no, lease.nonce) in held, *there.get(lease.run_no, (0, 0))) for lease in leases]

    def peek(self, leases: Sequence[Lease]) -> list[Renewed]:
        if not leases:
            return []
        numbers = [lease.run_no for lease in leases]
        there = {row[0]: row[1:] for row in self._read(lambda tx: tx.one("holders_of", {"numbers": numbers}, commit=True))}

        def found(lease: Lease) -> Renewed:
            fence, entries, nonce, holder = there.get(lease.run_no, (0, 0, None, None))
            return Renewed(lease.run_id, nonce == lease.nonce and holder is not None, fence, entries)

        return [found(lease) for lease in leases]

    def release(self, lease: Lease) -> None:
        values = {"run_no": lease.run_no, "fence": lease.fence, "nonce": lease.nonce, "now": ms(self.now())}
        self._write(lambda tx: tx.one("give_back", values, commit=True))

    def mark(self, lease: Lease, head: NewHead) -> None:
        values = {
            "run_no": lease.run_no, "fence": lease.fence, "nonce": lease.nonce, "status": head.status, "reason": head.reason,
            "needs": head.needs, "now": ms(self.now())}  # fmt: skip
        if not self._write(lambda tx: tx.one("mark", values, commit=True)):
            raise self._lost(lease)

    def reap(self) -> int:
        holders = self._read(lambda tx: tx.one("holder", {}, commit=True))
        gone = [who for (who,) in holders if self._dead(who)]
        return len(self._write(lambda tx: tx.one("bury", {"owners": gone}, commit=True))) if gone else 0

    def reclaim(self, lease: Lease, *, lease_s: float = 30) -> Lease:
        values = {**self._times(self._leased(lease_s)), "run_no": lease.run_no, "nonce": lease.nonce, "owner": lease.owner}
        found = self._write(lambda tx: tx.one("reclaim", values, commit=True))
        if not found:
            raise self._lost(lease)
        return replace(lease, fence=found[0][0], until=instant(found[0][1]))

    # ---- writing --------------------------------------------------------------------------------------------------------------

    def append(self, lease: Lease, place: Place, batch: Batch, *, now: datetime) -> Appended | Behind:
        statement, end = self._ready(lease, place, batch, now)
        more = [self._wake] if batch.children else []
        others = _in_order(batch)

        def work(tx: Tx) -> bool:
            if not others:
                return bool(tx.commit(statement, *more)[0][0][0])
            first = [lease.run_id, *(other.run_id for other in others)]
            _, [(written,)] = tx.ask(("lock", {"run_ids": first}), statement)
            if written:
                tx.commit(*self._tell(tx, others), self._wake)
            return bool(written)

        return Appended(end) if self._write(work) else self._refused(lease, place)

    def _ready(self, lease: Lease, place: Place, batch: Batch, now: datetime) -> tuple[Statement, Place]:
        """The statement that appends, and where the journal ends after it."""
        head = batch.head
        written = rows.Written(lease.run_id, place, batch.entries, fence=lease.fence, status=head.status)
        if written.place.seq != batch.seq:
            what = f"{lease.run_id}: the batch ends at checkpoint {batch.seq}, its entries at {written.place.seq}"
            raise InvariantViolated(what, run_id=lease.run_id)
        carried = {
            **_rows(written, batch.gates, batch.notices), "n": len(written), "seq": batch.seq, "now": ms(now), "status": head.status,
            "reason": head.reason, "agent_version": head.agent_version, "model_calls": head.model_calls, "input_tokens": head.input_tokens,
            "output_tokens": head.output_tokens, "cache_read_tokens": head.cache_read_tokens, "cache_write_tokens": head.cache_write_tokens,
            "cost_usd": head.cost_usd, "progress": batch.progress, "release": head.release, "wake_at": rows.maybe_ms(head.wake_at),
            "needs": head.needs, "extend_until": self._extend(batch), "children": [_new_run(child, now) for child in batch.children]}  # fmt: skip
        values = {"run_no": lease.run_no, "fence": lease.fence, "nonce": lease.nonce, "entries": place.entries, "batch": _json(carried)}
        return ("append", values), written.place

    def _extend(self, batch: Batch) -> int | None:
        if batch.extend_until is None:
            return None
        lease_now = self._lease_clock() if self._lease_clock else EPOCH + (self._server.now_ms() or ms(self.now())) * _MS
        return ms(lease_now + batch.extend_until)

    def _refused(self, lease: Lease, place: Place) -> Behind:
        """Why an append wrote nothing, read by a transaction that is younger than it. Raises LeaseLost."""

        def look(tx: Tx) -> tuple[list[Row], list[Row]]:
            present, tail = tx.commit(("lease", {"run_no": lease.run_no}), self._after(lease.run_no, place))
            return present, tail

        present, tail = self._read(look)
        self._present(present, lease)
        return Behind(*self._tail(tail, lease.run_id, place))

    @staticmethod
    def _after(run_no: int, place: Place, since_seq: int = 0) -> Statement:
        return ("load", {"run_no": run_no, "since": max(place.seq, since_seq), "after": place.entries})

    @staticmethod
    def _tail(found: Sequence[Row], run: str, after: Place) -> tuple[list[Entry], Place]:
        return rows.entries(found, run), Place(found[-1][0], found[-1][1], found[-1][8]) if found else after

    @staticmethod
    def _present(found: Sequence[Row], lease: Lease) -> None:
        """Is the lease current? Raises LeaseLost."""
        if not found or (found[0][0], found[0][1]) != (lease.fence, lease.nonce) or found[0][3] is None:
            raise _lost(found, lease)

    def _lost(self, lease: Lease) -> LeaseLost:
        return _lost(self._read(lambda tx: tx.one("lease", {"run_no": lease.run_no}, commit=True)), lease)

    def append_locked(self, lease: Lease, place: Place, plan: Callable[[Sequence[Entry], Place], Batch], *,
                      now: datetime) -> tuple[Appended, Sequence[Entry]]:  # fmt: skip
        def work(tx: Tx) -> tuple[Appended, Sequence[Entry]]:
            _, present, tail = tx.ask(
                ("lock_family", {"run_id": lease.run_id}), ("lease", {"run_no": lease.run_no}), self._after(lease.run_no, place)
            )
            self._present(present, lease)
            others, end = self._tail(tail, lease.run_id, place)
            batch = plan(others, end)
            statement, after = self._ready(lease, end, batch, now)
            wake = [self._wake] if batch.children or batch.parent or batch.others else []
            if told := _in_order(batch):
                [[(written,)]] = tx.ask(statement)
                tx.commit(*self._tell(tx, told), *wake)
            else:
                [(written,)] = tx.commit(statement, *wake)[0]
            if not written:
                raise InvariantViolated(f"the journal of {lease.run_id} changed under its own lock", run_id=lease.run_id)
            return Appended(after), others

        return self._write(work)

    # ---- from outside ---------------------------------------------------------------------------------------------------------

    def outside(self, run_id: str, plan: Plan, *, entry_id: str | None = None) -> tuple[Head, Any, bool]:
        times = self._times()
        sent: list[tuple[Any, Mapping[str, Any]]] = []  # (value, its last entry) of a try whose answer was lost

        def work(tx: Tx) -> tuple[Head, Any, bool]:
            first = ("lock_family", {"run_id": run_id})
            if sent:
                _, stands, heads = tx.ask(first, ("stands", sent[-1][1]), ("head", {"run_id": run_id, **times}))
                if stands:
                    return self._only(heads, run_id), sent[-1][0], True
            value, statements, mark = self._outside(tx, run_id, plan, entry_id, first)
            if not statements:
                return self._only(tx.one("head", {"run_id": run_id, **times}), run_id), value, False
            assert mark is not None
            sent[:] = [(value, mark)]
            *_, heads = tx.commit(*statements, self._wake, ("head", {"run_id": run_id, **times}))
            return self._only(heads, run_id), value, True

        return self._settled(work)

    def _outside(self, tx: Tx, run_id: str, plan: Plan, entry_id: str | None,
                 first: Statement) -> tuple[Any, list[Statement], Mapping[str, Any] | None]:  # fmt: skip
        """Lock, read and let the plan decide: (its value, what is to be sent, how the last entry is found again)."""
        times, key = self._times(), {"run_id": run_id}
        _, heads, seen, tail, gates, [(now_ms,)] = tx.ask(
            first, ("head", {**key, **times}), ("seen", {**key, "entry_id": entry_id}), ("since_message", key), ("gates", key),
            ("clock", times))  # fmt: skip
        head, now = self._only(heads, run_id), instant(now_ms)
        if seen:
            return None, [], None
        before, place = _since_message(head, tail)
        out = plan(Tail(head, before, [rows.gate(row)[0] for row in gates], now))
        if not out.entries:
            return out.value, [], None
        entries = rows.stamped(out.entries, now)
        if entry_id is not None and all(e.entry_id != entry_id for e in entries):
            entries[0] = replace(entries[0], entry_id=entry_id)
        status, reason = out.status or head.status, head.reason
        if status != head.status or out.status is not None:
            reason = out.reason
        written = rows.Written(run_id, place, entries, fence=0, status=status)
        carried = {
            **_rows(written, out.gates, out.notices), "n": len(written), "seq": written.place.seq, "now": ms(now), "status": status,
            "reason": reason, "wake": out.wake and not out.fence, "fresh": out.fresh, "fence": out.fence}  # fmt: skip
        statements: list[Statement] = [("outside", {"run_no": head.run_no, "batch": _json(carried)})]
        if out.spent is not None:
            statements.append(("outside_spent", {"run_no": head.run_no, **asdict(out.spent)}))
        others = sorted(out.others, key=lambda other: other.run_id)
        if others:
            tx.ask(*statements)
            statements = [*self._tell(tx, others)] or [("clock", times)]
        end = written.place
        return out.value, statements, {"run_no": head.run_no, "seq": end.seq, "entry_no": end.entries, "digest": end.digest}

    def _tell(self, tx: Tx, others: Sequence[ParentEntry]) -> list[Statement]:
        """Entries for other runs of this store; one that is no longer there (erased, moved) cannot be told."""
        statements: list[Statement] = []
        for other in others:
            try:
                statements += self._outside(tx, other.run_id, other.plan, None, ("lock", {"run_ids": [other.run_id]}))[1]
            except RunNotFound as e:
                if e.run_id != other.run_id:
                    raise
        return statements

    # ---- reading --------------------------------------------------------------------------------------------------------------

    def load(self, run_no: int, *, after: Place = Place(), since_seq: int = 0) -> tuple[list[Entry], Place]:  # noqa: B008 - a frozen value
        found = self._read(lambda tx: tx.commit(self._after(run_no, after, since_seq)))[0]
        try:
            return self._tail(found, f"number {run_no}", after)
        except Refused as e:
            [(_, run_id)] = self._read(lambda tx: tx.one("ids_of", {"numbers": [run_no]}, commit=True))
            raise rows.erased(run_id) from e

    def head(self, run_id: str) -> Head:
        return self._only(self._read(lambda tx: tx.one("head", {"run_id": run_id, **self._times()}, commit=True)), run_id)

    def _only(self, found: Sequence[Row], run_id: str) -> Head:
        if not found:
            raise RunNotFound(f"there is no run {run_id!r} in {self.url}", hint="outlast runs", run_id=run_id)
        return self._heads_of(found)[0]

    def _heads_of(self, found: Sequence[Row]) -> list[Head]:
        dead: dict[str, bool] = {}

        def held(row: Row) -> bool:
            if not row[18]:
                return False
            if row[17] not in dead:
                dead[row[17]] = self._dead(row[17])
            return not dead[row[17]]

        return [rows.head(row, held=held(row)) for row in found]

    def heads(self, where: RunFilter) -> list[Head]:
        unfinished = where.unfinished or (where.status is not None and where.status not in ENDED)
        query = "heads_stuck" if where.stuck else "heads_unfinished" if unfinished else "heads"
        values = {
            **self._times(), "status": where.status, "agent": where.agent, "tags": _json(dict(where.tags)),
            "since": ms(where.since) if where.since else -_END_OF_TIME, "limit": where.limit, "before_at": _END_OF_TIME,
            "before_id": ""}  # fmt: skip

        def work(tx: Tx) -> list[Row]:
            if where.before is not None:
                last = self._only(tx.one("head", {"run_id": where.before, **self._times()}), where.before)
                values.update(before_at=ms(last.created_at), before_id=last.run_id)
            return tx.one(query, values, commit=True)

        return self._heads_of(self._read(work))

    def unfinished(self) -> list[str]:
        return [run_id for (run_id,) in self._read(lambda tx: tx.one("unfinished", {}, commit=True))]

    def unfinished_page(self, *, after: Head | None = None, limit: int = _PAGE) -> list[Unfinished]:
        values = {"after_at": ms(after.created_at) if after else -_END_OF_TIME, "after_id": after.run_id if after else "", "limit": limit}

        def work(tx: Tx) -> list[Unfinished]:
            heads = self._heads_of(tx.one("unfinished_page", {**values, **self._times()}))
            numbers = {"numbers": [head.run_no for head in heads]}
            ran_by, tails = tx.commit(("ran_by", numbers), ("tails", numbers))
            return rows.unfinished(heads, ran_by, tails)

        return self._read(work)

    def pending(self, *, agents: Sequence[str], driver: str = BUILT_IN,
                within: timedelta = timedelta(seconds=60)) -> tuple[int, datetime | None]:  # fmt: skip
        values = {"driver": driver, "agents": list(agents), "until": ms(self.now() + within)}
        [(count, first)] = self._read(lambda tx: tx.one("pending", values, commit=True))
        return count, rows.maybe_instant(first)

    def gates(self, run_id: str) -> list[tuple[GateRow, datetime | None]]:
        key = {"run_id": run_id}
        heads, found = self._read(lambda tx: tx.commit(("head", {**key, **self._times()}), ("gates", key)))
        self._only(heads, run_id)
        return [rows.gate(row) for row in found]

    def inbox(self, *, role: str | None, agent: str | None, tags: Mapping[str, str],
              limit: int) -> list[tuple[Head, GateRow, datetime | None]]:  # fmt: skip
        values = {**self._times(), "role": role, "agent": agent, "tags": _json(dict(tags)), "limit": limit}
        found = self._read(lambda tx: tx.one("inbox", values, commit=True))
        heads = self._heads_of([row[: rows.HEAD] for row in found])
        return [(head, *rows.gate(row[rows.HEAD :])) for head, row in zip(heads, found, strict=True)]

    def stuck(self, *, limit: int = 1000) -> list[Stuck]:
        found = self._read(lambda tx: tx.one("stuck", {"limit": limit}, commit=True))
        return [Stuck(run_id, status, reason, datetime.fromisoformat(since), command) for run_id, status, reason, since, command in found]

    # ---- the clock of the gates, and who is told ----------------------------------------------------------------------------

    def due_gates(self, *, limit: int = 1000) -> list[str]:
        values = {"now": ms(self.now()), "limit": limit}
        return [run_id for (run_id,) in self._read(lambda tx: tx.one("gates_due", values, commit=True))]

    def claim_notices(self, targets: Sequence[str], *, limit: int = 50, hold: timedelta = timedelta(seconds=60)) -> list[DueNotice]:
        now = self.now()
        values = {**self._times(), "now": ms(now), "targets": list(targets), "limit": limit, "until": ms(now + hold)}
        return [self._due_notice(row) for row in self._write(lambda tx: tx.one("notices_due", values, commit=True))] if targets else []

    def _due_notice(self, row: Row) -> DueNotice:
        gate, notified_at = rows.gate(row[7 + rows.HEAD :])
        [head] = self._heads_of([row[7 : 7 + rows.HEAD]])
        run_no, notice_id, target, kind, text, tries, created_at = row[:7]
        return DueNotice(run_no, notice_id, target, kind, text, tries, instant(created_at), head, gate, notified_at)

    def notice_done(self, notice: DueNotice, *, error: str | None = None, again: timedelta | None = None) -> None:
        now = self.now()
        key = {"run_no": notice.run_no, "notice_id": notice.notice_id, "target": notice.target}
        if error is not None:
            next_at = rows.maybe_ms(now + again if again is not None else None)
            self._write(lambda tx: tx.commit(("notice_failed", {**key, "error": error, "next_try_at": next_at})))
            return
        told = {"run_no": notice.run_no, "gate_id": notice.gate.gate_id, "now": ms(now)}
        self._write(lambda tx: tx.commit(("gate_notified", told), ("notice_sent", {**key, "now": ms(now)})))

    def notice_targets(self, run_id: str, gate_id: str) -> list[str]:
        self.head(run_id)
        return [t for (t,) in self._read(lambda tx: tx.one("notice_targets", {"run_id": run_id, "gate_id": gate_id}, commit=True))]

    # ---- the journal as it stands, changes, checks --------------------------------------------------------------------------

    def journal(self, run_id: str, *, after: int = 0, limit: int | None = None) -> Iterator[JournalRow]:
        return self._pages(self.head(run_id).run_no, after, limit)

    def _pages(self, run_no: int, after: int, limit: int | None) -> Iterator[JournalRow]:
        since = 0
        while limit is None or limit > 0:
            size = min(_PAGE, limit if limit is not None else _PAGE)
            values = {"run_no": run_no, "since": since, "after": after, "limit": size}
            page = self._page_of(values)
            yield from map(rows.journal, page)
            if len(page) < size:
                return
            after, since = page[-1][0], page[-1][1]
            limit = None if limit is None else limit - len(page)

    def _page_of(self, values: Mapping[str, Any]) -> list[Row]:
        return self._read(lambda tx: tx.one("journal", values, commit=True))

    def ends(self) -> Iterator[tuple[str, int, str]]:
        after = ""
        while page := self._read(lambda tx, after=after: tx.one("ends", {"after": after, "limit": _PAGE}, commit=True)):  # type: ignore[misc]  # a default binds it
            yield from page
            after = page[-1][0]

    def digest_at(self, run_id: str, entry_no: int) -> str | None:
        found = self._read(lambda tx: tx.one("digest_at", {"run_id": run_id, "entry_no": entry_no}, commit=True))
        return str(found[0][0]) if found else None

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        try:
            return self._listener.wait(seen, timeout_s)
        except (psycopg.Error, Late, Standby) as e:
            raise self._speaker.error(e) from e

    def check(self) -> list[tuple[str, str, str]]:
        return [*self._check_settings(), *self._check_runs()]

    def _check_settings(self) -> Iterator[audit.Finding]:
        settings, orphans = self._read(lambda tx: tx.commit(("check_settings", {}), ("check_orphans", {})))
        for name, setting in settings:
            if setting == "off":
                yield f"setting {name}", "is off: a crash of the server may lose or damage what it has confirmed", f"switch {name} on"
        for table, run_no in orphans:
            yield f"run number {run_no}", f"rows in {table} without a run", _RESTORE

    def _check_runs(self) -> Iterator[audit.Finding]:
        after = -1
        while page := self._heads_after(after):
            for run_no, run_id in page:
                yield from self._check_run(run_no, run_id)
            after = page[-1][0]

    def _heads_after(self, run_no: int) -> list[Row]:
        return self._read(lambda tx: tx.one("check_heads", {"after": run_no, "limit": _PAGE}, commit=True))

    def _check_run(self, run_no: int, run_id: str) -> Iterator[audit.Finding]:
        everything = {"run_no": run_no, "since": 0, "after": 0, "limit": None}
        heads, journal, gates = self._read(
            lambda tx: tx.commit(("check_head", {"run_no": run_no}), ("journal", everything), ("gates", {"run_id": run_id})))  # fmt: skip
        for head in heads:  # none: erased meanwhile
            yield from audit.run(
                run_id, audit.CheckedHead(*head), [rows.journal(row) for row in journal], [rows.gate(row)[0] for row in gates], _RESTORE
            )


def _lost(found: Sequence[Row], lease: Lease) -> LeaseLost:
    if not found:
        return LeaseLost(f"{lease.run_id} is no longer there", run_id=lease.run_id)
    fence, _, _, holder, until = found[0]
    who = f"is held by {owners.short(holder)} until {iso(instant(until))}" if holder else "was released or cancelled"
    message = f"{lease.run_id} {who} (fence {fence}, ours {lease.fence})"
    return LeaseLost(message, hint=f"outlast show {lease.run_id}", run_id=lease.run_id)


def _in_order(batch: Batch) -> list[ParentEntry]:
    """The other runs that an append speaks to, in the order in which their rows are locked."""
    return sorted([*batch.others, *([batch.parent] if batch.parent else [])], key=lambda other: other.run_id)


def _new_run(new: NewRun, now: datetime) -> dict[str, Any]:
    written = rows.Written(new.run_id, Place(), rows.stamped(new.entries, now), fence=0, status="running")
    return {
        **_rows(written, (), ()), "run_id": new.run_id, "agent": new.agent, "agent_version": new.agent_version, "n": len(written),
        "seq": written.place.seq, "driver": new.driver, "tags": _json(dict(new.tags)), "started_by": new.started_by,
        "parent_run_id": new.parent_run_id, "parent_call_id": new.parent_call_id, "input_digest": new.input_digest, "format": FORMAT,
        "now": ms(now)}  # fmt: skip


def _rows(written: rows.Written, gates: Sequence[GateRow], notices: Sequence[NewNotice]) -> dict[str, Any]:
    """As the schema's function `add_rows` takes them."""
    return {
        "entries": [
            (number, seq, kind, at, by, entry_id, digest.hex(), meta, body)
            for _, number, seq, kind, at, _, by, entry_id, _, digest, meta, body in written.rows(0)
        ],
        "gates": [rows.gate_values(0, gate)[1:] for gate in gates],
        "notices": [(n.notice_id, n.target, n.gate_id, n.kind, n.text) for n in notices],
    }


def _since_message(head: Head, found: Sequence[Row]) -> tuple[Run, Place]:
    """The run folded from its last message that is not the model's on (texts that wait may be older than an answer), and the journal's end."""
    if not found:
        raise InvariantViolated(f"run {head.run_id} has no entries", hint="outlast store check", run_id=head.run_id)
    starts = found[0][2] == MessageAdded.__name__
    run = Run(
        head.run_id, agent=head.agent, agent_version=head.agent_version, tags=head.tags, started_by=head.started_by,
        parent_run_id=head.parent_run_id, parent_call_id=head.parent_call_id, entries=found[0][0] - 1, seq=found[0][1] - starts)  # fmt: skip
    return fold(run, rows.entries(found, head.run_id)), Place(found[-1][0], found[-1][1], found[-1][8])


def _options(url: str) -> tuple[str, dict[str, str]]:
    """The url for psycopg, and what only we understand of it."""
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    ours = {name: value for name, value in query if name in ("allow_async", "listen_url")}
    kept = urlencode([(name, value) for name, value in query if name not in ours], quote_via=quote)
    return urlunsplit(parts._replace(query=kept)), ours


def _without(url: str, option: str) -> str:
    """Another url in it may hold another password."""
    parts = urlsplit(url)
    kept = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name != option]
    return urlunsplit(parts._replace(query=urlencode(kept, quote_via=quote, safe="*/")))


def _shown(url: str, schema: str) -> str:
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    user = user.partition(":")[0] + (":***" if ":" in user else "")
    query = [(name, "***" if "password" in name else value) for name, value in parse_qsl(parts.query, keep_blank_values=True)]
    return f"postgresql://{user}{at}{place}{parts.path}?{urlencode([*query, ('schema', schema)], quote_via=quote, safe='*/')}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


__all__ = ["PostgresStore"]
