"""`init`: a folder to begin with. Its files stand in `project/`, each with `.txt` behind its name; nothing of them is run here."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli import render
from outlast.cli.options import Options, command
from outlast.errors import UsageError

# Our file -> theirs; the order is the one in which a person would read them.
FILES = {
    "README.md.txt": "README.md",
    "agent.py.txt": "agent.py",
    "tools.py.txt": "tools.py",
    "shop.py.txt": "shop.py",
    "world.py.txt": "world.py",
    "script.json.txt": "script.json",
    "test_agent.py.txt": "test_agent.py",
    "pyproject.toml.txt": "pyproject.toml",
    "gitignore.txt": ".gitignore",
}
NAME = re.compile(r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")


def register(cli: typer.Typer) -> None:
    command(cli, "init")(init)


def init(options: Options, *, name: Annotated[str, typer.Argument(metavar="NAME", help="of the agent; the folder is made here")]) -> int:
    """Make a project: an agent, its tools, their tests and a crash test."""
    if not NAME.match(name):
        raise UsageError(f"NAME is {name!r}: a letter, then letters, digits, '-' or '_', 64 at most")
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} is there already and not an empty folder: nothing was written", hint="another NAME, or another directory"
        )
    folder.mkdir(exist_ok=True)
    made = [write(folder, ours, theirs, name) for ours, theirs in FILES.items()]
    if options.json:
        render.document({"type": "project", "name": name, "folder": str(folder.resolve()), "files": made})
    else:
        render.say("\n".join(f"{folder}/{file}" for file in made) + f"\n\ngo on with\n  cd {folder} && pytest -q")
    return 0


def write(folder: Path, ours: str, theirs: str, name: str) -> str:
    text = (resources.files("outlast.cli") / "project" / ours).read_text(encoding="utf-8")
    text = text.replace("{name}", name).replace("{package}", name.lower().replace("_", "-"))
    (folder / theirs).write_text(text, encoding="utf-8")
    return theirs
