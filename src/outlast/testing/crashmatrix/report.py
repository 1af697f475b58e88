"""The report of a crash test: what was killed where, and what came of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CaseResult:
    """One case: where it was killed, and what differs from the undisturbed run.

    `reached`: all its points were passed. A run that goes another way each time may miss one; it then died less often, or not at all.
    """

    points: tuple[str, ...]
    place: str  # where that is, in words: the point before it for a commit
    findings: tuple[str, ...]
    reached: bool = True

    @property
    def ok(self) -> bool:
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        return {"type": "crash_case", "killed_at": list(self.points), "place": self.place, "reached": self.reached, "ok": self.ok,
                "findings": list(self.findings)}  # fmt: skip


@dataclass
class CrashReport:
    """What a crash test found.

    `cases`: how often the agent was killed and taken up again; the control, and a case that ended before its point, are not counted.
    `findings`: one sentence each; empty: every case ended as if nothing had happened. `notes`: what was not compared, and why.
    """

    cases: int
    findings: list[str]
    agent: str = ""
    notes: list[str] = field(default_factory=list)
    results: list[CaseResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def assert_ok(self) -> None:
        """Raise AssertionError with every finding, if there is one. What was not compared stands there too; where all is well it is warned of."""
        if self.findings:
            notes = ["not compared, or worth a look", *(f"- {note}" for note in self.notes)] if self.notes else []
            raise AssertionError("\n".join([self.headline(), *(f"- {finding}" for finding in self.findings), *notes]))
        for note in self.notes:
            warnings.warn(f"crash test of {self.agent}: {note}", stacklevel=2)

    def headline(self) -> str:
        """The result in one line."""
        if self.ok:
            return f"{self.agent}: killed in {self.cases} cases, and every one ended as the undisturbed run"
        return f"{self.agent}: killed in {self.cases} cases, {len(self.findings)} finding{'s' * (len(self.findings) != 1)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "crash_report",
            "agent": self.agent,
            "ok": self.ok,
            "cases": self.cases,
            "findings": self.findings,
            "notes": self.notes,
        }

    def write_junit(self, file: Path) -> None:
        """One testcase a case, as JUnit XML; what is wrong with the whole run is a case of its own."""
        from xml.etree import ElementTree as ET

        of_cases = {f for result in self.results for f in result.findings}
        whole = [f for f in self.findings if f not in of_cases]
        suite = ET.Element("testsuite", name=f"outlast crashtest {self.agent}", errors="0", skipped="0")
        rows: list[tuple[str, Sequence[str]]] = [("undisturbed, and the control", whole)]
        rows += [(f"killed at {', then '.join(result.points)}", result.findings) for result in self.results]
        suite.set("tests", str(len(rows)))
        suite.set("failures", str(sum(bool(findings) for _, findings in rows)))
        for name, findings in rows:
            case = ET.SubElement(suite, "testcase", classname=self.agent, name=name)
            if findings:
                ET.SubElement(case, "failure", message=_xml(findings[0])).text = _xml("\n".join(findings))
        root = ET.Element("testsuites")
        root.append(suite)
        ET.indent(root)
        ET.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


def _xml(text: str) -> str:
    """XML has no form for control characters."""
    return "".join(
        c if c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff") else f"\\u{ord(c):04x}" for c in text
    )
