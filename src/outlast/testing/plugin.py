"""The pytest plugin: the fixture `crash_matrix`.

Rule: pytest loads this in every project that has the package installed, so it imports nothing of it before the fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from outlast.testing.crashmatrix import CrashMatrix, CrashReport


@pytest.fixture
def crash_matrix(tmp_path_factory: pytest.TempPathFactory) -> CrashMatrix:
    """Kill an agent at every crash point and compare: `crash_matrix(agent, input, model=..., deps=..., observe=...).assert_ok()`.

    The cases' folders are kept where pytest keeps its temporary ones.
    """
    from outlast.testing.crashmatrix.matrix import crash_matrix as matrix

    def crash_matrix(*args: Any, **kwargs: Any) -> CrashReport:
        return matrix(*args, folder=tmp_path_factory.mktemp("crash"), **kwargs)

    return crash_matrix
