"""What Restate and Inngest have in common: their server calls the worker over HTTP, and is called over HTTP.

Rule: what serves runs in a thread with a loop of its own, so that a busy tool keeps no engine waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from outlast.engines.base import CALL_S
from outlast.errors import StoreError, UsageError


@contextlib.asynccontextmanager
async def serving(asgi: Any, listen: str, registered: Callable[[], None]) -> AsyncIterator[asyncio.Future[None]]:
    """Serve what an engine calls, and say where (`registered`), until the block ends; the future ends when serving does.

    In a thread with a loop of its own: an SDK may want SIGTERM for itself, and a busy tool must not keep the engine waiting.
    """
    import hypercorn.asyncio
    import hypercorn.config

    config = hypercorn.config.Config()
    config.bind, config.graceful_timeout = [listen], 1.0
    config.errorlog, config.accesslog = None, None
    here, their = asyncio.get_running_loop(), asyncio.new_event_loop()
    stop = asyncio.Event()  # of their loop
    ended: asyncio.Future[None] = here.create_future()

    def run() -> None:
        failed: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: their) as runner:
                runner.run(hypercorn.asyncio.serve(asgi, config, shutdown_trigger=stop.wait))
        except OSError as e:
            failed = UsageError(f"nothing can be served at {listen}: {e.strerror or e}", hint="listen= in --engine")
        except Exception as e:  # noqa: BLE001 - whatever ends the thread ends the worker, with its reason
            failed = e
        with contextlib.suppress(RuntimeError):  # the worker's loop is gone
            here.call_soon_threadsafe(settle, failed)

    def settle(failed: BaseException | None) -> None:
        if ended.done():
            return
        if failed is not None:
            ended.set_exception(failed)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name=f"outlast {listen}", daemon=True).start()
    registering = asyncio.ensure_future(asyncio.to_thread(registered))
    try:
        await asyncio.wait({ended, registering}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        await registering
        yield ended
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended already
            their.call_soon_threadsafe(stop.set)
        await asyncio.wait({ended}, timeout=5)
        if ended.done():
            ended.exception()  # said already


def retried(attempt: Callable[[], Any], *, for_s: float = 10.0) -> None:
    """Until it succeeds: what is called may come up in this moment. Raises what the last attempt did."""
    until = time.monotonic() + for_s
    pause = threading.Event()
    while True:
        try:
            attempt()
            return
        except (urllib.error.HTTPError, StoreError):
            if time.monotonic() >= until:
                raise
        pause.wait(0.1)


def http(method: str, url: str, body: Any = None, *, timeout: float = CALL_S, headers: Mapping[str, str] = {}) -> Any:
    """One call of an engine's HTTP API, its answer read as JSON. Raises urllib's HTTPError for a refusal, StoreError where nobody answers."""
    data = json.dumps(body).encode() if body is not None else None
    typed = {"content-type": "application/json"} if data is not None else {}
    request = urllib.request.Request(url, data, {"accept": "application/json", **typed, **headers}, method=method)  # noqa: S310 - the user's own setting
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310 - the request above
            text = answer.read()
    except urllib.error.HTTPError:
        raise
    except (OSError, ValueError) as e:
        raise StoreError(f"{url} cannot be reached: {getattr(e, 'reason', e)}", hint="start the server, or mend --engine") from e
    with contextlib.suppress(ValueError):
        return json.loads(text) if text else None
    return text.decode(errors="replace")
