"""`@tool`: a function that a model may call, with what a crash may do to it; `ToolContext`, `Outcome`, `ToolResult`, `Wait`, `Retry`.

The parameter annotated with `ToolContext` is filled by us and never by the model. A tool knows nothing of runs: what may run, when, and
what its outcome means is decided in `core`.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import sys
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from types import UnionType
from typing import Annotated, Any, Generic, Literal, ParamSpec, Protocol, Union, overload

import typing_extensions
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from typing_extensions import TypeVar

from outlast.core import codec
from outlast.core.gate import GatePolicy
from outlast.core.step import ToolPolicy
from outlast.documents import Gate, RunHead, Tags
from outlast.errors import UsageError
from outlast.gates import Approval, Hours, check_duration, check_instant

P = ParamSpec("P")
R = TypeVar("R")
Deps = TypeVar("Deps", default=Any)

Effect = Literal["read", "idempotent", "at_most_once"]
EFFECTS: tuple[str, ...] = ("read", "idempotent", "at_most_once")
NAME = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
DEFAULT_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class ToolContext(Generic[Deps]):
    """What a tool may know of the run that it acts for.

    `idempotency_key` is the same on every attempt. `attempt` above 1: an earlier attempt's outcome was not saved. `deadline`: when this
    attempt times out. `deps`: what the lifespan yields, or `Outlast(deps=)`. `decision`: the decision that let this call through.
    """

    run_id: str
    call_id: str
    idempotency_key: str
    agent: str
    attempt: int
    deadline: datetime
    tags: Tags
    deps: Deps
    decision: Gate | None = None


@dataclass(frozen=True)
class Outcome:
    """What `check=` returns. Anything else, None too, counts as unknown."""

    kind: Literal["happened", "not_happened", "unknown"]
    result: Any = None
    reason: str = ""

    @staticmethod
    def happened(result: Any) -> Outcome:
        """It was done; `result` is what the model reads."""
        return Outcome("happened", result)

    @staticmethod
    def not_happened() -> Outcome:
        """It was surely not done: it may be done now."""
        return Outcome("not_happened")

    @staticmethod
    def unknown(reason: str) -> Outcome:
        """It cannot be told: a person is asked."""
        return Outcome("unknown", reason=reason)


@dataclass(frozen=True)
class ToolResult:
    """Return it for images and other content blocks; plain values need no wrapping: they are shown as JSON."""

    content: str | Sequence[Mapping[str, Any]]
    is_error: bool = field(default=False, kw_only=True)


class Wait:
    """Return it and the call stays open: it is answered by `app.event(run_id, event, data)` or by its time.

    Exactly one of `within` and `until`; `event=None` means the call id; `otherwise`: the result when nothing came in time.
    """

    def __init__(
        self,
        event: str | None = None,
        *,
        within: timedelta | None = None,
        until: datetime | None = None,
        hours: Hours | None = None,
        otherwise: Any = None,
    ) -> None:
        if (within is None) == (until is None):
            raise UsageError("Wait needs exactly one of within= and until=", hint="Wait(within=timedelta(days=3))")
        if event is not None and (not isinstance(event, str) or not 1 <= len(event) <= 128):
            raise UsageError(f"event must be a name of 1 to 128 characters, not {event!r}")
        if hours is not None and (within is None or not isinstance(hours, Hours)):
            raise UsageError("hours counts within= in these hours: give both, and Hours(...)")
        try:
            self.otherwise = codec.stored(otherwise)[1]
        except codec.Unstorable as e:
            raise UsageError(f"otherwise: {e}") from None
        self.event = event
        self.within = check_duration("within", within) if within is not None else None
        self.until = check_instant("until", until) if until is not None else None
        self.hours = hours

    def ends(self, now: datetime) -> datetime:
        if self.until is not None:
            return self.until
        assert self.within is not None
        return self.hours.add(now, self.within) if self.hours else now + self.within


class Retry:
    """How often to try again: exponential back-off with full jitter; a Retry-After that is longer is honoured.

    `attempts` counts the first one too. `on`: which exceptions of a read tool are tried again.
    """

    def __init__(
        self,
        attempts: int = 3,
        *,
        on: type[Exception] | tuple[type[Exception], ...] = Exception,
        backoff: timedelta = timedelta(seconds=1),
        max_backoff: timedelta = timedelta(minutes=5),
    ) -> None:
        if isinstance(attempts, bool) or not isinstance(attempts, int) or not 1 <= attempts <= 1000:
            raise UsageError(f"attempts must be a number from 1 to 1000, not {attempts!r}")
        kinds = on if isinstance(on, tuple) else (on,)
        if not kinds or not all(isinstance(k, type) and issubclass(k, Exception) for k in kinds):
            raise UsageError(f"on must be an exception class or a tuple of them, not {on!r}")
        self.attempts, self.on = attempts, on
        self.backoff, self.max_backoff = (
            check_duration("backoff", backoff, zero=True),
            check_duration("max_backoff", max_backoff, zero=True),
        )

    def delay(self, failures: int, retry_after: timedelta | None = None, rng: Callable[[], float] = random.random) -> timedelta:
        """Before the next try, after `failures` of them."""
        top = min(self.backoff * 2 ** min(failures - 1, 30), self.max_backoff)
        wait: timedelta = top * rng()
        return max(wait, retry_after or timedelta(0))

    def __repr__(self) -> str:
        return f"Retry({self.attempts})"


class ToolSource(Protocol):
    """Whatever brings tools that are only known once it is connected: an MCP server."""

    async def connect_tools(self, stack: AsyncExitStack) -> Sequence[Tool[..., Any]]:
        """Connect, for as long as `stack` lives, and give the tools."""
        ...


class Tool(Generic[P, R]):
    """What `@tool` gives. Call it like the function that it wraps."""

    def __init__(
        self, fn: Callable[P, R], *, effect: str, gate: Approval | None, check: Callable[..., Any] | None, key: Callable[..., str] | None,
        key_ttl: timedelta | None, retry: Retry | None, timeout: timedelta, name: str | None, description: str | None, aliases: Sequence[str],
        upgrade: Callable[[str, dict[str, Any]], dict[str, Any]] | None, repeatable: bool,
    ) -> None:  # fmt: skip
        self.fn = fn
        self.name = name if name is not None else getattr(fn, "__name__", "")
        if not NAME.match(self.name):
            raise UsageError(f"the tool's name {self.name!r} must match {NAME.pattern}", hint='@tool(name="...")')
        self._check_parameters(effect, gate, check, key, key_ttl, retry, repeatable)
        self.effect: str = effect
        self.gate, self.check, self.key, self.key_ttl, self.retry = gate, check, key, key_ttl, retry
        self.timeout = check_duration("timeout", timeout)
        if isinstance(aliases, str) or not all(isinstance(a, str) and NAME.match(a) for a in aliases):
            raise UsageError(
                f"@tool on {self.name}: aliases must be a list of names, not {aliases!r}", hint='aliases=["reply_to_customer"]'
            )
        if upgrade is not None and (not aliases or not callable(upgrade)):
            raise UsageError(f"@tool on {self.name}: upgrade is a function of (old name, arguments) and goes with aliases=")
        self.aliases, self.upgrade, self.repeatable = tuple(aliases), upgrade, repeatable
        doc, per_argument = _docstring(inspect.getdoc(fn) or "")
        self.description = description if description is not None else doc
        self.context_name, self._arguments, self._fields = _arguments(self.name, fn, per_argument)
        self.input_schema: dict[str, Any] = _schema(self._arguments)
        self.schema_digest = codec.digest(self.input_schema)
        self.__name__ = self.name
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    def _check_parameters(
        self, effect: str, gate: object, check: object, key: object, key_ttl: object, retry: object, repeatable: object
    ) -> None:
        where = f"@tool on {self.name}: "
        if effect not in EFFECTS:
            raise UsageError(f"{where}effect must be one of {', '.join(EFFECTS)}, not {effect!r}")
        if gate is not None and not isinstance(gate, Approval):
            raise UsageError(
                f"{where}gate must be approval(...), not {gate!r}", hint='gate=approval(to="support-lead", within=timedelta(hours=4))'
            )
        if check is not None and (effect != "at_most_once" or not callable(check)):
            raise UsageError(f"{where}check is a function for effect='at_most_once' only")
        if key is not None and (effect == "read" or not callable(key)):
            raise UsageError(f"{where}key is a function of (run, **args) and for tools that have an effect")
        if key_ttl is not None:
            check_duration("key_ttl", key_ttl)
            if effect != "idempotent":
                raise UsageError(f"{where}key_ttl is for effect='idempotent' only")
        if retry is not None and (effect == "at_most_once" or not isinstance(retry, Retry)):
            raise UsageError(
                f"{where}retry is Retry(...) for effect='read' and 'idempotent' only: an at-most-once call is never repeated by a machine"
            )
        if not isinstance(repeatable, bool):
            raise UsageError(f"{where}repeatable must be True or False, not {repeatable!r}")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.name}, {self.effect}{', gated' if self.gate else ''}>"

    @property
    def schema(self) -> dict[str, Any]:
        """As the Messages API takes it."""
        return {"name": self.name, "description": self.description, "input_schema": self.input_schema}

    def validated(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them. Raises pydantic's ValidationError."""
        value = self._arguments.model_validate(dict(args))
        return {name: getattr(value, field) for name, field in self._fields.items()}

    def problem(self, args: Mapping[str, Any]) -> str | None:
        """Why these arguments are invalid, in words that a model can mend, or None."""
        try:
            self.validated(args)
        except ValidationError as e:
            return "; ".join(_explain(error) for error in e.errors(include_url=False, include_context=False)[:10])
        except Exception as e:  # noqa: BLE001 - a validator of the user's own
            return f"{type(e).__name__}: {e}"
        return None

    def upgraded(self, alias: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that were saved for an older name, as this tool takes them. Raises whatever the user's function does."""
        given = copy.deepcopy(dict(args))
        value = self.upgrade(alias, given) if self.upgrade is not None else given
        if not isinstance(value, dict):
            raise UsageError(f"upgrade of the tool {self.name} must give an object, not {value!r:.80}")
        return value

    def policy(self, head: Callable[[], RunHead]) -> ToolPolicy:
        """The tool as plain data and pure functions, for the core. One that asks nothing of the run is the same for all runs."""
        gate, key = self.gate, self.key
        if key is None and (gate is None or gate.when is None):
            return self._fixed_policy

        def when(args: Mapping[str, Any]) -> bool:
            return gate is None or gate.when is None or gate.when(head(), **self.validated(args))

        def business_key(args: Mapping[str, Any]) -> str:
            assert key is not None
            value = key(head(), **self.validated(args))
            if not isinstance(value, str) or not value.strip() or len(value) > 512:
                raise UsageError(f"key of the tool {self.name} must give a text of 1 to 512 characters, not {value!r}")
            return value

        return self._policy(when if gate and gate.when else None, business_key if key else None)

    @cached_property
    def _fixed_policy(self) -> ToolPolicy:
        return self._policy(None, None)

    @cached_property
    def _gate_policy(self) -> GatePolicy | None:
        return self.gate.policy() if self.gate else None

    def _policy(self, when: Callable[[Mapping[str, Any]], bool] | None, key: Callable[[Mapping[str, Any]], str] | None) -> ToolPolicy:
        return ToolPolicy(
            name=self.name, effect=self.effect, problem=self.problem, gate=self._gate_policy, when=when,  # type: ignore[arg-type]  # checked in the constructor
            key=key, key_ttl=self.key_ttl, has_check=self.check is not None, schema_digest=self.schema_digest, repeatable=self.repeatable,
            child=self.agent.name if self.agent is not None else None)  # fmt: skip

    agent: Any = None  # of a sub-agent's tool: the agent whose run answers it


@overload
def tool(fn: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    effect: Effect = "at_most_once",
    gate: Approval | None = None,
    check: Callable[..., Outcome | Awaitable[Outcome]] | None = None,
    key: Callable[..., str] | None = None,
    key_ttl: timedelta | None = None,
    retry: Retry | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    name: str | None = None,
    description: str | None = None,
    aliases: Sequence[str] = (),
    upgrade: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None,
    repeatable: bool = False,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(
    fn: Callable[P, R] | None = None,
    /,
    *,
    effect: str = "at_most_once",
    gate: Approval | None = None,
    check: Callable[..., Any] | None = None,
    key: Callable[..., str] | None = None,
    key_ttl: timedelta | None = None,
    retry: Retry | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    name: str | None = None,
    description: str | None = None,
    aliases: Sequence[str] = (),
    upgrade: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None,
    repeatable: bool = False,
) -> Any:
    """Make a function a tool. Its schema comes from its type hints and docstring.

    Args:
        effect: what a crash may do. "read": it runs again. "idempotent": it runs again with the same key, which the receiver dedupes.
            "at_most_once" (default): never repeated by a machine; after a crash in the middle a person, or `check`, says what happened.
        gate: from `approval()`: a person decides before it runs.
        check: `check(ctx, **args)` looks whether an earlier attempt happened; returns an Outcome.
        key: `key(run, **args)`: a business key instead of `run_id:call_id`.
        key_ttl: how long the receiver remembers a key; a repeat later than that is a person's decision.
        retry: of a read or idempotent tool whose attempt failed.
        timeout: per attempt. Then its outcome is unknown.
        name, description: default to the function's name and docstring.
        aliases, upgrade: older names of this tool, and how their saved arguments become today's.
        repeatable: a tool that polls: the same call with the same result is no loop.
    Raises:
        UsageError: a parameter, a type hint or the signature is wrong; nothing was registered (nothing ever is).
    """

    def wrap(fn: Callable[P, R]) -> Tool[P, R]:
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise UsageError(f"@tool on {fn.__name__}: a generator gives no result; return a value")
        if isinstance(fn, Tool) or not inspect.isfunction(fn):
            raise UsageError(f"@tool is for plain functions, not {fn!r}", hint="write a function; what it needs comes by ctx.deps")
        return Tool(fn, effect=effect, gate=gate, check=check, key=key, key_ttl=key_ttl, retry=retry, timeout=timeout, name=name,
                    description=description, aliases=aliases, upgrade=upgrade, repeatable=repeatable)  # fmt: skip

    return wrap(fn) if fn is not None else wrap


# ---- signatures -------------------------------------------------------------------------------------------------------------


def for_pydantic(hint: Any, *, inside: tuple[Any, ...] = ()) -> Any:
    """A type hint as pydantic takes it: before Python 3.12 it refuses `typing.TypedDict` and wants the same of typing_extensions."""
    if sys.version_info >= (3, 12) or hint in inside:
        return hint
    if typing.is_typeddict(hint) and type(hint).__module__ == "typing":
        fields = {
            name: (typing.Required if name in hint.__required_keys__ else typing.NotRequired)[for_pydantic(value, inside=(*inside, hint))]
            for name, value in _bare_hints(hint).items()
        }
        made: Any = typing_extensions.TypedDict(hint.__name__, fields)  # type: ignore[misc]  # its fields are known at run time only
        made.__doc__, made.__module__, made.__qualname__ = hint.__doc__, hint.__module__, hint.__qualname__
        return made
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is None or origin is Literal or origin is Callable:
        return hint
    if origin is Annotated:
        return Annotated[for_pydantic(args[0], inside=inside), *hint.__metadata__]
    new = tuple(for_pydantic(arg, inside=inside) for arg in args)
    if all(a is b for a, b in zip(new, args, strict=True)):
        return hint
    return Union[new] if origin in (Union, UnionType) else origin[new]  # noqa: UP007 - of a tuple


def _bare_hints(typed_dict: Any) -> dict[str, Any]:
    """The fields of a TypedDict without Required and NotRequired around them, with Annotated."""
    hints = typing.get_type_hints(typed_dict, include_extras=True)
    return {k: typing.get_args(v)[0] if typing.get_origin(v) in (typing.Required, typing.NotRequired) else v for k, v in hints.items()}


def _arguments(
    tool_name: str, fn: Callable[..., Any], per_argument: Mapping[str, str]
) -> tuple[str | None, type[BaseModel], dict[str, str]]:
    """(name of the context parameter, the model of the arguments, parameter -> field). Fields have names of their own: a parameter may be
    called `schema` or `copy`."""
    where = f"@tool on {tool_name}: "
    try:
        hints = typing.get_type_hints(fn, include_extras=True)
    except Exception as e:  # noqa: BLE001 - NameError and whatever an annotation raises
        raise UsageError(
            f"{where}its type hints cannot be resolved here: {e}", hint="import what the hints name at the top of the module"
        ) from None
    context_name: str | None = None
    definitions: dict[str, Any] = {}
    names: dict[str, str] = {}
    for n, (name, parameter) in enumerate(inspect.signature(fn).parameters.items()):
        hint = hints.get(name, Any)
        if hint is ToolContext or typing.get_origin(hint) is ToolContext:
            if context_name is not None:
                raise UsageError(f"{where}two parameters are annotated with ToolContext")
            context_name = name
            continue
        if n == 0 and name in ("self", "cls") and name not in hints:
            raise UsageError(f"{where}methods cannot be tools", hint="write a function; what it needs comes by ctx.deps")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UsageError(f"{where}parameter {parameter} cannot be filled by a model", hint="name every parameter")
        default = ... if parameter.default is parameter.empty else parameter.default
        names[name] = f"p{n}_{name}".replace("__", "_")
        definitions[names[name]] = (for_pydantic(hint), Field(default, alias=name, description=per_argument.get(name)))
    try:
        model = create_model(f"{tool_name}_arguments", __config__=ConfigDict(extra="ignore", arbitrary_types_allowed=False), **definitions)
        model.model_json_schema(by_alias=True)
    except Exception as e:  # noqa: BLE001 - pydantic has many ways to say that a type has no JSON form
        raise UsageError(f"{where}a parameter's type has no JSON schema: {str(e).splitlines()[0]}") from None
    return context_name, model, names


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(by_alias=True)
    schema.pop("title", None)
    for prop in schema.get("properties", {}).values():
        prop.pop("title", None)
    schema.setdefault("properties", {})
    return schema


def _docstring(doc: str) -> tuple[str, dict[str, str]]:
    """(description, per argument): an `Args:` section in Google's form goes to the arguments."""
    text, _, rest = doc.partition("\nArgs:\n")
    section, _, after = rest.partition("\n\n")
    per_argument: dict[str, str] = {}
    name = None
    for line in section.splitlines():
        if found := re.match(r"^ {2,8}(\w+)(?: ?\([^)]*\))?: (.*)$", line):
            name = found[1]
            per_argument[name] = found[2].strip()
        elif name and line.startswith(" "):
            per_argument[name] += " " + line.strip()
        elif line and not line.startswith(" "):
            after = line + "\n" + after
            name = None
    text = re.split(r"\n(?:Returns|Raises|Yields):\n", text)[0]
    return text.strip(), per_argument


def _explain(error: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in error["loc"]) or "arguments"
    return f"{path}: {error['msg']}"
