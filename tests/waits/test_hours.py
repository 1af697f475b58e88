"""Time that runs in somebody's hours: against a clerk who counts the open minutes one by one, and the dates that people get wrong."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast import Hours, Wait, approval
from outlast.errors import UsageError

NAIVE = datetime.fromisoformat("2026-11-30T12:00:00")
BERLIN = ZoneInfo("Europe/Berlin")
OFFICE = Hours("Mo-Fr 09:00-17:00; PH off", tz="Europe/Berlin", country="DE")
NIGHTS = Hours("Mo-Su 22:00-06:00", tz="Europe/Berlin")
NEW_YORK = Hours("Mo-Fr 08:00-12:00,13:00-18:00", tz="America/New_York")


def berlin(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN)


@pytest.mark.parametrize(
    "hours, start, length, end",
    [
        pytest.param(OFFICE, "2026-11-27 16:00", 4, "2026-11-30 12:00", id="friday afternoon to monday noon"),
        pytest.param(OFFICE, "2026-11-27 16:00", 1, "2026-11-27 17:00", id="exactly until closing time"),
        pytest.param(OFFICE, "2026-11-28 03:00", 4, "2026-11-30 13:00", id="begun while closed"),
        pytest.param(OFFICE, "2026-11-30 09:00", 8, "2026-11-30 17:00", id="a whole day"),
        pytest.param(OFFICE, "2026-11-30 09:00", 40, "2026-12-04 17:00", id="a whole week"),
        pytest.param(OFFICE, "2026-12-24 16:00", 4, "2026-12-28 12:00", id="christmas is off"),
        pytest.param(OFFICE, "2026-12-31 16:00", 2, "2027-01-04 10:00", id="new year is off"),
        pytest.param(OFFICE, "2027-03-25 16:30", 1, "2027-03-30 09:30", id="easter moves, and is off"),
        pytest.param(NIGHTS, "2026-11-27 23:00", 4, "2026-11-28 03:00", id="over midnight"),
        pytest.param(NIGHTS, "2026-11-28 05:00", 2, "2026-11-28 23:00", id="over a closed day"),
        pytest.param(Hours("24/7", tz="UTC"), "2026-11-27 16:00", 100, "2026-12-01 20:00", id="always open"),
    ],
)  # fmt: skip
def test_dates_that_people_get_wrong(hours: Hours, start: str, length: float, end: str) -> None:
    assert hours.add(berlin(start), timedelta(hours=length)) == berlin(end)


@pytest.mark.parametrize(
    "start, length, end_utc",
    [
        # The clock goes forward on 29 March 2026: the night shift from 22:00 to 06:00 has seven hours.
        pytest.param("2026-03-28 22:00", 7, "2026-03-29 04:00", id="spring: the short night, whole"),
        pytest.param("2026-03-28 22:00", 8, "2026-03-29 21:00", id="spring: its eighth hour is the next night's first"),
        pytest.param("2026-03-29 01:30", 1, "2026-03-29 01:30", id="spring: across the gap"),
        # It goes back on 25 October 2026: the same shift has nine.
        pytest.param("2026-10-24 22:00", 8, "2026-10-25 04:00", id="autumn: eight hours end at five"),
        pytest.param("2026-10-24 22:00", 9, "2026-10-25 05:00", id="autumn: the long night, whole"),
        pytest.param("2026-10-25 01:30", 2, "2026-10-25 01:30", id="autumn: across the hour that comes twice"),
    ],
)
def test_the_nights_on_which_clocks_change(start: str, length: float, end_utc: str) -> None:
    assert NIGHTS.add(berlin(start), timedelta(hours=length)) == datetime.fromisoformat(end_utc).replace(tzinfo=UTC)


def test_an_office_day_has_eight_hours_on_both_sides_of_a_clock_change() -> None:
    assert OFFICE.add(berlin("2026-03-27 16:00"), timedelta(hours=4)) == datetime(2026, 3, 30, 10, tzinfo=UTC)  # 12:00 in summer time
    assert OFFICE.add(berlin("2026-10-23 16:00"), timedelta(hours=4)) == datetime(2026, 10, 26, 11, tzinfo=UTC)  # 12:00 in winter time


def days(first: str, last: str) -> st.SearchStrategy[datetime]:
    return st.datetimes(datetime.fromisoformat(first), datetime.fromisoformat(last), timezones=st.just(UTC))


def is_open(name: str, at: datetime) -> bool:
    """By hand, from the wall clock of the place."""
    if name == "nights":
        return not 6 <= at.astimezone(BERLIN).hour < 22
    there = at.astimezone(ZoneInfo("America/New_York"))
    return there.weekday() < 5 and (8 <= there.hour < 12 or 13 <= there.hour < 18)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["nights", "new york"]),
    start=st.one_of(days("2026-03-05", "2026-03-30"), days("2026-10-22", "2026-11-03")),
    minutes=st.integers(1, 24 * 60),
)
def test_against_a_clerk_who_counts_minutes(name: str, start: datetime, minutes: int) -> None:
    """Around the nights on which clocks change, in Berlin and in New York."""
    begin = start.replace(second=0, microsecond=0)
    hours = NIGHTS if name == "nights" else NEW_YORK
    at, left = begin, minutes
    while left:
        left -= is_open(name, at)
        at += timedelta(minutes=1)
    assert hours.add(begin, timedelta(minutes=minutes)) == at


@settings(max_examples=60, deadline=None)
@given(
    start=days("2026-01-01", "2027-12-31"),
    first=st.integers(1, 3000), then=st.integers(1, 3000),
)  # fmt: skip
def test_one_wait_after_the_other_is_one_wait(start: datetime, first: int, then: int) -> None:
    a, b = timedelta(minutes=first), timedelta(minutes=then)
    assert OFFICE.add(OFFICE.add(start, a), b) == OFFICE.add(start, a + b)
    assert OFFICE.add(start, a) - start >= a


@pytest.fixture(params=["UTC", "Asia/Tokyo", "America/St_Johns"])
def zone_of_this_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


def test_a_worker_in_another_zone_changes_nothing(zone_of_this_machine: str) -> None:
    assert os.environ["TZ"] == zone_of_this_machine
    hours = Hours("Mo-Fr 09:00-17:00; PH off", tz="Europe/Berlin", country="DE")
    assert hours.add(berlin("2026-11-27 16:00"), timedelta(hours=4)) == datetime(2026, 11, 30, 11, tzinfo=UTC)


def test_what_is_stored_beside_an_instant_names_the_rule_whole() -> None:
    rule = OFFICE.rule()
    assert (rule["opening"], rule["tz"], rule["country"]) == ("Mo-Fr 09:00-17:00; PH off", "Europe/Berlin", "DE")
    assert rule["library"].startswith("opening-hours-py ")


@pytest.mark.parametrize(
    "opening, tz, country, said",
    [
        ("", "UTC", None, "opening must be"),
        ("   ", "UTC", None, "opening must be"),
        ("Mo-Fr 09:00-25:99", "UTC", None, "cannot be read"),
        ("every now and then", "UTC", None, "cannot be read"),
        ("off", "UTC", None, "never open"),
        ("2019 Mo-Fr 09:00-17:00", "UTC", None, "never open"),
        ("Mo-Fr 09:00-17:00; PH off", "Europe/Berlin", None, "country"),
        ("Mo-Fr 09:00-17:00; PH off", "Europe/Berlin", "Germany", "cannot be read"),
        ("Mo-Fr 09:00-17:00", "Europe/Atlantis", None, "tz"),
        ("Mo-Fr 09:00-17:00", "", None, "tz"),
        ("Mo-Fr 09:00-17:00", "../../etc/passwd", None, "tz"),
    ],
)
def test_hours_that_cannot_be_are_refused_where_they_are_written(opening: str, tz: str, country: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Hours(opening, tz=tz, country=country)


WRONG: list[Any] = [timedelta(0), timedelta(hours=-1), timedelta(days=4000), 3600, 4.0, math.nan, "4h", None, True]


@pytest.mark.parametrize("value", WRONG)
def test_durations_that_cannot_be_are_refused_with_the_parameters_name(value: Any) -> None:
    if value is not None:  # None is how a gate says that it has no deadline
        with pytest.raises(UsageError, match="within"):
            approval(to="lead", within=value)
        with pytest.raises(UsageError, match="remind_every"):
            approval(to="lead", within=timedelta(hours=4), remind_every=value)
    with pytest.raises(UsageError, match="within"):
        Wait("settled", within=value)


def test_instants_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match=r"until.* is naive"):
        Wait(until=NAIVE)
    with pytest.raises(UsageError, match="exactly one"):
        Wait(until=berlin("2026-11-30 12:00"), within=timedelta(hours=1))
    with pytest.raises(UsageError, match="hours"):
        Wait(until=berlin("2026-11-30 12:00"), hours=OFFICE)
    with pytest.raises(UsageError, match="otherwise"):
        Wait(within=timedelta(hours=1), otherwise=object())


@pytest.mark.parametrize(
    "bad, said",
    [
        ({"to": ""}, "to must"),
        ({"noun": " "}, "noun"),
        ({"hours": "Mo-Fr 09:00-17:00"}, "hours must be Hours"),
        ({"then": "approve"}, "then must"),
        ({"when": True}, "when"),
        ({"within": None, "then": approval(to="boss", within=timedelta(hours=1))}, "never asked"),
        ({"remind_every": timedelta(milliseconds=5)}, "remind_every"),
    ],
)
def test_a_gate_says_what_is_wrong_with_it(bad: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        approval(**{"to": "lead", "within": timedelta(hours=4), **bad})
