"""DBOS on SQLite: a workflow whose model and tool calls are steps. In a process of its own, since a process can hold one DBOS only.

A step's time is taken between two successive steps of one workflow. `child DIR` is that process: a number on stdin, times on stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from messages import Message, first, message


def launched(url: str) -> tuple[Any, list[float]]:
    """(the workflow, the instants of its steps)."""
    from dbos import DBOS

    DBOS(
        config={
            "name": "bench", "application_version": "1", "system_database_url": url, "log_level": "ERROR",
            "run_admin_server": False,
        }
    )  # fmt: skip
    times: list[float] = []

    @DBOS.step()
    def call(i: int) -> Message:
        times.append(time.perf_counter())
        return message(i)

    @DBOS.workflow()
    def agent(n: int) -> int:
        messages = [first(), *(call(i) for i in range(n))]
        times.append(time.perf_counter())
        return len(messages)

    DBOS.launch()
    return agent, times


class Dbos:
    name = "DBOS on SQLite"

    def __init__(self, folder: Path) -> None:
        self._start(f"sqlite:///{folder}/dbos.db")

    def _start(self, url: str) -> None:
        command = [sys.executable, __file__, "child", url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def steps(self, n: int, k: int) -> list[float]:
        """A step costs the same whatever came before: each saves its own result only."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{k}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("["):
                times: list[float] = json.loads(line)
                return times
        raise RuntimeError("DBOS ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def child(url: str) -> None:
    agent, times = launched(url)
    for line in sys.stdin:
        times.clear()
        agent(int(line))
        print(json.dumps([b - a for a, b in pairwise(times)]), flush=True)


if __name__ == "__main__":
    child(sys.argv[2])
    import os

    os._exit(0)  # its threads would keep the process
