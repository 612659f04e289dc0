"""What the routes share: settings, pipeline, access and limits, hung on the application's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from fastapi import Request

from rag_service.auth import Gatekeeper, Principal
from rag_service.config import Settings
from rag_service.limits import Gate, RateLimiter
from rag_service.pipeline import Backends, Pipeline
from rag_service.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Face:
    """One gateway replica's parts."""

    settings: Settings
    backends: Backends
    pipeline: Pipeline
    tokenizer: ChatTokenizer
    gatekeeper: Gatekeeper
    limiter: RateLimiter
    gate: Gate

    async def admit(self, request: Request, *scopes: str) -> Principal:
        """The caller, allowed and within limits; the limits' headers go onto the answer. Raises ``ApiError``."""
        principal = self.principal(request, *scopes)
        headers = await self.limiter.admit(principal)
        request.state.headers.update(headers)
        return principal

    def principal(self, request: Request, *scopes: str) -> Principal:
        """The caller, allowed but not counted. Raises ``ApiError``."""
        return self.gatekeeper.principal(request.headers.get("authorization"), *scopes)


def face_of(request: Request) -> Face:
    """The parts behind ``request``'s application."""
    return cast(Face, request.app.state.face)


def request_id_of(request: Request) -> str:
    return str(request.state.request_id)


def trace_id_of(request: Request) -> str | None:
    """The trace id of a valid ``traceparent``, else None."""
    trace: Any = getattr(request.state, "trace_id", None)
    return None if trace is None else str(trace)
