"""Many schedules from many seeds, or one again.

    python -m outlast.testing.simulate [--seeds N] [--first SEED] [--minutes M] [--processes N]
    python -m outlast.testing.simulate --only SEED [--choices AT:VALUE,AT:VALUE,…]

A schedule that breaks an invariant is cut down (choices that are not needed become calm ones) and shown with the command that repeats it.
What a large number of schedules never reached is an error too: a green run that never met a zombie has shown nothing about zombies.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

from outlast.runtime.clock import monotonic
from outlast.runtime.crashpoints import POINTS
from outlast.testing.simulation.loop import Livelock
from outlast.testing.simulation.schedule import EVENTS, WINDOWS, Broken, Schedule, quiet

SEEDS = 1000
SWEEP_EVERY = 100  # schedules between two collections of what dead processes left
SHRINK_TRIES = 400
ENOUGH = 5000  # schedules from which on everything below must have been reached
NOT_HERE = ("notice",)  # points of notices: nobody is told in these schedules
MUST_REACH = (
    *(f"died at {p}" for p in POINTS if not p.startswith(NOT_HERE)),
    "died at wire", "a zombie's append was refused", "an append was behind", "an append under the lock", "an unknown commit stood",
    "an unknown commit did not stand", "a store error", "a process was paused past its lease", "a worker was drained", "an attempt was deduped",
    "a decision at the very deadline", "a decision was refused", "an earlier attempt may still act", "somebody said approved",
    "somebody said rejected", "somebody said happened", "somebody said run_again", "somebody said give_up", "an event was delivered twice",
    "the clock was set back", "the clock was set forward", "a run was cancelled", "a run was retried", "a text was sent",
    "a person's word was said again", "the sweeper moved a gate", "a run was given up", "a run ended as done", "a run ended as failed",
    "a run ended as cancelled", "CallDoubted", "CallFailed", "CallSkipped", "ChildFinished", "EventReceived", "GateDecided", "GateExpired",
    "GateMoved", "LateResult", "ModelCallLost", "ModelFailed", "RetryAsked", "RunCancelled", "TextSent", "WorkerDied",
)  # fmt: skip
ENOUGH_FOR_PAIRS = 50_000  # and these
MUST_MEET = (*combinations(EVENTS, 2), *product(EVENTS, WINDOWS))
RAREST = 12
TELL_EVERY_S = 60.0
INTERRUPTED = 130  # as a shell says it of Ctrl-C


@dataclass
class Found:
    """A schedule that broke something."""

    seed: int
    why: str
    choices: dict[int, int]


@dataclass
class Result:
    schedules: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    reached: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    found: Found | None = None
    interrupted: bool = False

    def add(self, other: Result) -> None:
        self.schedules += other.schedules
        self.steps += other.steps
        self.virtual_s += other.virtual_s
        self.reached.update(other.reached)
        self.pairs.update(other.pairs)
        self.found = self.found or other.found

    @property
    def unreached(self) -> list[str]:
        """After so many schedules: states, and with more of them pairs."""
        states = [what for what in MUST_REACH if not self.reached[what]] if self.schedules >= ENOUGH else []
        pairs = [" / ".join(pair) for pair in MUST_MEET if not self.pairs[pair]] if self.schedules >= ENOUGH_FOR_PAIRS else []
        return states + pairs


def play(seed: int, choices: Mapping[int, int] | None = None) -> tuple[Schedule, str | None]:
    """One schedule, and what it broke. Anything that a schedule raises is a finding: nothing may come out of the runtime."""
    schedule = Schedule(seed, choices)
    try:
        schedule()
    except (Broken, Livelock) as e:
        return schedule, str(e)
    except Exception as e:  # noqa: BLE001 - whatever it is, it should not have come
        return schedule, f"I30: {type(e).__name__}: {e}"
    return schedule, None


def run(seeds: Sequence[int], until: float = float("inf")) -> Result:
    """Play them until one breaks something, the time is over, or Ctrl-C comes."""
    result = Result()
    with quiet() as sweep:
        try:
            for n, seed in enumerate(seeds):
                schedule, why = play(seed)
                result.schedules += 1
                result.steps += schedule.loop.steps
                result.virtual_s += schedule.loop.now
                result.reached.update(schedule.reached)
                result.pairs.update(schedule.pairs)
                made = dict(schedule.choices.made)
                del schedule  # with all that its dead processes left
                if why is not None:
                    result.found = Found(seed, why, made)
                    break
                if n % SWEEP_EVERY == SWEEP_EVERY - 1:
                    sweep()
                if monotonic() >= until:
                    break
        except KeyboardInterrupt:
            result.interrupted = True
    return result


def shrink(found: Found, breaks: Callable[[Mapping[int, int]], str | None]) -> Found:
    """Delta debugging over the choices: what can be calm becomes calm, as long as the same invariant breaks."""
    name = found.why.partition(":")[0]
    kept, why, tries = dict(found.choices), found.why, 0
    size = max(len(kept) // 2, 1)
    while size and tries < SHRINK_TRIES:
        smaller = False
        order = sorted(kept)
        for start in range(0, len(order), size):
            without = {at: v for at, v in kept.items() if at not in set(order[start : start + size])}
            tries += 1
            said = breaks(without)
            if said is not None and said.partition(":")[0] == name:
                kept, why, smaller = without, said, True
                break
            if tries >= SHRINK_TRIES:
                break
        if not smaller:
            size //= 2
    return Found(found.seed, why, kept)


def command(found: Found) -> str:
    choices = ",".join(f"{at}:{value}" for at, value in sorted(found.choices.items())) or "none"
    return f"python -m outlast.testing.simulate --only {found.seed} --choices {choices}"


def _left_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _part(arguments: tuple[Sequence[int], float]) -> Result:
    return run(*arguments)


def run_many(first: int, seeds: int, *, minutes: float | None, processes: int) -> Result:
    """All of them, over several processes; the first finding ends it."""
    until = monotonic() + minutes * 60 if minutes is not None else float("inf")
    if processes == 1:
        return run(range(first, first + seeds), until)
    chunk = min(200, max(seeds // (4 * processes), 1))
    parts = [(range(at, min(at + chunk, first + seeds)), until) for at in range(first, first + seeds, chunk)]
    total, told = Result(), monotonic()
    with multiprocessing.get_context("spawn").Pool(processes, _left_to_the_parent) as pool:
        try:
            for part in pool.imap_unordered(_part, parts):
                total.add(part)
                if total.found is not None or monotonic() >= until:
                    break
                if monotonic() - told >= TELL_EVERY_S:
                    told = monotonic()
                    sys.stderr.write(f"{total.schedules} schedules so far\n")
        except KeyboardInterrupt:
            total.interrupted = True
        pool.terminate()
    return total


def _report(result: Result, first: int, seconds: float, *, wanted: int, as_found: bool) -> int:
    days = result.virtual_s / 86400
    say(f"{result.schedules} schedules from seed {first}: {result.steps} steps, {days:.1f} simulated days in {seconds:.0f} s")
    if result.found is not None:
        say(f"seed {result.found.seed} broke {result.found.why}")
        if as_found:
            say(command(result.found))
            return 1
        with quiet():
            small = shrink(result.found, lambda kept: play(result.found.seed, kept)[1] if result.found else None)
        say(f"cut down to {len(small.choices)} choices: {small.why}", command(small))
        return 1
    for what, n in sorted(result.reached.items()):
        say(f"  {n:8} {what}")
    rarest = sorted(MUST_MEET, key=lambda pair: result.pairs[pair])[:RAREST]
    say(f"{sum(result.pairs[pair] > 0 for pair in MUST_MEET)} of {len(MUST_MEET)} pairs were met; the rarest:")
    for pair in rarest:
        say(f"  {result.pairs[pair]:8} {' / '.join(pair)}")
    if result.interrupted:
        say(f"interrupted after {result.schedules} schedules: nothing broke in those")
        return INTERRUPTED
    if result.unreached:
        say("never reached: " + "; ".join(result.unreached))
    if result.schedules < wanted:
        say(f"only {result.schedules} of {wanted} schedules were played: the time was over")
    return 1 if result.unreached or result.schedules < wanted else 0


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _at_least_1(given: str) -> int:
    if (value := int(given)) < 1:
        raise argparse.ArgumentTypeError(f"{given} is not 1 or more")
    return value


def _choices(given: str) -> dict[int, int]:
    found = [(int(at), int(value)) for at, value in re.findall(r"(\d+):(\d+)", given)]
    if given not in ("none", ",".join(f"{at}:{value}" for at, value in found)):
        raise argparse.ArgumentTypeError(f"{given!r:.60} is not AT:VALUE,…, as a finding's command has it")
    return dict(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m outlast.testing.simulate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=_at_least_1, help=f"how many; default {SEEDS}")
    parser.add_argument("--first", type=int, default=0, help="the first one; default 0")
    parser.add_argument("--minutes", type=float, help="stop after so long; fewer than --seeds then is an error")
    parser.add_argument("--processes", type=_at_least_1, default=os.cpu_count() or 1, help="default: one for each core")
    parser.add_argument("--as-found", action="store_true", help="do not cut down what is found")
    parser.add_argument("--only", type=int, metavar="SEED", help="one schedule")
    parser.add_argument("--choices", type=_choices, help="its choices, AT:VALUE,…; or none")
    args = parser.parse_args(argv)
    if args.choices is not None and args.only is None:
        parser.error("--choices are those of one schedule: --only SEED is missing")
    if args.only is not None:
        with quiet():
            schedule, why = play(args.only, args.choices)
        say(f"seed {args.only}: {schedule.loop.steps} steps, trace {schedule.loop.trace}", why or "nothing broke")
        return 1 if why else 0
    began = monotonic()
    seeds = args.seeds if args.seeds is not None else SEEDS
    result = run_many(args.first, seeds, minutes=args.minutes, processes=args.processes)
    wanted = args.seeds or 0  # with --minutes alone: as many as there is time for
    return _report(result, args.first, monotonic() - began, wanted=wanted, as_found=args.as_found)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: with its processes
    sys.exit(main())
