"""`MCPServer`: the tools of any MCP server as an agent's tools. Needs the extra `mcp`; the SDK is imported when a server is connected.

Rules
1. A server's hints are hints: `readOnlyHint` makes a tool "read", `idempotentHint` "idempotent", anything else, and nothing, "at_most_once".
   `effects=` overrides; a server that is not trusted gets `effects=` for every tool.
2. The idempotency key goes along in `_meta`, for servers that know it.
3. What the server answers is the outcome: `isError` is a result that the model reads. A server that is gone in mid-call leaves the outcome
   unknown, as a time-out does. Arguments that it refuses were surely not acted upon.
4. A connection has a task of its own, which outlives a lost connection: the next call connects anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Literal

from outlast.core import codec
from outlast.errors import OutlastError, ToolFailed, UsageError
from outlast.gates import Approval
from outlast.tools import DEFAULT_TIMEOUT, EFFECTS, NAME, Tool, ToolContext, ToolResult

KEY = "outlast/idempotency-key"  # in `_meta` of each call
CONNECT_S = 30.0
REFUSED = (-32601, -32602)  # JSON-RPC: no such method, invalid params: surely not done
MAX_TOOLS = 1000  # of one server: a listing that never ends is a broken one
IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")  # what the Messages API takes


class MCPServer:
    """The tools of one server, known once it is connected: with `work`, `run`, `resume`, or `async with app`.

    Args:
        target: a URL (Streamable HTTP), the SDK's `StdioServerParameters`, a transport, or in tests a server object.
        prefix: before each tool's name.
        only: the server's tools that the agent gets, by the server's names; default: all.
        effects: by the server's names: what a crash may do, where the hints do not say it or are not believed.
        gates: by the server's names: `approval(...)`.
    Raises:
        UsageError: a parameter is wrong. On connecting also: the server cannot be reached, or lacks a tool that is named here.
    """

    def __init__(
        self,
        target: Any,
        *,
        prefix: str = "",
        only: Sequence[str] | None = None,
        effects: Mapping[str, Literal["read", "idempotent", "at_most_once"]] = {},
        gates: Mapping[str, Approval] = {},
    ) -> None:
        if prefix and not NAME.match(prefix):
            raise UsageError(f"prefix must match {NAME.pattern}, not {prefix!r}")
        if isinstance(only, str):
            raise UsageError(f"only must be a list of names, not {only!r}", hint=f"only=[{only!r}]")
        for name, effect in effects.items():
            if effect not in EFFECTS:
                raise UsageError(f"effects: {name} must be one of {', '.join(EFFECTS)}, not {effect!r}")
        for name, gate in gates.items():
            if not isinstance(gate, Approval):
                raise UsageError(f"gates: {name} must be approval(...), not {gate!r}")
        if only is not None and (beside := sorted({*effects, *gates} - set(only))):
            raise UsageError(f"effects and gates name {', '.join(beside)}, which only= leaves out")
        self.target, self.prefix, self.only = target, prefix, tuple(only) if only is not None else None
        self.effects, self.gates = dict(effects), dict(gates)

    def __repr__(self) -> str:
        return f"<MCP server {self.shown}>"

    @property
    def shown(self) -> str:
        """For messages: no secrets of a URL or a command."""
        if isinstance(self.target, str):
            return re.sub(r"//[^/@]*@", "//", self.target.partition("?")[0])
        return str(getattr(self.target, "command", None) or getattr(self.target, "name", None) or type(self.target).__name__)

    async def connect_tools(self, stack: AsyncExitStack) -> Sequence[Tool[..., Any]]:
        """Connect, for as long as `stack` lives, and give the tools."""
        connection = await stack.enter_async_context(_Connection(self).open())
        listed = await connection.listed()
        there = {tool.name for tool in listed}
        if missing := sorted({*(self.only or ()), *self.effects, *self.gates} - there):
            raise UsageError(
                f"the MCP server {self.shown} has no tool {', '.join(missing)}", hint=f"it has {', '.join(sorted(there)) or 'none'}"
            )
        return [self._tool(connection, tool) for tool in listed if self.only is None or tool.name in self.only]

    def _tool(self, connection: _Connection, listed: Any) -> ServerTool:
        hints = listed.annotations
        effect = self.effects.get(listed.name)
        if effect is None:
            effect = "read" if hints and hints.read_only_hint else "idempotent" if hints and hints.idempotent_hint else "at_most_once"
        name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{self.prefix}{listed.name}")[:64]
        description = listed.description or listed.title or ""
        return ServerTool(connection, listed.name, name=name, description=description, effect=effect, gate=self.gates.get(listed.name),
                          schema=listed.input_schema)  # fmt: skip


class ServerTool(Tool[..., Any]):
    """A tool whose schema and whose work are the server's."""

    def __init__(
        self, connection: _Connection, theirs: str, *, name: str, description: str, effect: str, gate: Approval | None, schema: Mapping[str, Any],
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:  # fmt: skip
        async def call(outlast_context: ToolContext[Any]) -> Any:
            raise AssertionError

        super().__init__(
            call, effect=effect, gate=gate, check=None, key=None, key_ttl=None, retry=None, timeout=timeout, name=name, description=description,
            aliases=(), upgrade=None, repeatable=False)  # fmt: skip

        async def call_server(*, outlast_context: ToolContext[Any], **args: Any) -> ToolResult:
            return await connection.call(theirs, args, outlast_context, again=effect != "at_most_once")

        self.fn = call_server
        self.input_schema = {**schema, "properties": dict(schema.get("properties", {}))}
        self.schema_digest = codec.digest(self.input_schema)

    def validated(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """As they are: the server reads them by its own schema."""
        return dict(args)

    def problem(self, args: Mapping[str, Any]) -> str | None:
        import jsonschema  # type: ignore[import-untyped]  # the SDK brings it, without types

        try:
            found = list(jsonschema.validators.validator_for(self.input_schema)(self.input_schema).iter_errors(dict(args)))
        except jsonschema.exceptions.SchemaError as e:
            return f"the server's own schema is broken: {e.message}"
        return "; ".join(f"{'.'.join(map(str, e.absolute_path)) or 'arguments'}: {e.message}" for e in found[:10]) or None


class _Connection:
    """One connection, kept by a task of its own: an SDK's client must be left by the task that entered it."""

    def __init__(self, server: MCPServer) -> None:
        self.server = server
        self.task: asyncio.Task[None] | None = None
        self.client: Any = None
        self.stop = asyncio.Event()
        self.connecting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[_Connection]:
        await self.connect()
        try:
            yield self
        finally:
            await self.leave()

    async def connect(self) -> Any:
        async with self.connecting:
            if self.client is not None and self.task is not None and not self.task.done():
                return self.client
            await self.leave()
            try:
                from mcp import Client
            except ModuleNotFoundError:
                raise UsageError("MCP servers need the SDK", hint="pip install 'outlast[mcp]'") from None
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            stop = self.stop = asyncio.Event()

            async def keep() -> None:
                try:
                    async with Client(self.server.target) as client:
                        if not ready.done():
                            ready.set_result(client)
                        await stop.wait()
                except Exception as e:  # noqa: BLE001 - whatever a transport raises
                    if not ready.done():
                        ready.set_exception(e)

            self.task = asyncio.ensure_future(keep())
            try:
                self.client = await asyncio.wait_for(ready, CONNECT_S)
            except Exception as e:
                await self.leave()
                raise UsageError(
                    f"the MCP server {self.server.shown} cannot be reached: {_why(e)}", hint="start it, or mend MCPServer(...)"
                ) from e
            return self.client

    async def leave(self) -> None:
        task, self.task, self.client = self.task, None, None
        if task is None:
            return
        self.stop.set()
        await asyncio.wait({task}, timeout=5)
        task.cancel()
        await asyncio.wait({task}, timeout=5)

    async def listed(self) -> list[Any]:
        client = await self.connect()
        found: list[Any] = []
        cursor: str | None = None
        while len(found) <= MAX_TOOLS:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise UsageError(f"the MCP server {self.server.shown} lists more than {MAX_TOOLS} tools", hint="only=[...]")

    async def call(self, name: str, args: Mapping[str, Any], ctx: ToolContext[Any], *, again: bool) -> ToolResult:
        """`again`: a call that could not begin may be tried again by its tool's rules."""
        try:
            client = await self.connect()
        except OutlastError as e:
            raise (ConnectionError if again else ToolFailed)(str(e)) from e  # this attempt was surely not made
        from mcp import MCPError

        asked = asyncio.ensure_future(client.call_tool(name, dict(args), meta={KEY: ctx.idempotency_key}))
        assert self.task is not None
        try:
            await asyncio.wait({asked, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ConnectionError(f"the MCP server {self.server.shown} was gone in mid-call")
            return _result(asked.result())
        except MCPError as e:
            if e.code in REFUSED:
                raise ToolFailed(f"{name}: {e.message}") from e
            self._lost(e)
            raise ConnectionError(f"the MCP server {self.server.shown}: {_why(e)}") from e
        except Exception as e:
            self._lost(e)
            if isinstance(e, ConnectionError):
                raise
            raise ConnectionError(f"the MCP server {self.server.shown} was gone in mid-call: {_why(e)}") from e
        finally:
            asked.cancel()

    def _lost(self, e: Exception) -> None:
        """The next call connects anew."""
        self.client = None
        self.stop.set()


def _why(e: BaseException) -> str:
    while isinstance(e, BaseExceptionGroup) and e.exceptions:
        e = e.exceptions[0]
    text = " ".join(str(e).split())[:300]
    return f"{type(e).__name__}: {text}" if text else type(e).__name__


def _result(answer: Any) -> ToolResult:
    blocks = [block for content in answer.content for block in _block(content)]
    if not blocks and answer.structured_content is not None:
        blocks = [{"type": "text", "text": codec.encode(codec.clean(answer.structured_content))}]
    if all(block["type"] == "text" for block in blocks):
        return ToolResult("\n".join(block["text"] for block in blocks), is_error=bool(answer.is_error))
    return ToolResult(blocks, is_error=bool(answer.is_error))


def _block(content: Any) -> list[dict[str, Any]]:
    """A content block of MCP as one of the Messages API; what that does not know is described."""
    match content.type:
        case "text":
            return [{"type": "text", "text": content.text}]
        case "image" if content.mime_type in IMAGES:
            return [{"type": "image", "source": {"type": "base64", "media_type": content.mime_type, "data": content.data}}]
        case "resource" if getattr(content.resource, "text", None) is not None:
            return [{"type": "text", "text": f"{content.resource.uri}:\n{content.resource.text}"}]
        case "resource_link":
            return [{"type": "text", "text": f"{content.name}: {content.uri}"}]
        case _:
            kind = getattr(content, "mime_type", None) or content.type
            return [{"type": "text", "text": f"({kind}, not shown)"}]
