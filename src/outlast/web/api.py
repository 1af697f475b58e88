"""`/api/v1`: the same documents as the command line's `--json`, over HTTP. Every error is an `error` document.

Rules
1. Who acts is who was let in: a body cannot name a person.
2. A body is one JSON object whose keys are all known; a number keeps its digits.
3. Lists are `{"type": "list", "items": […], "next": …}`: pass `next` as `before` or `after`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outlast.documents import RunHead
from outlast.errors import GateClosed, NotAllowed, OutlastError, RunBusy, RunNotFound, UsageError
from outlast.web import forms, text
from outlast.web.openapi import document as openapi_document
from outlast.web.security import error_document
from outlast.web.site import STATUS_WORDS, Site, who_of

BASE = "/api/v1"
MOST = 1000  # items of one page
STATUSES = ("running", *STATUS_WORDS, "done", "failed", "cancelled")
Body = Mapping[str, Any]


def routes(site: Site) -> list[Route]:
    def get(path: str, handler: Callable[[Site, Request], Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            return answer(await run_in_threadpool(handler, site, request))

        return Route(BASE + path, endpoint, methods=["GET"])

    def post(path: str, handler: Callable[[Site, Request, Body], Any], keys: tuple[str, ...]) -> Route:
        async def endpoint(request: Request) -> Response:
            body = read(await request.body(), keys)
            value = await run_in_threadpool(handler, site, request, body)
            return answer(*value) if isinstance(value, tuple) else answer(value)

        return Route(BASE + path, endpoint, methods=["POST"])

    return [
        get("/health", health), get("/openapi.json", lambda *_: openapi_document()), get("/runs", runs),
        post("/runs", start, ("agent", "input", "run_id", "tags")), get("/runs/{run_id}", run), get("/runs/{run_id}/journal", journal),
        get("/inbox", inbox), post("/runs/{run_id}/decide", decide, ("call_id", "approved", "note", "args", "digest")),
        post("/runs/{run_id}/verify", verify, ("call_id", "outcome", "result", "note")), post("/runs/{run_id}/send", send, ("input",)),
        post("/runs/{run_id}/cancel", cancel, ("note",)), post("/runs/{run_id}/retry", retry, ()),
        post("/runs/{run_id}/event", event, ("name", "data", "event_id")),
    ]  # fmt: skip


def answer(value: Any, status: int = 200) -> Response:
    """ASCII only, so it is the same in every encoding."""
    return Response(json.dumps(value, ensure_ascii=True, allow_nan=False).encode(), status_code=status, media_type="application/json")


def failed(e: OutlastError) -> Response:
    gate = e.gate.to_dict() if isinstance(e, GateClosed) else None
    document = json.loads(error_document(e.type, str(e), e.hint, run_id=e.run_id, gate=gate))
    if isinstance(e, RunBusy):
        document["error"] |= {"owner": e.owner, "until": text.utc(e.until)}
    return answer(document, e.http_status)


def read(body: bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    try:
        given = body.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError("the body is not UTF-8") from None
    value = forms.parsed(given, "the body") if given.strip() else {}
    if not isinstance(value, dict):
        raise UsageError("the body must be a JSON object")
    if unknown := sorted(value.keys() - set(keys)):
        raise UsageError(f"the body has the unknown key {unknown[0][:60]!r}: there are {', '.join(keys) or 'none'}")
    return value


# ---- reading ----------------------------------------------------------------------------------------------------------------


def health(site: Site, request: Request) -> dict[str, Any]:
    """The store answers. Free for everybody: it says nothing else."""
    site.app.reader.page(limit=1)
    return {"type": "health", "status": "ok"}


def runs(site: Site, request: Request) -> dict[str, Any]:
    who, q = who_of(request), request.query_params
    _known(request, ("status", "agent", "tag", "since", "unfinished", "stuck", "q", "limit", "before"))
    status = q.get("status")
    if status is not None and status not in STATUSES:
        raise UsageError(f"status must be one of {', '.join(STATUSES)}")
    now = site.app.reader.now()
    since = text.when(q["since"], now) if "since" in q else None
    if "since" in q and since is None:
        raise UsageError("since must be a date, an instant with its zone, or a duration ago (4h)")
    tags = text.tags_of(q.getlist("tag"))
    if tags is None:
        raise UsageError("tag must be KEY=VALUE")
    page = site.app.reader.page(
        status=status, agent=q.get("agent"), tags=tags, since=since, unfinished=_flag(q.get("unfinished")), stuck=_flag(q.get("stuck")),
        text=q.get("q") or None, limit=_limit(q.get("limit"), 50), before=_run_id(q.get("before")))  # fmt: skip
    return {"type": "list", "items": [r.head.to_dict() for r in page.rows if site.sees(who, r.head)], "next": page.next}


def run(site: Site, request: Request) -> dict[str, Any]:
    _known(request, ("messages",))
    run_id = request.path_params["run_id"]
    site.run(who_of(request), run_id)
    return site.app.get(run_id).to_dict(messages=_flag(request.query_params.get("messages")))


def journal(site: Site, request: Request) -> dict[str, Any]:
    _known(request, ("after", "limit"))
    run_id, q = request.path_params["run_id"], request.query_params
    site.run(who_of(request), run_id)
    limit = _limit(q.get("limit"), 200)
    found = site.app.reader.entries(run_id, after=_number("after", q.get("after"), 0, 0, 10**9), limit=limit)
    return {"type": "list", "items": found, "next": found[-1]["entry_no"] if len(found) == limit else None}


def inbox(site: Site, request: Request) -> dict[str, Any]:
    _known(request, ("role", "agent", "limit"))
    q = request.query_params
    limit = _limit(q.get("limit"), 50)
    found = site.app.reader.inbox(role=q.get("role"), agent=q.get("agent"), limit=limit)
    return {"type": "list", "items": [g.to_dict() for h, g in found if site.sees(who_of(request), h)], "next": None}


# ---- changing ---------------------------------------------------------------------------------------------------------------


def start(site: Site, request: Request, body: Body) -> tuple[dict[str, Any], int]:
    """201 for a new run, 200 for the one that is there already, 409 for another input."""
    who = who_of(request)
    agent, run_id, tags = body.get("agent"), body.get("run_id"), body.get("tags") or {}
    if not isinstance(agent, str) or not agent.strip() or len(agent) > 256:
        raise UsageError("agent must be a name")
    if not isinstance(tags, dict):
        raise UsageError("tags must be an object of texts")
    if site.may_operate is not None:
        now = site.app.reader.now()
        planned = RunHead(run_id if isinstance(run_id, str) else "", agent, "", "running", None, 0, 0, 0, 0, 0, 0, None, 0, tags, who, None, None,
                          None, None, None, now, now)  # fmt: skip
        if not site.operates(who, planned):
            raise NotAllowed(f"{who} may not start runs of {agent}")
    there = _there(site, run_id)
    if there is not None and not site.sees(who, there):
        raise NotAllowed(f"{who} may not start a run of that id")
    head = site.app.start(site.app.agents.get(agent, agent), _input(body), run_id=run_id, tags=tags, by=who)
    return head.to_dict(), 200 if there is not None else 201


def _there(site: Site, run_id: Any) -> RunHead | None:
    try:
        return site.app.head(run_id) if isinstance(run_id, str) else None
    except (RunNotFound, UsageError):
        return None


def decide(site: Site, request: Request, body: Body) -> dict[str, Any]:
    run_id, who = _visible(site, request)
    if not isinstance(body.get("approved"), bool):
        raise UsageError("approved must be true or false")
    note, args = _text(body, "note"), body.get("args")
    if body["approved"] is False and not (note or "").strip():
        raise UsageError("a rejection needs a note: the model reads it")
    if args is not None and not isinstance(args, dict):
        raise UsageError("args must be an object")
    return site.app.decide(run_id, _text(body, "call_id"), approved=body["approved"], decided_by=who, note=note, args=args,
                           digest=_text(body, "digest")).to_dict()  # fmt: skip


def verify(site: Site, request: Request, body: Body) -> dict[str, Any]:
    run_id, who = _visible(site, request)
    outcome = body.get("outcome")
    if outcome not in ("happened", "run_again", "give_up"):
        raise UsageError("outcome must be happened, run_again or give_up")
    return site.app.verify(
        run_id, _text(body, "call_id"), outcome=outcome, decided_by=who, result=body.get("result"), note=_text(body, "note")
    ).to_dict()


def send(site: Site, request: Request, body: Body) -> dict[str, Any]:
    run_id, who = _operable(site, request)
    return site.app.send(run_id, _input(body), by=who).to_dict()


def cancel(site: Site, request: Request, body: Body) -> dict[str, Any]:
    run_id, who = _operable(site, request)
    return site.app.cancel(run_id, by=who, note=_text(body, "note")).to_dict()


def retry(site: Site, request: Request, body: Body) -> dict[str, Any]:
    run_id, who = _operable(site, request)
    return site.app.retry(run_id, by=who).to_dict()


def event(site: Site, request: Request, body: Body) -> dict[str, Any]:
    run_id, _ = _operable(site, request)
    name = body.get("name")
    if not isinstance(name, str):
        raise UsageError("name must be a text")
    first = site.app.event(run_id, name, body.get("data"), event_id=_text(body, "event_id"))
    return {"type": "event_received", "run_id": run_id, "name": name, "first": first}


# ---- inside -----------------------------------------------------------------------------------------------------------------


def _visible(site: Site, request: Request) -> tuple[str, str]:
    run_id, who = request.path_params["run_id"], who_of(request)
    site.run(who, run_id)
    return run_id, who


def _operable(site: Site, request: Request) -> tuple[str, str]:
    run_id, who = request.path_params["run_id"], who_of(request)
    if not site.operates(who, site.run(who, run_id)):
        raise NotAllowed(f"{who} may not operate run {run_id}", run_id=run_id)
    return run_id, who


def _text(body: Body, key: str) -> str | None:
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{key} must be a text")
    return value


def _input(body: Body) -> Any:
    value = body.get("input")
    if not isinstance(value, str | list):
        raise UsageError("input must be a text, content blocks or a message list")
    return value


def _known(request: Request, keys: tuple[str, ...]) -> None:
    if unknown := sorted(set(request.query_params) - set(keys)):
        raise UsageError(f"there is no parameter {unknown[0][:60]!r}: there are {', '.join(keys)}")


def _flag(value: str | None) -> bool:
    if value not in (None, "", "0", "1", "false", "true"):
        raise UsageError("a flag is true or false")
    return value in ("1", "true")


def _limit(value: str | None, default: int) -> int:
    return _number("limit", value, default, 1, MOST)


def _number(name: str, value: str | None, default: int, least: int, most: int) -> int:
    if value is None:
        return default
    if not value.isascii() or not value.isdigit() or len(value) > 12 or not least <= int(value) <= most:
        raise UsageError(f"{name} must be a number from {least} to {most}")
    return int(value)


def _run_id(value: str | None) -> str | None:
    if value is not None and (not value or len(value) > 1000):
        raise UsageError("before must be a run id")
    return value
