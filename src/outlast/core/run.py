"""The journal's entries, and the run as their fold.

    apply(run, entry) -> run        pure and total: the only way a run's state changes

Rules
1. A tool call is done if its result is in the journal, begun if its intent is (`CallStarted`). No second flag can disagree.
2. A message's body is the message and nothing else; what came beside it stands in `meta`.
3. Facts (an answer, a result, a doubt) are kept whatever came in between; intents (`CallStarted`) and consequences (gates, refusals, the
   batch's user message, the end) are worked out anew on the journal as it is.
4. `OUTSIDE` entries need no lease; each has an id of its own, unique in its run. After the end only those in `AFTER_END` are accepted.
   `GateMoved` and `GateExpired` may also be written without one, under the lock of a run that nobody holds: they say what the clock says.
5. A change of the fields below is a change of the journal format: they are read for ever. Code of a newer format says so by a
   `VersionChanged` before it writes anything else into an older run; code of an older one leaves such a run alone (`NewerFormat`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, Self, TypeVar

from outlast.core import codec
from outlast.core import messages as m

Json = Any
T = TypeVar("T")
GateKind = Literal["approval", "verification", "budget", "event", "run"]
EndStatus = Literal["done", "failed", "cancelled"]

FORMAT = 1  # of the journal: grows with every change of an entry's fields; older ones are read for ever
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
LATE_WIRE = timedelta(seconds=5)  # what a dead process put on the wire may still land


class NewerFormat(codec.Unstorable):
    """The journal was written in a format that this version does not know; nothing is wrong with it. `format`: the one that is needed."""

    def __init__(self, found: int) -> None:
        super().__init__("$.format", f"the journal is of format {found}, this version of outlast reads up to {FORMAT}")
        self.format = found


def ms(at: datetime) -> int:
    """Whole milliseconds since the epoch: the resolution of every stored instant."""
    return (at - EPOCH) // _MS


def instant(value: int) -> datetime:
    return EPOCH + timedelta(milliseconds=value)


def iso(at: datetime) -> str:
    """2026-11-30T11:00:00.000Z"""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---- entries ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Entry:
    """What every entry may carry beside its body; `at` is set by the store when it is read back."""

    by: str | None = field(default=None, metadata={"head": True})
    entry_id: str | None = field(default=None, metadata={"head": True})
    meta: Mapping[str, Any] | None = field(default=None, metadata={"head": True})
    at: datetime = field(default=EPOCH, metadata={"head": True}, compare=False)
    # Its row, once it is known: (kind, body, meta). Set by `stored` alone, so that every entry is encoded once; `dataclasses.replace` drops it.
    _row: tuple[str, str, str | None] | None = field(default=None, init=False, repr=False, compare=False, metadata={"head": True})

    # For all kinds together: generated for each of them, these two were a quarter of the time that `import outlast` takes.

    def __eq__(self, other: object) -> bool:
        """Equal kind and fields; `at` does not count."""
        if other.__class__ is not self.__class__:
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _COMPARED[type(self).__name__])

    __hash__ = None  # type: ignore[assignment]  # messages and arguments are dicts

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self) if f.repr)})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RunStarted(Entry):
    """The first entry: whose run it is and where it comes from."""

    agent: str
    agent_version: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    driver: str = "built-in"
    parent_run_id: str | None = None
    parent_call_id: str | None = None
    format: int = FORMAT
    code: str = ""  # a digest of what the agent's code said then; "": started by a process without it
    library: str = ""
    forked_from: str | None = None
    forked_at: int = 0  # the checkpoint of that run that this one begins with
    asks: bool = False  # every new call of a tool with an effect asks a person, whatever the code says


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MessageAdded(Entry):
    """A checkpoint: one more message."""

    message: m.Message


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CallStarted(Entry):
    """The intent, saved before the act. `may_act_until`: nobody concludes "not done" before it."""

    call_id: str
    key: str
    effect: str
    attempt: int
    may_act_until: datetime
    owner: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CallSkipped(Entry):
    """An intent that was surely not acted upon: its time had run out before the act began."""

    call_id: str
    why: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CallFailed(Entry):
    """An attempt whose outcome is an error or unknown, to be made again with the same key from `retry_at` on."""

    call_id: str
    why: str
    retry_at: datetime


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CallDoubted(Entry):
    """The outcome of a begun call cannot be told. `checked`: its check could not tell either."""

    call_id: str
    why: str
    may_act_until: datetime | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CallFinished(Entry):
    """A call's result. Without `content` the result stands in the user message of the same append, and only there.

    `how`: result (the tool's own), refused (never run: a gate, bad arguments, a cut answer), verified (a check or a person said so),
    unknown (not repeated, outcome unknown), cancelled, answered (an event, a timer or a child run).
    """

    call_id: str
    content: Json = None
    is_error: bool = False
    how: str = "result"
    effect: str | None = None  # of a call that ran


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GateOpened(Entry):
    """A wait. `rungs`: whom it asks and until when, first to last, all computed now: [{role, deadline, rule, remind_at: […]}].

    `closes_at`: from then on no decision is accepted; None: it stays open. `args`: of a budget or an event gate; of the others the call's.
    """

    gate_id: str
    kind: GateKind
    call_id: str | None
    tool: str | None
    digest: str
    noun: str = "call"
    rungs: Sequence[Mapping[str, Any]] = ()
    closes_at: datetime | None = None
    args: Mapping[str, Any] | None = None
    why: str | None = None
    guarded: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GateWaived(Entry):
    """`when=` was asked and said that nobody need be asked; asked once and saved."""

    call_id: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GateMoved(Entry):
    """A rung's clock: a reminder was due (the level stays) or the next one is asked (the level grows)."""

    gate_id: str
    level: int
    reminded_at: datetime | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GateExpired(Entry):
    """Its time is over and nobody decided."""

    gate_id: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RunEnded(Entry):
    """It is over: done, or failed with a reason."""

    status: EndStatus
    reason: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ModelFailed(Entry):
    """The model could not be asked. `retry_at`: when it is tried again; None: never by a machine."""

    why: str
    attempt: int
    retry_at: datetime | None
    status: int | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ModelCallLost(Entry):
    """A model call that may have been paid for: a worker died when the next step was one, or stopped it. Counted by every limit."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: str | None = None  # estimated; None: the model's price is unknown


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WorkerDied(Entry):
    """The process that began these calls is provably dead; what it put on the wire may land until `may_act_until`."""

    call_ids: Sequence[str]
    may_act_until: datetime


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class VersionChanged(Entry):
    """Newer or older code goes on with this run, from the next checkpoint on."""

    agent_version: str
    code: str
    library: str = ""
    format: int = FORMAT


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CallUpgraded(Entry):
    """A call that older code left open, with its arguments as today's code takes them. `tool`: whose they are now.

    An approval that was given, or asked for, with the arguments as they were no longer counts.
    """

    call_id: str
    tool: str
    args: Mapping[str, Any]


# ---- entries without a lease ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TextSent(Entry):
    """What a person said, for the next user message."""

    content: str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GateDecided(Entry):
    """A person's word on a gate."""

    gate_id: str
    outcome: str
    note: str | None = None
    args: Mapping[str, Any] | None = None
    digest: str | None = None
    result: Json = None
    has_result: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DecisionRefused(Entry):
    """A decision that came too late or from the wrong person; changes nothing."""

    gate_id: str
    why: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EventReceived(Entry):
    """What a wait waited for."""

    name: str
    data: Json = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ChildFinished(Entry):
    """A sub-agent's run is over."""

    call_id: str
    status: str
    output: Json = None
    reason: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: str | None = None
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    lost_tokens: int = 0  # of model calls below that may have been paid for and lost: counted by the parent's limits
    lost_usd: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RetryAsked(Entry):
    """Go on from the last checkpoint."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RunCancelled(Entry):
    """Stopped by a person."""

    note: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RunMoved(Entry):
    """It goes on in another store; here nothing more is accepted."""

    to: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LateResult(Entry):
    """A result that came too late to be one: evidence on the call, it changes no message."""

    call_id: str
    content: Json = None
    is_error: bool = False
    why: str | None = None


KINDS: dict[str, type[Entry]] = {
    k.__name__: k
    for k in (
        RunStarted, MessageAdded, CallStarted, CallSkipped, CallFailed, CallDoubted, CallFinished, GateOpened, GateWaived, GateMoved, GateExpired,
        RunEnded, ModelFailed, ModelCallLost, WorkerDied, VersionChanged, CallUpgraded,
        TextSent, GateDecided, DecisionRefused, EventReceived, ChildFinished, RetryAsked, RunCancelled, RunMoved, LateResult,
    )
}  # fmt: skip
OUTSIDE = (RunStarted, TextSent, GateDecided, DecisionRefused, EventReceived, ChildFinished, RetryAsked, RunCancelled, RunMoved, LateResult)
AFTER_END: dict[str, tuple[type[Entry], ...]] = {
    "done": (TextSent, LateResult, RunMoved),
    "failed": (RetryAsked, TextSent, LateResult, RunMoved),
    "cancelled": (RetryAsked, TextSent, LateResult, RunMoved),  # but after a RunMoved nothing
}

_COMPARED = {kind: tuple(f.name for f in fields(cls) if f.compare) for kind, cls in KINDS.items()}
_BODY = {kind: tuple((f.name, str(f.type), f.default) for f in fields(cls) if not f.metadata.get("head")) for kind, cls in KINDS.items()}


def to_row(entry: Entry) -> tuple[str, str, str | None]:
    """(kind, body, meta) as the store holds them. Fields at their default are left out. Raises codec.Unstorable."""
    if entry._row is not None:
        return entry._row
    return type(entry).__name__, codec.encode(_body(entry)), codec.encode(dict(entry.meta)) if entry.meta else None


def _body(entry: Entry) -> Mapping[str, Any]:
    if isinstance(entry, MessageAdded):
        return entry.message
    body: dict[str, Any] = {}
    for name, _, default in _BODY[type(entry).__name__]:
        value = getattr(entry, name)
        if name == "format":
            pass  # always written: where it is missing, today's number would be read into an old journal
        elif value is default or (isinstance(value, Mapping | tuple) and not value and default is not None):
            continue
        body[name] = iso(value) if isinstance(value, datetime) else value
    return body


def from_row(kind: str, body: str, meta: str | None, *, by: str | None = None, entry_id: str | None = None, at: datetime = EPOCH) -> Entry:
    """The entry as any reader sees it. Raises codec.Unstorable where the row is broken or of a kind that this version does not know."""
    return _entry(kind, codec.decode(body), codec.decode(meta) if meta else None, by, entry_id, at)


def _entry(kind: str, value: Any, meta: Any, by: str | None, entry_id: str | None, at: datetime) -> Entry:
    if not isinstance(meta, dict | None):
        raise codec.Unstorable("$", f"the meta of a {kind} must be an object")
    cls = KINDS.get(kind)
    if cls is None:
        raise codec.Unstorable("$", f"unknown kind of entry {kind!r}: written by a newer version?")
    if not isinstance(value, dict):
        raise codec.Unstorable("$", f"the body of a {kind} must be an object")
    if cls is MessageAdded:
        if value.get("role") not in ("user", "assistant", "system") or not isinstance(value.get("content"), str | list):
            raise codec.Unstorable("$", "a message needs a role and a content")
        for n, call in enumerate(m.tool_uses(value)):
            if not (isinstance(call.get("id"), str) and isinstance(call.get("name"), str) and isinstance(call.get("input"), dict)):
                raise codec.Unstorable(f"$.content: tool_use {n}", "a call needs an id, a name and an input object")
        return MessageAdded(value, by=by, entry_id=entry_id, meta=meta, at=at)
    given = {name: _read(value[name], hint, f"$.{name}") for name, hint, _ in _BODY[kind] if name in value}
    if given.get("format", 0) > FORMAT:
        raise NewerFormat(given["format"])
    try:
        return cls(**given, by=by, entry_id=entry_id, meta=meta, at=at)
    except TypeError as e:
        raise codec.Unstorable("$", f"{kind}: {e}") from None


_JSON_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool,), "Mapping": (dict,), "Sequence": (list,)}


def _read(value: Json, hint: str, path: str) -> Any:
    """A field of a body, checked: what a hand or a bug wrote into a row is found here, not somewhere in a decision."""
    if hint == "Json" or (value is None and hint.endswith("| None")):
        return value
    if hint.startswith("datetime"):
        return _instant(value, path)
    outer = re.split(r"[\[ ]", hint, maxsplit=1)[0]
    if type(value) not in _JSON_TYPES.get(outer, (str, list) if "Sequence" in hint else (str,)):
        raise codec.Unstorable(path, f"must be {hint}, not {type(value).__name__}")
    if hint.startswith("Sequence[str") and not all(isinstance(v, str) for v in value):
        raise codec.Unstorable(path, "must be a list of texts")
    if "Sequence[Mapping" in hint and isinstance(value, list) and not all(isinstance(v, dict) for v in value):
        raise codec.Unstorable(path, "must be a list of objects")
    if path == "$.rungs":
        for n, rung in enumerate(value):
            _check_rung(rung, f"{path}[{n}]")
    return value


def _check_rung(rung: Mapping[str, Any], path: str) -> None:
    remind_at = rung.get("remind_at", [])
    if not isinstance(remind_at, list) or not isinstance(rung.get("rule"), dict | None):
        raise codec.Unstorable(path, "a rung needs a rule and a list of instants")
    for at in ([] if rung.get("deadline") is None else [rung["deadline"]]) + remind_at:
        _instant(at, path)


def _instant(value: Json, path: str) -> datetime:
    try:
        at = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise codec.Unstorable(path, f"not an instant: {value!r}") from None
    if at.tzinfo is None:
        raise codec.Unstorable(path, f"an instant without a time zone: {value!r}")
    return at


def stored(entry: Entry) -> Entry:
    """The entry as it will be read back, so that what is folded in memory and what the store holds never differ; it knows its row."""
    if entry._row is not None:
        return entry
    kind = type(entry).__name__
    body, value = codec.stored(_body(entry))
    meta, beside = codec.stored(dict(entry.meta)) if entry.meta else (None, None)
    return _known(_entry(kind, value, beside, entry.by, entry.entry_id, entry.at), (kind, body, meta))


def headed(entry: Entry, **head: Any) -> Entry:
    """The entry with another `at`, `by`, `entry_id` or `meta`. What it says stays, and so does what is known of its row."""
    row = entry._row
    if row is None:
        return replace(entry, **head)
    meta = row[2]
    if "meta" in head:
        meta, head["meta"] = codec.stored(dict(head["meta"])) if head["meta"] else (None, None)
    return _known(replace(entry, **head), (row[0], row[1], meta))


def _known(entry: Entry, row: tuple[str, str, str | None]) -> Entry:
    object.__setattr__(entry, "_row", row)
    return entry


# ---- the fold -------------------------------------------------------------------------------------------------------------


def _with(record: T, **changes: Any) -> T:
    """`dataclasses.replace` for the fold's own records, which have no slots: a tenth of its time, at some twenty for every message."""
    new = object.__new__(type(record))
    new.__dict__.update(record.__dict__)
    assert changes.keys() <= new.__dict__.keys(), changes.keys() - new.__dict__.keys()
    new.__dict__.update(changes)
    return new


class _CallIds(AbstractSet[str]):
    """A look at a history's ids: asking it costs the same after 10,000 messages."""

    __slots__ = ("_ids", "_n")

    def __init__(self, ids: Mapping[str, int], n: int) -> None:
        self._ids, self._n = ids, n

    def __contains__(self, call_id: object) -> bool:
        at = self._ids.get(call_id) if isinstance(call_id, str) else None
        return at is not None and at < self._n

    def __iter__(self) -> Iterator[str]:
        return (call_id for call_id, at in self._ids.items() if at < self._n)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class History(Sequence[m.Message]):
    """Messages, oldest first. Grows in place: the fold of 10,000 messages shares one list (a tuple would make it quadratic)."""

    __slots__ = ("_ids", "_items", "_n")

    def __init__(self, items: list[m.Message] | None = None, n: int | None = None, ids: dict[str, int] | None = None) -> None:
        self._items = [] if items is None else items
        self._n = len(self._items) if n is None else n
        self._ids = {c["id"]: at for at, i in enumerate(self._items) for c in m.tool_uses(i)} if ids is None else ids

    def plus(self, message: m.Message) -> History:
        items, ids = self._items, self._ids
        if len(items) > self._n and items[self._n] is message:  # folded once more, for the inbox: the same future
            return History(items, self._n + 1, ids)
        if len(items) != self._n:  # someone else grew the shared list: another future of the same past
            items, ids = items[: self._n], {call_id: at for call_id, at in ids.items() if at < self._n}
        items.append(message)
        if message["role"] == "assistant":
            for call in m.tool_uses(message):
                ids.setdefault(str(call.get("id")), self._n)
        return History(items, self._n + 1, ids)

    @property
    def call_ids(self) -> AbstractSet[str]:
        """Every tool-call id in these messages; those of another future of the same past are not among them."""
        return _CallIds(self._ids, self._n)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, History) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it grows in place

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._items[: self._n][index]
        if not -self._n <= index < self._n:
            raise IndexError(index)
        return self._items[index if index >= 0 else self._n + index]

    def __iter__(self) -> Iterator[m.Message]:
        return iter(self._items[: self._n])


