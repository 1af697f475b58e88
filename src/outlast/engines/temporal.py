"""Temporal: `temporal://HOST:7233/NAMESPACE?task_queue=Q`.

The workflow's id is the run's. Steps are activities under their own names (`model`, `reply_to_customer`); long ones heartbeat, so that a lost
worker is noticed within `HEARTBEAT_S`, not after the step's whole time. Retries of an activity are for a lost worker or an unreachable store
only. The workflow continues as new when the server suggests it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from outlast.engines.base import CALL_S, NAME, Steps, needs, poking
from outlast.errors import OutlastError, StoreError, UsageError

if TYPE_CHECKING:
    from temporalio.client import Client

    from outlast.app import Outlast

T = TypeVar("T")

DEFAULT_QUEUE = "outlast"
BEAT_S = 3.0  # between two heartbeats of an activity; after 10 s without one the loop gives it to another worker


class Temporal:
    """Args: url: see above; client: one that is connected already."""

    driver = "temporal"

    def __init__(self, url: str = "temporal://127.0.0.1:7233/default", *, client: Any = None) -> None:
        parts = urlsplit(url)
        self.address = f"{parts.hostname or '127.0.0.1'}:{parts.port or 7233}"
        self.namespace = parts.path.strip("/") or "default"
        self.queue = parse_qs(parts.query).get("task_queue", [DEFAULT_QUEUE])[0]
        self._given = client
        self._connected: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    # ---- the five verbs -------------------------------------------------------------------------------------------------------

    def start(self, run_id: str) -> None:
        self._blocking(self._start(run_id))

    def wake(self, run_id: str) -> None:
        self._blocking(self._wake(run_id))

    def cancel(self, run_id: str) -> None:
        self._blocking(self._wake(run_id))  # the next step finds the run cancelled, and the workflow ends

    def describe(self, run_id: str) -> Mapping[str, Any]:
        async def ask() -> Mapping[str, Any]:
            client = await self._client()
            from temporalio.service import RPCError, RPCStatusCode

            try:
                found = await client.get_workflow_handle(run_id).describe()
            except RPCError as e:
                if e.status != RPCStatusCode.NOT_FOUND or "Namespace" in str(e):
                    raise
                return {"engine": self.driver, "id": run_id, "state": "unknown", "url": None}
            state = str(found.status and found.status.name)
            return {"engine": self.driver, "id": found.id, "state": state, "history": found.history_length, "url": None}

        return self._blocking(ask())

    async def worker(self, app: Outlast) -> None:
        client = await self._client()
        from temporalio.worker import Worker

        from outlast.engines._temporal_loop import OutlastRun

        async with app.connected_deps() as deps:
            steps = Steps(app, deps)
            worker = Worker(
                client, task_queue=self.queue, workflows=[OutlastRun], activities=[_activity(steps)],
                sticky_queue_schedule_to_start_timeout=timedelta(seconds=1), graceful_shutdown_timeout=app.grace)  # fmt: skip
            try:
                async with worker:
                    try:
                        await poking(steps, self.wake)
                    finally:
                        await steps.drain(app.grace)
            except RuntimeError as e:  # the server does not want it
                raise self._said(e) from e

    # ---- inside ---------------------------------------------------------------------------------------------------------------

    async def _start(self, run_id: str) -> None:
        client = await self._client()
        from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy

        await client.start_workflow(
            NAME, run_id, id=run_id, task_queue=self.queue, id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE, rpc_timeout=timedelta(seconds=CALL_S))  # fmt: skip

    async def _wake(self, run_id: str) -> None:
        """Signal with start: a run that was taken up again after its end has no workflow any more."""
        client = await self._client()
        from temporalio.common import WorkflowIDReusePolicy

        await client.start_workflow(
            NAME, run_id, id=run_id, task_queue=self.queue, start_signal="wake", id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            rpc_timeout=timedelta(seconds=CALL_S))  # fmt: skip

    async def _client(self) -> Client:
        if self._given is not None:
            return self._given  # type: ignore[no-any-return]  # the user's own
        if self._connected is None:
            with needs("Temporal", "temporalio", (1, 35)):
                from temporalio.client import Client
            try:
                self._connected = await Client.connect(self.address, namespace=self.namespace)
            except RuntimeError as e:
                raise StoreError(
                    f"Temporal at {self.address} cannot be reached: {str(e).splitlines()[0][:200]}",
                    hint="start the server, or mend --engine",
                ) from e
        return self._connected

    def _blocking(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on a loop of our own: the verbs are called from any thread, inside of loops and outside."""
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="outlast temporal", daemon=True).start()
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=3 * CALL_S)
        except OutlastError:
            raise
        except Exception as e:
            raise self._said(e) from e

    def _said(self, e: Exception) -> OutlastError:
        text = str(e).splitlines()[0][:200] if str(e) else type(e).__name__
        if "Namespace" in text and "not found" in text:
            return UsageError(f"Temporal has no namespace {self.namespace!r}", hint=f"temporal operator namespace create {self.namespace}")
        return StoreError(f"Temporal at {self.address}: {text}", hint="its worker takes the run up when it is there again")


def _activity(steps: Steps) -> Any:
    """The one activity, under whatever name the loop gives it: take a step, and say what is next."""
    from temporalio import activity
    from temporalio.common import RawValue

    async def step(args: Sequence[Any]) -> dict[str, Any]:
        run_id, doing = (activity.payload_converter().from_payload(arg.payload, str) for arg in args)
        beating = asyncio.ensure_future(_beat())
        try:
            return await steps.take(run_id, doing)
        finally:
            beating.cancel()

    step.__annotations__ = {"args": Sequence[RawValue], "return": dict[str, Any]}  # what the SDK asks of a dynamic activity
    return activity.defn(dynamic=True)(step)


async def _beat() -> None:
    from temporalio import activity

    while True:
        activity.heartbeat()
        await asyncio.sleep(BEAT_S)
