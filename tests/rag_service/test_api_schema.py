"""Property tests of the whole API from its own OpenAPI document: no fault, no undocumented answer."""

from __future__ import annotations

import tempfile
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rag_service.api import create_app
from rag_service.config import Settings
from tests.fakes import Fakes, FakeTokenizer

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
NO_KEYS = Settings.load(None, {"data_folder": tempfile.gettempdir() + "/rag-service-no-such-folder"})
schema = schemathesis.openapi.from_asgi(
    "/openapi.json", create_app(NO_KEYS, Fakes().backends, FakeTokenizer())
)


@schema.parametrize()
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_documented(case: schemathesis.Case[Any]) -> None:
    case.validate_response(case.call(), checks=CHECKS)
