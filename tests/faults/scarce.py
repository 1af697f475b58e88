"""A run in a process that has hardly anything left: `python -m tests.faults.scarce files|memory LEFT…`; one JSON line a case.

Each case is two lives in processes forked from this one, which stays single-threaded: one in want (of file descriptors, of memory), then one with
enough that takes the run up. What was told as saved before must be there, and nothing may happen twice.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.faults.scene import RUN, Life, Tell, app_in, in_a_child, taken_up

import outlast.stores.sqlite.store  # noqa: F401 - before there is want
from outlast.errors import OutlastError

LIMIT_S = 120


def want_of_files(left: int) -> None:
    open_now = sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # but the listing itself; in a fresh fork their numbers have no gaps
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + left, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def want_of_memory(left_mb: int) -> None:
    threading.stack_size(256 * 1024)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + left_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


WANTS = {"files": want_of_files, "memory": want_of_memory}


def in_want(folder: Path, of: str, left: int) -> Life:
    def life(tell: Tell) -> None:
        app, agent = app_in(folder, lambda event: tell(["seq", event.seq]) if event.type == "checkpoint" else None)
        WANTS[of](left)
        try:
            tell(["ended", app.run_sync(agent, "go", run_id=RUN).status])
        except OutlastError as e:
            tell(["error", type(e).__name__, str(e), e.hint])
        except (
            OSError,
            MemoryError,
            RuntimeError,
            SystemError,
            ImportError,
        ) as e:  # Python's own, before any code of ours: no loop, no thread, no memory
            tell(["error", type(e).__name__, str(e), "python"])

    return life


def case(of: str, left: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outlast-scarce-") as name:
        folder = Path(name)
        code, told = in_a_child(in_want(folder, of, left), LIMIT_S)
        again, found = in_a_child(taken_up(folder), LIMIT_S)
        said = {what[0]: what[1:] for what in told if what[0] != "seq"}
        acked = max((what[1] for what in told if what[0] == "seq"), default=0)
        return {"of": of, "left": left, "code": code, "again": again, "acked": acked, **said, **(found[0] if found else {})}


def main() -> None:
    logging.disable(logging.CRITICAL)
    for left in sys.argv[2:]:
        print(json.dumps(case(sys.argv[1], int(left))), flush=True)


if __name__ == "__main__":
    main()
