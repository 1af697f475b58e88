"""One schedule: workers, people and faults on two or three runs, from one seed to a verdict.

First the faulty phase (deaths at crash points, pauses past the lease, commits without an answer, store errors, a slow and lossy wire, clocks
set forward and back, people who decide late, twice, differently, or exactly at the deadline), then a calm one in which everything must end.
What is simulated is the world; worker, drive, writer, fold and SQL are the ones that ship.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import combinations, count
from typing import Any

import apsw

from outlast import app
from outlast.app import Outlast
from outlast.core import run as r
from outlast.errors import CommitUnknown, LeaseLost, StoreError
from outlast.runtime import crashpoints, drive, notices, worker, writer
from outlast.runtime.leases import LOOK_S, Keeper, _Held
from outlast.stores import base, owner
from outlast.stores.sqlite import opening, rows
from outlast.stores.sqlite import store as sqlite_store
from outlast.stores.sqlite.connections import Connections
from outlast.stores.sqlite.failures import speaking
from outlast.stores.sqlite.group import Writer
from outlast.stores.sqlite.store import SQLiteStore
from outlast.testing.simulation import oracles, world
from outlast.testing.simulation.loop import ACT, LEASE, PROCESS, WORLD, Change, Choices, Crash, Loop, Process
from outlast.testing.simulation.people import People
from outlast.testing.simulation.world import CHECK, MODEL, NAMES, TOOL, Receivers, make_agents

START = datetime(2026, 3, 2, 9, tzinfo=UTC)
FAULTY_S, CALM_S, TAIL_S = 120.0, 4000.0, 40.0  # virtual seconds; the last: longer than any store call and any wire takes
LOOK_AGAIN_S = 300.0  # the longest time between two looks at what neither a commit nor an instant that stands in the store announced
NOTICED_S = 1.0  # until the others look whether a process is still there
BOOTED_MS = 1_000_000  # the machine was up so long
LEASE_S = 30.0
MAX_DEATHS, MAX_PAUSES = 6, 4
SMALL = 0.7  # of the schedules: one run, one turn; most of what can go wrong goes wrong there too, in a third of the time
RARE = ("wire", "tool.before", "check.before", "check.after")  # passed seldom, and worth a death

# What happens, and what it may happen in the middle of: each pair must have been met, and each two of the former in one schedule.
EVENTS = (
    "a death", "a process was paused past its lease", "an unknown commit stood", "an unknown commit did not stand", "a store error",
    "the clock was set back", "the clock was set forward", "a run was cancelled", "a text was sent", "a run was retried", "a worker was drained",
    "somebody said approved", "somebody said rejected", "an event was delivered", "a zombie's append was refused", "an append was behind",
)  # fmt: skip
UNSAVED = "a result is not saved"
OF_STATUS = {
    "waiting_for_approval": "a person is asked", "waiting_for_verification": "a call is in doubt", "waiting_for_timer": "a timer runs",
    "waiting_for_event": "an event is awaited"}  # fmt: skip
WINDOWS = (MODEL, TOOL, CHECK, UNSAVED, *OF_STATUS.values(), "a request is on the wire", "somebody is paused", "a death is not noticed")


class Broken(AssertionError):
    """An invariant does not hold; its name stands first."""


@dataclass(frozen=True)
class Mood:
    """Which faults this seed has, and how often: swarms, so that not everything fails at once."""

    crash: float = 0.0
    pause: float = 0.0
    unknown: float = 0.0
    store: float = 0.0
    wire: float = 0.0
    model: float = 0.0
    late: float = 0.0  # store calls that take long
    jumps: float = 0.0
    cancels: float = 0.0
    texts: float = 0.0
    drains: float = 0.0
    oddities: float = 0.0  # of people
    seen: bool = True  # a death can be proved: same host and boot
    lacks: str | None = None  # a tool that the first worker's code does not have

    @staticmethod
    def of(rng: random.Random) -> Mood:
        def some(*values: float) -> float:
            return rng.choice((0.0, *values))

        return Mood(
            crash=some(0.01, 0.03, 0.08), pause=some(0.001, 0.004), unknown=some(0.02, 0.06), store=some(0.03), wire=some(0.2, 0.5), model=some(0.15),
            late=some(0.1, 0.3), jumps=some(0.3), cancels=some(0.15), texts=some(0.3), drains=some(0.2), oddities=some(0.5, 0.9),
            seen=rng.random() < 0.7, lacks=rng.choice((None, None, None, "look", "pay", "reply")))  # fmt: skip


@cache
def _migrated() -> apsw.Connection:
    """One database in memory for all schedules of this process: statements are prepared once, and migrated is once for all."""
    return opening.writer(opening.MEMORY, 10, lambda name: None)


def _empty() -> apsw.Connection:
    """Nothing of an earlier schedule is left in it."""
    db = _migrated()
    for table in sorted(opening.TABLES):
        db.execute(f"DELETE FROM {table}")  # noqa: S608 - our own tables
    return db


class Connection(Connections):
    """One, in one thread: there is no fork and no second thread to look out for."""

    def write(self, work: Callable[[apsw.Connection], Any]) -> Any:
        return self._open().write(work)

    def read(self, work: Callable[[apsw.Connection], Any]) -> Any:
        with speaking(self.path):
            return work(self._open().db)

    def version(self) -> int:
        return self._open().commits


class Store(SQLiteStore):
    """The SQL that ships, in memory, with the world's clocks; what was acknowledged is remembered."""

    def __init__(self, sim: Schedule) -> None:
        super().__init__(":memory:", clock=sim.wall, boot_clock=sim.boot_ms, boot=lambda: "boot", dead=sim.is_dead, point=crashpoints.point)
        self.sim = sim
        self._db = _empty()
        self._parked: tuple[Any, list[tuple[str, str]]] = None, []
        self._written: tuple[base.Lease, Sequence[r.Entry]] | None = None  # by the append that is under way
        self._files = Connection(self.path, read_only=False, busy_s=10, point=crashpoints.point, committed=self._committed)
        self._files._writer = Writer(self._db, self.path, busy_s=10, point=crashpoints.point, committed=self._committed)

    def close(self) -> None:
        """The connection stays, for the next schedule."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        self._files._writer = None

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        version = self._files.version()
        if seen is None or seen < self.sim.work_since or timeout_s <= 0:
            return version
        return Change(self._files.version, LOOK_AGAIN_S)  # type: ignore[return-value]  # the loop turns it into one; not `timeout_s`: `worker.IDLE_S` wakes too

    def _committed(self) -> None:
        super()._committed()
        if self._written is not None:
            self.sim.saved(*self._written)
        self.sim.committed()

    def _write(self, db: apsw.Connection, ready: Any) -> None:
        super()._write(db, ready)
        self._written = ready.lease, ready.batch.entries

    @contextmanager
    def _appends(self) -> Iterator[None]:
        try:
            yield
        except LeaseLost:
            self.sim.see("a zombie's append was refused")
            raise
        finally:
            self._written = None

    def parked(self, *, agents: Sequence[str], driver: str = base.BUILT_IN) -> list[tuple[str, str]]:
        """It depends on what is stored alone, and every look of a worker asks: one answer between two commits."""
        key = (self._files.version(), tuple(agents), driver)
        if key != self._parked[0]:
            self._parked = key, super().parked(agents=agents, driver=driver)
        return self._parked[1]

    def append(self, lease: base.Lease, place: base.Place, batch: base.Batch, *, now: datetime) -> base.Appended | base.Behind:
        sim = self.sim
        self._may_fail()
        for entry in batch.entries:
            if isinstance(entry, r.CallStarted):
                sim.intended[lease.run_id, entry.call_id] = sim.loop.now
        with self._appends():
            answer = super().append(lease, place, batch, now=now)
        if isinstance(answer, base.Behind):
            sim.see("an append was behind")
        else:
            sim.acknowledged(lease, answer.place)
        return answer

    def append_locked(self, lease: base.Lease, place: base.Place, plan: Any, *, now: datetime) -> Any:
        with self._appends():
            answer = super().append_locked(lease, place, plan, now=now)
        self.sim.see("an append under the lock")
        self.sim.acknowledged(lease, answer[0].place)
        return answer

    def renew(self, leases: Sequence[base.Lease], *, lease_s: float = 30) -> list[base.Renewed]:
        self._may_fail()
        return super().renew(leases, lease_s=lease_s)

    def _may_fail(self) -> None:
        if self.sim.choices.chance(self.sim.mood.store):
            self.sim.see("a store error")
            raise StoreError("simulated: disk full")


@contextmanager
def _beside() -> Iterator[None]:
    """As on the keeper's own thread: its commits have names of their own."""
    crashpoints.beside()
    try:
        yield
    finally:
        crashpoints._here.beside = False


