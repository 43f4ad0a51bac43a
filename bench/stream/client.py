"""A light client: all streams on one thread, raw sockets, and no parsing except counting tokens and events."""

from __future__ import annotations

import gc
import json
import random
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bench.harness.stub_request import MODEL, PATH
from bench.stream.paced import TOKEN

_TOKEN: Final = TOKEN.encode()
_EVENT: Final = b"data: {"
_END: Final = b"0\r\n\r\n"


@dataclass(slots=True)
class Seen:
    """The figures of a window of `seconds`."""

    seconds: float = 0.0
    tokens: int = 0
    events: int = 0
    reads: int = 0  # reads with at least one token
    gaps_s: list[float] = field(default_factory=list)  # between two such reads of a stream
    first_s: list[float] = field(default_factory=list)  # from a request to its first token
    replies: int = 0
    problems: list[str] = field(default_factory=list)
    client_cpu_s: float = 0.0


class _Stream:
    __slots__ = ("last_at", "leaves_after", "sent_at", "socket", "tail", "tokens")

    def __init__(self, port: int, request: bytes, leaves_after: int) -> None:
        self.leaves_after = leaves_after  # tokens after which the client hangs up
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(request)
        self.socket.setblocking(False)
        self.sent_at = time.perf_counter()
        self.last_at = 0.0
        self.tokens = 0
        self.tail = b""


def request_of(port: int, key: str, tokens: int) -> bytes:
    """Returns the request of one stream."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a long story about the sea."}],
        "max_tokens": tokens,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + data


def load(
    port: int,
    key: str,
    streams: int,
    tokens: int,
    rate: float,
    warm_up_s: float,
    window_s: float,
    opened: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    hang_ups: float = 0.0,
) -> Seen:
    """Keeps `streams` streams open: each client sends its next request after the end of its previous reply.

    In a share `hang_ups` of the replies, the client hangs up early and sends its next request immediately. The first
    requests are spread over the length of a reply, so that replies also end at different times. `opened` is called
    when the measured window begins.
    """
    request = request_of(port, key, tokens)
    drawn = random.Random(streams)
    began = clock()
    starts = sorted(began + drawn.random() * min(warm_up_s, tokens / rate) for _ in range(streams))
    poll = select.epoll()
    open_: dict[int, _Stream] = {}
    seen = Seen()
    opens, closes = began + warm_up_s, began + warm_up_s + window_s
    cpu = 0.0

    def begin() -> None:
        leaves = drawn.random() < hang_ups
        stream = _Stream(port, request, drawn.randrange(1, tokens) if leaves else 2 * tokens)
        open_[stream.socket.fileno()] = stream
        poll.register(stream.socket, select.EPOLLIN)

    def end(stream: _Stream, problem: str | None) -> None:
        poll.unregister(stream.socket)
        del open_[stream.socket.fileno()]
        stream.socket.close()
        if problem is not None:
            seen.problems.append(problem)
        if now < closes and len(seen.problems) < streams:
            begin()

    gc.collect()
    gc.disable()
    try:
        is_open = False
        while (now := clock()) < closes:
            while starts and starts[0] <= now:
                starts.pop(0)
                begin()
            if not is_open and now >= opens:
                opened()
                is_open, cpu, opens = True, time.process_time(), clock()
            for number, _ in poll.poll(0.002 if starts else 0.05, 256):
                stream = open_[number]
                try:
                    data = stream.socket.recv(65536)
                except BlockingIOError:
                    continue
                except OSError as error:
                    end(stream, f"{type(error).__name__}: {error}")
                    continue
                now = clock()
                if found := data.count(_TOKEN):
                    if is_open:
                        seen.tokens += found
                        seen.events += data.count(_EVENT)
                        seen.reads += 1
                        if stream.tokens:
                            seen.gaps_s.append(now - stream.last_at)
                        else:
                            seen.first_s.append(now - stream.sent_at)
                    stream.tokens += found
                    stream.last_at = now
                stream.tail = (stream.tail + data)[-64:]
                if not data or stream.tail.endswith(_END):
                    problem = (
                        None if stream.tokens == tokens else f"{stream.tokens} tokens of {tokens}: {stream.tail!r}"
                    )
                    if problem is None and is_open:
                        seen.replies += 1
                    end(stream, problem)
                elif stream.tokens >= stream.leaves_after:
                    end(stream, None)
        seen.seconds, seen.client_cpu_s = now - opens, time.process_time() - cpu
    finally:
        gc.enable()
        for stream in open_.values():
            stream.socket.close()
        poll.close()
    return seen
