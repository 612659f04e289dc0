"""``rag-service reranker train`` and ``rag-service tune retrieval``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rag_service.cli.asked import ConfigOption, DocumentsOption, LimitOption, QuestionsOption, whole_numbers
from rag_service.cli.index import indexed, load_settings, opened
from rag_service.cli.output import EXIT_USAGE, CommandError, JsonFlag, emit, note, progress

if TYPE_CHECKING:
    from retrieval.tuning import Trial


def train(
    output: Annotated[Path, typer.Argument(help="Folder for the trained reranker.")],
    questions: QuestionsOption = None,
    documents: DocumentsOption = None,
    limit: LimitOption = None,
    depth: Annotated[int, typer.Option(min=5, help="Candidates a question.")] = 30,
    folds: Annotated[int, typer.Option(min=2, max=20, help="Folds of the held-out evaluation.")] = 5,
    dimension: Annotated[int, typer.Option(min=8, help="Dimensions of stored token vectors.")] = 160,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train the small reranker on one's own questions, and say what it brings on held-out documents.

    With --documents, they are indexed for this alone. Without, the configured index is searched: its stored
    vectors stay as they are, and only the network is trained. Use it by setting retrieval.reranker.model to
    the folder.
    """
    from retrieval.evaluation import limit_per_domain, load_questions
    from retrieval.ranker_building import build_ranker, retrain_ranker

    if not questions:
        raise CommandError(
            "Name at least one file of questions with --questions.", EXIT_USAGE, "no_questions"
        )
    settings = load_settings(config)
    asked = limit_per_domain(load_questions(questions), limit)
    with progress() as bar:
        tasks: dict[str, Any] = {}

        def watch(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        if documents:
            built = build_ranker(
                settings.retrieval, settings.cache_folder, documents, asked, depth, folds, dimension, watch
            )
        else:
            with opened(settings) as service:
                built = retrain_ranker(service, asked, depth, folds, watch)
    built.model.save(output)
    result = {
        "folder": str(output),
        "num_examples": built.num_examples,
        "held_out": built.held_out,
        "unseen": built.unseen,
        "before": built.before,
    }
    table = Table("domain", "questions", "nDCG@10 before", "held out", "domain unseen")
    for domain, figures in built.held_out.items():
        others = (built.before, built.held_out, built.unseen)
        row = (f"{figures_of[domain]['ndcg@10']:.3f}" if figures_of else "-" for figures_of in others)
        table.add_row(domain, str(figures["num_questions"]), *row)
    emit(result, table, as_json=as_json)


def tune_retrieval(
    questions: QuestionsOption = None,
    documents: DocumentsOption = None,
    limit: LimitOption = 20,
    chunk_tokens: Annotated[str, typer.Option(help="Chunk sizes, with commas.")] = "128,224",
    depths: Annotated[str, typer.Option(help="Rerank depths, with commas; 0: no reranking.")] = "0,10,20,30",
    batch_sizes: Annotated[str, typer.Option(help="Embedding batch sizes, with commas.")] = "8,16,32",
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Sweep chunk size, embedding batch and rerank depth; print quality against latency, the frontier marked."""
    from retrieval.evaluation import limit_per_domain, load_questions
    from retrieval.tuning import batch_speeds, fastest_equal, frontier, measure, sample_texts, with_chunking

    if not questions or not documents:
        raise CommandError("Name files with --questions and --documents.", EXIT_USAGE, "no_questions")
    settings = load_settings(config)
    sizes, wanted = whole_numbers(chunk_tokens, "--chunk-tokens"), whole_numbers(depths, "--depths")
    batches = whole_numbers(batch_sizes, "--batch-sizes")
    asked = limit_per_domain(load_questions(questions), limit)
    trials: list[Trial] = []
    speeds: dict[int, dict[int, float]] = {}
    for size in sizes:
        note(f"Chunks of {size} tokens.")
        retrieval = with_chunking(settings.retrieval, size)
        with indexed(settings, documents, retrieval) as service:
            trials += measure(service, asked, wanted, size)
            texts = sample_texts(service, asked)
        speeds[size] = batch_speeds(retrieval, settings.cache_folder, texts, batches)
    best, fastest = fastest_equal(trials)
    on_frontier = frontier(trials)
    rows = [{**trial.as_dict(), "on_frontier": trial in on_frontier} for trial in trials]
    result = {
        "trials": rows,
        "embedder_chunks_per_second": speeds,
        "best": best.as_dict(),
        "fastest_of_equal_quality": fastest.as_dict(),
        "latency_saved": 1.0 - fastest.p50_seconds / best.p50_seconds,
    }
    emit(result, _trials_table(rows, result), as_json=as_json)


def _trials_table(rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> Table:
    fastest = result["fastest_of_equal_quality"]
    speeds = "; ".join(
        f"{size} tokens: " + ", ".join(f"batch {batch} {speed:.1f}" for batch, speed in of_size.items())
        for size, of_size in result["embedder_chunks_per_second"].items()
    )
    table = Table(
        "chunk tokens", "depth", "nDCG@10", "recall@10", "p50 ms", "p95 ms", "bytes a chunk", "",
        caption=f"Chunks of {fastest['chunk_tokens']} tokens, {fastest['depth']} reranked: as good as the best "
        f"but for noise, {result['latency_saved']:.0%} less latency. Embedder, chunks/s: {speeds}.",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("chunk_tokens", "depth")),
            *(f"{row[name]:.3f}" for name in ("ndcg@10", "recall@10")),
            *(f"{1000 * row[name]:.1f}" for name in ("p50_seconds", "p95_seconds")),
            str(row["bytes_per_chunk"]),
            "frontier" if row["on_frontier"] else "",
        )
    return table
