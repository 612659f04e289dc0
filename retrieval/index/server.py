"""The served index: a Qdrant server (or cluster) by URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx
from qdrant_client import QdrantClient
from qdrant_client import models as qdrant
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from retrieval.config import IndexConfig
from retrieval.fusion import Candidates, Lists
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

Value = TypeVar("Value")
_UPSERT_POINTS = 64


def connect(config: IndexConfig) -> QdrantClient:
    """A client for ``config.url``; TLS follows from ``https://``."""
    options: dict[str, Any] = {"verify": str(config.tls_ca)} if config.tls_ca else {}
    return QdrantClient(
        url=config.url,
        api_key=config.api_key.get_secret_value() if config.api_key else None,
        timeout=max(1, round(config.timeout_seconds)),
        check_compatibility=False,
        **options,
    )


class ServerIndex(PointReader):
    """See ``retrieval.index.record.Index``. Several writers and readers may share the collection.

    Readers see a new version of a document only once all of it is written, and never two versions; of two
    writers of one document the one that started later wins.
    """

    def __init__(
        self, client: QdrantClient, collection: str, dimension: int | None, num_retries: int = 3
    ) -> None:
        """Creates the collection, with its payload indexes, when it doesn't exist (``dimension`` None: it does)."""
        self._client = client
        self._collection = collection
        self._num_retries = num_retries
        if dimension is not None:
            self._call(lambda: self._create(dimension))

    def replace(self, document: IndexedDocument) -> None:
        stamp = time.time_ns() // 1000
        for start in range(0, len(document.chunks), _UPSERT_POINTS):
            points = [
                qdrant.PointStruct(
                    id=chunk.id,
                    vector={
                        DENSE: chunk.dense.tolist(),
                        SPARSE: qdrant.SparseVector(
                            indices=list(chunk.sparse.indices), values=list(chunk.sparse.values)
                        ),
                    },
                    payload=payload_of(document, chunk, stamp, live=0),
                )
                for chunk in document.chunks[start : start + _UPSERT_POINTS]
            ]
            self._upsert(points)
        ids: list[qdrant.ExtendedPointId] = [chunk.id for chunk in document.chunks]
        if ids:
            self._call(lambda: self._client.set_payload(self._collection, {"live": 1}, ids, wait=True))
        self._delete_older(document.tenant, document.id, stamp)

    def delete(self, tenant: str, document_id: str) -> bool:
        found = self._scroll(matching(tenant=tenant, document_id=document_id), ["live"])
        if found:
            ids: list[qdrant.ExtendedPointId] = [point_id for point_id, _ in found]
            self._remove(qdrant.PointIdsList(points=ids))
        return any(payload["live"] for _, payload in found)

    def _points(self, ids: Sequence[str], fields: Sequence[str]) -> list[Point]:
        if not ids:
            return []
        wanted: list[qdrant.ExtendedPointId] = list(ids)
        records = self._call(
            lambda: self._client.retrieve(self._collection, wanted, with_payload=list(fields))
        )
        return [(str(record.id), record.payload or {}) for record in records]

    def _nearest(self, query: IndexQuery, where: Sequence[Condition]) -> Lists:
        condition, limit = _filter(where), query.fusion.num_candidates
        corpus = qdrant.IdfCorpusParams(corpus=_filter(matching(tenant=query.tenant, live=1)))
        requests: dict[str, qdrant.QueryRequest] = {}
        if query.dense is not None:
            requests[DENSE] = qdrant.QueryRequest(
                query=query.dense.tolist(), using=DENSE, filter=condition, limit=limit
            )
        if query.sparse is not None and query.sparse.indices:
            vector = qdrant.SparseVector(indices=list(query.sparse.indices), values=list(query.sparse.values))
            requests[SPARSE] = qdrant.QueryRequest(
                query=vector,
                using=SPARSE,
                filter=condition,
                limit=limit,
                params=qdrant.SearchParams(idf=corpus),
            )
        if not requests:
            return Lists()
        responses = self._call(
            lambda: self._client.query_batch_points(self._collection, requests=list(requests.values()))
        )
        lists: dict[str, Candidates] = {
            name: [(str(point.id), point.score) for point in response.points]
            for name, response in zip(requests, responses, strict=True)
        }
        return Lists(lists.get(DENSE, ()), lists.get(SPARSE, ()))

    def count(self) -> int:
        return self._call(
            lambda: (
                self._client.count(self._collection, count_filter=_filter(matching(live=1)), exact=True).count
            )
        )

    def optimize(self) -> None:
        """The server optimises by itself."""

    def close(self) -> None:
        self._client.close()

    def _create(self, dimension: int) -> None:
        if self._client.collection_exists(self._collection):
            return
        self._client.create_collection(
            self._collection,
            vectors_config={DENSE: qdrant.VectorParams(size=dimension, distance=qdrant.Distance.COSINE)},
            sparse_vectors_config={SPARSE: qdrant.SparseVectorParams(modifier=qdrant.Modifier.IDF)},
        )
        tenant = qdrant.KeywordIndexParams(type=qdrant.KeywordIndexType.KEYWORD, is_tenant=True)
        schemas: dict[str, Any] = dict.fromkeys(KEYWORD_FIELDS, qdrant.PayloadSchemaType.KEYWORD)
        schemas |= dict.fromkeys(("chunk_index", "live", "stamp"), qdrant.PayloadSchemaType.INTEGER)
        for name, schema in {"tenant": tenant, **schemas}.items():
            self._client.create_payload_index(self._collection, name, field_schema=schema)

    def _delete_older(self, tenant: str, document_id: str, stamp: int) -> None:
        """Leave the newest live version alone: this writer's, or that of one who started later."""
        live = self._scroll(
            matching(tenant=tenant, document_id=document_id, live=1, chunk_index=0), ["stamp"]
        )
        newest = max([stamp, *(payload["stamp"] for _, payload in live)])
        older = qdrant.FieldCondition(key="stamp", range=qdrant.Range(lt=newest))
        must: list[Any] = [*_conditions(matching(tenant=tenant, document_id=document_id)), older]
        self._remove(qdrant.FilterSelector(filter=qdrant.Filter(must=must)))

    def _upsert(self, points: list[qdrant.PointStruct]) -> None:
        self._call(lambda: self._client.upsert(self._collection, points, wait=True))

    def _remove(self, selector: Any) -> None:
        self._call(lambda: self._client.delete(self._collection, selector, wait=True))

    def _page(
        self, where: Sequence[Condition], fields: Sequence[str], limit: int, offset: str | None
    ) -> tuple[list[Point], str | None]:
        records, following = self._call(
            lambda: self._client.scroll(
                self._collection,
                scroll_filter=_filter(where),
                limit=limit,
                offset=offset,
                with_payload=list(fields),
            )
        )
        return [(str(r.id), r.payload or {}) for r in records], None if following is None else str(following)

    def _call(self, function: Callable[[], Value]) -> Value:
        """``function()``, tried again after failures of transport; every operation here may be repeated."""
        retrying = Retrying(
            retry=retry_if_exception(_is_transient),
            stop=stop_after_attempt(self._num_retries + 1),
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            reraise=True,
        )
        try:
            return retrying(function)
        except (UnexpectedResponse, ResponseHandlingException, httpx.HTTPError) as error:
            raise RetrievalError(
                f"The Qdrant server could not be asked: {_first_line(error)}", "index_unavailable"
            ) from error


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, UnexpectedResponse):
        return error.status_code in (429, 502, 503, 504)
    return isinstance(error, (ResponseHandlingException, httpx.TransportError))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _conditions(where: Sequence[Condition]) -> list[qdrant.FieldCondition]:
    return [
        qdrant.FieldCondition(
            key=name,
            match=qdrant.MatchAny(any=list(values))
            if len(values) > 1
            else qdrant.MatchValue(value=values[0]),
        )
        for name, values in where
    ]


def _filter(where: Sequence[Condition]) -> qdrant.Filter:
    return qdrant.Filter(must=[*_conditions(where)])
