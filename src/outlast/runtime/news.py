"""Events for what there is one of per run: a run that is driven keeps no deque, no condition and no task for something that hardly ever comes.

`News` is asyncio's Event for one waiter, who waits for it beside other things; `Stop` is threading's, whose lock is made when somebody waits.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any


class News:
    """Set and cleared in the loop's thread."""

    __slots__ = ("_arrival", "_set")

    def __init__(self) -> None:
        self._set = False
        self._arrival: asyncio.Future[Any] | None = None

    def set(self) -> None:
        self._set = True
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def clear(self) -> None:
        self._set = False

    def arrived(self) -> asyncio.Future[Any]:
        """Done once this is set; for one waiter at a time, who may cancel it."""
        self._arrival = asyncio.get_running_loop().create_future()
        if self._set:
            self._arrival.set_result(None)
        return self._arrival


_making = threading.Lock()


class Stop:
    """Set once, from any thread."""

    __slots__ = ("_event", "_set")

    def __init__(self) -> None:
        self._set = False
        self._event: threading.Event | None = None

    def set(self) -> None:
        with _making:
            self._set, event = True, self._event
        if event is not None:
            event.set()

    def wait(self, timeout_s: float) -> bool:
        """Was it set before the time was over?"""
        with _making:
            if self._set:
                return True
            self._event = event = self._event or threading.Event()
        return event.wait(timeout_s)
