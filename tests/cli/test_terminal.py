"""What a model, a tool or a stranger writes cannot act on a terminal; and outputs that are odd or gone crash nothing."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cli.shell import Shell

OWN_STYLE = re.compile(rb"\x1b\[[\d;]*m")  # the colours of rich's tables
COMMANDS = [
    ("runs",),
    ("show", "run-1"),
    ("show", "run-1", "--messages", "--journal"),
    ("inbox",),
    ("resume", "run-1", "--app", "support"),
    ("approve", "run-1", "--note", "\x1b[2K\r\u202e"),
]


def on_terminal(shell: Shell, *args: str) -> tuple[int, bytes]:
    """Run it with a pseudo-terminal as stdout and stderr; what the terminal would have read."""
    master, slave = pty.openpty()
    process = shell.start(*args, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    read = b""
    try:
        while select.select([master], [], [], 60)[0]:
            try:
                piece = os.read(master, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not piece:
                break
            read += piece
        return process.wait(timeout=60), read
    finally:
        process.kill()
        process.wait()
        os.close(master)


def dangerous(shown: bytes) -> list[str]:
    """Characters that a terminal would act on, our own line ends and colours aside."""
    text = OWN_STYLE.sub(b"", shown).replace(b"\r\n", b"\n").decode("utf-8")
    return [c for c in text if (ord(c) < 0x20 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u200b\U000e0041"]


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_terminal_escape_in_the_approval_prompt(shell: Shell, args: tuple[str, ...]) -> None:
    shell.env["PLAN"] = "nasty"
    shell.story(plan="nasty")
    code, shown = on_terminal(shell, *args)
    assert code in {0, 3} and dangerous(shown) == []
    if args[0] != "runs":
        assert b"\\x1b[2K" in shown or b"\\u001b[2K" in shown, shown


def test_no_added_lines_and_no_markup(shell: Shell) -> None:
    shell.env["PLAN"] = "nasty"
    shell.story(plan="nasty")
    shell.outlast("approve", "run-1")
    done = shell.outlast("resume", "run-1", "--app", "support")
    assert done.code == 0
    assert [line.split()[1] for line in done.lines if line.startswith("checkpoint")][:2] == ["3", "4"]
    assert "[bold]x[/bold]" in done.out and "\x1b" not in done.out


def test_errors_logs_and_tracebacks_are_escaped_too(shell: Shell) -> None:
    for args in (("show", "run\x1b[31m\u202e"), ("runs", "--app", "x\x1b]0;title\x07"), ("runs", "--status", "\x9b31m"), ("\x1b[2K",)):
        code, shown = on_terminal(shell, *args)
        assert code in {1, 2} and dangerous(shown) == [], shown
    shell.write("bad.py", "raise RuntimeError('\\x1b[2K\\x9b31m')\n")
    code, shown = on_terminal(shell, "runs", "--app", "bad", "--debug")
    assert code == 2 and dangerous(shown) == [] and b"Traceback" in shown


def test_documents_are_ascii(shell: Shell) -> None:
    shell.story(plan="nasty")
    done = shell.outlast("inbox", "--json")
    [gate] = done.documents
    assert done.out.isascii() and "\x1b" not in done.out and "\x7f" not in done.out
    assert gate["args"]["message"].startswith("a\r\x1b[2K")


@pytest.mark.parametrize(
    "env", [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}], ids=["C", "ascii"]
)
def test_ascii_output_does_not_crash(shell: Shell, env: dict[str, str]) -> None:
    shell.env |= env
    shell.story(plan="nasty")
    for args in (("inbox",), ("show", "run-1", "--messages"), ("runs",), ("--help",), ("show", "n\u00f6pe")):
        done = shell.outlast(*args)
        assert done.code in {0, 2} and "internal error" not in done.err, done
    assert "\\xe9" in shell.outlast("inbox").out


@pytest.mark.parametrize("args", [("runs",), ("runs", "--json"), ("run", "support", "Hi", "--id", "run-2")], ids=" ".join)
def test_a_reader_who_has_gone_is_no_error(shell: Shell, args: tuple[str, ...]) -> None:
    shell.env["PLAN"] = "short"
    shell.story(plan="short", code=0)
    read, write = os.pipe()
    os.close(read)
    process = shell.start(*args, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    if args[0] == "run":
        assert shell.outlast("show", "run-2", "--json").documents[0]["status"] == "done", "driven to its end all the same"


@pytest.mark.parametrize("args", [("watch", "run-1"), ("tail",)], ids=" ".join)
def test_what_only_follows_ends_with_its_reader(shell: Shell, args: tuple[str, ...]) -> None:
    """`outlast tail | head -1` comes back: the first write that nobody reads is the last."""
    shell.story()
    read, write = os.pipe()
    os.close(read)
    process = shell.start(*args, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    if args == ("tail",):
        assert process.stderr and b"following" in process.stderr.readline()
        shell.outlast("approve", "run-1")
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


@pytest.mark.parametrize("args", ["runs", "runs --json", "run support Hi --id run-2", "run support Hi --id run-3 --json"])
def test_closed_stdout(shell: Shell, args: str) -> None:
    shell.env["PLAN"] = "short"
    shell.story(plan="short", code=0)
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m outlast {args} >&-', sys.executable],
        cwd=shell.folder,
        env=shell.env,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_is_said(shell: Shell) -> None:
    shell.story()
    with Path("/dev/full").open("wb") as full:
        process = shell.start("runs", stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and b"No space left on device" in err and b"Traceback" not in err


@pytest.mark.parametrize("columns", [200, 100, 60, 30])
def test_a_table_folds_and_cuts_nothing(shell: Shell, columns: int) -> None:
    shell.story()
    shell.env["COLUMNS"] = str(columns)
    code, shown = on_terminal(shell, "runs")
    text = OWN_STYLE.sub(b"", shown).decode()
    assert code == 0 and "…" not in text
    assert Counter("".join(text.split())) == Counter("".join(shell.outlast("runs").out.split())), "every character is there"
    if columns >= 100:
        assert "waiting_for_approval" in text, "only the last column is folded where there is room"
