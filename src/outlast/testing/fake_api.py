"""`FakeMessagesAPI`: a real HTTP server in place of the provider, with scripted answers; and the faults it can play.

Rules
1. A turn is chosen by the number of assistant messages in the request, so it is right after any crash and for any number of runs.
2. Every request is checked before it is answered, more strictly than the provider does (`outlast.testing.protocol`), and refused with
   400 in the API's own form with the name of the rule. Nothing is mended in silence.
3. The journal (`requests`) has every request, refused ones too, in the order in which they came.
4. No fault waits for time to pass: `Slow` is held until the test lets it go.
"""

from __future__ import annotations

import copy
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self

from outlast.models.scripted import whole_message
from outlast.testing.protocol import SentAnswer, Violation, check_request
from outlast.testing.sse import dumps, events_of

# HTTP status -> the type in the API's error document. https://docs.anthropic.com/en/api/errors
_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STATUS_OF_TYPE = {kind: status for status, kind in _TYPE_OF_STATUS.items()} | {"api_error": 500}

# Bytes; the provider's limit for a request.
_MAX_REQUEST = 32 * 1024 * 1024

# Seconds that a `Slow` answer is held at most, so that a test which forgets it ends.
_MAX_HOLD_S = 60.0


class Fault:
    """An answer that is an error: its status, its type in the error document (it follows from the status), headers."""

    def __init__(
        self,
        status: int,
        *,
        type: str | None = None,
        message: str = "scripted fault",
        retry_after: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.type = type or _TYPE_OF_STATUS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        self.message = message
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)


class Garbage:
    """A body that is no answer: a proxy's error page, an empty body, half a document."""

    def __init__(self, body: bytes | str = "<html>502 Bad Gateway</html>", *, status: int = 200, content_type: str = "text/html") -> None:
        self.body = body.encode() if isinstance(body, str) else body
        self.status = status
        self.content_type = content_type


class Cut:
    """The answer `turn`, of which `after` events are sent (not streamed: half its bytes); then the stream ends.

    `abrupt`: the connection is closed in the middle of the body, as by a crash. Else the body ends properly, with no `message_stop`.
    """

    def __init__(self, turn: Any = "This answer breaks off before its end.", *, after: int = 5, abrupt: bool = True) -> None:
        self.turn = turn
        self.after = after
        self.abrupt = abrupt


class ErrorInStream:
    """The answer `turn`, of which `after` events are sent; then an error event, under the status 200 (not streamed: just the error)."""

    def __init__(
        self, type: str = "overloaded_error", *, message: str = "Overloaded", turn: Any = "This answer ends in an error.", after: int = 5
    ) -> None:
        self.type = type
        self.message = message
        self.turn = turn
        self.after = after


class Slow:
    """The answer `turn`, held until `release` is set: before anything is sent, or after the first `after` events.

    `arrived` is set once the request is being held, so that a test can wait for it. The server's end lets everything go.
    """

    def __init__(self, turn: Any, *, after: int = 0) -> None:
        self.turn = turn
        self.after = after
        self.arrived = threading.Event()
        self.release = threading.Event()

    def hold(self) -> None:
        """Wait for `release`."""
        self.arrived.set()
        self.release.wait(_MAX_HOLD_S)


class Attempts:
    """Several items for one turn: the first request for it gets the first, the next one the second; the last one stays."""

    def __init__(self, items: Sequence[Any]) -> None:
        if not items:
            raise ValueError("Attempts needs at least one item")
        self.items = list(items)


