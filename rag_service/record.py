"""One line of the request log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from generation.types import SpeculationStats


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Everything the service keeps of one finished request. No text, unless the configuration asks for it.

    ``outcome``: ok, cancelled, client_error, overloaded, error. ``stage_seconds``: queue, embed, search,
    rerank, prompt, prefill, decode. ``started_at``: Unix seconds.
    """

    request_id: str
    started_at: float
    domain: str
    tenant: str
    outcome: str
    total_seconds: float
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    time_to_first_token_seconds: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    temperature: float = 0.0
    stats: SpeculationStats | None = None
    target: str = ""
    draft: str = ""
    mode: str = ""
    stream: bool = False
    error_code: str | None = None
    question: str | None = None
    answer: str | None = None
    trace_id: str | None = None
