"""The ``rag-service`` command: the composition root, which alone may import ``deployments``.

Each module here is named for its command and has ``register(app)``; modules load their heavy parts inside the
command, so that ``--help`` stays quick.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated

import typer

from rag_service.cli.output import CommandGroup, protect_standard_output, remember_debug

COMMANDS = (
    *("models", "config", "serve", "ask", "status", "keys"),
    *("retrieval", "alpha", "draft", "gate", "tune", "bench"),
)
"""Command modules in the order of ``--help``."""

app = typer.Typer(
    name="rag-service",
    cls=CommandGroup,
    help="Answers with sources, decoded speculatively over separate draft and target replicas.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Keep tracebacks of errors.", callback=remember_debug)
    ] = False,
) -> None:
    """Answers with sources, decoded speculatively over separate draft and target replicas."""


def register_commands() -> None:
    """Load every command module that is installed."""
    for name in COMMANDS:
        module = f"{__name__}.{name}"
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module).register(app)


register_commands()


def main() -> None:
    """Entry point of the ``rag-service`` script."""
    if "--json" in sys.argv[1:]:
        protect_standard_output()
    app(prog_name="rag-service")
