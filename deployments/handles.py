"""Serve handles → the protocols of ``rag_service.backends``.

What the pipeline sees is only typed results and the typed errors of ``generation`` and ``retrieval``, with
their codes. Here live deadlines, retries of what may be repeated, and the translation of Ray's errors:

- full queue → ``overloaded``; replica lost → repeated elsewhere when nothing has been passed on yet, else
  ``replica_lost``; nothing to call → ``unavailable``; too slow → ``deadline_exceeded``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from generation.types import GenerationChunk, GenerationError, GenerationRequest, QueueFull
from rag_service import tracing
from retrieval.types import (
    Document,
    DocumentInfo,
    JobCounts,
    JobStatus,
    Passage,
    RetrievalError,
    ScoredPassage,
    SearchRequest,
    SearchResult,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOST = (RayActorError, ReplicaUnavailableError)
"""The replica died or became unreachable (``ActorDiedError`` and ``ActorUnavailableError`` are inside)."""

NUM_ATTEMPTS = 4
READY_SECONDS = 5.0
CALL_SECONDS = 60.0
DEADLINE_GRACE_SECONDS = 2.0
"""The engine ends an overdue request itself; only if it cannot, the handle does so this much later."""


async def call(
    handle: DeploymentHandle[Any],
    method: str,
    *args: Any,
    seconds: float = CALL_SECONDS,
    repeat: bool = True,
    trace: str | None = None,
) -> Any:
    """One unary call within ``seconds``, in all. ``repeat``: a lost replica's work may be done again.

    ``trace``: a ``traceparent`` for a method that takes one.
    """

    async def once() -> Any:
        response = cast(Any, getattr(handle, method).remote(*args, **_sent(trace)))
        try:
            return await response
        except asyncio.CancelledError:
            _cancel(response)
            raise

    attempts = AsyncRetrying(
        retry=retry_if_exception_type(LOST),
        stop=stop_after_attempt(NUM_ATTEMPTS if repeat else 1),
        wait=wait_random_exponential(multiplier=0.1, max=2.0),
        reraise=True,
    )
    async with asyncio.timeout(seconds):
        return await attempts(once)


def _sent(trace: str | None) -> dict[str, str]:
    return {} if trace is None else {"trace": trace}


def _cancel(response: Any) -> None:
    # Cancelling a call that was never assigned to a replica raises what kept it from being so, once more.
    with contextlib.suppress(Exception):
        response.cancel()


def original(error: BaseException) -> BaseException:
    """The error as it was raised in the replica, without Ray's wrapping."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return error.cause
    return error


def generation_error(error: BaseException, who: str = "target") -> GenerationError:
    """Any failure of a generating call as one of generation's own errors."""
    cause = original(error)
    if isinstance(cause, GenerationError):
        return cause
    if isinstance(cause, BackPressureError):
        return QueueFull(int(cause.args[0]))
    message, code = described(cause, who)
    return GenerationError(message, code)


def retrieval_error(error: BaseException, who: str) -> RetrievalError:
    """Any failure of a retrieving call as retrieval's own error."""
    cause = original(error)
    if isinstance(cause, RetrievalError):
        return cause
    message, code = described(cause, who)
    return RetrievalError(message, code)


def described(error: BaseException, who: str) -> tuple[str, str]:
    """Message and code of an error that is none of our own types."""
    cause = original(error)
    if isinstance(cause, BackPressureError):
        return f"{cause.args[0]} requests wait for the {who} already; try again later.", "overloaded"
    if isinstance(cause, LOST):
        return f"The {who} replica that worked on this request stopped; ask again.", "replica_lost"
    if isinstance(cause, TimeoutError):
        return f"The {who} did not answer in time.", "deadline_exceeded"
    if isinstance(cause, DeploymentUnavailableError):
        return f"The {who} is not available.", "unavailable"
    if isinstance(cause, TaskCancelledError | RequestCancelledError):
        return f"The {who}'s work on this request was cancelled.", "cancelled"
    # The text of an unforeseen error may hold a path or a user's words: it goes to the log alone.
    logger.error("unforeseen error of the %s", who, exc_info=cause)
    return f"The {who} failed unexpectedly ({type(cause).__name__}).", "internal_error"


async def ready_of(handle: DeploymentHandle[Any], who: str) -> dict[str, str]:
    """What ``ready()`` of one replica says, or that none answers: name → reason, empty when ready."""
    try:
        return cast("dict[str, str]", await call(handle, "ready", seconds=READY_SECONDS))
    except TimeoutError:
        return {who: "no replica answers"}
    except Exception as error:
        return {who: described(error, who)[0]}


