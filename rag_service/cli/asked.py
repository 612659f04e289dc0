"""What commands that measure on questions have in common: their options, and prompts made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_service.cli.output import EXIT_USAGE, CommandError, note, progress

if TYPE_CHECKING:
    from generation.distillation.prompts import DistillationPrompt
    from rag_service.config import Settings

QuestionsOption = Annotated[
    list[Path] | None, typer.Option("--questions", help="JSON Lines of questions; may be repeated.")
]
DocumentsOption = Annotated[
    list[Path] | None,
    typer.Option("--documents", help="JSON Lines of documents, indexed for this run alone; may be repeated."),
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Questions a domain at most.")]
HeldOutOption = Annotated[
    bool, typer.Option("--held-out", help="Only questions that the packaged drafts were not trained on.")
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="Packaged name, folder or hub id; default: the configured one.")
]
DraftOption = Annotated[
    str | None, typer.Option("--draft", help="Draft folder or hub id; default: the configured one.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Configuration file.")]

Watch = Callable[[str, int, int], None]


def asked_prompts(
    settings: Settings,
    questions: Sequence[Path] | None,
    documents: Sequence[Path] | None,
    *,
    limit: int | None,
    held_out: bool,
    watch: Watch,
) -> list[DistillationPrompt]:
    """Prompts of the questions in the files, or of the packaged sample questions when none is named."""
    from generation.distillation.prompts import is_held_out
    from rag_service.question_set import limited, load_documents, load_questions, service_prompts

    if not questions:
        raise CommandError(
            "Name at least one file of questions with --questions.", EXIT_USAGE, "no_questions"
        )
    asked = load_questions(list(questions))
    if held_out:
        asked = [question for question in asked if is_held_out(question.id)]
        if not asked:
            raise CommandError("None of these questions is a held-out one.", EXIT_USAGE, "no_questions")
    asked = limited(asked, limit)
    if not documents:
        note("Searching the configured index, since no --documents are given.")
    return service_prompts(settings, asked, load_documents(list(documents or ())), watch)


@contextmanager
def bars() -> Iterator[Watch]:
    """Progress bars on standard error, one for each thing watched."""
    with progress() as shown:
        tasks: dict[str, int] = {}

        def watch(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]

        yield watch
