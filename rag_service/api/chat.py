"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from rag_service.answer import AnswerEnd, Delta, Event, Retrieved
from rag_service.api.events import ChunkWriter, completion_object
from rag_service.api.face import Face, face_of, request_id_of, trace_id_of
from rag_service.api.replies import ERRORS, ChatCompletion
from rag_service.api.stream import EventStream, RunningAnswer
from rag_service.auth import Principal
from rag_service.errors import ApiError, validation_error
from rag_service.figures import server_timing
from rag_service.pipeline import Emit
from rag_service.question import Question, question_of
from rag_service.schemas import ChatRequest

REFUSAL_GRACE_SECONDS = 0.1


class RecordedRoute(APIRoute):
    """Records a request that is refused before it reaches the pipeline. Callers without a key leave no trace."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def recorded(request: Request) -> Response:
            try:
                return await handle(request)
            except (RequestValidationError, ApiError) as fault:
                errors = fault.errors() if isinstance(fault, RequestValidationError) else ()
                error = fault if isinstance(fault, ApiError) else validation_error(errors)
                if not getattr(request.state, "recorded", False) and error.status not in (401, 403):
                    face_of(request).pipeline.recording.refused(request_id_of(request), error)
                raise

        return recorded


router = APIRouter(tags=["chat"], route_class=RecordedRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={
        **ERRORS,
        200: {
            "model": ChatCompletion,
            "description": "The answer; with `stream` true a stream of `chat.completion.chunk` events.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
    },
)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer the last user message from the indexed documents, with numbered sources."""
    face = face_of(request)
    principal = await face.admit(request, "chat")
    question = question_of(
        body, face.settings, request_id_of(request), principal.tenant, trace_id_of(request)
    )
    request.state.recorded = True
    answer = _begin(face, question, principal)
    try:
        if body.stream:
            return await _stream(face, body, question, answer)
        return await _whole(face, body, question, answer, request)
    except ApiError as error:
        answer.cancel()
        if error.status == 429 and "Retry-After" not in error.headers:
            raise face.gate.refusal(error.message) from None
        raise
    except BaseException:
        answer.cancel()
        raise


def _begin(face: Face, question: Question, principal: Principal) -> RunningAnswer:
    """Start the answer when there is room for it; its place is given back when it ends, however it ends."""
    try:
        face.gate.enter()
    except ApiError as error:
        face.pipeline.recording.refused(question.request_id, error, question.tenant, question.domain)
        raise
    answer = RunningAnswer(lambda emit: _charged(face, question, principal, emit))
    answer.task.add_done_callback(lambda _: face.gate.leave())
    return answer


async def _charged(face: Face, question: Question, principal: Principal, emit: Emit) -> None:
    """Answer, and count the tokens that were made, also of an answer that was broken off."""
    num_tokens = 0

    def watch(event: Event) -> None:
        nonlocal num_tokens
        if isinstance(event, Delta):
            num_tokens += len(event.token_ids)
        elif isinstance(event, AnswerEnd):
            num_tokens = event.num_prompt_tokens + event.num_generated_tokens
        emit(event)

    try:
        await face.pipeline.answer(question, watch)
    finally:
        await face.limiter.charge(principal, num_tokens)


async def _stream(face: Face, body: ChatRequest, question: Question, answer: RunningAnswer) -> Response:
    service = face.settings.service
    first = await answer.first(service.heartbeat_seconds, REFUSAL_GRACE_SECONDS)
    stages = first.stage_seconds if isinstance(first, Retrieved) else {}
    writer = ChunkWriter(
        f"chatcmpl-{question.request_id}",
        face.settings.model_name,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        accepted_of=face.tokenizer if body.speculation.show_accepted else None,
        logprobs=question.sampling.logprobs is not None,
    )
    headers = {"Server-Timing": server_timing(stages)} if stages else {}
    return EventStream(answer, writer, service.heartbeat_seconds, first, headers)


async def _whole(
    face: Face, body: ChatRequest, question: Question, answer: RunningAnswer, request: Request
) -> Response:
    events = await answer.all(request.receive)
    value: dict[str, Any] = completion_object(
        f"chatcmpl-{question.request_id}",
        face.settings.model_name,
        events,
        accepted_of=face.tokenizer if body.speculation.show_accepted else None,
        logprobs=question.sampling.logprobs is not None,
    )
    end = events[-1]
    stages = dict(end.stage_seconds) if isinstance(end, AnswerEnd) else {}
    total = {"total": end.total_seconds} if isinstance(end, AnswerEnd) else {}
    return JSONResponse(value, headers={"Server-Timing": server_timing({**stages, **total})})
