"""Waiting for what another thread or process does: on the store's commits, on a file, on an event; always with a limit, never by time alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from outlast import Outlast

LIMIT_S = 30.0


def until(app: Outlast, condition: Callable[[], bool], *, what: str = "", within_s: float = LIMIT_S) -> None:
    """Until the condition holds; it is asked again after every commit to the app's store."""
    from outlast.runtime.clock import monotonic

    end, seen = monotonic() + within_s, None
    while not condition():
        assert monotonic() < end, f"never: {what or condition}"
        seen = app._store.wait_for_change(seen, 0.2)


def happens(event: threading.Event) -> None:
    assert event.wait(LIMIT_S), "it never happened"
