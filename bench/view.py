"""How quick is the `checkpoints` view, which looks as if the whole list had been stored each time? In the plain sqlite3 shell.

The shell's own timer; where there is no shell, Python's sqlite3 module. The article's table beside it.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

import measure
from messages import history
from ours import Ours
from plain import Article

QUERIES = {
    "the latest row": "SELECT messages FROM checkpoints WHERE run_id = '{}' ORDER BY seq DESC LIMIT 1",
    "all rows, without messages": "SELECT seq, status FROM checkpoints WHERE run_id = '{}'",
    "max(seq)": "SELECT max(seq) FROM checkpoints WHERE run_id = '{}'",
    "every row, its length": "SELECT seq, status, length(messages) FROM checkpoints WHERE run_id = '{}' ORDER BY seq",
}
SIZES = (8, 1000, 10_000)
TIMES = 7
QUADRATIC = "every row, its length"


def main() -> None:
    shell = shutil.which("sqlite3")
    measure.header(f"view: `checkpoints` in {'the sqlite3 shell' if shell else 'the sqlite3 module'}")
    targets, rows = measure.Targets(), []
    with measure.folder() as folder:
        ours, article = Ours(folder), Article(folder)
        for n in SIZES:
            ours.session(history(n), f"run-{n}")
        for i in range(100):
            ours.session(history(8), f"other-{i}")
        messages = history(1000)
        for i in range(1, 1001):
            if i <= 8:
                article.save("run-8", messages[:i])
            article.save("run-1000", messages[:i])
        for name, path in (("Outlast", Path(ours.store.path)), (Article.name, folder / "article.db")):
            for what, query in QUERIES.items():
                cells = []
                for n in SIZES:
                    if (name == Article.name and n > 1000) or (what == QUADRATIC and n > 1000):
                        cells.append("-")
                        continue
                    took = measure.median([asked(shell, path, query.format(f"run-{n}")) for _ in range(TIMES if n <= 1000 else 3)])
                    cells.append(f"{took * 1e3:,.1f}")
                    if name == "Outlast" and what == "the latest row" and n <= 1000:
                        targets.at_most(f"{what} of {n:,}", took * 1e3, 2 if n == 8 else 10, " ms")
                    if name == "Outlast" and what == QUADRATIC and n == 8:
                        targets.at_most("all rows of 8 messages", took * 1e3, 2, " ms")
                rows.append((name, what, *cells))
        ours.close()
        article.close()
    measure.table(["", "query", *(f"{n:,} messages, ms" for n in SIZES)], rows)
    targets.show()


def asked(shell: str | None, path: Path, query: str) -> float:
    if shell is None:
        db = sqlite3.connect(path)
        a = measure.now()
        db.execute(query).fetchall()
        took = measure.now() - a
        db.close()
        return took
    script = f".timer on\n.output /dev/null\n{query};\n.output stdout\n"
    done = subprocess.run([shell, "-batch", str(path)], input=f"SELECT count(*) FROM runs;\n{script}" if "outlast" in path.name else script,
                          capture_output=True, text=True, check=True)  # fmt: skip
    return float(re.findall(r"real (\d+\.\d+)", done.stdout)[-1])


if __name__ == "__main__":
    main()
