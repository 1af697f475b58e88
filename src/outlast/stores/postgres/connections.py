"""The connections of one process to one server, and a transaction as few round trips over one of them.

Rules
1. Opened on first use, one process's only: a child after a fork opens its own and never touches its parent's.
2. Every call has an instant after which it ends, whatever the network does: each wait on a socket is bounded by it, and a connection whose
   time is over is cut, not returned. (A COMMIT whose answer is swallowed would else hang for ever: keepalives and server-side limits do not
   end it.)
3. No state of a session: all settings are the transaction's own and nothing is prepared, so a pooler may hand each transaction to another
   backend. A transaction's first message holds BEGIN and the settings, its last one COMMIT; both may be one.
4. `lost` and sent COMMIT means unknown. All else that fails wrote nothing.
"""

from __future__ import annotations

import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import ClientCursor, errors, generators
from psycopg.abc import PQGen
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

from outlast.errors import SchemaTooNew, StoreError, UsageError
from outlast.stores import sql
from outlast.stores.postgres.failures import Full, Late, Speaker, Standby, lost

_RV = TypeVar("_RV")
Row = tuple[Any, ...]
Statement = tuple[str, Mapping[str, Any]]  # name of a query, values

MOST = 16  # connections of one process: the server commits those of many at once, more only queue there
_FINE = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.EMPTY_QUERY)
_OURS = re.compile(r"\boutlast\.")
IDLE_S = 60.0  # a connection unused for so long is closed
SCHEMA = len(sql.migrations("outlast.stores.postgres"))  # the version that this program knows


class Server(NamedTuple):
    """What a new connection found."""

    sync: str  # its synchronous_commit
    pooled: bool  # another process stands between: no LISTEN
    clock: float  # seconds since the epoch
    version: int | None  # of the schema; None: there is none


class Wire(psycopg.Connection[Row]):
    """A connection every wait of which ends at `until`."""

    until: float = float("inf")
    idle_since: float = 0.0
    closings: int = 0  # how often the pool had been closed when this one was made
    pooled: bool = False  # another process stands between

    def wait(self, gen: PQGen[_RV], interval: float = 0.0, timeout: float | None = None) -> _RV:
        fd, poll, watched = self.pgconn.socket, select.poll(), 0
        until = self.until if timeout is None else min(self.until, time.monotonic() + timeout)
        try:
            want = next(gen)
            while True:
                mask = (select.POLLIN if want & 1 else 0) | (select.POLLOUT if want & 2 else 0)
                if mask != watched:
                    poll.register(fd, mask)
                    watched = mask
                left = until - time.monotonic()
                if left <= 0:
                    raise Late("its time is over")
                ready = poll.poll(min(left, 3600) * 1000)
                if ready:
                    event = ready[0][1]
                    broken = event & (select.POLLERR | select.POLLHUP | select.POLLNVAL)
                    readable = want & 1 if event & select.POLLIN or broken else 0
                    writable = want & 2 if event & select.POLLOUT or broken else 0
                    want = gen.send(readable | writable)
        except StopIteration as done:
            value: _RV = done.value
            return value
        except BaseException as e:
            if not isinstance(e, psycopg.Error):
                self.cut()
            raise

    # What psycopg's cursors do in more steps than a short transaction has to spare: they cost as much as the server's own work.

    @cached_property
    def _quoting(self) -> ClientCursor[Row]:
        return ClientCursor(self)

    def written(self, query: str, values: Mapping[str, Any]) -> str:
        """The statement with its values in it, as the driver writes them."""
        return self._quoting.mogrify(query, values)

    def answers(self, message: bytes) -> list[PGresult]:
        """What the server says to each statement of this message. Raises psycopg's errors."""
        with self.lock:
            self.pgconn.send_query(message)
            answers: list[PGresult] = self.wait(generators.execute(self.pgconn))
        for answer in answers:
            if answer.status not in _FINE:
                raise errors.error_from_result(answer, encoding="utf-8")
        return answers

    def rows(self, answer: PGresult) -> list[Row]:
        if not answer.nfields:
            return []
        loading = Transformer(self)
        loading.set_pgresult(answer)
        return loading.load_rows(0, answer.ntuples, tuple)

    def cut(self) -> None:
        """Close without another word to the server: whatever is on the wire must not keep us."""
        try:
            with socket.socket(fileno=os.dup(self.pgconn.socket)) as s:
                s.shutdown(socket.SHUT_RDWR)
        except (OSError, psycopg.Error):
            pass  # it is closed already
        self.pgconn.finish()


