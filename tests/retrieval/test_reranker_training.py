from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrieval.features import FEATURES
from retrieval.ranking_model import RankingModel
from retrieval.reranker_training import RankingExample, RankingTraining, fold_of, train_network
from retrieval.types import RetrievalError


def examples(count: int, seed: int) -> list[RankingExample]:
    """The relevant candidate is the one with the highest sum of two features; the others are noise."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        features = random.standard_normal((8, len(FEATURES))).astype(np.float32)
        relevant = np.zeros(8, dtype=np.bool_)
        relevant[np.argmax(features[:, 3] + features[:, 9])] = True
        made.append(RankingExample(features, relevant, "a" if number % 9 else "b", f"d{number}"))
    return made


def test_training_finds_what_matters_and_is_reproducible(tmp_path: Path) -> None:
    options = RankingTraining(num_epochs=30)
    tensors = train_network(examples(400, 0), options)
    again = train_network(examples(400, 0), options)
    assert all((tensors[name] == again[name]).all() for name in tensors)
    shared = {"projection": np.eye(4, dtype=np.float32), "idf": np.ones(9, dtype=np.float32)}
    RankingModel({**tensors, **shared}, 2, "model", "").save(tmp_path)
    model = RankingModel.load(tmp_path)
    hits = [
        int(np.argmax(model.scores(e.features, 0.0))) == int(np.argmax(e.relevant)) for e in examples(200, 1)
    ]
    assert np.mean(hits) > 0.8
    assert model.embedder == "model"
    assert model.scores(np.zeros((0, len(FEATURES)), dtype=np.float32), 0.0) == []


def test_the_hybrid_searchs_own_score_guards_against_a_network_that_is_wrong() -> None:
    """The candidate of the largest feature 9 is right for the network; for the guard, that of the best search."""
    size = len(FEATURES)
    first = np.zeros((2 * size, 1), dtype=np.float32)
    first[9, 0] = 1.0
    tensors = {
        "mean": np.zeros(size, dtype=np.float32),
        "scale": np.ones(size, dtype=np.float32),
        "first": first,
        "first_bias": np.zeros(1, dtype=np.float32),
        "second": np.ones(1, dtype=np.float32),
    }
    model = RankingModel(tensors, 2, "model", "")
    features = np.zeros((3, size), dtype=np.float32)
    features[:, 9] = (1.0, 2.0, 3.0)
    features[:, FEATURES.index("fused")] = (1.0, 0.9, 0.2)
    assert np.argsort(model.scores(features, 0.0)).tolist() == [0, 1, 2]
    assert int(np.argmax(model.scores(features, 5.0))) == 1, (
        "a weak guard drops what the search thought worst"
    )
    assert np.argsort(model.scores(features, 100.0)).tolist() == [2, 1, 0]
    alone = model.scores(features[:1], 0.0), model.scores(features[:1], 100.0)
    assert alone[0] == alone[1], "the best candidate keeps the network's own score"


def test_nothing_to_learn_from_is_said() -> None:
    example = examples(1, 0)[0]
    for flags in (np.ones(8, dtype=np.bool_), np.zeros(8, dtype=np.bool_)):
        with pytest.raises(RetrievalError, match="learn"):
            train_network([RankingExample(example.features, flags, "a", "d")], RankingTraining())


def test_a_missing_or_broken_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="no usable reranker"):
        RankingModel.load(tmp_path)
    (tmp_path / "ranking.safetensors").write_bytes(b"nonsense")
    with pytest.raises(RetrievalError, match="no usable reranker"):
        RankingModel.load(tmp_path)


def test_folds_keep_documents_together_and_are_even() -> None:
    folds = [fold_of(f"document-{i}", 5) for i in range(1000)]
    assert fold_of("document-7", 5) == folds[7]
    assert min(np.bincount(folds)) > 150
