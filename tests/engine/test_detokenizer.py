from __future__ import annotations

import codecs
import random
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from serve_app.engine.text.detokenizer import Detokenizer, StopFinder, Vocabulary
from tests.engine.fakes import EOS, byte_tokenizer

TEXTS = [
    "plain words, and a line\nbreak",
    "汉字和标点：你好，世界！",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "e\u0301 combining, किमपि, กำ",
    "mixed 汉 👩‍🚀 a\u0308\u0323 ende",
]


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama's kind: ▁ for spaces, bytes for what the vocabulary lacks."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [("▁", -3.0), ("▁a", -4.0), ("▁line", -4.0), ("words", -4.0), ("汉", -5.0), ("好", -5.0)]
    pieces += [(chr(c), -6.0) for c in range(33, 127)]
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=False)


BYTE_LEVEL = Vocabulary(byte_tokenizer())
TOKENIZERS: list[Any] = [byte_tokenizer(), sentencepiece_tokenizer()]
BOTH = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "sentencepiece"])


def stream(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    deltas = []
    for token in tokens:
        deltas.append(detokenizer.push(token))
        if detokenizer.stopped:
            return deltas
    return [*deltas, detokenizer.finish()]


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_never_split_wherever_the_output_is_cut(tokenizer: Any, text: str) -> None:
    vocabulary = Vocabulary(tokenizer)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    for cut in range(len(tokens) + 1):
        said = "".join(stream(Detokenizer(vocabulary), tokens[:cut]))
        spelled = b"".join(vocabulary.spelling(token) for token in tokens[:cut])
        # Only complete characters: a cut one is not text.
        assert said == text[: len(said)]
        assert said == spelled.decode(errors="ignore").removeprefix("" if vocabulary.is_byte_level else " ")


def test_special_tokens_leave_no_text() -> None:
    tokens = [*b"one", EOS, *b"two"]
    assert "".join(stream(Detokenizer(BYTE_LEVEL), tokens)) == "onetwo"


@BOTH
def test_special_tokens_between_pieces_change_no_space(tokenizer: Any) -> None:
    tokens = tokenizer("a line words", add_special_tokens=False)["input_ids"]
    tokens[2:2] = [tokenizer.eos_token_id]
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(stream(Detokenizer(Vocabulary(tokenizer)), tokens)) == expected


@settings(max_examples=40)
@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_has_them(data: list[int]) -> None:
    whole = [*data, ord(".")]
    assert "".join(stream(Detokenizer(BYTE_LEVEL), whole)) == TOKENIZERS[0].decode(whole, skip_special_tokens=True)
    up_to_the_unfinished = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(data))
    assert "".join(stream(Detokenizer(BYTE_LEVEL), data)) == up_to_the_unfinished


@pytest.mark.model
def test_the_bundled_models_text_is_the_same_streamed_and_at_once(bundled_tokenizer: Any) -> None:
    tokenizer, vocabulary = bundled_tokenizer, Vocabulary(bundled_tokenizer)
    assert vocabulary.is_byte_level
    chance = random.Random(1)
    for _ in range(60):
        tokens = [
            *(chance.randrange(len(tokenizer)) for _ in range(chance.randint(1, 40))),
            *tokenizer(".")["input_ids"],
        ]
        deltas = stream(Detokenizer(vocabulary), tokens)
        assert "".join(deltas) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_stop_string_across_tokens_is_found_and_no_part_of_it_leaks() -> None:
    for size in range(1, 8):
        text = "the end is ### near"
        finder = StopFinder(["###"])
        out = "".join(finder.push(text[i : i + size]) for i in range(0, len(text), size))
        assert out == "the end is "
        assert finder.found
        assert finder.flush() == ""


def test_text_that_only_began_like_a_stop_string_is_released() -> None:
    finder = StopFinder(["###"])
    assert finder.push("a##") == "a"
    assert finder.push("b#") == "##b"
    assert finder.flush() == "#"


def test_a_stop_string_completed_by_the_flush_does_not_leak() -> None:
    tokenizer = TOKENIZERS[1]
    detokenizer = Detokenizer(Vocabulary(tokenizer), stop=["x\ufffd"])
    *tokens, last = tokenizer("abx\ufffd", add_special_tokens=False)["input_ids"]
    assert "".join(detokenizer.push(token) for token in [*tokens, last]) == "ab"
    assert not detokenizer.stopped
    assert detokenizer.finish() == ""
    assert detokenizer.stopped


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, stop=["."], min_tokens=4)
    assert "".join(stream(detokenizer, [*b"a.b.c.d"])) == "a.b.c"


def marked_tokenizer(plain: Any) -> Any:
    """The same with special tokens around calls."""
    made = deepcopy(plain)
    made.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|end|>"]})
    return made


MARKED = [marked_tokenizer(tokenizer) for tokenizer in TOKENIZERS]
BOTH_MARKED = pytest.mark.parametrize("tokenizer", MARKED, ids=["byte-level", "sentencepiece"])


def ids(tokenizer: Any, *parts: str) -> list[int]:
    """Tokens of parts, of which the special ones are names."""
    return [t for part in parts for t in tokenizer(part, add_special_tokens=False)["input_ids"]]


