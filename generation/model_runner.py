"""One forward pass, shared by draft and target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from generation.attention import Segment
from generation.kv_cache import CacheShape, SlotPool


@dataclass(slots=True)
class LoadedModel:
    """A causal language model ready to run.

    ``decoder`` maps ids to hidden states ``[1, T, hidden]`` (transformers' base model); ``head`` maps those to
    logits ``[T, n]``. ``id_map``: for a trimmed head, the vocabulary id of each of the n rows; None when row
    and id are the same. ``vocab_size`` is the tokenizer's: rows beyond it are padding and never sampled.
    """

    decoder: nn.Module
    head: nn.Module
    vocab_size: int
    context_length: int
    cache_shape: CacheShape
    eos_token_ids: tuple[int, ...] = ()
    id_map: Tensor | None = None
    name: str = ""
    fingerprint: str = ""
    logit_softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def device(self) -> torch.device:
        return self.cache_shape.device


class ModelRunner:
    """Runs a step's segments through the model, over its own pool of slots."""

    def __init__(self, model: LoadedModel, num_slots: int, slot_length: int) -> None:
        self.model = model
        self.pool = SlotPool(model.cache_shape, num_slots, slot_length)
        self.forward_seconds = 0.0
        self.num_forwards = 0

    @torch.inference_mode()
    def forward(self, segments: list[Segment], rows: Sequence[int]) -> Tensor:
        """Logits ``[len(rows), n]`` (float32, on the model's device) of the chosen rows of the flat step.

        Rows number the tokens of all segments in order. The new keys and values stay in the slots.
        """
        began = time.perf_counter()
        ids = [token_id for segment in segments for token_id in segment.token_ids]
        positions = [position for segment in segments for position in segment.positions()]
        if len(ids) == 1:
            # Blocked kernels take another path for a single row: a second, unused row keeps results equal.
            ids, positions = [ids[0], ids[0]], [positions[0], positions[0]]
        device = self.model.device
        hidden = self.model.decoder(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            rag_step=self.pool.step(segments),
        ).last_hidden_state[0]
        chosen = list(rows) if len(rows) != 1 else [rows[0], rows[0]]
        if chosen != list(range(hidden.shape[0])):
            hidden = hidden[torch.tensor(chosen, dtype=torch.long, device=device)]
        logits = self._finish(self.model.head(hidden)) if chosen else hidden.new_zeros(0, 1).float()
        logits = logits[: len(rows)]
        self.forward_seconds += time.perf_counter() - began
        self.num_forwards += 1
        return logits

    def _finish(self, logits: Tensor) -> Tensor:
        model = self.model
        logits = logits.float()
        if model.logit_scale != 1.0:
            logits = logits * model.logit_scale
        if model.logit_softcap:
            logits = torch.tanh(logits / model.logit_softcap) * model.logit_softcap
        if model.id_map is None and logits.shape[-1] > model.vocab_size:
            logits = logits[..., : model.vocab_size]
        return logits
