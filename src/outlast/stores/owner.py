"""Who holds a lease: host, pid namespace, pid, process start; and whether that process is provably dead.

"Provably" means: same host, same boot, same pid namespace as the asker's, and no process of that pid that started at that instant. Anything
else (another machine, a container of its own, an odd name) counts as alive: its lease must run out.
"""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

_SEP = "/"


def me() -> str:
    """host/boot/pid-namespace/pid/start, of this process. Safe after fork: asked anew in the child."""
    pid = os.getpid()
    return _SEP.join((platform.node() or "host", boot_id()[:8], _pid_namespace(pid), str(pid), _start(pid) or "?"))


def short(owner: str) -> str:
    """host:pid, for people."""
    parts = owner.split(_SEP)
    return f"{parts[0]}:{parts[3]}" if len(parts) == 5 else owner


def provably_dead(owner: str) -> bool:
    """Is the process of this owner surely gone?"""
    parts = owner.split(_SEP)
    if len(parts) != 5:
        return False
    host, boot, namespace, pid, start = parts
    mine = os.getpid()
    if host != (platform.node() or "host") or namespace != _pid_namespace(mine) or not pid.isdigit() or start == "?":
        return False
    if boot != boot_id()[:8]:
        return True  # this machine was started anew since
    now = _start(int(pid))
    return now is None or now != start


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Of this machine since it was started; "" where it cannot be told (leases then only run out)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink()).removeprefix("pid:[").removesuffix("]")
    except OSError:
        return "-"


def _start(pid: int) -> str | None:
    """Clock ticks from boot to the start of that process; None: there is none (a zombie has ended too)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return None
    except OSError:
        return _alive_without_proc(pid)
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _alive_without_proc(pid: int) -> str | None:
    """Where /proc is missing (macOS) a pid that answers no signal is dead; a living one may be another process: not provable."""
    if Path("/proc/self/stat").exists():
        return None  # /proc is there, the process is not
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return "?"
    return "?"
