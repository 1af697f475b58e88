"""What the command line tells people about runs and gates, and the exact commands that go on. Lines, not yet escaped."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outlast.cli import render
from outlast.cli.options import Options

if TYPE_CHECKING:
    from outlast import Gate, Run, RunHead

DECIDED = {
    "approved": "was approved",
    "rejected": "was rejected",
    "expired": "expired",
    "cancelled": "was cancelled",
    "happened": "happened",
    "run_again": "is to be run again",
    "give_up": "was given up",
    "arrived": "was answered",
}
ASKS_PEOPLE = ("approval", "budget", "verification")


def head_line(head: RunHead) -> str:
    return render.line(f"{head.run_id} is {head.status}" + (f": {head.reason}" if head.reason else ""))


def gate_lines(gate: Gate, *, where: str | None = None) -> list[str]:
    """What is asked, of whom, until when, with every argument. `where`: how to see an argument that is too long to be listed whole."""
    asked = f" of {gate.role}" if gate.role else ""
    until = f", until {render.instant(gate.deadline)}" if gate.deadline else ", without a deadline"
    out = [render.line(f"{gate.run_id}  {gate.gate_id}  {gate.kind} is asked{asked}{until}"), f"  {render.line(gate.text)}"]
    if gate.tool:
        out.append(f"  {render.line(gate.tool)}")
    indent = "    " if gate.tool else "  "
    out += [f"{indent}{render.line(f'{name}: {render.value(value, where)}')}" for name, value in gate.args.items()]
    return out


def decided_line(gate: Gate) -> str:
    """What stands once a gate was decided: what, of which run, by whom and when."""
    what = f"{gate.tool} ({gate.gate_id})" if gate.tool else gate.gate_id
    says = ", says" if gate.kind == "verification" and gate.outcome != "give_up" else " by"
    by = f"{says} {gate.decided_by}" if gate.decided_by else ""
    at = f" at {render.instant(gate.decided_at)}" if gate.decided_at else ""
    note = f": {gate.note}" if gate.note else ""
    return render.line(f"{gate.run_id}: {what} {DECIDED.get(gate.outcome or '', gate.outcome or 'is open')}{by}{at}{note}")


def show_command(run_id: str, options: Options) -> str:
    return f"outlast show {shlex.quote(run_id)} --json{options.repeated()}"


def resume_command(run_id: str, options: Options) -> str:
    return f"outlast resume {shlex.quote(run_id)}{options.repeated()}"


def commands(run: Run | RunHead, gates: Sequence[Gate], options: Options) -> list[str]:
    """The commands that go on from where the run is; none for a run that is done."""
    rest = options.repeated()
    resume = resume_command(run.run_id, options)
    match run.status:
        case "done" | "cancelled":
            return []
        case "failed":
            return [f"outlast retry {shlex.quote(run.run_id)}{rest}"]
        case "waiting_for_approval" | "waiting_for_budget" | "waiting_for_verification":
            return [*decisions(run.run_id, gates, rest), resume]
        case "waiting_for_event":
            names = [str(g.args.get("event")) for g in gates if g.outcome is None and g.kind == "event"]
            return [*(f"outlast event {shlex.quote(run.run_id)} {shlex.quote(name)} --data JSON{rest}" for name in names), resume]
        case _:
            return [resume]


def decisions(run_id: str, gates: Sequence[Gate], rest: str = "", *, only: str | None = None) -> list[str]:
    """The commands that answer a run's open gates, or the one of id `only`. The call is named where there is a choice."""
    run_id = shlex.quote(run_id)
    still_open = [g for g in gates if g.outcome is None]
    to_approve = [g for g in still_open if g.kind in {"approval", "budget"}]
    to_verify = [g for g in still_open if g.kind == "verification"]
    out = []
    for gate in (g for g in to_approve if only in {None, g.gate_id}):
        call = "" if len(to_approve) == 1 else f" {shlex.quote(gate.call_id or gate.gate_id)}"
        out += [f"outlast approve {run_id}{call} --by you{rest}", f'outlast reject {run_id}{call} --by you --note "why"{rest}']
    for gate in (g for g in to_verify if only in {None, g.gate_id}):
        call = "" if len(to_verify) == 1 else f" {shlex.quote(gate.call_id or gate.gate_id)}"
        out += [f"outlast verify {run_id}{call} --by you {answer}{rest}" for answer in ("--happened", "--run-again", "--give-up")]
    return out


def paused(run: Run, options: Options) -> list[str]:
    """Why a run stopped where it waits, what is asked, and what goes on."""
    where = show_command(run.run_id, options)
    out = ["", render.line(f"paused: {run.reason or run.status}")]
    for gate in run.gates:
        if gate.outcome is None and gate.kind in ASKS_PEOPLE:
            out += ["", *gate_lines(gate, where=where)]
    return [*out, *go_on(commands(run, run.gates, options))]


def go_on(lines: Sequence[str]) -> list[str]:
    return ["", "go on with", *(f"  {each}" for each in lines)] if lines else []
