"""Looking after the schema: `stores.care` on Postgres."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from outlast.core.run import ms
from outlast.errors import RunNotFound, UsageError
from outlast.stores import care
from outlast.stores.base import Head, blank
from outlast.stores.postgres.connections import Connections, Row, Tx
from outlast.stores.postgres.pages import Pages
from outlast.stores.sqlite import rows
from outlast.stores.sqlite.care import finished


class Care(Pages):
    """Mixed into the store."""

    url: str
    _connections: Connections
    _write: Callable[[Callable[[Tx], Any]], Any]
    _settled: Callable[[Callable[[Tx], Any]], Any]

    def backup(self, file: Path) -> None:
        schema = self._connections.schema
        plain = self.url.partition("?")[0].replace(":***@", "@")
        raise UsageError(
            "a Postgres database is backed up by its own programs",
            hint=f"pg_dump --format=custom --schema='\"{schema}\"' --file={file} '{plain}'",
        )

    # ---- a run with all its rows ----------------------------------------------------------------------------------------------

    def whole(self, run_id: str) -> care.Whole:
        def work(tx: Tx) -> care.Whole:
            [head] = [self._only(tx.one("head", {"run_id": run_id, **self._times()}), run_id)]
            key = {"run_no": head.run_no}
            everything = {**key, "since": 0, "after": 0, "limit": None}
            [(format,)], journal, gates, notices = tx.commit(
                ("format", key), ("journal", everything), ("gates_as_written", key), ("notices", key)
            )
            return care.Whole(
                head,
                format,
                [rows.journal(row) for row in journal],
                [rows.gate(row) for row in gates],
                [rows.notice(row) for row in notices],
            )

        whole: care.Whole = self._read(work)
        return whole

    def put(self, whole: care.Whole, *, carried: bool = False) -> bool:
        values = rows.head_values(whole, carried=carried)
        run = {
            **values,
            "entries_": [(*row[:8], row[8].hex(), *row[9:]) for row in rows.journal_values(whole)],
            "gates": [(*row, told) for row, told in rows.all_gate_values(whole)],
            "notices": rows.notice_values(whole),
        }
        text = json.dumps(run, ensure_ascii=False)
        key = {"run_id": whole.head.run_id, "carried": care.CARRIED}

        def work(tx: Tx) -> bool:
            _, carried_so_far = tx.ask(("lock", {"run_ids": [whole.head.run_id]}), ("carried_run", key))
            if carried_so_far:
                tx.ask(*(("remove", {"numbers": [run_no for (run_no,) in carried_so_far]}),))
            return bool(tx.one("put_run", {"run": text}, commit=True))

        return bool(self._write(work))

    def let_go(self) -> int:
        return len(self._write(lambda tx: tx.one("let_go", {"carried": care.CARRIED}, commit=True)))

    # ---- old runs -------------------------------------------------------------------------------------------------------------

    def old(self, before: datetime, *, keep: Sequence[str] = ()) -> care.Old:
        values = {"before": ms(before), "keep": list(keep)}
        return care.Old(*self._read(lambda tx: tx.one("old_count", values, commit=True))[0])

    def prune(self, before: datetime, *, keep: Sequence[str] = (), limit: int = 200) -> int:
        values = {"before": ms(before), "keep": list(keep), "limit": limit}

        def work(tx: Tx) -> int:
            numbers = [run_no for (run_no,) in tx.one("old", values)]
            tx.commit(("remove", {"numbers": numbers}))
            return len(numbers)

        return int(self._write(work))

    # ---- erasing --------------------------------------------------------------------------------------------------------------

    def erase(self, run_id: str) -> list[str]:
        def work(tx: Tx) -> list[str]:
            heads = self._family(tx, run_id)
            for head in heads:
                finished(head)
            numbers = [head.run_no for head in heads]
            wiped = [
                (run_no, seq, n, blank(body), None if meta is None else blank(meta))
                for run_no, seq, n, body, meta in tx.one("payloads", {"numbers": numbers})
            ]
            tx.commit(
                ("wipe_entry", {"rows": json.dumps(wiped)}), ("wipe_gates", {"numbers": numbers}), ("wipe_notices", {"numbers": numbers}),
                ("wipe_run", {"numbers": numbers}))  # fmt: skip
            return [head.run_id for head in heads]

        erased: list[str] = self._write(work)
        return erased

    def _family(self, tx: Tx, run_id: str) -> list[Head]:
        """The run and the ones that it started, and theirs, locked in the order of their ids."""
        found: list[Row] = tx.one("family", {"run_id": run_id})
        if not found:
            raise RunNotFound(f"there is no run {run_id!r} in {self.url}", hint="outlast runs", run_id=run_id)
        ids = [name for (name,) in found]
        tx.one("lock", {"run_ids": ids})
        return [self._only(tx.one("head", {"run_id": name, **self._times()}), name) for name in ids]

    def tidy(self, *, wiped: bool = False) -> str | None:
        schema = self._connections.schema
        if not wiped:
            return None  # autovacuum does it
        tables = ", ".join(f'"{schema}".{table}' for table in ("entry", "gate", "notice", "run"))
        return (
            "the rows are overwritten; old versions of them leave the server's files with VACUUM (FULL) "
            f"{tables}, and its WAL and archives as these are recycled"
        )


__all__ = ["Care"]
