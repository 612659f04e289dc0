"""docs/operations.md: every setting and command it names exists, and its table of settings is current."""

from __future__ import annotations

import re
from collections.abc import Iterator

import typer

from k8s.tools import settings_table
from rag_service.config import Settings
from tests.k8s.rendering import ROOT

TEXT = settings_table.DOCUMENT.read_text(encoding="utf-8")
SECTIONS = set(Settings.model_fields) - {"data_folder", "cache_folder"}


def setting_paths() -> set[str]:
    return {path for path, _, _ in settings_table.knobs(Settings)}


def named_settings() -> set[str]:
    """Dotted names in the text that begin with a section, and environment variables of settings."""
    dotted = set(re.findall(rf"`((?:{'|'.join(sorted(SECTIONS))})\.[a-z_.*]+)`", TEXT))
    variables = re.findall(r"\bRAG_SERVICE_((?:[A-Z]+_{1,2})+[A-Z]+)\b", TEXT)
    return dotted | {name.lower().replace("__", ".") for name in variables if "__" in name}


def test_the_table_of_settings_is_current() -> None:
    assert settings_table.document(TEXT) == TEXT, "run: python k8s/tools/settings_table.py"


def test_every_setting_says_what_it_is() -> None:
    known = settings_table.reasons()
    for path, _, docstring in settings_table.knobs(Settings):
        parts = path.split(".")
        shared = ".".join(["deployments", "*", *parts[2:]]) if parts[0] == "deployments" else path
        assert settings_table.reason(shared, docstring, known), path


def test_reasons_are_of_settings_that_exist() -> None:
    paths = setting_paths() | {
        re.sub(r"^deployments\.\w+", "deployments.*", path) for path in setting_paths()
    }
    for name in settings_table.reasons():
        assert any(path == name or path.endswith(f".{name}") for path in paths), name


def test_every_setting_named_exists() -> None:
    paths = setting_paths()
    # The draft has none by default; where it is given, it has the settings of a model.
    paths |= {path.replace("engine.target.", "draft.draft.") for path in paths if "engine.target." in path}
    assert len(named_settings()) > 20
    for name in named_settings():
        pattern = re.compile(re.escape(name).replace(r"\*", r"\w+") + r"(\.|$)")
        assert any(pattern.match(path) for path in paths), name


def commands() -> Iterator[tuple[str, ...]]:
    """The first two words of every ``rag-service`` command, in a sentence or in a block of code."""
    blocks = "\n".join(re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)).splitlines()
    spans = re.findall(r"`(rag-service [^`]+)`", TEXT)
    for line in [*spans, *(line.strip() for line in blocks)]:
        if found := re.match(r"rag-service ([a-z-]+)(?: ([a-z]+))?", line):
            yield tuple(word for word in found.groups() if word)


def test_every_command_named_exists() -> None:
    from rag_service.cli import app

    known = dict(getattr(typer.main.get_command(app), "commands", {}))
    named = list(commands())
    assert len(named) > 10
    for first, *rest in named:
        assert first in known, first
        below = getattr(known[first], "commands", None)
        if below and rest:
            assert rest[0] in below, (first, rest[0])


def test_files_named_exist() -> None:
    for name in set(re.findall(r"`((?:k8s|docs|examples|benchmarks|tests)/[\w./-]+)`", TEXT)):
        assert (ROOT / name).exists(), name


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    }
    for target in re.findall(r"\]\(#([\w-]+)\)", TEXT):
        assert target in headings, target
