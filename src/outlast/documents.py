"""What people and programs get back: runs, checkpoints, gates, notices, events. Immutable; `to_dict()` is the document.

Every document has `type`. Keys are added, never renamed or dropped; absent is None, not a missing key; money is a decimal string.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Generic, Literal, TypeAlias

from typing_extensions import TypeVar

from outlast.core import codec
from outlast.core.gate import GateRow
from outlast.core.run import iso
from outlast.stores.base import ENDED, Head, JournalRow

Message: TypeAlias = dict[str, Any]
Tags: TypeAlias = Mapping[str, str]
Status: TypeAlias = Literal[
    "running", "waiting_for_approval", "waiting_for_verification", "waiting_for_budget", "waiting_for_event", "waiting_for_run",
    "waiting_for_timer", "waiting_for_code", "done", "failed", "cancelled",
]  # fmt: skip
GateOutcome: TypeAlias = Literal["approved", "rejected", "expired", "cancelled", "happened", "run_again", "give_up", "arrived"]
Out = TypeVar("Out", default=str)


def _iso(at: datetime | None) -> str | None:
    return iso(at) if at else None


@dataclass(frozen=True)
class RunHead:
    """One row of `runs`: everything about a run but its messages, output and gates."""

    run_id: str
    agent: str
    agent_version: str
    status: Status
    reason: str | None
    seq: int
    model_calls: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    cost_usd: Decimal | None
    attempts: int
    tags: Tags
    started_by: str | None
    parent_run_id: str | None
    parent_call_id: str | None
    lease_owner: str | None
    lease_until: datetime | None
    wake_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @property
    def waiting(self) -> bool:
        """It waits for somebody or something: nothing holds a process for it."""
        return self.status.startswith("waiting_")

    @property
    def finished(self) -> bool:
        """done, failed or cancelled."""
        return self.status in ENDED

    def to_dict(self, *, messages: bool = False) -> dict[str, Any]:
        """The `run` document (of a head: without output and gates)."""
        return {
            "type": "run", "run_id": self.run_id, "agent": self.agent, "agent_version": self.agent_version, "status": self.status,
            "reason": self.reason, "seq": self.seq, "model_calls": self.model_calls, "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens, "cache_read_tokens": self.cache_read_tokens, "cache_write_tokens": self.cache_write_tokens,
            "cost_usd": str(self.cost_usd) if self.cost_usd is not None else None, "attempts": self.attempts, "tags": dict(self.tags),
            "started_by": self.started_by, "parent_run_id": self.parent_run_id, "parent_call_id": self.parent_call_id,
            "lease_owner": self.lease_owner, "lease_until": _iso(self.lease_until), "wake_at": _iso(self.wake_at),
            "created_at": iso(self.created_at), "updated_at": iso(self.updated_at),
        }  # fmt: skip


def head_fields(head: Head) -> dict[str, Any]:
    """A store's row as the fields of RunHead and Run."""
    return {
        "run_id": head.run_id, "agent": head.agent, "agent_version": head.agent_version, "status": head.status, "reason": head.reason,
        "seq": head.seq, "model_calls": head.model_calls, "input_tokens": head.input_tokens, "output_tokens": head.output_tokens,
        "cache_read_tokens": head.cache_read_tokens, "cache_write_tokens": head.cache_write_tokens,
        "cost_usd": Decimal(head.cost_usd) if head.cost_usd is not None else None, "attempts": head.attempts, "tags": dict(head.tags),
        "started_by": head.started_by, "parent_run_id": head.parent_run_id, "parent_call_id": head.parent_call_id,
        "lease_owner": head.lease_owner, "lease_until": head.lease_until, "wake_at": head.wake_at, "created_at": head.created_at,
        "updated_at": head.updated_at,
    }  # fmt: skip


@dataclass(frozen=True)
class Gate:
    """A wait for a person, an event or another run, and what came of it. `outcome` None: it is open."""

    run_id: str
    gate_id: str
    kind: Literal["approval", "verification", "budget", "event", "run"]
    call_id: str | None
    tool: str | None
    args: dict[str, Any]
    digest: str
    text: str
    role: str | None
    level: int
    deadline: datetime | None
    created_at: datetime
    notified_at: datetime | None
    outcome: GateOutcome | None
    decided_at: datetime | None
    decided_by: str | None
    note: str | None
    edited_args: dict[str, Any] | None
    agent: str
    tags: Tags
    started_by: str | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "gate", "run_id": self.run_id, "gate_id": self.gate_id, "kind": self.kind, "call_id": self.call_id, "tool": self.tool,
            "args": self.args, "digest": self.digest, "text": self.text, "role": self.role, "level": self.level,
            "deadline": _iso(self.deadline), "created_at": iso(self.created_at), "notified_at": _iso(self.notified_at),
            "outcome": self.outcome, "decided_at": _iso(self.decided_at), "decided_by": self.decided_by, "note": self.note,
            "edited_args": self.edited_args, "agent": self.agent, "tags": dict(self.tags), "started_by": self.started_by,
        }  # fmt: skip


