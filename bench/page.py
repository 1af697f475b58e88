"""How quick is the page over a million runs, and what do a hundred open pages cost? On SQLite and Postgres. Argument: how many runs.

1. Server time of lists: the application is asked in this process, as a server asks it; filters, later pages, the inbox and the charts.
2. Server time of the page of a run with 10,000 entries.
3. A hundred pages stay open in another process and do as a browser does: hear of a change, ask for the page anew. Meanwhile messages are
   appended to one of the runs that they show, in turns with and without the pages.
"""

from __future__ import annotations

import asyncio
import html
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import quote

import many
import measure
from messages import history
from ours import Session
from outlast import Outlast
from outlast.core import run as r
from outlast.stores import base
from outlast.web.app import build
from outlast.web.security import Door
from support import postgres

RUNS = 1_000_000
LONG = 10_000  # entries of the long run
TIMES = 11
PAGES = 100
ROUNDS = 4
ROUND_S = 5.0  # of appending, one after the other
YARDSTICK = ""  # the same work in the same turns: how slow this machine was
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    [count] = measure.numbers((RUNS,))[:1]
    measure.header(f"page: {count:,} runs, a run of {LONG:,} entries, {PAGES} open pages")
    print(f"load before: {os.getloadavg()[0]:.1f}\n")
    targets = measure.Targets()
    with measure.folder() as folder:
        ask("SQLite", str(folder / "outlast.db"), count, targets, lambda now: many.fill_sqlite(str(folder / "outlast.db"), count, now))
    server = postgres.make()
    try:
        url = server.url(schema="bench")
        ask("Postgres", url, count, targets, lambda now: many.fill_postgres(url.partition("?")[0], "bench", count, now))
    finally:
        postgres.remove(server)
    targets.show()
    print(f"\nload after: {os.getloadavg()[0]:.1f}")


def ask(name: str, url: str, count: int, targets: measure.Targets, fill: Any) -> None:
    app = Outlast(url)
    store = app._store
    if hasattr(store, "migrate"):
        store.migrate()
    else:
        store.unfinished()  # makes the file
    begun = time.monotonic()
    fill(int(time.time() * 1000))
    long_run(store)
    print(f"## {name}: filled in {time.monotonic() - begun:.0f} s\n", flush=True)
    lists(name, app, count, targets)
    app.close()
    live(name, url, targets)


