"""One process of a case: forked off the caller, killed at a point or driven until the run is over; and what it leaves behind.

    FOLDER/world/         the working directory; what `deps` and `observe` get
    FOLDER/outlast.db     the store      model.log, tools.log, points.N, said.N, ended.N   written by the children, read by the parent

The child never returns into the caller's code: it ends by SIGKILL, by its alarm, or by `os._exit`.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from outlast.agent import Agent
from outlast.app import Outlast
from outlast.errors import OutlastError, UsageError
from outlast.models.scripted import ScriptedModel
from outlast.runtime import crashpoints
from outlast.testing.crashmatrix.person import Person, clock
from outlast.testing.crashmatrix.watch import Attempt, append, read, watch_uuids, watched

if TYPE_CHECKING:
    from outlast.app import Input
    from outlast.documents import Run

RUN = "crash-test"
LIMIT_S = 120  # of one process: one that hangs ends by its alarm, and the report says so
ROUNDS = 100  # of decisions and waits in one process
_WARM = {"outlast", "apsw", "genai_prices", "dbos", "sqlalchemy", "temporalio", "restate", "hypercorn", "inngest", "fastapi"}


@dataclass(frozen=True)
class Setup:
    """What every case runs. `lifespan` is entered by each process, in the case's own directory."""

    agent: Agent[Any]
    input: Input
    model: ScriptedModel
    deps: Callable[[Path], Any] | None = None
    observe: Callable[[Path], object] | None = None
    approve: bool = True
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None
    fixed_deps: Any = None  # of an app that was given an object; made before the fork, each process has its copy
    engine: str | None = None  # its URL: who takes the steps; None: the process itself
    apart: str = ""  # of this crash test: what its cases are called in the engine
    more_budget: bool = False  # is given where it is asked for, whatever `approve` says: the undisturbed run did not need any


@dataclass
class Ended:
    """What the store holds once the run is over, or waits for what nobody here can give."""

    status: str
    reason: str | None
    messages: dict[str, list[dict[str, Any]]]  # by run, children too
    statuses: dict[str, list[str]]  # of each checkpoint
    gates: list[list[Any]]  # run, gate, kind, tool, outcome, call
    problems: list[str]  # what the store finds wrong with itself
    loaded: list[str]  # modules of ours and of what we stand on
    model_calls: list[int] = field(default_factory=list)  # the turn of each call, from 0
    attempts: list[Attempt] = field(default_factory=list)


class DidNotEnd(Exception):
    """A process of a case broke, or hung."""


