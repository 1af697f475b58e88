"""One streamed answer: the provider's events folded into one whole message.

Rules
1. Nothing is lost: unknown blocks and fields are kept, numbers and the order of arguments stay (the SDK's own fold drops what it does
   not know, for instance the arguments of a block type it never heard of).
2. A piece that cannot be placed is an error, never skipped: a signed block that is not exactly what was sent is refused for ever.
3. Only an answer that ended with `message_stop` is one.

The events: https://docs.anthropic.com/en/api/messages-streaming. No I/O here.
"""

from __future__ import annotations

import json
from typing import Any

# What a delta adds to, by its type: text that grows.
_GROWING = {"text_delta": "text", "thinking_delta": "thinking"}


class BrokenAnswer(ValueError):
    """The events do not make one whole message."""


class Answer:
    """Takes the events of one answer in order; `message()` is the whole of it."""

    def __init__(self) -> None:
        self._message: dict[str, Any] | None = None
        self._arguments: dict[int, str] = {}  # index of a block -> the JSON text of its input so far
        self._ended = False

    def add(self, event: dict[str, Any]) -> str:
        """Fold one event in, and give the text that it adds to the answer ("" for most).

        Events of a type that is not known are passed over, as the provider asks of its clients.

        Raises:
            BrokenAnswer: the event does not fit what came before.
        """
        kind = event.get("type")
        if kind == "message_start":
            if self._message is not None:
                raise BrokenAnswer("a second message_start")
            self._message = {**event["message"], "content": list(event["message"].get("content") or [])}
        elif kind == "content_block_start":
            self._start(event["index"], event["content_block"])
        elif kind == "content_block_delta":
            return self._delta(event["index"], event["delta"])
        elif kind == "message_delta":
            self._finish(event)
        elif kind == "message_stop":
            self._ended = True
        return ""

    def message(self) -> dict[str, Any]:
        """The whole message.

        Raises:
            BrokenAnswer: the stream ended before the answer did.
        """
        if self._message is None or not self._ended:
            raise BrokenAnswer("the stream ended before message_stop")
        for index, text in self._arguments.items():
            if text:
                self._message["content"][index]["input"] = _arguments(text, cut=self._message.get("stop_reason") != "tool_use")
        return self._message

    def _start(self, index: int, block: dict[str, Any]) -> None:
        content = self._begun()["content"]
        if index != len(content):
            raise BrokenAnswer(f"block {index} began where block {len(content)} was due")
        content.append(dict(block))

    def _delta(self, index: int, delta: dict[str, Any]) -> str:
        content = self._begun()["content"]
        if not 0 <= index < len(content):
            raise BrokenAnswer(f"a delta for block {index}, which never began")
        block, kind = content[index], delta.get("type")
        if kind in _GROWING:
            field = _GROWING[kind]
            block[field] = (block.get(field) or "") + delta[field]
            return str(delta[field]) if kind == "text_delta" else ""
        if kind == "input_json_delta":
            self._arguments[index] = self._arguments.get(index, "") + delta["partial_json"]
        elif kind == "signature_delta":
            block["signature"] = delta["signature"]
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or []), delta["citation"]]
        elif kind == "compaction_delta":  # comes in one piece
            block.update({key: value for key, value in delta.items() if key != "type"})
        else:
            raise BrokenAnswer(f"a delta of the unknown type {kind!r}")
        return ""

    def _finish(self, event: dict[str, Any]) -> None:
        message = self._begun()
        message.update(event.get("delta") or {})
        # Counts are totals, so they replace; one that is null was not counted again, and the first count stands.
        counted = {key: value for key, value in (event.get("usage") or {}).items() if value is not None}
        message["usage"] = {**(message.get("usage") or {}), **counted}
        message.update({key: value for key, value in event.items() if key not in {"type", "delta", "usage"}})

    def _begun(self) -> dict[str, Any]:
        if self._message is None:
            raise BrokenAnswer("an event came before message_start")
        return self._message


def _arguments(text: str, *, cut: bool) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        # An answer that was cut off has half an argument list, and its calls never run: they are kept without arguments.
        # In any other answer this is what the model wrote, and it will be told so.
        return {} if cut else text
