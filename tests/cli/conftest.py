"""A folder to run `outlast` in, as a person would."""

from pathlib import Path

import pytest

from cli.shell import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)
