"""A gate record for people (Markdown) and for pipelines (JUnit XML)."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rag_service.gate_record import Check, GateRecord


def markdown(record: GateRecord) -> str:
    """The record as a page to attach to a change request."""
    verdict = "passed" if record.passed else "failed"
    lines = [
        f"# Gate {verdict}: {record.draft} for {record.target}",
        "",
        f"- Target `{record.target}`, weights `{record.target_fingerprint}`",
        f"- Draft `{record.draft}`, weights `{record.draft_fingerprint}`",
        f"- Questions and prompts `{record.data_fingerprint[:16]}`",
        f"- Bar: the lower end of α's 95 % interval at least {record.min_alpha:g} in every domain, "
        f"drafters: {record.drafters}, temperature {record.temperature:g}",
        f"- Signed off by {record.signed_off_by} on {record.created_at}",
        "",
        "| check | value | 95 % interval | bar | requests | |",
        "|---|---|---|---|---|---|",
        *[_line(check) for check in record.checks],
        "",
    ]
    by_domain = record.figures.get("speed_up", {})
    if by_domain:
        shown = ", ".join(f"{name} {_ratio(found)}" for name, found in by_domain.items())
        lines += [f"Speed-up by domain (not judged, few requests each): {shown}.", ""]
    if record.failures:
        lines += ["Why it failed:", "", *[f"- {reason}" for reason in record.failures], ""]
    lines.append(f"Digest of the record: `{record.digest}`")
    return "\n".join(lines) + "\n"


def _ratio(found: Mapping[str, Any]) -> str:
    value, interval = found["value"], found["interval"]
    if value is None:
        return "none"
    return f"{value:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def _line(check: Check) -> str:
    value = "none" if check.value is None else f"{check.value:.3f}"
    interval = f"{check.interval[0]:.3f} to {check.interval[1]:.3f}" if check.interval else "none"
    bar = "" if check.bar is None else f"{check.bar:g}"
    return (
        f"| {check.name} | {value} | {interval} | {bar} | {check.num_requests} | "
        f"{'passed' if check.passed else 'FAILED'} |"
    )


def junit(record: GateRecord) -> str:
    """JUnit XML: one test case a check."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"gate {record.draft} for {record.target}",
        tests=str(len(record.checks)),
        failures=str(len(record.failures)),
        errors="0",
        timestamp=record.created_at,
    )
    for check in record.checks:
        case = ElementTree.SubElement(suite, "testcase", classname="rag_service.gate", name=check.name)
        if not check.passed:
            ElementTree.SubElement(case, "failure", message=check.reason).text = _line(check)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def write_reports(record: GateRecord, folder: Path) -> dict[str, Path]:
    """Write ``gate.md`` and ``gate.xml`` beside the record."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"markdown": folder / "gate.md", "junit": folder / "gate.xml"}
    paths["markdown"].write_text(markdown(record), encoding="utf-8")
    paths["junit"].write_text(junit(record), encoding="utf-8")
    return paths
