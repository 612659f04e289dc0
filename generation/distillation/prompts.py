"""Prompts to distil on: what they are, which are held out, and whether one leaks into training."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HELD_OUT_PERCENT = 10
"""Speculation.md, section 7: one prompt in ten is never trained on."""
_VARIANT = "#variant-"


@dataclass(frozen=True, slots=True)
class DistillationPrompt:
    """One rendered prompt of the service: ``token_ids`` are exactly what the target is given."""

    id: str
    domain: str
    question: str
    token_ids: tuple[int, ...]


class LeakedPrompts(Exception):
    """A held-out question is also in the training set, so figures measured on it would flatter."""

    def __init__(self, ids: Sequence[str]) -> None:
        shown = ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
        super().__init__(f"Held-out questions are in the training set too: {shown}.")
        self.ids = tuple(ids)


def variant_id(prompt_id: str, number: int) -> str:
    """The id of another prompt with the same question: it falls on its question's side of the split."""
    return f"{prompt_id}{_VARIANT}{number}"


def base_id(prompt_id: str) -> str:
    """The question's own id, whichever of its prompts is meant."""
    return prompt_id.partition(_VARIANT)[0]


def is_held_out(prompt_id: str, percent: int = HELD_OUT_PERCENT) -> bool:
    """Whether the prompt belongs to the held-out part: a stable hash of its question's id, everywhere the same."""
    digest = hashlib.sha256(base_id(prompt_id).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def normalised(question: str) -> str:
    """The question reduced to its words: two that differ in case or punctuation are one question."""
    return " ".join(re.findall(r"\w+", question.lower()))


def split_prompts(
    prompts: Iterable[DistillationPrompt], percent: int = HELD_OUT_PERCENT
) -> tuple[list[DistillationPrompt], list[DistillationPrompt]]:
    """Training and held-out prompts.

    A question asked twice under two ids could fall on both sides; then the training copy is dropped, since
    the held-out part must stay the same whoever asks for it.
    """
    every = list(prompts)
    held_out = [prompt for prompt in every if is_held_out(prompt.id, percent)]
    questions = {normalised(prompt.question) for prompt in held_out}
    training = [
        prompt
        for prompt in every
        if not is_held_out(prompt.id, percent) and normalised(prompt.question) not in questions
    ]
    return training, held_out


def check_no_leak(training: Iterable[DistillationPrompt], held_out: Iterable[DistillationPrompt]) -> None:
    """Raise ``LeakedPrompts`` when a held-out id, question or whole prompt is in the training set.

    Another prompt of a held-out question (``variant_id``) is a leak like the question itself.
    """
    seen = list(training)
    ids = {base_id(prompt.id) for prompt in seen}
    questions = {normalised(prompt.question) for prompt in seen}
    token_ids = {prompt.token_ids for prompt in seen}
    leaked = [
        prompt.id
        for prompt in held_out
        if base_id(prompt.id) in ids
        or normalised(prompt.question) in questions
        or prompt.token_ids in token_ids
    ]
    if leaked:
        raise LeakedPrompts(leaked)


def fingerprint(prompts: Iterable[DistillationPrompt]) -> str:
    """SHA-256 over ids and tokens, independent of their order: which data a figure rests on."""
    lines = sorted(json.dumps([prompt.id, prompt.token_ids]) for prompt in prompts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def write_prompts(path: Path, prompts: Iterable[DistillationPrompt]) -> None:
    """JSON Lines, replaced in one step so that a killed run leaves no half file."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps(asdict(prompt), ensure_ascii=False) + "\n")
    partial.replace(path)


def read_prompts(path: Path) -> list[DistillationPrompt]:
    """Read what ``write_prompts`` wrote; a bad line is named by its number (ValueError)."""
    prompts = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                prompts.append(
                    DistillationPrompt(
                        row["id"], row["domain"], row.get("question", ""), tuple(row["token_ids"])
                    )
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a prompt ({error}).") from error
    return prompts
