"""A second look at the candidates: late interaction, a cross-encoder, or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrieval.config import RerankerConfig, RetrievalConfig
from retrieval.embedder import SentenceEmbedder, pick_device, resolve_model
from retrieval.token_vectors import LateInteraction
from retrieval.types import Passage, Reranker, RetrievalError

PACKAGED_HEAD = Path(__file__).parent / "head"


class KeepOrder:
    """No reranking: earlier passages score higher."""

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        return [1.0 / (rank + 1) for rank in range(len(passages))]


class LateInteractionReranker:
    """MaxSim over stored token vectors; passages without them are encoded on the spot (slow, but right)."""

    def __init__(self, embedder: SentenceEmbedder, late_interaction: LateInteraction) -> None:
        self._embedder = embedder
        self._late_interaction = late_interaction

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        return self.score_batch([(query, passages)])[0]

    def score_batch(self, requests: Sequence[tuple[str, Sequence[Passage]]]) -> list[list[float]]:
        """Several requests at once: their queries are encoded in one batch."""
        encodings = self._embedder.encode_queries([query for query, _ in requests])
        return [
            self._late_interaction.scores(self._late_interaction.query(encoding), self._vectors(passages))
            for encoding, (_, passages) in zip(encodings, requests, strict=True)
        ]

    def _vectors(self, passages: Sequence[Passage]) -> list[bytes]:
        missing = [passage for passage in passages if passage.token_vectors is None]
        made = iter(self._embedder.encode_passages([_indexed_text(passage) for passage in missing]))
        return [
            self._late_interaction.passage(next(made))
            if passage.token_vectors is None
            else passage.token_vectors
            for passage in passages
        ]


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


def load_late_interaction(config: RerankerConfig) -> LateInteraction:
    """The head that ``config`` names, the packaged one, or the model's plain vectors without one."""
    if config.model is not None:
        return LateInteraction.load(Path(config.model))
    return LateInteraction.load(PACKAGED_HEAD) if PACKAGED_HEAD.exists() else LateInteraction()


def load_reranker(config: RetrievalConfig, cache_folder: Path | None = None) -> Reranker:
    """The configured reranker, its models loaded. Raises ``RetrievalError`` when they can't be."""
    if config.reranker.kind == "none":
        return KeepOrder()
    if config.reranker.kind == "cross_encoder":
        return CrossEncoderReranker(config.reranker, cache_folder)
    embedder = config.embedder.model_copy(
        update={"device": config.reranker.device, "num_threads": config.reranker.num_threads}
    )
    return LateInteractionReranker(
        SentenceEmbedder(embedder, cache_folder), load_late_interaction(config.reranker)
    )
