"""Keeps LLM agents alive past the process they run in.

The public names, and nothing else. Importing anything here does no I/O, and each name's module is imported when the name is first used:
`outlast --help` and a web tier that only enqueues pay for nothing else.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.agent import Agent, Limits
    from outlast.app import Input, Outlast
    from outlast.documents import Checkpoint, Event, Gate, Message, Notice, Run, RunHead, Status, Tags
    from outlast.errors import OutlastError, ToolFailed
    from outlast.gates import Approval, Hours, approval
    from outlast.openrun import OpenRun
    from outlast.tools import Outcome, Retry, Tool, ToolContext, ToolResult, Wait, tool

__all__ = [
    "Agent", "Approval", "Checkpoint", "Event", "Gate", "Hours", "Input", "Limits", "Message", "Notice", "OpenRun", "Outcome", "Outlast",
    "OutlastError", "Retry", "Run", "RunHead", "Status", "Tags", "Tool", "ToolContext", "ToolFailed", "ToolResult", "Wait", "approval", "tool",
]  # fmt: skip

_HOMES = {
    "agent": ("Agent", "Limits"),
    "app": ("Input", "Outlast"),
    "documents": ("Checkpoint", "Event", "Gate", "Message", "Notice", "Run", "RunHead", "Status", "Tags"),
    "errors": ("OutlastError", "ToolFailed"),
    "gates": ("Approval", "Hours", "approval"),
    "openrun": ("OpenRun",),
    "tools": ("Outcome", "Retry", "Tool", "ToolContext", "ToolResult", "Wait", "tool"),
}

logging.getLogger("outlast").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"outlast.{home}"), name)
            return value
    raise AttributeError(f"module 'outlast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
