"""The house style that no linter knows, kept by tests over the files that git tracks (or would, once added)."""

import re
import subprocess
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
THIS = "tests/test_tidy.py"
SITE = "https://example.org"  # anybody's: what is tested is how a line names one
LOCKS = ("requirements/", "tests/js/package-lock.json")


@cache
def tracked() -> dict[str, str]:
    """Path from the root -> text, of every text file that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True, timeout=60
    ).stdout
    found = {}
    for name in sorted(set(listing.decode().split("\0")) - {""}):
        file = ROOT / name
        if not file.is_file():
            continue
        try:
            found[name] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # an image, a font
            continue
    return found


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


# --- what a file may not be called -------------------------------------------------------------------------------------
VAGUE = {"utils", "util", "helper", "common", "misc", "manager", "base_classes"}


def vague_name(name: str) -> bool:
    return Path(name).stem in VAGUE


# --- what a line may not hold -------------------------------------------------------------------------------------------
# An address of a package index ties a lock to one place, and a path of somebody's machine ties the repository to it.
PLACES = re.compile(
    r"""(?:files\.pythonhosted|pypi)\.org/(?:simple|packages)|registry\.(?:npmjs\.org|yarnpkg\.com)|--(?:extra-)?index-url\s|--find-links\s
      | "resolved":\s | (?<![\w.])/(?:work|root|Users|home)/\w""",
    re.VERBOSE,
)
# `time.sleep`, and an asyncio.sleep that lasts: 0 only gives way to others.
SLEEPS = re.compile(r"\btime\.sleep\(|\bfrom time import [^\n]*\bsleep\b")
LASTING_SLEEPS = re.compile(r"\basyncio\.sleep\((?!0\))")
# A marker that tells the linter or a type checker to look away says why, on the same line.
WAIVER = re.compile(r"#\s*(?:noqa\b(?::\s*[\w, ]*\d+)?|type:\s*ignore\b(?:\[[\w\-, ]+\])?|pyright:\s*ignore\b(?:\[\w+(?:, ?\w+)*\])?)")


def waives_without_reason(comment: str) -> bool:
    rest = WAIVER.sub("", comment)
    return rest != comment and len(re.sub(r"[\W_]", "", rest)) < 8  # two short words at least


def waives_everything(comment: str) -> bool:
    """Without naming the rule."""
    return re.search(r"#\s*noqa\b(?!:)|#\s*(?:type|pyright):\s*ignore(?!\[)", comment) is not None


def offending(pattern: re.Pattern[str], wanted: Callable[[str], bool]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in tracked().items()
        if wanted(name) and name != THIS
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def python(*folders: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(".py") and name.startswith(folders)


def test_no_vague_file_names() -> None:
    assert not [name for name in tracked() if vague_name(name)]


def test_no_sleep() -> None:
    assert not offending(SLEEPS, python("src/", "tests/", "examples/", "bench/"))
    assert not offending(LASTING_SLEEPS, python("tests/"))


def test_no_place_of_a_machine_or_index() -> None:
    assert not offending(PLACES, lambda _: True)


@pytest.mark.parametrize("judge", [waives_without_reason, waives_everything])
def test_waivers_name_their_rule_and_reason(judge: Callable[[str], bool]) -> None:
    wrong = [
        f"{name}:{line}: {comment}"
        for name, text in tracked().items()
        if name.endswith(".py") and name != THIS
        for line, comment in comments(text)
        if judge(comment)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_lint_ignore_says_why() -> None:
    """Each entry of `ignore` and `per-file-ignores` stands on a line of its own with a comment."""
    text = tracked()["pyproject.toml"]
    lint = tomllib.loads(text)["tool"]["ruff"]["lint"]
    codes = [*lint["ignore"], *(code for codes in lint["per-file-ignores"].values() for code in codes)]
    said = re.findall(r'^    "([A-Z]+\d+)",\s+#\s*\S.{10,}$', text, re.MULTILINE)
    assert sorted(codes) == sorted(said)


def test_every_mypy_exception_says_why() -> None:
    text = tracked()["pyproject.toml"]
    silent = [
        line
        for line in text.splitlines()
        if re.match(r"(?:ignore_missing_imports|ignore_errors|disable_error_code)\b", line) and "#" not in line
    ]
    assert not silent


def test_locks_hold_hashes_for_everything() -> None:
    for lock in ("requirements/core.txt", "requirements/postgres.txt", "requirements/dev.txt", "requirements/bench.txt"):
        blocks = re.split(r"\n(?=\S)", tracked()[lock].strip())
        packages = [b for b in blocks if not b.startswith("#")]
        assert packages
        assert not [b.splitlines()[0] for b in packages if "--hash=sha256:" not in b or "==" not in b]
    core, dev = (set(re.findall(r"^[\w.\-\[\]]+==\S+", tracked()[f"requirements/{n}.txt"], re.MULTILINE)) for n in ("core", "dev"))
    assert core <= dev, core - dev


def test_every_python_file_says_what_it_owns() -> None:
    """A file opens with a docstring, one that only marks a package excepted."""
    silent = [
        name
        for name, text in tracked().items()
        if python("src/", "tests/", "examples/")(name) and text.strip() and not re.match(r'(?:#!.*\n)?(?:#.*\n)*r?"""', text)
    ]
    assert not silent


def test_scripts_are_posix_sh() -> None:
    scripts = {name: text for name, text in tracked().items() if name.startswith(("script/", ".ci/"))}
    assert scripts
    for name, text in scripts.items():
        if name != "script/lib.sh":
            assert text.startswith("#!/bin/sh\n"), name
            assert (ROOT / name).stat().st_mode & 0o111, name
        done = subprocess.run(["sh", "-n", str(ROOT / name)], capture_output=True, text=True, check=False, timeout=10)
        assert done.returncode == 0, done.stderr
        assert not re.search(r"\[\[|\bfunction \w|\blocal \w|<<<|\$'", text), f"{name}: not POSIX"


@pytest.mark.parametrize(
    "line, wrong",
    [
        ("x = 1  # noqa: S101", True),
        ("x = 1  # noqa: S101 - the value was checked above", False),
        ("x = 1  # type: ignore[arg-type]", True),
        ("x = 1  # type: ignore[arg-type]  # the SDK's types are narrower", False),
        ("x = 1  # pyright: ignore[reportX]", True),
        ("x = 1  # why this is one", False),
    ],
)
def test_the_waiver_rule_itself(line: str, wrong: bool) -> None:
    assert any(waives_without_reason(c) for _, c in comments(line)) == wrong


@pytest.mark.parametrize(
    "line, wrong",
    [
        (f"--index-url {SITE}/simple", True),
        (f'"resolved": "{SITE}/x.tgz"', True),
        ("see /home/anna/outlast", True),
        ("see https://docs.python.org/3/library/sqlite3.html", False),
        ("cd examples/kitebase", False),
    ],
)
def test_the_place_rule_itself(line: str, wrong: bool) -> None:
    assert bool(PLACES.search(line)) == wrong
