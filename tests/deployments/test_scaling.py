"""Scaling the running application on real Ray, while requests are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from deployments.handles import GeneratorHandle
from deployments.options import APPLICATION
from deployments.scaling import NotRunning, scale, states, wait_for
from generation.types import GenerationRequest, SamplingParams
from rag_service.config import ConfigError, Settings
from tests.deployments.stand_ins import WordsTarget


@pytest.fixture(scope="module")
def target(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = str(tmp_path_factory.mktemp("target"))
    options: dict[str, Any] = {"name": "Target", "ray_actor_options": {"num_cpus": 0.1}, "num_replicas": 1}
    deployment = serve.deployment(**options, max_ongoing_requests=64)(WordsTarget)
    yield serve.run(
        deployment.bind(folder), name=APPLICATION, route_prefix=None, external_scaler_enabled=True
    )
    serve.delete(APPLICATION)


async def test_up_and_down_under_load_without_a_failed_request(target: Any) -> None:
    handle = GeneratorHandle(target)
    finished: list[str] = []
    stopping = asyncio.Event()

    async def client(name: str) -> None:
        number = 0
        while not stopping.is_set():
            number += 1
            request = GenerationRequest(f"{name}-{number}", (1,), SamplingParams(max_tokens=20))
            finished.append("".join([chunk.text async for chunk in handle.generate(request)]))

    clients = [asyncio.create_task(client(f"c{n}")) for n in range(4)]
    for num_replicas in (3, 1, 2):
        scale(Settings(), "Target", num_replicas)
        await asyncio.to_thread(wait_for, "Target", num_replicas, 60)
    stopping.set()
    await asyncio.gather(*clients)
    assert len(finished) > 4
    assert set(finished) == {"".join(f"w{n} " for n in range(20))}


def test_states_tell_of_deployments_and_their_replicas(target: Any) -> None:
    (found,) = states(with_replicas=True)
    assert (found.name, found.num_starting, found.num_stopping) == ("Target", 0, 0)
    assert len(found.replicas) == found.num_running
    assert {replica["target"] for replica in found.replicas} == {"words"}


@pytest.mark.parametrize(
    ("name", "number", "sentence"),
    [("Target", 0, "at least one"), ("Recorder", 2, "exactly one"), ("Retriever", 2, "embedded index")],
)
def test_what_may_not_be_scaled_is_refused(target: Any, name: str, number: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        scale(Settings(), name, number)


def test_unknown_and_absent_deployments_are_named(target: Any) -> None:
    with pytest.raises(ConfigError, match="'Planner'"):
        scale(Settings(), "Planner", 1)
    with pytest.raises(NotRunning, match="Draft is not part"):
        scale(Settings(), "Draft", 2)


def test_waiting_ends(target: Any) -> None:
    with pytest.raises(TimeoutError, match="did not come to 9 replicas"):
        wait_for("Target", 9, seconds=0.1)


def test_no_application_is_said(local_ray: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("deployments.scaling.APPLICATION", "another")
    with pytest.raises(NotRunning, match="No application 'another'"):
        states()
