"""Files made to break a loader: each is a named failure of that file, quickly, and the rest goes on."""

from __future__ import annotations

import io
import zipfile

import docx
import pytest

from retrieval.config import IngestionConfig
from retrieval.loaders import Loader, LoadFailure
from retrieval.types import Document

LOADER = Loader(IngestionConfig(max_archive_bytes=4 * 2**20), "legal", "default")


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def word_file(extra: int) -> bytes:
    """A Word file whose one paragraph is longer by ``extra`` characters."""
    document = docx.Document()
    document.add_paragraph("Hello")
    file = io.BytesIO()
    document.save(file)
    with zipfile.ZipFile(io.BytesIO(file.getvalue())) as package:
        members = {name: package.read(name) for name in package.namelist()}
    members["word/document.xml"] = members["word/document.xml"].replace(b"Hello", b"Hello" + b" a" * extra)
    return zipped(members)


def reason(name: str, content: bytes) -> str:
    items = list(LOADER.load(name, content))
    assert [type(item) for item in items] == [LoadFailure]
    assert isinstance(items[0], LoadFailure)
    return items[0].reason


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("deep.json", b"[" * 100_000 + b"]" * 100_000, "too deeply"),
        ("deep.jsonl", b'{"text":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "too deeply"),
        ("deeper.html", b"<div>" * 100_000 + b"words", "too deeply"),
        ("deep.html", b"<div>" * 3_000 + b"words", "too deeply"),
        ("nothing.docx", zipped({"x": b"y"}), "broken"),
        ("cut.docx", word_file(0)[:9000], "broken"),
        ("bomb.zip", zipped({f"{i}.txt": b"a" * 2**19 for i in range(9)}), "unpacks to more"),
        ("out.zip", zipped({"../../etc/passwd.txt": b"root text"}), "leads out"),
        ("scan.pdf", b"", "broken"),
    ],
)
def test_an_attack_is_a_named_failure(name: str, content: bytes, said: str) -> None:
    assert said in reason(name, content)


def test_an_office_file_is_not_unpacked_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval.loaders.office._MAX_UNPACKED_BYTES", 2**20)
    assert "unpacks to more" in reason("bomb.docx", word_file(2**20))


def test_a_parser_that_raises_anything_fails_its_file_alone() -> None:
    long_text = word_file(11 * 2**20 // 2)  # more than libxml takes in one text node
    loader = Loader(IngestionConfig(), "legal", "default")
    items = list(loader.load("all.zip", zipped({"long.docx": long_text, "fine.txt": b"Rent is due in May."})))
    assert isinstance(items[0], LoadFailure)
    assert isinstance(items[1], Document)
