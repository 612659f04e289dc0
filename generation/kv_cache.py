"""Keys and values: a fixed pool of slots for running sequences, and a store of prefix blocks.

A running sequence owns one contiguous slot, so attention reads its keys in place. Shared prefixes are kept as
blocks of ``block_size`` tokens, named by a hash chained over their ids (as in vLLM's prefix cache), copied out
of a slot when a prompt is done and into one when a prompt begins with them. Both are allocated once: the
budget never grows.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from generation.attention import Segment, Step


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Per layer ``(kv_heads, head_dim)``, and what the tensors are made of."""

    layers: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        itemsize = torch.empty((), dtype=self.dtype).element_size()
        return sum(2 * heads * dim * itemsize for heads, dim in self.layers)


def _zeros(size: tuple[int, ...], shape: CacheShape) -> Tensor:
    """Zeros that take memory on a CPU only where they are written: the budget is a bound, not a rent."""
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    itemsize = torch.empty((), dtype=shape.dtype).element_size()
    raw = np.zeros(math.prod(size) * itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(shape.dtype).view(size)


class SlotPool:
    """``num_slots`` slots of ``slot_length`` tokens; the lowest free slot is given first."""

    def __init__(self, shape: CacheShape, num_slots: int, slot_length: int) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self.slot_length = slot_length
        sizes = [(num_slots, heads, slot_length, dim) for heads, dim in shape.layers]
        self.keys = [_zeros(size, shape) for size in sizes]
        self.values = [_zeros(size, shape) for size in sizes]
        self._free = set(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """A free slot, or None."""
        if not self._free:
            return None
        slot = min(self._free)
        self._free.remove(slot)
        return slot

    def free(self, slot: int, *, poisoned: bool | None = False) -> None:
        """Give a slot back. ``poisoned``: it holds NaN, which masking would spread; wipe it. None: look.

        What is not a number in one layer is none in all later ones, so the last layer tells.
        """
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        if poisoned is None:
            poisoned = bool(self.values) and not bool(self.values[-1][slot].isfinite().all())
        if poisoned:
            for layer in (*self.keys, *self.values):
                layer[slot].zero_()
        self._free.add(slot)

    def step(self, segments: list[Segment]) -> Step:
        return Step(segments, self.keys, self.values)

    def check_integrity(self, owned: Sequence[int]) -> None:
        """Every slot is owned once or free; raises AssertionError otherwise."""
        assert len(set(owned)) == len(owned), f"slots owned twice: {sorted(owned)}"
        assert not self._free & set(owned), f"slots owned and free: {sorted(self._free & set(owned))}"
        assert len(self._free) + len(owned) == self.num_slots, "slots lost"


class PrefixCache:
    """Blocks of prompt keys and values, least recently used first out."""

    def __init__(self, pool: SlotPool, block_size: int, num_blocks: int) -> None:
        shape = pool.shape
        self._pool = pool
        self.block_size = block_size
        self.num_blocks = num_blocks
        sizes = [(num_blocks, heads, block_size, dim) for heads, dim in shape.layers]
        self._keys = [_zeros(size, shape) for size in sizes]
        self._values = [_zeros(size, shape) for size in sizes]
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_blocks))
        self.num_hit_tokens = 0
        self.num_queried_tokens = 0

    def load(self, token_ids: Sequence[int], slot: int) -> int:
        """Copy the longest stored prefix of ``token_ids`` into ``slot``; returns its length in tokens.

        At least one token is left to compute, since the last token's logits are needed.
        """
        self.num_queried_tokens += len(token_ids)
        blocks: list[int] = []
        for name in self._names(token_ids[:-1]):
            block = self._blocks.get(name)
            if block is None:
                break
            self._blocks.move_to_end(name)
            blocks.append(block)
        if not blocks:
            return 0
        length = len(blocks) * self.block_size
        index = torch.tensor(blocks, device=self._pool.shape.device)
        for layer in range(len(self._keys)):
            for store, slots in ((self._keys, self._pool.keys), (self._values, self._pool.values)):
                gathered = store[layer][index].transpose(0, 1).flatten(1, 2)
                slots[layer][slot][:, :length] = gathered
        self.num_hit_tokens += length
        return length

    def save(self, token_ids: Sequence[int], slot: int, length: int) -> None:
        """Store the whole blocks of the first ``length`` computed tokens of ``slot``."""
        for number, name in enumerate(self._names(token_ids[:length])):
            if name in self._blocks:
                self._blocks.move_to_end(name)
                continue
            block = self._take_block()
            if block is None:
                return
            rows = slice(number * self.block_size, (number + 1) * self.block_size)
            for layer in range(len(self._keys)):
                self._keys[layer][block] = self._pool.keys[layer][slot][:, rows]
                self._values[layer][block] = self._pool.values[layer][slot][:, rows]
            self._blocks[name] = block

    def check_integrity(self) -> None:
        used = list(self._blocks.values())
        assert len(set(used)) == len(used), "a block has two names"
        assert not set(used) & set(self._free), "a block is used and free"
        assert len(used) + len(self._free) == self.num_blocks, "blocks lost"

    def _take_block(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._blocks:
            return None
        return self._blocks.popitem(last=False)[1]

    def _names(self, token_ids: Sequence[int]) -> list[bytes]:
        names, parent = [], b""
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            block = token_ids[start : start + self.block_size]
            parent = hashlib.blake2b(parent + str(tuple(block)).encode(), digest_size=16).digest()
            names.append(parent)
        return names