@dataclass(frozen=True)
class Gate:
    """A wait and what came of it."""

    opened: GateOpened
    level: int = 0
    reminded_at: datetime | None = None
    outcome: str | None = None
    closed: GateDecided | EventReceived | ChildFinished | LateResult | GateExpired | None = None

    @property
    def rung(self) -> Mapping[str, Any]:
        rungs = self.opened.rungs
        return rungs[min(self.level, len(rungs) - 1)] if rungs else {}

    @property
    def role(self) -> str | None:
        return self.rung.get("role")

    @property
    def deadline(self) -> datetime | None:
        """The end of the present rung."""
        value = self.rung.get("deadline")
        return datetime.fromisoformat(value) if value else None


@dataclass(frozen=True)
class Call:
    """One tool call of the open batch."""

    id: str
    name: str
    args: Mapping[str, Any]
    started: CallStarted | None = None  # an intent that nothing has answered
    attempts: int = 0  # intents so far
    first_started_at: datetime | None = None
    may_act_until: datetime | None = None
    failures: int = 0  # attempts that ended in an error or an unknown outcome, since the last person's word
    retry_at: datetime | None = None
    doubt: str | None = None
    checked: bool = False
    waived: bool = False
    result: CallFinished | None = None
    gates: tuple[Gate, ...] = ()
    effect: str | None = None  # as it was when the call first began
    key: str | None = None
    late: LateResult | None = None
    upgraded: CallUpgraded | None = None
    past_gates: int = 0  # so many of its gates asked for arguments that are no longer what would run

    def gate(self, kind: GateKind) -> Gate | None:
        """The newest gate of that kind; of the approvals, of those that still count."""
        gates = self.gates[self.past_gates :] if kind == "approval" else self.gates
        return next((g for g in reversed(gates) if g.opened.kind == kind), None)

    @property
    def known_as(self) -> str:
        """The name of the tool that its arguments are meant for."""
        return self.upgraded.tool if self.upgraded else self.name

    @property
    def begun(self) -> bool:
        return self.result is None and (self.started is not None or self.doubt is not None)

    @property
    def decision(self) -> GateDecided | None:
        gate = self.gate("approval")
        return gate.closed if gate and isinstance(gate.closed, GateDecided) else None

    @property
    def allowed(self) -> Mapping[str, Any]:
        """The arguments that run: the model's, or what a person made of them."""
        decision = self.decision
        return decision.args if decision and decision.args is not None else self.asked

    @property
    def asked(self) -> Mapping[str, Any]:
        """The arguments that are asked about: the model's, or what newer code made of what was to run."""
        return self.upgraded.args if self.upgraded else self.args


