"""Bytes to text, whatever they were written in."""

from __future__ import annotations

import codecs

from charset_normalizer import from_bytes

from retrieval.loaders.extracted import UnreadableFile

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CANDIDATES = [
    "utf_8",
    "utf_16_le",
    "utf_16_be",
    "shift_jis",
    "euc_jp",
    "gb18030",
    "big5",
    "cp1251",
    "cp1252",
    "latin_1",
]


def decode(content: bytes) -> str:
    """The text of a whole file: by its mark, as UTF-8, or by what charset-normalizer makes of all of it.

    Raises ``UnreadableFile`` for binary content.
    """
    for mark, encoding in _BOMS:
        if content.startswith(mark):
            return _decode(content, encoding)
    if b"\0" not in content:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            pass
    elif not _looks_utf16(content):
        raise UnreadableFile("The file is binary, not text.")
    # The whole file, not a sample: a document may be plain ASCII up to its last page.
    best = from_bytes(
        content, steps=10, chunk_size=max(512, len(content) // 10), cp_isolation=_CANDIDATES
    ).best()
    if best is None:
        raise UnreadableFile("The file's text encoding could not be detected.")
    return _decode(content, best.encoding)


def _decode(content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"The file is not valid {encoding}: {error.reason}.") from None


def _looks_utf16(content: bytes) -> bool:
    """Text in UTF-16 without a mark: nearly all zeros stand at even or nearly all at odd places."""
    even, odd = content[0::2].count(0), content[1::2].count(0)
    return max(even, odd) > 0.2 * len(content) / 2 and min(even, odd) < 0.02 * len(content) / 2
