"""`dataclass` for frozen records, in a third of the time: making classes is most of what a new process does before its first step.

`dataclasses` compiles six methods for every class. Here one is, `__init__`; the others are shared. What comes out is a dataclass all the same:
fields, replace, asdict, pattern matching and copies work as they do there. A record may only inherit from records.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - what type checkers see, and re-exported to them
else:

    def dataclass(*, frozen, slots=False, kw_only=False, eq=True, repr=True):
        assert frozen

        def made(cls):
            own = set(cls.__dict__)
            cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
            if eq and own.isdisjoint(("__eq__", "__hash__")):
                _compare(cls)
            if repr and "__repr__" not in own:
                cls.__repr__ = _repr
            if slots:
                cls.__getstate__, cls.__setstate__ = _state, _set_state
            cls.__init__ = _init_of(cls)
            cls.__setattr__, cls.__delattr__ = _refuse_set, _refuse_delete
            return cls

        return made


def _init_of(cls: type) -> Any:
    given: list[str] = []
    named: list[str] = []
    body: list[str] = []
    values: dict[str, Any] = {"_set": object.__setattr__, "_later": _LATER}
    for f in dataclasses.fields(cls):
        value = f.name
        if f.default_factory is not dataclasses.MISSING:
            values[f"_make_{f.name}"] = f.default_factory
            value = f"_make_{f.name}() if {f.name} is _later else {f.name}" if f.init else f"_make_{f.name}()"
            default = "=_later"
        elif f.default is not dataclasses.MISSING:
            values[f"_default_{f.name}"] = f.default
            default = f"=_default_{f.name}"
            value = f.name if f.init else f"_default_{f.name}"
        else:
            default = ""
        if f.init:
            (named if f.kw_only else given).append(f.name + default)
        body.append(f" _set(self, {f.name!r}, {value})")
    parameters = ", ".join(["self", *given, *(["*", *named] if named else [])])
    scope: dict[str, Any] = {}
    exec(f"def __init__({parameters}):\n" + "\n".join(body or [" pass"]), values, scope)  # noqa: S102 - names of fields, written in this package
    init = scope["__init__"]
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = {**{f.name: f.type for f in dataclasses.fields(cls) if f.init}, "return": None}
    return init


class _Later:
    def __repr__(self) -> str:
        return "<factory>"


_LATER = _Later()


def _compare(cls: Any) -> None:
    names = [f.name for f in dataclasses.fields(cls) if f.compare]
    values: Any = attrgetter(*names) if names else lambda _: ()

    def equal(self: Any, other: object) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def hashed(self: Any) -> int:
        return hash(values(self))

    cls.__eq__, cls.__hash__ = equal, hashed


@recursive_repr()
def _repr(self: Any) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in dataclasses.fields(self) if f.repr)})"


def _refuse_set(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for f, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, f.name, value)
