"""Slots and prefix blocks: nothing owned twice, nothing lost, nothing mistaken for something else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generation.kv_cache import CacheShape, PrefixCache, SlotPool

SHAPE = CacheShape(((2, 3), (1, 4)), torch.float32, torch.device("cpu"))


def pool(num_slots: int = 3, length: int = 32) -> SlotPool:
    return SlotPool(SHAPE, num_slots, length)


def write(slots: SlotPool, slot: int, token_ids: list[int]) -> None:
    """Keys and values that depend on the whole text before them, as a model's do."""
    state = 0.0
    for place, token_id in enumerate(token_ids):
        state = 0.5 * state + token_id + 1
        for layer, (keys, values) in enumerate(zip(slots.keys, slots.values, strict=True)):
            keys[slot][:, place] = state + layer
            values[slot][:, place] = -state - layer


def holds(slots: SlotPool, slot: int, token_ids: list[int]) -> bool:
    wanted = pool(1, slots.slot_length)
    write(wanted, 0, token_ids)
    n = len(token_ids)
    return all(
        torch.equal(mine[slot][:, :n], theirs[0][:, :n])
        for mine, theirs in zip((*slots.keys, *slots.values), (*wanted.keys, *wanted.values), strict=True)
    )


def test_bytes_a_token() -> None:
    assert SHAPE.bytes_per_token == 2 * 4 * (2 * 3 + 1 * 4)


def test_slots_are_given_lowest_first_and_once() -> None:
    slots = pool()
    assert [slots.allocate() for _ in range(4)] == [0, 1, 2, None]
    slots.free(1)
    assert slots.num_free == 1
    slots.check_integrity([0, 2])
    with pytest.raises(ValueError, match="free already"):
        slots.free(1)
    assert slots.allocate() == 1


@pytest.mark.parametrize("owned", [[0, 0], [0, 1], []])
def test_integrity_notices_wrong_books(owned: list[int]) -> None:
    slots = pool()
    slots.allocate()
    slots.check_integrity([0])
    with pytest.raises(AssertionError):
        slots.check_integrity(owned)


def test_a_poisoned_slot_is_wiped() -> None:
    slots = pool()
    slot = slots.allocate()
    assert slot == 0
    slots.keys[0][0].fill_(float("nan"))
    slots.free(0, poisoned=True)
    assert not slots.keys[0].isnan().any()


def test_a_slot_of_an_unseen_result_is_looked_at() -> None:
    """A cancelled request's last tokens were computed, but nobody read their logits."""
    slots = pool()
    for bad in (False, True):
        slot = slots.allocate()
        assert slot == 0
        slots.keys[0][0].fill_(3.0)
        if bad:
            slots.values[-1][0, 0, 1, 0] = float("nan")
        slots.free(0, poisoned=None)
        assert not slots.values[-1].isnan().any()
        assert bool(slots.keys[0][0].any()) == (not bad)


def test_whole_blocks_come_back_and_one_token_is_always_left() -> None:
    slots = pool()
    cache = PrefixCache(slots, block_size=4, num_blocks=8)
    text = list(range(12))
    write(slots, 0, text)
    cache.save(text, 0, len(text))
    assert cache.load(text, 1) == 8  # the last block would leave nothing to compute
    assert holds(slots, 1, text[:8])
    assert cache.load([*text, 99], 1) == 12
    assert holds(slots, 1, text)
    assert cache.load([*text[:6], 77, 78, 79], 2) == 4
    assert cache.load([5, *text], 2) == 0
    assert cache.num_hit_tokens == 24
    assert cache.num_queried_tokens == 12 + 13 + 9 + 13


def test_only_computed_tokens_are_saved() -> None:
    slots = pool()
    cache = PrefixCache(slots, block_size=4, num_blocks=8)
    text = list(range(12))
    write(slots, 0, text[:7])
    cache.save(text, 0, 7)
    assert cache.load(text, 1) == 4


def test_equal_blocks_after_different_texts_are_different() -> None:
    slots = pool()
    cache = PrefixCache(slots, block_size=2, num_blocks=8)
    write(slots, 0, [1, 1, 5, 5])
    cache.save([1, 1, 5, 5], 0, 4)
    assert cache.load([2, 2, 5, 5, 9], 1) == 0
    assert cache.load([5, 5, 9], 1) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=15), st.integers(1, 6)
)
def test_whatever_comes_back_is_right_under_eviction(texts: list[list[int]], num_blocks: int) -> None:
    slots = pool(2)
    cache = PrefixCache(slots, block_size=3, num_blocks=num_blocks)
    size = sum(t.numel() for t in (*cache._keys, *cache._values))
    for text in texts:
        length = cache.load(text, 1)
        assert length % 3 == 0
        assert length < len(text)
        assert holds(slots, 1, text[:length])
        write(slots, 0, text)
        cache.save(text, 0, len(text))
        cache.check_integrity()
    assert sum(t.numel() for t in (*cache._keys, *cache._values)) == size


def test_the_least_recently_used_block_goes_first() -> None:
    slots = pool()
    cache = PrefixCache(slots, block_size=2, num_blocks=2)
    for text in ([1, 1], [2, 2]):
        write(slots, 0, text)
        cache.save(text, 0, 2)
    assert cache.load([1, 1, 9], 1) == 2  # used: 2, 2 is now the oldest
    write(slots, 0, [3, 3])
    cache.save([3, 3], 0, 2)
    assert cache.load([1, 1, 9], 1) == 2
    assert cache.load([2, 2, 9], 1) == 0
