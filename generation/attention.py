"""Attention over slots: how one flat forward pass serves many sequences at different lengths.

A step's tokens, whoever they belong to, run through the model as one row ``[1, T]``; only attention knows of
sequences. Each ``Segment`` names the rows of one sequence, the slot that holds its keys and values, and where
in the slot the new ones go. The function registers with transformers' attention interface, so any architecture
that calls the interface works, with grouped queries, sliding windows and soft caps.

Rows are padded to at least two and keys to a multiple of 64 (512 for prefill): on a CPU the fused kernel then
sums in the same order whatever the width of the step, which makes a token's result independent of whether it
was decoded alone or verified in a proposal (tested bitwise).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "rag_slots"
_DECODE_WIDTH = 16
_DECODE_PAD = 64
_PREFILL_PAD = 512


@dataclass(slots=True)
class Segment:
    """The new tokens of one sequence in a step.

    ``start``: where in the slot their keys and values are written (contiguous). ``position_ids``: their
    positions in the text; they differ from the place in the slot only in a tree. ``visible``: for a tree,
    a boolean ``[w, start + w]`` saying what each row sees; None: everything up to itself.
    """

    slot: int
    start: int
    token_ids: list[int]
    position_ids: list[int] | None = None
    visible: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + self.width

    def positions(self) -> list[int]:
        return self.position_ids if self.position_ids is not None else list(range(self.start, self.end))


class Step:
    """What attention needs to know of one forward pass: its segments and the slots they live in."""

    def __init__(self, segments: list[Segment], keys: list[Tensor], values: list[Tensor]) -> None:
        """``keys[layer]`` and ``values[layer]`` are ``[num_slots, kv_heads, slot_length, head_dim]``."""
        self.segments = segments
        self.keys = keys
        self.values = values

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Store the new keys and values and attend: ``query [H, T, D]`` to ``[T, H, D]``."""
        outputs, row = [], 0
        for segment in self.segments:
            rows = slice(row, row + segment.width)
            row = rows.stop
            keys, values = self.keys[layer][segment.slot], self.values[layer][segment.slot]
            keys[:, segment.start : segment.end] = key[:, rows]
            values[:, segment.start : segment.end] = value[:, rows]
            outputs.append(
                self._attend_segment(segment, query[:, rows], keys, values, scaling, window, softcap)
            )
        if row < query.shape[1]:  # the runner's padding row belongs to nobody
            outputs.append(query.new_zeros(query.shape[1] - row, query.shape[0], query.shape[2]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_segment(
        self,
        segment: Segment,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        num_heads, width, head_dim = query.shape
        num_kv_heads, slot_length, _ = keys.shape
        padded_width = max(2, width)
        if padded_width != width:
            query = F.pad(query, (0, 0, 0, padded_width - width))
        groups = num_heads // num_kv_heads
        mask = self._mask(segment, window, slot_length, groups, query.dtype, query.device)
        length = mask.shape[-1]
        # Query heads that share a key head become rows of one matrix: grouped attention without copies.
        grouped = query.reshape(1, num_kv_heads, groups * padded_width, head_dim)
        keys, values = keys[None, :, :length], values[None, :, :length]
        if softcap:
            scores = torch.tanh(grouped @ keys.transpose(2, 3) * (scaling / softcap)) * softcap
            attended = torch.softmax((scores + mask).float(), dim=-1).to(values.dtype) @ values
        else:
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        return attended.view(num_heads, padded_width, head_dim)[:, :width].transpose(0, 1)

    @staticmethod
    def _mask(
        segment: Segment,
        window: int | None,
        slot_length: int,
        groups: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Additive mask ``[groups * w, length]``, built once a step and shared by all layers."""
        mask = segment._masks.get(window)
        if mask is None:
            pad = _DECODE_PAD if segment.width <= _DECODE_WIDTH else _PREFILL_PAD
            length = min(slot_length, -(-segment.end // pad) * pad)
            visible = _visible(segment, window, length)
            if segment.width < 2:
                visible = visible.expand(2, -1)
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
            mask = mask.repeat(groups, 1).to(device)
            segment._masks[window] = mask
        return mask


def _visible(segment: Segment, window: int | None, length: int) -> Tensor:
    """Boolean ``[w, length]``: which stored keys each new row may see."""
    if segment.visible is not None:
        visible = F.pad(segment.visible, (0, length - segment.visible.shape[1]))
    else:
        rows = torch.arange(segment.start, segment.end)
        visible = torch.arange(length)[None, :] <= rows[:, None]
    if window is not None:
        # In a tree a key's text position lies within the segment's few rows of its slot position, so
        # windows stay right to within a branch; outside a tree the two are the same.
        text = torch.tensor(segment.positions())
        visible = visible & (torch.arange(length)[None, :] > text[:, None] - window)
    return visible


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    rag_step: Step | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over slots: ``query [1, H, T, D]`` to ``[1, T, H, D]``."""
    if rag_step is None:
        raise ValueError("slot attention needs the step's segments (rag_step)")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = rag_step.attend(layer, query[0], key[0], value[0], scale, sliding_window, softcap)
    return out[None], None


_attention: Callable[..., Any] = slot_attention
AttentionInterface.register(ATTENTION_NAME, _attention)
