"""Where a setting comes from: flag, then argument, then environment, then the nearest pyproject.toml, then the default.

Rules
1. Settings say *where*, never *who may* or *how much*: a container without the file must not be a looser one. So the file knows the keys
   of `FILE_KEYS` and refuses every other, secrets included.
2. A value that cannot be read is a UsageError that names its origin; nothing falls back to the next origin. An empty one counts as absent.
3. A password is in `StoreURL.url` only, which no `repr` shows; for people there is `shown`.
4. Nothing is read at import. What is asked for is read anew each time: once per process, in practice.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from outlast.errors import UsageError

DEFAULT_STORE = "sqlite:///outlast.db"
DEFAULT_SCHEMA = "outlast"
DEFAULT_CONCURRENCY = 10  # runs at once in one worker
NO_MOST = 1e9  # whatever is counted or waited for here, this is more than anybody means; and it keeps infinities out
DEFAULT_GRACE = timedelta(seconds=25)  # below the 30 s that Docker and Kubernetes wait between SIGTERM and SIGKILL
DEFAULT_WEB_HOST = "127.0.0.1"
DEFAULT_WEB_PORT = 8142
MIN_WEB_TOKEN = 32  # characters: 256 bits are 43 of them as token_urlsafe writes it
FILE_KEYS = ("store", "app", "engine", "log_level", "log_format")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS = ("text", "json")

_SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")  # Postgres cuts identifiers at 63 bytes
_URL_EXAMPLES = "sqlite:///relative.db, sqlite:////absolute.db, postgresql://USER@HOST/DB?schema=outlast"


@dataclass(frozen=True, slots=True)
class Found:
    """A setting's value and where it was found, in words for an error message."""

    value: str
    origin: str
    folder: Path | None = None  # of the file that says it


@dataclass(frozen=True, slots=True)
class StoreURL:
    """A store's address, taken apart."""

    kind: Literal["sqlite", "postgres"]
    url: str = field(repr=False)  # what the driver gets, password and all; `schema` is taken out of it
    shown: str  # for people, without a password
    path: Path | None = None  # SQLite: the file, absolute; None: in memory
    schema: str = ""  # Postgres


# ---- each setting ---------------------------------------------------------------------------------------------------------


def store(argument: str | os.PathLike[str] | None = None) -> StoreURL:
    """The store to use; `--store` comes as the argument. A path that the file names is relative to the file, not to this directory."""
    if argument is not None:
        return parse_store(argument, origin="store")
    if value := os.environ.get("OUTLAST_STORE"):
        return parse_store(value, origin="OUTLAST_STORE")
    if found := from_file("store"):
        file = nearest_file()
        return parse_store(found.value, origin=found.origin, folder=file.parent if file else None)
    return parse_store(DEFAULT_STORE)


def app(flag: str | None = None) -> Found | None:
    """MODULE:ATTR of the application, or None where nobody named one."""
    return _found("app", flag, "--app", "OUTLAST_APP", in_file=True)


def engine(argument: str | None = None) -> Found | None:
    """The URL of the engine that takes the steps, or None: the built-in worker does."""
    if argument is not None:
        return Found(argument, "engine")
    return _found("engine", None, "--engine", "OUTLAST_ENGINE", in_file=True)


def who(flag: str | None = None) -> str:
    """The person who acts: `--by`, OUTLAST_BY, the login name. Raises UsageError with none of them."""
    if flag is not None and not flag.strip():  # an unset shell variable must not sign with the login name
        raise UsageError("--by is empty", hint="give --by NAME, or leave it out for OUTLAST_BY or the login name")
    if found := _found("by", flag, "--by", "OUTLAST_BY"):
        return found.value
    import getpass

    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):  # no LOGNAME or USER, and the user id has no name on this machine
        name = ""
    if not name:
        raise UsageError("nobody to name as the one who acts", hint="give --by NAME, or set OUTLAST_BY")
    return name


def concurrency(flag: int | None = None) -> int:
    return int(_number(flag, "--concurrency", "OUTLAST_CONCURRENCY", DEFAULT_CONCURRENCY, least=1))


