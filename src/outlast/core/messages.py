"""Messages in the format of the Messages API, as plain dicts.

Unknown blocks and fields are kept untouched. This file owns the rules of the format: what a valid history is, what a stop reason means,
how a model's answer is brought into that form before it is saved (ids unique within the run, inputs that are objects), and how a batch of
results is put into one user message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

CALL_ID = re.compile(r"^[A-Za-z0-9_-]{1,64}\Z")  # not $: it would let a line break pass
FINISHED = frozenset({"end_turn", "stop_sequence"})  # the answer is whole
GOES_ON = frozenset({"pause_turn", "compaction"})  # send the list back unchanged
NO_ANSWER = "(no answer)"  # stands for an answer without content, which no later request may hold
TOOL_USE = "tool_use"  # the only reason that runs tools
CUT = "max_tokens"  # the answer was cut off: none of its calls is run


class BadMessage(ValueError):
    """A message or a list of messages that the Messages API would refuse. Says which one and why."""


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*blocks: Mapping[str, Any]) -> Message:
    return {"role": "user", "content": [dict(b) for b in blocks]}


def tool_result(call_id: str, content: Any, *, is_error: bool = False) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    if is_error:
        block["is_error"] = True
    return block


def blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The content as blocks; a bare string is one text block."""
    content = message.get("content")
    if isinstance(content, str):
        return [text(content)]
    return [b for b in content or () if isinstance(b, dict)]


