"""The clocks of a run: the store's wall clock for instants, this process's monotonic clock for what it may still do.

`ManualClock` replaces the store's wall clock in tests. It moves only by hand; leases and time-outs of a running process do not follow it.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

from outlast.errors import UsageError


def wall() -> datetime:
    """Now, in UTC, cut to whole milliseconds: the resolution of every stored instant."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", None)  # Linux: its monotonic clock stands still while the machine sleeps, a lease does not


def monotonic() -> float:
    """Seconds on a clock that no one sets; a machine's sleep counts."""
    return time.monotonic() if _SINCE_BOOT is None else time.clock_gettime(_SINCE_BOOT)


class ManualClock:
    """A wall clock for tests: `Outlast(clock=ManualClock())`. Begins at `now` (default: 2026-01-01 09:00 UTC) and moves only by `move`."""

    def __init__(self, now: datetime = datetime(2026, 1, 1, 9, tzinfo=UTC)) -> None:
        if now.tzinfo is None:
            raise UsageError(f"now must have a time zone: {now.isoformat()} is naive")
        self._now = now.astimezone(UTC)
        self._lock = threading.Lock()

    def __call__(self) -> datetime:
        with self._lock:
            return self._now.replace(microsecond=self._now.microsecond // 1000 * 1000)

    @property
    def now(self) -> datetime:
        return self()

    def move(self, by: timedelta) -> None:
        """Set it forward, or back with a negative duration."""
        with self._lock:
            self._now += by
