"""What is saved in every question: messages of about 1 KB of JSON each, the same on every machine and in every run.

Even numbers are answers with a tool call, odd ones their results. The texts hold what real ones hold: quotes, line breaks, non-ASCII.
"""

from __future__ import annotations

import json
import random
from typing import Any

Message = dict[str, Any]

_seeded = random.Random(7)
_WORDS = ["".join(_seeded.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(_seeded.randint(2, 10))) for _ in range(4000)]
_WORDS += ["é", '"q"', "—", "{}", "\n", "42", "日本"]


def _text(length: int) -> str:
    words: list[str] = []
    have = 0
    while have < length:
        words.append(_seeded.choice(_WORDS))
        have += len(words[-1]) + 1
    return " ".join(words)[:length]


_POOL = [_text(40_000) for _ in range(16)]


def piece(i: int, length: int) -> str:
    start = (i * 37) % 2900
    return _POOL[i % 16][start : start + length]


def message(i: int, size: int = 1000) -> Message:
    if i % 2 == 0:
        call = {"type": "tool_use", "id": f"toolu_{i:024d}", "name": "search", "input": {"query": piece(i + 9, 120)}}
        return {"role": "assistant", "content": [{"type": "text", "text": piece(i, max(size - 320, 20))}, call]}
    result = {"type": "tool_result", "tool_use_id": f"toolu_{i - 1:024d}", "content": piece(i, max(size - 130, 20))}
    return {"role": "user", "content": [result]}


def first() -> Message:
    return {"role": "user", "content": piece(3, 900)}


def history(n: int) -> list[Message]:
    return [first(), *(message(i) for i in range(n - 1))]


def mixed(n: int) -> list[Message]:
    """Sizes as they come in practice: log-normal around 1 KB, from 0.2 to 30 KB."""
    sizes = random.Random(11)
    lengths = (int(sizes.lognormvariate(6.9, 1)) for _ in range(n - 1))
    return [first(), *(message(i, sorted((350, length, 30_000))[1]) for i, length in enumerate(lengths))]


def json_bytes(messages: list[Message]) -> int:
    """What the list takes as JSON in one piece."""
    return len(json.dumps(messages, ensure_ascii=False).encode())
