"""An event that is waited for beside other things: a future for each wait, where `asyncio.Event.wait` needs a task of its own and its end."""

from __future__ import annotations

import asyncio
from typing import Any


class News(asyncio.Event):
    def __init__(self) -> None:
        super().__init__()
        self._arrival: asyncio.Future[Any] | None = None

    def set(self) -> None:
        super().set()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def arrived(self) -> asyncio.Future[Any]:
        """Done once this is set; for one waiter at a time, who may cancel it."""
        self._arrival = asyncio.get_running_loop().create_future()
        if self.is_set():
            self._arrival.set_result(None)
        return self._arrival
