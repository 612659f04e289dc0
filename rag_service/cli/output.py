"""How every command speaks: results on standard output, everything else on standard error.

With ``--json`` a command prints exactly one object on standard output. Libraries, child processes and
progress bars may print as they like: ``protect_standard_output`` points descriptor 1 at standard error first.
Exit status: 0 done, 1 failed (or a check failed), 2 wrong usage or configuration.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, TextIO

import typer
from pydantic import ValidationError
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from typer.core import TyperGroup

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
OWN_PACKAGES = ("rag_service", "deployments", "retrieval", "generation")

_JSON = "rag_service.json"
_DEBUG = "rag_service.debug"
_real_stdout: TextIO | None = None


class CommandError(Exception):
    """A command cannot go on. ``str()`` is one clear sentence; ``exit_status`` is 1 (failed) or 2 (usage)."""

    def __init__(self, message: str, exit_status: int = EXIT_FAILED, code: str = "failed") -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.code = code


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.meta[_JSON] = True
    return value


def remember_debug(ctx: typer.Context, value: bool) -> bool:
    """Callback of the global ``--debug`` option: errors then keep their traceback."""
    ctx.meta[_DEBUG] = value
    return value


JsonFlag = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on standard output, nothing else.", callback=_remember_json
    ),
]
"""The type of every command's ``as_json`` parameter; give it the default ``False``."""


def console() -> Console:
    """Standard error, for people: progress, notes, errors."""
    return Console(stderr=True, highlight=False)


def note(message: str) -> None:
    """One line for people on standard error."""
    console().print(message, markup=False, soft_wrap=True)


def emit(result: Mapping[str, Any], readable: RenderableType | None = None, *, as_json: bool) -> None:
    """Print a command's result on standard output: the object with ``--json``, otherwise ``readable``.

    ``readable`` None prints the object indented, which is also good reading.
    """
    stream = _real_stdout or sys.stdout
    if as_json or readable is None:
        indent = None if as_json else 2
        stream.write(json.dumps(result, indent=indent, ensure_ascii=False, default=str) + "\n")
    elif isinstance(readable, str):
        stream.write(readable.rstrip("\n") + "\n")
    else:
        Console(file=stream, highlight=False, soft_wrap=False).print(readable)
    stream.flush()


def protect_standard_output() -> None:
    """Keep standard output for ``emit`` alone: what else writes to descriptor 1 reaches standard error."""
    global _real_stdout
    if _real_stdout is None:
        sys.stdout.flush()
        _real_stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)


def progress(*, transfer: bool = False) -> Progress:
    """A progress bar on standard error; ``transfer`` shows bytes instead of counts."""
    amount: ProgressColumn = DownloadColumn() if transfer else MofNCompleteColumn()
    left: ProgressColumn = TimeRemainingColumn() if transfer else TimeElapsedColumn()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), amount, left)
    return Progress(*columns, console=console())


class CommandGroup(TyperGroup):
    """Turns every exception of a command into one sentence and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command; errors never leave a traceback unless ``--debug`` asks for it."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            note("Interrupted.")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            if not is_own_kind(error) or ctx.meta.get(_DEBUG):
                raise
            status = report_error(error, as_json=bool(ctx.meta.get(_JSON)))
            raise typer.Exit(status) from None


def is_own_kind(error: Exception) -> bool:
    """Whether this handler should speak for the error; usage errors of typer speak for themselves."""
    return type(error).__module__.split(".")[0] != "typer"


def report_error(error: Exception, *, as_json: bool) -> int:
    """Say what went wrong in one sentence on standard error (and as ``{"error": …}`` with ``--json``)."""
    message = sentence(error)
    note(f"Error: {message}")
    if as_json:
        code = getattr(error, "code", None)
        shown = code if isinstance(code, str) else "failed"
        emit({"error": {"message": message, "code": shown}}, as_json=True)
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return status
    return EXIT_USAGE if _is_configuration(error) else EXIT_FAILED


def _is_configuration(error: Exception) -> bool:
    return isinstance(error, ValidationError) or type(error).__name__ == "ConfigError"


def sentence(error: Exception) -> str:
    """One sentence about an error, for a person who has not read the code."""
    if isinstance(error, ValidationError):
        return _validation_sentence(error)
    if type(error).__module__.split(".")[0] in OWN_PACKAGES:
        return str(error) or type(error).__name__
    if isinstance(error, OSError):
        return _os_sentence(error)
    text = " ".join(str(error).split()) or "no details"
    return f"Unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)."


def _validation_sentence(error: ValidationError) -> str:
    parts = [f"{'.'.join(str(key) for key in issue['loc'])}: {issue['msg']}" for issue in error.errors()]
    return f"Invalid {error.title}: " + "; ".join(parts) + "."


def _os_sentence(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"No space is left on the disk{where}."
    if error.errno == errno.EACCES:
        return f"Permission denied{where}."
    if error.errno == errno.ENOENT:
        return f"No such file or folder{where}."
    return f"{error.strerror or error}{where}."
