"""Models: `ScriptedModel` for tests and demos, `Anthropic`, and any async callable of your own.

Rule: importing this costs next to nothing. Each adapter is loaded when it is first named, its provider's SDK when it is first asked.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outlast.models.base import Model, ModelRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.models.anthropic import Anthropic
    from outlast.models.scripted import ScriptedModel

__all__ = ["Anthropic", "Model", "ModelRequest", "ScriptedModel", "resolve"]

_LAZY = {"Anthropic": "outlast.models.anthropic", "ScriptedModel": "outlast.models.scripted"}

# Provider prefix of a model's name -> the adapter that takes the rest of it.
_PROVIDERS = {"anthropic": "Anthropic"}


def resolve(model: str | Model) -> Model:
    """The model an agent's `model=` means: `"anthropic:NAME"` is `Anthropic("NAME")`, a callable is itself.

    No I/O and no SDK: those come with the first request.

    Raises:
        UsageError: no known provider in front of the name, no name behind it, or not a callable.
    """
    from outlast.errors import UsageError

    known = ", ".join(f'"{prefix}:NAME"' for prefix in _PROVIDERS)
    if not isinstance(model, str):
        if not callable(model):
            raise UsageError(f"a model is a name or an async callable, not {type(model).__name__}", hint=f"give {known} or a callable")
        return model
    prefix, colon, name = model.partition(":")
    if not colon or not name.strip():
        raise UsageError(f"{model!r} does not name a provider and a model", hint=f"known are {known}; or pass any async callable")
    if prefix not in _PROVIDERS:
        raise UsageError(f"unknown model provider {prefix!r} in {model!r}", hint=f"known are {known}; or pass any async callable")
    adapter: Callable[[str], Model] = __getattr__(_PROVIDERS[prefix])
    return adapter(name)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
