"""How every question is asked: interleaved rounds, ratios of medians, a table, and what became of each target.

Rules
1. Peers run in the same run, in turns with ours: a noisy disk or neighbour meets all of them.
2. Nothing is thrown away: medians and 95th percentiles over all rounds.
3. A target that is missed is printed as missed, and by how much.
"""

from __future__ import annotations

import compileall
import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

import outlast

now = time.perf_counter
median = statistics.median


def p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]


def us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def kib(count: float) -> str:
    return f"{count / 1024:,.1f}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    lines = []
    for row in cells:
        padded = (c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append(f"| {' | '.join(padded)} |")
    lines.insert(1, "|" + "|".join("-" * (w + 1) + ("-" if n == 0 else ":") for n, w in enumerate(widths)) + "|")
    print("\n".join(lines), flush=True)


class Targets:
    """What was aimed at, and what came out."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str, str]] = []
        self.missed = 0

    def at_most(self, what: str, got: float, limit: float, unit: str = "") -> None:
        self._add(what, got, f"≤ {limit:g}{unit}", unit, got <= limit, got / limit if limit else got)

    def at_least(self, what: str, got: float, limit: float, unit: str = "") -> None:
        self._add(what, got, f"≥ {limit:g}{unit}", unit, got >= limit, limit / got if got else float("inf"))

    def _add(self, what: str, got: float, limit: str, unit: str, met: bool, factor: float) -> None:
        self.missed += not met
        self._rows.append(
            (
                what,
                limit,
                f"{got:.3g}{unit}" if abs(got) < 1000 else f"{got:,.0f}{unit}",
                "met" if met else f"MISSED by a factor of {factor:.2f}",
            )
        )

    def show(self) -> None:
        print()
        table(["target", "wanted", "got", ""], self._rows)


def header(question: str) -> None:
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    print(f"# {question}\n")
    print(
        f"{cpu}, {os.cpu_count()} CPUs; Linux {platform.release()}; Python {platform.python_version()}; "
        f"SQLite {apsw.sqlite_lib_version()} (ours), {sqlite3.sqlite_version} (peers); files on {_file_system(_base())}\n",
        flush=True,
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _base() -> str:
    return os.environ.get("BENCH_DATA") or tempfile.gettempdir()


def _file_system(path: str) -> str:
    mounts = [line.split()[1:3] for line in _lines("/proc/mounts")]
    inside = [m for m in mounts if os.path.realpath(path).startswith(m[0])]
    return max(inside, key=lambda m: len(m[0]), default=["", "an unknown file system"])[1]


@contextmanager
def folder(base: str | None = None) -> Iterator[Path]:
    """A folder for a round's files, gone afterwards. BENCH_DATA says where; a tmpfs there leaves the disk out."""
    path = Path(tempfile.mkdtemp(prefix="outlast-bench-", dir=base or _base()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def memory_folder() -> str:
    """A tmpfs: what is left of a time there is CPU. Falls back to the usual place, and says so."""
    for path in ("/dev/shm", "/run/shm"):
        if os.access(path, os.W_OK):
            return path
    print("(no tmpfs here: CPU figures include the disk)")
    return _base()


def sub(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir(parents=True)
    return path


def size(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def compiled() -> None:
    """Our modules as an installation leaves them, as the peers' are: a tree that was just edited would be compiled by every process anew."""
    compileall.compile_dir(str(Path(outlast.__file__).parent), quiet=1)


def race(command: Sequence[str], many: int, *, within_s: float) -> list[dict[str, Any]]:
    """What so many processes of a command say at their end, in JSON; each is told its number, says "ready", and begins when all are told "go"."""
    processes = [subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in range(many)]
    for p in processes:
        assert p.stdout is not None
        assert p.stdout.readline() == "ready\n"
    for p in processes:
        assert p.stdin is not None
        p.stdin.write("go\n")
        p.stdin.flush()
    return [json.loads(p.communicate(timeout=within_s)[0]) for p in processes]


def numbers(default: Sequence[int]) -> list[int]:
    """The command's own arguments."""
    return [int(a) for a in sys.argv[1:] if a.isdigit()] or list(default)
