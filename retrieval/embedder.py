"""Texts to vectors: one pass gives the dense vector and the token vectors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from retrieval.config import EmbedderConfig
from retrieval.types import RetrievalError

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Encoding:
    """One text: ``dense`` ``[dimension]`` of length 1; ``tokens`` ``[num_tokens, hidden]`` (special tokens
    excluded, not normalised), ``token_ids`` beside them."""

    dense: FloatArray
    tokens: FloatArray
    token_ids: npt.NDArray[np.int64]


def resolve_model(model: str, cache_folder: Path | None) -> str:
    """A packaged name's folder in the cache, or ``model`` itself (a folder or a hub id)."""
    if cache_folder is not None and (cache_folder / "models" / model / "config.json").exists():
        return str(cache_folder / "models" / model)
    return model


def pick_device(device: str) -> str:
    """``auto`` becomes ``cuda`` where there is one."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """``auto``: bfloat16 where the processor multiplies in it (two to three times faster here, cosines with
    float32 above 0.9999), else float32."""
    if dtype != "auto":
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    if device == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    capabilities = torch.cpu.get_capabilities()
    return (
        torch.bfloat16 if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else torch.float32
    )


class SentenceEmbedder:
    """A sentence-transformers model. Safe to call from several threads; only the tokenizer is one at a time."""

    def __init__(self, config: EmbedderConfig, cache_folder: Path | None = None) -> None:
        self._config = config
        path = resolve_model(config.model, cache_folder)
        try:
            self._model = SentenceTransformer(
                path, revision=config.revision, device=pick_device(config.device)
            )
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f"The embedding model {config.model!r} could not be loaded: {str(error).splitlines()[0]}",
                "embedder_unavailable",
            ) from error
        self._model.eval()
        self._model.to(pick_dtype(config.dtype, self._model.device.type))
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        tokenizer = getattr(self._model.tokenizer, "backend_tokenizer", None)
        if not isinstance(tokenizer, Tokenizer):
            raise RetrievalError(
                f"The embedding model {config.model!r} has no fast tokenizer.", "embedder_unavailable"
            )
        self.tokenizer = tokenizer
        self._special_ids = frozenset(self._model.tokenizer.all_special_ids)
        self._lock = threading.Lock()

    @property
    def dimension(self) -> int:
        dimension = self._model.get_embedding_dimension()
        assert dimension is not None
        return int(dimension)

    @property
    def name(self) -> str:
        """Model and revision: what vectors made by it can be compared under."""
        return f"{self._config.model}@{self._config.revision or ''}"

    @property
    def max_tokens(self) -> int:
        """The longest input; what is beyond it is not seen."""
        return int(self._model.get_max_seq_length() or 512)

    @property
    def num_at_once(self) -> int:
        """Batches that are best computed at the same time: on a CPU one a core, each by a single thread, since
        threads that share a batch wait for each other at every layer; on an accelerator one."""
        return torch.get_num_threads() if self._model.device.type == "cpu" else 1

    @property
    def hidden_size(self) -> int:
        """The width of token vectors."""
        transformer: Any = self._model[0]
        return int(transformer.auto_model.config.hidden_size)

    def num_tokens(self, text: str) -> int:
        """Without special tokens."""
        return len(self.token_ids(text))

    def token_ids(self, text: str) -> list[int]:
        """Without special tokens; cut off where the model stops reading."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Dense vectors ``[n, dimension]`` of passages."""
        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        return np.stack([encoding.dense for encoding in self.encode_passages(texts)])

    def encode_passages(self, texts: Sequence[str]) -> list[Encoding]:
        return _in_order(self.each_passage(texts))

    def encode_queries(self, texts: Sequence[str]) -> list[Encoding]:
        return _in_order(self._each([self._config.query_prefix + text for text in texts]))

    def each_passage(self, texts: Sequence[str]) -> Iterator[tuple[int, Encoding]]:
        """(place in ``texts``, encoding), as they come: all of them at once would take much memory."""
        return self._each([self._config.passage_prefix + text for text in texts])

    def _each(self, texts: Sequence[str]) -> Iterator[tuple[int, Encoding]]:
        """Batches of similar length, so that little is padded."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(order), self._config.batch_size):
            batch = order[start : start + self._config.batch_size]
            yield from zip(batch, self._forward([texts[i] for i in batch]), strict=True)

    @torch.inference_mode()
    def _forward(self, texts: list[str]) -> list[Encoding]:
        with self._lock:  # a fast tokenizer refuses two callers at once
            features: dict[str, Any] = self._model.preprocess(texts)
        features = {
            key: value.to(self._model.device) if isinstance(value, torch.Tensor) else value
            for key, value in features.items()
        }
        output = self._model(features)
        dense = torch.nn.functional.normalize(output["sentence_embedding"].float(), dim=-1).cpu().numpy()
        tokens = output["token_embeddings"].float().cpu().numpy()
        token_ids = features["input_ids"].cpu().numpy()
        encodings = []
        for row in range(len(texts)):
            keep = [i for i, token in enumerate(token_ids[row]) if int(token) not in self._special_ids]
            encodings.append(Encoding(dense[row], tokens[row, keep], token_ids[row, keep].astype(np.int64)))
        return encodings


def _in_order(encodings: Iterator[tuple[int, Encoding]]) -> list[Encoding]:
    return [encoding for _, encoding in sorted(encodings, key=lambda item: item[0])]
