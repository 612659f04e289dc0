"""Replicas by signals: the policy by itself, and Serve's autoscaler with real target and draft replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve._private.common import ReplicaState
from ray.serve.config import RequestRouterConfig

from deployments.autoscaling import ACCEPTANCE, BUSY_SHARE, KV_USE, QUEUED_TOKENS, REPLY_SHARE, SignalPolicy
from deployments.draft import ROUTER, DraftReplica
from deployments.handles import GeneratorHandle
from deployments.options import deployment_options
from deployments.target import TargetReplica
from generation.types import GenerationRequest, SamplingParams
from rag_service.config import Settings
from tests.deployments.tiny_pair import save_tiny_model, tiny_settings

# Serve would have the interval of a test from the environment of the whole Ray, which other tests share.
pytestmark = pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
Policy = Callable[[Any], tuple[float, dict[str, Any]]]


def policy_of(name: str) -> SignalPolicy:
    """The policy with the aims that the default settings give it."""
    settings = Settings.load(
        None, {f"deployments.{name.lower()}.autoscaling": {"target_ongoing_requests": 8}}
    )
    options: Any = deployment_options(settings, name)  # type: ignore[arg-type]
    return SignalPolicy(**options["autoscaling_config"]["policy"]["policy_kwargs"])


def wanted(
    policy: Policy, signals: Mapping[str, list[float]], calls: float = 0.0, current: int | None = None
) -> float:
    number = current if current is not None else max(1, *(len(values) for values in signals.values()))
    context = SimpleNamespace(
        current_num_replicas=number,
        target_num_replicas=number,
        total_num_requests=calls,
        aggregated_metrics={name: dict(enumerate(values)) for name, values in signals.items()},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 8.0),
    )
    return policy(context)[0]


@pytest.mark.parametrize(
    ("signals", "calls", "number"),
    [
        ({QUEUED_TOKENS: [0.0], KV_USE: [0.1]}, 20, 2.5),  # as Serve's own policy
        ({QUEUED_TOKENS: [8192.0], KV_USE: [0.1]}, 1, 2.0),  # few calls, long prompts
        ({QUEUED_TOKENS: [0.0, 0.0], KV_USE: [1.0, 0.955]}, 2, 2.3),  # no room for a burst
        ({}, 4, 0.5),  # nothing told yet
        ({QUEUED_TOKENS: [float("nan")], KV_USE: [0.425]}, 0, 0.5),
    ],
)
def test_a_target_follows_its_most_pressed_signal(
    signals: dict[str, list[float]], calls: float, number: float
) -> None:
    assert wanted(policy_of("Target"), signals, calls, current=2) == pytest.approx(number)


@pytest.mark.parametrize(
    ("told", "number"),
    [
        ({REPLY_SHARE: [1.6], BUSY_SHARE: [0.9], ACCEPTANCE: [0.7]}, 1.8),  # late because it is busy: another
        (
            {REPLY_SHARE: [4.0], BUSY_SHARE: [0.2], ACCEPTANCE: [0.7]},
            0.4,
        ),  # late by itself: another is as late
        (
            {REPLY_SHARE: [0.4, 0.4], BUSY_SHARE: [0.9, 0.9], ACCEPTANCE: [0.7, 0.6]},
            1.0,
        ),  # hidden: one will do
        ({REPLY_SHARE: [1.6, 1.6], BUSY_SHARE: [0.9, 0.9], ACCEPTANCE: [0.1, 0.2]}, 1.0),  # not accepted
        ({BUSY_SHARE: [0.0]}, 0.0),  # nobody asks
    ],
)
def test_a_draft_follows_latency_while_it_is_accepted(told: dict[str, list[float]], number: float) -> None:
    assert wanted(policy_of("Draft"), told) == pytest.approx(number)


def test_none_begin_by_themselves() -> None:
    assert wanted(policy_of("Draft"), {}, calls=0, current=0) == 0


class Service:
    """Target and Draft as an application whose replicas Serve counts; its look-back is short, for a test."""

    def __init__(self, settings: Settings) -> None:
        draft = serve.deployment(
            **self._options(settings, "Draft"),
            request_router_config=RequestRouterConfig(request_router_class=ROUTER),  # type: ignore[arg-type]
        )(DraftReplica).bind(settings)
        target = serve.deployment(**self._options(settings, "Target"))(TargetReplica).bind(settings, draft)
        self.target = GeneratorHandle(serve.run(target, name="scaled", route_prefix=None))
        self._count = 0

    @staticmethod
    def _options(settings: Settings, name: Any) -> dict[str, Any]:
        options = deployment_options(settings, name)
        options["autoscaling_config"] |= {"look_back_period_s": 2.0, "metrics_interval_s": 0.5}
        return options

    async def ask(self) -> str:
        self._count += 1
        prompt = tuple(3 + i * i % 200 for i in range(200))
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        chunks = self.target.generate(GenerationRequest(f"r{self._count}", prompt, sampling))
        return "".join([chunk.text async for chunk in chunks])

    async def until(self, name: str, number: int, num_clients: int) -> set[str]:
        """Ask with so many clients until there are ``number`` replicas; the answers given meanwhile."""
        given: set[str] = set()
        done = asyncio.Event()

        async def client() -> None:
            while not done.is_set():
                given.add(await self.ask())

        clients = [asyncio.create_task(client()) for _ in range(num_clients)]
        ends_at = time.monotonic() + 120
        try:
            while self.num_replicas(name) != number:
                assert time.monotonic() < ends_at, f"{name} did not come to {number} replicas"
                await asyncio.sleep(0.2)
        finally:
            done.set()
            await asyncio.gather(*clients)
        return given

    @staticmethod
    def num_replicas(name: str) -> int:
        deployments = serve.status().applications["scaled"].deployments
        return deployments[name].replica_states.get(ReplicaState.RUNNING, 0)


@pytest.fixture(scope="module")
def service(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder, data = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("data")
    save_tiny_model(Path(folder))
    soon = {"upscale_delay_seconds": 1.0, "downscale_delay_seconds": 2.0, "target_ongoing_requests": 100.0}
    settings = tiny_settings(
        folder,
        data,
        **{
            "deployments.target.autoscaling": {**soon, "max_replicas": 2, "target_queued_tokens": 600.0},
            "deployments.draft.autoscaling": {**soon, "min_replicas": 0, "max_replicas": 1},
            "deployments.draft.autoscaling.target_ongoing_requests": 0.5,
            "engine.max_batch_size": 1,
            "engine.cache.num_tokens": 16384,
        },
    )
    yield Service(settings)
    serve.delete("scaled")


@pytest.mark.slow
async def test_queued_tokens_bring_targets_and_work_wakes_the_draft(service: Service) -> None:
    # Eight calls are far from a hundred a replica: only the tokens that wait in the engine ask for a second target.
    answers = await service.until("Target", 2, num_clients=8)
    answers |= await service.until("Target", 1, num_clients=0)
    answers |= await service.until("Draft", 0, num_clients=0)
    answers |= await service.until("Draft", 1, num_clients=1)
    assert len(answers) == 1