def tool_uses(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls in an answer, in order. Calls that the provider's own server runs are not among them."""
    return [b for b in blocks(message) if b.get("type") == "tool_use"]


def said(message: Mapping[str, Any]) -> str:
    """All text of a message, joined."""
    return "".join(str(b.get("text", "")) for b in blocks(message) if b.get("type") == "text")


def as_content(value: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Text or content blocks that a person gave, checked. Raises BadMessage."""
    if isinstance(value, str):
        if not value.strip():
            raise BadMessage("the text is empty")
        return value
    if isinstance(value, list | tuple) and not value:
        raise BadMessage("the list is empty: a text or content blocks are needed")
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise BadMessage(f"must be a text or a list of content blocks, not {type(value).__name__}")
    for n, block in enumerate(value):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise BadMessage(f"content block {n} is not an object with a type")
        if block["type"] == "text" and not str(block.get("text") or "").strip():
            raise BadMessage(f"content block {n} is an empty text")
        if block["type"] in ("tool_result", "tool_use"):
            raise BadMessage(f"content block {n} is a {block['type']}: give a whole message list for that")
    return [dict(b) for b in value if isinstance(b, Mapping)]


def as_input(value: Any) -> list[Message]:
    """What starts a run, as a message list: a text, content blocks, or a whole history that is checked at once. Raises BadMessage."""
    if (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and value
        and all(isinstance(m, Mapping) and "role" in m for m in value)
    ):
        messages = [dict(m) for m in value]
        check_history(messages)
        return messages
    return [{"role": "user", "content": as_content(value)}]


def check_history(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a list that the API would refuse: every call is answered exactly once, in the very next user message, results first.

    The calls of the last message may be open: they are run, by their gates and effects. Raises BadMessage with the index of the bad message.
    """
    seen: set[str] = set()
    owed: list[str] = []
    for n, message in enumerate(messages):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise BadMessage(f"message {n}: role {role!r} is not user or assistant")
        content = message.get("content")
        if not isinstance(content, str | list) or not content:
            raise BadMessage(f"message {n}: content must be a text or a list of blocks, and not empty")
        for i, block in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(block, dict) or not isinstance(block.get("type"), str):
                raise BadMessage(f"message {n}: block {i} is not an object with a type")
            if block["type"] == "text" and not str(block.get("text") or "").strip():
                raise BadMessage(f"message {n}: block {i} is an empty text")
        results = [b for b in blocks(message) if b.get("type") == "tool_result"]
        if role == "user" or owed:
            _check_results(n, message, results, owed)
            owed = []
        if role == "user" and tool_uses(message):
            raise BadMessage(f"message {n}: a user message holds a tool_use")
        if role == "assistant":
            if results:
                raise BadMessage(f"message {n}: an assistant message holds a tool_result")
            for call in tool_uses(message):
                call_id = call.get("id")
                if not isinstance(call_id, str) or not CALL_ID.match(call_id) or call_id in seen:
                    raise BadMessage(f"message {n}: tool_use id {call_id!r} is missing, repeated or not {CALL_ID.pattern}")
                if not isinstance(call.get("name"), str) or not isinstance(call.get("input"), dict):
                    raise BadMessage(f"message {n}: tool_use {call_id} needs a name and an input object")
                seen.add(call_id)
                owed.append(call_id)
    if messages and messages[0].get("role") == "assistant":
        raise BadMessage("message 0: a history begins with a user message")


def _check_results(n: int, message: Mapping[str, Any], results: list[dict[str, Any]], owed: list[str]) -> None:
    ids = [b.get("tool_use_id") for b in results]
    if message.get("role") == "user" and sorted(map(str, ids)) == sorted(owed):
        if [b.get("type") for b in blocks(message)[: len(ids)]] != ["tool_result"] * len(ids):
            raise BadMessage(f"message {n}: its tool_result blocks must come first")
        return
    if missing := [i for i in owed if i not in ids]:
        raise BadMessage(f"message {n}: no tool_result for {', '.join(missing)} of message {n - 1}")
    raise BadMessage(
        f"message {n}: tool_result for {', '.join(str(i) for i in ids if i not in owed)} answers no call of the message before it"
    )


# ---- a model's answer ---------------------------------------------------------------------------------------------------


def as_answer(value: Any, *, used: Collection[str], seq: int) -> tuple[Message, dict[str, Any]]:
    """A model's answer as (message, meta), ready to be saved as checkpoint `seq`.

    `value`: a Messages API message as a dict or the SDK's object, its content blocks, or a text. The message is role and content and
    nothing else; everything that came beside (stop_reason, usage, id, …) goes to meta. Without a stop_reason key it follows from the
    content; present but null stays null. An answer without content, which every later request would be refused for, becomes NO_ANSWER
    and `meta["empty"]`. Ids of tool_use blocks that are empty, odd, or in `used` are renumbered; an input that is not an
    object becomes {} and what came is kept in `meta["malformed"]`. Raises BadMessage.
    """
    rest: dict[str, Any] = {}
    if not isinstance(value, str | list | tuple | Mapping):
        dump = getattr(value, "to_dict", None) or getattr(value, "model_dump", None)
        if dump is None:
            raise BadMessage(f"a model's answer must be a message, its blocks or a text, not {type(value).__name__}")
        try:
            value = dump(mode="json", warnings=False)
        except TypeError:
            value = dump()
    if isinstance(value, Mapping):
        rest = {k: v for k, v in value.items() if k not in ("role", "content", "type")}
        if value.get("role", "assistant") != "assistant":
            raise BadMessage(f"a model's answer has the role 'assistant', not {value['role']!r}")
        value = value.get("content")
    if not isinstance(value, str | list | tuple | None):
        raise BadMessage(f"the content of a model's answer must be a text or a list of blocks, not {type(value).__name__}")
    content = [text(value)] if isinstance(value, str) else [_block(b) for b in value or ()]
    content = [b for b in content if not (b.get("type") == "text" and not str(b.get("text") or "").strip())]
    new: set[str] = set()
    for n, block in enumerate(content):
        if block.get("type") == "tool_use":
            content[n] = _call(block, used, new, rest, f"call-{seq}-{n + 1}")
    if "stop_reason" not in rest:
        rest["stop_reason"] = TOOL_USE if any(b.get("type") == "tool_use" for b in content) else "end_turn"
    if not content:
        content, rest["empty"] = [text(NO_ANSWER)], True
    return {"role": "assistant", "content": content}, rest


def _block(block: Any) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        dump = getattr(block, "to_dict", None) or getattr(block, "model_dump", None)
        if isinstance(block, str):
            return text(block)
        if dump is None:
            raise BadMessage(f"a content block must be an object, not {type(block).__name__}")
        try:
            block = dump(mode="json", warnings=False)
        except TypeError:
            block = dump()
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise BadMessage("a content block of a model's answer must be an object with a type")
    return dict(block)


def _call(block: dict[str, Any], used: Collection[str], new: set[str], meta: dict[str, Any], fallback: str) -> dict[str, Any]:
    given = block.get("id")
    call_id = given if isinstance(given, str) and CALL_ID.match(given) else fallback
    base, n = call_id[:56], 2  # room for a suffix within 64 characters
    while call_id in used or call_id in new:
        call_id, n = f"{base}-{n}", n + 1
    new.add(call_id)
    if call_id != given:
        meta.setdefault("renumbered", {})[call_id] = given if isinstance(given, str) else None
    if not isinstance(block.get("name"), str) or not block["name"]:
        block = {**block, "name": str(block.get("name") or "unnamed")}
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        arguments, problem = _parsed(arguments)
        if problem:
            meta.setdefault("malformed", {})[call_id] = {"raw": block.get("input"), "problem": problem}
    return {**block, "id": call_id, "input": arguments}


def _parsed(raw: Any) -> tuple[dict[str, Any], str]:
    if isinstance(raw, str):
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as e:
            return {}, f"the arguments are not valid JSON ({e})"
        if isinstance(value, dict):
            return value, ""
        raw = value
    return {}, f"the arguments must be a JSON object, not {type(raw).__name__}"


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def results_message(results: Iterable[Mapping[str, Any]], texts: Iterable[Mapping[str, Any]]) -> Message:
    """The ONE user message that answers a batch: its results first, in the order of the calls, then what people said meanwhile."""
    return user(*results, *texts)
