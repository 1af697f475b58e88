"""A soak: real workers, killed and stopped again and again in windows that are held open; then the books are compared with the world.

    python -m outlast.testing.soak --kills 200 [--stops N] [--jumps N] [--runs N] [--workers N] [--seed N] [--windows N]
    python -m outlast.testing.soak --kills 200 --server-kills 50        on a Postgres server of its own, which is killed as well

`--jumps`: the workers' wall clocks are set forward and back while they run (libfaketime; their monotonic clocks and the world's go on).

At the end nothing may have happened twice, no run may be lost, none may be stuck, and enough kills must have landed inside each window:
random kills hardly ever hit what matters, so half of them are aimed, and what counts is what the victim was doing when it died.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from outlast.errors import OutlastError, Refused, StoreError, UsageError
from outlast.runtime.clock import ManualClock, monotonic
from outlast.testing import soak_agent
from outlast.testing.soak_agent import DEDUPED, GATED, LEASE, VARIABLE, WINDOWS, World, first_text, inside, plan
from outlast.testing.soak_nursery import Nursery, Worker
from outlast.testing.soak_postgres import Server

SLOW_MS = {"model.after": 20.0, "tool.after": 20.0, "commit.before": 6.0, "commit.after": 10.0}
AIM_S = 1.0  # how long an aimed kill waits for its window
STALLED_S = 120.0  # so long without a fault that could be done: nothing can be aimed at
SETTLE_S = 120.0  # after the last fault everything must come to its end
MOST_WRONG = 20  # of what must not happen while faults run: more of it shows nothing new
REJECTED = "not this one"
OFFSETS_S = (-3600, -60, 0, 60, 3600)  # of the workers' wall clocks; any two of them nearer than a gate's four hours
FAKETIME = ("usr/lib/*/faketime/libfaketimeMT.so.1", "usr/lib*/faketime/libfaketimeMT.so.1", "usr/local/lib/faketime/libfaketimeMT.so.1")


@dataclass
class Report:
    """What was done and what came of it; `problems` empty: the soak holds."""

    seed: int
    wanted: int  # kills inside each window
    kills: int = 0
    stops: int = 0
    jumps: int = 0  # of the workers' wall clocks
    server_kills: int = 0  # of Postgres
    refused: int = 0  # runs that a stopped worker had lost when it woke up
    hits: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    calls: int = 0
    effects: int = 0
    attempts: int = 0  # at receivers that dedupe
    asked: int = 0
    answers: int = 0
    verified: int = 0  # questions "did it happen?" that a person answered
    busy: int = 0  # times that the store had no time for people
    given_up: int = 0  # runs whose workers died five times in a row, taken up again by a person
    duplicated: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        missed = [f"only {self.hits[w]} kills inside the {w} window, {self.wanted} wanted" for w in WINDOWS if self.hits[w] < self.wanted]
        return [*self.duplicated, *self.lost, *self.stuck, *self.other, *missed]

    def lines(self) -> list[str]:
        windows = ", ".join(f"{self.hits[w]} in the {w} window" for w in WINDOWS)
        return [
            f"seed {self.seed}: {self.kills} kills ({windows}) in {self.seconds:.0f} s",
            f"{self.stops} stops past the lease, {self.jumps} clock jumps, {self.server_kills} kills of Postgres",
            f"{self.runs} runs, {self.calls} tool calls, {self.effects} effects; {self.attempts} attempts at receivers that dedupe",
            f"the model was asked {self.asked} times for {self.answers} answers; {self.verified} doubts settled by a person",
            f"{self.refused} runs taken from stopped workers; {self.given_up} given up and taken up again; the store had no time {self.busy} times",
            f"{len(self.duplicated)} duplicated effects, {len(self.lost)} lost runs, {len(self.stuck)} stuck runs",
            *self.problems,
        ]


class GivenUp(Exception):
    """Going on would show nothing; what was seen until then is told all the same."""


class Soak:
    def __init__(self, folder: Path, *, kills: int, stops: int, runs: int, workers: int, seed: int, windows: int, jumps: int = 0,
                 server_kills: int = 0) -> None:  # fmt: skip
        self.world = World(folder).make()
        self.jumps, self.server_kills = jumps, server_kills
        self.offset = self.world.folder / "offset"  # of the workers' wall clocks; what libfaketime reads
        self.server = Server().make().start() if server_kills else None
        self.app = soak_agent.make(self.world, self.server.url if self.server else None, Shifted(self.offset) if jumps else None)
        self.kills, self.stops, self.runs, self.rng = kills, stops, runs, random.Random(seed)  # noqa: S311 - a schedule, no secret
        self.report = Report(seed, windows)
        self.workers: list[Worker] = []
        self.nursery: Nursery | None = None
        self.born = 0
        self.stopped: dict[int, float] = {}  # index of a worker -> when it goes on
        self.poisoned: set[str] = set()
        self.ids: list[str] = []
        self.over = threading.Event()
        self.n = workers
        settings: dict[str, Any] = {"world": str(folder), "seed": seed, "slow": SLOW_MS}
        if self.server is not None:
            settings["store"] = self.server.url
        self.env = {**os.environ, VARIABLE: json.dumps(settings)}
        if jumps:
            self._set_clocks(0)
            self.env |= {
                "LD_PRELOAD": faketime(), "FAKETIME_TIMESTAMP_FILE": str(self.offset), "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}  # its stat can wait for itself for ever  # fmt: skip

    def __call__(self) -> Report:
        began = monotonic()
        people = threading.Thread(target=self._people, name="people", daemon=True)
        try:
            self.app.store_migrate()
            people.start()
            self.nursery = Nursery(self.env)
            self.workers = [self._worker() for _ in range(self.n)]
            self._start_runs()
            self._strike()
            self._settle()
        except GivenUp as e:
            self.report.other.append(str(e))
        finally:
            self.over.set()
            if people.is_alive():
                people.join(timeout=10)
            self._end_workers()
            if self.nursery is not None:
                self.nursery.close()
            if self.server is not None and sys.exc_info()[0] is not None:
                self.server.remove()
        try:
            self._audit()
            self.app.close()
        finally:
            if self.server is not None:
                self.server.remove()
        self.report.seconds = monotonic() - began
        return self.report

    # ---- faults -----------------------------------------------------------------------------------------------------------------

    def _worker(self) -> Worker:
        assert self.nursery is not None
        self.born += 1
        return self.nursery.worker(self.world.folder / "logs" / str(self.born))

    def _look(self) -> None:
        """Whether all workers are still there: whoever ends by itself was not killed by us."""
        for i, worker in enumerate(self.workers):
            if (code := worker.poll()) is not None:
                self._ended_by_itself(i, code)

    def _ended_by_itself(self, i: int, code: int) -> None:
        self.report.other.append(f"a worker ended by itself with {code}: {self.workers[i].last_words()}")
        if len(self.report.other) >= MOST_WRONG:
            raise GivenUp("given up: it goes on like that")
        self.stopped.pop(i, None)
        self.workers[i] = self._worker()

    def _strike(self) -> None:
        """Until all kills and stops are done; half of the kills wait for the window that was hit least."""
        pause, done, since = threading.Event(), -1, monotonic()
        while self._left():
            if (faults := self._done()) != done:
                done, since = faults, monotonic()
            elif monotonic() - since >= STALLED_S:
                began = sum(map(self._began, range(self.n)))
                raise GivenUp(f"no fault could be done for {STALLED_S:.0f} s; {began} of {self.n} workers have begun")
            self._look()
            self._go_on()
            self._start_runs()
            self._jump()
            self._kill_server()
            free = [i for i in range(self.n) if i not in self.stopped and self._began(i)]
            if not free:
                pause.wait(0.02)
                continue
            stops_left, kills_left = self.stops - self.report.stops, self.kills - self.report.kills
            if stops_left > 0 and (kills_left <= 0 or self.rng.random() < stops_left / (stops_left + kills_left)):
                self._stop(free)
            elif not self.stopped and (kills_left > 0 or self._missed()):  # else nobody might be left to take what a stopped one holds
                self._kill(free)
            pause.wait(self.rng.uniform(0, 0.06))

    def _left(self) -> bool:
        r = self.report
        return (
            r.kills < self.kills
            or bool(self._missed())
            or r.stops < self.stops
            or r.jumps < self.jumps
            or r.server_kills < self.server_kills
        )

    def _done(self) -> int:
        r = self.report
        return r.kills + r.stops + r.jumps + r.server_kills

    def _missed(self) -> list[str]:
        """Windows that want more kills; a machine that is too slow for any aim is given up after three times as many as asked for."""
        r = self.report
        return [w for w in WINDOWS if r.hits[w] < r.wanted] if r.kills < 3 * self.kills else []

    def _share(self) -> float:
        """How much of the kills is done: everything else is spread over them."""
        return self.report.kills / self.kills if self.kills else 1.0

    def _jump(self) -> None:
        if self.report.jumps < self.jumps and self.report.jumps <= self._share() * self.jumps:
            before = int(self.offset.read_text())
            self._set_clocks(self.rng.choice([x for x in OFFSETS_S if x != before]))
            self.report.jumps += 1

    def _set_clocks(self, offset_s: int) -> None:
        """In one step: a worker that reads half a number would be somewhere else altogether."""
        new = self.offset.with_suffix(".new")
        new.write_text(f"{offset_s:+d}")
        new.replace(self.offset)

    def _kill_server(self) -> None:
        if (
            self.server is not None
            and self.report.server_kills < self.server_kills
            and self.report.server_kills <= self._share() * self.server_kills
        ):
            self.server.kill()
            self.report.server_kills += 1
            self.server.start()

    def _began(self, i: int) -> bool:
        return (self.world.inside / str(self.workers[i].pid)).exists()

    def _kill(self, free: Sequence[int]) -> None:
        victim: int | None = self.workers[self.rng.choice(free)].pid
        extra = self.report.kills >= self.kills  # only those that hit what was missed
        if extra or self.rng.random() < 0.6:
            least = min(WINDOWS, key=lambda w: (self.report.hits[w], w))
            aimed = self._aim({least}, {*(self.workers[i].pid for i in free), *self._children()})
            victim = aimed if extra or aimed is not None else victim
        if victim is None:
            return
        number = next((i for i, worker in enumerate(self.workers) if worker.pid == victim), None)
        if number is not None:
            self.workers[number].kill()
            if (code := self.workers[number].wait()) != -signal.SIGKILL:
                self._ended_by_itself(number, code)
                return
            self.workers[number] = self._worker()
        elif not _is_alone(victim) or not _killed(victim):
            return  # it had come to its end
        self.report.kills += 1
        self.report.hits.update(inside(self.world.inside, victim))
        (self.world.inside / str(victim)).unlink(missing_ok=True)

    def _children(self) -> set[int]:
        """Processes that drive one run alone, of living workers and of dead ones."""
        found = {int(file.name) for file in self.world.inside.iterdir()} - {worker.pid for worker in self.workers}
        for pid in list(found):
            if not _is_alone(pid):
                found.discard(pid)
                (self.world.inside / str(pid)).unlink(missing_ok=True)
        return found

    def _aim(self, windows: set[str], pids: set[int]) -> int | None:
        """One of these processes that is inside one of these windows at this moment."""
        until, pause = monotonic() + AIM_S, threading.Event()
        while monotonic() < until:
            for pid in pids:
                if inside(self.world.inside, pid) & windows:
                    return pid
            pause.wait(0.0005)
            self._go_on()
        return None

    def _stop(self, free: Sequence[int]) -> None:
        """SIGSTOP past its lease; not inside a commit, where it would only hold everybody up."""
        numbers = {self.workers[i].pid: i for i in free}
        pid = self._aim({"model", "effect"}, set(numbers))
        if pid is None or len(self.stopped) >= self.n - 1:
            return
        victim = numbers[pid]
        self.workers[victim].send_signal(signal.SIGSTOP)
        self.report.stops += 1
        self.stopped[victim] = monotonic() + LEASE.total_seconds() * self.rng.uniform(1.5, 3.0)

    def _go_on(self) -> None:
        for victim, at in list(self.stopped.items()):
            if monotonic() >= at:
                self.workers[victim].send_signal(signal.SIGCONT)
                del self.stopped[victim]

    def _settle(self) -> None:
        """No more faults: everything must come to its end. Clocks stay on their latest: what waits for an instant of any of them is due."""
        if self.jumps:
            self._set_clocks(max(OFFSETS_S))
        until, pause = monotonic() + SETTLE_S, threading.Event()
        while monotonic() < until:
            self._look()
            self._go_on()
            try:
                if not self.stopped and not self.app.unfinished_runs() and not self._given_up():
                    return
            except StoreError:
                self.report.busy += 1
            pause.wait(0.1)

    def _end_workers(self) -> None:
        for worker in self.workers:
            worker.send_signal(signal.SIGCONT)
            worker.terminate()
        for worker in self.workers:
            try:
                if code := worker.wait(timeout=20):
                    self.report.other.append(f"a worker ended with {code} after SIGTERM")
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
                self.report.other.append("a worker did not end within 20 s of SIGTERM")
        for pid in self._children():
            _killed(pid)

    # ---- people -----------------------------------------------------------------------------------------------------------------

    def _start_runs(self) -> None:
        """Enough to do at any moment, and `runs` in all. Where the store is busy for long: the same again next time."""
        try:
            self._start()
        except StoreError:
            self.report.busy += 1

    def _start(self) -> None:
        while len(self.ids) < self.runs or (self._left() and len(self.app.unfinished_runs()) < 4 * self.n):
            if len(self.ids) >= self.runs or len(self.app.unfinished_runs()) < 8 * self.n:
                run_id = f"soak-{len(self.ids):05}"
                self.app.start("soaked", f"{self.report.seed}-{run_id}", run_id=run_id)
                self.ids.append(run_id)
            else:
                return

    def _people(self) -> None:
        """Approve, reject, look into the world before saying whether something happened, take up again what was given up."""
        while not self.over.wait(0.03):
            try:
                for gate in self.app.inbox(limit=200):
                    with suppress(Refused):  # decided by a clock, cancelled, or an earlier attempt may still act: asked again next time
                        self._decide(gate)
                for run_id in self._given_up():
                    self.poisoned.add(run_id)
                    self.report.given_up += 1
                    self.app.retry(run_id, by="operator")
            except StoreError:
                self.report.busy += 1
            except OutlastError as e:
                self.report.other.append(f"people: {type(e).__name__}: {e}")

    def _decide(self, gate: Any) -> None:
        if gate.kind == "approval":
            approved = not rejects(gate.run_id, gate.call_id)
            self.app.decide(gate.run_id, gate.gate_id, approved=approved, decided_by="ada", note=None if approved else REJECTED)
        elif gate.kind == "verification":
            key = f"{gate.run_id}:{gate.call_id}"
            happened = self.world.received(key) if gate.tool in DEDUPED else self.world.acted(key)
            outcome: Any = "happened" if happened else "run_again"
            self.app.verify(
                gate.run_id, gate.gate_id, outcome=outcome, result={"done": gate.args["text"]} if happened else None, decided_by="ada"
            )
            self.report.verified += 1

    def _given_up(self) -> list[str]:
        return [h.run_id for h in self.app.runs(status="failed", limit=1000) if (h.reason or "").startswith("worker died")]

    # ---- the books and the world ----------------------------------------------------------------------------------------------

    def _audit(self) -> None:
        report = self.report
        report.runs = len(self.ids)
        acts, expected_acts = Counter(self.world.notes("acts")), set[str]()
        attempts = Counter(self.world.notes("attempts"))
        report.attempts, report.asked = attempts.total(), len(self.world.notes("asked"))
        report.duplicated += [f"{key} happened {n} times" for key, n in sorted(acts.items()) if n > 1]
        for run_id in self.ids:
            try:
                run = self.app.get(run_id)
            except OutlastError as e:
                report.lost.append(f"{run_id}: {e}")
                continue
            report.answers += run.model_calls
            if not run.finished:
                report.stuck.append(f"{run_id}: {run.status}, {run.reason}")
                continue
            if run.status != "done":
                report.lost.append(f"{run_id}: {run.status}, {run.reason}")
                continue
            report.lost += [f"{run_id}: {what}" for what in self._differences(run)]
            keys = {f"{run_id}:{call['id']}" for turn in plan(first_text(run.messages)) for call in turn}
            expected_acts |= keys
        report.other += (
            [f"{key} is a key of no call" for key in sorted((acts.keys() | attempts.keys()) - expected_acts)] if not report.stuck else []
        )
        report.effects = acts.total() + len(list((self.world.folder / "received").iterdir()))
        report.other += [f"store check: {where}: {what}" for where, what, _ in self.app.store_check()]
        for log in (self.world.folder / "logs").iterdir():
            text = log.read_text(errors="replace")
            report.refused += text.count("; stopped")
            at = min((text.find(word) for word in ("Traceback", "a bug of ours") if word in text), default=None)
            report.other += [f"a worker's log: {text[max(at - 300, 0) : at + 3000]}"] if at is not None else []

    def _differences(self, run: Any) -> list[str]:
        """Its history against its plan, and its effects against the world."""
        wrong: list[str] = []
        turns = plan(first_text(run.messages))
        self.report.calls += sum(map(len, turns))
        asked = [x["content"] for x in run.messages if x["role"] == "assistant"]
        if asked != [*[list(turn) for turn in turns], [{"type": "text", "text": "Done."}]]:
            wrong.append("its answers are not its plan's")
        results = [b for x in run.messages[1:] if x["role"] == "user" for b in x["content"] if b["type"] == "tool_result"]
        if [b["tool_use_id"] for b in results] != [call["id"] for turn in turns for call in turn]:
            wrong.append("its results are not those of its calls")
        for call, answer in zip((call for turn in turns for call in turn), results, strict=False):
            wrong += self._call_differences(run.run_id, call, answer)
        return wrong

    def _call_differences(self, run_id: str, call: Any, answer: Any) -> list[str]:
        key, name = f"{run_id}:{call['id']}", call["name"]
        rejected = name in GATED and rejects(run_id, call["id"])
        happened = self.world.received(key) if name in DEDUPED else name == "look" or self.world.acted(key)
        failed = bool(answer.get("is_error"))
        if rejected and happened and name != "look":
            return [f"{call['id']} ({name}) was rejected, and it happened"]
        if run_id in self.poisoned and failed:
            return []  # a person took the run up again: what was open then is answered "not run" or "outcome unknown"
        if failed != rejected:
            return [f"{call['id']} ({name}) {'failed' if failed else 'went through'}: {answer.get('content')}"]
        return [] if happened or rejected else [f"{call['id']} ({name}) is told as done, and it never happened"]


class Shifted(ManualClock):
    """The wall clock of the people of a soak with jumps: the same as the workers'."""

    def __init__(self, offset: Path) -> None:
        super().__init__()
        self._offset = offset

    def __call__(self) -> datetime:
        now = datetime.now(UTC) + timedelta(seconds=int(self._offset.read_text()))
        return now.replace(microsecond=now.microsecond // 1000 * 1000)


def faketime() -> str:
    """Where libfaketime is."""
    found = [path for pattern in FAKETIME for path in sorted(Path("/").glob(pattern))]
    if not found:
        raise UsageError("clock jumps need libfaketime, and it is not installed here", hint="apt-get install faketime")
    return str(found[0])


def rejects(run_id: str, call_id: str | None) -> bool:
    return random.Random(f"{run_id}:{call_id}").random() < 0.2  # noqa: S311 - a person's mood


def _killed(pid: int) -> bool:
    """Kills somebody else's child, and waits until it runs no more."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    pause = threading.Event()
    while _is_alone(pid):  # a dead one has no command line
        pause.wait(0.001)
    return True


def _is_alone(pid: int) -> bool:
    try:
        return b"outlast.alone" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m outlast.testing.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=200, help="SIGKILLs of workers, and of their children that drive a run alone; default 200"
    )
    parser.add_argument("--stops", type=int, help="SIGSTOPs past the lease; default a tenth of the kills")
    parser.add_argument("--jumps", type=int, default=0, help="times that the workers' wall clocks are set; default none")
    parser.add_argument(
        "--server-kills", type=int, default=0, help="SIGKILLs of a Postgres server that the runs are stored in; default: SQLite"
    )
    parser.add_argument("--runs", type=int, default=100, help="at least so many runs; default 100")
    parser.add_argument("--workers", type=int, default=3, help="worker processes; default 3")
    parser.add_argument("--windows", type=int, help="kills wanted inside each window; default a tenth of the kills, at most 100")
    parser.add_argument("--seed", type=int, default=None, help="of the schedule; default: random, and printed")
    args = parser.parse_args(argv)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**31)
    stops, windows = (
        args.stops if args.stops is not None else args.kills // 10,
        args.windows if args.windows is not None else min(args.kills // 10, 100),
    )
    with tempfile.TemporaryDirectory(prefix="outlast-soak-") as folder:
        soak = Soak(Path(folder), kills=args.kills, stops=stops, runs=args.runs, workers=args.workers, seed=seed, windows=windows,
                    jumps=args.jumps, server_kills=args.server_kills)  # fmt: skip
        try:
            report = soak()
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: nothing was compared\n")
            return 130
    sys.stdout.write("\n".join(report.lines()) + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
