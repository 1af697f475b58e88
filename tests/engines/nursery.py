"""Workers without the wait for their imports: one process has imported everything, and each worker is forked off it.

A worker is a process of its own all the same, which runs `outlast worker` as the command does, and can be killed and stopped. The nursery reads
one request a line (JSON) from its stdin, and says who was born and who has ended; when its stdin closes, it ends what is left.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, ClassVar, NoReturn

COMMON = (
    "asyncio",
    "outlast.cli",
    "outlast.cli.worker",
    "outlast.app",
    "outlast.models",
    "outlast.runtime.worker",
    "apsw",
    "support.world",
)
OF = {
    "dbos": ("dbos", "sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.postgresql", "psycopg"),
    "restate": ("restate", "hypercorn.asyncio"),
    "inngest": ("inngest", "inngest.fast_api", "fastapi", "hypercorn.asyncio"),
    "temporal": ("temporalio.client", "temporalio.worker", "temporalio.testing"),
}


class Worker:
    """A process of the nursery's, with what the tests use of `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid, self._ended, self._code = pid, threading.Event(), 0

    @property
    def returncode(self) -> int | None:
        return self._code if self._ended.is_set() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0)
        return self._code

    def send_signal(self, number: int) -> None:
        if not self._ended.is_set():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process, as the tests see it; one for all of them."""

    _one: ClassVar[Nursery | None] = None

    def __init__(self) -> None:
        tests = Path(__file__).parents[1]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests / "engines"), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
        )
        self.workers: dict[int, Worker] = {}
        self.born, self.newest = threading.Semaphore(0), 0
        threading.Thread(target=self._listen, daemon=True, name="nursery").start()
        atexit.register(self.close)

    @classmethod
    def get(cls) -> Nursery:
        if cls._one is None or cls._one.process.poll() is not None:
            cls._one = cls()
        return cls._one

    def worker(self, argv: list[str], *, warm: str, folder: Path, log: Path, env: dict[str, str]) -> Worker:
        assert self.process.stdin is not None
        request = {"argv": argv, "warm": warm, "folder": str(folder), "log": str(log), "env": env}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        assert self.born.acquire(timeout=120), "the nursery says nothing"
        return self.workers[self.newest]

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if "code" not in said:
                self.newest = said["pid"]
                self.workers[self.newest] = Worker(self.newest)
                self.born.release()
            else:
                worker = self.workers.pop(said["pid"])
                worker._code = said["code"]
                worker._ended.set()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---- inside -------------------------------------------------------------------------------------------------------------------------


def serve() -> None:
    for name in COMMON:
        importlib.import_module(name)
    ended_r, ended_w = os.pipe()
    os.set_blocking(ended_w, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended_w)
    living: set[int] = set()
    with selectors.DefaultSelector() as waiting:
        waiting.register(0, selectors.EVENT_READ)
        waiting.register(ended_r, selectors.EVENT_READ)
        rest = b""
        while True:
            for key, _ in waiting.select():
                if key.fd == ended_r:
                    os.read(ended_r, 4096)
                    reap(living)
                    continue
                read = os.read(0, 65536)
                if not read:
                    for pid in living:
                        os.kill(pid, signal.SIGKILL)
                    return
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    pid = bear(json.loads(line))
                    living.add(pid)
                    say(pid=pid)


def reap(living: set[int]) -> None:
    for pid in list(living):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            living.discard(pid)
            say(pid=pid, code=os.waitstatus_to_exitcode(status))


def say(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def bear(request: dict[str, Any]) -> int:
    for name in OF.get(request["warm"], ()):
        importlib.import_module(name)
    pid = os.fork()
    if pid == 0:
        be_worker(request)
    return pid


def be_worker(request: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for theirs, ours in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(theirs, ours)
        os.chdir(request["folder"])
        os.environ.update(request["env"])
        from outlast.cli import main

        code = main(request["argv"])
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
