"""The documents are true where a machine can tell: the tutorial is played as it stands, links lead to files, and the reference names every
command, option, variable, view and column that the code has.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest
import typer

from outlast import Agent, Outlast, approval, settings, tool
from outlast.cli import build
from outlast.documents import entry_document
from outlast.models import ScriptedModel
from outlast.stores.sqlite.store import SQLiteStore

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    found = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    return found + sorted(DOCS.rglob("*.md")) + sorted((ROOT / "examples").rglob("*.md"))


# --- links ----------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for target in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    assert not broken_links(page)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A part, here\n[here](page.md#a-part-here) [gone](nowhere.md#part) [out](https://example.org) ![picture](none.png) [no](#other)"
    )
    assert broken_links(page) == ["nowhere.md#part", "none.png", "#other"]


def test_every_page_is_in_the_index() -> None:
    index = DOCS / "README.md"
    linked = {(DOCS / t.split("#")[0]).resolve() for t in LINK.findall(index.read_text(encoding="utf-8")) if "://" not in t}
    assert not [str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if p != index and p.resolve() not in linked]


# --- the tutorial ---------------------------------------------------------------------------------------------------------


def expected_code(line: str) -> int:
    said = re.search(r"# exit code (\d+)$", line)
    return int(said[1]) if said else 0


def test_tutorial_as_it_stands(tmp_path: Path) -> None:
    """Each `sh` line runs and ends as it says; each line of a `text` block is in the output of the `sh` block before it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTLAST_", "ANTHROPIC_"))}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "OUTLAST_BY": "priya", "COLUMNS": "200"}
    blocks = FENCE.findall((DOCS / "tutorial.md").read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks].count("sh") >= 5
    output = ""
    for kind, body in blocks:
        if kind == "python":
            (tmp_path / "support.py").write_text(body, encoding="utf-8")
        elif kind == "sh":
            output = ""
            for line in body.splitlines():
                done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
                code = 128 + signal.SIGKILL if done.returncode == -signal.SIGKILL else done.returncode
                assert code == expected_code(line), f"{line}\n{done.stdout}{done.stderr}"
                output += done.stdout
        else:
            assert kind == "text"
            assert not [line for line in body.splitlines() if line not in output], output
    assert (tmp_path / "sent.log").read_text() == "run-kite-142:toolu_02\n", "one reply"


# --- the reference against the code -------------------------------------------------------------------------------------------


def options_of_commands() -> dict[str, set[str]]:
    """`store check` -> its long options, those of every command left out."""
    found: dict[str, set[str]] = {}

    def walk(command: object, name: str) -> None:
        for child, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {child}".strip())
        if not hasattr(command, "commands"):
            flags = {o for p in getattr(command, "params", ()) for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
            found[name] = flags - {"--help", "--store", "--app", "--json", "--debug", "--log-level", "--log-format"}

    walk(typer.main.get_command(build()), "")
    return found


def test_reference_names_every_command_and_option() -> None:
    text = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    commands = options_of_commands()
    assert len(commands) > 25
    rows = {match[1]: match[0] for match in re.finditer(r"^    outlast ((?:store )?[a-z-]+)\b.*(?:\n {8,}.*)*", text, re.MULTILINE)}
    assert sorted(rows) == sorted(commands)
    assert not [(name, flag) for name, flags in commands.items() for flag in flags if not re.search(rf"{flag}\b(?!-)", rows[name])]
    named = {name: set(re.findall(r"--[a-z][a-z-]+", row)) for name, row in rows.items()}
    assert not [(name, flag) for name, flags in named.items() for flag in flags - commands[name]], "an option that is not there"


def test_reference_names_every_variable() -> None:
    text = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    source = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "src" / "outlast").rglob("*.py") if "soak" not in p.name)
    used = set(re.findall(r"OUTLAST_[A-Z_]*[A-Z]", source))
    assert used == set(re.findall(r"OUTLAST_[A-Z_]*[A-Z]", text))
    for default in (settings.DEFAULT_STORE, settings.DEFAULT_WEB_HOST, settings.DEFAULT_WEB_PORT, settings.DEFAULT_CONCURRENCY):
        assert str(default) in text
    assert not [key for key in settings.FILE_KEYS if f"`{key}`" not in text]


def test_reference_names_every_view_and_its_columns(tmp_path: Path) -> None:
    text = (REFERENCE / "sql.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| (.+) \|$", text, re.MULTILINE)
    said: dict[str, list[str]] = {}
    for names, columns in rows:
        same = re.fullmatch(r"as `(\w+)`", columns)
        said |= {view: said[same[1]] if same else columns.strip("`").split(", ") for view in re.findall(r"\w+", names)}
    file = tmp_path / "a.db"
    store = SQLiteStore(file)
    store.migrate()
    store.close()
    db = apsw.Connection(str(file))
    views = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'view'")]
    there = {view: [row[1] for row in db.execute(f"PRAGMA table_info({view})")] for view in views}
    db.close()
    assert said == there


def documents_of(page: Path) -> list[dict[str, Any]]:
    """Every JSON document in its fences."""
    found, decoder = [], json.JSONDecoder()
    for kind, body in FENCE.findall(page.read_text(encoding="utf-8")):
        rest = body.strip() if kind == "json" else ""
        while rest:
            document, end = decoder.raw_decode(rest)
            found.append(document)
            rest = rest[end:].lstrip()
    return found


def test_reference_names_every_key_of_the_documents(tmp_path: Path) -> None:
    @tool(effect="idempotent", gate=approval(to="support-lead", within=None))
    def reply(text: str) -> str:
        """Send a reply."""
        return text

    model = ScriptedModel([[{"type": "tool_use", "id": "toolu_01", "name": "reply", "input": {"text": "Hello."}}], "Done."])
    agent = Agent("support", model=model, tools=[reply])
    with Outlast(tmp_path / "a.db", agents=[agent]) as app:
        run = app.run_sync(agent, "Answer.", run_id="run-1")
        checkpoint = next(app.checkpoints("run-1"))
        entry = entry_document("run-1", next(iter(app.journal("run-1"))))
    said = {d["type"]: d for d in documents_of(REFERENCE / "documents.md")}
    for document in (run.to_dict(), run.gates[0].to_dict(), checkpoint.to_dict(), entry):
        assert sorted(said[document["type"]]) == sorted(document)
