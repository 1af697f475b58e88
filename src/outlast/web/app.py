"""`create_app`: the page as an ASGI app. `build` is what `outlast web` uses: with a token that it made, and the names it listens on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from outlast import settings
from outlast.app import Outlast
from outlast.documents import RunHead
from outlast.errors import OutlastError, UsageError
from outlast.runtime.metrics import TEXT_FORMAT
from outlast.web import actions, api, forms, views
from outlast.web.live import Hub
from outlast.web.security import COOKIE, SESSION_S, Door, Guard, Tokens, TooLarge, error_document, host_of, path_of
from outlast.web.site import Site, who_of

STATIC = Path(__file__).parent / "static"
Page = Callable[[Site, Request], Response]
Action = Callable[[Site, Request, Mapping[str, str]], Response]


def create_app(
    app: Outlast,
    *,
    get_user: Callable[[Any], str | None] | None = None,
    may_view: Callable[[str, RunHead], bool] | None = None,
    may_operate: Callable[[str, RunHead], bool] | None = None,
) -> Any:
    """The inbox, the runs and the API of an application, as an ASGI app to be served or mounted.

    Args:
        app: whose store is shown; its `may_decide` says who decides, its agents make the forms.
        get_user: `get_user(request)` -> the person's name, or None: nobody. Without it OUTLAST_WEB_TOKEN lets people in, who then act as
            OUTLAST_BY or the login name.
        may_view: `may_view(person, run)` -> may they see this run? Raising means no.
        may_operate: the same for starting, cancelling, retrying, sending and reporting events.
    Raises:
        UsageError: there is neither `get_user` nor OUTLAST_WEB_TOKEN.
    """
    if get_user is not None and not callable(get_user):
        raise UsageError(f"get_user must be a function of the request, not {get_user!r}")
    url = settings.web_url()
    token = settings.web_token()
    if get_user is None and token is None:
        raise UsageError("the page needs to know who asks: there is neither get_user nor OUTLAST_WEB_TOKEN",
                         hint="create_app(app, get_user=...), or start it with: outlast web MODULE:ATTR")  # fmt: skip
    secure = bool(url and url.startswith("https://"))
    tokens = Tokens(token or "", settings.who(), secure) if get_user is None else None
    door = Door(hosts=frozenset({host_of(url)}) if url else None, tokens=tokens, get_user=get_user, secure=secure)
    return build(app, door, may_view=may_view, may_operate=may_operate)


def build(
    app: Outlast,
    door: Door,
    *,
    may_view: Callable[[str, RunHead], bool] | None = None,
    may_operate: Callable[[str, RunHead], bool] | None = None,
) -> Served:
    """The same behind a door of one's own."""
    hub = Hub(app)
    site = Site(app, door, hub, may_view, may_operate)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        hub.close()

    routes = [
        Route("/", _home),
        Route("/inbox", _page(site, views.inbox)),
        Route("/runs", _page(site, views.runs)),
        Route("/runs/{run_id}", _page(site, views.run)),
        Route("/runs/{run_id}/messages/{seq:int}", _page(site, views.message)),
        Route("/charts", _page(site, views.pictures)),
        Route("/metrics", _page(site, _metrics)),
        Route("/live", _live(site)),
        *(Route(f"/runs/{{run_id}}/{name}", _action(site, action), methods=["POST"]) for name, action in (
            ("decide", actions.decide), ("verify", actions.verify), ("send", actions.send), ("event", actions.event),
            ("cancel", actions.cancel), ("retry", actions.retry), ("fork", actions.fork))),
        Route("/appearance", _action(site, actions.appearance), methods=["POST"]),
        Route("/login", _login(site), methods=["GET", "POST"]),
        Route("/logout", _logout(site), methods=["POST"]),
        *api.routes(site),
        Route("/static/{path:path}", _static(StaticFiles(directory=STATIC))),
    ]  # fmt: skip
    inner = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={OutlastError: _failed(site), HTTPException: _http(site), TooLarge: _too_large(site), Exception: _crashed(site)},
    )
    inner.router.redirect_slashes = False
    return Served(inner, door, site)


class Served(Guard):
    """The application behind its door; `site` is for whoever serves it."""

    def __init__(self, inner: Starlette, door: Door, site: Site) -> None:
        super().__init__(inner, door, site.refusal)
        self.site = site


async def _home(request: Request) -> Response:
    return RedirectResponse(f"{request.scope.get('root_path', '')}/inbox", status_code=303)


def _metrics(site: Site, _request: Request) -> Response:
    """Counts of this process and of the store. They are of all runs, so who may see only some gets none."""
    if site.may_view is not None:
        raise HTTPException(403, "counts of all runs are for those who may see all of them: a worker's --health-port has them too")
    return Response(site.app.metrics(), media_type=TEXT_FORMAT)


