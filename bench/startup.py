"""What does `import outlast` take? Fresh interpreters, in turns; the interpreter's own start is the first row."""

from __future__ import annotations

import resource
import subprocess
import sys

import measure

ROUNDS = 11
FIRST = """
import tempfile
from outlast import Agent, Outlast
async def model(request): return "Done."
agent = Agent("first", model=model)
with Outlast(tempfile.mkdtemp() + "/x.db", agents=[agent]) as app: app.run_sync(agent, "Hi")
"""
WHAT = {
    "(nothing)": "pass",
    "pydantic, asyncio, apsw": "import pydantic, asyncio, apsw",
    "outlast": "import outlast",
    "outlast, a store opened": "import outlast, tempfile; outlast.Outlast(tempfile.mkdtemp() + '/x.db').unfinished_runs()",
    "outlast --version": "import sys; sys.argv = ['outlast', '--version']; from outlast.cli import main; main()",
    "outlast --help": "import sys; sys.argv = ['outlast', '--help']; from outlast.cli import main; main()",
    "a first checkpoint": FIRST,
    "langgraph.graph and SqliteSaver": "import langgraph.graph; from langgraph.checkpoint.sqlite import SqliteSaver",
    "dbos": "import dbos",
}


def main() -> None:
    measure.header("startup: imports in a fresh interpreter")
    measure.compiled()
    times: dict[str, list[float]] = {what: [] for what in WHAT}
    cpu: dict[str, list[float]] = {what: [] for what in WHAT}
    for _ in range(ROUNDS):
        for what, code in WHAT.items():
            a, used = measure.now(), used_by_children()
            subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            times[what].append(measure.now() - a)
            cpu[what].append(used_by_children() - used)
    bare = measure.median(times["(nothing)"])
    rows = [
        (what, *(f"{x * 1e3:.0f}" for x in (measure.median(v), min(v), measure.median(v) - bare, min(cpu[what]))))
        for what, v in times.items()
    ]
    measure.table(["import", "median ms", "best ms", "without the interpreter's start", "least CPU ms"], rows)
    targets = measure.Targets()
    for what, most in (("outlast", 250), ("outlast --help", 500), ("a first checkpoint", 1000)):
        targets.at_most(f"{what}, at best", min(times[what]) * 1e3, most, " ms")
    targets.show()


def used_by_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
