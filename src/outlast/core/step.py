"""What comes next: a pure, total function of the run, the code's policy and the store's clock.

    next_step(run, policy, now, in_flight) -> Step

Rules, each closing a schedule that broke a simpler wording
1.  Everything that needs no I/O first (`Settle`), then every call that may run, then the earliest wait.
2.  A batch is answered by one user message whose results come first, in the order of the calls.
3.  What was gated once stays gated; what is begun and unanswered is in doubt, whatever the code says now.
4.  Missing code is looked at last, just before running: a rejected gate or a doubt needs none. So is other code than ran it so far.
5.  Only `tool_use` runs tools.
6.  `Wait.until` is the least instant at which this function could say something new: it may be early, never late.
7.  Nobody concludes "not done" while an earlier attempt may still act.
8.  What runs is what was approved: where newer code makes other arguments of a call, an approval of the old ones no longer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from outlast.core import codec
from outlast.core import gate as g
from outlast.core import messages as m
from outlast.core import run as r
from outlast.core.gate import GatePolicy
from outlast.core.run import Call, Gate, Run

MAX_CUTS = 3  # answers that were cut inside a call, in a row; the next fails the run
MAX_PAUSES = 10  # pause_turn answers in a row
MAX_CORRECTIONS = 2  # answers that were not of the output's type
SETTLE_LIMIT = 1000  # entries that one append may fold in; more is a bug
STATUS_ORDER = ("waiting_for_approval", "waiting_for_verification", "waiting_for_budget", "waiting_for_event", "waiting_for_run",
                "waiting_for_timer", "waiting_for_code")  # fmt: skip


# ---- what the code says: plain data and pure functions -----------------------------------------------------------------


@dataclass(frozen=True)
class ToolPolicy:
    name: str
    effect: Literal["read", "idempotent", "at_most_once"] = "at_most_once"
    problem: Callable[[Mapping[str, Any]], str | None] = lambda args: None  # why these arguments are invalid
    gate: GatePolicy | None = None
    when: Callable[[Mapping[str, Any]], bool] | None = None  # must it be asked? Raising or not a bool: yes
    key: Callable[[Mapping[str, Any]], str] | None = None
    key_ttl: timedelta | None = None
    has_check: bool = False
    repeatable: bool = False  # a tool that polls: no loop guard
    child: str | None = None  # the agent whose own run answers it
    schema_digest: str = ""
    tool: str = ""  # where `name` is an older name of it: what the tool is called now
    upgrade: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None  # likewise: saved arguments as it takes them today

    @property
    def intent(self) -> bool:
        """Is `CallStarted` saved before the act?"""
        return self.effect == "at_most_once" or (self.effect == "idempotent" and (self.key_ttl is not None or self.key is not None))


@dataclass(frozen=True)
class LimitPolicy:
    model_calls: int | None = 50
    tokens: int | None = None
    wall: timedelta | None = None
    then: Literal["ask", "fail"] = "ask"
    role: str | None = None
    cost_usd: Decimal | None = None
    repeats: int | None = None


@dataclass(frozen=True)
class Policy:
    """All that the code of an agent contributes to a decision."""

    tools: Mapping[str, ToolPolicy] = field(default_factory=dict)
    limits: LimitPolicy = LimitPolicy()
    parallel_calls: int = 8
    output_problem: Callable[[m.Message], str | None] = lambda message: None
    guarded: bool = False  # gates may only be decided through an app that has `may_decide`
    version: str = ""
    code: str = ""  # a digest of what the code says; "": versions are not looked at
    library: str = ""
    on_change: Literal["continue", "warn", "hold", "pinned"] = "continue"
    next_cost: Callable[[Run], Decimal | None] = lambda run: None  # what the next model call may cost; None: its price is unknown


# ---- steps ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask the model with the messages as they are."""


@dataclass(frozen=True, slots=True)
class RunCall:
    """Run one call. `check`: look first whether an earlier attempt happened. `intent`: save `CallStarted` right before. `before`: from then on the
    receiver may have forgotten the key, and the call is no longer begun by a machine.
    """

    call_id: str
    name: str
    args: Mapping[str, Any]
    key: str
    effect: str
    attempt: int
    intent: bool
    check: bool = False
    before: datetime | None = None


