"""Ways of decoding that the engine benchmarks compare: the engine in its modes, and transformers."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from generation.attention import ATTENTION_NAME
from generation.config import CacheConfig, EngineConfig, SpeculationConfig
from generation.distillation.draft_model import load_draft
from generation.distillation.prompts import DistillationPrompt
from generation.drafters.link import DraftLink, LocalLink
from generation.drafters.model import DraftWorker
from generation.engine import Engine
from generation.kv_cache import CacheShape
from generation.loading import cache_shape
from generation.model_runner import LoadedModel
from generation.packing import can_pack, pack_linears
from generation.types import GenerationRequest, SamplingParams, SpeculationStats
from rag_service.config import Settings
from rag_service.draft_choice import draft_config
from rag_service.measurement import Pair

K = 4
SLOT_LENGTH = 1280
HEAD_SIZE = 8192


class FullHead(nn.Module):
    """A trimmed head with logits over the whole vocabulary, for transformers' assisted generation."""

    def __init__(self, head: nn.Linear, id_map: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.head, self.id_map, self.vocab_size = head, id_map, vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
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
        adaptive: bool = False,
        prefix_caching: bool = False,
    ) -> None:
        """``adaptive``: proposals end in doubt, as the service has it; else all have ``k`` tokens, as theory."""
        worker = None
        if draft is not None:
            worker = DraftWorker(draft, num_slots=batch, slot_length=SLOT_LENGTH + 128)
        link: DraftLink | None = LocalLink(worker) if worker is not None else None
        speculation = SpeculationConfig(
            mode=mode, num_draft_tokens=k, passages=passages, adaptive_length=adaptive
        )
        config = EngineConfig(
            max_batch_size=batch,
            cache=CacheConfig(num_tokens=SLOT_LENGTH * batch, prefix_caching=prefix_caching),
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


def decode_rate(side: Side, group: list[DistillationPrompt], num_tokens: int) -> float:
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


def many_requests(side: Side, prompts: list[DistillationPrompt], number: int, num_marks: int) -> list[float]:
    """Resident MiB after each of ``num_marks`` equal parts of ``number`` requests; some are cancelled midway.

    Prompts are cut to a random length, so that slots, blocks and the draft's own cache are used unevenly; half
    of them begin like an earlier one, so that the prefix cache fills, hits and evicts.
    """
    engine, rng, process = side.engine, random.Random(0), psutil.Process()
    marks: list[float] = []
    done = added = 0
    while done < number:
        while added < number and added - done < 2 * engine.config.max_batch_size:
            ids = rng.choice(prompts).token_ids
            ids = ids[: rng.randrange(16, 200)] if added % 2 else ids[rng.randrange(100) :][:128]
            sampling = SamplingParams(max_tokens=rng.randrange(2, 24), temperature=rng.choice((0.0, 0.7)))
            engine.add(GenerationRequest(f"m{added}", ids, sampling, domain=f"domain-{added % 5}"))
            added += 1
        finished = [chunk for chunk in engine.step() if chunk.finish_reason is not None]
        if rng.random() < 0.02 and engine.cancel(f"m{rng.randrange(max(0, added - 16), added)}") is not None:
            done += 1
        done += len(finished)
        while len(marks) < done * num_marks // number:
            marks.append(round(process.memory_info().rss / 2**20, 1))
    engine.check_integrity()
    return marks


def hf_generate(model: Any, prompt: DistillationPrompt, num_tokens: int, **more: Any) -> float:
    """Seconds of ``transformers.generate``, greedy."""
    ids = torch.tensor([prompt.token_ids], device=model.device)
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
    factory: Any = AutoModel
    decoder = factory.from_config(
        AutoConfig.from_pretrained(config.model), attn_implementation=ATTENTION_NAME
    )
    device, dtype = target.device, target.cache_shape.dtype
    text_config = decoder.config
    head = nn.Linear(text_config.hidden_size, HEAD_SIZE, bias=False)
    holder = nn.ModuleDict({"decoder": decoder, "head": head}).to(device, dtype).requires_grad_(False)
    if device.type == "cpu" and can_pack(dtype):
        pack_linears(holder)
    shape: CacheShape = cache_shape(text_config, dtype, device)
    return dataclasses.replace(
        target,
        decoder=holder["decoder"],
        head=holder["head"],
        cache_shape=shape,
        id_map=torch.arange(HEAD_SIZE, device=device),
        name="useless",
        fingerprint="useless",
    )


def assistant_of(draft_folder: str, target_folder: str, hf: Any) -> Any:
    """The draft as transformers wants an assistant: a causal model over the whole vocabulary."""
    distilled = load_draft(Path(draft_folder), Path(target_folder), hf.dtype).to(hf.device)
    config = AutoConfig.for_model(**{**distilled.config.to_dict(), "vocab_size": hf.config.vocab_size})
    factory: Any = AutoModelForCausalLM
    assistant = factory.from_config(config).to(hf.device, hf.dtype).eval()
    assert distilled.id_map is not None
    assistant.model = distilled.decoder
    assistant.lm_head = FullHead(distilled.head, distilled.id_map, hf.config.vocab_size)
    assistant.generation_config.eos_token_id = hf.generation_config.eos_token_id
    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return assistant
