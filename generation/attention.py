"""Attention over slots: how one flat forward pass serves many sequences at different lengths.

A step's tokens, whoever they belong to, run through the model as rows ``[T]``; only attention knows of
sequences. Each ``Segment`` names the rows of one sequence, the slot that holds its keys and values, and where
in the slot the new ones go. The function registers with transformers' attention interface, so any architecture
that calls the interface works, with grouped queries, sliding windows and soft caps.

Short segments (decoding, verification, trees) whose slots lie side by side are attended together, as one
batch over a view of the pool; long ones (prefill) one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "rag_slots"
_SHORT_WIDTH = 16
_SHORT_PAD = 64
_LONG_PAD = 512


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

    @property
    def width(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + self.width

    def positions(self) -> list[int]:
        return self.position_ids if self.position_ids is not None else list(range(self.start, self.end))

    def sees(self, window: int | None, length: int) -> Tensor:
        """Boolean ``[w, length]``: which stored keys each new row may see."""
        places = torch.arange(length)
        if self.visible is not None:
            visible = F.pad(self.visible, (0, length - self.visible.shape[1]))
        else:
            visible = places <= torch.arange(self.start, self.end)[:, None]
        if window is not None:
            # In a tree a key's text position lies within the segment's few rows of its place in the slot, so
            # windows stay right to within a branch; outside a tree the two are the same.
            visible = visible & (places > torch.tensor(self.positions())[:, None] - window)
        return visible


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer asks of attention beside its tensors."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


class Group:
    """Segments in neighbouring slots, attended as one batch ``[n, kv_heads, rows, length]``.

    Every segment is padded to the widest (at least two rows) and to the longest, up to a multiple of 64 keys.
    On a CPU the 16-bit matrix kernels sum each row in an order that depends on neither the number of rows,
    nor the length, nor the batch, so a token's result is bitwise that of the same token alone
    (``tests/generation/test_packing.py``). float32 kernels don't: there a group is one segment.
    """

    def __init__(self, segments: list[Segment], first_rows: list[int], keys: Tensor) -> None:
        """``keys`` ``[num_slots, kv_heads, slot_length, D]``: a layer's, for its size and kind."""
        self.segments = segments
        self.slots = slice(segments[0].slot, segments[-1].slot + 1)
        self.width = max(2, *(segment.width for segment in segments))
        pad = _SHORT_PAD if _in_products(keys) or self.width <= _SHORT_WIDTH else _LONG_PAD
        self.length = min(keys.shape[2], -(-max(segment.end for segment in segments) // pad) * pad)
        self.first_rows = first_rows
        self._masks: dict[int | None, Tensor] = {}
        self._gather: Tensor | None = None
        self._scatter: Tensor | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> Tensor:
        """``query [T, H, D]`` of the whole step, a layer's ``keys`` and ``values`` of all slots; returns the
        rows of this group's segments, in order, ``[rows, H, D]``.
        """
        num_heads, head_dim = query.shape[1:]
        kv_heads = keys.shape[1]
        count, heads_per_key = len(self.segments), num_heads // kv_heads
        rows = self._gathered(query).view(count, self.width, kv_heads, heads_per_key, head_dim)
        # Query heads that share a key head become rows of one matrix: grouped attention without copies.
        grouped = rows.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, head_dim)
        keys, values = keys[self.slots, :, : self.length], values[self.slots, :, : self.length]
        mask = self._mask(shape.window, query)
        attended = _weigh(grouped, keys, values, mask, heads_per_key, shape)
        attended = attended.view(count, kv_heads, heads_per_key, self.width, head_dim)
        flat = attended.permute(0, 3, 1, 2, 4).reshape(count * self.width, num_heads, head_dim)
        return flat if self._scatter is None else flat.index_select(0, self._scatter)

    def _gathered(self, query: Tensor) -> Tensor:
        """Padded rows ``[n * width, H, D]``; a padding row repeats the segment's last."""
        if self._gather is None:
            gather: list[int] = []
            scatter: list[int] = []
            for number, (segment, first) in enumerate(zip(self.segments, self.first_rows, strict=True)):
                gather += [first + min(row, segment.width - 1) for row in range(self.width)]
                scatter += range(number * self.width, number * self.width + segment.width)
            self._gather = torch.tensor(gather, device=query.device)
            if len(scatter) < len(gather):
                self._scatter = torch.tensor(scatter, device=query.device)
        return query.index_select(0, self._gather)

    def _mask(self, window: int | None, like: Tensor) -> Tensor:
        """Additive mask ``[n, 1, 1, width, length]``, built once a step and shared by all layers."""
        mask = self._masks.get(window)
        if mask is None:
            visible = torch.stack([self._padded_sight(segment, window) for segment in self.segments])
            mask = torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, float("-inf"))
            mask = mask[:, None, None].to(like.device)
            self._masks[window] = mask
        return mask

    def _padded_sight(self, segment: Segment, window: int | None) -> Tensor:
        visible = segment.sees(window, self.length)
        missing = self.width - segment.width
        return torch.cat([visible, visible[-1:].expand(missing, -1)]) if missing else visible


def _in_products(like: Tensor) -> bool:
    """Whether plain matrix products beat the fused kernel: with 16-bit floats on a CPU, twice and more.

    For a handful of rows the fused kernel spends most of its time packing keys, for many on the mask.
    """
    return like.device.type == "cpu" and like.dtype != torch.float32


