"""Pages that are open hear of changes: one watcher a process, however many pages, and one look a topic and change.

Rules
1. An event says only that something changed (`changed`, its id a fingerprint); the page then asks for itself, through the front door.
2. The watcher runs while somebody listens. A page whose fingerprint is the present one is not woken. What a fingerprint is made of is read
   by an index and without bodies.
3. What all pages together cost is bounded: they are woken a few at a time (`SLICE`), and the next few wait while this process has used more
   than its share of a core (`SHARE`, saved up to `BURST_S`), `LAG_S` at most. A few pages hear at once; a hundred on a busy store within seconds.
4. At most `MOST` listeners; a comment every `BEAT_S` seconds keeps proxies from closing, and finds listeners who have gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from typing import ParamSpec, TypeVar
from urllib.parse import parse_qsl

from outlast.app import Outlast
from outlast.errors import OutlastError
from outlast.web.lists import listing

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("outlast.web")

MOST = 500  # pages open at once in one process
BEAT_S = 15.0
PAUSE_S = 0.4  # between two looks: a busy store does not keep pages busy
LOOK_S = 1.0  # how long one wait for a change blocks its thread, and how old news are where a store does not tell of every commit
SLICE = 8  # pages woken at once
SHARE = 0.3  # of one core: what pages may take together
BURST_S = 1.0  # of a core's time: what they may take at once after a while without
LAG_S = 12.0


@dataclass(eq=False)
class Listener:
    topic: str
    seen: str
    news: asyncio.Event = field(default_factory=asyncio.Event)
    print_: str = ""


class Budget:
    """What this process may use of a core: a share of the time that passes, saved up to a limit."""

    def __init__(self) -> None:
        self._left = BURST_S
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def spent(self) -> bool:
        wall, cpu = time.monotonic(), time.process_time()
        self._left = min(BURST_S, self._left + SHARE * (wall - self._wall) - (cpu - self._cpu))
        self._left = max(self._left, -LAG_S * SHARE)  # what others use of this process is no debt for ever
        self._wall, self._cpu = wall, cpu
        return self._left < 0


class Hub:
    """Listeners by topic: `inbox`, `runs` with a list's filters (`runs?status=failed`), `run:ID`."""

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
        """Of what the topic's page shows; blocking. "": the run has gone."""
        return self.fingerprints([topic]).get(topic, "")

    def fingerprints(self, topics: Iterable[str]) -> dict[str, str]:
        """Of many at once, the runs' in one question; blocking."""
        reader = self.app.reader
        out: dict[str, object] = {}
        ids = [t.removeprefix("run:") for t in topics if t.startswith("run:")]
        out.update({f"run:{run_id}": glance for run_id, glance in reader.glance(ids).items()} if ids else {})
        for topic in topics:
            if topic == "inbox":
                out[topic] = reader.glance_inbox()
            elif topic.startswith("runs"):
                with contextlib.suppress(OutlastError):  # the run that its page comes after has gone
                    out[topic] = self._list(topic)
        return {topic: sha256(repr(seen).encode("utf-8", "backslashreplace")).hexdigest()[:16] for topic, seen in out.items()}

    def _list(self, topic: str) -> object:
        reader = self.app.reader
        listed = listing(dict(parse_qsl(topic.partition("?")[2])), reader.now())
        rows = [(r.head.run_id, r.head.status, r.head.reason, r.head.seq, r.head.lease_owner, r.gate and r.gate.gate_id)
                for r in reader.page(**listed.where).rows]  # fmt: skip
        return rows, reader.counts(**listed.counted) if listed.counted is not None else None

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
        seen, commits = None, ""
        fresh: set[Listener] = set()
        budget = Budget()
        while self._listeners and not self._closed:
            try:
                waited = LOOK_S if fresh >= self._listeners else 0.0
                seen = await self._blocking(self.app.reader.wait_for_change, seen, waited)
                before, commits = commits, await self._blocking(self.app.reader.commits)
                if before == commits and fresh >= self._listeners:
                    continue
                listeners = set(self._listeners)
                prints = await self._blocking(self.fingerprints, {x.topic for x in listeners})
                fresh = listeners
                await self._wake(listeners, prints, budget)
            except Exception as e:  # noqa: BLE001 - whatever fails, the pages that are open must not go deaf
                log.warning("looking for changes failed: %s", type(e).__name__)
                seen, fresh = None, set()
            await asyncio.sleep(PAUSE_S)

    async def _wake(self, listeners: Collection[Listener], prints: Mapping[str, str], budget: Budget) -> None:
        """Those whose page is no longer true; a run that has gone wakes nobody."""
        stale = [x for x in listeners if prints.get(x.topic, x.seen) not in (x.seen, x.print_)]
        until = time.monotonic() + LAG_S
        for n, listener in enumerate(stale):
            if n and n % SLICE == 0:
                await asyncio.sleep(PAUSE_S / 2)  # they ask, and are answered
                while budget.spent() and time.monotonic() < until and not self._closed:  # noqa: ASYNC110 - no event tells when a core is idle
                    await asyncio.sleep(PAUSE_S / 2)
            listener.print_ = prints[listener.topic]
            listener.news.set()

    async def _blocking(self, f: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        assert self._pool is not None
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(f, *args, **kwargs))
