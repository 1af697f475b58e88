"""The demo, line by line, with real processes. Run by plain `pytest -q`, in this folder or from the repository's root.

Nothing here calls the demo's functions in this process, the help desk's own tests aside: each story is a `python main.py` of
its own, and what is looked at afterwards are the files that it left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent import SCRIPTS
from helpdesk import HelpDesk, UnknownTicket
from outlast import Outlast

HERE = Path(__file__).parent
AIMOCK = HERE.parents[1] / "tests" / "js" / "node_modules" / "@copilotkit" / "aimock" / "dist" / "cli.js"
LIMIT_S = 120  # a whole story takes a few seconds; more means that something hangs

EXPECTED = """\
== Process 1: start the run ==
checkpoint 1  running               user: Ticket KITE-142 just came in. Look it up, find the ...
loaded checkpoint 1 (running)
checkpoint 2  running               model asks for get_ticket(ticket_id="KITE-142")
checkpoint 3  running               tool result: {"id": "KITE-142", "title": "Customer locked...
checkpoint 4  running               model asks for search_help(query="locked out after SSO ch...
checkpoint 5  running               tool result: [account-recovery#2] Locked out of your acco...
checkpoint 6  waiting_for_approval  model asks for reply_to_customer(ticket_id="KITE-142", me...
paused: reply_to_customer needs a human, so process 1 exits

== Process 2: resume, then get killed right after the reply goes out ==
loaded checkpoint 6 (waiting_for_approval)
  help desk: sent reply #1 to Northwind Studio (key run-kite-142:toolu_03)
CRASH: killed after reply_to_customer ran, before its result was saved

== Process 3: a fresh worker picks up unfinished runs ==
loaded checkpoint 6 (waiting_for_approval)
  help desk: key run-kite-142:toolu_03 seen before, returned reply #1, sent nothing
checkpoint 7  running               tool result: {"reply_id": 1, "status": "sent"}
checkpoint 8  done                  model: Replied to Northwind Studio on KITE-142 with the S...

== Result ==
Replies Northwind Studio got on KITE-142: 1
Model calls across all three processes: 4
"""


def play(program: str, folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run one of the demo's programs with its files in `folder`; no setting of this machine reaches it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ANTHROPIC_", "OUTLAST_", "KITEBASE_"))}
    command = [sys.executable, str(HERE / program), "--keep", str(folder), *args]
    return subprocess.run(command, env=clean | env, cwd=folder.parent, text=True, capture_output=True, timeout=LIMIT_S, check=False)


def finished(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def part(output: str, heading: str) -> list[str]:
    """The lines under one heading."""
    return output.split(f"== {heading}", 1)[1].split("\n== ", 1)[0].rstrip().splitlines()[1:]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The story as it is told first: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("story") / "files"
    return folder, finished(play("main.py", folder))


# --- the three processes -----------------------------------------------------------------------------------------------------


def test_demo_prints_the_story(story: tuple[Path, str]) -> None:
    assert story[1] == EXPECTED


def test_second_demo_in_the_same_folder_begins_anew(tmp_path: Path) -> None:
    finished(play("main.py", tmp_path / "files", "--reject", "No."))
    assert finished(play("main.py", tmp_path / "files")) == EXPECTED


def test_without_a_key_the_customer_gets_two_replies(tmp_path: Path) -> None:
    output = finished(play("main.py", tmp_path / "files", "--no-idempotency-key"))
    assert part(output, "Process 2") == [
        "loaded checkpoint 6 (waiting_for_approval)",
        "  help desk: sent reply #1 to Northwind Studio (no key)",
        "CRASH: killed after reply_to_customer ran, before its result was saved",
    ]
    assert "  help desk: sent reply #2 to Northwind Studio (no key)" in part(output, "Process 3")
    assert part(output, "Result") == ["Replies Northwind Studio got on KITE-142: 2", "Model calls across all three processes: 4"]


def test_rejected_reply_is_not_sent_and_the_model_says_why(tmp_path: Path) -> None:
    output = finished(play("main.py", tmp_path / "files", "--reject", "Loop in their IT admin first."))
    assert "CRASH" not in output
    assert "help desk" not in output
    assert part(output, "Result") == ["Replies Northwind Studio got on KITE-142: 0", "Model calls across all three processes: 4"]
    messages = saved_messages(tmp_path / "files", "run-kite-142")
    why = "A support lead rejected this reply: Loop in their IT admin first."
    assert len(messages) == 8
    (result,) = messages[-2]["content"]
    assert (result["is_error"], result["content"]) == (True, why)
    assert messages[-1]["content"][0]["text"] == f"I sent nothing to Northwind Studio on KITE-142. {why}"


def test_another_ticket_changes_customer_and_figures(tmp_path: Path) -> None:
    output = finished(play("main.py", tmp_path / "files", "--ticket", "KITE-157"))
    assert "  help desk: key run-kite-157:toolu_04 seen before, returned reply #1, sent nothing" in part(output, "Process 3")
    assert part(output, "Result") == ["Replies Halden Clinic got on KITE-157: 1", "Model calls across all three processes: 5"]


def test_what_runs_is_what_was_shown(story: tuple[Path, str]) -> None:
    messages = saved_messages(story[0], "run-kite-142")
    (asked,) = messages[5]["content"]
    (scripted,) = SCRIPTS["KITE-142"][2]
    assert asked == scripted
    with Outlast(story[0] / "agent.db") as app:
        (gate,) = app.get("run-kite-142").gates
    assert (gate.call_id, gate.args, gate.outcome, gate.decided_by) == ("toolu_03", asked["input"], "approved", "priya")
    with HelpDesk(story[0] / "helpdesk.db")._transaction() as db:
        replies = db.execute("SELECT ticket_id, message, idempotency_key FROM replies").fetchall()
    assert replies == [("KITE-142", asked["input"]["message"], "run-kite-142:toolu_03")]
    assert messages[6]["content"][0]["tool_use_id"] == "toolu_03"


def test_every_checkpoint_is_the_one_before_and_one_message(story: tuple[Path, str]) -> None:
    query = (
        "select json_object('seq', seq, 'status', status, 'size', length(messages), 'messages', json(messages)) "
        "from checkpoints order by seq"
    )
    rows = [json.loads(line) for line in shell(story[0], query)]
    assert [row["seq"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["status"] for row in rows] == ["running"] * 5 + ["waiting_for_approval", "running", "done"]
    for n, row in enumerate(rows, start=1):
        assert row["messages"] == rows[-1]["messages"][:n]
        assert len(row["messages"]) == n
    assert 1_750 <= rows[5]["size"] <= 2_000
    assert 8_500 <= sum(row["size"] for row in rows) <= 9_500


def saved_messages(folder: Path, run_id: str) -> list[dict[str, Any]]:
    with Outlast(folder / "agent.db") as app:
        return app.latest(run_id).messages


def shell(folder: Path, query: str) -> list[str]:
    """Ask the file through the system's own sqlite3 shell, as a person would."""
    program = shutil.which("sqlite3")
    if program is None:
        pytest.skip("no sqlite3 shell here")
    done = subprocess.run([program, "-readonly", folder / "agent.db", query], text=True, capture_output=True, timeout=LIMIT_S, check=False)
    return finished(done).splitlines()


# --- the folder --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["main.py", "without_keys.py"])
def test_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path, program: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("agent.db", "thesis.txt"):
        (folder / name).write_text("mine")
    done = play(program, folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"error: {folder} holds files that are not this demo's: thesis.txt",
        "hint: name another folder with --keep, or move those files away",
    ]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"agent.db": "mine", "thesis.txt": "mine"}


def test_file_where_a_folder_is_needed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("mine")
    assert play("main.py", tmp_path / "files").returncode == 2
    assert (tmp_path / "files").read_text() == "mine"


def test_ticket_without_a_script_is_refused(tmp_path: Path) -> None:
    done = play("main.py", tmp_path / "files", "--ticket", "KITE-098")
    assert done.returncode == 2
    assert "no script for KITE-098" in done.stderr


# --- systems without keys ----------------------------------------------------------------------------------------------------


def test_check_finds_the_reply_and_nobody_is_asked(tmp_path: Path) -> None:
    output = finished(play("without_keys.py", tmp_path / "files", "--way", "check"))
    key = "without-keys-check:toolu_01"
    assert part(output, "With a check") == [
        "checkpoint 1  running               user: Tell the customer on KITE-142 that we are on it.",
        'checkpoint 2  running               model asks for send_reply(ticket_id="KITE-142", message="...',
        f"  help desk: sent reply #1 to Northwind Studio (reference {key})",
        "CRASH: killed after send_reply ran, before its result was saved",
        f"  check: looked for reference {key}, found reply #1",
        'checkpoint 3  running               tool result: {"reply_id": 1, "status": "sent"}',
        "checkpoint 4  done                  model: Replied to Northwind Studio on KITE-142 with a fir...",
        "without-keys-check is done",
        "Replies Northwind Studio got on KITE-142: 1",
    ]


@pytest.mark.parametrize(
    "answer, result, last",
    [
        ("happened", '{"reply_id": 1, "status": "sent"}', "Replied to Brisk Couriers on KITE-163 with a first answer."),
        ("give_up", "outcome unknown, not repeated", "I cannot say that Brisk Couriers has a reply on KITE-163: "),
    ],
)
def test_without_a_check_a_person_is_asked(tmp_path: Path, answer: str, result: str, last: str) -> None:
    output = finished(play("without_keys.py", tmp_path / "files", "--way", "person", "--answer", answer))
    lines = part(output, "Without a check")
    assert [line for line in lines if "help desk: sent" in line] == ["  help desk: sent reply #1 to Brisk Couriers (no key)"]
    assert any(line.startswith("without-keys-person is waiting_for_verification: ") for line in lines)
    assert len([line for line in lines if line.startswith("in_doubt: toolu_01 send_reply ")]) == 1
    assert lines[-2:] == ["without-keys-person is done", "Replies Brisk Couriers got on KITE-163: 1"]
    messages = saved_messages(tmp_path / "files", "without-keys-person")
    assert messages[2]["content"][0]["content"].startswith(result)
    assert messages[3]["content"][0]["text"].startswith(last)


# --- a real client over real HTTP ----------------------------------------------------------------------------------------------


def test_story_over_http_with_the_real_client(tmp_path: Path) -> None:
    """The same story, kill included, with the provider's own SDK against a server that nobody here wrote."""
    with aimock(tmp_path) as url:
        env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "mock"}
        output = finished(play("main.py", tmp_path / "files", "--model", "claude-sonnet-5-5", **env))
        with urllib.request.urlopen(f"{url}/__aimock/journal", timeout=LIMIT_S) as answer:  # noqa: S310  # our own server
            journal = json.load(answer)
    assert output == EXPECTED
    requests = [each["body"]["messages"] for each in journal if each["path"].startswith("/v1/messages")]
    assert [sum(message["role"] == "assistant" for message in messages) for messages in requests] == [0, 1, 2, 3]  # none was asked twice


def fixtures() -> dict[str, Any]:
    """The script of KITE-142 as aimock's fixtures. `turnIndex` counts the assistant messages in a request, so it is right after a kill."""
    answers: list[dict[str, Any]] = []
    for turn in SCRIPTS["KITE-142"]:
        if callable(turn):
            answers.append({"content": turn([{"role": "user", "content": [{"type": "tool_result", "content": "{}"}]}])})
        else:
            answers.append({"toolCalls": [{"id": block["id"], "name": block["name"], "arguments": block["input"]} for block in turn]})
    usage = {"input_tokens": 900, "output_tokens": 60}
    matches = [{"userMessage": "KITE-142 just came in", "turnIndex": n} for n in range(len(answers))]
    return {"fixtures": [{"match": match, "response": {**answer, "usage": usage}} for match, answer in zip(matches, answers, strict=True)]}


@contextmanager
def aimock(folder: Path) -> Iterator[str]:
    node = shutil.which("node")
    if node is None or not AIMOCK.exists():
        pytest.skip("aimock needs Node and `npm ci` in tests/js")
    pytest.importorskip("anthropic")
    (folder / "fixtures.json").write_text(json.dumps(fixtures()))
    command = [node, str(AIMOCK), "-p", "0", "-f", str(folder / "fixtures.json"), "--strict", "--validate-on-load"]
    env = os.environ | {"AIMOCK_STRICT_TURN_INDEX": "1"}
    # a session of its own: `node` may be a script that starts the real one, and only both together close the pipe
    server = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    assert server.stdout is not None
    try:
        said = []
        for line in server.stdout:  # ends when the server does
            said.append(line)
            if "listening on " in line:
                yield line.split("listening on ", 1)[1].strip()
                break
        else:
            pytest.fail("aimock did not start:\n" + "".join(said))
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.communicate(timeout=LIMIT_S)


# --- the help desk, by itself --------------------------------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path: Path) -> HelpDesk:
    return HelpDesk(tmp_path / "helpdesk.db")


def test_repeated_key_gives_the_first_reply_and_sends_nothing(desk: HelpDesk, capsys: pytest.CaptureFixture[str]) -> None:
    first = desk.send_reply("KITE-142", "Hello", "a:1")
    again = desk.send_reply("KITE-142", "Hello", "a:1")
    assert first == {"reply_id": 1, "status": "sent"}
    assert again == {"reply_id": 1, "status": "sent", "duplicate": True}
    assert desk.replies_to("KITE-142") == 1
    assert capsys.readouterr().out.splitlines() == [
        "  help desk: sent reply #1 to Northwind Studio (key a:1)",
        "  help desk: key a:1 seen before, returned reply #1, sent nothing",
    ]


def test_replies_without_a_key_are_all_sent(desk: HelpDesk) -> None:
    assert [desk.send_reply("KITE-142", "Hello")["reply_id"] for _ in range(3)] == [1, 2, 3]
    assert (desk.replies_to("KITE-142"), desk.replies_to("KITE-157")) == (3, 0)


def test_reply_is_found_by_its_reference_on_its_ticket_only(desk: HelpDesk) -> None:
    desk.send_reply("KITE-142", "Hello", reference="r")
    assert desk.find_reply("KITE-142", "r") == {"reply_id": 1, "status": "sent"}
    assert desk.find_reply("KITE-157", "r") is None
    assert desk.find_reply("KITE-142", "s") is None


def test_unknown_ticket_gets_nothing(desk: HelpDesk) -> None:
    with pytest.raises(UnknownTicket, match="KITE-999"):
        desk.get_ticket("KITE-999")
    with pytest.raises(UnknownTicket, match="KITE-999"):
        desk.send_reply("KITE-999", "Hello")
    with pytest.raises(UnknownTicket, match="KITE-999"):
        desk.add_comment("KITE-999", "Hm")
    assert desk.replies_to("KITE-999") == 0


@pytest.mark.parametrize(
    "query, best",
    [
        ("locked out after SSO change", "[account-recovery#2] "),
        ("customer was charged two times", "[billing#1] "),
        ("CSV export custom columns", "[exports#2] "),
        ("invite a guest to a board", "[guests#1] "),
        ("zebra", "No help article fits."),
    ],
)
def test_search_finds_the_passage_that_fits(desk: HelpDesk, query: str, best: str) -> None:
    assert desk.search_help(query).startswith(best)


def test_internal_comment_is_written_once_per_key(desk: HelpDesk) -> None:
    assert desk.add_comment("KITE-142", "Hm", "a:1") == {"comment_id": 1}
    assert desk.add_comment("KITE-142", "Hm", "a:1") == {"comment_id": 1, "duplicate": True}
    assert desk.add_comment("KITE-142", "Hm", "a:2") == {"comment_id": 2}
