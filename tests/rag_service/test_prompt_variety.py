"""More prompts from the same documents: other choices of passages, questions about names in them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from generation.distillation.prompts import (
    DistillationPrompt,
    LeakedPrompts,
    base_id,
    check_no_leak,
    is_held_out,
    split_prompts,
    variant_id,
)
from rag_service import question_set
from rag_service.config import Settings
from rag_service.prompt_variety import Variety, names_in, other_choices, questions_about, training_id
from rag_service.question_set import AskedQuestion, service_prompts
from retrieval.types import Passage, ScoredPassage


def _passages(count: int) -> list[ScoredPassage]:
    return [
        ScoredPassage(
            Passage("d", f"c{n}", f"Corvane {'ABCDEFGH'[n]}lpha was bought by Marlow Trust."), 1.0 - n / 10
        )
        for n in range(count)
    ]


def test_other_choices_keep_the_rank_and_are_never_the_services_own() -> None:
    passages = _passages(8)
    choices = other_choices(passages, 3, 10, "seed")
    assert len(choices) == 10
    assert choices == other_choices(passages, 3, 10, "seed")
    numbers = [tuple(passages.index(one) for one in chosen) for chosen in choices]
    assert len(set(numbers)) == 10
    assert all(chosen == tuple(sorted(chosen)) and len(chosen) in (2, 3) for chosen in numbers)
    assert (
        max(max(chosen) for chosen in numbers) < 6
    )  # what lies further down has little to do with the question
    assert (0, 1, 2) not in numbers
    assert other_choices(passages[:1], 3, 4, "seed") == []


def test_names_are_found_without_the_words_that_begin_a_sentence() -> None:
    text = "The Bank of England met in March. However, Corvane Instruments did not. In its note, it said so."
    assert names_in(text) == ["Bank of England", "March", "Corvane Instruments"]


def test_made_questions_are_different_and_about_the_passages() -> None:
    texts = [one.passage.text for one in _passages(3)]
    questions = list(questions_about(texts, 12, "seed"))
    assert len(questions) == len(set(questions)) == 12
    assert all("Corvane" in question or "Marlow Trust" in question for question in questions)
    assert list(questions_about(["no name here"], 5, "seed")) == []


def test_made_questions_are_for_training_alone() -> None:
    assert not any(is_held_out(training_id("red", f"question {number}")) for number in range(200))


class _FakeMaker:
    """Retrieval that finds the same passages for every question; the prompt is the passages' numbers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def search(self, question: AskedQuestion) -> list[ScoredPassage]:
        return _passages(6)

    def prompt(self, question: AskedQuestion, passages: Sequence[ScoredPassage]) -> DistillationPrompt:
        every = [one.passage.chunk_id for one in _passages(6)]
        ids = (
            zlib.crc32(question.question.encode()),
            *(every.index(one.passage.chunk_id) for one in passages[:3]),
        )
        return DistillationPrompt(question.id, question.domain, question.question, ids)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DistillationPrompt]:
    @contextmanager
    def maker(settings: Settings, *others: Any) -> Iterator[_FakeMaker]:
        yield _FakeMaker(settings)

    monkeypatch.setattr(question_set, "_maker", maker)
    asked = [AskedQuestion(f"q{n}", ("red", "blue")[n % 2], f"What about thing {n}?") for n in range(40)]
    return service_prompts(Settings(), asked, variety=Variety(3, 10))


def test_held_out_questions_have_the_services_own_prompt_alone(made: list[DistillationPrompt]) -> None:
    training, held_out = split_prompts(made)
    check_no_leak(training, held_out)
    assert {prompt.id for prompt in held_out} == {f"q{n}" for n in range(40) if is_held_out(f"q{n}")}
    assert all(prompt.token_ids[1:] == (0, 1, 2) for prompt in held_out)
    per_question = [prompt for prompt in training if base_id(prompt.id) == "q0"]
    assert [prompt.id for prompt in per_question] == ["q0", variant_id("q0", 1), variant_id("q0", 2)]
    assert len({prompt.token_ids for prompt in per_question}) == 3
    for domain in ("red", "blue"):
        assert len([p for p in training if p.id.startswith("passages-") and p.domain == domain]) == 10


def test_without_variety_there_is_one_prompt_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def maker(settings: Settings, *others: Any) -> Iterator[_FakeMaker]:
        yield _FakeMaker(settings)

    monkeypatch.setattr(question_set, "_maker", maker)
    asked = [AskedQuestion("q0", "red", "What?"), AskedQuestion("q1", "red", "Who?")]
    assert [prompt.id for prompt in service_prompts(Settings(), asked)] == ["q0", "q1"]


def test_a_variant_of_a_held_out_question_in_the_training_set_is_a_leak(
    made: list[DistillationPrompt],
) -> None:
    training, held_out = split_prompts(made)
    first = held_out[0]
    variant = DistillationPrompt(variant_id(first.id, 1), first.domain, "other words", (9, 9, 9))
    assert is_held_out(variant.id)
    with pytest.raises(LeakedPrompts, match=first.id):
        check_no_leak([*training, variant], held_out)
