"""An answer's events as OpenAI's objects: chunks of a stream, or one completion."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from generation.types import TokenLogprob
from rag_service.answer import AnswerEnd, ChoiceEnd, Delta, Event, Retrieved
from rag_service.citations import Citation
from rag_service.figures import speculation_figures, timing_figures
from rag_service.prompt import PromptSource
from rag_service.tokenizer import ChatTokenizer

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": working\n\n"


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event. JSON has no raw line break, so one ``data`` line holds it."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class ChunkWriter:
    """Makes ``chat.completion.chunk`` objects of events, in the order they come."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        include_usage: bool = False,
        accepted_of: ChatTokenizer | None = None,
        logprobs: bool = False,
    ) -> None:
        self._base = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._accepted_of = accepted_of
        self._logprobs = logprobs
        self._begun: set[int] = set()

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """The chunks that ``event`` becomes: none, one or two."""
        match event:
            case Retrieved():
                return [
                    self._chunk([], sources=[source_object(s) for s in event.sources], rag=rag_object(event))
                ]
            case Delta():
                return [self._delta(event)]
            case ChoiceEnd():
                return [self._end(event)]
            case AnswerEnd():
                closing = [self._chunk([], metrics=metrics_object(event))]
                if self._include_usage:
                    closing.append(self._chunk([], usage=usage_object(event)))
                return closing

    def _delta(self, event: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": event.text}
        if event.choice not in self._begun:
            self._begun.add(event.choice)
            delta = {"role": "assistant", **delta}
        choice: dict[str, Any] = {
            "index": event.choice,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        if self._logprobs:
            choice["logprobs"] = logprobs_object(event.logprobs)
        if self._accepted_of is not None:
            choice["tokens"] = tokens_object(self._accepted_of, event)
        return self._chunk([choice])

    def _end(self, event: ChoiceEnd) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if event.choice not in self._begun:
            self._begun.add(event.choice)
            delta = {"role": "assistant", "content": ""}
        if event.citations:
            delta["annotations"] = [annotation_object(citation) for citation in event.citations]
        return self._chunk(
            [{"index": event.choice, "delta": delta, "logprobs": None, "finish_reason": event.finish_reason}]
        )

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        usage = {"usage": None} if self._include_usage else {}
        return {**self._base, "choices": choices, **usage, **more}


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    end: ChoiceEnd | None = None


def completion_object(
    answer_id: str,
    model: str,
    events: Iterable[Event],
    accepted_of: ChatTokenizer | None = None,
    logprobs: bool = False,
) -> dict[str, Any]:
    """The ``chat.completion`` of a finished answer's events."""
    choices: dict[int, _Choice] = {}
    more: dict[str, Any] = {}
    for event in events:
        match event:
            case Retrieved():
                more["sources"] = [source_object(source) for source in event.sources]
                more["rag"] = rag_object(event)
            case Delta():
                choice = choices.setdefault(event.choice, _Choice())
                choice.text.append(event.text)
                choice.logprobs.extend(event.logprobs)
                if accepted_of is not None:
                    choice.tokens.extend(tokens_object(accepted_of, event))
            case ChoiceEnd():
                choices.setdefault(event.choice, _Choice()).end = event
            case AnswerEnd():
                more["usage"] = usage_object(event)
                more["metrics"] = metrics_object(event)
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _choice_object(index, choice, logprobs, accepted_of is not None)
            for index, choice in sorted(choices.items())
        ],
        **more,
    }


def _choice_object(index: int, choice: _Choice, logprobs: bool, accepted: bool) -> dict[str, Any]:
    citations = choice.end.citations if choice.end else ()
    value: dict[str, Any] = {
        "index": index,
        "message": {
            "role": "assistant",
            "content": "".join(choice.text),
            "refusal": None,
            "annotations": [annotation_object(citation) for citation in citations],
        },
        "logprobs": logprobs_object(choice.logprobs) if logprobs else None,
        "finish_reason": choice.end.finish_reason if choice.end else None,
    }
    return {**value, "tokens": choice.tokens} if accepted else value


def source_object(source: PromptSource) -> dict[str, Any]:
    """A source under its number, with where it stands in its document (characters)."""
    metadata = dict(source.passage.metadata)
    return {
        "index": source.index,
        "document_id": source.passage.document_id,
        "chunk_id": source.passage.chunk_id,
        "title": source.title,
        "text": source.text,
        "score": source.score,
        "domain": metadata.get("domain"),
        "start": metadata.get("start"),
        "end": metadata.get("end"),
        "page": metadata.get("page"),
        "section": metadata.get("section"),
        "url": source_url(source),
    }


def source_url(source: PromptSource) -> str:
    """The document's own web address when it has one, else ours."""
    given = str(source.passage.metadata.get("source") or "")
    if given.startswith(("https://", "http://")):
        return given
    return document_url(source.passage.document_id)


def document_url(document_id: str) -> str:
    """The path of ``GET /v1/documents/{id}``."""
    from urllib.parse import quote

    return f"/v1/documents/{quote(document_id, safe='')}"


def annotation_object(citation: Citation) -> dict[str, Any]:
    """A marker as OpenAI's ``url_citation``; beside it, which source and who set the marker."""
    metadata = citation.source.passage.metadata
    return {
        "type": "url_citation",
        "url_citation": {
            "start_index": citation.start,
            "end_index": citation.end,
            "url": source_url(citation.source),
            "title": citation.source.title or citation.source.passage.document_id,
        },
        "source": citation.source.index,
        "document_id": citation.source.passage.document_id,
        "chunk_id": citation.source.passage.chunk_id,
        "chunk_span": [metadata.get("start"), metadata.get("end")],
        "origin": citation.origin,
    }


def rag_object(event: Retrieved) -> dict[str, Any]:
    return {"domain": event.domain, "domain_inferred": event.domain_inferred, "query": event.query}


def usage_object(event: AnswerEnd) -> dict[str, Any]:
    """Counts of the target's own tokens; markers that the service wrote are none."""
    return {
        "prompt_tokens": event.num_prompt_tokens,
        "completion_tokens": event.num_generated_tokens,
        "total_tokens": event.num_prompt_tokens + event.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": event.num_cached_tokens},
    }


def metrics_object(event: AnswerEnd) -> dict[str, Any]:
    return {
        "speculative_decoding": speculation_figures(event.stats),
        "timings": timing_figures(
            event.stage_seconds, event.time_to_first_token_seconds, event.total_seconds
        ),
    }


def logprobs_object(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """OpenAI's ``logprobs`` of tokens."""
    return {
        "content": [
            {
                **_token_object(entry.token, entry.logprob),
                "top_logprobs": [_token_object(token, logprob) for _, token, logprob in entry.top],
            }
            for entry in logprobs
        ],
        "refusal": None,
    }


def _token_object(token: str, logprob: float) -> dict[str, Any]:
    # JSON has no infinity: OpenAI's clients know -9999 as "impossible".
    return {"token": token, "logprob": max(logprob, -9999.0), "bytes": list(token.encode())}


def tokens_object(tokenizer: ChatTokenizer, event: Delta) -> list[dict[str, Any]]:
    """The model's own tokens of a piece, each with whether it was an accepted draft token."""
    accepted = event.accepted or (False,) * len(event.token_ids)
    return [
        {"text": str(tokenizer.decode([token_id])), "accepted": was}
        for token_id, was in zip(event.token_ids, accepted, strict=False)
    ]
