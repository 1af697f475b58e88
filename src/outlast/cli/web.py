"""`web`: the page and its API, served from this process beside the workers.

Loopback is served with a token that is made at the start and printed as a one-time link; any other address needs OUTLAST_WEB_TOKEN and,
where it is no address that a browser could ask for, OUTLAST_WEB_URL: what people type.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast import settings
from outlast.cli import render
from outlast.cli.options import Options, command
from outlast.cli.target import opened
from outlast.errors import UsageError

if TYPE_CHECKING:
    from outlast import Outlast

BACKLOG = 2048  # connections that wait to be accepted: uvicorn's own number
END_S = 3  # open pages are told to go; nobody waits longer for them


def register(cli: typer.Typer) -> None:
    command(cli, "web")(web)


def web(
    options: Options,
    *,
    app_name: Annotated[str | None, typer.Argument(metavar="[APP]", help="MODULE:ATTR, as --app: edited arguments need its tools")] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="HOST", help="default 127.0.0.1; any other needs OUTLAST_WEB_TOKEN")] = None,
    port: Annotated[int | None, typer.Option("--port", metavar="N", help="default 8142; 0: any free one")] = None,
) -> int:
    """Serve the inbox, the runs and the JSON API for people and programs."""
    import dataclasses

    if app_name is not None:
        if options.app is not None:
            raise UsageError("the app is named twice: by --app and as APP")
        options = dataclasses.replace(options, app=app_name)
    where, number, token, url = settings.web_host(host), settings.web_port(port), settings.web_token(), settings.web_url()
    if not local(where):
        if token is None:
            raise UsageError(
                f"{where} is no loopback address: whoever reaches it could decide", hint="set OUTLAST_WEB_TOKEN, or leave --host out"
            )
        if url is None and unspecific(where):
            raise UsageError(
                f"{where} names no address that a browser asks for", hint="set OUTLAST_WEB_URL, like https://outlast.example.org"
            )
    who = settings.who(None)
    try:
        import uvicorn  # noqa: F401 - only whether it is there

        from outlast.web.security import Door, Tokens
    except ModuleNotFoundError as e:
        raise UsageError(f"the page needs {e.name}", hint="pip install 'outlast[web]'") from None
    with opened(options) as app, contextlib.closing(listening(where, number)) as sock:
        bound = sock.getsockname()[1]
        secure = bool(url and url.startswith("https://"))
        tokens = Tokens(token or secrets.token_urlsafe(32), who, secure)
        serve(
            app,
            Door(hosts=names(where, bound, url), tokens=tokens, secure=secure),
            sock,
            url or f"http://{shown(where)}:{bound}",
            tokens.link(),
        )
    return 0


def local(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def unspecific(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    return False


def names(host: str, port: int, url: str | None) -> frozenset[str]:
    """What a browser may send as `Host`: what we listen on, and what people were told."""
    from outlast.web.security import host_of, loopback

    found = set(loopback(port)) if local(host) or unspecific(host) else {host_of(f"http://{shown(host)}:{port}")}
    return frozenset(found | ({host_of(url)} if url else set()))


def shown(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def listening(host: str, port: int) -> socket.socket:
    plain = host.strip("[]")
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((plain, port))
        sock.listen(BACKLOG)  # from here on nobody is refused who was told the address, and nobody else gets it
    except OSError as e:
        sock.close()
        raise UsageError(f"{shown(host)}:{port} cannot be served: {e.strerror}", hint="another --port") from None
    return sock


def serve(app: Outlast, door: Any, sock: socket.socket, url: str, code: str) -> None:
    import uvicorn

    from outlast.web.app import build

    built = build(app, door)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            render.say(f"outlast: {url} for {door.tokens.by}", err=True)  # it answers now, and a signal ends it in order
            render.say(f"log in, once and within ten minutes: {url}/login?code={code}", err=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            built.site.hub.close()  # before uvicorn waits for the streams to end
            await super().shutdown(sockets)
            self._captured_signals.clear()  # asked to end, and ended: exit code 0, as a worker's

    config = uvicorn.Config(
        built, log_config=None, access_log=False, server_header=False, date_header=True, lifespan="on", timeout_graceful_shutdown=END_S,
        proxy_headers=False, backlog=BACKLOG, h11_max_incomplete_event_size=64 * 1024, limit_concurrency=2000)  # fmt: skip
    os.environ.pop("OUTLAST_WEB_TOKEN", None)  # no child of this process needs it
    Server(config).run(sockets=[sock])
