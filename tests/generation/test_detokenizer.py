"""Text as it streams: whole characters, nothing held back longer than a stop string needs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generation.detokenizer import Detokenizer, StopStrings
from generation.types import DraftProposal, Verification
from tests.generation.fakes import make_request
from tests.generation.real_model import load_target


class ByteTokenizer:
    """One byte a token: characters beyond ASCII take two to four."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(t for t in token_ids if t < 256).decode("utf-8", errors="replace")


TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("aé€😀ñ")), max_size=30)


@settings(max_examples=200, deadline=None)
@given(TEXT.filter(lambda text: "�" not in text))
def test_characters_come_whole_and_as_soon_as_they_are_whole(text: str) -> None:
    detokenizer, out = Detokenizer(ByteTokenizer()), ""
    for character in text:
        data = character.encode()
        for byte in data[:-1]:
            assert detokenizer.push(byte) == ""
        piece = detokenizer.push(data[-1])
        assert piece == character
        out += piece
    assert out + detokenizer.flush() == text


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.push("😀".encode()[0]) == ""
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_at_all_lose_nothing(data: list[int]) -> None:
    """What cannot be decoded shows as replacement characters, and what can is all there."""
    detokenizer = Detokenizer(ByteTokenizer())
    out = "".join(detokenizer.push(byte) for byte in data) + detokenizer.flush()
    ascii_only = "".join(chr(byte) for byte in data if byte < 128)
    assert "".join(c for c in out if ord(c) < 128) == ascii_only


@pytest.mark.parametrize(
    "text",
    [
        "Revenue grew by 4 % — naïve café, 東京, עברית, 😀👩‍👩‍👧 and   spaces\n\n\ttabs.",
        " leading space",
        "```python\nprint('é')\n```",
    ],
)
def test_the_real_tokenizer_streams_what_it_decodes(text: str) -> None:
    _, tokenizer = load_target()
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer, pieces = Detokenizer(tokenizer), []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        assert "�" not in pieces[-1]
    assert "".join(pieces) + detokenizer.flush() == text


# -- stop strings --------------------------------------------------------------------------------------------


def streamed(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool, int]:
    """``(text, stopped, longest held back)``."""
    strings, out, held, given_in = StopStrings(stops), "", 0, 0
    for piece in pieces:
        given_in += len(piece)
        text, stopped = strings.push(piece)
        out += text
        if stopped:
            return out, True, held
        held = max(held, given_in - len(out))
    return out + strings.flush(), False, held


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_cut_at_the_first_stop_wherever_the_pieces_break(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    out, stopped, held = streamed(stops, pieces)
    # A stop ends the text as soon as it is complete: the earliest end counts, then the earliest beginning
    # among what had been read by then.
    ends = [end for end in range(len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    assert stopped == bool(ends)
    if not stopped:
        assert out == whole
    else:
        assert whole.startswith(out)
        assert not any(stop in out for stop in stops)
        assert any(whole[len(out) :].startswith(stop) for stop in stops)
    assert held < max(len(stop) for stop in stops)


def test_a_stop_straddling_pieces() -> None:
    assert streamed(["STOP"], ["ab S", "T", "OP cd"]) == ("ab ", True, 2)
    assert streamed(["STOP"], ["ab ST", "AY"])[:2] == ("ab STAY", False)


def test_without_stops_nothing_is_held() -> None:
    assert streamed([], ["a", "b"]) == ("ab", False, 0)
    assert streamed([""], ["a", "b"]) == ("ab", False, 0)


# -- text, ids and logprobs are cut at one place --------------------------------------------------------------


def test_a_stop_inside_an_accepted_run_cuts_text_and_ids_together() -> None:
    from generation.sequence import Sequence as Running
    from generation.types import TokenLogprob

    request = make_request("r", [1], max_tokens=50, stop=("lo w",), logprobs=0)
    running = Running(request, ByteTokenizer())
    text = b"hello world"
    entries = [TokenLogprob(byte, chr(byte), -0.5) for byte in text]
    chunk = running.commit(
        DraftProposal(tuple(text[:-1])),
        Verification(len(text) - 1, tuple(text), "bonus"),
        entries,
        counts=True,
    )
    assert chunk.finish_reason == "stop"
    assert chunk.text == "hel"
    assert bytes(chunk.token_ids) == b"hel"
    assert [entry.token for entry in chunk.logprobs] == list("hel")
    assert chunk.stats is not None
    assert chunk.stats.rounds_by_cause == {"censored": 1}
    assert chunk.stats.num_rejections == 0


@settings(max_examples=150, deadline=None)
@given(
    st.text("abc ", min_size=1, max_size=24),
    st.lists(st.integers(1, 5), min_size=1, max_size=24),
    st.lists(st.text("abc ", min_size=1, max_size=3), max_size=2),
)
def test_chunks_add_up_however_rounds_fall(text: str, rounds: list[int], stops: list[str]) -> None:
    """Text, ids, accepted flags and logprobs stay in step chunk by chunk, whatever the round lengths."""
    from generation.sequence import Sequence as Running
    from generation.types import TokenLogprob

    request = make_request("r", [1], max_tokens=len(text), stop=tuple(stops), logprobs=0)
    running = Running(request, ByteTokenizer())
    data, start, turn = text.encode(), 0, 0
    seen_text, seen_ids = "", b""
    while not running.is_finished:
        size = min(rounds[turn % len(rounds)], len(data) - start)
        piece = tuple(data[start : start + size])
        entries = [TokenLogprob(byte, chr(byte), -1.0) for byte in piece]
        chunk = running.commit(
            DraftProposal(piece[:-1]), Verification(size - 1, piece, "bonus"), entries, counts=True
        )
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.accepted)
        assert [entry.token_id for entry in chunk.logprobs] == list(chunk.token_ids)
        seen_text += chunk.text
        seen_ids += bytes(chunk.token_ids)
        assert seen_ids.decode() == seen_text  # one byte a character here
        start, turn = start + size, turn + 1
    assert text.startswith(seen_text)
    assert not any(stop in seen_text for stop in stops)
    assert (seen_text == text) == (not any(stop in text for stop in stops))
