"""`Agent` and `Limits`: what an agent is, immutable and checked where it is written."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from functools import cached_property
from importlib import metadata
from typing import Any, Generic, Literal, TypeGuard

from pydantic import TypeAdapter, ValidationError

from outlast.core import codec
from outlast.core import messages as m
from outlast.core.run import Run
from outlast.core.step import LimitPolicy, Policy
from outlast.documents import Out, RunHead
from outlast.errors import UsageError
from outlast.gates import Approval, check_duration
from outlast.models.base import Model
from outlast.prices import CHARS_PER_TOKEN, DEFAULT_MAX_TOKENS, Prices, estimate, name_of
from outlast.tools import Retry, Tool, ToolSource, for_pydantic


@functools.cache
def library() -> str:
    """The version of this library: stored with every run."""
    return metadata.version("outlast")


NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


def _count(name: str, value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(f"{name} must be a number of at least 1, or None, not {value!r}")
    return value


class Limits:
    """Per run, counted from the journal, checked before each model call. `then="ask"`: the run waits in the inbox of role `to`, and somebody
    raises the limit or ends the run; "fail": it fails.

    `wall` counts from the start, waits included. `repeats`: the same call with the same result that often in a row.
    """

    def __init__(
        self,
        *,
        model_calls: int | None = 50,
        tokens: int | None = None,
        wall: timedelta | None = None,
        cost_usd: Decimal | float | None = None,
        repeats: int | None = 5,
        then: Literal["ask", "fail"] = "ask",
        to: str | None = None,
    ) -> None:
        self.model_calls, self.tokens, self.repeats = (
            _count("model_calls", model_calls),
            _count("tokens", tokens),
            _count("repeats", repeats),
        )
        self.wall = check_duration("wall", wall) if wall is not None else None
        self.cost_usd = None
        if cost_usd is not None:
            if (
                isinstance(cost_usd, bool)
                or not isinstance(cost_usd, Decimal | float | int)
                or not Decimal(str(cost_usd)).is_finite()
                or cost_usd <= 0
            ):
                raise UsageError(f"cost_usd must be a positive amount, not {cost_usd!r}", hint='cost_usd=Decimal("0.50")')
            self.cost_usd = Decimal(str(cost_usd))
        if then not in ("ask", "fail"):
            raise UsageError(f'then must be "ask" or "fail", not {then!r}')
        if to is not None and (not isinstance(to, str) or not to.strip()):
            raise UsageError(f"to must be a role, not {to!r}")
        self.then, self.to = then, to

    def policy(self) -> LimitPolicy:
        return LimitPolicy(self.model_calls, self.tokens, self.wall, self.then, self.to, self.cost_usd, self.repeats)

    def to_dict(self) -> dict[str, Any]:
        return {k: str(v) if v is not None else None for k, v in sorted(vars(self).items())}


class Agent(Generic[Out]):
    """A model with instructions, tools and limits. Immutable; `replace` gives a changed one.

    Args:
        name: stored with every run: a worker takes the runs of the agents that it knows by name.
        model: "anthropic:claude-sonnet-5-5", or any async callable (outlast.models.Model).
        instructions: a text, or `instructions(run)`, asked before every model call.
        tools: from `@tool`, of an MCPServer, or another agent's `as_tool()`.
        output: what the last answer must be: `str`, or a pydantic model, dataclass or TypedDict for typed output.
        limits: per run.
        model_settings: sent as they are: max_tokens, thinking, output_config, ...
        retry: of model calls; the provider SDK's own retries are off.
        parallel_calls: how many calls of one answer run side by side.
        version, on_change: what happens to runs in flight when this code changes.
    Raises:
        UsageError: a parameter is wrong; named.
    """

    def __init__(
        self,
        name: str,
        *,
        model: str | Model,
        instructions: str | Callable[[RunHead], str] = "",
        tools: Sequence[Tool[..., Any] | ToolSource] = (),
        output: type[Out] = str,  # type: ignore[assignment]  # Out defaults to str
        limits: Limits = Limits(),  # noqa: B008 - immutable
        model_settings: Mapping[str, Any] = {},
        retry: Retry = Retry(6),  # noqa: B008 - immutable
        parallel_calls: int = 8,
        version: str = "",
        on_change: Literal["continue", "warn", "hold", "pinned"] = "continue",
    ) -> None:
        if not isinstance(name, str) or not NAME.match(name):
            raise UsageError(f"the agent's name {name!r} must match {NAME.pattern}")
        where = f"agent {name}: "
        if not (isinstance(model, str) and model.strip()) and not callable(model):
            raise UsageError(
                f"{where}model must be PROVIDER:NAME or an async callable, not {model!r}", hint='model="anthropic:claude-sonnet-5-5"'
            )
        if not isinstance(instructions, str) and not callable(instructions):
            raise UsageError(f"{where}instructions must be a text or a function of the run, not {instructions!r}")
        if isinstance(tools, str) or not isinstance(tools, Sequence):
            raise UsageError(f"{where}tools must be a list, not {tools!r}")
        if not isinstance(limits, Limits):
            raise UsageError(f"{where}limits must be Limits(...), not {limits!r}")
        if not isinstance(retry, Retry):
            raise UsageError(f"{where}retry must be Retry(...), not {retry!r}")
        if on_change not in ("continue", "warn", "hold", "pinned"):
            raise UsageError(f'{where}on_change must be "continue", "warn", "hold" or "pinned", not {on_change!r}')
        if not isinstance(version, str):
            raise UsageError(f"{where}version must be a text, not {version!r}", hint='version="2026-11-29"')
        if not isinstance(model_settings, Mapping):
            raise UsageError(f"{where}model_settings must be a mapping, not {model_settings!r}", hint='model_settings={"max_tokens": 4096}')
        self.name, self.model, self.instructions, self.output = name, model, instructions, output
        self.limits, self.retry, self.version, self.on_change = limits, retry, version, on_change
        self.model_settings = dict(model_settings)
        self.parallel_calls = _count("parallel_calls", parallel_calls) or 1
        self.sources: tuple[ToolSource, ...] = tuple(t for t in tools if _is_server(t))
        self.tools: tuple[Tool[..., Any], ...] = tuple(self._checked(t, where) for t in tools if not _is_server(t))
        names = [n for t in self.tools for n in (t.name, *t.aliases)]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise UsageError(f"{where}two tools are called {', '.join(twice)}", hint='@tool(name="...")')
        self._typed = output is not str and output is not Any
        try:
            self._adapter: TypeAdapter[Any] | None = TypeAdapter(for_pydantic(output)) if self._typed else None
            self.output_schema: dict[str, Any] | None = self._adapter.json_schema() if self._adapter else None
        except Exception as e:  # noqa: BLE001 - pydantic has many ways to say that a type has no JSON form
            raise UsageError(f"{where}output {output!r} has no JSON schema: {str(e).splitlines()[0]}") from None
        self._whole = True

    def __setattr__(self, name: str, value: object) -> None:
        if "_whole" in self.__dict__:  # runs in flight are driven by it
            raise dataclasses.FrozenInstanceError(f"an agent is not changed ({name}): agent.replace(...) gives another one")
        super().__setattr__(name, value)

    @staticmethod
    def _checked(tool: Any, where: str) -> Tool[..., Any]:
        if isinstance(tool, Tool):
            return tool
        name = getattr(tool, "__name__", repr(tool))
        raise UsageError(
            f"{where}{name} is not a tool", hint=f"put @tool on {name}" if inspect.isroutine(tool) else "tools are made with @tool"
        )

    def replace(self, **changes: Any) -> Agent[Out]:
        """The same agent with other model, instructions, tools, limits or version."""
        if unknown := changes.keys() - {"model", "instructions", "tools", "limits", "version"}:
            raise UsageError(f"replace takes model, instructions, tools, limits and version, not {', '.join(sorted(unknown))}")
        return self._copy(changes)

    def one_by_one(self) -> Agent[Out]:
        """The same agent whose calls run one after another: for a crash test, which needs the same order every time."""
        return self._copy({"parallel_calls": 1})

    def _copy(self, changes: Mapping[str, Any]) -> Agent[Out]:
        now = {
            "model": self.model, "instructions": self.instructions, "tools": [*self.tools, *self.sources], "output": self.output,
            "limits": self.limits, "model_settings": self.model_settings, "retry": self.retry, "parallel_calls": self.parallel_calls,
            "version": self.version, "on_change": self.on_change,
        }  # fmt: skip
        return Agent(self.name, **{**now, **changes})

    def connected(self, tools: Sequence[Tool[..., Any]]) -> Agent[Out]:
        """The same agent with the tools that its servers brought, instead of the servers. Its code counts as the same: a run that was started
        by a process without the servers has not met another version."""
        if not self.sources:
            return self
        copy = self.replace(tools=[*self.tools, *tools])
        copy.__dict__["code"] = self.code
        return copy

    def as_tool(self, *, description: str, name: str | None = None, gate: Approval | None = None) -> Tool[..., Any]:
        """This agent as a tool of another one: the call is answered by a run of its own, `{run_id}:{call_id}`. Its one argument is the task."""

        def run(task: str) -> str:
            raise UsageError(f"{self.name} runs as a tool of another agent only")

        tool = Tool(
            run, effect="idempotent", gate=gate, check=None, key=None, key_ttl=None, retry=None, timeout=timedelta(seconds=120),
            name=name or re.sub(r"[^A-Za-z0-9_-]", "_", self.name), description=description, aliases=(), upgrade=None, repeatable=False)  # fmt: skip
        tool.agent = self
        return tool

    def __repr__(self) -> str:
        return f"<agent {self.name}: {', '.join(t.name for t in self.tools) or 'no tools'}>"

    # ---- what the runtime asks ------------------------------------------------------------------------------------------------

    def tool(self, name: str) -> Tool[..., Any] | None:
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Tool[..., Any]]:
        return {n: t for t in self.tools for n in (t.name, *t.aliases)}

    @cached_property
    def _limit_policy(self) -> LimitPolicy:
        return self.limits.policy()

    def policy(self, head: Callable[[], RunHead], *, guarded: bool = False, prices: Prices = {}) -> Policy:
        """The agent as plain data and pure functions, for the core. `prices`: what `Outlast(prices=)` says."""
        model, settings = name_of(self.model), self.model_settings

        def next_cost(run: Run) -> Decimal | None:
            new = sum(len(str(x.get("content"))) for x in (run.messages if not run.context_tokens else run.messages[-1:]))
            top = settings.get("max_tokens")
            most = top if isinstance(top, int) and top > 0 else DEFAULT_MAX_TOKENS
            return estimate(model, new + run.context_tokens * CHARS_PER_TOKEN, most, prices)

        tools = {t.name: t.policy(head) for t in self.tools}
        for tool in self.tools:
            for alias in tool.aliases:
                upgrade = functools.partial(tool.upgraded, alias) if tool.upgrade is not None else None
                tools[alias] = dataclasses.replace(tools[tool.name], name=alias, tool=tool.name, upgrade=upgrade)
        return Policy(
            tools, self._limit_policy, self.parallel_calls, self.output_problem, guarded, version=self.version, code=self.code, library=library(),
            on_change=self.on_change, next_cost=next_cost)  # fmt: skip

    def output_problem(self, message: m.Message) -> str | None:
        """What the model is told where its last answer is not of the output's type."""
        if self._adapter is None:
            return None
        try:
            self._adapter.validate_json(bare(m.said(message)))
        except ValidationError as e:
            found = "; ".join(
                f"{'.'.join(map(str, x['loc'])) or 'answer'}: {x['msg']}" for x in e.errors(include_url=False, include_context=False)[:10]
            )
            return f"The answer must be JSON of this schema and nothing else: {codec.encode(self.output_schema)}. Problems: {found}"
        return None

    def output_of(self, message: m.Message | None) -> Any:
        """The last answer as the output's type; plain text where it is str."""
        if message is None:
            return None
        if self._adapter is None:
            return m.said(message)
        try:
            return self._adapter.validate_json(bare(m.said(message)))
        except ValidationError:
            return None

    def instructions_for(self, head: RunHead) -> str:
        """Raises UsageError where the user's function does not give a text."""
        text = self.instructions if isinstance(self.instructions, str) else self.instructions(head)
        if not isinstance(text, str):
            raise UsageError(f"instructions of agent {self.name} must give a text, not {type(text).__name__}")
        return text

    @cached_property
    def code(self) -> str:
        """A digest of what the code says: instructions, tools, model, limits. Never of source text."""
        return codec.digest({
            "instructions": self.instructions if isinstance(self.instructions, str) else f"function {getattr(self.instructions, '__qualname__', '')}",
            "tools": [t.schema for t in self.tools],
            "model": self.model if isinstance(self.model, str) else _name_of(self.model),
            "limits": self.limits.to_dict(),
        })  # fmt: skip


def _name_of(model: Model) -> str:
    return str(getattr(model, "name", None) or getattr(model, "__qualname__", None) or type(model).__name__)


def bare(text: str) -> str:
    """JSON that a model wrapped in a code fence."""
    found = re.match(r"^\s*```(?:json)?\s*\n(.*)\n```\s*$", text, re.DOTALL)
    return found[1] if found else text


def _is_server(value: Any) -> TypeGuard[ToolSource]:
    """An MCPServer, told by its shape: this file does not import what only some need."""
    return hasattr(value, "connect_tools")
