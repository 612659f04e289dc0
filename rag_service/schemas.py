"""The chat request, field by field as OpenAI names them. Every field is honoured or refused by name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from generation.types import AcceptanceMethod
from rag_service.config import CitationMode
from rag_service.errors import ApiError

MAX_MESSAGES = 256
REFUSED_FIELDS = {
    "tools": "the model calls no tools",
    "tool_choice": "the model calls no tools",
    "parallel_tool_calls": "the model calls no tools",
    "functions": "the model calls no functions",
    "function_call": "the model calls no functions",
    "audio": "the model has no audio",
    "prediction": "proposals come from the draft and the passages",
    "web_search_options": "answers come from the indexed documents",
    "reasoning_effort": "the model does not reason apart from its answer",
    "verbosity": "the model has no such setting; use max_tokens",
    "metadata": "nothing is stored",
    "prompt_cache_retention": "the prefix cache has no such setting",
    "best_of": "use n",
    "suffix": "this is no completion endpoint",
    "echo": "this is no completion endpoint",
}
"""OpenAI's fields that are not honoured, with why. ``null``, ``[]`` and ``{}`` say nothing and are let through."""


def scalar_filters(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` when every one is a scalar or a list of scalars; else ``ValueError`` naming the first."""
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if not items or not all(isinstance(item, (str, int, float, bool)) for item in items):
            raise ValueError(f"{name!r} must be a text, a number, a truth value or a list of those")
    return values


class Body(BaseModel):
    """A request body: unknown fields are errors, so that none is ignored silently."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts true as 1; a client that sends ``n: true`` has made a mistake."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        wanted = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and bool not in wanted and (int in wanted or float in wanted):
            raise ValueError("a number is wanted, not true or false")
        return value


def whole_characters(text: str) -> str:
    """Refuse half a surrogate pair, which no encoding has; pydantic lets it by in a union."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(whole_characters)]


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message. Content is text, or parts that are all text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None
    name: str | None = Field(default=None, max_length=64, description="Accepted; the template has no names.")
    refusal: None = None
    annotations: list[Any] | None = Field(default=None, description="Of an earlier answer; not read.")

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("role") in ("tool", "function") or value.get("tool_calls"):
                raise ValueError("messages of tools are not supported: the model calls no tools")
            content = value.get("content")
            for part in content if isinstance(content, list) else ():
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind != "text":
                    raise ValueError(
                        f"content parts of type {kind[:64]!r} are not supported: the model reads text"
                    )
            return {key: item for key, item in value.items() if item is not None}
        return value

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    name: str = Field(default="answer", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_given(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self

    @property
    def grammar(self) -> str | None:
        """The schema as text; any object for ``json_object``, as OpenAI promises; None for text."""
        if self.type == "json_object":
            return json.dumps({"type": "object"})
        return json.dumps(self.json_schema.schema_, sort_keys=True) if self.json_schema else None


class RagOptions(Body):
    """What is ours: which passages the answer stands on."""

    domain: str | None = Field(default=None, description="One of GET /v1/domains; none: all, and inferred.")
    enabled: bool = Field(default=True, description="False: a plain chat without retrieval.")
    top_k: int | None = Field(default=None, ge=1, le=50, description="Passages in the prompt.")
    rerank: bool | None = None
    rewrite: bool | None = Field(default=None, description="Make the last turn a query of its own.")
    filters: dict[str, Any] = Field(
        default_factory=dict, description="Metadata: a value, or a list of values."
    )
    document_ids: list[str] = Field(default_factory=list, max_length=1000)
    citations: CitationMode | None = None

    _filters = field_validator("filters")(scalar_filters)


class SpeculationOptions(Body):
    """How this answer is decoded; the default is the service's. Every mode but a lossy acceptance is exact."""

    mode: Literal["auto", "off", "passages", "colocated", "synchronous", "lookahead"] | None = None
    acceptance: AcceptanceMethod | None = None
    show_accepted: bool = Field(default=False, description="Tell for every token whether it was drafted.")


class ChatRequest(Body):
    """``POST /v1/chat/completions``."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "example": {
                "model": "smollm2-135m-instruct",
                "messages": [{"role": "user", "content": "When does the library open?"}],
                "rag": {"domain": "general"},
                "stream": False,
            }
        },
    )

    model: str = Field(max_length=256)
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0, le=100_000)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1)
    stop: Text | list[Text] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=64)
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=10.0)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1024)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    user: str | None = Field(default=None, max_length=512, description="Accepted; nothing depends on it.")
    safety_identifier: str | None = Field(default=None, max_length=512, description="As user.")
    prompt_cache_key: str | None = Field(default=None, max_length=512, description="As user.")
    rag: RagOptions = RagOptions()
    speculation: SpeculationOptions = SpeculationOptions()

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, value: Any) -> Any:
        return refuse_unknown(value, cls, REFUSED_FIELDS) if isinstance(value, dict) else value

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: str | list[str] | None) -> list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop
        if stops and (len(stops) > 4 or not all(0 < len(text) <= 256 for text in stops)):
            raise ValueError("give at most four stop texts of 1 to 256 characters")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for name, value in (bias or {}).items():
            if not name.isascii() or not name.isdigit() or not -100.0 <= value <= 100.0:
                raise ValueError("logit_bias maps token ids to numbers from -100 to 100")
        return bias

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.messages[-1].role != "user":
            raise ValueError("the last message must be the user's question")
        if not self.messages[-1].text.strip():
            raise ValueError("the question is empty")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("give max_tokens or max_completion_tokens, not both")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        return self


def refuse_unknown(
    value: dict[str, Any], model: type[BaseModel], refused: Mapping[str, str]
) -> dict[str, Any]:
    """``value`` without its nulls. Raises ``ApiError`` 400 for a field that is not honoured, by name."""
    given = {key: item for key, item in value.items() if item is not None}
    for name in list(given):
        if name in refused and given[name] in ([], {}, "none", "medium"):
            del given[name]
        elif name in refused:
            message = f"The field {name} is not supported: {refused[name]}."
            raise ApiError(400, message, param=name, code="unsupported_field")
        elif name not in model.model_fields:
            nearest = difflib.get_close_matches(name, model.model_fields, n=1)
            hint = f"; did you mean {nearest[0]}" if nearest else ""
            raise ApiError(
                400, f"There is no field {name[:64]}{hint}.", param=name[:64], code="unknown_field"
            )
    return given
