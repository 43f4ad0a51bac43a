"""For any cut of a reply into tokens and packets, a client reads the same text.

No broken character, no character of a stop string, nothing lost and nothing sent twice.
"""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai._streaming import SSEDecoder

from serve_app.engine.text.detokenizer import Vocabulary, bytes_of_unicode
from serve_app.model.tools.format_table import TOOL_FORMATS
from serve_app.model.tools.reasoning import MARKERS
from tests.engine.test_detokenizer import sentencepiece_tokenizer
from tests.gateway.scripted_model import ids_of, tokenizer_of
from tests.gateway.strict_sse import Choice, read
from tests.gateway.token_cuts import partitions, streamed, up_to_stop

SHORT = {
    "Chinese": "你好#",
    "a skin tone": "👍🏽x",
    "a flag": "a🇩🇪",
    "a keycap": "1\ufe0f\u20e3!",
    "joined emoji": "👩\u200d💻",
    "combining marks": "e\u0301\u0323e",
    "Hangul jamo": "\u1112\u1161\u11ab",
    "right to left": "א\u05b0\u200fب",
    "Devanagari": "क्षि",
    "line ends": "\r\n\u2028\x85a",
}
LONG_RUN = [pytest.mark.slow, pytest.mark.long]
#: How many of the cuts of a short text, of which there are up to thousands.
SOME_AND_ALL = pytest.mark.parametrize("most", [16, pytest.param(None, marks=LONG_RUN)], ids=["some", "all"])
#: How many random cuts.
FEW_AND_MANY = pytest.mark.parametrize("count", [12, pytest.param(400, marks=LONG_RUN)])
LONG = (
    "汉字和标点：你好，世界！\n\n👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 1️⃣ keycap, 🇩🇪🇯🇵 flags."
    " e\u0301\u0323 a\u0308 किमपि กำ שָׁלוֹם \u202eabc\u202c مرحبا \u1112\u1161\u11ab\u1100\u1161 한글 𝒳𝕐 ﷽ \u2028 end"
    " <|im_end|> ### User: <0x41> ▁ Ġ ĉ \ufffd \ufeff done"
)


def neighbours(text: str) -> list[str]:
    """Strings that begin with the bytes of a character of the text but are not in the text."""
    found = []
    for number, character in enumerate(text):
        other = chr(ord(character) ^ 1)
        if unicodedata.category(other) not in ("Cs", "Cn") and other not in text:
            found.append(text[:number] + other)
    return found


def stop_strings(text: str) -> list[str]:
    """Every part of a text, also parts that begin or end inside a visible character."""
    return sorted({text[a:b] for a in range(len(text)) for b in range(a + 1, len(text) + 1)})


@cache
def cut_tokenizer(data: bytes) -> tuple[Vocabulary, Any]:
    """A tokenizer that has each part of some bytes as a token."""
    tokenizer = tokenizer_of([data[a:b] for a in range(len(data)) for b in range(a + 2, len(data) + 1)])
    return Vocabulary(tokenizer), tokenizer


def content(body: bytes) -> str:
    """The text of a stream that keeps all rules; each of its deltas is valid text by itself."""
    reply = read(body)
    [choice] = reply.choices.values()
    return choice.content


def by_sdk(body: bytes) -> list[str]:
    """The content deltas as OpenAI's client library decodes them."""
    events = [json.loads(event.data) for event in SSEDecoder().iter_bytes(iter([body])) if event.data != "[DONE]"]
    return [event["choices"][0]["delta"].get("content", "") for event in events]


@SOME_AND_ALL
@pytest.mark.parametrize("name", SHORT)
def test_a_text_cut_into_tokens_in_every_way_is_read_as_it_is(name: str, most: int | None) -> None:
    text = SHORT[name]
    vocabulary, tokenizer = cut_tokenizer(text.encode())
    for pieces in partitions(text.encode(), most):
        body = streamed(vocabulary, ids_of(tokenizer, pieces))
        deltas = by_sdk(body)
        assert "".join(deltas) == content(body) == text
        assert not any("\ufffd" in delta for delta in deltas)


@SOME_AND_ALL
@pytest.mark.parametrize("name", SHORT)
def test_no_character_of_a_stop_string_leaks_however_tokens_are_cut(name: str, most: int | None) -> None:
    """Every way to cut the text, combined with every part of it as a stop string."""
    text = SHORT[name]
    vocabulary, tokenizer = cut_tokenizer(text.encode())
    stops = itertools.cycle([*stop_strings(text), *neighbours(text)])
    rng = random.Random(name)
    for pieces in partitions(text.encode(), most):
        tokens = ids_of(tokenizer, pieces)
        for number in (1, 1, 2, 3):
            chosen = tuple(itertools.islice(stops, number))
            body = streamed(vocabulary, tokens, rng, stop=chosen)
            assert content(body) == up_to_stop(text, chosen), (pieces, chosen)


