"""Trouble at the draft hides itself: no request fails, greedy output is unchanged, and the metrics say why.

Real local Ray, real target and draft replicas, real messages; the models are tiny so that hundreds of requests
take seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.draft import ROUTER
from deployments.handles import GeneratorHandle
from deployments.options import deployment_options
from deployments.target import build_target
from generation.types import GenerationChunk, GenerationRequest, SamplingParams
from rag_service.config import Settings
from tests.deployments.tiny_pair import FAULTS, FaultyDraft, save_tiny_model, tiny_settings

T = TypeVar("T")
NUM_TOKENS = 40

pytestmark = pytest.mark.slow


class Service:
    """Target and Draft as one Serve application of their own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.deploy(num_drafts=1, num_targets=1)
        self._count = 0

    def deploy(self, *, num_drafts: int, num_targets: int) -> None:
        draft_options = {**deployment_options(self.settings, "Draft"), "num_replicas": num_drafts}
        draft = serve.deployment(
            **draft_options,
            request_router_config=RequestRouterConfig(request_router_class=ROUTER),  # type: ignore[arg-type]
        )(FaultyDraft).bind(self.settings)
        update = {"deployments": {"target": {"num_replicas": num_targets}}}
        target = build_target(Settings.parse(_merged(self.settings.as_values(), update)), draft)
        handle = serve.run(target, name="faults", route_prefix=None)
        self.target = GeneratorHandle(handle)
        self.draft = serve.get_deployment_handle("Draft", "faults")

    def set_fault(self, fault: str) -> None:
        self.draft.broadcast("set_fault", fault).results(timeout_s=30)

    def draft_pids(self) -> list[int]:
        try:
            found = self.draft.broadcast("status").results(timeout_s=30, return_exceptions=True)
        except DeploymentUnavailableError:
            return []  # the last one killed has no successor yet
        return [status["pid"] for status in found if isinstance(status, dict)]

    async def ask(self, number: int, mode: str | None = None) -> list[GenerationChunk]:
        self._count += 1
        prompt = tuple(3 + (number * 7 + i * i) % 200 for i in range(12 + number % 5))
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        request = GenerationRequest(f"{number}/{self._count}", prompt, sampling, mode=mode)
        return [chunk async for chunk in self.target.generate(request)]


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        out[key] = _merged(out[key], value) if isinstance(value, dict) else value
    return out


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def ids(chunks: list[GenerationChunk]) -> tuple[int, ...]:
    assert chunks[-1].finish_reason == "length", chunks[-1]
    return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)


def counts(service: Service) -> dict[str, int]:
    """What the target's link counted since it began."""
    link = run(service.target.status())["link"]
    return {
        name: value for name, value in link.items() if type(value) is int and not name.startswith("bytes")
    }


