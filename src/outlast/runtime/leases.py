"""The keeper of a process's leases: one thread that renews them all and listens for what others write to their runs.

A thread of its own, so that a tool that blocks the event loop starves no lease. A renewal that finds a lease gone, and a journal that grew
from outside, are told to the driver of that run at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outlast.errors import StoreError
from outlast.runtime.clock import monotonic
from outlast.runtime.crashpoints import beside
from outlast.stores import base

log = logging.getLogger("outlast.worker")

LOOK_S = 0.2  # at most so often is the store asked what is new for the runs held here


@dataclass(slots=True)
class _Held:
    lease: base.Lease
    news: Callable[[base.Renewed], None]


class Keeper:
    """Renews every third of the lease. `alive()` is what `/livez` asks."""

    def __init__(self, store: base.Store, lease_s: float) -> None:
        self.store, self.lease_s = store, lease_s
        # By run and nonce: a run that was lost and taken again in this process has two for a moment, and one claim of many runs one nonce.
        self._held: dict[tuple[int, str], _Held] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()
        self.lost_at = float("-inf")  # when a renewal or a look failed last: others' leases may have run out for the same reason

    def add(self, lease: base.Lease, news: Callable[[base.Renewed], None]) -> None:
        """Keep this lease until `remove`; `news` is called from the keeper's thread."""
        with self._lock:
            self._held[lease.run_no, lease.nonce] = _Held(lease, news)
            if self._thread is None or not self._thread.is_alive():
                self._stop.clear()
                self._thread = threading.Thread(target=self._keep, name="outlast leases", daemon=True)
                self._thread.start()

    def update(self, lease: base.Lease) -> None:
        """The same run under a new fence (after an unknown commit)."""
        with self._lock:
            if (held := self._held.get((lease.run_no, lease.nonce))) is not None:
                held.lease = lease

    def remove(self, lease: base.Lease) -> None:
        """Keep it no longer; another lease of the same run stays."""
        with self._lock:
            self._held.pop((lease.run_no, lease.nonce), None)

    def held(self) -> int:
        """How many runs are kept here."""
        return len(self._held)

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def healthy(self) -> bool:
        """Is everything that is held here kept?"""
        with self._lock:
            return not self._held or self.alive()

    @contextmanager
    def while_open(self) -> Iterator[bool]:
        """Is the application still open? It is not closed inside: what comes late must not open its store anew."""
        with self._closing:
            yield not self._stop.is_set()

    def close(self) -> None:
        with self._closing:
            self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2)
        self._thread = None

    def _keep(self) -> None:
        beside()
        renew_at, seen = monotonic() + self.lease_s / 3, None
        while not self._stop.is_set():
            with self._lock:
                held = dict(self._held)
            if not held:
                if self._stop.wait(LOOK_S):
                    return
                renew_at = min(renew_at, monotonic() + self.lease_s / 3)
                with self._lock:
                    if not self._held:
                        self._thread = None  # nothing to keep: a next `add` starts another thread
                        return
                continue
            try:
                now = monotonic()
                if now >= renew_at:
                    renew_at = now + self.lease_s / 3
                    found = self.store.renew([h.lease for h in held.values()], lease_s=self.lease_s)
                else:
                    seen = self.store.wait_for_change(seen, max(min(renew_at - now, 1.0), 0.01))
                    found = self.store.peek([h.lease for h in held.values()])
                    self._stop.wait(LOOK_S)
            except StoreError as e:
                self.lost_at = monotonic()
                log.warning("leases could not be renewed: %s", e)
                renew_at = monotonic() + min(1.0, self.lease_s / 10)
                self._stop.wait(min(1.0, self.lease_s / 10))
                continue
            for one, renewed in zip(held.values(), found, strict=True):
                one.news(renewed)
