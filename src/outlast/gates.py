"""`approval()`: what a gate asks, of whom, until when; `Hours`: in which hours its time runs.

Everything that can be wrong is refused here, where it is written, with the parameter's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from outlast.core.gate import GatePolicy
from outlast.errors import UsageError

LONGEST = timedelta(days=3660)  # ten years: a longer wait is a mistake in the unit


def check_duration(name: str, value: object, *, zero: bool = False) -> timedelta:
    """A positive, finite, sane timedelta, or UsageError naming the parameter."""
    if isinstance(value, bool) or not isinstance(value, timedelta):
        raise UsageError(f"{name} must be a timedelta, not {value!r}", hint=f"{name}=timedelta(hours=4)")
    if value < timedelta(0) or (not zero and value == timedelta(0)) or value > LONGEST or math.isnan(value.total_seconds()):
        raise UsageError(f"{name} must be more than 0 and at most {LONGEST.days} days, not {value}", hint=f"{name}=timedelta(hours=4)")
    return value


def check_instant(name: str, value: object) -> datetime:
    """An aware datetime in UTC, whole milliseconds, or UsageError naming the parameter."""
    if not isinstance(value, datetime):
        raise UsageError(f"{name} must be a datetime, not {value!r}")
    if value.tzinfo is None or value.utcoffset() is None:
        raise UsageError(f"{name} must have a time zone: {value.isoformat()} is naive", hint="datetime(..., tzinfo=UTC)")
    value = value.astimezone(UTC)
    return value.replace(microsecond=value.microsecond // 1000 * 1000)


class Hours:
    """Opening hours in which a wait's time runs, e.g. `Hours("Mo-Fr 09:00-17:00; PH off", tz="Europe/Berlin", country="DE")`.

    `opening` is the opening_hours syntax of OpenStreetMap; `PH` (public holidays) needs `country`, two letters. Needs the extra `hours`.
    Raises UsageError for hours that cannot be read, an unknown zone or country, and hours that are never open.
    """

    def __init__(self, opening: str, *, tz: str | ZoneInfo, country: str | None = None) -> None:
        try:
            self.tz = tz if isinstance(tz, ZoneInfo) else ZoneInfo(tz)
        except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
            raise UsageError(f"tz: there is no time zone {tz!r}", hint='tz="Europe/Berlin"') from None
        self.opening, self.country = opening, country
        self._hours = self._read()
        start = datetime(2026, 1, 1, tzinfo=UTC)
        if self._next_open(start) is None:
            raise UsageError(f"opening: {opening!r} is never open")

    def _read(self) -> Any:
        try:
            import opening_hours
        except ModuleNotFoundError:
            raise UsageError("Hours needs the package opening-hours-py", hint="pip install 'outlast[hours]'") from None
        if not isinstance(self.opening, str) or not self.opening.strip():
            raise UsageError(f"opening must be opening hours as a text, not {self.opening!r}", hint='Hours("Mo-Fr 09:00-17:00", tz=...)')
        if "PH" in self.opening and not self.country:
            raise UsageError(f"country: {self.opening!r} speaks of public holidays (PH), of which country?", hint='country="DE"')
        try:
            return opening_hours.OpeningHours(self.opening, timezone=self.tz, country=self.country)
        except Exception as e:  # noqa: BLE001 - whatever the library says about a text that a person wrote
            raise UsageError(f"opening: {self.opening!r} cannot be read: {str(e).splitlines()[0]}") from None

    def rule(self) -> dict[str, Any]:
        """What is stored beside the instants that these hours gave."""
        from importlib.metadata import version

        return {
            "opening": self.opening,
            "tz": self.tz.key,
            "country": self.country,
            "library": f"opening-hours-py {version('opening-hours-py')}",
        }

    def add(self, start: datetime, duration: timedelta) -> datetime:
        """The UTC instant at which `duration` of open time has passed since `start`.

        Raises UsageError where the hours end before (open only in the past, say).
        """
        at, left = start.astimezone(UTC), duration
        for _ in range(20_000):  # changes of state: some decades of working days
            opens = at if self._is_open(at) else self._next_open(at)
            if opens is None:
                break
            closes = self._change(opens)
            if closes is None or closes - opens >= left:
                return opens + left
            at, left = closes, left - (closes - opens)
        raise UsageError(f"the hours {self.opening!r} are not open for {duration} after {start.isoformat()}")

    def _is_open(self, at: datetime) -> bool:
        return bool(self._hours.is_open(at.astimezone(self.tz)))

    def _change(self, at: datetime) -> datetime | None:
        """The next instant, in UTC, at which open and closed change places: a DST night moves the wall clock, not the time that passes."""
        found = self._hours.next_change(at.astimezone(self.tz))
        if found is None:
            return None
        if found.tzinfo is None:
            found = found.replace(tzinfo=self.tz)
        found = found.astimezone(UTC)
        return found if found > at else None

    def _next_open(self, at: datetime) -> datetime | None:
        for _ in range(1000):
            if self._is_open(at):
                return at
            following = self._change(at)
            if following is None:
                return None
            at = following
        return None

    def __repr__(self) -> str:
        return f"Hours({self.opening!r}, tz={self.tz.key!r}, country={self.country!r})"


@dataclass(frozen=True)
class Approval:
    """What `approval()` gives: the rule of a gate, to be put on a tool."""

    to: str | None
    noun: str
    within: timedelta | None
    hours: Hours | None
    then: Literal["reject", "keep_waiting"] | Approval
    remind_every: timedelta | None
    when: Callable[..., bool] | None

    def policy(self) -> GatePolicy:
        """The same as plain data and pure functions, for the core."""
        return GatePolicy(
            role=self.to,
            noun=self.noun,
            within=self.within,
            then=self.then.policy() if isinstance(self.then, Approval) else self.then,
            remind_every=self.remind_every,
            count=self.hours.add if self.hours else lambda start, duration: start + duration,
            hours=self.hours.rule() if self.hours else None,
            conditional=self.when is not None,
        )


def approval(
    to: str | None = None,
    *,
    noun: str = "call",
    within: timedelta | None,
    hours: Hours | None = None,
    then: Literal["reject", "keep_waiting"] | Approval = "reject",
    remind_every: timedelta | None = None,
    when: Callable[..., bool] | None = None,
) -> Approval:
    """A gate: the call waits until a person decides.

    Args:
        to: the role that is asked; "support-lead" reads "A support lead rejected this reply: ...".
        noun: what the call is to people: "reply", "refund".
        within: until when it is asked, from the moment the call is saved; None must be written: it waits for ever, and shows as stuck.
        hours: count `within` and `remind_every` in these hours only.
        then: at the deadline: "reject", "keep_waiting", or the next one to ask (an Approval, from the deadline on).
        remind_every: remind whoever is asked, that often.
        when: `when(run, **args)` -> must it be asked? Asked once and saved. Raising or not a bool means yes.
    Raises:
        UsageError: a parameter is wrong; named.
    """
    if to is not None and (not isinstance(to, str) or not to.strip() or len(to) > 64):
        raise UsageError(f"to must be a role of 1 to 64 characters, not {to!r}", hint='approval(to="support-lead", ...)')
    if not isinstance(noun, str) or not noun.strip():
        raise UsageError(f"noun must be a word, not {noun!r}", hint='noun="reply"')
    if within is not None:
        check_duration("within", within)
    if remind_every is not None:
        check_duration("remind_every", remind_every)
        if remind_every < timedelta(seconds=1):
            raise UsageError(f"remind_every must be at least a second, not {remind_every}")
    if hours is not None and not isinstance(hours, Hours):
        raise UsageError(f"hours must be Hours(...), not {hours!r}", hint='Hours("Mo-Fr 09:00-17:00", tz="Europe/Berlin")')
    if not isinstance(then, Approval) and then not in ("reject", "keep_waiting"):
        raise UsageError(f'then must be "reject", "keep_waiting" or another approval(), not {then!r}')
    if isinstance(then, Approval) and within is None:
        raise UsageError("then: the next one is never asked, because within is None", hint="within=timedelta(hours=4)")
    if when is not None and not callable(when):
        raise UsageError(f"when must be a function of (run, **args), not {when!r}")
    return Approval(to, noun, within, hours, then, remind_every, when)
