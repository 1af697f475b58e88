"""pgbouncer in transaction mode before a test server: each transaction may get another backend, and no state of a session is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

import psycopg
import pytest

from support.postgres import Server, free_port, unprivileged


class Bouncer:
    """`with Bouncer(server, folder) as port`. Without the program a test skips, which with CI=1 is a failure."""

    def __init__(self, server: Server, folder: Path) -> None:
        program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
        if program is None:
            pytest.skip("no pgbouncer here: apt-get install pgbouncer")
        self.program, self.server, self.folder, self.port = program, server, server.folder / f"bouncer-{free_port()}", free_port()

    def __enter__(self) -> int:
        self.folder.mkdir()
        config, users = self.folder / "ini", self.folder / "users"
        users.write_text(f'"{self.server.user}" "{self.server.password}"\n')
        config.write_text(
            f"[databases]\n* = host={self.server.socket_dir} port={self.server.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {self.port}\nunix_socket_dir =\nauth_type = plain\nauth_file = {users}\npool_mode = transaction\n"
            f"default_pool_size = 3\nserver_round_robin = 1\nlogfile = {self.folder / 'log'}\n"
        )
        who = unprivileged()
        if who:
            for path in (self.folder, config, users):
                os.chown(path, who["user"], who["group"])
        self.process = subprocess.Popen([self.program, str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **who)
        end, pause = time.monotonic() + 20, threading.Event()
        while True:
            try:
                psycopg.connect(self.server.conninfo, host="127.0.0.1", port=self.port, connect_timeout=5).close()
                return self.port
            except psycopg.Error as e:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError((self.folder / "log").read_text()) from e
            pause.wait(0.02)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(10)
