"""Gateway: the HTTP face, one FastAPI application a replica."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.handles import GeneratorHandle, RerankerHandle, RetrieverHandle
from deployments.observed import observe
from deployments.recorder_handle import RecorderHandle
from rag_service.api import Backends, create_app
from rag_service.config import Settings


class Gateway:
    """Builds ``rag_service.api``'s application over the handles of the other deployments.

    The application is built in the replica, after the constructor: it holds locks and clients that cannot
    travel between processes.
    """

    def __init__(
        self,
        settings: Settings,
        retriever: DeploymentHandle[Any],
        reranker: DeploymentHandle[Any],
        target: DeploymentHandle[Any],
        recorder: DeploymentHandle[Any],
    ) -> None:
        observe(settings)
        self._settings = settings
        retriever_handle = RetrieverHandle(retriever)
        generator = GeneratorHandle(target, settings.deployments.gateway.retry_unstarted)
        self._backends = Backends(
            retriever=retriever_handle,
            reranker=RerankerHandle(reranker),
            generator=generator,
            recorder=RecorderHandle(recorder, generator.status, retriever_handle.job_counts),
        )

    async def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve appends its own x-request-id to every answer.
        return create_app(self._settings, self._backends, tell_request_id=False)


GatewayIngress = serve.ingress()(Gateway)
"""``Gateway`` as Serve runs it."""
