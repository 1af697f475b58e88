"""Workers without the wait for their imports: one process has imported everything, and each worker is forked off it.

A worker is a process of its own all the same: it runs `outlast worker` as the command does, and is killed and stopped like any other. The
nursery answers one request a line (JSON) with one line, has one thread, and ends what is left when its stdin closes.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from outlast.runtime.clock import monotonic

WARM = ("outlast.cli.worker", "outlast.runtime.worker", "outlast.testing.soak_agent", "psycopg")  # what the command imports anyway
WORKER = ("worker", "--app", "outlast.testing.soak_agent:app", "--concurrency", "4", "--grace", "5s")


class Worker:
    """A process of the nursery's, with what a soak uses of `Popen`."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self.nursery, self.pid, self.log, self.code = nursery, pid, log, None

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        return next((line for line in reversed(lines) if line), "it said nothing")

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.nursery.ask("poll", self.pid)
        return self.code

    def wait(self, timeout: float = 60) -> int:
        until, pause = monotonic() + timeout, threading.Event()
        while (code := self.poll()) is None:
            if monotonic() > until:
                raise subprocess.TimeoutExpired("worker", timeout)
            pause.wait(0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Nursery:
    """The process, as a soak sees it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outlast.testing.soak_nursery"], env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        self._lock = threading.Lock()

    def worker(self, log: Path) -> Worker:
        return Worker(self, self.ask("fork", str(log)), log)

    def ask(self, *what: Any) -> Any:
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        with self._lock:
            asked.write(json.dumps(what) + "\n")
            asked.flush()
            return json.loads(answers.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


# ---- inside of it ---------------------------------------------------------------------------------------------------------------


def _live(log: str) -> int:
    """In the child: `python -m outlast worker …`, to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = ["outlast", *WORKER]
    try:
        runpy.run_module("outlast", run_name="__main__", alter_sys=True)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def serve() -> None:
    for module in WARM:
        with suppress(ImportError):  # psycopg is not everywhere
            importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to the soak too, which ends us when its workers have ended
    alive: set[int] = set()
    for line in sys.stdin:
        what, of = json.loads(line)
        if what == "fork":
            pid = os.fork()
            if pid == 0:
                code = 70
                try:
                    code = _live(of)
                finally:
                    os._exit(code)
            alive.add(pid)
            answer: int | None = pid
        else:
            found, status = os.waitpid(of, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
            if found:
                alive.discard(of)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    serve()