@BOTH_MARKED
def test_names_of_shown_special_tokens_are_text_and_all_others_vanish(tokenizer: Any) -> None:
    tokens = ids(tokenizer, "a line", "<|call|>", " words", "<|end|>", "好")
    for shown, expected in (
        ((), "alinewords好"),
        (("<|call|>",), "aline<|call|>words好"),
        (("<|call|>", "<|end|>", "words", "<|none|>"), "aline<|call|>words<|end|>好"),
    ):
        text = "".join(stream(Detokenizer(Vocabulary(tokenizer), shown=shown), tokens))
        assert text.replace(" ", "") == expected


@BOTH_MARKED
@settings(max_examples=30)
@given(data=st.data())
def test_with_all_special_tokens_shown_the_text_is_the_tokenizers_own_with_them(
    tokenizer: Any, data: st.DataObject
) -> None:
    pieces = data.draw(
        st.lists(st.sampled_from(["<|call|>", "<|end|>", "a line", " words", "汉好", "👍🏽", "e\u0301"]))
    )
    tokens = ids(tokenizer, *pieces)
    shown = tuple(Vocabulary(tokenizer).special_names)
    expected = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert "".join(stream(Detokenizer(Vocabulary(tokenizer), shown=shown), tokens)) == expected


@BOTH_MARKED
def test_an_unfinished_character_before_a_shown_token_becomes_the_replacement_character(tokenizer: Any) -> None:
    (call,), half = ids(tokenizer, "<|call|>"), ids(tokenizer, "é")[-2:][:1]
    whole = ids(tokenizer, "é")[-2:]
    text = "".join(stream(Detokenizer(Vocabulary(tokenizer), shown=("<|call|>",)), [*half, call, *whole]))
    assert text == "\ufffd<|call|>é"


@BOTH_MARKED
def test_stop_strings_apply_to_text_with_the_names_of_shown_tokens(tokenizer: Any) -> None:
    tokens = ids(tokenizer, "a", "<|end|>", " b")
    for stop in ("a<|end|> b", "<|end|>", "|end|> b"):
        detokenizer = Detokenizer(Vocabulary(tokenizer), stop=[stop], shown=("<|end|>",))
        assert "".join(stream(detokenizer, tokens)).strip() == "a<|end|> b".split(stop)[0]
        assert detokenizer.stopped
        hidden = Detokenizer(Vocabulary(tokenizer), stop=[stop])
        stream(hidden, tokens)
        assert not hidden.stopped


@BOTH_MARKED
def test_a_shown_token_is_spelled_as_it_is_shown(tokenizer: Any) -> None:
    vocabulary = Vocabulary(tokenizer)
    tokens = ids(tokenizer, "a", "<|call|>", " b", "<|end|>")
    text = "".join(stream(Detokenizer(vocabulary, shown=("<|call|>", "<|end|>")), tokens))
    spelled = b"".join(vocabulary.spelling(token) for token in tokens)
    assert spelled.decode().lstrip() == text.lstrip()


@pytest.mark.parametrize("shown", [(), ("<|end|>",)])
@BOTH_MARKED
def test_the_mark_is_counted_to_the_token_that_makes_it_whole(tokenizer: Any, shown: tuple[str, ...]) -> None:
    tokens = ids(tokenizer, "a</th", "<|end|>", "ink> and </think>")
    told = Detokenizer(Vocabulary(tokenizer), shown=shown, mark="</think>")
    text, expected = "", None
    for count, token in enumerate(tokens, 1):
        text += told.push(token)
        if expected is None and "</think>" in text:
            expected = count
        assert told.marked_tokens == expected
    assert expected is not None


@given(st.lists(st.sampled_from([97, 98, 0xC3, 0xA9]), max_size=30), st.text("abé\ufffd", min_size=1, max_size=4))
def test_a_mark_is_found_wherever_the_text_is_cut(tokens: list[int], mark: str) -> None:
    detokenizer, plain, seen = Detokenizer(BYTE_LEVEL, stop=["abab"], mark=mark), Detokenizer(BYTE_LEVEL), ""
    expected = None
    for count, token in enumerate(tokens, 1):
        seen += plain.push(token)
        detokenizer.push(token)
        expected = count if expected is None and mark in seen else expected
    detokenizer.finish()
    if expected is None and mark in seen + plain.finish():
        expected = len(tokens)
    assert detokenizer.marked_tokens == expected


@settings(max_examples=60)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=40, max_size=40),
)
def test_however_text_arrives_exactly_what_precedes_the_first_stop_string_is_released(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    finder, out, position = StopFinder(stops), "", 0
    for cut in cuts:
        out += finder.push(text[position : position + cut])
        position += cut
    out += finder.flush()
    at_once = StopFinder(stops)
    assert at_once.push(text) + at_once.flush() == out
    assert finder.found == any(stop in text for stop in stops)
    if not finder.found:
        assert out == text
    else:
        assert text.startswith(out)
        assert finder.stop in stops
        assert text[len(out) :].startswith(finder.stop or "")
        assert not any(stop in out for stop in stops)
