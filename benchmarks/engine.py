"""How fast is the engine, against transformers and against the theory?

Both sides in one run: same weights, same dtype, one thread, the same prompts in alternating order. Ratios are
per prompt; medians with quartiles are reported. Answers run to a fixed length (the end of sequence ignored), so
that both sides do the same work.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import torch
from harness import Spread, parser, publish, say
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from workload import default_pair, held_out_prompts

from generation.attention import ATTENTION_NAME
from generation.config import CacheConfig, EngineConfig, SpeculationConfig
from generation.distillation.draft_model import load_draft
from generation.distillation.prompts import DistillationPrompt
from generation.drafters.link import DraftLink, LocalLink
from generation.drafters.model import DraftWorker
from generation.engine import Engine
from generation.loading import cache_shape
from generation.model_runner import LoadedModel
from generation.packing import pack_linears
from generation.types import GenerationRequest, SamplingParams, SpeculationStats
from rag_service.config import Settings
from rag_service.draft_choice import draft_config, resolved
from rag_service.measurement import Pair

K = 4
SLOT_LENGTH = 1280


class FullHead(nn.Module):
    """A trimmed head with logits over the whole vocabulary, for transformers' assisted generation."""

    def __init__(self, head: nn.Linear, id_map: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.head, self.id_map, self.vocab_size = head, id_map, vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), torch.finfo(logits.dtype).min)
        full[..., self.id_map] = logits
        return full


class Side:
    """One way of decoding: runs a prompt and says how long it took."""

    def __init__(
        self,
        pair: Pair,
        mode: str,
        *,
        batch: int = 1,
        draft: LoadedModel | None = None,
        k: int = K,
        passages: bool = False,
    ) -> None:
        worker = None
        if draft is not None:
            worker = DraftWorker(draft, num_slots=batch, slot_length=SLOT_LENGTH + 128)
        link: DraftLink | None = LocalLink(worker) if worker is not None else None
        speculation = SpeculationConfig(mode=mode, num_draft_tokens=k, passages=passages)
        config = EngineConfig(
            max_batch_size=batch,
            cache=CacheConfig(num_tokens=SLOT_LENGTH * batch, prefix_caching=False),
            speculation=speculation,
        )
        self.engine = Engine(pair.target, pair.tokenizer, config, colocated=link)
        self.worker = worker
        self.count = 0
        self.stats: list[SpeculationStats] = []

    def run(self, prompts: list[DistillationPrompt], num_tokens: int) -> tuple[float, float]:
        """``(wall-clock seconds, decoding seconds)`` of answering all prompts together."""
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        requests = []
        for prompt in prompts:
            self.count += 1
            requests.append(
                GenerationRequest(f"{self.count}", prompt.token_ids, sampling, domain=prompt.domain)
            )
        began, decode = time.perf_counter(), 0.0
        for chunk in self.engine.generate(requests):
            if chunk.error:
                raise RuntimeError(chunk.error)
            if chunk.stats is not None and chunk.timings is not None:
                self.stats.append(chunk.stats)
                decode = max(decode, chunk.timings.decode_seconds)
        return time.perf_counter() - began, decode

    def alpha(self) -> float | None:
        accepted = sum(stats.num_accepted_tokens for stats in self.stats)
        tested = accepted + sum(stats.num_rejections for stats in self.stats)
        return accepted / tested if tested else None

    def tokens_per_round(self) -> float:
        rounds = sum(stats.num_rounds for stats in self.stats)
        return 1.0 + sum(stats.num_accepted_tokens for stats in self.stats) / max(1, rounds)


def hf_generate(model: Any, prompt: DistillationPrompt, num_tokens: int, **more: Any) -> float:
    """Seconds of ``transformers.generate``, greedy."""
    ids = torch.tensor([prompt.token_ids])
    began = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        **more,
    )
    return time.perf_counter() - began


def paired(prompts: list[DistillationPrompt], ours: Any, theirs: Any) -> list[float]:
    """``theirs / ours`` in seconds, prompt by prompt, the order alternating."""
    ratios = []
    for number, prompt in enumerate(prompts):
        if number % 2:
            b = theirs(prompt)
            a = ours(prompt)
        else:
            a = ours(prompt)
            b = theirs(prompt)
        ratios.append(b / a)
    return ratios


