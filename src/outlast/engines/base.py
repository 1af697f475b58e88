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
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from outlast.core.run import iso
from outlast.errors import StoreError, UsageError

if TYPE_CHECKING:
    from outlast.app import Outlast

log = logging.getLogger("outlast.engine")

POKE_S = 30.0  # how often an engine's worker pokes each run of its driver that is due and unheld
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

    async def take(self, run_id: str, doing: str) -> dict[str, Any]:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._here(run_id, doing), self.loop))

    async def _here(self, run_id: str, doing: str) -> dict[str, Any]:
        if self.ending:
            raise StoreError("this worker is ending", hint="another one takes the step")
        task = self.loop.create_task(self.app.step(run_id, deps=self.deps, doing=doing), context=self.context.copy())
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        try:
            return (await task).to_dict()
        except asyncio.CancelledError:
            if not self.ending:
                raise
            raise StoreError("this worker is ending", hint="another one takes the step") from None

    async def drain(self, grace: timedelta) -> None:
        """Nothing new; what runs gets `grace`, then its lease goes back."""
        self.ending = True
        if self.running:
            await asyncio.wait(set(self.running), timeout=grace.total_seconds())
        for task in set(self.running):
            task.cancel()
        if self.running:
            await asyncio.wait(set(self.running), timeout=5)


async def poking(app: Outlast, poke: Callable[[str], None]) -> None:
    """Poke each run that is due and unheld, at once and every POKE_S: a lost poke, or a decision made without the engine's client, costs time only."""
    while True:
        try:
            for run_id in await asyncio.to_thread(app.due_runs):
                await asyncio.to_thread(poke, run_id)
        except StoreError as e:
            log.warning("%s", e)
        await asyncio.sleep(POKE_S)


async def works(steps: Steps, poke: Callable[[str], None], served: asyncio.Future[None]) -> None:
    """Poke until cancelled, or until serving has ended; then let running steps end."""
    pokes = asyncio.ensure_future(poking(steps.app, poke))
    try:
        await asyncio.wait({served, pokes}, return_when=asyncio.FIRST_COMPLETED)
        for ended in {served, pokes}:
            if ended.done():
                ended.result()
    finally:
        pokes.cancel()
        await steps.drain(steps.app.grace)


@contextlib.asynccontextmanager
async def serving(asgi: Any, listen: str, registered: Callable[[], None]) -> AsyncIterator[asyncio.Future[None]]:
    """Serve what an engine calls, and say where (`registered`), until the block ends; the future ends when serving does.

    In a thread with a loop of its own: an SDK may want SIGTERM for itself, and a busy tool must not keep the engine waiting.
    """
    import hypercorn.asyncio
    import hypercorn.config

    config = hypercorn.config.Config()
    config.bind, config.graceful_timeout = [listen], 1.0
    config.errorlog, config.accesslog = None, None
    here, their = asyncio.get_running_loop(), asyncio.new_event_loop()
    stop = asyncio.Event()  # of their loop
    ended: asyncio.Future[None] = here.create_future()

    def run() -> None:
        failed: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: their) as runner:
                runner.run(hypercorn.asyncio.serve(asgi, config, shutdown_trigger=stop.wait))
        except OSError as e:
            failed = UsageError(f"nothing can be served at {listen}: {e.strerror or e}", hint="listen= in --engine")
        except Exception as e:  # noqa: BLE001 - whatever ends the thread ends the worker, with its reason
            failed = e
        with contextlib.suppress(RuntimeError):  # the worker's loop is gone
            here.call_soon_threadsafe(settle, failed)

    def settle(failed: BaseException | None) -> None:
        if ended.done():
            return
        if failed is not None:
            ended.set_exception(failed)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name=f"outlast {listen}", daemon=True).start()
    registering = asyncio.ensure_future(asyncio.to_thread(registered))
    try:
        await asyncio.wait({ended, registering}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        await registering
        yield ended
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended already
            their.call_soon_threadsafe(stop.set)
        await asyncio.wait({ended}, timeout=5)
        if ended.done():
            ended.exception()  # said already


def missing_sdk(engine: str, extra: str) -> UsageError:
    return UsageError(f"the SDK of {engine} is not installed", hint=f"pip install 'outlast[{extra}]'")


def retried(attempt: Callable[[], Any], *, for_s: float = 10.0) -> None:
    """Until it succeeds: what is called may come up in this moment. Raises what the last attempt did."""
    until = time.monotonic() + for_s
    pause = threading.Event()
    while True:
        try:
            attempt()
            return
        except (urllib.error.HTTPError, StoreError):
            if time.monotonic() >= until:
                raise
        pause.wait(0.1)


def http(method: str, url: str, body: Any = None, *, timeout: float = CALL_S, headers: Mapping[str, str] = {}) -> Any:
    """One call of an engine's HTTP API, its answer read as JSON. Raises urllib's HTTPError for a refusal, StoreError where nobody answers."""
    data = json.dumps(body).encode() if body is not None else None
    typed = {"content-type": "application/json"} if data is not None else {}
    request = urllib.request.Request(url, data, {"accept": "application/json", **typed, **headers}, method=method)  # noqa: S310 - the user's own setting
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310 - the request above
            text = answer.read()
    except urllib.error.HTTPError:
        raise
    except (OSError, ValueError) as e:
        raise StoreError(f"{url} cannot be reached: {getattr(e, 'reason', e)}", hint="start the server, or mend --engine") from e
    with contextlib.suppress(ValueError):
        return json.loads(text) if text else None
    return text.decode(errors="replace")
