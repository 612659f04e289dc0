"""Settings from file, environment and overrides; every mistake one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rag_service.config import ConfigError, Settings


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("service: {port: 1, host: 127.0.0.2}\nprompt:\n  top_k: 4\n")
    monkeypatch.setenv("RAG_SERVICE_SERVICE__PORT", "2")
    monkeypatch.setenv("RAG_SERVICE_SERVICE__DOMAINS", "[legal, tax]")
    monkeypatch.setenv("RAG_SERVICE_PORT", "tcp://10.0.0.1:8000")  # set by Kubernetes, no setting
    monkeypatch.setenv("RAG_SERVICE_DATA", str(tmp_path / "data"))
    settings = Settings.load(file, {"service.port": 3})
    assert (settings.service.port, settings.service.host, settings.prompt.top_k) == (3, "127.0.0.2", 4)
    assert settings.service.domains == ("legal", "tax")
    assert settings.keys_file == tmp_path / "data" / "api-keys.json"
    assert Settings.load(file).service.port == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"service": {"prot": 1}}, "There is no setting service.prot; did you mean port?"),
        ({"servce": {}}, "There is no setting servce; did you mean service?"),
        ({"deployments.target.num_cpu": 1}, "did you mean num_cpus?"),
        ({"draft": {"draft": {"modl": "x"}}}, "draft.draft.modl; did you mean model?"),
        ({"service.port": "many"}, "The setting service.port is not usable"),
        ({"service.domains": ["Law"]}, "no domain name"),
        ({"service.domains": []}, "at least one"),
    ],
)
def test_mistakes(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Settings.load(None, values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00"])
def test_bad_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        Settings.load(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        Settings.load(tmp_path / "none.yaml")


def test_values_round_trip_and_secrets_are_masked() -> None:
    settings = Settings.load(None, {"retrieval.index.api_key": "hidden", "service.cors_origins": ["*"]})
    assert "hidden" not in yaml.safe_dump(settings.as_values())
    assert Settings.parse(settings.as_values(reveal=True)) == settings


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("Org/Name-1.5B", "name-1.5b"),
        ("/models/x.gguf", "x"),
    ],
)
def test_model_name(model: str, name: str) -> None:
    assert Settings.load(None, {"engine.target.model": model}).model_name == name
