"""Rows of the request log as numpy columns, ready to be summed and resampled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, cast

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from generation.types import ROUND_CAUSES
from rag_service.statistics import Values
from rag_service.telemetry import OTHER, STAGES

Names = npt.NDArray[np.object_]
_NAMES: Final = ("domain", "outcome", "target", "draft", "mode", "drafter", "acceptance_method")
_COUNTS: Final = (
    "num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_rejections", "overlap_sum", "num_overlap",
    "num_generated_tokens", "lookahead_hits", "lookahead_misses",
)  # fmt: skip
_POSITIONS: Final = ("tested_per_position", "accepted_per_position", "acceptance_histogram")
COLUMN_NAMES: Final = (
    *_NAMES, *_COUNTS, *_POSITIONS, "rounds_by_cause", "stage_seconds", "by_drafter", "temperature", "started_at",
    "total_seconds", "time_to_first_token_seconds",
)  # fmt: skip
"""The columns of the log that are read here: no text."""
DRAFTER_COUNTS: Final = (
    "num_draft_tokens", "num_accepted_tokens", "num_rejections", "overlap_sum", "num_overlap",
)  # fmt: skip
TEMPERATURE_EDGES: Final = (("0", 0.0), ("0-0.5", 0.5), ("0.5-1", 1.0))
"""Buckets by their upper edge, inclusive; above the last: ``>1``."""


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """``[n]`` requests. Unknown times are NaN, counts of requests without speculation 0.

    ``names`` also has ``temperature``, the bucket. ``positions`` are ``[n, k]``. ``times`` are the seconds of
    requests that ended well: ``total``, ``time_to_first_token`` and the stages, NaN for the others.
    """

    names: dict[str, Names]
    counts: dict[str, Values]
    causes: dict[str, Values]
    times: dict[str, Values]
    positions: dict[str, Values]
    started_at: Values

    def __len__(self) -> int:
        return len(self.started_at)

    def where(self, kept: npt.NDArray[np.bool_]) -> RequestColumns:
        """The requests of a mask."""
        return RequestColumns(
            {name: values[kept] for name, values in self.names.items()},
            {name: values[kept] for name, values in self.counts.items()},
            {name: values[kept] for name, values in self.causes.items()},
            {name: values[kept] for name, values in self.times.items()},
            {name: values[kept] for name, values in self.positions.items()},
            self.started_at[kept],
        )


def load_columns(
    connection: duckdb.DuckDBPyConnection, domains: Collection[str] | None = None, by_drafter: bool = False
) -> RequestColumns:
    """All of the connection's ``requests``.

    ``domains``: any other becomes ``other``; None keeps all. ``by_drafter``: one row for each drafter kind
    that proposed in a request, with the counts that kind earned; rounds, times and positions belong to no
    single kind and are left out (0, NaN, empty).
    """
    table: pa.Table = connection.sql(_drafter_query() if by_drafter else _query()).to_arrow_table()
    names: dict[str, Names] = {name: _strings(table, name) for name in _NAMES}
    names["temperature"] = _temperature_buckets(_floats(table, "temperature"))
    if domains is not None:
        names["domain"][~np.isin(names["domain"], list(domains))] = OTHER
    return RequestColumns(
        names,
        {name: np.nan_to_num(_floats(table, name)) for name in _COUNTS},
        {cause: np.nan_to_num(_floats(table, f"cause_{cause}")) for cause in ROUND_CAUSES},
        {name: _floats(table, f"time_{name}") for name in ("total", "time_to_first_token", *STAGES)},
        {name: _matrix(table, name) for name in _POSITIONS},
        _floats(table, "started_at"),
    )


def _query() -> str:
    causes = [f"rounds_by_cause['{cause}'] as cause_{cause}" for cause in ROUND_CAUSES]
    times = {"total": "total_seconds", "time_to_first_token": "time_to_first_token_seconds"}
    times |= {stage: f"stage_seconds['{stage}']" for stage in STAGES}
    timed = [f"case when outcome = 'ok' then {source} end as time_{name}" for name, source in times.items()]
    columns = [*_NAMES, *_COUNTS, *_POSITIONS, *causes, *timed, "temperature", "started_at"]
    return f"select {', '.join(columns)} from requests order by started_at"


def _drafter_query() -> str:
    names = [name for name in _NAMES if name != "drafter"]
    columns = [*names, "part.drafter as drafter", *(f"part.{name} as {name}" for name in DRAFTER_COUNTS)]
    columns += [f"0 as {name}" for name in _COUNTS if name not in DRAFTER_COUNTS]
    columns += [f"null::bigint[] as {name}" for name in _POSITIONS]
    columns += [f"0 as cause_{cause}" for cause in ROUND_CAUSES]
    times = ("total", "time_to_first_token", *STAGES)
    columns += [f"null::double as time_{name}" for name in times]
    return (
        f"select {', '.join(columns)}, temperature, started_at"
        " from (select *, unnest(by_drafter) as part from requests) order by started_at"
    )


def _floats(table: pa.Table, name: str) -> Values:
    column: Any = table[name].cast(pa.float64())
    return np.asarray(column.to_numpy(), dtype=np.float64).copy()


def _strings(table: pa.Table, name: str) -> Names:
    filled: Any = pc.fill_null(cast("Any", table[name].combine_chunks()), "")
    encoded = filled.dictionary_encode()
    known = np.array([*encoded.dictionary.to_pylist(), ""], dtype=object)
    return np.asarray(known[encoded.indices.to_numpy(zero_copy_only=False)], dtype=object)


def _matrix(table: pa.Table, name: str) -> Values:
    column: Any = table[name].combine_chunks()
    lengths = np.nan_to_num(
        np.asarray(pc.list_value_length(column).cast(pa.float64()).to_numpy(zero_copy_only=False))
    ).astype(np.int64)
    values = np.asarray(column.flatten().to_numpy(zero_copy_only=False), dtype=np.float64)
    matrix = np.zeros((len(lengths), int(lengths.max(initial=0))))
    rows = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    matrix[rows, np.arange(len(values)) - starts] = values
    return matrix


def _temperature_buckets(temperatures: Values) -> Names:
    edges = np.array([edge for _, edge in TEMPERATURE_EDGES])
    names = np.array([*(name for name, _ in TEMPERATURE_EDGES), ">1"], dtype=object)
    return np.asarray(names[np.searchsorted(edges, temperatures, side="left")], dtype=object)
