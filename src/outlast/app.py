"""`Outlast`: what an application calls.

What runs your code (model, tools) is a coroutine with a `_sync` twin; everything else is plain, thread-safe and one transaction. Constructing
it does no I/O: the store opens on first use, once per process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, Self, TypeVar, cast

from outlast import alone, engines, settings, sync
from outlast.agent import Agent, bare, library
from outlast.core import codec
from outlast.core import messages as m
from outlast.core import run as r
from outlast.core import step as s
from outlast.core.gate import GateRow
from outlast.core.step import Policy, may_go_on
from outlast.documents import Checkpoint, Event, Gate, Message, Notice, Out, Run, RunHead, Status, Stuck, Tags, gate_of, head_fields
from outlast.engines.base import Engine, Taken
from outlast.errors import (
    GateClosed,
    InvariantViolated,
    LeaseLost,
    NotAllowed,
    OutlastError,
    Refused,
    RunBusy,
    RunExists,
    RunNotFound,
    SchemaTooNew,
    StoreError,
    UsageError,
)
from outlast.gates import check_duration, check_instant
from outlast.models import resolve
from outlast.openrun import OpenRun
from outlast.prices import checked as checked_prices
from outlast.reader import Reader
from outlast.runtime import crashpoints, deploy, fork, metrics, notices, outside, sweeper
from outlast.runtime import plan as plans
from outlast.runtime.clock import ManualClock
from outlast.runtime.drive import Drive, named
from outlast.runtime.leases import Keeper
from outlast.runtime.metrics import Key as MetricKey
from outlast.runtime.worker import Worker
from outlast.runtime.writer import Writer
from outlast.stores import audit, base, care, moving, owner
from outlast.tools import Tool

log = logging.getLogger("outlast")
T = TypeVar("T")

Input = str | Sequence[Mapping[str, Any]]
RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
STORE_THREADS = 64  # asyncio's own pool has cpu + 4: too few to share a commit
FOREGROUND = timedelta(seconds=60)  # `run` and `resume` sleep through timers up to here
BACKGROUND = timedelta(seconds=5)  # a worker gives the lease back for anything longer
STOP_TELLING_S = 5.0  # for what is being sent when a worker ends
LOOK_FOR_STUCK_S = 300.0  # between two looks of a worker for runs that do not go on by themselves
RECENT = 32  # runs that an engine's worker keeps in memory between two steps, so that a step does not read the whole journal anew
DRIVERS = (base.BUILT_IN, "temporal", "restate", "dbos", "inngest")
_EXAMPLES = {
    "temporal": "temporal://HOST:7233/NAMESPACE", "restate": "restate://HOST:8080", "dbos": "dbos:", "inngest": "inngest://HOST:8288"}  # fmt: skip
SCRIPT = base.SCRIPT
MAX_TAGS, MAX_TAG_KEY, MAX_TAG_VALUE = 16, 64, 256
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_run_id() -> str:
    """run- and 16 characters that sort by time: nine for the millisecond, two for its 1,024th part, five by chance."""
    stamp, out = time.time_ns() * 1024 // 1_000_000, ""
    for _ in range(11):
        stamp, digit = divmod(stamp, 32)
        out = _ALPHABET[digit] + out
    return f"run-{out}{''.join(secrets.choice(_ALPHABET) for _ in range(5))}"


class Outlast:
    """Agents, and the store that keeps their runs.

    Args:
        store: a path (a SQLite file) or a store's URL; default: OUTLAST_STORE, the nearest pyproject.toml, `sqlite:///outlast.db`.
        agents: what this process can drive; sub-agents come with their tool.
        deps: an object for `ctx.deps`, or
        lifespan: makes it: an async context manager, entered per `work`, `run` and `resume`, or once by `async with app`.
        notify: who is told about gates: callables, webhook and apprise URLs.
        may_decide: `may_decide(person, gate)`, or role -> people. Without it anybody who can reach the store may decide.
        on_event: gets every event of the runs that this process drives; lost in a crash, never awaited.
        lease: how long a worker that hangs keeps a run from the others.
        clock: tests: replaces the store's wall clock.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        *,
        agents: Sequence[Agent[Any]] = (),
        deps: Any = None,
        lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
        notify: Sequence[str | Callable[[Notice], Any]] = (),
        may_decide: Callable[[str, Gate], bool] | Mapping[str, Sequence[str]] | None = None,
        on_event: Callable[[Event], None] | None = None,
        engine: str | Engine | None = None,
        prices: Mapping[str, Mapping[str, Decimal]] = {},
        lease: timedelta = timedelta(seconds=30),
        clock: ManualClock | None = None,
    ) -> None:
        if store is not None and not isinstance(store, str | os.PathLike):
            raise UsageError(f"store must be a path or a store's URL, not {store!r}", hint='Outlast("agent.db")')
        if isinstance(agents, Agent) or not all(isinstance(a, Agent) for a in agents):
            raise UsageError("agents must be a list of Agent(...)", hint="Outlast(agents=[support])")
        if deps is not None and lifespan is not None:
            raise UsageError("give deps or lifespan, not both")
        if may_decide is not None and not callable(may_decide) and not isinstance(may_decide, Mapping):
            raise UsageError(f"may_decide must be a function of (person, gate) or role -> people, not {may_decide!r}")
        if not isinstance(lease, timedelta) or not timedelta(seconds=1) <= lease <= timedelta(hours=1):
            raise UsageError(f"lease must be from 1 s to 1 h, not {lease!r}", hint="lease=timedelta(seconds=30)")
        self._given = store
        self._agents = _all_agents(agents)
        self._deps, self._lifespan, self._entered = deps, lifespan, _NOTHING
        self._notify, self._may_decide, self._prices, self._engine = tuple(notify), may_decide, checked_prices(prices), engine
        self._engine_made: Engine | EllipsisType | None = ...
        self._told = notices.targets(notify, _notice_settings)
        self._tellers: list[notices.Teller] = []
        self._listeners: list[Callable[[Event], None]] = [on_event] if on_event else []
        self._lease_s, self._clock = lease.total_seconds(), clock
        self._lock = threading.Lock()
        self.grace = timedelta(seconds=25)  # what running steps get when a worker is told to end
        self._opened: tuple[int, care.CareStore, Keeper, ThreadPoolExecutor] | None = None
        self._stack: contextlib.AsyncExitStack | None = None
        self._entered_agents: Mapping[str, Agent[Any]] | None = None  # with the tools of their servers, inside of `async with app`
        self._recent: dict[int, tuple[r.Run, base.Place, int]] = {}  # as an engine's last steps here left them, oldest first
        self._slots: asyncio.Semaphore | None = None  # how many steps an engine's worker takes at once
        self._looked_at, self._known_stuck = float("-inf"), set[tuple[str, str]]()
        self._target: str | None = None  # MODULE:ATTR, where a command loaded this app: a run can be driven alone

    def with_store(self, store: str | os.PathLike[str]) -> Outlast:
        """The same application on another store."""
        other = Outlast(
            store, agents=list(self._agents.values()), deps=self._deps, lifespan=self._lifespan, notify=self._notify, may_decide=self._may_decide,
            engine=self._engine, prices=self._prices, lease=timedelta(seconds=self._lease_s), clock=self._clock)  # fmt: skip
        other._listeners, other._target = list(self._listeners), self._target
        return other

    def listen(self, callback: Callable[[Event], None]) -> None:
        """Also give `callback` the events of runs that this process drives."""
        self._listeners.append(callback)

    @property
    def agents(self) -> dict[str, Agent[Any]]:
        """By name, sub-agents included."""
        return dict(self._agents)

    # ---- driving ----------------------------------------------------------------------------------------------------------------

    async def run(self, agent: Agent[Out], input: Input, *, run_id: str | None = None, tags: Tags = {}, by: str | None = None) -> Run[Out]:
        """Start a run and drive it here until it waits or ends; start and claim are one commit, so no worker can snatch it.

        The same id, agent and input again: the run that is there goes on. Raises UsageError, RunExists (other input), RunBusy (somebody
        drives it now), StoreError. What was saved stands; `resume` goes on.
        """
        self._mine(agent)
        resolve(agent.model)  # a provider that nobody knows: nothing is started
        if self.engine is not None:
            started = await self._blocking(lambda: self.start(agent, input, run_id=run_id, tags=tags, by=by))
            return cast("Run[Out]", await self._until_it_waits(started.run_id))
        new = self._new_run(agent, input, run_id, tags, by)
        head, lease, created = await self._taken(
            lambda: self._store.start(new, owner=owner.me(), lease_s=self._lease_s), lambda made: made[1]
        )
        if not created:
            self._same(head, new)
            return cast("Run[Out]", await self.resume(head.run_id))
        assert lease is not None
        async with self._deps_for(lease) as deps, self._telling() as teller:
            await self._drive(lease, agent, deps)
            await self._go_on(head.run_id, deps, teller)
        return cast("Run[Out]", await self._blocking(self.get, head.run_id))

    def run_sync(self, agent: Agent[Out], input: Input, *, run_id: str | None = None, tags: Tags = {}, by: str | None = None) -> Run[Out]:
        """`run` for a plain program."""
        return self._sync("run_sync", lambda: self.run(agent, input, run_id=run_id, tags=tags, by=by))

    async def resume(self, run_id: str) -> Run[Any]:
        """Drive a run here until it waits or ends. One that is over, or that still waits, comes back as it is.

        Raises RunNotFound, RunBusy (owner, until), UsageError where this process lacks the agent.
        """
        head = await self._blocking(self._store.head, run_id)
        if self.engine is not None and head.driver == self.engine.driver:
            await self._blocking(self._poke_engine, head)
            return await self._until_it_waits(run_id)
        if head.status not in base.ENDED:
            agent = self._agents.get(head.agent)
            if agent is None:
                raise UsageError(f"run {run_id} needs the agent {head.agent!r}, which this process does not know", run_id=run_id,
                                 hint=f"Outlast(agents=[...]) with {head.agent!r}; on the command line --app MODULE:ATTR")  # fmt: skip
            lease = await self._claimed(run_id)
            crashpoints.point("claim.after")
            async with self._deps_for(lease) as deps, self._telling() as teller:
                await self._drive(lease, agent, deps)
                await self._go_on(run_id, deps, teller)
        return await self._blocking(self.get, run_id)

    def resume_sync(self, run_id: str) -> Run[Any]:
        """`resume` for a plain program."""
        return self._sync("resume_sync", lambda: self.resume(run_id))

    async def work(
        self, *, concurrency: int = 10, agents: Sequence[str] = (), until_idle: bool = False, grace: timedelta = timedelta(seconds=25)
    ) -> None:
        """Be a worker: take runs that are due and drive each until it waits or ends, `concurrency` at once. Cancel the task to drain.

        Args:
            agents: names to take; default: all of this app's.
            until_idle: return when every unfinished run waits; a timer counts only where it is more than a minute away, and a run that
                somebody else holds is waited for.
            grace: what running steps get after a cancel.
        """
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= 10_000:
            raise UsageError(f"concurrency must be a number from 1 to 10000, not {concurrency!r}")
        check_duration("grace", grace, zero=True)
        if unknown := [a for a in agents if a not in self._agents]:
            raise UsageError(
                f"agents: this app does not know {', '.join(map(repr, unknown))}", hint=f"known: {', '.join(self._agents) or 'none'}"
            )
        if not self._agents:
            raise UsageError("a worker needs agents", hint="Outlast(agents=[...])")
        if self.engine is not None:
            if agents:
                raise UsageError(
                    f"agents: {self.engine.driver} gives a worker any of its runs", hint="a task queue, or an application, of their own"
                )
            await self._work_for(self.engine, concurrency, grace, until_idle=until_idle)
            return
        async with self._deps_now() as deps, self._telling() as teller:
            worker = Worker(
                self._store, self._keeper, agents=list(agents) or list(self._agents), concurrency=concurrency, grace=grace, lease_s=self._lease_s,
                until_idle=until_idle, blocking=self._blocking, satisfies=self._satisfies, alone=self._alone(grace),
                sweep=self._sweeping,
                drive=lambda lease: self._drive_of(lease, self._agents[lease.agent], deps=deps, patience_s=BACKGROUND.total_seconds()))  # fmt: skip
            self._worker = worker
            while True:
                sent = teller.sent
                await worker()
                await teller.deliver()
                if teller.sent == sent:  # until_idle: nobody was told anything that may have been answered by now
                    return

    def work_sync(
        self, *, concurrency: int = 10, agents: Sequence[str] = (), until_idle: bool = False, grace: timedelta = timedelta(seconds=25)
    ) -> None:
        """`work` for a plain program."""
        self._sync("work_sync", lambda: self.work(concurrency=concurrency, agents=agents, until_idle=until_idle, grace=grace))

    async def stream(self, run_id: str, *, after: int = 0) -> AsyncIterator[Event]:
        """Checkpoints with a number above `after`, then what comes, until the run is finished; `text` and `reset` only where this process drives."""
        pieces: deque[Event] = deque()
        came = asyncio.Event()
        loop = asyncio.get_running_loop()

        def put(event: Event) -> None:
            pieces.append(event)
            came.set()

        def hear(event: Event) -> None:
            if event.run_id == run_id and event.type in ("text", "reset"):
                loop.call_soon_threadsafe(put, event)

        await self._blocking(self._store.head, run_id)
        self._listeners.append(hear)
        change: asyncio.Task[int] | None = None
        told: tuple[str, int] | None = None
        try:
            while True:
                if change is None or change.done():  # not for every piece of text: each look is a thread and a read
                    seen = change.result() if change is not None else await self._blocking(self._store.wait_for_change, None, 0.0)
                    head = await self._blocking(self._store.head, run_id)
                    for event in await self._blocking(self._checkpoint_events, head, after) if head.seq > after else ():
                        while pieces and pieces[0].seq <= event.seq:
                            yield pieces.popleft()
                        after = event.seq
                        yield event
                    ended = head.status in base.ENDED
                    while ended and pieces:
                        yield pieces.popleft()
                    if (head.status.startswith("waiting_") or ended) and told != (head.status, head.entries):
                        told = (head.status, head.entries)
                        yield Event(
                            "run", run_id, head.seq, None, None, cast("Status", head.status), head.updated_at, RunHead(**head_fields(head))
                        )
                    if ended:
                        return
                    change = asyncio.create_task(self._blocking(self._store.wait_for_change, seen, 1.0))
                came.clear()
                while pieces and pieces[0].seq <= after + 1:  # the text of a later one waits until the checkpoints before it are out
                    piece = pieces.popleft()
                    if piece.seq > after:
                        yield piece
                news = asyncio.create_task(came.wait())
                await asyncio.wait((change, news), return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
        finally:
            self._listeners.remove(hear)

    def _checkpoint_events(self, head: base.Head, after: int) -> list[Event]:
        return [
            Event("checkpoint", head.run_id, row.seq, None, codec.decode(row.body), _status_at(head, row), row.at)
            for row in self._store.journal(head.run_id)
            if row.kind == "MessageAdded" and row.seq > after
        ]

    # ---- starting and steering -----------------------------------------------------------------------------------------------------

    def start(self, agent: Agent[Any] | str, input: Input, *, run_id: str | None = None, tags: Tags = {}, by: str | None = None) -> RunHead:
        """Create a run for a worker to take; it is committed when this returns. The same again gives the run that is there.

        `agent`: an Agent of this app, or a name, from a process without its code. Raises UsageError, RunExists (other agent or input), StoreError.
        """
        new = self._new_run(agent, input, run_id, tags, by)
        if self.engine is not None:
            new = replace(new, driver=self.engine.driver)
        head, _, created = self._store.start(new)
        if not created:
            self._same(head, new)
        if self.engine is not None and head.driver == self.engine.driver and head.status not in base.ENDED:
            self._tell_engine(self.engine.start, head.run_id)
        return RunHead(**head_fields(head))

    def decide(self, run_id: str, call_id: str | None = None, *, approved: bool, decided_by: str, note: str | None = None,
               args: Mapping[str, Any] | None = None, digest: str | None = None) -> Gate:  # fmt: skip
        """Approve or reject a call (or the raising of a limit). The first decision stands; the same one again is accepted.

        Args:
            call_id: a call id or a gate id; may be left out while exactly one is open.
            approved: True or False and nothing else.
            note: why; the model reads it with a rejection.
            args: run with these arguments instead; checked by the tool's schema, so this process needs the agent.
            digest: of what was shown; anything else there now is refused.
        Raises:
            GateClosed: decided, expired or cancelled before, or another digest: `gate` says what stands. NotAllowed, UsageError, RunNotFound.
        """
        if not isinstance(approved, bool):
            raise UsageError(f"approved must be True or False, not {approved!r}", run_id=run_id)
        if args is not None and not approved:
            raise UsageError("args are for an approval: a rejection runs nothing", run_id=run_id)
        edited = self._plain("args", args) if args is not None else None
        if edited is not None and not isinstance(edited, dict):
            raise UsageError(f"args must be an object, not {args!r}", run_id=run_id)
        outcome = "approved" if approved else "rejected"
        entry = r.GateDecided("", outcome, note=_note(note), args=edited, by=_person("decided_by", decided_by))
        if edited is not None:
            entry = replace(entry, digest=codec.digest(edited))
        return self._decide(run_id, ("approval", "budget"), call_id, entry, digest)

    def verify(self, run_id: str, call_id: str | None = None, *, outcome: Literal["happened", "run_again", "give_up"], decided_by: str,
               result: Any = None, note: str | None = None) -> Gate:  # fmt: skip
        """Say what became of a call in doubt: it happened (with this result), run it again, or give it up (the model reads "outcome unknown").

        Raises RunBusy where "run_again" comes while the earlier attempt may still act; else as `decide`.
        """
        if outcome not in ("happened", "run_again", "give_up"):
            raise UsageError(f'outcome must be "happened", "run_again" or "give_up", not {outcome!r}', run_id=run_id)
        if result is not None and outcome != "happened":
            raise UsageError('result is for the outcome "happened"', run_id=run_id)
        entry = r.GateDecided(
            "", outcome, note=_note(note), result=self._plain("result", result), has_result=result is not None, by=_person("decided_by", decided_by))  # fmt: skip
        return self._decide(run_id, ("verification",), call_id, entry, None)

    def event(self, run_id: str, name: str, data: Any = None, *, event_id: str | None = None) -> bool:
        """Tell a run that something happened: it answers the call that waits for `name`, or is kept for one that will. True the first time."""
        if not isinstance(name, str) or not 1 <= len(name) <= 128:
            raise UsageError(f"name must be a text of 1 to 128 characters, not {name!r}", run_id=run_id)
        entry_id = f"event:{_id('event_id', event_id)}" if event_id is not None else f"event:{secrets.token_hex(8)}"
        return self._outside(run_id, outside.event(name, self._plain("data", data), entry_id), entry_id=entry_id)[2]

    def send(self, run_id: str, input: Input, *, by: str | None = None) -> RunHead:
        """Say something to a run: it is placed after the results of the open batch, else before the next model call; a finished run goes on."""
        try:
            content = m.as_content(input)
        except m.BadMessage as e:
            raise UsageError(f"input: {e}", run_id=run_id) from None
        self._sized("input", content)
        return RunHead(**head_fields(self._outside(run_id, outside.send(content, _by(by)))[0]))

    def cancel(self, run_id: str, *, by: str | None = None, note: str | None = None) -> RunHead:
        """End a run: gates closed, open calls answered, in one transaction that needs no living worker. A finished one stays as it is."""
        head, gone = self._store.head(run_id), outside.lost(r.Run(run_id))
        if head.parent_run_id is not None:
            with contextlib.suppress(InvariantViolated, SchemaTooNew):  # a journal that cannot be read: the run can be ended all the same
                gone = outside.lost(r.fold(r.Run(run_id), self._store.load(head.run_no)[0]))
        return RunHead(**head_fields(self._outside(run_id, outside.cancel(_by(by), _note(note), gone))[0]))

    def retry(self, run_id: str, *, by: str | None = None) -> RunHead:
        """Take a failed or cancelled run up again. Refused where that would only repeat the failure: `send` it something instead."""
        return RunHead(**head_fields(self._outside(run_id, outside.retry(_by(by)))[0]))

    def fork(
        self, run_id: str, *, at: int, new_run_id: str | None = None, edit_message: Message | None = None, live: bool = False,
        by: str | None = None,
    ) -> RunHead:  # fmt: skip
        """Start a new run with this one's history up to checkpoint `at`, for a worker to take.

        What happened in that history stays done. Every new call of a tool with an effect asks a person first, whatever its gate says, unless
        `live`; runs of sub-agents likewise. Its keys are its own. The same again gives the fork that is there.

        Args:
            edit_message: instead of message `at`; of the same role.
        Raises:
            UsageError: no such checkpoint, or a message that does not fit there. RunNotFound, RunExists, StoreError.
        """
        source = self._store.head(_ref(run_id))
        entries = self._read(source.run_no, run_id)
        started = entries[0]
        assert isinstance(started, r.RunStarted)
        edited = self._plain("edit_message", edit_message) if edit_message is not None else None
        past = fork.history(entries, at, edited, run_id=run_id)
        known = self._agents.get(source.agent)
        driver = source.driver if source.driver == SCRIPT else self.engine.driver if self.engine is not None else base.BUILT_IN
        first = r.RunStarted(
            source.agent, known.version if known else "", source.tags, driver=driver, code=known.code if known else "",
            library=library() if known else "", forked_from=run_id, forked_at=at, asks=not live, by=_by(by), meta=started.meta)  # fmt: skip
        now = self._store.now()
        digest = codec.digest(["fork", run_id, at, edited, live])
        new = base.NewRun(
            _run_id(new_run_id) if new_run_id is not None else _fresh_id(), source.agent, [r.stored(r.headed(e, at=now)) for e in (first, *past)],
            source.tags, driver=driver, started_by=first.by, agent_version=first.agent_version, input_digest=digest)  # fmt: skip
        head, _, created = self._store.start(new)
        if not created:
            self._same(head, new)
        self._poke_engine(head)
        return RunHead(**head_fields(head))

    @contextmanager
    def open(
        self, run_id: str, input: Input | None = None, *, tools: Sequence[Tool[..., Any]] = (), agent: str = SCRIPT, tags: Tags = {}
    ) -> Iterator[OpenRun]:
        """Drive a run by a loop of your own: every message you append is a checkpoint. `input` starts the run where it is new.

        Raises RunBusy where somebody holds it, RunNotFound without `input`, RunExists where it was started with another input.
        """
        hand = Agent(agent, model=_by_hand, tools=tools)
        if input is not None:
            new = self._new_run(agent, input, run_id, tags, None, by_hand=hand)
            head, lease, created = self._store.start(replace(new, driver=SCRIPT), owner=owner.me(), lease_s=self._lease_s)
            if not created:
                self._same(head, new)
                lease = None
        else:
            lease = None
        if lease is None:
            lease = self._store.claim_run(_run_id(run_id), owner.me(), lease_s=self._lease_s, driver=SCRIPT)
        opened = OpenRun(self, lease, hand)
        try:
            yield opened
        finally:
            opened._close()
            if self._told:
                self._deliver()

    # ---- reading ----------------------------------------------------------------------------------------------------------------

    def get(self, run_id: str) -> Run[Any]:
        """The run with its messages, gates and output. Raises RunNotFound."""
        run = r.Run(run_id)
        place = base.Place()
        first: r.Entry | None = None
        head = self._store.head(_ref(run_id))
        for _ in range(100):  # a run that grows while it is read: read on until head and journal agree
            try:
                entries, place = self._store.load(head.run_no, after=place)
            except codec.Unstorable as e:
                raise InvariantViolated(f"run {run_id}: {e}", run_id=run_id, hint=f"outlast show {run_id} --journal") from e
            first = first or (entries[0] if entries else None)
            run = r.fold(run, entries)
            head = self._store.head(run_id)
            if head.entries <= place.entries:
                break
        gates = [gate_of(head, row, told) for row, told in self._store.gates(run_id)]
        return Run(**head_fields(head), output=self._output(head, run, first), messages=list(run.messages), gates=gates)

    def _output(self, head: base.Head, run: r.Run, first: r.Entry | None) -> Any:
        if head.status != "done":
            return None
        last = next((x for x in reversed(list(run.messages)) if x["role"] == "assistant"), None)
        if (agent := self._agents.get(head.agent)) is not None:
            return agent.output_of(last)
        text = m.said(last) if last else None
        if text and first is not None and (first.meta or {}).get("typed"):
            with contextlib.suppress(codec.Unstorable):
                return codec.decode(bare(text))
        return text

    def head(self, run_id: str) -> RunHead:
        """The run's row, without messages: for status pages and polling."""
        return RunHead(**head_fields(self._store.head(_ref(run_id))))

    def latest(self, run_id: str) -> Checkpoint:
        """The newest checkpoint."""
        last: Checkpoint | None = None
        for checkpoint in self._checkpoints(run_id, 0, only_last=True):
            last = checkpoint
        assert last is not None  # a run starts with a message
        return last

    def checkpoints(self, run_id: str, *, after: int = 0) -> Iterator[Checkpoint]:
        """Checkpoints with a number above `after`, oldest first."""
        return self._checkpoints(run_id, after)

    def _checkpoints(self, run_id: str, after: int, *, only_last: bool = False) -> Iterator[Checkpoint]:
        head = self._store.head(_ref(run_id))
        messages: list[Message] = []
        for row in self._store.journal(run_id):
            if row.kind != "MessageAdded":
                continue
            messages.append(codec.decode(row.body))
            if row.seq <= after or (only_last and row.seq < head.seq):
                continue
            yield Checkpoint(run_id, row.seq, _status_at(head, row), list(messages), row.at)

    def runs(self, *, status: Status | None = None, agent: str | None = None, tags: Tags = {}, unfinished: bool = False, stuck: bool = False,
             since: datetime | None = None, limit: int = 50, before: str | None = None) -> list[RunHead]:  # fmt: skip
        """Newest first. `before`: the page after that run."""
        if status is not None and status not in _STATUSES:
            raise UsageError(f"status must be one of {', '.join(_STATUSES)}, not {status!r}")
        where = base.RunFilter(
            status=status, agent=agent, tags=_tags(tags), unfinished=unfinished, stuck=stuck,
            since=check_instant("since", since) if since is not None else None, limit=_limit(limit), before=before)  # fmt: skip
        return [RunHead(**head_fields(head)) for head in self._store.heads(where)]

    def unfinished_runs(self) -> list[str]:
        """Run ids, oldest first; those that wait too."""
        return self._store.unfinished()

    def stuck(self, *, limit: int = 1000) -> list[Stuck]:
        """What does not go on by itself, longest first: each with its reason and the one command that mends it."""
        found = self._store.stuck(limit=_limit(limit))
        return [Stuck(x.run_id, cast("Status", x.status), x.reason, x.since, x.command) for x in found]

    def inbox(self, *, role: str | None = None, agent: str | None = None, tags: Tags = {}, limit: int = 50) -> list[Gate]:
        """What waits for a person, soonest deadline first."""
        found = self._store.inbox(role=role, agent=agent, tags=_tags(tags), limit=_limit(limit))
        return [gate_of(head, row, told) for head, row, told in found]

    def journal(self, run_id: str, *, after: int = 0, limit: int | None = None) -> Iterator[base.JournalRow]:
        """The journal as it stands: rows with an entry_no above `after`."""
        self._store.head(_ref(run_id))
        return self._store.journal(run_id, after=after, limit=limit)

    def metrics(self) -> str:
        """This process's counts, and what waits in the store, as Prometheus text. Cost: two indexed reads of the store."""
        return metrics.text(self._gauges())

    def _gauges(self) -> dict[MetricKey, float]:
        opened = self._opened
        held = opened[2].held() if opened is not None and opened[0] == os.getpid() else 0
        return {**metrics.gauges(self.reader.waiting(), self._store.now()), ("outlast_runs_held", ()): held}

    def keeps_leases(self) -> bool:
        """Are the leases of the runs held here being renewed? (Where none is held there is nothing to renew.)"""
        opened = self._opened
        return opened is None or opened[0] != os.getpid() or opened[2].healthy()

    def store_check(self, heads: Sequence[tuple[str, int, str]] = ()) -> list[tuple[str, str, str]]:
        """What is wrong with the store, as (where, what, remedy); empty: all is well. `heads`: what `store_heads` once gave, kept elsewhere."""
        return [*self._store.check(), *audit.compared(heads, self._store.digest_at)]

    def store_heads(self) -> Iterator[tuple[str, int, str]]:
        """(run id, entries, digest of the last one) of every run: whoever keeps them elsewhere can prove that nothing was lost or changed since."""
        return self._store.ends()

    def store_migrate(self) -> tuple[int, int]:
        """Bring the schema up to date: (version before, version now). Of many at once one works, and the others find it done."""
        return self._store.migrate()

    def store_migration_sql(self) -> str:
        """What makes the schema in an empty database, to be read or to be run by hand."""
        return self._store.migration_sql()

    def store_backup(self, file: Path) -> None:
        """A copy of one moment in a new file, made while others work. Postgres has programs of its own for that: UsageError names the command."""
        self._store.backup(file)

    def store_export(self, run_id: str, *, move: bool = False, by: str | None = None) -> dict[str, Any]:
        """The run as a JSON document. `move`: it ends here first (`cancelled`, `moved to a document`), so that it can go on elsewhere."""
        return moving.export(self._store, _ref(run_id), move=move, by=_by(by))

    def store_import(self, document: str, *, run_id: str | None = None) -> RunHead:
        """Put in what `store_export` gave: a moved run under its own id, any other one only as another run."""
        return RunHead(**head_fields(moving.read_in(self._store, document, run_id=None if run_id is None else _run_id(run_id))))

    def store_copy(
        self, to: str | os.PathLike[str], *, by: str | None = None, each: Callable[[str], None] = lambda run_id: None
    ) -> moving.Copied:
        """Carry every run to another store, and end it here. Cut off anywhere, the same again goes on. No worker may run meanwhile."""
        target = open_store(to, clock=self._clock)
        try:
            return moving.copy(self._store, target, by=_by(by), each=each)
        finally:
            target.close()

    def store_old(self, older_than: timedelta, *, keep: Sequence[str] = ()) -> tuple[int, int]:
        """(runs, entries) that `store_prune` would remove."""
        return self._store.old(self._store.now() - older_than, keep=keep)

    def store_prune(self, older_than: timedelta, *, keep: Sequence[str] = ()) -> tuple[int, str | None]:
        """Remove finished runs whose last entry is older, but those of the statuses `keep`: how many, and what is left to do by hand."""
        before, removed = self._store.now() - older_than, 0
        while some := self._store.prune(before, keep=keep):
            removed += some
        return removed, self._store.tidy() if removed else None

    def store_erase(self, run_id: str) -> tuple[list[str], str | None]:
        """Wipe what a finished run and the runs that it started say: their ids, and what is left to do by hand. Raises Refused."""
        return self._store.erase(_ref(run_id)), self._store.tidy(wiped=True)

    # ---- before a deploy, and second thoughts ---------------------------------------------------------------------------------------

    def plan(self, run_id: str) -> plans.Plan:
        """What `resume` would do with a run now, call by call, what it would cost, and what is missing. Nothing is written or called."""
        head = self._store.head(_ref(run_id))
        run = r.fold(r.Run(run_id), self._read(head.run_no, run_id))
        agent = self._agents.get(head.agent)
        policy = self._policy(agent, head) if agent else Policy()
        died = head.lease_owner is not None and not head.held
        found = plans.plan(run, policy, self._store.now(), status=head.status, died=died, attempts=head.attempts + died)
        found = replace(found, held_by=owner.short(head.lease_owner) if head.held and head.lease_owner else None)
        if head.status in base.ENDED:
            return found
        if agent is None:
            why = f"this process does not know the agent {head.agent!r}"
            unknown = plans.Missing("agent", head.agent, why)
            first = found.next if found.next == "wait" else "hold"
            return replace(
                found, next=first, reason=found.reason if first == "wait" else why, tokens=None, cost_usd=None, missing=[unknown]
            )
        return replace(found, missing=[*found.missing, *self._missing(agent, found)])

    def check_deploy(self, *, agents: Sequence[str] = ()) -> deploy.Report:
        """What this code would do with every unfinished run of the store: continue, continue with a change, hold it, or leave it stuck.

        Args:
            agents: only runs of these.
        Cost: reads each unfinished run's head and its rows since its last message; nothing is written.
        """
        reasons: dict[str, str] = {}
        for one in self._store.stuck(limit=_ALL):
            if not one.command.startswith("outlast worker"):  # those are what this code may mend
                reasons.setdefault(one.run_id, one.reason)
        policies = {name: agent.policy(_no_head) for name, agent in self._agents.items()}
        return deploy.report(v for v in deploy.verdicts(self._unfinished(), policies, reasons) if not agents or v.agent in agents)

    def _unfinished(self) -> Iterator[base.Unfinished]:
        last: base.Head | None = None
        while page := self._store.unfinished_page(after=last):
            yield from page
            last = page[-1].head

    def _read(self, run_no: int, run_id: str) -> list[r.Entry]:
        try:
            return self._store.load(run_no)[0]
        except codec.Unstorable as e:
            raise InvariantViolated(f"run {run_id}: {e}", run_id=run_id, hint=f"outlast show {run_id} --journal") from e

    def _policy(self, agent: Agent[Any], head: base.Head) -> Policy:
        return agent.policy(lambda: RunHead(**head_fields(head)), guarded=self.guarded, prices=self._prices)

    def _missing(self, agent: Agent[Any], found: plans.Plan) -> list[plans.Missing]:
        """A provider's key and people of a role, as far as this process can tell."""
        out = []
        given = any(os.environ.get(name) for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"))
        if found.tokens is not None and isinstance(agent.model, str) and agent.model.startswith("anthropic:") and not given:
            out.append(plans.Missing("key", "ANTHROPIC_API_KEY", f"{agent.model} is asked next, and no key is set here"))
        if isinstance(self._may_decide, Mapping):
            roles = dict.fromkeys(item.role for item in found.items if item.action == "ask a person" and item.role)
            out += [plans.Missing("role", x, f"nobody is {x} in may_decide=") for x in roles if not self._may_decide.get(x)]
        return out

    # ---- the clock ----------------------------------------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Apply the deadlines that have passed, of any agent's runs, and send the notices that are due; how many of both.

        A worker does the same by itself. Nothing depends on it: whoever takes a run applies what has passed first.
        """
        return sweeper.sweep(self._store, notices.names(self._told)) + (self._deliver() if self._told else 0)

    def _deliver(self) -> int:
        async def deliver() -> int:
            return await self._teller().deliver()

        return notices.run_blocking(deliver)

    def _teller(self) -> notices.Teller:
        return notices.Teller(self._store, self._told, blocking=self._blocking, settings=_notice_settings)

    @contextlib.asynccontextmanager
    async def _telling(self) -> AsyncIterator[notices.Teller]:
        """Deliver notices beside whatever is driven here."""
        teller = self._teller()
        self._tellers.append(teller)
        serving = asyncio.ensure_future(teller.serve())
        try:
            yield teller
        finally:
            teller.stop()
            await asyncio.wait({serving}, timeout=STOP_TELLING_S)
            serving.cancel()  # what is being sent is sent again later, under the same id
            self._tellers.remove(teller)

    def _poke(self) -> None:
        for teller in list(self._tellers):
            teller.poke()

    async def _sweeping(self) -> None:
        """What a worker does now and then. A bug here must not make the worker deaf."""
        try:
            await self._sweep_once()
        except StoreError:
            raise
        except Exception:
            log.exception("a sweep failed; the next one comes")

    async def _sweep_once(self) -> None:
        await self._blocking(sweeper.sweep, self._store, notices.names(self._told))
        self._poke()
        if time.monotonic() - self._looked_at >= LOOK_FOR_STUCK_S:
            self._looked_at = time.monotonic()
            now = {(x.run_id, x.reason): x for x in await self._blocking(lambda: self._store.stuck(limit=100))}
            for key, x in now.items():
                if key not in self._known_stuck:
                    log.warning("run %s does not go on by itself: %s; %s", x.run_id, x.reason, x.command, extra={"run_id": x.run_id})
            self._known_stuck = set(now)

    # ---- life -------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the store. Runs that are being driven are not waited for."""
        metrics.withdraw(self._gauges)
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[2].close()  # first: what comes late from now on opens no store anew
            opened[1].close()
            opened[3].shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        stack = contextlib.AsyncExitStack()
        try:
            self._entered_agents = await self._connect_tools(stack)
            if self._lifespan is not None:
                self._entered = await stack.enter_async_context(self._lifespan())
        except BaseException:
            self._entered_agents = None
            await stack.aclose()
            raise
        self._stack = stack
        return self

    async def __aexit__(self, *exc: object) -> None:
        stack, self._stack, self._entered, self._entered_agents = self._stack, None, _NOTHING, None
        if stack is not None:
            await stack.aclose()
        self.close()

    # ---- inside -----------------------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[int, care.CareStore, Keeper, ThreadPoolExecutor]:
        opened = self._opened
        if opened is not None and opened[0] == os.getpid():
            return opened
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():  # after a fork the child opens its own
                store = open_store(self._given, clock=self._clock)
                threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="outlast store")
                self._opened = (os.getpid(), store, Keeper(store, self._lease_s), threads)
            return self._opened

    @property
    def _store(self) -> care.CareStore:
        return self._open()[1]

    @property
    def guarded(self) -> bool:
        """Is there a rule who may decide what?"""
        return self._may_decide is not None

    def why_not(self, person: str, gate: Gate) -> str | None:
        """Why this person may not decide that gate, or None: for pages, which show it before somebody tries. `decide` asks anew."""
        if self._may_decide is None:
            return None
        head = self._store.head(gate.run_id)
        asked = [
            gate_of(head, as_asked, told)
            for row, told in self._store.gates(gate.run_id)
            if row.gate_id == gate.gate_id
            for as_asked in self._as_asked(head, row)
        ]
        return self._why_not(person, asked)

    @property
    def reader(self) -> Reader:
        """What pages and reports read: lists, counts, decisions, figures. Blocking, nothing is written."""
        return Reader(self._store)

    @property
    def _keeper(self) -> Keeper:
        return self._open()[2]

    async def _blocking(self, f: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._open()[3], lambda: f(*args))

    def _sync(self, name: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return sync.run(make())
        raise UsageError(f"{name} cannot be used inside a running event loop", hint=f"await app.{name.removesuffix('_sync')}(...)")

    @contextlib.asynccontextmanager
    async def connected_deps(self) -> AsyncIterator[Any]:
        """What tools get as `ctx.deps`, for as long as an engine's worker lives."""
        async with self._deps_now() as deps:
            yield deps

    @contextlib.asynccontextmanager
    async def _deps_for(self, lease: base.Lease) -> AsyncIterator[Any]:
        """The deps for a run that is held already: where they cannot be made, its lease goes back and others may take it."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                deps = await stack.enter_async_context(self._deps_now())
            except (Exception, asyncio.CancelledError):
                await self._blocking(lambda: self._store.release(lease))
                raise
            yield deps

    async def _taken(self, take: Callable[[], T], lease_of: Callable[[T], base.Lease | None]) -> T:
        """Take a run. A claim under way when we are cancelled counts as made: its lease goes back at once."""
        taken = asyncio.ensure_future(self._blocking(take))
        try:
            return await asyncio.shield(taken)
        except asyncio.CancelledError:
            while not taken.done():
                with contextlib.suppress(asyncio.CancelledError):  # however often: nobody else knows of this lease
                    await asyncio.wait({taken})
            if not taken.cancelled() and taken.exception() is None and (lease := lease_of(taken.result())) is not None:
                with contextlib.suppress(StoreError):  # else it runs out
                    await asyncio.shield(self._blocking(lambda: self._store.release(lease)))
            raise

    async def _claimed(self, run_id: str) -> base.Lease:
        return await self._taken(lambda: self._store.claim_run(run_id, owner.me(), lease_s=self._lease_s), lambda lease: lease)

    @contextlib.asynccontextmanager
    async def _deps_now(self) -> AsyncIterator[Any]:
        async with contextlib.AsyncExitStack() as stack:
            if self._entered_agents is None and (agents := await self._connect_tools(stack)) is not None:
                stack.callback(_CONNECTED.reset, _CONNECTED.set((self, agents)))
            if self._entered is not _NOTHING or self._lifespan is None:
                yield self._deps_here
            else:
                yield await stack.enter_async_context(self._lifespan())

    async def _connect_tools(self, stack: contextlib.AsyncExitStack) -> Mapping[str, Agent[Any]] | None:
        """Connect the servers that bring tools, for as long as `stack` lives: the agents with those beside their own; None: there are none."""
        if not any(agent.sources for agent in self._agents.values()):
            return None
        sources = dict.fromkeys(source for agent in self._agents.values() for source in agent.sources)
        tools = {source: await source.connect_tools(stack) for source in sources}
        return {name: a.connected([t for source in a.sources for t in tools[source]]) for name, a in self._agents.items()}

    @property
    def _connected(self) -> Mapping[str, Agent[Any]]:
        """The agents with the tools of their servers, where somebody connected them: the whole app, or the call that drives here."""
        if self._entered_agents is not None:
            return self._entered_agents
        found = _CONNECTED.get()
        return found[1] if found is not None and found[0] is self else self._agents

    @property
    def _deps_here(self) -> Any:
        """What tools get inside of `async with app`, or without a lifespan."""
        return self._deps if self._entered is _NOTHING else self._entered

    def _drive_of(self, lease: base.Lease, agent: Agent[Any], *, deps: Any, patience_s: float, by_hand: bool = False) -> Drive:
        if not by_hand:  # whoever drives by hand names the tools, whatever an agent of that name has
            agent = self._connected.get(agent.name, agent)
        metrics.export(self._gauges)
        return Drive(
            self._store, lease, agent, resolve(agent.model), writer=self._equip, deps=deps, listen=self._emit, keeper=self._keeper,
            threads=self._open()[3], patience=timedelta(seconds=patience_s), lease_s=self._lease_s, guarded=self._may_decide is not None,
            prices=self._prices,
            sleeps=self._clock is None)  # fmt: skip

    def _equip(self, writer: Writer) -> None:
        """What an append may carry for other runs: children begun, a parent told."""
        told = notices.names(self._told)
        writer.notices = lambda before, entries: notices.due(before, entries, told)
        writer.told = self._poke
        writer.children = self._children
        writer.others = _ends_children
        writer.parent = self._parent

    def _children(self, run: r.Run, entries: Sequence[r.Entry]) -> list[base.NewRun]:
        out = []
        for entry in entries:
            if isinstance(entry, r.GateOpened) and entry.kind == "run" and entry.args:
                agent = self._agents.get(str(entry.args["agent"])) or str(entry.args["agent"])
                new = self._new_run(
                    agent, str(entry.args["task"]), None, run.tags, run.started_by, child_id=str(entry.args["run_id"]), asks=run.asks
                )
                driver = self.engine.driver if self.engine is not None else base.BUILT_IN  # whoever drives the parent drives the child
                out.append(replace(new, driver=driver, parent_run_id=run.id, parent_call_id=entry.call_id,
                                   entries=[replace(e, parent_run_id=run.id, parent_call_id=entry.call_id) if isinstance(e, r.RunStarted) else e
                                            for e in new.entries]))  # fmt: skip
        return out

    def _parent(self, run: r.Run, step: Any) -> base.ParentEntry | None:
        from outlast.core.step import Finish

        if not isinstance(step, Finish) or run.parent_run_id is None or run.parent_call_id is None:
            return None
        agent = self._agents.get(run.agent)
        last = next((x for x in reversed(list(run.messages)) if x["role"] == "assistant"), None)
        output = codec.clean(agent.output_of(last)) if agent and step.status == "done" else None
        ended = r.ChildFinished(run.parent_call_id, step.status, output, step.reason, run.input_tokens, run.output_tokens,
                                outside.paid(run), run.cache_read_tokens, run.cache_write_tokens, *outside.lost(run))  # fmt: skip
        return base.ParentEntry(run.parent_run_id, outside.child_ended(ended))

    def _alone(self, grace: timedelta) -> Callable[[base.Lease, asyncio.Event], Awaitable[None]] | None:
        """How a run whose worker died again and again is driven in a process of its own; None where a child could not find this app."""
        target = alone.target_of(self, self._target)
        if target is None or self._store.url.endswith(":memory:"):
            return None

        async def drive(lease: base.Lease, stopping: asyncio.Event) -> None:
            self._keeper.add(lease, lambda renewed: None)  # until the child has it, or one that starts slowly would count as a death
            given = str(self._given) if self._given is not None else None
            child = asyncio.ensure_future(alone.drive(target, given, lease, grace, stopping))
            try:
                await self._watched(child, lease)
                code = None if child.cancelled() else child.result()
            finally:
                self._keeper.remove(lease)
                if not child.done():
                    child.cancel()
                    await asyncio.wait({child})
                if stopping.is_set():  # a child that was stopped before it took the lease: nobody else gives it back
                    with contextlib.suppress(StoreError):
                        await self._blocking(lambda: self._store.release(lease))
            if code:
                log.warning(
                    "run %s: the process that drove it alone ended with %s",
                    lease.run_id,
                    code,
                    extra={"run_id": lease.run_id, "fence": lease.fence},
                )

        return drive

    async def _watched(self, child: asyncio.Task[int], lease: base.Lease) -> None:
        """A child keeps its lease itself, from when it has taken it; one that does not take it, or that loses it and does not end, is ended."""
        fine_at = time.monotonic()
        while not child.done():
            await asyncio.wait({child}, timeout=min(self._lease_s / 3, 1.0))
            try:
                [found] = await self._blocking(self._store.peek, [lease])
                held = (await self._blocking(self._store.head, lease.run_id)).held
            except StoreError:
                continue
            taken = found.fence != lease.fence
            if taken:  # its own process renews it now: were that to hang whole, the lease would run out
                self._keeper.remove(lease)
            if taken and found.held and held:
                fine_at = time.monotonic()
            if time.monotonic() - fine_at >= (alone.END_S if taken else alone.START_S) and not child.done():
                log.warning("run %s: the process that drives it alone hangs; it is ended", lease.run_id, extra={"run_id": lease.run_id})
                child.cancel()
                await asyncio.wait({child})

    async def _drive_handed(self, lease: base.Lease, grace: timedelta, stopping: asyncio.Event) -> None:
        """Drive a run whose lease this process was handed."""
        async with self._deps_for(lease) as deps:
            drive = self._drive_of(lease, self._agents[lease.agent], deps=deps, patience_s=BACKGROUND.total_seconds())

            async def drain() -> None:
                await stopping.wait()
                drive.drain(grace)

            draining = asyncio.ensure_future(drain())
            try:
                await drive()
            except LeaseLost:
                raise
            except StoreError:
                await drive.hand_back()
                raise
            finally:
                draining.cancel()

    async def _go_on(self, run_id: str, deps: Any, teller: notices.Teller) -> bool:
        """Runs that answer calls of this one are driven here too, and where somebody who was told decided at once, it goes on. Was there any?"""
        progress = False
        while True:
            await teller.deliver()
            head = await self._blocking(self._store.head, run_id)
            agent = self._agents.get(head.agent)
            if head.status in base.ENDED or head.held or head.driver != base.BUILT_IN or agent is None:
                return progress
            if head.needs is None and head.wake_at is not None and head.wake_at <= self._store.now():
                try:
                    lease = await self._claimed(run_id)
                except RunBusy:
                    return progress
                await self._drive(lease, agent, deps)
                if (await self._blocking(self._store.head, run_id)).entries == head.entries:
                    return progress
            else:
                children = await self._blocking(self._open_children, run_id)
                went_on = await asyncio.gather(*(self._go_on(child, deps, teller) for child in children))
                if not any(went_on):
                    return progress
            progress = True

    def _open_children(self, run_id: str) -> list[str]:
        """Runs that answer calls of this run and are there."""
        found = [codec.decode(row.args)["run_id"] for row, _ in self._store.gates(run_id) if row.kind == "run" and row.outcome is None]
        return [str(child) for child in found]

    async def _drive(self, lease: base.Lease, agent: Agent[Any], deps: Any) -> None:
        try:
            drive = self._drive_of(lease, agent, deps=deps, patience_s=FOREGROUND.total_seconds())
        except OutlastError:
            await self._blocking(lambda: self._store.release(lease))
            raise
        try:
            await drive()
        except LeaseLost as e:
            head = await self._blocking(self._store.head, lease.run_id)
            if head.status in base.ENDED or head.status.startswith("waiting_"):
                log.info("run %s: %s", lease.run_id, e, extra=drive.writer.about())  # cancelled, or finished by somebody else
                return
            raise
        except StoreError:
            await self._given_back(drive)
            raise

    async def _given_back(self, drive: Drive) -> None:
        """After the store failed: whoever tries again, here or elsewhere, finds the run free, and no death is counted."""
        with contextlib.suppress(StoreError):  # else its lease runs out
            await self._blocking(lambda: self._store.release(drive.writer.lease))

    def _emit(self, event: Event) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                log.exception("on_event failed", extra={"run_id": event.run_id, "seq": event.seq})

    def _satisfies(self, agent_name: str, needs: str) -> bool:
        """Does this code have what a parked run lacks?"""
        agent = self._connected.get(agent_name)
        what, _, rest = needs.partition(":")
        if agent is None:
            return False
        if what == "tool":
            return agent.tool(rest) is not None
        if what == "schema":
            name, _, digests = rest.partition(":")
            tool = agent.tool(name)
            return tool is not None and tool.schema_digest not in digests.split(",")
        if what == "code":
            algorithm, code, version = rest.split(":", 2)
            return may_go_on(agent.on_change, f"{algorithm}:{code}", version, agent.code, agent.version)
        if what == "upgrade":
            return agent.tool(rest) is not None
        if what == "model":
            with contextlib.suppress(OutlastError):
                resolve(agent.model)
                return True
            return False
        return what == "format" and rest.isdecimal() and int(rest) <= r.FORMAT

    def _mine(self, agent: Agent[Any]) -> None:
        if not isinstance(agent, Agent):
            raise UsageError(f"agent must be an Agent, not {agent!r}", hint="Agent(...)")
        if self._agents.get(agent.name) is not agent:
            raise UsageError(f"the agent {agent.name!r} is not in Outlast(agents=[...])", hint=f"Outlast(..., agents=[{agent.name}])")

    def _new_run(
        self, agent: Agent[Any] | str, input: Input, run_id: str | None, tags: Tags, by: str | None, *, child_id: str | None = None,
        asks: bool = False, by_hand: Agent[Any] | None = None,
    ) -> base.NewRun:  # fmt: skip
        name = agent.name if isinstance(agent, Agent) else agent
        if isinstance(agent, Agent):
            self._mine(agent)
        elif not isinstance(name, str) or not name.strip():
            raise UsageError(f"agent must be an Agent or a name, not {agent!r}")
        try:
            messages = m.as_input(input)
        except m.BadMessage as e:
            raise UsageError(f"input: {e}", run_id=run_id) from None
        self._sized("input", messages)
        known = agent if isinstance(agent, Agent) else self._agents.get(name)
        code_of = by_hand or known
        version = code_of.version if code_of else ""
        now = self._store.now()
        meta = {"typed": True} if known is not None and known.output is not str else None
        code, library_version = (code_of.code, library()) if code_of else ("", "")
        first = r.RunStarted(name, version, _tags(tags), code=code, library=library_version, asks=asks, by=_by(by), at=now, meta=meta)
        entries: list[r.Entry] = [first]
        for message in messages:
            imported = (
                {"imported": True, "stop_reason": "tool_use" if m.tool_uses(message) else "end_turn"}
                if message["role"] == "assistant"
                else None
            )
            entries.append(r.MessageAdded(message, meta=imported, at=now))
        try:
            entries = [r.stored(e) for e in entries]
        except codec.Unstorable as e:
            raise UsageError(f"input: {e}", run_id=run_id) from None
        digest = codec.digest([name, [e.message for e in entries if isinstance(e, r.MessageAdded)]])
        return base.NewRun(child_id or (_run_id(run_id) if run_id is not None else new_run_id()), name, entries, _tags(tags), started_by=first.by,
                           agent_version=version, input_digest=digest)  # fmt: skip

    @staticmethod
    def _same(head: base.Head, new: base.NewRun) -> None:
        if head.agent != new.agent or head.input_digest != new.input_digest:
            what = f"of agent {head.agent}" if head.agent != new.agent else "with other input"
            raise RunExists(
                f"run {head.run_id} exists already, {what} ({head.status})",
                run_id=head.run_id,
                hint=f"another --id, or outlast show {head.run_id}",
            )

    def _decide(self, run_id: str, kinds: Sequence[str], call_id: str | None, entry: r.GateDecided, digest: str | None) -> Gate:
        head = self._store.head(_ref(run_id))
        person = entry.by or ""
        said: dict[str, str | None] = {}
        if self._may_decide is not None:  # asked before the transaction: it may take its time
            said = {
                row.gate_id: self._why_not(person, [gate_of(head, as_asked, told) for as_asked in self._as_asked(head, row)])
                for row, told in self._store.gates(run_id)
                if row.kind in kinds
            }

        def may(row: GateRow) -> str | None:
            if self._may_decide is None:
                return "this gate is decided through an application that checks who may (--app MODULE:ATTR)" if row.guarded else None
            return said.get(row.gate_id, "the gate is new: look again")

        _, value, written = self._outside(run_id, outside.decide(kinds, call_id, entry, digest=digest, may=may, prepare=self._check_edit))
        if isinstance(value, NotAllowed | RunBusy):
            raise value
        assert isinstance(value, Gate)
        if not written and entry.outcome == "happened":
            self._same_result(head, value, entry)
        return value

    def _same_result(self, head: base.Head, gate: Gate, mine: r.GateDecided) -> None:
        """ "It happened" said again, with another result, is another decision; the first one stands in the journal alone."""
        seq = next(row.seq for row, _ in self._store.gates(head.run_id) if row.gate_id == gate.gate_id)
        entries, _ = self._store.load(head.run_no, since_seq=seq)
        stands = next((e for e in entries if isinstance(e, r.GateDecided) and e.gate_id == gate.gate_id), None)
        if stands is None or (stands.has_result, codec.canonical(stands.result)) == (mine.has_result, codec.canonical(mine.result)):
            return
        who = f" by {gate.decided_by}" if gate.decided_by else ""
        raise GateClosed(f"{gate.call_id or gate.gate_id} was confirmed{who}, with another result", gate=gate,
                         hint=f"outlast show {head.run_id}", run_id=head.run_id)  # fmt: skip

    def _as_asked(self, head: base.Head, row: GateRow) -> list[GateRow]:
        """The gate as it is, and as it was on every earlier rung: whoever was asked may still answer."""
        if row.level == 0 or row.outcome is not None:
            return [row]
        entries, _ = self._store.load(head.run_no, since_seq=row.seq)
        opened = next((e for e in entries if isinstance(e, r.GateOpened) and e.gate_id == row.gate_id), None)
        rungs = opened.rungs[: row.level] if opened else ()
        return [row, *(replace(row, role=rung.get("role"), level=n) for n, rung in enumerate(rungs))]

    def _why_not(self, person: str, gates: Sequence[Gate]) -> str | None:
        may = self._may_decide
        for gate in gates:
            try:
                if isinstance(may, Mapping):
                    allowed: object = person in may.get(gate.role or "", ())
                else:
                    assert may is not None
                    allowed = may(person, gate)
            except Exception as e:  # noqa: BLE001 - a person's function: whatever it raises, nothing is decided
                return f"may_decide failed ({type(e).__name__})"
            if allowed is True:
                return None
        asked = " or ".join(dict.fromkeys(gate.role or "nobody in particular" for gate in gates))
        return f"asked is {asked}"

    def _check_edit(self, tail: base.Tail, row: GateRow, entry: r.GateDecided) -> r.GateDecided:
        if entry.args is None:
            return entry
        if row.kind == "budget":
            return _raised(tail.head.run_id, codec.decode(row.args), entry)
        agent = self._connected.get(tail.head.agent)
        tool = agent.tool(row.tool or "") if agent else None
        if tool is None:
            raise UsageError(f"args can only be edited where the tool {row.tool!r} of agent {tail.head.agent!r} is known: its schema checks them",
                             hint="--app MODULE:ATTR", run_id=tail.head.run_id)  # fmt: skip
        known = {*tool.input_schema.get("properties", {}), *codec.decode(row.args)}
        if unknown := [name for name in entry.args if name not in known]:  # a slip of the pen must not run with a default instead
            raise UsageError(f"args do not fit {row.tool}: there is no {', '.join(unknown)}", run_id=tail.head.run_id)
        asked = self._of_today(tool, row.tool or "", entry.args)
        if why := tool.problem(asked):
            raise UsageError(f"args do not fit {row.tool}: {why}", run_id=tail.head.run_id)
        return entry

    @staticmethod
    def _of_today(tool: Tool[..., Any], name: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Edited arguments are those of the tool that was asked about; where that is an older name, newer code upgrades them before they run."""
        if tool.upgrade is None or name == tool.name:
            return args
        try:
            return tool.upgraded(name, args)
        except Exception as e:  # noqa: BLE001 - a person's function: arguments that it cannot convert do not fit
            raise UsageError(f"args do not fit {name}: they could not be upgraded for {tool.name}: {type(e).__name__}: {e}") from None

    def _outside(self, run_id: str, plan: base.Plan, *, entry_id: str | None = None) -> tuple[base.Head, Any, bool]:
        head, value, written = self._store.outside(_ref(run_id), plan, entry_id=entry_id)
        if written:
            self._poke_engine(head)
        return head, value, written

    # ---- an engine takes the steps ------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine | None:
        """Who takes the steps of runs that are started here; None: the built-in worker."""
        if self._engine_made is ...:
            given = self._engine
            if given is None and (found := settings.engine()) is not None:
                given = found.value
            made = None if given is None else engines.resolve(given)
            if made is not None and hasattr(made, "beside"):  # its tables live beside ours
                made.beside(settings.store(self._given))
            self._engine_made = made
        return self._engine_made

    def use_engine(self, engine: str | Engine | None) -> None:
        """Another engine than the one that was given: `--engine` stands above the argument."""
        self._engine, self._engine_made = engine, ...

    async def step(self, run_id: str, *, deps: Any, doing: str | None = None) -> Taken:
        """Take one step of a run: what an engine's activity does. It claims for itself, and gives the lease back with what it saved.

        `doing`: the activity's name; where the next step is called otherwise, it is named and not begun. Raises StoreError: try again.
        """
        engine = self.engine
        assert engine is not None
        async with self._slots or contextlib.nullcontext():
            try:
                head = await self._blocking(self._store.head, run_id)
            except RunNotFound:  # erased
                return Taken(run_id, 0, "done", None, "gone", None)
            if head.status in base.ENDED or head.driver != engine.driver:
                return Taken(run_id, head.seq, "done", None, head.status, None)
            agent = self._agents.get(head.agent)
            if agent is None:
                return Taken(run_id, head.seq, "wait", None, "waiting_for_code", None)
            try:
                lease = await self._blocking(self._claim_for_step, run_id, engine.driver)
            except RunBusy as e:
                return Taken(run_id, head.seq, "busy", None, head.status, e.until)
            except Refused:  # moved to another driver in this moment
                return Taken(run_id, head.seq, "done", None, head.status, None)
            return await self._step_held(engine, lease, agent, deps, doing, entries=head.entries)

    def _claim_for_step(self, run_id: str, driver: str) -> base.Lease:
        """Claim; a holder that is provably dead is none."""
        try:
            return self._store.claim_run(run_id, owner.me(), lease_s=self._lease_s, driver=driver)
        except RunBusy as e:
            if not owner.provably_dead(e.owner):
                raise
        self._store.reap()
        return self._store.claim_run(run_id, owner.me(), lease_s=self._lease_s, driver=driver)

    async def _step_held(
        self, engine: Engine, lease: base.Lease, agent: Agent[Any], deps: Any, doing: str | None, *, entries: int
    ) -> Taken:  # fmt: skip
        crashpoints.point("claim.after")
        run_id = lease.run_id
        try:
            drive = self._drive_of(lease, agent, deps=deps, patience_s=0)
        except OutlastError:
            await self._blocking(lambda: self._store.release(lease))
            raise
        known = self._recent.pop(lease.run_no, None)
        if known is not None and known[0].id == run_id and known[1].entries <= entries and known[2] < lease.fence:
            drive.writer.run, drive.writer.place = known[:2]  # a journal only grows: what is new is read
        try:
            saved = await drive.step(doing)
        except LeaseLost:
            return Taken(run_id, drive.run.seq, "busy", None, "running", None)
        except StoreError:
            await self._given_back(drive)
            raise
        if not isinstance(saved.step, s.Finish):
            self._recent[lease.run_no] = (drive.writer.run, drive.writer.place, lease.fence)
            while len(self._recent) > RECENT:
                del self._recent[next(iter(self._recent))]
        for entry in saved.entries:
            if isinstance(entry, r.GateOpened) and entry.kind == "run" and entry.args:
                await self._blocking(self._tell_engine, engine.start, str(entry.args["run_id"]))
        if isinstance(saved.step, s.Finish) and drive.run.parent_run_id:
            await self._blocking(self._tell_engine, engine.wake, drive.run.parent_run_id)
        return taken(drive.run, saved.step, saved.status)

    async def _work_for(self, engine: Engine, concurrency: int, grace: timedelta, *, until_idle: bool) -> None:
        """An engine's worker, and beside it what a worker does now and then: deadlines, reminders, notices."""
        self._slots, self.grace = asyncio.Semaphore(concurrency), grace
        async with self._telling() as teller:
            working = asyncio.ensure_future(engine.worker(self))
            try:
                swept_at = float("-inf")
                while not working.done():
                    if time.monotonic() - swept_at >= self._lease_s:
                        swept_at = time.monotonic()
                        with contextlib.suppress(StoreError):
                            await self._sweeping()
                    await asyncio.wait({working}, timeout=1.0)
                    if until_idle and not working.done() and await self._blocking(self._engine_idle, engine.driver):
                        await teller.deliver()
                        if await self._blocking(self._engine_idle, engine.driver):
                            return
                await working
            finally:
                working.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await working
                self._slots = None

    def _engine_idle(self, driver: str) -> bool:
        return self._store.pending(agents=list(self._agents), driver=driver)[0] == 0

    def due_runs(self) -> list[str]:
        """This engine's runs that are due and that nobody holds: its worker pokes them, so that a lost poke costs time only."""
        assert self.engine is not None
        driver = self.engine.driver
        parked = self._store.parked(agents=list(self._agents), driver=driver)
        needs = [(agent, what) for agent, what in parked if self._satisfies(agent, what)]
        return self._store.due(agents=list(self._agents), driver=driver, needs=needs)

    def move(self, run_id: str, to: str) -> RunHead:
        """Give a run that waits to another driver: built-in, temporal, restate, dbos or inngest.

        An engine must be this application's. Raises UsageError, RunNotFound, RunBusy, Refused where the run does not wait; nothing was changed.
        """
        if to not in DRIVERS:
            raise UsageError(f"to must be one of {', '.join(DRIVERS)}, not {to!r}", run_id=run_id)
        if to != base.BUILT_IN and (self.engine is None or self.engine.driver != to):
            now = self.engine.driver if self.engine is not None else base.BUILT_IN
            raise UsageError(f"this application's driver is {now}, not {to}", hint=f"OUTLAST_ENGINE={_EXAMPLES[to]}", run_id=run_id)
        before = self._store.head(_ref(run_id))
        if before.driver == SCRIPT:
            raise Refused(f"{run_id} is driven by a program of its own", run_id=run_id, hint=f"outlast show {run_id}")
        head = self._store.drive_by(run_id, to)
        if self.engine is not None and head.driver == self.engine.driver:
            self._tell_engine(self.engine.start, run_id)
        return RunHead(**head_fields(head))

    def _poke_engine(self, head: base.Head) -> None:
        if self.engine is None or head.driver != self.engine.driver:
            return
        self._tell_engine(self.engine.cancel if head.status == "cancelled" else self.engine.wake, head.run_id)

    @staticmethod
    def _tell_engine(verb: Callable[[str], None], run_id: str) -> None:
        """The store's side stands already: an engine that cannot be reached hears of it from its worker, a little later."""
        try:
            verb(run_id)
        except OutlastError as e:
            hint = f" ({e.hint})" if e.hint else ""
            log.warning("run %s: %s%s; its worker will see it", run_id, e, hint, extra={"run_id": run_id})

    async def _until_it_waits(self, run_id: str) -> Run[Any]:
        """Until a run that somebody else drives waits for more than a moment, or is over."""
        seen: int | None = None
        while True:
            seen = await self._blocking(self._store.wait_for_change, seen, 1.0)
            head = await self._blocking(self._store.head, run_id)
            short = head.status == "waiting_for_timer" and head.wake_at is not None and head.wake_at - self._store.now() <= FOREGROUND
            if head.status in base.ENDED or (
                head.status.startswith("waiting_") and not short and not head.held and not _is_due(head, self._store.now())
            ):
                return await self._blocking(self.get, run_id)

    def _plain(self, name: str, value: Any) -> Any:
        try:
            return codec.stored(value)[1]
        except codec.Unstorable as e:
            raise UsageError(f"{name}: {e}") from None

    @staticmethod
    def _sized(name: str, value: Any) -> None:
        try:
            size = len(codec.encode(value).encode())
        except codec.Unstorable as e:
            raise UsageError(f"{name}: {e}") from None
        if size > codec.MAX_INPUT_BYTES:
            raise UsageError(
                f"{name} has {size:,} bytes as JSON; at most {codec.MAX_INPUT_BYTES:,} are kept",
                hint="put large things elsewhere and send a link",
            )


def _fresh_id() -> str:
    return new_run_id()


def _no_head() -> RunHead:
    raise AssertionError("no gate or key is asked of a run that is only looked at")


def _notice_settings() -> notices.Settings:
    env = os.environ
    return notices.Settings(env.get("OUTLAST_WEBHOOK_SECRET", ""), env.get("OUTLAST_WEBHOOK_ALLOW", ""), env.get("OUTLAST_WEB_URL", ""))


def _ends_children(before: r.Run, entries: Sequence[r.Entry]) -> list[base.ParentEntry]:
    """A run that ends while others still answer its calls (a limit was reached, its workers died) takes them along."""
    if not any(isinstance(e, r.RunEnded) for e in entries):
        return []
    waited_for = [x.opened.args for x in before.all_gates() if x.opened.kind == "run" and x.outcome is None]
    return [base.ParentEntry(str(args["run_id"]), outside.cancel(None, f"run {before.id} is over")) for args in waited_for if args]


_NOTHING: Any = object()
_CONNECTED: ContextVar[tuple[Outlast, Mapping[str, Agent[Any]]] | None] = ContextVar("outlast_connected", default=None)
_ALL = 10**9
_STATUSES: tuple[str, ...] = (
    "running", "waiting_for_approval", "waiting_for_verification", "waiting_for_budget", "waiting_for_event", "waiting_for_run", "waiting_for_timer",
    "waiting_for_code", "done", "failed", "cancelled")  # fmt: skip


def open_store(given: str | os.PathLike[str] | None, *, clock: ManualClock | None = None) -> care.CareStore:
    """The store of a URL or path; nothing is read or written yet."""
    url = settings.store(given)
    if url.kind == "postgres":
        try:
            from outlast.stores.postgres.store import PostgresStore
        except ModuleNotFoundError as e:
            raise UsageError(f"{url.shown} needs {e.name}", hint="pip install 'outlast[postgres]'") from None
        return PostgresStore(url.url, schema=url.schema, shown=url.shown, clock=clock, point=crashpoints.point)
    from outlast.stores.sqlite.store import SQLiteStore

    return SQLiteStore(url.path or ":memory:", clock=clock, point=crashpoints.point)


async def _by_hand(request: Any) -> Any:
    raise UsageError("this run is driven by hand: app.open(...)")


def _status_at(head: base.Head, row: base.JournalRow) -> Status:
    """A checkpoint's status when it was saved; the last one of a run that is over shows how it ended."""
    ended = row.seq == head.seq and head.status in base.ENDED
    return cast("Status", head.status if ended else row.status)


def _is_due(head: base.Head, now: datetime) -> bool:
    """Is somebody about to look at it? (A decision that has just come sets wake_at to now.)"""
    return head.wake_at is not None and head.wake_at <= now and head.needs is None


def taken(run: r.Run, step: s.Step, status: str) -> Taken:
    """A step's outcome as an engine sees it. Of a wait, `tool` names the calls that are open: what comes next in all likelihood."""
    match step:
        case s.Finish():
            return Taken(run.id, run.seq, "done", None, status, None)
        case s.RunCalls():
            return Taken(run.id, run.seq, "tool", named(step), status, None)
        case s.Wait(until=until):
            still_open = ", ".join(dict.fromkeys(c.name for c in run.calls if c.result is None))
            return Taken(run.id, run.seq, "wait", still_open or None, status, until)
        case _:
            return Taken(run.id, run.seq, "model", None, status, None)


def _raised(run_id: str, asked: Mapping[str, Any], entry: r.GateDecided) -> r.GateDecided:
    """The new limit that a person gives, checked: a number above what is used; of money a decimal text (or a number, which becomes one)."""
    given, used, args = (entry.args or {}).get("raise_to"), asked.get("used"), entry.args or {}
    money = asked.get("limit") == "cost_usd"
    amount = r.money(str(given)) if not isinstance(given, bool) and isinstance(given, int | float | str) else None
    spent = r.money(str(used)) if used is not None else None
    text = isinstance(given, str) and not money
    if set(args) - {"raise_to", "limit", "used"} or amount is None or text or (spent is not None and amount <= spent):
        raise UsageError(f'args of a limit must be {{"raise_to": N}} with N above {used}, not {codec.encode(args)}', run_id=run_id)
    return replace(entry, args={**args, "raise_to": f"{amount:f}"}) if money else entry


def _all_agents(agents: Sequence[Agent[Any]]) -> dict[str, Agent[Any]]:
    out: dict[str, Agent[Any]] = {}
    waiting = list(agents)
    while waiting:
        agent = waiting.pop(0)
        known = out.get(agent.name)
        if known is not None and known is not agent:
            raise UsageError(f"two agents are called {agent.name!r}")
        out[agent.name] = agent
        waiting += [t.agent for t in agent.tools if t.agent is not None and out.get(t.agent.name) is not t.agent]
    return out


def _run_id(value: object) -> str:
    if not isinstance(value, str) or not RUN_ID.match(value):
        shown = repr(value) if not isinstance(value, str) or len(value) <= 140 else f"{value[:60]!r}… ({len(value)} characters)"
        raise UsageError(f"a run id must match {RUN_ID.pattern}: 1 to 128 letters, digits, '.', '_', '-', not {shown}")
    return value


def _ref(value: object) -> str:
    """A run id that names a run; a child's holds colons."""
    if not isinstance(value, str):
        raise UsageError(f"a run id is a text, not {value!r}")
    if not all(RUN_ID.match(part) for part in value.split(":")):
        _run_id(value)
    return value


def _id(name: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 256:
        raise UsageError(f"{name} must be a text of 1 to 256 characters, not {value!r}")
    return value


def _person(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 256:
        raise UsageError(f"{name} must name a person in 1 to 256 characters, not {value!r}")
    return codec.stored(value)[1]  # type: ignore[no-any-return]  # a text stays one


def _by(value: object) -> str | None:
    return _person("by", value) if value is not None else None


def _note(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"note must be a text, not {value!r}")
    return codec.stored(value)[1] if value else None


def _limit(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10_000:
        raise UsageError(f"limit must be a number from 1 to 10000, not {value!r}")
    return value


def _tags(tags: object) -> dict[str, str]:
    if not isinstance(tags, Mapping) or len(tags) > MAX_TAGS:
        raise UsageError(f"tags must be a mapping of at most {MAX_TAGS} texts, not {tags!r:.100}")
    for key, value in tags.items():
        if not isinstance(key, str) or not 1 <= len(key) <= MAX_TAG_KEY or not isinstance(value, str) or len(value) > MAX_TAG_VALUE:
            raise UsageError(
                f"tags: keys are texts of at most {MAX_TAG_KEY}, values of at most {MAX_TAG_VALUE} characters, not {key!r:.80}: {value!r:.80}"
            )
    return dict(codec.stored(dict(tags))[1])


__all__ = ["Input", "ManualClock", "Outlast", "RunBusy", "RunNotFound", "deploy", "plans"]