class FakeMessagesAPI:
    """A Messages API on a free port of this machine.

        with FakeMessagesAPI([[{"type": "tool_use", "id": "toolu_01", "name": "f", "input": {}}], "Done."]) as api:
            model = Anthropic("any-name", client=anthropic.AsyncAnthropic(api_key="mock", base_url=api.url))

    `turns[n]` answers a request with n assistant messages: a text, content blocks, a whole message (to set `stop_reason` and so on), a
    function of the request's body that gives any of these, or a fault: `Fault`, `Cut`, `ErrorInStream`, `Slow`, `Garbage`. `Attempts`
    holds several for one turn. An exception in such a function is raised again when the `with` block ends: an assertion there counts.

    `requests` are the bodies as they came, refused ones too; `raw_requests` their texts; `refused` the names of the rules that were
    broken, oldest first.
    """

    def __init__(self, turns: Sequence[Any]) -> None:
        self.turns = list(turns)
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.raw_requests: list[str] = []
        self.refused: list[str] = []
        self._lock = threading.Lock()
        self._attempts: dict[int, int] = {}
        self._sent: dict[int, list[SentAnswer]] = {}
        self._held: list[Slow] = []
        self._script_errors: list[BaseException] = []
        self._server: _Server | None = None

    def __enter__(self) -> Self:
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._server is not None
        for slow in self._held:
            slow.release.set()
        self._server.end()
        self._server = None
        if self._script_errors and exc[0] is None:
            raise self._script_errors[0]

    # What follows is called from the server's threads, one a connection.

    def take(self, raw: str) -> tuple[Any, int]:
        """Journal and check one request; the turn that answers it, and its number from 0.

        Raises:
            Violation: it must be refused.
        """
        with self._lock:
            self.raw_requests.append(raw)
            try:
                body = _parse(raw)
                if isinstance(body, dict):
                    self.requests.append(body)
                check_request(body, self._sent)
                n = sum(1 for message in body["messages"] if message["role"] == "assistant")
                if n >= len(self.turns):
                    raise Violation("script-has-the-turn", "messages", f"turn {n + 1} of {len(self.turns)} was asked for")
            except Violation as violation:
                self.refused.append(violation.rule)
                raise
            attempt = self._attempts.get(n, 0)
            self._attempts[n] = attempt + 1
        turn = self.turns[n]
        if isinstance(turn, Attempts):
            turn = turn.items[min(attempt, len(turn.items) - 1)]
        if callable(turn):
            try:
                turn = turn(copy.deepcopy(body))
            except BaseException as error:
                self._script_errors.append(error)
                raise Violation("script-works", f"turn {n + 1}", f"{type(error).__name__}: {error}") from error
        if isinstance(turn, Slow):
            self._held.append(turn)
        return turn, n

    def answer(self, turn: Any, n: int, body: dict[str, Any]) -> dict[str, Any]:
        """The whole message for a turn that is no fault."""
        message = whole_message(turn, n, body["messages"])
        if not isinstance(turn, Mapping) or "id" not in turn:
            message["id"] = f"msg_fake_{len(self.raw_requests):04d}"
        if not isinstance(turn, Mapping) or "model" not in turn:
            message["model"] = body["model"]
        return message

    def remember(self, message: dict[str, Any], n: int, body: dict[str, Any]) -> None:
        """This answer goes out whole, so it may come back."""
        declared = frozenset(tool["name"] for tool in body.get("tools", []) if "name" in tool)
        content = json.loads(dumps(message["content"]))
        with self._lock:
            self._sent.setdefault(n, []).append(SentAnswer(content, message["stop_reason"], declared))

    def next_request_id(self) -> str:
        """The request id for the answer under way."""
        return f"req_fake_{len(self.raw_requests):04d}"


def _parse(raw: str) -> Any:
    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice in an object")
        return found

    try:
        return json.loads(raw, parse_constant=refuse_constant, object_pairs_hook=refuse_twice)
    except ValueError as error:
        raise Violation("body-is-json", "body", str(error)) from error


