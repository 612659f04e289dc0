"""Parquet files in one folder a day, local or on object storage, each whole or absent.

A local file is written under a temporary name, forced to the disk and renamed; on object storage one put is
atomic by itself. Files never change once written. Small files of a finished day are merged into one that
names those it replaces, so a reader counts no row twice even when a crash leaves both.
"""

from __future__ import annotations

import io
import json
import os
import time
import uuid
from typing import Any, Final

import fsspec  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

DAY_PREFIX: Final = "day="
MERGED_PREFIX: Final = "merged-"
_REPLACES: Final = b"replaces"
_TEMPORARY_SECONDS: Final = 3600.0


class LogStorage:
    """The days and files below one folder or fsspec URL. Errors are the file system's ``OSError``."""

    def __init__(self, folder: str) -> None:
        self.filesystem: Any
        self.filesystem, self.root = fsspec.core.url_to_fs(folder)
        self.is_local = isinstance(self.filesystem, LocalFileSystem)
        self._replaced_by_merged: dict[str, frozenset[str]] = {}

    def days(self) -> list[str]:
        """Days with a partition, oldest first, as ``YYYY-MM-DD``."""
        names = (_name(path) for path in self._listed(self.root))
        return sorted(name.removeprefix(DAY_PREFIX) for name in names if name.startswith(DAY_PREFIX))

    def files(self, day: str) -> list[str]:
        """Paths of the files that hold a day's rows, without those that a merged file replaces."""
        paths = [path for path in self._listed(self._folder(day)) if path.endswith(".parquet")]
        replaced: set[str] = set()
        for path in paths:
            if _name(path).startswith(MERGED_PREFIX):
                replaced |= self._replaced_by(path)
        return sorted(path for path in paths if _name(path) not in replaced)

    def address(self, path: str) -> str:
        """A path as DuckDB opens it."""
        if self.is_local:
            return path
        protocol = self.filesystem.protocol
        return f"{protocol if isinstance(protocol, str) else protocol[0]}://{path.lstrip('/')}"

    def parts(self, day: str) -> list[str]:
        """Those of ``files`` that have not been merged yet."""
        return [path for path in self.files(day) if not _name(path).startswith(MERGED_PREFIX)]

    def write(self, day: str, name: str, table: pa.Table) -> None:
        """Put a table as ``<day>/<name>.parquet``, replacing a file of that name at once or not at all."""
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd")
        path = f"{self._folder(day)}/{name}.parquet"
        if self.is_local:
            _write_local(path, buffer.getbuffer())
        else:
            self.filesystem.pipe_file(path, buffer.getvalue())

    def merge(self, day: str, paths: list[str]) -> None:
        """Make one file of several of a day, then remove them."""
        table = pa.concat_tables([self._read(path) for path in paths], promote_options="default")
        names = [_name(path) for path in paths]
        metadata = {**(table.schema.metadata or {}), _REPLACES: json.dumps(names).encode()}
        self.write(day, f"{MERGED_PREFIX}{uuid.uuid4().hex}", table.replace_schema_metadata(metadata))
        for path in paths:
            self.filesystem.rm_file(path)

    def remove_replaced(self, day: str) -> None:
        """Remove what a crash left: merged files' sources, and temporary files older than an hour."""
        current = set(self.files(day))
        for path in self._listed(self._folder(day)):
            stale = path.endswith(".tmp") and time.time() - os.path.getmtime(path) > _TEMPORARY_SECONDS
            if stale or (path.endswith(".parquet") and path not in current):
                self.filesystem.rm_file(path)

    def remove_day(self, day: str) -> None:
        self.filesystem.rm(self._folder(day), recursive=True)

    def _folder(self, day: str) -> str:
        return f"{self.root}/{DAY_PREFIX}{day}"

    def _listed(self, folder: str) -> list[str]:
        try:
            self.filesystem.invalidate_cache()
            return [str(path) for path in self.filesystem.ls(folder, detail=False)]
        except FileNotFoundError:
            return []

    def _read(self, path: str) -> pa.Table:
        with self.filesystem.open(path, "rb") as file:
            return pq.read_table(file)

    def _replaced_by(self, path: str) -> frozenset[str]:
        if path not in self._replaced_by_merged:
            with self.filesystem.open(path, "rb") as file:
                metadata = pq.read_schema(file).metadata or {}
            self._replaced_by_merged[path] = frozenset(json.loads(metadata.get(_REPLACES, b"[]")))
        return self._replaced_by_merged[path]


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _write_local(path: str, content: memoryview) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
