"""A bad model or data folder is named before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rag_service.cli import app, serve
from rag_service.config import ConfigError, Settings
from rag_service.start_checks import check_folder, check_model, check_start

FILES = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}


def model(folder: Path, without: str | None = None, **other: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in {**FILES, **other}.items():
        if name != without:
            (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("without", "named"),
    [("config.json", "config.json"), ("tokenizer.json", "tokenizer"), ("model.safetensors", "weights")],
)
def test_a_model_folder_is_told_what_it_lacks(tmp_path: Path, without: str, named: str) -> None:
    folder = model(tmp_path / "model", without)
    with pytest.raises(ConfigError, match=f"engine.target.model names {folder}.*{named}"):
        check_model("engine.target.model", str(folder), None, tmp_path)


def test_whole_folders_pass_those_of_old_sentence_transformers_too(tmp_path: Path) -> None:
    check_model("x", str(model(tmp_path / "whole")), None, tmp_path)
    old = tmp_path / "old"
    model(old / "0_Transformer")
    (old / "modules.json").write_text('[{"path": "0_Transformer"}]')
    check_model("x", str(old), None, tmp_path)


def test_a_broken_configuration_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", **{"config.json": "{"})
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        check_model("x", str(folder), None, tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        check_model("x", str(tmp_path / "nowhere"), None, tmp_path)


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_id_is_refused_only_where_the_hub_may_not_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: offline)
    if not offline:
        check_model("x", "nobody/no-such-model", None, tmp_path)
        return
    with pytest.raises(ConfigError, match=r"nobody/no-such-model.*HF_HUB_OFFLINE"):
        check_model("x", "nobody/no-such-model", None, tmp_path)


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder("data_folder", tmp_path / "new" / "below")
    assert not (tmp_path / "new").exists()
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(ConfigError, match=f"data_folder is {folder}, but {file} is a file"):
            check_folder("data_folder", folder)
    monkeypatch.setattr("rag_service.start_checks.os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="may not write"):
        check_folder("data_folder", tmp_path / "new")


def test_serve_says_it_before_it_starts_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def running(_: Settings) -> Iterator[Any]:
        raise AssertionError("started")
        yield

    # As on a machine without Ray: tests before this one may have left theirs running in this process.
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("deployments.cluster.ray.is_initialized", lambda: False)
    monkeypatch.setattr(serve, "_running", running)
    monkeypatch.setenv("RAG_SERVICE_ENGINE__TARGET__MODEL", str(tmp_path / "nowhere"))
    result = CliRunner().invoke(app, ["serve", "--once"])
    assert result.exit_code == 2
    assert "engine.target.model" in result.output
    assert "started" not in result.output


def test_the_folders_of_the_settings_are_looked_at(tmp_path: Path) -> None:
    whole, file = str(model(tmp_path / "model")), tmp_path / "file"
    file.write_text("")
    values = {"engine": {"target": {"model": whole}}, "retrieval": {"embedder": {"model": whole}}}
    check_start(Settings.parse({**values, "data_folder": tmp_path}))
    for bad in ({"data_folder": file}, {"data_folder": tmp_path, "telemetry": {"folder": str(file)}}):
        with pytest.raises(ConfigError, match="is a file"):
            check_start(Settings.parse({**values, **bad}))
