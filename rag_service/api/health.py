"""``/healthz`` and ``/readyz``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from rag_service.api.face import face_of
from rag_service.api.replies import ERRORS, Alive, Ready

router = APIRouter(tags=["health"])
READY_SECONDS = 6.0


@router.get("/healthz", response_model=Alive)
async def alive() -> Response:
    """The process answers; nothing more is said."""
    return JSONResponse({"status": "alive"})


@router.get("/v1/status", response_model=dict[str, Any], responses=ERRORS)
async def status(request: Request) -> Response:
    """What this gateway and the target are doing: requests at work, queue, key-value cache, breakers."""
    face = face_of(request)
    face.principal(request, "analyst")
    gateway = {"num_in_flight": face.gate.num_in_flight, "retry_after_seconds": face.gate.wait_seconds()}
    return JSONResponse({"gateway": gateway, "generator": await face.backends.generator.status()})


@router.get("/readyz", response_model=Ready, responses={503: {"model": Ready}})
async def ready(request: Request) -> Response:
    """Models loaded and index reachable; otherwise 503 and what is not, by name."""
    backends = face_of(request).backends
    names = ("retriever", "reranker", "generator", "recorder")
    checks = (
        backend.ready()
        for backend in (
            backends.retriever,
            backends.reranker,
            backends.generator,
            backends.recorder,
        )
    )
    found = await asyncio.gather(
        *(asyncio.wait_for(check, READY_SECONDS) for check in checks), return_exceptions=True
    )
    missing: dict[str, str] = {}
    for name, result in zip(names, found, strict=True):
        if isinstance(result, dict):
            missing.update(result)
        elif isinstance(result, TimeoutError):
            missing[name] = "does not answer"
        else:
            missing[name] = f"cannot be asked ({type(result).__name__})"
    status = "not_ready" if missing else "ready"
    return JSONResponse({"status": status, "not_ready": missing}, status_code=503 if missing else 200)
