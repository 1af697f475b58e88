"""How long until a new process is ready for the next step of a run of n messages? From the process's start: imports, opening, loading.

Outlast: claimed, loaded, folded, and `next_step` asked. LangGraph: `get_state`. DBOS: its recovery has replayed the workflow up to the next
step. Each measured in fresh processes, in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import measure

KINDS = {
    "ours": "Outlast", "article": "the article's design", "langgraph": "LangGraph SqliteSaver", "langgraph-delta": "LangGraph DeltaChannel",
    "langgraph-async": "LangGraph AsyncSqliteSaver", "dbos": "DBOS on SQLite (replay)",
}  # fmt: skip
ROUNDS = 5
RUN = "run-1"


def main() -> None:
    measure.header("resume: a new process, until it is ready for the next step")
    measure.compiled()
    targets, rows = measure.Targets(), []
    for n in measure.numbers((100, 1000)):
        with measure.folder() as folder:
            found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
            for kind in KINDS:
                if kind != "dbos":
                    child(kind, "make", n, measure.sub(folder, kind))
            for turn in range(ROUNDS):
                for kind in KINDS:
                    where = folder / kind
                    if kind == "dbos":  # a workflow that was recovered goes on: each round needs a new one that broke off
                        where = measure.sub(folder, f"dbos-{turn}")
                        child(kind, "make", n, where)
                    answer = child(kind, "load", n, where)
                    assert answer is not None, kind
                    found[kind].append(answer)
        total = {kind: measure.median([f["total"] for f in v]) for kind, v in found.items()}
        for kind, v in found.items():
            parts = [measure.median([f[part] for f in v]) * 1e3 for part in ("imports", "load", "total")]
            rows.append((f"{n:,}", KINDS[kind], *(f"{p:,.0f}" for p in parts), f"{total[kind] / total['ours']:.2f}"))
        if n == 1000:
            targets.at_most("against LangGraph SqliteSaver, 1,000 messages", total["ours"] / total["langgraph"], 0.15, "×")
            targets.at_most("against DBOS, 1,000 messages", total["ours"] / total["dbos"], 0.06, "×")
    measure.table(["messages", "", "start and imports ms", "open and load ms", "ready after ms", "× Outlast"], rows)
    targets.show()


def child(kind: str, mode: str, n: int, where: Path) -> dict[str, float] | None:
    command = [sys.executable, __file__, "child", kind, mode, str(n), str(where), repr(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines or mode == "make", done.stderr[-2000:]
    return json.loads(lines[-1]) if lines else None


def say(spawned: float, imported: float) -> None:
    ready = time.time()
    print(json.dumps({"imports": imported - spawned, "load": ready - imported, "total": ready - spawned}), flush=True)


def of_ours(mode: str, n: int, where: Path, spawned: float) -> None:
    from outlast import Outlast
    from outlast.core import run as r
    from outlast.core import step as s
    from outlast.stores import base

    app = Outlast(where / "outlast.db")
    imported = time.time()
    store = app._store
    if mode == "make":
        from messages import history

        store.start(base.NewRun(RUN, "bench", [r.RunStarted("bench"), *(r.MessageAdded(m) for m in history(n))]))
        return
    lease = store.claim_run(RUN, "bench")
    entries, _ = store.load(lease.run_no)
    run = r.fold(r.Run(RUN), entries)
    s.next_step(run, s.Policy(), store.now())
    assert len(run.messages) == n
    say(spawned, imported)
    store.release(lease)  # for the next round


def of_article(mode: str, n: int, where: Path, spawned: float) -> None:
    from messages import history
    from plain import Article

    article = Article(where)
    imported = time.time()
    if mode == "make":
        article.save(RUN, history(n))
        return
    assert len(article.load(RUN)) == n
    say(spawned, imported)


def of_langgraph(kind: str, mode: str, n: int, where: Path, spawned: float) -> None:
    import graphs

    subject: Any = {"langgraph": graphs.LangGraph, "langgraph-delta": graphs.LangGraphDelta, "langgraph-async": graphs.LangGraphAsync}[
        kind
    ](where)
    imported = time.time()
    if mode == "make":
        if kind == "langgraph-delta":  # its rows only look as they would if the messages came one by one
            subject.go(RUN, 0, n - 2)
        else:
            subject.seed(RUN, n)
        return
    assert len(subject.load(RUN)) >= n - 1
    say(spawned, imported)


def of_dbos(mode: str, n: int, where: Path, spawned: float) -> None:
    import threading

    from dbos import DBOS

    from messages import message

    imported = time.time()
    ready = threading.Event()
    DBOS(
        config={
            "name": "bench",
            "application_version": "1",
            "system_database_url": f"sqlite:///{where}/dbos.db",
            "log_level": "ERROR",
            "run_admin_server": False,
        }
    )

    @DBOS.step()
    def call(i: int) -> Any:
        if i == n:
            if mode == "make":
                os._exit(0)
            say(spawned, imported)
            ready.set()
        return message(i)

    @DBOS.workflow()
    def agent(count: int) -> int:
        return len([call(i) for i in range(count + 1)])

    DBOS.launch()
    if mode == "make":
        agent(n)
    else:
        assert ready.wait(120)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _, _, kind, mode, count, where, spawned = sys.argv
        if kind == "ours":
            of_ours(mode, int(count), Path(where), float(spawned))
        elif kind == "article":
            of_article(mode, int(count), Path(where), float(spawned))
        elif kind == "dbos":
            of_dbos(mode, int(count), Path(where), float(spawned))
        else:
            of_langgraph(kind, mode, int(count), Path(where), float(spawned))
        sys.stdout.flush()
        os._exit(0)  # the peers' threads would keep the process
    main()
