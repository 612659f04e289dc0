"""Several continuations of each prompt in one batch, with the target's top log-probabilities kept.

A prompt is prefilled once; all its continuations attend to that one copy of its keys and values. That is
what makes a batch of 64 affordable: repeating an 800-token cache for every continuation would move
gigabytes a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

ATTENTION_NAME = "shared_prefix"


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The target's likeliest ids at each position: ``ids`` and natural-log ``logprobs``, both ``[n, k]``.

    Log-probabilities are over the whole vocabulary at temperature 1; what is missing from their sum is the
    mass outside the top k.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Continuation:
    """One answer of the target; ``top`` has one row for each of ``token_ids``."""

    temperature: float
    token_ids: tuple[int, ...]
    top: TopLogprobs


@dataclass(slots=True)
class SharedPrefix:
    """Keys and values of a batch of prompts, ``[prompts, kv_heads, length, head]`` a layer, padded at the end.

    ``bias`` ``[prompts, 1, 1, length]`` is 0 on real positions and minus infinity on padding.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    bias: torch.Tensor


_active: list[SharedPrefix] = []


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the active shared prefix and the row's own suffix, one query position a row.

    ``query`` ``[rows, heads, 1, head]``, ``key`` and ``value`` ``[rows, kv_heads, suffix, head]``. Without an
    active prefix this is transformers' ordinary attention.
    """
    if not _active:
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output: tuple[torch.Tensor, None] = plain(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    prefix = _active[-1]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    prefix_keys, prefix_values = prefix.keys[layer], prefix.values[layer]
    num_prompts, kv_heads, length, width = prefix_keys.shape
    rows, heads = query.shape[0], query.shape[1]
    copies, group = rows // num_prompts, heads // kv_heads
    scale = width**-0.5 if scaling is None else scaling
    # [prompts, kv_heads, copies x group, head]: every query that reads the same prefix, side by side.
    by_prompt = query.view(num_prompts, copies, kv_heads, group, width).transpose(1, 2)
    by_prompt = by_prompt.reshape(num_prompts, kv_heads, copies * group, width)
    by_row = query.view(rows, kv_heads, group, width)
    to_prefix = (by_prompt @ prefix_keys.transpose(-1, -2)).float() * scale + prefix.bias
    to_prefix = to_prefix.view(num_prompts, kv_heads, copies, group, length).transpose(1, 2)
    to_suffix = (by_row @ key.transpose(-1, -2)).float() * scale
    scores = torch.cat([to_prefix.reshape(rows, kv_heads, group, length), to_suffix], dim=-1)
    weights = scores.softmax(dim=-1).to(query.dtype)
    left = weights[..., :length].view(num_prompts, copies, kv_heads, group, length).transpose(1, 2)
    from_prefix = left.reshape(num_prompts, kv_heads, copies * group, length) @ prefix_values
    from_prefix = from_prefix.view(num_prompts, kv_heads, copies, group, width).transpose(1, 2)
    from_suffix = weights[..., length:] @ value
    mixed = from_prefix.reshape(rows, kv_heads, group, width) + from_suffix
    return mixed.reshape(rows, 1, heads, width), None


AttentionInterface.register(ATTENTION_NAME, shared_prefix_attention)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each prompt is continued: one continuation for each entry of ``temperatures`` (0: greedy)."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 0.7, 1.0)
    max_new_tokens: int = 96
    top_k: int = 20
    stop_share: float = 0.1
    """A batch is ended when fewer than this share of its rows still run: the last few cost as much as all."""
    end_ids: frozenset[int] = field(default_factory=frozenset)


class Continuator:
    """Samples continuations from one model. Not thread-safe: the shared prefix is the module's own."""

    def __init__(self, model: PreTrainedModel, sampling: Sampling) -> None:
        self._model = model
        self._sampling = sampling
        model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[Sequence[int]], seed: int
    ) -> tuple[list[TopLogprobs], list[list[Continuation]]]:
        """Top log-probabilities at each prompt position but the last, and the continuations by prompt."""
        tops, lasts, caches = [], [], []
        for prompt in prompts:
            cache = DynamicCache(config=self._model.config)
            ids = torch.tensor([list(prompt)], device=self._model.device)
            logits = self._model(input_ids=ids, cache=cache, use_cache=True).logits[0]
            tops.append(top_logprobs(logits[:-1], self._sampling.top_k))
            lasts.append(logits[-1])
            caches.append(cache)
        prefix = stack_prefixes(caches, self._model.config.num_hidden_layers)
        _active.append(prefix)
        try:
            lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._model.device)
            return tops, self._decode(torch.stack(lasts), lengths, seed)
        finally:
            _active.pop()

    def _decode(self, logits: torch.Tensor, lengths: torch.Tensor, seed: int) -> list[list[Continuation]]:
        sampling = self._sampling
        copies = len(sampling.temperatures)
        logits = logits.repeat_interleave(copies, dim=0)
        position = lengths.repeat_interleave(copies)
        temperatures = torch.tensor(sampling.temperatures, device=logits.device).repeat(len(lengths))
        generator = torch.Generator(device=logits.device).manual_seed(seed)
        cache = DynamicCache(config=self._model.config)
        running = torch.ones(len(position), dtype=torch.bool)
        chosen, tops = [], []
        for step in range(sampling.max_new_tokens):
            tops.append(top_logprobs(logits, sampling.top_k))
            likeliest = torch.from_numpy(tops[-1].ids[:, 0].astype(np.int64)).to(logits.device)
            next_ids = draw(logits, likeliest, temperatures, generator)
            chosen.append(next_ids.cpu())
            running &= ~torch.isin(chosen[-1], torch.tensor(sorted(sampling.end_ids)))
            if running.float().mean() < sampling.stop_share or step + 1 == sampling.max_new_tokens:
                break
            logits = self._model(
                input_ids=next_ids[:, None],
                position_ids=(position + step)[:, None],
                cache=cache,
                use_cache=True,
            ).logits[:, -1]
        return self._collect(torch.stack(chosen, dim=1).numpy(), tops, copies)

    def _collect(
        self, ids: npt.NDArray[np.int64], tops: list[TopLogprobs], copies: int
    ) -> list[list[Continuation]]:
        answers: list[list[Continuation]] = []
        for row, sequence in enumerate(ids):
            ends = np.flatnonzero(np.isin(sequence, list(self._sampling.end_ids)))
            length = int(ends[0]) + 1 if len(ends) else len(sequence)
            top = TopLogprobs(
                np.stack([step.ids[row] for step in tops[:length]]),
                np.stack([step.logprobs[row] for step in tops[:length]]),
            )
            if row % copies == 0:
                answers.append([])
            answers[-1].append(
                Continuation(
                    self._sampling.temperatures[row % copies],
                    tuple(int(token) for token in sequence[:length]),
                    top,
                )
            )
        return answers


