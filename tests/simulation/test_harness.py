"""The harness of the simulation: what it sees, counts, pauses and renews is what it says; a run that played too little is not green."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import pytest

from outlast.errors import StoreError
from outlast.runtime import drive, perform
from outlast.stores import base
from outlast.stores.sqlite.rows import Q
from outlast.testing import simulate
from outlast.testing.simulate import main, play, run
from outlast.testing.simulation import oracles, world
from outlast.testing.simulation.loop import PROCESS, Choices, Loop
from outlast.testing.simulation.schedule import LEASE_S, LoopKeeper, Schedule, Store
from outlast.testing.simulation.world import CHECK, MODEL, TOOL

passes = asyncio.sleep  # of a schedule's own time: nobody waits for it

FIRST = 20261129


# ---- what it sees -------------------------------------------------------------------------------------------------------------


def test_a_bug_that_a_worker_catches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call, calls = drive.Drive._call, Counter[str]()

    async def buggy(self: drive.Drive, *args: Any) -> Any:
        calls["made"] += 1
        if calls["made"] % 7 == 0:
            raise KeyError("a bug of ours")
        return await call(self, *args)

    monkeypatch.setattr(drive.Drive, "_call", buggy)
    found = run(range(FIRST, FIRST + 150)).found
    assert found is not None
    assert found.why.startswith("I30: run run-")
    assert "KeyError" in found.why


@pytest.mark.parametrize("query, more", [("take", 2), ("take", 0), ("reclaim", 2), ("outside_fence", 2)])
def test_a_fence_that_grows_by_more_or_less_than_one_is_found(monkeypatch: pytest.MonkeyPatch, query: str, more: int) -> None:
    assert "fence = fence + 1" in Q[query]
    monkeypatch.setitem(Q, query, Q[query].replace("fence = fence + 1", f"fence = fence + {more}"))
    found = run(range(FIRST, FIRST + 200)).found
    assert found is not None
    assert found.why.startswith("I15: ")


# ---- what it counts -----------------------------------------------------------------------------------------------------------


def test_a_window_is_open_while_its_call_is_in_flight_in_a_living_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted here around the runtime's own functions, however they are left."""
    under_way: Counter[tuple[int, str, str]] = Counter()
    lies: list[str] = []
    met: Counter[str] = Counter()

    def watched(window: str, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            here = world.playing.seed, PROCESS.get().owner, window
            under_way[here] += 1
            try:
                return await function(*args, **kwargs)
            finally:
                under_way[here] -= 1

        return call

    monkeypatch.setattr(drive.Drive, "_ask", watched(MODEL, drive.Drive._ask))
    monkeypatch.setattr(perform, "act", watched(TOOL, perform.act))
    monkeypatch.setattr(perform, "look", watched(CHECK, perform.look))
    see = Schedule.see

    def seen(self: Schedule, what: str) -> None:
        living = [owner for owner, process in self.processes.items() if not process.dead]
        true = {window for (seed, owner, window), n in under_way.items() if n and seed == self.seed and owner in living}
        lies.extend(f"{self.seed}: {what} / {window}" for window in self._windows() & {MODEL, TOOL, CHECK} if window not in true)
        met.update(self._windows())
        see(self, what)

    monkeypatch.setattr(Schedule, "see", seen)
    assert run(range(FIRST, FIRST + 250)).found is None
    assert lies == []
    assert met[MODEL] and met[TOOL] and met[CHECK]


def test_nothing_is_left_open_when_all_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came of a call is saved or given up; and a process that is about to act, and so cannot be paused, gets there or is cancelled."""
    left: list[str] = []
    ends = oracles.at_the_end

    def at_the_end(sim: Schedule) -> None:
        living = [p for p in sim.processes.values() if not p.dead]
        left.extend(f"{sim.seed}: {p.name} {p.inside} {p.unsaved} {p.acting}" for p in living if p.inside or p.unsaved or p.acts())
        ends(sim)

    monkeypatch.setattr(oracles, "at_the_end", at_the_end)
    result = run(range(FIRST, FIRST + 80))
    assert result.found is None
    assert left == []
    assert result.reached["EventReceived"]  # somebody called `await_word`
    assert result.pairs["a death", "a result is not saved"]


# ---- who keeps the leases -----------------------------------------------------------------------------------------------------


class Leases:
    """As much of a store as a keeper needs."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.renewed_at, self.failing = loop, list[float](), 0

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        return 1

    def peek(self, leases: list[base.Lease]) -> list[base.Renewed]:
        return [base.Renewed(lease.run_id, True, lease.fence, 0) for lease in leases]

    def renew(self, leases: list[base.Lease], *, lease_s: float) -> list[base.Renewed]:
        self.renewed_at.append(self.loop.now)
        if self.failing:
            self.failing -= 1
            raise StoreError("disk full")
        return self.peek(leases)


def lease(run_no: int) -> base.Lease:
    return base.Lease(run_no=run_no, run_id=f"run-{run_no}", agent="a", fence=1, nonce="n", owner="o", until=datetime(2026, 3, 2, tzinfo=UTC),
                      attempts=0, taken_over=False)  # fmt: skip


@contextmanager
def kept() -> Iterator[tuple[Loop, Leases, LoopKeeper]]:
    loop = Loop(Choices(0, {}), pause=lambda process: 0.0, latency=lambda: 0.0)
    leases: Any = Leases(loop)
    try:
        yield loop, leases, LoopKeeper(leases, LEASE_S)
    finally:
        loop.forget()
        loop.close()


def test_one_task_keeps_the_leases_of_a_process() -> None:
    with kept() as (loop, leases, keeper):

        async def taken_and_given_back() -> None:
            for run_no in range(5):
                keeper.add(lease(run_no), lambda renewed: None)
                await passes(1.0)
                keeper.remove(lease(run_no))
            keeper.add(lease(9), lambda renewed: None)
            await passes(31.0)

        loop.run_until_complete(taken_and_given_back())
        assert len(leases.renewed_at) == 3


def test_a_renewal_that_failed_is_tried_again_after_a_second_as_the_thread_does() -> None:
    with kept() as (loop, leases, keeper):
        leases.failing = 2

        async def held() -> None:
            keeper.add(lease(1), lambda renewed: None)
            await passes(30.0)

        loop.run_until_complete(held())
        assert [round(at) for at in leases.renewed_at] == [10, 11, 12, 22]
        assert keeper.lost_at == leases.renewed_at[1]


def test_a_renewal_fails_now_and_then_in_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing is known about what comes of it."""
    failed: list[float] = []
    renew = Store.renew

    def watched(self: Store, *args: Any, **kwargs: Any) -> list[base.Renewed]:
        try:
            return renew(self, *args, **kwargs)
        except StoreError:
            failed.append(self.sim.loop.now)
            raise

    monkeypatch.setattr(Store, "renew", watched)
    assert run(range(FIRST, FIRST + 20)).found is None
    assert failed


# ---- what is green ------------------------------------------------------------------------------------------------------------


def test_fewer_schedules_than_were_asked_for_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--minutes", "0.001", "--processes", "1"]
    assert main([*few, "--seeds", "100000"]) == 1
    assert "of 100000 schedules were played: the time was over" in capsys.readouterr().out
    assert main(few) == 0  # as many as there is time for
    assert main(["--minutes", "10", "--seeds", "2", "--processes", "1"]) == 0


def test_an_interrupted_run_is_not_green(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(seed: int) -> Any:
        if seed == 2:
            raise KeyboardInterrupt
        return play(seed)

    monkeypatch.setattr(simulate, "play", interrupted)
    assert main(["--seeds", "100", "--processes", "1"]) == 130
    assert "interrupted after 2 schedules" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, why",
    [
        (["--seeds", "0"], "0 is not 1 or more"),
        (["--processes", "-1"], "-1 is not 1 or more"),
        (["--only", "5", "--choices", "garbage"], "'garbage' is not AT:VALUE"),
        (["--only", "5", "--choices", "10:-5"], "is not AT:VALUE"),
        (["--choices", "1:1"], "--only SEED is missing"),
    ],
)
def test_a_mistyped_command_is_no_success(given: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


# ---- what its world does ------------------------------------------------------------------------------------------------------


def test_an_answer_is_lost_after_what_was_sent_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a person looks in between and says "run it again", and no journal can help (seed 910111192, with a wire that took no time)."""
    send, in_world = world.Receivers.send, Schedule.in_world
    landing: ContextVar[list[bool] | None] = ContextVar("landing", default=None)
    lost: list[bool] = []

    async def watched(*args: Any, **more: Any) -> Any:
        landed: list[bool] = []
        landing.set(landed)
        try:
            return await send(*args, **more)
        except ConnectionError:
            lost.append(bool(landed))
            raise

    def noted(self: Schedule, after: float, f: Callable[[], object]) -> None:
        landed = landing.get()
        in_world(self, after, lambda: (landed.append(True) if landed is not None else None, f()))

    monkeypatch.setattr(world.Receivers, "send", watched)
    monkeypatch.setattr(Schedule, "in_world", noted)
    assert run(range(FIRST, FIRST + 400)).found is None
    assert len(lost) >= 4 and all(lost)
