"""Is the draft's core better spent on a second target?

The same total load on the same two cores: one target with look-ahead beside one draft, against two plain targets
that share the requests. From 1 to 16 concurrent requests; tokens per second of the whole, and seconds a request.
Two plain targets double the throughput once there are two requests; a draft halves the time of each. Where the
lines cross is published, whichever way it falls.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from harness import Spread, parser, publish, say
from modes import DRAFT_CORE, SCRATCH, SLOT_LENGTH, TARGET_CORE, make_worker
from workload import default_pair, held_out_prompts

from generation.config import CacheConfig, EngineConfig, SpeculationConfig
from generation.distillation.prompts import DistillationPrompt
from generation.drafters.process_link import ProcessLink
from generation.engine import Engine
from generation.types import GenerationRequest, SamplingParams
from rag_service.config import Settings
from rag_service.measurement import Pair

MAX_BATCH = 16


@dataclass(frozen=True, slots=True)
class Load:
    """What one side did: tokens, wall-clock seconds, and the seconds of every request."""

    tokens: int
    seconds: float
    request_seconds: tuple[float, ...]


class Loop:
    """Closed-loop load on one engine: ``concurrency`` requests at any time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0

    def run(self, prompts: list[DistillationPrompt], concurrency: int, num_tokens: int) -> Load:
        waiting, began, tokens = list(prompts), time.perf_counter(), 0
        started: dict[str, float] = {}
        took: list[float] = []
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        while waiting or self.engine.has_work:
            while waiting and len(started) < concurrency:
                prompt = waiting.pop(0)
                self._count += 1
                request = GenerationRequest(f"{self._count}", prompt.token_ids, sampling, prompt.domain)
                started[request.request_id] = time.perf_counter()
                self.engine.add(request)
            for chunk in self.engine.step():
                tokens += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    took.append(time.perf_counter() - started.pop(chunk.request_id))
        return Load(tokens, time.perf_counter() - began, tuple(took))


def make_engine(pair: Pair, mode: str, remote: ProcessLink | None) -> Engine:
    options: dict[str, Any] = {"mode": mode, "num_draft_tokens": 4, "passages": mode != "off"}
    config = EngineConfig(
        max_batch_size=MAX_BATCH,
        max_waiting=256,
        cache=CacheConfig(num_tokens=SLOT_LENGTH * MAX_BATCH, prefix_caching=False),
        speculation=SpeculationConfig(**options),
    )
    return Engine(pair.target, pair.tokenizer, config, remote=remote)


def second_target(connection: Connection) -> None:
    """A plain target in a process of its own, on the draft's core."""
    os.sched_setaffinity(0, {DRAFT_CORE})
    torch.set_num_threads(1)
    loop = Loop(make_engine(default_pair(Settings.load(), with_draft=False), "off", None))
    connection.send("ready")
    while (order := connection.recv()) is not None:
        connection.send(loop.run(*order))


def two_plain(
    loop: Loop, other: Connection, prompts: list[DistillationPrompt], concurrency: int, n: int
) -> Load:
    """Half the prompts and half the concurrency each; with one request at a time the second target idles."""
    share = concurrency // 2
    if share == 0:
        return loop.run(prompts, 1, n)
    mine, theirs = prompts[::2], prompts[1::2]
    began, found = time.perf_counter(), []
    other.send((theirs, share, n))
    listener = threading.Thread(target=lambda: found.append(other.recv()))
    listener.start()
    here = loop.run(mine, concurrency - share, n)
    listener.join()
    there: Load = found[0]
    seconds = time.perf_counter() - began
    return Load(here.tokens + there.tokens, seconds, here.request_seconds + there.request_seconds)


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = Settings.load()
    prompts = held_out_prompts(settings, options.data, 2 if options.quick else 5)
    n = 32 if options.quick else 64
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=second_target, args=(there,), daemon=True)
    process.start()
    assert here.recv() == "ready"
    os.sched_setaffinity(0, {TARGET_CORE})
    pair = default_pair(settings, with_draft=False)
    link = ProcessLink(functools.partial(make_worker, settings, MAX_BATCH), core=DRAFT_CORE)
    plain, ahead = Loop(make_engine(pair, "off", None)), Loop(make_engine(pair, "auto", link))
    ahead.run(prompts[:4], 2, n)
    rows: list[dict[str, Any]] = []
    for concurrency in (1, 2, 4) if options.quick else (1, 2, 4, 8, 16):
        many = (prompts * 4)[: max(len(prompts), 2 * concurrency)]
        say(f"concurrency {concurrency}")
        ours = ahead.run(many, concurrency, n)
        theirs = two_plain(plain, here, many, concurrency, n)
        rows.append(
            {
                "concurrency": concurrency,
                "draft_tokens_per_second": ours.tokens / ours.seconds,
                "two_plain_tokens_per_second": theirs.tokens / theirs.seconds,
                "throughput_ratio": ours.tokens / ours.seconds / (theirs.tokens / theirs.seconds),
                "draft_request_seconds": Spread.of(ours.request_seconds),
                "two_plain_request_seconds": Spread.of(theirs.request_seconds),
            }
        )
    here.send(None)
    link.close()
    crossover = next((row["concurrency"] for row in rows if row["throughput_ratio"] < 1.0), None)
    publish(
        "equal_hardware", {"crossover_concurrency": crossover, "rows": rows, "scratch": SCRATCH}, options.json
    )


if __name__ == "__main__":
    main()
