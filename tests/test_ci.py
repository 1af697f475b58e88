"""With CI=1 whatever was left out fails the session and is named; without it, it does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LEFT_OUT = {
    "skip": "import pytest\ndef test_it(): pytest.skip('no gcc')\n",
    "mark": "import pytest\n@pytest.mark.skipif(True, reason='no gcc')\ndef test_it(): pass\n",
    "xfail": "import pytest\n@pytest.mark.xfail(reason='no gcc')\ndef test_it(): assert False\n",
    "module": "import pytest\npytest.importorskip('no_such_module', reason='no gcc')\ndef test_it(): pass\n",
}


def session(folder: Path, ci: str) -> subprocess.CompletedProcess[str]:
    """A pytest session with this repository's conftest.py, in a folder of its own."""
    (folder / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder), str(folder)]
    return subprocess.run(
        command, env=os.environ | {"CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_left_out_fails_in_ci(tmp_path: Path, kind: str) -> None:
    (tmp_path / "test_one.py").write_text(LEFT_OUT[kind])
    (tmp_path / "test_two.py").write_text("def test_passes(): pass\n")
    done = session(tmp_path, ci="1")
    assert done.returncode == 1, done.stdout
    assert "left out, which fails with CI=1" in done.stdout
    assert "test_one.py" in done.stdout.split("left out")[1] and "no gcc" in done.stdout.split("left out")[1]
    assert session(tmp_path, ci="").returncode == 0


def test_nothing_left_out_passes_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_passes(): pass\n")
    done = session(tmp_path, ci="1")
    assert done.returncode == 0 and "left out" not in done.stdout
