"""A Serve config made of settings is valid for Serve, keeps no secret, and reads back as the same settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.options import DEPLOYMENT_NAMES, deployment_options
from rag_service.config import ConfigError, Settings
from rag_service.serve_config import build_serve_config, has_secrets, load_settings

VALUES = {
    "service": {"port": 8123, "domains": ["finance", "legal"]},
    "prompt": {"top_k": 5},
    "retrieval": {"index": {"url": "http://qdrant:6333", "api_key": "hush-hush"}},
    "deployments": {
        "retriever": {"num_replicas": 2},
        "target": {"num_gpus": 1.0},
        "draft": {"autoscaling": {"min_replicas": 1, "max_replicas": 3}},
    },
}


def build(settings: Settings) -> dict[str, object]:
    return build_serve_config(settings, [deployment_options(settings, name) for name in DEPLOYMENT_NAMES])


def test_serve_takes_the_config_and_it_reads_back(tmp_path: Path) -> None:
    settings = Settings.parse(VALUES)
    text = yaml.safe_dump(build(settings))
    path = tmp_path / "serve.yaml"
    path.write_text(text)

    checked = ServeDeploySchema.model_validate(yaml.safe_load(text))
    by_name = {deployment.name: deployment for deployment in checked.applications[0].deployments}
    assert set(by_name) == set(DEPLOYMENT_NAMES)
    assert by_name["Retriever"].num_replicas == 2
    read = load_settings(path)
    assert read.service == settings.service
    assert read.prompt == settings.prompt
    for name in DEPLOYMENT_NAMES:
        assert getattr(read.deployments, name.lower()) == getattr(settings.deployments, name.lower())


def test_secrets_are_left_out() -> None:
    settings = Settings.parse(VALUES)
    assert has_secrets(settings)
    assert not has_secrets(Settings.parse({}))
    text = yaml.safe_dump(build(settings))
    assert "hush-hush" not in text
    assert "api_key" not in text
    assert "http://qdrant:6333" in text


def test_what_was_edited_in_serves_own_list_wins(tmp_path: Path) -> None:
    document = build(Settings.parse(VALUES))
    application = document["applications"][0]  # type: ignore[index]
    for deployment in application["deployments"]:
        if deployment["name"] == "Target":
            deployment["num_replicas"] = 4
            deployment["ray_actor_options"]["num_cpus"] = 2
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    target = load_settings(path, {"service.port": 9000}).deployments.target
    assert (target.num_replicas, target.num_cpus, target.num_gpus) == (4, 2.0, 1.0)
    assert load_settings(path, {"service.port": 9000}).service.port == 9000


def test_a_serve_config_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("applications: [{name: other, import_path: 'other:app'}]")
    with pytest.raises(ConfigError, match="0 applications"):
        load_settings(path)


def test_a_settings_file_is_still_one(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("prompt: {top_k: 7}")
    assert load_settings(path).prompt.top_k == 7
    path.write_text("prompt: {top_q: 7}")
    with pytest.raises(ConfigError, match="top_k"):
        load_settings(path)
