"""``/v1/acceptance`` and ``/metrics``: what the Recorder knows of past requests."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from rag_service.api.face import face_of
from rag_service.api.replies import ERRORS
from rag_service.config import OTHER_DOMAIN
from rag_service.errors import ApiError
from rag_service.report_query import ReportQuery, ReportQueryError

router = APIRouter(tags=["reports"])
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TABLES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The report.",
        "content": {"text/csv": {"schema": {"type": "string"}}, "application/vnd.apache.parquet": {}},
    }
}


@router.get("/v1/acceptance", response_model=dict[str, Any], responses={**ERRORS, **_TABLES})
async def acceptance(
    request: Request,
    window: str | None = None,
    since: str | None = None,
    until: str | None = None,
    domain: str | None = None,
    group_by: str | None = None,
    bucket: str | None = None,
    format: Literal["json", "csv", "parquet"] = "json",
) -> Response:
    """Acceptance rate with its interval, and latency by stage, by domain.

    `window`: 30m, 24h, 7d; or `since` and `until` in Unix seconds. `group_by`: draft, target, drafter,
    temperature, mode. `bucket`: a time series in steps of that length, or auto.
    """
    face = face_of(request)
    await face.admit(request, "analyst")
    query = dict(request.query_params)
    try:
        ReportQuery.of(query, time.time(), (*face.settings.service.domains, OTHER_DOMAIN))
        query.pop("format", None)
        report = await face.backends.recorder.acceptance(query)
    except ReportQueryError as error:
        raise ApiError(400, str(error), param=error.param, code="invalid_value") from None
    if format == "json":
        return JSONResponse(report)
    # Here, since these renderers bring pyarrow, which a gateway that is asked for none should not carry.
    from rag_service.report_rendering import csv_of, parquet_of

    attachment = {"Content-Disposition": f'attachment; filename="acceptance.{format}"'}
    if format == "csv":
        return Response(csv_of(report), media_type="text/csv", headers=attachment)
    return Response(parquet_of(report), media_type="application/vnd.apache.parquet", headers=attachment)


@router.get("/metrics", response_class=PlainTextResponse, responses=ERRORS)
async def metrics(request: Request) -> Response:
    """Prometheus' text format. Open to all unless `auth.public_metrics` is off."""
    face = face_of(request)
    if not face.settings.auth.public_metrics:
        face.principal(request, "analyst")
    return Response(await face.backends.recorder.metrics(), media_type=METRICS_TYPE)
