"""Keeps LLM agents alive past the process they run in.

The public names, and nothing else. Importing anything here does no I/O.
"""

import logging

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

logging.getLogger("outlast").addHandler(logging.NullHandler())
