"""An MCP server as others write them: `python server.py FOLDER [PORT]`, over stdio, or with a port over Streamable HTTP.

What it did stands in FOLDER/calls, one line a call with the key that came along.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

FOLDER = Path(sys.argv[1])
DOT = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
server = MCPServer("issues")


def note(name: str, ctx: Context[Any, Any] | None = None) -> None:
    meta = dict(ctx.request_context.meta or {}) if ctx is not None else {}
    with (FOLDER / "calls").open("a") as f:
        f.write(json.dumps({"name": name, "key": meta.get("outlast/idempotency-key")}) + "\n")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def list_issues(team: str, limit: int = 10) -> str:
    """List issues."""
    note("list_issues")
    return f"{limit} issues of {team}"


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def label_issue(id: str, label: str, ctx: Context[Any, Any]) -> str:
    """Put a label on an issue."""
    note("label_issue", ctx)
    if label == "crash" and not (FOLDER / "crashed").exists():
        (FOLDER / "crashed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{id} is {label}"


@server.tool()
def create_issue(title: str, ctx: Context[Any, Any]) -> dict[str, str]:
    """Create an issue."""
    note("create_issue", ctx)
    if title == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if title == "bad":
        raise ToolError("a title must be good")
    return {"id": "ISSUE-1", "title": title}


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def screenshot() -> list[Any]:
    """What it looks like."""
    return ["a dot", Image(data=DOT, format="png")]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