@dataclass(frozen=True)
class Run:
    """All that the next step depends on. The empty run is `Run(run_id)`; everything else comes from `apply`."""

    id: str
    agent: str = ""
    agent_version: str = ""
    code: str = ""
    library: str = ""
    format: int = FORMAT
    asks: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    started: datetime | None = None
    started_by: str | None = None
    parent_run_id: str | None = None
    parent_call_id: str | None = None
    entries: int = 0
    seq: int = 0
    messages: History = field(default_factory=History)
    stop_reason: str | None = None
    calls: tuple[Call, ...] = ()
    gates: tuple[Gate, ...] = ()  # of the run itself: limits
    queued: tuple[TextSent, ...] = ()
    events: tuple[EventReceived, ...] = ()  # that came before their wait
    ended: RunEnded | None = None
    model_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    lost_calls: int = 0
    lost_tokens: int = 0
    spent: Decimal = Decimal(0)  # USD, of answers and of runs below whose price is known
    unpriced: int = 0  # answers (and runs below) whose price is unknown: the cost is then unknown, never 0
    lost_usd: Decimal = Decimal(0)
    context_tokens: int = 0  # of the last answer, input and output: what the next call begins with
    batch: tuple[tuple[str, Any, Any], ...] = ()  # the last batch: (tool, arguments, result) of each call
    repeats: int = 0  # how often in a row the same batch had the same results
    granted: Mapping[str, Any] = field(default_factory=dict)
    budget_gates: int = 0
    model_failures: int = 0
    retry_at: datetime | None = None
    model_error: str | None = None
    cut_in_a_row: int = 0
    paused_in_a_row: int = 0
    container: str | None = None  # that the last answer ran in: the next request names it
    corrections: int = 0  # answers sent back because they were not of the output's type

    @property
    def cost_usd(self) -> Decimal | None:
        """What its answers cost, runs below included; None: unknown, or nothing was answered yet."""
        return self.spent if self.model_calls and not self.unpriced else None

    def call(self, call_id: str | None) -> Call | None:
        return next((c for c in self.calls if c.id == call_id), None)

    def all_gates(self) -> Iterator[Gate]:
        yield from self.gates
        for call in self.calls:
            yield from call.gates

    def find_gate(self, gate_id: str) -> Gate | None:
        return next((g for g in self.all_gates() if g.opened.gate_id == gate_id), None)

    def with_call(self, call_id: str | None, **changes: Any) -> Self:
        return _with(self, calls=tuple(_with(c, **changes) if c.id == call_id else c for c in self.calls))


