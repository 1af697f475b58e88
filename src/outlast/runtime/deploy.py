"""Before a deploy: what would this code do with every unfinished run? Read-only; the same rules as `core.step`, asked ahead of time.

A gate that is open counts as if it were approved: what matters is whether the call could run then. Only a run's rows since its last message
are read, and the one entry that says by whose code it ran last; so it costs the same for long runs as for short ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outlast.core import codec
from outlast.core import messages as m
from outlast.core import run as r
from outlast.core import step as s
from outlast.stores import base

Outcome = Literal["continues", "changes", "held", "stuck"]
OUTCOMES: tuple[Outcome, ...] = ("held", "stuck", "changes", "continues")
EXAMPLES = 5  # of each group


@dataclass(frozen=True)
class Verdict:
    """What this code would do with one run."""

    run_id: str
    agent: str
    outcome: Outcome
    why: str
    call_id: str | None = None


@dataclass
class Group:
    """Runs of one agent with the same verdict; `examples`: (run id, call id) of the first few, oldest first."""

    outcome: Outcome
    agent: str
    why: str
    runs: int = 0
    examples: list[tuple[str, str | None]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "deploy_group", "outcome": self.outcome, "agent": self.agent, "why": self.why, "runs": self.runs,
            "examples": [{"run_id": run_id, "call_id": call_id} for run_id, call_id in self.examples],
        }  # fmt: skip


@dataclass(frozen=True)
class Report:
    """`groups`: held ones first, then stuck, changing, continuing; the larger first."""

    groups: list[Group]

    def count(self, outcome: Outcome) -> int:
        return sum(g.runs for g in self.groups if g.outcome == outcome)

    @property
    def ok(self) -> bool:
        """Would every run go on? (One that is stuck already is not this code's doing.)"""
        return not self.count("held")


def report(verdicts: Iterable[Verdict]) -> Report:
    groups: dict[tuple[str, str, str], Group] = {}
    for v in verdicts:
        group = groups.setdefault((v.outcome, v.agent, v.why), Group(v.outcome, v.agent, v.why))
        group.runs += 1
        if len(group.examples) < EXAMPLES:
            group.examples.append((v.run_id, v.call_id))
    return Report(sorted(groups.values(), key=lambda g: (OUTCOMES.index(g.outcome), -g.runs, g.agent, g.why)))


def verdicts(pages: Iterable[base.Unfinished], policies: Mapping[str, s.Policy], stuck: Mapping[str, str]) -> Iterator[Verdict]:
    """`stuck`: why a run does not go on by itself, whatever the code says."""
    judge = _Judge(policies)
    for found in pages:
        head = found.head
        verdict = judge(found)
        if verdict.outcome in ("continues", "changes") and head.run_id in stuck:
            verdict = Verdict(head.run_id, head.agent, "stuck", stuck[head.run_id])
        yield verdict


class _Judge:
    """Knows what it said of a version, so that of a hundred thousand runs of one version each costs only its open calls."""

    def __init__(self, policies: Mapping[str, s.Policy]) -> None:
        self.policies = policies
        self.versions: dict[tuple[str, str], tuple[str | None, str | None]] = {}

    def __call__(self, found: base.Unfinished) -> Verdict:
        head = found.head

        def verdict(outcome: Outcome, why: str, call: r.Call | None = None) -> Verdict:
            return Verdict(head.run_id, head.agent, outcome, why, call.id if call else None)

        if head.driver == "script":
            return verdict("continues", "a program of its own drives it (app.open)")
        policy = self.policies.get(head.agent)
        if policy is None:
            return verdict("held", f"this code has no agent {head.agent!r}")
        try:
            held_version, changed = self._version(found, policy)
            calls = _open_calls(found)
        except r.NewerFormat as e:
            return verdict("held", str(e))
        except codec.Unstorable as e:
            return verdict("stuck", f"its journal cannot be read: {e}")
        notes = [changed] if changed else []
        for call in calls:
            held, note = _call(call, policy)
            if held:
                return verdict("held", held, call)
            notes += [note] if note else []
        if held_version:
            return verdict("held", held_version)
        return verdict("changes", "; ".join(dict.fromkeys(notes))) if notes else verdict("continues", "as before")

    def _version(self, found: base.Unfinished, policy: s.Policy) -> tuple[str | None, str | None]:
        """(why this code may not go on with it, what is recorded as changed)."""
        key = (found.head.agent, found.ran_by.body)
        if key not in self.versions:
            run = r.apply(r.Run(found.head.run_id, agent=found.head.agent), _entry(found.ran_by))
            held, was, now = s.version_step(run, policy), run.agent_version or "unnamed", policy.version or "unnamed"
            changed = [
                *(["other instructions, tools, model or limits"] if run.code != policy.code else []),
                *([f"version {was} to {now}"] if was != now else []),
            ]
            self.versions[key] = (held.reason if isinstance(held, s.Wait) else None, ", ".join(changed) if run.code and changed else None)
        return self.versions[key]


_ONLY_ASKED = frozenset({"GateOpened", "GateMoved", "TextSent", "VersionChanged", "DecisionRefused", "RunStarted"})


def _open_calls(found: base.Unfinished) -> Sequence[r.Call]:
    """The calls of its last message, as far as they are not answered."""
    rows = found.rows
    if not rows or rows[0].kind != r.MessageAdded.__name__:
        return ()
    first = _entry(rows[0])
    assert isinstance(first, r.MessageAdded)
    calls = m.tool_uses(first.message) if first.message["role"] == "assistant" else []
    if not calls:
        return ()
    if all(
        row.kind in _ONLY_ASKED and '"kind": "approval"' in row.body for row in rows[1:]
    ):  # nothing decided, begun or answered: nearly all
        return [r.Call(c["id"], c["name"], c["input"]) for c in calls]
    run = r.Run(found.head.run_id, agent=found.head.agent, entries=rows[0].entry_no - 1, seq=found.head.seq - 1)
    return r.fold(run, [first, *(_entry(row) for row in rows[1:])]).calls


def _entry(row: base.JournalRow) -> r.Entry:
    return r.from_row(row.kind, row.body, row.meta, by=row.by, entry_id=row.entry_id, at=row.at)


def _call(call: r.Call, policy: s.Policy) -> tuple[str | None, str | None]:
    """(why it would be held, what would change)."""
    approval = call.gate("approval")
    if call.result is not None or (approval and approval.outcome not in (None, "approved")) or call.gate("event") or call.gate("run"):
        return None, None  # answered without code
    tool = policy.tools.get(call.known_as)
    if tool is None:
        if call.begun and call.effect == "at_most_once":
            return None, None  # only a person can say what happened
        return f"there is no tool {call.known_as!r}", None
    try:
        args = tool.upgrade(call.allowed) if tool.upgrade is not None else call.allowed
    except Exception as e:  # noqa: BLE001 - a person's function
        return f"the arguments saved for {call.known_as} could not be upgraded for {tool.tool}: {type(e).__name__}: {e}", None
    if why := s.problem_of(tool, args):
        return (
            f"the arguments saved for {call.known_as} do not fit {'its schema' if not tool.tool else f'the schema of {tool.tool}'}: {why}",
            None,
        )
    if tool.upgrade is not None and codec.canonical(args) != codec.canonical(call.allowed):
        again = ", and it is asked about again" if approval or tool.gate else ""
        return None, f"{call.known_as} becomes {tool.tool} with other arguments{again}"
    return None, f"{call.known_as} is {tool.tool} now" if tool.tool else None
