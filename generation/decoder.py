"""Llama-shaped decoders in few operations.

At one to sixteen rows a step, transformers' layers spend a third of their time on small operations between
the matrix products. This decoder computes the same layers with the projections that share an input joined
into one product, rotary embedding in three operations and no cache object, from the model's own weights. It
serves Llama, Mistral, Qwen2 and Qwen3; every other architecture runs as transformers has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation.attention import AttentionShape, Step

FUSED_DECODERS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """``last_hidden_state [1, T, hidden]``, under the name transformers gives it."""

    last_hidden_state: Tensor


class FusedLayer(nn.Module):
    """One decoder layer over rows ``[T, hidden]``."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim = int(attention.head_dim)
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.intermediate = int(mlp.gate_proj.out_features)
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = attention.o_proj
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj])
        self.down = mlp.down_proj
        self.shape = AttentionShape(float(attention.scaling), _window(attention))

    def forward(self, rows: Tensor, cos: Tensor, sin: Tensor, step: Step, number: int) -> Tensor:
        count, width = rows.shape[0], self.head_dim
        num_rotated = self.num_heads + self.num_kv_heads
        mixed = self.qkv(_norm(rows, self.input_norm)).view(count, -1, width)
        rotated, value = mixed[:, :num_rotated], mixed[:, num_rotated:]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
            rotated = torch.cat([_norm(query, self.query_norm), _norm(key, self.key_norm)], dim=1)
        rotated = torch.addcmul(rotated * cos, rotated.roll(width // 2, dims=-1), sin)
        query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        attended = step.attend(number, query, key, value, self.shape)
        rows = rows + self.out(attended.reshape(count, -1))
        gate_up = self.gate_up(_norm(rows, self.post_norm))
        gate, up = gate_up[:, : self.intermediate], gate_up[:, self.intermediate :]
        return rows + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class FusedDecoder(nn.Module):
    """Embedding, layers and last norm of a Llama-shaped model, called as transformers' base model is."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embedding = decoder.embed_tokens
        self.rotary = decoder.rotary_emb
        self.norm = decoder.norm
        layers = []
        for number in range(len(decoder.layers)):
            layers.append(FusedLayer(decoder.layers[number]))
            decoder.layers[number] = None  # its weights live on in the fused layer, not beside it
        self.layers = nn.ModuleList(layers)

    def forward(self, input_ids: Tensor, position_ids: Tensor, rag_step: Step, **_: Any) -> DecoderOutput:
        """``input_ids`` and ``position_ids [1, T]``."""
        rows = self.embedding(input_ids[0])
        cos, sin = self.rotary(rows[None], position_ids)
        cos, sin = cos[0, :, None], sin[0, :, None]
        # rotate_half(x) = roll(x) with the first half negated: the sign goes into the sine, once a step.
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for number, layer in enumerate(self.layers):
            rows = layer(rows, cos, sin, rag_step, number)
        return DecoderOutput(_norm(rows, self.norm)[None])


def can_fuse(decoder: nn.Module) -> bool:
    """Whether ``decoder`` is of a known architecture with nothing unusual switched on."""
    config: Any = getattr(decoder, "config", None)
    plain = getattr(config, "hidden_act", "") == "silu" and not getattr(config, "rope_interleaved", False)
    return type(decoder).__name__ in FUSED_DECODERS and plain


def joined(linears: list[nn.Linear]) -> nn.Linear:
    """One linear layer that gives the outputs of several that share their input, side by side."""
    first = linears[0]
    bias = first.bias is not None
    weight = torch.cat([linear.weight.detach() for linear in linears])
    with torch.device("meta"):
        whole = nn.Linear(first.in_features, weight.shape[0], bias=bias)
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if bias:
        whole.bias = nn.Parameter(
            torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False
        )
    return whole


def _window(attention: Any) -> int | None:
    """The layer's sliding window: its own (Qwen), or the model's for every layer (Mistral)."""
    owner = attention if hasattr(attention, "sliding_window") else attention.config
    window: int | None = getattr(owner, "sliding_window", None)
    return window


def _norm(rows: Tensor, norm: Any) -> Tensor:
    """Root mean square norm (1910.07467) over the last dimension."""
    return torch.rms_norm(rows, (rows.shape[-1],), norm.weight, norm.variance_epsilon)
