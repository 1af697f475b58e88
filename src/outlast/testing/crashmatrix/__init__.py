"""The crash test of an agent: run it once undisturbed, then once for every crash point with a SIGKILL there, and compare.

    matrix.py   which cases there are, in which order, and the control that must go red
    life.py     one process of a case: forked, killed at a point or driven to the end; what it leaves behind
    byengine.py the same process as the worker of an engine, for `crashtest --engine`
    watch.py    the log of what the tools did, written by wrappers around them
    person.py   who answers the gates
    judge.py    what differs from the undisturbed run, in words that say what to declare instead
    report.py   the report: findings, table rows, documents, JUnit XML

Rules
1. The agent's code is not changed and not imported by name: children are forked from the caller, so an agent may be a closure.
2. Every case has a folder of its own: `deps(folder)` makes its world there, `observe(folder)` looks at it. Nothing else is shared.
3. A death is a real SIGKILL of a real process. What it leaves is read by the next process, never by us.
4. The parent opens no store and starts no thread: it forks, waits, reads what the children wrote, and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outlast.runtime.crashpoints import POINTS
from outlast.testing.crashmatrix.report import CrashReport

if TYPE_CHECKING:
    from outlast.agent import Agent
    from outlast.app import Input
    from outlast.models.scripted import ScriptedModel


class CrashMatrix(Protocol):
    """What the pytest fixture `crash_matrix` gives. Every case has its own directory: `deps(dir)` is ctx.deps there, `observe(dir)` must
    be equal in all.

    Args:
        model: its turns are played; its log is not used, every case has its own.
        approve: what is asked of people is approved; False: it is rejected.
        pairs: also kill the process that takes up the run, at each of its points.
    Raises:
        UsageError: the undisturbed run fails, or `observe` raises after it: there is nothing to compare with.
    """

    def __call__(
        self,
        agent: Agent[Any],
        input: Input,
        *,
        model: ScriptedModel,
        deps: Callable[[Path], Any] = ...,
        observe: Callable[[Path], object] = ...,
        approve: bool = True,
        pairs: bool = False,
    ) -> CrashReport: ...


__all__ = ["POINTS", "CrashMatrix", "CrashReport"]
