"""The embedded index: Qdrant Edge in one folder, for one process.

Chosen over the Python client's local mode by measurement (docs/retrieval.md): that one takes milliseconds an
upsert and tens of milliseconds a search at 10,000 chunks, this one a fraction of either.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import qdrant_edge as edge
from filelock import FileLock, Timeout

from retrieval.fusion import Lists
from retrieval.index.reader import PointReader
from retrieval.index.record import (
    DENSE,
    KEYWORD_FIELDS,
    SPARSE,
    Condition,
    IndexedDocument,
    IndexQuery,
    Point,
    matching,
    payload_of,
)
from retrieval.types import RetrievalError

_UPSERT_POINTS = 256
_EXACT_KILOBYTES = 65_536
"""Up to here (some 40,000 chunks) dense search is exact: building a graph would cost more than it saves."""
_DIRTY = "DIRTY"


class ReadWriteLock:
    """Many readers or one writer; a waiting writer goes before new readers."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writers_waiting = 0
        self._writing = False

    @contextmanager
    def read(self) -> Iterator[None]:
        with self._condition:
            while self._writing or self._writers_waiting:
                self._condition.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        with self._condition:
            self._writers_waiting += 1
            while self._writing or self._readers:
                self._condition.wait()
            self._writers_waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()


class EdgeIndex(PointReader):
    """See ``retrieval.index.record.Index``. Thread-safe; a second process is refused with a clear error."""

    def __init__(self, folder: Path, dimension: int | None, quantization: str = "none") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file_lock = FileLock(folder / "LOCK")
        try:
            self._file_lock.acquire(timeout=0)
        except Timeout:
            raise RetrievalError(
                f"The index in {folder} is in use by another process; ask the running service instead.",
                "index_locked",
            ) from None
        self._visible = ReadWriteLock()
        self._write_lock = threading.Lock()
        self._stamps = itertools.count(time.time_ns() // 1000)
        try:
            self._shard = _open(folder / "shard", dimension, quantization)
            if (folder / _DIRTY).exists():
                self._recover()
        except BaseException:
            self._file_lock.release()
            raise

    def replace(self, document: IndexedDocument) -> None:
        with self._write_lock:
            (self._folder / _DIRTY).touch()
            old = self._scroll(matching(tenant=document.tenant, document_id=document.id), ["live"])
            stamp = next(self._stamps)
            new_ids = [chunk.id for chunk in document.chunks]
            for start in range(0, len(document.chunks), _UPSERT_POINTS):
                self._update(
                    edge.UpdateOperation.upsert_points(
                        [
                            edge.Point(
                                id=chunk.id,
                                vector={
                                    DENSE: chunk.dense.tolist(),
                                    SPARSE: edge.SparseVector(
                                        list(chunk.sparse.indices), list(chunk.sparse.values)
                                    ),
                                },
                                payload=payload_of(document, chunk, stamp, live=0),
                            )
                            for chunk in document.chunks[start : start + _UPSERT_POINTS]
                        ]
                    )
                )
            stale = [point_id for point_id, _ in old if point_id not in set(new_ids)]
            with self._visible.write():
                if new_ids:
                    self._update(edge.UpdateOperation.set_payload([*new_ids], {"live": 1}))
                if stale:
                    self._update(edge.UpdateOperation.delete_points([*stale]))

    def delete(self, tenant: str, document_id: str) -> bool:
        with self._write_lock:
            points = self._scroll(matching(tenant=tenant, document_id=document_id), ["live"])
            if points:
                with self._visible.write():
                    self._update(edge.UpdateOperation.delete_points([point_id for point_id, _ in points]))
            return any(payload["live"] for _, payload in points)

    def _reading(self) -> AbstractContextManager[None]:
        return self._visible.read()

    def _points(self, ids: Sequence[str], fields: Sequence[str]) -> list[Point]:
        if not ids:
            return []
        wanted = [UUID(chunk_id) for chunk_id in ids]
        records = self._shard.retrieve([*wanted], with_payload=list(fields), with_vector=False)
        return [(str(record.id), record.payload or {}) for record in records]

    def _nearest(self, query: IndexQuery, where: Sequence[Condition]) -> Lists:
        condition, limit = _filter(where), query.fusion.num_candidates
        dense: list[tuple[str, float]] = []
        sparse: list[tuple[str, float]] = []
        if query.dense is not None:
            dense = self._query(edge.Query.Nearest(query.dense.tolist(), using=DENSE), condition, limit)
        if query.sparse is not None and query.sparse.indices:
            vector = edge.SparseVector(list(query.sparse.indices), list(query.sparse.values))
            # Term statistics of the tenant's own chunks: another's documents must not show through scores.
            corpus = edge.IdfParams(corpus=_filter(matching(tenant=query.tenant, live=1)))
            nearest = edge.Query.Nearest(vector, using=SPARSE)
            sparse = self._query(nearest, condition, limit, edge.SearchParams(idf=corpus))
        return Lists(dense, sparse)

    def _query(
        self, query: edge.Query, condition: edge.Filter, limit: int, params: edge.SearchParams | None = None
    ) -> list[tuple[str, float]]:
        request = edge.QueryRequest(limit=limit, query=query, filter=condition, params=params)
        return [(str(point.id), float(point.score)) for point in self._shard.query(request)]

    def count(self) -> int:
        with self._visible.read():
            return int(self._shard.count(edge.CountRequest(exact=True, filter=_filter(matching(live=1)))))

    def optimize(self) -> None:
        """Merge and clean up segments; readers go on meanwhile."""
        with self._write_lock:
            self._shard.optimize()
            self._shard.flush()

    def close(self) -> None:
        """Flush and release the folder. Calling it again does nothing."""
        if not self._file_lock.is_locked:
            return
        with self._write_lock, self._visible.write():
            self._shard.flush()
            self._shard.close()
            (self._folder / _DIRTY).unlink(missing_ok=True)
            self._file_lock.release()

    def _update(self, operation: Any) -> None:
        try:
            self._shard.update(operation)
        except Exception as error:  # the binding raises plain Exception
            raise RetrievalError(f"The index could not be written: {error}", "index_write_failed") from error

    def _page(
        self, where: Sequence[Condition], fields: Sequence[str], limit: int, offset: str | None
    ) -> tuple[list[Point], str | None]:
        request = edge.ScrollRequest(
            offset=offset, limit=limit, filter=_filter(where), with_payload=list(fields)
        )
        try:
            with self._visible.read():
                records, following = self._shard.scroll(request)
        except ValueError:
            raise RetrievalError("The offset is none that a listing returned.", "invalid_offset") from None
        return [(str(r.id), r.payload or {}) for r in records], None if following is None else str(following)

    def _recover(self) -> None:
        """After a hard kill: finish every replacement whose new version is complete, undo the others."""
        versions: dict[tuple[str, str], dict[int, list[tuple[str, dict[str, Any]]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        fields = ["tenant", "document_id", "stamp", "num_chunks", "live"]
        for point_id, payload in self._scroll([], fields):
            versions[payload["tenant"], payload["document_id"]][payload["stamp"]].append((point_id, payload))
        for by_stamp in versions.values():
            complete = [
                stamp for stamp, points in by_stamp.items() if len(points) == points[0][1]["num_chunks"]
            ]
            for stamp, points in by_stamp.items():
                ids = [point_id for point_id, _ in points]
                if not complete or stamp != max(complete):
                    self._update(edge.UpdateOperation.delete_points([*ids]))
                elif not all(payload["live"] for _, payload in points):
                    self._update(edge.UpdateOperation.set_payload([*ids], {"live": 1}))


def _open(folder: Path, dimension: int | None, quantization: str) -> edge.EdgeShard:
    if (folder / "edge_config.json").exists():
        return edge.EdgeShard.load(str(folder))
    if dimension is None:
        raise RetrievalError(f"There is no index in {folder}.", "index_missing")
    folder.mkdir(parents=True, exist_ok=True)
    config = edge.EdgeConfig(
        vectors={DENSE: edge.EdgeVectorParams(size=dimension, distance=edge.Distance.Cosine)},
        sparse_vectors={SPARSE: edge.EdgeSparseVectorParams(modifier=edge.Modifier.Idf)},
        optimizers=edge.EdgeOptimizersConfig(indexing_threshold=_EXACT_KILOBYTES),
        quantization_config=edge.ScalarQuantizationConfig(type=edge.ScalarType.Int8, always_ram=True)
        if quantization == "int8"
        else None,
    )
    shard = edge.EdgeShard.create(str(folder), config)
    shard.update(edge.UpdateOperation.create_field_index("tenant", edge.KeywordIndexParams(is_tenant=True)))
    for name in KEYWORD_FIELDS:
        shard.update(edge.UpdateOperation.create_field_index(name, edge.PayloadSchemaType.Keyword))
    for name in ("chunk_index", "live"):
        shard.update(edge.UpdateOperation.create_field_index(name, edge.PayloadSchemaType.Integer))
    return shard


def _filter(where: Sequence[Condition]) -> edge.Filter:
    must: list[Any] = [edge.FieldCondition(key=name, match=_match(values)) for name, values in where]
    return edge.Filter(must=must) if must else edge.Filter()


def _match(values: Sequence[str | int]) -> edge.MatchValue | edge.MatchAny:
    if len(values) == 1:
        return edge.MatchValue(values[0])
    any_of: Any = list(values)  # all texts or all numbers, which the annotation can't say
    return edge.MatchAny(any_of)
