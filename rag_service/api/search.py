"""``POST /v1/search``: retrieval alone."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, field_validator

from rag_service.answer import Progress
from rag_service.api.face import face_of
from rag_service.api.replies import ERRORS, SearchReply
from rag_service.errors import ApiError
from rag_service.figures import server_timing, timing_figures
from rag_service.question import check_domain, check_length
from rag_service.schemas import Body, scalar_filters
from retrieval.types import ScoredPassage, SearchRequest

router = APIRouter(tags=["search"])


class SearchBody(Body):
    """Search, and rerank unless ``rerank`` is false. Without ``domain`` all domains are searched."""

    query: str = Field(min_length=1, examples=["When does the library open?"])
    domain: str | None = None
    top_k: int = Field(default=10, ge=1, le=100)
    rerank: bool | None = None
    filters: dict[str, Any] = Field(default_factory=dict)
    document_ids: list[str] = Field(default_factory=list, max_length=1000)

    _filters = field_validator("filters")(scalar_filters)


@router.post("/v1/search", response_model=SearchReply, responses=ERRORS)
async def search(body: SearchBody, request: Request) -> Response:
    """The passages nearest to a query, best first."""
    face = face_of(request)
    principal = await face.admit(request, "search")
    settings = face.settings
    check_domain(body.domain, settings, "domain")
    check_length(body.query, settings, "query")
    if not body.query.strip():
        raise ApiError(400, "The query is empty.", param="query", code="invalid_value")
    wanted = SearchRequest(
        query=body.query,
        tenant=principal.tenant,
        domain=body.domain,
        top_k=max(body.top_k, settings.prompt.candidates),
        filters=body.filters,
        document_ids=tuple(body.document_ids),
    )
    progress = Progress()
    face.gate.enter()
    try:
        rerank = settings.prompt.rerank if body.rerank is None else body.rerank
        passages = await face.pipeline.grounding.search_within_deadline(wanted, rerank, progress)
    finally:
        face.gate.leave()
    value = {
        "object": "list",
        "data": [found_object(scored) for scored in passages[: body.top_k]],
        "timings": timing_figures(progress.stage_seconds, None, progress.elapsed()),
    }
    return JSONResponse(value, headers={"Server-Timing": server_timing(progress.stage_seconds)})


def found_object(scored: ScoredPassage) -> dict[str, Any]:
    """A found passage; what the index keeps of it is in ``metadata``."""
    metadata = dict(scored.passage.metadata)
    return {
        "document_id": scored.passage.document_id,
        "chunk_id": scored.passage.chunk_id,
        "title": str(metadata.get("title") or ""),
        "text": scored.passage.text,
        "score": scored.score,
        "domain": metadata.get("domain"),
        "start": metadata.get("start"),
        "end": metadata.get("end"),
        "metadata": metadata,
    }