def long_run(store: Any) -> None:
    """Half messages, half what stands between them."""
    entries: list[r.Entry] = [r.RunStarted("support", at=store.now())]
    for n in range(LONG // 4):
        call = {"type": "tool_use", "id": f"toolu_{n}", "name": "get_ticket", "input": {"ticket_id": f"KITE-{n}"}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": "Customer locked out after SSO change"}
        entries += [
            r.MessageAdded({"role": "user", "content": [result] if n else "Look through all tickets."}, at=store.now()),
            r.MessageAdded({"role": "assistant", "content": [{"type": "text", "text": "The next one."}, call]}, at=store.now(), meta={"latency_ms": 900}),
            r.CallStarted(f"toolu_{n}", f"long:toolu_{n}", "read", 1, store.now(), "worker-1/boot/1/4117/1", at=store.now()),
            r.CallFinished(f"toolu_{n}", "Customer locked out after SSO change", meta={"ms": 40}, at=store.now())]  # fmt: skip
    store.start(base.NewRun("long", "support", entries[:LONG]), owner=None, lease_s=3600)


# ---- lists ------------------------------------------------------------------------------------------------------------------


def lists(name: str, app: Outlast, count: int, targets: measure.Targets) -> None:
    served = build(app, Door(hosts=frozenset({"bench"}), get_user=lambda request: "priya"))
    second = app.reader.page().next
    deep = f"run-{count // 2}-{count // 2 * 7919 % 1000003}"
    paths = {
        "first page": "/runs", "second page": f"/runs?before={second}", "page in the middle": f"/runs?before={deep}", "status=failed": "/runs?status=failed",
        "status=waiting": "/runs?status=waiting", "status=running": "/runs?status=running", "agent=support": "/runs?agent=support",
        "agent=rare": "/runs?agent=rare", "agent and status": "/runs?agent=import&status=cancelled", "tag": "/runs?tag=tenant%3Dt-7",
        "id begins with": "/runs?q=run-999", "words of the first message": "/runs?q=KITE-999", "words that nobody said": "/runs?q=nothing-like-this",
        "since=4h": "/runs?since=4h", "stuck": "/runs?stuck=1", "long run, its end": "/runs/long", "long run, its middle": f"/runs/long?after={LONG // 2}",
        "inbox": "/inbox", "charts of a day": "/charts?since=1d", "charts of a month": "/charts?since=30d",
        "(a yardstick: to add a million numbers)": YARDSTICK}  # fmt: skip
    took: dict[str, list[float]] = {what: [] for what in paths}
    cpu: dict[str, list[float]] = {what: [] for what in paths}
    for _ in range(TIMES):
        for what, path in paths.items():
            served.site._figures.clear()
            before, a = time.process_time(), measure.now()
            if path == YARDSTICK:
                assert sum(range(1_000_000)) > 0
                took[what].append(measure.now() - a)
            else:
                took[what].append(asyncio.run(asked(served, path)))
            cpu[what].append(time.process_time() - before)
    measure.table([f"{name}, server time", "median ms", "95 % ms", "least ms", "CPU of this process, ms"],
                  [(what, *map(measure.ms, (measure.median(x), measure.p95(x), min(x), measure.median(cpu[what])))) for what, x in took.items()])  # fmt: skip
    print()
    for what, times in took.items():
        if not what.startswith(("inbox", "charts", "(")):
            targets.at_most(f"{name}: {what}", measure.median(times) * 1e3, 100 if what.startswith("long") else 50, " ms")


async def asked(served: Any, path: str) -> float:
    """Seconds until the last byte of the answer."""
    path, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http", "path": path, "raw_path": path.encode(),
        "query_string": query.encode(), "root_path": "", "headers": [(b"host", b"bench")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}  # fmt: skip
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    a = measure.now()
    await served(scope, receive, send)
    took = measure.now() - a
    assert said[0]["status"] == 200, (path, said[0]["status"])
    return took


# ---- live -------------------------------------------------------------------------------------------------------------------


def live(name: str, url: str, targets: measure.Targets) -> None:
    app = Outlast(url)
    session = Session(app._store, history(10), "live")
    serving = child("serve", url)
    port = serving.stdout.readline().strip()
    watching = child("watch", port)
    away: list[float] = []
    beside: list[float] = []
    cpu = wall = 0.0
    told(watching, "open")
    at = cpu_s(serving.pid), measure.now()
    threading.Event().wait(ROUND_S)
    quiet = (cpu_s(serving.pid) - at[0]) / (measure.now() - at[1])
    told(watching, "close")
    refreshed = 0
    for _ in range(ROUNDS):
        away += steps(session)
        told(watching, "open")
        at = cpu_s(serving.pid), measure.now()
        beside += steps(session)
        cpu, wall = cpu + cpu_s(serving.pid) - at[0], wall + measure.now() - at[1]
        refreshed += int(told(watching, "close"))
    for process in (watching, serving):
        process.terminate()
        process.wait(30)
    app.close()
    slower = measure.median(beside) / measure.median(away)
    measure.table([f"{name}, {PAGES} open pages", ""], [
        ("CPU while nothing happens, of one core", f"{quiet:.3f}"), ("CPU while one run grows as fast as it can", f"{cpu / wall:.2f}"),
        ("pages asked for anew, a second", f"{refreshed / wall:.0f}"), ("an append without them, median ms", measure.ms(measure.median(away))),
        ("an append beside them, median ms", measure.ms(measure.median(beside)))])  # fmt: skip
    print()
    targets.at_most(f"{name}: CPU of {PAGES} open pages", cpu / wall, 1, " cores")
    targets.at_most(f"{name}: an append beside them", slower, 1.1, "×")


def steps(session: Session) -> list[float]:
    out: list[float] = []
    until = measure.now() + ROUND_S
    while measure.now() < until:
        out += session.steps(20)
    return out


def child(what: str, *args: str) -> Any:
    return subprocess.Popen([sys.executable, __file__, what, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: Any, what: str) -> str:
    process.stdin.write(what + "\n")
    process.stdin.flush()
    answer: str = process.stdout.readline()
    assert answer, f"{what}: the process ended"
    return answer


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def serve(url: str) -> None:
    import uvicorn

    from outlast.cli.web import listening

    def with_whom_asked() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=with_whom_asked, daemon=True).start()
    sock = listening("127.0.0.1", 0)
    port = sock.getsockname()[1]
    served = build(Outlast(url), Door(hosts=frozenset({f"127.0.0.1:{port}"}), get_user=lambda request: "priya"))
    print(port, flush=True)
    uvicorn.Server(uvicorn.Config(served, log_config=None, access_log=False, lifespan="on")).run(sockets=[sock])


async def watch(port: int) -> None:
    """A third of the pages each: the inbox, the list, the run that grows. "open" answers when all have been heard, "close" how often they asked anew."""
    loop = asyncio.get_running_loop()
    paths = [("/inbox", "/runs", "/runs/live")[n % 3] for n in range(PAGES)]
    pages: list[asyncio.Task[None]] = []
    asked_anew = [0]
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line.strip() == "open":
            asked_anew[0] = 0
            ready = asyncio.Semaphore(0)
            pages = []
            for path in paths:
                pages.append(asyncio.create_task(stays_open(port, path, ready, asked_anew)))
                pages[-1].add_done_callback(ended)
                if len(pages) % 5 == 0:  # nobody opens a hundred pages at once
                    for _ in range(5):
                        await ready.acquire()
            print("open", flush=True)
        else:
            for page in pages:
                page.cancel()
            await asyncio.gather(*pages, return_exceptions=True)
            print(asked_anew[0], flush=True)


def ended(page: asyncio.Task[None]) -> None:
    """A page that fails must not look like one that is quiet."""
    if not page.cancelled() and (e := page.exception()) is not None:
        traceback.print_exception(e)
        os._exit(1)


async def stays_open(port: int, path: str, ready: asyncio.Semaphore, asked_anew: list[int]) -> None:
    address = html.unescape(re.search(r'hx-sse:connect="([^"]+)"', await got(port, path))[1])  # type: ignore[index]  # every live page has it
    news, events = await asyncio.open_connection("127.0.0.1", port)
    try:
        events.write(f"GET {quote(address, safe='/?=&%:')} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        await news.readuntil(b"retry: 1000")
        ready.release()
        while line := await news.readline():
            if line.startswith(b"event: changed"):
                await got(port, path)
                asked_anew[0] += 1
    finally:
        events.close()


async def got(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        return answer.decode()
    finally:
        writer.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", url]:
            serve(url)
        case ["watch", port]:
            asyncio.run(watch(int(port)))
        case _:
            main()
