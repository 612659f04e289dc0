"""Words of a text that carry its meaning, for attribution and for query rewriting."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+(?:[.,:/'’-]\w+)*")
_BINDING = (
    "a about above after again against all also am an and any are as at be because been before being below "
    "between both but by can could did do does doing down during each either else etc few for from further "
    "get had has have having he her here hers him his how however i if in into is it its itself just let may "
    "me might more most much must my no nor not now of off on once one only or other our out over own per "
    "please same shall she should since so some such tell than that the their theirs them then there these "
    "they this those through to too under until up upon us very was we were what when where whether which "
    "while who whom whose why will with within without would yes yet you your"
)
STOP_WORDS = frozenset(_BINDING.split())


def words(text: str) -> list[str]:
    """All words of ``text``, lower case, in order; ``3.5`` and ``e-mail`` are one word."""
    return [match.lower().replace("’", "'") for match in _WORD.findall(text)]


def content_words(text: str) -> list[str]:
    """``words`` without those that only bind."""
    return [word for word in words(text) if word not in STOP_WORDS and (len(word) > 1 or word.isdigit())]


def stem(word: str) -> str:
    """``word`` without a plural or verbal ending, so that ``fees`` meets ``fee``; numbers stay."""
    if any(character.isdigit() for character in word):
        return word.replace(",", "")
    for ending, least in (("'s", 3), ("ies", 5), ("ing", 6), ("ed", 5), ("es", 5), ("s", 4), ("e", 4)):
        if word.endswith(ending) and len(word) >= least:
            return word[: -len(ending)] + ("y" if ending == "ies" else "")
    return word