def causes(answers: list[list[GenerationChunk]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for answer in answers:
        stats = answer[-1].stats
        assert stats is not None
        total.update(dict(stats.rounds_by_cause))
    return total


@pytest.fixture(scope="module")
def service(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder, data = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("data")
    save_tiny_model(Path(folder))
    yield Service(tiny_settings(folder, data))
    serve.delete("faults")


async def healed(service: Service) -> None:
    """A trouble of before leaves its breaker open for up to 15 s, and behind it nothing new would be met."""
    for number in range(300):
        await service.ask(number)
        if set((await service.target.status())["link"]["breakers"].values()) == {"closed"}:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("no breaker closed again")


async def gathered(service: Service, numbers: range, mode: str | None = None) -> list[list[GenerationChunk]]:
    limit = asyncio.Semaphore(4)

    async def one(number: int) -> list[GenerationChunk]:
        async with limit:
            return await service.ask(number, mode)

    return list(await asyncio.gather(*(one(number) for number in numbers)))


@pytest.fixture(scope="module")
def truth(service: Service) -> list[tuple[int, ...]]:
    """What plain decoding says to every prompt."""
    return [ids(answer) for answer in run(gathered(service, range(12), mode="off"))]


@pytest.mark.parametrize("fault", FAULTS)
def test_answers_are_those_of_plain_decoding(
    service: Service, truth: list[tuple[int, ...]], fault: str
) -> None:
    run(healed(service))
    before = Counter(counts(service))
    service.set_fault(fault)
    try:
        answers = run(gathered(service, range(12)))
        link = Counter(counts(service)) - before
    finally:
        service.set_fault("none")
    assert [ids(answer) for answer in answers] == truth
    found = causes(answers)
    if fault == "none":
        assert found["all_accepted"] > 0
        return
    assert found["no_proposal_timeout"] + found["no_proposal_draft_down"] + found["no_proposal_off"] > 0
    troubles = {
        "late": link["late"],
        "one in ten": sum(count for name, count in link.items() if name.startswith("failed_")),
        "raises": sum(count for name, count in link.items() if name.startswith("failed_")),
        "garbage": link["garbled"],
        "cut short": link["garbled"],
        "nan": link["garbled"],
        "wrong round": link["dropped"],
        "another's table": link["dropped"],
    }
    assert troubles[fault] > 0, link


def test_a_draft_that_answers_one_in_ten_opens_its_breaker(service: Service) -> None:
    run(healed(service))
    service.set_fault("one in ten")
    try:
        found = causes(run(gathered(service, range(12))))
        status = run(service.target.status())
    finally:
        service.set_fault("none")
    # Behind an open breaker nothing is asked: a few rounds of hundreds reached the draft.
    assert "closed" not in {state for key, state in status["link"]["breakers"].items() if "/" not in key}
    assert found["no_proposal_draft_down"] > found["no_proposal_timeout"], found


def test_killing_the_draft_again_and_again_fails_no_request(
    service: Service, truth: list[tuple[int, ...]]
) -> None:
    num_requests, num_kills = 96, 6

    async def killer() -> int:
        killed = 0
        while killed < num_kills:
            await asyncio.sleep(0.7)
            for pid in await asyncio.to_thread(service.draft_pids):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        return killed

    async def both() -> tuple[list[list[GenerationChunk]], int]:
        kills = asyncio.create_task(killer())
        answers: list[list[GenerationChunk]] = []
        while len(answers) < num_requests or not kills.done():
            answers += await gathered(service, range(12))
        return answers, await kills

    answers, killed = run(both())
    assert killed >= num_kills
    assert all(ids(answer) == truth[number % 12] for number, answer in enumerate(answers))


def test_scaling_draft_and_target_while_serving_fails_no_request(
    service: Service, truth: list[tuple[int, ...]]
) -> None:
    async def load(stop: asyncio.Event) -> list[list[GenerationChunk]]:
        answers: list[list[GenerationChunk]] = []
        while not stop.is_set():
            answers += await gathered(service, range(12))
        return answers

    async def both() -> list[list[GenerationChunk]]:
        stop = asyncio.Event()
        loading = asyncio.create_task(load(stop))
        for num_drafts, num_targets in ((2, 1), (2, 2), (1, 2), (1, 1)):
            await asyncio.to_thread(service.deploy, num_drafts=num_drafts, num_targets=num_targets)
            await asyncio.sleep(1.0)
        stop.set()
        return await loading

    answers = run(both())
    assert answers
    assert all(ids(answer) == truth[number % 12] for number, answer in enumerate(answers))


def test_clients_that_leave_free_everything(service: Service) -> None:
    async def leave() -> None:
        for number in range(12):
            request = GenerationRequest(
                f"gone/{number}", (5, 6, 7), SamplingParams(max_tokens=400, ignore_eos=True)
            )
            stream = service.target.generate(request)
            await anext(stream)
            await cast(Any, stream).aclose()

    async def freed() -> bool:
        for _ in range(100):
            status = await service.target.status()
            kv = status["kv"]
            if kv["free_slots"] == kv["slots"] and status["running"] == 0 and status["waiting"] == 0:
                return True
            await asyncio.sleep(0.1)
        return False

    run(leave())
    assert run(freed())
