"""What the README names exists: files, make targets, metrics, commands."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from rag_service.cli import app
from rag_service.telemetry import Telemetry

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z]+)", README))
    assert named <= targets
    assert {"setup", "serve", "test", "fix", "check", "bench", "soak"} <= targets


def test_commands_exist() -> None:
    known = typer.main.get_command(app)
    for words in re.findall(r"rag-service ([a-z]+(?: [a-z]+)?)", README):
        command: object = known
        for word in words.split():
            below = getattr(command, "commands", None)
            if below is None:
                break
            assert word in below, f"rag-service {words}"
            command = below[word]


def test_metrics_are_exported() -> None:
    exposed = Telemetry(["finance"]).exposition()
    exported = set(re.findall(r"^# TYPE (\S+)", exposed, re.MULTILINE))
    named = set(re.findall(r"`(rag_[a-z_]+)", README))
    assert len(named) >= 14
    assert named - exported == set()
