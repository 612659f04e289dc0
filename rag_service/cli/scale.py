"""``rag-service scale DEPLOYMENT N``: another number of replicas, while requests go on."""

from __future__ import annotations

from typing import Annotated

import typer

from rag_service.cli.config import ConfigOption
from rag_service.cli.output import CommandError, JsonFlag, console, emit

RayOption = Annotated[
    str | None, typer.Option("--ray", help="Address of the Ray; default: RAY_ADDRESS, else this machine's.")
]


def scale(
    deployment: Annotated[
        str, typer.Argument(help="Gateway, Retriever, Reranker, Target or Draft (any case).")
    ],
    num_replicas: Annotated[int, typer.Argument(min=0, help="Replicas to run; 0 for Draft alone.")],
    config_file: ConfigOption = None,
    ray_address: RayOption = None,
    wait: Annotated[bool, typer.Option(help="Return when exactly that many run and none drains.")] = True,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for them.")] = 300.0,
    as_json: JsonFlag = False,
) -> None:
    """Change the number of replicas of one deployment of the running service.

    Give the service's own --config, which says what may be scaled. A replica that goes ends its streams first.
    Holds until the service is started or deployed anew. Exit status 1: not there in time.
    """
    from deployments import scaling
    from rag_service.serve_config import load_settings

    settings = load_settings(config_file)
    name = deployment.capitalize()
    scaling.connect(settings, ray_address)
    scaling.scale(settings, name, num_replicas)
    if wait:
        with console().status(f"Waiting for {num_replicas} replicas of {name}"):
            try:
                scaling.wait_for(name, num_replicas, timeout)
            except TimeoutError as error:
                raise CommandError(f"{error} They are still asked for.", code="timeout") from None
    done = "runs" if wait else "was asked for"
    emit(
        {"deployment": name, "num_replicas": num_replicas, "waited": wait},
        f"{name} {done} with {num_replicas} {'replica' if num_replicas == 1 else 'replicas'}.",
        as_json=as_json,
    )


def register(app: typer.Typer) -> None:
    """Add the ``scale`` command."""
    app.command("scale")(scale)
