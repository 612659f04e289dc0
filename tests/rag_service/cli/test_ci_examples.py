"""The example pipelines call commands and options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main
import yaml

from rag_service.cli import app

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "ci"


def _workflow() -> list[list[str]]:
    steps = yaml.safe_load((FOLDER / "gate.yml").read_text(encoding="utf-8"))["jobs"]["gate"]["steps"]
    return [shlex.split(step["run"]) for step in steps if step.get("run", "").startswith("rag-service")]


def _script() -> list[list[str]]:
    text = (FOLDER / "gate.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("rag-service")]


@pytest.mark.parametrize("words", [*_workflow(), *_script()], ids=lambda words: " ".join(words[1:3]))
def test_every_command_and_option_exists(words: list[str]) -> None:
    command = typer.main.get_command(app)
    rest = words[1:]
    while rest and hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    asked = {word for word in rest if re.fullmatch(r"--[a-z-]+", word)}
    assert asked <= known


def test_the_gate_is_among_them() -> None:
    for commands in (_workflow(), _script()):
        assert [words[1] for words in commands][:2] == ["models", "gate"]
