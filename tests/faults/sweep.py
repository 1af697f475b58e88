"""A fault at every write of a run: `LD_PRELOAD=fi.so python -m tests.faults.sweep STRIDE FIRST`; one JSON line a case, the calm one first.

Each case is a process forked from this one, which stays single-threaded: one life on a failing disk (which is mended after a moment where the
fault stays), then another on a good one that takes the run up. What was told as saved before must be there.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.faults.scene import RUN, Life, Tell, app_in, in_a_child, taken_up

from outlast.errors import CommitUnknown, OutlastError

KINDS = {1: "EIO", 2: "ENOSPC", 3: "torn", 4: "killed", 5: "torn and killed"}
MENDED_AFTER_S = 0.3
LIMIT_S = 60
disk = ctypes.CDLL(None)
disk.fi_calls.restype = ctypes.c_long


def mend_later() -> None:
    """Somebody makes room, a moment after the disk began to fail."""
    pause = threading.Event()
    while not disk.fi_fired():
        pause.wait(0.005)
    pause.wait(MENDED_AFTER_S)
    disk.fi_mend()


def disturbed(folder: Path, nth: int, kind: int, stays: bool) -> Life:
    def life(tell: Tell) -> None:
        app, agent = app_in(folder, lambda event: tell(["seq", event.seq]) if event.type == "checkpoint" else None)
        disk.fi_arm(ctypes.c_long(nth), kind, int(stays), b"outlast.db")
        if stays:
            threading.Thread(target=mend_later, daemon=True).start()
        try:
            run = app.run_sync(agent, "go", run_id=RUN)
            tell(["ended", run.status])
        except OutlastError as e:
            tell(["error", type(e).__name__, str(e), e.hint, isinstance(e, CommitUnknown)])
        disk.fi_mend()
        tell(["calls", disk.fi_calls(), disk.fi_fired()])
        app.close()

    return life


def case(nth: int, kind: int, stays: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outlast-fault-") as name:
        folder = Path(name)
        code, told = in_a_child(disturbed(folder, nth, kind, stays), LIMIT_S)
        again, found = in_a_child(taken_up(folder), LIMIT_S)
        said = {what[0]: what[1:] for what in told if what[0] != "seq"}
        return {
            "nth": nth, "kind": KINDS.get(kind, "calm"), "stays": stays, "code": code,
            "again": again,
            "acked": max((x[1] for x in told if x[0] == "seq"), default=0),
            **said, **(found[0] if found else {})}  # fmt: skip


def main() -> None:
    stride, first = int(sys.argv[1]), int(sys.argv[2])
    logging.disable(logging.CRITICAL)
    calm = case(-1, 0, False)
    print(json.dumps(calm), flush=True)
    number = 0
    for kind in KINDS:
        for stays in (False, True) if kind < 4 else (False,):
            for nth in range(1, calm["calls"][0] + 1):
                number += 1
                if number % stride == first % stride:
                    print(json.dumps(case(nth, kind, stays)), flush=True)


if __name__ == "__main__":
    main()
