"""Stands in for an OTLP collector: an HTTP server that keeps the spans that the SDK's own exporter sends it."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True)
class Span:
    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[str]  # span ids
    failed: bool
    resource: dict[str, Any] = field(default_factory=dict)


class Collector:
    """`spans` as they came in, those of a process together. `raw`: every byte of every request, unpacked."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        lock, mine = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
                with lock:
                    mine.raw += data
                    mine.spans += read(data)
                body = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Span]:
        """Oldest first."""
        return sorted((s for s in self.spans if s.name == name), key=lambda s: s.start_ns)


def read(data: bytes) -> list[Span]:
    request = ExportTraceServiceRequest()
    request.ParseFromString(data)
    return [
        Span(
            span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano,
            plain(span.attributes), [(e.name, plain(e.attributes)) for e in span.events], [link.span_id.hex() for link in span.links],
            span.status.code == 2, plain(sent.resource.attributes))
        for sent in request.resource_spans
        for scope in sent.scope_spans
        for span in scope.spans
    ]  # fmt: skip


def plain(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
