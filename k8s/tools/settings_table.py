"""Write the table of settings in docs/operations.md from the settings' own types, defaults and docstrings.

``python k8s/tools/settings_table.py`` after a change of a setting; ``--check`` writes nothing.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rag_service.config import Settings

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
REASONS = Path(__file__).with_name("setting_reasons.json")
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field of a class, base classes first."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if not issubclass(kind, BaseModel) or kind is BaseModel:
            continue
        body = ast.parse(inspect.getsource(kind)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                assert isinstance(after, ast.Expr)
                assert isinstance(after.value, ast.Constant)
                found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def knobs(model: type[BaseModel], path: str = "", default: Any = None) -> Iterator[tuple[str, str, str]]:
    """Path, default as JSON, and docstring of every setting below ``model``."""
    texts = docstrings(model)
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        value = getattr(default, name) if default is not None else field.get_default()
        below = next(
            (kind for kind in (field.annotation, *get_args(field.annotation)) if _is_model(kind)), None
        )
        if below is None:
            yield here, _shown(value, here), texts.get(name, "")
        elif value is None:
            yield here, "null", texts.get(name, "")
            if name == "autoscaling":
                yield from knobs(below, here)
        else:
            yield from knobs(below, here, value)


def _rows() -> list[tuple[str, str, str]]:
    """All knobs; those that every deployment has in one row, with each deployment's default where they differ."""
    rows: dict[str, tuple[dict[str, str], str]] = {}
    for path, default, docstring in knobs(Settings):
        top, _, rest = path.partition(".")
        name, _, field = rest.partition(".")
        shared = top == "deployments" and field != "retry_unstarted"
        known, _ = rows.setdefault(f"deployments.*.{field}" if shared else path, ({}, docstring))
        known[name if shared else ""] = default
    return [(path, _one(defaults), text) for path, (defaults, text) in rows.items()]


def _one(defaults: dict[str, str]) -> str:
    if len(set(defaults.values())) == 1:
        return next(iter(defaults.values()))
    return ", ".join(f"{name} {default}" for name, default in defaults.items())


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _shown(value: Any, path: str) -> str:
    if path in ("data_folder", "cache_folder") or value is PydanticUndefined:
        return "see text"
    if isinstance(value, tuple):
        value = list(value)
    return json.dumps(
        value, ensure_ascii=False, default=lambda odd: dict(odd) if hasattr(odd, "keys") else str(odd)
    )


def reasons() -> dict[str, str]:
    """Why a default is what it is, by path or by the last names of a path, for settings that do not say so."""
    known: dict[str, str] = json.loads(REASONS.read_text(encoding="utf-8"))
    return known


def reason(path: str, docstring: str, known: dict[str, str]) -> str:
    """What the table says of a setting: the nearest reason written for it, and its own docstring."""
    names = path.split(".")
    tails = (".".join(names[start:]) for start in range(len(names)))
    written = next((known[tail] for tail in tails if tail in known), "")
    return " ".join(part for part in (docstring, written) if part)


def table() -> str:
    """The table in Markdown, a section a heading."""
    known = reasons()
    lines: list[str] = []
    section = ""
    for path, default, docstring in _rows():
        top = path.split(".")[0] if "." in path else "folders"
        if top != section:
            section = top
            lines += ["", f"### {top}", "", "| setting | default | what and why |", "|---|---|---|"]
        said = reason(path, docstring, known).replace("|", "\\|").replace("``", "`")
        lines.append(f"| `{path}` | `{default}` | {said} |")
    return "\n".join(lines).strip() + "\n"


def document(text: str) -> str:
    """``text`` with the table between its two marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def main() -> int:
    """Write or check the table."""
    text = DOCUMENT.read_text(encoding="utf-8")
    if document(text) == text:
        return 0
    if "--check" in sys.argv:
        print("The settings in docs/operations.md are out of date.")
        return 1
    DOCUMENT.write_text(document(text), encoding="utf-8")
    print("Settings in docs/operations.md written.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
