"""What ``serve``'s options set, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rag_service.cli import app, serve
from rag_service.cli.output import CommandError
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


@pytest.mark.parametrize(("code", "goes_on"), [("missing_api_key", True), ("failed", False)])
def test_a_service_that_asks_for_a_key_does_not_end_for_its_own_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, goes_on: bool
) -> None:
    """Once a key exists `make serve`, as the README has it, must still start the service."""

    def refused(*_: object) -> None:
        raise CommandError("Give an API key.", code=code)

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "_ingest", refused)
    monkeypatch.setattr("rag_service.cli.serve.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt if goes_on else CommandError):
        serve._work("http://127.0.0.1:1", 1.0, Path("corpus"), False, False, None, False)
    assert ("RAG_SERVICE_API_KEY" in capsys.readouterr().err) == goes_on
