"""A second look at the candidates: late interaction, a cross-encoder, or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retrieval.config import RerankerConfig, RetrievalConfig
from retrieval.embedder import Encoding, SentenceEmbedder, pick_device, resolve_model
from retrieval.features import FEATURES, FeatureExtractor
from retrieval.ranking_model import RankingModel
from retrieval.token_vectors import TokenVectors, unpack
from retrieval.types import Passage, Reranker, RetrievalError

PACKAGED = Path(__file__).parent / "ranking"


class KeepOrder:
    """No reranking: earlier passages score higher."""

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        return [1.0 / (rank + 1) for rank in range(len(passages))]


class LateInteractionReranker:
    """The learned ranker over stored token vectors and wording; see ``retrieval.features``.

    Passages without token vectors are encoded on the spot: slow, but right.
    """

    def __init__(self, embedder: SentenceEmbedder, ranker: Ranker) -> None:
        self._embedder = embedder
        self._ranker = ranker

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        return self.score_batch([(query, passages)])[0]

    def score_batch(self, requests: Sequence[tuple[str, Sequence[Passage]]]) -> list[list[float]]:
        """Several requests at once: their queries are encoded in one batch. Each request's passages are
        ranked against each other."""
        encodings = self._embedder.encode_queries([query for query, _ in requests])
        return [
            self._ranker.scores(query, encoding, passages, self._tokens(passages))
            for encoding, (query, passages) in zip(encodings, requests, strict=True)
        ]

    def _tokens(self, passages: Sequence[Passage]) -> list[TokenVectors]:
        missing = [passage for passage in passages if passage.token_vectors is None]
        contexts = [str(passage.metadata.get("title") or "") for passage in missing]
        texts = [f"{c}\n{p.text}" if c else p.text for c, p in zip(contexts, missing, strict=True)]
        made = iter(zip(self._embedder.encode_passages(texts), contexts, strict=True))
        result = []
        for passage in passages:
            if passage.token_vectors is None:
                encoding, context = next(made)
                result.append(self._ranker.extractor.passage(encoding, self._embedder.num_tokens(context)))
            else:
                result.append(unpack(passage.token_vectors))
        return result


class Ranker:
    """A feature extractor with the network trained on it, or without one: the mean of meaning and wording."""

    def __init__(self, extractor: FeatureExtractor, model: RankingModel | None) -> None:
        self.extractor = extractor
        self._model = model

    @property
    def name(self) -> str:
        """What stored vectors can be compared under: part of the collection's name."""
        return self._model.name if self._model else "plain"

    def scores(
        self, query: str, encoding: Encoding, passages: Sequence[Passage], tokens: Sequence[TokenVectors]
    ) -> list[float]:
        features = self.extractor.features(self.extractor.query(query, encoding), passages, tokens)
        if self._model is not None:
            return self._model.scores(features)
        late, fused = features[:, FEATURES.index("late")], features[:, FEATURES.index("fused")]
        return [float(value) for value in late + 0.5 * fused]


class CrossEncoderReranker:
    """A sentence-transformers cross-encoder over (query, passage) pairs."""

    def __init__(self, config: RerankerConfig, cache_folder: Path | None = None) -> None:
        from sentence_transformers import CrossEncoder

        if config.model is None:
            raise RetrievalError(
                "A cross_encoder reranker needs a model: a hub id or a folder.", "reranker_unavailable"
            )
        path = resolve_model(config.model, cache_folder)
        try:
            self._model = CrossEncoder(path, revision=config.revision, device=pick_device(config.device))
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f"The reranker {config.model!r} could not be loaded: {str(error).splitlines()[0]}",
                "reranker_unavailable",
            ) from error
        self._batch_size = config.batch_size

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        return self.score_batch([(query, passages)])[0]

    def score_batch(self, requests: Sequence[tuple[str, Sequence[Passage]]]) -> list[list[float]]:
        """Several requests at once, as one list of pairs."""
        pairs = [(query, _indexed_text(passage)) for query, passages in requests for passage in passages]
        if not pairs:
            return [[] for _ in requests]
        scores = iter(
            self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False).tolist()
        )
        return [[float(next(scores)) for _ in passages] for _, passages in requests]


def _indexed_text(passage: Passage) -> str:
    title = str(passage.metadata.get("title") or "")
    return f"{title}\n{passage.text}" if title else passage.text


def load_ranker(config: RerankerConfig, embedder: SentenceEmbedder, embedder_name: str) -> Ranker:
    """The ranker that ``config`` names; else the packaged one when it was trained on this embedder; else one
    without training."""
    model = None
    if config.model is not None:
        model = RankingModel.load(Path(config.model))
        if model.tensors["projection"].shape[0] != embedder.hidden_size:
            raise RetrievalError(
                f"The reranker {config.model!r} was trained on {model.embedder}, not on {embedder_name}.",
                "reranker_unavailable",
            )
    elif PACKAGED.exists():
        packaged = RankingModel.load(PACKAGED)
        model = packaged if packaged.embedder == embedder_name else None
    if model is not None:
        return Ranker(model.extractor(embedder.tokenizer), model)
    identity = np.eye(embedder.hidden_size, dtype=np.float32)
    rarity = np.ones(embedder.tokenizer.get_vocab_size(), dtype=np.float32)
    return Ranker(FeatureExtractor(identity, rarity, 2, embedder.tokenizer), None)


def load_reranker(config: RetrievalConfig, cache_folder: Path | None = None) -> Reranker:
    """The configured reranker, its models loaded. Raises ``RetrievalError`` when they can't be."""
    if config.reranker.kind == "none":
        return KeepOrder()
    if config.reranker.kind == "cross_encoder":
        return CrossEncoderReranker(config.reranker, cache_folder)
    settings = config.embedder.model_copy(
        update={"device": config.reranker.device, "num_threads": config.reranker.num_threads}
    )
    embedder = SentenceEmbedder(settings, cache_folder)
    return LateInteractionReranker(embedder, load_ranker(config.reranker, embedder, config.embedder.model))