def _page(site: Site, page: Page) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(page, site, request)

    return endpoint


def _action(site: Site, action: Action) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        form = forms.read(await request.body())
        return await run_in_threadpool(action, site, request, form)

    return endpoint


def _static(files: StaticFiles) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        response = await files.get_response(request.path_params["path"], request.scope)
        response.headers["Cache-Control"] = "no-cache"  # asked each time, answered by 304: a new version is seen at once
        return response

    return endpoint


def _live(site: Site) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        topic = request.query_params.get("topic", "inbox")
        if topic.startswith("run:"):
            await run_in_threadpool(site.run, who_of(request), topic.removeprefix("run:"))
        elif topic != "inbox" and topic.partition("?")[0] != "runs":
            raise UsageError("there is no such topic")
        if site.hub.full:
            raise HTTPException(503, "too many pages are open")
        seen = request.headers.get("last-event-id") or request.query_params.get("seen", "")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(site.hub.listen(topic, seen), media_type="text/event-stream", headers=headers)

    return endpoint


def _login(site: Site) -> Callable[[Request], Any]:
    """GET shows a form and changes nothing (a link preview must not use the link up); POST trades the code or the token for a cookie."""

    async def endpoint(request: Request) -> Response:
        tokens, scope = site.door.tokens, request.scope
        if tokens is None:
            raise HTTPException(404)
        root = scope.get("root_path", "")
        if request.method != "POST":
            if code := request.query_params.get("code"):
                return HTMLResponse(site.env.get_template("login.html").render(root=root, code=code).encode("utf-8", "replace"))
            return HTMLResponse(site.refusal(scope, 401, "", "")[1])
        form = forms.read(await request.body())
        if not tokens.redeem(form.get("code") or form.get("token") or ""):
            return HTMLResponse(site.refusal(scope, 401, "that is not the token, or the link was used already", "")[1], status_code=401)
        response = RedirectResponse(f"{root}/inbox", status_code=303)
        response.set_cookie(
            COOKIE, tokens.cookie(), max_age=SESSION_S, path=root or "/", httponly=True, samesite="strict", secure=site.door.secure
        )
        return response

    return endpoint


def _logout(site: Site) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        response = RedirectResponse(f"{root}/login", status_code=303)
        response.delete_cookie(COOKIE, path=root or "/", httponly=True, samesite="strict", secure=site.door.secure)
        return response

    return endpoint


# ---- errors -----------------------------------------------------------------------------------------------------------------


def _failed(site: Site) -> Callable[[Request, Exception], Any]:
    """An error of ours, as a document or a page: its message is made for people and holds no secret."""

    async def handler(request: Request, e: Exception) -> Response:
        assert isinstance(e, OutlastError)
        if path_of(request.scope).startswith("/api/"):
            return api.failed(e)
        title = {404: "There is no such run", 403: "You may not do that", 503: "The store does not answer"}.get(
            e.http_status, "That cannot be done"
        )
        shown = str(e)[:1].upper() + str(e)[1:]
        if e.http_status >= 500:  # the store itself may be what fails: a page that reads nothing
            return HTMLResponse(
                site.refusal(request.scope, e.http_status, title, "nothing was changed; try again")[1], status_code=e.http_status
            )
        return await run_in_threadpool(
            lambda: site.render(
                request,
                "error.html",
                status=e.http_status,
                title=title,
                message=f"{shown}.",
                hint=e.hint if e.hint.startswith("outlast ") else "",
            )
        )

    return handler


def _too_large(site: Site) -> Callable[[Request, Exception], Any]:
    async def handler(request: Request, e: Exception) -> Response:
        kind, body = site.refusal(request.scope, 413, "the body is larger than 1 MiB", "")
        return Response(body, status_code=413, media_type=kind)

    return handler


def _crashed(site: Site) -> Callable[[Request, Exception], Any]:
    """What we did not foresee. The guard logs its kind; its text goes nowhere."""

    async def handler(request: Request, e: Exception) -> Response:
        kind, body = site.refusal(request.scope, 500, "something failed here that should not", "the server's log names it")
        return Response(body, status_code=500, media_type=kind)

    return handler


def _http(site: Site) -> Callable[[Request, Exception], Any]:
    async def handler(request: Request, e: Exception) -> Response:
        assert isinstance(e, HTTPException)
        words = {404: "there is no such page", 405: "this page does not take that method", 503: "too many pages are open"}.get(
            e.status_code, "that cannot be done"
        )
        if path_of(request.scope).startswith("/api/"):
            body = error_document("usage_error" if e.status_code < 500 else "store_error", words)
            return Response(body, status_code=e.status_code, media_type="application/json", headers=dict(e.headers or {}))
        return HTMLResponse(
            site.refusal(request.scope, e.status_code, words, "")[1], status_code=e.status_code, headers=dict(e.headers or {})
        )

    return handler
