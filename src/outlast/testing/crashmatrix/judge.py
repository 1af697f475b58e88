"""What a case did that the undisturbed run did not, in words that name the tool, the point, and what to declare instead.

What a crash may do, and nothing more: each death may cost one more call of the model; a `read` call may be made again; an `idempotent` one
may be made again with its key, if the world then looks the same
(where nobody looks, a repetition without the key is a finding); whatever is in doubt may be asked of a person first (a gate of kind
verification more); a lost call of the model counts for the run's limits, so a person may be asked for more (a gate of kind budget more).
Everything else is a finding.

Values that differ between two undisturbed runs (a time of day, a random number) are left out of the comparison: `changing` finds where.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.core.step import no_such_tool
from outlast.errors import UsageError
from outlast.testing.crashmatrix.life import Ended
from outlast.testing.crashmatrix.watch import ACTED, Attempt
from outlast.tools import Tool

_SHOWN = 160  # characters of a value in a finding
_LINES = 6  # values of a list in a finding
_UUID = re.compile(r"\b[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}\b")
Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """One run of the script: what is stored, and what `observe` saw afterwards."""

    ended: Ended
    observed: Any = None


@dataclass(frozen=True)
class Calm:
    """The undisturbed run, and what is different each time even then."""

    seen: Seen
    changing_messages: frozenset[Path_]
    changing_observed: frozenset[Path_]
    observes: bool
    tools: Mapping[str, Tool[..., Any]]


# ---- what changes by itself -------------------------------------------------------------------------------------------------------


Place = Callable[[int], str]  # in a list, as a part of a path


def anywhere(number: int) -> str:
    """Lists that may be longer after a crash: what is in them is the same kind of thing in every place."""
    return "*"


def changing(a: Any, b: Any, path: Path_ = (), place: Place = anywhere) -> frozenset[Path_]:
    """Where two values differ. A list counts as a whole where its length does."""
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        return frozenset().union(*(changing(a[name], b[name], (*path, str(name)), place) for name in a))
    if _listed(a) and _listed(b) and len(a) == len(b):
        return frozenset().union(*(changing(x, y, (*path, place(n)), place) for n, (x, y) in enumerate(zip(a, b, strict=True))))
    return frozenset() if a == b else frozenset([path])


def masked(value: Any, paths: frozenset[Path_], path: Path_ = (), place: Place = anywhere) -> Any:
    """The value without what changes by itself."""
    if path in paths:
        return "…"
    if not paths:
        return value
    if isinstance(value, Mapping):
        return {name: masked(v, paths, (*path, str(name)), place) for name, v in value.items()}
    if _listed(value):
        return [masked(v, paths, (*path, place(n)), place) for n, v in enumerate(value)]
    return value


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def at(path: Path_) -> str:
    return "".join(f"[{part}]" for part in path) or "its value"


# ---- one case ---------------------------------------------------------------------------------------------------------------------


def differences(calm: Calm, found: Seen, deaths: int) -> list[str]:
    """What is wrong with a case; each without the point, which the caller knows. Empty: as if nothing had happened."""
    was, now = calm.seen.ended, found.ended
    out = _effects(calm, found)
    if now.status != was.status:
        out.append(f"the run ends {now.status} ({now.reason}), undisturbed {was.status}")
    elif out:
        pass  # what an effect did twice shows in the messages too, and in nothing that would be news
    elif (told := _messages(calm, now)) is not None:
        out.append(told)
    elif not _same_statuses(now, was):
        out.append(f"the checkpoints pass the statuses {_paths(now)}, undisturbed {_paths(was)}")
    calls, calm_calls = Counter(now.model_calls), Counter(was.model_calls)
    if lost := calm_calls - calls:
        out.append(f"the model was never asked for turn {min(lost) + 1}")
    if (more := calls.total() - calm_calls.total()) > deaths:
        out.append(f"the model was called {calls.total()} times, undisturbed {calm_calls.total()}: {deaths} more at most, not {more}")
    if (told := _gates(was, now)) is not None:
        out.append(told)
    out += [f"the store finds something wrong with itself: {problem}" for problem in now.problems]
    return out


def _messages(calm: Calm, now: Ended) -> str | None:
    was = calm.seen.ended
    unsaid = {a.call for a in now.attempts if a.event in ACTED and not a.sayable} & _verified(now, "happened")
    for run_id, before in was.messages.items():
        after = now.messages.get(run_id, [])
        for number, (x, y) in enumerate(zip(before, after, strict=False)):
            here = [path for path in calm.changing_messages if path[0] == run_id and path[1:2] in ((), (str(number),))]
            paths = frozenset(path[2:] for path in here)
            here_was, here_is = (_without_results(run_id, message, unsaid) for message in (x, y))
            if masked(here_was, paths, place=str) != masked(here_is, paths, place=str):
                return f"message {number + 1} of {run_id} is {_short(y)}, undisturbed {_short(x)}"
        if len(before) != len(after):
            return f"{run_id} has {len(after)} messages, undisturbed {len(before)}"
    return None


def _without_results(run_id: str, message: Mapping[str, Any], calls: Collection[tuple[str, str]]) -> Mapping[str, Any]:
    """What a person could not hand in is in neither: that the call has been answered is."""
    if not calls:
        return message
    return {**message, "content": [
        {"type": block["type"], "tool_use_id": block["tool_use_id"]}
        if isinstance(block, Mapping) and (run_id, block.get("tool_use_id")) in calls
        else block
        for block in message["content"]
    ]}  # fmt: skip


def _gates(was: Ended, now: Ended) -> str | None:
    def asked(ended: Ended) -> set[tuple[str, ...]]:
        return {tuple(map(str, gate)) for gate in ended.gates if gate[2] != "verification"}

    budgets = [sum(gate[2] == "budget" for gate in ended.gates) for ended in (was, now)]
    settled = {attempt.call for attempt in now.attempts if attempt.event == "waits"} & _verified(now)  # by a person: nothing is waited for
    unneeded = {gate for gate in asked(was) if gate[2] == "event" and (gate[0], gate[5]) in settled}
    lost = {gate for gate in asked(was) - asked(now) - unneeded if gate[2] != "budget"}
    more = {gate for gate in asked(now) - asked(was) if gate[2] != "budget"}
    if lost or more:
        return f"the gates differ: {_short(sorted(more))}, undisturbed {_short(sorted(lost))}"
    if budgets[1] < budgets[0]:
        return f"{budgets[1]} times more budget was asked for, undisturbed {budgets[0]} times"
    return None


def _verified(ended: Ended, *outcomes: str) -> set[tuple[str, str]]:
    """The calls whose outcome a person said, or said to be one of these."""
    return {
        (run_id, call_id)
        for run_id, _, kind, _, outcome, call_id in ended.gates
        if kind == "verification" and (not outcomes or outcome in outcomes)
    }


def _same_statuses(now: Ended, was: Ended) -> bool:
    """Of each checkpoint; where either waits for more budget, a lost call of the model has only moved that."""
    budget = "waiting_for_budget"
    return now.statuses.keys() == was.statuses.keys() and all(
        len(statuses) == len(was.statuses[run_id])
        and all(x == y or budget in (x, y) for x, y in zip(statuses, was.statuses[run_id], strict=True))
        for run_id, statuses in now.statuses.items()
    )


def _paths(ended: Ended) -> str:
    return "; ".join(", ".join(statuses) for statuses in ended.statuses.values())


# ---- effects ----------------------------------------------------------------------------------------------------------------------


def _effects(calm: Calm, found: Seen) -> list[str]:
    """Calls that acted more often or less often than undisturbed, by their effect and by what the world shows."""
    was, now = _returned(calm.seen.ended), _returned(found.ended)
    repeated = [call for call in now if len(now[call]) > len(was.get(call, []))]
    lost = [call for call in was if len(now.get(call, [])) < len(was[call])]
    shown = calm.observes and masked(found.observed, calm.changing_observed) != masked(calm.seen.observed, calm.changing_observed)
    out = [f"{was[call][0].tool} ({call[1]}): acted {len(now.get(call, []))} times, undisturbed {len(was[call])}: lost" for call in lost]
    suspects = [call for call in repeated if now[call][0].effect != "read"] or repeated
    for call in repeated:
        attempts = now[call]
        if attempts[0].effect == "at_most_once":
            out.append(_twice(calm, found, attempts, shown=shown))
        elif len({a.args for a in attempts}) > 1:
            out.append(f"{attempts[0].tool} ({call[1]}): sent {len(attempts)} times with other arguments each time")
        elif (shown and call in suspects) or (not calm.observes and call in suspects and _unkeyed(attempts)):
            out.append(_twice(calm, found, attempts, shown=shown))
    if shown and not out:
        out.append(f"observe sees something else, and no tool ran more often or less often; {_world(calm, found)}")
    return out


def _returned(ended: Ended) -> dict[tuple[str, str], list[Attempt]]:
    out: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in ended.attempts:
        if attempt.event in ACTED:
            out.setdefault(attempt.call, []).append(attempt)
    return out


def _unkeyed(attempts: Sequence[Attempt]) -> bool:
    """Repeated without a key that another system could know it by."""
    return attempts[0].effect == "idempotent" and not any(a.read_key for a in attempts)


def _twice(calm: Calm, found: Seen, attempts: Sequence[Attempt], *, shown: bool) -> str:
    tool, call_id, effect = attempts[0].tool, attempts[0].call_id, attempts[0].effect
    made = _keys_made(calm, found, attempts) if effect == "idempotent" else []
    what = f"{tool} ({call_id}): sent {len(attempts)} times"
    if made:
        what += f", each time with another key: {' and '.join(made)}"
    known = calm.tools.get(tool)
    declare = _declare(tool, attempts, effect, made, checks=known is not None and known.check is not None)
    if shown:
        return f"{what}; {declare}; {_world(calm, found)}"
    alone = effect == "idempotent" and not calm.observes
    return f"{what}; {declare}" + ("; where it is harmless without a key, let observe show that the world is the same" if alone else "")


def _declare(tool: str, attempts: Sequence[Attempt], effect: str, made: list[str], *, checks: bool) -> str:
    key = attempts[0].key
    other = 'if it takes no key, declare effect="at_most_once" and a check= that looks for it'
    if effect == "read":
        return f'it is declared effect="read" and changes the world: declare effect="idempotent" and send ctx.idempotency_key; {other}'
    if effect == "at_most_once":
        if checks:
            return "its check= said of an attempt that had come back that it did not happen: it looks too early, or in another place"
        return "an at-most-once call was repeated, which must not happen: please report it"
    if made:
        return (
            f"a key of its own for each attempt tells the other system nothing: send ctx.idempotency_key ({key} on every attempt); {other}"
        )
    if not any(a.read_key for a in attempts):
        return f'it is declared effect="idempotent" and never used ctx.idempotency_key: send that key ({key}) with the request; {other}'
    return (
        f'it is declared effect="idempotent", and the other system acts again on the same key ({key}): '
        'declare effect="at_most_once" and a check= that looks for it'
    )


def _keys_made(calm: Calm, found: Seen, attempts: Sequence[Attempt]) -> list[str]:
    """Keys that the tool made itself, one an attempt: random UUIDs, or whatever of that form `observe` saw more of than undisturbed."""
    if any(a.read_key for a in attempts):
        return []
    if all(a.made for a in attempts):
        return [uuid for a in attempts for uuid in a.made]
    before, after = _UUID.findall(repr(calm.seen.observed)), _UUID.findall(repr(found.observed))
    return list(dict.fromkeys(after)) if len(set(after)) > len(set(before)) else []


def _world(calm: Calm, found: Seen) -> str:
    """What `observe` saw more or less of; where something is there twice, both."""
    was, now = calm.seen.observed, found.observed
    if _listed(was) and _listed(now):
        more = _left(now, was, calm)
        less = _left(was, now, calm)
        if more or less:
            parts = [f"there {_short_list(more)}" if more else "", f"missing {_short_list(less)}" if less else ""]
            return "observe: " + ", ".join(part for part in parts if part)
    return f"observe: {_short(now)}, undisturbed {_short(was)}"


def _left(these: Sequence[Any], those: Sequence[Any], calm: Calm) -> list[Any]:
    """What is in `these` more often than in `those`, with everything that looks the same: both of a pair."""
    mask: Callable[[Any], str] = lambda value: repr(masked([value], calm.changing_observed))  # noqa: E731 - a name for one line
    here, there = Counter(map(mask, these)), Counter(map(mask, those))
    return [value for value in these if here[mask(value)] > there[mask(value)]]


def _short_list(values: Sequence[Any]) -> str:
    shown = [_short(value) for value in values[:_LINES]]
    return " and ".join(shown) + (f" and {len(values) - _LINES} more" if len(values) > _LINES else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


# ---- before the first death ---------------------------------------------------------------------------------------------------------


def undisturbed(first: Seen, second: Seen, tools: Mapping[str, Tool[..., Any]], *, observes: bool) -> tuple[Calm, list[str], list[str]]:
    """What to compare with; findings; and notes on what is not compared.

    Raises:
        UsageError: the run fails when nobody disturbs it.
    """
    for seen in (first, second):
        if seen.ended.status == "failed":
            raise UsageError(f"the run fails when nobody disturbs it: {seen.ended.reason}", hint="is the script whole?")
    messages = changing(first.ended.messages, second.ended.messages, place=str)
    observed = changing(first.observed, second.observed) if observes else frozenset()
    calm = Calm(first, messages, observed, observes, tools)
    if len(first.ended.model_calls) != len(second.ended.model_calls):
        raise UsageError("two undisturbed runs call the model a different number of times: there is nothing to compare with",
                         hint="a tool answers differently each time; give it a world of its own with deps=")  # fmt: skip
    findings = [
        f"observe must see the same after every run, and does not after two that nobody disturbed: {at(path)} is "
        f"{' and then '.join(_short(value) for value in _both(path, first.observed, second.observed))}. Leave out what changes by itself; "
        "a key made anew each time is no key: send ctx.idempotency_key"
        for path in sorted(observed)
    ]  # fmt: skip
    silent = _silent(first.ended, tools)
    findings += _untested(first.ended, silent)
    notes = [f"{_where(first.ended, path)} changes from run to run and was not compared" for path in sorted(messages)]
    failed = Counter(
        f"{a.tool} ({a.call_id}) failed in the undisturbed run: {a.result}" for a in first.ended.attempts if a.event == "raised"
    )
    notes += [told + f", {count} times" * (count > 1) for told, count in failed.items()]
    notes += [f"{name} ({call[1]}) was called and did not run: {_short(told)}" for call, (name, told) in silent.items()]
    return calm, findings, notes


def _silent(ended: Ended, tools: Mapping[str, Tool[..., Any]]) -> dict[tuple[str, str], tuple[str, Any]]:
    """Calls of the model that began no tool, and that nobody refused: (the name, what the model was told)."""
    begun = {attempt.call for attempt in ended.attempts}
    held = {(run_id, tool) for run_id, _, kind, tool, outcome, _ in ended.gates if kind == "approval" and outcome != "approved"}
    return {
        call: (name, told)
        for call, (name, told) in _called(ended).items()
        if call not in begun and (call[0], name) not in held and (name not in tools or tools[name].agent is None)
    }


def _untested(ended: Ended, silent: Mapping[tuple[str, str], tuple[str, Any]]) -> list[str]:
    """Calls that could show nothing, whatever is killed: a test of them would be green without a reason."""
    returned = {a.call for a in ended.attempts if a.event in ACTED}
    broke = {a.call: a for a in ended.attempts if a.event == "raised" and not str(a.result).startswith("CancelledError:")}
    out = [
        f"{a.tool} ({a.call_id}) never came back in the undisturbed run ({a.result}): what it does was not tested; give it what it needs "
        "(deps=), or raise ToolFailed where that is its answer"
        for call, a in broke.items()
        if call not in returned and a.effect != "read"
    ]  # fmt: skip
    out += [
        f"the model called {name} ({call[1]}), and there is no such tool: nothing of it was tested; is it called something else by now?"
        for call, (name, told) in silent.items()
        if str(told).startswith(no_such_tool(name))
    ]
    return out


def _called(ended: Ended) -> dict[tuple[str, str], tuple[str, Any]]:
    """By (run, call): the tool that the model called, and what it was told."""
    called: dict[tuple[str, str], tuple[str, Any]] = {}
    for run_id, messages in ended.messages.items():
        for block in (block for message in messages for block in message["content"] if isinstance(block, Mapping)):
            if block.get("type") == "tool_use":
                called[run_id, block["id"]] = (block["name"], None)
            elif block.get("type") == "tool_result" and (call := (run_id, block["tool_use_id"])) in called:
                called[call] = (called[call][0], block.get("content"))
    return called


def _where(ended: Ended, path: Path_) -> str:
    """A place in the messages, for people: of a tool's result, whose it is."""
    run_id, *inside = path
    if not inside:
        return f"the number of messages of {run_id}"
    block: Any = ended.messages[run_id][int(inside[0])]
    if inside[1:2] == ["content"] and len(inside) > 2:
        block = block["content"][int(inside[2])]
        if (call := _called(ended).get((run_id, block.get("tool_use_id", "")))) is not None:
            return f"the result of {call[0]} ({block['tool_use_id']})"
    return f"message {int(inside[0]) + 1} of {run_id}"


def _both(path: Path_, *values: Any) -> list[Any]:
    """The first pair of values at this path that differ."""
    pairs: list[tuple[Any, ...]] = [values]
    for part in path:
        nxt: list[tuple[Any, ...]] = []
        for pair in pairs:
            if part == "*" and all(_listed(v) for v in pair):
                nxt += list(zip(*pair, strict=False))
            elif all(isinstance(v, Mapping) for v in pair):
                nxt.append(tuple(v[next(k for k in v if str(k) == part)] for v in pair))
        pairs = nxt
    return list(next(pair for pair in pairs if pair[0] != pair[1]))
