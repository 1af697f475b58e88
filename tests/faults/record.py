"""Records what a run writes, syncs and cuts, and what it was told is saved: `python -m tests.faults.record FOLDER full|normal`, JSON lines."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import apsw
from tests.faults.scene import RUN, app_in

from outlast.runtime import crashpoints
from outlast.stores.sqlite import opening

trace: list[list[Any]] = []


class File(apsw.VFSFile):
    def __init__(self, base: str, name: Any, flags: list[int]) -> None:
        self.name = Path(name.filename() if hasattr(name, "filename") else name).name
        super().__init__(base, name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802 - the name SQLite calls it by
        trace.append(["write", self.name, offset, base64.b64encode(data).decode()])
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:  # noqa: N802 - the name SQLite calls it by
        trace.append(["cut", self.name, size])
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:  # noqa: N802 - the name SQLite calls it by
        super().xSync(flags)
        trace.append(["sync", self.name])


class Recorder(apsw.VFS):
    def __init__(self) -> None:
        super().__init__("recorder", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> File:  # noqa: N802 - the name SQLite calls it by
        return File("unix", name, flags)

    def xDelete(self, name: str, sync: bool) -> None:  # noqa: N802 - the name SQLite calls it by
        super().xDelete(name, sync)
        trace.append(["delete", Path(name).name])


def main() -> None:
    folder, level = Path(sys.argv[1]), sys.argv[2]
    recorder = Recorder()
    opening.WAL_PAGES = 12  # checkpoints within one short run
    if level == "normal":
        configured = opening.configure

        def normal(db: apsw.Connection, path: str) -> None:
            configured(db, path)
            db.execute("PRAGMA synchronous = normal")

        opening.configure = normal
    app, agent = app_in(folder)

    def hook(name: str) -> None:
        writer = app._store._files._writer if app._opened else None
        if name == "commit.after" and writer is not None:
            [(entries,)] = writer.db.execute("SELECT count(*) FROM entry").fetchall()
            trace.append(["told", entries])

    crashpoints.arm(hook)
    with app:
        for n in range(2):
            assert app.run_sync(agent, "go", run_id=f"{RUN}-{n}").status == "done"
    crashpoints.arm(None)
    print("\n".join(json.dumps(step) for step in trace))
    del recorder


if __name__ == "__main__":
    main()
