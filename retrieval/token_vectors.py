"""Token vectors of a chunk: reduced, pooled, and packed in eight bits beside its token ids.

Encoding passages at query time costs tens of milliseconds each on a CPU; their token vectors fall out of the
pass that makes the dense vector, so they are stored and late interaction (MaxSim, ColBERT, 2004.12832) is one
small matrix product a passage.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrieval.types import RetrievalError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_HEADER = struct.Struct("<BHHHH")
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """``vectors`` ``[m, dimension]``: pooled, of length 1. ``ids`` ``[n]``: all tokens of the indexed text, of
    which the first ``num_context`` are the chunk's context (title, section)."""

    vectors: FloatArray
    ids: IntArray
    num_context: int


def normalise(vectors: FloatArray) -> FloatArray:
    """Rows of length 1 (rows of zeros stay)."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    result: FloatArray = vectors / np.maximum(norms, 1e-12)
    return result


def pool(vectors: FloatArray, factor: int) -> FloatArray:
    """Sums of ``factor`` adjacent rows."""
    if factor <= 1 or len(vectors) <= 1:
        return vectors
    sums: FloatArray = np.add.reduceat(vectors, np.arange(0, len(vectors), factor), axis=0)
    return sums


def pack(tokens: TokenVectors) -> bytes:
    """Signed 8-bit vectors with one scale a row, ids in 32 bits."""
    vectors = tokens.vectors
    scales = np.abs(vectors).max(axis=1, initial=1e-8)
    quantised = np.rint(vectors / scales[:, None] * 127.0).astype(np.int8)
    header = _HEADER.pack(_FORMAT, *vectors.shape, len(tokens.ids), tokens.num_context)
    ids = tokens.ids.astype("<u4").tobytes()
    return b"".join((header, ids, scales.astype("<f2").tobytes(), quantised.tobytes()))


def unpack(packed: bytes) -> TokenVectors:
    """The inverse of ``pack``, within its rounding. Raises ``RetrievalError`` for other bytes."""
    if len(packed) < _HEADER.size or packed[0] != _FORMAT:
        raise RetrievalError("Stored token vectors are damaged.", "index_corrupt")
    _, rows, columns, num_ids, num_context = _HEADER.unpack_from(packed)
    scales_at = _HEADER.size + 4 * num_ids
    values_at = scales_at + 2 * rows
    if len(packed) != values_at + rows * columns:
        raise RetrievalError("Stored token vectors are damaged.", "index_corrupt")
    ids = np.frombuffer(packed, dtype="<u4", count=num_ids, offset=_HEADER.size).astype(np.int64)
    scales = np.frombuffer(packed, dtype="<f2", count=rows, offset=scales_at).astype(np.float32)
    values = np.frombuffer(packed, dtype=np.int8, offset=values_at).reshape(rows, columns)
    return TokenVectors(values.astype(np.float32) * (scales[:, None] / 127.0), ids, num_context)
