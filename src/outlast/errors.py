"""Every error that a caller can meet, by what the caller should do.

    OutlastError
    ├── UsageError            fix the call                                        exit 2   HTTP 400
    ├── RunNotFound           look at the id and at the store that is named            1        404
    ├── Refused               someone or something else stands                         5        409
    │   ├── RunExists         the id is taken by a run with other input
    │   ├── RunBusy           someone drives it now; `owner`, `until`
    │   ├── GateClosed        decided, expired, cancelled, or another digest; `gate`
    │   └── NotAllowed        this person may not                                      5        403
    ├── StoreError            nothing was written; try again                           1        503
    │   ├── CommitUnknown     it may have been written: read, then decide
    │   ├── LeaseLost         stop; someone else goes on
    │   └── SchemaTooNew      update this program, or use the newer worker
    ├── ModelError            the model's answer could not be had
    ├── ToolFailed            raised by a tool: surely not done
    └── InvariantViolated     our bug; the run is stopped and marked                   1        500

Rejected, expired, waiting, cancelled and finished are facts in the journal, not exceptions.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.documents import Gate


class OutlastError(Exception):
    """Base of all. `str(e)` is one line; `hint` is the command or the change that mends it, or ""."""

    exit_code: int = 1
    http_status: int = 500
    type: str = "outlast_error"

    def __init_subclass__(cls) -> None:
        cls.type = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, message: str, *, hint: str = "", run_id: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.run_id = run_id


class UsageError(OutlastError):
    """The call is wrong; nothing was done. The message names the parameter and what it may be."""

    exit_code = 2
    http_status = 400


class RunNotFound(OutlastError):
    """No run of that id in the store that the message names."""

    exit_code = 1
    http_status = 404


class Refused(OutlastError):
    """Someone or something else stands; nothing was changed."""

    exit_code = 5
    http_status = 409


class RunExists(Refused):
    """A run of this id is there, started with another agent or other input; it is untouched."""


class RunBusy(Refused):
    """Someone drives this run now, or an earlier attempt may still act; nothing was changed."""

    def __init__(self, message: str, *, owner: str, until: datetime, hint: str = "", run_id: str | None = None) -> None:
        super().__init__(message, hint=hint, run_id=run_id)
        self.owner = owner
        self.until = until


class GateClosed(Refused):
    """The gate was decided, expired or cancelled before, or its arguments are not those that were shown. `gate` holds what stands."""

    def __init__(self, message: str, *, gate: Gate, hint: str = "", run_id: str | None = None) -> None:
        super().__init__(message, hint=hint, run_id=run_id)
        self.gate = gate


class NotAllowed(Refused):
    """`may_decide` said no (or failed). The attempt is recorded in the journal; nothing else changed."""

    http_status = 403


class StoreError(OutlastError):
    """The database failed; nothing was written. Trying again is safe."""

    exit_code = 1
    http_status = 503


class CommitUnknown(StoreError):
    """The commit's answer was lost: it may stand or not. Read before acting (a later write that takes the run's row settles it)."""


class LeaseLost(StoreError):
    """Another worker holds this run now; nothing of ours was written and nothing more may be done for it."""


class SchemaTooNew(StoreError):
    """The store, or this run's journal, was written by a newer version; it is untouched. `needs`: what a run waits for."""

    def __init__(self, message: str, *, hint: str = "", run_id: str | None = None, needs: str | None = None) -> None:
        super().__init__(message, hint=hint, run_id=run_id)
        self.needs = needs


class ModelError(OutlastError):
    """Raise it in your own model. `retryable`: the same request may work later, not before `retry_after`."""

    http_status = 502

    def __init__(
        self, message: str, *, retryable: bool, retry_after: timedelta | None = None, status: int | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.retryable = retryable
        self.retry_after = retry_after
        self.status = status


class ToolFailed(OutlastError):
    """Raise it in a tool: it surely was not done. The model reads the text as an error result."""


class InvariantViolated(OutlastError):
    """A rule of ours does not hold: our bug. The run is stopped and marked; its journal is as it was."""