@pytest.fixture(scope="module")
def bundled(bundled_tokenizer: Any) -> Vocabulary:
    return Vocabulary(bundled_tokenizer)


@cache
def sentencepiece() -> Vocabulary:
    return Vocabulary(sentencepiece_tokenizer())


def in_bytes(vocabulary: Vocabulary, token: int) -> list[int]:
    """The single-byte tokens that spell a token; of the token itself where it has none."""
    names = ["<0x%02X>", None] if not vocabulary.is_byte_level else [None]
    spelled = vocabulary.spelling(token)
    if names[0] is None:
        return [vocabulary.tokenizer.convert_tokens_to_ids(stand_in) for stand_in in map(STAND_INS.get, spelled)]
    if vocabulary.tokenizer.convert_ids_to_tokens(token).startswith(("▁", "<0x")):
        return [token]
    return [vocabulary.tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in spelled]


STAND_INS = {byte: character for character, byte in bytes_of_unicode().items()}


def cut_anyhow(vocabulary: Vocabulary, text: str, rng: random.Random) -> list[int]:
    """Tokens of a text as its tokenizer cuts it, some of them spelled out in bytes."""
    tokens = vocabulary.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    share = rng.choice([0.0, 0.1, 0.5, 1.0])
    return [part for token in tokens for part in (in_bytes(vocabulary, token) if rng.random() < share else [token])]


def some_stops(text: str, rng: random.Random) -> tuple[str, ...]:
    """Parts of a text and strings that only begin like one; they may overlap, begin anywhere, or be the end."""
    stops = []
    for _ in range(rng.randint(0, 4)):
        start = rng.randrange(len(text))
        stop = rng.choice([text[start : start + rng.randint(1, 12)], text[-rng.randint(1, 5) :]])
        stops.append(rng.choice([stop, stop, stop + "\u0323", stop[:-1] + "#" if len(stop) > 1 else stop]))
    return tuple(stops)


def characters_after(vocabulary: Vocabulary, tokens: list[int]) -> list[int]:
    """Returns the number of complete characters after each of the tokens."""
    decoder = vocabulary.decoder()
    return [0, *itertools.accumulate(len(decoder.push(token)) for token in tokens)]


