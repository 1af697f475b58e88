"""DBOS: `dbos:` — a library, no server: its tables live beside ours, in a file `NAME.dbos.db` or in the same Postgres database.

The workflow's id is the run's; a run that goes on after its end, or after `MANY` steps, has a next one, `RUN~2`. Steps are DBOS steps under
their own names, a wait is its durable `recv` on the topic `wake`. DBOS takes over no dead executor's workflows by itself: each worker leaves
a heartbeat in a table of ours beside DBOS' own, and whoever sees one missing has DBOS recover that executor's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlast.engines.base import FIRST, LOOP_VERSION, NAME, Steps, left_s, needs, next_name, poking
from outlast.errors import OutlastError, StoreError, UsageError
from outlast.stores import owner

if TYPE_CHECKING:
    from dbos import DBOSClient

    from outlast.app import Outlast

log = logging.getLogger("outlast.engine")

QUEUE = "outlast"
VERSION = f"outlast-{LOOP_VERSION}"  # DBOS would take a digest of the source, and strand what waits when it changes
TOPIC = "wake"
MANY = 1000  # steps in one workflow: a recovery reads them all
BEAT_S = 2.0
DEAD_S = 10.0  # without a heartbeat for so long a worker on another machine counts as dead
FOREVER_S = 10 * 365 * 86400.0
HEARTBEATS = """CREATE TABLE IF NOT EXISTS {table} (executor_id TEXT PRIMARY KEY, seen_at DOUBLE PRECISION NOT NULL)"""
BEAT = "INSERT INTO {table} VALUES (:id, :now) ON CONFLICT (executor_id) DO UPDATE SET seen_at = excluded.seen_at"


class DBOS:
    """Args: url: `dbos:` beside the store, or `dbos:` and a database's URL; client: a DBOSClient of your own."""

    driver = "dbos"

    def __init__(self, url: str = "dbos:", *, client: Any = None) -> None:
        self.url, self.schema = url.removeprefix("dbos:").removeprefix("//"), "dbos"
        self._client_made, self._lock = client, threading.Lock()
        self._newest: dict[str, str] = {}  # of runs that had more than one: where to begin looking

    def beside(self, store: Any) -> None:
        """Where our store is: its URL, taken apart."""
        if self.url:
            return
        if store.kind == "sqlite":
            if store.path is None:
                raise UsageError("DBOS needs a store that other processes see too", hint="--store FILE, or a postgresql:// URL")
            self.url = f"sqlite:///{store.path.with_suffix('.dbos.db')}"
        else:
            self.url, self.schema = store.url.replace("postgres://", "postgresql://", 1), f"{store.schema}_dbos"

    # ---- the five verbs -------------------------------------------------------------------------------------------------------

    def start(self, run_id: str) -> None:
        with _Said(self):
            self._enqueue(run_id)

    def wake(self, run_id: str) -> None:
        with _Said(self):
            client = self._client()
            current = self._current(run_id)
            if current is None or current[1] not in _OPEN:
                self._enqueue(run_id if current is None else _following(current[0]))
            else:  # one that is being recovered is enqueued too, and goes on where it waited
                client.send(current[0], "wake", TOPIC)

    def cancel(self, run_id: str) -> None:
        self.wake(run_id)  # the next step finds the run cancelled, and the workflow ends

    def describe(self, run_id: str) -> Mapping[str, Any]:
        with _Said(self):
            id, state = self._current(run_id) or (run_id, "unknown")
            return {"engine": self.driver, "id": id, "state": state, "url": None}

    async def worker(self, app: Outlast) -> None:
        with needs("DBOS", "dbos", (3, 4)):
            import dbos
        async with app.connected_deps() as deps:
            steps = Steps(app, deps)
            library = await asyncio.to_thread(self._launch, dbos.DBOS, steps)
            beating = asyncio.ensure_future(self._beating(library))
            try:
                await poking(steps, self.wake)
            finally:
                beating.cancel()
                await steps.drain(app.grace)
                await asyncio.to_thread(dbos.DBOS.destroy)  # it would sleep first; what it has not recorded is taken again

    # ---- inside ---------------------------------------------------------------------------------------------------------------

    def _launch(self, library: Any, steps: Steps) -> Any:
        config = {
            "name": "outlast", "system_database_url": self.url, "dbos_system_schema": self.schema, "application_version": VERSION,
            "executor_id": owner.me(), "log_level": "WARNING", "notification_listener_polling_interval_sec": 0.2}  # fmt: skip
        with _Said(self):
            made = library(config=config)
            _register(library, steps)
            library.launch()
            library.register_queue(QUEUE, polling_interval_sec=0.2)
        return made

    async def _beating(self, library: Any) -> None:
        while True:
            try:
                await asyncio.to_thread(self._beat, library)
            except Exception:
                log.exception("a heartbeat failed; the next one comes")
            await asyncio.sleep(BEAT_S)

    def _beat(self, library: Any) -> None:
        """Say that this worker lives; have the workflows of those that do not recovered."""
        import sqlalchemy as sa

        engine, now = library._sys_db.engine, time.time()
        table = "outlast_worker" if engine.dialect.name == "sqlite" else f'"{self.schema}".outlast_worker'
        with engine.begin() as db:
            db.execute(sa.text(HEARTBEATS.format(table=table)))
            db.execute(sa.text(BEAT.format(table=table)), {"id": owner.me(), "now": now})
            seen = [(str(id), float(at)) for id, at in db.execute(sa.text(f"SELECT executor_id, seen_at FROM {table}"))]  # noqa: S608 - our own name
        dead = [id for id, at in seen if id != owner.me() and (at < now - DEAD_S or owner.provably_dead(id))]
        if not dead:
            return
        log.warning("taking over from %s", ", ".join(map(owner.short, dead)))
        type(library)._recover_pending_workflows(dead)
        with engine.begin() as db:
            for id in dead:  # one that was only stopped says so with its next beat
                db.execute(sa.text(f"DELETE FROM {table} WHERE executor_id = :id"), {"id": id})  # noqa: S608 - our own name again

    def _client(self) -> DBOSClient:
        with self._lock:
            if self._client_made is None:
                with needs("DBOS", "dbos", (3, 4)):
                    from dbos import DBOSClient
                if not self.url:
                    raise UsageError(
                        "DBOS does not know the store yet", hint="give the engine to Outlast(engine=), or DBOS('dbos:postgresql://...')"
                    )
                self._client_made = DBOSClient(
                    system_database_url=self.url, dbos_system_schema=self.schema, application_name="outlast", retry_connection_errors=False
                )
            return self._client_made  # type: ignore[no-any-return]  # or the user's own

    def _enqueue(self, workflow_id: str) -> None:
        self._client().enqueue(
            {"workflow_name": NAME, "queue_name": QUEUE, "workflow_id": workflow_id, "app_version": VERSION}, workflow_id
        )

    def _current(self, run_id: str) -> tuple[str, str] | None:
        """The run's newest workflow, and its state."""
        found, id = None, self._newest.get(run_id, run_id)
        while rows := self._client().list_workflows(workflow_ids=[id], load_input=False, load_output=False):
            found, id = (id, str(rows[0].status)), _following(id)
        if found is not None and found[0] != run_id:
            self._newest[run_id] = found[0]
        return found


