"""The Serve config fits Ray's own schema and carries the settings, but no secret and no folder of this machine."""

from __future__ import annotations

import json

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.serve_config import serve_config
from rag_service.config import ConfigError, Settings


def settings(**values: object) -> Settings:
    return Settings.load(None, values)


def test_defaults_fit_rays_schema_and_need_no_arguments() -> None:
    config = serve_config(settings())
    schema = ServeDeploySchema.model_validate(yaml.safe_load(yaml.safe_dump(config)))
    application = schema.applications[0]
    assert application.name == "rag"
    assert application.import_path == "deployments.app:build_app"
    assert application.args == {}
    names = [deployment.name for deployment in application.deployments]
    assert names == ["Gateway", "Retriever", "Reranker", "Target", "Draft", "Recorder"]


def test_changed_settings_travel_and_come_back_the_same() -> None:
    given = settings(**{"prompt.top_k": 5, "service.domains": ["a", "b"], "engine.speculation.mode": "off"})
    arguments = serve_config(given)["applications"][0]["args"]
    assert arguments == {
        "prompt": {"top_k": 5},
        "service": {"domains": ["a", "b"]},
        "engine": {"speculation": {"mode": "off"}},
    }
    assert Settings.parse(arguments).prompt == given.prompt


def test_scaling_stands_in_the_deployments_alone() -> None:
    config = serve_config(
        settings(
            **{
                "deployments.target": {"num_replicas": 3, "num_gpus": 1.0},
                "deployments.reranker.autoscaling": {"min_replicas": 1, "max_replicas": 5},
            }
        )
    )
    application = ServeDeploySchema.model_validate(config).applications[0]
    assert application.args == {}
    assert not application.external_scaler_enabled
    by_name = {deployment["name"]: deployment for deployment in config["applications"][0]["deployments"]}
    assert by_name["Target"]["num_replicas"] == 3
    assert by_name["Target"]["ray_actor_options"]["num_gpus"] == 1.0
    assert by_name["Reranker"]["autoscaling_config"]["max_replicas"] == 5
    assert "num_replicas" not in by_name["Reranker"]


def test_without_draft_replicas_there_is_no_draft_and_the_arguments_say_so() -> None:
    config = serve_config(settings(**{"deployments.draft.num_replicas": 0}))
    application = config["applications"][0]
    assert "Draft" not in [deployment["name"] for deployment in application["deployments"]]
    assert application["args"] == {"deployments": {"draft": {"num_replicas": 0}}}


def test_no_secret_is_written() -> None:
    given = settings(**{"retrieval.index": {"url": "http://qdrant:6333", "api_key": "hush-hush"}})
    text = json.dumps(serve_config(given))
    assert "hush" not in text
    assert "***" not in text
    assert "http://qdrant:6333" in text


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"deployments.retriever.num_replicas": 2}, "embedded index"),
        ({"deployments.recorder.num_replicas": 2}, "running figures"),
        ({"deployments.target.num_replicas": 0}, "at least one replica"),
        ({"deployments.target.autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "above max_replicas"),
    ],
)
def test_what_cannot_be_scaled_so_is_refused_by_name(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        serve_config(settings(**values))
    assert next(iter(values)).rsplit(".", 1)[0] in str(refused.value)


def test_several_retrievers_are_fine_with_a_server() -> None:
    values = {"deployments.retriever.num_replicas": 2, "retrieval.index.url": "http://qdrant:6333"}
    serve_config(settings(**values))
