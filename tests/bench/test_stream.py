"""The client of the stream benchmark counts what arrives, and the table is made of its records alone."""

from __future__ import annotations

import socket
import threading
from typing import Any

from bench.stream import report
from bench.stream.client import load, request_of
from bench.stream.paced import TOKEN


def serve(listener: socket.socket, tokens: int, *, ends: bool = True) -> None:
    """Answers each connection with this many tokens, two to an event. Without `ends`, the client has to leave."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            for _ in range(tokens // 2):
                connection.sendall(b'data: {"content":"%b"}\n\n' % (2 * TOKEN.encode()))
            if ends:
                connection.sendall(b"data: [DONE]\n\n0\r\n\r\n")
            else:
                connection.recv(1)


class Clock:
    """Time that passes with each look at it: a slow machine sees as many replies as a fast one."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def test_tokens_and_events_are_counted_and_each_client_sends_its_next_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener, 10))
        thread.start()
        seen = load(listener.getsockname()[1], "key", 2, 10, 10**6, 0.0, 0.06, clock=Clock())
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    assert seen.problems == []
    assert seen.replies > 0
    assert seen.tokens == 2 * seen.events
    assert len(seen.first_s) >= seen.replies


def test_a_reply_that_is_too_short_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener, 10))
        thread.start()
        seen = load(listener.getsockname()[1], "key", 1, 12, 10**6, 0.0, 0.06, clock=Clock())
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    assert seen.problems[0].startswith("10 tokens of 12")


def test_a_client_that_hangs_up_sends_its_next_request_and_is_no_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener, 2), kwargs={"ends": False})
        thread.start()
        seen = load(listener.getsockname()[1], "key", 1, 2, 10**6, 0.0, 0.06, clock=Clock(), hang_ups=1.0)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    assert (seen.problems, seen.replies) == ([], 0)
    assert len(seen.first_s) > 1


def test_a_request_has_the_key_and_its_length() -> None:
    head, _, body = request_of(1, "sk-1", 5).partition(b"\r\n\r\n")
    assert b"authorization: Bearer sk-1" in head
    assert b"content-length: %d" % len(body) in head


def test_the_cost_of_a_token_is_that_of_backend_and_gateway() -> None:
    record: dict[str, Any] = {
        "title": "serve-app", "streams": 512, "rate": 50, "tokens_per_s": 20_000.0, "events_per_s": 20_000.0,
        "gap_ms": report.quantiles([0.02] * 100), "first_ms": {}, "problems": [], "client_cores": 0.1,
        "cores_by_part": {"Gateway": 0.6, "Paced": 0.4, "HAProxy": 0.2},
    }  # fmt: skip
    there = {"cores": 2, "cpu": "x", "family": "y", "system": "z", "python": "3.11", "libraries": {}}
    about = {"machine": there, "date": "2026-01-01", "seconds": 60.0, "tokens": 500, "window_s": 15, "warm_up_s": 12}
    text = report.markdown({**about, "records": [record]})
    assert "| serve-app | 512 x 50 | 20,000 | 20,000 | 20 / 20 | none | 0.40 | 0.60 | 0.20 | 0.10 | 50 |" in text
