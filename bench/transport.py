"""Messages between two processes of one machine: our frames compared with grpc.aio and ZeroMQ (`pip install pyzmq`).

`python -m bench.transport` measures each transport in turn, with one message at a time and with 16 at once. A message
is a list with one Admit, as a gateway sends it: in MessagePack for our frames, pickled for the other two.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import grpc  # type: ignore[import-untyped]
import uvloop

from deployments.direct_calls import Connection, Server
from deployments.transport import Address, connect
from serve_app.contracts.limiting import Admit

MESSAGE = [Admit("chatcmpl-" + "0" * 32, "gateway-1", "0" * 64, "svc-chat", 100, 1000, 270, 1100, "smollm2")]
METHOD = "/bench/answer"
Send = Callable[[Any], Awaitable[Any]]


async def answer(message: Any) -> Any:
    return message


async def serve_ours(path: str) -> Address:
    return await Server(answer).address()


async def send_ours(address: Address) -> Send:
    return (await connect(address, Connection)).send


async def serve_grpc(path: str) -> str:
    async def handle(request: bytes, _: Any) -> bytes:
        return pickle.dumps(await answer(pickle.loads(request)))

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(handle)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    ALIVE.append(server)
    return f"unix:{path}"


async def send_grpc(address: str) -> Send:
    call = grpc.aio.insecure_channel(address).unary_unary(METHOD)

    async def send(message: Any) -> Any:
        return pickle.loads(await call(pickle.dumps(message)))

    return send


async def serve_zmq(path: str) -> str:
    import zmq.asyncio

    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")

    async def loop() -> None:
        while True:
            peer, number, raw = await socket.recv_multipart()
            await socket.send_multipart([peer, number, pickle.dumps(await answer(pickle.loads(raw)))])

    ALIVE.append(asyncio.ensure_future(loop()))
    return f"ipc://{path}"


async def send_zmq(address: str) -> Send:
    import zmq.asyncio

    socket = zmq.asyncio.Context().socket(zmq.DEALER)
    socket.connect(address)
    waiting: dict[bytes, asyncio.Future[Any]] = {}

    async def receive() -> None:
        while True:
            number, raw = await socket.recv_multipart()
            waiting.pop(number).set_result(pickle.loads(raw))

    ALIVE.append(asyncio.ensure_future(receive()))

    async def send(message: Any) -> Any:
        number = str(len(ALIVE) + time.perf_counter_ns()).encode()
        future = waiting[number] = asyncio.get_running_loop().create_future()
        await socket.send_multipart([number, pickle.dumps(message)])
        return await future

    return send


ALIVE: list[Any] = []  # references that prevent garbage collection
KINDS = {"ours": (serve_ours, send_ours), "grpc.aio": (serve_grpc, send_grpc), "zeromq": (serve_zmq, send_zmq)}


def serve(kind: str, path: str, ready: Pipe) -> None:
    async def run() -> None:
        ready.send(await KINDS[kind][0](path))
        await asyncio.Event().wait()

    uvloop.run(run())


async def measure(send: Send, at_once: int, seconds: float) -> float:
    """Microseconds per message."""
    done, ends = 0, time.perf_counter() + seconds
    began = time.perf_counter()

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < ends:
            await send(MESSAGE)
            done += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return (time.perf_counter() - began) / done * 1e6


def one(kind: str, at_once: int, seconds: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(kind, f"{folder}/s", there))
        process.start()
        try:
            address = here.recv()

            async def run() -> float:
                send = await KINDS[kind][1](address)
                await measure(send, at_once, 0.3)
                return await measure(send, at_once, seconds)

            return uvloop.run(run())
        finally:
            process.terminate()
            process.join()
            ALIVE.clear()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each measurement; default: 2")
    parser.add_argument("--only", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="default: all")
    options = parser.parse_args()
    found: dict[tuple[str, int], list[float]] = {}
    for turn in range(options.rounds):
        for kind in options.only if turn % 2 == 0 else reversed(options.only):
            for at_once in (1, 16):
                found.setdefault((kind, at_once), []).append(one(kind, at_once, options.seconds))
    print("| transport | 1 at a time, µs per message | 16 at once, µs per message |\n|---|---|---|")
    for kind in options.only:
        print(f"| {kind} | " + " | ".join(f"{statistics.median(found[kind, n]):.0f}" for n in (1, 16)) + " |")


if __name__ == "__main__":
    main()
