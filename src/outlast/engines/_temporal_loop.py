"""The frozen loop as a Temporal workflow: version 1. It is never changed: a changed loop is a new version under a new name.

It imports nothing of ours, so that Temporal's sandbox has nothing to re-import and no change of ours can reach an old history.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy

FIRST = "model"
SLACK_S = 0.01  # past the deadline, so that the store's clock has seen it too
LATE_S = 0.1  # this clock says that a deadline has passed and the store's does not yet: look again
BUSY_S = 1.0  # somebody else holds the run: look again
HEARTBEAT_S = 10  # an activity that is not heard of for so long is given to another worker
STEP_S = 24 * 3600  # tools and models have time-outs of their own; this only ends what nobody would end
MANY = 1000  # steps in one history


@workflow.defn(name="outlast-run-v1")
class OutlastRun:
    def __init__(self) -> None:
        self.pokes = 0

    @workflow.signal
    def wake(self) -> None:
        self.pokes += 1

    @workflow.run
    async def run(self, run_id: str, name: str = FIRST) -> dict[str, Any]:
        for n in range(1, MANY * 2):
            seen = self.pokes
            taken: dict[str, Any] = await workflow.execute_activity(
                name, args=[run_id, name], start_to_close_timeout=timedelta(seconds=STEP_S), heartbeat_timeout=timedelta(seconds=HEARTBEAT_S),
                retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=100), maximum_interval=timedelta(seconds=10)))  # fmt: skip
            if taken["kind"] == "done":
                return taken
            if taken["kind"] != "busy":
                name = taken["tool"] or FIRST
            if taken["kind"] in ("wait", "busy"):
                await self.sleep(taken, seen)
            if workflow.info().is_continue_as_new_suggested() or n >= MANY:
                break
        return workflow.continue_as_new(args=[run_id, name])

    async def sleep(self, taken: dict[str, Any], seen: int) -> None:
        """Until it is woken, or until the absolute instant, by the engine's clock."""
        until = datetime.fromisoformat(taken["wake_at"]).timestamp() if taken["wake_at"] else None
        now = workflow.time()
        left = (until - now + SLACK_S if until > now else LATE_S) if until is not None else None
        if taken["kind"] == "busy":
            left = min(left, BUSY_S) if left is not None else BUSY_S
        try:
            await workflow.wait_condition(lambda: self.pokes > seen, timeout=left)
        except TimeoutError:
            return
