"""The pages: each a function of a request that reads and renders. None of them changes anything."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from outlast.documents import Gate, RunHead
from outlast.errors import RunNotFound, UsageError
from outlast.web import cards, charts, text
from outlast.web.cards import Card
from outlast.web.lists import PAGE, STATUSES, listing
from outlast.web.site import STATUS_WORDS, Site, query, who_of
from outlast.web.timeline import Story

MOST_ASKS = 500  # gates that the inbox looks at
SHOWN_ASKS = 50  # and shows
WINDOW = 200  # journal entries of one page
MOST_GATES = 50  # documents of gates at the end of a run's page
STUCK_SHOWN = 3
SPANS = {"1d": ("24 hours", timedelta(days=1)), "7d": ("7 days", timedelta(days=7)), "30d": ("30 days", timedelta(days=30))}


@dataclass(frozen=True)
class Choice:
    label: str
    href: str
    current: bool
    count: str | int | None = None
    shape: str = ""


@dataclass(frozen=True)
class Choices:
    label: str
    choices: Sequence[Choice]


@dataclass(frozen=True)
class Notice:
    bold: str
    rest: str = ""
    run_id: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class Trouble:
    """What a person tried and what came of it, to be shown beside the card that it was about."""

    run_id: str
    gate_id: str
    message: str
    entered: Mapping[str, str]


# ---- inbox ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    title: str
    cards: Sequence[Card]


def inbox(site: Site, request: Request, *, notice: Notice | None = None, trouble: Trouble | None = None, status: int = 200) -> Response:
    who, clock = who_of(request), site.clock(request.scope)
    given = (
        {k: request.query_params.get(k) for k in ("role", "kind", "agent")}
        if request.method == "GET"
        else dict.fromkeys(("role", "kind", "agent"))
    )
    live = _live(site, request, "inbox")  # the fingerprint first: what changes while the page is made is heard of afterwards
    everything = site.waiting(who, limit=MOST_ASKS)
    whole = len(everything) < MOST_ASKS
    of_store = everything if whole else site.waiting(who, limit=MOST_ASKS, role=given["role"], agent=given["agent"])
    asked = [(h, g) for h, g in of_store if _fits(h, g, given)]
    made = [ask(site, who, h, g, clock, trouble) for h, g in asked[:SHOWN_ASKS]]
    opened = trouble and cards.dom_id(trouble.run_id, trouble.gate_id)
    if opened is None:
        opened = made[0].id if len(made) == 1 else request.query_params.get("open")
    guarded = site.app.guarded
    return site.render(
        request, "inbox.html", status=status, clock=clock, waiting=len(everything), total=len(asked),
        yours=sum(site.app.why_not(who, g) is None for _, g in asked) if guarded else None, filters=_inbox_filters(site, request, everything, given),
        sections=_sections(made, clock), more=len(asked) > SHOWN_ASKS, whole=len(asked) < MOST_ASKS, opened=opened,
        notice=notice or _done_notice(site, who, request, clock), running=site.app.reader.counts()["running"],
        decided=[(g, cards.decided_words(g)) for h, g in site.app.reader.decided(since=clock.now - timedelta(days=7), limit=20) if site.sees(who, h)][:6],
        command="outlast inbox" + (f" --role {given['role']}" if given["role"] else ""), here=_path(request, "/inbox") + _query_string(request),
        live=live)  # fmt: skip


def ask(site: Site, who: str, head: RunHead, gate: Gate, clock: text.Clock, trouble: Trouble | None = None) -> Card:
    mine = trouble if trouble and (trouble.run_id, trouble.gate_id) == (gate.run_id, gate.gate_id) else None
    agent = site.app.agents.get(gate.agent)
    tool = agent.tool(gate.tool) if agent is not None and gate.tool else None
    return cards.card(
        head, gate, clock, entries=site.app.reader.gate_entries(gate.run_id, gate.gate_id), schema=tool.input_schema if tool is not None else None,
        entered=mine.entered if mine else {}, error=mine.message if mine else "", why_not=site.app.why_not(who, gate))  # fmt: skip


def _fits(head: RunHead, gate: Gate, given: Mapping[str, str | None]) -> bool:
    return all(not v or v == {"role": gate.role or "", "kind": gate.kind, "agent": head.agent}[k] for k, v in given.items())


def _inbox_filters(
    site: Site, request: Request, everything: Sequence[tuple[RunHead, Gate]], given: Mapping[str, str | None]
) -> list[Choices]:
    out = []
    of: dict[str, Callable[[RunHead, Gate], str]] = {
        "role": lambda h, g: g.role or "",
        "kind": lambda h, g: g.kind,
        "agent": lambda h, g: h.agent,
    }
    for key, label, all_of in (("role", "Asked", "anyone"), ("kind", "For", "all kinds"), ("agent", "Agent", "all")):
        values: dict[str, int] = {}
        for h, g in everything:
            value = of[key](h, g)
            if value:
                values[value] = values.get(value, 0) + 1
        if given[key] and given[key] not in values:
            values[str(given[key])] = 0
        base = _path(request, "/inbox")
        choices = [Choice(all_of, base + query({**given, key: None}), not given[key], len(everything) if key == "role" else None)]
        choices += [Choice(v, base + query({**given, key: v}), given[key] == v, n) for v, n in sorted(values.items())]
        out.append(Choices(label, choices))
    return out


def _sections(made: Sequence[Card], clock: text.Clock) -> list[Section]:
    """By the day on which their time is over; those without one at the end, longest wait first."""
    days: dict[str, list[Card]] = {}
    for card in made:
        if card.gate.deadline is not None:
            days.setdefault(clock.long_day(card.gate.deadline), []).append(card)
    out = [Section(day, found) for day, found in days.items()]
    endless = [card for card in made if card.gate.deadline is None]
    return [*out, Section("No deadline, longest wait first", endless)] if endless else out


def _done_notice(site: Site, who: str, request: Request, clock: text.Clock) -> Notice | None:
    """After a decision: what stands now, read anew, whatever the address says."""
    run_id, gate_id = request.query_params.get("run"), request.query_params.get("gate")
    if not run_id or not gate_id:
        return None
    try:
        site.run(who, run_id)
    except (RunNotFound, UsageError):
        return None
    gate = next((g for g in site.app.reader.gates(run_id) if g.gate_id == gate_id and g.outcome is not None), None)
    if gate is None or gate.decided_at is None:
        return None
    words = cards.decided_words(gate)
    return Notice(f"{words[:1].upper()}{words[1:]}", f"({run_id}, {clock.local(gate.decided_at):%H:%M:%S}).", run_id)


# ---- runs -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    head: RunHead
    first: str | None
    step: str
    waits: str
    until: str


def runs(site: Site, request: Request) -> Response:
    who, clock = who_of(request), site.clock(request.scope)
    listed = listing(request.query_params, clock.now)
    given = listed.given
    live = _live(site, request, "runs" + query(given))
    found, following, scanned = _page(site, who, listed.where)
    # counts are of all runs: nobody who may see only some gets them
    counts = site.app.reader.counts(**listed.counted) if site.may_view is None and listed.counted is not None else None
    base, kept = _path(request, "/runs"), listed.kept
    stuck = [] if given["stuck"] else _stuck(site, who)
    return site.render(
        request, "runs.html", clock=clock, rows=[_row(r, clock) for r in found], given=given, agents=site.app.reader.agents(),
        statuses=[Choice("all", base + query({**kept, "status": None}), not given["status"], _count(counts, None)),
                  *(Choice(STATUS_WORDS.get(s, s), base + query({**kept, "status": s}), given["status"] == s, _count(counts, s), _shape(s)) for s in STATUSES)],
        problem=listed.problem, stuck=stuck[:STUCK_SHOWN], stuck_count=len({s.run_id for s in stuck}),
        filtered=any(kept.values()), scanned=scanned, older=base + query({**kept, "before": following}) if following else None,
        newest=base + query(kept) if given["before"] else None, here=base + _query_string(request), live=live,
        command=listed.command())  # fmt: skip


def _page(site: Site, who: str, where: Mapping[str, Any]) -> tuple[list[Any], str | None, int | None]:
    """A page of runs that this person may see; where a rule hides some, further pages are looked at, a few."""
    out: list[Any] = []
    following: str | None = where["before"]
    scanned: int | None = None
    for _ in range(1 if site.may_view is None else 10):
        page = site.app.reader.page(**{**where, "before": following})
        out += [r for r in page.rows if site.sees(who, r.head)]
        following, scanned = page.next, page.scanned
        if following is None or len(out) >= PAGE:
            break
    return out, following, scanned


def _row(row: Any, clock: text.Clock) -> Row:
    head, gate = row.head, row.gate
    step = _step(head, gate, clock)
    waits, until = "", ""
    if gate is not None:
        waits = {"event": "an event", "run": "a run of its own"}.get(gate.kind) or gate.role or "anyone"
        until = _until(gate.deadline, clock)
    elif head.status == "waiting_for_code":
        waits, until = "code", "no deadline"
    elif head.status == "waiting_for_timer" and head.wake_at:
        waits, until = "a timer", f"until {clock.local(head.wake_at):%H:%M:%S}"
    return Row(head, row.first, step, waits, until)


def _step(head: RunHead, gate: Gate | None, clock: text.Clock) -> str:
    """The last step in a few words; whom the run waits for stands beside it."""
    match head.status:
        case "running":
            return "at work" if head.lease_owner else "waits for a worker"
        case "done":
            return "answered"
        case "waiting_for_approval" if gate is not None and gate.tool:
            return f"asked for {gate.tool}"
        case "waiting_for_verification" if gate is not None and gate.tool:
            return f"{gate.tool}, outcome unknown"
        case "waiting_for_event" if gate is not None and gate.kind == "event":
            return f"waits for {text.one_line(str(gate.args.get('event')), 60)}"
    return text.one_line(clock.words(head.reason or STATUS_WORDS.get(head.status, head.status)), 80)


def _until(deadline: datetime | None, clock: text.Clock) -> str:
    if deadline is None:
        return "no deadline"
    return clock.words(f"until {text.utc(deadline)}")


def _count(counts: Mapping[str, int] | None, status: str | None) -> str | None:
    if counts is None:
        return None
    most = 10_000
    found = [
        n for s, n in counts.items()
        if status is None or s == status or (status == "waiting" and s.startswith("waiting_") and s != "waiting_for_verification")
    ]  # fmt: skip
    total = sum(found)
    if total > most or any(n > most for n in found):
        return f"{most:,}+"
    return f"{total:,}"


def _shape(status: str) -> str:
    return "doubt" if status == "waiting_for_verification" else status


def _stuck(site: Site, who: str) -> list[Any]:
    found, seen = [], set()
    for row in site.stuck():
        if row.run_id in seen:
            continue
        seen.add(row.run_id)
        if site.may_view is None or site.sees(who, site.app.head(row.run_id)):
            found.append(row)
    return found


# ---- one run ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pages:
    first: int
    last: int
    earlier: str | None
    later: str | None


def run(site: Site, request: Request, *, notice: Notice | None = None, trouble: Trouble | None = None, status: int = 200) -> Response:
    who, clock, run_id = who_of(request), site.clock(request.scope), request.path_params["run_id"]
    head = site.run(who, run_id)
    reader = site.app.reader
    live = _live(site, request, f"run:{run_id}")
    length = reader.length(run_id)
    last_start = max(0, length - WINDOW)
    wanted = request.query_params.get("after", "")
    after = min(int(wanted), last_start) if wanted.isascii() and wanted.isdigit() and len(wanted) < 10 else last_start
    entries = reader.entries(run_id, after=after, limit=WINDOW)
    gates = reader.gates(run_id)
    agent = site.app.agents.get(head.agent)
    known = {tool.name: tool.effect for tool in agent.tools} if agent is not None else {}
    story = Story(head.agent, entries, gates, clock, known)
    waiting = [g for g in gates if g.outcome is None]
    asks = [ask(site, who, head, g, clock, trouble) for g in waiting if g.kind in cards.DECIDED_KINDS][:SHOWN_ASKS]
    base = _path(request, f"/runs/{run_id}")
    pages = None
    if length > WINDOW:
        earlier = base + query({"after": max(0, after - WINDOW) or "0"}) if after else None
        later = base + query({"after": after + WINDOW}) if after + WINDOW < length else None
        pages = Pages(after + 1, min(after + WINDOW, length), earlier, later)
    return site.render(
        request, "run.html", status=status, clock=clock, head=head, operates=site.operates(who, head), commands=_commands(head, waiting),
        lead=story.answer() if head.status == "done" else clock.words(head.reason or ""), at_work=story.at_work(head) if pages is None else None,
        driven_by=cards.owner_words(head.lease_owner or ""), life=life if len(life := story.life()) > 1 else [], cards=asks,
        groups=story.groups, seconds=story.seconds, effects=story.effects(), said=story.conversation(), gates=gates[:MOST_GATES],
        entries=entries, length=length, pages=pages, notice=notice or _done_notice(site, who, request, clock),
        events=[str(g.args.get("event")) for g in waiting if g.kind == "event"], here=base + _query_string(request),
        live=live)  # fmt: skip


def _commands(head: RunHead, waiting: Sequence[Gate]) -> list[str]:
    """The exact commands for the same: to see it, and what goes on from here."""
    name = shlex.quote(head.run_id)
    out = [f"outlast show {name} --journal --messages"]
    for g in waiting[:3]:
        call = shlex.quote(g.call_id or g.gate_id)
        if g.kind in ("approval", "budget"):
            out.append(f"outlast approve {name} {call}")
        elif g.kind == "verification":
            out.append(f"outlast verify {name} {call} --happened")
        elif g.kind == "event":
            out.append(f"outlast event {name} {shlex.quote(str(g.args.get('event')))}")
    if head.status == "failed":
        out.append(f"outlast retry {name}")
    return out


def message(site: Site, request: Request) -> Response:
    """One message whole, as JSON text: what is too long for the page."""
    run_id, number = request.path_params["run_id"], request.path_params["seq"]
    site.run(who_of(request), run_id)
    for row in site.app.journal(run_id):
        if row.kind == "MessageAdded" and row.seq == number:
            return PlainTextResponse(text.json_text(json.loads(row.body), indent=2).encode("utf-8", "backslashreplace"))
    raise RunNotFound(f"run {run_id} has no message {number}", run_id=run_id)


# ---- pictures ---------------------------------------------------------------------------------------------------------------


def pictures(site: Site, request: Request) -> Response:
    clock, params = site.clock(request.scope), request.query_params
    span = params.get("since", "1d") if params.get("since", "1d") in SPANS else "1d"
    agent = params.get("agent") or None
    if site.may_view is not None:  # sums over runs that a person may not see would tell about them
        raise UsageError("charts are sums over all runs, and here not everybody may see every run")
    base = _path(request, "/charts")
    label, long = SPANS[span]
    offset = clock.local(clock.now).utcoffset() or timedelta(0)
    figures = site.figures(long, agent, offset)
    decided = [g for _, g in site.app.reader.decided(since=clock.now - max(long, timedelta(days=7)), agent=agent, limit=500)]
    filters = [
        Choices("Span", [Choice(words, base + query({"since": key, "agent": agent}), key == span) for key, (words, _) in SPANS.items()]),
        Choices("Agent", [Choice("all", base + query({"since": span}), agent is None),
                          *(Choice(a, base + query({"since": span, "agent": a}), a == agent) for a in site.app.reader.agents()[:20])]),
    ]  # fmt: skip
    return site.render(request, "charts.html", clock=clock, filters=filters, charts=charts.all_of(figures, decided, clock, long, label))


# ---- inside -----------------------------------------------------------------------------------------------------------------


def _path(request: Request, path: str) -> str:
    return f"{request.scope.get('root_path', '')}{path}"


def _query_string(request: Request) -> str:
    if request.method != "GET":
        return ""
    kept = {k: request.query_params.getlist(k) for k in request.query_params if k not in ("run", "gate", "open")}
    return query(kept)


def _live(site: Site, request: Request, topic: str) -> str:
    return _path(request, "/live") + query({"topic": topic, "seen": site.hub.fingerprint(topic)})
