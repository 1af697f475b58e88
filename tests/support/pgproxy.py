"""A TCP proxy before Postgres that cuts a connection around a COMMIT, however it is sent: alone, at the end of a longer message, or pipelined.

    before      the message that holds the COMMIT is not passed on; both sides are closed: the transaction is gone
    after       it is passed on; once the server has said COMMIT, both sides are closed and the client has heard nothing
    swallow     it is passed on, and no answer ever comes back; the connection stays open

It reads the protocol message by message (a COMMIT is never split, and one inside a value is none), and waits for nothing but the network.
"""

from __future__ import annotations

import asyncio
import re
import struct
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Literal, Self

Mode = Literal["before", "after", "swallow"]
MODES: tuple[Mode, ...] = ("before", "after", "swallow")

_COMMIT = re.compile(rb"(?:^|[;\0]\s*)COMMIT\s*;?\s*\0", re.IGNORECASE)  # a statement of its own, the last of a Query or all of a Parse
_PLAIN = {80877103, 80877104}  # codes of SSLRequest and GSSENCRequest: answered with a single byte
_CANCEL = 80877102


class Proxy:
    """`with Proxy(host, port) as proxy`: listens on `proxy.port`. A test arms it, runs, and asks what happened."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._upstream = host, port
        self._lock = threading.Lock()
        self._mode: Mode | None = None
        self._nth = 0
        self._apart = False
        self.seen = 0  # COMMITs since `arm`
        self.cuts = 0
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgproxy", daemon=True)

    def arm(self, mode: Mode, nth: int) -> None:
        """Do this to the nth COMMIT from now on, and to no other."""
        with self._lock:
            self._mode, self._nth, self.seen, self.cuts = mode, nth, 0, 0

    def disarm(self) -> None:
        with self._lock:
            self._mode = None

    def part(self) -> None:
        """From now on nothing passes either way, and nobody is told: the network between the two is gone."""
        self._apart = True

    def join(self) -> None:
        """Heal it: what was open is closed, new connections pass."""
        self._apart = False
        self._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in list(self._open)])

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    # ---- the loop, in its thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._pass(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await self._startup(reader, writer)
        if self._apart:
            await self._stop.wait()
        to_server: asyncio.StreamWriter
        if self._host.startswith("/"):
            from_server, to_server = await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._upstream}")
        else:
            from_server, to_server = await asyncio.open_connection(self._host, self._upstream)
        doom = _Doom()
        self._open |= {writer, to_server}
        try:
            to_server.write(first)
            both = [
                asyncio.ensure_future(self._forward(reader, to_server, doom)),
                asyncio.ensure_future(self._backward(from_server, writer, doom)),
            ]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        finally:
            self._open -= {writer, to_server}
            to_server.transport.abort()

    @staticmethod
    async def _startup(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The client's first message; encryption is declined."""
        while True:
            head = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack(">i", head)[0] - 4)
            if struct.unpack(">i", body[:4])[0] not in _PLAIN:
                return head + body
            writer.write(b"N")

    async def _forward(self, reader: asyncio.StreamReader, to_server: asyncio.StreamWriter, doom: _Doom) -> None:
        async for kind, message in _messages(reader):
            if kind in b"QP" and _COMMIT.search(message, 5) and (mode := self._hit()) is not None:
                if mode == "before":
                    return
                doom.mode = mode
            if self._apart:
                await self._stop.wait()
            to_server.write(message)
            await to_server.drain()

    async def _backward(self, from_server: asyncio.StreamReader, writer: asyncio.StreamWriter, doom: _Doom) -> None:
        async for kind, message in _messages(from_server):
            if doom.mode == "after" and kind == ord("C") and message[5:] == b"COMMIT\0":
                return
            if self._apart:
                await self._stop.wait()
            if doom.mode is None:
                writer.write(message)
                await writer.drain()

    def _hit(self) -> Mode | None:
        with self._lock:
            self.seen += 1
            if self._mode is None or self.seen != self._nth:
                return None
            self.cuts += 1
            return self._mode


class _Doom:
    """What a connection's end will be, once its COMMIT has passed."""

    mode: Mode | None = None


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """(type, whole message), until the sender closes."""
    while True:
        try:
            head = await reader.readexactly(5)
        except asyncio.IncompleteReadError:
            return
        yield head[0], head + await reader.readexactly(struct.unpack(">i", head[1:])[0] - 4)
