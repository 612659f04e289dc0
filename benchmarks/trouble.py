"""What do the users see while the draft is in trouble? Tokens a second, by two-second windows, against ``off``.

Real Ray, target and draft replicas on their own cores, the default pair. Streams decode without a pause; after a
while without trouble the draft is spoilt in one way (``tests/deployments/tiny_pair.py``), or killed again and
again. The goal: no failed request, the same greedy text, and no window under 95 % of plain decoding for longer
than it lasts.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from harness import ROOT, parser, publish, say
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from workload import held_out_prompts

from deployments.draft import ROUTER
from deployments.handles import GeneratorHandle
from deployments.options import deployment_options
from deployments.target import build_target
from generation.distillation.prompts import DistillationPrompt
from generation.types import GenerationRequest, SamplingParams
from rag_service.config import Settings
from tests.deployments.tiny_pair import FAULTS, FaultyDraft

WINDOW = 2.0
GOAL = 0.95
NUM_TOKENS = 96
KILLED = "killed every two seconds"


class Pair:
    """Target and draft as a Serve application, and streams over them."""

    def __init__(self, settings: Settings) -> None:
        draft = serve.deployment(
            **deployment_options(settings, "Draft"),
            request_router_config=RequestRouterConfig(request_router_class=ROUTER),  # type: ignore[arg-type]
        )(FaultyDraft).bind(settings)
        self._target = GeneratorHandle(
            serve.run(build_target(settings, draft), name="trouble", route_prefix=None)
        )
        self._draft = serve.get_deployment_handle("Draft", "trouble")
        self._count = itertools.count()

    def set_fault(self, fault: str) -> None:
        self._draft.broadcast("set_fault", fault).results(timeout_s=60)

    async def kill(self) -> None:
        """The draft's process, as an out-of-memory killer would."""
        try:
            found = await self._draft.broadcast("status").results_async(timeout_s=5, return_exceptions=True)
        except DeploymentUnavailableError:
            return  # the last one killed has no successor yet
        for status in found:
            if isinstance(status, dict):
                os.kill(status["pid"], signal.SIGKILL)

    async def stream(self, prompt: DistillationPrompt, mode: str | None) -> AsyncIterator[tuple[int, ...]]:
        """Token ids of one answer as they come."""
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        request = GenerationRequest(
            f"{next(self._count)}", prompt.token_ids, sampling, domain=prompt.domain, mode=mode
        )
        async for chunk in self._target.generate(request):
            yield chunk.token_ids

    async def run(
        self,
        prompts: list[DistillationPrompt],
        mode: str | None,
        concurrency: int,
        seconds: float,
        fault: str,
    ) -> dict[str, Any]:
        """Stream for ``seconds``, ``concurrency`` at once."""
        arrivals: list[tuple[float, int]] = []
        texts: dict[str, tuple[int, ...]] = {}
        failures: list[str] = []
        turn = itertools.cycle(prompts)
        ends = time.perf_counter() + seconds

        async def stream() -> None:
            while time.perf_counter() < ends:
                prompt, text = next(turn), list[int]()
                try:
                    async for ids in self.stream(prompt, mode):
                        arrivals.append((time.perf_counter(), len(ids)))
                        text += ids
                except Exception as error:  # counted: what the benchmark looks for
                    failures.append(repr(error))
                    continue
                texts[prompt.id] = tuple(text)

        async def killer() -> None:
            while fault == KILLED and time.perf_counter() < ends - 1:
                await self.kill()
                await asyncio.sleep(2.0)

        began = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(concurrency)), killer())
        return {
            "tokens_per_second": rate(arrivals, began, ends),
            "windows": windows(arrivals, began, ends),
            "failures": failures,
            "texts": texts,
        }


def rate(arrivals: list[tuple[float, int]], began: float, ends: float) -> float:
    return sum(n for at, n in arrivals if began <= at <= ends) / (ends - began)


def windows(arrivals: list[tuple[float, int]], began: float, ends: float) -> list[float]:
    """Tokens a second in every window of two seconds, each beginning a quarter of a second after the last."""
    starts = []
    at = began
    while at + WINDOW <= ends:
        starts.append(at)
        at += WINDOW / 8
    return [rate(arrivals, start, start + WINDOW) for start in starts]


@contextmanager
def cluster() -> Iterator[None]:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), os.environ.get("PYTHONPATH", "")]
    )  # for the replicas
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def measure(
    pair: Pair, prompts: list[DistillationPrompt], concurrency: int, seconds: float
) -> dict[str, Any]:
    """Plain decoding before and after every fault, so that a drifting machine is seen and not blamed."""
    out: dict[str, Any] = {}
    before = asyncio.run(pair.run(prompts, "off", concurrency, seconds, "none"))
    truth = dict(before["texts"])
    for fault in (*FAULTS, KILLED):
        say(f"{concurrency} streams, {fault}")
        if fault != KILLED:
            pair.set_fault(fault)
        with_fault = asyncio.run(pair.run(prompts, None, concurrency, seconds, fault))
        if fault != KILLED:
            pair.set_fault("none")
        after = asyncio.run(pair.run(prompts, "off", concurrency, seconds, "none"))
        truth.update(after["texts"])
        plain = statistics.fmean((before["tokens_per_second"], after["tokens_per_second"]))
        # A window of plain decoding is uneven too (prefill): like is compared with like.
        plain_worst = min(*before["windows"], *after["windows"])
        shared = [i for i in with_fault["texts"] if i in truth]
        out[fault] = {
            "over_off": with_fault["tokens_per_second"] / plain,
            "worst_window_over_off": min(with_fault["windows"]) / plain,
            "worst_window_over_worst_of_off": min(with_fault["windows"]) / max(plain_worst, 1e-9),
            "share_of_windows_below_95_percent": statistics.fmean(
                w < GOAL * plain for w in with_fault["windows"]
            ),
            "off_share_of_windows_below_95_percent": statistics.fmean(
                w < GOAL * plain for w in (*before["windows"], *after["windows"])
            ),
            "failed_requests": len(with_fault["failures"]),
            "failures": with_fault["failures"][:3],
            "texts_compared": len(shared),
            "texts_different": sum(with_fault["texts"][i] != truth[i] for i in shared),
        }
        before = after
    return out


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as data, cluster():
        settings = Settings.load(
            None,
            {
                "data_folder": data,
                "engine.speculation.mode": "lookahead",
                "deployments.target.num_cpus": 1,
                "deployments.draft.num_cpus": 1,
            },
        )
        prompts = held_out_prompts(settings, options.data, 1 if options.quick else 2)
        pair = Pair(settings)
        asyncio.run(pair.run(prompts, None, 1, 5.0, "none"))
        concurrencies = (1,) if options.quick else (1, 4)
        seconds = 8.0 if options.quick else 12.0
        result = {f"{n} streams": measure(pair, prompts, n, seconds) for n in concurrencies}
    publish("trouble", result, options.json)


if __name__ == "__main__":
    main()
