"""Rows are computed alike, whatever their company: the ground under exact greedy equality. Bitwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from generation.attention import Segment
from generation.model_runner import ModelRunner
from generation.packing import PackedLinear, can_pack, pack_linears
from tests.generation.real_model import corpus_questions, load_target, prompt_ids


def needs(dtype: torch.dtype) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this processor has no blocked kernels for {dtype}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_linear_is_the_linear(dtype: torch.dtype, bias: bool) -> None:
    needs(dtype)
    torch.manual_seed(0)
    linear = nn.Linear(96, 80, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    inputs = torch.randn(1, 5, 96).to(dtype)
    with torch.inference_mode():
        want = nn.functional.linear(
            inputs.double(),
            linear.weight.double(),
            linear.bias.double() if bias else None,
        )
        got = packed(inputs)
    assert got.dtype == dtype
    assert got.shape == (1, 5, 80)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert torch.allclose(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("shape", [(576, 576), (576, 192), (576, 1536), (1536, 576), (100, 36)])
def test_rows_are_bitwise_independent_of_their_number(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """The target's own layer shapes, from two rows (the runner never gives fewer) to a full batch."""
    needs(dtype)
    torch.manual_seed(1)
    packed = PackedLinear(nn.Linear(shape[0], shape[1], bias=False).to(dtype))
    inputs = torch.randn(48, shape[0]).to(dtype)
    with torch.inference_mode():
        whole = packed(inputs)
        for width in (2, 3, 6, 8, 16, 17, 31):
            for start in (0, 5, 48 - width):
                rows = slice(start, start + width)
                assert torch.equal(packed(inputs[rows].contiguous()), whole[rows]), (width, start)


def test_packing_replaces_linears_and_leaves_tied_embeddings() -> None:
    needs(torch.bfloat16)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
            self.head = nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied().to(torch.bfloat16)
    before = model.embedding.weight.clone()
    assert pack_linears(model) == 3
    assert isinstance(model.layers[0], PackedLinear)
    assert isinstance(model.head, PackedLinear)
    assert torch.equal(model.embedding.weight, before)
    assert pack_linears(model) == 0


@pytest.fixture(scope="module")
def target() -> tuple[Any, list[list[int]]]:
    needs(torch.bfloat16)
    model, tokenizer = load_target()
    texts = [
        list(prompt_ids(tokenizer, question, num_tokens=40 + 30 * i))
        for i, question in enumerate(corpus_questions(3))
    ]
    return model, texts


def prefilled(model: Any, texts: list[list[int]]) -> ModelRunner:
    runner = ModelRunner(model, len(texts), 320)
    for slot, text in enumerate(texts):
        runner.forward([Segment(slot, 0, text[:-6])], [])
    return runner


def test_a_tokens_logits_are_bitwise_the_same_alone_in_a_proposal_and_in_company(
    target: tuple[Any, list[list[int]]],
) -> None:
    model, texts = target
    runner = prefilled(model, texts)
    start = [len(text) - 6 for text in texts]
    # One at a time, as plain decoding does.
    alone = [
        torch.cat([runner.forward([Segment(s, start[s] + i, [text[start[s] + i]])], [0]) for i in range(6)])
        for s, text in enumerate(texts)
    ]
    # All six as one proposal.
    for s, text in enumerate(texts):
        together = runner.forward([Segment(s, start[s], text[start[s] :])], range(6))
        assert torch.equal(together, alone[s]), f"text {s}, verification of width 6"
    # Everyone's proposals of different widths in one step, beside a piece of prompt.
    segments: list[Segment] = []
    rows: list[int] = []
    wanted: list[torch.Tensor] = []
    row = 0
    for s, (text, width) in enumerate(zip(texts, (6, 2, 4), strict=True)):
        segments.append(Segment(s, start[s], text[start[s] : start[s] + width]))
        rows.extend(range(row, row + width))
        wanted.append(alone[s][:width])
        row += width
    in_company = runner.forward(segments, rows)
    assert torch.equal(in_company, torch.cat(wanted))


def test_company_with_a_prefill_changes_no_bit(target: tuple[Any, list[list[int]]]) -> None:
    model, texts = target
    runner = prefilled(model, texts)
    text = texts[0]
    start = len(text) - 6
    alone = runner.forward([Segment(0, start, text[start:])], range(6))
    beside = runner.forward(
        [Segment(0, start, text[start:]), Segment(1, 0, texts[1][:40])], [0, 1, 2, 3, 4, 5]
    )
    assert torch.equal(beside, alone)
