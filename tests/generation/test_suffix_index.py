"""The suffix index against a straightforward search, and the drafters that copy with it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from generation.drafters.passages import HistoryDrafter, HistoryStore, MatchAcceptance, PassageDrafter
from generation.drafters.suffix_index import LENGTHS, SuffixIndex

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def search(text: list[int], suffix: list[int]) -> tuple[int, int] | None:
    """The latest place after the longest known ending, by looking everywhere."""
    for length in reversed(LENGTHS):
        if length > len(suffix):
            continue
        wanted = suffix[len(suffix) - length :]
        places = [end for end in range(length, len(text)) if text[end - length : end] == wanted]
        if places:
            return places[-1], length
    return None


@settings(max_examples=200, deadline=None)
@given(TOKENS, TOKENS)
def test_find_is_the_search(text: list[int], suffix: list[int]) -> None:
    assert SuffixIndex(text).find(suffix) == search(text, suffix)


@settings(max_examples=100, deadline=None)
@given(TOKENS, st.lists(st.integers(1, 9), max_size=12))
def test_growing_in_pieces_is_growing_at_once(text: list[int], pieces: list[int]) -> None:
    index, start = SuffixIndex(), 0
    for size in pieces:
        index.extend(text[start : start + size])
        start += size
    index.extend(text[start:])
    for end in range(len(text) + 1):
        assert index.find(text[:end]) == SuffixIndex(text).find(text[:end])


def test_the_newest_occurrence_wins() -> None:
    index = SuffixIndex([1, 2, 7, 1, 2, 8, 5])
    assert index.find([1, 2]) == (5, 2)
    assert index.continuation(5, 2) == (8, 5)


def test_the_end_itself_is_no_match() -> None:
    """What follows the last token is not known yet."""
    assert SuffixIndex([4, 5]).find([5]) is None


def test_copies_run_on_where_the_text_ends() -> None:
    index = SuffixIndex([1, 2, 1, 2])
    place, _ = index.find([1, 2]) or (0, 0)
    assert index.continuation(place, 5) == (1, 2, 1, 2, 1)


def test_nothing_matches_or_runs_across_a_separator() -> None:
    index = SuffixIndex([1, 2, 3])
    index.separate()
    index.extend([4, 5, 6, 4])
    assert index.find([3]) is None  # its only continuation is the separator
    assert index.find([3, 4]) is None or index.find([3, 4]) == (5, 1)
    assert index.continuation(1, 9) == (2, 3)


def test_entries_grow_by_a_constant_a_token() -> None:
    index = SuffixIndex(range(1000))
    assert sum(len(places) for places in index._places.values()) <= len(LENGTHS) * 1000


# -- passages ---------------------------------------------------------------------------------------------


def test_passages_are_copied_after_a_long_enough_match() -> None:
    drafter = PassageDrafter([9, 8, 50, 51], passages=[[50, 51, 52, 53, 54]], min_match=2)
    match = drafter.match((), 3)
    assert match is not None
    assert (match.token_ids, match.match_length, match.kind) == ((52, 53, 54), 2, "passages")
    proposal = match.proposal()
    assert proposal.kinds == ("passages",) * 3
    assert proposal.support_probs is None
    assert PassageDrafter([9, 8, 49, 51], passages=[[50, 51, 52]], min_match=2).match((), 3) is None


def test_the_answer_itself_is_text_to_copy() -> None:
    drafter = PassageDrafter([1], min_match=2)
    drafter.extend([30, 31, 32, 33, 7, 30, 31])
    match = drafter.match((), 2)
    assert match is not None
    assert match.token_ids == (32, 33)


def test_tokens_ahead_extend_the_suffix_without_being_kept() -> None:
    drafter = PassageDrafter([10, 11, 12, 13, 14, 10], min_match=2)
    match = drafter.match((11, 12), 2)
    assert match is not None
    assert match.token_ids == (13, 14)
    assert drafter.match((99,), 2) is None


# -- history -------------------------------------------------------------------------------------------------


def test_history_needs_a_longer_match_and_stays_bounded() -> None:
    history = HistoryDrafter(max_tokens=100, min_match=3)
    for answer in range(50):
        history.add([answer, answer + 1, answer + 2, answer + 3, answer + 4])
        assert len(history) <= 140  # two generations and their separators
    match = history.match([49, 50, 51], 2)
    assert match is not None
    assert (match.token_ids, match.kind) == ((52, 53), "history")
    assert history.match([50, 51], 2) is None
    assert history.match([1, 2, 3], 2) is None  # forgotten


def test_an_answer_larger_than_the_budget_is_cut() -> None:
    history = HistoryDrafter(max_tokens=20)
    history.add(list(range(1000)))
    assert len(history) <= 22


def test_history_never_crosses_tenants_or_domains() -> None:
    store = HistoryStore(max_tokens=1000)
    store.get("acme", "legal").add([1, 2, 3, 4, 5])
    assert store.get("acme", "legal").match([1, 2, 3], 2) is not None
    assert store.get("other", "legal").match([1, 2, 3], 2) is None
    assert store.get("acme", "medical").match([1, 2, 3], 2) is None


def test_the_least_recently_used_group_is_forgotten() -> None:
    store = HistoryStore(max_tokens=100, max_groups=2)
    store.get("a", "x").add([1, 2, 3, 4])
    store.get("b", "x").add([1, 2, 3, 4])
    store.get("a", "x")
    store.get("c", "x")
    assert store.get("a", "x").match([1, 2, 3], 1) is not None
    assert len(store._groups) == 2


def test_match_acceptance_is_learned_by_length() -> None:
    acceptance = MatchAcceptance()
    assert acceptance.rate(16) > acceptance.rate(2) > acceptance.rate(1)
    for _ in range(300):
        acceptance.update(16, num_accepted=0, num_tested=1)
        acceptance.update(2, num_accepted=5, num_tested=5)
    assert acceptance.rate(16) < 0.1
    assert acceptance.rate(2) > 0.95