class LoopKeeper(Keeper):
    """Keeps leases on the loop of the schedule: the same rounds as the thread, in the process that holds them."""

    _task: asyncio.Task[None] | None = None

    def add(self, lease: base.Lease, news: Callable[[base.Renewed], None]) -> None:
        LEASE.set((lease.run_no, lease.nonce))  # of the drive that asks for it, and of all that it begins
        self._held[lease.run_no, lease.nonce] = _Held(lease, news)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._rounds())

    def remove(self, lease: base.Lease) -> None:
        super().remove(lease)
        process = PROCESS.get()
        process.unsaved = {(of, call_id) for of, call_id in process.unsaved if of != (lease.run_no, lease.nonce)}

    def close(self) -> None:
        self._held.clear()

    async def _rounds(self) -> None:
        loop, seen = asyncio.get_running_loop(), None
        assert isinstance(loop, Loop)
        renew_at = loop.now + self.lease_s / 3
        while True:
            held = dict(self._held)
            if not held:
                await asyncio.sleep(LOOK_S)
                renew_at = min(renew_at, loop.now + self.lease_s / 3)
                if not self._held:
                    return
                continue
            try:
                if loop.now >= renew_at:
                    renew_at = loop.now + self.lease_s / 3
                    with _beside():
                        found = self.store.renew([h.lease for h in held.values()], lease_s=self.lease_s)
                else:
                    if seen == self.store.wait_for_change(None, 0):
                        await loop.change(renew_at - loop.now)
                    seen = self.store.wait_for_change(None, 0)
                    found = self.store.peek([h.lease for h in held.values()])
                    await asyncio.sleep(LOOK_S)
            except StoreError:
                self.lost_at = loop.now
                pause = min(1.0, self.lease_s / 10)
                renew_at = loop.now + pause
                await asyncio.sleep(pause)
                continue
            for one, renewed in zip(held.values(), found, strict=True):
                one.news(renewed)


