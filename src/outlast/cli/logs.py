"""Where log records go: to stderr, as text on a terminal and as JSON lines elsewhere, escaped. Only the command line sets this up."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from outlast import settings
from outlast.cli import render
from outlast.cli.options import Options

FIELDS = ("run_id", "seq", "call_id", "worker", "fence")


def configure(options: Options) -> None:
    """Our loggers at the chosen level, those of others from warnings on."""
    level = settings.log_level(options.log_level)
    as_json = (settings.log_format(options.log_format) or ("text" if _on_terminal() else "json")) == "json"
    handler = Handler()
    handler.setFormatter(JSONLines() if as_json else Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.getLogger("outlast").setLevel(level.upper())
    if level == "debug":
        for noisy in ("asyncio", "httpcore", "httpx"):
            logging.getLogger(noisy).setLevel(logging.INFO)
        for tells_urls in ("apprise", "urllib3"):  # those of notices, which hold tokens
            logging.getLogger(tells_urls).setLevel(logging.WARNING)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - a record that cannot be formatted must not end what is being logged
            text = f"a log record of {record.name} could not be formatted"
        render.write_log(text)


class Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        extras = "".join(f"  {name}={value}" for name in FIELDS if (value := getattr(record, name, None)) is not None)
        text = render.line(f"{at} {record.levelname.lower():<7} {record.getMessage()}{extras}")
        if record.exc_info:
            text += "\n" + render.safe(self.formatException(record.exc_info))
        return text


class JSONLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"at": at, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str).replace("\x7f", "\\u007f")
