"""Writers that die at a chosen moment, for child processes: importing this is quick."""

from __future__ import annotations

import os
from pathlib import Path

from retrieval.index.edge import EdgeIndex
from tests.retrieval.stored import make_document


def killed_in_between(folder: Path, when: str) -> None:
    index = EdgeIndex(folder, 4)
    index.replace(make_document(version="v1", num_chunks=3))
    update, calls = index._update, []

    def dying(operation: object) -> None:
        calls.append(operation)
        if when == "before going live" and len(calls) == 2:
            os._exit(9)
        update(operation)
        if when == "before removal" and len(calls) == 2:
            os._exit(9)

    index._update = dying  # type: ignore[method-assign]
    index.replace(make_document(version="v2", num_chunks=2))


def killed_while_writing(folder: Path) -> None:
    index = EdgeIndex(folder, 4)
    index.replace(make_document(version="v1", num_chunks=3))
    index._update = lambda operation: os._exit(9)  # type: ignore[method-assign]
    index.replace(make_document(version="v2", num_chunks=2))
