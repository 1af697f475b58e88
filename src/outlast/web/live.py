"""Pages that are open hear of changes: one watcher a process, however many pages, and one look a topic and change.

Rules
1. An event says only that something changed (`changed`, its id a fingerprint); the page then asks for itself, through the front door.
2. The watcher runs while somebody listens. A page whose fingerprint is the present one is not woken. What a fingerprint is made of is read
   by an index and without bodies.
3. What all pages together cost is bounded: after pages were woken, the next look waits until this process had been idle for as long as it
   was at work (`SHARE`), `LAG_S` at most. One page hears at once; a hundred on a busy store hear every few seconds.
4. At most `MOST` listeners; a comment every `BEAT_S` seconds keeps proxies from closing, and finds listeners who have gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
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
SHARE = 0.5  # of one core: what pages may take together
LAG_S = 8.0


@dataclass(eq=False)
class Listener:
    topic: str
    seen: str
    news: asyncio.Event = field(default_factory=asyncio.Event)
    print_: str = ""


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
        while self._listeners and not self._closed:
            try:
                waited = LOOK_S if fresh >= self._listeners else 0.0
                seen = await self._blocking(self.app.reader.wait_for_change, seen, waited)
                before, commits = commits, await self._blocking(self.app.reader.commits)
                if before == commits and fresh >= self._listeners:
                    continue
                begun = time.monotonic(), time.process_time()
                woken = await self._wake(listeners := set(self._listeners))
                fresh = listeners
                await self._rest(woken, *begun)
            except Exception as e:  # noqa: BLE001 - whatever fails, the pages that are open must not go deaf
                log.warning("looking for changes failed: %s", type(e).__name__)
                seen, fresh = None, set()
                await asyncio.sleep(PAUSE_S)

    async def _wake(self, listeners: Collection[Listener]) -> int:
        """Those whose page is no longer true; gives how many there were."""
        prints = await self._blocking(self.fingerprints, {x.topic for x in listeners})
        woken = 0
        for listener in listeners:
            print_ = prints.get(listener.topic)  # a run that has gone wakes nobody
            if print_ is not None and print_ not in (listener.seen, listener.print_):
                listener.print_ = print_
                listener.news.set()
                woken += 1
        return woken

    @staticmethod
    async def _rest(woken: int, since: float, cpu: float) -> None:
        """Until the pages that were woken have had their answers, and this process has been idle for its share of the time."""
        until = since + LAG_S
        await asyncio.sleep(max(PAUSE_S, (time.monotonic() - since) / SHARE))
        while woken > 1 and (now := time.monotonic()) < until and time.process_time() - cpu > SHARE * (now - since):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(PAUSE_S)

    async def _blocking(self, f: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        assert self._pool is not None
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(f, *args, **kwargs))
