from __future__ import annotations

import numpy as np
import pytest

from retrieval.token_vectors import TokenVectors, normalise, pack, pool, unpack
from retrieval.types import RetrievalError


def test_packing_keeps_ids_exactly_and_vectors_nearly() -> None:
    random = np.random.default_rng(0)
    vectors = normalise(random.standard_normal((37, 96)).astype(np.float32))
    ids = random.integers(0, 250_000, size=73)
    back = unpack(pack(TokenVectors(vectors, ids, 5)))
    assert back.num_context == 5
    assert (back.ids == ids).all()
    assert float((back.vectors * vectors).sum(axis=1).min()) > 0.995


def test_damaged_bytes_are_refused() -> None:
    packed = pack(TokenVectors(np.eye(4, dtype=np.float32), np.arange(4), 0))
    for broken in (packed[:-1], b"", b"\x09" + packed[1:]):
        with pytest.raises(RetrievalError, match="damaged"):
            unpack(broken)


def test_pooling_sums_neighbours_and_keeps_the_odd_one() -> None:
    rows = np.array([[1.0], [2.0], [4.0]], dtype=np.float32)
    assert pool(rows, 2).tolist() == [[3.0], [4.0]]
    assert pool(rows, 1).tolist() == rows.tolist()
