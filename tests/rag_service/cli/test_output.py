"""Every command's manners: exit status, purity of ``--json``, one sentence and no traceback."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from rag_service.cli import app, output
from rag_service.cli.output import CommandError, CommandGroup, JsonFlag, emit, remember_debug
from rag_service.config import ConfigError
from retrieval.types import RetrievalError


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own."""
    import os

    code = "from rag_service.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        check=False,
    )


def failing(error: Exception) -> typer.Typer:
    """A command group whose command raises."""
    small = typer.Typer(cls=CommandGroup, pretty_exceptions_enable=False)

    @small.callback()
    def root(debug: bool = typer.Option(False, "--debug", callback=remember_debug)) -> None:
        """Root."""

    @small.command("fail")
    def fail(as_json: JsonFlag = False) -> None:
        raise error

    return small


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (CommandError("It broke."), 1, "It broke."),
        (CommandError("Wrong use.", 2), 2, "Wrong use."),
        (ConfigError("There is no setting x."), 2, "There is no setting x."),
        (RetrievalError("No index."), 1, "No index."),
        (OSError(errno.ENOSPC, "full", "/some/file"), 1, "No space is left on the disk (/some/file)."),
        (FileNotFoundError(errno.ENOENT, "none", "here.txt"), 1, "No such file or folder (here.txt)."),
        (KeyError("odd"), 1, "Unexpected KeyError"),
    ],
)
def test_errors_are_one_sentence_with_a_status(error: Exception, status: int, said: str) -> None:
    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.exit_code == status
    assert result.stdout == ""
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_error_with_json_is_one_object_with_its_code() -> None:
    result = CliRunner().invoke(failing(RetrievalError("No index.", "no_index")), ["fail", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"error": {"message": "No index.", "code": "no_index"}}


def test_debug_keeps_the_traceback() -> None:
    result = CliRunner().invoke(failing(CommandError("It broke.")), ["--debug", "fail"])
    assert isinstance(result.exception, CommandError)


def test_interrupt_has_the_usual_status() -> None:
    small = typer.Typer(cls=CommandGroup)

    @small.callback()
    def root() -> None:
        """Root."""

    @small.command("wait")
    def wait() -> None:
        raise KeyboardInterrupt

    assert CliRunner().invoke(small, ["wait"]).exit_code == 130


NOISY = """
import os, subprocess, sys
from rag_service.cli.output import emit, protect_standard_output
protect_standard_output()
print("a library prints")
os.write(1, b"native code prints\\n")
subprocess.run(["echo", "a child prints"], check=True)
emit({"answer": 42}, as_json=True)
"""


def test_nothing_but_the_object_reaches_standard_output() -> None:
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"answer": 42}
    for said in ("a library prints", "native code prints", "a child prints"):
        assert said in done.stderr


def test_usage_errors_exit_2_without_a_traceback() -> None:
    for arguments in (["no-such-command"], ["models", "fetch", "--no-such-option"], ["ask"]):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert done.stdout == ""
        assert "Traceback" not in done.stderr


def test_emit_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"name": "ä"}, as_json=False)
    emit({"name": "ä"}, "readable", as_json=False)
    assert capsys.readouterr().out == '{\n  "name": "ä"\n}\nreadable\n'
    assert output.sentence(ValueError("two\nlines")).count("\n") == 0


def test_every_command_offers_json() -> None:
    """Whatever helper wrote it: a command without ``--json`` is a mistake."""

    def leaves(command: object, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], object]]:
        below = getattr(command, "commands", None)
        if below is None:
            return [(path, command)]
        return [leaf for name, child in below.items() for leaf in leaves(child, (*path, name))]

    found = leaves(typer.main.get_command(app), ())
    assert len(found) >= 5
    for path, command in found:
        options = {name for parameter in command.params for name in parameter.opts}  # type: ignore[attr-defined]
        assert "--json" in options, " ".join(path)
