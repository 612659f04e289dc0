"""Errors as the API tells them: OpenAI's shape, a fitting status, one sentence, never a traceback."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from generation.types import GenerationError
from retrieval.types import RetrievalError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_STATUSES = {
    "context_length_exceeded": 400,
    "deadline_exceeded": 408,
    "timeout": 408,
    "overloaded": 429,
    "queue_full": 429,
    "unavailable": 503,
    "replica_lost": 503,
    "cancelled": 503,
    "draining": 503,
    "not_found": 404,
    "empty_prompt": 400,
    "no_token_left": 400,
    "too_large": 413,
}
"""Codes of the neighbours' errors. Other codes that begin with ``invalid`` or ``unsupported`` are 400."""


class ApiError(Exception):
    """A request answered with an error. ``param`` names the field at fault, ``code`` is for machines."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """``{"error": {message, type, param, code}}``."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def outcome(self) -> str:
        """What the request log calls it."""
        if self.status == 429:
            return "overloaded"
        return "error" if self.status >= 500 or self.status == 408 else "client_error"


def unexpected(error: BaseException) -> ApiError:
    """The error told for a fault of ours; what it was goes to the log alone."""
    logger.error("A request failed unexpectedly.", exc_info=error)
    return ApiError(500, "The service failed to answer; the fault is logged on the server.", code="internal")


def as_api_error(error: BaseException) -> ApiError:
    """How ``error``, from whatever neighbour, is told to the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (GenerationError, RetrievalError)):
        code = error.code
        if code.startswith("internal"):  # its text may hold a path or somebody's words
            return unexpected(error)
        refused = code.startswith(("invalid", "unsupported", "unknown"))
        status = _STATUSES.get(code, 400 if refused else 500)
        return ApiError(status, str(error), code=code)
    if isinstance(error, TimeoutError):
        return ApiError(408, "The request was not done within its deadline.", code="deadline_exceeded")
    return unexpected(error)


def error_response(error: ApiError) -> JSONResponse:
    """The error as an HTTP answer."""
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


def install_handlers(app: FastAPI) -> None:
    """Make every way a request can fail end in ``ApiError``'s shape."""

    async def on_api_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(as_api_error(error))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(_http_error(request, error))

    async def on_validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error.errors()))

    for kind in (ApiError, GenerationError, RetrievalError, TimeoutError):
        app.add_exception_handler(kind, on_api_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)


_KIND = re.compile(r"str|int|float|bool|[\w-]+\[.*\]")


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """A 400 that names the first field at fault and says what is wrong with it."""
    first: Mapping[str, Any] = errors[0] if errors else {"loc": (), "msg": "The request is not valid"}
    kind = str(first.get("type", "invalid"))
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "syntax error")
        return ApiError(400, f"The body is no valid JSON: {reason}.", code="invalid_json")
    location = [part for part in first["loc"] if part not in ("body", "query", "path", "header")]
    # Where a field takes text or a list, pydantic names the kind it tried too: stop.str, content.list[TextPart].
    location = [part for part in location if not (isinstance(part, str) and _KIND.fullmatch(part))]
    param = ".".join(str(part) for part in location) or None
    context: Mapping[str, Any] = first.get("ctx", {})
    reason = str(context.get("error") or first["msg"]).rstrip(".")
    if kind == "extra_forbidden":
        return ApiError(400, f"There is no field {param}.", param=param, code="unknown_field")
    message = f"{param}: {reason}." if param else f"{reason}."
    return ApiError(400, message, param=param, code="missing_field" if kind == "missing" else "invalid_value")


def _http_error(request: Request, error: HTTPException) -> ApiError:
    headers = error.headers
    if error.status_code == 404:
        return ApiError(404, f"There is nothing at {request.url.path[:200]}.", code="not_found")
    if error.status_code == 405:
        message = f"{request.method} is not allowed at {request.url.path[:200]}."
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(error.status_code, str(error.detail), headers=headers)
