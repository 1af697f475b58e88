"""Public test helpers: a strict stand-in for the model provider, a clock that moves by hand, a context for calling tools,
the crash test.

Rule: importing this costs next to nothing; each helper is loaded when it is first named. A new one is a line in `_LAZY`, and one in each
list beside it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.runtime.clock import ManualClock
    from outlast.testing.context import tool_context
    from outlast.testing.crashmatrix import CrashMatrix, CrashReport
    from outlast.testing.fake_api import Attempts, Cut, ErrorInStream, FakeMessagesAPI, Fault, Garbage, Slow

__all__ = [
    "Attempts",
    "CrashMatrix",
    "CrashReport",
    "Cut",
    "ErrorInStream",
    "FakeMessagesAPI",
    "Fault",
    "Garbage",
    "ManualClock",
    "Slow",
    "tool_context",
]

# Public name -> the module that has it.
_LAZY = {
    "Attempts": "outlast.testing.fake_api",
    "CrashMatrix": "outlast.testing.crashmatrix",
    "CrashReport": "outlast.testing.crashmatrix",
    "Cut": "outlast.testing.fake_api",
    "ErrorInStream": "outlast.testing.fake_api",
    "FakeMessagesAPI": "outlast.testing.fake_api",
    "Fault": "outlast.testing.fake_api",
    "Garbage": "outlast.testing.fake_api",
    "ManualClock": "outlast.runtime.clock",
    "Slow": "outlast.testing.fake_api",
    "tool_context": "outlast.testing.context",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
