"""The HTTP face: OpenAI's shapes on the outside, the pipeline and its neighbours on the inside."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware

from rag_service import __version__
from rag_service.api import chat, documents, health, models, pages, reports, search
from rag_service.api.envelope import Envelope
from rag_service.api.face import Face
from rag_service.auth import Gatekeeper, check_exposure
from rag_service.config import Settings
from rag_service.errors import install_handlers
from rag_service.limits import Gate, RateLimiter
from rag_service.models import resolve
from rag_service.pipeline import Backends, Pipeline
from rag_service.tokenizer import ChatTokenizer, load_tokenizer
from rag_service.traced_app import TracedApp

__all__ = ["Backends", "create_app"]

_EXPOSED = [
    "x-request-id",
    "server-timing",
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
]


def create_app(
    settings: Settings,
    backends: Backends,
    tokenizer: ChatTokenizer | None = None,
    *,
    tell_request_id: bool = True,
) -> FastAPI:
    """The ASGI application of one gateway replica.

    ``tokenizer`` None: the target's, from the model cache. ``tell_request_id`` False: whoever serves the
    application adds the ``x-request-id`` header itself, as Ray Serve does. Raises ``ConfigError`` when a
    public address would be served without keys.
    """
    check_exposure(settings)
    if tokenizer is None:
        target = settings.engine.target
        tokenizer = load_tokenizer(str(resolve(target.model, settings.cache_folder)), target.revision)
    app = FastAPIOffline(
        redoc_url=None,
        title="rag-service",
        version=__version__,
        description="Cited answers from indexed documents, decoded speculatively; OpenAI-compatible.",
        openapi_tags=[
            {"name": name} for name in ("chat", "search", "documents", "models", "reports", "health")
        ],
    )
    app.state.face = Face(
        settings=settings,
        backends=backends,
        pipeline=Pipeline(settings, backends, tokenizer),
        tokenizer=tokenizer,
        gatekeeper=Gatekeeper(settings),
        limiter=RateLimiter(settings.limits),
        gate=Gate(
            settings.limits.max_in_flight,
            settings.limits.answer_within_seconds or settings.service.request_deadline_seconds,
        ),
    )
    install_handlers(app)
    for noun in (chat, search, documents, models, reports, health, pages):
        app.include_router(noun.router)
    _wrap(app, settings, tell_request_id)
    return app


def _wrap(app: FastAPI, settings: Settings, tell_request_id: bool) -> None:
    service = settings.service
    if service.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    app.add_middleware(TracedApp)
    app.add_middleware(
        Envelope,
        max_body_bytes=service.max_body_bytes,
        max_upload_bytes=service.max_upload_bytes,
        origins=service.cors_origins,
        tell_request_id=tell_request_id,
    )
