"""What is measured is what the pair is: known α, the same text as plain decoding, honest pooling."""

from __future__ import annotations

import pytest

from rag_service.measurement import Setup, acceptance_table, figures, interleaved, speed_up
from tests.rag_service.pairs import known_pair, letter_prompts, outcome


@pytest.mark.parametrize("mode", ["colocated", "lookahead"])
def test_a_known_acceptance_rate_is_found(mode: str) -> None:
    setup = Setup(mode=mode, num_draft_tokens=3, temperature=1.0, passages=False, max_tokens=60)  # type: ignore[arg-type]
    found = figures(known_pair().run(letter_prompts(40), setup))
    assert found.interval is not None
    assert found.interval[0] < 0.7 < found.interval[1]
    assert found.acceptance_rate == pytest.approx(0.7, abs=0.04)
    assert found.overlap == pytest.approx(0.7, abs=1e-4)  # every position has the same overlap
    assert found.num_requests == 40


def test_block_verification_reports_the_overlap() -> None:
    setup = Setup("colocated", 3, 1.0, passages=False, acceptance="block", max_tokens=40)
    found = figures(known_pair().run(letter_prompts(10), setup))
    assert found.acceptance_rate == found.overlap == pytest.approx(0.7, abs=1e-4)


def test_greedy_answers_are_those_of_plain_decoding_in_any_batch() -> None:
    pair, prompts = known_pair(), letter_prompts(6)
    plain = pair.run(prompts, Setup("off", max_tokens=20))
    for setup in (Setup("colocated", max_tokens=20), Setup("passages", max_tokens=20, batch_size=3)):
        assert [one.token_ids for one in pair.run(prompts, setup)] == [one.token_ids for one in plain]


def test_without_a_draft_nothing_is_tested_and_nothing_is_claimed() -> None:
    pair = known_pair()
    pair.draft = None
    found = figures(pair.run(letter_prompts(3), Setup("off", max_tokens=8)))
    assert (found.acceptance_rate, found.interval, found.accepted_over_drafted) == (None, None, None)
    assert found.mean_acceptance_length == 1.0


def test_pooled_and_mean_of_requests_are_told_apart() -> None:
    table = acceptance_table([outcome(0, 90, 10), outcome(1, 0, 2, domain="blue")])
    assert table["pooled"]["acceptance_rate"] == pytest.approx(90 / 102)
    assert table["pooled"]["acceptance_rate_mean_of_requests"] == pytest.approx(0.45)
    assert table["domains"]["red"]["acceptance_rate"] == 0.9
    assert table["domains"]["red"]["interval"] is None  # one request has no spread
    assert table["domains"]["blue"]["acceptance_rate"] == 0.0


def test_speed_is_compared_a_token_at_a_time() -> None:
    plain = [outcome(0, 0, 1, seconds=3.0), outcome(1, 0, 1, seconds=3.0)]
    longer = [outcome(0, 0, 1, seconds=3.0, token_ids=(0,) * 6), outcome(1, 0, 1, seconds=1.5)]
    ratio, interval = speed_up(plain, longer)
    assert ratio == pytest.approx((6.0 + 3.0) / 4.5)
    assert interval is not None
    assert interval[0] <= 2.0 <= interval[1]


def test_setups_take_turns_and_answer_as_they_do_alone() -> None:
    pair, prompts = known_pair(), letter_prompts(5)
    plain, served = Setup("off", max_tokens=8), Setup("colocated", max_tokens=8)
    seen: list[tuple[int, int]] = []
    first, second = interleaved(
        [(pair, plain), (pair, served)], prompts, lambda run, done: seen.append((run, done)), block=2
    )
    assert seen == [(0, 2), (1, 2), (0, 4), (1, 4), (0, 5), (1, 5)]
    assert [one.token_ids for one in first] == [one.token_ids for one in pair.run(prompts, plain)]
    assert [one.prompt_id for one in second] == [prompt.id for prompt in prompts]
