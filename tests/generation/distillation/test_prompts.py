"""The split is stable, and a held-out question that was trained on is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from generation.distillation.prompts import (
    LeakedPrompts,
    check_no_leak,
    fingerprint,
    is_held_out,
    read_prompts,
    split_prompts,
    write_prompts,
)
from tests.generation.distillation.conftest import make_prompts


def test_about_one_prompt_in_ten_is_held_out_and_always_the_same_ones() -> None:
    training, held_out = split_prompts(make_prompts(1000))
    assert 60 < len(held_out) < 140
    assert len(training) + len(held_out) == 1000
    again = split_prompts(reversed(make_prompts(1000)))
    assert {p.id for p in again[1]} == {p.id for p in held_out}
    # Pinned: a change of the hash would silently move trained questions into the held-out part.
    assert [number for number in range(60) if is_held_out(f"q{number}")] == [1, 5, 12, 20, 34, 39, 48, 51]


def test_a_question_on_both_sides_is_dropped_from_training() -> None:
    prompts = make_prompts(200)
    held = next(prompt for prompt in prompts if is_held_out(prompt.id))
    twin_id = next(f"twin{n}" for n in range(100) if not is_held_out(f"twin{n}"))
    twin = replace(held, id=twin_id, question=held.question.upper() + "?")
    training, held_out = split_prompts([*prompts, twin])
    assert twin not in training
    assert held in held_out
    check_no_leak(training, held_out)


@pytest.mark.parametrize("how", ["id", "question", "tokens"])
def test_a_leak_is_found_by_id_question_or_whole_prompt(how: str) -> None:
    training, held_out = split_prompts(make_prompts(200))
    leaked = held_out[3]
    other = training[0]
    planted = {
        "id": replace(other, id=leaked.id),
        "question": replace(other, question=leaked.question.replace(" ", "  ").title() + "!"),
        "tokens": replace(other, token_ids=leaked.token_ids),
    }[how]
    with pytest.raises(LeakedPrompts, match=leaked.id) as caught:
        check_no_leak([*training, planted], held_out)
    assert caught.value.ids == (leaked.id,)


def test_prompts_survive_the_file_and_keep_their_fingerprint(tmp_path: Path) -> None:
    prompts = make_prompts(7)
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, prompts)
    assert read_prompts(path) == prompts
    assert fingerprint(reversed(prompts)) == fingerprint(prompts)
    changed = [replace(prompts[0], token_ids=(*prompts[0].token_ids, 1)), *prompts[1:]]
    assert fingerprint(changed) != fingerprint(prompts)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, make_prompts(2))
    path.write_text(path.read_text(encoding="utf-8") + '{"id": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 3"):
        read_prompts(path)
