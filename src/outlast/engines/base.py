"""What an engine is to us: it only decides when a step is taken.

Our store stays the truth. The engine's workflow is a frozen, versioned loop that knows nothing of agents:

    take a step -> done: return; wait: race the wake signal with the absolute deadline, on the engine's clock; else again

Rules
1. Messages never pass through an engine; what does is a `Taken`: {run_id, seq, kind, tool, status, wake_at}.
2. Every attempt of an activity claims for itself: a fence never travels through the engine, so a retry and a zombie never share one.
3. `start` is idempotent: the engine's own id is the run id. `wake` may be lost: the worker pokes what is due again every `POKE_S`.
4. Retries are ours, as a wait in the store; the engine itself retries only a lost worker or an unreachable store.
5. An engine's SDK is imported inside its adapter's methods, never at the top.
6. Tools run on the loop of `worker()`, where their connections live, whatever thread the engine calls from (`Steps`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib.metadata
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from outlast.core.run import iso
from outlast.errors import StoreError, UsageError

if TYPE_CHECKING:
    from outlast.app import Outlast

log = logging.getLogger("outlast.engine")

POKE_S = 30.0  # how often an engine's worker pokes each run of its driver that is due and unheld
LOOK_S = 1.0  # after the end of a run: was it taken up again while its workflow ended, and missed the wake?
BUSY_S = 1.0  # somebody else holds the run: look again after so long
SLACK_S = 0.01  # past a deadline, so that the store's clock has seen it too
LATE_S = 0.1  # the engine's clock says that a deadline has passed and the store's does not yet: look again after so long
CALL_S = 10.0  # for one call of an engine: start, wake, describe
LOOP_VERSION = 1  # of the frozen loop: part of its name in the engine, so that a changed loop never meets an old history
NAME = f"outlast-run-v{LOOP_VERSION}"  # of the workflow, in every engine
FIRST = "model"  # what the first activity is called, before anything is known: runs begin with a model call


@dataclass(frozen=True, slots=True)
class Taken:
    """What one step left: all that an engine ever sees of a run.

    kind: what the next step is: "model", "tool" (its names in `tool`), "wait" or "done". wake_at: of a wait, the instant at which the run can
    go on by itself; None: only somebody outside wakes it. busy: somebody else holds the run until then, try again.
    """

    run_id: str
    seq: int
    kind: Literal["model", "tool", "wait", "done", "busy"]
    tool: str | None
    status: str
    wake_at: datetime | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "wake_at": iso(self.wake_at) if self.wake_at else None}


def next_name(taken: Mapping[str, Any]) -> str:
    """The next activity's name, as the engine's page shows it: a tool's, or `model`."""
    return str(taken["tool"] or FIRST)


def left_s(taken: Mapping[str, Any], now: float) -> float | None:
    """For how long the loop sleeps, by the engine's clock; None: until somebody wakes it."""
    until = datetime.fromisoformat(taken["wake_at"]).timestamp() if taken["wake_at"] else None
    left = (until - now + SLACK_S if until > now else LATE_S) if until is not None else None
    if taken["kind"] == "busy":
        return min(left, BUSY_S) if left is not None else BUSY_S
    return left


@runtime_checkable
class Engine(Protocol):
    """Five verbs. All but `worker` are blocking and safe from any thread; they raise StoreError where the engine cannot be reached (the
    store's side stands, and the worker's poke makes it good) and UsageError for what can only be mended by the caller."""

    driver: str  # runs.driver of the runs that it drives

    def start(self, run_id: str) -> None:
        """Begin the workflow of a run; a second time is nothing."""
        ...

    def wake(self, run_id: str) -> None:
        """The run can go on: end its wait. Unknown or finished workflows: begin it, or nothing."""
        ...

    def cancel(self, run_id: str) -> None:
        """Our run was cancelled: let the workflow see it."""
        ...

    def describe(self, run_id: str) -> Mapping[str, Any]:
        """What the engine knows of it: at least {"engine", "id", "state", "url"}."""
        ...

    async def worker(self, app: Outlast) -> None:
        """Take steps of this driver's runs until cancelled."""
        ...


