"""What a store is: plain blocking SQL, safe from any thread, one transaction per call.

The store knows rows, fences, leases and entries; it decides nothing about agents. What an entry from outside does is a pure function that
the caller hands in (`Plan`) and that runs under the lock of the run's row.

Rules
1. One append = one transaction = one fsync: entries, head, gates, notices, children.
2. An append is refused (`Behind`) unless the run's fence and nonce are the lease's and the journal is as long as the writer saw it.
3. Every transaction locks `runs` rows first, in order of run id, then gates. Instants that decide about a deadline are read after the lock.
4. An answer of COMMIT that is lost is `CommitUnknown`; `reclaim` settles it.
5. Only an append that releases its lease moves `wake_at` later.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from outlast.core.gate import GateRow
from outlast.core.run import Entry, Run, iso
from outlast.errors import Refused, RunBusy
from outlast.stores.owner import short

BUILT_IN = "built-in"  # runs.driver of our own worker
SCRIPT = "script"  # of runs that a program drives by hand
ENDED = ("done", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a journal ends: the writer's side of compare-and-append."""

    entries: int = 0
    seq: int = 0
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to one run until `until`: `fence` grows with every claim, `nonce` is random per claim."""

    run_no: int
    run_id: str
    agent: str
    fence: int
    nonce: str
    owner: str
    until: datetime  # for people; what counts is the store's lease clock
    attempts: int = 0  # claims in a row that found a lease nobody had released
    taken_over: bool = False  # this claim found one


@dataclass(frozen=True, slots=True)
class Head:
    """One row of `runs`, as read."""

    run_no: int
    run_id: str
    agent: str
    agent_version: str
    status: str
    reason: str | None
    entries: int
    seq: int
    model_calls: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    cost_usd: str | None
    wake_at: datetime | None
    driver: str
    needs: str | None
    lease_owner: str | None
    lease_until: datetime | None
    fence: int
    attempts: int
    tags: Mapping[str, str]
    started_by: str | None
    parent_run_id: str | None
    parent_call_id: str | None
    created_at: datetime
    updated_at: datetime
    held: bool = False  # a lease that is not over
    input_digest: str = ""  # of agent and first messages: the same start twice is one run


@dataclass(frozen=True, slots=True)
class NewHead:
    """What an append writes into `runs`. `release`: the lease is given back and `wake_at` set; otherwise both stay."""

    status: str
    reason: str | None
    agent_version: str = ""
    model_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cost_usd: str | None = None
    release: bool = False
    wake_at: datetime | None = None  # of a release
    needs: str | None = None  # of a release: what no worker so far had


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to be created: its first entries (RunStarted, messages) and head. Child runs are created in their parent's transaction."""

    run_id: str
    agent: str
    entries: Sequence[Entry]
    tags: Mapping[str, str] = field(default_factory=dict)
    driver: str = BUILT_IN
    started_by: str | None = None
    parent_run_id: str | None = None
    parent_call_id: str | None = None
    agent_version: str = ""
    input_digest: str = ""


@dataclass(frozen=True, slots=True)
class NewNotice:
    """Somebody is to be told, after the commit. `notice_id` is the same on every try."""

    notice_id: str
    gate_id: str
    kind: str  # opened, reminder, escalated, expired
    target: str
    text: str


@dataclass(frozen=True, slots=True)
class DueNotice:
    """A notice that this process has taken to deliver: nobody else sends it before its `hold` is over. `tries` counts this one."""

    run_no: int
    notice_id: str
    target: str
    kind: str
    text: str
    tries: int
    created_at: datetime
    head: Head
    gate: GateRow  # as it is now
    notified_at: datetime | None


@dataclass(frozen=True, slots=True)
class Stuck:
    """A row of the view `stuck`: why a run does not go on by itself, since when, and the one command that mends it."""

    run_id: str
    status: str
    reason: str
    since: datetime
    command: str


@dataclass(frozen=True, slots=True)
class Batch:
    """One append. `after` is the run with `entries` folded in; `gates` the final row of each gate that they touched."""

    entries: Sequence[Entry]
    head: NewHead
    seq: int  # of the last message once the entries stand
    gates: Sequence[GateRow] = ()
    children: Sequence[NewRun] = ()
    notices: Sequence[NewNotice] = ()
    extend_until: timedelta | None = None  # the lease lasts at least so much longer from now (an effect is about to begin)
    progress: bool = False  # a message, a result or a gate entry: `attempts` starts anew
    parent: ParentEntry | None = None  # a child's end, told to its parent in the same transaction
    others: Sequence[ParentEntry] = ()  # children that end with this run, in the same transaction


