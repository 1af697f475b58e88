"""A worker: takes runs that are due and drives each until it waits or ends, many at once.

    look -> claim a batch -> drive each as a task -> look again when one is back, something changed in the store, or an instant has come

Rules
1. Correctness never depends on this loop's timing: what is due stays due until somebody claims it.
2. One run's trouble is that run's: its task ends, the others go on.
3. After the store was lost, by whatever part of this process, no lease that ran out is taken for one lease period: their holders lost it as
   well, and renew first. What was driven here is given back as soon as the store takes that: its worker lives, nobody counts a death.
4. A run whose worker died is driven alone, in a process of its own: its next death takes nobody along.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

from outlast.errors import LeaseLost, OutlastError, StoreError
from outlast.runtime.clock import monotonic
from outlast.runtime.crashpoints import point
from outlast.runtime.drive import LONGEST_PAUSE_S, POISON, STORE_PAUSE_S, Drive
from outlast.runtime.leases import Keeper
from outlast.stores import base, owner

log = logging.getLogger("outlast.worker")

IDLE_S = 1.0  # the longest wait between two looks: the safety net under every wake-up
REAP_S = 2.0  # how often dead processes' leases are looked for
SOON = timedelta(seconds=60)  # `until_idle` waits for a timer that is at most so far away
TRY_AGAIN_S = 300.0  # a need that cannot be judged ahead (does an `upgrade` work?): how often it is tried
ALONE_END_S = 15.0  # for a process that drives one run to end when it is told to, or for a claim; longer than those get themselves
SAVE_S = 5.0  # after the grace, for what has come to be saved
CUT_S = 3.0  # for what is cut off after the grace to give its lease back
ALONE_FROM = 2  # attempts: from the second on a run is driven alone


class Worker:
    """Args:
    drive: makes the Drive of a lease.
    alone: drives a lease in a process of its own, which begins nothing new once the event is set; None: not possible here, it is driven
        like the others.
    satisfies: (agent, needs) of a parked run -> does this code have it?
    """

    def __init__(
        self,
        store: base.Store,
        keeper: Keeper,
        *,
        agents: Sequence[str],
        concurrency: int,
        grace: timedelta,
        lease_s: float,
        until_idle: bool,
        drive: Callable[[base.Lease], Drive],
        blocking: Callable[..., Awaitable[Any]],
        satisfies: Callable[[str, str], bool],
        alone: Callable[[base.Lease, asyncio.Event], Awaitable[None]] | None = None,
        sweep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.store, self.keeper, self.agents, self.concurrency, self.grace = store, keeper, list(agents), concurrency, grace
        self.lease_s, self.until_idle, self.drive, self.blocking = lease_s, until_idle, drive, blocking
        self.satisfies, self.alone, self.sweep = satisfies, alone, sweep
        self.running: dict[asyncio.Task[None], Drive | None] = {}
        self.claim: asyncio.Future[Sequence[base.Lease]] | None = None  # under way
        self.taken: list[base.Lease] = []  # by the last one, and not begun yet
        self.changed = asyncio.Event()
        self.stopping = asyncio.Event()
        self.reaped_at = 0.0
        self.failed: dict[tuple[str, str], float] = {}  # needs that this code has and that still were not enough, and when
        self.unfit: dict[str, OutlastError] = {}  # agents whose model cannot be made here, and why
        self.troubled: dict[str, int] = {}  # runs that the store failed for, and how often in a row
        self.ready = False
        self.lost_at = float("-inf")  # when the store failed last, as far as this loop and its runs know

    async def __call__(self) -> None:
        """Work until cancelled (which drains), or with `until_idle` until every unfinished run waits."""
        watcher = asyncio.ensure_future(self._watch())
        try:
            while True:
                await self._take()
                if self.until_idle and not self.running and await self._idle():
                    return
                await self._pause()
        except (Exception, asyncio.CancelledError):  # whatever ends this loop, what it took is driven to a good place and goes back
            await self._drain()
            raise
        finally:
            watcher.cancel()
            for task in self.running:
                task.cancel()

    # ---- finding work -------------------------------------------------------------------------------------------------------

    async def _take(self) -> None:
        free = self.concurrency - len(self.running)
        if free <= 0:
            return
        try:
            if monotonic() - self.reaped_at >= REAP_S:
                self.reaped_at = monotonic()
                if self._may_take_over():
                    await self.blocking(self.store.reap)
            parked = await self.blocking(lambda: self.store.parked(agents=self.agents))
            needs = [x for x in parked if monotonic() - self.failed.get(x, float("-inf")) >= TRY_AGAIN_S and self.satisfies(*x)]
            await self._claim(free, needs)
            self.ready = True
        except StoreError as e:
            self.ready = False
            self._lost_store()
            log.warning("no work could be taken: %s", e)
            return
        nothing_to_do: OutlastError | None = None
        while self.taken:
            lease = self.taken[0]
            point("claim.after")
            try:
                self._begin(lease)
                self.unfit.pop(lease.agent, None)
            except OutlastError as e:
                await self._leave(lease, e)
                if len(self.unfit) == len(self.agents):
                    nothing_to_do = e
            del self.taken[0]
        if nothing_to_do is not None:
            raise nothing_to_do

    def _lost_store(self) -> None:
        self.lost_at = monotonic()

    def _may_take_over(self) -> bool:
        """May a lease that ran out be taken? Not while, and for one lease period after, the store is lost."""
        return monotonic() >= max(self.lost_at, self.keeper.lost_at) + self.lease_s

    async def _leave(self, lease: base.Lease, e: OutlastError) -> None:
        """A run whose agent cannot be driven here, its model cannot be made, say: held for a worker that can. The other agents go on."""
        if lease.agent not in self.unfit:
            about = {"run_id": lease.run_id, "worker": owner.short(lease.owner), "fence": lease.fence}
            log.error(
                "agent %s cannot be driven here: %s%s; its runs are held", lease.agent, e, f" ({e.hint})" if e.hint else "", extra=about
            )
        self.unfit[lease.agent] = e
        needs = f"model:{lease.agent}"
        self.failed[lease.agent, needs] = monotonic()
        head = base.NewHead(status="waiting_for_code", reason=f"agent {lease.agent} cannot be driven: {e}", release=True, needs=needs)
        with contextlib.suppress(StoreError):  # else its lease runs out
            await self.blocking(lambda: self.store.mark(lease, head))

    async def _claim(self, limit: int, needs: Sequence[tuple[str, str]]) -> None:
        """A claim under way when the worker is stopped counts as made: `_drain` gives back what it takes."""
        self.claim = asyncio.ensure_future(self.blocking(
            lambda: self.store.claim(
                owner.me(), agents=self.agents, limit=limit, lease_s=self.lease_s, needs=needs, over=self._may_take_over())))  # fmt: skip
        self.taken = list(await asyncio.shield(self.claim))
        self.claim = None

    def _begin(self, lease: base.Lease) -> None:
        if ALONE_FROM <= lease.attempts < POISON and self.alone is not None:
            task = asyncio.ensure_future(self.alone(lease, self.stopping))
            self.running[task] = None
        else:
            drive = self.drive(lease)
            task = asyncio.ensure_future(self._drive(drive))
            self.running[task] = drive
        task.add_done_callback(self._back)

    async def _drive(self, drive: Drive) -> None:
        run_id = drive.writer.lease.run_id
        try:
            step = await drive()
            if needs := getattr(step, "needs", None):
                self.failed[drive.writer.lease.agent, needs] = monotonic()
            log.info("run %s: %s", run_id, getattr(step, "status", "given back"), extra=drive.writer.about())
            self.troubled.pop(run_id, None)
        except LeaseLost as e:
            log.warning("run %s: %s; stopped", run_id, e, extra=drive.writer.about())
        except StoreError as e:
            self._lost_store()
            log.error("run %s: %s; it is given back when the store takes that", run_id, e, extra=drive.writer.about())  # noqa: TRY400 - likewise
            self.troubled[run_id] = times = self.troubled.get(run_id, 0) + 1
            await drive.hand_back(min(STORE_PAUSE_S * 2 ** min(times - 1, 10), LONGEST_PAUSE_S))
        except OutlastError as e:
            log.error("run %s: %s", run_id, e, extra=drive.writer.about())  # noqa: TRY400 - said in one line; a trace would tell nobody more
        except Exception:
            log.exception("run %s: a bug of ours; its lease will run out and it is tried again", run_id, extra=drive.writer.about())

    def _back(self, task: asyncio.Task[None]) -> None:
        self.running.pop(task, None)
        self.changed.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("a run's task ended badly: %r", task.exception())

    async def _pause(self) -> None:
        """Until a run is back, the store changed, or the safety net's time."""
        news = asyncio.ensure_future(self.changed.wait())
        try:  # not `wait_for`: before Python 3.12 it can swallow a cancellation, and the worker would never drain
            await asyncio.wait({news}, timeout=IDLE_S)
        finally:
            news.cancel()
        self.changed.clear()

    async def _watch(self) -> None:
        """Wakes the loop when something was committed: an idle worker sleeps on the store, not on a timer."""
        seen: int | None = None
        swept_at = monotonic()
        while True:
            try:
                seen = await self.blocking(lambda seen=seen: self.store.wait_for_change(seen, IDLE_S))
                self.changed.set()
                if self.sweep is not None and monotonic() - swept_at >= self.lease_s:
                    swept_at = monotonic()
                    await self.sweep()
            except StoreError as e:
                self._lost_store()
                log.warning("%s", e)
                await asyncio.sleep(IDLE_S)
            except Exception:
                log.exception("a bug of ours; this worker goes on watching")  # or no deadline is swept here any more, and nobody would know
                await asyncio.sleep(IDLE_S)

    async def _idle(self) -> bool:
        """Does every unfinished run of these agents wait (a timer: for longer than a minute)?"""
        try:
            count, _ = await self.blocking(lambda: self.store.pending(agents=self.agents, within=SOON))
        except StoreError as e:
            self._lost_store()
            log.warning("%s", e)
            return False
        return bool(count == 0)

    # ---- stopping -------------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """No new claims; what runs begins nothing new and gets the grace time, what comes in is saved, leases go back at once."""
        if self.running:
            log.info("stopping: %d running get %s s", len(self.running), self.grace.total_seconds())
        self.stopping.set()
        for drive in self.running.values():
            if drive is not None:
                drive.drain(self.grace)
        giving_back = asyncio.ensure_future(self._give_back_unbegun())
        await asyncio.wait({giving_back, *self.running}, timeout=self.grace.total_seconds() + SAVE_S)
        for drive in self.running.values():
            if drive is not None:  # the store takes nothing any more: what is begun and unsaved is in doubt, and this process may end
                drive.writer.stopped.set()
        alone = [task for task, drive in self.running.items() if drive is None]
        for task in self.running:
            task.cancel()
        await asyncio.wait({giving_back, *self.running}, timeout=ALONE_END_S if alone or not giving_back.done() else CUT_S)

    async def _give_back_unbegun(self) -> None:
        if self.claim is not None:
            await asyncio.wait({self.claim})
            if not self.claim.cancelled() and self.claim.exception() is None:
                self.taken = list(self.claim.result())
        for lease in self.taken:
            with contextlib.suppress(StoreError):  # given back already by what was stopped on its way, or it runs out
                await self.blocking(lambda lease=lease: self.store.release(lease))