def fold(run: Run, entries: Sequence[Entry] | Iterator[Entry]) -> Run:
    for entry in entries:
        run = apply(run, entry)
    return run


def apply(run: Run, entry: Entry) -> Run:
    """The run after one more entry."""
    run = _with(run, entries=run.entries + 1)
    match entry:
        case MessageAdded(message) if message["role"] == "assistant":
            return _answered(run, entry)
        case MessageAdded(message):
            corrected = bool(entry.meta and entry.meta.get("correction"))
            return _with(
                run, messages=run.messages.plus(message), seq=run.seq + 1, calls=(), queued=(), stop_reason=None,
                corrections=run.corrections + 1 if corrected else 0 if run.queued else run.corrections, **_repeated(run, message))  # fmt: skip
        case CallStarted() | CallSkipped() | CallFailed() | CallDoubted() | CallFinished() | LateResult() | CallUpgraded():
            call = run.call(entry.call_id)
            return _called(run, call, entry) if call else run
        case WorkerDied():
            return _with(run, calls=tuple(_with(c, may_act_until=entry.may_act_until) if c.id in entry.call_ids else c for c in run.calls))
        case GateOpened() | GateMoved() | GateExpired() | GateDecided() | GateWaived() | EventReceived() | ChildFinished():
            return _gate(run, entry)
        case RunStarted():
            return _with(
                run, agent=entry.agent, agent_version=entry.agent_version, code=entry.code, library=entry.library, format=entry.format,
                asks=entry.asks, tags=entry.tags, started=entry.at, started_by=entry.by,
                parent_run_id=entry.parent_run_id, parent_call_id=entry.parent_call_id)  # fmt: skip
        case TextSent():
            return _with(_revived(run) if run.ended else run, queued=(*run.queued, entry))
        case ModelFailed():
            return _with(run, model_failures=entry.attempt, retry_at=entry.retry_at, model_error=entry.why)
        case ModelCallLost():
            lost = money(entry.cost_usd) or Decimal(0)
            tokens = run.lost_tokens + entry.input_tokens + entry.output_tokens
            return _with(run, lost_calls=run.lost_calls + 1, lost_tokens=tokens, lost_usd=run.lost_usd + lost)
        case VersionChanged():
            return _with(run, agent_version=entry.agent_version, code=entry.code, library=entry.library, format=entry.format)
        case RetryAsked():
            return _revived(run)
        case RunEnded():
            return _with(run, ended=entry, retry_at=None, gates=_closed(run.gates))
        case RunCancelled():
            return _with(run, ended=RunEnded("cancelled", entry.note), retry_at=None, gates=_closed(run.gates))
        case RunMoved():
            calls = tuple(_with(c, gates=_closed(c.gates)) if c.gates else c for c in run.calls)  # nobody is asked here any more
            return _with(run, ended=RunEnded("cancelled", f"moved to {entry.to}"), retry_at=None, gates=_closed(run.gates), calls=calls)
        case _:  # DecisionRefused: recorded, changes nothing
            return run


