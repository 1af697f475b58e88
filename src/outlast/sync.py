"""A coroutine for a plain program: like `asyncio.run`, but what will not end is left behind.

`asyncio.run` waits for every task that is left, for ever: a tool that swallows each cancellation would keep the whole program. Its call is in
doubt by then, and its run given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger("outlast")
T = TypeVar("T")

LEFT_S = 2.0  # for what is left to end when it is cancelled


def run(main: Coroutine[Any, Any, T]) -> T:
    """Its result. Raises what it raises."""

    async def whole() -> T:
        try:
            return await main
        finally:
            await _leave_behind()

    return asyncio.run(whole())


async def _leave_behind() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if not left:
        return
    _, stubborn = await asyncio.wait(left, timeout=LEFT_S)
    for task in stubborn:
        log.warning("a task does not end when it is cancelled; it is left behind: %r", task)
        asyncio._unregister_task(task)  # documented for whoever keeps tasks of their own
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # said above