def gate_of(head: Head, row: GateRow, notified_at: datetime | None = None) -> Gate:
    """A store's gate row as the public Gate."""
    return Gate(
        run_id=head.run_id, gate_id=row.gate_id, kind=row.kind, call_id=row.call_id, tool=row.tool, args=codec.decode(row.args),  # type: ignore[arg-type]  # a stored text is one of the five
        digest=row.digest, text=row.text, role=row.role, level=row.level, deadline=row.deadline, created_at=row.created_at,
        notified_at=notified_at, outcome=row.outcome, decided_at=row.decided_at, decided_by=row.decided_by, note=row.note,  # type: ignore[arg-type]  # likewise
        edited_args=codec.decode(row.edited_args) if row.edited_args is not None else None, agent=head.agent, tags=dict(head.tags),
        started_by=head.started_by)  # fmt: skip


@dataclass(frozen=True)
class Run(RunHead, Generic[Out]):
    """A run with its messages, its gates (open ones first, oldest first) and its output (None until it is done)."""

    output: Out | None = None
    messages: list[Message] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)

    def to_dict(self, *, messages: bool = False) -> dict[str, Any]:
        """The `run` document; `messages` adds the message list."""
        document = super().to_dict()
        document["output"] = codec.clean(self.output)
        document["gates"] = [gate.to_dict() for gate in self.gates]
        if messages:
            document["messages"] = self.messages
        return document


@dataclass(frozen=True)
class Checkpoint:
    """The run as of a saved message: `messages` are the first `seq`; `status` is the one that was saved with it."""

    run_id: str
    seq: int
    status: Status
    messages: list[Message]
    created_at: datetime

    @property
    def message(self) -> Message:
        """The newest one."""
        return self.messages[-1]

    def to_dict(self, *, messages: bool = False) -> dict[str, Any]:
        document: dict[str, Any] = {
            "type": "checkpoint", "run_id": self.run_id, "seq": self.seq, "status": self.status, "created_at": iso(self.created_at),
            "message": self.message,
        }  # fmt: skip
        if messages:
            document["messages"] = self.messages
        return document


@dataclass(frozen=True)
class Notice:
    """Somebody is to be told about a gate: at least once, with the same `id` on every try."""

    id: str
    kind: Literal["opened", "reminder", "escalated", "expired"]
    gate: Gate
    text: str
    url: str | None


@dataclass(frozen=True)
class Stuck:
    """A run that does not go on by itself: why, since when, and the one command that mends it. A run may have several."""

    run_id: str
    status: Status
    reason: str
    since: datetime
    command: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "stuck", "run_id": self.run_id, "status": self.status, "reason": self.reason, "since": iso(self.since), "command": self.command,
        }  # fmt: skip


@dataclass(frozen=True)
class Event:
    """What `stream()` and `on_event` give.

    checkpoint: a message was saved (`message`, `status`). run: the run waits or is over (`status`; `head`). text: a piece of the answer that
    is being written as checkpoint `seq`; reset: forget the text of this `seq`, the answer broke off. Text and reset exist only in the
    process that drives the run.
    """

    type: Literal["text", "reset", "checkpoint", "run"]
    run_id: str
    seq: int
    text: str | None
    message: Message | None
    status: Status | None
    created_at: datetime
    head: RunHead | None = None

    def to_dict(self) -> dict[str, Any]:
        """The `text`, `reset`, `checkpoint` or (for `run`) the run's head document."""
        if self.type == "run" and self.head is not None:
            return self.head.to_dict()
        document: dict[str, Any] = {"type": self.type, "run_id": self.run_id, "seq": self.seq}
        if self.type == "text":
            document["text"] = self.text
        elif self.type != "reset":
            document |= {"status": self.status, "created_at": iso(self.created_at)}
            if self.type == "checkpoint":
                document["message"] = self.message
        return document


def entry_document(run_id: str, row: JournalRow) -> dict[str, Any]:
    """A journal entry as a document."""
    return {
        "type": "entry", "run_id": run_id, "entry_no": row.entry_no, "seq": row.seq, "kind": row.kind, "at": iso(row.at), "by": row.by,
        "status": row.status, "fence": row.fence, "meta": codec.decode(row.meta) if row.meta else None, "body": codec.decode(row.body),
    }  # fmt: skip
