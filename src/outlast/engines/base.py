"""What an engine is to us: it only decides when a step is taken.

Our store stays the truth. The engine's workflow is a frozen, versioned loop that knows nothing of agents:

    take a step -> done: return; wait: race the wake signal with the absolute deadline, on the engine's clock; else again

Rules
1. Messages never pass through an engine; what does is a `Taken`: {run_id, seq, kind, tool, status, wake_at}.
2. Every attempt of an activity claims for itself: a fence never travels through the engine, so a retry and a zombie never share one.
3. `start` is idempotent: the engine's own id is the run id. `wake` may be lost: the worker pokes what is due again every `POKE_S`.
4. Retries are ours, as a wait in the store; the engine itself retries only a lost worker or an unreachable store.
5. An engine's SDK is imported inside its adapter's methods, never at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from outlast.core.run import iso

if TYPE_CHECKING:
    from outlast.app import Outlast

POKE_S = 30.0  # how often an engine's worker pokes each run of its driver that is due and unheld
LOOP_VERSION = 1  # of the frozen loop: part of its name in the engine, so that a changed loop never meets an old history
FIRST_STEP: Mapping[str, Any] = {"kind": "step", "tool": None}  # what the first activity is called, before anything is known


@dataclass(frozen=True, slots=True)
class Taken:
    """What one step left: all that an engine ever sees of a run.

    kind: what the next step is: "model", "tool" (its names in `tool`), "wait" or "done". wake_at: of a wait, the instant at which the run can
    go on by itself; None: only somebody outside wakes it. busy: somebody else holds the run until then, try again.
    """

    run_id: str
    seq: int
    kind: Literal["model", "tool", "wait", "done", "busy"]
    tool: str | None
    status: str
    wake_at: datetime | None

    @property
    def name(self) -> str:
        """The next activity's name, as the engine's page shows it."""
        return self.tool if self.kind == "tool" and self.tool else self.kind

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "wake_at": iso(self.wake_at) if self.wake_at else None}


@runtime_checkable
class Engine(Protocol):
    """Five verbs. All but `worker` are blocking and safe from any thread; they raise StoreError where the engine cannot be reached (the
    store's side stands, and the worker's poke makes it good) and UsageError for what can only be mended by the caller."""

    driver: str  # runs.driver of the runs that it drives

    def start(self, run_id: str) -> None:
        """Begin the workflow of a run; a second time is nothing."""
        ...

    def wake(self, run_id: str) -> None:
        """The run can go on: end its wait. Unknown or finished workflows: begin it, or nothing."""
        ...

    def cancel(self, run_id: str) -> None:
        """Our run was cancelled: let the workflow see it."""
        ...

    def describe(self, run_id: str) -> Mapping[str, Any]:
        """What the engine knows of it: at least {"engine", "id", "state", "url"}."""
        ...

    async def worker(self, app: Outlast) -> None:
        """Take steps of this driver's runs until cancelled."""
        ...
