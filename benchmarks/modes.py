"""Off, colocated, synchronous and look-ahead in one run: does drafting beside the target pay?

The target runs on one core and the draft, in a process of its own, on another; messages are those of the wire
between replicas. Every mode answers the same held-out prompts of five domains, in rotating order.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Spread, parser, publish, say
from workload import default_pair, held_out_prompts

from generation.config import CacheConfig, EngineConfig, SpeculationConfig
from generation.distillation.prompts import DistillationPrompt
from generation.drafters.link import LocalLink
from generation.drafters.model import DraftWorker
from generation.drafters.process_link import ProcessLink
from generation.engine import Engine
from generation.types import GenerationRequest, SamplingParams, SpeculationStats
from rag_service.config import Settings
from rag_service.draft_choice import load_draft_model
from rag_service.measurement import Pair

MODES = ("off", "colocated", "synchronous", "lookahead")
SLOT_LENGTH = 1280
SCRATCH = 192
TARGET_CORE, DRAFT_CORE = 0, 1


def make_worker(settings: Settings, num_slots: int) -> DraftWorker:
    """The draft, in the child process."""
    torch.set_num_threads(1)
    return DraftWorker(load_draft_model(settings), num_slots=num_slots, slot_length=SLOT_LENGTH + SCRATCH)


@dataclass(slots=True)
class Cell:
    """What one mode did with one domain at one temperature and concurrency."""

    tokens: int = 0
    seconds: float = 0.0
    first_token: list[float] = field(default_factory=list)
    token_gaps: list[float] = field(default_factory=list)
    stats: list[SpeculationStats] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        accepted = sum(s.num_accepted_tokens for s in self.stats)
        tested = accepted + sum(s.num_rejections for s in self.stats)
        hits, misses = (sum(getattr(s, f"lookahead_{w}") for s in self.stats) for w in ("hits", "misses"))
        rounds = sum(s.num_rounds for s in self.stats)
        causes: dict[str, int] = defaultdict(int)
        for stats in self.stats:
            for cause, count in stats.rounds_by_cause.items():
                causes[cause] += count
        return {
            "tokens_per_second": self.tokens / self.seconds if self.seconds else None,
            "time_to_first_token_seconds": Spread.of(self.first_token).median if self.first_token else None,
            "p95_token_seconds": _p95(self.token_gaps),
            "acceptance_rate": accepted / tested if tested else None,
            "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
            "hit_rate": hits / (hits + misses) if hits + misses else None,
            "rounds_by_cause": dict(causes),
        }


class Bench:
    """Engines of all modes over one target and one draft process."""

    def __init__(self, settings: Settings, pair: Pair, concurrency: int, passages: bool, k: int) -> None:
        self._pair, self._concurrency = pair, concurrency
        self._count = 0
        assert pair.draft is not None
        self.remote = ProcessLink(functools.partial(make_worker, settings, concurrency), core=DRAFT_CORE)
        worker = DraftWorker(pair.draft, num_slots=concurrency, slot_length=SLOT_LENGTH + SCRATCH)
        self._engines = {}
        for mode in MODES:
            config = EngineConfig(
                max_batch_size=concurrency,
                cache=CacheConfig(num_tokens=SLOT_LENGTH * concurrency, prefix_caching=False),
                speculation=SpeculationConfig(
                    mode=mode, num_draft_tokens=k, passages=passages, branch_budget=8
                ),
            )
            self._engines[mode] = Engine(
                pair.target,
                pair.tokenizer,
                config,
                colocated=LocalLink(worker) if mode == "colocated" else None,
                remote=self.remote if mode in ("synchronous", "lookahead") else None,
            )

    def run(
        self, mode: str, prompts: list[DistillationPrompt], temperature: float, num_tokens: int, cell: Cell
    ) -> None:
        """Answer ``prompts`` with ``concurrency`` at once (again where they are fewer, so that there are so many);
        decoding time only counts full steps."""
        prompts = prompts * -(-self._concurrency // len(prompts))
        engine = self._engines[mode]
        sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens)
        for start in range(0, len(prompts), self._concurrency):
            last: dict[str, float] = {}
            for prompt in prompts[start : start + self._concurrency]:
                self._count += 1
                engine.add(
                    GenerationRequest(f"{prompt.id}/{self._count}", prompt.token_ids, sampling, prompt.domain)
                )
            while engine.has_work:
                decoding = not any(s.is_prefilling for s in engine.scheduler.running) and bool(
                    engine.scheduler.running
                )
                began = time.perf_counter()
                chunks = engine.step()
                now = time.perf_counter()
                if decoding:
                    cell.seconds += now - began
                for chunk in chunks:
                    if decoding:
                        cell.tokens += len(chunk.token_ids)
                    if chunk.request_id in last and chunk.token_ids:
                        gap = (now - last[chunk.request_id]) / len(chunk.token_ids)
                        cell.token_gaps += [gap] * len(chunk.token_ids)
                    last[chunk.request_id] = now
                    if chunk.timings is not None and chunk.stats is not None:
                        cell.first_token.append(chunk.timings.time_to_first_token_seconds)
                        cell.stats.append(chunk.stats)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--no-passages", action="store_true", help="the model draft alone")
    arguments.add_argument("--batched", action="store_true", help="4 and 8 at once, alone")
    arguments.add_argument("--num-draft-tokens", type=int, default=4)
    arguments.add_argument("--per-domain", type=int, help="questions a domain (2 when quick, else 6)")
    options = arguments.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = Settings.load()
    prompts = held_out_prompts(settings, options.data, options.per_domain or (2 if options.quick else 6))
    pair = default_pair(settings)
    os.sched_setaffinity(0, {TARGET_CORE})
    concurrencies = (1,) if options.quick else (4, 8) if options.batched else (1, 4, 8)
    temperatures = (0.0,) if options.quick else (0.0, 0.7)
    num_tokens = 48 if options.quick else 80
    runs = {}
    for concurrency in concurrencies:
        bench = Bench(settings, pair, concurrency, not options.no_passages, options.num_draft_tokens)
        for mode in MODES:
            bench.run(mode, prompts[:2], 0.0, 16, Cell())
        for temperature in temperatures:
            say(f"concurrency {concurrency}, temperature {temperature}")
            runs[concurrency, temperature] = measure(bench, prompts, temperature, num_tokens)
        bench.remote.close()
    if options.batched:
        publish("modes_batched", {"runs": run_report(runs)}, options.json)
    else:
        publish("modes", report(runs), options.json)


def measure(
    bench: Bench, prompts: list[DistillationPrompt], temperature: float, num_tokens: int
) -> dict[str, dict[str, Cell]]:
    """``cells[domain][mode]``; the order of modes rotates from domain to domain."""
    by_domain: dict[str, list[DistillationPrompt]] = defaultdict(list)
    for prompt in prompts:
        by_domain[prompt.domain].append(prompt)
    cells: dict[str, dict[str, Cell]] = {}
    for turn, (domain, group) in enumerate(by_domain.items()):
        cells[domain] = {mode: Cell() for mode in MODES}
        for step in range(len(MODES)):
            mode = MODES[(turn + step) % len(MODES)]
            bench.run(mode, group, temperature, num_tokens, cells[domain][mode])
    return cells


def report(runs: dict[tuple[int, float], dict[str, dict[str, Cell]]]) -> dict[str, Any]:
    """Keys of design.md, section 6, from the run at concurrency 1 and temperature 0; all runs beside them."""
    first = runs[1, 0.0]
    pooled = _pool(first)
    return {
        **_ratios({mode: cell.summary() for mode, cell in pooled.items()}),
        "domains": {
            domain: _ratios({m: c.summary() for m, c in cells.items()}) for domain, cells in first.items()
        },
        "runs": run_report(runs),
    }


def run_report(runs: dict[tuple[int, float], dict[str, dict[str, Cell]]]) -> dict[str, Any]:
    """Every run, its domains pooled."""
    return {
        f"concurrency {concurrency}, temperature {temperature}": {
            "pooled": {mode: cell.summary() for mode, cell in _pool(cells).items()},
            "ratios": _ratios({mode: cell.summary() for mode, cell in _pool(cells).items()}),
        }
        for (concurrency, temperature), cells in runs.items()
    }


def _ratios(modes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    speed = {mode: summary["tokens_per_second"] or float("nan") for mode, summary in modes.items()}
    ahead = modes["lookahead"]
    return {
        "lookahead_over_best_other": speed["lookahead"] / max(speed["colocated"], speed["synchronous"]),
        "lookahead_over_off": speed["lookahead"] / speed["off"],
        "colocated_over_off": speed["colocated"] / speed["off"],
        "synchronous_over_off": speed["synchronous"] / speed["off"],
        "hit_rate": ahead["hit_rate"],
        "acceptance_rate": ahead["acceptance_rate"],
        "mean_acceptance_length": ahead["mean_acceptance_length"],
        "tokens_per_second": speed,
    }


def _pool(cells: dict[str, dict[str, Cell]]) -> dict[str, Cell]:
    pooled = {mode: Cell() for mode in MODES}
    for by_mode in cells.values():
        for mode, cell in by_mode.items():
            into = pooled[mode]
            into.tokens += cell.tokens
            into.seconds += cell.seconds
            into.first_token += cell.first_token
            into.token_gaps += cell.token_gaps
            into.stats += cell.stats
    return pooled


def _p95(values: list[float]) -> float | None:
    ordered = sorted(values)
    return ordered[int(0.95 * (len(ordered) - 1))] if ordered else None


if __name__ == "__main__":
    main()
