"""A call has one result: the first that was saved."""

from __future__ import annotations

from outlast.core import run as r


def test_a_second_result_changes_nothing() -> None:
    call = {"type": "tool_use", "id": "a", "name": "pay", "input": {}}
    asked = r.MessageAdded({"role": "assistant", "content": [call]}, meta={"stop_reason": "tool_use"})
    run = r.fold(r.Run("run-1"), [r.RunStarted("agent"), asked, r.CallFinished("a", "first"), r.CallFinished("a", "second")])
    [found] = run.calls
    assert found.result is not None
    assert found.result.content == "first"
