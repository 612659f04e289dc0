"""The learned reranker's small network: features of one query's candidates to scores."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save_file
from tokenizers import Tokenizer

from retrieval.features import FEATURES, FeatureExtractor
from retrieval.token_vectors import FloatArray
from retrieval.types import RetrievalError

_FILE = "ranking.safetensors"
_SCALE = 0.1


@dataclass(frozen=True, slots=True)
class RankingModel:
    """Projection and rarity table for token vectors, and a network with one hidden layer over the features.

    Each feature enters twice: as it is, and as its distance from the best among the candidates. Tensors:
    ``projection`` ``[hidden, dimension]``, ``idf`` ``[vocabulary]``, ``mean`` and ``scale`` ``[features]``,
    ``first`` ``[2 features, width]``, ``first_bias``, ``second`` ``[width]``.
    """

    tensors: Mapping[str, FloatArray]
    pooling: int
    embedder: str
    name: str
    """What stored vectors can be compared under: part of the collection's name."""

    @classmethod
    def load(cls, folder: Path) -> RankingModel:
        """As made by ``rag-service reranker train``. Raises ``RetrievalError`` without one."""
        path = folder / _FILE
        try:
            content = path.read_bytes()
            tensors = {name: value.astype(np.float32) for name, value in load(content).items()}
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
            if metadata["features"] != ",".join(FEATURES):
                raise RetrievalError(
                    f"The reranker in {folder} was trained by another version: train it again.",
                    "reranker_unavailable",
                )
            stored = tensors["projection"].tobytes()
            name = hashlib.sha256(stored + metadata["pooling"].encode()).hexdigest()[:12]
            return cls(tensors, int(metadata["pooling"]), metadata["embedder"], name)
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise RetrievalError(
                f"There is no usable reranker in {folder}: {error}", "reranker_unavailable"
            ) from error

    def save(self, folder: Path) -> None:
        """In half precision; the file appears whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {"features": ",".join(FEATURES), "pooling": str(self.pooling), "embedder": self.embedder}
        staged = folder / f".{_FILE}"
        save_file({name: value.astype(np.float16) for name, value in self.tensors.items()}, staged, metadata)
        staged.replace(folder / _FILE)

    def extractor(self, tokenizer: Tokenizer) -> FeatureExtractor:
        return FeatureExtractor(self.tensors["projection"], self.tensors["idf"], self.pooling, tokenizer)

    def scores(self, features: FloatArray, hybrid_weight: float) -> list[float]:
        """One score from 0 to 1 a candidate, ``features`` being ``[candidates, features]`` of one query.

        The network's output through a logistic function: an order, and roughly comparable between queries.
        ``hybrid_weight`` pulls down what the hybrid search put far below its best candidate: a guard against
        a network that is wrong with conviction about documents of a kind it has never seen.
        """
        if not len(features):
            return []
        inputs = network_inputs(features, self.tensors["mean"], self.tensors["scale"])
        hidden = gelu(inputs @ self.tensors["first"] + self.tensors["first_bias"])
        fused = features[:, FEATURES.index("fused")]
        output = hidden @ self.tensors["second"] + hybrid_weight * (fused - fused.max())
        return [float(value) for value in 1.0 / (1.0 + np.exp(-_SCALE * output))]


def network_inputs(features: FloatArray, mean: FloatArray, scale: FloatArray) -> FloatArray:
    """``[candidates, 2 features]``: standardised features, and their distance from the candidates' best."""
    standard = (features - mean) / scale
    return np.concatenate([standard, standard - standard.max(axis=0, keepdims=True)], axis=1).astype(
        np.float32
    )


def gelu(values: FloatArray) -> FloatArray:
    """The tanh form, as in training."""
    inner = np.sqrt(2.0 / np.pi) * (values + 0.044715 * values**3)
    result: FloatArray = 0.5 * values * (1.0 + np.tanh(inner))
    return result
