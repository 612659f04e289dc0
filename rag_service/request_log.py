"""The request log: every finished request as one row, written ahead and compacted to Parquet by day.

Life of a row: ``append`` writes it to the write-ahead file (survives the process), ``flush`` forces it to the
disk (survives the machine), ``maintain`` turns a full or old file into Parquet and removes it. At every
moment a row lies in the write-ahead file, in Parquet, or, between two steps of a compaction, in both; readers
count it once. ``kill -9`` at any point loses nothing that ``append`` returned for.

When the disk is full, rows wait in memory, at most ``max_pending`` of them; beyond that the oldest are
dropped and counted. Serving never fails because of the log.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path

import duckdb
import pyarrow as pa

from rag_service.log_reader import open_requests
from rag_service.log_storage import LogStorage
from rag_service.record import RequestRecord
from rag_service.request_row import Row, day_of, row_of, table_of
from rag_service.write_ahead import WriteAheadFile, abandoned, read_segment, segments

WAL_FOLDER = "write-ahead"
HOUSEKEEPING_SECONDS = 600.0
"""How often finished days are merged and old ones removed: it lists every day, which costs on object storage."""


class RequestLog:
    """Writer and reader of one log. Thread-safe. Several processes may share a folder.

    ``folder``: local folder or fsspec URL; None keeps the last ``max_pending`` rows in memory only.
    ``local_folder``: where a log on object storage writes ahead; required for one, ignored otherwise.
    ``segment_rows`` and ``segment_seconds``: when a write-ahead file is compacted.
    """

    def __init__(
        self,
        folder: str | None,
        *,
        local_folder: Path | None = None,
        keep_text: bool = False,
        retention_days: int | None = None,
        segment_rows: int = 5000,
        segment_seconds: float = 300.0,
        max_pending: int = 10_000,
    ) -> None:
        self.failure: str | None = None
        """Why the last write failed; None while the log is written."""
        self.num_dropped = 0
        self._storage = LogStorage(folder) if folder is not None else None
        self._ahead_folder = ahead_folder(folder, local_folder) if folder is not None else None
        self._keep_text = keep_text
        self._retention_days = retention_days
        self._segment_rows = segment_rows
        self._segment_seconds = segment_seconds
        self._pending: deque[Row] = deque()
        self._max_pending = max_pending
        self._current: WriteAheadFile | None = None
        self._current_since = 0.0
        self._kept_house_at = -math.inf
        self._lock = threading.Lock()
        self._compaction = threading.Lock()

    @property
    def num_pending(self) -> int:
        """Rows that wait in memory for a disk that takes them."""
        return len(self._pending) if self._storage is not None else 0

    def append(self, record: RequestRecord) -> None:
        """Log one request. Never raises: a disk that refuses sets ``failure`` and the row waits."""
        row = row_of(record, self._keep_text)
        with self._lock:
            self._pending.append(row)
            if len(self._pending) == 1 or self._storage is None:
                self._write_pending()
            while len(self._pending) > self._max_pending:
                self._pending.popleft()
                self.num_dropped += self._storage is not None

    def flush(self) -> None:
        """Write what waits and force the file to the disk."""
        with self._lock:
            self._write_pending()
            try:
                if self._current is not None:
                    self._current.sync()
            except OSError as error:
                self.failure = str(error)

    def maintain(self, now: float | None = None) -> None:
        """Compact, merge and expire what is due. Call it every few seconds; it is cheap when nothing is."""
        now = time.time() if now is None else now
        # A clock that was set back would hold both up until it is where it was.
        if now < self._kept_house_at:
            self._kept_house_at = -math.inf
        with self._lock:
            self._current_since = min(self._current_since, now)
            current = self._current
            due = current is not None and (
                current.num_lines >= self._segment_rows or now - self._current_since >= self._segment_seconds
            )
            if due:
                self._seal()
        self._tidy(now, now - self._kept_house_at >= HOUSEKEEPING_SECONDS)

    def close(self) -> None:
        """Write, compact and let go."""
        self.flush()
        with self._lock:
            self._seal()
        self._tidy(time.time(), keep_house=True)

    @contextmanager
    def reading(
        self, since: float | None = None, until: float | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[duckdb.DuckDBPyConnection]:
        """A DuckDB connection with a table ``requests`` of the rows started in [since, until).

        ``columns``: those wanted, which makes a long window much cheaper; None takes all.
        """
        with self._lock:
            waiting = list(self._pending)
        window = (since, until)
        with open_requests(self._storage, self._ahead_folder, window, waiting, columns) as connection:
            yield connection

    def _write_pending(self) -> None:
        if self._storage is None or self._ahead_folder is None:
            return
        try:
            while self._pending:
                if self._current is None:
                    self._current = WriteAheadFile(self._ahead_folder)
                    self._current_since = time.time()
                self._current.append(self._pending[0])
                self._pending.popleft()
            self.failure = None
        except OSError as error:
            self.failure = str(error)

    def _seal(self) -> None:
        """End the current write-ahead file; without its lock it is due for compaction."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def _tidy(self, now: float, keep_house: bool) -> None:
        if self._storage is None or self._ahead_folder is None:
            return
        with self._compaction:
            try:
                for path in segments(self._ahead_folder):
                    if abandoned(path):
                        compact(path, self._storage)
                if keep_house:
                    self._kept_house_at = now
                    self._merge_finished_days(self._storage, now)
                    self._expire(self._storage, now)
            except (OSError, pa.ArrowException) as error:
                self.failure = str(error)

    def _merge_finished_days(self, storage: LogStorage, now: float, few: int = 8, many: int = 100) -> None:
        today = _day(now)
        for day in storage.days():
            parts = storage.parts(day)
            if day < today and len(parts) > few:
                storage.remove_replaced(day)
                storage.merge(day, parts[:many])

    def _expire(self, storage: LogStorage, now: float) -> None:
        if self._retention_days is None:
            return
        oldest = _day(now - timedelta(days=self._retention_days).total_seconds())
        for day in storage.days():
            if day < oldest:
                storage.remove_day(day)


def ahead_folder(folder: str, local_folder: Path | None) -> Path:
    """Where the log in ``folder`` writes ahead: inside it when local, else in ``local_folder``."""
    storage = LogStorage(folder)
    if storage.is_local:
        return Path(storage.root) / WAL_FOLDER
    if local_folder is None:
        raise ValueError(f"The request log {folder} needs a local folder to write ahead in.")
    return local_folder / WAL_FOLDER


def compact(segment: Path, storage: LogStorage) -> None:
    """Write a segment's rows as Parquet, one file a day, then remove it. Repeating it changes nothing."""
    rows = sorted(read_segment(segment), key=day_of)
    for day, of_day in groupby(rows, key=day_of):
        storage.write(day, f"part-{segment.stem}", table_of(list(of_day)))
    segment.unlink(missing_ok=True)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, tz=UTC).date().isoformat()
