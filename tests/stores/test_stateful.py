"""Any sequence of calls on a store, against a model of it in plain Python. What fails is cut down to a short list of calls.

The model knows what the contract says and nothing of SQL: who holds a run, under which fence, until when; which entries stand; who must be refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outlast.core import run as r
from outlast.errors import CommitUnknown, LeaseLost, RunBusy
from outlast.settings import parse_store
from outlast.stores.base import Appended, Batch, Behind, Lease, NewHead, NewRun, Outside, Place, Store
from outlast.stores.postgres import PostgresStore
from outlast.stores.sqlite import SQLiteStore
from support.postgres import Server

LEASE_S = 30
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
LONG = os.environ.get("OUTLAST_TESTS") == "long"
EXAMPLES = 2000 if LONG else 40
RUNS = st.sampled_from(["run-1", "run-2"])
OWNERS = st.sampled_from(["host/boot/ns/1/1", "host/boot/ns/2/2", "host/boot/ns/3/3"])
COMMITS = st.sampled_from(["", "", "", "before", "after"])  # where its answer is lost, if at all


@dataclass
class World:
    """Clocks, deaths and lost answers, as the store is given them."""

    now: datetime = datetime(2026, 3, 2, 9, tzinfo=UTC)
    dead: set[str] = field(default_factory=set)
    lose: str = ""

    def point(self, name: str) -> None:
        if self.lose and name == f"commit.{self.lose}":
            self.lose = ""
            raise CommitUnknown("the answer was lost")


@dataclass
class Known:
    """A run as the model has it."""

    texts: list[str]  # what was said, in order: what stands
    ids: set[str] = field(default_factory=set)
    holder: str | None = None
    nonce: str = ""
    fence: int = 0
    until: datetime = LONG_AGO
    attempts: int = 0
    due: bool = True


@dataclass(frozen=True)
class Held:
    """A lease as its holder has it, and how far it has read."""

    lease: Lease
    place: Place


class Stores(RuleBasedStateMachine):
    """One store; any number of workers and people."""

    make: ClassVar[Any]
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.store: Store = type(self).make(self.world)
        self.runs: dict[str, Known] = {}
        self.words = 0

    def teardown(self) -> None:
        self.store.close()

    # ---- the model ------------------------------------------------------------------------------------------------------------

    def over(self, run: Known) -> bool:
        return run.holder is None or self.world.now >= run.until or run.holder in self.world.dead

    def mine(self, lease: Lease) -> bool:
        run = self.runs[lease.run_id]
        return run.holder is not None and (run.fence, run.nonce) == (lease.fence, lease.nonce)

    def took(self, lease: Lease, owner: str) -> None:
        run = self.runs[lease.run_id]
        assert lease.fence == run.fence + 1, "a claim takes the next fence"
        assert lease.taken_over == (run.holder is not None)
        run.attempts += run.holder is not None
        assert lease.attempts == run.attempts
        run.fence, run.nonce, run.holder, run.until = lease.fence, lease.nonce, owner, self.world.now + timedelta(seconds=LEASE_S)

    def held(self, lease: Lease) -> Held:
        return Held(lease, self.store.load(lease.run_no)[1])

    def word(self) -> str:
        self.words += 1
        return f"w{self.words}"

    # ---- starting and taking --------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.start("run-1")

    @rule(run_id=RUNS)
    def start(self, run_id: str) -> None:
        entries = [r.RunStarted("agent"), r.MessageAdded({"role": "user", "content": "go"})]
        _, lease, created = self.store.start(NewRun(run_id, "agent", entries))
        assert created == (run_id not in self.runs)
        assert lease is None
        self.runs.setdefault(run_id, Known([]))

    @rule(target=leases, owner=OWNERS, run_id=RUNS)
    def claim_one(self, owner: str, run_id: str) -> Any:
        if run_id not in self.runs:
            return self.held_by_nobody()
        if not self.over(self.runs[run_id]):
            with pytest.raises(RunBusy) as busy:
                self.store.claim_run(run_id, owner, lease_s=LEASE_S)
            assert busy.value.owner == self.runs[run_id].holder
            return self.held_by_nobody()
        lease = self.store.claim_run(run_id, owner, lease_s=LEASE_S)
        self.took(lease, owner)
        return self.held(lease)

    @rule(target=leases, owner=OWNERS)
    def claim(self, owner: str) -> Any:
        self.store.reap()
        for run in self.runs.values():
            if run.holder in self.world.dead:
                run.until = min(run.until, self.world.now)
        wanted = {run_id for run_id, run in self.runs.items() if self.over(run) and (run.holder is not None or run.due)}
        leases = self.store.claim(owner, agents=["agent"], limit=5, lease_s=LEASE_S)
        assert {lease.run_id for lease in leases} == wanted
        for lease in leases:
            self.took(lease, owner)
        return self.held(leases[0]) if leases else self.held_by_nobody()

    def held_by_nobody(self) -> Held:
        """A lease that nobody can have: of a claim that was refused."""
        return Held(Lease(1, "run-1", "agent", 0, "never", "nobody", self.world.now), Place(2, 1))

    # ---- holding --------------------------------------------------------------------------------------------------------------

    @rule(target=leases, held=consumes(leases), lose=COMMITS, release=st.booleans())
    def append(self, held: Held, lose: str, release: bool) -> Held:
        lease, run = held.lease, self.runs[held.lease.run_id]
        text, now = self.word(), self.store.now()
        entry = r.stored(replace(r.TextSent(text), at=now))
        head = NewHead("running", None, release=release, wake_at=now if release else None)
        batch = Batch([entry], head, seq=1, progress=True)
        self.world.lose = lose
        try:
            answer = self.store.append(lease, held.place, batch, now=now)
        except LeaseLost:
            assert not self.mine(lease), "a holder was told that it lost its lease"
            return held
        except CommitUnknown:
            if not self.mine(lease):  # a server commits a refusal too, and its answer can be lost like any other
                if run.nonce == lease.nonce:  # given back, and nobody took it since: whoever gave it back may take it again
                    return self.settle(held, text, stood=False, release=release)
                with pytest.raises(LeaseLost):
                    self.store.reclaim(lease, lease_s=LEASE_S)
                return held
            return self.settle(held, text, stood=lose == "after" and held.place.entries == 2 + len(run.texts), release=release)
        finally:
            self.world.lose = ""
        assert self.mine(lease), "an append of a lease that somebody else took over stands"
        if isinstance(answer, Behind):
            assert answer.place.entries == 2 + len(run.texts) > held.place.entries
            return Held(lease, answer.place)
        assert held.place.entries == 2 + len(run.texts), "an append stands although the journal grew"
        self.stands(run, text, release=release)
        return Held(lease, answer.place)

    def stands(self, run: Known, text: str, *, release: bool) -> None:
        run.texts.append(text)
        run.attempts = 0
        if release:
            run.holder, run.due = None, True

    def settle(self, held: Held, text: str, *, stood: bool, release: bool) -> Held:
        """After an unknown commit: take the row, then read."""
        run = self.runs[held.lease.run_id]
        if stood:
            self.stands(run, text, release=release)
        lease = self.store.reclaim(held.lease, lease_s=LEASE_S)
        run.fence += 1
        assert lease.fence == run.fence
        run.holder, run.until = lease.owner, self.world.now + timedelta(seconds=LEASE_S)
        entries, place = self.store.load(lease.run_no, after=held.place)
        ours = [e for e in entries if isinstance(e, r.TextSent) and e.content == text]
        assert len(ours) == stood
        return Held(lease, place)

    @rule(held=leases)
    def renew(self, held: Held) -> None:
        mine = self.mine(held.lease)
        [peeked] = self.store.peek([held.lease])
        [renewed] = self.store.renew([held.lease], lease_s=LEASE_S)
        assert peeked.held == renewed.held == mine
        if mine:
            run = self.runs[held.lease.run_id]
            run.until = max(run.until, self.world.now + timedelta(seconds=LEASE_S))

    @rule(held=consumes(leases))
    def release(self, held: Held) -> None:
        mine = self.mine(held.lease)
        self.store.release(held.lease)
        if mine:
            run = self.runs[held.lease.run_id]
            run.holder, run.due = None, True

    @rule(target=leases, held=consumes(leases))
    def append_under_the_lock(self, held: Held) -> Held:
        text, now = self.word(), self.store.now()
        entry = r.stored(replace(r.TextSent(text), at=now))
        batch = Batch([entry], NewHead("running", None), seq=1, progress=True)
        try:
            answer, others = self.store.append_locked(held.lease, held.place, lambda entries, place: batch, now=now)
        except LeaseLost:
            assert not self.mine(held.lease)
            return held
        assert self.mine(held.lease)
        run = self.runs[held.lease.run_id]
        assert len(others) == 2 + len(run.texts) - held.place.entries
        self.stands(run, text, release=False)
        assert isinstance(answer, Appended)
        return Held(held.lease, answer.place)

    # ---- from outside ---------------------------------------------------------------------------------------------------------

    @rule(run_id=RUNS, entry_id=st.sampled_from(["a", "b", None]), lose=COMMITS)
    def send(self, run_id: str, entry_id: str | None, lose: str) -> None:
        run = self.runs.get(run_id)
        if run is None:
            return
        text = self.word()
        known = entry_id in run.ids
        self.world.lose = "" if known else lose
        try:
            written = self.store.outside(run_id, lambda tail: Outside([r.TextSent(text, entry_id=entry_id)]), entry_id=entry_id)[2]
        except CommitUnknown:
            written = lose == "after"
        finally:
            self.world.lose = ""
        assert not (written and known), "the same entry stands twice"
        if written:
            run.texts.append(text)
            run.due = True
            run.ids |= {entry_id} if entry_id else set()

    @rule(run_id=RUNS)
    def take_the_fence(self, run_id: str) -> None:
        """What a cancel does."""
        run = self.runs.get(run_id)
        if run is None:
            return
        text = self.word()
        self.store.outside(run_id, lambda tail: Outside([r.TextSent(text)], fence=True, wake=False))
        run.texts.append(text)
        run.fence, run.holder, run.nonce, run.due = run.fence + 1, None, "", False

    # ---- the world ------------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 29, 31]))
    def time_passes(self, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)

    @precondition(lambda self: len(self.world.dead) < 2)
    @rule(owner=OWNERS)
    def a_process_dies(self, owner: str) -> None:
        self.world.dead.add(owner)

    # ---- what always holds --------------------------------------------------------------------------------------------------------

    @invariant()
    def the_journal_is_what_was_said(self) -> None:
        for run_id, run in self.runs.items():
            entries, place = self.store.load(self.store.head(run_id).run_no)
            assert [e.content for e in entries if isinstance(e, r.TextSent)] == run.texts
            assert place.entries == 2 + len(run.texts)

    @invariant()
    def the_head_says_who_holds_it(self) -> None:
        for run_id, run in self.runs.items():
            head = self.store.head(run_id)
            assert (head.fence, head.entries, head.attempts) == (run.fence, 2 + len(run.texts), run.attempts)
            assert head.held == (not self.over(run))
            assert head.lease_owner == run.holder

    @invariant()
    def the_store_finds_nothing_wrong(self) -> None:
        assert self.store.check() == []


def in_memory(world: World) -> Store:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return SQLiteStore(
        ":memory:", clock=lambda: world.now, boot_clock=lambda: (world.now - start) // timedelta(milliseconds=1), boot=lambda: "boot",
        dead=lambda owner: owner in world.dead, point=world.point)  # fmt: skip


def on(server: Server) -> Callable[[World], Store]:
    """Of a Postgres server: a schema of its own for every example."""

    def make(world: World) -> Store:
        parsed = parse_store(server.url(schema=server.fresh_schema()))
        store = PostgresStore(
            parsed.url, schema=parsed.schema, clock=lambda: world.now, lease_clock=lambda: world.now, dead=lambda owner: owner in world.dead,
            point=world.point)  # fmt: skip
        store.migrate()
        return store

    return make


def does_what_the_model_does(make: Callable[[World], Store], examples: int) -> None:
    made = type("Example", (Stores,), {"make": staticmethod(make)})
    run_state_machine_as_test(
        made,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, database=None,
            phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False,
            derandomize=not LONG,
            suppress_health_check=list(HealthCheck)),
    )  # fmt: skip


def test_sqlite_does_what_the_model_does() -> None:
    does_what_the_model_does(in_memory, EXAMPLES)


def test_postgres_does_what_the_model_does(postgres: Server) -> None:
    does_what_the_model_does(on(postgres), max(EXAMPLES // 5, 1))  # each has a server's commits to wait for
