"""Linear layers in oneDNN's blocked weight layout, for decoding on a CPU.

``torch.nn.functional.linear`` re-reads a row-major weight matrix and converts it on every call; with one to
sixteen rows of input that conversion *is* the cost. Reordering each weight once makes decoding two to three
times faster here, and the blocked kernels compute every row alike whatever the number of rows: a token's
logits are bitwise the same verified alone, in a proposal of eight, or in company. The engine's exact equality
of speculative and plain greedy decoding rests on that (``tests/generation/test_packing.py`` holds it down).
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
# oneDNN keeps a compiled kernel for every shape it meets, 1,024 of them unless told, and a decoding step of every
# context length has shapes of its own: hundreds of megabytes over a day. 128 hold the shapes of a round
# (benchmarks/engine.py, section memory). It is read when the first kernel is made.

_BATCH_HINT = 16
"""Rows the blocked layout is chosen for; one hint for all layers, since another hint is another kernel."""


class PackedLinear(nn.Module):
    """A frozen ``nn.Linear`` whose weight ``[out, in]`` is kept in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = linear.weight.dtype
        self.bias = linear.bias.detach() if linear.bias is not None else None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _BATCH_HINT)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the weight's dtype."""
        return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
            inputs, self._packed, self.bias, "none", [], ""
        )


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor runs blocked kernels for ``dtype``."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_linears(model: nn.Module) -> int:
    """Replace every plain ``nn.Linear`` inside ``model`` by a ``PackedLinear``; returns how many.

    Weights shared with an embedding stay with the embedding: the packed copy is the linear's own.
    """
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight.dtype):
                setattr(parent, name, PackedLinear(child))
                num_packed += 1
    return num_packed
