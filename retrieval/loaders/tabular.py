"""CSV and JSON Lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

from retrieval.loaders.encoding import decode
from retrieval.loaders.extracted import Extracted, UnreadableFile
from retrieval.loaders.plain import normalise

_TEXT_KEYS = ("text", "content", "body")


def load_csv(content: bytes) -> Extracted:
    """Every row as one line of ``column: value`` pairs, so that a chunk of rows still names its columns."""
    text = normalise(decode(content))
    csv.field_size_limit(16 * 2**20)
    try:
        dialect: type[csv.Dialect] | csv.Dialect = csv.Sniffer().sniff(text[:8192], delimiters=",;\t|")
    except csv.Error:
        dialect = csv.excel
    try:
        rows = [row for row in csv.reader(io.StringIO(text), dialect) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UnreadableFile(f"The file is no valid CSV: {error}.") from None
    if len(rows) < 2:
        return Extracted("\n".join(", ".join(row) for row in rows))
    header, *body = rows
    lines = []
    for row in body:
        cells = [
            f"{name.strip()}: {' '.join(value.split())}" if name.strip() else " ".join(value.split())
            for name, value in zip([*header, *[""] * len(row)], row, strict=False)
            if value.strip()
        ]
        lines.append("; ".join(cells))
    return Extracted("\n".join(lines), metadata={"columns": [name.strip() for name in header]})


def load_json_lines(content: bytes) -> Iterator[Extracted | UnreadableFile]:
    """One document a line: ``text`` (or content, body) and optionally id, title, domain, metadata. A bad line
    is that line's failure."""
    for number, line in enumerate(normalise(decode(content)).split("\n"), start=1):
        if line.strip():
            yield _json_document(line, f"Line {number}")


def load_json(content: bytes) -> Iterator[Extracted | UnreadableFile]:
    """One object or a list of them."""
    try:
        value = json.loads(decode(content))
    except ValueError as error:
        raise UnreadableFile(f"The file is no valid JSON: {error}.") from None
    except RecursionError:
        raise UnreadableFile("The file's JSON is nested too deeply.") from None
    items = value if isinstance(value, list) else [value]
    for number, item in enumerate(items, start=1):
        yield _json_document(json.dumps(item), f"Item {number}")


def _json_document(line: str, where: str) -> Extracted | UnreadableFile:
    try:
        record = json.loads(line)
    except ValueError as error:
        return UnreadableFile(f"{where} is no valid JSON: {error}.")
    except RecursionError:
        return UnreadableFile(f"{where} is nested too deeply.")
    if not isinstance(record, dict):
        return UnreadableFile(f"{where} is no JSON object.")
    text = next((record[key] for key in _TEXT_KEYS if isinstance(record.get(key), str)), None)
    if text is None:
        return UnreadableFile(f'{where} has no text: give it a field "text".')
    metadata = record.get("metadata")
    return Extracted(
        text=normalise(text),
        title=str(record.get("title") or ""),
        metadata=metadata if isinstance(metadata, dict) else {},
        id=str(record["id"]) if record.get("id") not in (None, "") else None,
        domain=str(record["domain"]) if record.get("domain") else None,
    )