def _called(
    run: Run, call: Call, entry: CallStarted | CallSkipped | CallFailed | CallDoubted | CallFinished | LateResult | CallUpgraded
) -> Run:
    match entry:
        case CallUpgraded():
            return run.with_call(
                call.id, upgraded=entry, past_gates=len(call.gates), gates=_closed(call.gates, "approval"), waived=False, late=None)  # fmt: skip
        case CallStarted():
            return run.with_call(
                call.id, started=entry, attempts=entry.attempt, may_act_until=entry.may_act_until, doubt=None, checked=False, retry_at=None,
                first_started_at=call.first_started_at or entry.at, effect=call.effect or entry.effect, key=entry.key)  # fmt: skip
        case CallSkipped():
            return run.with_call(call.id, started=None, first_started_at=call.first_started_at if call.attempts > 1 else None)
        case CallFailed():
            attempts = call.attempts + (call.started is None)  # an intent has counted itself
            return run.with_call(call.id, started=None, attempts=attempts, failures=call.failures + 1, retry_at=entry.retry_at)
        case CallDoubted():
            return run.with_call(call.id, doubt=entry.why, checked=entry.checked, may_act_until=entry.may_act_until or call.may_act_until)
        case CallFinished():  # the first result stands
            return run.with_call(call.id, result=entry, gates=_closed(call.gates)) if call.result is None else run
        case LateResult():
            run = run.with_call(call.id, late=entry)
            gate = call.gate("verification")
            return _change(run, gate.opened.gate_id, outcome="happened", closed=entry) if gate and call.result is None else run


