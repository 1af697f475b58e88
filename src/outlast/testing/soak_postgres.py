"""A Postgres server of a soak's own, that is killed and started again. `OUTLAST_PG_BIN` names its binaries, if they are not where Debian or PATH has them.

It never runs as root: where the soak does, it runs as `postgres` or `nobody`. Its files lie in a folder of their own, for that user to come to;
what it commits is synced as in production.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outlast.errors import UsageError
from outlast.runtime.clock import monotonic

STARTS_WITHIN_S = 60.0


def binaries() -> Path:
    """The newest server that is installed here."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name), reverse=True)
    if named := os.environ.get("OUTLAST_PG_BIN"):
        places.insert(0, Path(named))
    if found := shutil.which("postgres"):
        places.append(Path(found).parent)
    for place in places:
        if (place / "initdb").exists() and (place / "postgres").exists():
            return place
    raise UsageError("no Postgres server is installed here", hint="apt-get install postgresql, or OUTLAST_PG_BIN=FOLDER")


def _unprivileged() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise UsageError("Postgres does not run as root, and there is neither a user postgres nor nobody")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@dataclass
class Server:
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="outlast-soak-postgres-")))
    port: int = field(default_factory=_free_port)
    kills: int = 0
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://outlast@127.0.0.1:{self.port}/postgres"

    def make(self) -> Server:
        self.folder.chmod(0o755)
        if (me := _unprivileged()) is not None:
            os.chown(self.folder, me.pw_uid, me.pw_gid)
        command = [
            str(binaries() / "initdb"),
            "-D",
            str(self.folder / "data"),
            "-U",
            "outlast",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
        ]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._as())
        return self

    def _as(self) -> dict[str, Any]:
        me = _unprivileged()
        return {} if me is None else {"user": me.pw_uid, "group": me.pw_gid, "extra_groups": []}

    def start(self) -> Server:
        """Start it, or start it anew, and wait until it answers."""
        settings = {
            "port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "200"}  # fmt: skip
        args = [arg for name, value in settings.items() for arg in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(binaries() / "postgres"), "-D", str(self.folder / "data"), *args], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                start_new_session=True, **self._as())  # fmt: skip
        self.wait()
        return self

    def wait(self) -> None:
        import psycopg

        until, pause = monotonic() + STARTS_WITHIN_S, threading.Event()
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=5).close()
                return
            except psycopg.Error as e:
                if monotonic() > until or self._process is None or self._process.poll() is not None:
                    raise UsageError(f"postgres does not start: {e}") from e
            pause.wait(0.05)

    def kill(self) -> None:
        """SIGKILL to the server and to all that it started, and wait until they are gone."""
        if self._process is None:
            return
        children = _children(self._process.pid)
        self._process.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.wait(30)
        pause, until = threading.Event(), monotonic() + 30
        while any(Path(f"/proc/{child}").exists() for child in children) and monotonic() < until:
            pause.wait(0.01)  # one that is left would hold the shared memory, and the next start is refused
        self._process = None
        self.kills += 1

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found
