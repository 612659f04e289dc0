"""The request log as a DuckDB view: Parquet, write-ahead files and rows in memory, each row once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from rag_service.log_storage import LogStorage
from rag_service.request_row import SCHEMA, Row, table_of
from rag_service.write_ahead import read_segment, segments

_ATTEMPTS: Final = 3
Window = tuple[float | None, float | None]
"""From, inclusive, and to, exclusive, in Unix seconds; None is unbounded."""


@contextmanager
def open_requests(
    storage: LogStorage | None,
    ahead_folder: Path | None,
    window: Window = (None, None),
    waiting: Sequence[Row] = (),
    columns: Sequence[str] | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """An in-memory connection with a table ``requests``: ``columns`` of ``request_row.SCHEMA``, None for all.

    Rows started in the window [since, until), Unix seconds. ``waiting``: rows not yet on the disk.
    The table is a snapshot: compaction and retention may go on beside it.
    """
    connection = duckdb.connect(":memory:", config={"threads": 1})
    try:
        if storage is not None and not storage.is_local:
            connection.register_filesystem(storage.filesystem)
        for attempt in range(_ATTEMPTS):
            try:
                _load(connection, storage, ahead_folder, window, waiting, columns)
                break
            except duckdb.IOException:
                # A merge or retention removed a file between listing and reading it: list again.
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(0.05)
        yield connection
    finally:
        connection.close()


def _load(
    connection: duckdb.DuckDBPyConnection,
    storage: LogStorage | None,
    ahead_folder: Path | None,
    window: Window,
    waiting: Sequence[Row],
    columns: Sequence[str] | None,
) -> None:
    since, until = window
    # Write-ahead files first: a row that moves to Parquet meanwhile is then seen twice, never missed.
    ahead = list(waiting)
    for path in segments(ahead_folder) if ahead_folder is not None else ():
        ahead += read_segment(path)
    connection.register("ahead", table_of(ahead))
    connection.register("nothing", pa.Table.from_pylist([], schema=SCHEMA))
    files = _files(storage, since, until) if storage is not None else []
    chosen = ", ".join(SCHEMA.names if columns is None else columns)
    kept = f"started_at >= {_bound(since, '-inf')} and started_at < {_bound(until, 'inf')}"
    stored = "select * from nothing"
    if files:
        connection.execute("set variable files = ?", [files])
        stored += (
            " union all by name select * from read_parquet(getvariable('files'), union_by_name = true,"
            " hive_partitioning = false)"
        )
    connection.execute(
        f"""create or replace temp table requests as
        with stored as ({stored})
        select {chosen} from stored where {kept}
        union all
        select {chosen} from ahead where {kept} and not exists (
            select 1 from stored where stored.segment = ahead.segment and stored.line = ahead.line
        )"""
    )


def _files(storage: LogStorage, since: float | None, until: float | None) -> list[str]:
    first = _day(since) if since is not None else ""
    last = _day(until) if until is not None else "9999"
    return [
        storage.address(path) for day in storage.days() if first <= day <= last for path in storage.files(day)
    ]


def _bound(at: float | None, unbounded: str) -> str:
    return f"{at!r}" if at is not None else f"'{unbounded}'::double"


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, tz=UTC).date().isoformat()
