"""What a step on Postgres is compared with: a bare INSERT, ours, LangGraph's PostgresSaver, DBOS, Absurd. Each is given the server's address."""

from __future__ import annotations

import time
import uuid
from itertools import pairwise
from typing import Any

import psycopg

from dbos_steps import Dbos
from graphs import LangGraph, Loop, graph
from messages import Message, first, history, message, piece
from ours import Session
from outlast.stores.postgres import PostgresStore
from server import Server


class PgInsert:
    """One autocommitted INSERT of 1 KB, prepared."""

    name = "bare INSERT"

    def __init__(self, server: Server, port: int | None = None) -> None:
        self.db = psycopg.connect(server.url(port=port), autocommit=True, prepare_threshold=1)
        self.db.execute("CREATE TABLE IF NOT EXISTS bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text)")
        self._body = piece(1, 1000)

    def steps(self, n: int, k: int) -> list[float]:
        times = []
        for _ in range(k):
            a = time.perf_counter()
            self.db.execute("INSERT INTO bare (body) VALUES (%s)", (self._body,))
            times.append(time.perf_counter() - a)
        return times

    def close(self) -> None:
        self.db.close()


class PgOurs:
    name = "Outlast"

    def __init__(self, server: Server, port: int | None = None, schema: str = "outlast") -> None:
        self.schema = schema
        self.store = PostgresStore(server.url(port=port), schema=schema)
        self.store.migrate()
        self._sessions: dict[int, Session] = {}

    def session(self, messages: list[Message]) -> Session:
        return Session(self.store, messages, str(uuid.uuid4()))

    def steps(self, n: int, k: int) -> list[float]:
        if n not in self._sessions:
            self._sessions[n] = self.session(history(n))
        return self._sessions[n].steps(k)

    def anew(self, n: int) -> None:
        self._sessions.pop(n, None)

    def close(self) -> None:
        self.store.close()


class PgLangGraph(LangGraph):
    name = "LangGraph PostgresSaver"

    def __init__(self, server: Server, port: int | None = None, dbname: str = "langgraph") -> None:
        from langgraph.checkpoint.postgres import PostgresSaver
        from psycopg.rows import dict_row

        self.loop = Loop()
        url = server.url(port=port, dbname=dbname)
        self.saver = PostgresSaver(psycopg.connect(url, autocommit=True, prepare_threshold=0, row_factory=dict_row))  # type: ignore[arg-type]  # its rows are dicts
        self.saver.setup()
        self.graph = graph(self.saver, self.loop)
        self._threads = {}


class PgDbos(Dbos):
    name = "DBOS"

    def __init__(self, server: Server, port: int | None = None, dbname: str = "dbos") -> None:
        self._start(server.url(port=port, dbname=dbname, scheme="postgresql+psycopg"))


class PgAbsurd:
    name = "absurd-sdk"

    def __init__(self, server: Server, port: int | None = None, dbname: str = "absurd") -> None:
        from absurd_sdk import Absurd
        from absurdctl import BUNDLED_SCHEMA_SQL

        url = server.url(port=port, dbname=dbname)
        with psycopg.connect(url, autocommit=True) as db:
            if not db.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'absurd'").fetchone():
                db.execute(BUNDLED_SCHEMA_SQL)
        self.app: Any = Absurd(url, queue_name="bench")
        self.app.create_queue("bench")
        self._times: list[float] = []

        @self.app.register_task(name="agent")
        def agent(params: Any, ctx: Any) -> Any:
            messages = [first()]
            for i in range(params["n"]):
                messages.append(ctx.step(f"s{i}", lambda i=i: self._made(i)))  # noqa: PERF401 - a loop of steps, as an agent is
            self._times.append(time.perf_counter())
            return {"n": len(messages)}

    def _made(self, i: int) -> Message:
        self._times.append(time.perf_counter())
        return message(i)

    def steps(self, n: int, k: int) -> list[float]:
        """A step costs the same whatever came before: each saves its own result only."""
        self._times.clear()
        self.app.spawn("agent", {"n": k})
        self.app.work_batch(worker_id="w", claim_timeout=600, batch_size=1)
        return [b - a for a, b in pairwise(self._times)]

    def close(self) -> None:
        self.app.close()


ALL: list[Any] = [PgInsert, PgOurs, PgLangGraph, PgDbos, PgAbsurd]
DATABASES = ("langgraph", "dbos", "absurd")  # of the peers; ours and the bare table are in `postgres`
