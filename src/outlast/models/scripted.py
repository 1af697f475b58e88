"""`ScriptedModel`: answers from a script, for tests, demos and crash matrices.

Rules
1. The answer is chosen by the number of assistant messages in the request and by nothing else, so it is the right one in any
   process, after any crash, however often it is asked.
2. The script's blocks are handed out exactly as written (as copies: nobody can change the script).
3. With a log every call leaves one line before anything else can go wrong, in one write: calls are counted across processes.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from outlast.errors import ModelError
from outlast.models.base import ModelRequest

Turn: TypeAlias = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Callable[[list[dict[str, Any]]], Any]

# One token is about four characters of English text or JSON. Only so that usage is never zero and grows with the text.
_CHARACTERS_PER_TOKEN = 4


class ScriptedModel:
    """A model that plays `turns`: `turns[n]` answers a request with n assistant messages in it.

    A turn is a text, content blocks, a whole Messages API message (to set `stop_reason`, `usage` and so on), or a function of the
    request's messages that returns any of these or raises. What a whole message leaves out is filled in; a `stop_reason` that is
    there, even null, stays.

    Args:
        turns: the script. Asked past its end: `ModelError`, not retryable, that says which turn was asked.
        log: a file that gets one line of JSON per call, `{"n": 2, "pid": 4711}`, answered or not.
    """

    name = "scripted"  # what its answers say, and what prices may be given for

    def __init__(self, turns: Sequence[Turn], *, log: str | os.PathLike[str] | None = None) -> None:
        self.turns = list(turns)
        self.log = log

    async def __call__(self, request: ModelRequest, /) -> dict[str, Any]:
        n = sum(1 for message in request.messages if message.get("role") == "assistant")
        if self.log is not None:
            _append_line(self.log, json.dumps({"n": n, "pid": os.getpid()}))
        if n >= len(self.turns):
            raise ModelError(f"the script has {len(self.turns)} turns, and turn {n + 1} was asked for", retryable=False)
        turn: Any = self.turns[n]
        if callable(turn):
            turn = turn(copy.deepcopy(request.messages))
            if inspect.isawaitable(turn):
                turn = await turn
        message = whole_message(turn, n, request.messages)
        for block in message["content"]:
            if isinstance(block, dict) and block.get("type") == "text":
                request.emit(block["text"])
        return message


def _append_line(path: str | os.PathLike[str], line: str) -> None:
    # O_APPEND and a single write: lines of several processes never mix, and no buffer is lost with a killed one.
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


def whole_message(turn: Any, n: int, asked: list[dict[str, Any]]) -> dict[str, Any]:
    """The Messages API message that `turn` (no function any more), number n from 0, stands for. What it says itself stays.

    Raises:
        TypeError: it is neither a text nor content blocks nor a message.
    """
    given = _fields(turn, n)
    content = given["content"]
    calls = any(isinstance(block, dict) and block.get("type") == "tool_use" for block in content)
    filled = {
        "id": f"msg_scripted_{n + 1:02d}",
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": content,
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": _tokens(asked), "output_tokens": _tokens(content)},
    }
    return {**filled, **given}


def _fields(turn: Any, n: int) -> dict[str, Any]:
    """What the turn says of its message, copied; always with a list as `content`."""
    if hasattr(turn, "to_dict"):  # the SDK's Message or one of its blocks
        turn = turn.to_dict(mode="json", warnings=False)
    if isinstance(turn, Mapping) and "content" in turn and turn.get("type", "message") == "message":
        given = copy.deepcopy(dict(turn))
        given["content"] = _blocks(given["content"], n)
        return given
    return {"content": _blocks(turn, n)}


def _blocks(content: Any, n: int) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []  # an empty text block is refused everywhere
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise TypeError(f"turn {n + 1} of the script is {type(content).__name__}: a text, content blocks or a message is needed")
    return [_block(block, n) for block in content]


def _block(block: Any, n: int) -> dict[str, Any]:
    if hasattr(block, "to_dict"):
        block = block.to_dict(mode="json", warnings=False)
    if not isinstance(block, Mapping):
        raise TypeError(f"turn {n + 1} of the script holds a {type(block).__name__} where a content block is needed")
    return copy.deepcopy(dict(block))


def _tokens(value: Any) -> int:
    return 1 + len(json.dumps(value, ensure_ascii=False, default=str)) // _CHARACTERS_PER_TOKEN
