"""Answers held to a schema: masks along drafts, ends, errors, and exactness of cut proposals."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from generation import acceptance
from generation.drafters.link import LocalLink
from generation.drafters.model import DraftWorker
from generation.grammar import Grammar, GrammarCompiler
from generation.types import DraftProposal, GenerationError
from generation.verifier import within_grammar
from tests.generation.enumeration import Enumerator, Uniform, branching_inverse_cdf
from tests.generation.fakes import make_engine, make_request, markov_model, random_table, run
from tests.generation.real_model import load_target

ALPHABET = '{}[]":,.-+ \\abcdefghijklmnopqrstuvwxyz0123456789E'
END = len(ALPHABET)
V = END + 1
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["n", "b"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One character a token, byte-level as the grammar library wants it."""
    letters = {("Ġ" if c == " " else c): i for i, c in enumerate(ALPHABET)}
    made = Tokenizer(BPE({**letters, "<end>": END}, merges=[]))
    made.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, eos_token="<end>")


def ids(text: str) -> list[int]:
    return [ALPHABET.index(c) for c in text]


def grammar(tokenizer: Any, schema: str = SCHEMA) -> Grammar:
    return GrammarCompiler(tokenizer, V).compile(schema)


def test_masks_follow_the_draft_and_stop_where_it_leaves_the_grammar(tokenizer: Any) -> None:
    held = grammar(tokenizer)
    masks = held.allowed_along(ids('{"n"'))
    assert len(masks) == 5
    assert masks[0][ids("{")[0]]
    assert not masks[0][ids("n")[0]]
    assert len(held.allowed_along(ids('{"zz'))) == 3  # {, " may stand; z may not
    assert held.allowed_along([END])[0].dtype == torch.bool
    assert len(held.allowed_along([END])) == 1


def test_looking_along_a_draft_leaves_no_trace(tokenizer: Any) -> None:
    held = grammar(tokenizer)
    before = held.allowed_along([])[0]
    for draft in ('{"n":1', "{{{", '{"b"'):
        held.allowed_along(ids(draft))
        assert torch.equal(held.allowed_along([])[0], before)
    for token_id in ids('{"n": 4, "b": true}'):
        held.advance(token_id)
    assert held.allowed_along([])[0].nonzero()[:, 0].tolist() in ([END], [])


def test_a_forbidden_token_is_an_error_of_this_answer(tokenizer: Any) -> None:
    with pytest.raises(GenerationError, match="grammar") as failure:
        grammar(tokenizer).advance(ids("z")[0])
    assert failure.value.code == "grammar_failed"


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        '{"type": "nonsense"}',
        '{"type": 7}',
        "[1]",
        '{"$ref": "#"}',
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
        '{"allOf": [{"$ref": "#"}]}',
    ],
)
def test_bad_schemas_are_refused_by_name(tokenizer: Any, schema: str) -> None:
    with pytest.raises(GenerationError, match="schema") as failure:
        grammar(tokenizer, schema)
    assert failure.value.code == "invalid_schema"


def engine(tokenizer: Any, **speculation: Any) -> Any:
    target = markov_model(random_table(V, seed=6), eos_token_ids=(END,))
    draft = DraftWorker(markov_model(random_table(V, seed=7)), num_slots=8, slot_length=256)
    return make_engine(
        target,
        tokenizer,
        colocated=LocalLink(draft),
        num_tokens=8 * 256,
        speculation={"mode": "colocated", "num_draft_tokens": 3, **speculation},
    )


@pytest.mark.parametrize("method", ["token", "block"])
def test_random_models_write_valid_json(tokenizer: Any, method: str) -> None:
    """Models that know nothing of JSON, drafts included: what is finished is valid, always."""
    requests = [
        make_request(f"r{i}", [1], json_schema=SCHEMA, max_tokens=120, temperature=t, seed=s, min_tokens=m)
        for i, (t, s, m) in enumerate([(0.0, None, 0), (1.0, None, 0), (1.0, 3, 0), (1.3, 4, 30)])
    ]
    finished = 0
    for answer in run(engine(tokenizer, acceptance=method), requests).values():
        assert answer.last.finish_reason in ("stop", "length"), answer.last.error
        if answer.last.finish_reason == "stop":
            assert set(json.loads(answer.text)) == {"n", "b"}
            finished += 1
    assert finished >= 1


def test_a_bad_schema_does_not_harm_others(tokenizer: Any) -> None:
    made = engine(tokenizer)
    requests = [
        make_request("bad", [1], json_schema="{", max_tokens=3),
        make_request("good", [1], max_tokens=3, ignore_eos=True),
    ]
    got = run(made, requests)
    assert got["bad"].last.finish_reason == "error"
    assert "schema" in str(got["bad"].last.error)
    assert got["good"].last.finish_reason == "length"
    made.check_integrity()


@pytest.mark.parametrize("rule", [acceptance.verify_token_wise, acceptance.verify_block])
@pytest.mark.parametrize("seed", range(4))
def test_proposals_cut_by_a_grammar_stay_exact(rule: Any, seed: int) -> None:
    """Three drafted tokens over {0, 1, 2} of which 2 is forbidden everywhere.

    The length of what is verified then depends on the tokens. Both rules keep a prefix with a probability that
    the prefix alone decides, so both stay exact; here by enumeration, with tables that differ by prefix.
    """
    generator = np.random.default_rng(seed)
    prefixes = [p for n in range(4) for p in itertools.product(range(3), repeat=n)]
    draft = {p: generator.dirichlet([1.0] * 3) for p in prefixes}
    target = {p: np.append(generator.dirichlet([0.7] * 2), 0.0) for p in prefixes}
    tree = Enumerator()

    def program() -> tuple[int, ...]:
        drafted: list[int] = []
        for _ in range(3):
            drafted.append(tree.choose(draft[tuple(drafted)].tolist()))
        stands = next((i for i, t in enumerate(drafted) if t == 2), 3)
        starts = [tuple(drafted[:i]) for i in range(4)]
        supports = np.stack([draft[p] for p in starts[:3]])
        proposal = within_grammar(
            DraftProposal(tuple(drafted), np.tile(np.arange(3), (3, 1)), supports),  # type: ignore[arg-type]
            [torch.tensor([True, True, False])] * (stands + 1),
        )
        assert len(proposal) == stands
        rows = np.stack([target[p] for p in starts[: stands + 1]])
        tokens = rule(rows, proposal, [Uniform(tree)] * (stands + 1)).token_ids
        while len(tokens) < 3:  # later rounds are the target's
            tokens = (*tokens, tree.choose(target[tokens].tolist()))
        return tuple(tokens[:3])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "inverse_cdf", branching_inverse_cdf(tree))
        got = tree.distribution(program)
    for answer in itertools.product(range(2), repeat=3):
        want = np.prod([target[answer[:i]][t] for i, t in enumerate(answer)])
        assert got.get(answer, 0.0) == pytest.approx(want, abs=1e-12)


def test_the_real_tokenizer_compiles() -> None:
    model, tokenizer = load_target()
    held = GrammarCompiler(tokenizer, model.vocab_size).compile(SCHEMA)
    text = tokenizer.encode('{"n": 12, "b": false}', add_special_tokens=False)
    assert len(held.allowed_along(text)) == len(text) + 1
    for token_id in text:
        held.advance(token_id)
    assert held.is_complete or bool(held.allowed_along([])[0][tokenizer.eos_token_id])
