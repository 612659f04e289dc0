"""Attention over slots against the definition, row by row in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from generation.attention import AttentionShape, Segment, Step

SLOTS, KV_HEADS, GROUPS, LENGTH, WIDTH = 7, 2, 3, 640, 16


def naive(segment: Segment, query: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> Tensor:
    """``query [w, H, D]``, a slot's ``keys`` and ``values [KV, length, D]``; returns ``[w, H, D]``."""
    out = torch.zeros_like(query, dtype=torch.float64)
    visible = segment.sees(shape.window, segment.end)
    for row in range(segment.width):
        seen = visible[row].nonzero()[:, 0]
        for head in range(query.shape[1]):
            kv = head // GROUPS
            scores = keys[kv, seen].double() @ query[row, head].double() * shape.scaling
            if shape.softcap:
                scores = torch.tanh(scores / shape.softcap) * shape.softcap
            out[row, head] = torch.softmax(scores, 0) @ values[kv, seen].double()
    return out


def tree(slot: int, start: int) -> Segment:
    """Two branches of two tokens: each row sees the text and its own branch."""
    visible = torch.zeros(4, start + 4, dtype=torch.bool)
    visible[:, :start] = True
    for row, seen in enumerate(([0], [1], [0, 2], [1, 3])):
        visible[row, [start + column for column in seen]] = True
    return Segment(slot, start, [1, 2, 3, 4], [start, start, start + 1, start + 1], visible)


STEPS = {
    "alone": [Segment(3, 70, [1])],
    "neighbours": [Segment(slot, 60 + slot, [1]) for slot in range(4)],
    "mixed widths out of order": [
        Segment(2, 100, [1] * 5),
        Segment(0, 64, [1]),
        Segment(1, 63, [1, 2]),
        Segment(5, 20, [1] * 3),
    ],
    "unequal lengths": [Segment(0, 600, [1]), Segment(1, 3, [1, 2]), Segment(2, 5, [1])],
    "trees": [tree(1, 50), tree(2, 90), Segment(3, 30, [1, 2])],
    "with a prompt": [Segment(4, 0, [1] * 40), Segment(1, 50, [1, 2]), Segment(2, 40, [1])],
    "prompts": [Segment(0, 0, [1] * 300), Segment(3, 200, [1] * 20)],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [AttentionShape(0.25), AttentionShape(0.25, window=24), AttentionShape(0.3, softcap=2.0)],
    ids=["plain", "window", "softcap"],
)
@pytest.mark.parametrize("name", STEPS)
def test_every_row_sees_its_own_text(name: str, shape: AttentionShape, dtype: torch.dtype) -> None:
    segments = STEPS[name]
    generator = torch.Generator().manual_seed(5)
    pool = torch.randn(2, SLOTS, KV_HEADS, LENGTH, WIDTH, generator=generator).to(dtype)
    count = sum(segment.width for segment in segments)
    new = torch.randn(3, count + 1, KV_HEADS * GROUPS, WIDTH, generator=generator).to(dtype)
    query, key, value = new[0], new[1, :, :KV_HEADS], new[2, :, :KV_HEADS]
    step = Step(segments, [pool[0]], [pool[1]])
    got = step.attend(0, query, key, value, shape)
    assert got.shape == query.shape
    assert not got[count:].any(), "the padding row belongs to nobody"
    row = 0
    for segment in segments:
        rows = slice(row, row + segment.width)
        row = rows.stop
        places = slice(segment.start, segment.end)
        assert torch.equal(pool[0, segment.slot, :, places], key[rows].transpose(0, 1))
        want = naive(segment, query[rows], pool[0, segment.slot], pool[1, segment.slot], shape)
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(got[rows].double(), want, atol=tolerance, rtol=tolerance), segment


def test_what_was_not_a_number_in_another_slot_does_not_spread() -> None:
    pool = torch.randn(2, SLOTS, KV_HEADS, LENGTH, WIDTH).bfloat16()
    pool[:, 3] = math.nan
    segments = [Segment(2, 9, [1]), Segment(4, 12, [1])]
    new = torch.randn(3, 2, KV_HEADS * GROUPS, WIDTH).bfloat16()
    step = Step(segments, [pool[0]], [pool[1]])
    got = step.attend(0, new[0], new[1, :, :KV_HEADS], new[2, :, :KV_HEADS], AttentionShape(0.25))
    assert got.isfinite().all()