class _Inline:
    """For `Executor.submit` of late results."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def submit(self, work: Callable[..., Any], *args: Any) -> None:
        self.loop.call_soon(work, *args)

    def shutdown(self, *, wait: bool = True) -> None:
        pass


class Schedule:
    """Run it by calling it: gives the trace's hash, raises Broken."""

    def __init__(self, seed: int, kept: Mapping[int, int] | None = None) -> None:
        self.seed = seed
        scenario = random.Random(f"scenario-{seed}")  # noqa: S311 - from the seed alone, so that a cut schedule is about the same scene
        self.choices = Choices(seed, kept)
        self.reached: Counter[str] = Counter()
        self.pairs: Counter[tuple[str, str]] = Counter()  # (event, window), and events of one schedule
        self.unnoticed = 0  # deaths since the last claim
        self.mood = Mood()
        self.faulty_mood = Mood.of(scenario)
        small = scenario.random() < SMALL
        self.plans = {f"run-{n}": _plan(scenario, n, small=small) for n in range(1 if small else scenario.choice((1, 1, 2, 3)))}
        if any("forgetful" in text for text in self.plans.values()):  # how long a receiver remembers is not a matter of our clock
            self.faulty_mood = replace(self.faulty_mood, jumps=0.0)
        self.asks = any('"ask"' in text for text in self.plans.values())
        self.workers = scenario.choice((1, 2, 2, 2, 3))
        self.loop = Loop(self.choices, pause=self._pause_of, latency=self._latency)
        self.loop.problems = []
        self.receivers = Receivers(self)
        self.skew = timedelta(0)
        self.deaths = self.pauses = self.interruptions = 0
        self.orderly = 0  # drains and cancels: a model call under way is given up, and nothing is lost unseen
        self.fences: dict[int, tuple[int, str | None]] = {}  # run_no -> fence and nonce
        self.people: People
        self.over = False
        self.processes: dict[str, Process] = {}
        self.history: dict[int, list[bytes]] = {}  # run_no -> digests as they were seen
        self.last_row = 0  # of the entries seen
        self.wakes: list[tuple[int | None, int | None, bool]] = []  # of each run: due when (wall clock), held until (boot clock), parked
        self.work_since = 0  # the last commit that left something to be taken
        self.alarm: Any = None
        self.statuses: dict[int, str] = {}  # of the runs, after the last commit
        self.acked: dict[int, tuple[int, bytes]] = {}
        self.intended: dict[tuple[str, str], float] = {}
        self.ended_as: dict[str, str] = {}
        self._ends: dict[Process, asyncio.Future[None]] = {}
        self._tokens = count(1)
        self._world_context = copy_context()

    # ---- what the runtime is given instead of the machine -------------------------------------------------------------------

    def wall(self) -> datetime:
        return START + timedelta(milliseconds=round(self.loop.now * 1000)) + self.skew

    def boot_ms(self) -> int:
        return round(self.loop.now * 1000) + BOOTED_MS

    def is_dead(self, who: str) -> bool:
        process = self.processes.get(who)
        return process is not None and process.dead and self.faulty_mood.seen

    def _latency(self) -> float:
        return (0.0, 0.01, 0.4, 33.0)[self.choices.pick(4, self.mood.late)] if self.mood.late else 0.0

    def _pause_of(self, process: Process) -> float:
        if not self.mood.pause or self.pauses >= MAX_PAUSES or not (which := self.choices.pick(4, self.mood.pause)):
            return 0.0
        self.pauses += 1
        self.interruptions += 1
        self.see("a process was paused past its lease" if which > 1 else "a process was paused")
        return (0.0, 10.0, 40.0, 90.0)[which]

    def point(self, name: str) -> None:
        process, what = PROCESS.get(), name.partition(":")[0]
        if process.dead:
            raise Crash(name)
        self.loop.note(name, process.name)
        if what == "claim.after":
            self.unnoticed = 0
        elif what == "tool.before" and (call := asyncio.current_task()) is not None:
            ACT.set(call)
            process.acting.add(call)
        if process.faulty and self.deaths < MAX_DEATHS and self.choices.chance(self.mood.crash * (4 if what in RARE else 1)):
            self.reached[f"died at {what}"] += 1
            self.see("a death")
            self.unnoticed += 1
            self.deaths += 1
            self.die(process)
            raise Crash(name)
        if what in ("commit.before", "commit.after") and self.choices.chance(self.mood.unknown):
            self.see(f"an unknown commit {'stood' if what == 'commit.after' else 'did not stand'}")
            raise CommitUnknown("simulated: the answer was lost")

    def see(self, what: str) -> None:
        """Count it, and what it happened in the middle of."""
        self.reached[what] += 1
        if what in EVENTS:
            self.pairs.update((what, window) for window in self._windows())

    def _windows(self) -> set[str]:
        living = [process for process in self.processes.values() if not process.dead]
        found = {window for process in living for window in process.inside}
        if any(process.unsaved for process in living):
            found.add(UNSAVED)
        found.update(window for status, window in OF_STATUS.items() if status in self.statuses.values())
        if self.receivers.under_way:
            found.add("a request is on the wire")
        if self.loop.somebody_sleeps:
            found.add("somebody is paused")
        if self.unnoticed:
            found.add("a death is not noticed")
        return found

    def die(self, process: Process) -> None:
        self.loop.died(process)
        self.interruptions += 1
        self.in_world(NOTICED_S, self._rings)
        if (ended := self._ends.pop(process, None)) is not None and not ended.done():
            self.in_world(0.0, lambda: None if ended.done() else ended.set_result(None))

    def in_world(self, delay: float, act: Callable[[], Any]) -> None:
        self.loop.call_later(delay, act, context=self._world_context)

    # ---- oracles while it runs ------------------------------------------------------------------------------------------------

    def broken(self, invariant: str, why: str) -> None:
        self.loop.stop_with = self.loop.stop_with or Broken(f"{invariant}: {why}")  # whoever raised it, a tool say, must not swallow it
        raise self.loop.stop_with

    def committed(self) -> None:
        """After every commit: what stood before stands, nothing is missing between, and fences only grow."""
        oracles.growing(self)
        now, boot = round(self.wall().timestamp() * 1000), self.boot_ms()
        work = any(
            parked or (wake_at is not None and wake_at <= now) if until is None else until <= boot for wake_at, until, parked in self.wakes
        )
        if work:
            self.work_since = self.store._files.version()
        self.loop.changed(work=work)
        self.set_alarm()

    def set_alarm(self) -> None:
        """Idle workers look again when an instant has come that stands in the store, not every second: nothing can be due in between."""
        now = self.loop.now
        wall = round((START + self.skew).timestamp() * 1000)
        instants = [(wake_at - wall) / 1000 for wake_at, *_ in self.wakes if wake_at is not None]
        instants += [(until - BOOTED_MS) / 1000 for _, until, _ in self.wakes if until]
        if self.alarm is not None:
            self.alarm.cancel()
        coming = [at for at in instants if at > now]
        self.alarm = self.loop.call_at(min(coming) + 0.001, self._rings, context=self._world_context) if coming else None

    def _rings(self) -> None:
        """An instant has come, somebody died, or the clock was set: idle workers look."""
        self.loop.changed(work=True)
        self.set_alarm()

    def acknowledged(self, lease: base.Lease, place: base.Place) -> None:
        if place.digest:
            self.acked[lease.run_no] = max(self.acked.get(lease.run_no, (0, b"")), (place.entries, place.digest))

    @staticmethod
    def saved(lease: base.Lease, entries: Sequence[r.Entry]) -> None:
        """An append of a holder stands."""
        PROCESS.get().unsaved -= {((lease.run_no, lease.nonce), getattr(entry, "call_id", None)) for entry in entries}

    def begins(self, ctx: Any, args: dict[str, Any]) -> None:
        """A tool's first line."""
        PROCESS.get().acting.discard(ACT.get())
        oracles.may_begin(self, ctx, args)

    def check_pairs(self, messages: Any) -> None:
        oracles.paired(self, messages)

    def forget(self) -> None:
        """Let go of everything that still wants to run."""
        for process in [*self.processes.values(), WORLD]:
            process.ready.clear()
        self._ends.clear()
        self.loop.forget()

    # ---- processes ------------------------------------------------------------------------------------------------------------

    def app(self, process: Process) -> Outlast:
        lacks = self.faulty_mood.lacks if process.name == "w0" and self.mood is self.faulty_mood else None
        app = Outlast(":memory:", agents=make_agents(lacks, asks=self.asks), deps=self.receivers, lease=timedelta(seconds=LEASE_S))
        app._engine_made = None  # nor what a pyproject.toml says
        app._target = "nowhere:app"  # in memory no child could find it; not to be looked for
        app._opened = (os.getpid(), self.store, LoopKeeper(self.store, LEASE_S), _Inline(self.loop))  # type: ignore[assignment]  # what is used of an executor
        return app

    async def _keep_worker(self, name: str) -> None:
        """A process manager: starts a worker anew whenever it is gone."""
        for born in count():
            process = Process(name, born, faulty=True)
            self.processes[process.owner] = process
            ended: asyncio.Future[None] = self.loop.create_future()
            self._ends[process] = ended
            context = copy_context()
            context.run(PROCESS.set, process)
            task = self.loop.create_task(self.app(process).work(concurrency=2, grace=timedelta(seconds=5)), context=context)
            task.add_done_callback(lambda t, ended=ended: None if ended.done() else ended.set_result(None), context=self._world_context)  # type: ignore[misc]  # a default binds it
            if self.choices.chance(self.mood.drains):
                self.in_world(5.0 + 40.0 * self.choices.pick(4), lambda task=task, process=process: self._drain(task, process))  # type: ignore[misc]  # likewise
            await ended
            if not process.dead:
                self.die(process)
            if self.over:
                return
            await asyncio.sleep((0.5, 5.0, 50.0)[self.choices.pick(3)])

    def _drain(self, task: asyncio.Task[None], process: Process) -> None:
        if not task.done() and not process.dead:
            self.see("a worker was drained")
            self.interruptions += 1
            self.orderly += 2  # it held at most two runs
            task.cancel()

    async def _jumps(self) -> None:
        while self.mood.jumps:
            await asyncio.sleep(20.0)
            if self.choices.chance(self.mood.jumps):
                self.jump((-400, -5, 5, 60, 400)[self.choices.pick(5)])

    def jump(self, by: int) -> None:
        """Somebody sets the wall clock."""
        self.see(f"the clock was set {'back' if by < 0 else 'forward'}")
        self.skew += timedelta(seconds=by)
        self._rings()

    # ---- the schedule -----------------------------------------------------------------------------------------------------------

    def __call__(self) -> str:
        with _simulated(self):
            self.store = Store(self)
            try:
                self.loop.run_until_complete(self._main())
                oracles.at_the_end(self)
                self.pairs.update(combinations([event for event in EVENTS if self.reached[event]], 2))
                self.loop.note(sorted((run_no, [d.hex() for d in seen]) for run_no, seen in self.history.items()))
                if self.loop.problems:
                    self.broken("I30", self.loop.problems[0])
            finally:
                self.over = True
                for process in self.processes.values():
                    self.loop.died(process)
                self.store.close()
        return self.loop.trace

    async def _main(self) -> None:
        people = People(self, self.app(Process("people")))
        background = [self.loop.create_task(self._run_worker_safely(f"w{n}")) for n in range(self.workers)]
        self.mood = self.faulty_mood
        background += [self.loop.create_task(work) for work in (self._jumps(), *people.tasks())]
        for run_id, text in self.plans.items():
            await people.start(run_id, text)
        until = self.loop.now + FAULTY_S
        while self.loop.now < until and not self._all_over():
            await self.news(min(LOOK_AGAIN_S, until - self.loop.now))
            self._look_at(background)
        self.mood = Mood()
        people.diligent = True
        for process in self.processes.values():  # deploys come to an end: everybody runs the whole code
            if not process.dead and process.name == "w0" and self.faulty_mood.lacks:
                self.deaths += 1
                self.die(process)
        until = self.loop.now + CALM_S
        while True:
            await self._come_to_an_end(background, until)
            # What is on its way lands, what a stopped process says when it goes on is heard, and nothing changes but by the word of a person
            # who had not been heard yet: what that one takes up again comes to an end too.
            await asyncio.sleep(self.loop.sleeps_for + TAIL_S)
            self._look_at(background)
            if self._all_over():
                break
        self.over = True

    async def _come_to_an_end(self, background: list[asyncio.Task[None]], until: float) -> None:
        while not self._all_over():
            await self.news(LOOK_AGAIN_S)
            self._look_at(background)
            if self.loop.now > until:
                states = [
                    f"{h.run_id} {h.status} ({h.reason}), wakes {h.wake_at}, held {h.held} by {h.lease_owner}"
                    for h in self._heads()
                    if h.status not in base.ENDED
                ]
                self.broken("I17", f"stuck {CALM_S:.0f} s after the last fault: {'; '.join(states)}")

    async def news(self, at_most: float) -> None:
        """Until something is committed, or the time is over."""
        await self.loop.change(at_most)

    async def _run_worker_safely(self, name: str) -> None:
        await self._keep_worker(name)

    def _look_at(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _heads(self) -> list[base.Head]:
        return self.store.heads(base.RunFilter(limit=100))

    def _all_over(self) -> bool:
        return all(status in base.ENDED for status in self.statuses.values())


def _plan(rng: random.Random, n: int, *, small: bool) -> str:
    """Turns of calls; a model may use an id again in a later turn."""
    turns = []
    for turn in range(1 if small else rng.choice((1, 1, 2, 3))):
        names = [rng.choice(NAMES) for _ in range(rng.choice((1, 1, 2) if small else (1, 1, 2, 3)))]
        turns.append([[name, f"t{0 if rng.random() < 0.1 else turn}_{i}"] for i, name in enumerate(names)])
    return json.dumps([n, turns])


class _Stop:
    """`news.Stop` in one thread: the pauses between tries to save take no time here."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def wait(self, timeout_s: float) -> bool:
        return self._set


class _Log(logging.LoggerAdapter[logging.Logger]):
    """What is caught and told as a bug of ours comes out of the schedule. (What a dead process left may raise when it is thrown away.)"""

    def __init__(self, logger: logging.Logger, sim: Schedule) -> None:
        super().__init__(logger)
        self._sim = sim

    def log(self, level: int, msg: object, *args: object, exc_info: Any = None, **about: Any) -> None:
        super().log(level, msg, *args, exc_info=exc_info, **about)
        if (exc_info or "ended badly" in str(msg)) and asyncio._get_running_loop() is not None:
            self._sim.broken("I30", f"{str(msg) % args}{f': {sys.exc_info()[1]!r}' if exc_info else ''}")


def _read_once() -> Callable[..., r.Entry]:
    """`from_row` that reads the same row once in a schedule: entries are values, whoever reads them."""
    read = r.from_row
    known: dict[Any, r.Entry] = {}

    def from_row(kind: str, body: str, meta: str | None, *, by: str | None, entry_id: str | None, at: datetime) -> r.Entry:
        key = (kind, body, meta, by, entry_id, at)
        if (entry := known.get(key)) is None:
            entry = known[key] = read(kind, body, meta, by=by, entry_id=entry_id, at=at)
        return entry

    return from_row


@contextmanager
def _simulated(sim: Schedule) -> Iterator[None]:
    """The machine's clocks, randomness and processes are the schedule's in here."""
    tokens = sim._tokens

    class Tokens:
        @staticmethod
        def token_hex(n: int) -> str:
            return f"{next(tokens):0{2 * n}x}"

    patches: list[tuple[Any, str, Any]] = [
        (owner, "me", lambda: PROCESS.get().owner), (owner, "provably_dead", sim.is_dead), (sqlite_store, "secrets", Tokens),
        (drive, "monotonic", sim.loop.time), (worker, "monotonic", sim.loop.time), (worker, "IDLE_S", LOOK_AGAIN_S), (writer, "Stop", _Stop),
        (notices, "LOOK_S", 600.0), (rows, "from_row", _read_once()),
    ]  # fmt: skip
    patches += [(world, "playing", sim), (worker, "log", _Log(worker.log, sim)), (app, "log", _Log(app.log, sim))]
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    random.seed(sim.seed)
    for module, name, value in patches:
        setattr(module, name, value)
    crashpoints.arm(sim.point)
    token = PROCESS.set(WORLD)
    try:
        yield
    finally:
        crashpoints.arm(None)
        for module, name, value in before:
            setattr(module, name, value)
        sim.forget()
        sim.loop.close()
        PROCESS.reset(token)


@contextmanager
def quiet() -> Iterator[Callable[[], object]]:
    """Around any number of schedules: no log, and what dead processes left (coroutines in the middle of a step) is thrown away
    unheard, by the function that this gives; never by chance in the middle of somebody else's step.
    """
    hook, disabled, collects = sys.unraisablehook, logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.unraisablehook = lambda unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a coroutine that nobody awaited: its process died before
            yield gc.collect
            gc.collect()
    finally:
        gc.unfreeze()
        sys.unraisablehook = hook
        logging.disable(disabled)
        if collects:
            gc.enable()


__all__ = ["EVENTS", "WINDOWS", "Broken", "Mood", "Schedule", "quiet"]
