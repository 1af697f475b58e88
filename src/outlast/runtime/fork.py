"""A fork: a new run with another one's history up to a checkpoint.

What stands in that history happened and is not done again: the messages come with their results. Calls that the last message leaves open are
new calls, under the fork's own keys; only a refusal that was saved with them (no such tool, arguments that do not fit) comes along. Limits,
grants, gates and decisions are not history: the fork begins with none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outlast.core import messages as m
from outlast.core import run as r
from outlast.errors import UsageError

ELSEWHERE = ("container", "malformed")  # of a message's meta: what belongs to the run that it came from


def history(source: Sequence[r.Entry], at: int, edit: Mapping[str, Any] | None, *, run_id: str) -> list[r.Entry]:
    """The entries behind `RunStarted`: messages 1 to `at`, the last one as `edit` says. Raises UsageError."""
    messages = [e for e in source if isinstance(e, r.MessageAdded)]
    if isinstance(at, bool) or not isinstance(at, int) or not 1 <= at <= len(messages):
        raise UsageError(f"at must be a checkpoint of run {run_id}, from 1 to {len(messages)}, not {at!r}", run_id=run_id)
    kept: list[r.Entry] = [_imported(e) for e in messages[:at]]
    if edit is not None:
        kept[-1] = _edited(edit, messages[at - 1])
    try:
        m.check_history([e.message for e in kept if isinstance(e, r.MessageAdded)])
    except m.BadMessage as e:
        what = "edit_message does not fit behind the messages before it" if edit is not None else f"run {run_id} cannot be forked at {at}"
        raise UsageError(f"{what}: {e}", run_id=run_id) from None
    return kept if edit is not None else [*kept, *_refusals(source, messages, at)]


def _imported(entry: r.MessageAdded) -> r.MessageAdded:
    meta = {k: v for k, v in (entry.meta or {}).items() if k not in ELSEWHERE}
    return r.MessageAdded(entry.message, meta={**meta, "imported": True} if entry.message["role"] == "assistant" else meta or None)


def _edited(edit: Mapping[str, Any], instead_of: r.MessageAdded) -> r.MessageAdded:
    if not isinstance(edit, Mapping) or edit.get("role") != instead_of.message["role"] or not isinstance(edit.get("content"), str | list):
        raise UsageError(
            f'edit_message must be a message of the role {instead_of.message["role"]}: {{"role": ..., "content": ...}}, not {edit!r:.100}'
        )
    message = {"role": edit["role"], "content": edit["content"]}
    if message["role"] != "assistant":
        return r.MessageAdded(message)
    stop_reason = m.TOOL_USE if m.tool_uses(message) else "end_turn"
    return r.MessageAdded(message, meta={"imported": True, "stop_reason": stop_reason})


def _refusals(source: Sequence[r.Entry], messages: Sequence[r.MessageAdded], at: int) -> list[r.Entry]:
    """Of the calls of message `at`: those that were answered in the very append that saved it, since they could never run."""
    out: list[r.Entry] = []
    answers = {b.get("tool_use_id"): b for x in messages[at : at + 1] for b in m.blocks(x.message) if b.get("type") == "tool_result"}
    for entry in source[source.index(messages[at - 1]) + 1 :]:
        if not isinstance(entry, r.CallFinished) or entry.how != "refused":
            break
        content = entry.content if entry.content is not None else answers.get(entry.call_id, {}).get("content")
        out.append(r.CallFinished(entry.call_id, content, is_error=True, how="refused"))
    return out