def draw(
    logits: torch.Tensor, likeliest: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """One id a row of ``logits`` ``[rows, vocabulary]``: ``likeliest`` at temperature 0, else a draw.

    The draw inverts the cumulative distribution: one uniform number a row, where ``torch.multinomial`` would
    spend a random number on every id of the vocabulary (a quarter of the whole step).
    """
    chosen = likeliest.clone()
    warm = temperatures > 0
    if warm.any():
        scaled = logits[warm].float() / temperatures[warm, None]
        cumulative = (scaled - scaled.amax(dim=-1, keepdim=True)).exp_().cumsum(dim=-1)
        uniform = torch.rand(len(temperatures), 1, generator=generator, device=logits.device)[warm]
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
        chosen[warm] = drawn.clamp(max=logits.shape[-1] - 1)
    return chosen


def top_logprobs(logits: torch.Tensor, k: int, rows_at_once: int = 128) -> TopLogprobs:
    """The k likeliest ids of each row of ``logits`` ``[n, vocabulary]``, normalised over all of it."""
    ids, logprobs = [], []
    for part in torch.split(logits, rows_at_once):  # float32 of a whole prompt would be 160 MB
        values, indices = part.topk(k, dim=-1)
        total = part.float().logsumexp(dim=-1, keepdim=True)
        ids.append(indices.to(torch.int32).cpu().numpy())
        logprobs.append((values.float() - total).detach().to(torch.float16).cpu().numpy())
    if not ids:
        return TopLogprobs(np.zeros((0, k), np.int32), np.zeros((0, k), np.float16))
    return TopLogprobs(np.concatenate(ids), np.concatenate(logprobs))


def stack_prefixes(caches: Sequence[DynamicCache], num_layers: int) -> SharedPrefix:
    """Pad the prompts' caches to one length and stack them; the caches hold one sequence each."""
    lengths = [cache.get_seq_length() for cache in caches]
    longest = max(lengths)

    def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        first = tensors[0]
        out = first.new_zeros(len(tensors), first.shape[1], longest, first.shape[3])
        for row, tensor in enumerate(tensors):
            out[row, :, : tensor.shape[2]] = tensor[0]
        return out

    layers: list[list[Any]] = [[cache.layers[index] for cache in caches] for index in range(num_layers)]
    keys = [stacked([layer.keys for layer in row]) for row in layers]
    values = [stacked([layer.values for layer in row]) for row in layers]
    bias = torch.zeros(len(caches), 1, 1, longest, device=keys[0].device)
    for row, length in enumerate(lengths):
        bias[row, :, :, length:] = float("-inf")
    return SharedPrefix(keys, values, bias)
