"""Log-probabilities on the wire, read back by the real client library."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import openai
import pytest

from serve_app.api.chat_reply import Choice, ChunkEncoder, Usage, complete_reply
from serve_app.contracts.generation import TokenLogprob
from tests.api.test_stream import FIXED, chunk, encoder

USAGE = Usage(prompt_tokens=10, completion_tokens=2)


def token(text: str, raw: bytes, logprob: float, *top: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(1, text, raw, logprob, top)


HI = token("Hi", b"Hi", -0.5, token("Hi", b"Hi", -0.5), token("\ufffd", b"\xf0\x9f", -1.25))
HI_JSON = (
    b'{"token":"Hi","logprob":-0.5,"bytes":[72,105],"top_logprobs":['
    b'{"token":"Hi","logprob":-0.5,"bytes":[72,105]},{"token":"\xef\xbf\xbd","logprob":-1.25,"bytes":[240,159]}]}'
)


@pytest.mark.parametrize("usage", [None, b"null"], ids=["without usage", "with usage"])
def test_a_chunk_with_tokens_has_exactly_these_bytes(usage: bytes | None) -> None:
    sent = encoder(include_usage=usage is not None).content_chunk("Hi", [HI])
    told = b'"logprobs":{"content":[' + HI_JSON + b'],"refusal":null},"finish_reason":null}'
    assert sent == chunk(b'{"index":0,"delta":{"content":"Hi"},' + told, usage)
    openai.types.chat.ChatCompletionChunk.model_validate_json(sent[len("data: ") :], strict=True)


def test_a_chunk_without_tokens_says_null() -> None:
    assert encoder().content_chunk("Hi", []) == encoder().content_chunk("Hi")
    assert b'"logprobs":null' in encoder().content_chunk("Hi")


def complete(tokens: Any) -> Any:
    body = complete_reply(**FIXED, choices=[Choice("Hi", "stop", tokens=tokens)], usage=USAGE)  # type: ignore[arg-type]
    openai.types.chat.ChatCompletion.model_validate_json(body, strict=True)
    return json.loads(body)["choices"][0]["logprobs"]


def test_the_complete_reply_has_all_tokens() -> None:
    entry = json.loads(HI_JSON)
    assert complete([HI, HI]) == {"content": [entry, entry], "refusal": None}


def test_an_empty_reply_has_an_empty_list_and_a_reply_without_logprobs_has_null() -> None:
    assert complete([]) == {"content": [], "refusal": None}
    assert complete(None) is None


def test_a_token_of_probability_zero_has_a_finite_logprob() -> None:
    [entry] = complete([token("x", b"x", -inf)])["content"]
    assert (entry["logprob"], entry["top_logprobs"]) == (-9999.0, [])


def test_no_line_splitter_takes_a_token_for_a_line_end() -> None:
    sent = (
        encoder()
        .content_chunk("x", [token(text, text.encode(), -1.0) for text in ("\x85", "\u2028", "\u2029")])
        .decode()
    )
    assert sent.splitlines() == [*sent[:-2].split("\n"), ""]
    [choice] = json.loads(sent.removeprefix("data: "))["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["\x85", "\u2028", "\u2029"]


def test_role_and_finish_chunks_have_no_tokens() -> None:
    chunks: ChunkEncoder = encoder()
    assert b'"logprobs":null' in chunks.role_chunk()
    assert b'"logprobs":null' in chunks.finish_chunk("stop")
