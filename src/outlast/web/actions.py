"""What a person does by a form: decide, verify, send, report an event, cancel, try again, fork. Then they are sent to the page that shows it.

A refusal changes nothing and comes back as the same page with what stands instead; what was typed stays in its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, cast

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from outlast.documents import Gate
from outlast.errors import GateClosed, NotAllowed, OutlastError, RunBusy, RunNotFound, UsageError
from outlast.web import forms, text, views
from outlast.web.site import Site, query, who_of
from outlast.web.views import Notice, Trouble

Form = Mapping[str, str]
TRIED = {"approve": "approval", "reject": "rejection", "verify": "answer"}


def decide(site: Site, request: Request, form: Form) -> Response:
    who, run_id, gate_id = who_of(request), request.path_params["run_id"], form.get("gate", "")
    head = site.run(who, run_id)
    decision = form.get("decision", "")

    def act() -> Gate:
        if decision not in ("approve", "reject"):
            raise UsageError("say approve or reject")
        if not form.get("digest"):
            raise UsageError("the form does not say which arguments were shown: open the page anew")
        gate = _gate(site, run_id, gate_id)
        if gate.kind == "verification":
            raise UsageError("a call in doubt is verified, not approved")
        note = form.get("note", "").strip()
        if decision == "reject" and not note:
            raise UsageError("a rejection needs a note: the agent reads it and goes on from there")
        return site.app.decide(run_id, gate_id, approved=decision == "approve", decided_by=who, note=note or None,
                               args=_edited(gate, form) if decision == "approve" else None, digest=form["digest"])  # fmt: skip

    return _done(site, request, form, head.run_id, gate_id, decision, act)


def verify(site: Site, request: Request, form: Form) -> Response:
    who, run_id, gate_id = who_of(request), request.path_params["run_id"], form.get("gate", "")
    head = site.run(who, run_id)

    def act() -> Gate:
        outcome = form.get("outcome", "")
        if outcome not in ("happened", "run_again", "give_up"):
            raise UsageError("say happened, run_again or give_up")
        if outcome == "run_again" and form.get("looked") != "yes":
            raise UsageError("look first: running it again may act twice")
        gate = _gate(site, run_id, gate_id)
        if form.get("digest") != gate.digest:
            raise GateClosed(f"{gate.call_id or gate.gate_id} no longer has the arguments that were shown", gate=gate, run_id=run_id)
        given = form.get("result", "").strip() if outcome == "happened" else ""
        return site.app.verify(run_id, gate_id, outcome=cast('Literal["happened", "run_again", "give_up"]', outcome), decided_by=who,
                               result=forms.parsed(given, "the result") if given else None, note=form.get("note", "").strip() or None)  # fmt: skip

    return _done(site, request, form, head.run_id, gate_id, "verify", act)


def send(site: Site, request: Request, form: Form) -> Response:
    def act(who: str, run_id: str) -> None:
        if not form.get("text", "").strip():
            raise UsageError("the message is empty")
        site.app.send(run_id, form["text"], by=who)

    return _operate(site, request, act)


def event(site: Site, request: Request, form: Form) -> Response:
    def act(_: str, run_id: str) -> None:
        given = form.get("data", "").strip()
        site.app.event(run_id, form.get("name", "").strip(), forms.parsed(given, "the data") if given else None)

    return _operate(site, request, act)


def cancel(site: Site, request: Request, form: Form) -> Response:
    return _operate(site, request, lambda who, run_id: site.app.cancel(run_id, by=who, note=form.get("note", "").strip() or None))


def retry(site: Site, request: Request, form: Form) -> Response:
    return _operate(site, request, lambda who, run_id: site.app.retry(run_id, by=who))


def fork(site: Site, request: Request, form: Form) -> Response:
    """The new run's page is shown."""

    def act(who: str, run_id: str) -> str:
        at, wanted = form.get("at", "").strip(), form.get("new_run_id", "").strip()
        if not at.isascii() or not at.isdigit() or len(at) > 9:
            raise UsageError("say at which message: a number")
        return site.app.fork(run_id, at=int(at), new_run_id=wanted or None, by=who).run_id

    return _operate(site, request, act)


# ---- inside -----------------------------------------------------------------------------------------------------------------


