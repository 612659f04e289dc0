from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import docx
import pptx
import pypdf
import pytest
from pptx.util import Inches

from retrieval.config import IngestionConfig
from retrieval.loaders import Loader, LoadFailure, expand_paths
from retrieval.types import Document, RetrievalError


def load(name: str, content: bytes, domain: str | None = "legal") -> list[Document | LoadFailure]:
    return list(Loader(IngestionConfig(), domain).load(name, content))


def one(name: str, content: bytes) -> Document:
    (item,) = load(name, content)
    assert isinstance(item, Document), item
    return item


def reason(name: str, content: bytes) -> str:
    (item,) = load(name, content)
    assert isinstance(item, LoadFailure), item
    return item.reason


GERMAN = "Die Gebühr beträgt 5 €. Für Prüfungen über größere Mengen gelten höhere Sätze. " * 5
JAPANESE = "料金は五月に支払われます。検査は別途請求されます。詳細は規約をご覧ください。" * 5


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (GERMAN, "utf-8"),
        (GERMAN, "utf-8-sig"),
        (GERMAN, "utf-16"),
        (GERMAN, "utf-16-le"),
        (GERMAN.replace("€", "Euro"), "latin-1"),
        (JAPANESE, "shift-jis"),
        (JAPANESE, "utf-16"),
    ],
)
def test_encodings_are_detected(text: str, encoding: str) -> None:
    assert one("a.txt", text.encode(encoding)).text == text


def test_a_late_letter_outside_ascii_is_seen() -> None:
    text = "plain words only, line after line\n" * 3000 + "naïve café at the end"
    assert one("a.txt", text.encode("latin-1")).text == text


def test_binary_and_empty_files_fail_by_name() -> None:
    assert "binary" in reason("a.txt", bytes(range(256)) * 8)
    assert reason("a.txt", b" \n ") == "The file has no text."
    assert ".xyz" in reason("a.xyz", b"x")


def test_html_keeps_headings_lists_and_tables_and_drops_scripts() -> None:
    page = b"""<html><head><title>Fees &amp; dates</title><style>p{}</style></head><body>
      <nav>Home</nav><script>var x = 1;</script><h2>Fees</h2><p>Due <b>in</b> May.</p>
      <ul><li>one</li><li>two</li></ul>
      <table><tr><th>Item</th><th>Fee</th></tr><tr><td>Copy</td><td>5</td></tr></table></body></html>"""
    document = one("a.html", page)
    assert document.title == "Fees & dates"
    assert "## Fees\n\nDue in May." in document.text
    assert "- one\n- two" in document.text
    assert "Item | Fee\nCopy | 5" in document.text
    assert "var x" not in document.text
    assert "Home" not in document.text


def test_markdown_front_matter_gives_the_title() -> None:
    document = one("a.md", b"---\ntitle: Rules\n---\n\n# Other\n\nText.")
    assert document.title == "Rules"
    assert document.text.startswith("# Other")


def test_csv_rows_name_their_columns() -> None:
    assert one("a.csv", b"name;fee\nCopy;5\nScan;7\n").text == "name: Copy; fee: 5\nname: Scan; fee: 7"


def test_json_lines_one_bad_line_fails_alone() -> None:
    lines = [
        json.dumps({"id": "x", "title": "T", "text": "words", "domain": "finance"}),
        "{oops",
        '{"id": "y"}',
    ]
    good, broken, empty = load("a.jsonl", "\n".join(lines).encode())
    assert isinstance(good, Document)
    assert (good.id, good.domain, good.title, good.text) == ("x", "finance", "T", "words")
    assert isinstance(broken, LoadFailure)
    assert "Line 2" in broken.reason
    assert isinstance(empty, LoadFailure)
    assert "no text" in empty.reason