@dataclass(frozen=True, slots=True)
class ParentEntry:
    """An entry for another run, locked before this one: `plan` is worked out under that lock."""

    run_id: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Appended:
    """It stands. `place` is the journal's end now."""

    place: Place


@dataclass(frozen=True, slots=True)
class Behind:
    """Refused, nothing was written: others appended these first (oldest first). `place` is the journal's end now."""

    entries: Sequence[Entry]
    place: Place


@dataclass(frozen=True, slots=True)
class Tail:
    """What a plan sees under the lock: the head, the run folded from its last message on that is not the model's, and all its gates.

    Its calls, gates, queued texts (which may be older than the model's last answer) and end are right; its message list begins with that
    message, and its counters are not the run's (take them from `head`).
    """

    head: Head
    run: Run
    gates: Sequence[GateRow]
    now: datetime  # the store's clock, read after the lock


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that are added to a head's, and what all of the run costs with them (worked out under the lock; None: unknown)."""

    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    cost_usd: str | None


@dataclass(frozen=True, slots=True)
class Outside:
    """What an entry from outside changes. No entries: nothing is written."""

    entries: Sequence[Entry] = ()
    status: str | None = None  # None: as it is
    reason: str | None = None
    gates: Sequence[GateRow] = ()
    wake: bool = True  # wake_at = now, and `needs` is forgotten
    fresh: bool = False  # a person's word: `attempts` starts anew
    fence: bool = False  # cancel and move: fence + 1, lease cleared, wake_at empty
    others: Sequence[ParentEntry] = ()  # entries for other runs in the same transaction: cancelling goes down, a child's end goes up
    notices: Sequence[NewNotice] = ()
    spent: Spent | None = None  # by a child run that is over
    value: Any = None  # given back to the caller


Plan = Callable[[Tail], Outside]


@dataclass(frozen=True, slots=True)
class Renewed:
    """What a renewal found: the present fence and the journal's length. `held` false: the lease is gone, stop."""

    run_id: str
    held: bool
    fence: int
    entries: int


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One row of the journal as it stands, for checks, pages and exports."""

    entry_no: int
    seq: int
    kind: str
    body: str
    meta: str | None
    at: datetime
    by: str | None
    entry_id: str | None
    fence: int
    status: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An unfinished run as far as a deploy is concerned: its head, the entry that says by whose code it ran last, its rows since its last message."""

    head: Head
    ran_by: JournalRow
    rows: Sequence[JournalRow]


@dataclass(frozen=True, slots=True)
class RunFilter:
    status: str | None = None
    agent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    unfinished: bool = False
    stuck: bool = False
    since: datetime | None = None
    before: str | None = None  # a run id: the page after it
    limit: int = 50


def busy(head: Head, now: datetime) -> RunBusy:
    """Somebody holds it."""
    holder, until = head.lease_owner or "?", head.lease_until or now
    return RunBusy(
        f"{head.run_id} is driven by {short(holder)} until {iso(until)}", owner=holder, until=until, run_id=head.run_id,
        hint=f"outlast show {head.run_id}")  # fmt: skip


def driven_by_another(head: Head, driver: str) -> Refused:
    """It belongs to another driver. Only what waits can be moved, and never to or from a program's own loop."""
    if head.driver == SCRIPT:
        return Refused(
            f"{head.run_id} is driven by a program of its own",
            run_id=head.run_id,
            hint=f"that program goes on with app.open({head.run_id!r})",
        )
    hint = f"outlast move {head.run_id} --to {driver}"
    if driver == SCRIPT:
        hint = f"outlast resume {head.run_id}" if head.driver == BUILT_IN else f"outlast show {head.run_id}"
    return Refused(f"{head.run_id} is driven by {head.driver}", hint=hint, run_id=head.run_id)


