"""More prompts to train on from the same documents, where there are few questions.

A draft learns how the target answers from passages; what is asked matters less than that there is much of it.
So a question is put over other passages that retrieval found for it, and questions are made by pattern about
names in the passages. Both are for training alone: held-out prompts stay exactly the service's own.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from generation.distillation.prompts import is_held_out
from retrieval.types import ScoredPassage


@dataclass(frozen=True, slots=True)
class Variety:
    """``prompts_per_question``: with the service's own; ``questions_from_passages``: made ones a domain."""

    prompts_per_question: int = 1
    questions_from_passages: int = 0
    seed: int = 0


_PATTERNS = (
    "What is {}?",
    "What is said about {}?",
    "Why is {} important?",
    "Describe {}.",
    "How is {} related to {}?",
    "What is the difference between {} and {}?",
    "Which facts are given about {}?",
    "What is the role of {}?",
    "Explain what {} means.",
    "When is {} mentioned, and why?",
)
_NAME = re.compile(r"\b[A-Z][\w'-]+(?:\s+(?:of|the|and|de)?\s*[A-Z][\w'-]+){0,3}")
_OPENERS = frozenset(
    re.findall(
        r"\w+",
        "A After All Also An And As At Before Both But By Each For From He Her His How However If In It Its Many "
        "Most No Not Of On One Or Our She Since Some Such That The Their There These They This Those To We What "
        "When Where Which While Who With You Your",
    )
)
"""Words that begin a sentence with a capital and are no name."""


def other_choices(
    passages: Sequence[ScoredPassage], top_k: int, count: int, seed: str
) -> list[list[ScoredPassage]]:
    """At most ``count`` other choices among the first ``2 * top_k`` passages, each in order of rank.

    As many as the service takes or one fewer; never the service's own choice, never the same twice.
    """
    pool = passages[: 2 * top_k]
    sizes = {min(top_k, len(pool)), max(1, min(top_k, len(pool)) - 1)}
    own = tuple(range(min(top_k, len(pool))))
    every = [chosen for size in sorted(sizes) for chosen in combinations(range(len(pool)), size)]
    possible = [chosen for chosen in every if chosen != own]
    drawn = random.Random(seed).sample(possible, min(max(0, count), len(possible)))
    return [[pool[index] for index in chosen] for chosen in drawn]


def names_in(text: str) -> list[str]:
    """Capitalised names in ``text``, in order, without the words that merely begin a sentence."""
    found: dict[str, None] = {}
    for match in _NAME.finditer(text):
        words = match.group(0).split()
        while words and words[0] in _OPENERS:
            words = words[1:]
        name = " ".join(words)
        if len(name) > 3:
            found[name] = None
    return list(found)


def questions_about(texts: Sequence[str], count: int, seed: str) -> Iterator[str]:
    """At most ``count`` different questions about names in ``texts``; fewer where there are few names."""
    draw = random.Random(seed)
    named = [names for names in map(names_in, dict.fromkeys(texts)) if len(names) > 1]
    asked: set[str] = set()
    for _ in range(20 * count if named else 0):
        if len(asked) == count:
            return
        names = draw.sample(draw.choice(named), 2)
        pattern = draw.choice(_PATTERNS)
        question = pattern.format(*names[: pattern.count("{}")])
        if question not in asked:
            asked.add(question)
            yield question


def training_id(domain: str, question: str) -> str:
    """An id that belongs to the training part: held-out figures are to rest on questions that people asked."""
    found = "passages-" + hashlib.sha256(f"{domain}\n{question}".encode()).hexdigest()[:16]
    while is_held_out(found):
        found += "x"
    return found