def grace(flag: timedelta | None = None) -> timedelta:
    """How long running steps may go on once a worker was asked to end. OUTLAST_GRACE_S is in seconds."""
    seconds = flag.total_seconds() if flag is not None else None
    return timedelta(seconds=_number(seconds, "--grace", "OUTLAST_GRACE_S", DEFAULT_GRACE.total_seconds(), whole=False))


def health_port(flag: int | None = None) -> int | None:
    """The port of the health pages (0: any free one), or None: off."""
    off = -1
    port = int(_number(flag, "--health-port", "OUTLAST_HEALTH_PORT", off, most=65535))
    return None if port == off else port


def web_host(flag: str | None = None) -> str:
    found = _found("host", flag, "--host", "OUTLAST_WEB_HOST")
    return found.value if found else DEFAULT_WEB_HOST


def web_port(flag: int | None = None) -> int:
    """The page's port (0: any free one)."""
    return int(_number(flag, "--port", "OUTLAST_WEB_PORT", DEFAULT_WEB_PORT, most=65535))


def web_token() -> str | None:
    """The token of the page, or None. Raises UsageError for one that could be guessed. It stands in no message."""
    token = os.environ.get("OUTLAST_WEB_TOKEN") or None
    if token is not None and (len(token) < MIN_WEB_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
        raise UsageError(
            f"OUTLAST_WEB_TOKEN must be at least {MIN_WEB_TOKEN} visible ASCII characters",
            hint="python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return token


def web_url() -> str | None:
    """The address under which people open the page, without a slash at its end; also the base of a notice's link. None: not said."""
    value = os.environ.get("OUTLAST_WEB_URL")
    if not value:
        return None
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise UsageError(f"OUTLAST_WEB_URL is {without_password(value)!r}: it must be like https://outlast.example.org")
    return value.rstrip("/")


def log_level(flag: str | None = None) -> str:
    found = _found("log_level", flag, "--log-level", "OUTLAST_LOG_LEVEL", in_file=True)
    return _one_of(found, LOG_LEVELS) or "info"


def log_format(flag: str | None = None) -> str | None:
    """`text` or `json`; None: as the output is a terminal or not."""
    found = _found("log_format", flag, "--log-format", "OUTLAST_LOG_FORMAT", in_file=True)
    return _one_of(found, LOG_FORMATS)


def _found(name: str, flag: str | None, flag_name: str, variable: str, *, in_file: bool = False) -> Found | None:
    if flag:
        return Found(flag, flag_name)
    if value := os.environ.get(variable):
        return Found(value, variable)
    return from_file(name) if in_file else None


def _one_of(found: Found | None, allowed: tuple[str, ...]) -> str | None:
    if found is None:
        return None
    value = found.value.lower()
    if value not in allowed:
        raise UsageError(f"{found.origin} is {found.value!r}: it must be one of {', '.join(allowed)}")
    return value


def _number(flag: float | None, flag_name: str, variable: str, default: float, *, whole: bool = True, least: float = 0,
            most: float = NO_MOST) -> float:  # fmt: skip
    value, origin = flag, flag_name
    if value is None:
        text = os.environ.get(variable)
        if not text:
            return default
        origin = variable
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            raise UsageError(f"{variable} is {text!r}: it must be a {'whole ' if whole else ''}number") from None
    if not least <= value <= most:
        at_most = f" and at most {most:g}" if most < NO_MOST else ""
        raise UsageError(f"{origin} is {value:g}: it must be at least {least:g}{at_most}")
    return value


# ---- the file ---------------------------------------------------------------------------------------------------------------


def nearest_file(start: Path | None = None) -> Path | None:
    """The nearest pyproject.toml in this directory or above, whether or not it speaks of us."""
    here = (start or Path.cwd()).absolute()
    return next((file for folder in (here, *here.parents) if (file := folder / "pyproject.toml").is_file()), None)


def from_file(name: str, start: Path | None = None) -> Found | None:
    """One key of `[tool.outlast]`. Raises UsageError for a file that cannot be read and for keys that do not belong there."""
    file = nearest_file(start)
    if file is None:
        return None
    table = _table(file)
    value = table.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise UsageError(f"[tool.outlast] {name} in {file} must be a string, not {type(value).__name__}")
    return Found(value, f"[tool.outlast] {name} in {file}", file.parent)


def _table(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError) as e:
        raise UsageError(f"{file} cannot be read: {e}") from None
    table = tool.get("outlast", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise UsageError(f"[tool.outlast] in {file} must be a table")
    if unknown := sorted(table.keys() - set(FILE_KEYS)):
        raise UsageError(
            f"[tool.outlast] in {file} has no setting {unknown[0]!r}: there are {', '.join(FILE_KEYS)}",
            hint="roles, limits and prices are arguments in Python; secrets are environment variables",
        )
    return table


# ---- store URLs ---------------------------------------------------------------------------------------------------------------


def parse_store(value: str | os.PathLike[str], *, origin: str = "store", folder: Path | None = None) -> StoreURL:
    """Take a store's address apart. What is no URL is a SQLite file's path.

    Args:
        folder: what a relative path is relative to; the current directory otherwise.
    Raises:
        UsageError: it is neither. The message holds no password.
    """
    text = os.fspath(value)
    if isinstance(value, os.PathLike):
        return _sqlite(str(text), folder)
    scheme, colon, rest = text.partition(":")
    if colon and rest.startswith("//"):
        if scheme == "sqlite":
            return _sqlite_url(text, origin, folder)
        if scheme in {"postgres", "postgresql"}:
            return _postgres_url(text, origin)
    looks_like_url = bool(colon) and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", scheme)
    looks_like_dsn = re.search(r"\b(?:host|dbname|password)\s*=", text)  # the other way to address Postgres, with a password in it
    if looks_like_url or looks_like_dsn or not text or "\0" in text:
        raise UsageError(f"{origin} is no store's address: {without_password(text)!r}", hint=f"like these: {_URL_EXAMPLES}")
    return _sqlite(text, folder)


def _sqlite_url(text: str, origin: str, folder: Path | None) -> StoreURL:
    rest = text.removeprefix("sqlite://")
    if not rest.startswith("/") or rest == "/" or "\0" in rest:
        raise UsageError(
            f"{origin} names no file: {text!r}", hint="three slashes and a relative path, or four: sqlite:////var/lib/agent.db"
        )
    if "?" in rest:
        raise UsageError(f"{origin} has options after '?', and SQLite stores take none: {text!r}")
    return _sqlite(rest[1:], folder)


def _sqlite(path: str, folder: Path | None) -> StoreURL:
    if path == ":memory:":
        return StoreURL("sqlite", "sqlite:///:memory:", "sqlite:///:memory:")
    file = (folder or Path.cwd()) / Path(path).expanduser()
    return StoreURL("sqlite", f"sqlite:///{file}", f"sqlite:///{file}", path=file)


def _postgres_url(text: str, origin: str) -> StoreURL:
    parts = urlsplit(text)
    query = parse_qsl(parts.query, keep_blank_values=True)
    schemas = [v for name, v in query if name == "schema"]
    schema = schemas[-1] if schemas else DEFAULT_SCHEMA
    if not _SCHEMA.fullmatch(schema):
        raise UsageError(f"{origin}: schema={schema!r} is no plain name of letters, digits and '_'")
    if not parts.netloc and not any(name == "host" for name, _ in query) and not parts.path.strip("/"):
        raise UsageError(f"{origin} names neither host nor database: {without_password(text)!r}", hint=f"like these: {_URL_EXAMPLES}")
    kept = [(name, v) for name, v in query if name != "schema"]
    hidden = [(name, "***" if "password" in name else v) for name, v in kept]
    place = f"postgresql://{parts.netloc}{parts.path}"
    url = place + (f"?{urlencode(kept, quote_via=quote)}" if kept else "")
    shown = f"{place}?{urlencode([*hidden, ('schema', schema)], quote_via=quote, safe='*/')}"
    return StoreURL("postgres", url, without_password(shown), schema=schema)


def without_password(text: str) -> str:
    """The text with what looks like a URL's password as `***`."""
    text = re.sub(r"//([^/:@\s]*):\S*@", r"//\1:***@", text)  # greedy: a password may hold '/', ':' and '@'
    return re.sub(r"(password\s*=\s*)(?:'[^']*'|[^\s&]+)", r"\1***", text)
