"""What does one step ask of the disk? Counted by strace, free of noise: this is the gate.

fsync and fdatasync calls, and KB written, per step at 10 and at 1,000 messages, from a WAL that was just folded into the file. Exits 1
where ours are over. "ours, long" shows what folding it adds over a thousand steps.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import measure

STEPS = 60
SYNCS, KB = 1.0, 20.0  # ours, per step, at most
LONG = 1000  # steps of a longer look, in which the WAL is folded into the file several times: shown, and no gate
KINDS = ("ours", "ours, long", "article", "article-wal", "langgraph", "langgraph-delta", "dbos")
BEGIN, END = "counting begins", "counting ends"
CALL = re.compile(r"\b(fsync|fdatasync|write|pwrite64|pwritev|writev|unlink|unlinkat)\((.*)\)\s+= (\d+)")


def main() -> int:
    measure.header("syscalls: what a step asks of the disk, by strace")
    rows, targets = [], measure.Targets()
    for n in measure.numbers((10, 1000)):
        for kind in KINDS:
            if kind == "dbos" and n > 10:
                continue  # saves each result alone, whatever came before
            with measure.folder() as folder:
                syncs, kb, unlinks = counted(kind, n, folder)
            rows.append((kind, f"{n:,}", f"{syncs:.2f}", f"{kb:,.1f}", f"{unlinks:.2f}"))
            if kind == "ours":
                targets.at_most(f"fsync per step, {n:,} messages", syncs, SYNCS)
                targets.at_most(f"KB written per step, {n:,} messages", kb, KB, " KB")
    measure.table(["a step of", "messages", "fsync + fdatasync", "KB written", "files removed"], rows)
    targets.show()
    return 1 if targets.missed else 0


def counted(kind: str, n: int, folder: Path) -> tuple[float, float, float]:
    trace = folder / "trace"
    data = measure.sub(folder, "data")
    steps = STEPS if kind != "ours, long" else LONG
    command = [
        "strace",
        "-f",
        "-qq",
        "-s",
        "64",
        "-e",
        "trace=fsync,fdatasync,write,pwrite64,pwritev,writev,unlink,unlinkat",
        "-o",
        str(trace),
    ]
    subprocess.run(
        [*command, sys.executable, __file__, "child", kind, str(n), str(data)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=900,
    )
    syncs = written = unlinks = 0
    counting = False
    for line in joined(trace.read_text(errors="replace").splitlines()):
        if BEGIN in line or END in line:
            counting = BEGIN in line
            continue
        found = CALL.search(line)
        if not counting or not found:
            continue
        name, _, result = found.groups()
        if name in ("fsync", "fdatasync"):
            syncs += 1
        elif name.startswith("unlink"):
            unlinks += 1
        elif int(result) > 1:  # a single byte wakes an event loop
            written += int(result)
    return syncs / steps, written / steps / 1000, unlinks / steps


def joined(lines: list[str]) -> list[str]:
    """Calls that strace shows in two parts, because another thread came in between, as one line."""
    out: list[str] = []
    begun: dict[str, str] = {}
    for line in lines:
        thread = line.split(maxsplit=1)[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>")
        elif "resumed>" in line and thread in begun:
            out.append(begun.pop(thread) + line.split("resumed>", 1)[1])
        else:
            out.append(line)
    return out


def child(kind: str, n: int, folder: Path) -> None:
    subject = subject_of(kind, folder)
    subject.steps(n, 6)
    subject.settle()  # what putting the history there left in the WAL is not these steps' cost
    subject.steps(n, 2)  # the first one begins the new WAL
    os.write(2, BEGIN.encode())
    subject.steps(n, LONG if kind == "ours, long" else STEPS)
    os.write(2, END.encode())


def subject_of(kind: str, folder: Path) -> Any:
    if kind.startswith("ours"):
        from ours import Ours

        return Ours(folder)
    if kind.startswith("article"):
        import plain

        return plain.Article(folder) if kind == "article" else plain.ArticleWal(folder)
    if kind.startswith("langgraph"):
        import graphs

        return graphs.LangGraph(folder) if kind == "langgraph" else graphs.LangGraphDelta(folder)
    from dbos_steps import launched

    agent, _ = launched(f"sqlite:///{folder}/dbos.db")

    class Here:
        def steps(self, n: int, k: int) -> None:
            agent(k)

        def settle(self) -> None:
            """DBOS keeps a rollback journal: there is no WAL."""

    return Here()


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
        sys.stdout.flush()
        os._exit(0)  # the peers' threads would keep the process
    sys.exit(main())
