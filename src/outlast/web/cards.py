"""A gate as a person reads it: what is asked, the call whole, who was asked when and what comes next, and the form to answer with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from markupsafe import Markup

from outlast.documents import Gate, RunHead
from outlast.web import forms, text

SOON = timedelta(minutes=15)
OUTCOMES = {
    "approved": "approved", "rejected": "rejected", "expired": "nobody decided", "cancelled": "cancelled", "happened": "said that it happened",
    "run_again": "said to run it again", "give_up": "gave it up", "arrived": "answered",
}  # fmt: skip
SENT = {"reply", "message", "mail", "email", "e-mail", "letter", "notice", "invoice", "text", "post"}
DECIDED_KINDS = ("approval", "verification", "budget")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
COLUMNS_LEAST = 2  # percent of a bar, so that it is seen


@dataclass(frozen=True)
class Arg:
    name: str
    kind: str
    folded: text.Folded
    letter: bool = False  # a text of several lines, or a long one


@dataclass(frozen=True)
class Step:
    """One line of who is asked when."""

    at: datetime
    what: str
    state: str  # past, now, next


@dataclass(frozen=True)
class Card:
    gate: Gate
    head: RunHead
    id: str
    title: str
    args: Sequence[Arg]
    steps: Sequence[Step]
    facts: Sequence[tuple[str, Markup | str]]
    percent: int | None
    soon: bool
    over: bool  # its time is over, and nobody has written that down yet
    noun: str
    fields: Sequence[forms.Field] | None = None  # None: this process does not know the tool
    whole: str = ""
    editing: bool = False
    error: str = ""
    note: str = ""
    why_not: str | None = None  # why this person may not decide it

    @property
    def left(self) -> timedelta | None:
        return self.gate.deadline - self._now if self.gate.deadline else None

    _now: datetime = field(default=EPOCH, repr=False)

    @property
    def waited(self) -> timedelta:
        return self._now - self.gate.created_at


def dom_id(run_id: str, gate_id: str) -> str:
    return f"ask-{run_id}.{gate_id}"


def role_words(role: str | None) -> str:
    name = (role or "person").replace("-", " ").replace("_", " ")
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def arguments(args: Mapping[str, Any]) -> list[Arg]:
    """Each argument whole and exact: short values as JSON, long or many-lined texts as they read."""
    out = []
    for name, value in args.items():
        if isinstance(value, str) and ("\n" in value or len(value) > 200):
            lines = value.count("\n") + 1
            kind = f"text, {text.plural(lines, 'line')}, {text.plural(len(value), 'character')}"
            out.append(Arg(name, kind + _hidden(value), text.folded(value), letter=True))
        else:
            shown = text.json_text(value, indent=2 if isinstance(value, dict | list) and value else None)
            raw = value if isinstance(value, str) else shown
            out.append(Arg(name, text.kind_of(value) + _hidden(raw), text.folded(_unseen_kept(value, shown))))
    return out


def _unseen_kept(value: Any, shown: str) -> str:
    """A short text in quotes with its unseen characters as they are: `seen` marks them. Everything else as its JSON."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return shown


def _hidden(value: str) -> str:
    n = text.unseen(value)
    return f", {text.plural(n, 'unseen character')} shown as escapes" if n else ""


def card(head: RunHead, gate: Gate, clock: text.Clock, *, entries: Sequence[Mapping[str, Any]] = (), schema: Mapping[str, Any] | None = None,
         entered: Mapping[str, str] = {}, error: str = "", why_not: str | None = None) -> Card:  # fmt: skip
    now = clock.now
    opened: Mapping[str, Any] = next(
        (e["body"] for e in entries if e["kind"] == "GateOpened" and e["body"].get("gate_id") == gate.gate_id), {}
    )
    noun = str(opened.get("noun") or "call")
    closes_at = text.instant(opened.get("closes_at"))
    whole_time = (gate.deadline - gate.created_at) if gate.deadline else None
    percent = None
    if whole_time is not None and whole_time > timedelta(0):
        percent = min(100, max(COLUMNS_LEAST, round(100 * ((now - gate.created_at) / whole_time))))
    editable = schema is not None and gate.kind == "approval"
    return Card(
        gate=gate, head=head, id=dom_id(gate.run_id, gate.gate_id), title=_title(gate, noun), args=arguments(gate.args),
        steps=_steps(gate, opened, entries, now, noun), facts=_facts(gate, head, entries, clock), percent=percent,
        soon=gate.deadline is not None and gate.deadline - now < SOON, over=closes_at is not None and closes_at <= now, noun=noun,
        fields=forms.fields(schema, gate.args, entered) if editable and schema is not None else None,
        whole=entered.get("whole") or text.json_text(gate.args, indent=2), editing=bool(error) and any(k[:2] in ("t.", "j.") or k == "whole" for k in entered),
        error=error, note=entered.get("note", ""), why_not=why_not, _now=now)  # fmt: skip


