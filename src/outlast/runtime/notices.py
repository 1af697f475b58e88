"""Notices: who is told about a gate, in which words; and delivering them.

A notice is a row, written in the transaction that opened, moved or closed its gate, one for each target; its id is worked out from the
journal, so it is the same on each try and for each target. It is delivered after that commit, at least once: taken for a while like a
lease, sent, recorded. What fails is tried again later, and shows in the inbox (`notified_at` stays empty) and in `stuck`; it never fails a
run. Stored is a target's name, never its URL: those hold secrets.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import unicodedata
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar
from urllib.parse import quote
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from outlast.core import codec
from outlast.core import gate as g
from outlast.core import run as r
from outlast.documents import Notice, gate_of
from outlast.errors import StoreError, UsageError
from outlast.runtime import perform, webhook
from outlast.runtime.crashpoints import point
from outlast.stores import base

log = logging.getLogger("outlast")
T = TypeVar("T")
Kind = Literal["opened", "reminder", "escalated", "expired"]

ASKS_PEOPLE = ("approval", "verification", "budget")
SEND_LIMIT = timedelta(seconds=20)  # for one try of one target
HOLD = timedelta(seconds=60)  # longer than SEND_LIMIT: nobody else sends it meanwhile; after a kill it is sent again then
FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=5), timedelta(hours=1)  # between tries; each four times the one before
GIVE_UP_AFTER = timedelta(days=3)
LOOK_S = 5.0  # between two looks for notices that are due again
MAX_ARGS_CHARS = 3000  # of arguments in a notice's text: what a chat message or a mail still shows
MAX_BODY_ARGS = 64 * 1024  # bytes of arguments in a webhook's body
MAX_ERROR = 300  # characters of an error that is kept


# ---- who is told -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """`name` is what is stored: it tells targets apart and holds no secret. `send` gives or raises when it is done."""

    name: str
    send: Callable[[Notice], Awaitable[None] | None]


@dataclass(frozen=True)
class Settings:
    """What the environment says, read at each delivery so that keys can be changed: the secret and networks of webhooks, links' base."""

    secret: str = ""
    allow: str = ""
    web_url: str = ""


def targets(notify: Sequence[str | Callable[[Notice], Any]], settings: Callable[[], Settings]) -> list[Target]:
    """Callables, webhook URLs (http, https), apprise URLs (everything else). Raises UsageError; does no I/O."""
    if isinstance(notify, str) or callable(notify):
        raise UsageError("notify must be a list", hint='Outlast(notify=["https://..."])')
    found: list[Target] = []
    for one in notify:
        if callable(one):
            target = Target(_named(one), one)
        elif isinstance(one, str) and one.lower().startswith(("https://", "http://")):
            target = _webhook(one, settings)
        elif isinstance(one, str) and "://" in one:
            target = _apprise(one)
        else:
            raise UsageError("notify takes callables, webhook URLs and apprise URLs", hint='notify=["https://HOST/PATH", tell_slack]')
        same = sum(t.name == target.name or t.name.startswith(f"{target.name} ") for t in found)
        found.append(Target(f"{target.name} {same + 1}", target.send) if same else target)
    return found


def _named(function: Callable[..., Any]) -> str:
    where = function if hasattr(function, "__qualname__") else type(function)
    return f"python:{getattr(where, '__module__', None) or 'builtins'}.{where.__qualname__}"


def _mark(url: str) -> str:
    """Tells two URLs of one host apart, and says nothing about either."""
    return hashlib.sha256(url.encode("utf-8", "replace")).hexdigest()[:10]


def _webhook(url: str, settings: Callable[[], Settings]) -> Target:
    hook = webhook.parse(url)

    def send(notice: Notice) -> None:
        now = settings()
        webhook.send(hook, notice.id, body(notice), secret=now.secret, allow=now.allow)

    return Target(f"webhook:{hook.shown}#{_mark(url)}", send)


def _apprise(url: str) -> Target:
    scheme = url.partition("://")[0].lower()
    try:
        import apprise
    except ModuleNotFoundError:
        raise UsageError(f"notify: {scheme}:// needs the package apprise", hint="pip install 'outlast[notify]'") from None
    if apprise.Apprise.instantiate(url, suppress_exceptions=True) is None:
        raise UsageError(f"notify: the {scheme}:// URL is none that apprise knows", hint="https://appriseit.com/services/")

    def send(notice: Notice) -> None:
        service = apprise.Apprise()
        service.add(url)
        text = notice.text + (f"\n{notice.url}" if notice.url else "")
        if not service.notify(body=text, title=title(notice), body_format="text"):
            raise webhook.Undelivered(f"{scheme}://: the service did not take it")

    return Target(f"apprise:{scheme}#{_mark(url)}", send)


