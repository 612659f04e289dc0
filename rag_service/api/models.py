"""``/v1/models`` and ``/v1/domains``: what may be named in a request."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from rag_service.api.face import face_of
from rag_service.api.replies import ERRORS, DomainList, Model, ModelList
from rag_service.question import check_model

router = APIRouter(tags=["models"])
_STARTED_AT = int(time.time())


@router.get("/v1/models", response_model=ModelList, responses=ERRORS)
async def list_models(request: Request) -> Response:
    """The served model."""
    face = face_of(request)
    face.principal(request)
    return JSONResponse({"object": "list", "data": [_model_object(face.settings.model_name)]})


@router.get("/v1/models/{model:path}", response_model=Model, responses=ERRORS)
async def get_model(model: str, request: Request) -> Response:
    """One model by its id."""
    face = face_of(request)
    face.principal(request)
    check_model(model, face.settings)
    return JSONResponse(_model_object(face.settings.model_name))


@router.get("/v1/domains", response_model=DomainList, responses=ERRORS)
async def list_domains(request: Request) -> Response:
    """The domains that documents and questions may have."""
    face = face_of(request)
    face.principal(request)
    domains = [{"id": domain, "object": "domain"} for domain in face.settings.service.domains]
    return JSONResponse({"object": "list", "data": domains})


def _model_object(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": _STARTED_AT, "owned_by": "rag-service"}
