"""From paths, globs, folders, zip files and uploads to documents, one at a time."""

from __future__ import annotations

import glob
import io
import itertools
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from retrieval.config import IngestionConfig
from retrieval.loaders.extracted import Extracted, UnreadableFile
from retrieval.loaders.office import load_docx, load_pdf, load_pptx
from retrieval.loaders.plain import load_html, load_markdown, load_text
from retrieval.loaders.tabular import load_csv, load_json, load_json_lines
from retrieval.types import Document, RetrievalError

_ONE: dict[str, Callable[[bytes], Extracted]] = {
    ".txt": load_text,
    ".text": load_text,
    ".rst": load_text,
    ".log": load_text,
    ".md": load_markdown,
    ".markdown": load_markdown,
    ".html": load_html,
    ".htm": load_html,
    ".xhtml": load_html,
    ".csv": load_csv,
    ".tsv": load_csv,
    ".pdf": load_pdf,
    ".docx": load_docx,
    ".pptx": load_pptx,
}
_MANY: dict[str, Callable[[bytes], Iterator[Extracted | UnreadableFile]]] = {
    ".jsonl": load_json_lines,
    ".ndjson": load_json_lines,
    ".json": load_json,
}
SUPPORTED = tuple(sorted([*_ONE, *_MANY, ".zip"]))


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A file (or one document within it) that could not be loaded, and why."""

    name: str
    reason: str


class Loader:
    """Makes documents of files for one domain and tenant. What fails is yielded as a ``LoadFailure``."""

    def __init__(self, config: IngestionConfig, domain: str | None, tenant: str = "default") -> None:
        """``domain`` None: only files that name their own (JSON Lines) can be loaded."""
        self._config = config
        self._domain = domain
        self._tenant = tenant

    def load_paths(self, paths: Iterable[tuple[Path, str]]) -> Iterator[Document | LoadFailure]:
        """Documents of files on disk, given with the name they go by (see ``expand_paths``)."""
        for path, name in paths:
            try:
                if path.stat().st_size > self._limit(name):
                    yield self._too_large(name)
                    continue
                content = path.read_bytes()
            except OSError as error:
                yield LoadFailure(name, f"The file cannot be read: {error.strerror or error}.")
                continue
            yield from self.load(name, content)

    def load(self, name: str, content: bytes) -> Iterator[Document | LoadFailure]:
        """Documents of one file's bytes; its suffix says how to read it."""
        if len(content) > self._limit(name):
            yield self._too_large(name)
            return
        suffix = PurePosixPath(name).suffix.lower()
        try:
            if suffix == ".zip":
                yield from self._load_zip(name, content)
            elif suffix in _MANY:
                for number, item in enumerate(_MANY[suffix](content), start=1):
                    yield self._document(name, item, f"#{number}")
            elif suffix in _ONE:
                yield self._document(name, _ONE[suffix](content), "")
            else:
                known = ", ".join(SUPPORTED)
                yield LoadFailure(
                    name, f"Files of type {suffix or '(none)'} can't be read; these can: {known}."
                )
        except UnreadableFile as error:
            yield LoadFailure(name, str(error))
        except Exception as error:  # whatever a parser comes up with is this file's failure, not the job's
            yield LoadFailure(name, f"The file is broken: {type(error).__name__}: {error}")

    def _document(self, name: str, item: Extracted | UnreadableFile, part: str) -> Document | LoadFailure:
        if isinstance(item, UnreadableFile):
            return LoadFailure(name, str(item))
        domain = item.domain or self._domain
        label = f"{name}{part}"
        if domain is None:
            return LoadFailure(label, 'No domain: name one, or give each document a field "domain".')
        if not any(character.isalnum() for character in item.text):
            return LoadFailure(label, "The file has no text.")
        if len(item.text) > self._config.max_document_characters:
            limit = self._config.max_document_characters
            return LoadFailure(label, f"The text has {len(item.text)} characters; {limit} are allowed.")
        metadata = {**item.metadata, "source": name}
        if item.page_starts:
            metadata["page_starts"] = list(item.page_starts)
        return Document(
            id=item.id or label,
            domain=domain,
            title=item.title,
            text=item.text.encode("utf-8", "replace").decode("utf-8"),
            metadata=metadata,
            tenant=self._tenant,
        )

    def _load_zip(self, name: str, content: bytes) -> Iterator[Document | LoadFailure]:
        try:
            archive = zipfile.ZipFile(io.BytesIO(content))
        except zipfile.BadZipFile:
            raise UnreadableFile("The zip file is broken.") from None
        members = [
            member for member in archive.infolist() if not member.is_dir() and not _hidden(member.filename)
        ]
        if sum(member.file_size for member in members) > self._config.max_archive_bytes:
            raise UnreadableFile(f"The zip file unpacks to more than {self._config.max_archive_bytes} bytes.")
        for member in members:
            label = f"{name}/{member.filename}"
            if ".." in PurePosixPath(member.filename).parts:
                yield LoadFailure(label, "The name leads out of the zip file.")
            elif member.flag_bits & 0x1:
                yield LoadFailure(label, "The file is encrypted: give it without a password.")
            elif member.filename.lower().endswith(".zip"):
                yield LoadFailure(label, "A zip file inside a zip file is not read.")
            else:
                yield from self._load_member(archive, member, label)

    def _load_member(
        self, archive: zipfile.ZipFile, member: zipfile.ZipInfo, label: str
    ) -> Iterator[Document | LoadFailure]:
        try:
            with archive.open(member) as file:
                # One byte more than allowed: sizes in a zip's directory may lie.
                unpacked = file.read(self._config.max_file_bytes + 1)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
            yield LoadFailure(label, f"The file cannot be unpacked: {error}.")
            return
        yield from self.load(label, unpacked)

    def _limit(self, name: str) -> int:
        archive = name.lower().endswith(".zip")
        return self._config.max_archive_bytes if archive else self._config.max_file_bytes

    def _too_large(self, name: str) -> LoadFailure:
        return LoadFailure(name, f"The file is larger than {self._limit(name)} bytes.")


def expand_paths(patterns: Iterable[str]) -> list[tuple[Path, str]]:
    """Files behind paths, folders (readable types only, in order of name) and globs, each with its name.

    A file's name is its path below the folder or glob that was given, so that moving the folder keeps ids.
    Raises ``RetrievalError`` for a path that doesn't exist.
    """
    found: dict[Path, str] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.is_file() and _readable(file, path)]
            found.update((file, file.relative_to(path).as_posix()) for file in files)
        elif path.exists():
            found[path] = path.name
        else:
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            if not matches:
                raise RetrievalError(f"There is no file {pattern!r}.", "file_not_found")
            root = _static_part(path)
            found.update((match, match.relative_to(root).as_posix()) for match in matches if match.is_file())
    return list(found.items())


def _static_part(pattern: Path) -> Path:
    """The folder before the first part with a wildcard."""
    parts = list(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    return Path(*parts)


def _readable(file: Path, root: Path) -> bool:
    return file.suffix.lower() in SUPPORTED and not _hidden(file.relative_to(root).as_posix())


def _hidden(name: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) and part != ".." for part in PurePosixPath(name).parts)
