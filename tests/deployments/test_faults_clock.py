"""A clock that jumps: the request log neither loses rows nor stops being looked after."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rag_service.request_log import RequestLog
from tests.rag_service.records import record_of, stats_of

HOUR = 3600.0


@pytest.mark.parametrize("jump", [-24 * HOUR, 24 * HOUR])
def test_the_log_is_compacted_after_a_jump(tmp_path: Path, jump: float) -> None:
    log = RequestLog(str(tmp_path), segment_seconds=300.0)
    began = time.time()
    log.append(record_of("before", stats_of([3]), started_at=began))
    log.maintain(began)
    log.append(record_of("after", stats_of([3]), started_at=began + jump))
    log.maintain(began + jump)
    log.maintain(began + jump + 301.0)
    compacted = list(tmp_path.glob("day=*/*.parquet"))
    with log.reading() as connection:
        rows = connection.sql("select request_id from requests order by 1").fetchall()
    log.close()
    assert compacted
    assert rows == [("after",), ("before",)]
