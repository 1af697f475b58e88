"""Everything that the command line prints goes through here, and nothing that is printed can act on a terminal.

Rules
1. Text for people: `say`, `table`. Documents for programs: `document`. Nobody else writes to stdout or stderr.
2. What could move the cursor, hide or reorder text is shown as an escape (`\\x1b`, `\\u202e`); only newline and tab pass, and those only
   where a text may have several lines: `line()` escapes them too, so that data cannot add lines of its own.
3. rich is given plain `Text` and no markup; an output that cannot show a character gets its escape; a reader who has gone is no error.
4. What is cut says so: `...` in the one-line summary of a checkpoint, elsewhere how many characters are missing and where they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

LINE_WIDTH = 60  # of a checkpoint's summary: fits 100 columns with its number and status
STATUS_WIDTH = 20  # waiting_for_approval; two spaces follow
LAST_COLUMN = 16  # of a table on a terminal, at least; below that every column folds
VALUE_WIDTH = 2000  # of one argument in a list; the whole is one command away

# Control (Cc) but \t and \n, format (Cf: bidi, zero-width, tags), lone surrogates (Cs), line and paragraph separators, and the letters
# and marks that are drawn as nothing: fillers, joiners, variation selectors (FE0E and FE0F choose between text and emoji: they stay).
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)

_documents: int | None = None  # the file descriptor that only documents are written to, once `documents_only` was called
_gone: set[int] = set()  # outputs whose reader has gone


# ---- escaping ---------------------------------------------------------------------------------------------------------------


def safe(text: str) -> str:
    """The text with every character that could act on a terminal as its escape; newlines and tabs stay."""
    return _UNSAFE.sub(_escape, text)


def line(text: str) -> str:
    """The same on one line: newlines and tabs are escaped too."""
    return safe(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# ---- printing ---------------------------------------------------------------------------------------------------------------


def say(text: str = "", *, err: bool = False) -> None:
    """Print text for people, escaped, and flush it. Raises OSError where it cannot be written and the reader is still there."""
    _write(safe(text) + "\n", err=err)


def document(value: Mapping[str, Any], *, err: bool = False) -> None:
    """Print one JSON document on a line of its own. ASCII only, so it is safe on every terminal and in every encoding."""
    _write(json.dumps(value, ensure_ascii=True, allow_nan=False).replace("\x7f", "\\u007f") + "\n", err=err)


def documents_only() -> None:
    """From now on stdout has documents only: what user code and its child processes print there goes to stderr."""
    global _documents
    if _documents is not None or sys.stdout is None:
        return
    sys.stdout.flush()
    try:
        _documents = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed: nothing to keep apart
        return


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Aligned columns: by rich on a terminal (folded, never cut), plain elsewhere."""
    cells = [[line(cell) for cell in row] for row in rows]
    widths = [max(len(c) for c in column) for column in zip(headers, *cells, strict=True)]
    if not _terminal(sys.stdout):
        for row in [list(headers), *cells]:
            _write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
        return
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    room = Console(file=sys.stdout).width
    left_for_last = room - sum(widths[:-1]) - 2 * len(headers)
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for number, header in enumerate(headers, 1):  # where there is room the last one folds and the others stay whole
        whole = left_for_last >= LAST_COLUMN and number < len(headers)
        drawn.add_column(Text(header), overflow="fold", min_width=widths[number - 1] if whole else None)
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    drawing = StringIO()
    Console(file=drawing, force_terminal=True, width=room, markup=False, emoji=False, highlight=False).print(drawn)
    _write(drawing.getvalue())


def on_terminal() -> bool:
    return _terminal(sys.stdout)


@contextlib.contextmanager
def live() -> Iterator[Callable[[Sequence[str], Sequence[str], Sequence[str]], None]]:
    """A part of the terminal that is drawn anew: top, middle (the end of it where there is no room), bottom. The last drawing stays."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    with Live(Text(), console=console, auto_refresh=False, vertical_overflow="crop") as drawn:

        def draw(top: Sequence[str], middle: Sequence[str], bottom: Sequence[str]) -> None:
            room = max(console.height - len(top) - len(bottom) - 1, 1)
            lines = [line(each) for each in (*top, *middle[-room:], *bottom)]
            drawn.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)

        yield draw


def write_log(text: str) -> None:
    """A line of the log, on stderr; its formatter has escaped it. An output that fails is no reason to stop working."""
    try:
        _write(text + "\n", err=True)
    except OSError:
        return


def _terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _write(text: str, *, err: bool = False) -> None:
    fd = 2 if err else 1
    stream = sys.stderr if err else sys.stdout
    if fd in _gone or stream is None:  # None: closed before we began
        return
    try:
        data = text.encode(stream.encoding or "ascii", "backslashreplace")
        stream.flush()
        _write_all(_documents if _documents is not None and not err else stream.fileno(), data)
    except BrokenPipeError:
        _gone.add(fd)
        _silence(stream)


def unread() -> bool:
    """Whoever read stdout is gone: for a command that does nothing but write there, the end."""
    return 1 in _gone


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _silence(stream: TextIO) -> None:
    """Nobody reads any more: what user code and the interpreter's exit still write there must not fail either."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


# ---- words --------------------------------------------------------------------------------------------------------------------


def checkpoint_line(seq: int, status: str, message: Mapping[str, Any]) -> str:
    return line(f"checkpoint {seq}  {status:<{STATUS_WIDTH}}  {cut(summary(message))}")


def cut(text: str) -> str:
    return text if len(text) <= LINE_WIDTH else text[: LINE_WIDTH - 3] + "..."


def summary(message: Mapping[str, Any]) -> str:
    """One message on one line: what the model asks for, what tools gave, or who said what. Not cut, not escaped."""
    blocks = message.get("content") or []
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    if calls := [block for block in blocks if block.get("type") == "tool_use"]:
        return "model asks for " + ", ".join(f"{call.get('name')}({arguments(call.get('input'))})" for call in calls)
    if results := [block for block in blocks if block.get("type") == "tool_result"]:
        return "tool result: " + ", ".join(one_line(result.get("content")) for result in results)
    who = "user" if message.get("role") == "user" else "model"
    return f"{who}: {one_line(blocks)}"


def arguments(args: Any) -> str:
    if not isinstance(args, Mapping):
        return json_text(args)
    return ", ".join(f"{name}={json_text(value)}" for name, value in args.items())


def one_line(content: Any) -> str:
    """A text, or content blocks, without line breaks. Blocks that are no text are named; thinking only where there is nothing else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return " ".join(content.split())
    if not isinstance(content, list):
        return json_text(content)
    shown = [b for b in content if not str(b.get("type")).endswith("thinking")] or content
    return " ".join(" ".join(str(b.get("text", "")).split()) if b.get("type") == "text" else f"[{b.get('type')}]" for b in shown)


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def value(value: Any, where: str | None = None) -> str:
    """A value as JSON on one line. Over 2,000 characters the middle is left out if `where` says how to see all of it."""
    text = json_text(value)
    if where is None or len(text) <= VALUE_WIDTH:
        return text
    head, tail = VALUE_WIDTH * 3 // 4, VALUE_WIDTH // 4  # what is dangerous likes to stand at the end
    return f"{text[:head]} ... {len(text) - head - tail:,} more characters here: {where} ... {text[-tail:]}"


def instant(at: datetime | None) -> str:
    return "" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
