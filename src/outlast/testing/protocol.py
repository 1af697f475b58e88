"""The rules of the Messages API, as `FakeMessagesAPI` checks them: stricter than the provider.

`check_request` looks at one request's body in the light of what was answered before, and raises `Violation` with the name of the rule:

    body-is-an-object      model                   max-tokens              known-fields            system
    tool-schema            messages                message-fields          roles-alternate         system-role
    ends-with-user         content-not-empty       block                   block-fields            text-not-empty
    unicode                call-id                 call-id-unique          call-input              call-has-schema
    calls-answered         results-first           no-result-without-call  one-result-per-call     results-in-order
    result-content         answer-unchanged

Stricter, because the provider forgives some of it today: results must come in the order of their calls, assistant messages stand alone
(user messages in a row are merged by the provider: what is said after a cancelled batch follows its results), and an answer must come
back exactly as it was sent: every block and field, numbers (1.0 is not 1) and the order of a call's arguments. The
order of a block's own keys is free: the provider's SDK does not keep it either. Three repairs of an answer that no client could send
back are allowed: an id that is malformed or was used before, an input that is not an object (comes back as `{}`), and characters that
no database stores (NUL and lone surrogates come back as U+FFFD).

Pure: no I/O, and one function a subject. https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

# What the API of November 2026 takes, beta fields included; anything else is refused there too ("Extra inputs are not permitted").
_BODY_FIELDS = frozenset(
    "model messages max_tokens system tools tool_choice metadata stop_sequences stream temperature top_k top_p thinking service_tier"
    " container context_management mcp_servers output_config output_format inference_geo cache_control speed diagnostics betas"
    " compaction fallbacks fallback_credit_token billing_policy thread".split()
)
_BLOCK_FIELDS = {
    "text": frozenset({"type", "text", "cache_control", "citations"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
}
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# After these the list goes back unchanged, so that an answer stands at its end, and the next one right behind it.
_GOES_ON = {"pause_turn", "compaction"}


class Violation(Exception):
    """A request broke `rule`, at `where` (for instance `messages.3.content.0`)."""

    def __init__(self, rule: str, where: str, text: str) -> None:
        super().__init__(f"{where}: {text} [rule: {rule}]")
        self.rule = rule
        self.where = where


@dataclass(frozen=True, slots=True)
class SentAnswer:
    """One answer that was sent: its blocks and stop reason as on the wire, and the tools that its request declared."""

    content: list[Any]
    stop_reason: str | None
    declared: frozenset[str]


SentAnswers = Mapping[int, Sequence[SentAnswer]]  # by the number of assistant messages that stood before the answer


def check_request(body: Any, sent: SentAnswers) -> None:
    """Raise `Violation` unless the body follows every rule; the first broken one in the order of the messages is named."""
    if not isinstance(body, dict):
        _refuse("body-is-an-object", "body", "must be a JSON object")
    _check_unicode(body, "body")
    _check_fields(body)
    declared = _check_tools(body.get("tools", []))
    _Conversation(declared, sent).check(body["messages"])


def canonical(value: Any, *, ordered: bool = False) -> str:
    """The value as one text that is equal where the JSON is: 1, 1.0 and true differ, 10**20 is exact.

    Keys are sorted, except in the `input` of a call (and everywhere with `ordered`): the order of arguments is part of it.
    """
    if isinstance(value, Mapping):
        call = str(value.get("type", "")).endswith("tool_use")
        keys = list(value) if ordered else sorted(value)
        parts = (f"{json.dumps(key)}:{canonical(value[key], ordered=ordered or (call and key == 'input'))}" for key in keys)
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(canonical(item, ordered=ordered) for item in value) + "]"
    return json.dumps(value)


def _refuse(rule: str, where: str, text: str) -> NoReturn:
    raise Violation(rule, where, text)


def _check_unicode(value: Any, where: str) -> None:
    if isinstance(value, str) and _LONE_SURROGATE.search(value):
        _refuse("unicode", where, "a lone surrogate is no text")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_unicode(key, where)
            _check_unicode(item, f"{where}.{key}")
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check_unicode(item, f"{where}.{i}")


def _check_fields(body: dict[str, Any]) -> None:
    if not isinstance(body.get("model"), str) or not body["model"]:
        _refuse("model", "model", "must be a non-empty string")
    limit = body.get("max_tokens")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        _refuse("max-tokens", "max_tokens", "must be a positive integer")
    unknown = sorted(set(body) - _BODY_FIELDS)
    if unknown:
        _refuse("known-fields", unknown[0], "extra inputs are not permitted")
    system = body.get("system", "x")
    texts = [system] if isinstance(system, str) else [block.get("text") for block in system] if isinstance(system, list) else [None]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        _refuse("system", "system", "must be a non-empty text, or text blocks that are not empty")
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        _refuse("messages", "messages", "at least one message is required")


def _check_tools(tools: Any) -> frozenset[str]:
    if not isinstance(tools, list):
        _refuse("tool-schema", "tools", "must be a list")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where = f"tools.{i}"
        if not isinstance(tool, dict):
            _refuse("tool-schema", where, "must be an object")
        name = tool.get("name")
        ours = tool.get("type", "custom") == "custom"  # others are run by the provider and have a schema there
        if ours and (not isinstance(name, str) or not _ID.fullmatch(name)):
            _refuse("tool-schema", f"{where}.name", "must match ^[a-zA-Z0-9_-]{1,64}$")
        if name in names:
            _refuse("tool-schema", f"{where}.name", f"tool names must be unique, and {name!r} is there twice")
        schema = tool.get("input_schema")
        if ours and (not isinstance(schema, dict) or schema.get("type") != "object"):
            _refuse("tool-schema", f"{where}.input_schema", 'must be a JSON schema of type "object"')
        if isinstance(name, str):
            names.add(name)
    return frozenset(names)


class _Conversation:
    """Goes through the messages of one request in order."""

    def __init__(self, declared: frozenset[str], sent: SentAnswers) -> None:
        self._declared = declared
        self._sent = sent
        self._answers = 0  # assistant messages so far
        self._ids: set[str] = set()  # of the calls so far
        self._open: list[str] = []  # calls of the last assistant message, in order
        self._goes_on = False  # the last assistant message was sent by us, and to be sent back as it is

    def check(self, messages: list[Any]) -> None:
        before = ""
        for i, message in enumerate(messages):
            where = f"messages.{i}"
            blocks = self._check_shape(message, where)
            role = message["role"]
            if self._open and role != "user":
                self._refuse_unanswered(self._open, where)
            self._check_role(role, before, where)
            if role == "user":
                self._check_user(blocks, f"{where}.content")
            elif role == "assistant":
                self._check_assistant(blocks, f"{where}.content")
            before = role
        last = f"messages.{len(messages) - 1}"
        if self._open:
            self._refuse_unanswered(self._open, last)
        if before == "assistant" and not self._goes_on:
            _refuse("ends-with-user", last, "the conversation must end with a user message")

    def _check_shape(self, message: Any, where: str) -> list[dict[str, Any]]:
        """The message's blocks; a text is one block."""
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            named = sorted(set(message) ^ {"role", "content"}) if isinstance(message, dict) else message
            _refuse("message-fields", where, f"a message is role and content, nothing less and nothing else: {named}")
        content = message["content"]
        if not content:
            _refuse("content-not-empty", f"{where}.content", "messages must have non-empty content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            _refuse("block", f"{where}.content", "must be a text or a list of blocks")
        for i, block in enumerate(content):
            self._check_block(block, f"{where}.content.{i}", ours=message["role"] != "assistant")
        return content

    def _check_block(self, block: Any, where: str, *, ours: bool) -> None:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            _refuse("block", where, "a content block is an object with a type")
        kind = block["type"]
        if kind == "text" and not (isinstance(block.get("text"), str) and block["text"].strip()):
            _refuse("text-not-empty", where, "text content blocks must contain non-whitespace text")
        if not ours:
            return
        unknown = sorted(set(block) - _BLOCK_FIELDS.get(kind, frozenset(block)))
        if unknown:
            _refuse("block-fields", f"{where}.{unknown[0]}", "extra inputs are not permitted")
        if kind in {"tool_use", "thinking", "redacted_thinking"}:
            _refuse("block", where, f"{kind} blocks are the assistant's")

    def _check_role(self, role: str, before: str, where: str) -> None:
        if role not in {"user", "assistant", "system"}:
            _refuse("roles-alternate", where, f"unknown role {role!r}")
        if role == "system":
            if before != "user":
                _refuse("system-role", where, "a system message stands right behind a user message")
            return
        # Behind a system message comes what comes behind the user message before it.
        before = "user" if before == "system" else before
        if role == "assistant" and before == "":
            _refuse("roles-alternate", where, "the first message must be the user's")
        if role == "assistant" and before == "assistant" and not self._goes_on:
            _refuse("roles-alternate", where, "two assistant messages in a row, and the first did not pause")

    def _check_user(self, blocks: list[dict[str, Any]], where: str) -> None:
        answered: list[str] = []
        for i, block in enumerate(blocks):
            if block["type"] != "tool_result":
                continue
            at, call = f"{where}.{i}", block.get("tool_use_id")
            if call not in self._open:
                _refuse("no-result-without-call", at, f"{call!r} is no call of the message right before")
            if call in answered:
                _refuse("one-result-per-call", at, f"{call!r} has a second result")
            if i != len(answered):
                _refuse("results-first", at, "tool_result blocks stand before everything else in a message")
            self._check_result(block, at)
            answered.append(call)
        missing = [call for call in self._open if call not in answered]
        if missing:
            self._refuse_unanswered(missing, where)
        if answered != self._open:
            _refuse("results-in-order", where, f"results {answered} are not in the order of the calls {self._open}")
        self._open = []

    def _refuse_unanswered(self, calls: list[str], where: str) -> NoReturn:
        _refuse("calls-answered", where, f"these calls have no tool_result in the very next message: {', '.join(calls)}")

    def _check_result(self, block: dict[str, Any], where: str) -> None:
        content = block.get("content", "")
        if not isinstance(block.get("is_error", False), bool):
            _refuse("result-content", where, "is_error must be true or false")
        if block.get("is_error") and not content:
            _refuse("result-content", where, "content cannot be empty if is_error is true")
        if isinstance(content, str):
            return
        if not isinstance(content, list):
            _refuse("result-content", where, "content must be a text or a list of blocks")
        for i, inner in enumerate(content):
            self._check_block(inner, f"{where}.content.{i}", ours=True)
            if inner["type"] in {"tool_result", "server_tool_use"}:
                _refuse("result-content", f"{where}.content.{i}", f"a {inner['type']} block cannot be a result")

    def _check_assistant(self, blocks: list[dict[str, Any]], where: str) -> None:
        answer = self._check_unchanged(blocks, where)
        for i, block in enumerate(blocks):
            at = f"{where}.{i}"
            if block["type"] == "tool_result":
                _refuse("block", at, "tool_result blocks are the user's")
            if block["type"] == "tool_use":
                self._check_call(block, at, answer)
        self._goes_on = answer is not None and answer.stop_reason in _GOES_ON
        self._answers += 1

    def _check_call(self, block: dict[str, Any], where: str, answer: SentAnswer | None) -> None:
        call, name = block.get("id"), block.get("name")
        if not isinstance(call, str) or not _ID.fullmatch(call):
            _refuse("call-id", f"{where}.id", f"{call!r} does not match ^[a-zA-Z0-9_-]{{1,64}}$")
        if call in self._ids:
            _refuse("call-id-unique", f"{where}.id", f"{call!r} was used before")
        if not isinstance(block.get("input"), dict):
            _refuse("call-input", f"{where}.input", "must be an object")
        # A name that the model made up has no schema and never had one.
        made_up = answer is not None and name not in answer.declared
        if name not in self._declared and not made_up:
            _refuse("call-has-schema", f"{where}.name", f"{name!r} is not among the request's tools")
        self._ids.add(call)
        self._open.append(call)

    def _check_unchanged(self, blocks: list[dict[str, Any]], where: str) -> SentAnswer | None:
        """The answer that this message is; None where none was ever sent at this place (the client brought its own history)."""
        candidates = self._sent.get(self._answers, ())
        got = canonical(blocks)
        for answer in candidates:
            expected = self._as_returned(answer.content, blocks)
            if got in {canonical(expected), canonical(_storable(expected))}:
                return answer
        if not candidates:
            return None
        expected = self._as_returned(candidates[-1].content, blocks)
        at, text = f"{where}", f"{len(blocks)} blocks came back and {len(expected)} were sent"
        for i, (want, have) in enumerate(zip(expected, blocks, strict=False)):
            if canonical(want) != canonical(have):
                at, text = f"{where}.{i}", f"came back as {canonical(have)} and was sent as {canonical(want)}"
                break
        _refuse("answer-unchanged", at, text)

    def _as_returned(self, content: list[Any], blocks: list[dict[str, Any]]) -> list[Any]:
        """The sent blocks with those repairs that they need."""
        expected: list[Any] = []
        seen = set(self._ids)
        for i, block in enumerate(content):
            want = block
            if isinstance(block, dict) and block.get("type") == "tool_use":
                call = block.get("id")
                if i < len(blocks) and (not isinstance(call, str) or not _ID.fullmatch(call) or call in seen):
                    call = blocks[i].get("id")
                want = {**block, "id": call, "input": block["input"] if isinstance(block.get("input"), dict) else {}}
                seen.add(str(call))
            expected.append(want)
        return expected


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_storable(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_storable(item) for item in value]
    return value
