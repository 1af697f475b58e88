"""Restate: `restate://HOST:8080?admin=9070&listen=127.0.0.1:9080&public=http://WORKER:9080`.

The run is a virtual object of that key: at most one stretch of it runs at a time. A stretch takes steps, each under its own name, until the
run waits or ends; a wait is a message to the same object for the absolute deadline, and whoever wakes the run sends one for now: so nothing
sleeps in a journal that code could stop fitting. The server calls the worker: `listen` is where it serves, `public` how the server reaches
it, the same address for all workers of a run's life (a load balancer, or a restarted process).
"""

from __future__ import annotations

import urllib.error
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlsplit

from outlast.engines._http import http, retried, serving
from outlast.engines.base import FIRST, NAME, Steps, left_s, needs, next_name, works
from outlast.errors import StoreError, UsageError

if TYPE_CHECKING:
    from outlast.app import Outlast

MANY = 200  # steps in one stretch: its journal is sent to the worker anew after every pause
INACTIVITY = timedelta(hours=1)  # a model call may say nothing for long; Restate's own is a minute
ABORT = timedelta(hours=24)  # tools and models have time-outs of their own
TIMER = "timer"  # the object's one piece of state: for which instant a message is under way


class Restate:
    """Args: url: see above; client: `client(method, url, body)` instead of plain HTTP, for a server behind a sign-in."""

    driver = "restate"

    def __init__(self, url: str = "restate://127.0.0.1:8080", *, client: Any = None) -> None:
        parts = urlsplit(url)
        options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        host = parts.hostname or "127.0.0.1"
        self.ingress = f"http://{host}:{parts.port or 8080}"
        self.admin = f"http://{host}:{options.get('admin', '9070')}"
        self.listen = options.get("listen", "127.0.0.1:9080")
        self.public = options.get("public", f"http://{self.listen}")
        self._call = client or http

    # ---- the five verbs -------------------------------------------------------------------------------------------------------

    def start(self, run_id: str) -> None:
        self.wake(run_id)  # a second stretch of one object waits for the first, and finds nothing to do

    def wake(self, run_id: str) -> None:
        try:
            self._call("POST", f"{self.ingress}/{NAME}/{quote(run_id, safe='')}/go/send")
        except urllib.error.HTTPError as e:
            if e.code == 404:
                raise StoreError(
                    f"Restate at {self.ingress} does not know the worker yet", hint="outlast worker --engine restate://..."
                ) from e
            raise StoreError(
                f"Restate at {self.ingress} says {e.code}: {_text(e)}", hint="its worker takes the run up when it is there again"
            ) from e

    def cancel(self, run_id: str) -> None:
        self.wake(run_id)  # a running step sees the cancellation in the store; a waiting run ends with this one

    def describe(self, run_id: str) -> Mapping[str, Any]:
        """Its newest invocation, by the admin API's SQL."""
        key = run_id.replace("'", "''")
        query = f"SELECT id, status FROM sys_invocation WHERE target_service_name = '{NAME}' AND target_service_key = '{key}' ORDER BY created_at DESC LIMIT 1"  # noqa: S608 - the run id is quoted above
        try:
            rows = (self._call("POST", f"{self.admin}/query", {"query": query}) or {}).get("rows", [])
        except urllib.error.HTTPError as e:
            raise StoreError(f"Restate at {self.admin} says {e.code}: {_text(e)}", hint="is admin= in --engine its admin port?") from e
        state = rows[0]["status"] if rows else "unknown"
        return {"engine": self.driver, "id": f"{NAME}/{run_id}", "state": state, "url": f"{self.admin}/ui/invocations" if rows else None}

    async def worker(self, app: Outlast) -> None:
        with needs("Restate", "restate-sdk", (1, 3)):
            import hypercorn  # noqa: F401 - it serves
            import restate
        async with app.connected_deps() as deps:
            steps = Steps(app, deps)
            async with serving(restate.app([_object(restate, steps)]), self.listen, self._register) as served:
                await works(steps, self.wake, served)

    # ---- inside ---------------------------------------------------------------------------------------------------------------

    def _register(self) -> None:
        """Tell the server where we are. The loop is frozen: registering it again replaces it by the same."""
        try:
            retried(self._announce)
        except urllib.error.HTTPError as e:
            raise UsageError(f"Restate does not reach this worker at {self.public}: {e.msg}", hint="listen= and public= in --engine") from e

    def _announce(self) -> None:
        try:
            self._call("POST", f"{self.admin}/deployments", {"uri": self.public, "force": True})
        except urllib.error.HTTPError as e:
            text = _text(e)
            if "version" in text.lower():  # of the protocol between the two
                raise UsageError(
                    f"Restate at {self.admin} and this worker's SDK do not fit: {text}",
                    hint="pip install -U 'outlast[restate]', or a server of 1.7",
                ) from e
            raise urllib.error.HTTPError(e.url, e.code, text, e.headers, None) from e


def _text(e: urllib.error.HTTPError) -> str:
    return " ".join(e.read(2000).decode(errors="replace").split())[:300]


def _object(restate: Any, steps: Steps) -> Any:
    """The frozen loop, version 1."""
    forever = restate.InvocationRetryPolicy(initial_interval=timedelta(milliseconds=100), max_interval=timedelta(seconds=5))
    run = restate.VirtualObject(NAME, inactivity_timeout=INACTIVITY, abort_timeout=ABORT, invocation_retry_policy=forever)

    @run.handler()  # type: ignore[untyped-decorator]  # the SDK is imported only where it is used
    async def go(ctx: Any) -> dict[str, Any]:
        run_id, name = ctx.key(), FIRST
        taken: dict[str, Any] = {}
        for _ in range(MANY):
            taken = await ctx.run_typed(name, steps.take, restate.RunOptions(type_hint=dict), run_id, name)
            if taken["kind"] == "done":
                ctx.clear(TIMER)
                return taken
            if taken["kind"] in ("wait", "busy"):
                break
            name = next_name(taken)
        left = left_s(taken, await ctx.time()) if taken["kind"] in ("wait", "busy") else 0.0
        if left is None:
            return taken
        if taken["kind"] != "wait" or await ctx.get(TIMER, type_hint=str) != taken["wake_at"]:
            if taken["kind"] == "wait":
                ctx.set(TIMER, taken["wake_at"])
            ctx.object_send(go, key=run_id, arg=None, send_delay=timedelta(seconds=left))
        return taken

    return run
