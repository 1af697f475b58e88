"""The people of a crash test: who approves, who looks into the other system before saying what became of a call, and the clock.

A call in doubt is answered as by somebody who looked: the log of the tools says whether the attempt came back. "It happened", with its
result; or, where the tool had not begun, or said that it surely did nothing (ToolFailed), "run it again"; and a call that ended in another
exception is given up, crash or not.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from outlast.app import Outlast
from outlast.documents import Gate
from outlast.errors import RunBusy
from outlast.runtime.clock import ManualClock
from outlast.testing.crashmatrix.watch import ACTED, append, read

WHO = "the crash test"


class Person:
    """Answers everything that runs of this store wait for.

    Args:
        clock: moved where a run waits for a time. How far is kept in `clock_file`: no later process falls behind an earlier one.
    """

    def __init__(self, app: Outlast, clock: ManualClock, clock_file: Path, log: Path, *, approve: bool, more_budget: bool = False) -> None:
        self.app, self.clock, self.clock_file, self.log = app, clock, clock_file, log
        self.approve, self.more_budget = approve, more_budget

    def answer(self) -> bool:
        """Decide what is asked, else let time pass until something is due. False: nothing here can go on by itself."""
        gates = self.app.inbox(limit=1000)
        for gate in gates:
            if gate.kind == "verification":
                self._verify(gate)
            else:
                yes = self.approve or (gate.kind == "budget" and self.more_budget)
                note = None if yes else "the crash test rejects everything"
                self.app.decide(gate.run_id, gate.gate_id, approved=yes, decided_by=WHO, note=note)
        if gates:
            return True
        due = [head.wake_at for head in self.app.runs(unfinished=True, limit=1000) if head.wake_at is not None]
        if not due:
            return False
        self._wait_until(min(due))
        return True

    def _verify(self, gate: Gate) -> None:
        lines = [line for line in read(self.log) if line.call == (gate.run_id, gate.call_id)]
        returned = next((line for line in lines if line.event in ACTED), None)
        if returned is not None:
            self.app.verify(gate.run_id, gate.gate_id, outcome="happened", decided_by=WHO, result=returned.result)
        elif lines and lines[-1].event != "refused":
            self.app.verify(gate.run_id, gate.gate_id, outcome="give_up", decided_by=WHO, note="it did not come back with a result")
        else:
            try:
                self.app.verify(gate.run_id, gate.gate_id, outcome="run_again", decided_by=WHO)
            except RunBusy as busy:  # a dead process's request may still be under way until then
                self._wait_until(busy.until)
                self.app.verify(gate.run_id, gate.gate_id, outcome="run_again", decided_by=WHO)

    def _wait_until(self, at: datetime) -> None:
        by = at - self.clock.now
        if by > timedelta(0):
            append(self.clock_file, str(by.total_seconds()))
            self.clock.move(by)


def clock(file: Path) -> ManualClock:
    """Now, and how far the processes before this one moved it."""
    moved = sum(float(line) for line in file.read_text().splitlines()) if file.exists() else 0.0
    return ManualClock(datetime.now(UTC) + timedelta(seconds=moved))
