"""The example clients as they are, run against a gateway on a port."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

CLIENTS = Path(__file__).resolve().parents[2] / "examples" / "clients"
CITED = "The library opens at nine on weekdays. [1] Members may borrow six books. [1]"
QUESTION = "When does the library open?"


async def _run(address: str, *command: str | Path, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        env={**os.environ, "RAG_URL": address, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, error.decode()
    return out.decode()


async def test_openai_python(address: str) -> None:
    out = await _run(address, sys.executable, CLIENTS / "ask_openai.py", QUESTION, "general")
    assert "[1] Library (/v1/documents/library)" in out
    assert CITED in out
    assert "acceptance rate 0.8" in out


async def test_curl(address: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    out = await _run(address, CLIENTS / "ask.sh", QUESTION)
    assert CITED in out
    assert out.rstrip().endswith("data: [DONE]")


async def test_langchain(address: str) -> None:
    pytest.importorskip("langchain_openai")
    out = await _run(address, sys.executable, CLIENTS / "ask_langchain.py", QUESTION)
    assert out.count(CITED) == 2
    assert "'output_tokens': 17" in out


async def test_openai_javascript(address: str) -> None:
    modules = os.environ.get("RAG_NODE_MODULES")
    if shutil.which("node") is None or modules is None:
        pytest.skip("needs node, and RAG_NODE_MODULES naming a node_modules folder with the openai package")
    # An ES module finds packages beside itself alone, so the client is run from where they are.
    client = Path(modules).parent / "ask_openai.mjs"
    shutil.copyfile(CLIENTS / "ask_openai.mjs", client)
    out = await _run(address, "node", client, QUESTION, "general")
    assert CITED in out
    assert "acceptance rate 0.8" in out
