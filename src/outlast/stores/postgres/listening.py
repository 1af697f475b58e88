"""Hearing of commits from outside: LISTEN on one connection of this process, whoever of its threads waits first reads it for all.

A notice may be lost (a pooler in between, a connection that broke): whoever waits looks again by itself when its time is over. Behind a pooler
nothing is heard unless `listen_url` names the server itself.
"""

from __future__ import annotations

import os
import select
import threading
import time

import psycopg
from psycopg import sql

from outlast.stores.postgres.connections import Connections, Wire
from outlast.stores.postgres.failures import Late, Standby


class Listener:
    """`channel`: what is notified. `limit_s`: how long connecting may take."""

    def __init__(self, connections: Connections, channel: str, listen_url: str | None, limit_s: float) -> None:
        self._connections, self._channel, self._url, self._limit_s = connections, channel, listen_url, limit_s
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._leading = False
        self._version = 0
        self._wire: Wire | None = None
        self._deaf = False  # a pooler stands in between
        self._parents: Wire | None = None

    def wait(self, seen: int | None, timeout_s: float) -> int:
        """Until the number is another one than `seen`, or the time is over; None: only begin to listen."""
        if self._pid != os.getpid():
            wire = self._wire
            self._reset()
            self._parents = wire  # kept, so that its end in this process ends nothing of the parent's
        end = time.monotonic() + timeout_s
        looked = False
        while True:
            with self._changed:
                while True:
                    left = end - time.monotonic()
                    ready = self._wire is not None or self._deaf
                    if (seen is not None and self._version != seen) or (ready and seen is None) or (looked and left <= 0):
                        return self._version
                    if not self._leading and not self._deaf:
                        self._leading = True
                        break
                    looked = True
                    self._changed.wait(max(left, 0) if seen is not None or left > 0 else 0.1)
            heard = 0
            try:
                heard = self._listen(0 if seen is None else max(left, 0))
            finally:
                looked = True
                with self._changed:
                    self._leading = False
                    self._version += heard
                    self._changed.notify_all()

    def _listen(self, timeout_s: float) -> int:
        """Read the connection once, made where there is none: 1 where something was or may have been said."""
        wire = self._wire
        if wire is None:
            wire = self._connections.connect(time.monotonic() + self._limit_s, url=self._url)
            if wire.pooled:
                wire.close()
                self._deaf = True
                return 0
            wire.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
            wire.until = float("inf")
            self._wire = wire
            return 1 if timeout_s else 0  # what was said since the last connection broke is lost
        try:
            poll = select.poll()
            poll.register(wire.pgconn.socket, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                return 0
            wire.pgconn.consume_input()
            heard = 0
            while wire.pgconn.notifies() is not None:
                heard = 1
            return heard
        except (psycopg.Error, Late, Standby, OSError):
            self._wire = None
            wire.cut()
            return 1

    def close(self) -> None:
        if self._pid == os.getpid():
            with self._changed:
                wire, self._wire = self._wire, None
            if wire is not None:
                wire.cut()
