"""``rag-service scale`` from another process, on real Ray: the draft to none and back while requests run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.cluster import StartError
from deployments.handles import GeneratorHandle
from deployments.options import APPLICATION
from deployments.scaling import connect, states
from generation.types import GenerationRequest, SamplingParams
from rag_service.config import Settings
from tests.deployments.stand_ins import WordsTarget


class IdleDraft:
    """There to be counted."""

    async def status(self) -> dict[str, Any]:
        return {"replica": serve.get_replica_context().replica_tag}


class Pair(WordsTarget):
    """A target that holds the handle of a draft, as the real one does."""

    def __init__(self, folder: str, draft: DeploymentHandle[Any]) -> None:
        super().__init__(folder)
        self._draft = draft


@pytest.fixture(scope="module")
def target(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle[Any]]:
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}, "num_replicas": 1}
    draft = serve.deployment(name="Draft", **options)(IdleDraft)
    pair = serve.deployment(name="Target", **options)(Pair)
    app = pair.bind(str(tmp_path_factory.mktemp("target")), draft.bind())
    yield serve.run(app, name=APPLICATION, route_prefix=None, external_scaler_enabled=True)
    serve.delete(APPLICATION)


def scale(*arguments: str) -> subprocess.CompletedProcess[str]:
    address = str(ray.get_runtime_context().gcs_address)
    command = "from rag_service.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", command, "scale", *arguments, "--ray", address, "--json"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def num_running(name: str) -> int:
    return next(state.num_running for state in states() if state.name == name)


async def test_the_draft_goes_to_none_and_comes_back(target: DeploymentHandle[Any]) -> None:
    for number in (0, 1):
        done = scale("draft", str(number))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"deployment": "Draft", "num_replicas": number, "waited": True}
        assert (num_running("Draft"), num_running("Target")) == (number, 1)
        request = GenerationRequest(f"r{number}", (1,), SamplingParams(max_tokens=3))
        text = [chunk.text async for chunk in GeneratorHandle(target).generate(request)]
        assert "".join(text) == "w0 w1 w2 "


def test_what_may_not_be_is_a_usage_error(target: DeploymentHandle[Any]) -> None:
    done = scale("target", "0")
    assert done.returncode == 2
    assert "only the draft may have none" in done.stderr
    assert num_running("Target") == 1


def test_an_autoscaled_service_says_why_it_cannot_be_scaled(target: DeploymentHandle[Any]) -> None:
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}}
    bounds = {"min_replicas": 1, "max_replicas": 2}
    draft = serve.deployment(name="Draft", num_replicas=1, **options)(IdleDraft)
    scaled = serve.deployment(name="Target", autoscaling_config=bounds, **options)(Pair)
    serve.run(scaled.bind("nowhere", draft.bind()), name=APPLICATION, route_prefix=None)
    done = scale("target", "2")
    assert done.returncode == 1
    error = json.loads(done.stdout or done.stderr)["error"] if done.stdout else done.stderr
    assert "Target cannot be scaled" in str(error)
    assert "Traceback" not in done.stderr
    assert num_running("Target") == 1


def test_a_ray_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(StartError, match=r"No Ray answers at 127\.0\.0\.1:1"):
        connect(Settings(), "127.0.0.1:1")
