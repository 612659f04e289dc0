"""What ``serve``'s options set, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from rag_service.cli import app, serve
from rag_service.config import Settings


@pytest.mark.parametrize(
    ("options", "force"),
    [((), "no"), (("--allow-slow",), "even_slow")],
)
def test_allow_slow_uses_a_draft_that_the_gate_did_not_pass(
    options: tuple[str, ...], force: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []

    @contextmanager
    def running(settings: Settings) -> Iterator[tuple[str, float]]:
        seen.append(settings)
        yield "http://127.0.0.1:1", 0.0

    monkeypatch.setattr(serve, "_running", running)
    monkeypatch.setattr(serve, "check_models", lambda settings: None)
    result = CliRunner().invoke(app, ["serve", "--once", *options])
    assert result.exit_code == 0, result.output
    assert [settings.draft.force for settings in seen] == [force]
