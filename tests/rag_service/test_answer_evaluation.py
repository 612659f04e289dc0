from __future__ import annotations

import pytest

from rag_service.answer_evaluation import Asked, overlap_f1, summarise, supported


def test_overlap_is_with_the_best_reference() -> None:
    assert overlap_f1("The rent is due in May [1].", ["rent due", "nothing alike"]) == pytest.approx(0.5)
    assert overlap_f1("anything", []) is None
    assert overlap_f1("other words", ["rent due"]) == 0.0


def test_support_counts_content_words_only() -> None:
    assert supported("The rent is due in June [1].", ["Rent is due in May."]) == pytest.approx(2 / 3)
    assert supported("It is.", ["x"]) is None


def test_figures_by_domain() -> None:
    answers = [
        Asked("legal", "Rent is due in May [1].", ["Rent is due in May."], ["in May"]),
        Asked("legal", "Rent is due [3].", ["Rent is due in May."]),
        Asked("medical", "Nobody knows.", []),
    ]
    figures = summarise(answers)
    assert figures["legal"]["cited"] == 1.0
    assert figures["legal"]["citation_validity"] == 0.5
    assert figures["medical"]["citation_validity"] is None
    assert figures["medical"]["supported"] == 0.0
    assert figures["all"]["num_answers"] == 3


def test_a_citation_is_held_to_the_source_that_it_names() -> None:
    sources = ["Rent is due in May.", "Pets need consent."]
    text = "Rent is due in May. [1] Pets need written consent. [2] Nothing else."
    assert summarise([Asked("legal", text, sources)])["all"]["citation_support"] == pytest.approx(
        (1 + 3 / 4) / 2
    )
    assert summarise([Asked("legal", "Rent is due in May [2].", sources)])["all"]["citation_support"] == 0.0
    assert summarise([Asked("legal", "Rent is due in May.", sources)])["all"]["citation_support"] is None
