"""Outlast's side: an append as the driver makes it, the fact through the codec and then one transaction of the store."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from messages import Message, history, message
from outlast.core import run as r
from outlast.stores import base
from outlast.stores.sqlite.store import SQLiteStore

AGENT = "bench"


class Ours:
    name = "Outlast"

    def __init__(self, folder: Path) -> None:
        self.store = SQLiteStore(folder / "outlast.db")
        self._sessions: dict[int, Session] = {}

    def session(self, messages: list[Message], run_id: str) -> Session:
        return Session(self.store, messages, run_id)

    def steps(self, n: int, k: int) -> list[float]:
        if n not in self._sessions:
            self._sessions[n] = self.session(history(n), str(uuid.uuid4()))
        return self._sessions[n].steps(k)

    def anew(self, n: int) -> None:
        """The next steps at n are another run's."""
        self._sessions.pop(n, None)

    def settle(self) -> None:
        """The WAL into the file."""
        import apsw

        db = apsw.Connection(self.store.path)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        db.close()

    def close(self) -> None:
        self.store.close()


class Session:
    """One run that this process holds."""

    def __init__(self, store: base.Store, messages: list[Message], run_id: str) -> None:
        entries = [r.RunStarted(AGENT), *(r.MessageAdded(m) for m in messages)]
        head, lease, _ = store.start(base.NewRun(run_id, AGENT, entries), owner="bench", lease_s=3600)
        assert lease is not None
        self.store, self.lease = store, lease
        _, self.place = store.load(head.run_no, after=base.Place(), since_seq=head.seq)
        self.n = len(messages)

    def fact(self, m: Message) -> r.Entry:
        """As the driver does with an answer: what is folded is what is stored."""
        return r.stored(r.MessageAdded(m, at=self.store.now()))

    def save(self, fact: r.Entry) -> None:
        batch = base.Batch([fact], base.NewHead("running", None, model_calls=self.n), self.place.seq + 1, progress=True)
        answer = self.store.append(self.lease, self.place, batch, now=fact.at)
        assert isinstance(answer, base.Appended)
        self.place = answer.place

    def step(self) -> None:
        self.save(self.fact(message(self.n)))
        self.n += 1

    def steps(self, k: int) -> list[float]:
        times = []
        for _ in range(k):
            m = message(self.n)
            a = time.perf_counter()
            self.save(self.fact(m))
            times.append(time.perf_counter() - a)
            self.n += 1
        return times

    def cpu(self, k: int) -> list[float]:
        times = []
        for _ in range(k):
            m = message(self.n)
            a = time.process_time()
            self.save(self.fact(m))
            times.append(time.process_time() - a)
            self.n += 1
        return times
