"""The public types, as users' checkers see them: mypy (strict) and pyright, against the reference and against the installed wheel.

The stub is extracted from docs/reference/python.md, so the reference cannot drift from what the programs beside this file
use. The wheel is built and installed into an environment of its own, so that `py.typed` and what is packed are proved too.

PENDING names what cannot pass against the wheel yet, with the reason. Each entry is asserted to be truly failing: whoever
makes it work takes it out.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference" / "python.md"
PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(file.name for file in PROGRAMS.glob("p*.py"))
PATIENCE_S = 300  # a checker's first run without its cache, on a busy machine

# program -> why it does not type-check against the wheel yet
PENDING: dict[str, str] = {}
# offline program -> what it prints
RUNNING: dict[str, str] = {
    "p01_first_agent.py": "done Northwind Studio is locked out since its SSO change.\n1 running ",
}
PENDING_RUNS: dict[str, str] = {}

# What a stub module needs at its top; the reference shows only what users read.
IMPORTS = {
    "outlast": """
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from decimal import Decimal
from os import PathLike
from typing import Any, Generic, Literal, ParamSpec, Self, TypeAlias, overload
from zoneinfo import ZoneInfo
from typing_extensions import TypeVar
from outlast.engines import Engine
from outlast.errors import OutlastError as OutlastError, ToolFailed as ToolFailed
from outlast.mcp import MCPServer
from outlast.models import Model
from outlast.testing import ManualClock
P = ParamSpec("P"); R = TypeVar("R"); Out = TypeVar("Out", default=str); Deps = TypeVar("Deps", default=Any)
""",
    "outlast.errors": "from datetime import datetime, timedelta\nfrom outlast import Gate\n",
    "outlast.models": """
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol
""",
    "outlast.mcp": "from collections.abc import Mapping, Sequence\nfrom typing import Any, Literal\nfrom outlast import Approval\n",
    "outlast.testing": """
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from outlast import Agent, Input, Tags, ToolContext
from outlast.models import ScriptedModel
""",
    "outlast.engines": "from collections.abc import Mapping\nfrom typing import Any, Protocol\nfrom outlast import Outlast\n",
    "outlast.web": "from collections.abc import Callable\nfrom typing import Any\nfrom outlast import Gate, Outlast, RunHead\n",
}

Errors = Mapping[str, list[tuple[int, str]]]  # file name -> (line, what)


def stub_modules(text: str) -> dict[str, str]:
    """The reference's Python blocks by module: `# module: NAME` opens one."""
    lines: dict[str, list[str]] = defaultdict(list)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        module = None
        for line in block.splitlines():
            if opening := re.match(r"# module: ([\w.]+)", line):
                module = opening[1]
            assert module, f"a line before any `# module:`: {line}"
            lines[module].append(line)
    return {module: IMPORTS[module] + "\n".join(body) + "\n" for module, body in lines.items()}


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on a checker's path: outlast/*.pyi."""
    folder = tmp_path_factory.mktemp("stub")
    (folder / "outlast").mkdir()
    for module, text in stub_modules(REFERENCE.read_text(encoding="utf-8")).items():
        name = "__init__" if module == "outlast" else module.removeprefix("outlast.")
        (folder / "outlast" / f"{name}.pyi").write_text(text, encoding="utf-8")
    return folder


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in {"MYPYPATH", "PYTHONPATH"}}
    return subprocess.run(
        [str(c) for c in command], cwd=cwd, env=clean | dict(env), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.fixture(scope="session")
def wheel_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the built wheel, and below it everything that is installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", ROOT, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (folder / "dist").glob("outlast-*.whl")
    assert run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder).returncode == 0
    python = folder / "venv" / "bin" / "python"
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    assert (site / "outlast" / "py.typed").exists()
    # A plain path, not addsitedir(): the editable install over there is not followed.
    (site / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import outlast; print(outlast.__file__)", cwd=folder).stdout
    assert where.startswith(str(site)), where
    return python


def mypy(folder: Path, python: Path, *, stub: Path | None) -> Errors:
    cache = ROOT / ".mypy_cache" / ("stub" if stub else "wheel")
    done = run(
        *(sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "--config-file", os.devnull, "--cache-dir", cache),
        *("--python-executable", python, "--no-error-summary", "--hide-error-context", *sorted(p.name for p in folder.glob("*.py"))),
        cwd=folder,
        env={"MYPYPATH": str(stub)} if stub else {},
    )
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for line in done.stdout.splitlines():
        if match := re.match(r"(.+?):(\d+): error: (.*)", line):
            found[Path(match[1]).name].append((int(match[2]), f"mypy: {match[3]}"))
        else:
            assert re.match(r"(.+?):(\d+): note: ", line), line
    return found


def pyright(folder: Path, python: Path, *, stub: Path | None) -> Errors:
    # basic: pyright's strict mode complains of the programs' own frameworks, which are not ours to type
    config = {"typeCheckingMode": "basic", "reportMissingModuleSource": False, "pythonVersion": "3.11", "include": ["."]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config | ({"extraPaths": [str(stub)]} if stub else {})))
    done = run(sys.executable, "-m", "pyright", "--project", folder, "--pythonpath", python, "--outputjson", cwd=folder)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["summary"]["filesAnalyzed"] >= len(NAMES)
    for item in report["generalDiagnostics"]:
        if item["severity"] == "error":
            found[Path(item["file"]).name].append((item["range"]["start"]["line"] + 1, f"pyright: {item['message']}"))
    return found


