"""What commands that make, measure and train drafts have in common: their options, and prompts of questions."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from rag_service.cli.output import EXIT_USAGE, CommandError, console, note, progress

if TYPE_CHECKING:
    from generation.distillation.prompts import DistillationPrompt
    from rag_service.config import Settings
    from rag_service.prompt_variety import Variety

N = TypeVar("N", int, float)
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
TokensOption = Annotated[
    int, typer.Option("--tokens", min=1, max=16, help="K, the most draft tokens a round.")
]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
ModelAloneOption = Annotated[
    bool, typer.Option("--model-alone", help="Measure the draft model without passages.")
]
MinAlphaOption = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="What the lower end of α's interval must reach in every domain."),
]
LayersOption = Annotated[
    str | None, typer.Option(help="The target's layers to begin with, with commas; default: searched.")
]
NumLayersOption = Annotated[int, typer.Option(min=1, help="How many layers to search for.")]
HeadOption = Annotated[int, typer.Option("--head-size", min=0, help="Ids the head scores; 0: all.")]
MinutesOption = Annotated[
    float, typer.Option(min=0.1, help="Time to train, recording and measuring excluded.")
]
DataMinutesOption = Annotated[
    float | None,
    typer.Option(min=0.1, help="Time to record the target's answers; default: until all are there."),
]
WorkersOption = Annotated[int, typer.Option(min=1, help="Processes that run the target to record answers.")]

Watch = Callable[[str, int, int], None]


def asked_prompts(
    settings: Settings,
    questions: Sequence[Path] | None,
    documents: Sequence[Path] | None,
    *,
    limit: int | None,
    held_out: bool,
    watch: Watch,
    variety: Variety | None = None,
) -> list[DistillationPrompt]:
    """Prompts of the questions in the files; ``variety`` adds prompts to train on."""
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
    return service_prompts(settings, asked, load_documents(list(documents or ())), watch, variety)


def numbers(text: str, option: str) -> list[float]:
    """Numbers from 0 up with commas, each once is enough. Raises ``CommandError``."""
    return _listed(text, option, float, "numbers")


def whole_numbers(text: str, option: str) -> list[int]:
    """Whole numbers from 0 up with commas. Raises ``CommandError``."""
    return _listed(text, option, int, "whole numbers")


def chosen_layers(text: str | None) -> list[int] | None:
    """``--layers`` as numbers. Raises ``CommandError``."""
    return None if text is None else whole_numbers(text, "--layers")


def _listed(text: str, option: str, read: Callable[[str], N], kind: str) -> list[N]:
    try:
        values = [read(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(0 <= value < math.inf for value in values):
        raise CommandError(f"{option} takes {kind} from 0 up with commas, not {text!r}.", EXIT_USAGE, "usage")
    return values


def target_folder(settings: Settings) -> Path:
    """The target's own folder: a draft is made of its weights."""
    from rag_service.draft_choice import resolved

    folder = Path(resolved(settings.engine.target, settings).model)
    if not folder.is_dir():
        raise CommandError(
            f"The target {settings.engine.target.model} must lie in a folder to make a draft of it: "
            "fetch or download it first.",
            EXIT_USAGE,
            "bad_target",
        )
    return folder


@contextmanager
def bars() -> Iterator[Watch]:
    """Progress bars on standard error, one for each thing watched; lines where no terminal draws bars."""
    quiet_libraries()
    if not console().is_terminal:
        yield _Lines()
        return
    with progress() as shown:
        tasks: dict[str, int] = {}

        def watch(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]

        yield watch


class _Lines:
    """A line at every quarter of each thing watched."""

    def __init__(self) -> None:
        self._quarters: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        quarter = 4 * done // max(1, total)
        if quarter > self._quarters.get(what, 0):
            self._quarters[what] = quarter
            note(f"{what}: {done} of {total}")


def quiet_libraries() -> None:
    """Keep transformers' own bars (one a model loaded) out of ours, in this process and those it starts."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
