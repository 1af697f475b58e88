"""Who may import whom inside the package, read from the source; importing for types alone counts too.

To change a rule, change `MAY` and ARCHITECTURE.md together. A pair in `TYPES_ONLY` is a cycle of types that cannot be
avoided: it may stand under `if TYPE_CHECKING` only, and each has its reason.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# layer -> the layers (or single modules) it may import; its own files are always allowed, except where ALONE says so.
# A layer is a module or package directly under `outlast`; the longest matching prefix counts.
MAY: dict[str, set[str]] = {
    "outlast": {
        "agent",
        "app",
        "documents",
        "errors",
        "gates",
        "models.base",
        "tools",
        "core",
        "runtime.clock",
        "openrun",
    },  # public names only
    "core": set(),
    "errors": set(),
    "settings": {"errors"},
    "sync": set(),
    "prices": {"errors"},
    "gates": {"core", "errors"},
    "stores": {"core", "errors"},
    "models": {"core", "errors"},
    "documents": {"core", "errors", "stores.base"},
    "reader": {"core", "errors", "documents", "prices", "stores.base", "stores.pages"},
    "tools": {"core", "errors", "documents", "gates"},
    "agent": {"prices", "core", "errors", "documents", "gates", "tools", "models.base", "mcp"},
    "mcp": {"core", "errors", "documents", "gates", "tools"},
    "runtime": {
        "prices",
        "core",
        "errors",
        "documents",
        "gates",
        "tools",
        "agent",
        "stores.base",
        "stores.owner",
        "stores.pages",
        "models.base",
    },
    "openrun": {"sync", "core", "errors", "documents", "tools", "agent", "stores.base", "runtime"},
    "alone": {"sync", "core", "errors", "stores", "agent", "app"},  # a child process begins here: it makes the app again
    "engines": {"core", "errors", "documents", "gates", "tools", "agent", "stores.base", "stores.owner", "models.base", "runtime"},
    "app": {
        "sync",
        "prices",
        "core",
        "errors",
        "documents",
        "gates",
        "tools",
        "agent",
        "stores",
        "models",
        "mcp",
        "runtime",
        "engines",
        "settings",
        "reader",
        "openrun",
        "alone",
    },
    "web": {"app", "errors", "documents", "settings", "runtime.metrics"},
    "cli": {"sync", "reader", "stores.pages", "runtime.metrics", "outlast", "app", "errors", "documents", "settings", "web", "testing"},
    "__main__": {"cli"},
    "testing": {"app", "engines", "agent", "core", "errors", "documents", "gates", "tools", "models", "runtime", "stores"},
}

# Inside these packages the files do not know each other; `base` (and what is named here) is for all.
# A sandbox imports _temporal_loop anew: it holds nothing else. _http: what the two have in common whose server calls the worker.
ALONE: dict[str, set[str]] = {"engines": {"base", "_http", "_temporal_loop"}}

# Only inside functions, so that `outlast --help` stays quick.
LAZY: dict[str, set[str]] = {"cli": {"outlast", "app", "documents", "web", "testing"}}

# (module, imported) -> why the types cannot be had otherwise; under `if TYPE_CHECKING` only.
TYPES_ONLY: dict[tuple[str, str], str] = {
    ("errors", "documents"): "GateClosed carries the Gate, and who makes documents raises errors",
    ("openrun", "app"): "an open run is made by the Outlast that it belongs to",
    **{
        (f"engines.{name}", "app"): "an engine's worker() is given the Outlast that it works for, and app ties engines in"
        for name in ("base", "dbos", "inngest", "restate", "temporal")
    },
}


@dataclass(frozen=True)
class Import:
    module: str  # who imports, without the leading `outlast.`
    target: str  # what, likewise
    line: int
    types_only: bool
    in_function: bool


def modules() -> dict[str, Path]:
    """Every module of the package: `core.run` -> its file; the package itself is `outlast`."""
    found = {}
    for file in sorted((SRC / "outlast").rglob("*.py")):
        parts = file.relative_to(SRC / "outlast").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or "outlast"] = file
    return found


def is_type_checking(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(module: str, source: str, known: set[str], *, package: bool) -> list[Import]:
    """The imports of our own modules in one file. `from outlast.core import run` counts as `core.run` where that is a module."""
    found: list[Import] = []

    def note(full: str, line: int, types_only: bool, in_function: bool) -> None:
        if full == "outlast" or full.startswith("outlast."):
            found.append(Import(module, full.removeprefix("outlast.") or "outlast", line, types_only, in_function))

    def walk(node: ast.AST, types_only: bool, in_function: bool) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    note(alias.name, node.lineno, types_only, in_function)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    here = ([] if module == "outlast" else module.split(".")) if package else module.split(".")[:-1]
                    up = here[: len(here) - (node.level - 1)]
                    base = ".".join(["outlast", *up, *([node.module] if node.module else [])])
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    note(full if full.removeprefix("outlast.") in known else base, node.lineno, types_only, in_function)
            case ast.If() if is_type_checking(node):
                for child in node.body:
                    walk(child, True, in_function)
                for child in node.orelse:
                    walk(child, types_only, in_function)
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                in_function = True
        for child in ast.iter_child_nodes(node):
            walk(child, types_only, in_function)

    walk(ast.parse(source), False, False)
    return found


def layer_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def within(target: str, allowed: set[str]) -> bool:
    return any(target == a or target.startswith(f"{a}.") for a in allowed)


def verdict(imported: Import) -> str | None:
    """What is wrong with this import, or None."""
    here, there = layer_of(imported.module), layer_of(imported.target)
    if here not in MAY:
        return f"{imported.module} is in no layer: add it to MAY and to ARCHITECTURE.md"
    if here == there:
        siblings = ALONE.get(here)
        same = imported.target in {imported.module, here} or imported.module == here
        if siblings is None or same or within(imported.target, {f"{here}.{s}" for s in siblings}):
            return None
        return f"{imported.module} imports its neighbour {imported.target}"
    if imported.types_only and (imported.module, imported.target) in TYPES_ONLY:
        return None
    if not within(imported.target, MAY[here]):
        return f"{imported.module} imports {imported.target}"
    if within(imported.target, LAZY.get(here, set())) and not imported.in_function and not imported.types_only:
        return f"{imported.module} imports {imported.target} at its top, which makes --help slow"
    return None


def all_imports() -> list[Import]:
    known = modules()
    return [
        imported
        for name, file in known.items()
        for imported in imports_of(name, file.read_text(encoding="utf-8"), set(known), package=file.name == "__init__.py")
    ]


def test_everyone_imports_only_who_they_may() -> None:
    wrong = [f"{modules()[i.module]}:{i.line}: {why}" for i in all_imports() if (why := verdict(i))]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_in_a_layer() -> None:
    assert {layer_of(m) for m in modules()} <= set(MAY)


def test_exceptions_for_types_are_used() -> None:
    """An exception that nobody needs any more must go; one for a module that is not there yet may stay."""
    used = {(i.module, i.target) for i in all_imports() if i.types_only}
    there = set(modules())
    unused = {pair for pair in TYPES_ONLY if set(pair) <= there and pair not in used}
    assert not unused


# Not `pathlib` and `uuid` themselves: a path or a UUID in a tool's result is data, and the codec knows both.
IMPURE_MODULES = {
    "asyncio",
    "logging",
    "os",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "sys",
    "threading",
    "time",
    "apsw",
    "typer",
    "rich",
}
IMPURE_CALLS = {"open", "print", "input", "Path", "uuid1", "uuid4", "now", "utcnow", "today"}


def impurities(source: str) -> list[str]:
    """What in this file does I/O, looks at a clock, is async, random or global: `LINE: WHAT`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                found += [f"{node.lineno}: {a.name}" for a in node.names if a.name.split(".", maxsplit=1)[0] in IMPURE_MODULES]
            case ast.ImportFrom(module=str(name)) if node.level == 0 and name.split(".", maxsplit=1)[0] in IMPURE_MODULES:
                found.append(f"{node.lineno}: {name}")
            case ast.AsyncFunctionDef() | ast.Await() | ast.Global():
                found.append(f"{node.lineno}: {type(node).__name__}")
            case ast.Call() if ast.unparse(node.func).split(".")[-1] in IMPURE_CALLS:
                found.append(f"{node.lineno}: {ast.unparse(node.func)}()")
    return found


