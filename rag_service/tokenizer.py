"""The target's tokenizer as the gateway needs it: text to ids, and a chat template that text cannot break."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

Message = Mapping[str, str]
"""``role`` and ``content``."""

_OPEN, _CLOSE = "\ue000", "\ue001"  # private use: no template trims or escapes these
_SLOT = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


class ChatTokenizer(Protocol):
    """What is used of ``transformers.PreTrainedTokenizerBase``."""

    def __hash__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...

    def get_added_vocab(self) -> dict[str, int]: ...


def load_tokenizer(model: str, revision: str | None = None) -> ChatTokenizer:
    """The tokenizer of a folder, GGUF file or hub id, as the engine loads it. Raises ``ModelNotUsable``."""
    from generation.tokenizer import load_tokenizer as load

    return cast(ChatTokenizer, load(str(Path(model).expanduser()), revision))


def encode_text(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Ids of ``text`` as plain text: no special or added token, whatever ``text`` contains.

    Works for any tokenizer: a string that is an added token is cut in two before it is encoded.
    """
    markup, added_ids = _markup(tokenizer)
    ids: list[int] = []
    for piece in _defused(text, markup):
        ids.extend(tokenizer.encode(piece, add_special_tokens=False))
    return [token_id for token_id in ids if token_id not in added_ids]


def encode_chat(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> tuple[int, ...]:
    """Ids of a conversation up to where the assistant's answer begins.

    The chat template is rendered around slots; only its own text may hold special tokens, and what fills the
    slots is encoded by ``encode_text``. Raises ``ValueError`` when the template loses or repeats a message.
    """
    slots = [
        {"role": message["role"], "content": f"{_OPEN}{index}{_CLOSE}"}
        for index, message in enumerate(messages)
    ]
    rendered = str(tokenizer.apply_chat_template(slots, tokenize=False, add_generation_prompt=True))
    parts = _SLOT.split(rendered)
    if [int(number) for number in parts[1::2]] != list(range(len(messages))):
        raise ValueError("The model's chat template does not render every message once and in order.")
    ids: list[int] = []
    for index, part in enumerate(parts):
        if index % 2:
            ids.extend(encode_text(tokenizer, messages[int(part)]["content"]))
        elif part:
            ids.extend(tokenizer.encode(part, add_special_tokens=False))
    return tuple(ids)


def _defused(text: str, markup: re.Pattern[str] | None) -> list[str]:
    if markup is None:
        return [text] if text else []
    pieces, start = [], 0
    for match in markup.finditer(text):
        # A cut after the first character of every occurrence, also of overlapping ones (look-ahead pattern).
        pieces.append(text[start : match.start() + 1])
        start = match.start() + 1
    pieces.append(text[start:])
    return [piece for piece in pieces if piece]


@lru_cache(maxsize=8)
def _markup(tokenizer: ChatTokenizer) -> tuple[re.Pattern[str] | None, frozenset[int]]:
    added = {text: token_id for text, token_id in tokenizer.get_added_vocab().items() if len(text) > 1}
    if not added:
        return None, frozenset()
    longest_first = sorted(added, key=len, reverse=True)
    return re.compile("(?=" + "|".join(map(re.escape, longest_first)) + ")"), frozenset(added.values())