@FEW_AND_MANY
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_long_reply_cut_anyhow_reads_as_it_is_up_to_its_first_stop_string(
    kind: str, count: int, bundled: Vocabulary
) -> None:
    vocabulary = bundled if kind == "byte-level" else sentencepiece()
    rng = random.Random(kind)
    stopped = 0
    for number in range(count):
        start = rng.randrange(len(LONG))
        text = LONG[start : start + rng.randint(1, len(LONG))].lstrip(" ")
        tokens = cut_anyhow(vocabulary, text, rng)
        text = vocabulary.decode(tokens)
        stops, min_tokens = some_stops(text, rng) if text else (), rng.choice([0, 0, 3, len(tokens) // 2])
        unchecked = characters_after(vocabulary, tokens)[min(min_tokens, len(tokens))]
        expected = up_to_stop(text, stops, unchecked)
        body = streamed(vocabulary, tokens, rng, stop=stops, min_tokens=min_tokens, logprobs=rng.choice([None, 0]))
        reply = read(body)
        assert reply.choices[0].content == expected == "".join(by_sdk(body)), (number, stops, min_tokens)
        assert reply.choices[0].content.count("\ufffd") == expected.count("\ufffd")
        assert reply.choices[0].finish_reason == "stop"
        stopped += expected != text
    assert count / 4 < stopped < count * 3 / 4


@FEW_AND_MANY
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_tokens_that_are_reported_are_those_of_the_text_and_none_of_a_stop_string(
    kind: str, count: int, bundled: Vocabulary
) -> None:
    vocabulary = bundled if kind == "byte-level" else sentencepiece()
    rng = random.Random(kind)
    for number in range(count // 2):
        start = rng.randrange(len(LONG))
        tokens = cut_anyhow(vocabulary, LONG[start : start + rng.randint(1, 60)].strip(" "), rng)
        text = vocabulary.decode(tokens)
        stops = some_stops(text, rng) if text else ()
        expected = up_to_stop(text, stops).encode()
        [choice] = read(streamed(vocabulary, tokens, rng, stop=stops, logprobs=0)).choices.values()
        told = [bytes(token["bytes"]) for token in choice.tokens]
        spelled = b"".join(told)
        if kind == "sentencepiece":
            spelled = spelled.removeprefix(b" ")  # the tokenizer's decoding drops it
        assert spelled.startswith(expected), (number, stops)
        assert len(spelled) - len(told[-1] if told else b"") < max(1, len(expected)), (number, stops, told)


# Reasoning and tool calls

HARD = "汉👩‍👩‍👧 🇩🇪 e\u0301 \u202eא\u202c </t </thi \u1112\u1161\u11ab"
ARGUMENTS = json.dumps({HARD: [HARD, '</tool_call> </think> \\ " }{']}, ensure_ascii=False)
REASONS = f"<think>\n{HARD}\n</think>\n\n"
CALLS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
REPLY = f"{REASONS}{HARD}\n{CALLS}".encode()
BEFORE_ARGUMENTS = [f'\n<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("get_weather", "get_time")]
WHOLE = (HARD, HARD, [("get_weather", ARGUMENTS), ("get_time", "{}")])


@cache
def reply_tokenizer() -> tuple[Vocabulary, Any]:
    """Has the reply's beginnings and ends as tokens, and each byte."""
    tokenizer = tokenizer_of([part for at in range(len(REPLY) + 1) for part in (REPLY[:at], REPLY[at:])])
    return Vocabulary(tokenizer), tokenizer


def heard(pieces: Iterable[bytes], rng: random.Random | None = None, **sampling: Any) -> Choice:
    """Returns a reply of these tokens as its client reads it. The model reasons and has two tools."""
    vocabulary, tokenizer = reply_tokenizer()
    parser = TOOL_FORMATS["hermes"].parser(("get_weather", "get_time"), 1, markers=MARKERS[0])
    body = streamed(vocabulary, ids_of(tokenizer, [*filter(None, pieces)]), rng, parser=parser, **sampling)
    assert b"\xef\xbf\xbd" not in body
    [choice] = read(body).choices.values()
    return choice


def parts(choice: Choice) -> tuple[str, str, list[tuple[str, str]]]:
    return choice.reasoning, choice.content, [(call.name, call.arguments) for call in choice.calls]


@FEW_AND_MANY
def test_reasoning_text_and_calls_are_the_same_wherever_their_bytes_are_cut(count: int) -> None:
    for at in range(0, len(REPLY) + 1, 13 if count < 100 else 1):
        choice = heard([REPLY[:at], REPLY[at:]])
        assert (parts(choice), choice.finish_reason) == (WHOLE, "tool_calls"), at
    rng = random.Random(5)
    for _ in range(count // 4):
        assert parts(heard([REPLY[at : at + 1] for at in range(len(REPLY))], rng)) == WHOLE


@FEW_AND_MANY
def test_a_stop_string_in_reasoning_or_calls_leaks_nothing(count: int) -> None:
    rng = random.Random(6)
    text = REPLY.decode()
    for _ in range(count):
        stops = some_stops(text, rng)
        before = up_to_stop(text, stops).encode()
        choice = heard([REPLY[at : at + 1] for at in range(len(REPLY))], rng, stop=stops)
        assert parts(choice) == parts(heard([before])), stops


def begins(found: str, whole: str, *marks: str) -> bool:
    """Returns whether a text is the beginning of another, or all of it and then the beginning of a mark.

    Text alone can't show what was cut before it was known to be a call, or before a mark was complete.
    """
    if not found.startswith(whole):
        return whole.startswith(found)
    return any(mark.startswith(found[len(whole) :]) for mark in marks)


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=LONG_RUN)])
def test_a_reply_that_its_length_cuts_anywhere_is_a_beginning_of_the_whole(step: int) -> None:
    reasoning, content, calls = WHOLE
    for most in range(1, len(REPLY), step):
        choice = heard([REPLY[at : at + 1] for at in range(len(REPLY))], max_tokens=most)
        assert choice.finish_reason == "length"
        assert begins(choice.reasoning, reasoning, "\n</think>")
        assert begins(choice.content, content, *BEFORE_ARGUMENTS) or "<think>".startswith(choice.content)
        assert len(choice.calls) <= len(calls)
        for call, (name, arguments) in zip(choice.calls, calls, strict=False):
            assert call.name == name
            assert arguments.startswith(call.arguments)


# Packets

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.sse"))


def datas(pieces: Iterable[bytes]) -> list[str]:
    return [event.data for event in SSEDecoder().iter_bytes(iter(pieces))]


def lines_of(pieces: Iterable[bytes]) -> list[str]:
    """As httpx, and with it most clients of event streams in Python, cuts a response into lines."""
    return list(httpx.Response(200, content=iter(pieces)).iter_lines())


@SOME_AND_ALL
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_stream_cut_into_packets_at_any_byte_reads_the_same(path: Path, most: int | None) -> None:
    body = path.read_bytes()
    frames = [frame.removeprefix("data: ") for frame in body.decode().split("\n\n")[:-1] if frame[0] != ":"]
    lines = body.decode().split("\n")[:-1]
    assert datas([body]) == frames
    assert lines_of([body]) == lines
    for at in range(1, len(body), 1 if most is None else len(body) // most):
        assert datas([body[:at], body[at:]]) == frames
        assert lines_of([body[:at], body[at:]]) == lines
    for size in (1, 7) if most else (1, 2, 3, 7):
        packets = [body[at : at + size] for at in range(0, len(body), size)]
        assert datas(packets) == frames
        assert lines_of(packets) == lines
