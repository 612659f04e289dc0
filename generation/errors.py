"""What is raised for a model that cannot be used."""

from __future__ import annotations


class ModelNotUsable(Exception):
    """A model cannot be loaded or paired; ``str()`` is one clear sentence."""


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
