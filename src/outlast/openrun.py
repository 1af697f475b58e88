"""`OpenRun`: the loop stays yours; every message is a checkpoint, every call runs by its effect.

with app.open("run-1", "Ticket …", tools=[…]) as run:
    while run.status == "running":
        if run.pending: …run.call_sync(call)…
        else: run.append(your_model(run.messages, run.tools))
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from outlast import sync
from outlast.core import codec
from outlast.core import messages as m
from outlast.core import run as r
from outlast.core import step as s
from outlast.documents import Checkpoint, Message, RunHead, Status, Tags, head_fields
from outlast.errors import LeaseLost, OutlastError, Refused, StoreError, UsageError
from outlast.runtime.drive import Drive
from outlast.runtime.news import Stop
from outlast.runtime.writer import Saved

if TYPE_CHECKING:
    from outlast.agent import Agent
    from outlast.app import Outlast
    from outlast.stores import base


log = logging.getLogger("outlast.worker")


class OpenRun:
    """A run that this program drives by hand, under a lease that is renewed until the with-block ends. Its fields are live."""

    def __init__(self, app: Outlast, lease: base.Lease, agent: Agent[Any]) -> None:
        self._app, self._agent = app, agent
        self._drive: Drive = app._drive_of(lease, agent, deps=app._deps_here, patience_s=0, by_hand=True)
        self._writer = self._drive.writer
        self._saved: Saved
        self._pid = os.getpid()
        self._one_thread = threading.Lock()  # what a call needs belongs to one event loop at a time
        self._under_way: set[str] = set()  # calls that began here and are not saved: none runs twice side by side
        try:
            self._take_up(lease)
        except BaseException:  # nobody will close what was never opened
            app._keeper.remove(lease)
            with suppress(StoreError):  # its lease runs out
                app._store.release(self._writer.lease)
            raise

    def _take_up(self, lease: base.Lease) -> None:
        self._row = self._app._store.head(lease.run_id)
        self._drive.head_row = self._row
        self._writer.status, self._writer.needed = self._row.status, self._row.needs
        self._writer.load()
        self._app._keeper.add(lease, self._news)
        self._saved = self._writer.save(self._drive.found_on_take_over)
        self._drive.tell(self._saved)

    def _news(self, renewed: base.Renewed) -> None:
        if not renewed.held:
            self._drive.lose()

    def _close(self) -> None:
        """Give the lease back, due at once where it did not wait or end. What was appended stands, whatever becomes of this."""
        if os.getpid() != self._pid:  # a child that was forked inside of the block: the lease is its parent's
            return
        keeper, store = self._app._keeper, self._app._store
        if self._saved.released or self._drive.lost:
            keeper.remove(self._writer.lease)
            return
        over = Stop()
        over.set()  # nothing is lost with it: nobody waits here for a store that is down
        try:
            with suppress(LeaseLost):  # all that was appended stands, or its append said so
                self._saved = self._writer.save([], draining=True, stop=over)
        except StoreError as e:
            try:
                store.release(self._writer.lease)
            except StoreError:
                log.warning("run %s: its lease could not be given back yet: %s", self._writer.run.id, e, extra=self._writer.about())
                keeper.add(self._writer.lease, self._given_back)  # this process lives: nobody is to count a death
                return
        except BaseException:  # Ctrl-C in its middle
            keeper.remove(self._writer.lease)
            with suppress(StoreError):
                store.release(self._writer.lease)
            raise
        keeper.remove(self._writer.lease)

    def _given_back(self, renewed: base.Renewed) -> None:
        """From the keeper's thread, whenever the store has answered again."""
        with suppress(StoreError):  # then when it has answered next
            if renewed.held:
                self._app._store.release(self._writer.lease)
            self._app._keeper.remove(self._writer.lease)

    # ---- live fields ----------------------------------------------------------------------------------------------------------

    @property
    def head(self) -> RunHead:
        """The run's row as of now."""
        run = self._writer.run
        row = replace(
            self._row, seq=run.seq, model_calls=run.model_calls, input_tokens=run.input_tokens, output_tokens=run.output_tokens,
            cache_read_tokens=run.cache_read_tokens, cache_write_tokens=run.cache_write_tokens,
            cost_usd=f"{run.cost_usd:f}" if run.cost_usd is not None else None, status=self._saved.status, reason=self._saved.reason)  # fmt: skip
        if self._saved.released:
            row = replace(row, lease_owner=None, lease_until=None, wake_at=self._saved.wake_at)
        return RunHead(**head_fields(row))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.head, name)

    if TYPE_CHECKING:
        run_id: str
        agent: str
        agent_version: str
        status: Status
        reason: str | None
        seq: int
        waiting: bool
        finished: bool
        model_calls: int
        input_tokens: int
        output_tokens: int
        cache_read_tokens: int
        cache_write_tokens: int
        cost_usd: Decimal | None
        attempts: int
        tags: Tags
        started_by: str | None
        parent_run_id: str | None
        parent_call_id: str | None
        lease_owner: str | None
        lease_until: datetime | None
        wake_at: datetime | None
        created_at: datetime
        updated_at: datetime

        def to_dict(self, *, messages: bool = False) -> dict[str, Any]: ...

    @property
    def messages(self) -> list[Message]:
        return list(self._writer.run.messages)

    @property
    def pending(self) -> list[dict[str, Any]]:
        """tool_use blocks that may run now: allowed, and not answered."""
        step = self._saved.step
        if not isinstance(step, s.RunCalls):
            return []
        ready = {c.call_id for c in step.calls}
        return [b for b in m.tool_uses(self._writer.run.messages[-1]) if b["id"] in ready]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools' schemas, for your model call."""
        return [t.schema for t in self._agent.tools]

    # ---- what it can do -------------------------------------------------------------------------------------------------------

    def append(self, message: Any) -> Checkpoint:
        """Save a message: the model's answer (a dict, the SDK's object, blocks or a text), opening its gates in the same commit, or a user's.

        Raises Refused where calls wait for their results, another message was saved meanwhile, or the run waits or is over; UsageError for what
        is no message; LeaseLost. While the store fails it is tried again: an answer is paid for.
        """
        self._check()
        seen = self._writer.run.seq

        def facts(run: r.Run, now: datetime) -> list[r.Entry]:
            """What it adds to the run as it is when it is saved: of two threads, or after an append whose end nobody saw, only one adds."""
            if run.seq != seen:
                raise Refused(
                    f"a message of run {run.id} was saved meanwhile", hint="look at run.messages and run.pending again", run_id=run.id
                )
            from_user = isinstance(message, Mapping) and message.get("role") == "user"
            if any(c.result is None for c in run.calls) or (run.calls and not from_user):
                raise Refused(
                    "calls wait for their results: run them first", hint="for call in run.pending: run.call_sync(call)", run_id=run.id
                )
            try:
                if from_user:
                    return [r.TextSent(m.as_content(message.get("content", "")))]
                return s.heard(run, message, self._writer.policy)
            except (m.BadMessage, codec.Unstorable) as e:
                raise UsageError(f"message: {e}") from None

        try:
            with self._hearing_of_loss():
                saved = self._writer.save(facts)
        except Refused:
            if self._writer.run.seq != seen:  # and what stands is what pending and status are about
                with suppress(OutlastError):
                    self._after(self._writer.save([], tuple(self._drive.tasks)))
            raise
        self._after(saved)
        run = self._writer.run
        at = next((e.at for e in reversed(saved.entries) if isinstance(e, r.MessageAdded)), None)
        if at is None:  # a text that is shown later
            return self._app.latest(run.id)
        return Checkpoint(run.id, run.seq, self._saved.status, self.messages, at)  # type: ignore[arg-type]  # one of the eleven

    async def call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Run one pending call by its effect, save its result and give the tool_result; the last one of a batch appends the user message.

        Raises UsageError where the call is not pending; LeaseLost, StoreError. A call whose outcome is unknown gives an error result that
        says so, and the run waits. Where it is stopped (a time-out around it), what is known is saved first: a `read` or `idempotent` call is
        pending again, with its key, and of an `at_most_once` one that had begun a person is asked.
        """
        if not isinstance(call, Mapping):
            raise UsageError(f"call must be a tool_use block, not {type(call).__name__}", hint="use the blocks in run.pending")
        self._check()
        step, call_id = self._saved.step, call.get("id")
        ready = next((c for c in step.calls if c.call_id == call_id), None) if isinstance(step, s.RunCalls) else None
        if ready is None:
            raise UsageError(f"{call_id!r} is not pending", hint="use the blocks in run.pending")
        if ready.call_id in self._under_way:
            raise UsageError(f"{call_id!r} runs already", hint="run each block of run.pending once")
        decided = False

        def after(saved: Saved) -> None:
            nonlocal decided
            decided = True
            self._after(saved)

        self._under_way.add(ready.call_id)
        try:
            with self._hearing_of_loss():
                saved = await self._drive.one(ready, after)
        except BaseException:
            if not decided:  # what was saved beside it left it out, as one that runs
                self._is_pending_again(ready)
            raise
        finally:
            self._under_way.discard(ready.call_id)
        run = self._writer.run
        block = next((b for b in m.blocks(run.messages[-1]) if b.get("tool_use_id") == call_id), None)
        if block is not None:
            return block
        found = run.call(str(call_id))
        if found is not None and found.result is not None:
            return m.tool_result(str(call_id), found.result.content, is_error=found.result.is_error)
        return m.tool_result(str(call_id), f"no result yet: {saved.reason or saved.status}", is_error=True)

    def _is_pending_again(self, call: s.RunCall) -> None:
        """It may have begun: what comes of that is decided when it is asked for again."""
        step, found = self._saved.step, self._writer.run.call(call.call_id)
        others = step.calls if isinstance(step, s.RunCalls) else ()
        if not self._saved.released and found is not None and found.result is None and call not in others:
            self._saved = replace(self._saved, step=s.RunCalls((*others, call)))

    @contextmanager
    def _hearing_of_loss(self) -> Iterator[None]:
        """A save that finds the lease gone knows it before the keeper does."""
        try:
            yield
        except LeaseLost:
            self._drive.lose()
            raise

    def call_sync(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """`call` for a plain program. From several threads: one after the other. Side by side: `await asyncio.gather(*map(run.call, run.pending))`."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            with self._one_thread:
                return sync.run(self.call(call))
        raise UsageError("call_sync cannot be used inside a running event loop", hint="await run.call(call)")

    def _check(self) -> None:
        if self._saved.released:  # first: the keeper finds a lease that we gave back gone as well
            raise Refused(f"run {self._writer.run.id} is {self._saved.status}: {self._saved.reason or 'nothing is to be done'}", run_id=self._writer.run.id,
                          hint=f"outlast show {self._writer.run.id}")  # fmt: skip
        if self._drive.lost:
            raise LeaseLost(f"run {self._writer.run.id} is held by somebody else now", run_id=self._writer.run.id)

    def _after(self, saved: Saved) -> None:
        self._saved = saved
        self._app._keeper.update(self._writer.lease)
        self._drive.tell(saved)
