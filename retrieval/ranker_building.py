"""From documents and questions to a trained reranker, with an honest figure beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.chunking import Chunker
from retrieval.config import RetrievalConfig
from retrieval.embedder import SentenceEmbedder
from retrieval.evaluation import Question, relevant_chunks, score_rankings
from retrieval.features import FeatureExtractor, inverse_document_frequencies, principal_axes
from retrieval.loaders import Loader, LoadFailure
from retrieval.ranking_model import RankingModel
from retrieval.reranker import Ranker
from retrieval.reranker_training import RankingExample, RankingTraining, fold_of, train_network
from retrieval.service import RetrievalService
from retrieval.token_vectors import FloatArray
from retrieval.types import Document, Passage, RetrievalError, SearchRequest

Watch = Callable[[str, int, int | None], None]
"""Called with (what, done, all)."""

POOLING = 2
_SAMPLED_CHUNKS = 512
"""Chunks whose token vectors choose the projection."""


@dataclass(frozen=True, slots=True)
class BuiltRanker:
    """The model trained on every question, and figures by domain: ``before`` reranking, ``held_out`` (each
    question ranked by a network that saw none of its document's questions) and ``unseen`` (by one that saw none
    of its domain's; None with a single domain)."""

    model: RankingModel
    num_examples: int
    before: dict[str, dict[str, Any]]
    held_out: dict[str, dict[str, Any]]
    unseen: dict[str, dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class _Candidates:
    question: Question
    chunk_ids: list[str]
    relevant: set[str]
    example: RankingExample


def build_ranker(
    config: RetrievalConfig,
    cache_folder: Path | None,
    document_files: Sequence[Path],
    questions: Sequence[Question],
    depth: int,
    num_folds: int,
    dimension: int,
    watch: Watch,
) -> BuiltRanker:
    """Index the documents in a temporary folder, search every question, train, and cross-validate.

    Raises ``RetrievalError`` when a document can't be read or nothing can be learned.
    """
    reranker = config.reranker.model_copy(update={"kind": "late_interaction", "model": None})
    index = config.index.model_copy(update={"url": None, "folder": None})
    config = config.model_copy(update={"reranker": reranker, "index": index})
    embedder = SentenceEmbedder(config.embedder, cache_folder)
    documents = _load(config, document_files)
    projection, idf = _representation(config, embedder, documents, dimension)
    extractor = FeatureExtractor(projection, idf, POOLING, embedder.tokenizer)
    with tempfile.TemporaryDirectory(prefix="rag-service-") as folder:
        service = RetrievalService(config, cache_folder, Path(folder), Ranker(extractor, None))
        try:
            service.ingestion.run(documents, lambda now: watch("indexing", now.num_documents, len(documents)))
            return retrain_ranker(service, questions, depth, num_folds, watch)
        finally:
            service.close()


def retrain_ranker(
    service: RetrievalService, questions: Sequence[Question], depth: int, num_folds: int, watch: Watch
) -> BuiltRanker:
    """Train another network on what the service's index stores already: nothing is embedded or written anew.

    Raises ``RetrievalError`` when the index holds no token vectors or nothing can be learned.
    """
    ranker = service.ranker
    if ranker is None:
        raise RetrievalError(
            "Without a reranker of kind late_interaction the index holds no token vectors to learn from.",
            "reranker_unavailable",
        )
    extractor, embedder = ranker.extractor, service.config.embedder.model
    found = _candidates(service, questions, depth, watch)
    if not found:
        raise RetrievalError(
            "No question's document is in the index: name the documents too.", "no_documents"
        )
    shared = {"projection": extractor.projection, "idf": extractor.idf}

    def trained(examples: Sequence[RankingExample]) -> RankingModel:
        tensors = {**train_network(examples, RankingTraining()), **shared}
        return RankingModel(tensors, extractor.pooling, embedder, "new")

    asked = [candidates.question for candidates in found]
    relevance = {candidates.question.id: candidates.relevant for candidates in found}
    examples = [candidates.example for candidates in found]

    def crossed(part_of: Callable[[RankingExample], str], what: str) -> dict[str, dict[str, Any]]:
        weight = service.config.reranker.hybrid_weight
        rankings = _cross_validated(found, part_of, trained, weight, partial(watch, what))
        return score_rankings(asked, relevance, rankings)

    several = len({example.group for example in examples}) > 1
    return BuiltRanker(
        model=trained(examples),
        num_examples=sum(example.teaches for example in examples),
        before=score_rankings(asked, relevance, {c.question.id: c.chunk_ids for c in found}),
        held_out=crossed(lambda example: str(fold_of(example.document_id, num_folds)), "folds"),
        unseen=crossed(lambda example: example.group, "domains") if several else None,
    )


def _load(config: RetrievalConfig, files: Sequence[Path]) -> list[Document]:
    documents: list[Document] = []
    loader = Loader(config.ingestion, None)
    for item in loader.load_paths([(path, f"{path.parent.name}/{path.name}") for path in files]):
        if isinstance(item, LoadFailure):
            raise RetrievalError(f"{item.name}: {item.reason}", "bad_documents")
        documents.append(item)
    return documents


def _representation(
    config: RetrievalConfig, embedder: SentenceEmbedder, documents: Sequence[Document], dimension: int
) -> tuple[FloatArray, FloatArray]:
    """The projection of token vectors and the rarity of tokens, in the precision they are stored in."""
    chunker = Chunker(config.chunking, embedder.tokenizer)
    texts = [chunk.indexed_text for document in documents for chunk in chunker.chunk(document)]
    if not texts:
        raise RetrievalError("The documents have no text.", "no_documents")
    ids = [np.array(embedder.token_ids(text), dtype=np.int64) for text in texts]
    idf = inverse_document_frequencies(ids, embedder.tokenizer.get_vocab_size())
    chosen = np.random.default_rng(0).permutation(len(texts))[:_SAMPLED_CHUNKS]
    sample = embedder.encode_passages([texts[int(i)] for i in chosen])
    projection = principal_axes(np.concatenate([encoding.tokens for encoding in sample]), dimension)
    return projection.astype(np.float16).astype(np.float32), idf.astype(np.float16).astype(np.float32)


def _candidates(
    service: RetrievalService,
    questions: Sequence[Question],
    depth: int,
    watch: Watch,
) -> list[_Candidates]:
    @cache
    def chunks_of(document_id: str) -> Sequence[Passage]:
        return service.index.passages("default", document_id)

    found: list[_Candidates] = []
    for number, question in enumerate(questions, start=1):
        watch("questions", number, len(questions))
        relevant = relevant_chunks(question, chunks_of)
        if not relevant:
            continue
        hits = service.search(SearchRequest(question.text, top_k=depth)).passages
        if not hits:
            continue
        features = np.array([hit.passage.features for hit in hits], dtype=np.float32)
        chunk_ids = [hit.passage.chunk_id for hit in hits]
        flags = np.array([chunk_id in relevant for chunk_id in chunk_ids], dtype=np.bool_)
        example = RankingExample(features, flags, question.domain, question.relevant_spans[0][0])
        found.append(_Candidates(question, chunk_ids, relevant, example))
    return found


def _cross_validated(
    found: Sequence[_Candidates],
    part_of: Callable[[RankingExample], str],
    trained: Callable[[Sequence[RankingExample]], RankingModel],
    hybrid_weight: float,
    watch: Callable[[int, int], None],
) -> dict[str, list[str]]:
    """Each question's candidates, ordered by a network that saw no question of its part."""
    rankings: dict[str, list[str]] = {}
    parts = [part_of(candidates.example) for candidates in found]
    names = sorted(set(parts))
    for number, name in enumerate(names):
        watch(number, len(names))
        model = trained([c.example for c, part in zip(found, parts, strict=True) if part != name])
        for candidates, part in zip(found, parts, strict=True):
            if part == name:
                scores = model.scores(candidates.example.features, hybrid_weight)
                rankings[candidates.question.id] = _reordered(candidates.chunk_ids, scores)
    watch(len(names), len(names))
    return rankings


def _reordered(chunk_ids: Sequence[str], scores: Sequence[float]) -> list[str]:
    order = sorted(range(len(chunk_ids)), key=lambda i: -scores[i])
    return [chunk_ids[i] for i in order]
