"""One connected trace of a run over three processes, one of them killed: with the real SDK and its exporter, into a collector of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outlast import Outlast
from telemetry.collector import Collector, Span

ROOT = Path(__file__).parents[2]
RUN = "run-kite-142"
AGENT, TOOL = "invoke_agent kitebase-support", "execute_tool reply_to_customer"
Story = tuple[Collector, list[str]]


def process(number: int, folder: Path, collector: Collector, *, crash_at: str | None = None, content: bool = False) -> str:
    """What it printed: its counts. Of a process that is killed nothing."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTLAST_", "OTEL_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "examples/kitebase"), str(ROOT / "src")])
    env |= {"OUTLAST_CRASH_AT": crash_at} if crash_at else {}
    env |= {"OUTLAST_TRACE_CONTENT": "1"} if content else {}
    command = [sys.executable, str(Path(__file__).with_name("story.py")), str(number), str(folder), collector.url]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if crash_at else 0), done.stderr
    return done.stdout


def played(folder: Path, *, content: bool = False) -> Story:
    with Collector() as collector:
        counts = [process(1, folder, collector, content=content)]
        with Outlast(folder / "agent.db") as app:
            app.decide(RUN, approved=True, decided_by="priya")
        process(2, folder, collector, crash_at="tool.after:reply_to_customer", content=content)
        counts.append(process(3, folder, collector, content=content))
        with Outlast(folder / "agent.db") as app:
            assert app.head(RUN).status == "done"
    return collector, counts


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return played(tmp_path_factory.mktemp("story"))


@pytest.fixture
def segments(story: Story) -> list[Span]:
    return story[0].named(AGENT)


def test_there_are_two_segments_and_they_are_linked(segments: list[Span]) -> None:
    """The killed process exports nothing: what it began is told by the one that went on."""
    first, last = segments
    assert [s.resource["service.name"] for s in segments] == ["process-1", "process-3"]
    assert first.trace != last.trace
    assert (first.parent, last.parent) == ("", "")
    assert first.links == []
    assert first.id in last.links
    assert {s.attributes["gen_ai.conversation.id"] for s in segments} == {RUN}
    assert {s.attributes["gen_ai.operation.name"] for s in segments} == {"invoke_agent"}


def test_no_span_is_open_over_the_wait(story: Story, segments: list[Span]) -> None:
    first, last = segments
    assert all(s.end_ns <= first.end_ns for s in story[0].spans if s.trace == first.trace)
    assert first.end_ns < last.start_ns
    assert first.attributes["outlast.run.status"] == "waiting_for_approval"
    assert [name for name, _ in first.events] == ["gate.opened"]
    assert last.attributes["outlast.run.status"] == "done"


def test_the_last_segment_says_that_it_recovered(segments: list[Span]) -> None:
    first, last = segments
    assert first.attributes["outlast.recovered"] is False
    assert last.attributes["outlast.recovered"] is True
    assert [name for name, _ in last.events] == ["recovered", "gate.decided"]
    assert dict(last.events)["gate.decided"]["outcome"] == "approved"
    assert last.attributes["outlast.fence"] > first.attributes["outlast.fence"]


def test_the_repeated_attempt_is_a_possible_replay_and_no_new_effect(story: Story, segments: list[Span]) -> None:
    collector, counts = story
    (replayed,) = collector.named(TOOL)
    assert (replayed.trace, replayed.parent) == (segments[1].trace, segments[1].id)
    assert (replayed.attributes["outlast.tool.possible_replay"], replayed.attributes["outlast.tool.attempt"]) == (True, 2)
    assert replayed.attributes["gen_ai.tool.call.id"] == "toolu_03"
    assert 'outlast_replays_total{tool="reply_to_customer"} 1' in counts[1]
    assert "outlast_effects_total 0" in counts[1]
    assert "outlast_recovered_total 1" in counts[1]
    for name in ("get_ticket", "search_help"):
        (read,) = collector.named(f"execute_tool {name}")
        assert read.attributes["outlast.tool.possible_replay"] is False


def test_the_models_own_spans_are_children_of_their_segment(story: Story, segments: list[Span]) -> None:
    parents = [s.parent for s in story[0].named("chat scripted")]
    assert parents == [segments[0].id] * 3 + [segments[1].id]
    assert [s.attributes["gen_ai.usage.input_tokens"] for s in segments] == [300, 100]
    assert [s.attributes["gen_ai.usage.output_tokens"] for s in segments] == [30, 10]


def test_neither_content_nor_keys_leave_the_process(story: Story) -> None:
    raw = story[0].raw
    assert RUN.encode() in raw
    assert f"{RUN}:toolu_03".encode() not in raw
    for said in (b"Northwind", b"ticket_id", b"locked out"):
        assert said not in raw


def test_content_is_exported_where_it_is_asked_for_and_keys_are_not(tmp_path: Path) -> None:
    collector, _ = played(tmp_path, content=True)
    (span,) = collector.named(TOOL)
    assert "Northwind" in span.attributes["gen_ai.tool.call.arguments"]
    assert "reply_id" in span.attributes["gen_ai.tool.call.result"]
    assert f"{RUN}:toolu_03".encode() not in collector.raw
