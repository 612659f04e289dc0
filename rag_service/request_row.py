"""A request record as one row of the request log: the columns, and the way there.

Text columns stay null unless the configuration asks for text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from generation.types import DrafterCounts, SpeculationStats
from rag_service.record import RequestRecord

Row = dict[str, Any]
DRAFTER_COLUMNS: Final[tuple[tuple[str, pa.DataType], ...]] = (
    ("drafter", pa.string()),
    ("num_draft_tokens", pa.int64()),
    ("num_accepted_tokens", pa.int64()),
    ("num_rejections", pa.int64()),
    ("overlap_sum", pa.float64()),
    ("num_overlap", pa.int64()),
)
_COLUMNS: Final[list[tuple[str, pa.DataType]]] = [
    ("segment", pa.string()),
    ("line", pa.int64()),
    ("request_id", pa.string()),
    ("started_at", pa.float64()),
    ("domain", pa.string()),
    ("tenant", pa.string()),
    ("outcome", pa.string()),
    ("error_code", pa.string()),
    ("stream", pa.bool_()),
    ("trace_id", pa.string()),
    ("target", pa.string()),
    ("draft", pa.string()),
    ("mode", pa.string()),
    ("temperature", pa.float64()),
    ("total_seconds", pa.float64()),
    ("time_to_first_token_seconds", pa.float64()),
    ("stage_seconds", pa.map_(pa.string(), pa.float64())),
    ("num_prompt_tokens", pa.int64()),
    ("num_cached_tokens", pa.int64()),
    ("num_generated_tokens", pa.int64()),
    ("acceptance_method", pa.string()),
    ("drafter", pa.string()),
    ("num_rounds", pa.int64()),
    ("num_draft_tokens", pa.int64()),
    ("num_accepted_tokens", pa.int64()),
    ("num_rejections", pa.int64()),
    ("tested_per_position", pa.list_(pa.int64())),
    ("accepted_per_position", pa.list_(pa.int64())),
    ("acceptance_histogram", pa.list_(pa.int64())),
    ("rounds_by_cause", pa.map_(pa.string(), pa.int64())),
    ("overlap_sum", pa.float64()),
    ("num_overlap", pa.int64()),
    ("by_drafter", pa.list_(pa.struct(DRAFTER_COLUMNS))),
    ("lookahead_hits", pa.int64()),
    ("lookahead_misses", pa.int64()),
    ("hidden_draft_seconds", pa.float64()),
    ("waited_draft_seconds", pa.float64()),
    ("question", pa.string()),
    ("answer", pa.string()),
]
SCHEMA: Final = pa.schema(_COLUMNS)
"""``segment`` and ``line`` say where the row was first written; together they identify it, so that a row
found both in the write-ahead file and in Parquet counts once. Columns from ``acceptance_method`` to
``waited_draft_seconds`` are null for a request that never reached the target. ``started_at``: Unix time."""
_MAPS: Final = ("stage_seconds", "rounds_by_cause")


def row_of(record: RequestRecord, keep_text: bool) -> Row:
    """Plain JSON values, without ``segment`` and ``line``."""
    row: Row = {
        "request_id": record.request_id,
        "started_at": record.started_at,
        "domain": record.domain,
        "tenant": record.tenant,
        "outcome": record.outcome,
        "error_code": record.error_code,
        "stream": record.stream,
        "trace_id": record.trace_id,
        "target": record.target,
        "draft": record.draft,
        "mode": record.mode,
        "temperature": record.temperature,
        "total_seconds": record.total_seconds,
        "time_to_first_token_seconds": record.time_to_first_token_seconds,
        "stage_seconds": dict(record.stage_seconds),
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "num_generated_tokens": record.num_generated_tokens,
    }
    if record.stats is not None:
        row |= _stats_columns(record.stats)
    if keep_text:
        row |= {"question": record.question, "answer": record.answer}
    return row


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as an Arrow table in ``SCHEMA``; names it doesn't know are left out (an older reader)."""
    return pa.Table.from_pylist([_with_pairs(row) for row in rows], schema=SCHEMA)


def day_of(row: Mapping[str, Any]) -> str:
    """The day, UTC, whose partition the row belongs to."""
    return datetime.fromtimestamp(float(row["started_at"]), tz=UTC).date().isoformat()


def _with_pairs(row: Mapping[str, Any]) -> Row:
    changed = dict(row)
    for name in _MAPS:
        if isinstance(changed.get(name), Mapping):
            changed[name] = list(changed[name].items())
    return changed


def _stats_columns(stats: SpeculationStats) -> Row:
    return {
        "acceptance_method": stats.acceptance_method,
        "drafter": stats.drafter,
        "num_rounds": stats.num_rounds,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_rejections": stats.num_rejections,
        "tested_per_position": list(stats.tested_per_position),
        "accepted_per_position": list(stats.accepted_per_position),
        "acceptance_histogram": list(stats.acceptance_histogram),
        "rounds_by_cause": dict(stats.rounds_by_cause),
        "overlap_sum": stats.overlap_sum,
        "num_overlap": stats.num_overlap,
        "by_drafter": [_drafter_columns(kind, counts) for kind, counts in stats.by_drafter.items()],
        "lookahead_hits": stats.lookahead_hits,
        "lookahead_misses": stats.lookahead_misses,
        "hidden_draft_seconds": stats.hidden_draft_seconds,
        "waited_draft_seconds": stats.waited_draft_seconds,
    }


def _drafter_columns(kind: str, counts: DrafterCounts) -> Row:
    return {
        "drafter": kind,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "num_rejections": counts.num_rejections,
        "overlap_sum": counts.overlap_sum,
        "num_overlap": counts.num_overlap,
    }