class Store(Protocol):
    """Errors of every method: StoreError (nothing was written), CommitUnknown (it may have been), RunNotFound where a run id is given."""

    url: str  # without a password

    def now(self) -> datetime:
        """The store's wall clock, whole milliseconds, no I/O: never later than the clock that judges deadlines."""
        ...

    # ---- starting and taking runs -----------------------------------------------------------------------------------
    def start(self, new: NewRun, *, owner: str | None = None, lease_s: float = 30) -> tuple[Head, Lease | None, bool]:
        """Create a run, or find it there: (head, lease, created).

        `owner`: also lease it in the same commit, so that no worker can snatch it. Where the run is there already, nothing is written and
        there is no lease; the caller compares `input_digest`.
        """
        ...

    def claim(self, owner: str, *, agents: Sequence[str], limit: int = 1, lease_s: float = 30, driver: str = BUILT_IN,
              needs: Sequence[tuple[str, str]] = (), over: bool = True) -> list[Lease]:  # fmt: skip
        """Take up to `limit` runs of these agents whose `wake_at` has come and which nobody holds, oldest first, and then those whose lease is over.

        `needs`: (agent, needs) of parked runs that this worker can satisfy. `over` false: leave those whose lease is over (the store was lost
        a moment ago, and their holders lost it as well). fence + 1, a new nonce. One write transaction, none where
        nothing is due. Costs the same whatever the number of runs.
        """
        ...

    def claim_run(self, run_id: str, owner: str, *, lease_s: float = 30, driver: str | None = BUILT_IN) -> Lease:
        """Take this run, due or not. Raises RunBusy (owner, until) where its lease is not over, Refused where another driver has it.

        Here and in `claim` and `start`: a lease whose commit's answer was lost is found again by who asks again, not held until it runs out.
        """
        ...

    def due(self, *, agents: Sequence[str], driver: str, limit: int = 100, needs: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Run ids of this driver that are due (or whose lease is over) and that nobody holds: an engine is poked for them. Nothing is taken."""
        ...

    def drive_by(self, run_id: str, driver: str) -> Head:
        """Give a run that waits, and that nobody holds, to another driver. Raises Refused where it does not wait, RunBusy where it is held."""
        ...

    def parked(self, *, agents: Sequence[str], driver: str = BUILT_IN) -> list[tuple[str, str]]:
        """Distinct (agent, needs) of runs that wait for code."""
        ...

    def renew(self, leases: Sequence[Lease], *, lease_s: float = 30) -> list[Renewed]:
        """Renew all in one statement; the answers come in their order. Never shortens one.

        Needs only the nonce, which a reclaim keeps: a lease that ran out and that nobody took is renewed late.
        """
        ...

    def peek(self, leases: Sequence[Lease]) -> list[Renewed]:
        """What `renew` would find, without writing."""
        ...

    def release(self, lease: Lease) -> None:
        """Give a lease back unused: due at once, nothing else changes."""
        ...

    def mark(self, lease: Lease, head: NewHead) -> None:
        """Write only the head (status, reason, needs), under the fence: of a run whose journal cannot be read. Its gates are left as they are."""
        ...

    def reap(self) -> int:
        """End the leases whose process is provably dead or whose machine was started anew; how many. `claim` then takes them over."""
        ...

    def reclaim(self, lease: Lease, *, lease_s: float = 30) -> Lease:
        """After CommitUnknown: fence + 1 under our nonce. When it returns, what stands in the journal is settled.

        Raises LeaseLost where somebody else has the run: whether the append stood that gave it back says the fence of the journal's rows.
        """
        ...

    # ---- writing ------------------------------------------------------------------------------------------------------
    def append(self, lease: Lease, place: Place, batch: Batch, *, now: datetime) -> Appended | Behind:
        """Save a batch in one commit. Entries carry `at` already (`now`). Raises LeaseLost."""
        ...

    def append_locked(
        self, lease: Lease, place: Place, plan: Callable[[Sequence[Entry], Place], Batch], *, now: datetime
    ) -> tuple[Appended, Sequence[Entry]]:
        """The second try: lock the row, read what others appended after `place`, let `plan` work out the batch on it, write. (result, what others wrote)."""
        ...

    def outside(self, run_id: str, plan: Plan, *, entry_id: str | None = None) -> tuple[Head, Any, bool]:
        """An entry without a lease: (head afterwards, the plan's value, written). With an `entry_id` that the run has already: (head, None, False)."""
        ...

    # ---- reading --------------------------------------------------------------------------------------------------------
    def load(self, run_no: int, *, after: Place = Place(), since_seq: int = 0) -> tuple[list[Entry], Place]:
        """Entries after `after` (and with seq >= `since_seq`), oldest first, and the journal's end."""
        ...

    def head(self, run_id: str) -> Head: ...

    def heads(self, where: RunFilter) -> list[Head]:
        """Newest first (created_at, then run id); keyset pages by `before`."""
        ...

    def unfinished(self) -> list[str]:
        """Run ids, oldest first, from a covering partial index."""
        ...

    def unfinished_page(self, *, after: Head | None = None, limit: int = 500) -> list[Unfinished]:
        """Unfinished runs as above, oldest first, those behind `after`: three statements a page, whatever the length of their journals."""
        ...

    def pending(
        self, *, agents: Sequence[str], driver: str = BUILT_IN, within: timedelta = timedelta(seconds=60)
    ) -> tuple[int, datetime | None]:
        """For `until_idle`: how many runs of these agents are held by somebody, due, or due within that time; and the earliest instant."""
        ...

    def gates(self, run_id: str) -> list[tuple[GateRow, datetime | None]]:
        """Open ones first, oldest first; with the instant at which somebody was first told."""
        ...

    def inbox(
        self, *, role: str | None, agent: str | None, tags: Mapping[str, str], limit: int
    ) -> list[tuple[Head, GateRow, datetime | None]]:
        """Open gates of kind approval, verification, budget: soonest deadline first, those without one last, then oldest first."""
        ...

    def stuck(self, *, limit: int = 1000) -> list[Stuck]:
        """Rows of the view `stuck`, longest first; a run may have several."""
        ...

    # ---- the clock of the gates, and who is told ----------------------------------------------------------------------
    def due_gates(self, *, limit: int = 1000) -> list[str]:
        """Ids of the runs with an open gate whose `next_at` has come, earliest first, by a partial index."""
        ...

    def claim_notices(self, targets: Sequence[str], *, limit: int = 50, hold: timedelta = timedelta(seconds=60)) -> list[DueNotice]:
        """Take up to `limit` notices for these targets that are due, oldest first: `tries` + 1, due again after `hold`. No write where none is."""
        ...

    def notice_done(self, notice: DueNotice, *, error: str | None = None, again: timedelta | None = None) -> None:
        """It was delivered (then its gate's `notified_at` is set, the first time), or not: `error`, tried again after `again`; None: never."""
        ...

    def notice_targets(self, run_id: str, gate_id: str) -> list[str]:
        """Who was to be told of this gate so far."""
        ...

    def journal(self, run_id: str, *, after: int = 0, limit: int | None = None) -> Iterator[JournalRow]:
        """Rows as they stand, entry_no > `after`."""
        ...

    def ends(self) -> Iterator[tuple[str, int, str]]:
        """(run id, entries, digest of the last one in hex) of every run, by run id: to be kept elsewhere, and compared."""
        ...

    def digest_at(self, run_id: str, entry_no: int) -> str | None:
        """The digest of that entry in hex; None: there is no such run or entry."""
        ...

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        """Block until something outside of this process was committed, or `timeout_s` is over; gives a token to pass in next time."""
        ...

    def check(self) -> list[tuple[str, str, str]]:
        """Findings as (where, what, remedy); empty: all is well."""
        ...

    def close(self) -> None: ...


_EMPTY = hashlib.sha256(b"").digest()


def genesis(run_id: str) -> bytes:
    """What the digest chain of a run begins with."""
    return hashlib.sha256(run_id.encode()).digest()


def chain(previous: bytes, *, entry_no: int, seq: int, kind: str, at_ms: int, by: str | None, entry_id: str | None, fence: int, status: str,
          meta: str | bytes | None, body: str | bytes) -> bytes:  # fmt: skip
    """The digest of an entry: SHA-256 over the one before, what stands in its columns, and the SHA-256 of by, entry_id, meta and body.

    `meta` or `body` as bytes is already a digest: of an erased entry only that is left, and the chain still verifies.
    """
    sha = hashlib.sha256(previous)
    sha.update(f"{entry_no}|{seq}|{kind}|{at_ms}|{fence}|{status}|".encode())
    for part in (by, entry_id, meta, body):
        sha.update(part if isinstance(part, bytes) else hashlib.sha256(part.encode()).digest() if part else _EMPTY)
    return sha.digest()


def blank(text: str) -> str:
    """What stands in the place of an erased body or meta: its SHA-256. No body that is written has this form."""
    return text if _BLANK.fullmatch(text) else f'{{"erased": "{hashlib.sha256(text.encode()).hexdigest()}"}}'


def as_chained(text: str) -> str | bytes:
    """A body or meta as `chain` takes it: of an erased one its digest."""
    found = _BLANK.fullmatch(text) if len(text) == _BLANK_LENGTH else None
    return bytes.fromhex(found[1]) if found else text


def is_blank(text: str) -> bool:
    return len(text) == _BLANK_LENGTH and _BLANK.fullmatch(text) is not None


_BLANK = re.compile(r'\{"erased": "([0-9a-f]{64})"\}')
_BLANK_LENGTH = len('{"erased": ""}') + 64
