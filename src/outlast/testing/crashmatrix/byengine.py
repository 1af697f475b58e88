"""A process of a case whose steps an engine gives out: it is the engine's worker, starts the run there, and is its person as well.

One server serves all cases, one after another: in it each case's runs have names of their own (`Apart`), while in our store every case has
the same, so that keys and messages can be compared. What an earlier case left in the engine is told that it is over.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outlast.app import Outlast
from outlast.engines import Engine, Taken, resolve
from outlast.errors import StoreError, UsageError

if TYPE_CHECKING:
    from outlast.agent import Agent
    from outlast.app import Input
    from outlast.documents import Run
    from outlast.testing.crashmatrix.person import Person

_SDK = {"temporal": "temporalio.worker", "restate": "restate", "dbos": "dbos", "inngest": "inngest.fast_api"}
GRACE = timedelta(seconds=5)
LOOK_S = 0.2  # the store says when something was saved; what only time brings is seen so late


class Apart:
    """An engine in which the runs of one case are called `PREFIX` and their id."""

    def __init__(self, inner: Engine, prefix: str) -> None:
        self.inner, self.prefix, self.driver = inner, prefix, inner.driver

    def beside(self, store: Any) -> None:
        if hasattr(self.inner, "beside"):  # its tables live beside the store
            self.inner.beside(store)

    def start(self, run_id: str) -> None:
        self.inner.start(self.prefix + run_id)

    def wake(self, run_id: str) -> None:
        self.inner.wake(self.prefix + run_id)

    def cancel(self, run_id: str) -> None:
        self.inner.cancel(self.prefix + run_id)

    def describe(self, run_id: str) -> Mapping[str, Any]:
        return self.inner.describe(self.prefix + run_id)

    async def worker(self, app: Outlast) -> None:
        await self.inner.worker(_Named(app, self.prefix))  # type: ignore[arg-type]  # what a worker asks of an app, and no more


class _Named:
    """The app as the engine's worker knows it."""

    def __init__(self, app: Outlast, prefix: str) -> None:
        self.app, self.prefix = app, prefix

    @property
    def grace(self) -> timedelta:
        return self.app.grace

    @asynccontextmanager
    async def connected_deps(self) -> AsyncIterator[Any]:
        async with self.app.connected_deps() as deps:
            yield deps

    def due_runs(self) -> list[str]:
        return [self.prefix + run_id for run_id in self.app.due_runs()]

    async def step(self, id: str, *, deps: Any, doing: str | None = None) -> Taken:
        if not id.startswith(self.prefix):  # of an earlier case, whose store is not ours
            return Taken(id, 0, "done", None, "gone", None)
        return await self.app.step(id.removeprefix(self.prefix), deps=deps, doing=doing)


def engine_for_cases(url: str) -> None:
    """Raises UsageError where a crash test cannot go through this engine. Its SDK is imported once, for all processes that come."""
    engine = resolve(url)
    if engine is None:
        raise UsageError("--engine built-in: the crash test is that already", hint="leave --engine out")
    if engine.driver == "temporal" and _has_a_runtime():
        raise UsageError(
            "Temporal's client was used in this process: its threads are lost in the processes that a crash test forks off, and they can break",
            hint="give the crash test a process of its own: outlast crashtest --engine …, or pytest with that file alone")  # fmt: skip
    with suppress(ImportError):  # who needs it says so
        importlib.import_module(_SDK[engine.driver])


def _has_a_runtime() -> bool:
    """Of Temporal's SDK, which has no question for it that would not also forbid one from then on."""
    made = getattr(sys.modules.get("temporalio.runtime"), "_runtime_ref", None)
    return getattr(made, "_default_runtime", None) is not None


async def driven(app: Outlast, agent: Agent[Any], input: Input, run_id: str, person: Person, rounds: int) -> Run[Any] | None:
    """Be the worker until the run is over, or waits for what nobody here can give. None: it goes round and round."""
    here = asyncio.get_running_loop()
    working = asyncio.ensure_future(app.work(grace=GRACE))
    deciding: asyncio.Future[Run[Any] | None] = here.create_future()

    def decide() -> None:
        try:
            run = _decide(app, agent, input, run_id, person, rounds)
        except Exception as e:  # noqa: BLE001 - whatever it is ends the process, with its reason
            here.call_soon_threadsafe(deciding.set_exception, e)
        else:
            here.call_soon_threadsafe(deciding.set_result, run)

    threading.Thread(target=decide, name="person", daemon=True).start()  # where the worker breaks, it goes with the process
    either: set[asyncio.Future[Any]] = {working, deciding}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if working.done():  # it ends by itself only where it breaks
        working.result()
        raise StoreError("the engine's worker has ended")
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
    return await deciding


def _decide(app: Outlast, agent: Agent[Any], input: Input, run_id: str, person: Person, rounds: int) -> Run[Any] | None:
    app.start(agent, input, run_id=run_id)
    for _ in range(rounds):
        seen: int | None = None
        while not _quiet(app):
            seen = app._store.wait_for_change(seen, LOOK_S)
        run = app.get(run_id)
        if run.finished or not person.answer():
            return run
        for due in app.due_runs():  # the person's clock went on, the engine's did not
            assert app.engine is not None
            with suppress(StoreError):  # its worker sees it, a little later
                app.engine.wake(due)
    return None


def _quiet(app: Outlast) -> bool:
    """Nobody holds a run and none is due: only a decision, or time, can change anything."""
    heads = app.runs(unfinished=True, limit=1000)
    return not any(head.lease_owner is not None for head in heads) and not app.due_runs()