class Case:
    """The processes of one case, one after another, in a folder of its own."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.folder, self.lives = setup, folder, 0
        self.world.mkdir(parents=True)

    @property
    def world(self) -> Path:
        return self.folder / "world"

    @property
    def log(self) -> Path:
        return self.folder / "tools.log"

    def passed(self) -> list[str]:
        """The points of the last process, in order."""
        file = self.folder / f"points.{self.lives}"
        return file.read_text().splitlines() if file.exists() else []

    def killed_at(self, spec: str) -> bool:
        """One process that is killed at this point. False: it came to its end without passing it."""
        return self._live(spec) is None

    def finish(self) -> Ended:
        """One process that nobody kills. Raises DidNotEnd."""
        ended = self._live(None)
        if ended is None:
            raise DidNotEnd(f"a process that nobody was to kill was killed: {self._said()}")
        return ended

    def _live(self, die_at: str | None) -> Ended | None:
        """None: killed at the point."""
        self.lives += 1
        with warnings.catch_warnings():  # Python warns where the caller has threads; the child uses none of theirs, and an alarm ends it
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _be_child(self, die_at)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except BaseException:  # Ctrl-C: no child outlives us, or writes into a folder that is being removed
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
        if code == -signal.SIGKILL and die_at is not None:
            return None
        if code == -signal.SIGALRM:
            raise DidNotEnd(f"a process did not come to its end within {LIMIT_S} s{self._in()}: {self._said()}")
        if code != 0:
            raise DidNotEnd(f"a process broke ({code}){self._in()}: {self._said()}")
        ended = Ended(**json.loads((self.folder / f"ended.{self.lives}").read_text()))
        _warm(ended.loaded)
        log = self.folder / "model.log"
        ended.model_calls = [json.loads(line)["n"] for line in log.read_text().splitlines()] if log.exists() else []
        ended.attempts = read(self.log)
        return ended

    def _in(self) -> str:
        """Which tool it was in: a point before it was the last one it passed."""
        last = (self.passed() or [""])[-1]
        return f" in {last.partition(':')[2]}" if last.startswith(("tool.before:", "check.before:")) else ""

    def _said(self) -> str:
        file = self.folder / f"said.{self.lives}"
        lines = file.read_text(errors="replace").strip().splitlines() if file.exists() else []
        return lines[-1] if lines else "it said nothing"


def _warm(modules: list[str]) -> None:
    """Import what a child had to, so that the next one, forked off here, need not."""
    for name in modules:
        if name not in sys.modules:
            with suppress(ImportError):
                importlib.import_module(name)


# ---- in the child ---------------------------------------------------------------------------------------------------------------


def _be_child(case: Case, die_at: str | None) -> NoReturn:
    code = 1
    try:
        gc.freeze()  # the caller's objects are the caller's to close
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # what the caller lets pass (nohup), its children do
                signal.signal(number, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        _redirect(case.folder / f"said.{case.lives}")
        os.chdir(case.world)
        _arm(case.folder / f"points.{case.lives}", die_at)
        watch_uuids()
        ended = _drive(case)
        crashpoints.arm(None)
        (case.folder / f"ended.{case.lives}").write_text(json.dumps(ended))
        code = 0
    except BaseException as e:  # noqa: BLE001 - whatever it is, it must not go on in the caller's code
        with suppress(BaseException):
            traceback.print_exc()
            if isinstance(e, OutlastError):
                sys.stderr.write(f"{e} ({e.hint})\n" if e.hint else f"{e}\n")
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(file: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    said = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    # The caller's may be a test runner's own; these last as long as the process.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0, closefd=False), *(os.fdopen(n, "w", 1, closefd=False) for n in (1, 2))


def _arm(file: Path, die_at: str | None) -> None:
    kill = crashpoints.kill_at(die_at) if die_at is not None else None

    def hook(name: str) -> None:
        append(file, name)
        if kill is not None:
            kill(name)

    crashpoints.arm(hook)


def _drive(case: Case) -> dict[str, Any]:
    setup, folder = case.setup, case.folder
    now = clock(folder / "clock")
    agent = watched(setup.agent, case.log, model=ScriptedModel(setup.model.turns, log=folder / "model.log"))
    deps = _deps(setup.deps, case.world) if setup.deps is not None else setup.fixed_deps
    lifespan = setup.lifespan if setup.deps is None else None
    engine = _engine(case)
    with Outlast(
        folder / "outlast.db", agents=[agent], deps=None if lifespan else deps, lifespan=lifespan, clock=now, engine=engine or "built-in"
    ) as app:
        person = Person(app, now, folder / "clock", case.log, approve=setup.approve, more_budget=setup.more_budget)
        if engine is None:
            run = _driven(app, agent, setup.input, person)
        else:
            from outlast.testing.crashmatrix.byengine import driven

            run = asyncio.run(driven(app, agent, setup.input, RUN, person, ROUNDS))
        if run is None:
            raise DidNotEnd(f"the run goes round and round: {app.get(RUN).status}, {app.get(RUN).reason}")
        crashpoints.arm(None)
        return _found(app, run.status, run.reason)


def _deps(make: Callable[[Path], Any], world: Path) -> Any:
    try:
        return make(world)
    except (Exception, SystemExit) as e:
        raise UsageError(f"deps raised {type(e).__name__}: {e}") from e


def _engine(case: Case) -> Any:
    if case.setup.engine is None:
        return None
    from outlast.engines import resolve
    from outlast.testing.crashmatrix.byengine import Apart

    made = resolve(case.setup.engine)
    assert made is not None  # looked at before the first case
    return Apart(made, f"{case.setup.apart}.{case.folder.name}.")


def _driven(app: Outlast, agent: Agent[Any], input: Input, person: Person) -> Run[Any] | None:
    """Until the run is over, or waits for what nobody here can give; None: it goes round and round."""
    run = app.run_sync(agent, input, run_id=RUN)
    for _ in range(ROUNDS):
        if run.finished or not person.answer():
            return run
        run = app.resume_sync(RUN)
    return None


def _found(app: Outlast, status: str, reason: str | None) -> dict[str, Any]:
    runs = [app.get(head.run_id) for head in reversed(app.runs(limit=1000))]
    return {
        "status": status,
        "reason": reason,
        "messages": {run.run_id: run.messages for run in runs},
        "statuses": {run.run_id: [c.status for c in app.checkpoints(run.run_id)] for run in runs},
        "gates": [[g.run_id, g.gate_id, g.kind, g.tool, g.outcome, g.call_id] for run in runs for g in run.gates],
        "loaded": sorted(name for name in sys.modules if name.partition(".")[0] in _WARM),
        "problems": [": ".join(problem) for problem in app.store_check()],
    }
