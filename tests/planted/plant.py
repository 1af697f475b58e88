"""Plants one fault at a time into a copy of the source, and runs the tests that are meant to notice: `python -m tests.planted.plant [NAME…]`.

A fault is a small file: why it is a fault, which tier must catch it, and its edits (each text stands exactly once in its file); for the
simulation also the invariants that it is meant to break. It is caught if that tier goes red on the copy with the fault, and the very test or
schedule that went red is green on a copy without one. A tier is sound if it is green there as a whole (of the simulation: a small part).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"
LIMIT_S = 1200
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
SIMULATE = ("-m", "outlast.testing.simulate")
TIERS: dict[str, tuple[str, ...]] = {
    "core": (*PYTEST, "tests/core"),
    "contract": (*PYTEST, "tests/stores/test_sqlite.py", "tests/stores/test_chain.py"),
    "crash": (*PYTEST, "tests/crash/test_in_process.py", "-k", "test_every_point"),
    "people": (*PYTEST, "tests/runtime/test_said_again.py"),
    "unknown commit": (*PYTEST, "tests/runtime/test_unknown_commit.py"),
    "power loss": (*PYTEST, "tests/faults/test_power_loss.py", "-k", "nothing_acknowledged"),
    "simulation": (*SIMULATE, "--seeds", "12000", "--processes", "1", "--as-found"),
}
CONTROL = {
    "simulation": (*SIMULATE, "--seeds", "60", "--processes", "1", "--as-found")
}  # quick: each schedule that is found is a control too


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    name: str
    why: str
    caught_by: str
    edits: tuple[Edit, ...]
    breaks: tuple[str, ...] = ()  # invariants of the simulation, any of which is a catch


def read(file: Path) -> Fault:
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    return Fault(file.stem, found["why"], found["caught_by"], tuple(Edit(**edit) for edit in found["edit"]), tuple(found.get("breaks", ())))


def all_faults() -> list[Fault]:
    return [read(file) for file in sorted(FAULTS.glob("*.toml"))]


def planted(text: str, edit: Edit) -> str:
    """Raises where the text to be changed does not stand there once: then the fault must follow the source."""
    if text.count(edit.old) != 1:
        raise LookupError(f"{edit.file}: stands there {text.count(edit.old)} times: {edit.old!r}")
    return text.replace(edit.old, edit.new)


@contextmanager
def copy_of_the_source(fault: Fault | None) -> Iterator[dict[str, str]]:
    """The environment in which `import outlast` finds a copy with the fault."""
    with tempfile.TemporaryDirectory(prefix="outlast-planted-") as folder:
        shutil.copytree(ROOT / "src" / "outlast", Path(folder) / "outlast", ignore=shutil.ignore_patterns("__pycache__"))
        for edit in fault.edits if fault else ():
            file = Path(folder) / "outlast" / edit.file
            file.write_text(planted(file.read_text(encoding="utf-8"), edit), encoding="utf-8")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTLAST_", "PYTEST_"))}
        yield {**env, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OUTLAST_PLANTED": fault.name if fault else "none"}


def run(command: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    where = subprocess.run(
        [sys.executable, "-c", "import outlast; print(outlast.__file__)"], cwd=ROOT, env=env, capture_output=True, text=True, check=True,
        timeout=60)  # fmt: skip
    assert where.stdout.startswith(env["PYTHONPATH"]), "the tests would look at the source itself"
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def caught(fault: Fault) -> tuple[bool, str]:
    """Did its tier notice, and because of the fault? And what it said."""
    try:
        return _caught(fault)
    except subprocess.TimeoutExpired as e:
        return False, f"not finished within {e.timeout:.0f} s"


def _caught(fault: Fault) -> tuple[bool, str]:
    with copy_of_the_source(fault) as env:
        done = run(TIERS[fault.caught_by], env)
    said, again = (broken if fault.caught_by == "simulation" else failed)(done.stdout)
    # That something was never reached is no catch, nor that something hung until its limit ended it.
    if done.returncode != 1 or not again:
        return False, (done.stdout[-300:] + done.stderr[-300:]).strip()
    if fault.breaks and not said.partition(" broke ")[2].startswith(tuple(f"{name}:" for name in fault.breaks)):
        return False, f"{said}, which is none of {', '.join(fault.breaks)}"
    with copy_of_the_source(None) as env:
        for command in again:
            if (without := run(command, env)).returncode:
                return False, f"{said}; and without the fault: {without.stdout[-600:]}{without.stderr[-300:]}"
    return True, said


def broken(stdout: str) -> tuple[str, list[Sequence[str]]]:
    """What the simulation says it found, and its schedule again: drawn from the seed, and with the choices that were made."""
    said = re.search(r"(?m)^seed (\d+) broke .*", stdout)
    printed = re.search(r"(?m)^python (-m outlast.testing.simulate --only .*)", stdout)
    if said is None or printed is None:
        return "", []
    return said[0], [(*SIMULATE, "--only", said[1]), shlex.split(printed[1])]


def failed(stdout: str) -> tuple[str, list[Sequence[str]]]:
    """What pytest says, and the test that failed again."""
    said, test = re.search(r"(?m)^E  .*", stdout), re.search(r"(?m)^FAILED (.*?)(?: - .*)?$", stdout)
    return (said[0], [(*PYTEST, test[1])]) if said and test else ("", [])


def sound(tier: str) -> tuple[bool, str]:
    """Is the tier green on a copy without a fault?"""
    with copy_of_the_source(None) as env:
        done = run(CONTROL.get(tier, TIERS[tier]), env)
    return done.returncode == 0, done.stdout[-600:] + done.stderr[-300:]


def main(names: Sequence[str]) -> int:
    faults = [f for f in all_faults() if not names or f.name in names]
    bad = 0
    tiers = sorted({f.caught_by for f in faults})
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is a process of its own
        for tier, (green, said) in zip(tiers, pool.map(sound, tiers), strict=True):
            bad += not green
            sys.stdout.write(f"{'green' if green else 'RED: ' + said:6} without a fault: {tier}\n")
            sys.stdout.flush()
        for fault, (found, said) in zip(faults, pool.map(caught, faults), strict=True):
            bad += not found
            sys.stdout.write(f"{'caught' if found else 'MISSED'} {fault.name} by {fault.caught_by}: {said[:160]}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(faults)} faults, {bad} missed or tiers that are red without one\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
