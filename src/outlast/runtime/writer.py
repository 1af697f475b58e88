"""The holder's side of the journal: what a lease holder knows of its run, and how it saves.

Blocking, one thread at a time (the others wait): one append per run is in flight. Rules

1. What is folded is what is stored: every fact goes through the codec before it is folded.
2. A refused append (`Behind`) keeps the facts and works out the consequences anew, the second time under the lock of the run's row.
3. An intent is a proposal: if anything came in between, it is dropped.
4. A commit whose answer is lost is settled by `reclaim` before anything else is done; then what stands at the expected place is compared.
5. A result that could not be saved is kept and saved again until it is in or the lease is gone; what it stands for is never repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from threading import Lock
from typing import Any

from outlast.core import codec, gate
from outlast.core import run as r
from outlast.core import step as s
from outlast.errors import CommitUnknown, InvariantViolated, LeaseLost, StoreError
from outlast.runtime import metrics
from outlast.runtime.clock import monotonic
from outlast.runtime.news import Stop
from outlast.stores import base, owner

log = logging.getLogger("outlast.worker")

LINKS = 4  # segments before that a trace links to: one whose process was killed exported nothing, so the last one alone may lead nowhere
TRACEPARENT = "traceparent"  # in the meta of the first entry of a segment
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0  # between attempts to save while the store fails


@dataclass(frozen=True, slots=True)
class Saved:
    """What an append left: the step that remains, and what it made visible."""

    step: s.Step
    entries: Sequence[r.Entry] = ()
    status: str = "running"
    reason: str | None = None
    released: bool = False
    at: datetime | None = None  # as the store has it
    wake_at: datetime | None = None  # of a run that was given back


Keep = Callable[[s.Step, datetime], bool]
Facts = Sequence[r.Entry] | Callable[[r.Run, datetime], Sequence[r.Entry]]  # or what is found on the run as it is when it is saved


class Writer:
    """One run under one lease.

    `policy`: what the code says. `keep(step, now)`: is the lease kept although the run waits (a short timer)? `notices`: who is to be told
    of the gates that these entries open, move or close; `told`: that such a batch stands now. `children`: the runs that answer calls of this
    one. `others`: what this batch does to them: they end with it. `parent`: what the end of this run tells its parent.
    """

    def __init__(
        self,
        store: base.Store,
        lease: base.Lease,
        policy: s.Policy,
        *,
        keep: Keep = lambda step, now: False,
        notices: Callable[[r.Run, Sequence[r.Entry]], Sequence[base.NewNotice]] = lambda before, entries: (),
        told: Callable[[], None] = lambda: None,
        children: Callable[[r.Run, Sequence[r.Entry]], Sequence[base.NewRun]] = lambda run, entries: (),
        others: Callable[[r.Run, Sequence[r.Entry]], Sequence[base.ParentEntry]] = lambda before, entries: (),
        parent: Callable[[r.Run, s.Step], base.ParentEntry | None] = lambda run, step: None,
        lease_s: float = 30,
    ) -> None:
        self.store, self.lease, self.policy = store, lease, policy
        self.keep, self.notices, self.told, self.lease_s = keep, notices, told, lease_s
        self.children, self.others, self.parent = children, others, parent
        self.run = r.Run(lease.run_id)
        self.place = base.Place()
        self.status = ""
        self.needed: str | None = None  # what the run was parked for when it was taken
        self.fresh = True  # nothing was appended under this lease yet
        self.released = False
        self.stopped = Stop()  # stop trying to save: the process is going down
        self.traceparent: str | None = None  # of this segment, until its first append has saved it
        self.traced_before: Sequence[str] = ()  # of the segments before, newest first
        self.heard: list[r.Entry] = []  # what others wrote, and this segment has not told yet
        self._one = Lock()  # held while the store is read or written: whoever else calls meanwhile waits

    def about(self, call_id: str | None = None) -> dict[str, Any]:
        """What a log record says beside its text."""
        lease = self.lease
        return {"run_id": lease.run_id, "seq": self.run.seq, "call_id": call_id, "worker": owner.short(lease.owner), "fence": lease.fence}

    # ---- reading ------------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read what is new since the last look. Raises StoreError; a broken journal is InvariantViolated with the entry's number."""
        with self._one:
            self._load()

    def _load(self) -> None:
        first = self.place.entries == 0
        try:
            entries, self.place = self.store.load(self.lease.run_no, after=self.place)
        except codec.Unstorable as e:
            raise InvariantViolated(
                f"run {self.lease.run_id}: {e}", run_id=self.lease.run_id, hint=f"outlast show {self.lease.run_id} --journal"
            ) from e
        self.run = r.fold(self.run, entries)
        if self.store.now() >= self.lease.until and not self.store.peek([self.lease])[0].held:
            # Stopped past its lease, perhaps: what it reads now is somebody else's work, and the model would be asked twice for what comes next.
            raise LeaseLost(
                f"run {self.lease.run_id} was taken over meanwhile", hint=f"outlast show {self.lease.run_id}", run_id=self.lease.run_id
            )
        if first:
            traced = (str(e.meta[TRACEPARENT]) for e in reversed(entries) if e.meta and TRACEPARENT in e.meta)
            self.traced_before = list(islice(traced, LINKS))
            entries = _since_last_held(entries)
        self.heard += entries

    # ---- saving -------------------------------------------------------------------------------------------------------------

    def save(self, facts: Facts, in_flight: Collection[str] = (), *, draining: bool = False, stop: Stop | None = None) -> Saved:
        """Save facts and all that follows from them: the step that remains.

        `draining`: give the lease back unless calls are in flight, due at once. `stop`: of this save alone, instead of `stopped`.
        Raises LeaseLost; StoreError only where there are no facts to lose and no calls in flight to take along.
        """
        with self._one:
            return self._save(facts, in_flight, stop or self.stopped, draining=draining)

    def _save(self, facts: Facts, in_flight: Collection[str], stop: Stop, *, draining: bool) -> Saved:
        pause, tries = FIRST_PAUSE_S, 0
        stood: Sequence[r.Entry] = ()  # of a batch whose answer was lost
        while True:
            now = self.store.now()
            plan = _Plan(self, facts, in_flight, stood, draining=draining)
            batch = plan.on(self.run, now)
            if not batch.entries and not plan.writes_head(batch):
                return plan.saved(batch)
            began = monotonic()
            try:
                if tries == 0:
                    answer = self.store.append(self.lease, self.place, batch, now=now)
                    if isinstance(answer, base.Behind):
                        self.run, self.place, tries = r.fold(self.run, answer.entries), answer.place, 1
                        self.heard += answer.entries
                        continue
                    appended = answer
                else:
                    appended = self._locked(plan, now)
                    assert plan.batch is not None
                    batch = plan.batch
            except CommitUnknown as e:
                log.warning("run %s: %s; reading what stands", self.lease.run_id, e, extra=self.about())
                assert plan.batch is not None
                try:
                    if self._stood(plan.batch, stop):  # under the lock it was made anew, after what had come in
                        facts, stood = (), (*stood, *plan.batch.entries)
                        self.fresh = self.fresh and not plan.batch.progress
                        if plan.batch.notices:
                            self.told()
                except LeaseLost:
                    if (end := self._gave_back(plan.batch)) is None:
                        raise
                    return self._saved(plan, plan.batch, end)
                continue
            except LeaseLost:
                raise
            except StoreError as e:
                if not (plan.facts or in_flight) or stop.wait(pause):
                    raise
                log.warning(
                    "run %s: what was done could not be saved yet, it is kept: %s",
                    self.lease.run_id,
                    e,
                    extra=self.about(),
                )
                pause = min(pause * 2, LONGEST_PAUSE_S)
                continue
            metrics.appended(monotonic() - began, step=batch.progress)
            return self._saved(plan, batch, appended.place)

    def _saved(self, plan: _Plan, batch: base.Batch, end: base.Place) -> Saved:
        self.run, self.place = plan.after, end
        self._marked(batch)
        self.status, self.fresh = batch.head.status, self.fresh and not batch.progress
        self.released = batch.head.release
        if batch.notices:
            self.told()
        return plan.saved(batch)

    def _locked(self, plan: _Plan, now: datetime) -> base.Appended:
        def under_lock(entries: Sequence[r.Entry], place: base.Place) -> base.Batch:
            return plan.on(r.fold(self.run, entries), now)

        appended, others = self.store.append_locked(self.lease, self.place, under_lock, now=now)
        self.heard += others
        return appended

    def beside(self, in_flight: Collection[str]) -> Saved | None:
        """What remains while every open call runs: nothing follows then, so there is nothing to save. None: it has to be worked out."""
        if self.status != "running" or self.run.ended or any(c.result is None and c.id not in in_flight for c in self.run.calls):
            return None
        step = s.next_step(self.run, self.policy, self.store.now(), in_flight)
        return Saved(step) if isinstance(step, s.Wait) and step.status == "running" else None

    def propose(self, intent: r.CallStarted, extend: timedelta) -> bool:
        """Save an intent if nothing came in between; False: decide again, nothing was saved. Raises LeaseLost, StoreError."""
        with self._one:
            return self._propose(intent, extend)

    def _propose(self, intent: r.CallStarted, extend: timedelta) -> bool:
        now = self.store.now()
        entry = r.stored(r.headed(intent, at=now, meta=self.marks(intent)))
        after = r.apply(self.run, entry)
        batch = base.Batch(entries=[entry], head=self._head(after, "running", None), seq=after.seq, extend_until=extend)
        began = monotonic()
        try:
            answer = self.store.append(self.lease, self.place, batch, now=now)
        except CommitUnknown:
            return self._stood(batch, self.stopped)
        if isinstance(answer, base.Behind):
            self.run, self.place = r.fold(self.run, answer.entries), answer.place
            self.heard += answer.entries
            return False
        metrics.appended(monotonic() - began, step=False)
        self.run, self.place, self.status = after, answer.place, "running"
        self._marked(batch)
        return True

    def marks(self, first: r.Entry) -> dict[str, Any] | None:
        """The meta of an append's first entry: the trace that a next segment links to, where one is recorded and not saved yet."""
        meta = {**(first.meta or {}), **({TRACEPARENT: self.traceparent} if self.traceparent is not None else {})}
        return meta or None

    def _marked(self, batch: base.Batch) -> None:
        if batch.entries:
            self.traceparent = None

    def container(self) -> str | None:
        """The id of the container that the last answer ran in: the next request names it."""
        return self.run.container

    def _stood(self, batch: base.Batch, stop: Stop) -> bool:
        """Settle an unknown commit: did this batch stand? Raises LeaseLost."""
        entries, place = self._settle(stop)
        ours, there = [r.to_row(e) for e in batch.entries], [r.to_row(e) for e in entries]
        # Others' entries may stand before ours: an append under the lock read them first.
        at = next((n for n in range(len(there) - len(ours) + 1) if there[n : n + len(ours)] == ours), None) if ours else None
        self.run, self.place = r.fold(self.run, entries), place
        self.status = ""
        if at is not None:
            self._marked(batch)
            entries = entries[:at] + entries[at + len(ours) :]
        self.heard += entries
        return at is not None

    def _gave_back(self, batch: base.Batch) -> base.Place | None:
        """The lease is gone: was it this batch, whose answer was lost, that gave it back? Its entries then stand under our fence, and nobody else's."""
        if not batch.head.release or not batch.entries:
            return None
        try:
            there = [row for row in self.store.journal(self.lease.run_id, after=self.place.entries) if row.fence == self.lease.fence]
        except StoreError:
            return None
        if [(row.kind, row.body, row.meta) for row in there] != [r.to_row(e) for e in batch.entries]:
            return None
        return base.Place(there[-1].entry_no, there[-1].seq, there[-1].digest)

    def _settle(self, stop: Stop) -> tuple[list[r.Entry], base.Place]:
        """Take the run's row again under our nonce, and read what stands after our last known place."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                self.lease = self.store.reclaim(self.lease, lease_s=self.lease_s)
                return self.store.load(self.lease.run_no, after=self.place)
            except LeaseLost:
                raise
            except StoreError as e:
                log.warning("run %s: %s; nothing is done for it before this is settled", self.lease.run_id, e, extra=self.about())
                if stop.wait(pause):
                    raise
                pause = min(pause * 2, LONGEST_PAUSE_S)

    def _head(self, run: r.Run, status: str, reason: str | None, **more: object) -> base.NewHead:
        return base.NewHead(
            status=status, reason=reason, agent_version=run.agent_version, model_calls=run.model_calls, input_tokens=run.input_tokens,
            output_tokens=run.output_tokens, cache_read_tokens=run.cache_read_tokens, cache_write_tokens=run.cache_write_tokens,
            cost_usd=f"{run.cost_usd:f}" if run.cost_usd is not None else None, **more)  # type: ignore[arg-type]  # release, wake_at, needs  # fmt: skip


class _Plan:
    """Facts and what follows from them on a given state of the run."""

    def __init__(self, writer: Writer, given: Facts, in_flight: Collection[str], stood: Sequence[r.Entry], *, draining: bool) -> None:
        self.writer, self.given, self.in_flight, self.stood, self.draining = writer, given, in_flight, stood, draining
        self.facts: Sequence[r.Entry] = ()
        self.batch: base.Batch | None = None
        self.step: s.Step = s.CallModel()
        self.after = writer.run
        self.now: datetime | None = None

    def on(self, before: r.Run, now: datetime) -> base.Batch:
        w, self.now = self.writer, now
        given = self.given(before, now) if callable(self.given) else self.given
        self.facts = facts = [f for f in (r.stored(r.headed(x, at=now)) for x in given) if _still(before, f)]
        run = r.fold(before, facts)
        after, consequences, self.step = s.settled(run, w.policy, now, self.in_flight)
        entries = [*facts, *consequences]
        recovered = w.fresh and w.lease.taken_over and bool(entries)
        if entries and (recovered or w.traceparent is not None):
            marks = {**(w.marks(entries[0]) or {}), **({"taken_over": True} if recovered else {})}
            entries[0] = r.stored(r.headed(entries[0], meta=marks))
        self.after, gates = gate.projection(before, entries, after_all=None if recovered or w.traceparent is not None else after)
        waits = isinstance(self.step, s.Wait | s.Finish) and not self.in_flight and not w.keep(self.step, now)
        release = waits or (self.draining and not self.in_flight)
        status, reason, wake_at, needs = _place_in_life(self.step, now)
        needs = _also(needs, w.needed)
        if release and not waits:
            wake_at, needs = now, None  # a drain: somebody else goes on at once
        self.batch = base.Batch(
            entries=compact(entries), seq=self.after.seq, gates=gates, notices=w.notices(before, entries),
            head=w._head(self.after, status, reason, release=release, wake_at=wake_at if release else None, needs=needs if release else None),
            children=w.children(self.after, entries), others=w.others(before, entries), parent=w.parent(self.after, self.step) if entries else None,
            progress=any(isinstance(e, _PROGRESS) for e in entries))  # fmt: skip
        return self.batch

    def writes_head(self, batch: base.Batch) -> bool:
        return batch.head.release or batch.head.status != (self.writer.status or batch.head.status)

    def saved(self, batch: base.Batch) -> Saved:
        entries = (*self.stood, *batch.entries)
        return Saved(self.step, entries, batch.head.status, batch.head.reason, batch.head.release, self.now, batch.head.wake_at)


def _since_last_held(entries: Sequence[r.Entry]) -> list[r.Entry]:
    """What came from outside after the last entry that was written under a lease."""
    n = len(entries)
    while n and isinstance(entries[n - 1], r.OUTSIDE) and not isinstance(entries[n - 1], r.RunStarted):
        n -= 1
    return list(entries[n:])


_PROGRESS = (r.MessageAdded, r.CallFinished, r.GateOpened, r.GateMoved, r.GateExpired, r.GateWaived)


def _still(run: r.Run, fact: r.Entry) -> bool:
    """Is there still something that this fact is about? (A result of a call that was answered meanwhile is not.)"""
    if isinstance(fact, r.CallFinished | r.CallFailed | r.CallDoubted | r.CallSkipped):
        call = run.call(fact.call_id)
        return (call is not None and call.result is None) or _opens(fact)
    return True


def _opens(fact: r.Entry) -> bool:
    return isinstance(fact, r.CallFinished) and fact.how == "refused"  # saved with the answer that holds its call


def _place_in_life(step: s.Step, now: datetime) -> tuple[str, str | None, datetime | None, str | None]:
    """(status, reason, wake_at, needs) of a run whose next step this is."""
    match step:
        case s.Wait():
            return (
                step.status,
                step.reason if step.status != "running" else None,
                step.until,
                step.needs,
            )  # parked: `needs` finds it, not time
        case s.Finish():
            return step.status, step.reason, None, None
        case _:
            return "running", None, now, None


def _also(needs: str | None, before: str | None) -> str | None:
    """Of a schema that the saved arguments do not fit: all that were tried, or two workers would pass the run to each other for ever."""
    what, name, digest = [*(needs or "").split(":", 2), "", ""][:3]
    if what != "schema" or before is None or not before.startswith(f"schema:{name}:"):
        return needs
    tried = [*before.split(":", 2)[2].split(","), digest]
    return f"schema:{name}:{','.join(sorted(set(tried)))}"


def compact(entries: Sequence[r.Entry]) -> list[r.Entry]:
    """Store each result once: where the user message that holds it is in the same append, its CallFinished has no content."""
    ends = [n for n, e in enumerate(entries) if isinstance(e, r.MessageAdded) and e.message["role"] == "user"]
    return [
        replace(e, content=None) if isinstance(e, r.CallFinished) and e.content is not None and any(n > i for n in ends) else e
        for i, e in enumerate(entries)
    ]
