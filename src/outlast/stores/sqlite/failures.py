"""What SQLite says, as our errors: the file's absolute path, the cause, and what to do.

No apsw exception leaves the store. Before COMMIT a failure wrote nothing (`StoreError`); from COMMIT on its outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import apsw

from outlast.errors import CommitUnknown, InvariantViolated, OutlastError, StoreError, UsageError


def translated(error: apsw.Error, path: str, *, committing: bool = False, what: str = "") -> OutlastError:
    """`committing`: COMMIT had begun."""
    cause, hint = _cause(error)
    message = f"{path}: {what + ': ' if what else ''}{cause}"
    if committing:
        return CommitUnknown(f"{message}; the commit may stand or not", hint=hint)
    if isinstance(error, apsw.ConstraintError | apsw.MismatchError):
        return InvariantViolated(message)
    return StoreError(message, hint=hint)


def _cause(error: apsw.Error) -> tuple[str, str]:
    said = str(error)
    match error:
        case apsw.BusyError() | apsw.LockedError():
            return "locked by another process", "wait for it or end it: `fuser -v FILE` names it"
        case apsw.FullError():
            return "disk full", "free some space, then try again"
        case apsw.CorruptError() | apsw.NotADBError():
            return f"the file is damaged ({said})", "keep the file and its -wal, look with `outlast store check`, restore a backup"
        case apsw.ReadOnlyError() | apsw.PermissionsError() | apsw.AuthError():
            return f"the file or its directory cannot be written ({said})", "let this user write the file, its -wal and its directory"
        case apsw.CantOpenError():
            return f"cannot be opened ({said})", "look at the rights of the file, its -wal and -shm, and its directory"
        case apsw.IOError():
            return f"the disk failed: disk I/O error ({said})", "look at free space and at the disk (dmesg), then try again"
        case apsw.NoMemError():
            return "out of memory", "try again with more memory"
        case _:
            return f"{type(error).__name__}: {said}", ""


@contextmanager
def speaking(path: str, what: str = "") -> Iterator[None]:
    """Whatever SQLite raises inside comes out as one of ours."""
    try:
        yield
    except apsw.Error as e:
        raise translated(e, path, what=what) from e
    except UnicodeEncodeError as e:
        raise UsageError(f"not a text that can be stored: {e.object!r}") from e
