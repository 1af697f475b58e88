"""A whole message as the stream of events in which the provider would send it.

Texts, thoughts and arguments come in several pieces, so that whoever puts them together is really tested; what the provider sends whole
(redacted thoughts, blocks of types that nobody knows yet) comes whole. https://docs.anthropic.com/en/api/messages-streaming
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# Characters. Short, so that even "Hello, Priya" comes in several pieces.
_PIECE = 7

# A block's field -> the type of the delta that carries it, and the delta's own field.
_IN_PIECES = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}

Event = tuple[str, dict[str, Any]]  # the event's name and its data


def dumps(value: Any) -> bytes:
    """JSON as on the provider's wire: UTF-8, nothing escaped that need not be."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a script may hold a lone surrogate on purpose: only an escape can carry it
        return json.dumps(value, separators=(",", ":")).encode()


def events_of(message: dict[str, Any]) -> Iterator[Event]:
    """The events of one answer, `message_start` to `message_stop`."""
    usage = dict(message.get("usage") or {})
    late = {key: message[key] for key in ("stop_reason", "stop_sequence", "stop_details", "container") if key in message}
    start = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 1}}
    for key in ("stop_details", "container", "context_management"):
        start.pop(key, None)
    yield "message_start", {"type": "message_start", "message": start}
    yield "ping", {"type": "ping"}
    for index, block in enumerate(message["content"]):
        first, deltas = _open(block)
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": first}
        for delta in deltas:
            yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    ending: dict[str, Any] = {"type": "message_delta", "delta": late, "usage": {"output_tokens": usage.get("output_tokens", 1)}}
    if "context_management" in message:
        ending["context_management"] = message["context_management"]
    yield "message_delta", ending
    yield "message_stop", {"type": "message_stop"}


def _open(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The block as it begins, and the deltas that make it whole."""
    kind = str(block.get("type"))
    if kind in _IN_PIECES and isinstance(block.get(kind), str):
        field, delta = _IN_PIECES[kind]
        deltas: list[dict[str, Any]] = [{"type": delta, field: piece} for piece in _pieces(block[field])]
        first = {**block, field: ""}
        if isinstance(block.get("citations"), list):
            first["citations"] = []
            deltas += [{"type": "citations_delta", "citation": citation} for citation in block["citations"]]
        if "signature" in block:
            first["signature"] = ""
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return first, deltas
    if kind.endswith("tool_use") and "input" in block:
        given = block["input"]
        # A text is what a model wrote instead of an argument list: it goes out as it is, well-formed or not.
        text = given if isinstance(given, str) else "" if given == {} else dumps(given).decode()
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in ("", *_pieces(text))]
    return block, []


def _pieces(text: str) -> list[str]:
    return [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
