from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from retrieval.chunking import Chunker, document_version
from retrieval.config import ChunkingConfig
from retrieval.types import Document

TOKENIZER = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
TOKENIZER.pre_tokenizer = pre_tokenizers.Whitespace()
CHUNKER = Chunker(ChunkingConfig(max_tokens=40, overlap_tokens=8, context_tokens=10), TOKENIZER)


def document(text: str, title: str = "") -> Document:
    return Document("d", "legal", title, text)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab é漢.\n#-= 😀"), max_size=1500))
def test_every_chunk_is_its_span_and_every_word_is_in_a_chunk(text: str) -> None:
    chunks = CHUNKER.chunk(document(text))
    covered = [False] * len(text)
    for chunk in chunks:
        assert text[chunk.start : chunk.end] == chunk.text
        assert len(TOKENIZER.encode(chunk.text).ids) <= 40
        covered[chunk.start : chunk.end] = [True] * len(chunk.text)
    blank = [i for i, done in enumerate(covered) if not done and text[i].isalnum()]
    assert blank == []
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))


def test_context_names_title_and_section_within_its_budget() -> None:
    text = "# Fees\n\n" + "Fees are due in May. " * 30
    chunks = CHUNKER.chunk(document(text, "Terms"))
    assert len(chunks) > 2
    assert all(chunk.context == "Terms | Fees" for chunk in chunks)
    assert chunks[1].indexed_text.startswith("Terms | Fees\n")
    long = CHUNKER.chunk(document("text", "word " * 50))[0]
    assert len(TOKENIZER.encode(long.context).ids) == 10


def test_ids_follow_content_owner_and_place() -> None:
    first = document("One two three. " * 40)
    ids = [chunk.id for chunk in CHUNKER.chunk(first)]
    assert ids == [chunk.id for chunk in CHUNKER.chunk(replace(first))]
    for other in (
        replace(first, text=first.text + "!"),
        replace(first, tenant="other"),
        replace(first, id="e"),
        replace(first, metadata={"year": 1}),
    ):
        assert not set(ids) & {chunk.id for chunk in CHUNKER.chunk(other)}


def test_versions_differ_with_anything_that_is_stored() -> None:
    base = document("text", "title")
    changed = [
        replace(base, text="Text"),
        replace(base, title=""),
        replace(base, domain="x"),
        replace(base, metadata={"a": 1}),
    ]
    assert len({document_version(item) for item in [base, *changed]}) == 5
    assert document_version(replace(base, metadata={"a": 1, "b": 2})) == document_version(
        replace(base, metadata={"b": 2, "a": 1})
    )


def test_a_text_without_words_has_no_chunks() -> None:
    assert CHUNKER.chunk(document(" \n\n --- \n")) == []


def test_a_long_text_is_cut_in_blocks_without_loss() -> None:
    text = "\n\n".join(f"Paragraph {number} has some words in it." for number in range(9000))
    chunks = CHUNKER.chunk(document(text))
    assert all(text[chunk.start : chunk.end] == chunk.text for chunk in chunks)
    assert f"Paragraph {8999}" in chunks[-1].text
    joined = " ".join(chunk.text for chunk in chunks)
    assert all(f"Paragraph {number} " in joined for number in range(0, 9000, 250))
