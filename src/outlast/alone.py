"""Driving one run in a process of its own: its next death takes nobody along.

A worker does this with a run whose worker died more than once. The lease is handed over: the child takes the run's row under the lease's
nonce (fence + 1), so that what the claim found (a lease that nobody released) is still known to whoever drives.

    worker -> a new Python process, one JSON line on stdin: {"target": …, "store": …, "lease": {…}, "grace_s": …} -> exit

A second line, or the end of stdin, says that the worker stops, or died: the child begins nothing new, what runs gets the grace, and the lease
goes back. SIGTERM says so without a grace; Ctrl-C, which a terminal gives to both, is the worker's to hear.

Until the child has the lease, its worker renews it; from then on the child does. A child that does not take it in time, or whose lease ran out
(it was stopped, or hangs as a whole), is ended. What a tool or the model may take is bounded in the child like anywhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import json
import os
import runpy
import signal
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast import sync
from outlast.core.run import iso
from outlast.errors import OutlastError
from outlast.stores import base, owner

if TYPE_CHECKING:
    from outlast.app import Outlast

COMMAND = "import sys; from outlast.alone import main; sys.exit(main())"
START_S = 60.0  # until a child has taken its lease
END_S = 30.0  # for a child whose lease is gone, or given back, to end
KILL_S = 10.0  # between SIGTERM and SIGKILL
MAIN = "__outlast_child__"  # the run name of a program's main file in the child: its `if __name__ == "__main__"` stays quiet


def target_of(app: Outlast, given: str | None) -> str | None:
    """Where a child process finds this app again: MODULE:ATTR, PATH.py:ATTR of the main program, or None where it is in no module."""
    if given:
        return given
    for name, module in list(sys.modules.items()):
        for attr, value in list(getattr(module, "__dict__", {}).items()):
            if value is not app:
                continue
            if name != "__main__":
                return f"{name}:{attr}"
            if file := getattr(module, "__file__", None):
                return f"{Path(file).resolve()}:{attr}"
    return None


async def drive(target: str, store: str | None, lease: base.Lease, grace: timedelta, stopping: asyncio.Event) -> int:
    """Hand a lease to a child process and wait for it; its exit code. Cancelled, it passes SIGTERM on, waits, and kills what does not end.

    Args:
        grace: what a running step gets once `stopping` is set.
    """
    document = {
        "target": target,
        "store": store,
        "path": sys.path,
        "lease": {**dataclasses.asdict(lease), "until": iso(lease.until)},
        "grace_s": grace.total_seconds(),
    }
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", COMMAND, stdin=asyncio.subprocess.PIPE)
    ended, stop = asyncio.ensure_future(child.wait()), asyncio.ensure_future(stopping.wait())
    try:
        await _say(child, json.dumps(document))
        await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await _say(child, "stop")
            await asyncio.wait({ended})
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait({ended}, timeout=KILL_S)
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
        await child.wait()
        raise
    finally:
        stop.cancel()
    return child.returncode or 0


async def _say(child: asyncio.subprocess.Process, line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{line}\n".encode())
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: whoever waits for it sees that
        await child.stdin.drain()


def main() -> int:
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    try:
        with open(0, "rb", buffering=0, closefd=False) as said:
            document = json.loads(said.readline())
    except json.JSONDecodeError:
        return 1  # the worker died before it had said what to drive: its lease runs out, nobody else waits for us
    worker = os.dup(0)
    with open(os.devnull) as nothing:  # noqa: PTH123 - a descriptor: what tools read, and the programs that they begin
        os.dup2(nothing.fileno(), 0)
    sys.path[:] = [p for p in document["path"] if isinstance(p, str)]
    app = _load(document["target"])
    if document["store"] is not None and document["store"] != str(app._given):
        app = app.with_store(document["store"])
    raw = {**document["lease"], "until": datetime.fromisoformat(document["lease"]["until"]), "owner": owner.me()}
    try:
        lease = app._store.reclaim(base.Lease(**raw), lease_s=app._lease_s)
        sync.run(_drive(app, lease, timedelta(seconds=document["grace_s"]), worker))
    except OutlastError as e:  # lost on the way, say: whoever holds the run now drives it
        sys.stderr.write(f"outlast: run {raw['run_id']}: {e}\n")
        return e.exit_code
    return 0


async def _drive(app: Outlast, lease: base.Lease, grace: timedelta, worker: int) -> None:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()

    def heard() -> None:
        loop.remove_reader(worker)
        stopping.set()

    loop.add_reader(worker, heard)
    task = asyncio.ensure_future(app._drive_handed(lease, grace, stopping))
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _load(target: str) -> Outlast:
    from outlast.agent import Agent
    from outlast.app import Outlast

    module, _, attr = target.rpartition(":")
    value: Any = None
    if module.endswith(".py"):
        value = runpy.run_path(module, run_name=MAIN)[attr]
    else:
        value = importlib.import_module(module)
        for part in attr.split("."):
            value = getattr(value, part)
    if isinstance(value, Agent):
        value = Outlast(agents=[value])
    assert isinstance(value, Outlast), target
    return value