def _revived(run: Run) -> Run:
    """Taken up again after its end, by a text or by retry: what ended it is forgotten, or it would end at once again."""
    gates = tuple(g for g in run.gates if g.outcome not in ("rejected", "expired"))
    return _with(
        run, ended=None, model_failures=0, retry_at=None, model_error=None, cut_in_a_row=0, paused_in_a_row=0, corrections=0, gates=gates)  # fmt: skip


def _answered(run: Run, entry: MessageAdded) -> Run:
    meta = entry.meta or {}
    usage = meta.get("usage") if not meta.get("imported") else None  # of a history that was given: paid for elsewhere
    calls = tuple(Call(b["id"], b["name"], b.get("input") or {}) for b in m.tool_uses(entry.message))
    reason = meta.get("stop_reason")
    if not isinstance(reason, str | None):
        reason = codec.canonical(reason)  # unknown, and shown as it came
    return _with(
        run,
        messages=run.messages.plus(entry.message),
        seq=run.seq + 1,
        stop_reason=reason,
        calls=calls,
        model_calls=run.model_calls + (not meta.get("imported")),
        input_tokens=run.input_tokens + _count(usage, "input_tokens"),
        output_tokens=run.output_tokens + _count(usage, "output_tokens"),
        cache_read_tokens=run.cache_read_tokens + _count(usage, "cache_read_input_tokens"),
        cache_write_tokens=run.cache_write_tokens + _count(usage, "cache_creation_input_tokens"),
        **_paid(run, meta.get("cost_usd"), counts=not meta.get("imported")),
        context_tokens=sum(_count(usage, n) for n in _CONTEXT),
        container=(meta.get("container") or {}).get("id") or run.container if isinstance(meta.get("container"), Mapping) else run.container,
        model_failures=0,
        retry_at=None,
        model_error=None,
        cut_in_a_row=run.cut_in_a_row + 1 if reason == m.CUT and calls else 0,
        paused_in_a_row=run.paused_in_a_row + 1 if reason in m.GOES_ON else 0,
    )


