"""One thread, one seed, one virtual clock: an event loop whose every choice is drawn from a list that can be kept, cut and played again.

Rules
1. Whatever is not decided by the code is a choice: which process goes on, how long a store call takes, who dies where, who is paused.
   Choice 0 is always the calm one, so that a schedule with more zeros is a simpler one.
2. Callbacks belong to the process (a context variable) that made them. A dead process's are dropped, a paused one's wait.
3. Within a process the order is asyncio's own; between processes it is chosen.
4. A store call runs inline, after a delay; it blocks nobody, as a thread would not.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heappop, heappush
from typing import Any


class Crash(BaseException):
    """This process is gone."""


class Livelock(AssertionError):
    """Something is done again and again, and nothing comes of it."""


HEARD_AFTER_S = (0.01, 2.0, 8.0)  # a commit, by who watches the store; later commits are heard of together
MOST_STEPS = 60_000  # of a schedule; a long one has 8,000


@dataclass(eq=False)
class Process:
    """A simulated process: whose callbacks run, until it dies."""

    name: str
    born: int = 0
    faulty: bool = False  # may die and be paused
    dead: bool = False
    paused_until: float = 0.0
    inside: list[str] = field(default_factory=list)  # the windows that it is in: its calls to the outside that are in flight
    unsaved: set[tuple[object, str | None]] = field(default_factory=set)  # what came of them, and is not saved
    acting: set[asyncio.Future[Any]] = field(default_factory=set)  # calls between the last look at the clock and the act
    ready: deque[Step] = field(default_factory=deque)

    @property
    def owner(self) -> str:
        """As `stores.owner` writes it: another incarnation is another start."""
        return f"sim/boot/ns/{self.name}/{self.born}"

    def acts(self) -> bool:
        """Is one of its calls about to act? One instant, as far as anybody can tell. (Some are cancelled before their first line.)"""
        self.acting = {call for call in self.acting if not call.done()}
        return bool(self.acting)


class Step:
    """A callback, of the process that made it. As much of `asyncio.Handle` and `TimerHandle` as anybody here uses."""

    __slots__ = ("args", "callback", "context", "process", "when")

    def __init__(self, callback: Any, args: tuple[Any, ...], context: Context | None, when: float) -> None:
        self.callback, self.args, self.when = callback, args, when
        self.context = context if context is not None else copy_context()
        self.process: Process = self.context.get(PROCESS, WORLD)

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None


WORLD = Process("world")
PROCESS: ContextVar[Process] = ContextVar("process", default=WORLD)
LEASE: ContextVar[object] = ContextVar("lease", default=None)  # which one whatever runs here is driven under
ACT: ContextVar[Any] = ContextVar("act", default=None)  # the call that a tool's first line belongs to


class Choices:
    """Draws from a seed, or plays what was kept: `kept` maps the number of a choice to its value, all others are 0."""

    def __init__(self, seed: int, kept: Mapping[int, int] | None = None) -> None:
        self._rng = random.Random(f"choices-{seed}")  # noqa: S311 - a seeded schedule is the point
        self._kept = kept
        self.made: dict[int, int] = {}  # those that are not 0
        self.n = 0

    def pick(self, n: int, chance: float = 1.0) -> int:
        """0 to n - 1; something else than 0 with that chance at most."""
        at, self.n = self.n, self.n + 1
        if self._kept is not None:
            value = min(self._kept.get(at, 0), n - 1)
        elif n < 2 or (chance < 1.0 and self._rng.random() >= chance):
            value = 0
        else:
            value = self._rng.randrange(n) if chance >= 1.0 else self._rng.randrange(1, n)
        if value:
            self.made[at] = value
        return value

    def chance(self, p: float) -> bool:
        return self.pick(2, p) == 1


class Loop(asyncio.BaseEventLoop):
    """The event loop of a schedule. `pause` is asked before every step of a process that may be paused, for how long."""

    _ready: deque[Step]
    _scheduled: list[tuple[float, int, Step]]  # first come, first served

    def __init__(self, choices: Choices, *, pause: Callable[[Process], float], latency: Callable[[], float]) -> None:
        super().__init__()
        self.choices, self._pause, self._latency = choices, pause, latency
        self.now = 0.0
        self.steps = 0
        self.stop_with: Exception | None = None  # a finding: the schedule ends with it, after the present step
        self._able: list[Process] = []
        self._sleeping: list[Process] = []
        self._died = False  # since the last step
        self._timers = 0
        self._waiters: list[tuple[Process, Callable[[], None], bool]] = []
        self._trace = sha256()

    # ---- time, and what runs next -------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def note(self, *what: object) -> None:
        """Part of the trace's hash."""
        self._trace.update(f"{self.now:.6f} {what}\n".encode())

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()

    def _run_once(self) -> None:
        if self.stop_with is not None:
            raise self.stop_with
        if self._ready or self._died:
            self._sort()
        while not self._able:
            self._advance()
            self._sort()
        process = self._able[self.choices.pick(len(self._able)) if len(self._able) > 1 else 0]
        if process.faulty and not (process.acting and process.acts()) and (pause := self._pause(process)):
            process.paused_until = self.now + pause
            self._able.remove(process)
            self._sleeping.append(process)
            self.call_at(process.paused_until, self._wake, process)
            return
        step = process.ready.popleft()
        if not process.ready:
            self._able.remove(process)
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise Livelock(f"I17: {MOST_STEPS} steps, and it is only {self.now:.0f} s: something goes round in circles")
        if step.callback is not None:
            try:
                step.context.run(step.callback, *step.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as e:  # noqa: BLE001 - as asyncio does
                self.call_exception_handler({"message": "a callback raised", "exception": e})

    def _sort(self) -> None:
        """New callbacks to their processes."""
        ready = self._ready
        while ready:
            step = ready.popleft()
            process = step.process
            if process.dead or step.callback is None:
                continue
            process.ready.append(step)
            if len(process.ready) == 1 and process not in self._sleeping:
                self._able.append(process)
        if self._died:
            self._died = False
            for p in self._able:
                if p.dead:
                    p.ready.clear()
            self._able = [p for p in self._able if not p.dead]

    def died(self, process: Process) -> None:
        """Nothing of it runs any more."""
        process.dead = self._died = True

    @property
    def somebody_sleeps(self) -> bool:
        return any(not p.dead for p in self._sleeping)

    @property
    def sleeps_for(self) -> float:
        """How long from now on somebody is paused."""
        return max((p.paused_until - self.now for p in self._sleeping if not p.dead), default=0.0)

    def _wake(self, process: Process) -> None:
        if process in self._sleeping:
            self._sleeping.remove(process)
            if process.ready and not process.dead:
                self._able.append(process)

    def _advance(self) -> None:
        """Nothing can run now: on to the next instant at which something can."""
        while self._scheduled:
            when, _, step = heappop(self._scheduled)
            if step.callback is None or step.process.dead:
                continue
            self.now = max(self.now, when)
            self._ready.append(step)
            return
        raise AssertionError("nothing can ever happen any more")

    # ---- asyncio's own, without what nobody needs here (checks of threads, debug mode) ------------------------------------------

    def get_debug(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]  # of our own
        step = Step(callback, args, context, self.now)
        self._ready.append(step)
        return step

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]  # of our own
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]  # of our own
        step = Step(callback, args, context, when)
        self._timers += 1
        heappush(self._scheduled, (when, self._timers, step))
        return step

    # ---- the store's threads ------------------------------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]  # for our callers only
        future = self.create_future()

        def run() -> None:
            try:
                value = func(*args)
            except Crash:
                return
            except BaseException as e:  # noqa: BLE001 - to whoever awaits it, as an executor does
                if not future.done():
                    future.set_exception(e)
                return
            if isinstance(value, Change):
                value.hear(self, lambda token: None if future.done() else future.set_result(token))
            elif not future.done():
                future.set_result(value)

        delay = self._latency()
        self.call_later(delay, run) if delay else self.call_soon(run)
        return future

    def on_change(self, heard: Callable[[], None], timeout: float, *, for_work: bool = False) -> None:
        """Call `heard` after the next commit (`for_work`: that leaves something to be taken), or when the time is over."""
        done = False

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                timer.cancel()
                heard()

        timer = self.call_later(timeout, once)
        self._waiters.append((PROCESS.get(), once, for_work))

    async def change(self, at_most: float) -> None:
        """Until something is committed, or the time is over."""
        heard = self.create_future()
        self.on_change(lambda: None if heard.done() else heard.set_result(None), at_most)
        await heard

    def changed(self, *, work: bool) -> None:
        """Something was committed: whoever watches the store hears of it, in its own process, sooner or later."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            process, heard, for_work = waiter
            if for_work and not work and not process.dead:
                self._waiters.append(waiter)
            elif not process.dead:
                token = PROCESS.set(process)
                try:
                    self.call_later(HEARD_AFTER_S[self.choices.pick(3)] + self._latency(), heard)
                finally:
                    PROCESS.reset(token)

    def forget(self) -> None:
        """Drop all that waits."""
        self._ready.clear()
        self._scheduled.clear()
        self._waiters.clear()
        self._able.clear()
        self._sleeping.clear()

    # ---- what of an event loop is not needed here ---------------------------------------------------------------------------

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]  # for our callers only
        return self.call_soon(callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, Crash | asyncio.CancelledError):
            self.problems.append(f"{context.get('message')}: {type(error).__name__}: {error}")

    problems: list[str] = []  # noqa: RUF012 - replaced for every schedule

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class Change:
    """What an idle worker's waiting for a commit gives here, instead of blocking a thread: who awaits it hears of the next that is of use."""

    def __init__(self, version: Callable[[], int], timeout: float) -> None:
        self._version, self._timeout = version, timeout

    def hear(self, loop: Loop, tell: Callable[[int], None]) -> None:
        loop.on_change(lambda: tell(self._version()), self._timeout, for_work=True)
