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
from retrieval.index.record import (
    DENSE,
    HIT_FIELDS,
    INFO_FIELDS,
    KEYWORD_FIELDS,
    SOURCE_FIELDS,
    SPARSE,
    IndexedDocument,
    IndexQuery,
    filter_conditions,
    hits_of,
    info_of,
    newest_only,
    passage_of,
    payload_of,
    source_of,
)
from retrieval.types import DocumentInfo, Passage, RetrievalError, ScoredPassage

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


class ServerIndex:
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

    def version(self, tenant: str, document_id: str) -> str | None:
        condition = _match(tenant=tenant, document_id=document_id, live=1, chunk_index=0)
        points = self._scroll(condition, ["version", "stamp"])
        return str(max(points, key=lambda point: point[1]["stamp"])[1]["version"]) if points else None

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
        found = self._scroll(_match(tenant=tenant, document_id=document_id), ["live"])
        if found:
            ids: list[qdrant.ExtendedPointId] = [point_id for point_id, _ in found]
            self._remove(qdrant.PointIdsList(points=ids))
        return any(payload["live"] for _, payload in found)

    def search(self, query: IndexQuery) -> list[ScoredPassage]:
        condition, size = _condition(query), query.fusion.num_candidates
        corpus = qdrant.SearchParams(idf=qdrant.IdfCorpusParams(corpus=_match(tenant=query.tenant, live=1)))
        requests: dict[str, qdrant.QueryRequest] = {}
        if query.dense is not None:
            requests[DENSE] = qdrant.QueryRequest(
                query=query.dense.tolist(), using=DENSE, filter=condition, limit=size
            )
        if query.sparse is not None and query.sparse.indices:
            vector = qdrant.SparseVector(indices=list(query.sparse.indices), values=list(query.sparse.values))
            requests[SPARSE] = qdrant.QueryRequest(
                query=vector, using=SPARSE, filter=condition, limit=size, params=corpus
            )
        if not requests:
            return []
        responses = self._call(
            lambda: self._client.query_batch_points(self._collection, requests=list(requests.values()))
        )
        lists = {
            name: [(str(point.id), point.score) for point in response.points]
            for name, response in zip(requests, responses, strict=True)
        }
        ranked = query.fusion.fuse(lists.get(DENSE, []), lists.get(SPARSE, []))[: query.limit]
        fields = [*HIT_FIELDS, "tokens"] if query.with_token_vectors else list(HIT_FIELDS)
        ids: list[qdrant.ExtendedPointId] = [candidate.id for candidate in ranked]
        records = self._call(lambda: self._client.retrieve(self._collection, ids, with_payload=fields))
        return hits_of(ranked, [(str(record.id), record.payload or {}) for record in records])

    def passages(self, tenant: str, document_id: str, indices: Sequence[int] | None = None) -> list[Passage]:
        must: list[Any] = _conditions(tenant=tenant, document_id=document_id, live=1)
        if indices is not None:
            must.append(qdrant.FieldCondition(key="chunk_index", match=qdrant.MatchAny(any=list(indices))))
        points = self._scroll(qdrant.Filter(must=must), list(HIT_FIELDS))
        kept = sorted(newest_only(points), key=lambda point: point[1]["chunk_index"])
        return [passage_of(point_id, payload) for point_id, payload in kept]

    def documents(
        self, tenant: str, domain: str | None, limit: int, offset: str | None
    ) -> tuple[list[DocumentInfo], str | None]:
        conditions: dict[str, str | int] = {"tenant": tenant, "live": 1, "chunk_index": 0}
        if domain is not None:
            conditions["domain"] = domain
        points, following = self._page(_match(**conditions), INFO_FIELDS, limit, offset)
        return [info_of(payload) for _, payload in points], following

    def document(self, tenant: str, document_id: str) -> DocumentInfo | None:
        condition = _match(tenant=tenant, document_id=document_id, live=1, chunk_index=0)
        points = self._scroll(condition, [*INFO_FIELDS, "stamp"])
        return info_of(max(points, key=lambda point: point[1]["stamp"])[1]) if points else None

    def text(self, tenant: str, document_id: str) -> str:
        condition = _match(tenant=tenant, document_id=document_id, live=1, chunk_index=0)
        points = self._scroll(condition, ["document_text", "stamp"])
        return str(max(points, key=lambda point: point[1]["stamp"])[1]["document_text"]) if points else ""

    def sources(self, limit: int, offset: str | None) -> tuple[list[dict[str, Any]], str | None]:
        points, following = self._page(_match(live=1, chunk_index=0), SOURCE_FIELDS, limit, offset)
        return [source_of(payload) for _, payload in points], following

    def count(self) -> int:
        return self._call(
            lambda: self._client.count(self._collection, count_filter=_match(live=1), exact=True).count
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
        live = self._scroll(_match(tenant=tenant, document_id=document_id, live=1, chunk_index=0), ["stamp"])
        newest = max([stamp, *(payload["stamp"] for _, payload in live)])
        older = qdrant.FieldCondition(key="stamp", range=qdrant.Range(lt=newest))
        must: list[Any] = [*_conditions(tenant=tenant, document_id=document_id), older]
        self._remove(qdrant.FilterSelector(filter=qdrant.Filter(must=must)))

    def _upsert(self, points: list[qdrant.PointStruct]) -> None:
        self._call(lambda: self._client.upsert(self._collection, points, wait=True))

    def _remove(self, selector: Any) -> None:
        self._call(lambda: self._client.delete(self._collection, selector, wait=True))

    def _page(
        self, condition: qdrant.Filter, fields: Sequence[str], limit: int, offset: str | None
    ) -> tuple[list[tuple[str, dict[str, Any]]], str | None]:
        records, following = self._call(
            lambda: self._client.scroll(
                self._collection,
                scroll_filter=condition,
                limit=limit,
                offset=offset,
                with_payload=list(fields),
            )
        )
        return [(str(r.id), r.payload or {}) for r in records], None if following is None else str(following)

    def _scroll(self, condition: qdrant.Filter, fields: list[str]) -> list[tuple[str, dict[str, Any]]]:
        points: list[tuple[str, dict[str, Any]]] = []
        offset: str | None = None
        while True:
            page, offset = self._page(condition, fields, 500, offset)
            points += page
            if offset is None:
                return points

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


def _conditions(**fields: str | int) -> list[qdrant.FieldCondition]:
    return [
        qdrant.FieldCondition(key=name, match=qdrant.MatchValue(value=value))
        for name, value in fields.items()
    ]


def _match(**fields: str | int) -> qdrant.Filter:
    return qdrant.Filter(must=[*_conditions(**fields)])


def _condition(query: IndexQuery) -> qdrant.Filter:
    must: list[Any] = [*_conditions(live=1)]
    must += [
        qdrant.FieldCondition(key=name, match=qdrant.MatchAny(any=allowed))
        for name, allowed in filter_conditions(query)
    ]
    return qdrant.Filter(must=must)