def _weigh(
    grouped: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    heads_per_key: int,
    shape: AttentionShape,
) -> Tensor:
    """Values by attention: ``grouped [n, kv_heads, G * w, D]``, keys and values ``[n, kv_heads, length, D]``.

    By two batched matrix products where these are quicker or a soft cap must fit between them.
    """
    count, kv_heads, rows, _ = grouped.shape
    if not shape.softcap and not _in_products(grouped):
        by_row = mask.expand(-1, -1, heads_per_key, -1, -1).reshape(count, 1, rows, -1)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=by_row, scale=shape.scaling)
    if 4 * rows < keys.shape[2]:
        # The kernel packs its right side, so the smaller one goes there; the sums are the same to the bit.
        scores = (keys @ grouped.transpose(2, 3)).transpose(2, 3).contiguous()
    else:
        scores = grouped @ keys.transpose(2, 3)
    scores = scores.view(count, kv_heads, heads_per_key, -1, keys.shape[2])
    if shape.softcap:
        capped = torch.tanh(scores.float() * (shape.scaling / shape.softcap)) * shape.softcap
        weights = torch.softmax(mask + capped, dim=-1).to(values.dtype)
    else:
        weights = torch.softmax(torch.add(mask, scores, alpha=shape.scaling), dim=-1)
    return weights.view(count, kv_heads, rows, -1) @ values


class Step:
    """What attention needs to know of one forward pass: its segments and the slots they live in."""

    def __init__(self, segments: list[Segment], keys: list[Tensor], values: list[Tensor]) -> None:
        """``keys[layer]`` and ``values[layer]`` are ``[num_slots, kv_heads, slot_length, head_dim]``."""
        self.segments = segments
        self.keys = keys
        self.values = values
        self._plan: _Plan | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: AttentionShape) -> Tensor:
        """Store the new keys and values and attend: ``query [T, H, D]``, ``key`` and ``value [T, KV, D]``.

        Rows beyond the segments' belong to nobody (the runner pads a single row) and come out as zeros.
        """
        keys, values = self.keys[layer], self.values[layer]
        plan = self._plan = self._plan or _Plan(self.segments, keys)
        plan.store(key, keys)
        plan.store(value, values)
        parts = [group.attend(query, keys, values, shape) for group in plan.groups]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if plan.order is not None:
            out = out.index_select(0, plan.order)
        missing = query.shape[0] - plan.num_rows
        return F.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out


class _Plan:
    """How a step's rows are stored and grouped; the same for all layers."""

    def __init__(self, segments: list[Segment], keys: Tensor) -> None:
        rows = 0
        first_rows: dict[int, int] = {}
        for segment in segments:
            first_rows[id(segment)] = rows
            rows += segment.width
        self.num_rows = rows
        self._segments = segments
        self._in_blocks = any(segment.width > _SHORT_WIDTH for segment in segments)
        slots = [segment.slot for segment in segments for _ in segment.token_ids]
        places = [place for segment in segments for place in range(segment.start, segment.end)]
        self._where = torch.tensor([slots, places], device=keys.device)
        # The fused float32 kernel of a CPU sums in another order in company.
        together = keys.device.type != "cpu" or keys.dtype != torch.float32
        self.groups = [
            Group(group, [first_rows[id(segment)] for segment in group], keys)
            for group in _grouped(segments, together)
        ]
        grouped = [
            row
            for group in self.groups
            for segment, first in zip(group.segments, group.first_rows, strict=True)
            for row in range(first, first + segment.width)
        ]
        in_order = grouped == list(range(rows))
        self.order = None if in_order else torch.tensor(grouped, device=keys.device).argsort()

    def store(self, rows: Tensor, slots: Tensor) -> None:
        """Put ``rows [T, KV, D]`` where they belong in ``slots [num_slots, KV, length, D]``."""
        if not self._in_blocks:
            slots[self._where[0], :, self._where[1]] = rows[: self.num_rows]
            return
        row = 0  # a prompt's rows lie side by side: copying the block is quicker than naming each place
        for segment in self._segments:
            block = rows[row : row + segment.width].transpose(0, 1)
            slots[segment.slot, :, segment.start : segment.end] = block
            row += segment.width


def _grouped(segments: list[Segment], together: bool) -> list[list[Segment]]:
    """Narrow decoding segments in runs of neighbouring slots and similar length; any other alone."""
    groups: list[list[Segment]] = []
    narrow = [segment for segment in segments if segment.width <= _SHORT_WIDTH]
    for segment in sorted(narrow, key=lambda segment: segment.slot):
        last = groups[-1] if groups and together else None
        if last and last[-1].slot + 1 == segment.slot and _alike([*last, segment]):
            last.append(segment)
        else:
            groups.append([segment])
    return groups + [[segment] for segment in segments if segment.width > _SHORT_WIDTH]


def _alike(segments: list[Segment]) -> bool:
    """Whether padding all to the longest wastes less than a call each would."""
    longest = max(segment.end for segment in segments) + 256
    return longest * len(segments) <= 2 * sum(segment.end + 256 for segment in segments)


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
    shape = AttentionShape(scale, sliding_window, softcap)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return rag_step.attend(layer, query, key, value, shape)[None], None


_attention: Callable[..., Any] = slot_attention
AttentionInterface.register(ATTENTION_NAME, _attention)
