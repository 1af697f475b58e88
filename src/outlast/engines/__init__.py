"""Engines: the same agent on Temporal, Restate, DBOS and Inngest; one adapter file each, imported only where it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from outlast.engines.base import Engine, Taken
from outlast.errors import UsageError

if TYPE_CHECKING:
    from outlast.engines.dbos import DBOS
    from outlast.engines.inngest import Inngest
    from outlast.engines.restate import Restate
    from outlast.engines.temporal import Temporal

__all__ = ["DBOS", "Engine", "Inngest", "Restate", "Taken", "Temporal", "resolve"]

_ADAPTERS = {"temporal": "Temporal", "restate": "Restate", "dbos": "DBOS", "inngest": "Inngest"}


def __getattr__(name: str) -> Any:
    module = name.lower()
    if _ADAPTERS.get(module) != name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"outlast.engines.{module}"), name)


def resolve(engine: str | Engine | None) -> Engine | None:
    """An engine, or its URL: `temporal://HOST:7233/NAMESPACE?task_queue=Q`, `restate://HOST:8080`, `dbos:`, `inngest://HOST:8288`."""
    if engine is None or engine == "built-in":
        return None
    if not isinstance(engine, str):
        if isinstance(engine, Engine):
            return engine
        raise UsageError(f"engine must be an engine's URL or an Engine, not {engine!r}")
    scheme = urlsplit(engine).scheme
    if scheme not in _ADAPTERS:
        raise UsageError(
            f"there is no engine {engine!r}",
            hint="temporal://HOST:7233/NAMESPACE, restate://HOST:8080, dbos:, inngest://HOST:8288, built-in",
        )
    made: Engine = __getattr__(_ADAPTERS[scheme])(engine)
    return made
