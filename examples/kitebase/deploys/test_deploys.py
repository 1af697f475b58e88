"""The deploy of version 2 while a run waits, by the command line and with real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpdesk import HelpDesk

HERE = Path(__file__).parent
RUN = "run-kite-142"
LIMIT_S = 120  # each command takes a second or two; more means that something hangs


class Shop:
    """Commands in this folder, on files of their own."""

    def __init__(self, files: Path) -> None:
        self.files = files

    def outlast(self, *args: str, code: int = 0) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("ANTHROPIC_", "OUTLAST_", "KITEBASE_"))}
        done = subprocess.run(
            [sys.executable, "-m", "outlast", *args], cwd=HERE, env=clean | {"KITEBASE_DIR": str(self.files), "PYTHONDONTWRITEBYTECODE": "1"},
            text=True, capture_output=True, timeout=LIMIT_S, check=False)  # fmt: skip
        assert done.returncode == code, (args, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def status(self) -> str:
        status: str = json.loads(self.outlast("show", RUN, "--app", "v1", "--json"))["status"]
        return status

    def replies(self) -> list[tuple[str, str]]:
        """(key, message) of every reply that the customer got."""
        with HelpDesk(self.files / "helpdesk.db")._transaction() as db:
            return list(db.execute("SELECT idempotency_key, message FROM replies"))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """A run of version 1 that waits for the approval of its reply."""
    shop = Shop(tmp_path / "files")
    shop.files.mkdir()
    shop.outlast("run", "v1", "Ticket KITE-142 just came in. Look it up and reply to the customer.", "--id", RUN, code=3)
    return shop


def test_without_the_alias_check_says_no_and_the_run_is_held(shop: Shop) -> None:
    said = shop.outlast("check", "v2", code=1)
    assert RUN in said and "toolu_03" in said and "reply_to_customer" in said
    [group, total] = map(json.loads, shop.outlast("check", "v2", "--json", code=1).splitlines())
    assert (group["outcome"], group["runs"], group["examples"]) == ("held", 1, [{"run_id": RUN, "call_id": "toolu_03"}])
    assert (total["ok"], total["held"]) == (False, 1)

    shop.outlast("approve", RUN, "--by", "priya", "--app", "v2")
    shop.outlast("worker", "v2", "--until-idle")
    head = json.loads(shop.outlast("show", RUN, "--app", "v2", "--json"))
    assert (head["status"], head["attempts"]) == ("waiting_for_code", 0)
    assert "reply_to_customer" in head["reason"]
    assert RUN in shop.outlast("runs", "--stuck", "--app", "v2")
    assert shop.replies() == []

    shop.outlast("worker", "v1", "--until-idle")  # one that is still there finishes it
    assert shop.status() == "done"
    assert [key for key, _ in shop.replies()] == [f"{RUN}:toolu_03"]


def test_with_the_alias_check_is_green_and_the_approval_counts(shop: Shop) -> None:
    shown = json.loads(shop.outlast("inbox", "--app", "v1", "--json"))
    assert "answer_ticket" in shop.outlast("check", "v2_alias")
    shop.outlast("approve", RUN, "--by", "priya", "--app", "v1")
    shop.outlast("check", "v2_alias")
    shop.outlast("worker", "v2_alias", "--until-idle")
    assert shop.status() == "done"
    assert shop.replies() == [(f"{RUN}:toolu_03", shown["args"]["message"])]


def test_a_run_that_the_first_deploy_held_goes_on_with_the_second(shop: Shop) -> None:
    shop.outlast("approve", RUN, "--by", "priya", "--app", "v1")
    shop.outlast("worker", "v2", "--until-idle")
    assert shop.status() == "waiting_for_code"
    shop.outlast("check", "v2_alias")
    shop.outlast("worker", "v2_alias", "--until-idle")
    assert shop.status() == "done"
    assert len(shop.replies()) == 1