_CONTEXT = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


def money(value: Any) -> Decimal | None:
    """An amount as it is stored: a decimal string. Anything else is unknown."""
    try:
        amount = Decimal(value) if isinstance(value, str) else None
    except InvalidOperation:
        return None
    return amount if amount is not None and amount.is_finite() else None


def _paid(run: Run, cost_usd: Any, *, counts: bool) -> dict[str, Any]:
    amount = money(cost_usd)
    return {"spent": run.spent + (amount or 0), "unpriced": run.unpriced + (counts and amount is None)}


def _repeated(run: Run, message: m.Message) -> dict[str, Any]:
    """Was this batch the same as the one before, results and all?"""
    if not run.calls:
        return {"batch": (), "repeats": 0}
    results = {b.get("tool_use_id"): b.get("content") for b in m.blocks(message) if b.get("type") == "tool_result"}
    batch = tuple((c.name, c.args, results.get(c.id)) for c in run.calls)
    return {"batch": batch, "repeats": run.repeats + 1 if batch == run.batch else 1}


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, Mapping) else None
    return value if isinstance(value, int) and value > 0 else 0


def _gate(run: Run, entry: Entry) -> Run:
    match entry:
        case GateOpened(call_id=None):
            return _with(run, gates=(*run.gates, Gate(entry)), budget_gates=run.budget_gates + (entry.kind == "budget"))
        case GateOpened():
            call = run.call(entry.call_id)
            events = run.events
            if call is None:
                return run
            run = run.with_call(entry.call_id, gates=(*call.gates, Gate(entry)))
            early = next((e for e in events if entry.kind == "event" and e.name == (entry.args or {}).get("event")), None)
            if early is None:
                return run
            run = _with(run, events=tuple(e for e in events if e is not early))
            return _change(run, entry.gate_id, outcome="arrived", closed=early)
        case GateWaived(call_id):
            return run.with_call(call_id, waived=True)
        case GateMoved():
            return _change(run, entry.gate_id, level=entry.level, reminded_at=entry.reminded_at)
        case GateExpired():
            return _change(run, entry.gate_id, outcome="expired", closed=entry)
        case GateDecided():
            return _decided(run, entry)
        case EventReceived():
            gate = next(
                (
                    g
                    for g in run.all_gates()
                    if g.outcome is None and g.opened.kind == "event" and (g.opened.args or {}).get("event") == entry.name
                ),
                None,
            )
            if gate is None:
                return _with(run, events=(*run.events, entry))
            return _change(run, gate.opened.gate_id, outcome="arrived", closed=entry)
        case ChildFinished(call_id):
            spent = _with(
                run, input_tokens=run.input_tokens + entry.input_tokens, output_tokens=run.output_tokens + entry.output_tokens,
                cache_read_tokens=run.cache_read_tokens + entry.cache_read_tokens,
                cache_write_tokens=run.cache_write_tokens + entry.cache_write_tokens, lost_tokens=run.lost_tokens + entry.lost_tokens,
                lost_usd=run.lost_usd + (money(entry.lost_usd) or 0), **_paid(run, entry.cost_usd, counts=True))  # fmt: skip
            return _change(spent, f"run:{call_id}", outcome="arrived", closed=entry)
    return run


