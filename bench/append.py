"""What does one durable step cost, and does it grow with the history?

Messages of 1 KB, one saved per step, at histories of 10 to 10,000 messages; in turns with the floor and with every peer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import measure
from dbos_steps import Dbos
from graphs import LangGraph, LangGraphAsync, LangGraphDelta
from messages import history
from ours import Ours
from plain import Article, ArticleWal, Insert, Write

ROUNDS = {10: (15, 10), 100: (10, 20), 1000: (6, 16), 10_000: (3, 8)}  # history -> rounds, steps a round
QUICK = 3  # times as many for those that are quick and do not grow


def main() -> None:
    measure.header("append: one durable step against the history's length")
    targets = measure.Targets()
    with measure.folder() as folder:
        subjects: list[Any] = [
            kind(measure.sub(folder, kind.__name__))
            for kind in (Write, Insert, Ours, Article, ArticleWal, LangGraph, LangGraphDelta, LangGraphAsync, Dbos)
        ]
        medians: dict[int, dict[str, float]] = {}
        for n in measure.numbers((10, 100, 1000, 10_000)):
            medians[n] = at(n, subjects)
        for subject in subjects:
            subject.close()
    floor(targets, None, "disk")
    floor(targets, measure.memory_folder(), "tmpfs")
    cpu(measure.memory_folder())
    judge(targets, medians)
    with measure.folder(measure.memory_folder()) as folder:
        targets.at_most("CPU of one append, codec included (tmpfs)", cpu_of(folder) * 1e6, 90, " µs")
    targets.show()


def at(n: int, subjects: list[Any]) -> dict[str, float]:
    rounds, k = ROUNDS.get(n, (3, 8))
    times: dict[str, list[float]] = {s.name: [] for s in subjects}
    for s in subjects:
        s.steps(n, 6)  # the history is put there, the WAL is warm
    for _ in range(rounds):
        for s in subjects:
            if n <= 1000 and hasattr(s, "anew"):
                s.anew(n)  # or the history would not be n messages any more
            times[s.name] += s.steps(n, k * (QUICK if isinstance(s, Write | Insert | Ours | Dbos) else 1))
    found = {name: measure.median(v) for name, v in times.items()}
    print(f"\n{n:,} messages ({len(str(history(n))):,} characters)")
    rows = [
        (
            name,
            measure.us(found[name]),
            measure.us(measure.p95(v)),
            f"{found[name] / found[Insert.name]:.2f}",
            f"{found[name] / found[Ours.name]:.2f}",
        )
        for name, v in times.items()
    ]
    measure.table(["a step of", "median µs", "p95 µs", "× bare INSERT", "× Outlast"], rows)
    return found


def floor(targets: measure.Targets, base: str | None, where: str) -> None:
    """Ours against the floor, one step each in turn: a disk that is busy for a moment is busy for all of them."""
    with measure.folder(base) as folder:
        write, insert, ours = (kind(measure.sub(folder, kind.__name__)) for kind in (Write, Insert, Ours))
        turns: dict[str, tuple[Any, int]] = {
            write.name: (write, 100),
            insert.name: (insert, 100),
            "Outlast, 100 messages": (ours, 100),
            "Outlast, 10,000 messages": (ours, 10_000),
        }
        times: dict[str, list[float]] = {name: [] for name in turns}
        for subject, n in turns.values():
            subject.steps(n, 30)
        for _ in range(600):
            for name, (subject, n) in turns.items():
                times[name] += subject.steps(n, 1)
        for subject in (write, insert, ours):
            subject.close()
    found = {name: measure.median(v) for name, v in times.items()}
    print(f"\nstep by step in turns, {where}")
    rows = [
        (name, measure.us(found[name]), measure.us(measure.p95(v)), measure.us(min(v)), f"{found[name] / found[insert.name]:.2f}")
        for name, v in times.items()
    ]
    measure.table(["a step of", "median µs", "p95 µs", "least µs", "× bare INSERT"], rows)
    if where == "disk":
        targets.at_most("against a bare fsynced INSERT", found["Outlast, 100 messages"] / found[insert.name], 1.5, "×")
    targets.at_most(f"10,000 messages against 100, {where}", found["Outlast, 10,000 messages"] / found["Outlast, 100 messages"], 1.2, "×")


def cpu(base: str) -> None:
    """The same on a tmpfs: what is left is CPU."""
    with measure.folder(base) as folder:
        subjects: list[Any] = [kind(measure.sub(folder, kind.__name__)) for kind in (Insert, Ours, Article, LangGraph)]
        times: dict[str, list[float]] = {s.name: [] for s in subjects}
        for s in subjects:
            s.steps(100, 20)
        for _ in range(10):
            for s in subjects:
                times[s.name] += s.steps(100, 30)
        print("\nwithout a disk (tmpfs), 100 messages")
        measure.table(["a step of", "median µs"], [(name, measure.us(measure.median(v))) for name, v in times.items()])
        for s in subjects:
            s.close()


def cpu_of(folder: Path) -> float:
    ours = Ours(folder)
    session = ours.session(history(100), "run-cpu")
    session.cpu(200)
    found = min(measure.median(session.cpu(100)) for _ in range(20))  # the quietest round: neighbours slow a CPU, nothing speeds one up
    ours.close()
    return found


def judge(targets: measure.Targets, medians: dict[int, dict[str, float]]) -> None:
    def ratio(n: int, name: str) -> float:
        return medians[n][name] / medians[n][Ours.name]

    for n in medians:
        for name, wanted in (
            (Article.name, {10: 3, 1000: 10, 10_000: 50}),
            (LangGraph.name, {10: 2.5, 1000: 6, 10_000: 50}),
            (LangGraphDelta.name, {1000: 4}),
            (Dbos.name, {100: 8}),
        ):
            if n in wanted:
                targets.at_least(f"{name}, {n:,} messages", ratio(n, name), wanted[n], "×")


if __name__ == "__main__":
    main()
