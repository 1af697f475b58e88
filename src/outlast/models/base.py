"""What a model is to us: one request in, one whole message out.

Rules
1. A model is any async callable that takes a `ModelRequest`. It returns a Messages API message as a dict or the SDK's
   object, its blocks, or a string; who calls it makes one message of that.
2. What it cannot answer it raises as `ModelError`, which says whether asking again may help. Any other exception is a bug.
3. It keeps nothing: everything it may build on stands in the request, so that any process can ask in another's place.
4. This file imports nothing but typing: agents and the runtime know models by it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


def _emit_nowhere(_text: str) -> None:
    """Where streamed text goes when nobody listens."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Everything a model may know when it is asked.

    `messages` are in Messages API form, oldest first, and are sent on as they are: unknown blocks and fields too. `tools` are
    their schemas (name, description, input_schema). `output_schema` is the JSON schema of typed output, else None. `settings` are
    the agent's `model_settings`; `settings["container"]`, where there is one, names the container of the last answer.
    `emit(text)` streams a piece of the answer to whoever watches: optional, never saved, and void when the call then fails.
    """

    messages: list[dict[str, Any]]
    instructions: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    output_schema: dict[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    emit: Callable[[str], None] = _emit_nowhere


class Model(Protocol):
    """An async callable that answers a `ModelRequest`.

    The answer's `stop_reason` decides what happens next: only `"tool_use"` runs tools. Without that key it follows from the
    content; present but null or unknown, the run fails.

    Raises:
        ModelError: nothing came that could be saved.
    """

    async def __call__(self, request: ModelRequest, /) -> Any: ...
