"""Text that others wrote, made safe and honest to look at; and times, durations and numbers in words.

Rules
1. Whatever is shown goes through `seen`: HTML is escaped, and a character that would not be seen, or would move others, is shown as its
   escape in a mark of its own. Templates do that by themselves (`finalize`); attributes take `plain`.
2. Nothing is cut without saying how much, and the rest stands in the same page.
3. Instants come in UTC and are shown in the viewer's zone; their `datetime` attribute stays UTC.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from markupsafe import Markup, escape

HEAD_CHARS, TAIL_CHARS = 1_200, 300  # of a long text that stand outside of its fold: what is dangerous likes to stand at the end
LONG_CHARS = 2_000  # from here on a text is folded
MANY = 24  # line breaks or blanks in a row are counted instead of shown: what follows them must not be pushed out of sight
UNSEEN = re.compile(  # the same characters that the command line escapes
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_HOST = re.compile(r"(?<=://)[^\s/?#\"'<>]+")
_INSTANT = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_ODD = re.compile(r"[^\x00-\x7f]")
_MANY = re.compile(r"\n[\n \t]{%d,}\n|[ \t]{%d,}" % (MANY, MANY))  # noqa: UP031 - braces of the pattern


def escaped(char: str) -> str:
    r"""\x1b, \u202e, \U000e0041"""
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _hosts(text: str) -> str:
    """Letters of other scripts in a host name as escapes: they are drawn like the ones they are taken for."""
    return _HOST.sub(lambda m: _ODD.sub(lambda c: escaped(c[0]), m[0]), text) if "://" in text else text


def unseen(text: str) -> int:
    """How many characters of it would not be seen."""
    return len(UNSEEN.findall(text))


def seen(text: object) -> Markup:
    """The text as HTML."""
    if isinstance(text, Markup):
        return text
    out: list[str] = []
    at = 0
    plain_text = _hosts(str(text))
    if UNSEEN.search(plain_text) is None:
        return escape(plain_text)
    for found in UNSEEN.finditer(plain_text):
        out += [escape(plain_text[at : found.start()]), f'<span class="escape">{escape(escaped(found[0]))}</span>']
        at = found.end()
    return Markup("".join([*out, escape(plain_text[at:])]))  # noqa: S704 - every part was escaped above


def plain(text: object) -> Markup:
    """The text for an attribute: escapes without a mark."""
    return escape(UNSEEN.sub(lambda m: escaped(m[0]), _hosts(str(text))))


def exact(text: object) -> Markup:
    """The text for a field's value: HTML is escaped, nothing else is touched."""
    return escape(str(text))