class _Server(ThreadingHTTPServer):
    """Serves one `FakeMessagesAPI`; `end` leaves no thread and no connection behind."""

    daemon_threads = False
    block_on_close = True

    def __init__(self, api: FakeMessagesAPI) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.api = api
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, name="fake-messages-api", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.shutdown()
        self._thread.join()
        for connection in list(self._connections):  # kept alive by clients: their threads wait for a next request
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def opened(self, connection: socket.socket) -> None:
        self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        self._connections.discard(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle (killed, timed out) is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm: ClassVar[bool] = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.opened(self.connection)

    def finish(self) -> None:
        self.server.closed(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """The journal is the log."""

    def do_GET(self) -> None:
        self._send_error(Fault(404, message=f"no such endpoint: GET {self.path}"))

    def do_POST(self) -> None:
        api = self.server.api
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length).decode("utf-8", errors="surrogateescape")
        if self.path.partition("?")[0] != "/v1/messages":
            self._send_error(Fault(404, message=f"no such endpoint: POST {self.path}"))
        elif not self.headers.get("x-api-key") and not self.headers.get("authorization"):
            self._send_error(Fault(401, message="x-api-key header is required"))
        elif not self.headers.get("anthropic-version"):
            self._send_error(Fault(400, message="anthropic-version header is required [rule: version-header]"))
        elif length > _MAX_REQUEST:
            self._send_error(Fault(413, message="request exceeds the maximum size"))
        else:
            try:
                turn, n = api.take(raw)
            except Violation as violation:
                self._send_error(Fault(400, message=str(violation)))
                return
            self._play(turn, n, json.loads(raw))

    def _play(self, turn: Any, n: int, body: dict[str, Any]) -> None:
        api = self.server.api
        if isinstance(turn, Fault):
            self._send_error(turn)
            return
        if isinstance(turn, Garbage):
            self._send(turn.status, turn.body, turn.content_type)
            return
        fault = turn if isinstance(turn, Cut | ErrorInStream | Slow) else None
        streamed = body.get("stream") is True
        if isinstance(fault, Slow) and not (streamed and fault.after):
            fault.hold()
            self._play(fault.turn, n, body)
            return
        message = api.answer(turn if fault is None else fault.turn, n, body)
        if fault is None or isinstance(fault, Slow):
            api.remember(message, n, body)
        if streamed:
            self._stream(message, fault)
        elif isinstance(fault, ErrorInStream):
            self._send_error(Fault(_STATUS_OF_TYPE.get(fault.type, 500), type=fault.type, message=fault.message))
        else:
            self._send(200, dumps(message), "application/json", half=isinstance(fault, Cut))

    def _stream(self, message: dict[str, Any], fault: Cut | ErrorInStream | Slow | None) -> None:
        self._start(200, {"Content-Type": "text/event-stream; charset=utf-8", "Transfer-Encoding": "chunked", "Cache-Control": "no-cache"})
        events = list(events_of(message))
        at = None if fault is None else min(fault.after, len(events) - 1)  # at the latest before message_stop: a cut always cuts
        for i, (name, data) in enumerate(events):
            if fault is not None and i == at:
                if isinstance(fault, Slow):
                    fault.hold()
                elif isinstance(fault, ErrorInStream):
                    error = {"type": fault.type, "message": fault.message}
                    self._chunk(_event("error", {"type": "error", "error": error, "request_id": self._request_id}))
                    break
                elif fault.abrupt:
                    self._cut_off()
                    return
                else:
                    break
            self._chunk(_event(name, data))
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _cut_off(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send_error(self, fault: Fault) -> None:
        self._request_id = self.server.api.next_request_id()
        document = {"type": "error", "error": {"type": fault.type, "message": fault.message}, "request_id": self._request_id}
        self._send(fault.status, dumps(document), "application/json", headers=fault.headers)

    def _send(self, status: int, body: bytes, content_type: str, *, headers: Mapping[str, str] | None = None, half: bool = False) -> None:
        self._start(status, {"Content-Type": content_type, "Content-Length": str(len(body)), **(headers or {})})
        if half:
            self.wfile.write(body[: len(body) // 2])
            self._cut_off()
        else:
            self.wfile.write(body)

    def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._request_id = self.server.api.next_request_id()
        self.send_response_only(status)
        for name, value in {"Date": formatdate(usegmt=True), "request-id": self._request_id, **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + dumps(data) + b"\n\n"
