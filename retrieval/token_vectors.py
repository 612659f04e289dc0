"""Late interaction over stored token vectors: reduced, pooled, and packed in eight bits.

Encoding passages at query time costs tens of milliseconds each on a CPU; their token vectors fall out of the
pass that makes the dense vector, so they are stored. Scoring is then one small matrix product a passage.
The score is MaxSim (ColBERT, 2004.12832): each query token's best match, summed with weights.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from retrieval.embedder import Encoding
from retrieval.types import RetrievalError

FloatArray = npt.NDArray[np.float32]

_HEADER = struct.Struct("<HH")


def normalise(vectors: FloatArray) -> FloatArray:
    """Rows of length 1 (rows of zeros stay)."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    result: FloatArray = vectors / np.maximum(norms, 1e-12)
    return result


def pool(vectors: FloatArray, factor: int) -> FloatArray:
    """Means of ``factor`` adjacent rows."""
    if factor <= 1 or len(vectors) <= 1:
        return vectors
    starts = np.arange(0, len(vectors), factor)
    sums: FloatArray = np.add.reduceat(vectors, starts, axis=0)
    return sums


def pack(vectors: FloatArray) -> bytes:
    """``[n, dimension]`` to bytes: signed 8-bit with one scale a row."""
    scales = np.abs(vectors).max(axis=1, initial=1e-8)
    quantised = np.rint(vectors / scales[:, None] * 127.0).astype(np.int8)
    header = _HEADER.pack(*vectors.shape)
    return b"".join((header, scales.astype("<f2").tobytes(), quantised.tobytes()))


def unpack(packed: bytes) -> FloatArray:
    """The inverse of ``pack``, within its rounding. Raises ``RetrievalError`` for other bytes."""
    if len(packed) < _HEADER.size:
        raise RetrievalError("Stored token vectors are cut off.", "index_corrupt")
    rows, columns = _HEADER.unpack_from(packed)
    if len(packed) != _HEADER.size + rows * 2 + rows * columns:
        raise RetrievalError("Stored token vectors are cut off.", "index_corrupt")
    scales = np.frombuffer(packed, dtype="<f2", count=rows, offset=_HEADER.size).astype(np.float32)
    values = np.frombuffer(packed, dtype=np.int8, offset=_HEADER.size + rows * 2).reshape(rows, columns)
    result: FloatArray = values.astype(np.float32) * (scales[:, None] / 127.0)
    return result


class LateInteraction:
    """How token vectors are made smaller and compared: a trained head, or the model's own vectors."""

    def __init__(self, projection: FloatArray | None = None, pooling: int = 2, name: str = "plain") -> None:
        """``projection`` ``[hidden, dimension]``; ``pooling``: adjacent passage tokens merged into one."""
        self._projection = projection
        self._pooling = pooling
        self.name = name

    @classmethod
    def load(cls, folder: Path) -> LateInteraction:
        """A head made by ``rag-service reranker train``."""
        path = folder / "head.safetensors"
        if not path.exists():
            raise RetrievalError(f"There is no late-interaction head in {folder}.", "reranker_unavailable")
        tensors = load_file(path)
        return cls(tensors["projection"].astype(np.float32), int(tensors["pooling"][0]), folder.name)

    def passage(self, encoding: Encoding) -> bytes:
        """The packed vectors to store with a chunk."""
        return pack(normalise(pool(normalise(self._project(encoding.tokens)), self._pooling)))

    def query(self, encoding: Encoding) -> FloatArray:
        """``[num_tokens, dimension]``, rows of length 1."""
        return normalise(self._project(encoding.tokens))

    def scores(self, query: FloatArray, passages: Sequence[bytes]) -> list[float]:
        """The mean over query tokens of the best cosine with each passage's vectors."""
        if not len(query):
            return [0.0] * len(passages)
        return [float((query @ unpack(packed).T).max(axis=1).mean()) for packed in passages]

    def _project(self, tokens: FloatArray) -> FloatArray:
        if self._projection is None:
            return tokens
        result: FloatArray = tokens @ self._projection
        return result