class Connections:
    """Args:
    url: what psycopg takes.
    schema: of our tables.
    shown: the url as it may be printed.
    allow_async: go on where the server's own settings say synchronous_commit=off.
    heard: called with the server's clock, each time it was told.
    """

    def __init__(self, url: str, schema: str, shown: str, *, allow_async: bool, heard: Callable[[float, float], None],
                 point: Callable[[str], None]) -> None:  # fmt: skip
        self.schema, self.allow_async, self.heard, self.point = schema, allow_async, heard, point
        try:
            self._params = conninfo_to_dict(url)
        except psycopg.Error:
            raise UsageError(f"{shown} is no address of a Postgres database", hint="postgresql://USER@HOST/DB?schema=outlast") from None
        password = str(self._params.get("password") or "")
        self.speaker = Speaker(shown, (password, url))
        if "," in str(self._params.get("host") or ""):
            self._params.setdefault("target_session_attrs", "read-write")
        self._params.setdefault("application_name", "outlast")
        self.queries = written_for(schema, sql.queries("outlast.stores.postgres"))
        self.sync = "on"
        self.answered = False  # this process has had a connection once
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._idle: list[Wire] = []
        self._count = 0
        self._closings = 0
        self._parents: list[Wire] = []

    # ---- lending --------------------------------------------------------------------------------------------------------------

    @contextmanager
    def lend(self, until: float) -> Iterator[Wire]:
        """A connection until the block ends. One that failed, or is in the middle of something then, is not used again."""
        self._own()
        wire = self._take(until)
        pid = self._pid
        try:
            wire.until = until
            yield wire
        finally:
            if pid == os.getpid():
                self._give(wire)

    def _own(self) -> None:
        if self._pid != os.getpid():
            parents = self._idle
            self._reset()
            self._parents = parents  # kept, so that no destructor in this process ends the parent's sessions

    def _take(self, until: float) -> Wire:
        closings = self._closings
        while (wire := self._idle_one(until)) is not None:
            if _quiet(wire):
                return wire
            wire.cut()  # closed by the server, or it says something that nobody asked for
            self._one_less()
        try:
            wire = self.connect(until)
        except BaseException:
            self._one_less()
            raise
        wire.closings = closings
        return wire

    def _idle_one(self, until: float) -> Wire | None:
        """None: there is none, and room was made to connect."""
        with self._changed:
            while not self._idle:
                if self._count < MOST:
                    self._count += 1
                    return None
                if not self._changed.wait(max(until - time.monotonic(), 0)):
                    raise Full(f"all {MOST} connections of this process were busy")
            return self._idle.pop()

    def _give(self, wire: Wire) -> None:
        ok = not wire.closed and wire.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE
        if not ok:
            wire.cut()
        old: list[Wire] = []
        with self._changed:
            if ok:
                wire.idle_since = time.monotonic()
                while self._idle and self._idle[0].idle_since < wire.idle_since - IDLE_S:
                    old.append(self._idle.pop(0))
                (old if wire.closings != self._closings else self._idle).append(wire)
            self._count -= len(old) + (not ok)
            self._changed.notify(1 + len(old))
        for each in old:
            each.close()

    def _one_less(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify()

    def close(self) -> None:
        """Those in use are closed when they come back; a later call opens new ones."""
        self._own()
        with self._changed:
            self._closings += 1
            idle, self._idle = self._idle, []
            self._count -= len(idle)
        for wire in idle:
            wire.close()

    # ---- connecting -----------------------------------------------------------------------------------------------------------

    def connect(self, until: float, *, url: str | None = None, migrating: bool = False) -> Wire:
        """A new connection to a server that may be used: a primary, UTF8, our schema, commits that last."""
        params: dict[str, Any] = dict(self._params) if url is None else conninfo_to_dict(url)
        params["connect_timeout"] = str(max(2, int(min(until - time.monotonic(), float(str(params.get("connect_timeout") or 10))))))
        params["client_encoding"] = "utf8"
        wire = Wire.connect(make_conninfo(**params), autocommit=True, prepare_threshold=None, cursor_factory=ClientCursor)
        wire.until = until
        try:
            found = self._look(wire)
            if not migrating:
                self._judge_schema(found.version)
        except BaseException:
            wire.cut()
            raise
        if url is None:
            self.sync = "remote_apply" if found.sync == "remote_apply" else "on"  # never weaker than the server's own
            self.answered = True
        wire.pooled = found.pooled
        return wire

    def _look(self, wire: Wire) -> Server:
        table = f'"{self.schema}".schema_version'
        [(encoding, standby, sync, pid, has_schema, clock)] = wire.execute(self.queries["server"], {"table": table}).fetchall()
        self.heard(clock, time.monotonic())
        if encoding != "UTF8":
            raise UsageError(f"{self.speaker.url}: the database's encoding is {encoding}, and must be UTF8",
                             hint="CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0")  # fmt: skip
        if standby:
            raise Standby("read-only")
        if sync == "off" and not self.allow_async:
            raise StoreError(
                f"{self.speaker.url}: synchronous_commit is off in the server's settings: a crash of the server takes back what it has confirmed",
                hint="switch it on; or add ?allow_async=1, our own transactions set it on for themselves")  # fmt: skip
        version = wire.execute(self.queries["version"]).fetchall()[0][0] or 0 if has_schema else None
        return Server(sync, pid != wire.pgconn.backend_pid, clock, version)

    def _judge_schema(self, version: int | None) -> None:
        if version is None:
            raise StoreError(f"{self.speaker.url}: the database has no schema {self.schema!r} of ours yet",
                             hint=f"outlast store migrate --store '{self.speaker.url}'")  # fmt: skip
        self.not_newer(version)
        if version < SCHEMA:
            raise StoreError(
                f"{self.speaker.url}: its schema is version {version}, this program needs {SCHEMA}", hint="outlast store migrate"
            )

    def not_newer(self, version: int) -> None:
        if version > SCHEMA:
            raise SchemaTooNew(
                f"{self.speaker.url}: its schema is version {version}, this program knows up to {SCHEMA}; it was left as it is",
                hint="update outlast, or use the newer worker")  # fmt: skip


class Tx:
    """One transaction. `ask` sends statements as one message and gives their rows; the first message begins, `commit` ends in the same one."""

    def __init__(self, connections: Connections, wire: Wire, *, limit_s: float, reads: bool) -> None:
        self._connections, self._wire, self._reads = connections, wire, reads
        self._limit_ms = max(int(limit_s * 1000), 100)
        self.open = False
        self.committing = False  # COMMIT was sent; False again once it is answered

    def ask(self, *statements: Statement, commit: bool = False) -> list[list[Row]]:
        queries, wire, begins = self._connections.queries, self._wire, not self.open
        parts = [wire.written(queries[name], values) for name, values in statements]
        if begins:
            limits = {"sync": self._connections.sync, "statement_ms": str(self._limit_ms), "idle_ms": str(max(self._limit_ms // 2, 100))}
            parts[:0] = [queries["begin_read" if self._reads else "begin"], wire.written(queries["limits"], limits)]
        if commit:
            parts.append("COMMIT")
            if not self._reads:
                self._connections.point("commit.before")
            self.committing = not self._reads
        self.open = True
        answers = wire.answers("\n;\n".join(parts).encode())  # a query may end in a comment
        if commit:
            said = answers.pop().command_status
            assert said == b"COMMIT", said
            self.open = self.committing = False
        if begins:
            clock = answers[1].get_value(0, answers[1].nfields - 1)
            assert clock is not None
            self._connections.heard(float(clock), time.monotonic())
            del answers[:2]
        results = [wire.rows(answer) for answer in answers]
        if commit and not self._reads:
            self._connections.point("commit.after")
        return results

    def one(self, name: str, values: Mapping[str, Any], *, commit: bool = False) -> list[Row]:
        [rows] = self.ask((name, values), commit=commit)
        return rows

    def commit(self, *statements: Statement) -> list[list[Row]]:
        return self.ask(*statements, commit=True)

    def end(self) -> None:
        """Roll back what is not committed."""
        if self.open and not self._wire.closed:
            try:
                self._wire.execute("ROLLBACK")
            except (psycopg.Error, Late):
                self._wire.cut()  # the server rolls back; what is on its way up tells more
        self.open = False

    def unknown(self, error: BaseException) -> bool:
        """Did this error leave open whether the transaction stands?"""
        return self.committing and isinstance(error, psycopg.Error | Late) and lost(error)


def written_for(schema: str, queries: Mapping[str, str]) -> dict[str, str]:
    return {name: in_schema(schema, text) for name, text in queries.items()}


def in_schema(schema: str, text: str) -> str:
    """SQL that is written for the schema `outlast`, for another."""
    return _OURS.sub(f'"{schema}".', text)


def _quiet(wire: Wire) -> bool:
    if wire.closed:
        return False
    poll = select.poll()
    poll.register(wire.pgconn.socket, select.POLLIN)
    return not poll.poll(0)


__all__ = ["MOST", "SCHEMA", "Connections", "Row", "Statement", "Tx", "Wire", "in_schema"]
