"""Driving one run under one lease: next_step -> perform -> append, until it waits or ends.

    load -> save([]) -> CallModel  -> ask the model   -> save(answer) -> …
                        RunCalls   -> side by side    -> save(result) as each comes, and whatever follows at that moment
                        Wait       -> released in the append that found it; a short timer is slept through
                        Finish     -> released in the append that found it

While calls run, the next step is asked again whenever a result or an outside entry comes or an instant of the run passes: a gate beside a
ten-minute call is not deaf. The store is blocking and is reached through the app's threads; model and tools are awaited here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from outlast.agent import Agent
from outlast.core import codec
from outlast.core import messages as m
from outlast.core import run as r
from outlast.core import step as s
from outlast.documents import Event, Gate, RunHead, gate_of, head_fields
from outlast.errors import InvariantViolated, LeaseLost, ModelError, OutlastError, SchemaTooNew, StoreError, ToolFailed, UsageError
from outlast.models.base import Model, ModelRequest
from outlast.prices import Prices, cost, name_of, usage_of
from outlast.runtime import metrics, perform, telemetry
from outlast.runtime.clock import monotonic
from outlast.runtime.crashpoints import point
from outlast.runtime.leases import Keeper
from outlast.runtime.news import News, Stop
from outlast.runtime.outside import worker_died
from outlast.runtime.writer import Facts, Saved, Writer
from outlast.stores import base, owner
from outlast.tools import Tool, ToolContext

log = logging.getLogger("outlast.worker")
T = TypeVar("T")

LATE_START = timedelta(seconds=30)  # an intent that was saved longer ago is not acted upon any more
POISON = 5  # deaths of a worker in a row, without a message, a result or a gate in between
STORE_PAUSE_S = 1.0  # before a call whose intent could not be saved is begun again, beside others that run
LONGEST_PAUSE_S = 30.0  # between attempts to give a lease back while the store fails
GIVE_UP_S = 20.0  # how long one that is stopped tries to save what it has
CHARS_PER_TOKEN = 4  # rough: for the cost of a model call whose answer was lost


class Drive:
    """One run, held.

    Args:
        lease: it is released when `__call__` returns, unless it was lost.
        agent: the code of the lease's agent; `model` is its model, resolved.
        deps: what tools get as `ctx.deps`.
        listen: gets the events of this run, in this process, never awaited.
        patience: timers that are at most so far away are slept through.
    """

    def __init__(
        self,
        store: base.Store,
        lease: base.Lease,
        agent: Agent[Any],
        model: Model,
        *,
        writer: Callable[[Writer], None] = lambda writer: None,
        deps: Any,
        listen: Callable[[Event], None],
        keeper: Keeper,
        threads: Executor,
        patience: timedelta,
        lease_s: float,
        guarded: bool = False,
        prices: Prices = {},
        sleeps: bool = True,
    ) -> None:
        self.store, self.agent, self.model, self.deps, self.prices = store, agent, model, deps, prices
        self.listen, self.keeper, self.threads, self.patience, self.sleeps = listen, keeper, threads, patience, sleeps
        self.head_row: base.Head | None = None
        self.writer = Writer(store, lease, agent.policy(self.head, guarded=guarded, prices=prices), keep=self._keep, lease_s=lease_s)
        writer(self.writer)
        self.saving = asyncio.Lock()
        self.tasks: dict[str, asyncio.Task[r.Entry | None]] = {}
        self.news = News()
        self.gone: asyncio.Event | None = None  # the lease, for the calls of a program that drives by hand: there may be many side by side
        self.unsaved: Sequence[r.Entry] = ()  # what has come and is on its way into the store
        self.asked: asyncio.Task[Sequence[r.Entry]] | None = None  # the model call that is under way
        self.reached = False  # it has reached the model: it may be paid for
        self.intended: dict[str, int] = {}  # attempts whose intent this drive saves
        self.acting: set[str] = set()  # calls whose act has begun here
        self.lost = False
        self.draining = False
        self.drained_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.segment = telemetry.Segment(None)  # of a program that drives by hand: its own spans are there

    @property
    def run(self) -> r.Run:
        return self.writer.run

    def head(self) -> RunHead:
        """The run's head as of now, for `when`, `key` and `instructions`."""
        assert self.head_row is not None
        run = self.run
        now = replace(
            self.head_row, seq=run.seq, model_calls=run.model_calls, input_tokens=run.input_tokens, output_tokens=run.output_tokens,
            cache_read_tokens=run.cache_read_tokens, cache_write_tokens=run.cache_write_tokens,
            cost_usd=f"{run.cost_usd:f}" if run.cost_usd is not None else None, status=self.writer.status or self.head_row.status)  # fmt: skip
        return RunHead(**head_fields(now))

    def drain(self, grace: timedelta) -> None:
        """Begin nothing new; what runs gets `grace`, then the lease goes back, due at once."""
        self.draining = True
        self.drained_at = monotonic() + grace.total_seconds()
        self.news.set()

    def lose(self) -> None:
        """The lease is gone: from the keeper's thread, also between two calls of a program that drives by hand."""
        self.lost = True
        if self._loop is not None and self.gone is not None:
            with contextlib.suppress(RuntimeError):  # nobody waits in a loop that is closed
                self._loop.call_soon_threadsafe(self.gone.set)

    # ---- the loop -----------------------------------------------------------------------------------------------------------

    async def __call__(self) -> s.Wait | s.Finish | None:
        """Drive until the run waits or ends; None: it was given back for somebody else to go on.

        Raises LeaseLost (what was running is stopped; results that come late are filed as such) and StoreError.
        """
        with self._traced():
            return await self._until_released()

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """One time that this run is driven: a segment. It ends with the lease, so no span is open while the run waits."""
        with telemetry.segment(self.writer.lease, owner.short(self.writer.lease.owner), name_of(self.agent.model)) as self.segment:
            self.writer.traceparent = self.segment.traceparent()
            try:
                yield
            finally:
                self._tell_heard()
                self.segment.end(self.writer.status, self.run.seq)

    def _hold(self) -> None:
        """Have the lease kept. The loop comes first: the keeper's thread may have something to tell it at once."""
        self._loop = asyncio.get_running_loop()
        self.keeper.add(self.writer.lease, self._news)

    async def _until_released(self) -> s.Wait | s.Finish | None:
        self._hold()
        try:
            saved = await self._begin()
            while not saved.released:
                saved = await self._take(saved.step)
            point("release.after")
            return saved.step if isinstance(saved.step, s.Wait | s.Finish) else None
        except asyncio.CancelledError:
            await self._give_back()
            raise
        finally:
            self.keeper.remove(self.writer.lease)
            stopped = await self._stop_tasks()
            self._file_late([*self.unsaved, *stopped])

    async def step(self, doing: str | None = None) -> Saved:
        """One step (a model call, or a batch of calls) and the lease goes back in the append that saves it: for an engine's activity.

        `doing`: what the activity is called. Where the next step is another one, nothing is begun: the lease goes back, due at once.
        """
        with self._traced():
            return await self._one_step(doing)

    async def _one_step(self, doing: str | None) -> Saved:
        self._hold()
        try:
            saved = await self._begin()
            if doing is not None and not saved.released and not self.writer.lease.taken_over and named(saved.step) not in (doing, None):
                self.draining = True
                saved = await self._save([])
            if not saved.released:
                if isinstance(saved.step, s.RunCalls):
                    self._start(saved.step.calls)
                work = asyncio.ensure_future(self._ask_model() if isinstance(saved.step, s.CallModel) else self._beside())
                self.draining = True
                saved = await work
            while not saved.released:
                if isinstance(saved.step, s.RunCalls) and self.drained_at is None:  # let through while others run: the same batch
                    self._start(saved.step.calls)
                    saved = await self._beside()
                else:
                    saved = await self._take(saved.step)
            point("release.after")
            return saved
        except asyncio.CancelledError:
            await self._give_back()
            raise
        finally:
            self.keeper.remove(self.writer.lease)
            stopped = await self._stop_tasks()
            self._file_late([*self.unsaved, *stopped])

    def _start(self, calls: Sequence[s.RunCall]) -> None:
        for call in calls:
            self.tasks[call.call_id] = asyncio.ensure_future(self._call(call))

    async def _beside(self) -> Saved:
        """What remains beside the calls that were just started: until when it waits was not asked before they were."""
        return self.writer.beside(tuple(self.tasks)) or await self._save([])

    async def _give_back(self) -> None:
        """Our own task was cancelled: save what has come, give the lease back, due at once."""
        self.drain(timedelta(0))
        if self.writer.released:  # by the very save that was under way
            return
        asyncio.get_running_loop().call_later(GIVE_UP_S, self.writer.stopped.set)
        stopped = [*await self._cut(), *await self._stop_tasks()]
        try:
            await self._save([*self.unsaved, *stopped])
        except OutlastError as e:
            log.warning("run %s: its lease could not be given back: %s", self.run.id, e, extra=self.writer.about())

    async def hand_back(self, pause_s: float = STORE_PAUSE_S) -> None:
        """After a StoreError: this process lives, so the lease is kept, and given back as soon as the store takes that.

        So nobody counts a death or a lost model call: nothing is under way. The pause comes first, or a run whose rows alone cannot be read
        would be taken again at once, for ever.
        """
        if self.writer.released:
            return
        lease = self.writer.lease
        self._hold()
        try:
            while await self._paused(pause_s):
                try:
                    await self._blocking(self.store.release, self.writer.lease)
                except StoreError as e:
                    log.warning("run %s: its lease could not be given back yet: %s", lease.run_id, e, extra=self.writer.about())
                    if self.drained_at is not None and monotonic() >= self.drained_at:
                        return  # its lease runs out
                    pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                else:
                    return
        finally:
            self.keeper.remove(lease)

    async def _paused(self, pause_s: float) -> bool:
        """Wait, but not past a stop: is the lease still ours?"""
        end = monotonic() + (pause_s if self.drained_at is None else min(pause_s, STORE_PAUSE_S))
        while not self.lost and (left := end - monotonic()) > 0:
            self.news.clear()
            news = self.news.arrived()
            try:
                await asyncio.wait({news}, timeout=left)
            finally:
                news.cancel()
            if self.drained_at is not None:
                break
        return not self.lost

    async def one(self, call: s.RunCall, after: Callable[[Saved], None]) -> Saved:
        """Run one call and save what came of it: for a program that drives by hand. One whose lease is lost is stopped at once.

        `after` hears what was saved, also where nobody waits for it any more: before a stop is raised, the result that has come is saved, or
        that the outcome is unknown, so that nothing is run again which may have acted.
        """
        if self._loop is not (loop := asyncio.get_running_loop()) or self.gone is None:
            if self.tasks:
                raise UsageError(
                    f"calls of run {self.run.id} are under way in another event loop",
                    hint="run the calls of one run in one loop, or one by one",
                )
            self._loop, self.saving, self.news, self.gone = loop, asyncio.Lock(), News(), asyncio.Event()
        self._raise_if_lost()
        calling = self.tasks[call.call_id] = asyncio.ensure_future(self._call(call))
        gone = asyncio.ensure_future(self.gone.wait())
        stop: asyncio.CancelledError | None = None
        giving_up = Stop()  # of this call's save alone
        timer: asyncio.TimerHandle | None = None
        try:
            try:
                await asyncio.wait({calling, gone}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as e:
                stop, timer = e, loop.call_later(GIVE_UP_S, giving_up.set)
            if not calling.done():
                calling.cancel()
                try:
                    await asyncio.wait({calling}, timeout=2 * perform.GRACE_S)
                except asyncio.CancelledError as e:  # a second stop means it: no more grace, and what cannot be saved at once is not
                    stop = stop or e
                    giving_up.set()
            self._raise_if_lost(calling)
            if stop is None:
                calling.result()
            saving = self._save_called(call.call_id, calling, after, giving_up, stopped=stop is not None)
            saved = await self._to_its_end(asyncio.ensure_future(saving), giving_up)
        except BaseException as e:
            self.tasks.pop(call.call_id, None)
            if stop is None or e is stop:
                raise
            raise stop from e
        finally:
            gone.cancel()
            if timer is not None:
                timer.cancel()
            if not self.tasks:
                self.writer.stopped = Stop()  # set by a stop that met an intent; what comes next is another matter
        if stop is not None:
            raise stop
        return saved

    async def _save_called(
        self, call_id: str, calling: asyncio.Task[r.Entry | None], after: Callable[[Saved], None], giving_up: Stop, *, stopped: bool
    ) -> Saved:
        # Taken off `tasks` under the lock only: what is decided for another call before knows that this one is not in doubt. And by now its
        # intent is saved or not.
        async with self.saving:
            fact = self._stopped(call_id, calling, "it") if stopped else calling.result()
            facts = [fact] if fact is not None else []
            self.tasks.pop(call_id, None)
            with self._filing(facts):
                saved = await self._blocking(lambda: self.writer.save(facts, tuple(self.tasks), stop=giving_up))
            after(saved)
            return saved

    async def _begin(self) -> Saved:
        try:
            await self._blocking(self.writer.load)
        except SchemaTooNew as e:
            return await self._park(e)
        except InvariantViolated as e:
            return await self._mark(e)
        self.head_row = await self._blocking(self.store.head, self.writer.lease.run_id)
        self.lost = self.lost or self.head_row.fence != self.writer.lease.fence  # we were stopped past our lease: nothing is asked under it
        self._raise_if_lost()
        self.writer.status, self.writer.needed = self.head_row.status, self.head_row.needs
        self.segment.follows(self.writer.traced_before)
        return await self._save(self.found_on_take_over)

    async def _mark(self, e: OutlastError) -> Saved:
        """A run whose journal cannot be read is stopped and marked; the others go on."""
        head = base.NewHead(status="failed", reason=str(e), release=True)
        await self._blocking(lambda: self.store.mark(self.writer.lease, head))
        log.error("run %s: %s", self.writer.lease.run_id, e, extra=self.writer.about())
        self.writer.released = True
        return Saved(s.Finish("failed", str(e)), (), "failed", str(e), released=True)

    async def _park(self, e: SchemaTooNew) -> Saved:
        """A run of a newer journal format is left for code that knows it: only its head says so."""
        wait = s.Wait("waiting_for_code", str(e), None, e.needs)
        head = base.NewHead(status=wait.status, reason=wait.reason, release=True, needs=wait.needs)
        await self._blocking(lambda: self.store.mark(self.writer.lease, head))
        log.warning("run %s: %s", self.writer.lease.run_id, e, extra=self.writer.about())
        self.writer.released = True
        return Saved(wait, (), wait.status, wait.reason, released=True)

    def found_on_take_over(self, run: r.Run, now: datetime) -> list[r.Entry]:
        """What a claim of a lease that nobody released has to write down first."""
        lease = self.writer.lease
        return taken_over(run, self.writer.policy, now, lease.attempts) if lease.taken_over else []

    async def _take(self, step: s.Step) -> Saved:
        match step:
            case s.CallModel() if not self.draining:
                return await self._ask_model()
            case s.RunCalls(calls) if not self.draining:
                self._start(calls)
                return await self._beside()
            case s.Wait(until=until):
                return await self._listen(until)
            case s.Finish():
                raise InvariantViolated(f"run {self.run.id} is over and its lease was kept", run_id=self.run.id)
            case _:  # draining
                return await (self._listen(None) if self.tasks else self._save([]))

    async def _listen(self, until: datetime | None) -> Saved:
        """Until a call is back, something came from outside, or an instant of the run has passed."""
        timeout = (until - self.store.now()).total_seconds() if until and self.sleeps else None
        if self.drained_at is not None:
            left = self.drained_at - monotonic()
            timeout = min(left, timeout) if timeout is not None else left
        news = self.news.arrived()
        try:
            await asyncio.wait(
                {*self.tasks.values(), news},
                timeout=max(timeout, 0.001) if timeout is not None else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            news.cancel()
        self._raise_if_lost()
        self.news.clear()
        if self.drained_at is not None and monotonic() >= self.drained_at:
            return await self._save(await self._stop_tasks())
        done = [call_id for call_id, task in self.tasks.items() if task.done()]
        if not done:
            await self._read_on()
        return await self._save(await self._results(done))

    async def _read_on(self) -> None:
        """What others wrote. A store that fails takes no call along that runs: it is asked again a little later."""
        try:
            async with self.saving:
                await self._blocking(self.writer.load)
        except LeaseLost:
            raise
        except StoreError as e:
            if not self.tasks:
                raise
            log.warning("run %s: what is new could not be read yet: %s", self.run.id, e, extra=self.writer.about())
            asyncio.get_running_loop().call_later(STORE_PAUSE_S, self.news.set)

    async def _results(self, done: Sequence[str]) -> Sequence[r.Entry]:
        """What the calls that are back leave. A call that could not begin takes no other's result along, nor a call that still runs."""
        facts: list[r.Entry] = []
        failed: list[Exception] = []
        for call_id in done:
            try:
                fact = self.tasks.pop(call_id).result()
            except Exception as e:  # noqa: BLE001 - its intent could not be saved, the lease is lost, a bug of ours: raised below
                failed.append(e)
            else:
                facts += [fact] if fact is not None else []
        self.unsaved = facts
        for raised in failed:
            again = isinstance(raised, StoreError) and not isinstance(raised, LeaseLost)
            if not again or not (facts or self.tasks):
                raise raised
            log.warning("run %s: a call could not begin yet: %s", self.run.id, raised, extra=self.writer.about())
        if failed:
            await asyncio.sleep(STORE_PAUSE_S)
        return facts

    def _keep(self, step: s.Step, now: datetime) -> bool:
        """A short timer is slept through: giving the lease back would cost more than it frees."""
        if self.draining or not self.sleeps:
            return False
        return (
            isinstance(step, s.Wait) and step.status == "waiting_for_timer" and step.until is not None and step.until - now <= self.patience
        )

    # ---- the model ------------------------------------------------------------------------------------------------------------

    async def _ask_model(self) -> Saved:
        self.asked = task = asyncio.ensure_future(self._ask())
        try:
            return await self._heard_or_stopped(task)
        finally:
            task.cancel()

    async def _cut(self) -> Sequence[r.Entry]:
        """Stop the model call that is under way: what it answered after all, or that it may have to be paid for."""
        task, self.asked = self.asked, None
        if task is None:
            return []
        task.cancel()
        await asyncio.wait({task}, timeout=perform.GRACE_S)
        if task.done() and not task.cancelled() and task.exception() is None:
            return task.result()
        return [model_call_lost(self.run, self.writer.policy)] if self.reached else []

    async def _heard_or_stopped(self, task: asyncio.Task[Sequence[r.Entry]]) -> Saved:
        while not task.done():
            news = self.news.arrived()
            left = self.drained_at - monotonic() if self.drained_at is not None else None
            await asyncio.wait({task, news}, timeout=max(left, 0.001) if left is not None else None, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            self.news.clear()
            if task.done():
                break
            if self.lost or (self.drained_at is not None and monotonic() >= self.drained_at):
                cut = await self._cut()
                self._raise_if_lost()
                return await self._save(cut)
        self.asked = None
        if task.cancelled():  # not by us: the model's failure, or its worker would take it for a stop of its own
            return await self._save([self._model_failed(ModelError("the model call was cancelled by itself", retryable=True))])
        return await self._save(task.result())

    async def _ask(self) -> Sequence[r.Entry]:
        run, seq = self.run, self.run.seq + 1
        emitted = False

        def emit(text: str) -> None:
            nonlocal emitted
            emitted = True
            self.listen(Event("text", run.id, seq, text, None, None, self.store.now()))

        started, self.reached = monotonic(), False
        try:
            request = ModelRequest(
                messages=list(run.messages), instructions=self.agent.instructions_for(self.head()), tools=[t.schema for t in self.agent.tools],
                output_schema=self.agent.output_schema, settings=self._settings(), emit=emit)  # fmt: skip
            point("model.before")
            self.reached = True
            answer: Any = self.model(request)
            if asyncio.iscoroutine(answer) or isinstance(answer, asyncio.Future):
                answer = await answer
            point("model.after")
            return self._heard(answer, {"latency_ms": int((monotonic() - started) * 1000), "attempt": run.model_failures + 1})
        except asyncio.CancelledError:  # a stop of ours, or the model's own: whoever waits for this task knows
            if emitted:
                self.listen(Event("reset", run.id, seq, None, None, None, self.store.now()))
            raise
        except (LeaseLost, StoreError):
            raise
        except Exception as e:  # noqa: BLE001 - a person's model: anything may come
            failed = self._model_failed(e)
        if emitted:
            self.listen(Event("reset", run.id, seq, None, None, None, self.store.now()))
        return [failed]

    def _heard(self, answer: Any, beside: dict[str, Any]) -> list[r.Entry]:
        try:
            entries = s.heard(self.run, answer, self.writer.policy)
        except (m.BadMessage, codec.Unstorable) as e:
            return [r.ModelFailed(f"the model's answer cannot be saved: {e}", self.run.model_failures + 1, None)]
        first = entries[0]
        said = first.meta or {}
        paid = cost(self._model_name(said), usage_of(said.get("usage")), self.prices)
        if paid is not None:
            beside["cost_usd"] = f"{paid:f}"
        return [r.headed(first, meta={**said, **beside}), *entries[1:]]

    def _model_name(self, said: Mapping[str, Any]) -> str | None:
        """Whose price counts: the model that was asked where its price was given, else the one that says it answered."""
        asked, named = name_of(self.agent.model), said.get("model")
        return asked if asked in self.prices or not isinstance(named, str) else named

    def _settings(self) -> dict[str, Any]:
        """The agent's settings, and the container that the last answer ran in."""
        settings = dict(self.agent.model_settings)
        container = self.writer.container()
        return {**settings, "container": container} if container and "container" not in settings else settings

    def _model_failed(self, e: Exception) -> r.ModelFailed:
        attempt, retry = self.run.model_failures + 1, self.agent.retry
        retryable = isinstance(e, ModelError) and e.retryable
        why = str(e) if isinstance(e, OutlastError) else f"the model failed: {type(e).__name__}: {' '.join(str(e).split())[:2000]}"
        status = e.status if isinstance(e, ModelError) else None
        if not retryable or attempt >= retry.attempts:
            tried = f" (tried {m.plural(attempt, 'time')})" if attempt > 1 else ""
            hint = f"; {e.hint}" if isinstance(e, OutlastError) and e.hint and e.hint not in why else ""
            return r.ModelFailed(f"{why}{tried}{hint}", attempt, None, status)
        delay = retry.delay(attempt, e.retry_after if isinstance(e, ModelError) else None)
        return r.ModelFailed(why, attempt, self.store.now() + delay, status)

    # ---- the calls --------------------------------------------------------------------------------------------------------------

    async def _call(self, call: s.RunCall) -> r.Entry | None:
        """One call by its effect: the fact that came of it, or None where nothing was begun because something came in between."""
        entry, tool = self.run.call(call.call_id), self.agent.tool(call.name)
        if entry is None or tool is None or entry.result is not None:
            return None
        if call.intent and entry.started is not None and entry.started.attempt >= call.attempt:
            return None  # decided before that attempt began, of which nobody knows what became: it is decided again
        late = self._late_for(call, entry)
        if call.check:
            outcome = await perform.look(call, tool, self._context(call, tool, entry))
            if outcome.kind == "happened":
                content, is_error = codec.result_content(outcome.result)
                return r.CallFinished(call.call_id, content, is_error=is_error, how="verified")
            if outcome.kind == "unknown":
                return r.CallDoubted(call.call_id, outcome.reason or "the check cannot tell", checked=True)
            if entry.doubt is not None:  # an exception, and surely not done: the model may read it
                return r.CallFinished(call.call_id, f"{call.name} failed: {entry.doubt}", is_error=True)
        begun_at = monotonic()
        if call.before is not None and self.store.now() >= call.before:  # since that was decided this process was stopped, say
            return None
        self.acting.discard(call.call_id)
        self.intended[call.call_id] = call.attempt
        if call.intent and not await self._intend(call, tool, entry):
            return None
        if call.intent and monotonic() - begun_at >= LATE_START.total_seconds():
            return r.CallSkipped(call.call_id, f"it could not begin within {LATE_START.seconds} s of its intent")
        self._raise_if_lost()
        started = monotonic()
        context = self._context(call, tool, entry)
        self.acting.add(call.call_id)
        with telemetry.tool(call, self.run.id, context.attempt) as tell:
            ended = await perform.act(call, tool, context, late)
            tell(ended)
        self._counted(call, context.attempt, ended)
        fact = perform.fact(call, self.run.call(call.call_id) or entry, tool, ended, self.store.now())
        fact = replace(fact, meta={"ms": int((monotonic() - started) * 1000), "attempt": call.attempt})
        return replace(fact, effect=call.effect) if isinstance(fact, r.CallFinished) else fact

    @staticmethod
    def _counted(call: s.RunCall, attempt: int, ended: perform.Ended) -> None:
        """A repeated attempt may be the same effect once more: it is counted apart."""
        if attempt > 1:
            metrics.add("outlast_replays_total", tool=call.name)
        elif call.effect != "read" and not isinstance(ended.raised, ToolFailed):
            metrics.add("outlast_effects_total", tool=call.name)

    async def _intend(self, call: s.RunCall, tool: Tool[..., Any], decided_on: r.Call) -> bool:
        lasts = tool.timeout + LATE_START
        intent = r.CallStarted(
            call.call_id, call.key, call.effect, call.attempt, self.store.now() + lasts, owner.me(), codec.digest(call.args)
        )
        async with self.saving:
            # What another save or look of ours has read meanwhile (the result of a late worker, say) does not stand in the append's way.
            if self.run.call(call.call_id) is not decided_on:
                return False
            return await self._blocking(self.writer.propose, intent, lasts)

    def _context(self, call: s.RunCall, tool: Tool[..., Any], entry: r.Call) -> ToolContext[Any]:
        attempt = call.attempt + (self.writer.lease.taken_over and self.writer.fresh and not call.intent)
        return ToolContext(
            run_id=self.run.id, call_id=call.call_id, idempotency_key=call.key, agent=self.agent.name, attempt=attempt,
            deadline=self.store.now() + tool.timeout, tags=dict(self.run.tags), deps=self.deps, decision=self._decision(entry))  # fmt: skip

    def _decision(self, entry: r.Call) -> Gate | None:
        approved = entry.gate("approval")
        if approved is None or approved.outcome != "approved" or self.head_row is None:
            return None
        from outlast.core.gate import row

        return gate_of(self.head_row, row(self.run, entry, approved, approved.closed.at if approved.closed else None))

    def _late_for(self, call: s.RunCall, entry: r.Call) -> perform.Late:
        """Files a result that came too late to be one: evidence on the call; it changes no message."""
        now = self.store.now()

        def file(ended: perform.Ended) -> None:
            if (
                ended.raised is not None
                and not isinstance(ended.raised, ToolFailed)
                and (call.effect != "read" or not isinstance(ended.raised, Exception))
            ):
                return  # it leaves the outcome as unknown as it was
            late = r.LateResult(call.call_id, why="it came after its time-out, or after its lease was lost")
            if ended.raised is not None:
                late = replace(late, content=perform.describe(ended.raised), is_error=True)
            else:
                found = perform.result(entry, ended.value, now)
                if isinstance(found, r.CallFinished):
                    late = replace(late, content=found.content, is_error=found.is_error)
            self._file(late)

        def later(ended: perform.Ended) -> None:
            self._beside_us(file, ended)

        return later

    def _beside_us(self, f: Callable[..., None], *args: Any) -> None:
        """In a thread of the app's; once that is closed there is nobody to tell any more."""
        try:
            self.threads.submit(f, *args)
        except RuntimeError:
            log.warning("run %s: a late result came after the application was closed", self.run.id, extra=self.writer.about())

    @contextlib.contextmanager
    def _filing(self, facts: Sequence[r.Entry]) -> Iterator[None]:
        """They are saved here; where the lease turns out to be lost they are filed, also where a stop came at the same time."""
        try:
            yield
        except (LeaseLost, asyncio.CancelledError) as e:
            if isinstance(e, LeaseLost) or isinstance(e.__cause__, LeaseLost):
                self._file_late(facts)
            raise

    def _file_late(self, facts: Sequence[r.Entry]) -> None:
        """Results that are held when the lease is gone."""
        for fact in facts:
            if isinstance(fact, r.CallFinished) and fact.how == "result":
                late = r.LateResult(fact.call_id, fact.content, is_error=fact.is_error, why="it came after its lease was lost")
                self._beside_us(self._file, late)

    def _file(self, late: r.LateResult) -> None:
        run_id = self.writer.lease.run_id
        try:
            with self.keeper.while_open() as still:
                if still:
                    self.store.outside(run_id, lambda tail: late_result(tail, late))
                else:
                    about = self.writer.about(late.call_id)
                    log.warning("run %s: a late result of %s came after the application was closed", run_id, late.call_id, extra=about)
        except OutlastError as e:
            log.warning(
                "run %s: a late result of %s could not be filed: %s", run_id, late.call_id, e, extra=self.writer.about(late.call_id)
            )

    async def _stop_tasks(self) -> list[r.Entry]:
        """Cancel what still runs: what is begun and not answered is in doubt, unless its act surely never began, and the journal says so."""
        tasks, self.tasks = self.tasks, {}
        for task in tasks.values():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks.values(), timeout=2 * perform.GRACE_S)
        facts = [self._stopped(call_id, task, "the worker") for call_id, task in tasks.items()]
        return [fact for fact in facts if fact is not None]

    def _stopped(self, call_id: str, task: asyncio.Task[r.Entry | None], who: str) -> r.Entry | None:
        """What remains of a call whose task was told to stop."""
        call = self.run.call(call_id)
        if task.done() and not task.cancelled() and task.exception() is None and (fact := task.result()) is not None:
            return fact
        if task.done() and call is not None and self._never_acted(call):
            return r.CallSkipped(call_id, f"{who} was stopped before it began")
        if call is not None and call.begun and call.effect == "at_most_once" and call.doubt is None:
            return r.CallDoubted(call_id, f"{who} was stopped while it ran")
        return None

    def _never_acted(self, call: r.Call) -> bool:
        """Is its open intent one of ours that came to nothing? (One of an earlier attempt, by whomever, may have acted.)"""
        return call.started is not None and self.intended.get(call.id) == call.started.attempt and call.id not in self.acting

    # ---- saving -----------------------------------------------------------------------------------------------------------------

    async def _save(self, facts: Facts) -> Saved:
        self.unsaved = held = () if callable(facts) else facts
        async with self.saving:
            self.unsaved = ()  # from here on they count as saved, or are filed: whoever cancels us waits for the store
            ran_by = (self.run.agent_version, self.run.code)
            with self._filing(held):
                self._raise_if_lost()
                saved = await self._blocking(lambda: self.writer.save(facts, tuple(self.tasks), draining=self.draining))
        self.keeper.update(self.writer.lease)
        self._tell_heard()
        if self.agent.on_change == "warn" and ran_by[1] and any(isinstance(e, r.VersionChanged) for e in saved.entries):
            was, now = (version or "unnamed" for version in (ran_by[0], self.agent.version))
            log.warning("run %s goes on with other code: version %s, until now %s", self.run.id, now, was, extra=self.writer.about())
        self.tell(saved)
        return saved

    def _tell_heard(self) -> None:
        """What others wrote since we looked last."""
        heard, self.writer.heard = self.writer.heard, []
        for entry in heard:
            self.segment.entry(entry)

    def tell(self, saved: Saved) -> None:
        for entry in saved.entries:
            self.segment.entry(entry)
        seq, now = self.run.seq - sum(isinstance(e, r.MessageAdded) for e in saved.entries), saved.at or self.store.now()
        for entry in saved.entries:
            if isinstance(entry, r.MessageAdded):
                seq += 1
                self.listen(Event("checkpoint", self.run.id, seq, None, entry.message, saved.status, now))  # type: ignore[arg-type]  # a status is one of the eleven
        if saved.released and self.head_row is not None:
            status: Any = saved.status
            head = replace(
                self.head(), status=status, reason=saved.reason, updated_at=now, lease_owner=None, lease_until=None, wake_at=saved.wake_at
            )
            self.listen(Event("run", self.run.id, self.run.seq, None, None, status, now, head))

    def _news(self, renewed: base.Renewed) -> None:
        """From the keeper's thread."""
        if not renewed.held:
            self.lost = True
        elif renewed.entries <= self.writer.place.entries:
            return
        try:
            assert self._loop is not None  # it was there before the keeper heard of us
            self._loop.call_soon_threadsafe(self.news.set)
        except RuntimeError:  # the loop is gone, and this run with it
            self.keeper.remove(self.writer.lease)

    def _raise_if_lost(self, calling: asyncio.Task[r.Entry | None] | None = None) -> None:
        if self.lost:
            if calling is not None and calling.done() and not calling.cancelled() and calling.exception() is None:
                self._file_late([fact] if (fact := calling.result()) is not None else [])
            raise LeaseLost(f"run {self.run.id} is held by somebody else now", run_id=self.run.id)

    async def _blocking(self, f: Callable[..., T], *args: Any) -> T:
        """Run a store call in a thread, to its end."""
        loop = asyncio.get_running_loop()
        return await self._to_its_end(loop.run_in_executor(self.threads, contextvars.copy_context().run, f, *args), self.writer.stopped)

    async def _to_its_end(self, future: asyncio.Future[T], stopped: Stop) -> T:
        """What is begun with the store counts as made: it is waited for, however often we are cancelled.

        What it raised then is the cancellation's cause. `stopped` is set where the stop is meant, or the store takes too long.
        """
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError as stop:
            giving_up = loop.call_later(GIVE_UP_S, stopped.set) if self.drained_at is None else None  # else its worker does
            while not future.done():
                try:
                    await asyncio.wait({future})
                except asyncio.CancelledError:  # a second stop means it: what fails now is not tried again
                    stopped.set()
            if giving_up is not None:
                giving_up.cancel()
            if not future.cancelled():  # heard, or asyncio would log it as lost
                stop.__cause__ = future.exception()
            raise


def named(step: s.Step) -> str | None:
    """What an engine's page calls this step; None: it has no name of its own."""
    match step:
        case s.CallModel():
            return "model"
        case s.RunCalls(calls):
            return ", ".join(dict.fromkeys(c.name for c in calls))
        case _:
            return None


def taken_over(run: r.Run, policy: s.Policy, now: datetime, attempts: int) -> list[r.Entry]:
    """What a claim of a lease that nobody released has to write down first. `attempts`: such claims in a row, this one included."""
    if run.ended and not run.calls:
        return []
    if attempts >= POISON:
        return [*s.closing(run, "not run"), r.RunEnded("failed", f"worker died {attempts} times while {_doing(run)}")]
    died = worker_died(run.calls, now)
    facts: list[r.Entry] = [died] if died else []
    any_code = replace(policy, code="")  # whose code would be asked next does not matter: what was paid for is counted
    step = s.settled(r.fold(run, facts), any_code, now)[2]
    if isinstance(step, s.CallModel):
        facts.append(model_call_lost(run, policy))
    return facts


def model_call_lost(run: r.Run, policy: s.Policy) -> r.ModelCallLost:
    """What a model call may have cost whose answer nobody has."""
    lost = policy.next_cost(run)
    tokens = sum(len(str(x.get("content"))) for x in run.messages) // CHARS_PER_TOKEN
    return r.ModelCallLost(input_tokens=tokens, cost_usd=f"{lost:f}" if lost is not None else None)


def _doing(run: r.Run) -> str:
    """What a worker was at when it died, in words."""
    begun = [c.name for c in run.calls if c.result is None and c.begun] or [c.name for c in run.calls if c.result is None]
    return f"running tool {', '.join(begun)}" if begun else "asking the model"


def late_result(tail: base.Tail, late: r.LateResult) -> base.Outside:
    """The plan of a late result: it answers an open verification gate of its call, and is evidence else."""
    from outlast.core.gate import projection

    call = tail.run.call(late.call_id)
    entry = r.stored(replace(late, at=tail.now))
    _, rows = projection(tail.run, [entry])
    answers = call is not None and any(row.outcome is not None for row in rows)
    tells = call is not None and call.begun and not late.is_error  # whoever comes next need not ask a person
    return base.Outside([entry], status="running" if answers else None, gates=rows, wake=answers or tells)
