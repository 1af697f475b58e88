"""The options of every command: both positions, which store and app they mean, and what `--json` and `--debug` do to errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.shell import SUPPORT, Shell
from outlast.cli import main

COMMANDS = "run resume runs show inbox approve reject verify send cancel retry worker".split()


@pytest.mark.parametrize(
    "args",
    [
        ("--store", "sqlite:///x.db", "--json", "runs"),
        ("runs", "--json", "--store", "sqlite:///x.db"),
        ("--json", "runs", "--store=sqlite:///x.db"),
        ("--store", "sqlite:///y.db", "runs", "--json", "--store", "sqlite:///x.db"),
    ],
)
def test_before_or_after_the_command(shell: Shell, args: tuple[str, ...]) -> None:
    shell.story()
    (shell.folder / "outlast.db").rename(shell.folder / "x.db")
    assert [d["run_id"] for d in shell.outlast(*args).documents] == ["run-1"]


@pytest.mark.parametrize("args", [("--json", "store", "check"), ("store", "--json", "check"), ("store", "check", "--json")])
def test_in_a_group_too(shell: Shell, args: tuple[str, ...]) -> None:
    shell.story()
    done = shell.outlast(*args)
    assert (done.code, done.documents) == (0, [])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_them(command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main([command, "--help"]) == 0
    text = capfd.readouterr().out
    assert all(option in text for option in ("--store", "--app", "--json", "--debug", "--log-level", "--log-format"))


def test_a_value_that_looks_like_an_option_stays_a_value(shell: Shell) -> None:
    shell.story()
    done = shell.outlast("reject", "run-1", "--note", "--json")
    assert done.code == 0 and done.out.startswith("run-1: "), "the note is the text --json, and no document is printed"


def test_the_app_says_which_store_unless_a_flag_does(shell: Shell) -> None:
    shell.write("support.py", SUPPORT.replace("Outlast(agents", 'Outlast("sqlite:///apps.db", agents'))
    assert shell.outlast("run", "support", "Hi", PLAN="short", OUTLAST_STORE="sqlite:///environment.db").code == 0
    assert sorted(p.name for p in shell.folder.glob("*.db")) == ["apps.db"]
    assert shell.outlast("run", "support", "Hi", "--store", "sqlite:///flag.db", PLAN="short").code == 0
    assert sorted(p.name for p in shell.folder.glob("*.db")) == ["apps.db", "flag.db"]


def test_app_and_store_of_the_file(shell: Shell) -> None:
    shell.write("support.py", SUPPORT)
    shell.write("pyproject.toml", '[tool.outlast]\napp = "support"\nstore = "sqlite:///filed.db"\n')
    assert shell.outlast("run", "Hi", PLAN="short").code == 0
    assert (shell.folder / "filed.db").exists()
    shell.write("pyproject.toml", '[tool.outlast]\napps = "support"\n')
    wrong = shell.outlast("run", "Hi")
    assert wrong.code == 2 and "no setting 'apps'" in wrong.err


def test_reading_needs_no_app_where_the_store_is_named(shell: Shell) -> None:
    shell.story()
    shell.write("broken.py", "1 / 0")
    assert shell.outlast("runs", "--store", "sqlite:///outlast.db", OUTLAST_APP="broken").code == 0
    assert shell.outlast("runs", OUTLAST_APP="broken").code == 2


@pytest.mark.parametrize("args", [("nonsense",), ("runs", "--nonsense"), ("runs", "--limit", "many"), ("show",), ("show", "a", "b"), ()])
def test_usage_errors_are_one_or_two_lines(shell: Shell, args: tuple[str, ...]) -> None:
    done = shell.outlast(*args)
    assert done.code == 2 and done.out == "" and 1 <= len(done.err.splitlines()) <= 2
    documented = shell.outlast(*args, "--json")
    assert documented.code == 2 and documented.out == "" and documented.error["type"] == "usage_error"


def test_errors_as_documents(shell: Shell) -> None:
    shell.story()
    absent = shell.outlast("show", "nope", "--json")
    assert absent.code == 1 and absent.out == "" and absent.error["type"] == "run_not_found" and absent.error["gate"] is None
    assert shell.outlast("approve", "run-1").code == 0
    refused = shell.outlast("reject", "run-1", "--by", "anna", "--note", "no", "--json")
    assert refused.code == 5 and refused.error["type"] == "gate_closed"
    assert refused.error["gate"]["decided_by"] == "priya" and refused.error["run_id"] == "run-1"


def test_an_internal_error_is_one_line_and_debug_shows_more(shell: Shell) -> None:
    shell.write("support.py", SUPPORT + "\nOutlast.runs = lambda self, **kwargs: 1 / 0\n")
    (shell.folder / "outlast.db").touch()
    done = shell.outlast("runs", "--app", "support")
    assert (
        done.code == 1 and done.err == "outlast: internal error: ZeroDivisionError: division by zero (run with --debug for the traceback)\n"
    )
    debugged = shell.outlast("runs", "--app", "support", "--debug")
    assert (
        debugged.code == 1
        and "Traceback" in debugged.err
        and debugged.err.endswith("outlast: internal error: ZeroDivisionError: division by zero\n")
    )


def test_who_acts_must_be_known(shell: Shell) -> None:
    shell.story()
    source = "import getpass\ndef nobody(): raise KeyError('no such user')\ngetpass.getuser = nobody\n"
    shell.write("sitecustomize.py", source)
    done = shell.outlast("approve", "run-1", OUTLAST_BY=None, PYTHONPATH=str(shell.folder))
    assert done.code == 2 and "--by" in done.err
    assert shell.outlast("inbox", "--json").documents, "still open"


@pytest.mark.parametrize("cause", ["missing", "directory", "garbage"])
def test_unwritable_or_missing_directory(shell: Shell, cause: str) -> None:
    """One line with the absolute path and the cause; no traceback."""
    (shell.folder / "a-directory").mkdir()
    shell.write("garbage.db", "this is no database, but a text that is long enough to be read as the beginning of one" * 20)
    path = {"missing": "missing/agent.db", "directory": "a-directory", "garbage": "garbage.db"}[cause]
    for args in (("runs",), ("run", "Hi", "--detach", "--agent", "support")):
        done = shell.outlast(*args, "--store", f"sqlite:///{path}")
        assert done.code in {1, 2} and done.out == "" and str(shell.folder / path) in done.err, done
        assert len(done.err.splitlines()) <= 2


def test_looking_creates_no_file(shell: Shell) -> None:
    for command in ("runs", "inbox"):
        done = shell.outlast(command)
        assert done.code == 0 and "outlast run" in done.out, "an empty state says what to do next"
    for args in (("show", "run-1"), ("approve", "run-1"), ("cancel", "run-1"), ("store", "check")):
        done = shell.outlast(*args)
        assert done.code == 1 and str(shell.folder / "outlast.db") in done.out + done.err
    assert not list(shell.folder.glob("*.db"))


def test_json_keeps_stdout_for_documents(shell: Shell) -> None:
    """Whatever the app prints, and its child processes print, goes to stderr."""
    shell.write("support.py", "import subprocess\nprint('imported')\nsubprocess.run(['echo', 'from a child'])\n" + SUPPORT)
    done = shell.outlast("run", "support", "Hi", "--json", PLAN="short")
    assert done.code == 0 and done.documents[-1]["type"] == "run"
    assert "imported" in done.err and "from a child" in done.err


def test_log_goes_to_stderr_as_json_lines_without_a_terminal(shell: Shell) -> None:
    shell.write(
        "support.py",
        "import logging\n" + SUPPORT + "\nlogging.getLogger('outlast.x').info('hello \\x1b[31m %s', 3, extra={'run_id': 'run-1'})\n",
    )
    done = shell.outlast("runs", "--app", "support")
    [line] = [json.loads(line) for line in done.err.splitlines()]
    assert (line["level"], line["logger"], line["message"], line["run_id"]) == ("info", "outlast.x", "hello \x1b[31m 3", "run-1")
    text = shell.outlast("runs", "--app", "support", "--log-format", "text").err
    assert "hello \\x1b[31m 3  run_id=run-1" in text and "\x1b" not in text
    assert shell.outlast("runs", "--app", "support", "--log-level", "warning").err == ""


def test_version_and_help(shell: Shell) -> None:
    assert shell.outlast("--version").out.startswith("outlast ")
    top = shell.outlast("--help")
    assert top.code == 0 and all(command in top.out for command in COMMANDS)


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """What makes it slow is imports, and those can be counted without a clock."""
    source = (
        "import sys\nfrom outlast.cli import main\nassert main(['--help']) == 0\n"
        "heavy = {'pydantic', 'apsw', 'asyncio', 'anthropic', 'outlast.app', 'outlast.agent', 'outlast.tools'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
