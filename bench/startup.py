"""What does `import outlast` take? Fresh interpreters, in turns; the interpreter's own start is the first row."""

from __future__ import annotations

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
    for _ in range(ROUNDS):
        for what, code in WHAT.items():
            a = measure.now()
            subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            times[what].append(measure.now() - a)
    bare = measure.median(times["(nothing)"])
    rows = [
        (what, f"{measure.median(v) * 1e3:.0f}", f"{min(v) * 1e3:.0f}", f"{(measure.median(v) - bare) * 1e3:.0f}")
        for what, v in times.items()
    ]
    measure.table(["import", "median ms", "best ms", "without the interpreter's start"], rows)
    targets = measure.Targets()
    targets.at_most("import outlast", measure.median(times["outlast"]) * 1e3, 250, " ms")
    targets.at_most("outlast --help", measure.median(times["outlast --help"]) * 1e3, 500, " ms")
    targets.at_most("a first checkpoint", measure.median(times["a first checkpoint"]) * 1e3, 1000, " ms")
    targets.show()


if __name__ == "__main__":
    main()