def _title(gate: Gate, noun: str) -> str:
    if gate.kind == "verification":
        return f"Did this {noun if noun != 'call' else (gate.tool or 'call')} happen?"
    return gate.text


def _steps(gate: Gate, opened: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], now: datetime, noun: str) -> list[Step]:
    rungs = list(opened.get("rungs") or ())
    first = rungs[0].get("role") if rungs else gate.role
    out = [Step(gate.created_at, f"{first or 'anyone'} asked", "past")]
    if gate.notified_at is not None:
        out.append(Step(gate.notified_at, "told", "past"))
    level = 0
    for e in entries:
        if e["kind"] == "GateMoved" and e["body"].get("gate_id") == gate.gate_id:
            at = text.instant(e["at"]) or now
            if e["body"]["level"] > level:
                level = e["body"]["level"]
                out.append(Step(at, f"{(rungs[level].get('role') if level < len(rungs) else gate.role) or 'anyone'} asked too", "past"))
            else:
                out.append(Step(at, "reminded", "past"))
    if gate.outcome is not None:
        if gate.decided_at is not None:
            by = gate.decided_by or "nobody"
            what = "nobody decided" if gate.outcome == "expired" else f"{by} {OUTCOMES.get(gate.outcome, gate.outcome)}"
            out.append(Step(gate.decided_at, what, "now"))
        return out
    out.append(Step(now, f"waits for {role_words(gate.role)}", "now"))
    reminders = [text.instant(at) for at in (rungs[gate.level].get("remind_at") or ())] if gate.level < len(rungs) else []
    coming = next((at for at in reminders if at is not None and at > now), None)
    if coming is not None:
        out.append(Step(coming, "reminded", "next"))
    for n in range(gate.level, len(rungs)):
        end = text.instant(rungs[n].get("deadline"))
        if end is None:
            continue
        if n + 1 < len(rungs):
            out.append(Step(end, f"{role_words(rungs[n + 1].get('role'))} is asked too", "next"))
        elif opened.get("closes_at"):
            done = "sent" if noun.lower() in SENT else "made"
            out.append(Step(end, f"rejected: the {noun} is not {done}" if gate.kind == "approval" else "it ends unanswered", "next"))
        else:
            out.append(Step(end, "it goes on waiting", "next"))
    return sorted(out, key=lambda s: (s.at, ("past", "now", "next").index(s.state)))


def _facts(gate: Gate, head: RunHead, entries: Sequence[Mapping[str, Any]], clock: text.Clock) -> list[tuple[str, Markup | str]]:
    out: list[tuple[str, Markup | str]] = []
    if gate.call_id:
        out.append(("Call", Markup('<span class="mono">{}</span>').format(text.seen(gate.call_id))))
    mine = [e for e in entries if gate.call_id is not None and gate.call_id in _call_ids(e)]
    begun = [e for e in mine if e["kind"] == "CallStarted"]
    if gate.kind == "verification" and begun:
        last = begun[-1]["body"]
        out += [("Begun", clock.time(text.instant(begun[-1]["at"]), "full")), ("By", owner_words(str(last.get("owner") or "")))]
        out.append(("Look for", Markup('<span class="mono">{}</span>').format(text.seen(str(last.get("key") or "")))))
        until = max((str(e["body"].get("may_act_until") or "") for e in mine), default="")
        for e in mine:
            if e["kind"] in ("WorkerDied", "CallDoubted") and e["body"].get("may_act_until"):
                until = str(e["body"]["may_act_until"])
        if until:
            out.append(("Run again", Markup("from {}").format(clock.time(text.instant(until), "second"))))
    out.append(("Shown", Markup('<span class="mono">{}</span>').format(text.seen(gate.digest[:23]))))
    if gate.role:
        out.append(("Asked", gate.role))
    if head.started_by:
        out.append(("Started by", head.started_by))
    return out


def _call_ids(entry: Mapping[str, Any]) -> list[str]:
    body = entry["body"]
    if not isinstance(body, Mapping):
        return []
    one = body.get("call_id")
    many = body.get("call_ids")
    return [one] if isinstance(one, str) else [x for x in many if isinstance(x, str)] if isinstance(many, list) else []


def owner_words(owner: str) -> str:
    """host/boot/namespace/pid/start as "host, pid 4117"."""
    parts = owner.split("/")
    return f"{parts[0]}, pid {parts[3]}" if len(parts) == 5 else owner


def decided_words(gate: Gate) -> str:
    """priya approved reply_to_customer"""
    what = gate.tool or ("the limit" if gate.kind == "budget" else gate.gate_id)
    if gate.outcome == "expired":
        return f"nobody decided on {what}"
    if gate.outcome == "cancelled":
        return f"{what} was cancelled"
    colon = ":" if gate.kind == "verification" else ""
    return f"{gate.decided_by or 'somebody'} {OUTCOMES.get(gate.outcome or '', gate.outcome or '')}{colon} {what}"
