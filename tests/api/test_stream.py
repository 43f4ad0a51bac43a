"""The exact bytes of replies, read back by the real client library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from serve_app.api import errors
from serve_app.api.chat_door import ChatDoor
from serve_app.api.chat_reply import (
    DONE,
    KEEP_ALIVE,
    Choice,
    ChunkEncoder,
    StreamedReply,
    Usage,
    complete_reply,
    error_event,
)
from serve_app.api.door import ReplyHead
from serve_app.contracts.generation import CallStarted, ChoiceEnded, Finished, FinishReason, ReplyParts, Text
from tests.api.requests import parse

HEAD = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"svc-chat",'
HEAD += b'"system_fingerprint":"fp_a","choices":['
FIXED = {"id": "chatcmpl-1", "created": 1700000000, "model": "svc-chat", "fingerprint": "fp_a"}
USAGE = Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=4)
USAGE_JSON = (
    b'{"prompt_tokens":10,"completion_tokens":3,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":4},'
    b'"prompt_cache_hit_tokens":4,"prompt_cache_miss_tokens":6,"completion_tokens_details":{"reasoning_tokens":0}}'
)


def encoder(include_usage: bool = False) -> ChunkEncoder:
    return ChunkEncoder(**FIXED, include_usage=include_usage)  # type: ignore[arg-type]


def chunk(choices: bytes, usage: bytes | None) -> bytes:
    return HEAD + choices + b"]" + (b"" if usage is None else b',"usage":' + usage) + b"}\n\n"


@pytest.mark.parametrize("usage", [None, b"null"], ids=["without usage", "with usage"])
def test_every_chunk_has_exactly_these_bytes(usage: bytes | None) -> None:
    chunks = encoder(include_usage=usage is not None)
    end = b'"logprobs":null,"finish_reason":null}'
    assert chunks.role_chunk() == chunk(b'{"index":0,"delta":{"role":"assistant","content":""},' + end, usage)
    assert chunks.content_chunk("Hi") == chunk(b'{"index":0,"delta":{"content":"Hi"},' + end, usage)
    assert chunks.finish_chunk("stop") == chunk(b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}', usage)
    assert DONE == b"data: [DONE]\n\n"
    assert KEEP_ALIVE == b": keep-alive\n\n"


def test_the_opening_chunk_of_a_reply_that_begins_with_a_call_has_null_content() -> None:
    end = b'"logprobs":null,"finish_reason":null}'
    opening = chunk(b'{"index":0,"delta":{"role":"assistant","content":null},' + end, None)
    reply = StreamedReply(encoder(), 1)
    assert reply.chunks(ReplyParts((CallStarted(0, "c", "f"),), 1)).startswith(opening)
    openai.types.chat.ChatCompletionChunk.model_validate_json(opening[len("data: ") :], strict=True)
    text_first = StreamedReply(encoder(), 1).chunks(ReplyParts((Text("I look"), CallStarted(0, "c", "f")), 1))
    assert text_first.startswith(encoder().role_chunk())


def ended(*reasons: FinishReason, **options: Any) -> list[dict[str, Any]]:
    """The chunks of a stream without text whose choices end with these reasons, the last one first."""
    request = parse(n=len(reasons), stream=True, stream_options=options)
    stream = ChatDoor().stream(request, ReplyHead("chatcmpl-1", 1, "svc-chat", "fp", 10, 4))
    body = stream.event(ReplyParts((Text("a"),), 1))
    for choice, reason in reversed(list(enumerate(reasons))):
        body += stream.event(ChoiceEnded(choice, reason)) if len(reasons) > 1 else b""
    body += stream.end(Finished(reasons[0], 10, 4, 3))
    return [json.loads(event.data) for event in decode(body)[:-1]]


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_without_include_usage_only_the_last_chunk_with_a_finish_reason_has_the_usage() -> None:
    for reasons in ((LENGTH,), (STOP, LENGTH, STOP)):
        *chunks, last = ended(*reasons)
        assert last["usage"] == json.loads(USAGE_JSON)
        assert all("usage" not in one for one in chunks)
        assert all(one["choices"] for one in [*chunks, last])
        found = {one["choices"][0]["index"]: one["choices"][0]["finish_reason"] for one in [*chunks, last]}
        assert found == dict(enumerate(reason.value for reason in reasons))


def test_with_include_usage_only_the_chunk_without_choices_has_the_usage() -> None:
    for reasons in ((LENGTH,), (STOP, LENGTH, STOP)):
        *chunks, last = ended(*reasons, include_usage=True)
        assert (last["choices"], last["usage"]) == ([], json.loads(USAGE_JSON))
        assert all(one["usage"] is None for one in chunks)
        assert sum(one["choices"][0]["finish_reason"] is not None for one in chunks) == len(reasons)


@pytest.mark.parametrize("include_usage", [False, True])
def test_with_continuous_usage_stats_each_chunk_has_the_usage_so_far(include_usage: bool) -> None:
    chunks = ended(STOP, include_usage=include_usage, continuous_usage_stats=True)
    counts = [(one["usage"]["completion_tokens"], one["usage"]["prompt_tokens_details"]) for one in chunks]
    assert counts == [(n, {"cached_tokens": 4}) for n in (1, 1, 3, *([3] if include_usage else []))]


def test_the_usage_chunk_has_no_choices() -> None:
    assert encoder(include_usage=True).usage_chunk(USAGE) == chunk(b"", USAGE_JSON)
    with pytest.raises(ValueError, match="usage"):
        encoder().usage_chunk(USAGE)


def test_an_error_in_the_stream_is_one_data_event() -> None:
    error = errors.server_error("req_1")
    sent = error_event(error)
    assert sent.startswith(b'data: {"error":{"message":')
    assert sent.endswith(b"}}\n\n")
    assert sent.count(b"\n") == 2


@pytest.mark.parametrize("reason", ["abort", "error", "", "STOP"])
def test_only_finish_reasons_of_the_format_are_sent(reason: str) -> None:
    with pytest.raises(ValueError, match="finish reason"):
        encoder().finish_chunk(reason)


def test_the_complete_reply() -> None:
    body = complete_reply(**FIXED, choices=[Choice("Hé\n", "length")], usage=USAGE)  # type: ignore[arg-type]
    assert json.loads(body) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "svc-chat",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hé\n"},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": json.loads(USAGE_JSON),
        "system_fingerprint": "fp_a",
    }
    openai.types.chat.ChatCompletion.model_validate_json(body, strict=True)


def decode(stream: bytes, piece: int = 7) -> list[Any]:
    def pieces() -> Iterator[bytes]:
        for at in range(0, len(stream), piece):
            yield stream[at : at + piece]

    return list(SSEDecoder().iter_bytes(pieces()))


texts = st.text(max_size=20) | st.text("a\x00\n\r\x1c\x85\u2028\u2029\ud800\udc00\ufffd😀", max_size=10)


@given(texts=st.lists(texts, max_size=8), include_usage=st.booleans(), piece=st.integers(1, 50))
def test_the_client_library_reads_the_text_that_was_generated(
    texts: list[str], include_usage: bool, piece: int
) -> None:
    chunks = encoder(include_usage)
    stream = KEEP_ALIVE + chunks.role_chunk() + KEEP_ALIVE + b"".join(chunks.content_chunk(text) for text in texts)
    stream += chunks.finish_chunk("stop") + (chunks.usage_chunk(USAGE) if include_usage else b"") + DONE
    stream.decode()
    events = decode(stream, piece)
    assert events.pop().data == "[DONE]"
    read = [openai.types.chat.ChatCompletionChunk.model_validate_json(event.data) for event in events]
    assert all(event.id is None and event.event is None and event.retry is None for event in events)
    assert {(one.id, one.created, one.model) for one in read} == {("chatcmpl-1", 1700000000, "svc-chat")}
    last = read.pop() if include_usage else None
    assert [one.choices[0].finish_reason for one in read] == [None] * (len(texts) + 1) + ["stop"]
    assert read[0].choices[0].delta.role == "assistant"
    said = [one.choices[0].delta.content for one in read[1:-1]]
    for found, text in zip(said, texts, strict=True):
        assert found is not None
        if any("\ud800" <= character <= "\udfff" for character in text):
            found.encode()
        else:
            assert found == text
    if last is not None:
        assert (last.choices, last.usage and last.usage.total_tokens) == ([], 13)
        assert all(one.usage is None for one in read)


@given(texts)
def test_no_line_splitter_takes_text_for_a_line_end(text: str) -> None:
    """`str.splitlines`, which some clients use, also splits at U+0085, U+2028 and U+2029."""
    sent = encoder().content_chunk(text)
    assert sent.decode().splitlines() == [*sent.decode()[:-2].split("\n"), ""]


def test_lone_surrogates_become_the_replacement_character_and_pairs_are_joined() -> None:
    assert '"content":"a\ufffdb"' in encoder().content_chunk("a\ud800b").decode()
    assert '"content":"\U0001f600"' in encoder().content_chunk("\ud83d\ude00").decode()


def test_the_sdk_reads_a_whole_stream_and_raises_the_error_event() -> None:
    """Through the SDK's own client, with a transport that answers our bytes."""
    import httpx2

    chunks = encoder(include_usage=True)
    good = (
        KEEP_ALIVE
        + chunks.role_chunk()
        + chunks.content_chunk("Hello")
        + chunks.finish_chunk("length")
        + chunks.usage_chunk(USAGE)
        + DONE
    )
    bad = chunks.role_chunk() + chunks.content_chunk("Hel") + error_event(errors.server_error("req_1"))

    def client(stream: bytes) -> openai.OpenAI:
        answer = httpx2.MockTransport(
            lambda request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
        )
        return openai.OpenAI(
            api_key="k", base_url="http://service/v1", http_client=httpx2.Client(transport=answer), max_retries=0
        )

    def ask(stream: bytes) -> Any:
        messages: Any = [{"role": "user", "content": "x"}]
        return client(stream).chat.completions.create(model="svc-chat", messages=messages, stream=True)

    read = list(ask(good))
    assert "".join(one.choices[0].delta.content or "" for one in read if one.choices) == "Hello"
    assert read[-1].usage.prompt_tokens_details.cached_tokens == 4
    with pytest.raises(openai.APIError, match="req_1"):
        list(ask(bad))