def _pdf(pages: list[str]) -> bytes:
    """A minimal PDF with one text line a page."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{3 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>")
    font = "<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {4 + 2 * i} 0 R /Resources {font} >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    tail = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer << /Size {size} /Root 1 0 R >>\n"
    return out + tail.encode() + f"startxref\n{len(out)}\n%%EOF".encode()


def test_pdf_pages_are_known() -> None:
    document = one("a.pdf", _pdf(["First page", "Second page"]))
    starts = document.metadata["page_starts"]
    assert document.text[starts[1] :].startswith("Second")


def test_pdf_without_text_encrypted_or_broken_is_a_named_failure() -> None:
    assert "no text" in reason("a.pdf", _pdf(["", ""]))
    assert "broken" in reason("a.pdf", b"%PDF-1.4 nonsense")
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(_pdf(["Secret"])))
    writer.encrypt("password", algorithm="RC4-128")
    encrypted = io.BytesIO()
    writer.write(encrypted)
    assert "encrypted" in reason("a.pdf", encrypted.getvalue())


def test_word_headings_and_tables() -> None:
    document = docx.Document()
    document.add_heading("Fees", level=1)
    document.add_paragraph("Due in May.")
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "Copy", "5"
    buffer = io.BytesIO()
    document.save(buffer)
    assert one("a.docx", buffer.getvalue()).text == "# Fees\n\nDue in May.\n\nCopy | 5"
    assert "broken" in reason("a.docx", b"PK nonsense")
    assert "encrypted" in reason("a.docx", bytes.fromhex("d0cf11e0a1b11ae1") + b"x" * 512)


def test_slides_are_pages() -> None:
    deck = pptx.Presentation()
    for text in ("First slide", "Second slide"):
        slide = deck.slides.add_slide(deck.slide_layouts[6])
        slide.shapes.add_textbox(Inches(1), Inches(1), Inches(4), Inches(1)).text_frame.text = text
        slide.notes_slide.notes_text_frame.text = "say it"
    buffer = io.BytesIO()
    deck.save(buffer)
    document = one("a.pptx", buffer.getvalue())
    assert document.text == "First slide\n\nNotes: say it\n\nSecond slide\n\nNotes: say it"
    assert document.metadata["page_starts"] == [0, document.text.index("Second")]


def test_zip_members_succeed_and_fail_one_by_one() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "words")
        archive.writestr("sub/b.pdf", "nonsense")
        archive.writestr("__MACOSX/a.txt", "junk")
    good, bad = load("all.zip", buffer.getvalue())
    assert isinstance(good, Document)
    assert good.id == "all.zip/a.txt"
    assert isinstance(bad, LoadFailure)
    assert bad.name == "all.zip/sub/b.pdf"
    assert "broken" in reason("all.zip", b"nonsense")


def test_a_zip_bomb_is_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", "0" * 2_000_000)
    loader = Loader(IngestionConfig(max_archive_bytes=1_000_000), "legal")
    (item,) = loader.load("bomb.zip", buffer.getvalue())
    assert isinstance(item, LoadFailure)
    assert "unpacks to more" in item.reason


def test_paths_folders_and_globs(tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.md", "sub/c.exe", ".hidden/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("words")
    assert [name for _, name in expand_paths([str(tmp_path)])] == ["a.txt", "sub/b.md"]
    assert [name for _, name in expand_paths([str(tmp_path / "sub" / "*.md")])] == ["b.md"]
    assert [name for _, name in expand_paths([str(tmp_path / "*" / "*.md")])] == ["sub/b.md"]
    with pytest.raises(RetrievalError, match="no file"):
        expand_paths([str(tmp_path / "missing.txt")])


def test_a_file_too_large_or_gone_fails_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    loader = Loader(IngestionConfig(max_file_bytes=10), "legal")
    items = list(loader.load_paths([(tmp_path / "a.txt", "a.txt"), (tmp_path / "gone.txt", "gone.txt")]))
    assert [type(item) for item in items] == [LoadFailure, LoadFailure]
