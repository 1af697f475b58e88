"""Every test of waiting runs on every store: a file in the test's folder, and a schema of its own on a real Postgres server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outlast import Outlast
from support.postgres import Server, postgres

NewStore = Callable[[], str]


@pytest.fixture(params=["sqlite", "postgres"])
def new_store(request: pytest.FixtureRequest) -> NewStore:
    """Gives the URL of a new, empty store each time; empty: a file in the folder."""
    if request.param == "sqlite":
        return lambda: ""
    server: Server = request.getfixturevalue("postgres")

    def made() -> str:
        url = server.url(schema=server.fresh_schema())
        with Outlast(url) as app:
            app._store.migrate()  # type: ignore[attr-defined]  # of Postgres: its schema is made on purpose
        return url

    return made


__all__ = ["postgres"]
