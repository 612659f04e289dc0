"""The packaged draft: what its card says is measured again, and no question it is judged on was trained on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from generation.distillation.draft_model import read_card
from generation.distillation.prompts import is_held_out
from rag_service.config import Settings
from rag_service.draft_choice import DRAFTS_FOLDER
from rag_service.measurement import Setup, figures
from rag_service.models import PACKAGED, state
from rag_service.pair import load_pair
from rag_service.question_set import limited, load_documents, load_questions, service_prompts

FOLDER = DRAFTS_FOLDER / "smollm2-135m-instruct-draft"
DOMAINS = ("finance", "medical", "legal", "software", "general")
MAX_BYTES = 25_000_000


def shared_data() -> Path:
    root = Path(os.environ.get("RAG_SHARED_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
    if not root.is_dir():
        pytest.skip(f"The shared data is not at {root}.")
    return root


def test_it_is_small_and_says_what_it_is() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= MAX_BYTES
    card = read_card(FOLDER)
    assert card.target == "smollm2-135m-instruct"
    assert card.quantization == "int8"
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for domain in DOMAINS:
        assert domain in text
    assert "draft distill" in text


def test_no_question_of_its_evaluation_was_trained_on() -> None:
    evaluation = json.loads((FOLDER / "evaluation.json").read_text(encoding="utf-8"))
    trained = set(json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))["question_ids"])
    asked = evaluation["question_ids"]
    assert asked
    assert not trained & set(asked)
    assert all(is_held_out(question) for question in asked)
    assert not any(is_held_out(question) for question in trained)


@pytest.mark.nightly
@pytest.mark.slow
def test_forty_questions_measured_again_agree_with_the_card() -> None:
    data = shared_data()
    settings = Settings.load()
    missing = [m.name for m in PACKAGED.values() if state(m, settings.cache_folder) != "ready"]
    if missing:
        pytest.skip(f"Models are not in the cache: {', '.join(missing)}.")
    files = [data / domain / "questions.jsonl" for domain in DOMAINS]
    held_out = [question for question in load_questions(files) if is_held_out(question.id)]
    asked = limited(held_out, 9)[:40]
    wanted: set[str] = set()
    chosen = {question.id for question in asked}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["id"] in chosen:
                wanted.update(row["relevant_documents"])
    every = load_documents([data / domain / "documents.jsonl" for domain in DOMAINS])
    prompts = service_prompts(settings, asked, [document for document in every if document.id in wanted])
    named = load_pair(settings)
    evaluation = json.loads((FOLDER / "evaluation.json").read_text(encoding="utf-8"))
    known = evaluation["temperatures"]["0"]["pooled"]
    setup = Setup("colocated", 4, 0.0, passages=False, max_tokens=64)
    found = figures(named.pair.run(prompts, setup))
    assert found.num_requests == len(asked)
    assert found.interval is not None
    # Other distractors are retrieved than for the card, so the intervals must meet, not the figures.
    assert found.interval[0] <= known["interval"][1]
    assert found.interval[1] >= known["interval"][0]
