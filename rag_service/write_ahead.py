"""Append-only files of JSON lines, one writer each, that a hard kill cannot break.

A line is handed to the operating system in one write before ``append`` returns, so it outlives the process;
``sync`` makes it outlive the machine. A write that fails half-way (full disk) is cut off again. A reader
passes over a torn last line, which is all that a kill can leave.

The writer holds a lock on its file while it lives. A file without a lock holder was left by a writer that is
gone and may be taken over (``abandoned``).
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUFFIX = ".jsonl"


class WriteAheadFile:
    """One segment being written. Not thread-safe. ``OSError`` from ``append``: nothing was added."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.segment = uuid.uuid4().hex
        self.path = folder / f"{self.segment}{SUFFIX}"
        self.num_lines = 0
        self._size = 0
        self._unsynced = False
        # Locked before it gets its name: nobody may take the fresh file for an abandoned one.
        fresh = self.path.with_suffix(".new")
        self._descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fresh.rename(self.path)
        except OSError:
            self.close()
            fresh.unlink(missing_ok=True)
            raise

    def append(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes fit")
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(line)
        self.num_lines += 1
        self._unsynced = True

    def sync(self) -> None:
        """Force what was appended to the disk."""
        if self._unsynced:
            os.fsync(self._descriptor)
            self._unsynced = False

    def close(self) -> None:
        """Give up the lock; the file stays until it has been compacted."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_segment(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a segment as rows with ``segment`` and ``line``; [] when it has been removed."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1]):
        row = _row_of(line)
        if row is not None:
            rows.append(row | {"segment": path.stem, "line": number})
    return rows


def segments(folder: Path) -> list[Path]:
    """All segments in a folder, of whatever writer."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def abandoned(path: Path) -> bool:
    """True when no living writer holds the segment."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "started_at" in row else None
