"""Draft and target on different Ray nodes: the same answers, and a draft node that dies fails no request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two-nodes")
    done = subprocess.run(
        [sys.executable, "-m", "tests.deployments.two_nodes", str(folder)],
        capture_output=True, text=True, check=False, timeout=540,
        env={**os.environ, "RAY_AUTH_TOKEN": "0" * 64},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_draft_and_target_are_on_different_nodes(result: dict[str, Any]) -> None:
    assert result["nodes"]["Target"] != result["nodes"]["Draft"]


@pytest.mark.parametrize("mode", ["synchronous", "lookahead"])
def test_answers_are_those_of_plain_decoding(result: dict[str, Any], mode: str) -> None:
    assert result[mode]["ids"] == result["off"]["ids"]
    assert result[mode]["accepted"] > 0
    assert mode != "lookahead" or result[mode]["hits"] > 0


def test_the_death_of_the_drafts_node_fails_no_request(result: dict[str, Any]) -> None:
    for phase in ("dying", "without"):
        assert set(result[phase]["ends"]) == {"length"}
        assert result[phase]["ids"] == result["off"]["ids"]


def test_a_new_node_brings_the_draft_back(result: dict[str, Any]) -> None:
    assert result["back_after_seconds"] > 0
