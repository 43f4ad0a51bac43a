"""Tokens are sent with the text that they begin, and no token of a stop string is sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.contracts.generation import TokenLogprob
from serve_app.model.logprob_alignment import TokenAligner


def tokens(*texts: str | bytes) -> list[TokenLogprob]:
    raws = [text.encode() if isinstance(text, str) else text for text in texts]
    return [TokenLogprob(0, raw.decode(errors="replace"), raw, -1.0) for raw in raws]


def align(aligner: TokenAligner, text: str, *came: str | bytes) -> list[bytes]:
    return [token.raw for token in aligner.align(text, tokens(*came))]


def test_tokens_go_with_their_text() -> None:
    aligner = TokenAligner()
    assert align(aligner, "Hello", "Hel", "lo") == [b"Hel", b"lo"]
    assert align(aligner, " you", " you") == [b" you"]


def test_a_token_that_is_ahead_of_the_text_waits_for_it() -> None:
    aligner = TokenAligner()
    assert align(aligner, "a", "a", "EN") == [b"a"]
    assert align(aligner, "ENx", "x") == [b"EN", b"x"]


def test_a_token_whose_first_byte_is_out_goes_though_its_rest_is_held_back() -> None:
    aligner = TokenAligner()
    assert align(aligner, "a ", "a", " EN") == [b"a", b" EN"]
    assert align(aligner, "ENd", "d") == [b"d"]


def test_tokens_of_a_stop_string_never_go() -> None:
    aligner = TokenAligner()  # stop is "END"; both deltas may be one, as when guesses were accepted or deltas joined
    assert align(aligner, "a ", "a", " E", "N", "D") == [b"a", b" E"]


def test_tokens_of_one_character_go_together_with_it() -> None:
    wave = "👋".encode()
    aligner = TokenAligner()
    assert align(aligner, "👋", wave[:1], wave[1:3], wave[3:]) == [wave[:1], wave[1:3], wave[3:]]


def test_the_blank_before_a_replys_first_word_is_no_text_and_tokens_stay_in_step() -> None:
    aligner = TokenAligner()  # stop is "END"
    assert align(aligner, "Hi", " Hi") == [b" Hi"]
    assert align(aligner, " ", " EN") == [b" EN"]
    assert align(aligner, "", "D") == []


def test_a_first_word_that_may_begin_a_stop_string_waits_with_its_blank() -> None:
    aligner = TokenAligner()
    assert align(aligner, "", " EN") == []
    assert align(aligner, "ENx", "x") == [b" EN", b"x"]


@pytest.mark.parametrize("odd", ["<|end|>", b"\xf0\x9f"], ids=["a special token", "half a character"])
def test_where_tokens_do_not_spell_the_text_none_is_lost(odd: str | bytes) -> None:
    aligner = TokenAligner()
    assert align(aligner, "a", "a", "b") == [b"a"]
    raw = odd.encode() if isinstance(odd, str) else odd
    assert align(aligner, "b\ufffd", odd) == [b"b", raw]
    assert align(aligner, "c", "c") == [b"c"]


pieces = st.lists(st.text("ab👋ñ\n", min_size=1, max_size=3), min_size=1, max_size=8)


@given(
    pieces=pieces,
    cuts=st.lists(st.integers(1, 4), min_size=8, max_size=8),
    lag=st.integers(0, 4),
    end=st.integers(0, 20),
)
def test_however_deltas_are_cut_the_same_tokens_are_sent(
    pieces: list[str], cuts: list[int], lag: int, end: int
) -> None:
    """The text runs up to `lag` characters behind the tokens and ends at `end`, where a stop string was found."""
    whole = "".join(pieces)[:end]
    aligner, seen, out = TokenAligner(), "", ""
    found: list[TokenLogprob] = []
    waiting = list(pieces)
    for cut in cuts:
        some, waiting = waiting[:cut], waiting[cut:]
        seen += "".join(some)
        text = whole[len(out) : max(0, len(seen) - lag)] if waiting else whole[len(out) :]
        out += text
        found += aligner.align(text, tokens(*some))
    starts = [len("".join(pieces[:number])) for number in range(len(pieces))]
    assert out == whole
    assert [token.text for token in found] == [
        piece for piece, start in zip(pieces, starts, strict=True) if start < len(whole)
    ]


def test_behind_a_token_without_text_no_token_of_a_stop_string_goes_either() -> None:
    aligner = TokenAligner()  # the end-of-sequence token is ignored, stop is "##"
    assert align(aligner, "a", "a") == [b"a"]
    assert align(aligner, "b", "<eos>", "b") == [b"<eos>", b"b"]
    assert align(aligner, "c", "c", "#", "#") == [b"c"]
