"""``rag-service evaluate retrieval`` and ``evaluate answers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from rag_service.cli.answer import answer_text, question_body
from rag_service.cli.ask import served_model
from rag_service.cli.asked import ConfigOption, DocumentsOption, LimitOption, QuestionsOption
from rag_service.cli.client import Client, KeyOption, UrlOption
from rag_service.cli.index import indexed, load_settings
from rag_service.cli.output import EXIT_USAGE, CommandError, JsonFlag, emit, progress

SHOWN = ("recall@1", "recall@3", "recall@5", "recall@10", "mrr", "ndcg@10")
MIN_DEPTH = 30
"""Candidates that are reranked, at least."""


def evaluate_retrieval(
    questions: QuestionsOption = None,
    documents: DocumentsOption = None,
    limit: LimitOption = None,
    depth: Annotated[int | None, typer.Option(min=10, help="Candidates to rerank.")] = None,
    configurations: Annotated[
        str, typer.Option(help="Of dense, sparse, hybrid, hybrid+rerank; with commas.")
    ] = "dense,sparse,hybrid,hybrid+rerank",
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Recall, MRR and nDCG by domain of each way of searching, all domains in one index, and latencies."""
    from retrieval.comparison import compare
    from retrieval.evaluation import limit_per_domain, load_questions

    if not questions:
        raise CommandError(
            "Name at least one file of questions with --questions.", EXIT_USAGE, "no_questions"
        )
    settings = load_settings(config)
    asked = limit_per_domain(load_questions(questions), limit)
    names = [name.strip() for name in configurations.split(",") if name.strip()]
    depth = depth or max(MIN_DEPTH, settings.prompt.candidates)
    with indexed(settings, documents) as service, progress() as bar:
        task = bar.add_task("questions", total=len(asked) * len(names))
        result = compare(service, asked, names, depth, lambda: bar.advance(task))
    emit(result, _table(result["configurations"]), as_json=as_json)


def evaluate_answers(
    questions: QuestionsOption = None,
    limit: LimitOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 96,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Ask a running service and measure: do citations resolve, does the answer agree with the references, how
    much of it do its sources support."""
    from rag_service.answer_evaluation import Asked, summarise
    from retrieval.evaluation import limit_per_domain, load_questions

    if not questions:
        raise CommandError(
            "Name at least one file of questions with --questions.", EXIT_USAGE, "no_questions"
        )
    asked = limit_per_domain(load_questions(questions), limit)
    answers: list[Asked] = []
    with Client(url, api_key) as client, progress() as bar:
        model = served_model(client)
        task = bar.add_task("questions", total=len(asked))
        for question in asked:
            body = question_body(
                question.text, question.domain, model, {"max_tokens": max_tokens, "temperature": temperature}
            )
            answer = client.call("POST", "/v1/chat/completions", json=body)
            texts = [str(source["text"]) for source in answer["sources"]]
            answers.append(Asked(question.domain, answer_text(answer), texts, question.answers))
            bar.advance(task)
    result = {"domains": summarise(answers)}
    emit(result, _answers_table(result["domains"]), as_json=as_json)


def _answers_table(domains: Mapping[str, Mapping[str, Any]]) -> Table:
    names = ("cited", "citation_validity", "citation_support", "overlap_f1", "supported")
    table = Table("domain", "answers", "cited", "valid", "cited source supports", "overlap (F1)", "supported")
    for domain, figures in domains.items():
        cells = ["-" if figures[name] is None else f"{figures[name]:.3f}" for name in names]
        table.add_row(domain, str(figures["num_answers"]), *cells)
    return table


def _table(configurations: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("configuration", "domain", "questions", *SHOWN)
    for name, domains in configurations.items():
        for domain, figures in domains.items():
            cells = ["-" if figures[measure] is None else _cell(figures, measure) for measure in SHOWN]
            table.add_row(name, domain, str(figures["num_questions"]), *cells)
        table.add_section()
    return table


def _cell(figures: Mapping[str, Any], measure: str) -> str:
    interval = figures["intervals"].get(measure)
    bounds = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
    return f"{figures[measure]:.3f}{bounds}"