@dataclass(frozen=True, slots=True)
class RunCalls:
    """These may run now, side by side."""

    calls: tuple[RunCall, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """No I/O: consequences, folded into the append that caused them."""

    entries: tuple[r.Entry, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until` (None: before somebody outside acts). `needs`: what the code lacks. Status `running`: calls are in flight."""

    status: str
    reason: str
    until: datetime | None = None
    needs: str | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    status: str
    reason: str | None = None


Step = CallModel | RunCalls | Settle | Wait | Finish
_OneCall = RunCall | Settle | Wait


def next_step(run: Run, policy: Policy, now: datetime, in_flight: Collection[str] = ()) -> Step:
    """What to do next.

    Args:
        run: the journal's fold.
        policy: what this code knows.
        now: the store's clock, as its last answer gave it.
        in_flight: ids of the calls that this holder is running at this moment.
    """
    step = _next(run, policy, now, in_flight)
    if isinstance(step, Wait) and policy.limits.then == "fail" and (end := _wall_end(run, policy)) and now < end:
        return replace(step, until=min(step.until, end) if step.until else end)
    return step


def _next(run: Run, policy: Policy, now: datetime, in_flight: Collection[str]) -> Step:
    if run.ended and not run.calls:
        return Finish(run.ended.status, run.ended.reason)
    if run.ended:
        return Settle(closing(run, "not run"))
    if run.calls and run.stop_reason != m.TOOL_USE:
        return _not_to_run(run, policy)
    if not in_flight and (over := _wall(run, policy, now)):
        return over
    if run.calls:
        return _batch(run, policy, now, in_flight)
    return _turn(run, policy, now)


def settled(run: Run, policy: Policy, now: datetime, in_flight: Collection[str] = ()) -> tuple[Run, list[r.Entry], Step]:
    """Apply all that needs no I/O: the run after it, the entries to append, and the step that remains."""
    entries: list[r.Entry] = []
    while isinstance(step := next_step(run, policy, now, in_flight), Settle):
        for entry in step.entries:
            kept = r.stored(r.headed(entry, at=now))
            entries.append(kept)
            run = r.apply(run, kept)
        if len(entries) > SETTLE_LIMIT:
            raise AssertionError(f"run {run.id} does not settle: {type(entries[-1]).__name__} again and again")
    return run, entries, step


# ---- between batches -----------------------------------------------------------------------------------------------------


def _turn(run: Run, policy: Policy, now: datetime) -> Step:
    last = run.messages[-1] if run.messages else None
    answered = last is not None and last["role"] == "assistant"
    goes_on = answered and run.stop_reason in m.GOES_ON
    if answered and not goes_on and run.stop_reason not in m.FINISHED and not run.queued:
        return Settle((r.RunEnded("failed", _stopped(run)),))
    if run.queued and not goes_on:
        return Settle((r.MessageAdded(m.results_message((), _texts(run))),))
    if answered and not goes_on:
        assert last is not None
        problem = policy.output_problem(last)
        if problem is None:
            return Settle((r.RunEnded("done"),))
        if run.corrections >= MAX_CORRECTIONS:
            return Settle((r.RunEnded("failed", f"the answer is not of the output's type after {MAX_CORRECTIONS} corrections: {problem}"),))
        return Settle((r.MessageAdded(m.user(m.text(problem)), meta={"correction": True}),))
    if run.paused_in_a_row > MAX_PAUSES:
        return Settle((r.RunEnded("failed", f"the model paused its turn more than {MAX_PAUSES} times in a row"),))
    if run.model_error is not None and run.retry_at is None:
        return Settle((r.RunEnded("failed", run.model_error),))
    if step := _limits(run, policy, now):
        return step
    if run.retry_at and now < run.retry_at:
        until = min(filter(None, (run.retry_at, _wall_end(run, policy))))
        return Wait("waiting_for_timer", f"the model is asked again at {r.iso(run.retry_at)}: {run.model_error}", until)
    return version_step(run, policy) or CallModel()


def _stopped(run: Run) -> str:
    match run.stop_reason:
        case m.CUT:
            return "the answer was cut off at max_tokens; raise max_tokens, then send a message to go on"
        case "refusal":
            return "the model refused to answer (refusal)"
        case "model_context_window_exceeded":
            return "the messages no longer fit into the model's context window (model_context_window_exceeded)"
        case m.TOOL_USE:
            return "the model stopped for tool_use but asked for no tool"
        case None:
            return "the model gave no stop reason"
        case other:
            return f"the model stopped for an unknown reason: {other!r}"


def _texts(run: Run) -> list[dict[str, Any]]:
    return [block for sent in run.queued for block in m.blocks({"content": sent.content})]


def _not_to_run(run: Run, policy: Policy) -> Settle:
    """An answer with calls that did not end in `tool_use`: none of them is run, each is answered."""
    cut = run.stop_reason == m.CUT
    why = "The answer was cut off at max_tokens, nothing was run. Ask again." if cut else "not run"
    results = _answers(run, why, "refused")
    answered = (*results, _message(run, results))
    if run.stop_reason in m.GOES_ON or (cut and run.cut_in_a_row <= MAX_CUTS) or (run.queued and not cut):
        return Settle(answered)
    if run.stop_reason in m.FINISHED:
        problem = policy.output_problem(run.messages[-1])
        return Settle(
            (*answered, r.RunEnded("failed", f"the answer is not of the output's type: {problem}") if problem else r.RunEnded("done"))
        )
    reason = f"the answer was cut off at max_tokens {run.cut_in_a_row} times in a row" if cut else _stopped(run)
    return Settle((*answered, r.RunEnded("failed", reason)))


def _answers(run: Run, why: str, how: str) -> tuple[r.CallFinished, ...]:
    """A result for every open call. A begun one is never called "not run"."""
    out = []
    for call in run.calls:
        if call.result is None:
            begun = call.begun and call.effect != "read"
            text = "outcome unknown, not repeated" if begun else why
            out.append(r.CallFinished(call.id, text, is_error=True, how="unknown" if begun else how))
    return tuple(out)


def _message(run: Run, results: Iterable[r.CallFinished]) -> r.MessageAdded:
    new = {f.call_id: f for f in results}
    blocks = [_block(call, new.get(call.id) or call.result) for call in run.calls]
    return r.MessageAdded(m.results_message(blocks, _texts(run)))


def _block(call: Call, finished: r.CallFinished | None) -> dict[str, Any]:
    assert finished is not None, call.id
    content = finished.content
    if finished.is_error and not content:
        content = "failed, no reason given"  # an error without content is refused
    return m.tool_result(call.id, content, is_error=finished.is_error)


def closing(run: Run, why: str, how: str = "cancelled") -> tuple[r.Entry, ...]:
    """What answers every open call of a run that is over, so that its history stays valid. Queued texts come with it, or they were lost."""
    if not run.calls:
        return ()
    results = _answers(run, why, how)
    return (*results, _message(run, results))


# ---- versions --------------------------------------------------------------------------------------------------------------


def version_step(run: Run, policy: Policy) -> Settle | Wait | None:
    """Is this the code that ran it so far? Looked at only where it is about to run something."""
    if not policy.code or (run.code, run.agent_version, run.library, run.format) == (policy.code, policy.version, policy.library, r.FORMAT):
        return None
    if run.code and not may_go_on(policy.on_change, run.code, run.agent_version, policy.code, policy.version):
        was, now = (run.agent_version or "unnamed", policy.version or "unnamed")
        what = (
            f"version {was} began it, this is {now}"
            if was != now
            else f"it was changed since{f' (both are version {was})' if run.agent_version else ''}"
        )
        needs = f"code:{run.code}:{run.agent_version}"
        why = f'the code of {run.agent} is not the one that this run is held for (on_change="{policy.on_change}"): {what}'
        return Wait("waiting_for_code", why, None, needs)
    return Settle((r.VersionChanged(policy.version, policy.code, policy.library),))


def may_go_on(on_change: str, was_code: str, was_version: str, code: str, version: str) -> bool:
    """Does the rule of the code that is here let it go on with a run of that code and version?"""
    return on_change in ("continue", "warn") or (code == was_code if on_change == "hold" else version == was_version)


# ---- limits ---------------------------------------------------------------------------------------------------------------


def _wall_end(run: Run, policy: Policy) -> datetime | None:
    wall = policy.limits.wall
    if wall is None or run.started is None:
        return None
    granted = run.granted.get("wall")
    try:
        return run.started + (max(wall, timedelta(seconds=granted)) if isinstance(granted, int | float) else wall)
    except OverflowError:  # later than any instant: no limit
        return None


def _wall(run: Run, policy: Policy, now: datetime) -> Settle | None:
    """The wall limit with then="fail" ends a run wherever it stands, unless a begun call needs somebody's word first."""
    end = _wall_end(run, policy)
    if end is None or now < end or policy.limits.then != "fail" or any(c.begun for c in run.calls) or _over(run):
        return None
    results = closing(run, "not run", "refused")
    return Settle((*results, r.RunEnded("failed", f"limit of {g.duration(end - run.started)} reached" if run.started else "limit reached")))


def _over(run: Run) -> bool:
    """Is the answer there already? A finished answer is not thrown away for a limit."""
    return (
        not run.calls
        and bool(run.messages)
        and run.messages[-1]["role"] == "assistant"
        and run.stop_reason in m.FINISHED
        and not run.queued
    )


def _limits(run: Run, policy: Policy, now: datetime) -> Settle | Wait | None:
    """Counted from the journal, checked before each model call."""
    open_gate = next((x for x in run.gates if x.outcome is None), None)
    if open_gate:
        return _wait_or_move(open_gate, "waiting_for_budget", open_gate.opened.why or "a limit is reached", now)
    refused = next((x for x in run.gates if x.outcome in ("rejected", "expired")), None)
    if refused:
        note = getattr(refused.closed, "note", None)
        why = f"{refused.opened.why}; it was not raised" + (f": {note}" if note else "")
        return Settle((r.RunEnded("failed", why),))
    for name, used, limit, unit in _measures(run, policy, now):
        granted = run.granted.get(name)
        top = max(limit, granted) if isinstance(granted, int | float) else limit
        if used < top:
            continue
        amount = (
            f"{top} {unit if top != 1 else unit.removesuffix('s')}" if name != "wall" else g.duration(timedelta(seconds=top))
        )  # exact: 1000000 tokens, not 1e+06
        reason = f"limit of {amount} reached"
        return _ask_or_fail(run, policy, {"limit": name, "used": used, "raise_to": max(top + limit, used + limit)}, reason)
    return _repeats(run, policy) or _cost(run, policy)


def _ask_or_fail(run: Run, policy: Policy, args: dict[str, Any], reason: str) -> Settle:
    if policy.limits.then == "fail":
        return Settle((r.RunEnded("failed", reason),))
    opened = r.GateOpened(
        f"budget:{run.budget_gates + 1}", "budget", None, None, codec.digest(args), noun="budget", args=args, why=reason, guarded=policy.guarded,
        rungs=[{"role": policy.limits.role, "deadline": None, "rule": {}, "remind_at": []}])  # fmt: skip
    return Settle((opened,))


def _repeats(run: Run, policy: Policy) -> Settle | None:
    """The same calls with the same results again and again: a run that only burns tokens is stopped, whoever wrote its tools."""
    limit = policy.limits.repeats
    granted = run.granted.get("repeats")
    top = max(limit, granted) if isinstance(granted, int | float) and limit is not None else limit
    if top is None or run.repeats < top or all((t := policy.tools.get(name)) is not None and t.repeatable for name, _, _ in run.batch):
        return None
    names = ", ".join(dict.fromkeys(name for name, _, _ in run.batch))
    reason = f"{names} was called {run.repeats} times in a row with the same arguments and the same result"
    return _ask_or_fail(run, policy, {"limit": "repeats", "used": run.repeats, "raise_to": run.repeats + (limit or 1)}, reason)


def _cost(run: Run, policy: Policy) -> Settle | None:
    """Spent, perhaps spent and lost, and what the next call may cost. An unknown price fails closed."""
    cap = policy.limits.cost_usd
    granted = run.granted.get("cost_usd")
    if cap is None or granted == "no limit":
        return None
    top = max(cap, r.money(granted) or cap) if isinstance(granted, str) else cap
    used, following = run.spent + run.lost_usd, policy.next_cost(run)
    if following is None or run.unpriced:
        reason = f"limit of {cap} USD: the price of its model is unknown, so what it costs cannot be counted"
        return _ask_or_fail(
            run, policy, {"limit": "cost_usd", "used": None, "raise_to": "no limit"}, f"{reason}; give it by Outlast(prices=...)"
        )
    if used < top and used + following <= top:
        return None
    reason = (
        f"limit of {top} USD reached" if used >= top else f"limit of {top} USD: {used:f} are spent and the next call may cost {following:f}"
    )
    return _ask_or_fail(
        run, policy, {"limit": "cost_usd", "used": f"{used:f}", "raise_to": f"{max(top + cap, used + following):f}"}, reason
    )


def _measures(run: Run, policy: Policy, now: datetime) -> Iterable[tuple[str, float, float, str]]:
    limits = policy.limits
    if limits.model_calls is not None:
        yield "model_calls", run.model_calls + run.lost_calls, limits.model_calls, "model calls"
    if limits.tokens is not None:
        yield "tokens", run.input_tokens + run.output_tokens + run.lost_tokens, limits.tokens, "tokens"
    if limits.wall is not None and run.started is not None:
        yield "wall", (now - run.started).total_seconds(), limits.wall.total_seconds(), "seconds"


# ---- a batch of calls ------------------------------------------------------------------------------------------------------


def _batch(run: Run, policy: Policy, now: datetime, in_flight: Collection[str]) -> Step:
    open_calls = [c for c in run.calls if c.result is None]
    if not open_calls:
        return Settle((_message(run, ()),))
    steps = [(c, call_step(run, c, policy, now)) for c in open_calls if c.id not in in_flight]
    if entries := tuple(e for _, s in steps if isinstance(s, Settle) for e in s.entries):
        return Settle(entries)
    ready = _startable(run, policy, [s for _, s in steps if isinstance(s, RunCall)], in_flight)[
        : max(policy.parallel_calls - len(in_flight), 0)
    ]
    waits = [s for _, s in steps if isinstance(s, Wait)]
    other_code = version_step(run, policy) if ready else None
    if ready and (other_code is None or isinstance(other_code, Settle)):
        return other_code or RunCalls(tuple(ready))
    if isinstance(other_code, Wait):
        waits.append(other_code)
    until = min((w.until for w in waits if w.until), default=None)
    if in_flight or not waits:
        return Wait("running", f"{m.plural(len(in_flight), 'call')} running", until)
    first = min(waits, key=lambda w: STATUS_ORDER.index(w.status))
    needs = next((w.needs for w in waits if w.needs), None) if first.status == "waiting_for_code" else None
    return Wait(first.status, first.reason, until, needs)


def _startable(run: Run, policy: Policy, ready: Sequence[RunCall], in_flight: Collection[str]) -> list[RunCall]:
    """An at-most-once call waits for every earlier one of its batch that is begun and unanswered, or just about to begin."""
    wanted = {c.call_id: c for c in ready}
    out: list[RunCall] = []
    blocked = False
    for call in run.calls:
        mine = wanted.get(call.id)
        if mine and not (blocked and mine.effect == "at_most_once" and not mine.check):
            out.append(mine)
            blocked = blocked or mine.intent or mine.check
        tool = policy.tools.get(call.known_as)
        blocked = blocked or call.begun or (call.id in in_flight and (tool is None or tool.intent))
    return out


def call_step(run: Run, call: Call, policy: Policy, now: datetime) -> RunCall | Settle | Wait:
    """What comes next for one call of the open batch, whatever stands beside it."""
    tool = policy.tools.get(call.known_as)
    approval = call.gate("approval")
    if approval and approval.outcome is None:
        return _wait_or_move(approval, "waiting_for_approval", asks(call.known_as, approval), now)
    if approval and approval.outcome != "approved":
        return Settle((_refused(call, approval),))
    if (event := call.gate("event")) or (event := call.gate("run")):
        return _answered_from_outside(call, event, now)
    forgets_at = _forgets_at(call, tool)
    if call.begun or _asked_what_happened(call) or (forgets_at and now >= forgets_at):
        return _in_doubt(run, call, tool, policy, now)
    if call.retry_at and now < call.retry_at:
        until = min(call.retry_at, forgets_at) if forgets_at else call.retry_at
        return Wait("waiting_for_timer", f"{call.name} is tried again at {r.iso(call.retry_at)}", until)
    if tool is None:
        return _no_code(call)
    if changed := _other_arguments(run, call, tool, policy, now, forgets_at):
        return changed
    if asked := _ask_first(run, call, tool, policy, now):
        return asked
    if tool.child:
        if isinstance(held := version_step(run, policy), Wait):
            return held
        args = {"run_id": f"{run.id}:{call.id}", "agent": tool.child, "task": call.allowed.get("task")}
        return Settle((r.GateOpened(f"run:{call.id}", "run", call.id, call.name, codec.digest(args), noun="run", args=args),))
    return _run(run, call, tool)


def _refused(call: Call, approval: Gate) -> r.CallFinished:
    """A gate said no. Where it was asked anew, with other arguments, an earlier attempt may have happened all the same."""
    text = g.refusal(approval)
    if call.begun and call.effect != "read":
        return r.CallFinished(call.id, f"{text} An earlier attempt had begun; its outcome is unknown.", is_error=True, how="unknown")
    return r.CallFinished(call.id, text, is_error=True, how="refused")


ASK = GatePolicy(None, "call", None)  # of a run that asks before every effect, where the tool itself has no gate


def _gate_of(run: Run, tool: ToolPolicy) -> GatePolicy | None:
    if run.asks and tool.effect != "read":
        return replace(tool.gate or ASK, conditional=False)
    return tool.gate


def _ask_first(run: Run, call: Call, tool: ToolPolicy, policy: Policy, now: datetime) -> Settle | None:
    """Must a person be asked about the arguments that would run? What was asked about once, with other arguments, always is."""
    if call.gate("approval") is not None:
        return None
    gate = _gate_of(run, tool)
    past = next((x for x in reversed(call.gates[: call.past_gates]) if x.opened.kind == "approval"), None)
    if past is not None:
        return Settle(
            (
                open_approval(
                    call,
                    replace(gate or replace(ASK, role=past.role, noun=past.opened.noun), conditional=False),
                    now,
                    guarded=policy.guarded,
                ),
            )
        )
    if gate is None or call.waived:
        return None
    if gate.conditional and not _must_ask(tool, call.allowed):
        return Settle((r.GateWaived(call.id),))
    return Settle((open_approval(call, gate, now, guarded=policy.guarded),))


def _no_code(call: Call) -> Wait:
    return Wait("waiting_for_code", f"no worker knows the tool {call.known_as!r}", None, f"tool:{call.known_as}")


def _other_arguments(
    run: Run, call: Call, tool: ToolPolicy, policy: Policy, now: datetime, forgets_at: datetime | None
) -> Settle | Wait | None:
    """Arguments that older code left, where this code takes others: made new, and asked about anew; or the run is held."""
    if tool.upgrade is not None:
        if isinstance(held := version_step(run, policy), Wait):  # the code that it is held for takes the arguments as they are
            return held
        allowed = call.allowed
        try:
            args = codec.stored(dict(tool.upgrade(allowed)))[1]
        except Exception as e:  # noqa: BLE001 - a person's function: what it cannot convert is held for code that can
            failed = f"the arguments saved for {call.known_as} could not be upgraded for {tool.tool}: {type(e).__name__}: {e}"
            return Wait("waiting_for_code", failed, forgets_at, f"upgrade:{call.known_as}")
        if codec.canonical(args) != codec.canonical(allowed):
            if why := problem_of(tool, args):
                text = f"the arguments saved for {call.known_as}, upgraded for {tool.tool}, do not fit its schema: {why}"
                return Wait("waiting_for_code", text, forgets_at, f"upgrade:{call.known_as}")
            return Settle((r.CallUpgraded(call.id, tool.tool, args),))
    if changed := _schema_changed(call, tool, forgets_at):
        return changed
    return _ask_first(run, call, tool, policy, now) if call.begun and call.upgraded else None  # what is made again is something else


def _schema_changed(call: Call, tool: ToolPolicy, forgets_at: datetime | None) -> Wait | None:
    """Arguments that were valid when they were saved and no longer are."""
    why = problem_of(tool, call.allowed)
    needs = f"schema:{call.known_as}:{tool.schema_digest}"
    return (
        Wait("waiting_for_code", f"the arguments saved for {call.known_as} no longer fit its schema: {why}", forgets_at, needs)
        if why
        else None
    )


def problem_of(tool: ToolPolicy, args: Mapping[str, Any]) -> str | None:
    try:
        return tool.problem(args)
    except Exception as e:  # noqa: BLE001 - a person's validator: arguments that make it stumble are not valid
        return f"{type(e).__name__}: {e}"


def _must_ask(tool: ToolPolicy, args: Mapping[str, Any]) -> bool:
    try:
        return tool.when(args) is not False if tool.when else True
    except Exception:  # noqa: BLE001 - a person's function: whatever it raises, the gate stays closed
        return True


def _run(run: Run, call: Call, tool: ToolPolicy, *, check: bool = False) -> RunCall | Settle:
    key: Any = call.key or f"{run.id}:{call.id}"
    if call.key is None and tool.key:
        try:
            key = tool.key(call.allowed)
        except Exception as e:  # noqa: BLE001 - a person's function: without a key the call is surely not run
            why = f"{call.name} was not run: no key could be made of its arguments ({type(e).__name__}: {e})"
            return Settle((r.CallFinished(call.id, why, is_error=True, how="refused"),))
        if not isinstance(key, str) or not key:
            why = f"{call.name} was not run: its key must be a text that is not empty, not {key!r}"
            return Settle((r.CallFinished(call.id, why, is_error=True, how="refused"),))
    effect = tool.effect if call.effect is None else call.effect
    intent = tool.intent or effect == "at_most_once"
    return RunCall(call.id, call.known_as, call.allowed, key, effect, call.attempts + 1, intent, check, _forgets_at(call, tool))


def open_approval(call: Call, policy: GatePolicy, now: datetime, *, guarded: bool = False) -> r.GateOpened:
    rungs, closes_at = g.rungs(policy, now)
    return r.GateOpened(
        _gate_id(call, "approval"), "approval", call.id, call.known_as, codec.digest(call.asked), noun=policy.noun, rungs=rungs, closes_at=closes_at,
        args=dict(call.asked) if call.upgraded else None, guarded=guarded)  # fmt: skip


def _gate_id(call: Call, kind: r.GateKind) -> str:
    n = sum(x.opened.kind == kind for x in call.gates)
    return f"{kind}:{call.id}" + (f".{n + 1}" if n else "")


def _in_doubt(run: Run, call: Call, tool: ToolPolicy | None, policy: Policy, now: datetime) -> _OneCall:
    """Begun, and no result. What the receiver dedupes is made again; a check looks first; then only a person can say."""
    forgets_at = _forgets_at(call, tool)
    asked = _asked_what_happened(call)  # once a person was asked, it is the person who says
    if call.late is not None and not call.late.is_error and not asked:  # it happened, and this is what came of it: nobody need be asked
        return Settle((r.CallFinished(call.id, call.late.content),))
    forgotten = forgets_at is not None and now >= forgets_at
    if call.effect == "idempotent" and call.doubt is None and not forgotten and not asked:
        if tool is None:
            return _no_code(call)
        return _other_arguments(run, call, tool, policy, now, forgets_at) or _run(run, call, tool)
    if not asked and tool and tool.has_check and not call.checked and call.effect == "at_most_once":
        if call.may_act_until and now < call.may_act_until:
            return Wait(
                "waiting_for_timer",
                f"an earlier attempt of {call.name} may still act until {r.iso(call.may_act_until)}",
                call.may_act_until,
            )
        return _other_arguments(run, call, tool, policy, now, forgets_at) or _run(run, call, tool, check=True)
    gate = call.gate("verification")
    if gate is None or gate.outcome == "run_again":  # this doubt is a new one
        why = "its receiver may have forgotten the key" if call.effect == "idempotent" and call.doubt is None else call.doubt
        return Settle((_open_verification(call, tool, policy, why),))
    if gate.outcome is None:
        return _wait_or_move(gate, "waiting_for_verification", _unknown(call), now)
    if gate.outcome == "happened":
        return Settle((_happened(call, gate),))
    return Settle((r.CallFinished(call.id, "outcome unknown, not repeated", is_error=True, how="unknown"),))


def _asked_what_happened(call: Call) -> bool:
    """Is there a verification that is open, or answered with something else than "run again"?"""
    gate = call.gate("verification")
    return gate is not None and gate.outcome != "run_again"


def _forgets_at(call: Call, tool: ToolPolicy | None) -> datetime | None:
    """From then on the receiver would take the same key for a new request: no attempt is repeated by a machine."""
    if call.result or not tool or not tool.key_ttl or not call.first_started_at or call.effect != "idempotent":
        return None
    return call.first_started_at + tool.key_ttl


def _happened(call: Call, gate: Gate) -> r.CallFinished:
    closed = gate.closed
    if isinstance(closed, r.LateResult):
        return r.CallFinished(call.id, closed.content, is_error=closed.is_error)
    if isinstance(closed, r.GateDecided) and closed.has_result:
        content, is_error = codec.result_content(closed.result)
        return r.CallFinished(call.id, content, is_error=is_error, how="verified")
    return r.CallFinished(call.id, "done (confirmed by a person)", how="verified")


def _open_verification(call: Call, tool: ToolPolicy | None, policy: Policy, why: str | None) -> r.GateOpened:
    role = tool.gate.role if tool and tool.gate else (call.gates[0].role if call.gates else None)
    return r.GateOpened(
        _gate_id(call, "verification"), "verification", call.id, call.name, codec.digest(call.allowed), why=why, guarded=policy.guarded,
        args=dict(call.allowed), rungs=[{"role": role, "deadline": None, "rule": {}, "remind_at": []}])  # fmt: skip


def _answered_from_outside(call: Call, gate: Gate, now: datetime) -> _OneCall:
    opened, closed = gate.opened, gate.closed
    if isinstance(closed, r.EventReceived):
        content, is_error = codec.result_content(closed.data)
        return Settle((r.CallFinished(call.id, content, is_error=is_error, how="answered"),))
    if isinstance(closed, r.ChildFinished):
        return Settle((_child_result(call, closed),))
    if gate.outcome == "expired":
        content, is_error = codec.result_content((opened.args or {}).get("otherwise"))
        return Settle((r.CallFinished(call.id, content, is_error=is_error, how="answered"),))
    if gate.outcome is not None:
        return Settle((r.CallFinished(call.id, "cancelled", is_error=True, how="cancelled"),))
    if opened.kind == "run":
        return Wait("waiting_for_run", f"{call.name} waits for its own run {(opened.args or {}).get('run_id', '')}".rstrip())
    timer = (opened.args or {}).get("timer")
    event = (opened.args or {}).get("event")
    status, reason = (
        ("waiting_for_timer", f"{call.name} waits") if timer else ("waiting_for_event", f"{call.name} waits for the event {event}")
    )
    return _wait_or_move(gate, status, reason + (f" until {r.iso(opened.closes_at)}" if opened.closes_at else ""), now)


def _child_result(call: Call, closed: r.ChildFinished) -> r.CallFinished:
    if closed.status == "done":
        content, is_error = codec.result_content(closed.output)
        return r.CallFinished(call.id, content, is_error=is_error, how="answered")
    return r.CallFinished(call.id, f"{call.name} {closed.status}: {closed.reason or 'no reason given'}", is_error=True, how="answered")


def _wait_or_move(gate: Gate, status: str, reason: str, now: datetime) -> Settle | Wait:
    if entry := g.moved(gate, now):
        return Settle((entry,))
    return Wait(status, reason, g.next_at(gate))


def asks(name: str, gate: Gate) -> str:
    """The reason of a run that waits for an approval."""
    until = f" until {r.iso(gate.deadline)}" if gate.deadline else ""
    return f"{name} waits for {gate.role or 'a decision'}{until}"


def _unknown(call: Call) -> str:
    return f"{call.name} was started and its outcome is unknown" + (f": {call.doubt}" if call.doubt else "")


# ---- a model's answer ------------------------------------------------------------------------------------------------------


def heard(run: Run, answer: Any, policy: Policy) -> list[r.Entry]:
    """A model's answer as facts: the message, and a refusal for each call that can never run. Raises m.BadMessage, codec.Unstorable.

    A name that the model just made up and arguments that do not fit are answered here, in the append that saves the answer; the same met
    after a load means that the code changed, and is not the model's fault.
    """
    message, meta = m.as_answer(answer, used=run.messages.call_ids, seq=run.seq + 1)
    added = r.stored(r.MessageAdded(message, meta=meta))
    assert isinstance(added, r.MessageAdded)
    out: list[r.Entry] = [added]
    if meta.get("stop_reason") != m.TOOL_USE:
        return out
    for call in m.tool_uses(added.message):
        if why := _impossible(call, meta, policy):
            out += [r.CallFinished(call["id"], why, is_error=True, how="refused")]
        elif (tool := policy.tools[call["name"]]).upgrade is not None:
            out += [r.CallUpgraded(call["id"], tool.tool, _of_today(tool, call["input"]))]
    return out


def _impossible(call: Mapping[str, Any], meta: Mapping[str, Any], policy: Policy) -> str | None:
    tool = policy.tools.get(call["name"])
    if tool is None:
        known = sorted(name for name, x in policy.tools.items() if not x.tool)
        return f"{no_such_tool(call['name'])} Known tools: {', '.join(known) or 'none'}."
    if malformed := meta.get("malformed", {}).get(call["id"]):
        return f"{call['name']} was not run: {malformed['problem']}."
    if why := problem_of(tool, _of_today(tool, call["input"])):
        return f"{call['name']} was not run, its arguments are invalid: {why}"
    return None


def no_such_tool(name: str) -> str:
    """How the model is told that it made a name up."""
    return f"There is no tool {name!r}."


def _of_today(tool: ToolPolicy, args: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model that has read an older name in its history may use it still: with the arguments that it took, or with today's."""
    if tool.upgrade is None:
        return args
    try:
        upgraded = codec.stored(dict(tool.upgrade(args)))[1]
    except Exception:  # noqa: BLE001 - a person's function: what it cannot convert is taken as it is, and judged by the schema
        return args
    return upgraded if problem_of(tool, upgraded) is None else args
