"""What is wrong with settings, in one sentence that names the setting."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError


def explained(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence on the first thing wrong in settings of ``model``; an unknown name with the nearest known."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        known = _known_names(model, first["loc"][:-1])
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        return f"There is no setting {path}" + (f"; did you mean {nearest[0]}?" if nearest else ".")
    return f"The setting {path} is not usable: {first['msg']} (given: {first['input']!r})."


def _known_names(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = model.model_fields.get(str(part))
        below = _alternatives(field.annotation) if field else []
        if not below:
            return []
        model = below[0]
    return list(model.model_fields)


def _alternatives(annotation: Any) -> list[type[BaseModel]]:
    origins = (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if typing.get_origin(annotation) in origins else (annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
