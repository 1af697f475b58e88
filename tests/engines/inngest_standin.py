"""A stand-in for Inngest's server: events in, the SDK's HTTP protocol out. `python inngest_standin.py PORT FILE`

It keeps what the real one keeps (events, and what each step left) in a file, so that it can be killed; it starts an event's function when its
`ts` has come, one at a time for each run, and calls again what a dead worker did not answer.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

AGAIN_S = 0.2  # after a call that failed


class Standin:
    def __init__(self, file: Path) -> None:
        self.file, self.lock, self.news = file, threading.RLock(), threading.Condition()
        self.events: dict[str, dict[str, Any]] = {}
        self.memos: dict[str, list[tuple[str, Any]]] = {}
        self.done: set[str] = set()
        self.app: str | None = None
        self.running: set[str] = set()
        for line in file.read_text().splitlines() if file.exists() else []:
            self.take(*json.loads(line))

    def take(self, kind: str, key: str, value: Any) -> None:
        match kind:
            case "event":
                self.events[key] = value
            case "step":
                self.memos.setdefault(key, []).append((value[0], value[1]))
            case "done":
                self.done.add(key)
            case "app":
                self.app = value

    def note(self, kind: str, key: str, value: Any = None) -> None:
        with self.lock:
            with self.file.open("a") as f:
                f.write(json.dumps([kind, key, value]) + "\n")
            self.take(kind, key, value)
        with self.news:
            self.news.notify_all()

    def receive(self, event: dict[str, Any]) -> str:
        with self.lock:
            id = event.get("id") or f"e{len(self.events)}-{time.time_ns()}"
            if id not in self.events:  # an id that was seen is dropped
                self.note("event", id, {**event, "id": id, "ts": event.get("ts") or int(time.time() * 1000)})
            return id

    # ---- what its REST API says -----------------------------------------------------------------------------------------------

    def latest(self, limit: int) -> list[dict[str, Any]]:
        with self.lock:
            return [{**e, "internal_id": e["id"]} for e in list(self.events.values())[::-1][:limit]]

    def runs_of(self, id: str) -> list[dict[str, Any]]:
        """Of an event whose time has not come, none."""
        with self.lock:
            if id in self.done:
                return [{"run_id": f"r-{id}", "status": "Completed"}]
            return [{"run_id": f"r-{id}", "status": "Running"}] if self.events[id]["data"]["run_id"] in self.running else []

    # ---- executing ------------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        while True:
            with self.lock:
                now = time.time() * 1000
                open_ones = [e for id, e in self.events.items() if id not in self.done] if self.app else []
                due = {e["data"]["run_id"]: e["id"] for e in reversed(open_ones) if e["ts"] <= now}
                for run_id, id in due.items():
                    if run_id not in self.running:
                        self.running.add(run_id)
                        threading.Thread(target=self.execute, args=(run_id, id), daemon=True).start()
            with self.news:
                self.news.wait(0.05)

    def execute(self, run_id: str, id: str) -> None:
        try:
            while not self.call(id):
                pass
            self.note("done", id)
        finally:
            self.running.discard(run_id)
            with self.news:
                self.news.notify_all()

    def call(self, id: str) -> bool:
        """One request of the function's; True: it has returned."""
        memos, event = self.memos.get(id, []), self.events[id]
        stack = [step for step, _ in memos]
        body = {
            "ctx": {"attempt": 0, "disable_immediate_execution": False, "run_id": id, "fn_id": "outlast-run", "step_id": "step",
                    "stack": {"stack": stack, "current": len(stack)}},
            "event": event, "events": [event], "steps": dict(memos), "use_api": False}  # fmt: skip
        request = urllib.request.Request(f"{self.app}&stepId=step", json.dumps(body).encode(), {"content-type": "application/json"})  # noqa: S310 - our own worker
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310 - our own worker again
                ops, status = json.load(answer), answer.status
        except (OSError, ValueError) as e:
            print("again:", e, e.read()[:500] if isinstance(e, urllib.error.HTTPError) else "", flush=True)
            threading.Event().wait(AGAIN_S)
            return False
        if status == 200:
            return True
        for op in ops:
            if op["op"] == "StepError":
                print("again:", op, flush=True)
                threading.Event().wait(AGAIN_S)
            elif op["op"] in ("StepRun", "Step"):
                self.note("step", id, [op["id"], op["data"]])
            else:
                raise RuntimeError(op)
        return False


def handler(standin: Standin) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"null")
            if self.path.startswith("/e/"):
                events = body if isinstance(body, list) else [body]
                answer: Any = {"ids": [standin.receive(event) for event in events], "status": 200}
            elif self.path.startswith("/fn/register"):
                standin.note("app", "", body["functions"][0]["steps"]["step"]["runtime"]["url"].partition("&stepId")[0])
                answer = {"ok": True, "modified": True}
            else:
                self.send_error(404)
                return
            self.answer(answer)

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path == "/v1/events":
                self.answer({"data": standin.latest(int(parse_qs(url.query)["limit"][0])), "status": 200})
            elif url.path.startswith("/v1/events/") and url.path.endswith("/runs"):
                self.answer({"data": standin.runs_of(unquote(url.path.split("/")[3])), "status": 200})
            else:
                self.send_error(404)

        def answer(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None: ...

    return Handler


if __name__ == "__main__":
    standin = Standin(Path(sys.argv[2]))
    threading.Thread(target=standin.serve, daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), handler(standin)).serve_forever()
