"""The bodies of completion requests, and the bytes of their replies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion

from serve_app.api import completions_reply
from serve_app.api.chat_request import RawRequest
from serve_app.api.codec import encode_json
from serve_app.api.completions_door import CompletionsDoor
from serve_app.api.completions_openapi import completion_request_schemas
from serve_app.api.completions_reply import TokenOffsets
from serve_app.api.completions_request import DEFAULT_MAX_TOKENS, UNSUPPORTED, parse_completion_request
from serve_app.api.door import ReplyEvent, ReplyHead
from serve_app.api.errors import ApiError, context_length_exceeded
from serve_app.contracts.generation import (
    ChoiceEnded,
    Delta,
    Finished,
    FinishReason,
    PromptEcho,
    RawPrompts,
    ReplyParts,
    Text,
    TokenLogprob,
)

SERVED = {"svc-chat": (32768, 4096)}
HEAD = ReplyHead("cmpl-1", 1767225600, "svc-chat", "fp_1")
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
DOOR = CompletionsDoor()


def parse(**fields: Any) -> RawRequest:
    return parse_completion_request(json.dumps({"model": "svc-chat", "prompt": "Hi", **fields}).encode(), SERVED, 10**6)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ("Hi",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([5, 6], ((5, 6),)),
        ([[5, 6], [7]], ((5, 6), (7,))),
        (["a", [7]], ("a", (7,))),
    ],
)
def test_a_prompt_is_a_text_or_token_ids_or_several_of_them(prompt: Any, prompts: Any) -> None:
    request = parse(prompt=prompt, n=2)
    assert request.raw.prompts == prompts
    assert request.choices == 2 * len(prompts)
    assert request.messages == ()


def test_fields_have_the_defaults_of_the_format() -> None:
    request = parse(suffix="", best_of=1)
    assert request.max_tokens == DEFAULT_MAX_TOKENS == 16
    assert request.raw == RawPrompts(("Hi",))
    assert (request.n, request.temperature, request.logprobs, request.is_echoed, request.generates) == (
        *(1, 1.0, False, False),
        True,
    )


def test_fields_of_the_chat_format_are_read_as_there() -> None:
    request = parse(temperature=0, stop="x", seed=3, top_k=5, logit_bias={"7": -100}, guided_choice=["a"], min_tokens=2)
    assert (request.temperature, request.stop, request.seed, request.top_k) == (0, ("x",), 3, 5)
    assert request.logit_bias == {7: -100.0}
    assert request.response_format == {"type": "regex", "pattern": "a"}


def test_more_tokens_than_the_model_can_make_count_as_its_limit() -> None:
    assert parse(max_tokens=10**9).max_tokens == 4096


def test_no_tokens_and_an_echo_compute_the_prompt_alone() -> None:
    request = parse(max_tokens=0, echo=True, logprobs=2)
    assert request.max_tokens == 0
    assert (request.raw.echo, request.raw.scored, request.top_logprobs) == (True, True, 2)


def test_token_ids_of_a_prompt_are_sent_without_its_probabilities() -> None:
    raw = parse(return_token_ids=True, logprobs=2).raw
    assert (raw.echo, raw.scored) == (True, False)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": 5}, "prompt", "must be a string, token ids, or an array of strings or of arrays of token ids"),
        ({"prompt": ["a", 5]}, "prompt[1]", "must be a string or an array of token ids, but it is the integer 5"),
        ({"prompt": [["a"]]}, "prompt[0][0]", "must be an integer"),
        ({"prompt": [True]}, "prompt[0]", "the boolean true"),
        ({"prompt": [5, "a"]}, "prompt[1]", "must be an integer"),
        ({"prompt": [5.0]}, "prompt[0]", "must be an integer, but it is the number 5.0"),
        ({"prompt": [[5], [5, 1.5]]}, "prompt[1][1]", "must be an integer, but it is the number 1.5"),
        ({"suffix": 5}, "suffix", "must be a string"),
        ({"echo": 1}, "echo", "must be true or false"),
        ({"logprobs": True}, "logprobs", "must be an integer"),
        ({"max_tokens": "5"}, "max_tokens", "must be an integer"),
        ({"n": "1", "logprobs": 9}, "n", "must be an integer"),  # types before values
    ],
)
def test_a_wrong_type_is_400_and_names_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": []}, "prompt", "must not be an empty array"),
        ({"prompt": [[5], []]}, "prompt[1]", "must not be an empty array"),
        ({"prompt": [5, -1]}, "prompt", "token ids from 0 to 2147483647, but one is the integer -1"),
        ({"prompt": [[5], [2**31]]}, "prompt[1]", "the integer 2147483648"),
        ({"prompt": ["a"] * 33, "n": 2}, "prompt", "and n ask for 66 choices, but a request may have 64"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1 without echo: true"),
        ({"max_tokens": -1}, "max_tokens", "must be at least 0"),
        ({"logprobs": 6}, "logprobs", "must be from 0 to 5"),
        ({"logprobs": -1}, "logprobs", "must be from 0 to 5"),
        ({"best_of": 2}, "best_of", "must be equal to n, which is 1"),
        ({"n": 2, "best_of": 1}, "best_of", "must be equal to n, which is 2"),
        ({"n": 9}, "n", "from 1 to 8"),
        ({"suffix": "x", "echo": True}, "suffix", "not possible with echo"),
        ({"suffix": "x", "prompt": [5]}, "suffix", "only possible with texts"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"prompt": [[5] * 40_000], "n": 8, "echo": True, "logprobs": 1}, "prompt", "send fewer prompts"),
        ({"min_tokens": 17}, "min_tokens", "above max_tokens"),
        ({"model": "other"}, "model", "does not exist"),
        ({"stream": True, "stream_options": {"resume": True}, "echo": True}, "stream_options.resume", "echo"),
        ({"stream": True, "stream_options": {"resume": True}, "prompt": ["a", "b"]}, "stream_options.resume", "n: 1"),
        ({"guided_grammar": "x"}, "guided_grammar", "can't be enforced"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": None}, "messages", "/chat/completions"),
        *(({name: 0.5}, name, "Send |Leave it out|Add ") for name in UNSUPPORTED if name != "messages"),
    ],
)
def test_a_wrong_value_is_422_and_names_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (422, param)
    assert re.search(words, caught.value.message)


def test_values_of_unsupported_fields_that_change_nothing_are_ignored() -> None:
    for name, unsupported in UNSUPPORTED.items():
        for value in unsupported.harmless:
            assert parse(**{name: value}).raw.prompts == ("Hi",)


def test_a_prompt_that_is_too_long_is_reported_in_the_words_of_the_format() -> None:
    error = DOOR.error_body(context_length_exceeded(40_000, 32768))["error"]
    assert error["param"] == "prompt"
    assert "maximum context length is 32768 tokens, and your prompt has 40000 tokens" in error["message"]
    assert "message" not in error["message"]


# Replies


def token(text: str, logprob: float, *top: tuple[str, float], raw: bytes | None = None) -> TokenLogprob:
    alternatives = tuple(TokenLogprob(1, name, name.encode(), value) for name, value in top)
    return TokenLogprob(0, text, text.encode() if raw is None else raw, logprob, alternatives)


def whole(request: RawRequest, *events: ReplyEvent, reason: FinishReason = STOP, completion: int = 2) -> Any:
    reply = DOOR.whole(request)
    for event in events:
        reply.add_event(event)
    raw = reply.body(HEAD, Finished(reason, 10, 4, completion))
    # The SDK's types do not know the null of a prompt's first token, which the format has.
    known = raw.replace(b'"token_logprobs":[null', b'"token_logprobs":[0').replace(
        b'"top_logprobs":[null', b'"top_logprobs":[{}'
    )
    Completion.model_validate_json(known)
    return json.loads(raw)


def streamed(request: RawRequest, *events: ReplyEvent, reason: FinishReason = STOP) -> list[Any]:
    reply = DOOR.stream(request, HEAD)
    raw = b"".join(map(reply.event, events)) + reply.end(Finished(reason, 10, 4, 2))
    frames = raw.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def test_a_whole_reply_has_the_form_of_the_format() -> None:
    body = whole(parse(), Delta("Hello", 1), Delta(" there", 2))
    assert body == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1767225600,
        "model": "svc-chat",
        "system_fingerprint": "fp_1",
        "choices": [{"index": 0, "text": "Hello there", "logprobs": None, "finish_reason": "stop"}],
        "usage": body["usage"],
    }
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (10, 2)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_several_prompts_have_their_choices_one_after_the_other() -> None:
    events = [
        ReplyParts((PromptEcho("B"),), 0, (), 2),
        ReplyParts((Text("3"),), 1, (), 3),
        ReplyParts((PromptEcho("A"),), 1, (), 0),
        ReplyParts((Text("0"),), 2, (), 0),
        ReplyParts((Text("2"),), 3, (), 2),
        *(ChoiceEnded(choice, LENGTH if choice == 3 else STOP) for choice in (3, 0, 1, 2)),
    ]
    body = whole(parse(prompt=["A", "B"], n=2, echo=True), *events)
    assert [choice["text"] for choice in body["choices"]] == ["A0", "A", "B2", "B3"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop", "stop", "length"]


PROMPT = (token("A", 0.0), token(" b", -1.5, (" c", -0.5), (" b", -1.5)))
ECHO = ReplyParts((PromptEcho("A b", (7, 8)),), 0, PROMPT)
REPLY = Delta("é!", 2, (token("é", -0.25, ("é", -0.25)), token("!", -0.5, ("?", -0.1))))
END = Delta("", 2, (token("<eos>", -0.125, ("<eos>", -0.125), raw=b""),))
LOGPROBS = {
    "tokens": ["A", " b", "é", "!", "<eos>"],
    "token_logprobs": [None, -1.5, -0.25, -0.5, -0.125],
    "top_logprobs": [None, {" c": -0.5, " b": -1.5}, {"é": -0.25}, {"?": -0.1, "!": -0.5}, {"<eos>": -0.125}],
    "text_offset": [0, 1, 3, 4, 5],
}


def test_an_echo_begins_text_and_probabilities_with_those_of_the_prompt() -> None:
    [choice] = whole(parse(echo=True, logprobs=2), ECHO, REPLY, END)["choices"]
    assert choice["text"] == "A bé!"
    assert choice["logprobs"] == LOGPROBS


def test_a_stream_has_the_same_as_the_whole_reply() -> None:
    request = parse(echo=True, logprobs=2, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    chunks = streamed(request, ECHO, REPLY, END)
    *pieces, last, usage = chunks
    choices = [chunk["choices"][0] for chunk in pieces]
    assert "".join(choice["text"] for choice in choices) == "A bé!"
    assert {name: [v for c in choices for v in c["logprobs"][name]] for name in LOGPROBS} == LOGPROBS
    assert [choice.get("prompt_token_ids") for choice in choices] == [[7, 8], None, None]
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all(chunk["object"] == "text_completion" and chunk["id"] == "cmpl-1" for chunk in chunks)


def test_an_echo_belongs_to_each_choice_of_its_prompt_and_its_pieces_join() -> None:
    more = ReplyParts((PromptEcho(""),), 0, (token("!", -1.0),), 0)
    chunks = streamed(parse(echo=True, logprobs=0, n=2, stream=True), ECHO, more)
    found = [chunk["choices"][0] for chunk in chunks]
    for index in (0, 1):
        own = [choice for choice in found if choice["index"] == index]
        assert [choice["text"] for choice in own] == ["A b", "", ""]
        assert [choice["logprobs"] and choice["logprobs"]["token_logprobs"] for choice in own] == [
            [None, -1.5],
            [-1.0],
            None,
        ]


def test_a_prompt_is_encoded_once_for_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    monkeypatch.setattr(completions_reply, "encode_json", lambda value: encoded.append(value) or encode_json(value))
    more = ReplyParts((PromptEcho(""),), 0, (token("!", -1.0),), 0)
    reply = DOOR.whole(parse(echo=True, logprobs=2, n=8))
    for event in (ECHO, more):
        reply.add_event(event)
    assert len(encoded) == 2 * len(LOGPROBS)
    ends = [ReplyParts((Text("é"),), choice, REPLY.tokens[:1], choice) for choice in (7, 0)]
    choices = whole(parse(echo=True, logprobs=2, n=8), ECHO, more, *ends)["choices"]
    assert choices[0]["logprobs"] == choices[7]["logprobs"]
    assert choices[0]["logprobs"]["text_offset"] == [0, 1, 3, 3]
    assert choices[1]["logprobs"]["token_logprobs"] == [None, -1.5, -1.0]


def test_token_ids_come_on_request() -> None:
    [choice] = whole(parse(return_token_ids=True), ECHO, Delta("x", 1, (), (5,)), Delta("", 2, (), (6,)))["choices"]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("x", [7, 8], [5, 6])


def test_a_prompt_alone_ends_for_its_length() -> None:
    [choice] = whole(parse(echo=True, logprobs=1, max_tokens=0), ECHO, reason=LENGTH, completion=0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("A b", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5]


def test_parts_of_characters_have_names_of_their_own_and_no_probability_is_no_infinity() -> None:
    halves = (
        token("�", -1.0, raw=b"\xe4\xb8"),
        TokenLogprob(0, "�", b"\x96", -2.0, (TokenLogprob(1, "�", b"\x97", float("-inf")),)),
    )
    [choice] = whole(parse(logprobs=1), Delta("世", 2, halves))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["bytes:\\xe4\\xb8", "bytes:\\x96"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"bytes:\\xe4\\xb8": -1.0}, {"bytes:\\x96": -2.0, "bytes:\\x97": -9999.0}],
        "text_offset": [0, 0],
    }


def test_line_separators_do_not_split_a_chunk() -> None:
    raw = DOOR.stream(parse(), HEAD).event(Delta("a\u2028b", 1))
    assert len(raw.decode().splitlines()) == 2


@pytest.mark.parametrize(
    ("pieces", "tokens", "offsets"),
    [
        (["Hello there"], [b"Hello", b" there"], [0, 5]),
        (["He", "llo", " x"], [b"Hello", b" x"], [0, 5]),  # a token is sent with the text of its first byte
        (["Hello"], [b" Hello"], [0]),  # a tokenizer that begins words with a blank
        (["ab"], [b"<s>", b"a", b"b"], [0, 0, 1]),  # a special token without text
        (["a�b"], [b"a", b"\xff", b"b"], [0, 1, 2]),  # a byte that is no character
    ],
)
def test_offsets_are_where_tokens_begin_in_the_text(pieces: list[str], tokens: list[bytes], offsets: list[int]) -> None:
    found = TokenOffsets()
    told = []
    for index, piece in enumerate(pieces):
        found.add_text(piece)
        told += [found.next_offset(raw) for raw in (tokens if len(pieces) == 1 else [tokens[0]] if index == 0 else [])]
    if len(pieces) > 1:
        told += [found.next_offset(raw) for raw in tokens[1:]]
    assert told == offsets


# The document

DOCUMENT = Path(__file__).parents[2] / "docs" / "completions.md"
FIELDS: dict[str, Any] = completion_request_schemas(["svc-chat"], 4096)["CompletionRequest"]["properties"]


def rows() -> dict[str, list[str]]:
    """The cells of the table of fields: default and what is allowed."""
    table = DOCUMENT.read_text().split("| field | default | |\n|---|---|---|\n")[1].split("\n\n")[0]
    found = {}
    for line in table.splitlines():
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found |= dict.fromkeys(re.findall(r"`([a-z_]+)`", names), cells)
    return found


def test_the_table_of_the_document_has_each_field_with_its_default_and_range() -> None:
    table = rows()
    assert set(table) == set(FIELDS)
    for name, (default, told) in table.items():
        schema = FIELDS[name]
        if told == "as in the [chat format](api.md#request)":
            continue
        declared = schema.get("default")
        assert default == ("" if declared is None else str(declared).lower()), name
        if "maximum" in schema:
            assert f"{schema['minimum']} to {schema['maximum']}" in told, name


def test_the_document_lists_each_field_that_is_refused() -> None:
    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text for name in UNSUPPORTED)
