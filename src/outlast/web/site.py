"""What every page has in common: the application, who asks and what they may see, the templates, and the viewer's clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from outlast.documents import Gate, RunHead
from outlast.errors import RunNotFound
from outlast.web import cards, text
from outlast.web.security import Door, Scope, cookies_of, error_document, headers_of, path_of

if TYPE_CHECKING:
    from outlast.app import Outlast
    from outlast.web.live import Hub

log = logging.getLogger("outlast.web")
THEMES = ("light", "dark")
ZONE_COOKIE, THEME_COOKIE = "outlast_zone", "outlast_theme"
STUCK_S = 5.0
FIGURES_S = 30.0  # pictures of a million runs are sums over them
NAV_MOST = 99  # what the count beside "Inbox" shows at most
STATUS_WORDS = {
    "waiting_for_verification": "in doubt",
    "waiting_for_approval": "waiting for approval",
    "waiting_for_budget": "waiting for a limit",
    "waiting_for_event": "waiting for an event",
    "waiting_for_run": "waiting for a run",
    "waiting_for_timer": "waiting for a timer",
    "waiting_for_code": "waiting for code",
}


def status_kind(status: str) -> str:
    """Which of the six shapes and colours."""
    if status == "waiting_for_verification":
        return "doubt"
    return "waiting" if status.startswith("waiting_") else status


@dataclass
class Site:
    app: Outlast
    door: Door
    hub: Hub
    may_view: Callable[[str, RunHead], bool] | None = None
    may_operate: Callable[[str, RunHead], bool] | None = None
    _stuck: tuple[float, Sequence[Any]] = (-1e9, ())
    _figures: dict[tuple[Any, ...], tuple[float, Any]] = field(default_factory=dict)

    @cached_property
    def env(self) -> Environment:
        env = Environment(
            loader=PackageLoader("outlast.web"), autoescape=True, finalize=text.seen, undefined=StrictUndefined, trim_blocks=True,
            lstrip_blocks=True)  # fmt: skip
        env.filters.update(
            attr=text.plain, exact=text.exact, json=text.json_text, span=text.span, number=text.number, money=text.money, kind=text.kind_of,
            one_line=text.one_line, folded=text.folded, plural=text.plural, unseen=text.unseen, counted=text.counted,
            document=text.document, clipped=text.clipped)  # fmt: skip
        env.globals.update(
            status_kind=status_kind, status_words=lambda s: STATUS_WORDS.get(s, s), clock_left=text.left, decided_words=cards.decided_words)  # fmt: skip
        return env

    # ---- who ------------------------------------------------------------------------------------------------------------------

    def sees(self, who: str, head: RunHead) -> bool:
        """May this person see this run? A rule that fails says no."""
        return self._asked("may_view", self.may_view, who, head)

    def operates(self, who: str, head: RunHead) -> bool:
        return self._asked("may_operate", self.may_operate, who, head)

    @staticmethod
    def _asked(name: str, rule: Callable[[str, RunHead], bool] | None, who: str, head: RunHead) -> bool:
        if rule is None:
            return True
        try:
            return rule(who, head) is True
        except Exception as e:  # noqa: BLE001 - a person's function: whatever it raises, the answer is no
            log.error("%s failed: %s", name, type(e).__name__)  # noqa: TRY400 - a traceback shows values
            return False

    def run(self, who: str, run_id: str) -> RunHead:
        """The run's head, or RunNotFound: also for a run that this person may not see, in the same words."""
        head = self.app.head(run_id)
        if not self.sees(who, head):
            raise RunNotFound(f"there is no run {run_id!r} in {self.app.reader.url}", hint="outlast runs", run_id=run_id)
        return head

    def waiting(self, who: str, *, limit: int, role: str | None = None, agent: str | None = None) -> list[tuple[RunHead, Gate]]:
        """What waits for a person, as far as this one may see it."""
        return [(head, gate) for head, gate in self.app.reader.inbox(role=role, agent=agent, limit=limit) if self.sees(who, head)]

    def count_waiting(self, who: str) -> int:
        """How many of those there are, up to one more than is shown."""
        limit = NAV_MOST + 1
        return len(self.app.reader.glance_inbox(limit=limit) if self.may_view is None else self.waiting(who, limit=limit))

    def stuck(self) -> Sequence[Any]:
        """What does not go on by itself, at most `STUCK_S` old: it is looked for in every run, which a list must not wait for each time."""
        at, rows = self._stuck
        if time.monotonic() - at > STUCK_S:
            rows = self.app.reader.stuck(limit=100)
            self._stuck = (time.monotonic(), rows)
        return rows

    def figures(self, long: timedelta, agent: str | None, offset: timedelta) -> Any:
        """For pictures, at most `FIGURES_S` old."""
        key = (long, agent, offset)
        at, found = self._figures.get(key, (-1e9, None))
        if found is None or time.monotonic() - at > FIGURES_S:
            found = self.app.reader.statistics(since=self.app.reader.now() - long, agent=agent, offset=offset)
            self._figures = {k: v for k, v in self._figures.items() if time.monotonic() - v[0] < FIGURES_S} | {
                key: (time.monotonic(), found)
            }
        return found

    # ---- pages ----------------------------------------------------------------------------------------------------------------

    def clock(self, scope: Scope) -> text.Clock:
        zone = cookies_of(headers_of(scope)).get(ZONE_COOKIE, "").replace("%2F", "/")
        return text.Clock(self.app.reader.now(), text.zone_of(zone))

    def render(self, request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
        scope = request.scope
        who = scope.get("outlast.user")
        clock = values.pop("clock", None) or self.clock(scope)
        waiting = values.pop("waiting", None)
        if waiting is None and who is not None and status < 500:
            waiting = self.count_waiting(who)
        html = self.env.get_template(template).render(
            root=scope.get("root_path", ""), who=who, clock=clock, theme=self._theme(scope), store=self.app.reader.url, waiting=waiting or 0,
            nav_most=NAV_MOST, may_log_out=self.door.tokens is not None and who is not None, path=path_of(scope), **values)  # fmt: skip
        return HTMLResponse(html.encode("utf-8", "replace"), status_code=status)

    @staticmethod
    def _theme(scope: Scope) -> str | None:
        theme = cookies_of(headers_of(scope)).get(THEME_COOKIE)
        return theme if theme in THEMES else None

    def refusal(self, scope: Scope, status: int, message: str, hint: str) -> tuple[str, bytes]:
        """(content type, body) of an answer that the guard gives itself. It reads no store: it must work whatever is wrong."""
        if path_of(scope).startswith("/api/"):
            kind = {401: "not_logged_in", 403: "not_allowed", 421: "wrong_host", 500: "internal_error"}.get(status, "usage_error")
            return "application/json", error_document(kind, message, hint)
        html = self.env.get_template("refusal.html").render(
            root=scope.get("root_path", ""), theme=self._theme(scope), status=status, message=message, hint=hint,
            login=status == 401 and self.door.tokens is not None)  # fmt: skip
        return "text/html; charset=utf-8", html.encode("utf-8", "replace")


def who_of(request: Request) -> str:
    """The person: the guard lets nobody else through."""
    who = request.scope.get("outlast.user")
    assert isinstance(who, str)
    return who


def since_of(value: str | None, now: datetime) -> datetime | None:
    return text.when(value, now) if value else None


def query(values: Mapping[str, Any]) -> str:
    """?a=b&c=d of what is there, or ""."""
    from urllib.parse import urlencode

    pairs = [(k, x) for k, v in values.items() for x in (v if isinstance(v, list) else [v]) if x not in (None, "", False)]
    return f"?{urlencode(pairs)}" if pairs else ""
