"""A chat request as the pipeline takes it: validated against the settings, every default filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from generation.types import AcceptanceMethod, SamplingParams
from rag_service.citations import without_markers
from rag_service.config import CitationMode, Settings
from rag_service.errors import ApiError
from rag_service.schemas import ChatRequest

CONVERSATION_FACTOR = 4
"""A conversation may be this many times as long as its longest message may be."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request to answer. ``messages``: the whole conversation when ``retrieve`` is False."""

    request_id: str
    text: str
    sampling: SamplingParams
    history: tuple[Mapping[str, str], ...] = ()
    system: str | None = None
    tenant: str = "default"
    domain: str | None = None
    retrieve: bool = True
    top_k: int | None = None
    rerank: bool = True
    rewrite: bool = True
    filters: Mapping[str, Any] = field(default_factory=dict)
    document_ids: tuple[str, ...] = ()
    citations: CitationMode = "attributed"
    num_choices: int = 1
    mode: str | None = None
    acceptance: AcceptanceMethod | None = None
    stream: bool = False
    trace_id: str | None = None

    @property
    def may_alter(self) -> bool:
        """May markers be written into the text? Not where the client counts on every token or on a grammar."""
        return self.sampling.logprobs is None and self.sampling.json_schema is None


def question_of(
    body: ChatRequest,
    settings: Settings,
    request_id: str,
    tenant: str = "default",
    trace_id: str | None = None,
) -> Question:
    """``body`` with the service's defaults. Raises ``ApiError`` for an unknown model or domain, or a limit."""
    _check(body, settings)
    system, history, text = _turns(body)
    retrieve = body.rag.enabled
    if retrieve:
        history = tuple(_unmarked(turn) for turn in history)
        system = "\n\n".join(part for part in (settings.prompt.system, system) if part)
    return Question(
        request_id=request_id,
        text=text,
        sampling=sampling_of(body, settings),
        history=history,
        system=system or None,
        tenant=tenant,
        domain=body.rag.domain,
        retrieve=retrieve,
        top_k=body.rag.top_k,
        rerank=settings.prompt.rerank if body.rag.rerank is None else body.rag.rerank,
        rewrite=settings.prompt.rewrite if body.rag.rewrite is None else body.rag.rewrite,
        filters=body.rag.filters,
        document_ids=tuple(body.rag.document_ids),
        citations=body.rag.citations or settings.prompt.citations,
        num_choices=body.n or 1,
        mode=body.speculation.mode,
        acceptance=body.speculation.acceptance,
        stream=body.stream,
        trace_id=trace_id,
    )


def _check(body: ChatRequest, settings: Settings) -> None:
    """Raise an ``ApiError`` for what the settings do not allow."""
    check_model(body.model, settings)
    check_domain(body.rag.domain, settings, "rag.domain")
    for index, message in enumerate(body.messages):
        check_length(message.text, settings, f"messages.{index}.content")
    num_chars = sum(len(message.text) for message in body.messages)
    if num_chars > CONVERSATION_FACTOR * settings.service.max_question_chars:
        reason = f"The messages have {num_chars} characters together, too many for any context here."
        raise ApiError(400, reason, param="messages", code="too_long")
    if (body.n or 1) > settings.service.max_choices:
        raise ApiError(
            400, f"n may be {settings.service.max_choices} at most.", param="n", code="invalid_value"
        )


def sampling_of(body: ChatRequest, settings: Settings) -> SamplingParams:
    """The sampling fields, with the service's default temperature and length."""
    service = settings.service
    max_tokens = body.max_completion_tokens or body.max_tokens or service.default_max_tokens
    if max_tokens > service.max_tokens_limit:
        message = f"max_tokens may be {service.max_tokens_limit} at most."
        raise ApiError(400, message, param="max_tokens", code="invalid_value")
    return SamplingParams(
        temperature=service.default_temperature if body.temperature is None else body.temperature,
        top_p=_or(body.top_p, 1.0),
        top_k=body.top_k or 0,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias={int(name): value for name, value in (body.logit_bias or {}).items()},
        seed=body.seed,  # without one the draws follow the request id, and acceptance is not bound to a seed
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens or 0, max_tokens),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=body.response_format.grammar if body.response_format else None,
        ignore_eos=body.ignore_eos,
    )


def check_model(model: str, settings: Settings) -> None:
    """Raise a 404 for a model that is not served."""
    if model not in (settings.model_name, settings.engine.target.model):
        message = f"There is no model {model[:100]!r} here; this service has {settings.model_name!r}."
        raise ApiError(404, message, param="model", code="model_not_found")


def check_domain(domain: str | None, settings: Settings, param: str) -> None:
    """Raise a 400 that names the known domains for another one."""
    if domain is not None and domain not in settings.service.domains:
        known = ", ".join(settings.service.domains)
        message = f"There is no domain {domain[:64]!r}; known are {known}."
        raise ApiError(400, message, param=param, code="unknown_domain")


def check_length(text: str, settings: Settings, param: str) -> None:
    """Raise a 400 for a text longer than any question should be."""
    longest = settings.service.max_question_chars
    if len(text) > longest:
        message = f"{param} has {len(text)} characters; {longest} are the most."
        raise ApiError(400, message, param=param, code="too_long")


def _turns(body: ChatRequest) -> tuple[str, tuple[Mapping[str, str], ...], str]:
    system = [message.text for message in body.messages if message.role in ("system", "developer")]
    turns = [message for message in body.messages if message.role in ("user", "assistant")]
    history = tuple({"role": message.role, "content": message.text} for message in turns[:-1])
    return "\n\n".join(system), history, turns[-1].text


def _unmarked(turn: Mapping[str, str]) -> Mapping[str, str]:
    """An earlier answer without its markers: their numbers meant other sources than this answer's."""
    if turn["role"] != "assistant":
        return turn
    return {**turn, "content": without_markers(turn["content"])}


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
