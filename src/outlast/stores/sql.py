"""SQL that lives in files of its own: named queries and numbered migrations, the same layout for every store.

    queries.sql            `-- name --` opens a query; what follows on that line is its comment
    migrations/0001.sql    0001, 0002, …: applied in that order, each once, never changed after a release

A query may hold `{fragment}`: the text of another query of the same file, put in when the file is read. SQL is put together from these
files only.
"""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable

_NAME = re.compile(r"^-- ([a-z_.]+) --[^\n]*\n", re.MULTILINE)
_FRAGMENT = re.compile(r"\{([a-z_.]+)\}")


def queries(package: str) -> dict[str, str]:
    """The named queries of `package`'s queries.sql, fragments put in."""
    parts = _NAME.split(files(package).joinpath("queries.sql").read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        assert name not in found, f"two queries are named {name}"
        found[name] = _FRAGMENT.sub(lambda m: found[m[1]], body).strip()
    return found


def migrations(package: str) -> list[str]:
    """The migrations of `package`, oldest first: the first brings the schema to version 1."""
    folder = files(package).joinpath("migrations")
    numbered = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    assert [_number(f) for f in numbered] == list(range(1, len(numbered) + 1)), "migrations are numbered 0001, 0002, … without a gap"
    return [f.read_text(encoding="utf-8") for f in numbered]


def _number(file: Traversable) -> int:
    return int(file.name.removesuffix(".sql"))