def _gate(site: Site, run_id: str, gate_id: str) -> Gate:
    found = next((g for g in site.app.reader.gates(run_id) if g.gate_id == gate_id), None)
    if found is None:
        raise UsageError(f"run {run_id} has no gate {gate_id[:100]!r}", run_id=run_id)
    return found


def _edited(gate: Gate, form: Form) -> dict[str, object] | None:
    """Other arguments, or None where they are the same."""
    if gate.kind == "budget":
        given = form.get("raise_to", "").strip()
        args = {"raise_to": forms.parsed(given, "raise to")} if given else None
        return None if args is None or forms.same(args["raise_to"], gate.args.get("raise_to")) else args
    if not any(k == "whole" or k[:2] in ("t.", "j.") for k in form):
        return None
    args = forms.arguments(form)
    return None if forms.same(args, gate.args) else args


def _done(site: Site, request: Request, form: Form, run_id: str, gate_id: str, tried: str, act: Callable[[], Gate]) -> Response:
    try:
        gate = act()
    except (GateClosed, NotAllowed, RunBusy, UsageError) as e:
        page = views.run if form.get("from") == "run" else views.inbox
        if isinstance(e, GateClosed):
            return page(site, request, notice=_closed(site, request, e, tried, run_id), status=e.http_status)
        shown = f"{e}. {e.hint}" if e.hint and not e.hint.startswith("outlast ") else str(e)
        trouble = Trouble(run_id, gate_id, shown[:1].upper() + shown[1:], form)
        notice = (
            None
            if any(g.gate_id == gate_id for g in site.app.reader.gates(run_id))
            else Notice("Nothing was changed:", str(e), run_id, failed=True)
        )
        return page(site, request, notice=notice, trouble=trouble, status=e.http_status)
    root = request.scope.get("root_path", "")
    to = f"/runs/{run_id}" if form.get("from") == "run" else "/inbox"
    return RedirectResponse(f"{root}{to}{query({'run': run_id, 'gate': gate.gate_id})}", status_code=303)


def _closed(site: Site, request: Request, e: GateClosed, tried: str, run_id: str) -> Notice:
    gate, clock = e.gate, site.clock(request.scope)
    mine = f"Your {TRIED.get(tried, 'decision')} of {run_id} changed nothing."
    if gate.outcome is None:
        return Notice("The arguments are no longer those that you saw.", mine, run_id, failed=True)
    at = f" at {clock.local(gate.decided_at):%H:%M:%S}" if gate.decided_at else ""
    if gate.outcome == "expired":
        return Notice("Its time is over, nobody had decided.", mine, run_id, failed=True)
    words = {"run_again": "set to run again", "give_up": "given up", "happened": "confirmed", "arrived": "answered"}.get(
        gate.outcome, gate.outcome
    )
    return Notice(f"Already {words} by {gate.decided_by or 'somebody'}{at}.", mine, run_id)


def _operate(site: Site, request: Request, act: Callable[[str, str], object]) -> Response:
    who, run_id = who_of(request), request.path_params["run_id"]
    head = site.run(who, run_id)
    if not site.operates(who, head):
        raise NotAllowed(f"{who} may not operate run {run_id}", run_id=run_id)
    shown: object = None
    try:
        shown = act(who, run_id)
    except RunNotFound:
        raise
    except OutlastError as e:
        if e.http_status >= 500:
            raise
        return views.run(site, request, notice=Notice("Nothing was changed:", f"{e}.", failed=True), status=e.http_status)
    return RedirectResponse(f"{request.scope.get('root_path', '')}/runs/{shown if isinstance(shown, str) else run_id}", status_code=303)


def appearance(site: Site, request: Request, form: Form) -> Response:
    """Light, dark, or as the system says; a cookie of this page."""
    from outlast.web.site import THEME_COOKIE, THEMES

    root = request.scope.get("root_path", "")
    back = form.get("back", "/inbox")
    response = RedirectResponse(root + (back if text.LOCAL_PATH.fullmatch(back) else "/inbox"), status_code=303)
    theme = form.get("theme")
    if theme in THEMES:
        response.set_cookie(
            THEME_COOKIE, theme, max_age=365 * 24 * 3600, path=root or "/", samesite="strict", httponly=True, secure=site.door.secure
        )
    else:
        response.delete_cookie(THEME_COOKIE, path=root or "/")
    return response
