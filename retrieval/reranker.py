"""A second look at the candidates: late interaction, a cross-encoder, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from retrieval.config import RerankerConfig, RetrievalConfig
from retrieval.embedder import Encoding, SentenceEmbedder, pick_device, resolve_model
from retrieval.features import FEATURES, FeatureExtractor
from retrieval.ranking_model import RankingModel
from retrieval.token_vectors import FloatArray, TokenVectors
from retrieval.types import Passage, Reranker, RetrievalError

PACKAGED = Path(__file__).parent / "ranking"


class KeepOrder:
    """No reranking: earlier passages score higher."""

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        return [1.0 / (rank + 1) for rank in range(len(passages))]


class LateInteractionReranker:
    """The learned ranker over stored token vectors and wording; see ``retrieval.features``.

    Passages come with their features from the retriever. Those of another place, without features, are
    encoded on the spot: slow, but right; only then is ``make_encoder`` asked for an embedder.
    """

    def __init__(
        self,
        model: RankingModel | None,
        make_encoder: Callable[[], tuple[SentenceEmbedder, Ranker]],
        hybrid_weight: float,
    ) -> None:
        """``model`` None: the mean of meaning and wording, without ``hybrid_weight``."""
        self._model = model
        self._hybrid_weight = hybrid_weight
        self._encoder = cache(make_encoder)

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        return self.score_batch([(query, passages)])[0]

    def score_batch(self, requests: Sequence[tuple[str, Sequence[Passage]]]) -> list[list[float]]:
        """Several requests at once; each one's passages are ranked against each other."""
        return [
            network_scores(self._model, self._features(query, passages), self._hybrid_weight)
            for query, passages in requests
        ]

    def _features(self, query: str, passages: Sequence[Passage]) -> FloatArray:
        if all(len(passage.features) == len(FEATURES) for passage in passages):
            rows = np.array([passage.features for passage in passages], dtype=np.float32)
            return rows.reshape(len(passages), len(FEATURES))
        embedder, ranker = self._encoder()
        contexts = [str(passage.metadata.get("title") or "") for passage in passages]
        texts = [f"{c}\n{p.text}" if c else p.text for c, p in zip(contexts, passages, strict=True)]
        tokens = [
            ranker.extractor.passage(encoding, embedder.num_tokens(context))
            for encoding, context in zip(embedder.encode_passages(texts), contexts, strict=True)
        ]
        return ranker.features(query, embedder.encode_queries([query])[0], passages, tokens)


def network_scores(model: RankingModel | None, features: FloatArray, hybrid_weight: float) -> list[float]:
    """One score a row of ``features`` ``[candidates, features]``; without a model by meaning and wording."""
    if model is not None:
        return model.scores(features, hybrid_weight)
    late, fused = features[:, FEATURES.index("late")], features[:, FEATURES.index("fused")]
    return [float(value) for value in late + 0.5 * fused]


class Ranker:
    """A feature extractor with the network trained on it, or without one."""

    def __init__(self, extractor: FeatureExtractor, model: RankingModel | None) -> None:
        self.extractor = extractor
        self.model = model

    @property
    def name(self) -> str:
        """What stored vectors can be compared under: part of the collection's name."""
        return self.model.name if self.model else "plain"

    def features(
        self, query: str, encoding: Encoding, passages: Sequence[Passage], tokens: Sequence[TokenVectors]
    ) -> FloatArray:
        """``[passages, features]``, the passages being all the candidates of one query."""
        return self.extractor.features(self.extractor.query(query, encoding), passages, tokens)


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


def load_model(config: RerankerConfig, embedder_name: str) -> RankingModel | None:
    """The model that ``config`` names; else the packaged one when it was trained on this embedder."""
    if config.model is not None:
        return RankingModel.load(Path(config.model))
    packaged = RankingModel.load(PACKAGED) if PACKAGED.exists() else None
    return packaged if packaged is not None and packaged.embedder == embedder_name else None


def load_ranker(config: RerankerConfig, embedder: SentenceEmbedder, embedder_name: str) -> Ranker:
    """The ranker that ``config`` names, or one without training when there is none for this embedder."""
    model = load_model(config, embedder_name)
    if model is not None:
        if model.tensors["projection"].shape[0] != embedder.hidden_size:
            raise RetrievalError(
                f"The reranker {config.model!r} was trained on {model.embedder}, not on {embedder_name}.",
                "reranker_unavailable",
            )
        return Ranker(model.extractor(embedder.tokenizer), model)
    identity = np.eye(embedder.hidden_size, dtype=np.float32)
    rarity = np.ones(embedder.tokenizer.get_vocab_size(), dtype=np.float32)
    return Ranker(FeatureExtractor(identity, rarity, 2, embedder.tokenizer), None)


def load_reranker(config: RetrievalConfig, cache_folder: Path | None = None) -> Reranker:
    """The configured reranker. Raises ``RetrievalError`` when its model can't be loaded."""
    if config.reranker.kind == "none":
        return KeepOrder()
    if config.reranker.kind == "cross_encoder":
        return CrossEncoderReranker(config.reranker, cache_folder)
    settings = config.embedder.model_copy(
        update={"device": config.reranker.device, "num_threads": config.reranker.num_threads}
    )

    def encoder() -> tuple[SentenceEmbedder, Ranker]:
        embedder = SentenceEmbedder(settings, cache_folder)
        return embedder, load_ranker(config.reranker, embedder, config.embedder.model)

    model = load_model(config.reranker, config.embedder.model)
    return LateInteractionReranker(model, encoder, config.reranker.hybrid_weight)