_OPEN = ("ENQUEUED", "PENDING", "DELAYED")


def _following(workflow_id: str) -> str:
    run_id, _, nth = workflow_id.partition("~")
    return f"{run_id}~{int(nth or 1) + 1}"


class _Said:
    """What DBOS and its database raise, as errors of ours."""

    def __init__(self, engine: DBOS) -> None:
        self.shown = engine.url.rpartition("@")[2] or "DBOS"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, e: BaseException | None, trace: object) -> None:
        if e is None or isinstance(e, OutlastError) or not isinstance(e, Exception):
            return
        text = str(e).splitlines()[0][:200] if str(e) else type(e).__name__
        if "no such table" in text or "does not exist" in text:
            raise StoreError("DBOS has no tables here yet", hint="outlast worker --engine dbos:   (it makes them)") from e
        raise StoreError(f"DBOS at {self.shown}: {text}", hint="its worker takes the run up when it is there again") from e


def _register(library: Any, steps: Steps) -> None:
    """The frozen loop, version 1."""

    @library.workflow(name=NAME, max_recovery_attempts=None)  # type: ignore[untyped-decorator]  # the SDK is imported only where it is used
    async def drive(workflow_id: str) -> dict[str, Any]:
        run_id, name = workflow_id.partition("~")[0], FIRST
        for _ in range(MANY):
            options = {"name": name, "retries_allowed": True, "max_attempts": 10_000, "interval_seconds": 1.0, "backoff_rate": 1.0}
            taken: dict[str, Any] = await library.run_step_async(options, steps.take, run_id, name)
            if taken["kind"] == "done":
                return taken
            if taken["kind"] != "busy":
                name = next_name(taken)
            if taken["kind"] in ("wait", "busy"):
                left = left_s(taken, time.time())  # of a replay the recorded instant counts
                await library.recv_async(TOPIC, timeout_seconds=left if left is not None else FOREVER_S)
        from dbos import SetWorkflowID

        with SetWorkflowID(_following(workflow_id)):
            await library.enqueue_workflow_async(QUEUE, drive, _following(workflow_id))
        return {"kind": "continued", "run_id": run_id}
