"""Inngest: `inngest://HOST:8288?listen=127.0.0.1:8289&public=http://WORKER:8289`; keys by INNGEST_EVENT_KEY and INNGEST_SIGNING_KEY.

An event `outlast/run` begins a stretch of a run: steps, each under its own name, until the run waits or ends. A wait sends the next event
for the absolute deadline (`ts` in the future); whoever wakes the run sends one for now, so a wake that comes before the wait is not lost,
and nothing sleeps in the server's memory but an event. The server calls the worker, as with Restate.
"""

from __future__ import annotations

import logging
import os
import time
import urllib.error
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from outlast.engines._http import http, retried, serving
from outlast.engines.base import FIRST, NAME, Steps, left_s, needs, next_name, works
from outlast.errors import StoreError, UsageError

if TYPE_CHECKING:
    from outlast.app import Outlast

MANY = 200  # steps in one stretch: every request carries what all earlier ones left, and 1,000 are allowed
EVENT = "outlast/run"
APP = "outlast"
PATH = "/api/inngest"
LATEST = 100  # events among which `describe` looks


class Inngest:
    """Args: url: see above; client: an `inngest.Inngest` of your own."""

    driver = "inngest"

    def __init__(self, url: str = "inngest://127.0.0.1:8288", *, client: Any = None) -> None:
        parts = urlsplit(url)
        options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        self.server = f"http://{parts.hostname or '127.0.0.1'}:{parts.port or 8288}"
        self.listen = options.get("listen", "127.0.0.1:8289")
        self.public = options.get("public", f"http://{self.listen}")
        self._client_given = client

    # ---- the five verbs -------------------------------------------------------------------------------------------------------

    def start(self, run_id: str) -> None:
        self._send(run_id, id=f"{run_id}@start")  # the server drops an event of an id that it has seen

    def wake(self, run_id: str) -> None:
        self._send(run_id)

    def cancel(self, run_id: str) -> None:
        self.wake(run_id)  # a running step sees the cancellation in the store; a waiting run ends with this event

    def describe(self, run_id: str) -> Mapping[str, Any]:
        """Its newest stretch, found by the REST API among the latest events: Inngest has ids of its own."""
        query = urlencode({"name": EVENT, "limit": LATEST})
        event = next((e for e in self._read(f"/v1/events?{query}") if (e.get("data") or {}).get("run_id") == run_id), None)
        stretches = self._read(f"/v1/events/{quote(event['internal_id'], safe='')}/runs") if event else []
        state = str(stretches[0]["status"]) if stretches else "Scheduled" if event else "unknown"
        return {"engine": self.driver, "id": stretches[0]["run_id"] if stretches else run_id, "state": state, "url": f"{self.server}/runs"}

    async def worker(self, app: Outlast) -> None:
        with needs("Inngest", "inngest", (0, 5)):
            import fastapi
            import hypercorn  # noqa: F401 - it serves
            import inngest
            import inngest.fast_api
        async with app.connected_deps() as deps:
            steps, client, asgi = Steps(app, deps), self._client(inngest), fastapi.FastAPI()
            inngest.fast_api.serve(asgi, client, [_function(inngest, client, steps)], serve_origin=self.public)
            async with serving(asgi, self.listen, self._register) as served:
                await works(steps, self.wake, served)

    # ---- inside ---------------------------------------------------------------------------------------------------------------

    def _client(self, inngest: Any) -> Any:
        if self._client_given is not None:
            return self._client_given
        return inngest.Inngest(
            app_id=APP, is_production=bool(os.environ.get("INNGEST_SIGNING_KEY")), api_base_url=self.server, event_api_base_url=self.server,
            logger=logging.getLogger("outlast.engine"))  # fmt: skip

    def _send(self, run_id: str, id: str | None = None) -> None:
        key = os.environ.get("INNGEST_EVENT_KEY", "NO_EVENT_KEY_SET")
        event = {"name": EVENT, "data": {"run_id": run_id}, **({"id": id} if id else {})}
        try:
            http("POST", f"{self.server}/e/{key}", event)
        except urllib.error.HTTPError as e:
            if e.code in (401, 403):
                raise UsageError(f"Inngest at {self.server} does not take the event key", hint="INNGEST_EVENT_KEY=...") from e
            raise StoreError(f"Inngest at {self.server} says {e.code}", hint="its worker takes the run up when it is there again") from e

    def _read(self, path: str) -> list[dict[str, Any]]:
        key = os.environ.get("INNGEST_SIGNING_KEY")
        try:
            answer = http("GET", self.server + path, headers={"authorization": f"Bearer {key}"} if key else {})
        except urllib.error.HTTPError as e:
            if e.code in (401, 403):
                raise UsageError(f"Inngest at {self.server} does not take the signing key", hint="INNGEST_SIGNING_KEY=...") from e
            raise StoreError(f"Inngest at {self.server} says {e.code}", hint="is the address in --engine its server's?") from e
        return list(answer.get("data") or []) if isinstance(answer, dict) else []

    def _register(self) -> None:
        """A PUT to ourselves has the SDK tell the server which functions are here."""
        try:
            retried(lambda: http("PUT", f"http://{self.listen}{PATH}", {}))
        except (urllib.error.HTTPError, StoreError) as e:
            raise StoreError(
                f"this worker cannot register with Inngest at {self.server}: {e}", hint="start the server, or mend --engine"
            ) from e


def _function(inngest: Any, client: Any, steps: Steps) -> Any:
    """The frozen loop, version 1."""

    @client.create_function(  # type: ignore[untyped-decorator]  # the SDK is imported only where it is used
        fn_id=NAME, trigger=inngest.TriggerEvent(event=EVENT), retries=20,
        concurrency=[inngest.Concurrency(limit=1, key="event.data.run_id", scope="fn")])  # fmt: skip
    async def run(ctx: Any) -> dict[str, Any]:
        run_id, name = str(ctx.event.data["run_id"]), FIRST
        taken: dict[str, Any] = {}
        for _ in range(MANY):
            taken = await ctx.step.run(name, steps.take, run_id, name)
            if taken["kind"] == "done":
                return taken
            if taken["kind"] in ("wait", "busy"):
                break
            name = next_name(taken)
        waits = taken["kind"] == "wait"
        if waits and taken["wake_at"] is None:
            return taken
        left = left_s(taken, time.time()) if taken["kind"] in ("wait", "busy") else 0.0  # inside of a step's memo: sent once
        at = datetime.fromisoformat(taken["wake_at"]) if waits else datetime.now(UTC)
        id = f"{run_id}@{taken['wake_at']}" if waits and (left or 0) > 1 else ""  # one event an instant, however often it is looked
        ts = int((at.timestamp() if waits else time.time() + (left or 0.0)) * 1000) + 10
        await ctx.step.send_event("wait" if waits else "again", inngest.Event(name=EVENT, data={"run_id": run_id}, id=id, ts=ts))
        return taken

    return run