def title(notice: Notice) -> str:
    """One line, for mails."""
    said: dict[str, str] = {"opened": "", "reminder": "Reminder: ", "escalated": "Escalated: ", "expired": "Expired: "}
    return plain(f"{said[notice.kind]}{notice.gate.text}").replace("\n", " ")[:120]


def body(notice: Notice) -> bytes:
    """What a webhook gets: the notice, and its gate's document. Arguments that are too long for a hook are left out and counted."""
    gate = notice.gate.to_dict()
    size = len(codec.encode(gate["args"]).encode())
    if size > MAX_BODY_ARGS:
        gate["args"] = None
    data = {"id": notice.id, "kind": notice.kind, "text": notice.text, "url": notice.url, "gate": gate, "args_bytes": size}
    document = {"type": f"gate.{notice.kind}", "timestamp": datetime.now(UTC).isoformat(timespec="seconds"), "data": data}
    return json.dumps(document, ensure_ascii=False).encode()


# ---- what is written with the gate ---------------------------------------------------------------------------------------------


def due(before: r.Run, entries: Sequence[r.Entry], to: Sequence[str]) -> list[base.NewNotice]:
    """The rows for what these entries do to gates that ask people: one for each target."""
    if not to or not any(isinstance(e, r.GateOpened | r.GateMoved | r.GateExpired) for e in entries):
        return []
    out: list[base.NewNotice] = []
    run = before
    for entry in entries:
        old = run.find_gate(entry.gate_id) if isinstance(entry, r.GateMoved) else None
        run = r.apply(run, entry)
        if not isinstance(entry, r.GateOpened | r.GateMoved | r.GateExpired):
            continue
        gate = run.find_gate(entry.gate_id)
        if gate is None or gate.opened.kind not in ASKS_PEOPLE:
            continue
        kind: Kind = "opened" if isinstance(entry, r.GateOpened) else "expired" if isinstance(entry, r.GateExpired) else "reminder"
        if old is not None and gate.level > old.level:
            kind = "escalated"
        text = words(kind, run, gate, old)
        notice_id = _id(run.id, entry.gate_id, kind, r.iso(entry.at), str(gate.level))
        out += [base.NewNotice(notice_id, entry.gate_id, kind, target, text) for target in to]
    return out


def _id(*parts: str) -> str:
    return f"ntc_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:32]}"


def words(kind: Kind, run: r.Run, gate: r.Gate, before: r.Gate | None = None) -> str:
    """What is asked, of whom, until when; with the arguments whole, or how much more there is."""
    call = run.call(gate.opened.call_id)
    args = gate.opened.args if gate.opened.args is not None else (call.args if call else {})
    asked = g.text_of(gate, run.agent)
    if kind == "expired":
        lines = [g.refusal(gate), f"It was: {asked}"]
    else:
        first = {"reminder": f"Reminder: {asked}", "escalated": f"{_escalated(before)} {asked}"}.get(kind, asked)
        lines = [first, f"Asked: {gate.role or 'anyone'}, {_until(gate)}"]
    lines += shown(args, gate.opened.tool, run.id)
    lines.append(f"Run {run.id}, {gate.opened.gate_id}")
    return plain("\n".join(lines))


def _escalated(before: r.Gate | None) -> str:
    return f"{g.a_role(before.role)} did not decide in time:" if before is not None and before.role else "Nobody decided in time:"


def _until(gate: r.Gate) -> str:
    return f"until {local(gate.deadline, gate.rung)}" if gate.deadline else "without a deadline"


def local(at: datetime, rung: Mapping[str, Any]) -> str:
    """An instant as the people who are asked read it: in the zone of their hours, else UTC."""
    name = ((rung.get("rule") or {}).get("hours") or {}).get("tz") or "UTC"
    try:
        zone: Any = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # this machine knows fewer zones than the one that opened the gate
        name, zone = "UTC", UTC
    there = at.astimezone(zone)
    day = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")[there.weekday()]
    return f"{day} {there:%Y-%m-%d %H:%M}" + (" UTC" if name == "UTC" else f" {there:%Z} ({name})")


def shown(args: Mapping[str, Any], tool: str | None, run_id: str) -> list[str]:
    """The arguments, one below the other. A value's own lines are indented, so that none can pass for one of ours."""
    lines = [tool] if tool else []
    left = MAX_ARGS_CHARS
    values = {name: value if isinstance(value, str) else codec.encode(value) for name, value in args.items()}
    total = sum(len(v) for v in values.values())
    for name, value in values.items():
        cut = value[: max(left, 0)]
        left -= len(value)
        lines.append(f"  {name}: " + cut.replace("\n", "\n    ") + ("…" if len(cut) < len(value) else ""))
    if total > MAX_ARGS_CHARS:
        lines.append(f"  {total - MAX_ARGS_CHARS:,} more characters are not shown here: outlast show {run_id}")
    return lines