def useless_draft(settings: Settings, target: LoadedModel) -> LoadedModel:
    """A draft of the packaged draft's shape with random weights."""
    config = draft_config(settings)
    assert config is not None
    torch.manual_seed(0)
    decoder = AutoModel.from_config(
        AutoConfig.from_pretrained(config.model), attn_implementation=ATTENTION_NAME
    )
    decoder = decoder.to(torch.bfloat16).requires_grad_(False)
    text_config = decoder.config
    head = nn.Linear(text_config.hidden_size, 8192, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    holder = nn.ModuleDict({"decoder": decoder, "head": head})
    pack_linears(holder)
    shape = cache_shape(text_config, torch.bfloat16, torch.device("cpu"))
    return dataclasses.replace(
        target,
        decoder=holder["decoder"],
        head=holder["head"],
        cache_shape=shape,
        id_map=torch.arange(8192),
        name="useless",
        fingerprint="useless",
    )


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
    from generation.attention import Segment
    from generation.model_runner import ModelRunner

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
    from generation.types import DraftRequest

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


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = Settings.load()
    num_tokens = 40 if arguments.quick else 96
    pair = default_pair(settings)
    assert pair.draft is not None
    prompts = held_out_prompts(settings, arguments.data, 1 if arguments.quick else 6)
    target_config, draft = resolved(settings.engine.target, settings), draft_config(settings)
    assert draft is not None
    hf = AutoModelForCausalLM.from_pretrained(target_config.model, dtype=torch.bfloat16).eval()
    off = Side(pair, "off")
    result: dict[str, Any] = {"num_prompts": len(prompts), "num_tokens": num_tokens, "num_draft_tokens": K}

    say("plain decoding against transformers")
    off.run(prompts[:1], 8)
    hf_generate(hf, prompts[0], 8)
    ratios = paired(prompts, lambda p: off.run([p], num_tokens)[0], lambda p: hf_generate(hf, p, num_tokens))
    result["plain_over_transformers"] = Spread.of(ratios).median
    result["plain_over_transformers_spread"] = Spread.of(ratios)

    say("batch 8 against batch 1")
    eight = Side(pair, "off", batch=8)
    groups = [prompts[i : i + 8] for i in range(0, len(prompts) - 7, 8)] or [(prompts * 8)[:8]]
    batch_ratios, per_step = [], []
    for group in groups:
        alone = sum(off.run([p], num_tokens)[1] for p in group)
        steps, overhead = eight.engine.num_steps, eight.engine.overhead_seconds
        together = _decode_rate(eight, group, num_tokens)
        per_step.append((eight.engine.overhead_seconds - overhead) / (eight.engine.num_steps - steps) * 1e3)
        batch_ratios.append(together * alone / (8 * num_tokens))
    result["batch8_over_batch1"] = Spread.of(batch_ratios).median
    result["overhead_ms_per_round"] = Spread.of(per_step).median

    say("speculative against plain")
    spec = Side(pair, "colocated", draft=pair.draft)
    spec.run(prompts[:1], 8)
    spec.stats.clear()
    ratios = paired(prompts, lambda p: spec.run([p], num_tokens)[1], lambda p: off.run([p], num_tokens)[1])
    alpha = spec.alpha() or 0.0
    result["speculative_over_plain"] = Spread.of(ratios).median
    result["speculative_over_plain_spread"] = Spread.of(ratios)
    result["acceptance_rate"] = alpha
    result["tokens_per_round"] = spec.tokens_per_round()
    predictions = [prediction(pair, prompt, alpha) for prompt in prompts[:: max(1, len(prompts) // 5)]]
    result["prediction"] = {key: Spread.of([p[key] for p in predictions]).median for key in predictions[0]}
    result["speculative_over_predicted"] = (
        result["speculative_over_plain"] / result["prediction"]["predicted"]
    )
    default = Side(pair, "auto", draft=pair.draft, k=5, passages=True)
    default.run(prompts[:2], num_tokens)
    default.stats.clear()
    ratios = paired(prompts, lambda p: default.run([p], num_tokens)[1], lambda p: off.run([p], num_tokens)[1])
    result["default_drafters"] = {
        "over_plain": Spread.of(ratios),
        "acceptance_rate": default.alpha(),
        "mean_acceptance_length": default.tokens_per_round(),
    }

    say("against transformers' assisted generation")
    distilled = load_draft(_path(draft.model), _path(target_config.model), torch.bfloat16)
    assistant = _assistant(distilled, hf)
    hf_generate(hf, prompts[0], 8, assistant_model=assistant)
    ratios = paired(
        prompts,
        lambda p: spec.run([p], num_tokens)[0],
        lambda p: hf_generate(hf, p, num_tokens, assistant_model=assistant),
    )
    result["speculative_over_assisted"] = Spread.of(ratios).median
    result["speculative_over_assisted_spread"] = Spread.of(ratios)

    say("a useless draft, with the controller on")
    useless = Side(pair, "auto", draft=useless_draft(settings, pair.target), k=5)
    useless.run(prompts[:2], num_tokens)
    useless.stats.clear()
    ratios = paired(prompts, lambda p: useless.run([p], num_tokens)[1], lambda p: off.run([p], num_tokens)[1])
    result["useless_draft_over_plain"] = Spread.of(ratios).median
    result["useless_draft_over_plain_spread"] = Spread.of(ratios)
    result["useless_draft_acceptance_rate"] = useless.alpha()
    result["kv_bytes"] = SLOT_LENGTH * pair.target.cache_shape.bytes_per_token
    publish("engine", result, arguments.json)


def _decode_rate(side: Side, group: list[DistillationPrompt], num_tokens: int) -> float:
    """Tokens per second of a full batch: steps in which every sequence decodes."""
    engine = side.engine
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for prompt in group:
        side.count += 1
        engine.add(GenerationRequest(f"{side.count}", prompt.token_ids, sampling))
    seconds = tokens = 0.0
    while engine.has_work:
        full = len(engine.scheduler.running) == len(group) and not any(
            s.is_prefilling for s in engine.scheduler.running
        )
        began = time.perf_counter()
        chunks = engine.step()
        if full:
            seconds += time.perf_counter() - began
            tokens += sum(len(chunk.token_ids) for chunk in chunks)
    return tokens / seconds


def _assistant(distilled: Any, hf: Any) -> Any:
    config = AutoConfig.for_model(**{**distilled.config.to_dict(), "vocab_size": hf.config.vocab_size})
    assistant = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    assistant.model = distilled.decoder
    assistant.lm_head = FullHead(distilled.head, distilled.id_map, hf.config.vocab_size)
    assistant.generation_config.eos_token_id = hf.generation_config.eos_token_id
    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return assistant


def _path(name: str) -> Any:
    from pathlib import Path

    return Path(name)


if __name__ == "__main__":
    main()
