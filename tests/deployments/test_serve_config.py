"""Deployment options and the built Serve config fit Ray's own schema; what cannot be scaled so is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from deployments.options import DEPLOYMENT_NAMES, check_scaling, deployment_options, has_draft, total_cpus
from rag_service.config import ConfigError, Settings
from rag_service.serve_config import build_serve_config, load_settings


def settings(**values: object) -> Settings:
    return Settings.load(None, values)


def options_by_name(given: Settings) -> dict[str, dict[str, Any]]:
    return {name: deployment_options(given, name) for name in DEPLOYMENT_NAMES}


def test_the_built_config_fits_rays_schema() -> None:
    document = build_serve_config(settings(), list(options_by_name(settings()).values()))
    schema = ServeDeploySchema.model_validate(yaml.safe_load(yaml.safe_dump(document)))
    application = schema.applications[0]
    assert application.import_path == "deployments.app:build_app"
    assert tuple(deployment.name for deployment in application.deployments) == DEPLOYMENT_NAMES


@pytest.mark.parametrize("name", DEPLOYMENT_NAMES)
def test_options_are_taken_by_serve(name: Any) -> None:
    class Replica:
        pass

    assert serve.deployment(**deployment_options(settings(), name))(Replica).name == name


def test_replicas_gpus_and_autoscaling_come_from_the_settings() -> None:
    options = options_by_name(
        settings(
            **{
                "deployments.target": {"num_replicas": 3, "num_gpus": 1.0, "resources": {"big": 1}},
                "deployments.reranker.autoscaling": {"min_replicas": 1, "max_replicas": 5},
                "engine.target.num_threads": 2,
            }
        )
    )
    assert options["Target"]["num_replicas"] == 3
    assert options["Target"]["ray_actor_options"]["num_gpus"] == 1.0
    assert options["Target"]["ray_actor_options"]["resources"] == {"big": 1}
    assert options["Target"]["ray_actor_options"]["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"
    assert options["Draft"]["ray_actor_options"]["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"
    assert options["Reranker"]["autoscaling_config"]["max_replicas"] == 5
    assert "num_replicas" not in options["Reranker"]


def test_a_replica_drains_for_as_long_as_its_longest_request() -> None:
    options = deployment_options(settings(**{"service.request_deadline_seconds": 300}), "Target")
    assert options["graceful_shutdown_timeout_s"] > 300


def test_by_default_everything_fits_two_cores() -> None:
    assert total_cpus(settings()) <= 2.0


def test_the_draft_alone_may_have_no_replicas() -> None:
    model = {"draft.draft": {"model": "some/draft"}}
    given = settings(**model, **{"deployments.draft.num_replicas": 0})
    check_scaling(given)
    assert not has_draft(given)
    assert has_draft(settings(**model))
    scaled = settings(**model, **{"deployments.draft.autoscaling": {"min_replicas": 0, "max_replicas": 2}})
    check_scaling(scaled)
    assert has_draft(scaled)


def test_a_target_for_which_no_draft_is_known_has_none() -> None:
    assert not has_draft(settings(**{"engine.target.model": "some/target"}))


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
        check_scaling(settings(**values))
    assert next(iter(values)).rsplit(".", 1)[0] in str(refused.value)


def test_several_retrievers_are_fine_with_a_server() -> None:
    values = {"deployments.retriever.num_replicas": 2, "retrieval.index.url": "http://qdrant:6333"}
    check_scaling(settings(**values))


EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "serve").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.name))
def test_the_examples_fit_rays_schema_and_our_settings(file: Path) -> None:
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    application = ServeDeploySchema.model_validate(document).applications[0]
    assert application.import_path == "deployments.app:build_app"
    Settings.parse(application.args)
    check_scaling(load_settings(file))
    assert {deployment.name for deployment in application.deployments} <= set(DEPLOYMENT_NAMES)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