def test_core_is_pure() -> None:
    """core: no I/O, no clock, no async, no randomness, no logging."""
    core = {name: file for name, file in modules().items() if layer_of(name) == "core"}
    wrong = [f"{file}:{what}" for file in core.values() for what in impurities(file.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)
    for line in ("import time", "from random import choice", "async def f(): ...", "datetime.now(UTC)", "open('x')", "uuid.uuid4()"):
        assert impurities(line), line


@pytest.mark.parametrize(
    "module, line, wrong",
    [
        ("core.run", "import json", False),
        ("core.run", "from outlast import errors", True),
        ("core.run", "from . import codec", False),
        ("core.run", "from ..errors import UsageError", True),
        ("core.run", "def f():\n    import outlast.app", True),
        ("core.run", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from outlast.agent import Agent", True),
        ("runtime.drive", "from outlast.stores.base import Store", False),
        ("runtime.drive", "from outlast.stores import base", False),
        ("runtime.drive", "from outlast.stores.sqlite import SQLiteStore", True),
        ("runtime.drive", "from outlast.app import Outlast", True),
        ("engines.temporal", "from .base import Engine", False),
        ("engines.temporal", "from .restate import Restate", True),
        ("errors", "if TYPE_CHECKING:\n    from outlast.documents import Gate", False),
        ("errors", "from outlast.documents import Gate", True),
        ("cli.run", "from outlast.app import Outlast", True),
        ("cli.run", "def run():\n    from outlast.app import Outlast", False),
        ("cli.run", "def run():\n    from outlast.stores.sqlite import SQLiteStore", True),
        ("surprise", "from outlast.core import run", True),
    ],
)
def test_the_rule_itself(module: str, line: str, wrong: bool) -> None:
    known = {
        "outlast",
        "core",
        "core.run",
        "core.codec",
        "errors",
        "app",
        "gates",
        "agent",
        "stores",
        "stores.base",
        "engines.base",
        "engines.restate",
    }
    verdicts = [verdict(i) for i in imports_of(module, line, known, package=False)]
    assert any(verdicts) == wrong, verdicts
