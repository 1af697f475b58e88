"""How many bytes does a run take on disk, for each byte of its messages as JSON, when every message was saved as it came?

On a tmpfs where there is one: the bytes are the same. Every subject saves message by message.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
from messages import Message, history, json_bytes, mixed

REPEAT = {10: 10, 100: 3}  # runs in one file: a file's own pages would count too much for one short run


def main() -> None:
    measure.header("storage: bytes on disk for each byte of JSON")
    targets = measure.Targets()
    base = measure.memory_folder()
    sizes = measure.numbers((10, 100, 1000))
    subjects: dict[str, Callable[[Path, int], float]] = {
        "Outlast": lambda folder, n: ours(folder, history(n), REPEAT.get(n, 1)),
        "Outlast, mixed sizes": lambda folder, n: ours(folder, mixed(n), REPEAT.get(n, 1)),
        "the article's design": article,
        "LangGraph SqliteSaver": lambda folder, n: langgraph(folder, n, delta=False),
        "LangGraph SqliteSaver, DeltaChannel": lambda folder, n: langgraph(folder, n, delta=True),
        "DBOS on SQLite": dbos,
    }
    rows: list[list[str]] = []
    for name, bytes_of in subjects.items():
        row = [name]
        for n in sizes:
            with measure.folder(base) as folder:
                taken = bytes_of(folder, n)
            per = taken / json_bytes(mixed(n) if "mixed" in name else history(n))
            row.append(f"{per:,.2f} ({taken / 1000:,.0f} KB)")
            if name.startswith("Outlast") and n >= 100:
                targets.at_most(f"{name}, {n:,} messages", per, 1.4 if "mixed" in name else 1.5, " bytes")
        rows.append(row)
    measure.table(["bytes for each byte of JSON", *(f"{n:,} messages" for n in sizes)], rows)
    targets.show()


def ours(folder: Path, messages: list[Message], repeat: int) -> float:
    from ours import Ours

    subject = Ours(folder)
    empty = Ours(measure.sub(folder, "empty"))
    empty.store.unfinished()
    for _ in range(repeat):
        session = subject.session(messages[:1], str(uuid.uuid4()))
        for m in messages[1:]:
            session.save(session.fact(m))
    subject.settle()
    empty.settle()
    file = Path(subject.store.path).stat().st_size - Path(empty.store.path).stat().st_size
    subject.close()
    empty.close()
    return file / repeat


def article(folder: Path, n: int) -> float:
    from plain import Article

    subject = Article(folder)
    messages = history(n)
    for i in range(1, n + 1):
        subject.save("run-1", messages[:i])
    subject.close()
    return measure.size(folder)


def langgraph(folder: Path, n: int, *, delta: bool) -> float:
    import graphs

    subject: Any = graphs.LangGraphDelta(folder) if delta else graphs.LangGraph(folder)
    subject.go("thread-1", 0, n - 2)
    subject.settle()
    subject.close()
    return measure.size(folder)


def dbos(folder: Path, n: int) -> float:
    from dbos_steps import Dbos

    subject = Dbos(folder)
    subject.steps(1, 1)
    before = measure.size(folder)
    subject.steps(n, n)
    after = measure.size(folder)
    subject.close()
    return after - before


if __name__ == "__main__":
    main()
