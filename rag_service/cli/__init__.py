"""The ``rag-service`` command: the composition root, which alone may import ``deployments``.

A module that is named for its command has ``register(app)``, and loads its heavy parts inside the command, so
that ``--help`` stays quick.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Annotated

import typer

from rag_service.cli.output import CommandGroup, protect_standard_output, remember_debug

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
    """Add what every module of this package registers."""
    for found in pkgutil.iter_modules(__path__):
        register = getattr(importlib.import_module(f"{__name__}.{found.name}"), "register", None)
        if register is not None:
            register(app)


register_commands()


def main() -> None:
    """Entry point of the ``rag-service`` script."""
    if "--json" in sys.argv[1:]:
        protect_standard_output()
    app(prog_name="rag-service")
