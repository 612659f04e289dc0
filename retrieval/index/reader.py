"""Reading that both engines share, over the few calls in which they differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from retrieval.fusion import Fused, Lists
from retrieval.index.record import (
    HIT_FIELDS,
    INFO_FIELDS,
    SOURCE_FIELDS,
    Condition,
    IndexQuery,
    Point,
    filter_conditions,
    hits_of,
    info_of,
    matching,
    newest_only,
    passage_of,
    source_of,
)
from retrieval.types import DocumentInfo, Passage, ScoredPassage

_PAGE_POINTS = 500
_MIN_LOOKED_AT = 20
"""Of at least so many candidates the document is looked up, however few are wanted."""


class PointReader(ABC):
    """Search and listings of ``retrieval.index.record.Index``. On a server a reader may come between a
    version's going live and its predecessor's removal, so only the newest version of a document counts."""

    @abstractmethod
    def _page(
        self, where: Sequence[Condition], fields: Sequence[str], limit: int, offset: str | None
    ) -> tuple[list[Point], str | None]:
        """Some points that meet every condition, and the offset of the next page."""

    @abstractmethod
    def _points(self, ids: Sequence[str], fields: Sequence[str]) -> list[Point]:
        """The points of these ids, in any order; those that are gone are left out."""

    @abstractmethod
    def _nearest(self, query: IndexQuery, where: Sequence[Condition]) -> Lists:
        """The best ``query.fusion.num_candidates`` points of each list."""

    def _reading(self) -> AbstractContextManager[None]:
        """Within it ``_points`` and ``_nearest`` see one state of the index, where the engine can do that."""
        return nullcontext()

    def version(self, tenant: str, document_id: str) -> str | None:
        point = self._first_chunk(tenant, document_id, ["version", "stamp"])
        return str(point["version"]) if point else None

    def search(self, query: IndexQuery) -> list[ScoredPassage]:
        where = [*matching(live=1), *filter_conditions(query)]
        fields = [*HIT_FIELDS, "tokens"] if query.with_token_vectors else list(HIT_FIELDS)
        with self._reading():
            found = self._nearest(query, where)
            ranked = query.fusion.fuse(found)
            points: dict[str, dict[str, Any]] = {}
            if query.fusion.document_weight and found.dense and found.sparse:
                looked_at = ranked[: max(query.limit, _MIN_LOOKED_AT)]
                points = dict(self._points([candidate.id for candidate in looked_at], fields))
                ranked = self._lifted(query, where, found, [c for c in looked_at if c.id in points], points)
            ranked = ranked[: query.limit]
            missing = [candidate.id for candidate in ranked if candidate.id not in points]
            points.update(self._points(missing, fields) if missing else [])
        return hits_of(ranked, list(points.items()))

    def _lifted(
        self,
        query: IndexQuery,
        where: Sequence[Condition],
        found: Lists,
        looked_at: Sequence[Fused],
        points: Mapping[str, Mapping[str, Any]],
    ) -> list[Fused]:
        """The candidates looked at and the other chunks of the best one's document, lifted by their documents."""
        if not looked_at:
            return []
        document_of = {candidate.id: str(points[candidate.id]["document_id"]) for candidate in looked_at}
        best = document_of[looked_at[0].id]
        inside = self._nearest(query, [*where, ("document_id", [best])])
        document_of |= dict.fromkeys(inside.ids, best)
        candidates = [c for c in query.fusion.fuse(found, inside) if c.id in document_of]
        return query.fusion.lift(candidates, document_of)

    def passages(self, tenant: str, document_id: str, indices: Sequence[int] | None = None) -> list[Passage]:
        where = matching(tenant=tenant, document_id=document_id, live=1)
        if indices is not None:
            where.append(("chunk_index", list(indices)))
        points = sorted(
            newest_only(self._scroll(where, HIT_FIELDS)), key=lambda point: point[1]["chunk_index"]
        )
        return [passage_of(point_id, payload) for point_id, payload in points]

    def documents(
        self, tenant: str, domain: str | None, limit: int, offset: str | None
    ) -> tuple[list[DocumentInfo], str | None]:
        where = matching(tenant=tenant, live=1, chunk_index=0)
        if domain is not None:
            where += matching(domain=domain)
        points, following = self._page(where, INFO_FIELDS, limit, offset)
        return [info_of(payload) for _, payload in points], following

    def document(self, tenant: str, document_id: str) -> DocumentInfo | None:
        point = self._first_chunk(tenant, document_id, [*INFO_FIELDS, "stamp"])
        return info_of(point) if point else None

    def text(self, tenant: str, document_id: str) -> str:
        point = self._first_chunk(tenant, document_id, ["document_text", "stamp"])
        return str(point["document_text"]) if point else ""

    def sources(self, limit: int, offset: str | None) -> tuple[list[dict[str, Any]], str | None]:
        points, following = self._page(matching(live=1, chunk_index=0), SOURCE_FIELDS, limit, offset)
        return [source_of(payload) for _, payload in points], following

    def _first_chunk(self, tenant: str, document_id: str, fields: Sequence[str]) -> dict[str, Any] | None:
        """The payload of the newest live version's first chunk."""
        where = matching(tenant=tenant, document_id=document_id, live=1, chunk_index=0)
        payloads = [payload for _, payload in self._scroll(where, fields)]
        return max(payloads, key=lambda payload: payload["stamp"], default=None)

    def _scroll(self, where: Sequence[Condition], fields: Sequence[str]) -> list[Point]:
        """Every point that meets the conditions."""
        points: list[Point] = []
        offset: str | None = None
        while True:
            page, offset = self._page(where, fields, _PAGE_POINTS, offset)
            points += page
            if offset is None:
                return points
