"""The server's clock without asking it each time: what it said last, plus the time that went by here since."""

from __future__ import annotations

import threading
import time

KEEP_S = 10.0  # so long an answer that took less time to come is believed over a newer one
JUMP_S = 1.0  # more than answers differ by: the server's clock was set, or it is another server


class ServerClock:
    """Never ahead of the server: what it said was true before its answer came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offset: float | None = None  # seconds that the server's clock is ahead of our monotonic one, at least
        self._at = 0.0

    def heard(self, server_s: float, here_s: float) -> None:
        """It said `server_s` at or before `here_s` of our monotonic clock."""
        offset = server_s - here_s
        with self._lock:
            known = self._offset
            if known is None or offset >= known or here_s - self._at >= KEEP_S or known - offset >= JUMP_S:
                self._offset, self._at = offset, here_s

    def now_ms(self) -> int | None:
        """Whole milliseconds since the epoch; None: it has not spoken yet."""
        with self._lock:
            return None if self._offset is None else int((time.monotonic() + self._offset) * 1000)
