"""The journal as a life: processes, waits, a kill, a recovery; the messages as a conversation; the calls with their keys and states.

It is made from the entries of one window of the journal, so a run of any length costs one page. A kind of entry that is not known here is
shown by its name and its JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from markupsafe import Markup

from outlast.documents import Gate, RunHead
from outlast.web import text
from outlast.web.cards import DECIDED_KINDS, OUTCOMES, arguments, owner_words, role_words

Entry = Mapping[str, Any]
MIN_BAR = 0.8  # percent: a bar that is there is seen
SHOWN_CHARS = 20_000  # of one text in the conversation; the rest is in the message's own document
PARTS = 9  # of the line of life


@dataclass
class Line:
    no: int | None
    at: datetime
    what: Markup
    under: str = ""
    took: timedelta | None = None
    bar: str = ""  # model, tool, lost
    begins: datetime | None = None
    row: str = ""  # killed, kept
    wait: Wait | None = None
    note: str | None = None
    digest: str = ""
    x: float = 0.0
    width: float = 0.0


@dataclass
class Tick:
    x: float
    bottom: str
    anchor: str
    y: int = 54


@dataclass
class Wait:
    """A wait to scale: from when it was opened to when it ends, by the clock."""

    used: float
    ticks: list[Tick]
    mark: float | None
    label: str
    kind: str
    title: Markup
    rules: str


@dataclass
class Group:
    title: str
    sub: list[str]
    lines: list[Line] = field(default_factory=list)
    kind: str = "process"  # process, wait, outside
    fence: int = 0
    killed: bool = False
    seconds: float = 0.0

    @property
    def long(self) -> timedelta:
        return (self.lines[-1].at - (self.lines[0].begins or self.lines[0].at)) if self.lines else timedelta(0)


@dataclass(frozen=True)
class Part:
    kind: str  # process, wait, killed, gap
    title: str
    under: str


@dataclass(frozen=True)
class Effect:
    call_id: str
    tool: str
    effect: str
    key: str | None
    state: str
    kind: str  # of the state's shape
    attempts: int


@dataclass(frozen=True)
class Block:
    kind: str  # text, thinking, call, result, placeholder
    text: text.Folded | None = None
    title: str = ""
    call_id: str = ""
    args: Sequence[Any] = ()
    is_error: bool = False
    json: str = ""
    cut: int = 0


@dataclass(frozen=True)
class Said:
    no: int
    who: str
    about: str
    at: datetime
    blocks: Sequence[Block]
    decided: Sequence[Gate] = ()


class Story:
    """One window of a run's journal, told.

    Args:
        entries: as documents, oldest first.
        gates: of the run.
        clock: now, and the viewer's zone.
        effects: tool -> its declared effect, where this process knows it.
    """

    def __init__(
        self, agent: str, entries: Sequence[Entry], gates: Sequence[Gate], clock: text.Clock, effects: Mapping[str, str] = {}
    ) -> None:
        self._effects = effects
        self.agent, self.entries, self.clock = agent, entries, clock
        self.gates = {g.gate_id: g for g in gates}
        self.tools: dict[str, str] = {g.call_id: g.tool for g in gates if g.call_id and g.tool}
        for e in entries:
            for block in _blocks(e):
                if block.get("type") == "tool_use":
                    self.tools[str(block.get("id"))] = str(block.get("name"))
        self.groups = self._grouped()
        self._scale()

    # ---- groups ---------------------------------------------------------------------------------------------------------------

    def _grouped(self) -> list[Group]:
        groups: list[Group] = []
        last_fence = 0
        for e in self.entries:
            fence = int(e["fence"])
            line = self._line(e)
            waits = e["kind"] == "GateOpened" and line.wait is not None
            if waits or (fence == 0 and e["kind"] not in ("RunStarted", "MessageAdded")):
                if not groups or groups[-1].kind != "wait":
                    groups.append(Group("No process", ["a wait costs one row"], kind="wait"))
            elif fence == 0:
                if not groups or groups[-1].kind != "outside":
                    groups.append(Group("The start", [self.clock.long_day(line.at)], kind="outside"))
            elif not groups or groups[-1].fence != fence:
                again = fence == last_fence
                if (e.get("meta") or {}).get("taken_over") and groups:
                    if fence - 1 > last_fence:  # whoever had it before this one wrote nothing
                        groups.append(Group(f"Process {self._number(groups, fence - 1)}", [f"fence {fence - 1}"], fence=fence - 1))
                        last_fence = fence - 1
                    self._killed(groups, line, last_fence)
                title = f"Process {self._number(groups, fence)}" + (" goes on" if again else "")
                groups.append(Group(title, [f"fence {fence}", self._when(line)], fence=fence))
                last_fence = fence
            group = groups[-1]
            if e["kind"] == "CallStarted" and (who := owner_words(str(e["body"].get("owner") or ""))) and who not in group.sub:
                group.sub.insert(0, who)
            group.lines.append(line)
        return groups

    @staticmethod
    def _number(groups: Sequence[Group], fence: int) -> int:
        return len({g.fence for g in groups if g.fence} | {fence})

    def _when(self, line: Line) -> str:
        return f"{self.clock.day(line.begins or line.at)} {self.clock.local(line.begins or line.at):%H:%M}"

    def _killed(self, groups: list[Group], line: Line, fence: int) -> None:
        before = next((g for g in reversed(groups) if g.fence == fence and fence), groups[-1])
        open_calls = [self.tools.get(c, c) for c in self._begun_in(before)]
        what = Markup('<b class="status-failed">Ended</b> without giving the run back')
        if open_calls:
            what += Markup(", after it had begun <code>{}</code>").format(text.seen(", ".join(open_calls)))
        elif not before.lines:
            what += Markup(", and nothing of it was saved")
        at = before.lines[-1].at if before.lines else line.begins or line.at
        before.lines.append(Line(None, at, what, "seen by the next process, which took the run over", row="killed"))
        before.killed = True

    def _begun_in(self, group: Group) -> list[str]:
        done = {e["body"].get("call_id") for e in self.entries if e["kind"] == "CallFinished" and e["fence"] == group.fence}
        begun = [e["body"]["call_id"] for e in self.entries if e["kind"] == "CallStarted" and e["fence"] == group.fence]
        return [c for c in begun if c not in done]

    def _scale(self) -> None:
        """One scale for all processes: from each one's first moment to the longest one's last."""
        for group in self.groups:
            if group.kind == "process" and group.lines:
                group.seconds = max(0.0, group.long.total_seconds())
        self.seconds = _round(max((g.seconds for g in self.groups), default=0.0))
        for group in self.groups:
            if group.kind != "process" or not group.lines:
                continue
            start = min(line.begins or line.at for line in group.lines)
            for line in group.lines:
                if line.bar and line.took is not None and line.begins is not None:
                    line.x = min(99.0, 100 * (line.begins - start).total_seconds() / self.seconds)
                    line.width = max(MIN_BAR, min(100 - line.x, 100 * line.took.total_seconds() / self.seconds))

    def answer(self) -> str:
        """The text that the run ended with, in short."""
        last = next((e for e in reversed(self.entries) if e["kind"] == "MessageAdded"), None)
        if last is None or last["body"].get("role") != "assistant":
            return ""
        content = last["body"].get("content")
        texts = [content] if isinstance(content, str) else [str(b.get("text")) for b in _blocks(last) if b.get("type") == "text"]
        return text.one_line(" ".join(texts), 200)

    def at_work(self, head: RunHead) -> str:
        """How long processes were at work, of the whole time; the journal must be here whole."""
        whole = (head.updated_at if head.finished else self.clock.now) - head.created_at
        worked = sum(g.seconds for g in self.groups)
        return f"{text.span(worked)} of {text.span(whole)}" if worked and whole.total_seconds() >= 1 else ""

    def life(self) -> list[Part]:
        """The run in one line, each part to its own scale."""
        parts: list[Part] = []
        for group in self.groups:
            if group.kind == "outside":
                continue
            if group.kind == "wait":
                wait = next((line for line in group.lines if line.wait is not None), None)
                end = group.lines[-1].at if len(group.lines) > 1 else self.clock.now
                long = wait.took if wait is not None and wait.took is not None else end - group.lines[0].at
                said = [str(line.what.striptags()) for line in group.lines if line.wait is None]
                under = said[-1] if said else str(wait.wait.title.striptags()) if wait is not None and wait.wait is not None else ""
                parts.append(Part("wait", f"No process, {text.span(long)}", under))
            else:
                last = [str(line.what.striptags()) for line in group.lines if not line.row]
                under = "ended without giving the run back" if group.killed else (last[-1] if last else "")
                took = f", {text.span(group.seconds)}" if group.seconds else ""
                parts.append(Part("killed" if group.killed else "process", f"{group.title}{took}", under))
        if len(parts) > PARTS:
            parts = [Part("gap", f"{len(parts) - PARTS + 1} parts before", "in the timeline"), *parts[-PARTS + 1 :]]
        return parts

    # ---- lines ----------------------------------------------------------------------------------------------------------------

    def _line(self, e: Entry) -> Line:
        at = text.instant(e["at"])
        assert at is not None
        tell: Callable[[Entry, Line], None] | None = getattr(self, f"_tell_{_snake(str(e['kind']))}", None)
        line = Line(e["entry_no"], at, Markup(""))
        if tell is None or not isinstance(e["body"], Mapping):
            line.what = text.seen(e["kind"])
            line.note = text.json_text(e["body"])
            return line
        tell(e, line)
        ms = (e.get("meta") or {}).get("ms", (e.get("meta") or {}).get("latency_ms"))
        if isinstance(ms, int) and not isinstance(ms, bool) and line.wait is None:  # of a wait the time is its own, not its tool's
            line.took = timedelta(milliseconds=ms)
            line.begins = at - line.took
            line.bar = line.bar or "tool"
        return line

    def _tool(self, e: Entry) -> Markup:
        call_id = str(e["body"].get("call_id"))
        return code(self.tools.get(call_id, call_id))

    def _tell_run_started(self, e: Entry, line: Line) -> None:
        body = e["body"]
        line.what = Markup("{} started the run of {}").format(text.seen(e["by"] or "Somebody"), text.seen(body.get("agent", self.agent)))
        line.under = f"version {body['agent_version']}" if body.get("agent_version") else ""
        if body.get("forked_from"):
            line.what = Markup("{} forked {} at message {}").format(
                text.seen(e["by"] or "Somebody"), code(body["forked_from"]), body.get("forked_at")
            )
            line.under = (
                "what happened there stays done; a new call that does something asks a person first" if body.get("asks") else line.under
            )

    def _tell_message_added(self, e: Entry, line: Line) -> None:
        number = Markup(' <a class="quiet nowrap" href="#m{0}">message {0}</a>').format(e["seq"])
        blocks = _blocks(e)
        if e["body"].get("role") == "assistant":
            line.bar = "model"
            names = [str(b.get("name")) for b in blocks if b.get("type") == "tool_use"]
            asks = Markup(", ").join(code(n) for n in names)
            line.what = (Markup("Model asks for {}").format(asks) if names else Markup("Model answers")) + number
            reason = (e.get("meta") or {}).get("stop_reason")
            line.under = f"stopped because of {reason}" if reason in ("max_tokens", "refusal", "model_context_window_exceeded") else ""
            attempt = (e.get("meta") or {}).get("attempt")
            if isinstance(attempt, int) and attempt > 1:
                line.under = f"try {attempt}"
        else:
            results = sum(b.get("type") == "tool_result" for b in blocks)
            what = f"{text.plural(results, 'result')} for the model" if results else "Input for the model"
            line.what = Markup("{}").format(what) + number

    def _tell_call_started(self, e: Entry, line: Line) -> None:
        body = e["body"]
        again = int(body.get("attempt") or 1) > 1
        line.what = Markup("Begins {}{} with key <code>{}</code>").format(
            self._tool(e), " again" if again else "", text.seen(body.get("key", ""))
        )
        line.under = f"attempt {body['attempt']}, the same key" if again else ""

    def _tell_call_skipped(self, e: Entry, line: Line) -> None:
        line.what = Markup("{} was surely not done").format(self._tool(e))
        line.under = str(e["body"].get("why"))

    def _tell_call_failed(self, e: Entry, line: Line) -> None:
        line.what = Markup("{} failed, tried again from {}").format(self._tool(e), self._clock(e["body"].get("retry_at")))
        line.under, line.bar = str(e["body"].get("why")), "lost"

    def _tell_call_doubted(self, e: Entry, line: Line) -> None:
        line.what = Markup('<b class="status-doubt">In doubt</b>: what came of {} cannot be told').format(self._tool(e))
        line.under = str(e["body"].get("why"))

    def _tell_call_upgraded(self, e: Entry, line: Line) -> None:
        line.what = Markup("The saved arguments of {} became those that the code takes now").format(self._tool(e))
        line.note = text.one_line(text.json_text(e["body"].get("args")), 300) if e["body"].get("args") is not None else None

    def _tell_call_finished(self, e: Entry, line: Line) -> None:
        body, tool = e["body"], self._tool(e)
        how = body.get("how", "result")
        words = {
            "result": "{} gave an error" if body.get("is_error") else "{} answered",
            "refused": "{} was not run",
            "verified": "{} happened: a check or a person said so",
            "unknown": "{} is not repeated, its outcome is unknown",
            "cancelled": "{} was cancelled",
            "answered": "{} was answered from outside",
        }
        line.what = Markup(words.get(how, "{} ended: " + text.plain(how))).format(tool)  # noqa: S704 - our own words, or escaped
        attempt = (e.get("meta") or {}).get("attempt")
        if isinstance(attempt, int) and attempt > 1:
            line.under, line.row = f"attempt {attempt}, with the key of the first", "kept"

    def _tell_gate_opened(self, e: Entry, line: Line) -> None:
        body = e["body"]
        gate = self.gates.get(str(body.get("gate_id")))
        kind = str(body.get("kind"))
        rungs = body.get("rungs") or []
        role = rungs[0].get("role") if rungs else None
        waits_for = {
            "approval": role or "anyone", "verification": f"{role or 'anyone'}: did it happen?", "budget": f"{role or 'anyone'}: a limit is reached",
            "event": f"the event {(body.get('args') or {}).get('event')}", "run": "a run of its own",
        }.get(kind, kind)  # fmt: skip
        shape = "doubt" if kind == "verification" else "waiting"
        line.what = Markup(
            '<span class="status status-{0}"><svg class="glyph" aria-hidden="true"><use href="#s-{0}"/></svg>waits for {1}</span>'
        ).format(shape, text.seen(waits_for))
        line.wait = self._wait(body, gate, line, kind)
        line.took = ((gate.decided_at if gate and gate.decided_at else self.clock.now) - line.at) if gate else None

    def _wait(self, body: Mapping[str, Any], gate: Gate | None, line: Line, kind: str) -> Wait | None:
        if gate is None:
            return None
        rungs = body.get("rungs") or []
        ends = [(text.instant(r.get("deadline")), r) for r in rungs]
        closed_at, now = gate.decided_at, self.clock.now
        points = [at for at, _ in ends if at is not None]
        end = max([*points, closed_at or now])
        whole = max((end - line.at).total_seconds(), 0.001)

        def x(at: datetime) -> float:
            return round(max(0.0, min(100.0, 100 * (at - line.at).total_seconds() / whole)), 2)

        ticks = [Tick(0, f"{self._short(line.at)} asked", "start")]
        for n, (at, _) in enumerate(ends):
            if at is None:
                continue
            following = rungs[n + 1].get("role") or "anyone" if n + 1 < len(rungs) else None
            what = f"{following} is asked" if following else "deadline"
            anchor = "end" if x(at) > 70 else "middle" if x(at) > 15 else "start"
            ticks.append(Tick(x(at), f"{self._short(at)} {what}", anchor, 68 if n % 2 == 0 and len(ends) > 1 else 54))
        reminders = [text.instant(r) for rung in rungs for r in rung.get("remind_at") or ()]
        ticks += [Tick(x(at), "", "middle") for at in reminders[:12] if at is not None and at < end]
        state = OUTCOMES.get(gate.outcome or "", gate.outcome or "") if gate.outcome else "open"
        rules = [_rule(r.get("rule") or {}, f"{r.get('role') or 'anyone'} for " if n else "") for n, r in enumerate(rungs)]
        label = f"The wait to scale by the clock: asked {self._short(line.at)}, " + ", ".join(
            [t.bottom for t in ticks[1:] if t.bottom] + [f"{state} {self._short(closed_at)}" if closed_at else "still open"]
        )
        title = Markup("waits for {}").format(text.seen(gate.role or kind))
        return Wait(
            x(closed_at or now), ticks, x(closed_at) if closed_at else None, label, state, title, ", then ".join(r for r in rules if r)
        )

    def _short(self, at: datetime) -> str:
        here = self.clock.local(at)
        same = here.date() == self.clock.local(self.clock.now).date()
        return f"{here:%H:%M}" if same else f"{here:%a} {here.day} {here:%b %H:%M}"

    def _clock(self, at: str | None) -> Markup:
        moment = text.instant(at)
        return self.clock.time(moment, "second") if moment else Markup("later")

    def _tell_gate_waived(self, e: Entry, line: Line) -> None:
        line.what = Markup("Nobody need be asked about {}").format(self._tool(e))

    def _tell_gate_moved(self, e: Entry, line: Line) -> None:
        gate = self.gates.get(str(e["body"].get("gate_id")))
        level = int(e["body"].get("level") or 0)
        role = text.seen(gate.role or "anyone") if gate else Markup("whoever is asked")
        line.what = (Markup("{} is asked now") if level and not e["body"].get("reminded_at") else Markup("{} was reminded")).format(role)

    def _tell_gate_expired(self, e: Entry, line: Line) -> None:
        line.what = Markup("<b>Nobody decided</b> before the deadline")

    def _tell_gate_decided(self, e: Entry, line: Line) -> None:
        body = e["body"]
        gate = self.gates.get(str(body.get("gate_id")))
        outcome = str(body.get("outcome"))
        changed = ", with other arguments" if body.get("args") is not None and gate and gate.kind == "approval" else ""
        role = f" for {gate.role}" if gate and gate.role else ""
        line.what = Markup("<b>{} {}</b>{}{}").format(
            text.seen(e["by"] or "somebody"), OUTCOMES.get(outcome, outcome), text.seen(role), changed
        )
        if gate and gate.deadline and gate.decided_at and gate.deadline > gate.decided_at:
            line.under = f"{text.span(gate.deadline - gate.decided_at)} before the deadline"
        line.note = body.get("note")
        line.digest = gate.digest[:23] if gate else ""

    def _tell_decision_refused(self, e: Entry, line: Line) -> None:
        line.what = Markup("{} tried to decide and may not").format(text.seen(e["by"] or "somebody"))
        line.under = str(e["body"].get("why"))

    def _tell_run_ended(self, e: Entry, line: Line) -> None:
        status = str(e["body"].get("status"))
        line.what = Markup(
            '<span class="status status-{0}"><svg class="glyph" aria-hidden="true"><use href="#s-{0}"/></svg>{0}</span>'
        ).format(status if status in ("done", "failed", "cancelled") else "done")
        line.under = str(e["body"].get("reason") or "")

    def _tell_model_failed(self, e: Entry, line: Line) -> None:
        body = e["body"]
        status = f" ({body['status']})" if body.get("status") else ""
        after = (
            Markup(", tried again from {}").format(self._clock(body["retry_at"])) if body.get("retry_at") else Markup(", not tried again")
        )
        line.what = Markup("Model could not be asked{}").format(status) + after
        line.under, line.bar = f"try {body.get('attempt')}: {body.get('why')}", "lost"

    def _tell_model_call_lost(self, e: Entry, line: Line) -> None:
        line.what = Markup("A model call was lost with its process; it may have been paid for")

    def _tell_worker_died(self, e: Entry, line: Line) -> None:
        names = ", ".join(self.tools.get(str(c), str(c)) for c in e["body"].get("call_ids") or ())
        line.what = Markup('<b class="status-failed">The process that began</b> {} is gone').format(code(names))
        line.row = "killed"

    def _tell_version_changed(self, e: Entry, line: Line) -> None:
        line.what = Markup("Version {} goes on with the run").format(code(e["body"].get("agent_version") or e["body"].get("code") or "?"))

    def _tell_text_sent(self, e: Entry, line: Line) -> None:
        line.what = Markup("{} sent a message to the run").format(text.seen(e["by"] or "Somebody"))
        content = e["body"].get("content")
        line.note = text.one_line(content if isinstance(content, str) else text.json_text(content), 300)

    def _tell_event_received(self, e: Entry, line: Line) -> None:
        line.what = Markup("The event {} came").format(code(e["body"].get("name")))
        line.note = text.one_line(text.json_text(e["body"].get("data")), 300)

    def _tell_child_finished(self, e: Entry, line: Line) -> None:
        line.what = Markup("The run of {} ended: {}").format(self._tool(e), text.seen(e["body"].get("status")))

    def _tell_retry_asked(self, e: Entry, line: Line) -> None:
        line.what = Markup("<b>{}</b> asked to try again").format(text.seen(e["by"] or "Somebody"))

    def _tell_run_cancelled(self, e: Entry, line: Line) -> None:
        line.what = Markup("<b>{} cancelled the run</b>").format(text.seen(e["by"] or "Somebody"))
        line.note = e["body"].get("note")

    def _tell_run_moved(self, e: Entry, line: Line) -> None:
        line.what = Markup("The run was moved to {}").format(code(e["body"].get("to")))

    def _tell_late_result(self, e: Entry, line: Line) -> None:
        line.what = Markup("A late result of {}, kept as evidence").format(self._tool(e))
        line.under = str(e["body"].get("why") or "")

    # ---- calls and messages -----------------------------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """What the calls of this window did, in the order in which the model asked for them."""
        out = []
        by_call: dict[str, list[Entry]] = {}
        for e in self.entries:
            if isinstance(e["body"], Mapping) and isinstance(e["body"].get("call_id"), str):
                by_call.setdefault(e["body"]["call_id"], []).append(e)
        answered = {str(b.get("tool_use_id")) for e in self.entries for b in _blocks(e) if b.get("type") == "tool_result"}
        for call_id in [str(b.get("id")) for e in self.entries for b in _blocks(e) if b.get("type") == "tool_use"]:
            mine = by_call.get(call_id, [])
            begun = [e for e in mine if e["kind"] == "CallStarted"]
            ended = next((e for e in reversed(mine) if e["kind"] == "CallFinished"), None)
            waiting = [g for g in self.gates.values() if g.call_id == call_id and g.outcome is None]
            state, kind = _state(ended, waiting, begun, call_id in answered)
            tried = len(begun) or sum(e["kind"] == "CallFailed" for e in mine) + bool(
                ended and ended["body"].get("how", "result") == "result"
            )
            first = begun[0]["body"] if begun else {}
            tool = self.tools.get(call_id, "")
            effect = str(first.get("effect") or self._effects.get(tool) or "")
            key = first.get("key") or (f"{self.entries[0]['run_id']}:{call_id}" if effect == "idempotent" else None)
            out.append(Effect(call_id, tool, effect, key, state, kind, tried))
        return out

    def conversation(self) -> list[Said]:
        out = []
        changed = any(e["kind"] == "VersionChanged" for e in self.entries)  # one version is said once, at the head of the page
        version = ""
        for e in self.entries:
            if e["kind"] in ("RunStarted", "VersionChanged"):
                version = str(e["body"].get("agent_version") or "")
            if e["kind"] != "MessageAdded" or not isinstance(e["body"], Mapping):
                continue
            at = text.instant(e["at"])
            assert at is not None
            blocks = _blocks(e)
            mine = [str(b.get("id")) for b in blocks if b.get("type") == "tool_use"]
            decided = [g for g in self.gates.values() if g.call_id in mine and g.outcome is not None and g.kind in DECIDED_KINDS]
            out.append(
                Said(
                    int(e["seq"]),
                    self._who(e, blocks),
                    self._about(e, version if changed else ""),
                    at,
                    [self._block(b) for b in blocks],
                    decided,
                )
            )
        return out

    def _who(self, e: Entry, blocks: Sequence[Mapping[str, Any]]) -> str:
        if e["body"].get("role") == "assistant":
            return self.agent
        names = [self.tools.get(str(b.get("tool_use_id")), str(b.get("tool_use_id"))) for b in blocks if b.get("type") == "tool_result"]
        return f"Result of {', '.join(names)}" if names else "User"

    @staticmethod
    def _about(e: Entry, version: str) -> str:
        meta = e.get("meta") or {}
        usage = meta.get("usage")
        parts = []
        if isinstance(usage, Mapping):
            parts.append(f"{text.number(usage.get('input_tokens'))} in, {text.number(usage.get('output_tokens'))} out")
        if isinstance(meta.get("latency_ms"), int):
            parts.append(text.span(meta["latency_ms"] / 1000))
        if isinstance(meta.get("cost_usd"), str):
            parts.append(text.money(meta["cost_usd"]))
        if version and e["body"].get("role") == "assistant":
            parts.append(f"version {version}")
        return ", ".join(parts)

    def _block(self, block: Mapping[str, Any]) -> Block:
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            return _text_block("text", block["text"])
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            made = _text_block("thinking", block["thinking"])
            return Block("thinking", made.text, f"Thinking, {text.plural(len(block['thinking'].split()), 'word')}", cut=made.cut)
        if kind == "tool_use":
            args = block.get("input")
            return Block(
                "call",
                title=str(block.get("name")),
                call_id=str(block.get("id")),
                args=arguments(args if isinstance(args, Mapping) else {}),
            )
        if kind == "tool_result":
            content = block.get("content")
            shown = content if isinstance(content, str) else _said(content)
            made = _text_block("result", shown)
            return Block("result", made.text, is_error=bool(block.get("is_error")), cut=made.cut, title=_others(content))
        return Block(
            "placeholder",
            title=_placeholder(block),
            json=text.json_text({k: v if len(text.json_text(v)) < 500 else "…" for k, v in block.items()}),
        )


def _text_block(kind: str, value: str) -> Block:
    return Block(kind, text.folded(value[:SHOWN_CHARS]), cut=max(0, len(value) - SHOWN_CHARS))


def _said(content: Any) -> str:
    if not isinstance(content, list):
        return "" if content is None else text.json_text(content)
    return "\n".join(str(b.get("text")) for b in content if isinstance(b, Mapping) and b.get("type") == "text")


def _others(content: Any) -> str:
    if not isinstance(content, list):
        return ""
    return "; ".join(_placeholder(b) for b in content if isinstance(b, Mapping) and b.get("type") != "text")


def _placeholder(block: Mapping[str, Any]) -> str:
    """A block that is not shown: what it is and how large, never loaded."""
    kind = str(block.get("type"))
    source = block.get("source")
    about = str(source.get("media_type") or source.get("type") or "") if isinstance(source, Mapping) else ""
    size = len(text.json_text(block))
    return f"[{kind}{', ' + about if about else ''}, {text.plural(size, 'character')} as JSON, not shown]"


def _blocks(e: Entry) -> list[Mapping[str, Any]]:
    if e["kind"] != "MessageAdded" or not isinstance(e["body"], Mapping):
        return []
    content = e["body"].get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [b for b in content or () if isinstance(b, Mapping)]


def _state(ended: Entry | None, waiting: Sequence[Gate], begun: Sequence[Entry], answered: bool) -> tuple[str, str]:
    if ended is not None:
        how = ended["body"].get("how", "result")
        return {"refused": ("refused", "cancelled"), "cancelled": ("cancelled", "cancelled"), "unknown": ("unknown", "doubt")}.get(
            how, ("done", "done")
        )
    if answered:
        return "done", "done"
    if any(g.kind == "verification" for g in waiting):
        return "in doubt", "doubt"
    if waiting:
        return "waiting", "waiting"
    return ("begun", "running") if begun else ("pending", "waiting")


def _rule(rule: Mapping[str, Any], who: str) -> str:
    seconds = rule.get("within_s")
    hours = rule.get("hours")
    counted = f", counted in {hours.get('opening')} {hours.get('tz')}" if isinstance(hours, Mapping) else ""
    return f"{who}{text.span(float(seconds))}{counted}" if isinstance(seconds, int | float) else ""


def _snake(kind: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()


def _round(seconds: float) -> float:
    """The next round number of seconds: 0.05, 0.1, 0.2, 0.5, 1, 2, 5, …"""
    step = 0.01
    while True:
        for factor in (1, 2, 5):
            if seconds <= step * factor:
                return step * factor
        step *= 10


def code(value: object) -> Markup:
    return Markup("<code>{}</code>").format(text.seen(value))


__all__ = ["Effect", "Group", "Line", "Part", "Said", "Story", "role_words"]