def _decided(run: Run, entry: GateDecided) -> Run:
    gate = run.find_gate(entry.gate_id)
    if gate is None or gate.outcome is not None:
        return run
    run = _change(run, entry.gate_id, outcome=entry.outcome, closed=entry)
    if gate.opened.kind == "budget" and entry.outcome == "approved":
        asked = {**(gate.opened.args or {}), **(entry.args or {})}
        return _with(run, granted={**run.granted, str(asked.get("limit")): asked.get("raise_to")})
    if gate.opened.kind == "verification" and entry.outcome == "run_again":  # used up by the next CallStarted
        call = run.call(gate.opened.call_id)
        # Said before the earlier attempt's time is over: its process was seen dead then, and what it put on the wire may still land.
        early = call is not None and call.may_act_until is not None and entry.at < call.may_act_until
        return run.with_call(
            gate.opened.call_id, started=None, doubt=None, checked=False, failures=0, retry_at=entry.at + LATE_WIRE if early else None,
            first_started_at=None)  # fmt: skip
    return run


def _change(run: Run, gate_id: str, **changes: Any) -> Run:
    def change(gates: tuple[Gate, ...]) -> tuple[Gate, ...]:
        return tuple(_with(g, **changes) if g.opened.gate_id == gate_id and g.outcome is None else g for g in gates)

    return _with(run, gates=change(run.gates), calls=tuple(_with(c, gates=change(c.gates)) if c.gates else c for c in run.calls))


def _closed(gates: tuple[Gate, ...], kind: str | None = None) -> tuple[Gate, ...]:
    return tuple(_with(g, outcome="cancelled") if g.outcome is None and kind in (None, g.opened.kind) else g for g in gates)
