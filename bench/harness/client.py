"""The load generator: raw sockets on one event loop. During a load it only records bytes and times.

Server and client share the machine's cores, so the client takes processor time from the server. The client's share is
measured and reported with each load.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.harness.replies import RawReply

#: Ends of a reply: the last chunk of a chunked body, or the last event. Some servers then leave the connection open.
_ENDS = (b"0\r\n\r\n", b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")


@dataclass(frozen=True, slots=True)
class Call:
    """One request, as the bytes to send."""

    port: int
    data: bytes
    max_tokens: int
    source: str | None = None  # the client's address on loopback; None: the system chooses


@dataclass(frozen=True, slots=True)
class Window:
    """The replies of a load. Times are of `time.perf_counter`."""

    began_at: float
    ended_at: float
    replies: tuple[RawReply, ...]
    client_cpu: float  # processor seconds of this process per second


class _Exchange(asyncio.Protocol):
    def __init__(self, call: Call, reply: RawReply, over: asyncio.Future[None]) -> None:
        self._call, self._reply, self._over = call, reply, over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._reply.sent_at = time.perf_counter()
        transport.write(self._call.data)

    def data_received(self, data: bytes) -> None:
        self._reply.pieces.append((time.perf_counter(), data))
        if data.endswith(_ENDS):
            self._transport.close()
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self._over.done():
            self._reply.problem = f"{type(exc).__name__}: {exc}"
        self._end()

    def _end(self) -> None:
        if not self._over.done():  # otherwise the exchange has already ended, or was cancelled
            self._reply.ended_at = time.perf_counter()
            self._over.set_result(None)


async def exchange(call: Call, into: list[RawReply]) -> RawReply:
    """Sends a request and reads the whole reply. Adds the reply to `into` first, so a cancelled one is kept."""
    reply = RawReply(time.perf_counter(), call.max_tokens)
    into.append(reply)
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    local = None if call.source is None else (call.source, 0)
    try:
        transport, _ = await loop.create_connection(
            lambda: _Exchange(call, reply, over), "127.0.0.1", call.port, local_addr=local
        )
    except OSError as error:
        reply.problem = str(error)
        reply.ended_at = time.perf_counter()
        return reply
    try:
        await over
    finally:
        transport.abort()
    return reply


async def closed_loop(clients: int, call: Callable[[int, int], Call], least_s: float, most_s: float) -> Window:
    """Runs clients. Each sends its next request after its previous reply. `call(client, n)` returns the n-th request.

    Runs for at least `least_s`, and until each client has finished a request, but for at most `most_s`. Then cancels
    open requests. The number of requests in flight is constant, so the rate is that of a server under steady load.
    """
    replies: list[RawReply] = []
    first = [[call(client, 0)] for client in range(clients)]  # built before the measurement
    waiting = set(range(clients))
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    with _without_garbage_collection():
        began, cpu = time.perf_counter(), time.process_time()

        def look() -> None:
            if not waiting and time.perf_counter() >= began + least_s:
                over.set()

        async def run(client: int) -> None:
            number = 0
            while not over.is_set():
                reply = await exchange(first[client].pop() if number == 0 else call(client, number), replies)
                number += 1
                waiting.discard(client)
                look()
                if _failed(reply):
                    return

        timer = loop.call_later(least_s, look)
        tasks = [asyncio.create_task(run(client)) for client in range(clients)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), most_s)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        timer.cancel()
        await _cancel_all(tasks)
    for reply in replies:
        if reply.ended_at is not None and reply.ended_at > ended:
            reply.ended_at = None
        reply.pieces = [piece for piece in reply.pieces if piece[0] <= ended]
    return Window(began, ended, tuple(replies), cpu / (ended - began))


async def one(call: Call, most_s: float) -> RawReply:
    """Sends a single request. Cancels it after `most_s`."""
    replies: list[RawReply] = []
    with contextlib.suppress(TimeoutError), _without_garbage_collection():
        await asyncio.wait_for(exchange(call, replies), most_s)
    return replies[0]


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Streams that ran before and during the prefill of another request."""

    streams: tuple[RawReply, ...]
    intruder: RawReply
    calm_from: float
    calm_until: float  # time at which the intruder was sent
    ended_at: float


async def disturbed(streams: Sequence[Call], intruder: Call, calm_s: float, most_s: float) -> Disturbed:
    """Starts the streams, lets all of them run for `calm_s`, then sends the intruder and waits for its end."""
    replies: list[RawReply] = []
    until = time.perf_counter() + most_s
    with _without_garbage_collection():
        tasks = [asyncio.create_task(exchange(call, replies)) for call in streams]
        # Polling every 20 ms costs less than counting pieces as they arrive. Nothing is measured yet.
        while time.perf_counter() < until and not (  # noqa: ASYNC110
            len(replies) == len(streams) and all(len(reply.pieces) >= 8 for reply in replies)
        ):
            await asyncio.sleep(0.02)
        calm_from = time.perf_counter()
        await asyncio.sleep(calm_s)
        calm_until = time.perf_counter()
        others: list[RawReply] = []
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(exchange(intruder, others), max(1.0, until - calm_until))
        ended = time.perf_counter()
        await _cancel_all(tasks)
    return Disturbed(tuple(replies), others[0], calm_from, calm_until, ended)


def _failed(reply: RawReply) -> bool:
    """Returns whether a client should stop, because immediate retries would only keep a broken server busy."""
    return reply.problem is not None or not reply.pieces or not reply.pieces[0][1].startswith(b"HTTP/1.1 200")


async def _cancel_all(tasks: list[asyncio.Task[None]] | list[asyncio.Task[RawReply]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # aborted transports end in the loop's next turn


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disables garbage collection while times are measured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
