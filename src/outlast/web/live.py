"""Pages that are open hear of changes: one watcher a process, however many pages, and one look a topic and change.

Rules
1. An event says only that something changed (`changed`, its id a fingerprint); the page then asks for itself, through the front door.
2. The watcher runs while somebody listens. A page whose fingerprint is the present one is not woken.
3. At most `MOST` listeners; a comment every `BEAT_S` seconds keeps proxies from closing, and finds listeners who have gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeVar

from outlast.app import Outlast
from outlast.errors import OutlastError

T = TypeVar("T")
log = logging.getLogger("outlast.web")

MOST = 500  # pages open at once in one process
BEAT_S = 15.0
PAUSE_S = 0.4  # between two looks: a busy store does not keep pages busy
LOOK_S = 1.0  # how long one wait for a change blocks its thread


@dataclass(eq=False)
class Listener:
    topic: str
    seen: str
    news: asyncio.Event = field(default_factory=asyncio.Event)
    print_: str = ""


class Hub:
    """Listeners by topic: `inbox`, `runs`, `run:ID`."""

    def __init__(self, app: Outlast) -> None:
        self.app = app
        self._listeners: set[Listener] = set()
        self._watching: asyncio.Task[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    @property
    def full(self) -> bool:
        return len(self._listeners) >= MOST

    def fingerprint(self, topic: str) -> str:
        """Of what the topic's page shows; blocking."""
        reader = self.app.reader
        if topic.startswith("run:"):
            run_id = topic.removeprefix("run:")
            head = self.app.head(run_id)
            seen: object = (reader.length(run_id), head.status, head.lease_owner, head.reason, str(head.wake_at))
        elif topic == "inbox":
            seen = [(h.run_id, g.gate_id, g.level, g.digest) for h, g in reader.inbox()]
        else:
            seen = [(r.head.run_id, r.head.status, r.head.reason, r.head.seq, r.head.lease_owner) for r in reader.page().rows]
        return sha256(repr(seen).encode("utf-8", "backslashreplace")).hexdigest()[:16]

    async def listen(self, topic: str, seen: str) -> AsyncIterator[str]:
        """Server-sent events of one page."""
        listener = Listener(topic, seen)
        self._listeners.add(listener)
        self._start()
        try:
            yield "retry: 1000\n\n"
            while not self._closed:
                try:
                    async with asyncio.timeout(BEAT_S):  # not wait_for, which may swallow our own cancellation
                        await listener.news.wait()
                except TimeoutError:
                    self._start()
                    yield ": still here\n\n"
                    continue
                listener.news.clear()
                if self._closed:
                    return
                listener.seen = listener.print_
                yield f"id: {listener.seen}\nevent: changed\ndata: {listener.topic.partition(':')[0]}\n\n"
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        """End every stream: the server is going down."""
        self._closed = True
        for listener in self._listeners:
            listener.news.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _start(self) -> None:
        if self._watching is None or self._watching.done():
            self._pool = self._pool or ThreadPoolExecutor(2, thread_name_prefix="outlast web live")
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        seen: int | None = None
        fresh: set[Listener] = set()
        while self._listeners and not self._closed:
            try:
                waited = LOOK_S if fresh >= self._listeners else 0.0
                before, seen = seen, await self._blocking(lambda: self.app.reader.wait_for_change(seen, waited))  # noqa: B023 - awaited at once
                if before == seen and fresh >= self._listeners:
                    continue
                listeners = list(self._listeners)
                for topic in {x.topic for x in listeners}:
                    print_ = await self._look(topic)
                    for listener in listeners:
                        if listener.topic == topic and print_ is not None and print_ not in (listener.seen, listener.print_):
                            listener.print_ = print_
                            listener.news.set()
                fresh = set(listeners)
            except Exception as e:  # noqa: BLE001 - whatever fails, the pages that are open must not go deaf
                log.warning("looking for changes failed: %s", type(e).__name__)
                seen, fresh = None, set()
            await asyncio.sleep(PAUSE_S)

    async def _look(self, topic: str) -> str | None:
        with contextlib.suppress(OutlastError):  # a run that has gone wakes nobody
            return await self._blocking(lambda: self.fingerprint(topic))
        return None

    async def _blocking(self, f: Callable[[], T]) -> T:
        assert self._pool is not None
        return await asyncio.get_running_loop().run_in_executor(self._pool, f)