class RetrieverHandle:
    """``RetrieverBackend`` over the Retriever deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def _call(self, method: str, *args: Any, repeat: bool = True, trace: str | None = None) -> Any:
        try:
            return await call(self._handle, method, *args, repeat=repeat, trace=trace)
        except Exception as error:
            raise retrieval_error(error, "retriever") from None

    async def search(self, request: SearchRequest) -> SearchResult:
        with tracing.span("search") as span:
            return cast(SearchResult, await self._call("search", request, trace=tracing.traceparent_of(span)))

    async def ingest(self, documents: Sequence[Document]) -> JobStatus:
        return cast(JobStatus, await self._call("ingest", list(documents), repeat=False))

    async def ingest_files(self, files: Sequence[tuple[str, bytes]], domain: str, tenant: str) -> JobStatus:
        return cast(JobStatus, await self._call("ingest_files", list(files), domain, tenant, repeat=False))

    async def job_counts(self) -> JobCounts | None:
        """Summed over the replicas; None when one does not answer, since a sum that falls looks like a restart."""
        try:
            response = self._handle.broadcast("job_counts")
            found: list[JobCounts] = await response.results_async(timeout_s=READY_SECONDS)
        except Exception:
            return None
        fields = JobCounts.__dataclass_fields__
        return JobCounts(**{name: sum(getattr(counts, name) for counts in found) for name in fields})

    async def job(self, job_id: str, tenant: str) -> JobStatus | None:
        return cast("JobStatus | None", await self._call("job", job_id, tenant))

    async def cancel_job(self, job_id: str, tenant: str) -> JobStatus | None:
        return cast("JobStatus | None", await self._call("cancel_job", job_id, tenant))

    async def documents(
        self, tenant: str, domain: str | None, limit: int, offset: str | None
    ) -> tuple[list[DocumentInfo], str | None]:
        page = await self._call("documents", tenant, domain, limit, offset)
        return cast("tuple[list[DocumentInfo], str | None]", page)

    async def document(self, document_id: str, tenant: str) -> tuple[DocumentInfo, list[Passage]] | None:
        found = await self._call("document", document_id, tenant)
        return cast("tuple[DocumentInfo, list[Passage]] | None", found)

    async def delete(self, document_id: str, tenant: str) -> bool:
        return bool(await self._call("delete", document_id, tenant))

    async def ready(self) -> dict[str, str]:
        return await ready_of(self._handle, "retriever")


class RerankerHandle:
    """``RerankerBackend`` over the Reranker deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def rerank(self, query: str, passages: Sequence[ScoredPassage]) -> list[ScoredPassage]:
        with tracing.span("rerank", attributes={"rag.num_passages": len(passages)}) as span:
            trace = tracing.traceparent_of(span)
            try:
                found = await call(self._handle, "rerank", query, list(passages), trace=trace)
            except Exception as error:
                raise retrieval_error(error, "reranker") from None
            return cast("list[ScoredPassage]", found)

    async def ready(self) -> dict[str, str]:
        return await ready_of(self._handle, "reranker")


class GeneratorHandle:
    """``GeneratorBackend`` over the Target deployment.

    ``retry_unstarted``: a request whose replica is lost before its first token is begun again on another.
    """

    def __init__(self, handle: DeploymentHandle[Any], retry_unstarted: bool = True) -> None:
        self._handle = handle
        self._retry_unstarted = retry_unstarted

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """Chunks as they are made. Closing the iterator cancels the request in the replica."""
        span = tracing.open_span("generate", attributes={"rag.domain": request.domain})
        try:
            # Closed here and now: closing is what cancels the request in the replica.
            async with contextlib.aclosing(self._generate(request, tracing.traceparent_of(span))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except GenerationError as error:
            tracing.failed(span, error.code)
            raise
        finally:
            span.end()

    async def _generate(
        self, request: GenerationRequest, trace: str | None
    ) -> AsyncGenerator[GenerationChunk]:
        deadline = _Deadline(request.deadline_seconds)
        for attempt in range(1, NUM_ATTEMPTS + 1):
            started = finished = False
            stream = cast(Any, self._handle.options(stream=True).generate.remote(request, **_sent(trace)))
            try:
                while True:
                    try:
                        chunk: GenerationChunk = await deadline.wait(anext(stream))
                    except StopAsyncIteration:
                        finished = True
                        return
                    started = True
                    yield chunk
            except LOST as error:
                if started or not self._retry_unstarted or attempt == NUM_ATTEMPTS:
                    raise generation_error(error) from None
                logger.warning("target replica lost before the first token; request begun again")
                await deadline.wait(asyncio.sleep(0.1 * 2**attempt))
            except Exception as error:
                raise generation_error(error) from None
            finally:
                # Also reached by GeneratorExit and CancelledError: the client is gone, so the target stops.
                if not finished:
                    _cancel(stream)

    async def status(self) -> dict[str, Any]:
        """One replica's status; with several, the first one's and all of them under ``replicas``."""
        try:
            response = self._handle.broadcast("status")
            found = await response.results_async(timeout_s=READY_SECONDS, return_exceptions=True)
        except Exception as error:
            raise generation_error(error) from None
        statuses = [status for status in found if isinstance(status, dict)]
        if not statuses:
            raise GenerationError("No target replica answers.", "unavailable")
        return {**statuses[0], "replicas": statuses} if len(statuses) > 1 else statuses[0]

    async def ready(self) -> dict[str, str]:
        return await ready_of(self._handle, "target")


class _Deadline:
    """What is left of a request's time, plus the grace that the engine has to end it by itself."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._ends_at = None if seconds is None else self._clock() + seconds + DEADLINE_GRACE_SECONDS

    async def wait(self, awaitable: Awaitable[T]) -> T:
        if self._ends_at is None:
            return await awaitable
        return await asyncio.wait_for(awaitable, max(self._ends_at - self._clock(), 0.0))
