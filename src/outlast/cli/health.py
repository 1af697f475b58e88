"""`/livez`, `/readyz` and `/metrics` of a worker, from a thread of their own: a tool that blocks the event loop must not look like a dead worker.

`/livez` is 200 while leases are kept: whoever restarts workers asks it. `/readyz` is 200 while the store answers, its schema fits, and the
worker was not asked to end. `/metrics` is Prometheus text: what this worker did, and what waits in its store.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from outlast.cli import render
from outlast.errors import OutlastError, UsageError
from outlast.runtime.metrics import TEXT_FORMAT

if TYPE_CHECKING:
    from outlast import Outlast


@contextlib.asynccontextmanager
async def serving(app: Outlast, port: int, *, ending: Callable[[], bool]) -> AsyncIterator[int]:
    """Serve on all interfaces until the block ends; gives the port (of 0: the free one that was found)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(app, self.path.partition("?")[0], ending=ending())
            plain = self.path.partition("?")[0] != "/metrics" or status != 200
            body = (render.line(text) + "\n" if plain else text).encode("utf-8", "backslashreplace")
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8" if plain else TEXT_FORMAT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Nobody wants a line for every probe."""

    try:
        server = ThreadingHTTPServer(("", port), Handler)
    except OSError as e:
        raise UsageError(f"--health-port {port} cannot be served: {e.strerror}") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="outlast health", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


def answer(app: Outlast, path: str, *, ending: bool) -> tuple[int, str]:
    """(HTTP status, what it says)."""
    match path:
        case "/livez":
            return (200, "ok") if app.keeps_leases() else (503, "leases are not kept")
        case "/readyz" if ending:
            return 503, "asked to end"
        case "/readyz":
            try:
                app.runs(limit=1)
            except OutlastError as e:
                return 503, str(e)
            return 200, "ok"
        case "/metrics":
            try:
                return 200, app.metrics()
            except OutlastError as e:
                return 503, str(e)
        case _:
            return 404, "there are /livez, /readyz and /metrics"
