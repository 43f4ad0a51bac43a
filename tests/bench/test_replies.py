"""Tests that a server's reply is read correctly, however the bytes were cut."""

from __future__ import annotations

import pytest

from bench.harness.replies import RawReply, read, server_sent_events

EVENTS = (
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b": keep-alive\n\n"
    b'data: {"choices": [{"delta": {"content": "Hel"}, "finish_reason": null}], "usage": null}\n\n'
    b'data: {"choices": [{"delta": {"content": "lo \xc3\xa9"}}]}\r\n\r\n'
    b'data:{"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3,'
    b' "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
    b"data: [DONE]\n\n"
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def arrived(data: bytes, size: int) -> RawReply:
    pieces = [(float(number), data[at : at + size]) for number, at in enumerate(range(0, len(data), size))]
    return RawReply(sent_at=-1.0, max_tokens=3, pieces=pieces, ended_at=1e9)


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 10**6])
@pytest.mark.parametrize("chunk", [1, 30, 10**6])
def test_a_stream_is_read_alike_however_it_was_cut(piece: int, chunk: int) -> None:
    reply = read(arrived(chunked(EVENTS, chunk), piece))
    assert reply.text == "Hello é"
    assert (reply.completion_tokens, reply.prompt_tokens, reply.cached_tokens) == (3, 9, 4)
    assert reply.finish_reason == "length"
    assert reply.problem is None


def test_a_body_without_framing_ends_with_the_connection() -> None:
    assert read(arrived(HEAD + b"connection: close\r\n\r\n" + EVENTS, 11)).completion_tokens == 3


def test_an_event_has_the_time_of_the_piece_that_completed_it() -> None:
    body = [(1.0, b"data: a\n"), (2.0, b"\ndata: b"), (3.0, b"\n\ndata: c\n\n"), (4.0, b"data: cut")]
    assert server_sent_events(body) == [(2.0, "a"), (3.0, "b"), (3.0, "c")]


def test_content_counts_from_its_first_letter_not_from_the_role() -> None:
    events = EVENTS.split(b"\n\n", 1)
    raw = RawReply(0.0, 3, [(1.0, HEAD + b"\r\n" + events[0] + b"\n\n"), (2.0, events[1])], ended_at=3.0)
    assert read(raw).first_at == 2.0


def test_a_refusal_is_reported_with_its_message() -> None:
    body = b'{"error": {"message": "no such model"}}'
    raw = arrived(b"HTTP/1.1 422 Unprocessable\r\ncontent-length: %d\r\n\r\n" % len(body) + body, 9)
    reply = read(raw)
    assert reply.problem is not None
    assert reply.problem.startswith("HTTP 422")
    assert "no such model" in reply.problem
    assert reply.text == ""


def test_an_error_event_spoils_a_reply() -> None:
    raw = arrived(chunked(b'data: {"error": {"message": "the engine died"}}\n\n', 100), 100)
    assert "the engine died" in (read(raw).problem or "")


def test_bytes_that_are_not_http_are_a_problem() -> None:
    assert "not HTTP" in (read(arrived(b"SSH-2.0-OpenSSH_9.2\r\n\r\n", 100)).problem or "")


def test_a_stream_cut_in_the_middle_keeps_what_had_come() -> None:
    whole = chunked(EVENTS, 10**6)
    reply = read(arrived(whole[: whole.index(b"lo \xc3")], 5))
    assert reply.text == "Hel"
    assert reply.completion_tokens is None
