"""Who is let in, and what every answer carries: plain ASGI around the whole application, so that errors are covered too.

Rules, in the order in which a request meets them
1. `Host` is one of an exact list, port included; anything else is answered 421 and nothing else happens (DNS rebinding).
2. A method that changes something must come from this page: `Sec-Fetch-Site` same-origin or none, and `Origin`, where it is sent, exactly
   ours; `null` says nothing and counts only beside a `Sec-Fetch-Site`. With neither of the two only a bearer token or a JSON call of the
   API is taken: no form of a browser sends either.
3. A body is at most 1 MiB, not compressed, JSON for the API and a plain form for pages.
4. Nobody is let in without a name: the application's own login (`get_user`), or the token: as a bearer, or as a cookie that was given for it.
   Free are exactly the paths of `FREE`, compared as the server decoded them.
5. Every answer has the headers of `HEADERS`, whoever made it. An exception becomes a short page or document; its text goes nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

log = logging.getLogger("outlast.web")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 1024 * 1024
COOKIE = "outlast_session"
SESSION_S = 7 * 24 * 3600  # a working week; then the token is asked for again
LINK_S = 600  # a one-time link is for the person who sees the terminal now
FREE = ("/login", "/api/v1/health")
FREE_FOLDER = "/static/"
MAX_NAME = 256  # characters of a person's name
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), payment=()",
}


@dataclass
class Tokens:
    """The token, the one-time links that stand for it once, and the cookies that were given for it."""

    token: str
    by: str
    secure: bool = False
    _links: dict[str, float] = field(default_factory=dict)

    def link(self) -> str:
        """A code that is good for one login within `LINK_S` seconds."""
        code = secrets.token_urlsafe(32)
        self._links[_digest(code)] = time.monotonic() + LINK_S
        return code

    def redeem(self, code: str) -> bool:
        """Is this a one-time code or the token? A code is used up."""
        if hmac.compare_digest(code.encode(), self.token.encode()):
            return True
        until = self._links.pop(_digest(code), None)  # looked up by its hash: how long that takes says nothing about the code
        return until is not None and time.monotonic() < until

    def cookie(self) -> str:
        until = int(time.time()) + SESSION_S
        value = f"{until}.{secrets.token_urlsafe(16)}"
        return f"{value}.{self._sign(value)}"

    def bearer(self, header: str) -> bool:
        kind, _, value = header.partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(value.strip().encode(), self.token.encode())

    def session(self, cookie: str) -> bool:
        value, _, mac = cookie.rpartition(".")
        if not hmac.compare_digest(mac.encode(), self._sign(value).encode()):
            return False
        until = value.partition(".")[0]
        return until.isdigit() and int(until) > time.time()

    def _sign(self, value: str) -> str:
        return hmac.new(self.token.encode(), b"session:" + value.encode(), hashlib.sha256).hexdigest()


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


@dataclass(frozen=True)
class Door:
    """Which names the server answers to, and who is let in.

    `hosts`: host[:port] as browsers send it; None: the loopback names with the server's own port. `origins`: scheme://host[:port] of pages
    that may change something, beside the host that was asked.
    """

    hosts: frozenset[str] | None = None
    tokens: Tokens | None = None
    get_user: Callable[[Any], str | None] | None = None
    secure: bool = False


class Guard:
    """Around the application. It sets `scope["outlast.user"]`: nobody gets further without one, but to what is free."""

    def __init__(self, app: App, door: Door, page: Callable[[Scope, int, str, str], tuple[str, bytes]]) -> None:
        self.app, self.door, self.page = app, door, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        started = False

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": with_headers(message.get("headers", []), scope)}
            await send(message)

        try:
            refused = self._refuse(scope)
            if refused is not None:
                await self._answer(scope, guarded, *refused)
                return
            if self.door.get_user is not None:
                name = await run_in_threadpool(self.door.get_user, Request(scope))
                scope["outlast.user"] = name if isinstance(name, str) and 0 < len(name.strip()) <= MAX_NAME else None
                if scope["outlast.user"] is None and not free(path_of(scope)):
                    await self._answer(scope, guarded, 401, "log in first", "this page is behind the login of the application around it")
                    return
            await self.app(scope, _limited(receive, headers_of(scope)), guarded)
        except TooLarge:
            if not started:
                await self._answer(scope, guarded, 413, "the body is larger than 1 MiB", "")
        except Exception as e:  # noqa: BLE001 - the last line of defence: headers on every answer, and no text of an exception anywhere
            log.error("%s %s failed: %s", scope["method"], route_of(scope), type(e).__name__)  # noqa: TRY400 - a traceback shows values
            if not started:
                await self._answer(scope, guarded, 500, "something failed here that should not", "the server's log names it")

    def _refuse(self, scope: Scope) -> tuple[int, str, str] | None:
        headers = headers_of(scope)
        host = headers.get("host", "")
        if headers.get("host:count", "1") != "1" or host.lower() not in self._hosts(scope):
            return 421, "this server does not answer to that name", "open it by the address it printed, or set OUTLAST_WEB_URL"
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "only GET, HEAD and POST are answered", ""
        if scope["method"] == "POST" and (refused := self._refuse_change(scope, headers, host)):
            return refused
        path = path_of(scope)
        if self.door.tokens is not None:
            known = self._known(headers, self.door.tokens)
            scope["outlast.user"] = self.door.tokens.by if known else None
            if not known and not free(path):
                return 401, "log in first", "open the link that `outlast web` printed, or send the token as a bearer"
        return None

    def _refuse_change(self, scope: Scope, headers: Mapping[str, str], host: str) -> tuple[int, str, str] | None:
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        bearer = headers.get("authorization", "").lower().startswith("bearer ")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        api = path_of(scope).startswith("/api/")
        if site is not None and site not in ("same-origin", "none"):
            return 403, "another site sent this", "nothing was changed"
        ours = f"{scheme_of(scope, secure=self.door.secure)}://{host}"
        hidden = origin == "null" and site is not None  # what a browser sends from a page without a referrer, ours too: the site decides
        if origin is not None and origin != ours and not hidden:
            return 403, "another site sent this", "nothing was changed"
        if site is None and origin is None and not bearer and not (api and kind == JSON):
            return 403, "it cannot be told which page sent this", "send Origin, or the token as a bearer"
        if headers.get("content-encoding", "identity") != "identity":
            return 415, "a body may not be compressed", ""
        if kind != (JSON if api else FORM):
            return 415, f"a body here is {JSON if api else FORM}", ""
        length = headers.get("content-length")
        if length is not None and (not length.isdigit() or int(length) > MAX_BODY_BYTES):
            return 413, "the body is larger than 1 MiB", ""
        return None

    def _hosts(self, scope: Scope) -> frozenset[str]:
        if self.door.hosts is not None:
            return self.door.hosts
        server = scope.get("server") or ("", None)
        return loopback(server[1])

    @staticmethod
    def _known(headers: Mapping[str, str], tokens: Tokens) -> bool:
        if (given := headers.get("authorization")) is not None:
            return tokens.bearer(given)
        cookie = cookies_of(headers).get(COOKIE)
        return cookie is not None and tokens.session(cookie)

    async def _answer(self, scope: Scope, send: Send, status: int, message: str, hint: str) -> None:
        kind, body = self.page(scope, status, message, hint)
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def free(path: str) -> bool:
    """May anybody have it? Exact paths, and files of one folder; what looks like one but is not, is not."""
    return path in FREE or (path.startswith(FREE_FOLDER) and "/" not in path.removeprefix(FREE_FOLDER) and ".." not in path)


class TooLarge(Exception):
    """The body went on past the limit."""


def _limited(receive: Receive, headers: Mapping[str, str]) -> Receive:
    taken = 0

    async def limited() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > MAX_BODY_BYTES:
                raise TooLarge
        return message

    return limited


def with_headers(headers: Iterable[tuple[bytes, bytes]], scope: Scope) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"server"]
    there = {name.lower() for name, _ in kept}
    out = [*kept, *((n.lower().encode(), v.encode()) for n, v in HEADERS.items() if n.lower().encode() not in there)]
    if b"cache-control" not in there:
        out.append((b"cache-control", b"no-store"))
    return out


def headers_of(scope: Scope) -> dict[str, str]:
    """By lower-case name. A second `Host` is counted, for it is no browser that sends two."""
    found: dict[str, str] = {}
    hosts = 0
    for name, value in scope.get("headers", []):
        key = name.decode("latin-1").lower()
        hosts += key == "host"
        found[key] = f"{found[key]}; {value.decode('latin-1')}" if key == "cookie" and key in found else value.decode("latin-1")
    found["host:count"] = str(hosts)
    return found


def cookies_of(headers: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in headers.get("cookie", "").split(";"):
        name, equals, value = part.strip().partition("=")
        if equals and name not in found:
            found[name] = value.strip('"')
    return found


def path_of(scope: Scope) -> str:
    """The path within this application, decoded once by the server."""
    path, root = scope["path"], scope.get("root_path", "")
    return str(path[len(root) :] if root and path.startswith(root) else path)


def route_of(scope: Scope) -> str:
    """Which page it was, for the log: without ids and without a query."""
    return "/".join(part if part.isalpha() and len(part) <= 12 else "…" for part in path_of(scope).split("/")[:5])


def scheme_of(scope: Scope, *, secure: bool) -> str:
    return "https" if secure else str(scope.get("scheme", "http"))


def loopback(port: int | None) -> frozenset[str]:
    """The names that browsers on this machine use."""
    names = {f"{name}:{port}" for name in LOOPBACK}
    return frozenset(names | set(LOOPBACK)) if port in (None, 80) else frozenset(names)


def host_of(url: str) -> str:
    """host[:port] of a URL, as a browser sends it."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    host = f"[{host}]" if ":" in host else host
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return host if parts.port in (None, default) else f"{host}:{parts.port}"


def error_document(kind: str, message: str, hint: str = "", *, run_id: str | None = None, gate: Any = None) -> bytes:
    error = {"type": kind, "message": message, "hint": hint, "run_id": run_id, "gate": gate}
    return json.dumps({"type": "error", "error": error}, ensure_ascii=True, allow_nan=False).encode()
