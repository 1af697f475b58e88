"""Named points on each side of every commit and every outside call. Off they cost one comparison.

`OUTLAST_CRASH_AT=NAME` or `NAME#3` ends this process with SIGKILL at the (third) time it passes the point: what a crash test and the demo's
second process use. In a test, `arm(hook)` calls the hook with each name instead.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

POINTS: dict[str, str] = {
    "commit.before": "the entries are written, the commit is not: all of it must be gone afterwards",
    "commit.after": "the commit stands, nobody was told: the next holder must not do it again",
    "renewal.before": "leases are about to be renewed: at worst they run out",
    "renewal.after": "leases are renewed and nobody was told: they last a little longer",
    "claim.after": "the run is taken and nothing is loaded yet: the lease must be taken over",
    "model.before": "the model is about to be asked: nothing is lost",
    "model.after": "the model answered and the answer is not saved: this one call is paid for again",
    "tool.before": "the intent is saved (where there is one) and the tool has not begun",
    "tool.after": "the tool acted and its result is not saved: the reason for effects",
    "check.before": "a check is about to look whether an earlier attempt happened",
    "check.after": "a check has looked and its word is not saved",
    "notice.before": "a notice is taken and about to be sent: whoever is to be told must still be told",
    "notice.after": "a notice was sent and that is not saved: it is sent again, under the same id",
    "release.after": "the run waits or is over, and the worker has not said so",
}

_hook: Callable[[str], None] | None = None
_here = threading.local()


def point(name: str) -> None:
    """Pass a named point; `tool.*` and `check.*` carry `:TOOL` behind the name."""
    if _hook is not None:
        _hook(name.replace("commit.", "renewal.") if getattr(_here, "beside", False) else name)


def beside() -> None:
    """This thread only renews leases: its commits come by the clock, so they have names of their own, and the nth commit of a run stays the same."""
    _here.beside = True


def arm(hook: Callable[[str], None] | None) -> None:
    """Call `hook` at every point from now on; None: off."""
    global _hook
    _hook = hook


def kill_at(spec: str) -> Callable[[str], None]:
    """A hook that ends this process by SIGKILL at the nth pass of the point that `spec` names (`NAME` or `NAME#n`)."""
    name, _, nth = spec.partition("#")
    left = [int(nth or 1)]
    lock = threading.Lock()

    def hook(passed: str) -> None:
        if passed != name:
            return
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


if _spec := os.environ.get("OUTLAST_CRASH_AT"):
    arm(kill_at(_spec))