def check(folder: Path, python: Path, *, stub: Path | None) -> tuple[Errors, Errors]:
    for program in PROGRAMS.glob("*.py"):
        (folder / program.name).write_text(program.read_text(encoding="utf-8"), encoding="utf-8")
    return mypy(folder, python, stub=stub), pyright(folder, python, stub=stub)


@pytest.fixture(scope="session")
def against_stub(tmp_path_factory: pytest.TempPathFactory, stub: Path) -> tuple[Errors, Errors]:
    return check(tmp_path_factory.mktemp("programs"), Path(sys.executable), stub=stub)


@pytest.fixture(scope="session")
def against_wheel(tmp_path_factory: pytest.TempPathFactory, wheel_python: Path) -> tuple[Errors, Errors]:
    return check(tmp_path_factory.mktemp("programs"), wheel_python, stub=None)


def complaints(name: str, both: tuple[Errors, Errors]) -> list[str]:
    """What is said of this program and of those it imports: what comes from a broken one is unchecked."""
    own = [f"{name}:{line}: {what}" for errors in both for line, what in errors.get(name, [])]
    imported = re.findall(r"^from (p\d\d_\w+) import", (PROGRAMS / name).read_text(encoding="utf-8"), re.MULTILINE)
    return own + [complaint for other in imported for complaint in complaints(f"{other}.py", both)]


def rejection_faults(both: tuple[Errors, Errors]) -> list[str]:
    """Where a checker took what it must refuse, or refused what is right."""
    lines = (PROGRAMS / "rejected.py").read_text(encoding="utf-8").splitlines()
    must = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    assert must
    faults = []
    for errors, checker in zip(both, ("mypy", "pyright"), strict=True):
        found = dict(errors.get("rejected.py", []))
        faults += [f"line {n}: {checker} takes it: {lines[n - 1].strip()}" for n in sorted(must - set(found))]
        faults += [f"line {n}: {found[n]}" for n in sorted(set(found) - must)]
    return faults


@pytest.mark.parametrize("name", NAMES)
def test_program_against_the_reference(name: str, against_stub: tuple[Errors, Errors]) -> None:
    assert not complaints(name, against_stub)


def test_rejections_by_the_reference(against_stub: tuple[Errors, Errors]) -> None:
    assert not rejection_faults(against_stub)


def judge(name: str, faults: list[str], pending: Mapping[str, str]) -> None:
    if name in pending:
        assert faults, f"{name} works now: take it out of the table ({pending[name]})"
    else:
        assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", NAMES)
def test_program_against_the_wheel(name: str, against_wheel: tuple[Errors, Errors]) -> None:
    judge(name, complaints(name, against_wheel), PENDING)


def test_rejections_by_the_wheel(against_wheel: tuple[Errors, Errors]) -> None:
    judge("rejected.py", rejection_faults(against_wheel), PENDING)


@pytest.mark.parametrize("name", RUNNING)
def test_offline_program_runs(name: str, wheel_python: Path, tmp_path: Path) -> None:
    done = run(wheel_python, PROGRAMS / name, cwd=tmp_path)
    faults = [] if done.returncode == 0 and done.stdout.startswith(RUNNING[name]) else [f"exit {done.returncode}", done.stdout, done.stderr]
    judge(name, faults, PENDING_RUNS)


def test_program_of_tests_passes(tmp_path: Path) -> None:
    """As a user's tests are: by plain pytest, whose plugin brings `crash_matrix`."""
    for program in PROGRAMS.glob("p0[28]*.py"):
        (tmp_path / program.name).write_text(program.read_text(encoding="utf-8"), encoding="utf-8")
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "p08_test_agent.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_tables_name_programs() -> None:
    assert set(PENDING) <= {*NAMES, "rejected.py"}
    assert set(PENDING_RUNS) <= set(RUNNING) <= set(NAMES)