def one_line(text: str, limit: int = 160) -> str:
    """The text without line breaks, cut with an ellipsis: for lists, never for what is decided."""
    flat = " ".join(text[: limit * 4].split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def counted(text: str) -> Markup:
    """The text with long runs of blanks and line breaks as their number."""
    out, at = Markup(""), 0
    for found in _MANY.finditer(text):
        lines = found[0].count("\n")
        what = f"{lines:,} line breaks" if lines else f"{len(found[0]):,} blanks"
        out += seen(text[at : found.start()]) + Markup('<span class="escape">[{}]</span>').format(what)
        at = found.end()
    return out + seen(text[at:])


@dataclass(frozen=True)
class Folded:
    """A text as a page shows it: `head`, then `rest` in a fold of its own, then `tail`."""

    head: Markup
    rest: Markup | None = None
    tail: Markup | None = None
    more: int = 0


def folded(text: str, *, long: int = LONG_CHARS) -> Folded:
    if len(text) <= long:
        return Folded(counted(text))
    cut = len(text) - TAIL_CHARS
    return Folded(counted(text[:HEAD_CHARS]), counted(text[HEAD_CHARS:cut]), counted(text[cut:]), cut - HEAD_CHARS)


# ---- JSON -------------------------------------------------------------------------------------------------------------------


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Every digit as it is stored; characters that would not be seen as JSON's own escapes."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    return UNSEEN.sub(lambda m: m[0] if m[0] in "\n\t" else _json_escape(m[0]), text)


def _json_escape(char: str) -> str:
    return json.dumps(char, ensure_ascii=True)[1:-1]


def kind_of(value: Any) -> str:
    """In the words of JSON, as a person says them."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float | Decimal):
        return "number"
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else "object"


# ---- times, numbers ---------------------------------------------------------------------------------------------------------


def instant(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def utc(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def span(value: timedelta | float) -> str:
    """0.04 s, 12 s, 12 min, 1 h 42 min, 2 d 19 h"""
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if seconds < 0:
        return f"-{span(-seconds)}"
    if 0 < seconds < 0.005:
        return "< 0.01 s"
    if seconds < 10:
        return f"{f'{seconds:.2f}'.removesuffix('.00')} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def left(value: timedelta) -> Markup:
    """Time that is left, its numbers in bold."""
    seconds = max(0, int(value.total_seconds()))
    if seconds < 60:
        return Markup("<b>{}</b> s").format(seconds)
    parts = span(value).split()
    return Markup(" ").join(Markup("<b>{}</b>").format(p) if p.isdigit() else Markup(p) for p in parts)  # noqa: S704 - our own words


def number(n: float | None) -> str:
    return "unknown" if n is None else f"{n:,}"


def money(usd: Decimal | float | str | None) -> str:
    if usd is None:
        return "unknown"
    value = Decimal(str(usd))
    return f"${value:,.2f}" if value >= 1 else f"${value:.4f}"


def plural(n: int, noun: str, many: str | None = None) -> str:
    return f"{n:,} {noun if n == 1 else many or noun + 's'}"


@dataclass(frozen=True)
class Clock:
    """Now, and the viewer's zone."""

    now: datetime
    zone: tzinfo

    @property
    def zone_name(self) -> str:
        name = getattr(self.zone, "key", None) or "UTC"
        offset = self.now.astimezone(self.zone).strftime("%z")
        sign = f"UTC{offset[:3].replace('+0', '+').replace('-0', '-')}{':' + offset[3:] if offset[3:] != '00' else ''}"
        return name if name == "UTC" else f"{name} ({sign})"

    @property
    def zone_key(self) -> str:
        return getattr(self.zone, "key", None) or "UTC"

    def local(self, at: datetime) -> datetime:
        return at.astimezone(self.zone)

    def day(self, at: datetime) -> str:
        """Today, Tomorrow, Yesterday, Mon 30 Nov, 30 Nov 2027"""
        here, now = self.local(at), self.local(self.now)
        distance = (here.date() - now.date()).days
        if distance in (0, 1, -1):
            return {0: "Today", 1: "Tomorrow", -1: "Yesterday"}[distance]
        return f"{here:%a} {here.day} {here:%b}" if here.year == now.year else f"{here.day} {here:%b %Y}"

    def long_day(self, at: datetime) -> str:
        day, here = self.day(at), self.local(at)
        return f"{day}, {here:%a} {here.day} {here:%b}" if day in ("Today", "Tomorrow", "Yesterday") else day

    def time(self, at: datetime | None, style: str = "short") -> Markup:
        """A <time>: `clock` 11:00, `second` 11:00:04, `ms`, `short` Today, 11:00, `full` with the seconds."""
        if at is None:
            return Markup("")
        here = self.local(at)
        match style:
            case "clock":
                words = f"{here:%H:%M}"
            case "second":
                words = f"{here:%H:%M:%S}"
            case "ms":
                words = f"{here:%H:%M:%S}<i>.{here.microsecond // 1000:03d}</i>"
            case "full":
                words = f"{self.day(at)}, {here:%H:%M:%S}"
            case "stamp":
                words = f"{here:%a} {here.day} {here:%b %Y, %H:%M:%S}"
            case _:
                words = f"{self.day(at)}, {here:%H:%M}"
        return Markup(f'<time datetime="{utc(at)}">{words}</time>')  # noqa: S704 - made of an instant alone

    def ago(self, at: datetime) -> str:
        seconds = max(0, int((self.now - at).total_seconds()))
        return "now" if seconds == 0 else f"{seconds} s ago" if seconds < 60 else f"{span(timedelta(seconds=seconds))} ago"

    def words(self, text: str) -> str:
        """A sentence with its instants in the viewer's zone."""
        return _INSTANT.sub(lambda m: self._here(datetime.fromisoformat(m[0])), text)

    def _here(self, at: datetime) -> str:
        day = self.day(at)
        return f"{day.lower() if day in ('Today', 'Tomorrow', 'Yesterday') else day} {self.local(at):%H:%M}"


def zone_of(name: str | None) -> tzinfo:
    """The zone that a viewer's browser named; UTC where there is none of that name."""
    if name and re.fullmatch(r"[A-Za-z0-9_+\-/]{1,64}", name):
        try:
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            return UTC
    return UTC


def when(text: str, now: datetime) -> datetime | None:
    """A date, an instant with its offset, or a duration ago (45s, 30m, 4h, 7d); None: it is none of these."""
    text = text.strip()
    if found := re.fullmatch(r"(\d{1,6})([smhd])", text):
        unit = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[found[2]]
        try:
            return now - timedelta(**{unit: int(found[1])})
        except OverflowError:
            return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        return at.replace(tzinfo=UTC)
    return at if at.tzinfo is not None else None


def tags_of(pairs: list[str]) -> dict[str, str] | None:
    """K=V each; None: one of them is not."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            return None
        found[key] = value
    return found


def document(value: Mapping[str, Any]) -> str:
    """A document as the command line prints it, but over several lines."""
    return json_text(value, indent=2)


def clipped(value: str, most: int = 4_000) -> str:
    """The beginning of a text that stands whole somewhere else; says how much is missing."""
    return value if len(value) <= most else f"{value[:most]} … {len(value) - most:,} more characters"


LOCAL_PATH = re.compile(r"/[A-Za-z0-9][A-Za-z0-9._:/-]*")  # a page of this site: never `//host`, never with a query
