"""Every schedule of two workers, an approver, a canceller, crashes and pauses on one gated at-most-once call.

The store and the world are abstract and small: compare-and-append with a fence, leases that run out while their holder is paused (a pause is a
schedule in which the others move), effects that are still on the wire when their sender is dead, entries from outside. What is decided is the real
code: `heard`, `settled`, `apply`, `closing`. Searched breadth first; in every state:

1. no lost wake-up: a run that nobody holds and that can go on is due, and `wake_at` is never later than the instant it waits for;
2. no effect without a person's yes, none twice unless a person said "run again";
3. no append by a stale fence;
4. no stuck run: with no more crashes, and without any person, it still reaches its end or a question that is open.

The last tests break one rule each and see that this is noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.core.build import HELLO, T0, s, t, use

from outlast.core import gate as g
from outlast.core import run as r
from outlast.core import step as st
from outlast.core.gate import GatePolicy
from outlast.core.step import CallModel, Finish, LimitPolicy, Policy, RunCalls, ToolPolicy, Wait, heard, settled

LEASE_S = 30
TIMEOUT_S = 10  # of the tool: `may_act_until` is so much and a lease from its intent on
Row = tuple[str, str, str | None]


class Broken(AssertionError):
    """An invariant does not hold; carries the schedule that led there."""


@dataclass(eq=False)
class Journal:
    """A journal as a path from its first row on: two that are equal are one object, and know their fold."""

    run: r.Run
    before: Journal | None = None
    last: Row | None = None
    after: dict[Row, Journal] = field(default_factory=dict)
    decisions: dict[int, tuple[tuple[Row, ...], st.Step]] = field(default_factory=dict)
    gists: dict[int, Any] = field(default_factory=dict)
    again: int = 0  # times that a person said run again
    approved: bool = False

    def plus(self, rows: Iterable[Row]) -> Journal:
        journal = self
        for x in rows:
            if x not in journal.after:
                entry = r.from_row(*x)
                said = entry.outcome if isinstance(entry, r.GateDecided) else None
                journal.after[x] = Journal(
                    r.apply(journal.run, entry), journal, x, again=journal.again + (said == "run_again"),
                    approved=journal.approved or said == "approved")  # fmt: skip
            journal = journal.after[x]
        return journal


@dataclass(frozen=True, slots=True)
class Worker:
    """What one process holds in memory; all of it is lost in a crash."""

    born: int = 0  # a process of its own after each crash

    phase: str = "idle"  # ready: to decide; model, intent, check, act: about to; wire: the effect is under way
    fence: int = 0
    seen: Journal | None = None  # the journal as it knows it
    facts: tuple[Row, ...] = ()  # that it knows and has not saved
    until: int = 0  # its `may_act_until`, seconds


@dataclass(frozen=True, slots=True)
class World:
    journal: Journal
    fence: int = 0
    owner: str = ""
    lease_until: int | None = None  # None: released
    holder_dead: bool = False  # the lease's process is provably dead
    crashed: bool = False  # its holder is gone, but nobody can tell
    wake_at: int | None = 0
    status: str = "running"
    workers: tuple[Worker, Worker] = (Worker(), Worker())
    wires: tuple[tuple[int, str], ...] = ()  # effects whose sender no longer waits for them: (may land before that second, sender)
    effects: int = 0
    now: int = 0
    crashes: int = 0
    pauses: int = 0  # leases lost by a holder that lives
    texts: int = 0
    last_append: str = ""


def row(entry: r.Entry) -> Row:
    return r.to_row(entry)


def past(at: int | None, now: int) -> int | None:
    return None if at is None else max(at - now, 0)


@dataclass
class Explorer:
    code: Policy
    person: tuple[str, ...] = ("approved", "rejected")
    crashes: int = 1
    pauses: int = 1
    texts: int = 0
    cancels: bool = True
    # ---- what is decided: the real code ----------------------------------------------------------------------------------

    def decide(self, journal: Journal, now: int) -> tuple[tuple[Row, ...], st.Step]:
        if now not in journal.decisions:
            _, entries, step = settled(journal.run, self.code, t(now))
            journal.decisions[now] = tuple(map(row, entries)), step
        return journal.decisions[now]

    # ---- the store's rules: overridden where a test breaks one -----------------------------------------------------------------

    def fenced(self, w: World, me: Worker) -> bool:
        return me.fence != w.fence

    def behind(self, w: World, me: Worker) -> bool:
        return me.seen is not w.journal

    def too_late(self, w: World, me: Worker) -> bool:
        return w.now >= me.until

    def wake(self, step: Wait) -> int | None:
        return None if step.until is None else int((step.until - T0).total_seconds())

    def saves_with(self, w: World, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """What of an append stands in one commit: all of it."""
        return rows

    # ---- moves ---------------------------------------------------------------------------------------------------------------

    def moves(self, w: World) -> Iterator[tuple[str, World]]:
        for n, me in enumerate(w.workers):
            if me.phase == "idle":
                yield from self.claims(w, n)
            else:
                for name, world in self.works(w, n, me):
                    yield f"{n}: {name}", world
                yield from self.crash(w, n, me)
        yield from self.outside(w)
        for wire in w.wires:
            left = list(w.wires)
            left.remove(wire)
            yield "an effect lands late", replace(w, effects=w.effects + 1, wires=tuple(left))
        if (later := self.next_instant(w)) is not None:
            yield f"it is {later}", replace(w, now=later, wires=tuple(x for x in w.wires if x[0] > later))

    def next_instant(self, w: World) -> int | None:
        instants = {w.wake_at, w.lease_until, *(x[0] for x in w.wires), *(x.until for x in w.workers)}
        run = w.journal.run
        instants |= {int((c.may_act_until - T0).total_seconds()) for c in run.calls if c.may_act_until}
        instants |= {int((x.opened.closes_at - T0).total_seconds()) for x in run.all_gates() if x.opened.closes_at}
        return min((x for x in instants if x is not None and x > w.now), default=None)

    def claims(self, w: World, n: int) -> Iterator[tuple[str, World]]:
        if w.status in ("done", "failed", "cancelled"):
            return
        pauses = w.pauses
        facts: tuple[Row, ...] = ()
        if w.lease_until is None:
            if w.wake_at is None or w.wake_at > w.now:
                return
        elif not w.holder_dead:
            if w.lease_until > w.now:
                return
            pauses += not w.crashed
            if pauses > self.pauses:
                return
        else:
            began = [c.id for c in w.journal.run.calls if c.started and c.started.owner == w.owner]
            facts = (row(r.WorkerDied(began, t(w.now) + r.LATE_WIRE)),) if began else ()
        fence = w.fence + 1
        me = Worker(w.workers[n].born, "ready", fence, w.journal, facts)
        held = replace(w, fence=fence, owner=self.name(n, me), lease_until=w.now + LEASE_S, holder_dead=False, crashed=False, pauses=pauses)
        yield f"{n}: claims", self.put(held, n, me)

    def name(self, n: int, me: Worker) -> str:
        return f"{n}.{me.born}"

    def put(self, w: World, n: int, me: Worker) -> World:
        return replace(w, workers=(me, w.workers[1]) if n == 0 else (w.workers[0], me))

    def append(self, w: World, n: int, rows: tuple[Row, ...], then: Worker, *, until: int = 0) -> World:
        """Compare and append. Refused by the fence: a result that it holds is filed as evidence. Behind: read, and decide anew."""
        me = w.workers[n]
        if self.fenced(w, me):
            late = [r.from_row(*x) for x in me.facts]
            evidence = tuple(row(r.LateResult(x.call_id, x.content)) for x in late if isinstance(x, r.CallFinished))
            w = replace(w, journal=w.journal.plus(evidence), wake_at=w.now if evidence and w.status not in r.AFTER_END else w.wake_at)
            return self.put(w, n, Worker(me.born))
        if self.behind(w, me):
            return self.put(w, n, replace(me, phase="ready", seen=w.journal))
        rows = self.saves_with(w, rows)
        if me.fence != w.fence and rows:
            w = replace(w, last_append="stale")
        journal = w.journal.plus(rows)
        w = replace(w, journal=journal, lease_until=None if w.lease_until is None else max(w.lease_until, until))
        return self.put(w, n, replace(then, seen=journal))

    def works(self, w: World, n: int, me: Worker) -> Iterator[tuple[str, World]]:
        known = me.seen
        assert known
        match me.phase:
            case "ready":
                yield self.decides(w, n, me, known)
            case "model":
                asked = sum(x["role"] == "assistant" for x in known.run.messages)
                said = [use("p", "pay")] if asked == 0 else "done"  # however often it is asked
                facts = tuple(map(row, heard(known.run, said, self.code)))
                yield "the model answers", self.put(w, n, replace(me, phase="ready", facts=facts))
            case "intent":
                call = known.run.calls[0]
                until = w.now + TIMEOUT_S + LEASE_S
                intent = row(r.CallStarted("p", "run-1:p", "at_most_once", call.attempts + 1, t(until), self.name(n, me)))
                yield "saves its intent", self.append(w, n, (intent,), replace(me, phase="act", until=until), until=until)
            case "check":
                looked = row(r.CallFinished("p", "ok", how="verified"))
                if w.effects:
                    yield "finds that it happened", self.put(w, n, replace(me, phase="ready", facts=(looked,)))
                else:
                    yield "finds that it did not happen", self.put(w, n, replace(me, phase="intent"))
                unknown = row(r.CallDoubted("p", "503", checked=True))
                yield "cannot look", self.put(w, n, replace(me, phase="ready", facts=(unknown,)))
            case "act" if self.too_late(w, me):
                yield "is too late", self.put(w, n, replace(me, phase="ready", facts=(row(r.CallSkipped("p", "too late")),)))
            case "act":
                yield "begins to act", self.put(w, n, replace(me, phase="wire", until=max(me.until, w.now + 1)))
            case "wire":
                if w.now < me.until:
                    paid = replace(me, phase="ready", facts=(row(r.CallFinished("p", "ok")),))
                    yield "acts", self.put(replace(w, effects=w.effects + 1), n, paid)
                lost = self.put(w, n, replace(me, phase="ready", facts=(row(r.CallDoubted("p", "connection lost")),)))
                yield "loses the connection", replace(lost, wires=self.wires(w, me.until, self.name(n, me)))

    def wires(self, w: World, until: int, sender: str) -> tuple[tuple[int, str], ...]:
        return tuple(sorted((*w.wires, *([(until, sender)] if until > w.now else []))))

    def decides(self, w: World, n: int, me: Worker, known: Journal) -> tuple[str, World]:
        entries, step = self.decide(known.plus(me.facts), w.now)
        rows = me.facts + entries
        match step:
            case Wait() | Finish():
                after = self.append(w, n, rows, replace(me, phase="released"))
                if after.workers[n].phase == "released":
                    wake_at = self.wake(step) if isinstance(step, Wait) else None
                    after = self.put(replace(after, lease_until=None, wake_at=wake_at, status=step.status), n, Worker(me.born))
                return f"releases: {step.status}", after
            case CallModel():
                phase = "model"
            case RunCalls((call,)):
                phase = "check" if call.check else "intent"
            case _:
                raise AssertionError(step)
        return f"goes on: {phase}", self.append(w, n, rows, replace(me, phase=phase, facts=()))

    def crash(self, w: World, n: int, me: Worker) -> Iterator[tuple[str, World]]:
        if w.crashes >= self.crashes:
            return
        holds = me.fence == w.fence and w.lease_until is not None
        wires = self.wires(w, me.until, self.name(n, me)) if me.phase == "wire" else w.wires
        gone = replace(self.put(w, n, Worker(w.crashes + 1)), crashes=w.crashes + 1, wires=wires)
        yield f"{n}: dies unseen", replace(gone, crashed=w.crashed or holds)
        if holds:  # seen at once; what it put on the wire lands soon or never
            soon = w.now + int(r.LATE_WIRE.total_seconds())
            landing = tuple(sorted((min(until, soon), who) if who == self.name(n, me) else (until, who) for until, who in wires))
            yield f"{n}: dies, seen", replace(gone, holder_dead=True, wires=landing)

    def outside(self, w: World) -> Iterator[tuple[str, World]]:
        run = w.journal.run
        if w.status in r.AFTER_END or run.ended:
            return
        for gate in run.all_gates():
            if gate.outcome is not None or (gate.opened.closes_at and t(w.now) >= gate.opened.closes_at):
                continue
            call = run.call(gate.opened.call_id)
            again = sum(x.outcome == "run_again" for x in (call.gates if call else ()))
            may_run_again = call and again == 0 and not (call.may_act_until and t(w.now) < call.may_act_until)
            for outcome in (
                self.person if gate.opened.kind == "approval" else ("happened", "give_up", *(("run_again",) if may_run_again else ()))
            ):
                yield (
                    f"a person: {outcome}",
                    replace(w, journal=w.journal.plus([row(r.GateDecided(gate.opened.gate_id, outcome))]), wake_at=w.now),
                )
        if w.texts < self.texts:
            yield "a person: a text", replace(w, journal=w.journal.plus([row(r.TextSent("hurry up"))]), wake_at=w.now, texts=w.texts + 1)
        if self.cancels:
            entries = (r.RunCancelled(), *st.closing(run, "cancelled"))
            yield "a person: cancel", replace(
                w, journal=w.journal.plus(map(row, entries)), fence=w.fence + 1, lease_until=None, holder_dead=False, crashed=False, wake_at=None,
                status="cancelled")  # fmt: skip

    # ---- what must hold --------------------------------------------------------------------------------------------------------

    def check(self, w: World) -> None:
        if w.effects > 1 + w.journal.again:
            raise Broken(f"the effect happened {w.effects} times, and a person said run again {w.journal.again} times")
        if w.effects and not w.journal.approved:
            raise Broken("the effect happened and nobody approved it")
        if w.last_append == "stale":
            raise Broken("an append by a stale fence stands")
        if w.lease_until is not None:
            return
        entries, step = self.decide(w.journal, w.now)
        if w.status in r.AFTER_END:
            if not isinstance(step, Finish):
                raise Broken(f"marked {w.status}, and it could go on: {step}")
        elif entries or not isinstance(step, Wait):
            if w.wake_at is None or w.wake_at > w.now:
                raise Broken(f"lost wake-up: it could go on ({step}), nobody holds it, and it wakes at {w.wake_at}")
        elif step.until is not None and (w.wake_at is None or t(w.wake_at) > step.until):
            raise Broken(f"it waits for {step.until} and wakes at {w.wake_at}")

    def rests(self, w: World) -> bool:
        """Over, or waiting with an open question and nobody at work."""
        if w.status in r.AFTER_END:
            return True
        entries, step = self.decide(w.journal, w.now)
        is_open = any(x.outcome is None for x in w.journal.run.all_gates())
        return w.lease_until is None and not entries and isinstance(step, Wait) and is_open

    def key(self, w: World) -> Any:
        """A state without its absolute time: instants count from now on, and what is past is past. Workers have no names, skipped attempts no number."""
        workers: list[tuple[Any, ...]] = []
        for x in w.workers:
            if x.phase == "idle":
                workers.append(("idle",))
            else:
                stale, behind = x.fence != w.fence, x.seen is not w.journal
                knows = self.gist(x.seen, w.now) if x.seen and behind and not stale else ()
                workers.append(
                    (x.phase, stale, behind, knows, tuple(f[:2] if f[0] != "WorkerDied" else f[0] for f in x.facts), past(x.until, w.now))
                )
        order = sorted((0, 1), key=lambda n: repr(workers[n]))
        who = {self.name(n, w.workers[n]): at for at, n in enumerate(order)}  # the others are gone
        owners = (who.get(w.owner), *(c.started and who.get(c.started.owner) for c in w.journal.run.calls))
        return (self.gist(w.journal, w.now), w.journal.again, w.journal.approved, owners, past(w.lease_until, w.now), past(w.wake_at, w.now),
                w.holder_dead, w.crashed, w.status, tuple(workers[n] for n in order),
                tuple((x - w.now, who.get(sender)) for x, sender in w.wires), w.effects, w.crashes, w.pauses, w.texts, w.last_append)  # fmt: skip

    def gist(self, journal: Journal, now: int) -> Any:
        """What of the fold the future depends on."""
        if now not in journal.gists:
            journal.gists[now] = self.weigh(journal.run, now)
        return journal.gists[now]

    def weigh(self, run: r.Run, now: int) -> Any:
        def left(at: Any) -> int | None:
            return past(int((at - T0).total_seconds()), now) if at else None

        calls = tuple((c.started is not None, c.doubt, c.checked, c.result is not None, c.waived, left(c.may_act_until) if c.begun else None,
                       tuple((x.opened.gate_id, x.outcome, left(x.opened.closes_at), x.level) for x in c.gates)) for c in run.calls)  # fmt: skip
        return run.seq, run.ended and run.ended.status, run.stop_reason, len(run.queued), calls

    def explore(self, limit: int = 60_000) -> int:
        start = World(Journal(r.Run("run-1")).plus(map(row, HELLO)))
        came: dict[Any, tuple[Any, str]] = {}
        first = self.key(start)
        found = {first: start}
        back: dict[Any, list[Any]] = {}
        resting: list[Any] = []
        queue = deque([first])
        while queue:
            key = queue.popleft()
            w = found[key]
            try:
                self.check(w)
                if self.rests(w):
                    resting.append(key)
                for name, after in self.moves(w):
                    next_key = self.key(after)
                    if not name.startswith("a person") and " dies" not in name:
                        back.setdefault(next_key, []).append(key)
                    if next_key not in found:
                        found[next_key] = after
                        came[next_key] = (key, name)
                        queue.append(next_key)
            except Broken as e:
                raise Broken(f"{e}\n  " + "\n  ".join(self.story(key, came))) from None
            assert len(found) < limit, "more states than this test has time for"
        alive = set(resting)
        queue = deque(resting)
        while queue:
            for key in back.get(queue.popleft(), ()):
                if key not in alive:
                    alive.add(key)
                    queue.append(key)
        for key in found:
            if key not in alive:
                raise Broken("stuck: no way to an end or an open question\n  " + "\n  ".join(self.story(key, came)))
        return len(found)

    def story(self, key: Any, came: dict[Any, tuple[Any, str]]) -> list[str]:
        names = []
        while key in came:
            key, name = came[key]
            names.append(name)
        return names[::-1]


def pay(*, check: bool = False, within: float | None = None) -> Policy:
    gate = GatePolicy("lead", "payment", within=None if within is None else s(within), then="keep_waiting" if within is None else "reject")
    return Policy(tools={"pay": ToolPolicy("pay", has_check=check, gate=gate)}, limits=LimitPolicy(model_calls=None))


SCENES = {
    "a person is asked": Explorer(pay()),
    "a check looks first": Explorer(pay(check=True), person=("approved",), cancels=False),
    "a check, and a cancel": Explorer(pay(check=True), pauses=0),
    "rejected": Explorer(pay(check=True), person=("rejected",)),
    "nobody may answer in time": Explorer(pay(within=50), pauses=0),
    "a text at any moment": Explorer(pay(), texts=1, pauses=0, person=("approved",)),
    "two crashes": Explorer(pay(), person=("approved",), cancels=False, crashes=2, pauses=0),
}


@pytest.mark.parametrize("scene", SCENES)
def test_every_schedule(scene: str) -> None:
    states = SCENES[scene].explore()
    print(f"{scene}: {states} states")
    assert states > 300  # a search that found nothing to do would hold too


# ---- broken on purpose -----------------------------------------------------------------------------------------------------------


class NoFence(Explorer):
    def fenced(self, w: World, me: Worker) -> bool:
        return False


class NoFenceNorComparison(NoFence):
    def behind(self, w: World, me: Worker) -> bool:
        return False


class NoComparison(Explorer):
    def behind(self, w: World, me: Worker) -> bool:
        return False


class NeverTooLate(Explorer):
    def too_late(self, w: World, me: Worker) -> bool:
        return False


class WakesNever(Explorer):
    def wake(self, step: Wait) -> int | None:
        return None


class WakesLate(Explorer):
    def wake(self, step: Wait) -> int | None:
        at = super().wake(step)
        return None if at is None else at + 1


class LosesConsequences(Explorer):
    def saves_with(self, w: World, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        return tuple(x for x in rows if x[0] != "GateOpened")


@pytest.mark.parametrize(
    "broken, why",
    [
        (NoFence(pay()), "stale fence"),
        (NoFenceNorComparison(pay()), "stale fence"),
        (NoComparison(pay(), texts=1, crashes=0, pauses=0), "lost wake-up"),
        (NeverTooLate(pay(check=True), pauses=2), "happened 2 times"),
        (WakesNever(pay(check=True)), "wakes at None"),
        (WakesLate(pay(within=50)), "and wakes at"),
        (LosesConsequences(pay()), "lost wake-up"),
    ],
)
def test_a_broken_store_is_noticed(broken: Explorer, why: str) -> None:
    with pytest.raises(Broken, match=why):
        broken.explore()


def test_noticed_begun_taken_for_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r.Call, "begun", property(lambda call: False))
    with pytest.raises(Broken, match="happened 2 times"):
        Explorer(pay()).explore()


def test_noticed_an_attempt_that_may_still_act_is_taken_for_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(run: r.Run, entry: r.Entry) -> r.Run:
        after = apply(run, entry)
        return replace(after, calls=tuple(replace(c, may_act_until=None) for c in after.calls))

    apply = r.apply
    monkeypatch.setattr(r, "apply", forgets)
    with pytest.raises(Broken, match="happened 2 times"):
        Explorer(pay(check=True)).explore()


def test_noticed_an_order_to_run_again_that_is_never_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_doubt(run: r.Run, call: r.Call, tool: ToolPolicy, *rest: Any) -> Any:
        gate = call.gate("verification")
        return st._run(run, call, tool) if gate and gate.outcome == "run_again" else real(run, call, tool, *rest)

    real = st._in_doubt
    monkeypatch.setattr(st, "_in_doubt", in_doubt)
    with pytest.raises(Broken, match="happened 3 times, and a person said run again 1 times"):
        Explorer(pay(), crashes=2, pauses=0, cancels=False, person=("approved",)).explore()


def test_noticed_a_no_taken_for_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = r._decided
    monkeypatch.setattr(r, "_decided", lambda run, entry: decided(run, replace(entry, outcome="approved")))
    with pytest.raises(Broken, match="nobody approved it"):
        Explorer(pay()).explore()


def test_noticed_a_gate_that_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st, "open_approval", lambda call, *_, **__: r.GateWaived(call.id))
    with pytest.raises(Broken, match="nobody approved it"):
        Explorer(pay()).explore()


def test_noticed_a_wait_without_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(g, "next_at", lambda gate: None)
    with pytest.raises(Broken, match=r"lost wake-up|stuck"):
        Explorer(pay(within=50)).explore()


def test_noticed_a_run_that_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st, "_in_doubt", lambda run, call, *_: Wait("waiting_for_verification", "nobody was asked"))
    with pytest.raises(Broken, match="stuck"):
        Explorer(pay()).explore()
