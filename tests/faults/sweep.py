"""A fault at every write of a run: `LD_PRELOAD=fi.so python -m tests.faults.sweep STRIDE FIRST`; one JSON line a case, the calm one first.

Each case is a process forked from this one, which stays single-threaded: one life on a failing disk (which is mended after a moment where the
fault stays), then another on a good one that takes the run up. What was told as saved before must be there.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.scene import RUN, app_in, effects

from outlast.errors import CommitUnknown, OutlastError, RunNotFound

KINDS = {1: "EIO", 2: "ENOSPC", 3: "torn", 4: "killed", 5: "torn and killed"}
MENDED_AFTER_S = 0.3
LIMIT_S = 60
disk = ctypes.CDLL(None)
disk.fi_calls.restype = ctypes.c_long


def in_a_child(life: Callable[[Callable[[Any], None]], None]) -> tuple[int, list[Any]]:
    """(how it ended, what it told before)."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        signal.alarm(LIMIT_S)
        code = 1
        try:
            life(lambda what: os.write(into, (json.dumps(what) + "\n").encode()))  # type: ignore[arg-type,return-value]  # a count nobody reads
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(into)
    with os.fdopen(out) as pipe:
        told = [json.loads(line) for line in pipe]
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


def mend_later() -> None:
    """Somebody makes room, a moment after the disk began to fail."""
    pause = threading.Event()
    while not disk.fi_fired():
        pause.wait(0.005)
    pause.wait(MENDED_AFTER_S)
    disk.fi_mend()


def disturbed(folder: Path, nth: int, kind: int, stays: bool) -> Callable[[Callable[[Any], None]], None]:
    def life(tell: Callable[[Any], None]) -> None:
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


def taken_up(folder: Path) -> Callable[[Callable[[Any], None]], None]:
    def life(tell: Callable[[Any], None]) -> None:
        app, agent = app_in(folder)
        with app:
            try:
                before = app.head(RUN).seq
            except RunNotFound:
                before = 0
            run = app.run_sync(agent, "go", run_id=RUN)
            tell({"before": before, "status": run.status, "reason": run.reason, "messages": run.messages, "effects": effects(folder),
                  "check": app.store_check()})  # fmt: skip

    return life


def case(nth: int, kind: int, stays: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outlast-fault-") as name:
        folder = Path(name)
        code, told = in_a_child(disturbed(folder, nth, kind, stays))
        again, found = in_a_child(taken_up(folder))
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
