"""What a worker's death or stop leaves behind says nothing that nobody asked: no trace of a child without work, none of a call whose waiter went."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.alone import COMMAND
from outlast.errors import LeaseLost
from outlast.runtime.drive import Drive
from outlast.runtime.news import Stop


@pytest.mark.parametrize("said", ["", '{"target": "app:ap'])
def test_a_child_whose_worker_died_before_it_said_what_to_drive(said: str) -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND], input=said, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_what_fails_after_its_waiter_was_stopped_is_no_lost_exception() -> None:
    unheard: list[Any] = []
    may_fail, begun = threading.Event(), threading.Event()

    def fails() -> None:
        begun.set()
        assert may_fail.wait(30)
        raise LeaseLost("run-1 is held by somebody else", run_id="run-1")

    async def stopped() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: unheard.append(context))
        drive = object.__new__(Drive)
        drive.threads, drive.drained_at = None, 0.0  # type: ignore[assignment]  # the loop's own
        drive.writer = SimpleNamespace(stopped=Stop())  # type: ignore[assignment]  # all of it that is used
        waiter = asyncio.ensure_future(drive._blocking(fails))
        await loop.run_in_executor(None, begun.wait, 30)
        waiter.cancel()
        await asyncio.sleep(0)
        may_fail.set()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        del waiter
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(stopped())
    assert unheard == []
