"""How fast is the engine, against transformers and against the theory?

Both sides in one run: same weights, same dtype, one thread, the same prompts in alternating order. Ratios are
per prompt; medians with quartiles are reported. Answers run to a fixed length (the end of sequence ignored), so
that both sides do the same work.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from harness import Spread, parser, publish, say
from sides import (
    SLOT_LENGTH,
    K,
    Side,
    assistant_of,
    decode_rate,
    hf_generate,
    many_requests,
    paired,
    useless_draft,
)
from transformers import AutoModelForCausalLM
from workload import default_pair, held_out_prompts

from generation.attention import Segment
from generation.distillation.prompts import DistillationPrompt
from generation.drafters.model import DraftWorker
from generation.model_runner import ModelRunner
from generation.types import DraftRequest, SamplingParams
from rag_service.config import Settings
from rag_service.draft_choice import draft_config, resolved
from rag_service.measurement import Pair


def prediction(pair: Pair, prompt: DistillationPrompt, alpha: float) -> dict[str, float]:
    """Speculation.md, section 4, from step times measured at this context length: τ / (cK + v)."""
    tokens = 1.0 + sum(alpha**i for i in range(1, K + 1))
    t1 = _verification_seconds(pair, prompt, 1)
    tv = _verification_seconds(pair, prompt, K + 1)
    td = _draft_seconds(pair, prompt)
    return {
        "t_v1_ms": t1 * 1e3,
        "t_v_ms": tv * 1e3,
        "t_d_ms": td * 1e3,
        "predicted": tokens / (K * td / t1 + tv / t1),
    }


def _verification_seconds(pair: Pair, prompt: DistillationPrompt, width: int) -> float:
    runner = ModelRunner(pair.target, 1, SLOT_LENGTH)
    ids = list(prompt.token_ids)
    runner.forward([Segment(0, 0, ids)], [len(ids) - 1])
    times = []
    for _ in range(12):
        began = time.perf_counter()
        logits = runner.forward([Segment(0, len(ids), ids[:width])], range(width))
        logits.max(dim=-1)
        times.append(time.perf_counter() - began)
    return Spread.of(times).median


def _draft_seconds(pair: Pair, prompt: DistillationPrompt) -> float:
    """One draft step, from proposals of K on a warm prefix: the catch-up pass counts as a step."""
    assert pair.draft is not None
    worker = DraftWorker(pair.draft, num_slots=1, slot_length=SLOT_LENGTH + 128)
    ids = prompt.token_ids
    times = []
    for number in range(12):
        new = ids if number == 0 else ids[:K]
        length = len(ids) + number * K
        began = time.perf_counter()
        worker.answer([DraftRequest("t", number, length, new, K, 0, SamplingParams())])
        times.append((time.perf_counter() - began) / K)
    return Spread.of(times[1:]).median


class EngineBenchmark:
    """One section a method; each adds its figures to ``result``."""

    def __init__(self, settings: Settings, options: argparse.Namespace) -> None:
        self.options = options
        self.num_tokens = 40 if options.quick else 96
        self.settings = settings
        self.pair = default_pair(settings)
        self.prompts = held_out_prompts(settings, options.data, 1 if options.quick else options.per_domain)
        self.target, draft = resolved(settings.engine.target, settings), draft_config(settings)
        assert draft is not None
        self.draft = draft
        shape = self.pair.target.cache_shape
        model: Any = AutoModelForCausalLM.from_pretrained(self.target.model, dtype=shape.dtype)
        self.hf = model.to(shape.device).eval()
        self.off = Side(self.pair, "off")
        self.off.run(self.prompts[:1], 8)
        self.result: dict[str, Any] = {
            "device": str(shape.device),
            "num_prompts": len(self.prompts),
            "num_tokens": self.num_tokens,
            "num_draft_tokens": K,
            "kv_bytes": SLOT_LENGTH * shape.bytes_per_token,
        }

    def note(self, name: str, ratios: list[float]) -> None:
        self.result[name] = Spread.of(ratios).median
        self.result[f"{name}_spread"] = Spread.of(ratios)

    def over_plain(self, side: Side) -> list[float]:
        """Decoding speed of ``side`` over plain decoding, prompt by prompt."""
        n = self.num_tokens
        return paired(self.prompts, lambda p: side.run([p], n)[1], lambda p: self.off.run([p], n)[1])

    def against_transformers(self) -> None:
        say("plain decoding against transformers")
        n = self.num_tokens
        hf_generate(self.hf, self.prompts[0], 8)
        ours, theirs = (lambda p: self.off.run([p], n)[0]), (lambda p: hf_generate(self.hf, p, n))
        self.note("plain_over_transformers", paired(self.prompts, ours, theirs))

    def batched(self) -> None:
        say("batch 8 against batch 1")
        side = Side(self.pair, "off", batch=8)
        prompts, n = self.prompts, self.num_tokens
        groups = [prompts[i : i + 8] for i in range(0, len(prompts) - 7, 8)] or [(prompts * 8)[:8]]
        ratios, per_step = [], []
        for group in groups:
            alone = sum(self.off.run([p], n)[1] for p in group)
            steps, overhead = side.engine.num_steps, side.engine.overhead_seconds
            together = decode_rate(side, group, n)
            per_step.append((side.engine.overhead_seconds - overhead) / (side.engine.num_steps - steps) * 1e3)
            ratios.append(together * alone / (8 * n))
        self.note("batch8_over_batch1", ratios)
        self.result["overhead_ms_per_round"] = Spread.of(per_step).median

    def speculative(self) -> Side:
        say("speculative against plain, and against the prediction")
        side = Side(self.pair, "colocated", draft=self.pair.draft)
        side.run(self.prompts[:1], 8)
        side.stats.clear()
        self.note("speculative_over_plain", self.over_plain(side))
        alpha = side.alpha() or 0.0
        self.result["acceptance_rate"] = alpha
        self.result["tokens_per_round"] = side.tokens_per_round()
        some = self.prompts[:: max(1, len(self.prompts) // 5)]
        predictions = [prediction(self.pair, prompt, alpha) for prompt in some]
        medians = {key: Spread.of([p[key] for p in predictions]).median for key in predictions[0]}
        self.result["prediction"] = medians
        measured = self.result["speculative_over_plain"]
        self.result["speculative_over_predicted"] = measured / medians["predicted"]
        return side

    def default_drafters(self) -> None:
        say("proposals that end in doubt, then the default drafters with the controller")
        doubting = Side(self.pair, "colocated", draft=self.pair.draft, adaptive=True)
        doubting.run(self.prompts[:2], self.num_tokens)
        doubting.stats.clear()
        self.note("adaptive_length_over_plain", self.over_plain(doubting))
        self.result["adaptive_length_tokens_per_round"] = doubting.tokens_per_round()
        side = Side(self.pair, "auto", draft=self.pair.draft, k=5, passages=True, adaptive=True)
        side.run(self.prompts[:2], self.num_tokens)
        side.stats.clear()
        self.result["default_drafters"] = {
            "over_plain": Spread.of(self.over_plain(side)),
            "acceptance_rate": side.alpha(),
            "mean_acceptance_length": side.tokens_per_round(),
        }

    def against_assisted(self, side: Side) -> None:
        say("against transformers' assisted generation")
        assistant, n = assistant_of(self.draft.model, self.target.model, self.hf), self.num_tokens
        hf_generate(self.hf, self.prompts[0], 8, assistant_model=assistant)
        ratios = paired(
            self.prompts,
            lambda p: side.run([p], n)[0],
            lambda p: hf_generate(self.hf, p, n, assistant_model=assistant),
        )
        self.note("speculative_over_assisted", ratios)

    def with_useless_draft(self) -> None:
        say("a useless draft, with the controller on")
        side = Side(
            self.pair, "auto", draft=useless_draft(self.settings, self.pair.target), k=5, adaptive=True
        )
        side.run(self.prompts[:2], self.num_tokens)
        side.stats.clear()
        self.note("useless_draft_over_plain", self.over_plain(side))
        self.result["useless_draft_acceptance_rate"] = side.alpha()

    def memory(self) -> None:
        """Resident memory while short requests come and go, speculation and prefix cache on."""
        number = 200 if self.options.quick else 1000
        say(f"memory over {number} requests")
        side = Side(self.pair, "auto", draft=self.pair.draft, batch=8, passages=True, prefix_caching=True)
        marks = many_requests(side, self.prompts, number, 10)
        pool = side.engine.runner.pool
        self.result["memory"] = {
            "num_requests": number,
            "kv_budget_bytes": 8 * SLOT_LENGTH * self.pair.target.cache_shape.bytes_per_token,
            "kv_bytes_held": sum(tensor.nbytes for tensor in (*pool.keys, *pool.values)),
            "slots_in_use_afterwards": pool.num_slots - pool.num_free,
            "resident_mib": marks,
            "growth_mib_second_half": marks[-1] - marks[len(marks) // 2],
        }

    def run(self) -> dict[str, Any]:
        self.against_transformers()
        self.batched()
        side = self.speculative()
        self.default_drafters()
        self.against_assisted(side)
        self.with_useless_draft()
        self.memory()
        return self.result


def measure(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """All sections on one device."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = Settings.load(overrides={"engine": {"target": {"device": device}}})
    return EngineBenchmark(settings, options).run()


def add_size(arguments: argparse.ArgumentParser) -> None:
    """``--per-domain``, the size of the run."""
    arguments.add_argument("--per-domain", type=int, default=6, help="prompts a domain (1 with --quick)")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--device", default="auto", help="auto, cpu or cuda:n")
    add_size(arguments)
    options = arguments.parse_args()
    publish("engine", measure(options, options.device), options.json)


if __name__ == "__main__":
    main()
