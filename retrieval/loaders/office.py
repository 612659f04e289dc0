"""PDF, Word and PowerPoint."""

from __future__ import annotations

import io
import logging
import zipfile
from typing import Any

import docx
import pptx
import pypdf
from docx.opc.exceptions import PackageNotFoundError as DocxNotFound
from docx.table import Table
from docx.text.paragraph import Paragraph
from pptx.exc import PackageNotFoundError as PptxNotFound
from pypdf.errors import PyPdfError

from retrieval.loaders.extracted import Extracted, UnreadableFile, join_pages, table_text
from retrieval.loaders.plain import normalise

_OLE = bytes.fromhex("d0cf11e0a1b11ae1")
"""An encrypted Office file is an OLE container instead of a zip file."""
_MAX_UNPACKED_BYTES = 256 * 2**20
logging.getLogger("pypdf").setLevel(logging.ERROR)


def load_pdf(content: bytes) -> Extracted:
    """The text layer, page by page. Raises for encrypted, broken and merely scanned files."""
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableFile("The PDF is encrypted: give it without a password.")
        pages = [normalise(page.extract_text() or "").strip() for page in reader.pages]
        title = str((reader.metadata.title if reader.metadata else "") or "").strip()
    except UnreadableFile:
        raise
    except (
        PyPdfError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OSError,
        RecursionError,
    ) as error:
        raise UnreadableFile(f"The PDF is broken: {error}") from None
    if not any(any(character.isalnum() for character in page) for page in pages):
        raise UnreadableFile("The PDF has no text (scanned pages?): run OCR over it first.")
    text, starts = join_pages(pages)
    return Extracted(text, title, page_starts=starts)


def load_docx(content: bytes) -> Extracted:
    """Paragraphs and tables in order; headings as ``#`` lines."""
    _check_package(content)
    try:
        document = docx.Document(io.BytesIO(content))
    except (DocxNotFound, KeyError, ValueError, zipfile.BadZipFile, OSError) as error:
        raise UnreadableFile(f"The Word file is broken: {error}") from None
    parts: list[str] = []
    for item in document.iter_inner_content():
        if isinstance(item, Paragraph):
            parts.append(_heading(item) + item.text if item.text.strip() else "")
        elif isinstance(item, Table):
            parts.append(table_text([[cell.text for cell in row.cells] for row in item.rows]))
    title = str(document.core_properties.title or "")
    return Extracted(normalise("\n\n".join(part for part in parts if part)), title)


def load_pptx(content: bytes) -> Extracted:
    """Slides as pages: text, tables and speaker's notes."""
    _check_package(content)
    try:
        deck = pptx.Presentation(io.BytesIO(content))
        slides = [_slide_text(slide) for slide in deck.slides]
    except (PptxNotFound, KeyError, ValueError, zipfile.BadZipFile, OSError) as error:
        raise UnreadableFile(f"The PowerPoint file is broken: {error}") from None
    text, starts = join_pages(slides)
    return Extracted(text, str(deck.core_properties.title or ""), page_starts=starts)


def _heading(paragraph: Paragraph) -> str:
    style = paragraph.style.name if paragraph.style is not None else ""
    if style == "Title":
        return "# "
    level = (style or "").removeprefix("Heading ")
    return "#" * int(level) + " " if level.isdigit() and int(level) <= 6 else ""


def _slide_text(slide: Any) -> str:
    parts: list[str] = []
    for shape in slide.shapes:
        if shape.has_text_frame and shape.text_frame.text.strip():
            parts.append(normalise(shape.text_frame.text.replace("\v", "\n")))
        if getattr(shape, "has_table", False) and shape.has_table:
            parts.append(table_text([[cell.text for cell in row.cells] for row in shape.table.rows]))
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        notes = slide.notes_slide.notes_text_frame.text.strip()
        if notes:
            parts.append(f"Notes: {notes}")
    return "\n\n".join(parts)


def _check_package(content: bytes) -> None:
    """Raises for encrypted files, and for those that would unpack to more than memory should hold."""
    if content.startswith(_OLE):
        raise UnreadableFile(
            "The file is encrypted, or in the old Office format: save it anew without a password."
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as package:
            size = sum(member.file_size for member in package.infolist())
    except zipfile.BadZipFile:
        raise UnreadableFile("The Office file is broken: it is no zip file.") from None
    if size > _MAX_UNPACKED_BYTES:
        raise UnreadableFile(f"The Office file unpacks to more than {_MAX_UNPACKED_BYTES} bytes.")
