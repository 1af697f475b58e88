"""People and other systems around the runs of a schedule: they decide late, twice, differently, at the very deadline; their answers get lost.

Whoever hears "unknown" says the same again under the same id: that is what these entries are made for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from outlast.app import Outlast
from outlast.documents import Gate
from outlast.errors import CommitUnknown, GateClosed, Refused, RunBusy, StoreError
from outlast.stores import base
from outlast.testing.simulation.loop import Crash

if TYPE_CHECKING:
    from outlast.testing.simulation.schedule import Schedule

TRIES = 20
LOOK_AGAIN_S = 300.0  # the longest time without a look into the inbox


class People:
    def __init__(self, sim: Schedule, app: Outlast) -> None:
        self.sim, self.app = sim, app
        self.diligent = False
        self.accepted: dict[tuple[str, str], set[str]] = {}  # gate -> the outcomes that somebody was told stand
        self.waiting_for_the_end: set[tuple[str, str]] = set()
        sim.people = self

    def tasks(self) -> Iterator[Any]:
        yield self._decides()
        yield self._meddles()
        yield self._tells()

    async def start(self, run_id: str, text: str) -> None:
        await self._again(lambda: self.app.start("agent", text, run_id=run_id))

    async def _again(self, say: Callable[[], Any]) -> Any:
        """Until it is known to stand."""
        for _ in range(TRIES):
            try:
                return say()
            except (CommitUnknown, StoreError, Crash):
                self.sim.reached["a person's word was said again"] += 1
                await asyncio.sleep(1.0)
        raise AssertionError("nobody is that unlucky")

    # ---- gates ----------------------------------------------------------------------------------------------------------------

    async def _decides(self) -> None:
        sim = self.sim
        seen, gates = None, []
        while not sim.over:
            version = sim.store.wait_for_change(None, 0)
            if version == seen and not gates:  # nobody is asked anything
                await sim.news(LOOK_AGAIN_S)
                continue
            await asyncio.sleep(3.0 if self.diligent else (3.0, 20.0, 70.0)[sim.choices.pick(3, 0.6)])
            seen = sim.store.wait_for_change(None, 0)
            gates = self.app.inbox(limit=100)
            for gate in gates:
                if (gate.run_id, gate.gate_id) in self.waiting_for_the_end:
                    continue
                if gate.kind == "verification":
                    await self._verify(gate)
                else:
                    await self._judge(gate)

    async def _judge(self, gate: Gate) -> None:
        sim = self.sim
        odd = sim.choices.pick(9, sim.mood.oddities)
        if odd == 0:
            await self._decide(gate, approved=True)
        elif odd in (1, 7, 8):  # or a no would hardly ever meet what is rare too
            await self._decide(gate, approved=False)
        elif odd == 2 and gate.kind == "approval":
            await self._decide(gate, approved=True, args={"text": f"{gate.args['text']} edited"})
        elif odd == 3:
            sim.reached["a gate was left alone"] += 1
        elif odd == 4 and (closes_at := self._closes_at(gate)) is not None:
            self.waiting_for_the_end.add((gate.run_id, gate.gate_id))
            sim.in_world(max((closes_at - sim.store.now()).total_seconds(), 0.0), lambda: self._at_the_deadline(gate))
        elif odd == 5:
            await self._decide(gate, approved=True)
            await self._decide(gate, approved=True)
            await self._decide(gate, approved=False, by="other")
        else:
            await self._decide(gate, approved=True, digest="sha256:of something else")

    async def _decide(self, gate: Gate, *, approved: bool, by: str = "ada", args: Any = None, digest: str | None = None) -> None:
        def say() -> Gate | None:
            return self._say(
                gate, lambda: self.app.decide(gate.run_id, gate.gate_id, approved=approved, decided_by=by, args=args, digest=digest)
            )

        await self._again(say)

    def _closes_at(self, gate: Gate) -> datetime | None:
        return next((x.closes_at for x, _ in self.sim.store.gates(gate.run_id) if x.gate_id == gate.gate_id and x.outcome is None), None)

    def _at_the_deadline(self, gate: Gate) -> None:
        self.waiting_for_the_end.discard((gate.run_id, gate.gate_id))
        if self._closes_at(gate) == self.sim.store.now():
            self.sim.reached["a decision at the very deadline"] += 1
        try:
            self._say(gate, lambda: self.app.decide(gate.run_id, gate.gate_id, approved=True, decided_by="late"))
        except (StoreError, Crash):
            return

    def _say(self, gate: Gate, decide: Callable[[], Gate]) -> Gate | None:
        try:
            stands = decide()
        except GateClosed:
            self.sim.reached["a decision was refused"] += 1
            return None
        except RunBusy:
            self.sim.reached["an earlier attempt may still act"] += 1
            return None
        except Refused:
            return None
        self.sim.see(f"somebody said {stands.outcome}")
        self.accepted.setdefault((gate.run_id, gate.gate_id), set()).add(f"{stands.outcome} {stands.edited_args}")
        return stands

    async def _verify(self, gate: Gate) -> None:
        """Look into the world, then say what is so. A clock that is set back just now: then an earlier attempt may seem to be under way."""
        hasty = self.sim.choices.chance(min(self.sim.mood.jumps * 2, 1.0))
        if hasty:
            self.sim.jump(-400)

        def say() -> Gate | None:
            happened = self.sim.receivers.told(f"{gate.run_id}:{gate.call_id}")
            outcome: Any = (
                "happened" if happened else "give_up" if not hasty and self.sim.choices.chance(self.sim.mood.oddities) else "run_again"
            )
            result = {"done": gate.args} if happened else None
            return self._say(gate, lambda: self.app.verify(gate.run_id, gate.gate_id, outcome=outcome, result=result, decided_by="ada"))

        await self._again(say)

    # ---- cancel, send, retry --------------------------------------------------------------------------------------------------

    async def _meddles(self) -> None:
        sim = self.sim
        while not self.diligent:
            await asyncio.sleep(15.0)
            for run_id in sim.plans:
                await self._meddle(run_id)
            if sim.choices.chance(sim.mood.oddities / 2):
                try:
                    sim.reached["the sweeper moved a gate"] += bool(self.app.sweep())
                except (StoreError, Crash):
                    continue

    async def _meddle(self, run_id: str) -> None:
        sim, app = self.sim, self.app
        if sim.choices.chance(sim.mood.cancels / 2):
            if app.head(run_id).status in base.ENDED:
                return
            await self._again(lambda: app.cancel(run_id, by="ada"))
            sim.see("a run was cancelled")
            sim.interruptions += 1
            sim.orderly += 1
        elif sim.choices.chance(sim.mood.texts / 3):
            await self._again(lambda: self._refusable(lambda: app.send(run_id, "hurry up", by="ada")))
            sim.see("a text was sent")
        elif sim.choices.chance(sim.mood.oddities) and app.head(run_id).status in ("failed", "cancelled"):
            await self._again(lambda: self._refusable(lambda: app.retry(run_id, by="ada")))
            sim.see("a run was retried")

    @staticmethod
    def _refusable(say: Callable[[], Any]) -> Any:
        try:
            return say()
        except Refused:
            return None

    # ---- events -----------------------------------------------------------------------------------------------------------------

    async def _tells(self) -> None:
        """Words that calls wait for: early, late, twice, or never."""
        sim = self.sim
        await asyncio.sleep(10.0)
        for run_id, text in sim.plans.items():
            for part in text.split('"await_word", "')[1:]:
                call_id = part.partition('"')[0]
                if sim.choices.pick(3) == 2:
                    continue
                for _ in range(1 + sim.choices.pick(2)):
                    await self._again(lambda run_id=run_id, call_id=call_id: self._refusable(  # type: ignore[misc]  # a default binds it
                        lambda: self._event(run_id, call_id)))  # fmt: skip
                await asyncio.sleep(timedelta(seconds=20).total_seconds() * sim.choices.pick(4))

    def _event(self, run_id: str, call_id: str) -> bool:
        first = self.app.event(run_id, f"word-{call_id}", "a word", event_id=f"word-{call_id}")
        self.sim.see("an event was delivered" if first else "an event was delivered twice")
        return first