class Steps:
    """The steps that a worker takes, on the loop and in the context that it was made in; `take` may be awaited on any loop."""

    def __init__(self, app: Outlast, deps: Any) -> None:
        self.app, self.deps = app, deps
        self.loop, self.context = asyncio.get_running_loop(), contextvars.copy_context()
        self.running: set[asyncio.Task[Any]] = set()
        self.ending = False
        self.ended: set[str] = set()  # runs whose workflows ended LOOK_S ago
        self.look = asyncio.Event()

    async def take(self, run_id: str, doing: str) -> dict[str, Any]:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._here(run_id, doing), self.loop))

    async def _here(self, run_id: str, doing: str) -> dict[str, Any]:
        if self.ending:
            raise StoreError("this worker is ending", hint="another one takes the step")
        task = self.loop.create_task(self.app.step(run_id, deps=self.deps, doing=doing), context=self.context.copy())
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        try:
            taken = await task
            if taken.kind == "done":
                self.loop.call_later(LOOK_S, self._look_at, run_id)
            return taken.to_dict()
        except asyncio.CancelledError:
            if not self.ending:
                raise
            raise StoreError("this worker is ending", hint="another one takes the step") from None

    def _look_at(self, run_id: str) -> None:
        self.ended.add(run_id)
        self.look.set()

    async def drain(self, grace: timedelta) -> None:
        """Nothing new; what runs gets `grace`, then its lease goes back."""
        self.ending = True
        if self.running:
            await asyncio.wait(set(self.running), timeout=grace.total_seconds())
        for task in set(self.running):
            task.cancel()
        if self.running:
            await asyncio.wait(set(self.running), timeout=5)


async def poking(steps: Steps, poke: Callable[[str], None]) -> None:
    """Poke each run that is due and unheld, at once and every POKE_S: a lost poke, or a decision made without the engine's client, costs time only.
    In between, runs whose workflows have just ended: a wake that came meanwhile went to a workflow that looks no more."""
    all_at = time.monotonic()
    while True:
        if every := time.monotonic() >= all_at:
            all_at = time.monotonic() + POKE_S
        steps.look.clear()
        ended, steps.ended = steps.ended, set()
        try:
            for run_id in await asyncio.to_thread(steps.app.due_runs) if every or ended else []:
                if every or run_id in ended:
                    await asyncio.to_thread(poke, run_id)
        except StoreError as e:
            log.warning("%s", e)
        with contextlib.suppress(TimeoutError):  # not `wait_for`: before Python 3.12 it can swallow a cancellation
            async with asyncio.timeout(max(all_at - time.monotonic(), 0)):
                await steps.look.wait()


async def works(steps: Steps, poke: Callable[[str], None], served: asyncio.Future[None]) -> None:
    """Poke until cancelled, or until serving has ended; then let running steps end."""
    pokes = asyncio.ensure_future(poking(steps, poke))
    try:
        await asyncio.wait({served, pokes}, return_when=asyncio.FIRST_COMPLETED)
        for ended in {served, pokes}:
            if ended.done():
                ended.result()
    finally:
        pokes.cancel()
        await steps.drain(steps.app.grace)


@contextlib.contextmanager
def needs(engine: str, package: str, oldest: tuple[int, int]) -> Iterator[None]:
    """Around the import of an engine's SDK: in one line what to install, where it is not there or too old. Raises UsageError."""
    extra = f"outlast[{engine.lower()}]"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = ""
    if found and tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < oldest:
        wanted = ".".join(map(str, oldest))
        raise UsageError(f"the SDK of {engine} is {package} {found}, and {wanted} or newer is needed", hint=f"pip install -U '{extra}'")
    try:
        yield
    except ModuleNotFoundError:
        raise UsageError(f"the SDK of {engine} is not installed", hint=f"pip install '{extra}'") from None
