"""A webhook receiver as a stranger writes one: a real HTTP server that checks signatures with the public library and dedupes by webhook-id."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks import Webhook

OLD = "whsec_b2xkIGtleSBvZiB0d2VudHktZm91ciBieXRlcw=="
NEW = "whsec_bmV3IGtleSBvZiB0d2VudHktZm91ciBieXRlcw=="


@dataclass
class Receiver:
    """`secret` empty: it asks for no signature. `answers`: a status for each request in turn, then 204. `accepted` holds each notice once, whatever came twice."""

    secret: str
    answers: list[int]
    url: str = ""
    requests: list[dict[str, str]] = field(default_factory=list)
    accepted: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    path: list[str] = field(default_factory=list)


@contextmanager
def receiving(answers: Sequence[int] = (), *, secret: str = NEW, location: str = "") -> Iterator[Receiver]:
    seen = Receiver(secret, list(answers))
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                seen.requests.append({k.lower(): v for k, v in self.headers.items()})
                seen.path.append(self.path)
                status = seen.answers.pop(0) if seen.answers else 204
                try:
                    document = json.loads(body) if not seen.secret else Webhook(seen.secret).verify(body, dict(self.headers))
                except Exception as e:
                    seen.refused.append(f"{type(e).__name__}: {e}")
                    status = 401
                else:
                    if 200 <= status < 300:
                        seen.accepted.setdefault(self.headers["webhook-id"] or "unsigned", document)
            self.send_response(status)
            if location:
                self.send_header("location", location)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen.url = f"http://127.0.0.1:{server.server_port}/hooks/secret-path-of-this-hook"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