def plain(text: str) -> str:
    """No control characters, nothing invisible and nothing that turns the writing round: what is read is what is there."""
    return "".join(c if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else f"\\u{ord(c):04x}" for c in text)


# ---- delivering ------------------------------------------------------------------------------------------------------------------


class Teller:
    """Delivers what is due, on one event loop.

    Args:
        blocking: reaches the store through the app's threads.
    """

    def __init__(
        self, store: base.Store, to: Sequence[Target], *, blocking: Callable[..., Awaitable[Any]], settings: Callable[[], Settings]
    ) -> None:
        self.store, self.targets, self.blocking, self.settings = store, {t.name: t for t in to}, blocking, settings
        self.sent = 0
        self._stopped = False
        self._one_at_a_time = asyncio.Lock()
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def poke(self) -> None:
        """Something was committed that somebody is to be told. From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # the loop is gone: another process, or the next sweep, delivers it
            pass

    def stop(self) -> None:
        """End `serve` once what is being sent is sent."""
        self._stopped = True
        self._news.set()

    async def serve(self) -> None:
        """Deliver until stopped. What is being sent when it is cancelled is sent again later, under the same id."""
        while not self._stopped:
            await self.deliver()
            try:
                async with asyncio.timeout(LOOK_S):  # not wait_for, which may swallow our own cancellation
                    await self._news.wait()
            except TimeoutError:
                continue
            self._news.clear()

    async def deliver(self) -> int:
        """Send what is due now, all targets side by side; how many arrived. Never raises but for a cancel."""
        if not self.targets:
            return 0
        arrived = 0
        async with self._one_at_a_time:
            try:
                while taken := await self.blocking(lambda: self.store.claim_notices(list(self.targets), hold=HOLD)):
                    arrived += sum(await asyncio.gather(*(self._send(notice) for notice in taken)))
            except StoreError as e:
                log.warning("notices could not be delivered: %s", e)
        return arrived

    async def _send(self, due: base.DueNotice) -> bool:
        target = self.targets[due.target]
        notice = self._notice(due)
        point("notice.before")
        ended = await perform.invoke(
            lambda: target.send(notice), _NO_CONTEXT, {}, context_name=None, timeout=SEND_LIMIT, late=lambda ended: None
        )
        point("notice.after")
        extra = {"run_id": due.head.run_id}
        try:
            if ended.raised is None:
                await self.blocking(lambda: self.store.notice_done(due))
                self.sent += 1
                return True
            error = perform.describe(ended.raised) if not isinstance(ended.raised, webhook.Undelivered) else str(ended.raised)
            again = pause(due.tries) if self.store.now() - due.created_at < GIVE_UP_AFTER else None
            what = f"{due.kind} of {due.gate.gate_id} did not reach {due.target} (try {due.tries})"
            log.warning("run %s: %s: %s", due.head.run_id, what, error, extra=extra)
            await self.blocking(lambda: self.store.notice_done(due, error=plain(error)[:MAX_ERROR], again=again))
        except StoreError as e:
            log.warning(
                "run %s: what became of notice %s was not saved, it is sent again: %s", due.head.run_id, due.notice_id, e, extra=extra
            )
        return False

    def _notice(self, due: base.DueNotice) -> Notice:
        base_url = self.settings().web_url.rstrip("/")
        url = f"{base_url}/runs/{quote(due.head.run_id, safe=':')}#{quote(due.gate.gate_id, safe=':')}" if base_url else None
        return Notice(due.notice_id, due.kind, gate_of(due.head, due.gate, due.notified_at), due.text, url)  # type: ignore[arg-type]  # a stored text is one of the four


_NO_CONTEXT: Any = None  # a notifier gets no ToolContext


def pause(tries: int) -> timedelta:
    """Before the next try."""
    longer: timedelta = FIRST_PAUSE * 4 ** min(tries - 1, 10)
    return min(longer, LONGEST_PAUSE)


def names(to: Iterable[Target]) -> list[str]:
    return [t.name for t in to]


def run_blocking(work: Callable[[], Awaitable[T]]) -> T:
    """Await it from a plain function, even one that is called on a running loop: then on a loop and thread of its own."""
    import threading

    async def main() -> T:
        return await work()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    done: list[Any] = []

    def run() -> None:
        try:
            done.append((asyncio.run(main()), None))
        except BaseException as e:  # noqa: BLE001 - raised again in the caller's thread
            done.append((None, e))

    thread = threading.Thread(target=run, name="outlast notices", daemon=True)
    thread.start()
    thread.join()
    value, error = done[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]  # what `work` gave


__all__ = ["Settings", "Target", "Teller", "due", "names", "run_blocking", "targets"]
