"""A `ToolContext` for a test that calls a tool as the plain function that it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.runtime.clock import wall
from outlast.tools import DEFAULT_TIMEOUT, ToolContext


def tool_context(
    deps: Any = None,
    *,
    run_id: str = "run-test",
    call_id: str = "toolu_01",
    tags: Mapping[str, str] = {},
    attempt: int = 1,
) -> ToolContext[Any]:
    """What a tool would get for the call `call_id` of run `run_id`; the key is theirs: `run-test:toolu_01`."""
    return ToolContext(
        run_id=run_id,
        call_id=call_id,
        idempotency_key=f"{run_id}:{call_id}",
        agent="test",
        attempt=attempt,
        deadline=wall() + DEFAULT_TIMEOUT,
        tags=dict(tags),
        deps=deps,
    )
