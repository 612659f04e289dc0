"""From logits to the distribution that is really sampled, and seeded draws from it.

The order is OpenAI's and transformers': repetition, presence and frequency penalties, logit bias, grammar
mask, temperature, top-k, top-p, min-p. The result is what verification compares and what drafts are held to:
``target_probs`` here are always *processed* probabilities.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from generation.types import SamplingParams


class TokenCounts:
    """How often each id occurs in a sequence, kept by the penalties' rules.

    Presence and frequency penalties count the answer's tokens (OpenAI); the repetition penalty also looks at
    the prompt (Keskar et al. 1909.05858, as transformers has it).
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt = frozenset(prompt_ids)
        self.answer: dict[int, int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.answer[token_id] = self.answer.get(token_id, 0) + 1

    def plus(self, token_ids: Sequence[int]) -> Mapping[int, int]:
        """The answer's counts as if ``token_ids`` had been accepted."""
        if not token_ids:
            return self.answer
        counts = dict(self.answer)
        for token_id in token_ids:
            counts[token_id] = counts.get(token_id, 0) + 1
        return counts


def needs_counts(sampling: SamplingParams) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def is_plain_greedy(sampling: SamplingParams) -> bool:
    """Argmax of the raw logits is all that is asked."""
    return sampling.temperature == 0.0 and not needs_counts(sampling) and not sampling.logit_bias


def adjust_logits(
    logits: Tensor,
    sampling: SamplingParams,
    counts: Mapping[int, int],
    prompt: frozenset[int],
    forbidden: Sequence[int] = (),
    allowed: Tensor | None = None,
) -> Tensor:
    """Penalties, bias and masks on one row ``[vocab]`` (a copy is returned when anything changes).

    ``forbidden``: ids that may not come (end of sequence before ``min_tokens``); ``allowed``: a boolean mask
    ``[vocab]`` of the grammar.
    """
    if not (needs_counts(sampling) or sampling.logit_bias or forbidden or allowed is not None):
        return logits
    out = logits.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(prompt | set(counts)), dtype=torch.long, device=out.device)
        values = out[seen]
        penalty = sampling.repetition_penalty
        out[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if counts and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = torch.tensor(list(counts), device=out.device)
        amounts = torch.tensor(list(counts.values()), device=out.device, dtype=out.dtype)
        out[ids] -= sampling.presence_penalty + sampling.frequency_penalty * amounts
    for token_id, bias in sampling.logit_bias.items():
        if 0 <= token_id < out.shape[-1]:
            out[token_id] += bias
    if forbidden:
        out[torch.tensor(list(forbidden), device=out.device)] = float("-inf")
    if allowed is not None:
        out.masked_fill_(~allowed, float("-inf"))
    return out


def to_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Temperature and truncation: rows ``[n, vocab]`` to probabilities that sum to one (float32).

    Temperature 0 gives one-hot rows on the first argmax.
    """
    if sampling.temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    scaled = logits.float() / sampling.temperature
    if sampling.top_k and sampling.top_k < scaled.shape[-1]:
        floor = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    probs = torch.softmax(scaled, dim=-1)
    if sampling.top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        # A token stays while the mass *before* it is below top_p: the first always stays.
        keep = ordered.cumsum(-1) - ordered < sampling.top_p
        keep[..., 0] = True
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered * keep)
    if sampling.min_p > 0.0:
        probs = probs * (probs >= sampling.min_p * probs.amax(-1, keepdim=True))
    return probs / probs.sum(-1, keepdim=True)


class RequestRandom:
    """Random numbers of one request, named by purpose and position.

    Counter-based: a draw depends on the seed, its purpose and the token position only, never on how many
    draws came before or with whom the request was batched.
    """

    def __init__(self, seed: int | None, request_id: str = "") -> None:
        self.seeded = seed is not None
        material = f"seed:{seed}" if seed is not None else f"request:{request_id}"
        digest = hashlib.blake2b(material.encode(), digest_size=8).digest()
        self.key = int.from_bytes(digest, "little")

    def uniforms(self, purpose: str, position: int, count: int) -> npt.NDArray[np.float64]:
        """``count`` numbers in [0, 1)."""
        return self._generator(purpose, position).random(count)

    def race(self, position: int, size: int) -> npt.NDArray[np.float64]:
        """Exponential noise ``[size]`` for the token at ``position``: the same on draft and target."""
        return self._generator("token", position).standard_exponential(size)

    def _generator(self, purpose: str, position: int) -> np.random.Generator:
        name = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=4).digest(), "little")
        return np.random.Generator(np.random.Philox(key=self.key, counter=[0, 0, name, position]))


def race_winner(probs: npt.NDArray[np.floating], noise: npt.NDArray[np.float64]) -> int:
    """The token that exponential ``noise [n]`` draws from ``probs [n]``: argmin(E / p) is p-distributed.

    The Gumbel-max trick without logarithms.
    """
    support = np.flatnonzero(probs)
    return int(support[np.argmin(noise[support] / probs[support])])
